"""What generator objectives share: tokenizers, requests, results and prepared captions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from tessera.data.notebook import figures_to_html
from tessera.data.tokens import TokenDataset, TokenizedBatch, TokensInfo
from tessera.engine.task import (
    Alarm,
    Batch,
    DataSettings,
    Examples,
    Frozen,
    Media,
    Source,
    Task,
    TaskConfig,
)
from tessera.sampling.guidance import Guidance
from tessera.text.encoder import TextEncoder

MAX_REPR_LEN = 60
"""The number of characters of the names of samples that a repr shows."""

OnStep = Callable[[int, int, Tensor], None]


class TokenizerProtocol(Protocol):
    """A trained tokenizer as a generator uses it."""

    is_external: bool
    """Whether the tokens were computed elsewhere, so that nothing can be encoded or decoded."""

    @property
    def network(self) -> nn.Module: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def grid(self) -> tuple[int, ...]: ...
    @property
    def num_quantizers(self) -> int: ...
    @property
    def features(self) -> Tensor | None: ...
    @property
    def seconds(self) -> float | None: ...
    def encode_examples(self, examples: Examples) -> Tensor: ...
    def to_media(self, codes: Tensor) -> Sequence[Media]: ...


class MediaTokenizer(TokenizerProtocol, Protocol):
    """A tokenizer that can encode media, with the fingerprint of its codes."""

    @property
    def fingerprint(self) -> str: ...
    def info(self) -> TokensInfo: ...
    def with_data(self, data: DataSettings) -> MediaTokenizer: ...


@dataclass(frozen=True)
class TokenPrompt:
    """Codes that a sample starts from, for one example."""

    codes: Tensor
    """The given codes, (1, *grid), or (B, *grid) in a request that is generated as one batch."""
    mask: Tensor | None = None
    """Which codes to generate, of the same shape; None if the codes are a prefix to continue."""
    cond_codes: Tensor | None = None
    """Codes of the conditioning tokenizer, (1, ...)."""
    trim: int = 0
    """The number of leading positions that are not part of the sample."""


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What to generate, from the command line to the sampler; one entry for each sample."""

    prompts: Sequence[str]
    """The text prompts; "" generates without one."""
    seeds: Sequence[int]
    """The seed of each sample."""
    names: Sequence[str] = ()
    """Labels of the samples; without them the prompts are the labels."""
    negative_prompt: str | None = None
    """The text that guidance leads away from; None uses the unconditional model."""
    start: TokenPrompt | None = None
    """Codes that every sample starts from."""
    cond_codes: Tensor | None = None
    """Codes of the conditioning tokenizer, (B, ...)."""
    lengths: Sequence[int] | None = None
    """The number of valid positions of each sample, where they differ."""
    sampling: Any = None
    """The sampling configuration; None uses that of the run."""
    guidance: Guidance | None = None
    """The guidance configuration; None uses that of the run."""
    on_step: OnStep | None = None
    """Called after each decoding step with its number, the number of steps, and the codes so far,
    (B, *grid); it may raise to stop."""

    def __len__(self) -> int:
        return len(self.prompts)

    def slice(self, start: int, stop: int) -> GenerationRequest:
        """Return the request for a range of the samples."""
        return self.select(range(len(self))[start:stop])

    def select(self, rows: Sequence[int]) -> GenerationRequest:
        """Return the request for some of the samples."""
        return replace(
            self,
            prompts=[self.prompts[row] for row in rows],
            seeds=[self.seeds[row] for row in rows],
            names=[self.names[row] for row in rows] if self.names else (),
            cond_codes=None if self.cond_codes is None else self.cond_codes[list(rows)],
            lengths=None if self.lengths is None else [self.lengths[row] for row in rows],
        )

    def generators(self) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in self.seeds]

    def conditioning_codes(self, device: torch.device) -> Tensor | None:
        """Return the codes to condition on, (B, ...)."""
        codes = self.cond_codes
        if codes is None and self.start is not None and self.start.cond_codes is not None:
            codes = self.start.cond_codes.expand(len(self), *self.start.cond_codes.shape[1:])
        return None if codes is None else codes.to(device)

    def guided_texts(self, guidance_scale: float) -> tuple[list[str], list[bool]]:
        """Return texts and which of them are dropped; with guidance, twice as many."""
        texts, dropped = list(self.prompts), [False] * len(self)
        if guidance_scale != 1:
            negative = self.negative_prompt
            texts += list(self.prompts) if negative is None else [negative] * len(self)
            dropped += [negative is None] * len(self)
        return texts, dropped


