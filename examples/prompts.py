"""Make a folder of about 2,700 spoken prompts in five languages with transcripts, for the audio
recipes.

    python examples/prompts.py OUT [--languages en it]

OUT gets one FLAC at 16 kHz per prompt (en/digits-1.flac), metadata.jsonl with the transcripts
("one"), and CREDITS.md with the licenses. They are the prompts of the Asterisk telephone exchange,
recorded in a studio with one speaker per language, from the Debian packages
asterisk-core-sounds-XX-g722, and their transcripts from asterisk-core-sounds-XX: apt-get downloads
about 11 MB per language, and nothing is installed. The archives are read in memory, and no path in
them is used to write a file. Beeps, silence, and prompts without a transcript are skipped.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from debian import check_tools, download, read_entries

from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.media import Audio

LICENSES = {
    "en": "CC-BY-SA-3.0",
    "es": "CC-BY-SA-3.0",
    "fr": "CC-BY-SA-3.0",
    "it": "CC-BY-SA-3.0",
    "ru": "CC-BY-3.0",
}
"""Language -> the license of its prompts, from the copyright file of the package."""

Entries = Iterable[tuple[PurePosixPath, bytes]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    parser.add_argument(
        "--languages",
        nargs="+",
        choices=LICENSES,
        default=list(LICENSES),
        metavar="XX",
        help=f"languages to download (default: {' '.join(LICENSES)})",
    )
    args = parser.parse_args()
    check_tools()
    lines: list[str] = []
    for language in args.languages:
        with tempfile.TemporaryDirectory() as folder:
            package = f"asterisk-core-sounds-{language}"
            transcripts = read_transcripts(read_entries(download(package, Path(folder))))
            prompts = read_entries(download(f"{package}-g722", Path(folder)))
            lines += write_prompts(prompts, transcripts, language, args.out)
    write_metadata(lines, args.languages, args.out)
    print(
        f"{len(lines):,} prompts with transcripts are in {args.out}: "
        f"try `tessera train ... --data {args.out}`"
    )


def read_transcripts(files: Entries) -> dict[str, str]:
    """Return prompt ("digits/1") -> transcript ("one").

    Lines have the form "digits/1: one"; those that start with ";" are comments.
    """
    transcripts: dict[str, str] = {}
    for path, data in files:
        if not path.name.startswith("core-sounds-") or not path.name.endswith((".txt", ".txt.gz")):
            continue
        text = decode_text(gzip.decompress(data) if path.suffix == ".gz" else data)
        for line in text.splitlines():
            name, colon, transcript = line.partition(":")
            if colon and not name.lstrip().startswith(";") and is_speech(transcript):
                transcripts[name.strip()] = " ".join(transcript.split())
    return transcripts


def decode_text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def is_speech(transcript: str) -> bool:
    """Return False for "[a simple beep tone]" or "(1 second of silence)"."""
    return any(c.isalnum() for c in re.sub(r"\[.*?\]|\(.*?\)|<.*?>", "", transcript))


def write_prompts(
    files: Entries, transcripts: dict[str, str], language: str, out: Path
) -> list[str]:
    """Write the prompts that have a transcript and can be read; return their lines of metadata."""
    (out / language).mkdir(parents=True, exist_ok=True)
    lines: dict[str, str] = {}
    for path, data in files:
        prompt = prompt_name(path)
        name = f"{language}/{file_name(prompt)}"
        if path.suffix != ".g722" or prompt not in transcripts or name in lines:
            continue
        try:
            decode_g722(data).write(out / name)
        except UnreadableFile as error:
            print(f"skipped {name}: {error}")
            continue
        lines[name] = json.dumps(
            {"file_name": name, "text": transcripts[prompt]}, ensure_ascii=False
        )
    return [lines[name] for name in sorted(lines)]


def prompt_name(path: PurePosixPath) -> str:
    """Return "digits/1" for "usr/share/asterisk/sounds/en_US_f_Allison/digits/1.g722"."""
    parts = path.with_suffix("").parts
    return "/".join(parts[parts.index("sounds") + 2 :] if "sounds" in parts else parts)


def file_name(prompt: str) -> str:
    """Build a file name of A-Z, a-z, 0-9, dashes and underscores from the name of a prompt, so that
    it cannot be a path."""
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", prompt).strip("-")
    return f"{plain or 'unnamed'}.flac"


def decode_g722(data: bytes) -> Audio:
    """Decode G.722, which has no header and is recognized by its suffix."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompt.g722"
        file.write_bytes(data)
        return Audio.load(file)


def write_metadata(lines: list[str], languages: Iterable[str], out: Path) -> None:
    """Write metadata and credits."""
    (out / "metadata.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    credits = [
        f"- {code}: Asterisk core sounds, asterisk-core-sounds-{code} ({LICENSES[code]})"
        for code in languages
    ]
    (out / "CREDITS.md").write_text("".join(f"{line}\n" for line in credits), encoding="utf-8")


if __name__ == "__main__":
    main()
