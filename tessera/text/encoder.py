"""Text encoders: captions in; out come states (a vector for each symbol, and which are real) for
another network to look at.

`LearnedText` is small, starts from nothing and learns with the network that it serves.
`PretrainedText` is somebody else's encoder (T5, as Muse and Imagen take it: arXiv 2301.00704,
section 2.1; or BERT, CLIP, ...): frozen, and in no checkpoint. Both keep one contract,
`TextEncoder`. Beyond rounding, a text's states do not depend on what else is in the batch.

B texts, L symbols of the longest among them, W width.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import grad_accum_steps, pairwise
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tessera.nn.bpe import BPE, PADDING, refuse_too_few
from tessera.nn.precision import full_precision
from tessera.nn.transformer import States, Transformer
from tessera.text.huggingface import library, read_weights, told


class TextEncoder(nn.Module):
    """The contract of all text encoders."""

    dim: int
    depth: int = 1
    """Layers that can be asked for states: 1, if there are only those of the last."""

    def forward(self, texts: Sequence[str]) -> States:
        raise NotImplementedError

    def layers(self, texts: Sequence[str], at: Sequence[int] = ()) -> list[States]:
        """The states after each of `at` layers, and last the result."""
        if at:
            raise ValueError(
                f"This text encoder has no states of layers {', '.join(map(str, at))}: only those of its last."
            )
        return [self(texts)]

    def prepare_text(self, texts: Iterable[str], place: Path | None = None) -> None:
        """Sees all captions of a run before the first step; `place` is a folder for what is worth
        keeping."""
        raise NotImplementedError

    def fits(self, text: str) -> bool:
        """Whether the whole text is read; the end of a longer one is not."""
        raise NotImplementedError

    def cut(self, texts: Iterable[str]) -> list[str]:
        """Those that are read only in part, for somebody to tell."""
        return [text for text in dict.fromkeys(texts) if not self.fits(text)]


def refuse_one_text(texts: Sequence[str]) -> None:
    if isinstance(texts, str):
        raise TypeError(
            f"A text encoder reads a list of texts, but was given the text {texts[:40]!r}: put it in a list."
        )


def padded(rows: list[Tensor]) -> States:
    """Sequences of several texts, (l, ...) each, side by side. What is padding is zero."""
    lengths_B = torch.tensor([len(row) for row in rows])
    mask_BL = torch.arange(int(lengths_B.max())) < lengths_B[:, None]
    return States(pad_sequence(rows, batch_first=True), mask_BL.to(rows[0].device))


# ------------------------------------------------------------------------------------------------------------- learned


@dataclass(frozen=True, kw_only=True)
class LearnedTextConfig:
    """A small text encoder that learns with the network it serves."""

    dim: int = 128
    depth: int = 2
    """Transformer blocks."""
    heads: int = 4
    tokens: int = 512
    """Size of the alphabet: 258 are taken (256 bytes), the rest are pieces of words, learnt from
    the training captions."""
    max_len: int = 64
    """Symbols of a text that are read, the one that begins it included."""
    casefold: bool = True
    """Whether capitals count as small letters: prompts are typed in any case."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"A text encoder's {name} is at least 1, but it is {getattr(self, name)}."
                )
        if self.max_len < 2:
            raise ValueError(
                f"Every text begins with a symbol of its own, so `max_len` is at least 2, but it is {self.max_len}."
            )
        refuse_too_few(self.tokens)

    def build(self) -> LearnedText:
        return LearnedText(self)


