"""Examples already tokenized: codes on disk with their names and the fingerprint of the tokenizer
that made them.

    codes/  codes-00000.safetensors ("codes": N x the grid, int32, or int64 if there are too many symbols), ...,
            index.json, written last

index.json makes the folder complete; without it there are no codes. Whoever reads them says which
tokenizer they expect, and codes of another are refused: they would mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tessera.run.directory import UserError, write_atomically

if TYPE_CHECKING:  # listing and reading files needs no torch
    import torch


@dataclass
class TokenizedBatch:
    codes: dict[str, torch.Tensor]
    """By each tokenizer the run stands on: (B, *grid) whole numbers."""
    captions: list[str]

    def to(self, device: torch.device | str) -> TokenizedBatch:
        return TokenizedBatch(
            {name: codes.to(device) for name, codes in self.codes.items()}, self.captions
        )


@dataclass
class TokenizedExample:
    codes: dict[str, Tensor]
    caption: str


@dataclass(frozen=True)
class TokenDataset:
    """One row of codes for each name, by each tokenizer."""

    names: list[str]
    codes: dict[str, Tensor]
    captions: list[str]
    captions_by_index: dict[int, list[str]] = field(default_factory=dict)
    """all captions of those examples that have several"""

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return self.names[index]

    def caption(self, index: int) -> str:
        return self.captions[index]

    def all_captions(self, index: int) -> list[str]:
        return self.captions_by_index.get(index, [self.captions[index]])

    def item(self, index: int, rng: np.random.Generator) -> TokenizedExample:
        """A draw for the caption, where there are several."""
        said = self.all_captions(index)
        caption = said[int(rng.integers(len(said)))] if len(said) > 1 else said[0]
        return TokenizedExample({name: codes[index] for name, codes in self.codes.items()}, caption)

    def collate(self, examples: list[TokenizedExample]) -> TokenizedBatch:
        return collate(examples)


def collate(examples: list[TokenizedExample]) -> TokenizedBatch:
    by = examples[0].codes
    codes = {name: torch.stack([example.codes[name] for example in examples]).long() for name in by}
    return TokenizedBatch(codes, [example.caption for example in examples])


SHARD = 4096
"""Examples in one file."""


@dataclass(frozen=True)
class TokensInfo:
    """What codes have to say of their origin."""

    fingerprint: str
    vocab_size: int
    recipe: str
    steps: int
    preprocessing: dict[str, Any]


def write_tokens(
    out: str | Path, batches: Iterable[tuple[list[str], list[str], Tensor]], about: TokensInfo
) -> int:
    """Writes (names, marks, codes) batches as shards and gives back how many examples there are; of
    none nothing is written.

    A mark is anything that changes when the example does: whoever reads the codes can tell whether
    they are stale.
    """
    folder = Path(out)
    if (folder / "index.json").exists():
        raise UserError(f"{out} already holds codes. Give another --out; nothing was changed.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"The folder {out} cannot be written ({error.strerror}). Give another --out."
        ) from None
    number = torch.int32 if about.vocab_size <= 2**31 else torch.int64
    names: list[str] = []
    signatures: list[str] = []
    waiting: list[Tensor] = []
    shards: list[dict[str, Any]] = []

    def flush() -> None:
        codes = torch.cat(waiting).to(number)
        shards.append({"file": f"codes-{len(shards):05d}.safetensors", "examples": len(codes)})
        save_file({"codes": codes}, folder / shards[-1]["file"])
        waiting.clear()

    for batch_names, batch_marks, codes in batches:
        names += batch_names
        signatures += batch_marks
        waiting.append(codes)
        if sum(map(len, waiting)) >= SHARD:
            flush()
    if waiting:
        flush()
    if not names:
        return 0
    index = {"names": names, "marks": signatures, "shards": shards, **about.__dict__}
    write_atomically(folder / "index.json", json.dumps(index, indent=1))
    return len(names)


@dataclass
class Codes:
    """The codes of a folder, whole."""

    names: list[str]
    signatures: list[str]
    codes: Tensor
    about: TokensInfo


def read_tokens_dir(path: str | Path, fingerprint: str) -> Codes:
    """The codes in a folder, if the tokenizer with this fingerprint made them."""
    index_path = Path(path) / "index.json"
    if not index_path.is_file():
        raise UserError(
            f"There are no codes in {path}: it has no index.json. `tessera tokenize` makes them."
        )
    try:
        index = json.loads(index_path.read_text(encoding="utf-8"))
        names, signatures, shards = index.pop("names"), index.pop("marks"), index.pop("shards")
        about = TokensInfo(**index)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(path, f"index.json cannot be read: {error}") from None
    if about.fingerprint != fingerprint:
        raise UserError(
            f"The codes in {path} were made by another tokenizer ({about.fingerprint[:12]}, {about.steps} steps) than the one "
            f"asked for ({fingerprint[:12]}): they would mean nothing to it. `tessera tokenize` them again."
        )
    try:
        parts = [load_file(Path(path) / Path(shard["file"]).name)["codes"] for shard in shards]
    except (OSError, SafetensorError, KeyError) as error:
        raise damaged(path, str(error)) from None
    return Codes(names, signatures, torch.cat(parts).long(), about)


def damaged(path: str | Path, problem: str) -> UserError:
    return UserError(
        f"The codes in {path} are damaged ({problem}). `tessera tokenize` them again, to another folder."
    )
