"""Inputs for adversary.py: damaged files of all formats, odd command lines and configurations."""

from __future__ import annotations

import contextlib
import inspect
import json
import random
import shutil
import struct
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import trimesh

from tessera.cli.commands import COMMANDS
from tessera.data.dataset import DataConfig, read_item
from tessera.data.errors import UnreadableFile, guard_reading
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.inspect import inspect_file as inspect_audio
from tessera.modalities.audio.media import Audio
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.inspect import inspect_file as inspect_image
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.inspect import inspect_file as inspect_mesh
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.modalities.video.inspect import inspect_file as inspect_video

MAX_SECONDS = 10.0
MAX_MEMORY_MB = 1500

MEDIA: dict[str, tuple[DataConfig, Any]] = {
    "image": (ImageDataConfig(size=16), inspect_image),
    "video": (VideoDataConfig(size=16, frames=5), inspect_video),
    "audio": (AudioDataConfig(seconds=0.25), inspect_audio),
    "mesh": (MeshDataConfig(), lambda *args: inspect_mesh(*args, MeshDataConfig())),
}


# ---- intact files


def write_sources(medium: str, folder: Path) -> list[Path]:
    """Write small intact files of every format of a medium."""
    folder.mkdir(parents=True, exist_ok=True)
    write = {
        "image": write_images,
        "video": write_videos,
        "audio": write_audio,
        "mesh": write_meshes,
    }
    write[medium](folder)
    return sorted(path for path in folder.iterdir() if path.stem == "source")


def write_images(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 3), dtype=np.uint8)
    image = PIL.Image.fromarray(pixels)
    for suffix in ("png", "jpg", "webp", "bmp", "gif", "tiff"):
        image.save(folder / f"source.{suffix}")


def write_videos(folder: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 255, (6, 16, 24, 3), dtype=np.uint8)
    for suffix, codec in (("mp4", "mpeg4"), ("webm", "libvpx"), ("avi", "mpeg4"), ("mkv", "mpeg4")):
        with av.open(str(folder / f"source.{suffix}"), "w") as container:
            stream = container.add_stream(codec, rate=12)
            stream.width, stream.height, stream.pix_fmt = 24, 16, "yuv420p"
            for frame in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
    first, *rest = [PIL.Image.fromarray(frame) for frame in frames]
    for suffix in ("gif", "webp"):
        first.save(folder / f"source.{suffix}", save_all=True, append_images=rest, duration=80)


def write_audio(folder: Path) -> None:
    wave = 0.3 * np.sin(np.arange(6000) * 0.1, dtype=np.float32)[None]
    for suffix in ("wav", "flac", "ogg", "mp3"):
        Audio(wave, 16_000).write(folder / f"source.{suffix}")
    for suffix, codec, layout in (
        ("opus", "libopus", "7.1"),
        ("m4a", "aac", "stereo"),
        ("mka", "pcm_s16le", "7.1"),
        ("aac", "aac", "mono"),
    ):
        with av.open(
            str(folder / f"source.{suffix}"), "w", format="adts" if suffix == "aac" else None
        ) as container:
            stream = container.add_stream(codec, rate=48_000, layout=layout)
            name = stream.codec_context.codec.audio_formats[0].name
            channels = stream.codec_context.layout.nb_channels
            kind = np.float32 if "flt" in name else np.int16
            samples = np.zeros((channels, 9600), kind)
            packed = samples if name.endswith("p") else samples.reshape(1, -1)
            frame = av.AudioFrame.from_ndarray(packed, format=name, layout=layout)
            frame.sample_rate = 48_000
            container.mux([*stream.encode(frame), *stream.encode(None)])


def write_meshes(folder: Path) -> None:
    box = trimesh.creation.box((1, 2, 3))
    for suffix in ("obj", "ply", "stl", "glb", "off"):
        content = box.export(file_type=suffix)
        data = content.encode() if isinstance(content, str) else content
        (folder / f"source.{suffix}").write_bytes(data)
    exported = trimesh.Scene(box).export(file_type="gltf", merge_buffers=True)
    for name, data in exported.items():
        target = "source.gltf" if name.endswith(".gltf") else name
        (folder / target).write_bytes(data)


# ---- damaged files


@dataclass(frozen=True)
class FilesRead:
    files: int
    slowest: float


def read_mutations(medium: str, sources: list[Path], seed: int, count: int, report: Path) -> None:
    """Damage files and read each as training and `tessera check` do.

    Any other error than UnreadableFile ends the process, as does a crash. The report has the number
    of files and the CPU time of the slowest one.
    """
    warnings.simplefilter("ignore")
    av.logging.set_level(None)
    rng = random.Random(seed)
    config, inspect_file = MEDIA[medium]
    slowest = 0.0
    folder = report.parent / "mutated"
    folder.mkdir(exist_ok=True)
    for shared in report.parent.glob("*.bin"):
        shutil.copy(shared, folder)
    for number in range(count):
        source = rng.choice(sources)
        path = folder / f"file{source.suffix}"
        path.write_bytes(mutate(source.read_bytes(), rng))
        report.write_text(f"{number} {slowest}")
        start = time.process_time()
        dataset = replace(config, path=str(path)).full(captions=False)
        with contextlib.suppress(UnreadableFile):
            read_item(dataset, 0, np.random.default_rng(0))
        with contextlib.suppress(UnreadableFile), guard_reading(path):
            inspect_file(path)
        slowest = max(slowest, time.process_time() - start)
    report.write_text(f"{count} {slowest}")