class LearnedText(TextEncoder):
    def __init__(self, config: LearnedTextConfig):
        super().__init__()
        self.dim, self.depth, self.max_len = config.dim, config.depth, config.max_len
        self.bpe = BPE(config.tokens, casefold=config.casefold)
        self.embedding = nn.Embedding(config.tokens, config.dim)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.transformer = Transformer(config.dim, config.depth, config.heads)

    def forward(self, texts: Sequence[str]) -> States:
        return self.layers(texts)[-1]

    def layers(self, texts: Sequence[str], at: Sequence[int] = ()) -> list[States]:
        symbols_BL = self.tokens(texts)
        mask_BL = symbols_BL != PADDING
        passed = self.transformer.layers(self.embedding(symbols_BL), mask_BN=mask_BL, at=at)
        return [States(values_BLW * mask_BL[..., None], mask_BL) for values_BLW in passed]

    def tokens(self, texts: Sequence[str]) -> Tensor:
        """(B, L), padded at the end and cut at `max_len`."""
        refuse_one_text(texts)
        spelt = [self.bpe.encode(text)[: self.max_len] for text in texts]
        # A finished model pads alike whoever is beside a text, so that not even a rounding depends
        # on it.
        most = max(map(len, spelt)) if self.training else self.max_len
        rows = [tokens + [PADDING] * (most - len(tokens)) for tokens in spelt]
        return torch.tensor(rows, device=self.embedding.weight.device)

    def prepare_text(self, texts: Iterable[str], place: Path | None = None) -> None:
        """Learns the alphabet, anew each time: the same captions give the same one. Nothing is kept
        on disk."""
        self.bpe.learn(texts)

    def fits(self, text: str) -> bool:
        return len(self.bpe.encode(text)) <= self.max_len


# ---------------------------------------------------------------------------------------------------------- pretrained

TEXTS_AT_ONCE = 64
TEXTS_IN_A_FILE = 64 * TEXTS_AT_ONCE
"""Whole batches, so that a text is computed in the same company however often the work was
interrupted."""

PROBE = "Two RED Cafés, 3 bicycles & naïve_木 🚲!"
"""Capitals, accents, digits, signs, other scripts: what tokenizers with the same vocabulary may
treat differently."""


@dataclass(frozen=True, kw_only=True)
class PretrainedTextConfig:
    """Somebody else's text encoder, frozen. Needs the extra `text`."""

    name: str
    """A folder with an encoder and its tokenizer in the Hugging Face layout, or the name of one on
    the hub."""
    max_len: int = 77
    """Symbols of a text that are read."""
    download: bool = False
    """Whether what is not yet on this machine may be fetched from the hub."""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError(
                "A pretrained text encoder needs a name: a folder that holds one, or its name on the hub."
            )
        if self.max_len < 1:
            raise ValueError(
                f"At least 1 symbol of a text must be read, but `max_len` is {self.max_len}."
            )

    def build(self) -> PretrainedText:
        return PretrainedText(self)


