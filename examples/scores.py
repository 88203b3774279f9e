"""Renders scores of four centuries to captioned clips, for music-mulan to learn from.

    python examples/scores.py OUT [--most 2000] [--seconds 8]

OUT then holds one FLAC per score (bach-bwv104-6.flac), 16 kHz, one channel, and metadata.jsonl with
captions in several phrasings and tags: who composed it, what it is, in which key and metre, and how
it is played here, at which tempo and on what. Key and metre are the score's own. Tempo and
instrument are drawn, from a generator seeded with the score's name: all parts are played on one
instrument of the General MIDI bank.

The scores are those that come with music21 (Bach, Palestrina, Monteverdi, fiddle tunes, folk songs,
quartets), the sounds those of TimGM6mb, which comes with pretty_midi. Nothing is downloaded by this
script; it needs

    pip install music21 pretty_midi soundfile && pip install --no-deps tinysoundfont

What cannot be read is named and left out. 2,000 clips take some ten minutes on one core.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tessera.modalities.audio.media import Audio

RATE_HZ = 16_000
INSTRUMENTS = {
    "piano": 0, "harpsichord": 6, "music box": 10, "vibraphone": 11, "church organ": 19, "accordion": 21, "guitar": 24,
    "violin": 40, "cello": 42, "harp": 46, "string orchestra": 48, "choir": 52, "trumpet": 56, "oboe": 68, "clarinet": 71,
    "flute": 73,
}  # fmt: skip
"""By the number that General MIDI has for them."""
TEMPOS = {"slow": 58.0, "moderate": 96.0, "fast": 160.0}
"""Quarter notes a minute."""
DANCES = (
    "jig",
    "reel",
    "hornpipe",
    "clog",
    "strathspey",
    "waltz",
    "polka",
    "march",
    "breakdown",
    "fling",
)
MASS = ("kyrie", "gloria", "credo", "sanctus", "benedictus", "agnus")
CHINESE = ("han", "natmin", "shanxi", "xinhua")
MOST_OF_A_BOOK = 40
"""Scores that are taken of one file which holds hundreds."""

PHRASES = (
    "{form} by {composer} in {key}, {metre} time, {tempo}, played on {instrument}",
    "a {tempo} {form} for {instrument}, {composer}, {key}",
    "{instrument} playing {a_form} at a {tempo} tempo in {key}, {metre}",
    "{tempo} {instrument} music in {key}: {a_form} ({composer})",
)


def with_article(noun: str) -> str:
    """an Irish tune, a European one."""
    return f"an {noun}" if noun[0] in "AEIOUaeiou" and not noun.startswith("Eu") else f"a {noun}"


Note = tuple[float, float, int]
"""When it begins and how long it lasts, in quarter notes, and its MIDI number."""


@dataclass(frozen=True)
class Facts:
    """What is said about a clip."""

    composer: str
    form: str
    key: str
    metre: str
    tempo: str
    instrument: str

    def captions(self) -> list[str]:
        return [phrase.format(**vars(self), a_form=with_article(self.form)) for phrase in PHRASES]

    def tags(self) -> list[str]:
        mode = self.key.split()[-1]
        return [
            self.instrument,
            self.tempo,
            f"{mode} key",
            self.form,
            self.composer,
            f"{self.metre} time",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to make")
    parser.add_argument(
        "--most", type=int, default=2000, help="so many scores, drawn evenly from all"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of each, from its beginning")
    asked = parser.parse_args()
    music21, synth = (
        required("music21"),
        Synth(bank_of(required("pretty_midi")), required("tinysoundfont")),
    )
    paths = chosen(sorted(music21.corpus.getCorePaths()), asked.most)
    scores = (found for path in paths for found in scores_in(path, music21.converter))
    written = lay_out(scores, synth.play, asked.out, asked.most, asked.seconds)
    print(
        f"{written:,} clips with their captions are in {asked.out}: try `tessera train music-mulan --data {asked.out}`"
    )


def required(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        sys.exit(
            f"Scores are rendered with {name}, which is not installed: see the first lines of this script for what to install."
        )


def bank_of(pretty_midi: Any) -> Path:
    return Path(pretty_midi.__file__).parent / "TimGM6mb.sf2"


# ---- scores


def chosen(paths: Sequence[Path], most: int) -> list[Path]:
    """About as many as are asked for, in an order in which every collection comes early; the same
    for every machine."""
    by_chance = sorted(paths, key=lambda path: number_of(path.name))
    homes: dict[str, list[Path]] = {}
    for path in by_chance:
        homes.setdefault(collection_of(path), []).append(path)
    shares = [
        ((place + 0.5) / len(members), path)
        for members in homes.values()
        for place, path in enumerate(members)
    ]  # of each collection the same share comes before any point
    return [path for _, path in sorted(shares)][: max(1, most)]


def collection_of(path: Path) -> str:
    """The folder below `corpus` that a score lies in."""
    parts = path.parts
    return parts[parts.index("corpus") + 1] if "corpus" in parts[:-1] else path.parent.name


def scores_in(path: Path, converter: Any) -> Iterator[tuple[str, Path, Any]]:
    """Name, file and score; of a book of many the first some. Read from their source, never from
    music21's pickles."""
    try:
        found = converter.parse(path, forceSource=True, storePickle=False)
        scores = list(found.scores)[:MOST_OF_A_BOOK] if hasattr(found, "scores") else [found]
    except (
        Exception
    ) as error:  # it meets what it cannot read with nearly every kind of exception there is
        print(f"left out {path.name}: {type(error).__name__}: {error}")
        return
    for number, score in enumerate(scores):
        stem = f"{collection_of(path)}-{path.stem}" + (f"-{number:03d}" if len(scores) > 1 else "")
        yield plain(stem), path, score


