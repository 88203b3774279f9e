"""Render scores of four centuries to captioned audio, for music-mulan.

    python examples/scores.py OUT [--max-scores 2000] [--seconds 8]

OUT gets one FLAC per score (bach-bwv104-6.flac), 16 kHz, one channel, and metadata.jsonl with tags
and captions in several phrasings: composer, form, key, time signature, tempo and instrument. Key
and time signature are those of the score. Tempo and instrument are drawn by a generator that is
seeded with the name of the score; all parts are played by one instrument of the General MIDI bank.

The scores are those of music21 (Bach, Palestrina, Monteverdi, fiddle tunes, folk songs, quartets),
and the instruments are those of TimGM6mb, which is part of pretty_midi. This script downloads
nothing; it needs

    pip install music21 pretty_midi soundfile && pip install --no-deps tinysoundfont

Scores that cannot be read are listed and skipped. 2,000 files take about ten minutes on one core.
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
    "piano": 0,
    "harpsichord": 6,
    "music box": 10,
    "vibraphone": 11,
    "church organ": 19,
    "accordion": 21,
    "guitar": 24,
    "violin": 40,
    "cello": 42,
    "harp": 46,
    "string orchestra": 48,
    "choir": 52,
    "trumpet": 56,
    "oboe": 68,
    "clarinet": 71,
    "flute": 73,
}
"""Name -> General MIDI program number."""
TEMPOS = {"slow": 58.0, "moderate": 96.0, "fast": 160.0}
"""Name -> quarter notes per minute."""
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
MASS_PARTS = ("kyrie", "gloria", "credo", "sanctus", "benedictus", "agnus")
CHINESE_PREFIXES = ("han", "natmin", "shanxi", "xinhua")
KNOWN_COLLECTIONS = {
    "bach": ("Bach", "chorale"),
    "monteverdi": ("Monteverdi", "madrigal"),
    "trecento": ("a master of the trecento", "song"),
    "oneills1850": ("unknown hands", "Irish tune"),
    "airdsairs": ("unknown hands", "Scottish air"),
    "haydn": ("Haydn", "string quartet"),
    "mozart": ("Mozart", "string quartet"),
    "beethoven": ("Beethoven", "string quartet"),
    "josquin": ("Josquin", "motet"),
    "corelli": ("Corelli", "sonata"),
    "handel": ("Handel", "aria"),
}
"""Collection -> composer and form of its scores."""
MAX_SCORES_PER_FILE = 40
"""Some files contain hundreds of scores."""

PHRASES = (
    "{form} by {composer} in {key}, {metre} time, {tempo}, played on {instrument}",
    "a {tempo} {form} for {instrument}, {composer}, {key}",
    "{instrument} playing {a_form} at a {tempo} tempo in {key}, {metre}",
    "{tempo} {instrument} music in {key}: {a_form} ({composer})",
)


def add_article(noun: str) -> str:
    """Return "an Irish tune", but "a European folk song"."""
    return f"an {noun}" if noun[0] in "AEIOUaeiou" and not noun.startswith("Eu") else f"a {noun}"


Note = tuple[float, float, int]
"""Onset and duration in quarter notes, and MIDI pitch."""


@dataclass(frozen=True)
class Description:
    """The facts from which captions and tags are made."""

    composer: str
    form: str
    key: str
    metre: str
    tempo: str
    instrument: str

    def captions(self) -> list[str]:
        return [phrase.format(**vars(self), a_form=add_article(self.form)) for phrase in PHRASES]

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
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    parser.add_argument(
        "--max-scores",
        type=int,
        default=2000,
        help="the most scores, in equal fractions of all collections",
    )
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="how much of each score, from its beginning"
    )
    args = parser.parse_args()
    music21, pretty_midi, tinysoundfont = (
        import_required(name) for name in ("music21", "pretty_midi", "tinysoundfont")
    )
    synth = Synth(find_sound_bank(pretty_midi), tinysoundfont)
    paths = choose_files(sorted(music21.corpus.getCorePaths()), args.max_scores)
    scores = (score for path in paths for score in read_scores(path, music21.converter))
    count = write_dataset(scores, synth.play, args.out, args.max_scores, args.seconds)
    print(
        f"{count:,} audio files with captions are in {args.out}: "
        f"try `tessera train music-mulan --data {args.out}`"
    )


def import_required(name: str) -> Any:
    """Import a package, or exit with a message."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        sys.exit(
            f"This script needs {name}, which is not installed: see the beginning of the script "
            "for the packages to install."
        )


