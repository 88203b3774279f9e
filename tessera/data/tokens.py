"""Tokenized examples: in memory, and on disk with the fingerprint of their tokenizer.

    tokens/  codes-00000.safetensors ("codes": N x grid, int32 or int64), ..., index.json

index.json is written last and makes the folder complete. Readers pass the fingerprint of their
tokenizer, and codes of another one are rejected, because they would have no meaning.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from tessera.data.dataset import ExampleDataset
from tessera.run.directory import write_atomically
from tessera.run.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SHARD_SIZE = 4096
"""The number of examples in one file."""


@dataclass
class TokenizedBatch:
    codes: dict[str, Tensor]
    """The codes of each tokenizer by its name, (B, *grid)."""
    captions: list[str]

    def to(self, device: torch.device | str) -> TokenizedBatch:
        codes = {name: codes.to(device) for name, codes in self.codes.items()}
        return TokenizedBatch(codes, self.captions)


@dataclass
class TokenizedExample:
    codes: dict[str, Tensor]
    caption: str


@dataclass(frozen=True)
class TokenDataset(ExampleDataset[TokenizedExample]):
    """Tokenized examples: one row of codes for each name and tokenizer."""

    names: list[str]
    codes: dict[str, Tensor]
    captions: list[str]
    """The first caption of each example."""
    captions_by_index: dict[int, list[str]] = field(default_factory=dict)
    """All captions of the examples that have several."""

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def all_captions(self, index: int) -> list[str]:
        return self.captions_by_index.get(index, [self.captions[index]])

    def item(self, index: int, rng: np.random.Generator) -> TokenizedExample:
        codes = {name: codes[index] for name, codes in self.codes.items()}
        return TokenizedExample(codes, self.sample_caption(index, rng))

    def collate(self, examples: list[TokenizedExample]) -> TokenizedBatch:
        return collate(examples)


def collate(examples: list[TokenizedExample]) -> TokenizedBatch:
    codes = {
        name: torch.stack([example.codes[name] for example in examples]).long()
        for name in examples[0].codes
    }
    return TokenizedBatch(codes, [example.caption for example in examples])


@dataclass(frozen=True)
class TokensInfo:
    """The tokenizer that wrote a folder of codes."""

    fingerprint: str
    vocab_size: int
    recipe: str
    steps: int
    preprocessing: dict[str, object]


@dataclass
class StoredTokens:
    """All codes of a folder."""

    names: list[str]
    signatures: list[str]
    """One string for each example that changes when its file does."""
    codes: Tensor
    info: TokensInfo


def write_tokens(
    folder: str | Path, batches: Iterable[tuple[list[str], list[str], Tensor]], info: TokensInfo
) -> int:
    """Write batches of (names, signatures, codes) and return the number of examples.

    Without any example nothing is written.
    """
    folder = Path(folder)
    if (folder / "index.json").exists():
        raise UserError(f"{folder} already holds codes. Give another --out; nothing was changed.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The folder {folder} cannot be written ({error.strerror}). Give another --out."
        ) from None
    dtype = torch.int32 if info.vocab_size <= 2**31 else torch.int64
    names: list[str] = []
    signatures: list[str] = []
    pending: list[Tensor] = []
    shards: list[dict[str, object]] = []

    def flush() -> None:
        codes = torch.cat(pending).to(dtype)
        file = f"codes-{len(shards):05d}.safetensors"
        shards.append({"file": file, "examples": len(codes)})
        # save_file creates files with mode 0600; these get the permissions of the umask.
        with open(folder / file, "wb") as opened:
            opened.write(save({"codes": codes}))
            opened.flush()
            os.fsync(opened.fileno())
        pending.clear()

    for batch_names, batch_signatures, codes in batches:
        names += batch_names
        signatures += batch_signatures
        pending.append(codes)
        if sum(map(len, pending)) >= SHARD_SIZE:
            flush()
    if pending:
        flush()
    if not names:
        return 0
    index = {"names": names, "signatures": signatures, "shards": shards, **asdict(info)}
    write_atomically(folder / "index.json", json.dumps(index, indent=1))
    return len(names)


def read_tokens(folder: str | Path, fingerprint: str) -> StoredTokens:
    """Read the codes in a folder if the tokenizer with this fingerprint wrote them."""
    index_path = Path(folder) / "index.json"
    if not index_path.is_file():
        raise UserError(
            f"There are no codes in {folder}: it has no index.json. `tessera tokenize` writes them."
        )
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
        names, signatures = index.pop("names"), index.pop("signatures")
        shards = index.pop("shards")
        info = TokensInfo(**index)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise corrupt_tokens(folder, f"index.json cannot be read: {error}") from None
    if info.fingerprint != fingerprint:
        raise UserError(
            f"The codes in {folder} were written by another tokenizer ({info.fingerprint[:12]}, "
            f"{info.steps} steps) than the requested one ({fingerprint[:12]}). Run `tessera "
            "tokenize` again."
        )
    try:
        parts = [load_file(Path(folder) / Path(one["file"]).name)["codes"] for one in shards]
    except (OSError, SafetensorError, KeyError) as error:
        raise corrupt_tokens(folder, str(error)) from None
    return StoredTokens(names, signatures, torch.cat(parts).long(), info)


def corrupt_tokens(folder: str | Path, problem: str) -> UserError:
    return UserError(
        f"The codes in {folder} are corrupt ({problem}). Run `tessera tokenize` again with another "
        "--out."
    )
