"""Lays out some 180 animated emoji, each with its name, as a folder that video recipes can learn
from.

    python examples/animated_emoji.py OUT

OUT then holds one 256 x 256 clip per emoji (1f600.mp4) and metadata.jsonl with the captions
("grinning face").
Animations: Microsoft's Fluent emoji, MIT, from the npm package @lobehub/fluent-emoji-anim-1. Names:
emoji-datasource, MIT. npm downloads about 190 MB. Left out are emoji that do not move, and variants
by skin tone: they move alike, so a held-out one would have been learnt from. The archives are read
entry by entry, and no path in them is ever written to.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from emoji import SKIN, make_folder, write_named

from tessera.modalities.video.io.files import probe
from tessera.modalities.video.io.writer import write_mp4
from tessera.modalities.video.media import Video

ANIMATIONS = "@lobehub/fluent-emoji-anim-1"


def main() -> None:
    make_folder("animated emoji", ANIMATIONS, lay_out, __doc__)


def lay_out(archive: Path, names: dict[str, str], out: Path) -> int:
    """Writes the animations that have a name, then the metadata; returns how many."""
    return write_named(archive, names, out, clip)


def clip(data: bytes, stem: Path) -> Path | None:
    """None for an emoji with a skin tone, and for one that does not move."""
    video = None if has_skin_tone(stem.name) else animation(data)
    if video is None:
        return None
    file = Path(f"{stem}.mp4")
    write_mp4(video, file)
    return file


def has_skin_tone(code_point: str) -> bool:
    return any(part.upper() in SKIN for part in code_point.split("-"))


def animation(data: bytes) -> Video | None:
    """The clip in these bytes; None for a still picture."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "emoji.webp"
        file.write_bytes(data)
        return None if probe(file).still else Video.load(file)


if __name__ == "__main__":
    main()
