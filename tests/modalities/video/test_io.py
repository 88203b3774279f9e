"""Any clip that a person may have comes in as they would see it, frame by frame at its time; what
is broken says where."""

from __future__ import annotations

import struct
import sys
from fractions import Fraction

import av
import numpy as np
import PIL.Image
import pytest
from av.stream import Disposition

from tessera.data.errors import UnreadableFile
from tessera.modalities.video.io.av_reader import decoder_of
from tessera.modalities.video.io.files import Examined, examine, probe
from tessera.modalities.video.media import Video, read_clip
from tests.films import animate, cut_short, levels, numbers, write

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


# ---- what is read


@pytest.mark.parametrize(
    ("name", "codec", "form"),
    [
        ("a.mp4", "libx264", "yuv420p"),
        ("a.MP4", "libx264", "yuv420p"),
        ("a.mp4", "mpeg4", "yuv420p"),
        ("a.m4v", "libx264", "yuv444p"),
        ("a.mov", "prores_ks", "yuv422p10le"),
        ("a.webm", "libvpx-vp9", "yuv420p"),
        ("a.webm", "libvpx", "yuv420p"),
        ("a.mkv", "ffv1", "gray"),
        ("a.avi", "mjpeg", "yuvj420p"),
        ("a.avi", "mpeg4", "yuv420p"),
        ("a.avi", "libx264", "yuv420p"),
    ],
)
def test_every_common_film_is_read_frame_by_frame(tmp_path, name, codec, form):
    path = write(tmp_path / name, levels(20), codec, form)
    facts, clip = probe(path), Video.load(path)
    assert numbers(clip) == list(range(20))
    assert (facts.width, facts.height, facts.rate_hz, clip.rate_hz) == (32, 16, 10, 10)
    assert (
        facts.seconds == facts.claimed_seconds == pytest.approx(2, abs=0.11)
    )  # of H.264 in AVI one frame is a guess
    assert examine(path) == Examined(20, pytest.approx(2, abs=0.01), "")


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.gif", {}), ("a.webp", {"lossless": True}), ("a.apng", {}), ("a.png", {})],
)
def test_an_animation_is_read_frame_by_frame(tmp_path, name, options):
    path = animate(
        tmp_path / name, levels(12), 100, **options, **({"format": "PNG"} if "png" in name else {})
    )
    facts, clip = probe(path), Video.load(path)
    assert numbers(clip) == list(range(12))
    assert (facts.width, facts.height, facts.frames, facts.still) == (32, 16, 12, False)
    assert clip.rate_hz == pytest.approx(10) and facts.seconds == pytest.approx(1.2)


STAMPS = [0, 100, 200, 800, 900, 1000, 1100]
HELD = [0, 1, 2, 2, 2, 2, 2, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "libx264"), ("a.webm", "libvpx-vp9"), ("a.mkv", "mpeg4")]
)
def test_a_film_of_variable_rate_is_seen_by_the_clock(tmp_path, name, codec):
    path = write(tmp_path / name, levels(7), codec, stamps=STAMPS)
    assert numbers(read_clip(path, 0.0, 12, 10.0)) == HELD
    assert numbers(read_clip(path, 0.5, 4, 10.0)) == [2, 2, 2, 3]


def test_an_animation_of_variable_rate_is_seen_by_the_clock(tmp_path):
    path = animate(tmp_path / "a.gif", levels(7), [*np.diff(STAMPS).tolist(), 100])
    assert numbers(read_clip(path, 0.0, 12, 10.0)) == HELD
    assert numbers(read_clip(path, 0.5, 4, 10.0)) == [2, 2, 2, 3]


def test_an_animation_without_pauses_runs_as_in_a_browser(tmp_path):
    assert probe(animate(tmp_path / "a.gif", levels(5), 0)).rate_hz == pytest.approx(10)


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.avi", "a.gif"])
def test_other_rates_leave_frames_out_or_repeat_them(tmp_path, name):
    codec = {"a.webm": "libvpx-vp9", "a.avi": "mpeg4"}.get(name, "libx264")
    path = tmp_path / name
    animate(path, levels(20), 100) if name == "a.gif" else write(path, levels(20), codec)
    assert numbers(read_clip(path, 0.0, 5, 5.0)) == [0, 2, 4, 6, 8]
    assert numbers(read_clip(path, 0.3, 6, 20.0)) == [3, 3, 4, 4, 5, 5]
    assert numbers(read_clip(path, 0.3, 4, 10 / 3)) == [3, 6, 9, 12]


