"""Any picture that a person may have comes in as the colours they see; what is broken says so."""

from __future__ import annotations

import pickle
import struct
import zlib
from io import BytesIO

import numpy as np
import PIL.Image
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.errors import UnreadableFile
from tessera.modalities.image.media import Image, decode, flatten, read

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 255)


def scene(width=40, height=24) -> PIL.Image.Image:
    """Red on the left, blue on the right, a green stripe at the top: no flip or turn of it looks
    the same."""
    picture = PIL.Image.new("RGB", (width, height), RED)
    picture.paste(BLUE, (width // 2, 0, width, height))
    picture.paste(GREEN, (0, 0, width, height // 4))
    return picture


def encoded(picture: PIL.Image.Image, form: str, **options) -> bytes:
    buffer = BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def close(image: Image, expected: PIL.Image.Image, within: float = 8) -> bool:
    """Lossy formats blur edges, so the mean difference is what is compared."""
    wanted = np.asarray(expected.convert("RGB"), dtype=float)
    return image.pixels.shape == wanted.shape and abs(image.pixels - wanted).mean() < within


@pytest.mark.parametrize(
    ("ending", "form", "options"),
    [
        ("png", "PNG", {}),
        ("PNG", "PNG", {}),
        ("jpg", "JPEG", {"quality": 95}),
        ("JPeG", "JPEG", {"quality": 95, "progressive": True}),
        ("webp", "WEBP", {"lossless": True}),
        ("bmp", "BMP", {}),
        ("gif", "GIF", {}),
        ("tif", "TIFF", {}),
        ("jpg", "PNG", {}),
        (
            "mpo.jpg",
            "MPO",
            {"quality": 95, "save_all": True, "append_images": [PIL.Image.new("RGB", (40, 24))]},
        ),
    ],
)
def test_every_common_format_is_read_whatever_the_file_is_called(tmp_path, ending, form, options):
    path = tmp_path / f"a.{ending}"
    path.write_bytes(encoded(scene(), form, **options))
    assert close(Image.load(path), scene())


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_an_animation_is_its_first_frame(tmp_path, form):
    path = tmp_path / "moving"
    options = {"lossless": True} if form == "WEBP" else {}
    path.write_bytes(
        encoded(
            scene(),
            form,
            save_all=True,
            append_images=[PIL.Image.new("RGB", (40, 24), WHITE)],
            **options,
        )
    )
    assert close(Image.load(path), scene())


def grey(levels) -> np.ndarray:
    return np.asarray(levels)[..., None].repeat(3, axis=-1)


RAMP = np.arange(0, 256, 5, dtype=np.uint8).reshape(4, 13)


@pytest.mark.parametrize(
    ("picture", "form", "expected"),
    [
        (PIL.Image.fromarray(RAMP), "PNG", grey(RAMP)),
        (PIL.Image.fromarray(RAMP.astype(np.uint16) * 257), "PNG", grey(RAMP)),
        (PIL.Image.fromarray(RAMP.astype(np.int32) * 257), "TIFF", grey(RAMP)),
        (PIL.Image.fromarray(RAMP.astype(np.float32)), "TIFF", grey(RAMP)),
        (PIL.Image.fromarray(RAMP.astype(np.float32) / 255), "TIFF", grey(RAMP)),
        (PIL.Image.fromarray(RAMP > 99), "PNG", grey(np.where(RAMP > 99, 255, 0))),
        (scene().quantize(4), "PNG", np.asarray(scene())),
        (scene().convert("CMYK"), "TIFF", np.asarray(scene())),
        (scene().convert("YCbCr"), "TIFF", np.asarray(scene().convert("YCbCr").convert("RGB"))),
    ],
    ids=["L", "I;16", "I", "F to 255", "F to 1", "1", "P", "CMYK", "YCbCr"],
)
def test_every_mode_keeps_its_colours(picture, form, expected):
    assert np.array_equal(np.asarray(flatten(decode(encoded(picture, form)))), expected)


def test_a_cmyk_jpeg_keeps_its_colours():
    jpeg = encoded(scene().convert("CMYK"), "JPEG", quality=95)
    assert close(Image(np.array(flatten(decode(jpeg)))), scene())


def glass(mode: str) -> PIL.Image.Image:
    """Opaque black on the left, half transparent black in the middle, nothing on the right."""
    rgba = np.zeros((1, 3, 4), dtype=np.uint8)
    rgba[0, :, 3] = (255, 128, 0)
    return PIL.Image.fromarray(rgba).convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_what_is_transparent_shows_white_paper(mode):
    picture = flatten(glass(mode))
    assert np.array_equal(np.asarray(picture)[0, :, 0], [0, 127, 255])


@pytest.mark.parametrize(("mode", "key"), [("L", 7), ("RGB", (7, 7, 7)), ("P", 7)])
def test_a_colour_declared_transparent_shows_white_paper(mode, key):
    picture = PIL.Image.new(mode, (2, 1), key)
    picture.putpixel((0, 0), 0 if mode != "RGB" else (0, 0, 0))
    if mode == "P":
        picture.putpalette([0, 0, 0] * 256)
    found = flatten(decode(encoded(picture, "PNG", transparency=key)))
    assert [found.getpixel((0, 0)), found.getpixel((1, 0))] == [(0, 0, 0), WHITE]


def test_a_palette_with_transparency_bytes_is_read_without_a_warning():
    picture = scene().quantize(4)
    found = flatten(decode(encoded(picture, "PNG", transparency=bytes([0, 0, 0, 0]))))
    assert np.all(np.asarray(found) == 255)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_as_the_camera_was_held(tmp_path, form, orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    # what the sensor saw, such that the EXIF instruction restores the scene
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    sensor = (
        scene().transpose(PIL.Image.Transpose(undo[orientation])) if orientation > 1 else scene()
    )
    path = tmp_path / "photo"
    options = {"lossless": True} if form == "WEBP" else {"quality": 95} if form == "JPEG" else {}
    path.write_bytes(encoded(sensor, form, exif=exif, **options))
    assert close(Image.load(path), scene())


def test_damaged_exif_does_not_lose_the_picture(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(
        encoded(scene(), "JPEG", quality=95, exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff broken")
    )
    with pytest.warns(UserWarning, match="Corrupt EXIF"):  # Pillow's, and all that comes of it
        assert close(Image.load(path), scene())


NOISE = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_a_file_that_is_cut_short_is_refused_with_its_name(tmp_path, form, share):
    data = encoded(NOISE, form)
    path = tmp_path / f"holiday.{form.lower()}"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(
        UnreadableFile, match=f"holiday.{form.lower()}: it is .*(damaged or cut short|no PNG)"
    ):
        Image.load(path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"hello, I am a text", "it is no PNG, JPEG, .* begins with b'hello, I'"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is no PNG"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 64, "it is "),
    ],
)
def test_what_is_no_picture_says_what_it_is(tmp_path, data, reason):
    path = tmp_path / "really.png"
    path.write_bytes(data)
    with pytest.raises(UnreadableFile, match=f"really.png: {reason}"):
        Image.load(path)


def test_colours_that_cannot_be_shown_are_refused():
    with pytest.raises(UnreadableFile, match=r"its colours \(mode La\) cannot be turned into RGB"):
        flatten(PIL.Image.new("La", (4, 4)))


def test_a_missing_file_is_unreadable_and_no_crash(tmp_path):
    with pytest.raises(UnreadableFile, match="gone.png: the file cannot be opened"):
        Image.load(tmp_path / "gone.png")


def test_a_decompression_bomb_is_refused_before_it_unpacks():
    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    bomb = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(b"\0" * 1000))
        + chunk(b"IEND", b"")
    )
    with pytest.raises(UnreadableFile, match="3,600 million pixels"):
        decode(bomb)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"]), st.data())
def test_damaged_bytes_give_a_picture_or_a_reason_and_nothing_else(form, data):
    whole = bytearray(encoded(scene(), form))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert flatten(decode(bytes(whole))).mode == "RGB"
    except UnreadableFile as error:
        assert str(error)


def test_an_unreadable_file_survives_the_way_back_from_a_worker():
    back = pickle.loads(pickle.dumps(UnreadableFile("a.png: the file is empty")))
    assert isinstance(back, UnreadableFile) and str(back) == "a.png: the file is empty"


def test_a_large_jpeg_is_decoded_smaller_but_never_below_what_is_asked(tmp_path):
    path = tmp_path / "large.jpg"
    path.write_bytes(encoded(scene(1600, 960), "JPEG"))
    assert read(path, shortest=200).size == (400, 240)
    assert read(path).size == (1600, 960)


def test_a_saved_picture_comes_back_the_same_and_its_name_is_kept_whole(tmp_path):
    image = Image(np.asarray(NOISE))
    path = image.save(tmp_path / "samples" / "guidance-1.5")
    assert path == tmp_path / "samples" / "guidance-1.5.png"
    assert np.array_equal(Image.load(path).pixels, image.pixels)


def test_every_byte_survives_the_way_through_floats():
    image = Image(np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3))
    floats = image.floats()
    assert floats.dtype == np.float32 and floats.shape == (3, 16, 16)
    assert floats.min() == -1 and floats.max() == 1
    assert np.array_equal(Image.from_floats(floats).pixels, image.pixels)


def test_floats_beyond_the_range_are_clipped_and_no_number_is_grey():
    array = np.zeros((3, 1, 5), dtype=np.float32)
    array[:] = (-7, 7, np.nan, np.inf, -np.inf)
    assert Image.from_floats(array).pixels[0, :, 0].tolist() == [0, 255, 128, 255, 0]


@pytest.mark.parametrize(
    "array", [np.zeros((3, 4, 4), np.uint8), np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3))]
)
def test_pixels_of_another_shape_or_type_are_refused(array):
    with pytest.raises(ValueError, match=r"\(height, width, 3\) bytes"):
        Image(array)


def test_floats_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(3, height, width\)"):
        Image.from_floats(np.zeros((8, 8, 3)))


def flat(width: int, height: int, colour) -> Image:
    return Image(np.asarray(PIL.Image.new("RGB", (width, height), colour)))


def test_a_sheet_is_read_like_a_page():
    sheet = Image.sheet(
        [flat(16, 16, RED), flat(16, 16, GREEN), flat(16, 16, BLUE)], columns=2
    ).pixels
    assert sheet.shape == (2 + 2 * 18, 2 + 2 * 18, 3)
    assert sheet[10, 10].tolist() == list(RED)
    assert sheet[10, 28].tolist() == list(GREEN)
    assert sheet[28, 10].tolist() == list(BLUE)
    assert sheet[28, 28].min() > 200, "an empty place shows the light background"


def test_a_sheet_centres_pictures_of_different_sizes():
    sheet = Image.sheet([flat(20, 10, RED), flat(10, 20, BLUE)]).pixels
    assert sheet[2 + 10, 2 + 10].tolist() == list(RED)
    assert sheet[2 + 10, 2 + 20 + 2 + 10].tolist() == list(BLUE)
    assert (sheet == RED).all(-1).sum() == (sheet == BLUE).all(-1).sum() == 200


def test_a_sheet_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Image.sheet([])


def test_a_picture_beside_another_keeps_both_whole():
    pair = Image.beside(flat(8, 8, RED), flat(6, 4, BLUE)).pixels
    assert pair.shape == (8, 8 + 2 + 6, 3)
    assert (pair == RED).all(-1).sum() == 64
    assert (pair == BLUE).all(-1).sum() == 24
    assert pair[:, 8:10].min() > 200
