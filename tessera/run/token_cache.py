"""From examples to their codes, once, before the first step; kept in the run's folder under `cache/`.

A cache is asked for by a hash of the tokenizer, the examples' names and the marks of their files (size and time of change), so
one that is stale is simply not found. Only the main process reads examples and the disk; the others are handed the result.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from tessera.data.dataset import Some, Split, sayings
from tessera.data.tokens import About, CodedSource, read_codes, write_codes
from tessera.engine.distributed import Processes
from tessera.engine.evaluation import NOTHING_HELD_OUT
from tessera.run.directory import Refused
from tessera.run.load import Codec

NOTHING_TO_LEARN = "Not one example could be read, so there is nothing to learn from. `tessera check` tells why."
TOGETHER = 32
"""Examples that are encoded together."""


def coded(
    split: Split, parts: dict[str, Codec], given: Path | None, cache: Path, meeting: Processes, say: Callable[[str], None]
) -> Split:
    """Both sides of a split as codes. `given` is a folder that `tessera tokenize` wrote."""
    coder = Coder(parts, given, cache, say)
    train = handed_out(lambda: coder.coded(split.train, NOTHING_TO_LEARN), meeting)
    if split.validation is split.train:
        return Split(train, train)
    return Split(train, handed_out(lambda: coder.coded(split.validation, NOTHING_HELD_OUT), meeting))


def handed_out(make: Callable[[], CodedSource], meeting: Processes) -> CodedSource:
    if meeting.processes == 1:
        return make()
    made: list[CodedSource] = []

    def describe() -> tuple[list[str], list[str], dict[int, list[str]]]:
        made.append(make())
        return made[0].names, made[0].captions, made[0].sayings_by_index

    names, captions, several = meeting.main_does(describe)
    codes = meeting.handed_out({"codes": made[0].codes} if made else None)["codes"]
    return CodedSource(names, {name: tensor.cpu() for name, tensor in codes.items()}, captions, several)


@dataclass
class Coder:
    parts: dict[str, Codec]
    given: Path | None
    cache: Path
    say: Callable[[str], None]

    def coded(self, source: Any, if_none: str) -> CodedSource:
        """What every tokenizer makes of a source; an example that one of them cannot read is left out. Where all are, the run
        ends with that sentence."""
        made = {name: self.rows(source, codec, name) for name, codec in self.parts.items()}
        usable = [i for i in range(len(source)) if all(source.name(i) in rows for rows in made.values())]
        names = [source.name(i) for i in usable]
        if not names:
            raise Refused(if_none)
        codes = {part: torch.stack([rows[name] for name in names]) for part, rows in made.items()}
        captions = [source.caption(i) for i in usable]
        several = {place: said for place, i in enumerate(usable) if len(said := sayings(source, i)) > 1}
        return CodedSource(names, codes, captions, several)

    def rows(self, source: Any, codec: Codec, name: str) -> dict[str, Tensor]:
        """The codes of each example that can be read: those given, and for the rest those of the cache."""
        fingerprint = codec.fingerprint
        have = self.given_rows(source, codec, fingerprint) if name == "tokenizer" and self.given is not None else {}
        missing = Some(source, [i for i in range(len(source)) if source.name(i) not in have])
        if len(missing) == 0:
            return have
        names, marks = [[ask(i) for i in range(len(missing))] for ask in (missing.name, missing.mark)]
        key = hashlib.sha256(json.dumps([fingerprint, names, marks]).encode()).hexdigest()[:16]
        return have | self.cached_rows(missing, codec, fingerprint, self.cache / f"{name}-{key}")

    def given_rows(self, source: Any, codec: Codec, fingerprint: str) -> dict[str, Tensor]:
        """What `tessera tokenize` wrote of these examples, if they have not changed since."""
        assert self.given is not None
        given = read_codes(self.given, fingerprint)
        marks = {source.name(i): source.mark(i) for i in range(len(source))}
        rows = zip(given.names, given.marks, given.codes, strict=True)
        have = {name: row for name, mark, row in rows if marks.get(name) == mark}
        if any(row.shape[: len(codec.grid)] != codec.grid for row in have.values()):
            met = tuple(next(iter(have.values())).shape)
            raise Refused(
                f"The codes in {self.given} are {met} for each example, but this run's examples become {codec.grid}: tokenize "
                "examples of the same length, or let this run do it (--task.codes cache)."
            )
        if len(have) < len(source):
            self.say(f"{self.given} has {len(have):,} of {len(source):,} examples as they are now; the rest is tokenized here.")
        return have

    def cached_rows(self, source: Some, codec: Codec, fingerprint: str, place: Path) -> dict[str, Tensor]:
        """From the cache; one that is not there, or damaged, is made."""
        try:
            found = read_codes(place, fingerprint)
        except Refused:
            shutil.rmtree(place, ignore_errors=True)
            self.say(f"Tokenizing {len(source):,} examples, once; the codes are kept in {place}")
            about = About(fingerprint, codec.vocabulary, codec.run.recipe, codec.steps, codec.transform)
            if not write_codes(place, self.batches(source, codec), about):
                return {}
            found = read_codes(place, fingerprint)
        return dict(zip(found.names, found.codes, strict=True))

    def batches(self, source: Some, codec: Codec) -> Iterator[tuple[list[str], list[str], Tensor]]:
        marks = {source.name(i): source.mark(i) for i in range(len(source))}
        rounds = -(-len(source) // TOGETHER)
        for batch, codes in track(codec.codes_of(source, TOGETHER), description="tokenizing", total=rounds, transient=True):
            for example, reason in batch.rejected:
                self.say(f"Left out {example}: {reason}")
            yield batch.names, [marks[one] for one in batch.names], codes
