"""Make two folders of percussive and tonal one-shots, for the codec.

    python examples/one_shots.py OUT

OUT/test gets about a tenth of the samples of Sonic Pi, and OUT/train gets the others, the drum kits
of Hydrogen and the samples of LMMS: audio files as they are (drum_cowbell.flac), metadata.jsonl
with a caption ("drum cowbell") and a kind ("drum") for each, and CREDITS.md. Loops are skipped. The
test set has no sounds of the drum kits, because a kit has the same drum at several levels. The
files are in the Debian packages sonic-pi-samples (22 MB, CC0), hydrogen-drumkits (143 MB, GPL and
CC-BY-SA) and lmms-common (8 MB, GPL): apt-get downloads them, and nothing is installed. The
archives are read in memory, and no path in them is used to write a file.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

import soundfile
from debian import check_tools, download, read_entries

from tessera.data.split import split_names

TEST_FRACTION = 0.1
SUFFIXES = (".flac", ".wav", ".aiff", ".ogg")
SKIPPED_KINDS = {"loop", "bassloops", "beats", "shapes"}
"""Loops, and single periods of oscillators."""

Entries = Iterable[tuple[PurePosixPath, bytes]]


@dataclass(frozen=True)
class OneShot:
    name: str
    """The name of its file, of a-z, 0-9 and underscores with a suffix, so that it is no path."""
    caption: str
    kind: str
    data: bytes

    @classmethod
    def describe(cls, path: PurePosixPath, data: bytes) -> OneShot:
        """Describe a file by its path; the kind is the folder, or the first word without one."""
        words = find_words(path.with_suffix("").as_posix()) or ["unnamed"]
        folder = find_words(path.parts[0]) if len(path.parts) > 1 else []
        kind = "_".join(folder) or words[0]
        return cls(f"{'_'.join(words)}{path.suffix}", " ".join(words), kind, data)


def find_words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


@dataclass(frozen=True)
class Source:
    package: str
    folder: str
    """The folder of its samples in the package."""
    credit: str

    def sounds(self, files: Entries) -> Iterator[OneShot]:
        """Return the samples that can be read."""
        for path, data in files:
            inside = path.as_posix().partition(f"/{self.folder}/")[2]
            if path.suffix not in SUFFIXES or not inside:
                continue
            sound = OneShot.describe(PurePosixPath(inside), data)
            if sound.kind in SKIPPED_KINDS:
                continue
            try:
                soundfile.info(BytesIO(data))
            except soundfile.SoundFileError as error:
                print(f"skipped {path.name}: {error}")
                continue
            yield sound


SONIC_PI = Source("sonic-pi-samples", "samples", "Samples of Sonic Pi (CC0)")
HYDROGEN = Source("hydrogen-drumkits", "drumkits", "Drum kits of Hydrogen (GPL, CC-BY-SA)")
LMMS = Source("lmms-common", "samples", "Samples of LMMS (GPL)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    args = parser.parse_args()
    check_tools()
    with tempfile.TemporaryDirectory() as folder:
        files = {
            source: read_entries(download(source.package, Path(folder)))
            for source in (SONIC_PI, HYDROGEN, LMMS)
        }
        train, test = write_sets(files, args.out)
    print(
        f"{train} one-shots are in {args.out / 'train'} and {test} in {args.out / 'test'}: "
        f"try `tessera train ... --data {args.out / 'train'}`"
    )


def write_sets(files: dict[Source, Entries], out: Path) -> tuple[int, int]:
    """Write both sets; return their numbers of sounds."""
    sounds = {source: list(source.sounds(entries)) for source, entries in files.items()}
    own = sounds.pop(SONIC_PI)
    train, test = split_names([one.name for one in own], TEST_FRACTION)
    others = [one for some in sounds.values() for one in some]
    num_train = write_one_shots([own[i] for i in train] + others, out / "train")
    num_test = write_one_shots([own[i] for i in test], out / "test")
    credits = "".join(f"- {source.credit}, {source.package}\n" for source in files)
    (out / "CREDITS.md").write_text(credits, encoding="utf-8")
    return num_train, num_test


def write_one_shots(sounds: Iterable[OneShot], out: Path) -> int:
    """Write sounds with metadata; return their number."""
    out.mkdir(parents=True, exist_ok=True)
    lines: dict[str, str] = {}
    for one in sounds:
        (out / one.name).write_bytes(one.data)
        content = {"file_name": one.name, "text": one.caption, "kind": one.kind}
        lines[one.name] = json.dumps(content)
    metadata = "".join(f"{lines[name]}\n" for name in sorted(lines))
    (out / "metadata.jsonl").write_text(metadata, encoding="utf-8")
    return len(lines)


if __name__ == "__main__":
    main()
