"""Tests of video readers: frames at their times, transparency, rotation, damaged files."""

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
from tessera.modalities.video.io.av_reader import build_decoder
from tessera.modalities.video.io.files import DecodeResult, decode_all, probe
from tessera.modalities.video.media import Video, read_video
from tests.videos import frame_numbers, grey_frames, truncate, write_animation, write_video

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


# ---- reading


@pytest.mark.parametrize(
    ("name", "codec", "pix_fmt"),
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
def test_common_codecs_and_containers_are_read(tmp_path, name, codec, pix_fmt):
    path = write_video(tmp_path / name, grey_frames(20), codec, pix_fmt)
    info, video = probe(path), Video.load(path)
    assert frame_numbers(video) == list(range(20))
    assert (info.width, info.height, info.rate_hz, video.rate_hz) == (32, 16, 10, 10)
    # the duration of H.264 in AVI is uncertain by one frame
    assert info.seconds == info.declared_seconds == pytest.approx(2, abs=0.11)
    assert decode_all(path) == DecodeResult(20, pytest.approx(2, abs=0.01), "")


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.gif", {}), ("a.webp", {"lossless": True}), ("a.apng", {}), ("a.png", {})],
)
def test_animations_are_read(tmp_path, name, options):
    format = {"format": "PNG"} if "png" in name else {}
    path = write_animation(tmp_path / name, grey_frames(12), 100, **options, **format)
    info, video = probe(path), Video.load(path)
    assert frame_numbers(video) == list(range(12))
    assert (info.width, info.height, info.frames, info.still) == (32, 16, 12, False)
    assert video.rate_hz == pytest.approx(10) and info.seconds == pytest.approx(1.2)


STARTS_MS = [0, 100, 200, 800, 900, 1000, 1100]
DISPLAYED = [0, 1, 2, 2, 2, 2, 2, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("name", "codec"), [("a.mp4", "libx264"), ("a.webm", "libvpx-vp9"), ("a.mkv", "mpeg4")]
)
def test_variable_frame_rate_is_sampled_by_time(tmp_path, name, codec):
    path = write_video(tmp_path / name, grey_frames(7), codec, starts_ms=STARTS_MS)
    assert frame_numbers(read_video(path, 0.0, 12, 10.0)) == DISPLAYED
    assert frame_numbers(read_video(path, 0.5, 4, 10.0)) == [2, 2, 2, 3]


def test_variable_animation_rate_is_sampled_by_time(tmp_path):
    path = write_animation(tmp_path / "a.gif", grey_frames(7), [*np.diff(STARTS_MS).tolist(), 100])
    assert frame_numbers(read_video(path, 0.0, 12, 10.0)) == DISPLAYED
    assert frame_numbers(read_video(path, 0.5, 4, 10.0)) == [2, 2, 2, 3]


def test_animation_without_durations_has_ten_frames_per_second(tmp_path):
    assert probe(write_animation(tmp_path / "a.gif", grey_frames(5), 0)).rate_hz == pytest.approx(
        10
    )


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.avi", "a.gif"])
def test_other_rates_skip_or_repeat_frames(tmp_path, name):
    codec = {"a.webm": "libvpx-vp9", "a.avi": "mpeg4"}.get(name, "libx264")
    path = tmp_path / name
    write_animation(path, grey_frames(20), 100) if name == "a.gif" else write_video(
        path, grey_frames(20), codec
    )
    assert frame_numbers(read_video(path, 0.0, 5, 5.0)) == [0, 2, 4, 6, 8]
    assert frame_numbers(read_video(path, 0.3, 6, 20.0)) == [3, 3, 4, 4, 5, 5]
    assert frame_numbers(read_video(path, 0.3, 4, 10 / 3)) == [3, 6, 9, 12]


@pytest.mark.parametrize("rate", [24, 25, 30, 60])
@pytest.mark.parametrize("name", ["a.webm", "a.gif"])
def test_rounded_time_stamps_neither_repeat_nor_skip_frames(tmp_path, name, rate):
    """WebM rounds times to 1 ms and GIF to 10 ms, which 1/24 s is not a multiple of."""
    frames = grey_frames(24)
    if name == "a.gif":
        Video(frames, rate).save(tmp_path / name)
    else:
        write_video(tmp_path / name, frames, "libvpx", rate=rate)
    # GIFs have at most 50 frames per second
    expected = list(range(0, 24, 2 if name == "a.gif" and rate == 60 else 1))
    video = read_video(tmp_path / name, 0.0, len(expected), rate * len(expected) / 24)
    assert frame_numbers(video) == expected