def plain(name: str) -> str:
    """Letters, digits and dashes: it cannot lead anywhere."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"


def form_of(path: Path) -> tuple[str, str]:
    """Who it is by, and what it is, as the collection and the file's name tell."""
    collection, name = collection_of(path).lower(), path.stem.lower()
    if collection == "palestrina":
        part = next((part for part in MASS if part in name), None)
        return "Palestrina", f"{part.capitalize()} of a mass" if part else "mass movement"
    if collection == "ryansmammoth":
        return "a fiddler", next((dance for dance in DANCES if dance in name), "fiddle tune")
    if collection == "essenfolksong":
        return "unknown hands", "Chinese folk song" if name.startswith(
            CHINESE
        ) else "European folk song"
    known = {
        "bach": ("Bach", "chorale"), "monteverdi": ("Monteverdi", "madrigal"), "trecento": ("a master of the trecento", "song"),
        "oneills1850": ("unknown hands", "Irish tune"), "airdsairs": ("unknown hands", "Scottish air"),
        "haydn": ("Haydn", "string quartet"), "mozart": ("Mozart", "string quartet"),
        "beethoven": ("Beethoven", "string quartet"),
        "josquin": ("Josquin", "motet"), "corelli": ("Corelli", "sonata"), "handel": ("Handel", "aria"),
    }  # fmt: skip
    return known.get(collection, (collection.replace("_", " ").title(), "piece"))


def notes_of(score: Any) -> list[Note]:
    """Those that are heard, in the order of their beginnings, from the first of them on."""
    heard = [
        (float(note.offset), float(note.quarterLength), int(pitch.midi))
        for note in score.flatten().notes
        for pitch in note.pitches
        if float(note.quarterLength) > 0
    ]
    first = min((offset for offset, _, _ in heard), default=0.0)
    return sorted((offset - first, length, pitch) for offset, length, pitch in heard)