def read_report(report: Path) -> FilesRead:
    files, slowest = report.read_text().split()
    return FilesRead(int(files), float(slowest))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Damage bytes as disks, networks and attackers do."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        if not changed:
            break
        position = int(len(changed) * rng.random() ** 2)  # headers more often than data
        match rng.randrange(9):
            case 0 | 1:
                changed[position] ^= 1 << rng.randrange(8)
            case 2:
                changed[position] = rng.choice((0, 1, 8, 127, 128, 254, 255, rng.randrange(256)))
            case 3:
                number = rng.choice((0, 1, 255, 65535, 2**31 - 1, 2**31, 2**32 - 1))
                order = rng.choice((">I", "<I"))
                changed[position : position + 4] = struct.pack(order, number)
            case 4:
                del changed[position:]
            case 5:
                del changed[position : position + rng.randrange(1, 64)]
            case 6:
                chunk = changed[position : position + rng.randrange(1, 64)]
                changed[position:position] = chunk * rng.choice((1, 2, 50))
            case 7:
                noise = rng.randbytes(rng.randrange(1, 32))
                changed[position : position + len(noise)] = noise
            case _:
                digits = rng.choice((b"-1", b"0", b"99999999999", b"1e308", b"nan", b"\n" * 500))
                changed[position : position + 1] = digits
    return bytes(changed)


# ---- command lines

ODD_TEXTS = [
    *("", " ", "-1", "0", "nan", "inf", "1e400", str(2**70), "x" * 300, "~nosuch", "/", ".."),
    *("\x1b[31m", "a\nb", "\u202e", "caf\udce9", "None", "[]", "{}", "--", "../../etc", "NUL"),
]
FLAGS = (
    "--steps --batch-size --seed --data --out --data.size --precision --lr --num-workers "
    "--log-with --data.val-fraction --task.optimizer.lr --task.optimizer.eps --init-from --count "
    "--weights --prompt --samples --task.model.dim --ema.decay --top --how --medium --json --mask "
    "--max-skipped-steps --data.channels --preset --quantizer --data.rescan"
).split()
OTHER_COMMANDS = ["recipes", "demo", "import", "view", "trian", "", "--help"]
RECIPES = ("images-vqgan", "images-maskgit", "audio-codec", "meshes-tree", "image", "a:b")


def odd_command(rng: random.Random, run: Path) -> list[str]:
    """Return a command line with a few odd words; trainings have few steps.

    Most flags are those of the command, so that odd values get further than to its parser.
    """
    values = [*ODD_TEXTS, str(run), str(run / "samples"), str(run / "config.json"), "1", "2", "16"]
    command = rng.choice(
        [*3 * [name for name in COMMANDS if name not in OTHER_COMMANDS], *OTHER_COMMANDS]
    )
    if command in ("demo", "view"):
        return [command, "--medium" if command == "demo" else "--export", rng.choice(ODD_TEXTS)]
    words = [command]
    if command == "pack":
        values.remove("/")  # valid, and it takes hours
    if command == "train":
        recipe = rng.choice(RECIPES)
        words += [recipe, "--preset", "tiny", "--steps", "1", "--out", "odd-run"]
    elif rng.random() < 0.9:
        words.append(str(run) if rng.random() < 0.6 else rng.choice(values))
    own = [*FLAGS] if command in ("train", *OTHER_COMMANDS) else list_flags(command)
    for _ in range(rng.randrange(1, 4)):
        words.append(rng.choice(own if rng.random() < 0.8 else FLAGS))
        if rng.random() < 0.9:
            words.append(rng.choice(values))
    return words


def list_flags(command: str) -> list[str]:
    parameters = inspect.signature(COMMANDS[command]).parameters.values()
    return [f"--{one.name.replace('_', '-')}" for one in parameters if one.kind is one.KEYWORD_ONLY]


# ---- configurations


def mutate_config(file: Path, rng: random.Random) -> None:
    """Change some values of a configuration, its structure, or its bytes."""
    if rng.random() < 0.2:
        file.write_bytes(mutate(file.read_bytes(), rng))
        return
    content = json.loads(file.read_text())
    for _ in range(rng.choice((1, 1, 2, 5))):
        parent, key = choose_place(content, rng)
        match rng.randrange(8):
            case 0 if isinstance(parent, dict):
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[f"{key}x"] = parent.pop(key)
            case 2:
                parent[key] = [parent[key]]
            case 3:
                parent[key] = {"class": "Path", "value": parent[key]}
            case 4:
                parent[key] = rng.choice((True, False, None, [], {}, "", "x" * 200))
            case 5 if isinstance(parent[key], (int, float)):
                parent[key] = rng.choice((0, -1, 1, 2, 3, 7, 0.5, 1e308, -0.0, 2**64, 10**30))
            case _:
                parent[key] = rng.choice(
                    (3, -3, 0.1, "images-vqgan", "cache", "../..", "os:system")
                )
    file.write_text(json.dumps(content))


def choose_place(content: Any, rng: random.Random) -> tuple[Any, Any]:
    """Return a container in a JSON value, and a key of it."""
    places = [(content, key) for key in content]
    for parent, key in places:
        inner = parent[key]
        if isinstance(inner, dict):
            places += [(inner, one) for one in inner]
        elif isinstance(inner, list):
            places += [(inner, number) for number in range(len(inner))]
    return rng.choice(places)
