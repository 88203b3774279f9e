"""The task of text to speech's first part: semantic tokens from transcripts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tessera.data.dataset import ExampleDataset, Subset
from tessera.data.tokens import TokenDataset
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, Loss, Source
from tessera.modalities.audio.ctc import CTCTokenizer
from tessera.modalities.audio.semantic_reconstruction import check_transcripts
from tessera.modalities.audio.text_to_semantic import (
    TextToSemantic,
    TextToSemanticConfig,
    with_speed,
)
from tessera.objectives.autoregressive import (
    AutoregressiveConfig,
    AutoregressiveInputs,
    AutoregressiveTask,
    token_accuracy,
)
from tessera.objectives.generation import (
    GenerationRequest,
    TokenizedGeneratorConfig,
    TokenizerProtocol,
)
from tessera.sampling.autoregressive import AutoregressiveSampling, StartDecoding
from tessera.sampling.guidance import Guidance
from tessera.text.characters import normalize_text

if TYPE_CHECKING:
    from tessera.modalities.audio.dataset import AudioDataConfig

LENGTH_FACTOR = 2
"""Sentences may be this many times as long as the longest recording of the training."""


@dataclass(frozen=True, kw_only=True)
class SpeechSampling(AutoregressiveSampling):
    temperature: float = 0.7
    """Sampling temperature; 0 takes the most likely token."""
    speed: float = 1.0
    """The speed of speech; durations are divided by it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.25 <= self.speed <= 4:
            raise ValueError(f"speed must be between 0.25 and 4, got {self.speed}.")


@dataclass(frozen=True, kw_only=True)
class TextToSemanticTaskConfig(AutoregressiveConfig, TokenizedGeneratorConfig):
    tokenizer: str = "runs/audio-semantic"
    """The run of the semantic tokenizer whose tokens are generated: one of `--features ctc`."""
    soundstorm: str | None = "runs/audio-soundstorm"
    """The run of SoundStorm that turns these tokens into audio, with the same semantic tokenizer.
    It is copied into the run directory, so that the run can speak; none trains without."""
    cond_drop_prob: float = 0.0
    """Text is never dropped: speech without text has no length."""
    duration_weight: float = 0.2
    """The weight of the cross-entropy of durations."""
    model: TextToSemanticConfig = TextToSemanticConfig()
    sampling: SpeechSampling = field(default_factory=SpeechSampling)
    guidance: Guidance = field(default_factory=lambda: Guidance(scale=1.0))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cond_drop_prob:
            raise ValueError("cond_drop_prob must be 0: speech without text has no length.")

    def companions(self) -> dict[str, str]:
        return {} if self.soundstorm is None else {"soundstorm": self.soundstorm}

    def validate_data(self, data: AudioDataConfig) -> None:
        super().validate_data(data)
        check_transcripts(data)

    def describe_missing_captions(self, missing: int, total: int) -> str:
        return f"{missing:,} of {total:,} recordings have no transcript and are left out."

    def prepare_dataset(
        self,
        dataset: TokenDataset,
        tokenizers: Mapping[str, TokenizerProtocol],
        source: Source,
    ) -> ExampleDataset:
        """Leave out examples without a transcript."""
        spoken = [i for i in range(len(dataset)) if normalize_text(dataset.caption(i))]
        return dataset if len(spoken) == len(dataset) else Subset(dataset, spoken)

    def build_model(self, tokenizer: TokenizerProtocol) -> TextToSemantic:
        recognizer = getattr(tokenizer, "model", None)
        if not isinstance(recognizer, CTCTokenizer):
            raise ValueError(
                "Text to speech needs semantic tokens that are trained on transcripts: train them "
                "with `tessera train audio-semantic --features ctc`."
            )
        return self.model.build(recognizer, LENGTH_FACTOR * tokenizer.grid[0])

    def build(self, **dependencies: TokenizerProtocol) -> TextToSemanticTask:
        return TextToSemanticTask(self, **dependencies)


class TextToSemanticTask(AutoregressiveTask):
    config: TextToSemanticTaskConfig
    model: TextToSemantic

    def __init__(self, config: TextToSemanticTaskConfig, tokenizer: TokenizerProtocol):
        super().__init__(config, tokenizer)
        self.max_positions = self.model.max_len

    def next_token_loss(self, batch: Batch, step: int) -> Loss:
        inputs: AutoregressiveInputs = self.get_inputs(batch)
        condition = self.model.condition(inputs.text or batch.examples.captions)
        predictions = self.model.predict(inputs.tokens_BNS, condition, inputs.model)
        correct_M = (predictions.logits_MV.detach().argmax(-1) == predictions.targets_M).float()
        terms = {
            "cross_entropy": predictions.cross_entropy_B().mean(),
            "duration": self.config.duration_weight * predictions.duration_loss_B.mean(),
        }
        accuracy = partial(token_accuracy, correct_M, predictions.example_M, predictions.count_B)
        return Loss(terms, {"accuracy": accuracy, "frames_error": predictions.frames_error_B.mean})

    def eval_step(self, batch: Batch) -> dict[str, Tensor]:
        sums = super().eval_step(batch)
        inputs: AutoregressiveInputs = self.get_inputs(batch)
        condition = self.model.condition(batch.examples.captions)
        predictions = self.model.predict(inputs.tokens_BNS, condition, inputs.model)
        error_B = predictions.frames_error_B
        examples = torch.tensor(len(batch), device=error_B.device)
        return sums | {"frames_error": error_B.sum(), "examples": examples}

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        metrics = super().compute_metrics(totals)
        return metrics | {"frames_error": float(totals["frames_error"] / totals["examples"])}

    def start_decoding(self, request: GenerationRequest, guidance: Guidance) -> StartDecoding:
        """Return the function that starts decoding at the requested speed."""
        if guidance.scale != 1:
            raise ValueError("Text to speech has no guidance: leave --guidance out.")
        sampling: SpeechSampling = request.sampling or self.config.sampling
        for text in request.prompts:
            if not self.model.text.encode_text(text):
                raise ValueError(describe_unreadable(self.model, text))
        condition = self.model.condition(request.prompts)
        return partial(self.model.start_decoding, with_speed(condition, sampling.speed))


def describe_unreadable(model: TextToSemantic, text: str) -> str:
    """Return why a text cannot be spoken."""
    unknown = model.text.vocab.find_unknown(text)
    if not unknown:
        return f"There is nothing to say in {text!r}: give a text with characters."
    return (
        f"The characters {' '.join(unknown[:10])} were not in the transcripts of the training: "
        f"write the text with {model.text.vocab.characters.strip()}, numbers as words."
    )