def test_frames_do_not_depend_on_where_decoding_starts(tmp_path):
    path = write_video(
        tmp_path / "a.mp4",
        np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), dtype=np.uint8),
    )
    whole = Video.load(path).frames
    for start in range(36):
        assert np.array_equal(
            read_video(path, start / 10, 4, 10.0).frames, whole[start : start + 4]
        )


@pytest.mark.parametrize(
    ("name", "codec"), [("long.mp4", "libx264"), ("long.webm", "libvpx"), ("long.avi", "mpeg4")]
)
def test_reading_near_the_end_decodes_few_frames(tmp_path, monkeypatch, name, codec):
    path = write_video(tmp_path / name, grey_frames(600, 16, 16), codec)
    decoded = 0
    original = build_decoder

    def count_frames(stream):
        def decode(packet):
            nonlocal decoded
            frames = original(stream)(packet)
            decoded += len(frames)
            return frames

        return decode

    monkeypatch.setattr("tessera.modalities.video.io.av_reader.build_decoder", count_frames)
    assert probe(path).seconds == pytest.approx(60, abs=0.02)
    assert decoded <= 2, "the duration is read from packets without decoding them"
    video = read_video(path, 58.0, 8, 10.0)
    assert frame_numbers(video) == [number % 32 for number in range(580, 588)]
    assert decoded <= 12 + 8 + 4, (
        "one key frame interval, the video, and frames buffered by the decoder"
    )


def test_large_frames_are_reduced_to_at_least_min_side(tmp_path):
    frames = np.zeros((2, 4320, 7680, 3), dtype=np.uint8)
    frames[:, :, :3840] = RED
    path = write_video(tmp_path / "8k.mp4", frames, "mpeg4")
    video = read_video(path, 0.0, 2, 10.0, min_side=64)
    assert video.frames.shape == (2, 64, 114, 3)
    assert (
        abs(video.frames[:, :, :55].astype(int) - RED).max() < 8
        and video.frames[:, :, 60:].max() < 8
    )
    assert (probe(path).width, probe(path).height) == (7680, 4320)


# ---- appearance


def red_with_alpha() -> np.ndarray:
    """Return frames that are opaque red on the left and transparent red on the right."""
    frames = np.zeros((4, 32, 32, 4), dtype=np.uint8)
    frames[..., 0] = 255
    frames[:, :, :16, 3] = 255
    frames[:, 0, 0, :3] = np.arange(4)[:, None]  # equal frames would be merged into one
    return frames


@pytest.mark.parametrize(
    ("name", "codec", "pix_fmt", "options"),
    [
        ("a.mov", "qtrle", "argb", {}),
        ("a.mov", "prores_ks", "yuva444p10le", {}),
        ("a.webm", "libvpx-vp9", "yuva420p", {}),
        ("a.webm", "libvpx", "yuva420p", {"auto-alt-ref": "0"}),
    ],
)
def test_transparent_videos_are_composited_over_white(tmp_path, name, codec, pix_fmt, options):
    path = write_video(tmp_path / name, red_with_alpha(), codec, pix_fmt, **options)
    for video in (Video.load(path), read_video(path, 0.0, 4, 10.0, min_side=16)):
        middle = video.frames.shape[2] // 4
        assert abs(video.frames[:, middle, middle].astype(int) - RED).max() < 4
        assert abs(video.frames[:, middle, -middle].astype(int) - WHITE).max() < 4


@pytest.mark.parametrize(
    ("name", "options"),
    [("a.gif", {"disposal": 2}), ("a.webp", {"lossless": True}), ("a.apng", {})],
)
def test_transparent_animations_are_composited_over_white(tmp_path, name, options):
    format = {"format": "PNG"} if "png" in name else {}
    path = write_animation(tmp_path / name, red_with_alpha(), 100, **options, **format)
    video = Video.load(path)
    assert len(video.frames) == 4
    assert (video.frames[:, 8, 8] == RED).all() and (video.frames[:, 8, 24] == WHITE).all()


