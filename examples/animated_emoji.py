"""Lays out some 180 animated emoji, each with its name, as a folder that video recipes can learn from.

    python examples/animated_emoji.py OUT

OUT then holds one 256 x 256 clip per emoji (1f600.mp4) and metadata.jsonl with the captions ("grinning face").
Animations: Microsoft's Fluent emoji, MIT, from the npm package @lobehub/fluent-emoji-anim-1. Names: emoji-datasource,
MIT. npm downloads about 190 MB. Left out are emoji that do not move, and variants by skin tone: they move alike, so a
held-out one would have been learnt from. The archives are read entry by entry, and no path in them is ever written to.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from emoji import CODE_POINT, NAMES, SKIN, download, entries, read_names, without_marks

from tessera.media.errors import Unreadable
from tessera.media.video import Video, probe, write_mp4

ANIMATIONS = "@lobehub/fluent-emoji-anim-1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    out = parser.parse_args().out
    if shutil.which("npm") is None:
        sys.exit("The emoji come as npm packages, but there is no npm on this machine: install Node.js first.")
    with tempfile.TemporaryDirectory() as folder:
        names = read_names(download(NAMES, Path(folder)))
        written = lay_out(download(ANIMATIONS, Path(folder)), names, out)
    print(f"{written:,} animated emoji with their names are in {out}: try `tessera train ... --data {out}`")


def lay_out(archive: Path, names: dict[str, str], out: Path) -> int:
    """Writes the animations that have a name, then the metadata; returns how many."""
    out.mkdir(parents=True, exist_ok=True)
    lines: dict[str, str] = {}
    for path, data in entries(archive):
        name = names.get(path.stem) or names.get(without_marks(path.stem))
        if path.suffix != ".webp" or name is None or not CODE_POINT.fullmatch(path.stem) or has_skin_tone(path.stem):
            continue
        try:
            video = animation(data)
        except Unreadable as error:
            print(f"left out {path.name}: {error}")
            continue
        if video is not None:
            file = out / f"{path.stem}.mp4"
            write_mp4(video, file)
            lines[file.name] = json.dumps({"file_name": file.name, "text": name}, ensure_ascii=False)
    (out / "metadata.jsonl").write_text("".join(f"{lines[file]}\n" for file in sorted(lines)), encoding="utf-8")
    return len(lines)


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
