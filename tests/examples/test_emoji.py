"""examples/emoji.py, with small archives instead of the downloaded ones."""

from __future__ import annotations

import importlib.util
import json
import tarfile
from io import BytesIO
from pathlib import Path

import PIL.Image
import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "emoji.py"


@pytest.fixture
def emoji():
    spec = importlib.util.spec_from_file_location("emoji_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def webp(color) -> bytes:
    buffer = BytesIO()
    PIL.Image.new("RGBA", (8, 8), color).save(buffer, "WEBP", lossless=True)
    return buffer.getvalue()


def archive(path: Path, **files: bytes) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, BytesIO(data))
    return path


NAMES = [
    {
        "name": "WAVING HAND SIGN",
        "unified": "1F44B",
        "skin_variations": {"1F3FB": {"unified": "1F44B-1F3FB"}},
    },
    {"name": None, "short_name": "red_heart", "unified": "2764-FE0F", "non_qualified": "2764"},
]


def test_named_emoji_become_images_on_white_with_captions(tmp_path, emoji):
    names = emoji.read_names(
        archive(tmp_path / "names.tgz", **{"package/emoji.json": json.dumps(NAMES).encode()})
    )
    images = archive(
        tmp_path / "images.tgz",
        **{
            "package/assets/2764.webp": webp((0, 0, 0, 0)),
            "package/assets/1f44b-1f3fb.webp": webp((255, 0, 0, 255)),
            "package/assets/1f44b.webp": b"broken",
            "package/assets/ffff.webp": webp((0, 0, 0, 255)),
            "package/README.md": b"hello",
        },
    )
    out = tmp_path / "out"
    records = emoji.write_images(images, names, out)
    emoji.write_metadata(records, out)
    assert sorted(path.name for path in out.iterdir()) == [
        "1f44b-1f3fb.png",
        "2764.png",
        "metadata.jsonl",
    ]
    rows = [json.loads(line) for line in (out / "metadata.jsonl").read_text().splitlines()]
    assert rows == [
        {
            "file_name": "1f44b-1f3fb.png",
            "text": "waving hand sign, light skin tone",
            "subject": "waving hand sign",
        },
        {"file_name": "2764.png", "text": "red heart", "subject": "red heart"},
    ]
    assert PIL.Image.open(out / "2764.png").getpixel((4, 4)) == (255, 255, 255)


def test_noto_emoji_name_their_style_in_the_caption_only(tmp_path, emoji):
    image = BytesIO()
    PIL.Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(image, "PNG")
    drawings = archive(
        tmp_path / "noto.tgz",
        **{
            "package/img/google/64/2764-fe0f.png": image.getvalue(),
            "package/img/google/64/ffff.png": image.getvalue(),
            "package/img/google/64/1f44b.webp": webp((255, 0, 0, 255)),
        },
    )
    names = {"2764-fe0f": "red heart, light skin tone", "1f44b": "hand"}
    assert emoji.write_noto_images(drawings, names, tmp_path / "out") == [
        {
            "file_name": "noto-2764-fe0f.png",
            "text": "red heart, light skin tone, flat",
            "subject": "red heart",
        }
    ]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["noto-2764-fe0f.png"]


def test_an_archive_cannot_write_outside_the_folder(tmp_path, emoji):
    images = archive(
        tmp_path / "evil.tgz",
        **{
            "../../1f44b.webp": webp((9, 9, 9, 255)),
            "/2764.webp": webp((9, 9, 9, 255)),
            "package/..\\x.webp": webp((9, 9, 9, 255)),
        },
    )
    out = tmp_path / "deep" / "out"
    names = {"1f44b": "hand", "2764": "heart", "..\\x": "evil"}
    emoji.write_metadata(emoji.write_images(images, names, out), out)
    written = {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert written == {
        "evil.tgz",
        "deep/out/1f44b.png",
        "deep/out/2764.png",
        "deep/out/metadata.jsonl",
    }


def test_excluded_emoji_are_left_out_with_their_variants(emoji):
    names = {"1f44b": "a", "1f44b-1f3fb": "b", "2764-fe0f": "c", "2764": "d", "1f44": "e"}
    assert emoji.exclude(names, ["1F44B"]) == {"2764-fe0f": "c", "2764": "d", "1f44": "e"}
    assert emoji.exclude(names, ["2764", "1f44"]) == {"1f44b": "a", "1f44b-1f3fb": "b"}
    assert emoji.exclude(names, []) == names


@pytest.mark.parametrize(
    ("name", "subject"),
    [
        ("red heart", "red heart"),
        ("kiss: woman, man, medium-dark skin tone", "kiss: woman, man"),
        ("people holding hands, light skin tone and dark skin tone", "people holding hands"),
    ],
)
def test_skin_tones_are_no_part_of_the_subject(emoji, name, subject):
    assert emoji.find_subject(name) == subject