@pytest.mark.parametrize("name", ["a.mp4", "a.mov"])
@pytest.mark.parametrize(
    ("matrix", "turns"), [((0, 1, -1, 0), 3), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)]
)
def test_rotation_in_the_metadata_is_applied(tmp_path, name, matrix, turns):
    """It is a matrix in the track header (ISO/IEC 14496-12, 8.3.2): (0, 1, -1, 0) is a quarter turn
    clockwise."""
    scene = np.zeros((3, 32, 64, 3), dtype=np.uint8)
    scene[:, :, :32] = RED
    scene[:, :8] = BLUE
    path = write_video(tmp_path / name, scene, pix_fmt="yuv444p")
    data = bytearray(path.read_bytes())
    a, b, c, d = (value << 16 for value in matrix)
    offset = data.index(b"tkhd") + 44
    data[offset : offset + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    expected = np.rot90(scene, turns, axes=(1, 2))
    video, info = Video.load(path), probe(path)
    assert video.frames.shape == expected.shape
    assert abs(video.frames.astype(int) - expected).mean() < 4
    assert (info.height, info.width) == expected.shape[1:3]


def test_still_image_is_a_video_of_one_frame(tmp_path):
    pixels = np.asarray(PIL.Image.linear_gradient("L").convert("RGB"))
    for name in ("a.png", "a.gif", "a.webp", "a.jpg"):
        PIL.Image.fromarray(pixels).save(
            tmp_path / name, **({"lossless": True} if name == "a.webp" else {})
        )
        assert probe(tmp_path / name).still
        assert abs(Video.load(tmp_path / name).frames[0].astype(int) - pixels).mean() < 2


@pytest.mark.parametrize(("name", "format"), [("pages.tif", "TIFF"), ("stereo.jpg", "MPO")])
def test_pages_of_an_image_are_not_frames(tmp_path, name, format):
    write_animation(tmp_path / name, grey_frames(3), 100, format=format)
    assert probe(tmp_path / name).still and len(Video.load(tmp_path / name).frames) == 1


def test_exif_orientation_of_still_images_is_applied(tmp_path):
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    PIL.Image.new("RGB", (40, 20)).save(tmp_path / "a.jpg", exif=exif)
    assert Video.load(tmp_path / "a.jpg").frames.shape == (1, 40, 20, 3)
    assert (probe(tmp_path / "a.jpg").width, probe(tmp_path / "a.jpg").height) == (20, 40)


def test_frames_of_a_folder_are_in_numerical_order(tmp_path):
    for number, pixels in enumerate(grey_frames(12)):
        PIL.Image.fromarray(pixels).save(tmp_path / f"frame {number}.png")
    (tmp_path / "notes.txt").write_text("not a frame")
    (tmp_path / ".hidden.png").write_bytes(b"nor this")
    assert frame_numbers(Video.load(tmp_path)) == list(range(12))
    assert probe(tmp_path).codec == "frames" and probe(tmp_path).rate_hz == 24
    assert frame_numbers(read_video(tmp_path, 4 / 24, 3, 12.0)) == [4, 6, 8]


def test_folder_is_read_up_to_a_damaged_frame(tmp_path):
    for number, pixels in enumerate(grey_frames(6)):
        PIL.Image.fromarray(pixels).save(tmp_path / f"{number:04d}.png")
    (tmp_path / "0004.png").write_bytes(b"")
    assert frame_numbers(Video.load(tmp_path)) == [0, 1, 2, 3]
    assert decode_all(tmp_path).error == (
        "readable up to 0.17 s of 0.25 s (frame 0004.png: the file is empty (0 bytes))"
    )


def test_frames_of_different_sizes_are_an_error(tmp_path):
    for number in range(3):
        PIL.Image.new("RGB", (10 + number, 10)).save(tmp_path / f"{number}.png")
    with pytest.raises(UnreadableFile, match="different sizes .10 x 10 and 11 x 10 and 12 x 10"):
        Video.load(tmp_path)


def test_folder_without_frames_is_unreadable(tmp_path):
    with pytest.raises(UnreadableFile, match="the folder contains no frames"):
        Video.load(tmp_path)


# ---- errors


def write_audio(path, cover: bool = False):
    """Write a file with audio and, optionally, cover art, but no video."""
    with av.open(str(path), "w") as container:
        audio = container.add_stream("aac", rate=16000)
        if cover:
            image = container.add_stream("mjpeg", rate=1)
            image.width, image.height, image.pix_fmt = 16, 16, "yuvj420p"
            image.disposition = Disposition.attached_pic
            container.mux(image.encode(av.VideoFrame.from_ndarray(grey_frames(1)[0, :, :16])))
            container.mux(image.encode())
        frame = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        frame.rate = 16000
        container.mux(audio.encode(frame))
        container.mux(audio.encode())
    return path


@pytest.mark.parametrize("cover", [False, True])
def test_audio_file_is_an_error_even_with_cover_art(tmp_path, cover):
    path = write_audio(tmp_path / "song.mp4", cover)
    for read in (probe, Video.load, decode_all):
        with pytest.raises(UnreadableFile, match="song.mp4: the file contains only audio, but"):
            read(path)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a.mkv", "the file contains no frame: the data ends before the first"),
        ("a.avi", "the file contains no frame: the data ends before the first"),
        ("a.mp4", "the file contains neither video nor audio, but"),
    ],
)
def test_file_without_frames_is_an_error(tmp_path, name, reason):
    with av.open(str(tmp_path / name), "w") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        container.start_encoding()
    with pytest.raises(UnreadableFile, match=f"{name}: {reason}"):
        Video.load(tmp_path / name)