@pytest.mark.parametrize("rate", [24, 25, 30, 60])
@pytest.mark.parametrize("name", ["a.webm", "a.gif"])
def test_rounded_time_stamps_neither_repeat_nor_lose_a_frame(tmp_path, name, rate):
    """WebM counts milliseconds and GIF hundredths of a second, which 24 frames do not divide."""
    frames = levels(24)
    if name == "a.gif":
        Video(frames, rate).save(tmp_path / "a")
    else:
        write(tmp_path / name, frames, "libvpx", rate=rate)
    shown = list(
        range(0, 24, 2 if name == "a.gif" and rate == 60 else 1)
    )  # a GIF shows at most 50 a second
    assert numbers(read_clip(tmp_path / name, 0.0, len(shown), rate * len(shown) / 24)) == shown


def test_a_clip_is_the_same_wherever_the_decoder_had_to_begin(tmp_path):
    path = write(
        tmp_path / "a.mp4",
        np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8),
    )
    whole = Video.load(path).frames
    for start in range(36):
        assert np.array_equal(read_clip(path, start / 10, 4, 10.0).frames, whole[start : start + 4])


@pytest.mark.parametrize(
    ("name", "codec"), [("long.mp4", "libx264"), ("long.webm", "libvpx"), ("long.avi", "mpeg4")]
)
def test_a_clip_near_the_end_of_a_minute_decodes_a_few_frames_of_it(
    tmp_path, monkeypatch, name, codec
):
    path = write(tmp_path / name, levels(600, 16, 16), codec)
    decoded = 0
    plainly = decoder_of

    def counting(stream):
        def decode(packet):
            nonlocal decoded
            frames = plainly(stream)(packet)
            decoded += len(frames)
            return frames

        return decode

    monkeypatch.setattr("tessera.modalities.video.io.av_reader.decoder_of", counting)
    assert probe(path).seconds == pytest.approx(60, abs=0.02)
    assert decoded <= 2, "the length is read from packets, of which none is decoded"
    clip = read_clip(path, 58.0, 8, 10.0)
    assert numbers(clip) == [number % 32 for number in range(580, 588)]
    assert decoded <= 12 + 8 + 4, "one group of frames, the clip, and what the decoder holds back"


def test_a_large_film_is_reduced_frame_by_frame_and_stays_large_enough(tmp_path):
    frames = np.zeros((2, 4320, 7680, 3), dtype=np.uint8)
    frames[:, :, :3840] = RED
    path = write(tmp_path / "8k.mp4", frames, "mpeg4")
    clip = read_clip(path, 0.0, 2, 10.0, shortest=64)
    assert clip.frames.shape == (2, 64, 114, 3)
    assert (
        abs(clip.frames[:, :, :55].astype(int) - RED).max() < 8 and clip.frames[:, :, 60:].max() < 8
    )
    assert (probe(path).width, probe(path).height) == (7680, 4320)


# ---- as a person would see it


def glass() -> np.ndarray:
    """Opaque red on the left, nothing (of red) on the right."""
    frames = np.zeros((4, 32, 32, 4), dtype=np.uint8)
    frames[..., 0] = 255
    frames[:, :, :16, 3] = 255
    frames[:, 0, 0, :3] = np.arange(4)[:, None]  # equal frames would be merged into one
    return frames


@pytest.mark.parametrize(
    ("name", "codec", "form", "options"),
    [
        ("a.mov", "qtrle", "argb", {}),
        ("a.mov", "prores_ks", "yuva444p10le", {}),
        ("a.webm", "libvpx-vp9", "yuva420p", {}),
        ("a.webm", "libvpx", "yuva420p", {"auto-alt-ref": "0"}),
    ],
)
def test_what_is_transparent_in_a_film_shows_white_paper(tmp_path, name, codec, form, options):
    path = write(tmp_path / name, glass(), codec, form, **options)
    for clip in (Video.load(path), read_clip(path, 0.0, 4, 10.0, shortest=16)):
        middle = clip.frames.shape[2] // 4
        assert abs(clip.frames[:, middle, middle].astype(int) - RED).max() < 4
        assert abs(clip.frames[:, middle, -middle].astype(int) - WHITE).max() < 4


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.gif", {"disposal": 2}), ("a.webp", {"lossless": True}), ("a.apng", {})],
)
def test_what_is_transparent_in_an_animation_shows_white_paper(tmp_path, name, options):
    clip = Video.load(
        animate(
            tmp_path / name, glass(), 100, **options, **({"format": "PNG"} if "png" in name else {})
        )
    )
    assert len(clip.frames) == 4
    assert (clip.frames[:, 8, 8] == RED).all() and (clip.frames[:, 8, 24] == WHITE).all()


