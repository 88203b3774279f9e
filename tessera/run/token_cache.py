"""From examples to their codes, once, before the first step; kept in the run's folder under
`cache/`.

A cache is asked for by a hash of the tokenizer, the examples' names and the marks of their files
(size and time of change), so one that is stale is simply not found. Only the main process reads
examples and the disk; the others are handed the result.
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

from tessera.data.dataset import Split, Subset, all_captions
from tessera.data.tokens import TokenDataset, TokensInfo, read_tokens_dir, write_tokens
from tessera.engine.distributed import Distributed
from tessera.engine.evaluation import NOTHING_HELD_OUT
from tessera.run.directory import UserError
from tessera.run.load import Tokenizer

NOTHING_TO_LEARN = (
    "Not one example could be read, so there is nothing to learn from. `tessera check` tells why."
)
TOGETHER = 32
"""Examples that are encoded together."""


def tokenize_dataset(
    split: Split,
    parts: dict[str, Tokenizer],
    given: Path | None,
    cache: Path,
    dist: Distributed,
    say: Callable[[str], None],
) -> Split:
    """Both sides of a split as codes. `given` is a folder that `tessera tokenize` wrote."""
    coder = Coder(parts, given, cache, say)
    train = handed_out(lambda: coder.tokenize_dataset(split.train, NOTHING_TO_LEARN), dist)
    if split.validation is split.train:
        return Split(train, train)
    return Split(
        train, handed_out(lambda: coder.tokenize_dataset(split.validation, NOTHING_HELD_OUT), dist)
    )


def handed_out(make: Callable[[], TokenDataset], dist: Distributed) -> TokenDataset:
    if dist.world_size == 1:
        return make()
    made: list[TokenDataset] = []

    def describe() -> tuple[list[str], list[str], dict[int, list[str]]]:
        made.append(make())
        return made[0].names, made[0].captions, made[0].captions_by_index

    names, captions, several = dist.on_main(describe)
    codes = dist.broadcast_tensors({"codes": made[0].codes} if made else None)["codes"]
    return TokenDataset(
        names, {name: tensor.cpu() for name, tensor in codes.items()}, captions, several
    )


@dataclass
class Coder:
    parts: dict[str, Tokenizer]
    given: Path | None
    cache: Path
    say: Callable[[str], None]

    def tokenize_dataset(self, dataset: Any, if_none: str) -> TokenDataset:
        """What every tokenizer makes of a source; an example that one of them cannot read is left
        out. Where all are, the run ends with that sentence."""
        made = {name: self.rows(dataset, codec, name) for name, codec in self.parts.items()}
        usable = [
            i for i in range(len(dataset)) if all(dataset.name(i) in rows for rows in made.values())
        ]
        names = [dataset.name(i) for i in usable]
        if not names:
            raise UserError(if_none)
        codes = {part: torch.stack([rows[name] for name in names]) for part, rows in made.items()}
        captions = [dataset.caption(i) for i in usable]
        several = {
            place: said
            for place, i in enumerate(usable)
            if len(said := all_captions(dataset, i)) > 1
        }
        return TokenDataset(names, codes, captions, several)

    def rows(self, dataset: Any, codec: Tokenizer, name: str) -> dict[str, Tensor]:
        """The codes of each example that can be read: those given, and for the rest those of the
        cache."""
        fingerprint = codec.fingerprint
        have = (
            self.given_rows(dataset, codec, fingerprint)
            if name == "tokenizer" and self.given is not None
            else {}
        )
        missing = Subset(dataset, [i for i in range(len(dataset)) if dataset.name(i) not in have])
        if len(missing) == 0:
            return have
        names, signatures = [
            [ask(i) for i in range(len(missing))] for ask in (missing.name, missing.signature)
        ]
        key = hashlib.sha256(json.dumps([fingerprint, names, signatures]).encode()).hexdigest()[:16]
        return have | self.cached_rows(missing, codec, fingerprint, self.cache / f"{name}-{key}")

    def given_rows(self, dataset: Any, codec: Tokenizer, fingerprint: str) -> dict[str, Tensor]:
        """What `tessera tokenize` wrote of these examples, if they have not changed since."""
        assert self.given is not None
        given = read_tokens_dir(self.given, fingerprint)
        signatures = {dataset.name(i): dataset.signature(i) for i in range(len(dataset))}
        rows = zip(given.names, given.signatures, given.codes, strict=True)
        have = {name: row for name, signature, row in rows if signatures.get(name) == signature}
        if any(row.shape[: len(codec.grid)] != codec.grid for row in have.values()):
            met = tuple(next(iter(have.values())).shape)
            raise UserError(
                f"The codes in {self.given} are {met} for each example, but this run's examples become {codec.grid}: tokenize "
                "examples of the same length, or let this run do it (--task.tokens cache)."
            )
        if len(have) < len(dataset):
            self.say(
                f"{self.given} has {len(have):,} of {len(dataset):,} examples as they are now; the rest is tokenized here."
            )
        return have

    def cached_rows(
        self, dataset: Subset, codec: Tokenizer, fingerprint: str, place: Path
    ) -> dict[str, Tensor]:
        """From the cache; one that is not there, or damaged, is made."""
        try:
            found = read_tokens_dir(place, fingerprint)
        except UserError:
            shutil.rmtree(place, ignore_errors=True)
            self.say(f"Tokenizing {len(dataset):,} examples, once; the codes are kept in {place}")
            about = TokensInfo(
                fingerprint, codec.vocab_size, codec.run.recipe, codec.steps, codec.preprocessing
            )
            if not write_tokens(place, self.batches(dataset, codec), about):
                return {}
            found = read_tokens_dir(place, fingerprint)
        return dict(zip(found.names, found.codes, strict=True))

    def batches(
        self, dataset: Subset, codec: Tokenizer
    ) -> Iterator[tuple[list[str], list[str], Tensor]]:
        signatures = {dataset.name(i): dataset.signature(i) for i in range(len(dataset))}
        decoding_steps = -(-len(dataset) // TOGETHER)
        for batch, codes in track(
            codec.codes_of(dataset, TOGETHER),
            description="tokenizing",
            total=decoding_steps,
            transient=True,
        ):
            for example, reason in batch.rejected:
                self.say(f"Left out {example}: {reason}")
            yield batch.names, [signatures[one] for one in batch.names], codes
