"""`check` of whatever a folder holds: the medium that most of its files are of.

GIFs, which can be pictures or clips, count for neither; a folder of nothing but these is looked through as pictures.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

from tessera.data import check_images, check_meshes, check_sounds, check_videos
from tessera.data.checks import Report
from tessera.data.folders import scan
from tessera.media import mesh_files, sound_files
from tessera.media.video_files import FILMS, PICTURES

Medium = Literal["image", "video", "sound", "mesh"]

CHECKS: dict[Medium, Callable[[str], Report]] = {
    "image": check_images.check,
    "video": check_videos.check,
    "sound": check_sounds.check,
    "mesh": check_meshes.check,
}
OWN_ENDINGS: dict[Medium, tuple[str, ...]] = {
    "image": PICTURES,
    "video": FILMS,
    "sound": sound_files.RECORDINGS,
    "mesh": mesh_files.ENDINGS,
}


def check(path: str, medium: Medium | None = None) -> Report:
    """Looks through all files of the medium, or of the one that most files are of. No file at all is Refused."""
    return CHECKS[medium or medium_of(path)](path)


def medium_of(path: str) -> Medium:
    root = Path(path).expanduser()
    names = [name.lower() for name in (scan(root) if root.is_dir() else [root.name])]
    return max(OWN_ENDINGS, key=lambda medium: sum(name.endswith(OWN_ENDINGS[medium]) for name in names))
