"""A pretrained text encoder, frozen: T5, as in Muse and Imagen (arXiv 2301.00704, section 2.1), or
BERT, CLIP and others in the Hugging Face layout.

The states of all captions of a run are computed once and cached on disk.

Shape suffixes: B texts, L tokens of the longest text, W dimension of a state.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tessera._optional import require
from tessera.engine.device import move_tensors
from tessera.nn.precision import full_precision
from tessera.nn.transformer import States
from tessera.run.directory import create_empty
from tessera.text.encoder import TextEncoder, Texts, check_texts, pad_rows
from tessera.text.huggingface import load_weights, translate_errors

BATCH_SIZE = 64
TEXTS_PER_FILE = 64 * BATCH_SIZE
"""A multiple of the batch size, so that an interruption does not change the batches."""

PROBE = "Two RED Cafés, 3 bicycles & naïve_木 🚲!"
"""Upper case, accents, digits, punctuation and other scripts: what tokenizers with the same
vocabulary may treat differently."""

TOKENIZER_FILES = (
    "config.json, the files of its tokenizer (some of them need packages that"
    ' pip install "tessera[text]" installs)'
)


@dataclass(frozen=True, kw_only=True)
class PretrainedTextConfig:
    """A pretrained text encoder, frozen. Needs the extra `text`."""

    name: str
    """A folder with an encoder and its tokenizer in the Hugging Face layout, or the name of a model
    on the hub."""
    max_len: int = 77
    """Maximum number of tokens of a text."""
    download: bool = False
    """Whether a model that is not on this machine may be downloaded from the hub."""

    def __post_init__(self) -> None:
        if not self.name.strip():
            raise ValueError(
                "The name of a pretrained text encoder is empty: give a folder that contains one,"
                " or the name of one on the hub."
            )
        if self.max_len < 1:
            raise ValueError(
                f"`max_len` is {self.max_len}, but it must be at least 1: use 77, for example."
            )

    def build(self) -> PretrainedTextEncoder:
        return PretrainedTextEncoder(self)


class PretrainedTextEncoder(TextEncoder):
    """A frozen encoder that is not registered as a submodule.

    Optimizers, the EMA and checkpoints therefore do not include it, but `.to(device)` moves it.
    """

    def __init__(self, config: PretrainedTextConfig):
        super().__init__()
        loaded = load_encoder(config)
        self.max_len = config.max_len
        self.dim = loaded.dim
        # nn.Module does not register modules inside a tuple.
        self._unregistered = (loaded.network.eval().requires_grad_(False),)
        self._settings, self._tokenizer = loaded.settings, loaded.tokenizer
        self._cache = TextStateCache()

    @property
    def network(self) -> nn.Module:
        return self._unregistered[0]

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device

    @property
    def input_device(self) -> torch.device:
        return self.device

    def train(self, mode: bool = True) -> Self:
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self.network._apply(fn, recurse)
        return self

    def forward(self, texts: Texts) -> States:
        """Return cached states where there are some, and compute the others, such as prompts."""
        if isinstance(texts, States):
            return texts
        assert not isinstance(texts, Tensor)
        return move_tensors(self.encode_inputs(texts), self.device)

    def encode_inputs(self, texts: Sequence[str]) -> States:
        check_texts(texts)
        rows = {text: self._cache[text] for text in texts if text in self._cache}
        missing = [text for text in dict.fromkeys(texts) if text not in rows]
        if missing:
            rows |= zip(missing, (one.cpu() for one in self.compute_states(missing)))
        return pad_rows([rows[text] for text in texts])

    @torch.no_grad()
    def compute_states(self, texts: Sequence[str]) -> list[Tensor]:
        """Return the states (l, W) of each text.

        They are computed in float32 even under autocast: T5 is known to overflow in float16.
        """
        tokens = [
            torch.tensor(self.tokenize(text, truncation=True, max_length=self.max_len))
            for text in texts
        ]
        padded = pad_rows(tokens)
        with full_precision(self.device.type):
            output = self.network(
                input_ids=padded.values.to(self.device),
                attention_mask=padded.mask.long().to(self.device),
            )
        return [values[: len(row)].float() for values, row in zip(output.last_hidden_state, tokens)]

    def tokenize(self, text: str, **options: int) -> list[int]:
        """Return the tokens of a text.

        A lone surrogate, left in a prompt by a terminal with another encoding, is read as "?". If
        the tokenizer returns no token for an empty text, one padding token is used.
        """
        valid = text.encode("utf-8", "replace").decode("utf-8")
        return self._tokenizer(valid, verbose=False, **options)["input_ids"] or [
            self._tokenizer.pad_token_id or 0
        ]

    def fits(self, text: str) -> bool:
        return len(self.tokenize(text)) <= self.max_len

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that the states of a text depend on, independent of the location.

        Weights are included without their names, which may change with the version of transformers,
        and once each, because the library may or may not list two tied weights.
        """
        weights = {_hash_tensor(tensor) for tensor in self.network.state_dict().values()}
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        facts = [self._settings, sorted(weights), vocabulary, self.tokenize(PROBE), self.max_len]
        return hashlib.blake2b(
            json.dumps(facts, sort_keys=True).encode(), digest_size=16
        ).hexdigest()

    def prepare_text(self, texts: Iterable[str], cache_dir: Path | None = None) -> None:
        """Compute every caption once and cache its states in `cache_dir`.

        Without a folder, states are computed when they are needed. Texts are sorted by length, so
        that little padding is computed, and each finished file survives an interruption.
        """
        if cache_dir is None:
            return
        self._cache = TextStateCache(cache_dir, self.fingerprint)
        lengths = {
            text: len(self.tokenize(text))
            for text in dict.fromkeys(texts)
            if text not in self._cache
        }
        ordered = sorted(lengths, key=lambda text: (lengths[text], text))
        for start in range(0, len(ordered), TEXTS_PER_FILE):
            chunk = ordered[start : start + TEXTS_PER_FILE]
            batches = [chunk[at : at + BATCH_SIZE] for at in range(0, len(chunk), BATCH_SIZE)]
            states = [rows.cpu() for batch in batches for rows in self.compute_states(batch)]
            self._cache.add(chunk, states)


