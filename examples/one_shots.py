"""Make a folder of about 150 percussive and tonal one-shots, for the codec.

    python examples/one_shots.py OUT

OUT gets the samples of Sonic Pi as FLAC files at their own rate (drum_cowbell.flac), metadata.jsonl
with a caption ("drum cowbell") and a kind ("drum") for each, and CREDITS.md. They are in the Debian
package sonic-pi-samples (22 MB, CC0): apt-get downloads it, and nothing is installed. The archive
is read in memory, and no path in it is used to write a file. Loops are skipped.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path, PurePosixPath

import soundfile
from debian import check_tools, download, read_entries

PACKAGE = "sonic-pi-samples"
SKIPPED_KINDS = {"loop"}
NAME = re.compile(r"[a-z0-9_]+")

Entries = Iterable[tuple[PurePosixPath, bytes]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    args = parser.parse_args()
    check_tools()
    with tempfile.TemporaryDirectory() as folder:
        count = write_one_shots(read_entries(download(PACKAGE, Path(folder))), args.out)
    print(f"{count} one-shots are in {args.out}: try `tessera train ... --data {args.out}`")


def write_one_shots(files: Entries, out: Path) -> int:
    """Write the samples that can be read, with metadata and credits; return their number."""
    out.mkdir(parents=True, exist_ok=True)
    lines: dict[str, str] = {}
    for path, data in files:
        kind = path.stem.partition("_")[0]
        if path.suffix != ".flac" or not NAME.fullmatch(path.stem) or kind in SKIPPED_KINDS:
            continue
        try:
            soundfile.info(BytesIO(data))
        except soundfile.SoundFileError as error:
            print(f"skipped {path.name}: {error}")
            continue
        (out / f"{path.stem}.flac").write_bytes(data)
        content = {
            "file_name": f"{path.stem}.flac",
            "text": path.stem.replace("_", " "),
            "kind": kind,
        }
        lines[path.stem] = json.dumps(content)
    metadata = "".join(f"{lines[name]}\n" for name in sorted(lines))
    (out / "metadata.jsonl").write_text(metadata, encoding="utf-8")
    (out / "CREDITS.md").write_text(f"- Samples of Sonic Pi, {PACKAGE} (CC0)\n", encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    main()