def test_video_of_one_frame_is_not_a_still_image(tmp_path):
    video = Video.load(write_video(tmp_path / "a.mp4", grey_frames(1)))
    assert video.frames.shape == (1, 16, 32, 3) and not probe(tmp_path / "a.mp4").still


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("a.mp4", b"", "the file is empty"),
        ("a.gif", b"", "the file is empty"),
        (
            "a.avi",
            b"dear reader",
            "not an MP4, MOV, WebM, MKV or AVI file, .* starts with b'dear rea'",
        ),
        ("a.gif", b"dear reader", "not a PNG, JPEG, WebP, .* starts with b'dear rea'"),
        ("a.webm", b"\x1a\x45\xdf\xa3" + b"\0" * 64, "not an MP4"),
    ],
)
def test_files_of_other_types_are_reported(tmp_path, name, data, reason):
    (tmp_path / name).write_bytes(data)
    for read in (probe, Video.load, decode_all, lambda path: read_video(path, 0.0, 4, 10.0)):
        with pytest.raises(UnreadableFile, match=f"{name}: {reason}"):
            read(tmp_path / name)


def test_missing_file_is_unreadable(tmp_path):
    for name in ("gone.mp4", "gone.gif"):
        with pytest.raises(UnreadableFile, match=f"{name}: the file cannot be opened"):
            Video.load(tmp_path / name)


def test_playlists_are_never_followed(tmp_path):
    path = write_video(tmp_path / "private.mp4", grey_frames(5))
    (tmp_path / "a.mp4").write_text(f"ffconcat version 1.0\nfile {path.name}\n")
    (tmp_path / "b.mp4").write_text(
        f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{path}\n#EXT-X-ENDLIST\n"
    )
    for name in ("a.mp4", "b.mp4"):
        with pytest.raises(UnreadableFile, match="not an MP4"):
            Video.load(tmp_path / name)


def test_names_are_never_parsed_as_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_video(tmp_path / "concat:a.mp4", grey_frames(3))
    assert len(Video.load("concat:a.mp4").frames) == 3
    assert len(Video.load(Video(grey_frames(3), 10.0).save("concat:b")).frames) == 3