def find_sound_bank(pretty_midi: Any) -> Path:
    return Path(pretty_midi.__file__).parent / "TimGM6mb.sf2"


# ---- scores


def choose_files(paths: Sequence[Path], count: int) -> list[Path]:
    """Choose files in an order in which every prefix has the same fraction of each collection.

    The order within a collection is a hash of the file name, so that it is the same on every
    machine.
    """
    collections: dict[str, list[Path]] = {}
    for path in sorted(paths, key=lambda path: hash_text(path.name)):
        collections.setdefault(collection_name(path), []).append(path)
    fractions = [
        ((index + 0.5) / len(files), path)
        for files in collections.values()
        for index, path in enumerate(files)
    ]
    return [path for _, path in sorted(fractions)][: max(1, count)]


def collection_name(path: Path) -> str:
    """Return the folder of a score below `corpus`."""
    parts = path.parts
    return parts[parts.index("corpus") + 1] if "corpus" in parts[:-1] else path.parent.name


def read_scores(path: Path, converter: Any) -> Iterator[tuple[str, Path, Any]]:
    """Read the scores of a file: yields name, file and score.

    They are parsed from the source, never from music21's pickles.
    """
    try:
        parsed = converter.parse(path, forceSource=True, storePickle=False)
        scores = [parsed]
        if hasattr(parsed, "scores"):
            scores = list(parsed.scores)[:MAX_SCORES_PER_FILE]
    except Exception as error:  # music21 raises many kinds of exceptions for files it cannot read
        print(f"skipped {path.name}: {type(error).__name__}: {error}")
        return
    for number, score in enumerate(scores):
        stem = f"{collection_name(path)}-{path.stem}" + (
            f"-{number:03d}" if len(scores) > 1 else ""
        )
        yield sanitize(stem), path, score


