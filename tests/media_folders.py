"""Small folders of every medium with captions, for tests of where data are read from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import PIL.Image

from tessera.data.dataset import DataConfig
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.media import Audio
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.synthetic import generate_object
from tessera.modalities.music.dataset import MusicDataConfig
from tessera.modalities.video.dataset import VideoDataConfig
from tests.videos import grey_frames, write_video


@dataclass(frozen=True)
class Medium:
    write: Callable[[Path, int], None]
    """Write a number of files with captions to a folder."""
    config: DataConfig
    """The settings with which they are read, with augmentation."""


def write_images(folder: Path, count: int = 8) -> None:
    """Write noise of different sizes into two folders; one name has a dot."""
    rng = np.random.default_rng(0)
    for number in range(count):
        path = folder / ("cats" if number % 2 else "dogs") / f"photo.{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (24 + number, 32, 3), dtype=np.uint8)
        PIL.Image.fromarray(pixels).save(path)


def write_captioned_images(folder: Path, count: int = 8) -> None:
    write_images(folder, count)
    for path in sorted(folder.rglob("*.png"))[:-1]:  # the last one has no caption
        path.with_suffix(".txt").write_text(f"a photo,\nnumber {path.stem[-2:]}", encoding="utf-8")


def write_videos(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        suffix = (".mp4", ".webm", ".avi")[number % 3]
        codec = {".mp4": "libx264", ".webm": "libvpx-vp9", ".avi": "mpeg4"}[suffix]
        frames = grey_frames(12) + np.uint8(number)
        write_video(folder / f"{number:02d}{suffix}", frames, codec)


def write_audio(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(count):
        samples = rng.uniform(-0.5, 0.5, (1, 12_000)).astype(np.float32)
        suffix = (".wav", ".flac", ".ogg", ".mp3")[number % 4]
        Audio(samples, 16_000).write(folder / f"{number:02d}{suffix}")
        text = f"noise {number}\nhiss {number}"
        (folder / f"{number:02d}.txt").write_text(text, encoding="utf-8")


def write_tagged_audio(folder: Path, count: int) -> None:
    write_audio(folder, count)
    lines = []
    for path in sorted(folder.glob("*.txt")):
        path.unlink()
        media = next(folder.glob(f"{path.stem}.*")).name
        text = '"text": ["slow", "calm"], ' if int(path.stem) % 2 else ""
        lines.append(f'{{"file_name": "{media}", {text}"tags": ["piano", "n{path.stem}"]}}')
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")


def write_meshes(folder: Path, count: int) -> None:
    folder.mkdir(parents=True)
    for number in range(count):
        generated = generate_object(7, number)
        generated.mesh.save(folder / f"{number:02d}{('.glb', '.obj', '.ply')[number % 3]}")
        (folder / f"{number:02d}.txt").write_text(generated.caption, encoding="utf-8")


MEDIA = {
    "images of classes": Medium(write_images, ImageDataConfig(size=16, min_scale=0.5, flip=True)),
    "images": Medium(write_captioned_images, ImageDataConfig(size=16, min_scale=0.5)),
    "videos": Medium(write_videos, VideoDataConfig(size=16, frames=5)),
    "audio": Medium(write_audio, AudioDataConfig(seconds=0.25)),
    "music": Medium(write_tagged_audio, MusicDataConfig(seconds=0.25)),
    "meshes": Medium(write_meshes, MeshDataConfig(scale=0.2, mirror=True)),
}