class PretrainedText(TextEncoder):
    """The network is held and not registered: no optimizer, average or checkpoint sees it. It
    follows `.to(device)`."""

    def __init__(self, config: PretrainedTextConfig):
        super().__init__()
        found = find_encoder(config)
        self.max_len = config.max_len
        self.dim: int = found.network.config.hidden_size
        self._held = (
            found.network.eval().requires_grad_(False),
        )  # a tuple, so that nn.Module does not register it
        self._facts, self._tokenizer = found.facts, found.tokenizer
        self._kept = Kept()

    @property
    def network(self) -> Any:
        return self._held[0]

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    def train(self, mode: bool = True) -> Self:
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.network._apply(fn, recurse)
        return self

    def forward(self, texts: Sequence[str]) -> States:
        """Kept states where there are some; whatever else is asked for (a prompt) is computed
        now."""
        refuse_one_text(texts)
        rows = {text: self._kept[text] for text in texts if text in self._kept}
        missing = [text for text in dict.fromkeys(texts) if text not in rows]
        if missing:
            rows |= zip(missing, self.compute(missing))
        return padded([rows[text].to(self.device) for text in texts])

    @torch.no_grad()
    def compute(self, texts: Sequence[str]) -> list[Tensor]:
        """The states (l, W) of each text, in float32 also under autocast: T5 is known to overflow
        in float16."""
        tokens = [
            torch.tensor(self.tokens(text, truncation=True, max_length=self.max_len))
            for text in texts
        ]
        ids = padded(tokens)
        with full_precision(self.device.type):
            seen = self.network(
                input_ids=ids.values.to(self.device), attention_mask=ids.mask.long().to(self.device)
            )
        return [values[: len(one)].float() for values, one in zip(seen.last_hidden_state, tokens)]

    def tokens(self, text: str, **how: Any) -> list[int]:
        """As the tokenizer spells it. Half a character, left in a prompt by a terminal of another
        encoding, is read as "?".

        Where the tokenizer makes nothing of a text of nothing, there is one symbol to look at all
        the same.
        """
        whole = text.encode("utf-8", "replace").decode("utf-8")
        return self._tokenizer(whole, verbose=False, **how)["input_ids"] or [
            self._tokenizer.pad_token_id or 0
        ]

    def fits(self, text: str) -> bool:
        return len(self.tokens(text)) <= self.max_len

    @cached_property
    def fingerprint(self) -> str:
        """Of all that a text's states depend on, and of nothing else: where the encoder lies and
        who reads it may change.

        Weights count without their names, which are the library's and may change with it, and once
        each: whether it lists two that are tied is its affair too.
        """
        weights = {_digest(tensor) for tensor in self.network.state_dict().values()}
        words = sorted(self._tokenizer.get_vocab().items())
        facts = [self._facts, sorted(weights), words, self.tokens(PROBE), self.max_len]
        return hashlib.blake2b(
            json.dumps(facts, sort_keys=True).encode(), digest_size=16
        ).hexdigest()

    def prepare_text(self, texts: Iterable[str], place: Path | None = None) -> None:
        """Computes every caption once and keeps it in `place`; without a place texts are computed
        when they come.

        They go in the order of their lengths, so that little is computed for padding, and after
        each file what is done is done.
        """
        if place is None:
            return
        self._kept = Kept(place, self.fingerprint)
        waiting = {
            text: len(self.tokens(text)) for text in dict.fromkeys(texts) if text not in self._kept
        }
        ordered = sorted(waiting, key=lambda text: (waiting[text], text))
        for start in range(0, len(ordered), TEXTS_IN_A_FILE):
            some = ordered[start : start + TEXTS_IN_A_FILE]
            batches = [some[at : at + TEXTS_AT_ONCE] for at in range(0, len(some), TEXTS_AT_ONCE)]
            self._kept.add(some, [rows.cpu() for batch in batches for rows in self.compute(batch)])


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(
        f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data.tobytes(), digest_size=16
    ).hexdigest()


# ---- finding it


@dataclass
class Found:
    network: Any
    tokenizer: Any
    facts: dict[str, Any]
    """Its config.json, without what says nothing about the numbers that it gives."""


def find_encoder(config: PretrainedTextConfig) -> Found:
    """Reads an encoder whole, or says what is missing. Only safetensors are read, and no code that
    comes with a model runs."""
    transformers = library("A pretrained text encoder", "take the text encoder that learns")
    what = f"The text encoder {config.name!r}"
    place, how = (
        place_of(config),
        {"local_files_only": not config.download, "trust_remote_code": False},
    )
    with told(transformers, what, PARTS):
        facts, _ = transformers.PreTrainedConfig.get_config_dict(place, **how)
        settings = transformers.AutoConfig.from_pretrained(place, **how)
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **how)
        weights = read_weights(_class_for(settings, transformers), place, **how)
    network = weights.refuse_half(
        what, unused=("pooler",)
    )  # which is not used here, and many files have none
    network = (
        network.get_encoder()
        if settings.is_encoder_decoder
        else getattr(network, "text_model", network)
    )
    refuse_length(config, network.config, tokenizer)
    saying = {
        name: value
        for name, value in facts.items()
        if name != "transformers_version" and not name.startswith("_")
    }
    return Found(network, tokenizer, saying)


PARTS = 'config.json, the files of its tokenizer (some of them need packages that pip install "tessera[text]" brings)'