NOISE = np.random.default_rng(0).integers(0, 256, (40, 32, 32, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("name", "codec"),
    [("a.mp4", "libx264"), ("a.webm", "libvpx"), ("a.avi", "mpeg4"), ("a.mkv", "libx264")],
)
def test_truncated_video_is_read_up_to_its_end(tmp_path, name, codec):
    path = write_video(tmp_path / name, NOISE, codec)
    whole = Video.load(path).frames
    truncate(path, 0.5)
    video, decoded = Video.load(path), decode_all(path)
    assert 5 < len(video.frames) < 30
    assert np.array_equal(video.frames, whole[: len(video.frames)])
    assert decoded.error.startswith(f"readable up to {decoded.seconds:.2f} s of ")
    assert decoded.seconds == pytest.approx(len(video.frames) / 10, abs=0.15)
    assert probe(path).seconds == pytest.approx(decoded.seconds, abs=0.3), "found without decoding"
    with pytest.raises(UnreadableFile, match=f"{name}: no frame can be decoded at 3.50 s"):
        read_video(path, 3.5, 4, 10.0)


@pytest.mark.parametrize(
    ("name", "codec"), [("a.webm", "libvpx"), ("a.mkv", "mpeg4"), ("a.mp4", "libx264")]
)
def test_duration_is_that_of_the_video_if_the_audio_is_longer(tmp_path, name, codec):
    with av.open(str(tmp_path / name), "w") as container:
        video, audio = (
            container.add_stream(codec, rate=10),
            container.add_stream("libopus", rate=48000),
        )
        video.width, video.height, video.pix_fmt = 32, 16, "yuv420p"
        for number, pixels in enumerate(grey_frames(20)):
            frame = av.VideoFrame.from_ndarray(pixels)
            frame.pts, frame.time_base = number, Fraction(1, 10)
            container.mux(video.encode(frame))
        container.mux(video.encode())
        for number in range(300):  # six seconds of audio and two of video
            frame = av.AudioFrame.from_ndarray(
                np.zeros((1, 960), np.float32), format="flt", layout="mono"
            )
            frame.rate, frame.pts, frame.time_base = 48000, 960 * number, Fraction(1, 48000)
            container.mux(audio.encode(frame))
        container.mux(audio.encode())
    info = probe(tmp_path / name)
    assert info.seconds == info.declared_seconds == pytest.approx(2, abs=0.01)
    assert (
        frame_numbers(Video.load(tmp_path / name)) == list(range(20))
        and decode_all(tmp_path / name).error == ""
    )


def test_truncated_animation_is_read_up_to_its_end(tmp_path):
    path = truncate(write_animation(tmp_path / "a.gif", NOISE, 100), 0.5)
    video = Video.load(path)
    assert 15 < len(video.frames) < 22
    assert decode_all(path).error.startswith(
        f"readable up to {decode_all(path).seconds:.2f} s (the data is damaged or truncated"
    )


def test_mp4_without_its_index_is_unreadable(tmp_path):
    with av.open(
        str(tmp_path / "a.mp4"), "w"
    ) as container:  # without faststart the index is at the end
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for pixels in NOISE:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
        container.mux(stream.encode())
    with pytest.raises(UnreadableFile, match="or truncated"):
        Video.load(truncate(tmp_path / "a.mp4", 0.9))


def test_frames_above_the_pixel_limit_are_not_decoded(tmp_path, monkeypatch):
    path = write_video(tmp_path / "a.mp4", grey_frames(2))
    monkeypatch.setattr("tessera.data.budget.max_decoded_bytes", lambda: 2000)
    with pytest.raises(UnreadableFile, match="frames of 32 x 16 pixels.*set TESSERA_MAX_DECODED"):
        Video.load(path)


@pytest.mark.parametrize("name", ["a.mp4", "a.webm", "a.avi", "a.gif", "a.webp"])
def test_damaged_bytes_give_a_video_or_unreadable_file(tmp_path, name):
    codec = {"a.mp4": "mpeg4", "a.webm": "libvpx", "a.avi": "mpeg4"}.get(name)
    path = (
        write_video(tmp_path / name, NOISE[:4], codec)
        if codec
        else write_animation(tmp_path / name, NOISE[:4], 90)
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
            info = probe(path)
            assert info.seconds > 0 and 1 <= len(read_video(path, 0.0, 4, 10.0).frames) <= 4
            outcomes.add("video")
        except UnreadableFile as error:
            assert name in str(error)
            outcomes.add("error")
    assert outcomes == {"video", "error"}


def test_changed_file_is_probed_again(tmp_path):
    write_video(tmp_path / "a.mp4", grey_frames(5))
    assert probe(tmp_path / "a.mp4").frames == 5
    write_video(tmp_path / "a.mp4", grey_frames(9))
    assert probe(tmp_path / "a.mp4").frames == 9


def test_missing_pyav_is_an_error_with_the_install_command(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"needs the Python package av, .* pip install \"tessera\[video\]\"",
    ):
        Video(grey_frames(2), 10.0).save(tmp_path / "a")