@pytest.mark.parametrize("name", ["a.mp4", "a.mov"])
@pytest.mark.parametrize(
    ("matrix", "turns"), [((0, 1, -1, 0), 3), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)]
)
def test_a_film_is_turned_as_the_camera_was_held(tmp_path, name, matrix, turns):
    """The matrix in the header of a track (ISO/IEC 14496-12, 8.3.2): (0, 1, -1, 0) is a quarter
    turn clockwise."""
    scene = np.zeros((3, 32, 64, 3), dtype=np.uint8)
    scene[:, :, :32] = RED
    scene[:, :8] = BLUE
    path = write(tmp_path / name, scene, form="yuv444p")
    data = bytearray(path.read_bytes())
    a, b, c, d = (value << 16 for value in matrix)
    at = data.index(b"tkhd") + 44
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    wanted = np.rot90(scene, turns, axes=(1, 2))
    clip, facts = Video.load(path), probe(path)
    assert clip.frames.shape == wanted.shape and abs(clip.frames.astype(int) - wanted).mean() < 4
    assert (facts.height, facts.width) == wanted.shape[1:3]


def test_a_still_picture_is_a_clip_of_one_frame(tmp_path):
    pixels = np.asarray(PIL.Image.linear_gradient("L").convert("RGB"))
    for name in ("a.png", "a.gif", "a.webp", "a.jpg"):
        PIL.Image.fromarray(pixels).save(
            tmp_path / name, **({"lossless": True} if name == "a.webp" else {})
        )
        assert probe(tmp_path / name).still
        assert abs(Video.load(tmp_path / name).frames[0].astype(int) - pixels).mean() < 2


@pytest.mark.parametrize(("name", "form"), [("pages.tif", "TIFF"), ("stereo.jpg", "MPO")])
def test_the_pages_of_a_picture_are_no_frames(tmp_path, name, form):
    animate(tmp_path / name, levels(3), 100, format=form)
    assert probe(tmp_path / name).still and len(Video.load(tmp_path / name).frames) == 1


def test_a_photograph_is_turned_here_too(tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg", exif=exif)
    assert Video.load(tmp_path / "a.jpg").frames.shape == (1, 40, 20, 3)
    assert (probe(tmp_path / "a.jpg").width, probe(tmp_path / "a.jpg").height) == (20, 40)


def test_a_folder_is_a_clip_in_the_order_of_its_numbers(tmp_path):
    for number, pixels in enumerate(levels(12)):
        PIL.Image.fromarray(pixels).save(tmp_path / f"frame {number}.png")
    (tmp_path / "notes.txt").write_text("not a frame")
    (tmp_path / ".hidden.png").write_bytes(b"nor this")
    assert numbers(Video.load(tmp_path)) == list(range(12))
    assert probe(tmp_path).codec == "frames" and probe(tmp_path).rate_hz == 24
    assert numbers(read_clip(tmp_path, 4 / 24, 3, 12.0)) == [4, 6, 8]


def test_a_folder_with_a_broken_frame_is_read_up_to_it(tmp_path):
    for number, pixels in enumerate(levels(6)):
        PIL.Image.fromarray(pixels).save(tmp_path / f"{number:04d}.png")
    (tmp_path / "0004.png").write_bytes(b"")
    assert numbers(Video.load(tmp_path)) == [0, 1, 2, 3]
    assert (
        examine(tmp_path).broke
        == "it breaks at 0.17 s of 0.25 s (the frame 0004.png: the file is empty (0 bytes))"
    )


def test_frames_of_different_sizes_are_no_clip(tmp_path):
    for number in range(3):
        PIL.Image.new("RGB", (10 + number, 10)).save(tmp_path / f"{number}.png")
    with pytest.raises(UnreadableFile, match="different sizes .10 x 10 and 11 x 10 and 12 x 10"):
        Video.load(tmp_path)


def test_a_folder_without_frames_is_unreadable(tmp_path):
    with pytest.raises(UnreadableFile, match="the folder holds no frames"):
        Video.load(tmp_path)


# ---- what is broken


def silence(path, cover: bool = False):
    """Sound without moving pictures, and with the picture of a record's cover if asked."""
    with av.open(str(path), "w") as film:
        sound = film.add_stream("aac", rate=16000)
        if cover:
            picture = film.add_stream("mjpeg", rate=1)
            picture.width, picture.height, picture.pix_fmt = 16, 16, "yuvj420p"
            picture.disposition = Disposition.attached_pic
            film.mux(picture.encode(av.VideoFrame.from_ndarray(levels(1)[0, :, :16])))
            film.mux(picture.encode())
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        frame.rate = 16000
        film.mux(sound.encode(frame))
        film.mux(sound.encode())
    return path


@pytest.mark.parametrize("cover", [False, True])
def test_sound_alone_is_no_video_even_with_a_cover(tmp_path, cover):
    path = silence(tmp_path / "song.mp4", cover)
    for read in (probe, Video.load, examine):
        with pytest.raises(UnreadableFile, match=r"song.mp4: it holds only sound, and no video"):
            read(path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.mkv", "it holds no frame: it ends before the first"),
        ("a.avi", "it holds no frame: it ends before the first"),
        ("a.mp4", "it holds neither pictures nor sound, and no video"),
    ],
)
def test_a_film_of_no_length_says_so(tmp_path, name, reason):
    with av.open(str(tmp_path / name), "w") as film:
        stream = film.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        film.start_encoding()
    with pytest.raises(UnreadableFile, match=f"{name}: {reason}"):
        Video.load(tmp_path / name)


