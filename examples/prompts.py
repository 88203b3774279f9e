"""Lays out some 2,700 spoken prompts in five languages, each with its transcript, for sound recipes
to learn from.

    python examples/prompts.py OUT [--languages en it]

OUT then holds one FLAC at 16 kHz per prompt (en/digits-1.flac), metadata.jsonl with the transcripts
("one") and CREDITS.md, which names the licences. They are the prompts of the Asterisk telephone
exchange, spoken in a studio by one person a language, from the Debian packages
asterisk-core-sounds-XX-g722, and their transcripts from asterisk-core-sounds-XX: apt-get downloads
about 11 MB a language, and nothing is installed. The archives are read in memory, entry by entry,
and no path in them is ever written to. Left out are beeps, silence, and prompts without a
transcript.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import tempfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from debian import download, entries, require_tools

from tessera.data.errors import UnreadableFile
from tessera.modalities.audio.media import Audio

LICENCES = {
    "en": "CC-BY-SA-3.0",
    "es": "CC-BY-SA-3.0",
    "fr": "CC-BY-SA-3.0",
    "it": "CC-BY-SA-3.0",
    "ru": "CC-BY-3.0",
}
"""Language -> the licence of its prompts, as their packages state it."""

Entries = Iterable[tuple[PurePosixPath, bytes]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument(
        "--languages",
        nargs="+",
        choices=LICENCES,
        default=list(LICENCES),
        metavar="XX",
        help="some of them",
    )
    asked = parser.parse_args()
    require_tools("The prompts come")
    lines: list[str] = []
    for language in asked.languages:
        with tempfile.TemporaryDirectory() as folder:
            transcripts = read_transcripts(
                entries(download(f"asterisk-core-sounds-{language}", Path(folder)))
            )
            recordings = entries(download(f"asterisk-core-sounds-{language}-g722", Path(folder)))
            lines += lay_out(recordings, transcripts, language, asked.out)
    finish(lines, asked.languages, asked.out)
    print(
        f"{len(lines):,} prompts with their transcripts are in {asked.out}: try `tessera train ... --data {asked.out}`"
    )


def read_transcripts(files: Entries) -> dict[str, str]:
    """Name, as recordings are called ("digits/1"), to what is said ("one"): lines like "digits/1:
    one"; ";" is a comment."""
    transcripts: dict[str, str] = {}
    for path, data in files:
        if not path.name.startswith("core-sounds-") or not path.name.endswith((".txt", ".txt.gz")):
            continue
        for line in decoded(gzip.decompress(data) if path.suffix == ".gz" else data).splitlines():
            name, colon, text = line.partition(":")
            if colon and not name.lstrip().startswith(";") and is_speech(text):
                transcripts[name.strip()] = " ".join(text.split())
    return transcripts


def decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def is_speech(text: str) -> bool:
    """Not "[a simple beep tone]" or "(1 second of silence)"."""
    return any(letter.isalnum() for letter in re.sub(r"\[.*?\]|\(.*?\)|<.*?>", "", text))


def lay_out(
    recordings: Entries, transcripts: dict[str, str], language: str, out: Path
) -> list[str]:
    """Writes the prompts that have a transcript and can be read; gives back their lines of the
    metadata."""
    (out / language).mkdir(parents=True, exist_ok=True)
    lines: dict[str, str] = {}
    for path, data in recordings:
        prompt = prompt_name(path)
        name = f"{language}/{file_name(prompt)}"
        if path.suffix != ".g722" or prompt not in transcripts or name in lines:
            continue
        try:
            sound_of(data).write(out / name)
        except UnreadableFile as error:
            print(f"left out {name}: {error}")
            continue
        lines[name] = json.dumps(
            {"file_name": name, "text": transcripts[prompt]}, ensure_ascii=False
        )
    return [lines[name] for name in sorted(lines)]


def prompt_name(path: PurePosixPath) -> str:
    """ "usr/share/asterisk/sounds/en_US_f_Allison/digits/1.g722" is the prompt "digits/1" of that
    voice."""
    parts = path.with_suffix("").parts
    return "/".join(parts[parts.index("sounds") + 2 :] if "sounds" in parts else parts)


def file_name(prompt: str) -> str:
    """Letters, digits, dashes and underscores of the prompt's own name, and nothing else: it cannot
    lead anywhere."""
    plain = re.sub(r"[^A-Za-z0-9_]+", "-", prompt).strip("-")
    return f"{plain or 'unnamed'}.flac"


def sound_of(data: bytes) -> Audio:
    """G.722 has no header: its ending is all by which it can be known."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompt.g722"
        file.write_bytes(data)
        return Audio.load(file)


def finish(lines: list[str], languages: Iterable[str], out: Path) -> None:
    """The metadata and the credits."""
    (out / "metadata.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    credits = [
        f"- {language}: Asterisk core sounds, asterisk-core-sounds-{language} ({LICENCES[language]})"
        for language in languages
    ]
    (out / "CREDITS.md").write_text("".join(f"{line}\n" for line in credits), encoding="utf-8")


if __name__ == "__main__":
    main()