def place_of(config: PretrainedTextConfig) -> str:
    """A folder; only where something may be fetched, a name on the hub.

    What was fetched before is looked up here, because the library calls the hub even when it is
    told to stay with local files (huggingface_hub 2.4 asks it for a list of programs, to say by
    which of them it is used).
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(config.name).is_dir() or config.download:
        return config.name
    try:
        fetched = try_to_load_from_cache(config.name, "config.json")
    except HFValidationError:  # no name that the hub could have
        fetched = None
    if isinstance(fetched, str):
        return str(Path(fetched).parent)
    raise FileNotFoundError(
        f"The text encoder {config.name!r} is neither a folder nor the name of one that was fetched from the hub before, and "
        "nothing is downloaded unless asked. Give the folder of an encoder (config.json, .safetensors and the files of its "
        "tokenizer), or set `download`."
    )


def _class_for(settings: Any, transformers: Any) -> Any:
    """The encoder alone where it has a class of its own (T5 and its kin), else the whole model."""
    has_one = type(settings) in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
    return transformers.AutoModelForTextEncoding if has_one else transformers.AutoModel


def refuse_length(config: PretrainedTextConfig, settings: Any, tokenizer: Any) -> None:
    """T5 reads any length; where places have learnt vectors there are only so many, and the
    tokenizer may know of fewer."""
    places = getattr(settings, "max_position_embeddings", None)
    least = tokenizer.num_special_tokens_to_add() + 1
    most = config.max_len if places is None else min(places, tokenizer.model_max_length)
    if not least <= config.max_len <= most:
        raise ValueError(
            f"`max_len` is {config.max_len}, but the text encoder {config.name!r} reads from {least} up to "
            f"{'any number of' if places is None else most} symbols, those that it adds itself included."
        )


# ---- keeping what it computed


class Kept:
    """States of texts on disk, each file whole in itself: texts-KEY-CHECKSUM.safetensors.

    The key is the encoder's fingerprint. A file holds some texts (as JSON), all their rows one
    below the other, and where each text's begin. Its name is the checksum of what is in it, so a
    file that is not what was written is left alone and its texts are computed anew, and processes
    that write at the same time write the same or different files. Rows are mapped into memory: the
    disk is read when they are asked for.
    """

    def __init__(self, place: Path | None = None, key: str = ""):
        self.place, self.key = place or Path(), key
        self._homes: dict[str, Tensor] = {}
        for path in sorted(self.place.glob(f"texts-{key}-*.safetensors")) if place else []:
            with contextlib.suppress(OSError, ValueError):
                self.take(path)

    def __contains__(self, text: str) -> bool:
        return text in self._homes

    def __getitem__(self, text: str) -> Tensor:
        """(l, W)"""
        return self._homes[text]

    def take(self, path: Path) -> None:
        if path.name != self.name_for(path):
            raise ValueError(f"{path} is not what was written under this name")
        found = load_file(path)
        texts = json.loads(bytes(found["texts"].numpy()))
        begins = found["begins"].tolist()
        self._homes |= {
            text: found["rows"][begin:end]
            for text, (begin, end) in zip(texts, pairwise(begins), strict=True)
        }

    def add(self, texts: list[str], rows: list[Tensor]) -> None:
        temporary = self.place / f".texts-{self.key}-{os.getpid()}"
        begins = [0, *grad_accum_steps(map(len, rows))]
        written = torch.frombuffer(bytearray(json.dumps(texts).encode()), dtype=torch.uint8)
        try:
            self.place.mkdir(parents=True, exist_ok=True)
            save_file(
                {"texts": written, "begins": torch.tensor(begins), "rows": torch.cat(rows)},
                temporary,
            )
            path = self.place / self.name_for(temporary)
            os.replace(temporary, path)
        except (OSError, SafetensorError) as problem:
            raise OSError(
                f"What a text encoder made of {len(texts)} captions could not be kept in {self.place} ({problem}). "
                "Make room there, or give another folder."
            ) from problem
        finally:
            with contextlib.suppress(OSError):  # already in its place, or never written
                temporary.unlink()
        self.take(path)

    def name_for(self, path: Path) -> str:
        with open(path, "rb") as file:
            return f"texts-{self.key}-{hashlib.file_digest(file, 'sha256').hexdigest()[:32]}.safetensors"
