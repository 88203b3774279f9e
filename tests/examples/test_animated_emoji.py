"""examples/animated_emoji.py, with small archives instead of the downloaded ones."""

from __future__ import annotations

import importlib.util
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from tessera.modalities.video.io.files import probe
from tessera.modalities.video.media import Video

EXAMPLE = Path(__file__).parents[2] / "examples" / "animated_emoji.py"


@pytest.fixture
def emoji(monkeypatch):
    """The example as a module; it imports examples/emoji.py, as the script does."""
    monkeypatch.syspath_prepend(str(EXAMPLE.parent))
    monkeypatch.delitem(sys.modules, "emoji", raising=False)
    spec = importlib.util.spec_from_file_location("animated_emoji_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("emoji", None)


def webp(frames: int, red: int = 255) -> bytes:
    """Encode an animation of a red area that grows over a transparent background."""
    images = []
    for number in range(frames):
        pixels = np.zeros((16, 16, 4), dtype=np.uint8)
        pixels[: number + 2] = (red, 0, 0, 255)
        images.append(PIL.Image.fromarray(pixels))
    buffer = BytesIO()
    images[0].save(
        buffer, "WEBP", save_all=True, append_images=images[1:], duration=50, lossless=True
    )
    return buffer.getvalue()


def archive(path: Path, **files: bytes) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, BytesIO(data))
    return path


NAMES = {
    "1f44b": "waving hand",
    "1f44b-1f3fb": "waving hand, light skin tone",
    "2764": "red heart",
    "1f600": "grinning face",
}


def test_named_animations_become_videos_with_captions(tmp_path, emoji):
    animations = archive(
        tmp_path / "animations.tgz",
        **{
            "package/assets/2764-fe0f.webp": webp(8),
            "package/assets/1f44b-1f3fb.webp": webp(4),
            "package/assets/1f44b.webp": webp(6),
            "package/assets/1f600.webp": webp(1),
            "package/assets/ffff.webp": webp(4),
            "package/README.md": b"hello",
        },
    )
    out = tmp_path / "out"
    records = emoji.write_videos(animations, NAMES, out)
    assert sorted(path.name for path in out.iterdir()) == ["1f44b.mp4", "2764-fe0f.mp4"]
    assert records == [
        {"file_name": "1f44b.mp4", "text": "waving hand", "subject": "waving hand"},
        {"file_name": "2764-fe0f.mp4", "text": "red heart", "subject": "red heart"},
    ]
    info, video = probe(out / "2764-fe0f.mp4"), Video.load(out / "2764-fe0f.mp4")
    assert (info.frames, info.width, info.height, info.rate_hz) == (8, 16, 16, 20)
    assert video.frames[:, 0, 8, 1].max() < 60 and video.frames[:, 14, 8].min() > 200, (
        "red on a white background"
    )


def test_a_broken_animation_is_skipped_with_a_message(tmp_path, emoji, capsys):
    animations = archive(
        tmp_path / "a.tgz", **{"package/1f44b.webp": b"broken", "package/2764.webp": webp(4)}
    )
    assert len(emoji.write_videos(animations, NAMES, tmp_path / "out")) == 1
    assert "skipped 1f44b.webp: " in capsys.readouterr().out


def test_an_archive_cannot_write_outside_the_folder(tmp_path, emoji):
    animations = archive(
        tmp_path / "evil.tgz",
        **{"../../1f44b.webp": webp(3), "/2764.webp": webp(3), "package/..\\x.webp": webp(3)},
    )
    emoji.write_videos(animations, {**NAMES, "..\\x": "evil"}, tmp_path / "deep" / "out")
    written = {
        path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()
    }
    assert written == {
        "evil.tgz",
        "deep/out/1f44b.mp4",
        "deep/out/2764.mp4",
    }
