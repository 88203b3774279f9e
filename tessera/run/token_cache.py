"""Tokenize a dataset once, before the first step; the codes are kept in the run directory.

The name of a cache is a hash of the tokenizer, the names of the examples and their signatures (size
and modification time), so a stale cache is never found. Only the main process reads examples; the
others receive the codes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from tessera.api.tokenizer import Tokenizer
from tessera.data.dataset import ExampleDataset, Split, Subset
from tessera.data.errors import UnreadableFile
from tessera.data.tokens import TokenDataset, read_tokens, write_tokens
from tessera.engine.distributed import Distributed
from tessera.engine.evaluation import NOTHING_HELD_OUT
from tessera.run.errors import UserError

NOTHING_TO_TRAIN_ON = (
    "No example could be read, so there is nothing to train on. `tessera check` shows the reasons."
)
BATCH_SIZE = 32
"""The number of examples that are encoded together."""


@dataclass
class TokenCache:
    tokenizers: dict[str, Tokenizer]
    given: Path | None
    """A folder that `tessera tokenize` wrote, or None."""
    folder: Path
    dist: Distributed
    notify: Callable[[str], None]

    def tokenize_split(self, split: Split) -> Split:
        train = self.broadcast(split.train, NOTHING_TO_TRAIN_ON)
        if split.validation is split.train:
            return Split(train, train)
        return Split(train, self.broadcast(split.validation, NOTHING_HELD_OUT))

    def broadcast(self, dataset: ExampleDataset, if_empty: str) -> TokenDataset:
        """Tokenize on the main process and send the result to all others."""
        if self.dist.world_size == 1:
            return self.tokenize(dataset, if_empty)
        created: list[TokenDataset] = []

        def tokenize() -> tuple[list[str], list[str], dict[int, list[str]]]:
            created.append(self.tokenize(dataset, if_empty))
            return created[0].names, created[0].captions, created[0].captions_by_index

        names, captions, several = self.dist.on_main(tokenize)
        files = {"codes": created[0].codes} if created else None
        codes = self.dist.broadcast_tensors(files)["codes"]
        codes = {name: tensor.cpu() for name, tensor in codes.items()}
        return TokenDataset(names, codes, captions, several)

    def tokenize(self, dataset: ExampleDataset, if_empty: str) -> TokenDataset:
        """Encode a dataset with every tokenizer; unreadable examples and captions are left out."""
        rows = {name: self.get_rows(dataset, name) for name in self.tokenizers}
        captions: list[list[str]] = []
        names: list[str] = []
        for i in range(len(dataset)):
            name = dataset.name(i)
            if all(name in by_name for by_name in rows.values()):
                try:
                    captions.append(dataset.all_captions(i))
                except UnreadableFile as error:
                    self.notify(f"Skipped {name}: {error}")
                else:
                    names.append(name)
        if not names:
            raise UserError(if_empty)
        codes = {
            tokenizer: torch.stack([by_name[name] for name in names])
            for tokenizer, by_name in rows.items()
        }
        first = [next(iter(some), "") for some in captions]
        several = {i: some for i, some in enumerate(captions) if len(some) > 1}
        return TokenDataset(names, codes, first, several)

    def get_rows(self, dataset: ExampleDataset, name: str) -> dict[str, Tensor]:
        """Return the codes of each readable example, given or from the cache."""
        tokenizer = self.tokenizers[name]
        rows: dict[str, Tensor] = {}
        if name == "tokenizer" and self.given is not None:
            rows = self.read_given(dataset, tokenizer, self.given)
        missing = Subset(dataset, [i for i in range(len(dataset)) if dataset.name(i) not in rows])
        if len(missing) == 0:
            return rows
        names = [missing.name(i) for i in range(len(missing))]
        signatures = [missing.signature(i) for i in range(len(missing))]
        content = json.dumps([tokenizer.fingerprint, names, signatures])
        key = hashlib.sha256(content.encode()).hexdigest()[:16]
        return rows | self.read_or_tokenize(missing, tokenizer, self.folder / f"{name}-{key}")

    def read_given(
        self, dataset: ExampleDataset, tokenizer: Tokenizer, folder: Path
    ) -> dict[str, Tensor]:
        """Read the codes of unchanged examples from a folder that `tessera tokenize` wrote."""
        stored = read_tokens(folder, tokenizer.fingerprint)
        signatures = {dataset.name(i): dataset.signature(i) for i in range(len(dataset))}
        rows = {
            name: row
            for name, signature, row in zip(
                stored.names, stored.signatures, stored.codes, strict=True
            )
            if signatures.get(name) == signature
        }
        axes = len(tokenizer.grid)
        for row in rows.values():
            if row.shape[:axes] != tokenizer.grid:
                raise UserError(
                    f"The codes in {folder} have shape {tuple(row.shape)} for each example, but "
                    f"the examples of this run have {tokenizer.grid}: tokenize examples of the "
                    "same length, or use --task.tokens cache."
                )
        if len(rows) < len(dataset):
            self.notify(
                f"{folder} has codes of {len(rows):,} of {len(dataset):,} examples in their "
                "current version; the others are tokenized now."
            )
        return rows

    def read_or_tokenize(
        self, dataset: Subset, tokenizer: Tokenizer, folder: Path
    ) -> dict[str, Tensor]:
        """Read a cache; tokenize if it is missing or corrupt."""
        try:
            stored = read_tokens(folder, tokenizer.fingerprint)
        except UserError:
            shutil.rmtree(folder, ignore_errors=True)
            self.notify(
                f"Tokenizing {len(dataset):,} examples, once; the codes are kept in {folder}"
            )
            if not write_tokens(folder, self.encode(dataset, tokenizer), tokenizer.info()):
                return {}
            stored = read_tokens(folder, tokenizer.fingerprint)
        return dict(zip(stored.names, stored.codes, strict=True))

    def encode(
        self, dataset: Subset, tokenizer: Tokenizer
    ) -> Iterator[tuple[list[str], list[str], Tensor]]:
        show = partial(track, description="tokenizing", transient=True)
        total = -(-len(dataset) // BATCH_SIZE)
        signatures = {dataset.name(i): dataset.signature(i) for i in range(len(dataset))}
        for batch, codes in show(tokenizer.encode_dataset(dataset, BATCH_SIZE), total=total):
            for example, reason in batch.rejected:
                self.notify(f"Skipped {example}: {reason}")
            if len(batch):
                yield batch.names, [signatures[one] for one in batch.names], codes
