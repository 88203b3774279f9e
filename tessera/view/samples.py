"""The samples of a run: those of its steps, and those that a command or the playground made."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tessera.run.directory import Json
from tessera.view.runs import FoundRun

MEDIA_TYPES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
    ".gif": "image/gif",
    ".mp4": "video/mp4",
    ".wav": "audio/wav",
    ".flac": "audio/flac",
    ".ogg": "audio/ogg",
    ".mp3": "audio/mpeg",
    ".obj": "text/plain; charset=utf-8",
    ".glb": "model/gltf-binary",
    ".ply": "application/octet-stream",
    ".stl": "application/octet-stream",
    ".txt": "text/plain; charset=utf-8",
    ".json": "application/json",
}
"""The files of a run that are served, and how. SVG and HTML, which can run scripts, are not."""

SHOWN_SUFFIXES = {
    "image": (".png",),
    "video": (".mp4", ".gif"),
    "audio": (".wav",),
    "music": (".wav", ".png"),
    "mesh": (".obj", ".glb"),
}
"""Modality -> the suffixes that are shown, the preferred one first."""

REQUEST_FILE = "request.json"
"""Beside settings.json in a folder that the playground made: how it was made."""


def list_steps(run: FoundRun) -> list[Json]:
    """Return the samples of each step, in order."""
    return [
        describe_folder(run, folder)
        for folder in list_folders(run.directory.samples)
        if folder.name.isdigit()
    ]


def list_history(run: FoundRun) -> list[Json]:
    """Return the samples that commands and the playground made, the newest first."""
    folders = [one for one in list_folders(run.directory.samples) if one.name.startswith("by-hand")]
    found = [describe_folder(run, folder) for folder in folders]
    return sorted(found, key=lambda one: -one["modified"])


def list_folders(folder: Path) -> list[Path]:
    try:
        return sorted(one for one in folder.iterdir() if one.is_dir() and one.name[0] != ".")
    except OSError:
        return []


def describe_folder(run: FoundRun, folder: Path) -> Json:
    """Return the files of a folder of samples with their labels."""
    try:
        names = sorted(one.name for one in folder.iterdir() if one.is_file())
        modified = folder.stat().st_mtime
    except OSError:
        names, modified = [], 0.0
    settings = read_object(folder / "settings.json")
    labels = find_labels(settings)
    samples = describe_whole_files(run, folder, settings)
    numbers = sorted({int(name[:4]) for name in names if re.match(r"\d{4}\.", name)})
    for number in numbers:
        files = [name for name in names if name.startswith(f"{number:04d}.")]
        label = labels[number] if number < len(labels) else f"{number}"
        samples.append({"label": label, "files": files, "shown": choose_shown(run, files)})
    return {
        "name": folder.name,
        "step": int(folder.name) if folder.name.isdigit() else settings.get("step"),
        "samples": samples,
        "sheet": "sheet.png" if "sheet.png" in names else None,
        "settings": settings,
        "request": read_object(folder / REQUEST_FILE),
        "tokens": read_object(folder / "tokens.json"),
        "hits": read_object(folder / "hits.json"),
        "modified": modified,
    }


def describe_whole_files(run: FoundRun, folder: Path, settings: Json) -> list[Json]:
    """Return the files that a codec reconstructed, which have the names of their originals."""
    files, labels = settings.get("files"), find_labels(settings)
    if not isinstance(files, list) or len(files) != len(labels):
        return []
    written = [str(name) for name in files]
    return [
        {"label": label, "files": [name], "shown": choose_shown(run, [name])}
        for name, label in zip(written, labels, strict=True)
        if (folder / name).is_file()
    ]


def choose_shown(run: FoundRun, files: list[str]) -> str:
    suffixes = SHOWN_SUFFIXES.get(run.read_info().modality, ())
    for suffix in suffixes:
        for name in files:
            if name.endswith(suffix):
                return name
    return files[0]


def find_labels(settings: Json) -> list[str]:
    """Return the prompts of samples, or the names of the examples that they were made from."""
    for name in ("prompts", "captions", "examples", "names"):
        found = settings.get(name)
        if isinstance(found, list) and any(found):
            return [str(one) for one in found]
    return []


def read_object(path: Path) -> Json:
    """Return a JSON object, or an empty one if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