def sanitize(name: str) -> str:
    """Reduce a name to a-z, 0-9 and dashes, so that it cannot be a path."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"


def composer_and_form(path: Path) -> tuple[str, str]:
    """Derive composer and form from the collection and the name of a file."""
    collection, name = collection_name(path).lower(), path.stem.lower()
    if collection == "palestrina":
        part = next((part for part in MASS_PARTS if part in name), None)
        return "Palestrina", f"{part.capitalize()} of a mass" if part else "mass movement"
    if collection == "ryansmammoth":
        return "a fiddler", next((dance for dance in DANCES if dance in name), "fiddle tune")
    if collection == "essenfolksong":
        region = "Chinese" if name.startswith(CHINESE_PREFIXES) else "European"
        return "unknown hands", f"{region} folk song"
    return KNOWN_COLLECTIONS.get(collection, (collection.replace("_", " ").title(), "piece"))


def extract_notes(score: Any) -> list[Note]:
    """Return the notes with a duration, sorted by onset, where the first onset is 0."""
    notes = [
        (float(note.offset), float(note.quarterLength), int(pitch.midi))
        for note in score.flatten().notes
        for pitch in note.pitches
        if float(note.quarterLength) > 0
    ]
    first = min((onset for onset, _, _ in notes), default=0.0)
    return sorted((onset - first, duration, pitch) for onset, duration, pitch in notes)


def describe(name: str, path: Path, score: Any) -> Description:
    """Read key and time signature from a score, and draw tempo and instrument for it."""
    rng = np.random.default_rng(hash_text(name))
    key = score.analyze("key")
    metres = [
        signature.ratioString for signature in score.flatten().getElementsByClass("TimeSignature")
    ]
    tempo, instrument = str(rng.choice(list(TEMPOS))), str(rng.choice(list(INSTRUMENTS)))
    composer, form = composer_and_form(path)
    tonic = key.tonic.name.replace("-", " flat").replace("#", " sharp")
    return Description(
        composer, form, f"{tonic} {key.mode}", metres[0] if metres else "free", tempo, instrument
    )


def hash_text(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


# ---- rendering


class Synth:
    """Plays notes with a General MIDI sound bank."""

    def __init__(self, bank: Path, tinysoundfont: Any):
        self.synth = tinysoundfont.Synth(gain=-6, samplerate=RATE_HZ)
        self.bank = self.synth.sfload(str(bank))

    def play(self, notes: Sequence[Note], description: Description, seconds: float) -> np.ndarray:
        """Render the beginning of a score, (N,) float32."""
        self.synth.sounds_off()
        self.synth.program_select(0, self.bank, 0, INSTRUMENTS[description.instrument])
        chunks, position = [], 0
        for sample, pitch, is_onset in note_events(notes, TEMPOS[description.tempo], seconds):
            if sample > position:
                chunks.append(self.render(sample - position))
                position = sample
            if is_onset:
                self.synth.noteon(0, pitch, 96)
            else:
                self.synth.noteoff(0, pitch)
        chunks.append(self.render(max(0, round(seconds * RATE_HZ) - position)))
        return np.concatenate(chunks)

    def render(self, count: int) -> np.ndarray:
        """Render the next samples: the mean of both channels, copied, since the synth reuses its
        buffer."""
        if not count:
            return np.zeros(0, np.float32)
        stereo = np.frombuffer(bytes(self.synth.generate(count)), np.float32).reshape(-1, 2)
        return stereo.mean(axis=1)


def note_events(notes: Sequence[Note], tempo: float, seconds: float) -> list[tuple[int, int, bool]]:
    """Return sample, pitch and whether the note starts there, sorted.

    Ends come before starts at the same sample, so that a repeated note is played twice.
    """
    samples_per_quarter = 60 / tempo * RATE_HZ
    last = round(seconds * RATE_HZ)
    events = []
    for onset, duration, pitch in notes:
        if onset * samples_per_quarter < last:
            start = round(onset * samples_per_quarter)
            end = min(last, max(round((onset + duration) * samples_per_quarter), start + 1))
            events += [(start, pitch, True), (end, pitch, False)]
    return sorted(events, key=lambda event: (event[0], event[2], event[1]))


# ---- files


def write_dataset(
    scores: Iterator[tuple[str, Path, Any]],
    play: Callable[[Sequence[Note], Description, float], np.ndarray],
    out: Path,
    max_scores: int,
    seconds: float,
) -> int:
    """Render at most `max_scores` scores, then write the metadata; return the number of files."""
    out.mkdir(parents=True, exist_ok=True)
    lines: dict[str, str] = {}
    for name, path, score in scores:
        if len(lines) >= max_scores:
            break
        file_name = f"{name}.flac"
        if file_name in lines:
            continue
        try:
            notes, description = extract_notes(score), describe(name, path, score)
        except Exception as error:  # as in read_scores
            print(f"skipped {name}: {type(error).__name__}: {error}")
            continue
        samples = play(notes, description, seconds)
        if np.abs(samples).max(initial=0) < 1e-3:
            print(f"skipped {name}: its first {seconds:g} seconds are silent")
            continue
        peak = max(1.0, float(np.abs(samples).max()))
        Audio((samples / peak)[None].astype(np.float32), RATE_HZ).write(out / file_name)
        entry = {
            "file_name": file_name,
            "text": description.captions(),
            "tags": description.tags(),
        }
        lines[file_name] = json.dumps(entry, ensure_ascii=False)
    (out / "metadata.jsonl").write_text(
        "".join(f"{lines[name]}\n" for name in sorted(lines)), encoding="utf-8"
    )
    return len(lines)


if __name__ == "__main__":
    main()
