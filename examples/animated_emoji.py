"""Make a folder of about 180 animated emoji with captions, for the video recipes.

    python examples/animated_emoji.py OUT

OUT gets one 256 x 256 video per emoji (1f600.mp4), and metadata.jsonl with the captions ("grinning
face"). Animations: Microsoft's Fluent emoji, MIT, from the npm package
@lobehub/fluent-emoji-anim-1. Names: emoji-datasource, MIT. npm downloads about 190 MB. Emoji
without motion are skipped, and so are variants by skin tone: they move like the original, so a
held-out variant would not be new to the model. The archives are read entry by entry, and no path in
them is used to write a file.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from emoji import SKIN_TONES, Record, build_parser, run_example, write_named

from tessera.modalities.video.io.files import probe
from tessera.modalities.video.io.writer import write_mp4
from tessera.modalities.video.media import Video

ANIMATIONS = "@lobehub/fluent-emoji-anim-1"


def main() -> None:
    run_example("animated emoji", {ANIMATIONS: write_videos}, build_parser(__doc__).parse_args())


def write_videos(archive: Path, names: dict[str, str], out: Path) -> list[Record]:
    """Write the animations that have a name; return their records."""
    return write_named(archive, names, out, write_video)


def write_video(data: bytes, stem: Path) -> Path | None:
    """Write an animation as MP4; None for an emoji with a skin tone, and for one without motion."""
    video = None if has_skin_tone(stem.name) else decode_animation(data)
    if video is None:
        return None
    file = Path(f"{stem}.mp4")
    write_mp4(video, file)
    return file


def has_skin_tone(code_point: str) -> bool:
    return any(part.upper() in SKIN_TONES for part in code_point.split("-"))


def decode_animation(data: bytes) -> Video | None:
    """Decode a WebP animation; None for a still image."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "emoji.webp"
        file.write_bytes(data)
        return None if probe(file).still else Video.load(file)


if __name__ == "__main__":
    main()
