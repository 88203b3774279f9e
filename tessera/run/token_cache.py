"""Tokenize a dataset once, before the first step; the codes are kept in the run directory.

The name of a cache is a hash of the tokenizer, the names of the examples and their signatures (size
and modification time), so a stale cache is never found. All processes tokenize; only the main one
reads and writes the cache.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from tessera.api.tokenizer import Tokenizer
from tessera.data.dataset import ExampleDataset, Split, Subset
from tessera.data.errors import UnreadableFile
from tessera.data.tokens import INDEX, StoredTokens, TokenDataset, TokenWriter, read_tokens
from tessera.engine.distributed import Distributed
from tessera.engine.evaluation import NOTHING_HELD_OUT
from tessera.run.errors import UserError

NOTHING_TO_TRAIN_ON = (
    "No example could be read, so there is nothing to train on. `tessera check` shows the reasons."
)
BATCH_SIZE = 32
"""The number of examples that are encoded together."""
NUM_WORKERS = 1
"""Examples are read in a worker process, since a damaged file may end the process that reads it."""
NOTICE_SECONDS = 60.0
"""The time between lines about the progress."""


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
        """Tokenize on all processes; the main one reads and writes the codes and sends them."""
        rows = {name: self.get_rows(dataset, name) for name in self.tokenizers}
        if self.dist.world_size == 1:
            return self.build_dataset(dataset, rows, if_empty)
        created: list[TokenDataset] = []

        def build() -> tuple[list[str], list[str], list[tuple[int, list[str]]]]:
            created.append(self.build_dataset(dataset, rows, if_empty))
            several = list(created[0].captions_by_index.items())
            return created[0].names, created[0].captions, several

        names, captions, several = self.dist.on_main(build)
        files = {"codes": created[0].codes} if created else None
        codes = self.dist.broadcast_tensors(files)["codes"]
        codes = {name: tensor.cpu() for name, tensor in codes.items()}
        return TokenDataset(names, codes, captions, dict(several))

    def tokenize(self, dataset: ExampleDataset, if_empty: str) -> TokenDataset:
        """Encode a dataset with every tokenizer, in one process."""
        rows = {name: self.get_rows(dataset, name) for name in self.tokenizers}
        return self.build_dataset(dataset, rows, if_empty)

    def build_dataset(
        self, dataset: ExampleDataset, rows: dict[str, dict[str, Tensor]], if_empty: str
    ) -> TokenDataset:
        """Combine codes and captions; unreadable examples and captions are left out."""
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
        """Return the codes of each readable example, given or from the cache.

        Other processes than the main one only help to tokenize, and return nothing.
        """
        tokenizer = self.tokenizers[name]
        rows: dict[str, Tensor] = {}

        def read_given() -> list[str]:
            if name == "tokenizer" and self.given is not None:
                rows.update(self.read_given(dataset, tokenizer, self.given))
            return list(rows)

        given = set(self.dist.on_main(read_given))
        missing = Subset(dataset, [i for i in range(len(dataset)) if dataset.name(i) not in given])
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
        if stored.extents:
            raise UserError(
                f"{folder} has the codes of whole files, but a run is trained on examples of one "
                "length: write their codes with `tessera tokenize --no-whole`, or use "
                "--task.tokens cache."
            )
        signatures = {dataset.name(i): dataset.signature(i) for i in range(len(dataset))}
        rows = {
            name: row
            for name, signature, row in zip(
                stored.names, stored.signatures, stored.rows, strict=True
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
        """Read a cache; tokenize if it is missing, incomplete or corrupt."""
        stored: list[StoredTokens] = []
        if not self.dist.on_main(lambda: self.read_cache(folder, tokenizer, stored)):
            self.write_cache(dataset, tokenizer, folder)
            self.dist.on_main(lambda: self.read_cache(folder, tokenizer, stored))
        rows = [dict(zip(one.names, one.rows, strict=True)) for one in stored]
        return rows[0] if rows else {}

    def read_cache(self, folder: Path, tokenizer: Tokenizer, stored: list[StoredTokens]) -> bool:
        """Append the codes of a complete cache to `stored`; remove a corrupt one."""
        try:
            stored.append(read_tokens(folder, tokenizer.fingerprint))
        except UserError as error:
            if (folder / INDEX).exists():
                self.notify(f"{error} They are made again.")
                shutil.rmtree(folder, ignore_errors=True)
            return False
        return True

    def write_cache(self, dataset: Subset, tokenizer: Tokenizer, folder: Path) -> None:
        """Tokenize on all processes, in rounds of one batch each.

        The main process writes what all of them send after each round, so no process waits longer
        than a round for another, and what is finished is kept if the run is stopped.
        """
        self.notify(f"Tokenizing {len(dataset):,} examples, once; the codes are kept in {folder}")
        rank, world_size = self.dist.rank, self.dist.world_size
        writers: list[TokenWriter] = []  # one, on the main process

        def open_writer() -> int:
            writers.append(TokenWriter(folder, tokenizer.info(), folder.name))
            return writers[0].num_read

        start = self.dist.on_main(open_writer)
        if start:
            self.notify(f"{start:,} of them were tokenized before.")
        signatures = {dataset.name(i): dataset.signature(i) for i in range(len(dataset))}
        batches = tokenizer.encode_dataset(
            dataset, BATCH_SIZE, NUM_WORKERS, start=start, rank=rank, world_size=world_size
        )
        next_notice = time.monotonic() + NOTICE_SECONDS
        rounds = range(start, len(dataset), BATCH_SIZE * world_size)
        for first in track(rounds, "tokenizing", transient=True, disable=not self.dist.is_main):
            batch, codes = next(batches, (None, torch.empty(0, dtype=torch.long)))
            parts = self.dist.all_gather_tensors({"codes": codes.long()})
            own = ([], []) if batch is None else (batch.names, batch.rejected)
            for number, (part, (names, rejected)) in enumerate(
                zip(parts, self.dist.all_gather_json([own]), strict=True)
            ):
                for example, reason in rejected:
                    self.notify(f"Skipped {example}: {reason}")
                for writer in writers:
                    begin = min(len(dataset), first + number * BATCH_SIZE)
                    end = min(len(dataset), begin + BATCH_SIZE)
                    marks = [signatures[name] for name in names]
                    writer.add(names, marks, part["codes"], end - begin)
            if time.monotonic() > next_notice:
                next_notice += NOTICE_SECONDS
                done = min(len(dataset), first + BATCH_SIZE * world_size)
                self.notify(f"{done:,} of {len(dataset):,} examples are tokenized.")
        for writer in writers:
            writer.finish()