def facts_of(name: str, path: Path, score: Any) -> Facts:
    draw = np.random.default_rng(number_of(name))
    key = score.analyze("key")
    metres = [
        signature.ratioString for signature in score.flatten().getElementsByClass("TimeSignature")
    ]
    tempo, instrument = str(draw.choice(list(TEMPOS))), str(draw.choice(list(INSTRUMENTS)))
    composer, form = form_of(path)
    tonic = key.tonic.name.replace("-", " flat").replace("#", " sharp")
    return Facts(
        composer, form, f"{tonic} {key.mode}", metres[0] if metres else "free", tempo, instrument
    )


def number_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


# ---- sounds


class Synth:
    """A General MIDI bank that plays."""

    def __init__(self, bank: Path, tinysoundfont: Any):
        self.synth = tinysoundfont.Synth(gain=-6, samplerate=RATE_HZ)
        self.bank = self.synth.sfload(str(bank))

    def play(self, notes: Sequence[Note], facts: Facts, seconds: float) -> np.ndarray:
        """(N,) float32"""
        self.synth.sounds_off()
        self.synth.program_select(0, self.bank, 0, INSTRUMENTS[facts.instrument])
        pieces, at = [], 0
        for sample, pitch, begins in events(notes, TEMPOS[facts.tempo], seconds):
            if sample > at:
                pieces.append(self.heard(sample - at))
                at = sample
            if begins:
                self.synth.noteon(0, pitch, 96)
            else:
                self.synth.noteoff(0, pitch)
        pieces.append(self.heard(max(0, round(seconds * RATE_HZ) - at)))
        return np.concatenate(pieces)

    def heard(self, count: int) -> np.ndarray:
        """The mean of both channels, copied: the synth writes into the same place again."""
        both = (
            np.frombuffer(bytes(self.synth.generate(count)), np.float32).reshape(-1, 2)
            if count
            else np.zeros((0, 2), np.float32)
        )
        return both.mean(axis=1)


def events(
    notes: Sequence[Note], quarters_a_minute: float, seconds: float
) -> list[tuple[int, int, bool]]:
    """Sample, pitch and whether the note begins there; ends come before beginnings, so that a
    repeated note is heard twice."""
    samples = 60 / quarters_a_minute * RATE_HZ
    last = round(seconds * RATE_HZ)
    found = []
    for offset, length, pitch in notes:
        if offset * samples < last:
            found.append((round(offset * samples), pitch, True))
            found.append(
                (
                    min(last, max(round((offset + length) * samples), round(offset * samples) + 1)),
                    pitch,
                    False,
                )
            )
    return sorted(found, key=lambda event: (event[0], event[2], event[1]))


# ---- files


def lay_out(
    scores: Iterator[tuple[str, Path, Any]], play: Callable[[Sequence[Note], Facts, float], np.ndarray], out: Path, most: int,
    seconds: float,
) -> int:  # fmt: skip
    """Writes clips until there are `most`, then the metadata; returns how many."""
    out.mkdir(parents=True, exist_ok=True)
    lines: dict[str, str] = {}
    for name, path, score in scores:
        if len(lines) >= most:
            break
        if f"{name}.flac" in lines:
            continue
        try:
            notes, facts = notes_of(score), facts_of(name, path, score)
        except Exception as error:  # as above
            print(f"left out {name}: {type(error).__name__}: {error}")
            continue
        sound = play(notes, facts, seconds)
        if np.abs(sound).max(initial=0) < 1e-3:
            print(f"left out {name}: nothing is heard in its first {seconds:g} seconds")
            continue
        peak = max(1.0, float(np.abs(sound).max()))
        Audio((sound / peak)[None].astype(np.float32), RATE_HZ).write(out / f"{name}.flac")
        said = {"file_name": f"{name}.flac", "text": facts.captions(), "tags": facts.tags()}
        lines[f"{name}.flac"] = json.dumps(said, ensure_ascii=False)
    (out / "metadata.jsonl").write_text(
        "".join(f"{lines[name]}\n" for name in sorted(lines)), encoding="utf-8"
    )
    return len(lines)


if __name__ == "__main__":
    main()