@dataclass(repr=False)
class Generated:
    """Samples with their codes; a notebook shows them with their names."""

    media: list[Media] = field(default_factory=list)
    codes: list[Tensor] = field(default_factory=list)
    """The codes of each sample, (*grid)."""
    names: list[str] = field(default_factory=list)
    """A label for each sample: its prompt, or the example it was made from."""
    settings: dict[str, object] = field(default_factory=dict)
    """The settings with which the samples were made."""
    notices: list[str] = field(default_factory=list)
    """Remarks for the user."""

    def __repr__(self) -> str:
        kind = type(self.media[0]).__name__ if self.media else "none"
        names = ", ".join(map(repr, dict.fromkeys(self.names)))
        shown = names if len(names) <= MAX_REPR_LEN else f"{names[:MAX_REPR_LEN]}..."
        return f"Generated(samples={len(self.media)}, media={kind}, names=[{shown}])"

    def _repr_html_(self) -> str:
        return figures_to_html(self.media, self.names)


@dataclass(frozen=True)
class MediaInputs:
    """Media files from which samples start, under the names of the flags of `tessera sample`.

    A modality adds its own.
    """

    data: str | None = None


class PromptEncoder(Protocol):
    """Access to a run's tokenizers for the prompts of a modality."""

    @property
    def data(self) -> DataSettings: ...
    def encode_file(self, path: str) -> Tensor: ...
    def encode_with(self, tokenizers: Sequence[str], data: DataSettings) -> list[Tensor]: ...
    @property
    def tokenizers(self) -> Mapping[str, Any]: ...


class GeneratorModelConfig(Protocol):
    """The configuration of a network that predicts tokens."""

    @property
    def text(self) -> object | None:
        """The configuration of the text encoder, or None for a model without prompts."""


class GeneratorNetwork(Protocol):
    """A network that predicts tokens."""

    @property
    def text(self) -> TextEncoder | None:
        """The text encoder, or None for a model without prompts."""


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig(TaskConfig):
    """Base class of generator configurations.

    A modality subclasses it to declare its tokenizers and to turn media files into token prompts.
    Without further fields the tokenizer is part of the modality and is not trained.
    """

    entry_point: ClassVar[str] = "Generator"
    inputs_class: ClassVar[type[MediaInputs]] = MediaInputs
    """The inputs that `encode_prompt` takes."""

    cond_drop_prob: float = 0.1
    """The probability with which the caption of a training example is dropped, for guidance."""
    model: GeneratorModelConfig

    def __post_init__(self) -> None:
        if not 0 <= self.cond_drop_prob < 1:
            raise ValueError(
                f"cond_drop_prob must be at least 0 and below 1, got {self.cond_drop_prob}."
            )

    @property
    def uses_captions(self) -> bool:
        return self.model.text is not None

    def encode_prompt(self, inputs: MediaInputs, encoder: PromptEncoder) -> TokenPrompt | None:
        """Turn media files into codes to start from; None if they only provide captions."""
        return None

    def finish_media(
        self, media: Sequence[Media], start: TokenPrompt | None, data: DataSettings
    ) -> Sequence[Media]:
        """Return decoded samples as they are saved, such as without parts that were added."""
        return media