def _hash_tensor(tensor: Tensor) -> str:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return hashlib.blake2b(
        f"{tensor.dtype} {tuple(tensor.shape)}".encode() + data.tobytes(), digest_size=16
    ).hexdigest()


# ---- loading


class HuggingFaceTokenizer(Protocol):
    """The part of a tokenizer of transformers that is used here."""

    pad_token_id: int | None
    model_max_length: int

    def __call__(self, text: str, **options: int) -> Mapping[str, list[int]]: ...
    def get_vocab(self) -> dict[str, int]: ...
    def num_special_tokens_to_add(self) -> int: ...


@dataclass
class LoadedEncoder:
    """A pretrained encoder and its tokenizer."""

    network: nn.Module
    dim: int
    tokenizer: HuggingFaceTokenizer
    settings: dict[str, object]
    """Its config.json, without entries that do not affect its output."""


def load_encoder(config: PretrainedTextConfig) -> LoadedEncoder:
    """Load an encoder completely, or raise an error that names what is missing.

    Only safetensors are read, and no code that comes with a model is executed.
    """
    transformers = require("transformers", extra="text", purpose="A pretrained text encoder")
    what = f"The text encoder {config.name!r}"
    path = resolve_path(config)
    options = {"local_files_only": not config.download, "trust_remote_code": False}
    with translate_errors(transformers, what, TOKENIZER_FILES):
        settings, _ = transformers.PreTrainedConfig.get_config_dict(path, **options)
        model_config = transformers.AutoConfig.from_pretrained(path, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
        weights = load_weights(_model_class(model_config, transformers), path, **options)
    # The pooler is not used here, and many checkpoints have none.
    network = weights.check_complete(what, unused=("pooler",))
    network = (
        network.get_encoder()
        if model_config.is_encoder_decoder
        else getattr(network, "text_model", network)
    )
    check_max_len(config, network.config, tokenizer)
    settings = {
        name: value
        for name, value in settings.items()
        if name != "transformers_version" and not name.startswith("_")
    }
    return LoadedEncoder(network, network.config.hidden_size, tokenizer, settings)


def resolve_path(config: PretrainedTextConfig) -> str:
    """Return a folder, or a name on the hub if downloads are allowed.

    Earlier downloads are found here, because transformers contacts the hub even with
    `local_files_only` (huggingface_hub 2.4 requests a list of programs, to report which of them
    uses it).
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(config.name).is_dir() or config.download:
        return config.name
    try:
        cached = try_to_load_from_cache(config.name, "config.json")
    except HFValidationError:  # not a valid name on the hub
        cached = None
    if isinstance(cached, str):
        return str(Path(cached).parent)
    raise FileNotFoundError(
        f"The text encoder {config.name!r} is neither a folder nor the name of a model that was"
        " downloaded from the hub before, and nothing is downloaded by default. Give the folder of"
        " an encoder (config.json, .safetensors and the files of its tokenizer), or set `download`."
    )


def _model_class(model_config: object, transformers: ModuleType) -> Any:
    """Return the class of the encoder alone if there is one (T5 and similar), else of the model."""
    if type(model_config) in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING:
        return transformers.AutoModelForTextEncoding
    return transformers.AutoModel


def check_max_len(
    config: PretrainedTextConfig, model_config: object, tokenizer: HuggingFaceTokenizer
) -> None:
    """Raise a ValueError unless the encoder accepts texts of `max_len` tokens.

    T5 accepts any length. Learned position embeddings limit it, and the tokenizer may have a lower
    limit.
    """
    max_positions = getattr(model_config, "max_position_embeddings", None)
    lower = tokenizer.num_special_tokens_to_add() + 1
    if max_positions is None:
        upper = config.max_len
    else:
        upper = min(max_positions, tokenizer.model_max_length)
    if not lower <= config.max_len <= upper:
        limit = "any number of" if max_positions is None else upper
        raise ValueError(
            f"`max_len` is {config.max_len}, but the text encoder {config.name!r} takes from"
            f" {lower} up to {limit} tokens, including its special tokens: use a `max_len` in"
            " this range."
        )


# ---- cache


class TextStateCache:
    """States of texts on disk, in self-contained files texts-KEY-CHECKSUM.safetensors.

    The key is the encoder's fingerprint. A file contains some texts (as JSON), the concatenation of
    their rows, and the offset of each text's rows. Its name contains the checksum of its content. A
    file with another content is ignored and its texts are computed again, and processes that write
    at the same time write identical or different files. Rows are memory-mapped: the disk is read
    when they are used.
    """

    def __init__(self, cache_dir: Path | None = None, key: str = ""):
        self.cache_dir, self.key = cache_dir or Path(), key
        self._rows: dict[str, Tensor] = {}
        files = self.cache_dir.glob(f"texts-{key}-*.safetensors") if cache_dir else []
        for path in sorted(files):
            with contextlib.suppress(OSError, ValueError):
                self.load(path)

    def __contains__(self, text: str) -> bool:
        return text in self._rows

    def __getitem__(self, text: str) -> Tensor:
        """Return the states (l, W) of a text."""
        return self._rows[text]

    def load(self, path: Path) -> None:
        """Add the texts of a file, or raise a ValueError if its checksum is wrong."""
        if path.name != self.file_name(path):
            raise ValueError(f"{path} does not have the checksum of its name")
        tensors = load_file(path)
        texts = json.loads(bytes(tensors["texts"].numpy()))
        offsets = tensors["offsets"].tolist()
        self._rows |= {
            text: tensors["rows"][start:end]
            for text, (start, end) in zip(texts, pairwise(offsets), strict=True)
        }

    def add(self, texts: list[str], rows: list[Tensor]) -> None:
        """Write the states of texts to a new file, atomically."""
        temporary = self.cache_dir / f".texts-{self.key}-{os.getpid()}"
        tensors = {
            "texts": torch.frombuffer(bytearray(json.dumps(texts).encode()), dtype=torch.uint8),
            "offsets": torch.tensor([0, *accumulate(map(len, rows))]),
            "rows": torch.cat(rows),
        }
        try:
            self.cache_dir.mkdir(parents=True, exist_ok=True)
            mode = create_empty(temporary)
            save_file(tensors, temporary)
            temporary.chmod(mode)
            path = self.cache_dir / self.file_name(temporary)
            os.replace(temporary, path)
        except (OSError, SafetensorError) as error:
            raise OSError(
                f"The states of {len(texts)} captions could not be written to {self.cache_dir}"
                f" ({error}). Free some space there, or give another folder."
            ) from error
        finally:
            with contextlib.suppress(OSError):  # already renamed, or never written
                temporary.unlink()
        self.load(path)

    def file_name(self, path: Path) -> str:
        """Return the name that belongs to the content of a file."""
        with open(path, "rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        return f"texts-{self.key}-{checksum}.safetensors"
