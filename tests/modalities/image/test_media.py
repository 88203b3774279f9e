"""Tests of `Image`: decoding of common formats, errors for unusable files, saving and sheets."""

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
from tessera.modalities.image.contact_sheet import to_rgb_pixels
from tessera.modalities.image.media import Image, decode, open_image, to_rgb

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 255)


def scene(width=40, height=24) -> PIL.Image.Image:
    """Return an image without symmetry: red on the left, blue on the right, green at the top."""
    image = PIL.Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    image.paste(GREEN, (0, 0, width, height // 4))
    return image


def encode(image: PIL.Image.Image, format: str, **options) -> bytes:
    buffer = BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def is_close(image: Image, expected: PIL.Image.Image, tolerance: float = 8) -> bool:
    """Compare the mean difference, since lossy formats blur edges."""
    wanted = np.asarray(expected.convert("RGB"), dtype=float)
    return image.pixels.shape == wanted.shape and abs(image.pixels - wanted).mean() < tolerance


@pytest.mark.parametrize(
    ("suffix", "format", "options"),
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
def test_formats_are_detected_by_content(tmp_path, suffix, format, options):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(encode(scene(), format, **options))
    assert is_close(Image.load(path), scene())


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_animations_load_as_their_first_frame(tmp_path, format):
    path = tmp_path / "animation"
    options = {"lossless": True} if format == "WEBP" else {}
    path.write_bytes(
        encode(
            scene(),
            format,
            save_all=True,
            append_images=[PIL.Image.new("RGB", (40, 24), WHITE)],
            **options,
        )
    )
    assert is_close(Image.load(path), scene())


def grey(levels) -> np.ndarray:
    return np.asarray(levels)[..., None].repeat(3, axis=-1)


RAMP = np.arange(0, 256, 5, dtype=np.uint8).reshape(4, 13)


@pytest.mark.parametrize(
    ("image", "format", "expected"),
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
def test_conversion_to_rgb_preserves_colours(image, format, expected):
    assert np.array_equal(np.asarray(to_rgb(decode(encode(image, format)))), expected)


def test_cmyk_jpeg_preserves_colours():
    jpeg = encode(scene().convert("CMYK"), "JPEG", quality=95)
    assert is_close(Image(np.array(to_rgb(decode(jpeg)))), scene())


def black_with_alpha(mode: str) -> PIL.Image.Image:
    """Return three black pixels: opaque, half transparent, fully transparent."""
    rgba = np.zeros((1, 3, 4), dtype=np.uint8)
    rgba[0, :, 3] = (255, 128, 0)
    return PIL.Image.fromarray(rgba).convert(mode)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA"])
def test_alpha_is_composited_over_white(mode):
    image = to_rgb(black_with_alpha(mode))
    assert np.array_equal(np.asarray(image)[0, :, 0], [0, 127, 255])


@pytest.mark.parametrize(("mode", "key"), [("L", 7), ("RGB", (7, 7, 7)), ("P", 7)])
def test_transparent_colour_key_becomes_white(mode, key):
    image = PIL.Image.new(mode, (2, 1), key)
    image.putpixel((0, 0), 0 if mode != "RGB" else (0, 0, 0))
    if mode == "P":
        image.putpalette([0, 0, 0] * 256)
    found = to_rgb(decode(encode(image, "PNG", transparency=key)))
    assert [found.getpixel((0, 0)), found.getpixel((1, 0))] == [(0, 0, 0), WHITE]


def test_palette_with_transparency_bytes_gives_no_warning():
    image = scene().quantize(4)
    found = to_rgb(decode(encode(image, "PNG", transparency=bytes([0, 0, 0, 0]))))
    assert np.all(np.asarray(found) == 255)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied(tmp_path, format, orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    # the stored pixels, from which the EXIF orientation restores the scene
    inverse = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}
    stored = (
        scene().transpose(PIL.Image.Transpose(inverse[orientation])) if orientation > 1 else scene()
    )
    path = tmp_path / "photo"
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 95}}.get(format, {})
    path.write_bytes(encode(stored, format, exif=exif, **options))
    assert is_close(Image.load(path), scene())


def test_image_with_damaged_exif_is_readable(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(
        encode(scene(), "JPEG", quality=95, exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff broken")
    )
    with pytest.warns(UserWarning, match="Corrupt EXIF"):  # from Pillow
        assert is_close(Image.load(path), scene())


NOISE = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8))


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
@pytest.mark.parametrize("fraction", [0.01, 0.3, 0.9])
def test_truncated_files_are_reported_with_their_path(tmp_path, format, fraction):
    data = encode(NOISE, format)
    path = tmp_path / f"holiday.{format.lower()}"
    path.write_bytes(data[: int(len(data) * fraction)])
    with pytest.raises(
        UnreadableFile, match=f"holiday.{format.lower()}: .*(damaged or truncated|not a PNG)"
    ):
        Image.load(path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the file is empty"),
        (b"hello, I am a text", "not a PNG, JPEG, .* starts with b'hello, I'"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a PNG"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 64, "(not a PNG|the data is damaged)"),
    ],
)
def test_files_of_other_types_are_reported(tmp_path, data, reason):
    path = tmp_path / "really.png"
    path.write_bytes(data)
    with pytest.raises(UnreadableFile, match=f"really.png: {reason}"):
        Image.load(path)


def test_unsupported_colour_mode_is_an_error():
    with pytest.raises(UnreadableFile, match="colours of mode La cannot be converted to RGB"):
        to_rgb(PIL.Image.new("La", (4, 4)))


def test_missing_file_is_unreadable(tmp_path):
    with pytest.raises(UnreadableFile, match="gone.png: the file cannot be opened"):
        Image.load(tmp_path / "gone.png")


def test_decompression_bomb_is_rejected_before_decoding():
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
def test_damaged_bytes_give_an_image_or_unreadable_file(format, data):
    whole = bytearray(encode(scene(), format))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        assert to_rgb(decode(bytes(whole))).mode == "RGB"
    except UnreadableFile as error:
        assert str(error)


def test_unreadable_file_can_be_pickled():
    back = pickle.loads(pickle.dumps(UnreadableFile("a.png: the file is empty")))
    assert isinstance(back, UnreadableFile) and str(back) == "a.png: the file is empty"


def test_large_jpeg_is_decoded_at_reduced_size(tmp_path):
    path = tmp_path / "large.jpg"
    path.write_bytes(encode(scene(1600, 960), "JPEG"))
    assert open_image(path, min_side=200).size == (400, 240)
    assert open_image(path).size == (1600, 960)


def test_saved_image_is_lossless_and_keeps_dots_in_its_name(tmp_path):
    image = Image(np.asarray(NOISE))
    path = image.save(tmp_path / "samples" / "guidance-1.5")
    assert path == tmp_path / "samples" / "guidance-1.5.png"
    assert np.array_equal(Image.load(path).pixels, image.pixels)


@pytest.mark.parametrize(
    ("name", "format"),
    [("a.png", "PNG"), ("a.PNG", "PNG"), ("a.jpg", "JPEG"), ("a.jpeg", "JPEG"), ("a.webp", "WEBP")],
)
def test_save_writes_the_format_of_the_suffix(tmp_path, name, format):
    path = Image(np.asarray(scene())).save(tmp_path / name)
    assert path == tmp_path / name and [file.name for file in tmp_path.iterdir()] == [name]
    with PIL.Image.open(path) as file:
        assert file.format == format
    assert is_close(Image.load(path), scene())


def test_save_rejects_formats_that_cannot_be_written(tmp_path):
    with pytest.raises(ValueError, match=r"\.tga, but .* \.png, \.jpg, \.jpeg, \.webp"):
        Image(np.asarray(NOISE)).save(tmp_path / "a.tga")
    assert not list(tmp_path.iterdir())


def test_conversion_to_floats_and_back_is_exact():
    image = Image(np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3))
    floats = image.to_floats()
    assert floats.dtype == np.float32 and floats.shape == (3, 16, 16)
    assert floats.min() == -1 and floats.max() == 1
    assert np.array_equal(Image.from_floats(floats).pixels, image.pixels)


def test_floats_out_of_range_are_clipped_and_nan_is_grey():
    array = np.zeros((3, 1, 5), dtype=np.float32)
    array[:] = (-7, 7, np.nan, np.inf, -np.inf)
    assert Image.from_floats(array).pixels[0, :, 0].tolist() == [0, 255, 128, 255, 0]


@pytest.mark.parametrize(
    "array", [np.zeros((3, 8, 8), np.uint8), np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3))]
)
def test_pixels_of_wrong_shape_or_dtype_are_an_error(array):
    with pytest.raises(ValueError, match=r"expects uint8 pixels of shape \(height, width, 3\)"):
        Image(array)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_every_number_of_channels_is_saved_and_converted(channels, mode, tmp_path):
    image = Image(np.random.default_rng(0).integers(0, 256, (6, 5, channels), np.uint8))
    loaded = Image.load(image.save(tmp_path / "image.png"), channels=channels)
    assert image.to_pillow().mode == mode
    assert np.array_equal(loaded.pixels, image.pixels)
    assert np.array_equal(Image.from_floats(image.to_floats()).pixels, image.pixels)


