"""Add a real speaker to the folder of examples/voices.py: the English telephone prompts.

    python examples/voices.py VOICES --dev-sentences 40
    python examples/prompts.py PROMPTS --languages en
    python examples/real_voice.py PROMPTS VOICES

VOICES/test/allison gets 60 prompts of at least three words and one second, and VOICES/train/allison
the others, without those that have the sentence of a test prompt. Prompts of more than four
seconds are left out. The transcripts are added to both metadata.jsonl. The prompts are
CC-BY-SA-3.0 (PROMPTS/CREDITS.md).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import soundfile

from tessera.text.characters import normalize_text

SPEAKER, FOLDER = "allison", "en"
NUM_TEST, MIN_WORDS = 60, 3
MIN_SECONDS, MAX_SECONDS = 1.0, 4.0

Record = dict[str, str]
"""A line of metadata.jsonl."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prompts", type=Path, metavar="PROMPTS", help="of examples/prompts.py")
    parser.add_argument("voices", type=Path, metavar="VOICES", help="of examples/voices.py")
    args = parser.parse_args()
    for folder in (args.prompts, args.voices / "train", args.voices / "test"):
        if not (folder / "metadata.jsonl").is_file():
            sys.exit(
                f"{folder} has no metadata.jsonl: run examples/prompts.py and voices.py first."
            )
    train, test = choose_prompts(args.prompts)
    for part, records in (("train", train), ("test", test)):
        add_speaker(args.prompts, records, args.voices / part)
    print(f"{len(train)} and {len(test)} prompts are in {args.voices}/train and test")


def choose_prompts(prompts: Path) -> tuple[list[Record], list[Record]]:
    """Return the prompts to train on and those to test with."""
    records = [
        record
        for record in read_records(prompts)
        if record["file_name"].startswith(f"{FOLDER}/") and seconds(prompts, record) <= MAX_SECONDS
    ]
    candidates = [
        record
        for record in records
        if len(record["text"].split()) >= MIN_WORDS and seconds(prompts, record) >= MIN_SECONDS
    ]
    test = sorted(candidates, key=hash_record)[:NUM_TEST]
    sentences = {normalize_text(record["text"]) for record in test}
    train = [record for record in records if normalize_text(record["text"]) not in sentences]
    return train, test


def read_records(folder: Path) -> list[Record]:
    lines = (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def seconds(prompts: Path, record: Record) -> float:
    return soundfile.info(prompts / record["file_name"]).duration


def hash_record(record: Record) -> str:
    """Return a key that puts prompts in an arbitrary order, which depends on their names alone."""
    return hashlib.sha256(f"tts{record['file_name']}".encode()).hexdigest()


def add_speaker(prompts: Path, records: Sequence[Record], out: Path) -> None:
    """Copy prompts to a folder of voices, and add their transcripts."""
    (out / SPEAKER).mkdir(exist_ok=True)
    added = {}
    for record in records:
        name = f"{SPEAKER}/{Path(record['file_name']).name}"
        shutil.copyfile(prompts / record["file_name"], out / name)
        added[name] = record["text"]
    others = [record for record in read_records(out) if record["file_name"] not in added]
    every = others + [{"file_name": name, "text": text} for name, text in added.items()]
    lines = "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in every)
    (out / "metadata.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main()
