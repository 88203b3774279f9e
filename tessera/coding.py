"""From examples to their codes, once, before the first step; kept in the run's folder under `cache/`.

A cache is asked for by a hash of the tokenizer, the examples' names and the marks of their files (size and time of change), so
one that is stale is simply not found. Only the main process reads examples and the disk; the others are handed the result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import track
from torch import Tensor

from tessera.data.coded import CodedSource
from tessera.data.codes import About, Codes, read_codes, write_codes
from tessera.data.draws import Source
from tessera.data.split import Split
from tessera.engine.processes import Processes
from tessera.finished import Codec
from tessera.folder import Refused

TOGETHER = 32
"""Examples that are encoded together."""


def coded(split: Split, parts: dict[str, Codec], given: str, cache: Path, meeting: Processes, say: Callable[[str], None]) -> Split:
    """Both sides of a split as codes. `given` is a folder of `tessera tokenize`, or no folder at all."""
    coder = Coder(parts, Path(given), cache, say)
    train = handed_out(lambda: coder.coded(split.train), meeting)
    if split.validation is split.train:
        return Split(train, train)
    return Split(train, handed_out(lambda: coder.coded(split.validation), meeting))


def handed_out(make: Callable[[], CodedSource], meeting: Processes) -> CodedSource:
    if meeting.processes == 1:
        return make()
    made: list[CodedSource] = []

    def describe() -> tuple[list[str], list[str]]:
        made.append(make())
        return made[0].names, made[0].captions

    names, captions = meeting.main_does(describe)
    codes = meeting.handed_out({"codes": made[0].codes} if made else None)["codes"]
    return CodedSource(names, {name: tensor.cpu() for name, tensor in codes.items()}, captions)


@dataclass
class Coder:
    parts: dict[str, Codec]
    given: Path
    cache: Path
    say: Callable[[str], None]

    def coded(self, source: Any) -> CodedSource:
        """What every tokenizer makes of a source; an example that one of them cannot read is left out."""
        made = {name: self.codes(source, codec, name) for name, codec in self.parts.items()}
        rows = {name: {example: row for row, example in enumerate(one.names)} for name, one in made.items()}
        usable = [i for i in range(len(source)) if all(source.name(i) in known for known in rows.values())]
        names = [source.name(i) for i in usable]
        codes = {name: one.codes[[rows[name][example] for example in names]].int() for name, one in made.items()}
        return CodedSource(names, codes, [source.caption(i) for i in usable])

    def codes(self, source: Any, codec: Codec, name: str) -> Codes:
        names = [source.name(i) for i in range(len(source))]
        marks = [source.mark(i) for i in range(len(source))]
        fingerprint = codec.fingerprint
        if name == "tokenizer" and (self.given / "index.json").exists():
            given = read_codes(self.given, fingerprint)
            known = dict(zip(given.names, given.marks, strict=True))
            if all(known.get(one) == mark for one, mark in zip(names, marks, strict=True)):
                return given
            self.say(f"{self.given} lacks codes of some examples, or they have changed since: they are tokenized anew.")
        key = hashlib.sha256(json.dumps([fingerprint, names, marks]).encode()).hexdigest()[:16]
        place = self.cache / f"{name}-{key}"
        if not (place / "index.json").exists():
            self.say(f"Tokenizing {len(source):,} examples, once; the codes are kept in {place}")
            about = About(fingerprint, codec.vocabulary, codec.run.recipe, codec.steps, codec.transform)
            write_codes(place, self.batches(source, codec, dict(zip(names, marks, strict=True))), about)
        return read_codes(place, fingerprint)

    def batches(self, source: Source, codec: Codec, marks: dict[str, str]) -> Iterator[tuple[list[str], list[str], Tensor]]:
        rounds = -(-len(source) // TOGETHER)
        for batch, codes in track(codec.codes_of(source, TOGETHER), description="tokenizing", total=rounds, transient=True):
            for example, reason in batch.rejected:
                self.say(f"Left out {example}: {reason}")
            yield batch.names, [marks[one] for one in batch.names], codes