def test_a_film_of_one_frame_is_a_clip(tmp_path):
    clip = Video.load(write(tmp_path / "a.mp4", levels(1)))
    assert clip.frames.shape == (1, 16, 32, 3) and not probe(tmp_path / "a.mp4").still


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.mp4", b"", "the file is empty"),
        ("a.gif", b"", "the file is empty"),
        (
            "a.avi",
            b"dear reader",
            "it is no MP4, MOV, WebM, MKV or AVI, .* begins with b'dear rea'",
        ),
        ("a.gif", b"dear reader", "it is no PNG, JPEG, WebP, .* begins with b'dear rea'"),
        ("a.webm", b"\x1a\x45\xdf\xa3" + b"\0" * 64, "it is "),
    ],
)
def test_what_is_no_video_says_what_it_is(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(data)
    for read in (probe, Video.load, examine, lambda path: read_clip(path, 0.0, 4, 10.0)):
        with pytest.raises(UnreadableFile, match=f"{name}: {reason}"):
            read(tmp_path / name)


def test_a_missing_file_is_unreadable_and_no_crash(tmp_path):
    for name in ("gone.mp4", "gone.gif"):
        with pytest.raises(UnreadableFile, match=f"{name}: the file cannot be opened"):
            Video.load(tmp_path / name)


def test_a_playlist_in_disguise_leads_nowhere(tmp_path):
    path = write(tmp_path / "private.mp4", levels(5))
    (tmp_path / "a.mp4").write_text(f"ffconcat version 1.0\nfile {path.name}\n")
    (tmp_path / "b.mp4").write_text(
        f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{path}\n#EXT-X-ENDLIST\n"
    )
    for name in ("a.mp4", "b.mp4"):
        with pytest.raises(UnreadableFile, match="it is no MP4"):
            Video.load(tmp_path / name)


def test_a_name_is_never_taken_for_an_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "concat:a.mp4", levels(3))
    assert len(Video.load("concat:a.mp4").frames) == 3
    assert len(Video.load(Video(levels(3), 10.0).save("concat:b")).frames) == 3


NOISE = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("name", "codec"),
    [("a.mp4", "libx264"), ("a.webm", "libvpx"), ("a.avi", "mpeg4"), ("a.mkv", "libx264")],
)
def test_a_film_that_is_cut_short_is_read_up_to_there(tmp_path, name, codec):
    path = write(tmp_path / name, NOISE, codec)
    whole = Video.load(path).frames
    cut_short(path, 0.5)
    clip, told = Video.load(path), examine(path)
    assert 5 < len(clip.frames) < 30
    assert np.array_equal(clip.frames, whole[: len(clip.frames)])
    assert told.broke.startswith(f"it breaks at {told.seconds:.2f} s of ")
    assert told.seconds == pytest.approx(len(clip.frames) / 10, abs=0.15)
    assert probe(path).seconds == pytest.approx(told.seconds, abs=0.3), "known without decoding"
    with pytest.raises(UnreadableFile, match=f"{name}: there is no frame to be read at 3.50 s"):
        read_clip(path, 3.5, 4, 10.0)