def test_grey_and_transparent_images_are_shown_in_colour(tmp_path):
    grey = Image(np.full((4, 4, 1), 7, np.uint8))
    clear = Image(np.zeros((4, 4, 4), np.uint8))
    assert (to_rgb_pixels(grey.pixels) == 7).all() and to_rgb_pixels(grey.pixels).shape == (4, 4, 3)
    assert (to_rgb_pixels(clear.pixels) == 255).all()
    assert {7, 255} <= set(np.unique(Image.sheet([grey, clear]).pixels))
    assert (Image.side_by_side(grey, clear).pixels[:, -4:] == 255).all()
    assert (Image.load(clear.save(tmp_path / "clear.jpg")).pixels == 255).all()  # JPEG has no alpha


def test_floats_of_wrong_shape_are_an_error():
    with pytest.raises(ValueError, match=r"\(3, height, width\)"):
        Image.from_floats(np.zeros((8, 8, 3)))


def plain(width: int, height: int, colour) -> Image:
    return Image(np.asarray(PIL.Image.new("RGB", (width, height), colour)))


def test_sheet_is_an_image_with_captions():
    images = [plain(96, 96, colour) for colour in (RED, GREEN, BLUE)]
    sheet, labelled = Image.sheet(images, columns=2), Image.sheet(images, "abc", columns=2)
    assert isinstance(sheet, Image) and sheet.pixels.shape == (228, 228, 3)
    assert labelled.pixels.shape[0] > 228 and (labelled.pixels == 0).all(-1).any()


def test_empty_sheet_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        Image.sheet([])


def test_side_by_side_contains_both_images():
    pair = Image.side_by_side(plain(8, 8, RED), plain(6, 4, BLUE)).pixels
    assert pair.shape == (8, 8 + 1 + 6, 3)
    assert (pair == RED).all(-1).sum() == 64
    assert (pair == BLUE).all(-1).sum() == 24
    assert pair[:, 8].min() > 200


def test_repr_is_short() -> None:
    assert repr(Image(np.zeros((2, 3, 3), np.uint8))) == "Image(width=3, height=2)"