@dataclass(frozen=True, kw_only=True)
class TokenizedGeneratorConfig(GeneratorConfig):
    """Base class of configurations of generators that use the tokens of a trained tokenizer."""

    tokenizer: str
    """The run of the tokenizer whose tokens are generated; it is copied into the run directory."""
    tokens: str = "cache"
    """When examples are tokenized: `cache` tokenizes once before the first step, `live` at every
    step, which augmentation needs; or the path of a folder that `tessera tokenize` wrote."""

    def conditioning(self) -> dict[str, str]:
        """Return the run of the tokenizer whose tokens are a condition, by its name."""
        return {}

    def dependencies(self) -> dict[str, str]:
        return {"tokenizer": self.tokenizer} | self.conditioning()

    def prepare_dataset(
        self,
        dataset: TokenDataset,
        tokenizers: Mapping[str, TokenizerProtocol],
        source: Source,
    ) -> Source:
        """Return tokenized examples as they are trained on, such as several joined to one.

        `source` has the examples that were tokenized, with the same names.
        """
        return dataset

    def notice(self, data: object) -> str:
        return f"Tokenizer: {self.tokenizer}."

    def validate_data(self, data: DataSettings) -> None:
        if self.tokens != "live" and data != data.without_augmentation():
            raise ValueError(
                "Augmented examples cannot be tokenized in advance: disable augmentation (for "
                "images --data.crop centre, no --data.flip, --data.min-scale 1), or use "
                "--task.tokens live."
            )


class GeneratorTask(Task):
    """Base class of generator tasks; a subclass defines `network` and `generate`."""

    config: Any
    """A `GeneratorConfig` with `sampling` and `guidance`, whose types are the subclass's."""
    conditioner: str | None = None
    """The name of the tokenizer whose tokens are a condition, if there is one."""

    def __init__(self, tokenizers: Mapping[str, TokenizerProtocol]):
        super().__init__()
        self.tokenizers = dict(tokenizers)
        self.frozen = nn.ModuleList([Frozen(one.network) for one in self.tokenizers.values()])

    @property
    def network(self) -> GeneratorNetwork:
        """The network that predicts tokens."""
        raise NotImplementedError

    def text_networks(self) -> Sequence[GeneratorNetwork]:
        """Return the networks that have a text encoder."""
        return [self.network] if self.network.text is not None else []

    def prepare_text(self, captions: Sequence[str], cache_dir: Path) -> None:
        if self.network.text is None:
            return
        if not any(captions):
            raise ValueError(
                "No example has a caption, but this recipe is trained on captions: put name.txt "
                "beside each file, or a metadata.jsonl, or sort the files into named folders. For "
                "a model without prompts use --text none."
            )
        for network in self.text_networks():
            assert network.text is not None
            network.text.prepare_text(captions, cache_dir)

    def get_codes(self, examples: Examples, tokenizer: str = "tokenizer") -> Tensor:
        """Return cached codes, or tokenize the examples now."""
        if isinstance(examples, TokenizedBatch):
            return examples.codes[tokenizer]
        with torch.no_grad():
            return self.tokenizers[tokenizer].encode_examples(examples)

    def request_like(self, batch: Batch) -> GenerationRequest:
        """Return the request for samples with the captions and conditions of examples."""
        return GenerationRequest(prompts=batch.examples.captions, seeds=batch.seeds)

    def generate(self, request: GenerationRequest) -> Tensor:
        """Generate codes (B, *grid), with -1 after the end of a sample."""
        raise NotImplementedError

    def measure_conditions(self, batches: Iterable[Batch], seed: int) -> dict[str, float]:
        """Return metrics of samples that start from a part of held-out examples.

        By default there are none, and nothing is read.
        """
        return {}

    def sample(self, batch: Batch) -> Sequence[Media]:
        return self.tokenizers["tokenizer"].to_media(self.generate(self.request_like(batch)))


def other_captions(captions: Sequence[str]) -> list[str] | None:
    """Return for each example the next different caption of the batch; None if all are equal.

    The caption of the next example is often the same where captions are classes.
    """
    if len(set(captions)) < 2:
        return None
    doubled = [*captions, *captions]
    return [next(one for one in doubled[i + 1 :] if one != own) for i, own in enumerate(captions)]


PROMPT_IGNORED = Alarm(
    name="prompt ignored",
    metric="val_ema/condition_gain",
    below=0.005,
    patience=3,
    after=1000,
    hint="Shuffled captions predict the tokens as well as the right ones. Inspect the captions "
    "(`tessera check`), or train longer.",
)