@pytest.mark.parametrize(
    ("name", "codec"), [("a.webm", "libvpx"), ("a.mkv", "mpeg4"), ("a.mp4", "libx264")]
)
def test_the_length_is_that_of_the_pictures_also_where_the_sound_lasts_longer(
    tmp_path, name, codec
):
    with av.open(str(tmp_path / name), "w") as film:
        picture, sound = film.add_stream(codec, rate=10), film.add_stream("libopus", rate=48000)
        picture.width, picture.height, picture.pix_fmt = 32, 16, "yuv420p"
        for number, pixels in enumerate(levels(20)):
            frame = av.VideoFrame.from_ndarray(pixels)
            frame.pts, frame.time_base = number, Fraction(1, 10)
            film.mux(picture.encode(frame))
        film.mux(picture.encode())
        for number in range(300):  # six seconds of sound to two of pictures
            frame = av.AudioFrame.from_ndarray(
                np.zeros((1, 960), np.float32), format="flt", layout="mono"
            )
            frame.rate, frame.pts, frame.time_base = 48000, 960 * number, Fraction(1, 48000)
            film.mux(sound.encode(frame))
        film.mux(sound.encode())
    facts = probe(tmp_path / name)
    assert facts.seconds == facts.claimed_seconds == pytest.approx(2, abs=0.01)
    assert (
        numbers(Video.load(tmp_path / name)) == list(range(20))
        and examine(tmp_path / name).broke == ""
    )


def test_an_animation_that_is_cut_short_is_read_up_to_there(tmp_path):
    path = cut_short(animate(tmp_path / "a.gif", NOISE, 100), 0.5)
    clip = Video.load(path)
    assert 15 < len(clip.frames) < 22
    assert examine(path).broke.startswith(
        f"it breaks at {examine(path).seconds:.2f} s (it is damaged or cut short"
    )


def test_a_film_whose_table_of_contents_is_missing_is_unreadable(tmp_path):
    with av.open(str(tmp_path / "a.mp4"), "w") as film:  # without faststart it stands at the end
        stream = film.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for pixels in NOISE:
            film.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        film.mux(stream.encode())
    with pytest.raises(UnreadableFile, match="or it is cut short"):
        Video.load(cut_short(tmp_path / "a.mp4", 0.9))


def test_a_frame_of_too_many_pixels_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    path = write(tmp_path / "a.mp4", levels(2))
    monkeypatch.setattr("tessera.modalities.video.io.av_reader.MOST_PIXELS", 500)
    with pytest.raises(
        UnreadableFile, match="its frames are 32 x 16, more pixels than a frame may have"
    ):
        Video.load(path)


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.avi", "a.gif", "a.webp"])
def test_damaged_bytes_give_a_clip_or_a_reason_and_nothing_else(tmp_path, name):
    codec = {"a.mp4": "mpeg4", "a.webm": "libvpx", "a.avi": "mpeg4"}.get(name)
    path = (
        write(tmp_path / name, NOISE[:4], codec)
        if codec
        else animate(tmp_path / name, NOISE[:4], 90)
    )
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    outcomes = set()
    for attempt in range(60):
        data = np.frombuffer(whole, np.uint8).copy()
        data[rng.integers(len(data) if rng.random() < 0.5 else 300, size=rng.integers(1, 7))] = (
            rng.integers(256)
        )
        path = tmp_path / f"{attempt} {name}"
        path.write_bytes(data.tobytes())
        try:
            facts = probe(path)
            assert facts.seconds > 0 and 1 <= len(read_clip(path, 0.0, 4, 10.0).frames) <= 4
            outcomes.add("a clip")
        except UnreadableFile as error:
            assert name in str(error)
            outcomes.add("a reason")
    assert outcomes == {"a clip", "a reason"}


def test_a_file_that_changes_is_looked_at_again(tmp_path):
    write(tmp_path / "a.mp4", levels(5))
    assert probe(tmp_path / "a.mp4").frames == 5
    write(tmp_path / "a.mp4", levels(9))
    assert probe(tmp_path / "a.mp4").frames == 9


def test_without_pyav_a_sentence_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs PyAV, .* Install tessera\[video\]"):
        Video(levels(2), 10.0).save(tmp_path / "a")
