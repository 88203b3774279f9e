"""Training and evaluation of semantic tokens that are trained on transcripts (`ctc.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import PIL.Image
import PIL.ImageDraw
import torch
from torch import Tensor

from tessera.engine.device import move_tensors
from tessera.engine.task import Batch, BestMetric, Inputs, Loss
from tessera.losses.ctc import CTCTargets, ctc_loss_B, most_likely_labels
from tessera.metrics.codebook import codebook_bits
from tessera.metrics.text import edit_distance
from tessera.modalities.audio.ctc import CharacterReconstruction, CTCTokenizer
from tessera.modalities.audio.features import num_frames
from tessera.modalities.audio.media import AudioBatch
from tessera.modalities.audio.reconstruction import WaveformAdapter
from tessera.modalities.image.media import Image
from tessera.objectives.reconstruction import (
    ReconstructionConfig,
    ReconstructionLoss,
    TokenizerConfig,
    TokenizerTask,
)
from tessera.text.characters import CharacterVocab

FRAME_PIXELS, ROW_PIXELS, TEXT_PIXELS = 4, 6, 16
"""The size of a frame, of a character and of a line of text in an image."""


@dataclass(frozen=True, kw_only=True)
class RecognitionConfig(ReconstructionConfig):
    """Metrics of recognised text; the loss is that of CTC."""

    def build(self) -> RecognitionMetrics:
        return RecognitionMetrics()


class RecognitionMetrics(ReconstructionLoss):
    best_metric = BestMetric(name="character_error", higher_is_better=False)

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {
            "character_error": float(totals["errors"] / totals["characters"].clamp_min(1)),
            "ctc": float(totals["ctc"] / totals["examples"]),
            "bits_per_second": float(codebook_bits(totals["codes"]) / totals["seconds"]),
        }


class RecognitionAdapter(WaveformAdapter):
    """Shows the logits of characters with the text that they are recognised as."""

    def __init__(self, vocab: CharacterVocab):
        self.vocab = vocab

    def to_media(self, output: Tensor) -> list[Image]:
        """Draw logits (B, T, V)."""
        frames_B = torch.full((len(output),), output.shape[1])
        texts = map(self.vocab.decode, most_likely_labels(output, frames_B))
        used = 1 + len(self.vocab.characters)
        return [
            draw_characters(logits_TV[:, :used], [text])
            for logits_TV, text in zip(output, texts, strict=True)
        ]


class CTCTask(TokenizerTask):
    model: CTCTokenizer

    def __init__(self, config: TokenizerConfig):
        super().__init__(config)
        self.adapter = RecognitionAdapter(self.model.vocab)

    def prepare_text(self, captions: Sequence[str], cache_dir: Path) -> None:
        self.model.vocab.train_from(captions)

    def prepare_inputs(self, batch: Batch[AudioBatch]) -> dict[str, Inputs]:
        """Draw noise and the scale of the frequencies of each example, and look up its labels."""
        lengths = batch.examples.lengths.tolist()
        inputs = super().prepare_inputs(batch) | {
            "longest": self.pad_length(max(lengths), batch.examples.samples.shape[2]),
            "frames": [num_frames(length, self.model.hop) for length in lengths],
            "targets": CTCTargets.from_labels(self.model.labels(batch.examples.captions)),
        }
        config, generators = self.model.config, batch.generators()
        if config.noise_db is not None:
            rows = zip(batch.examples.samples, generators, strict=True)
            noise = [draw_noise(samples_1N, config.noise_db, one) for samples_1N, one in rows]
            inputs["noise"] = torch.stack(noise)
        if config.warp:
            exponent_B = torch.stack([2 * torch.rand((), generator=one) - 1 for one in generators])
            inputs["warp_B"] = (1 + config.warp) ** exponent_B
        return inputs

    def reconstruction_loss(self, batch: Batch[AudioBatch], step: int) -> Loss:
        kwargs = self.train_kwargs(batch)
        frames, targets = kwargs.pop("frames"), kwargs.pop("targets")
        output: CharacterReconstruction = self.model(batch.examples.samples, **kwargs)
        loss_B = ctc_loss_B(output.output, frames, targets)
        logits_BTV, captions = output.output.detach(), batch.examples.captions
        error = partial(self.mean_character_error, logits_BTV, output.frames_B, captions)
        return Loss({"ctc": loss_B.mean()} | output.penalties, {"character_error": error})

    def eval_step(self, batch: Batch[AudioBatch]) -> dict[str, Tensor]:
        output: CharacterReconstruction = self.reconstruct(batch)  # type: ignore[assignment]
        labels = self.model.labels(batch.examples.captions)
        found = most_likely_labels(output.output, output.frames_B)
        pairs = [pair for pair in zip(found, labels, strict=True) if pair[1]]
        device, codes = output.codes.device, output.codes
        targets = move_tensors(CTCTargets.from_labels(labels), device)
        return {
            "examples": torch.tensor(len(batch), device=device),
            "codes": torch.bincount(codes[codes >= 0], minlength=self.model.vocab_size)[None],
            "errors": torch.tensor(sum(edit_distance(*pair) for pair in pairs), device=device),
            "characters": torch.tensor(sum(len(one) for _, one in pairs), device=device),
            "ctc": ctc_loss_B(output.output, output.frames_B.tolist(), targets).sum(),
            "seconds": batch.examples.lengths.double().sum() / batch.examples.rate_hz,
        }

    def sample(self, batch: Batch[AudioBatch]) -> list[Image]:
        """Draw the probabilities of characters over time, with the transcript and the text that was
        recognised."""
        output: CharacterReconstruction = self.reconstruct(batch)  # type: ignore[assignment]
        found = most_likely_labels(output.output, output.frames_B)
        frames, captions = output.frames_B.tolist(), batch.examples.captions
        used = 1 + len(self.model.vocab.characters)
        return [
            draw_characters(logits_TV[:count, :used], [caption, self.model.vocab.decode(labels)])
            for logits_TV, count, labels, caption in zip(
                output.output, frames, found, captions, strict=True
            )
        ]

    def mean_character_error(
        self, logits_BTV: Tensor, frames_B: Tensor, captions: Sequence[str]
    ) -> Tensor:
        """Return the mean over examples of their character error, so that micro-batches add up."""
        found = most_likely_labels(logits_BTV, frames_B)
        errors = [
            edit_distance(one, expected) / max(1, len(expected))
            for one, expected in zip(found, self.model.labels(captions), strict=True)
        ]
        return torch.tensor(errors, device=logits_BTV.device).mean()


def draw_noise(
    samples_1N: Tensor, range_db: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """Draw noise that follows the amplitude of the samples, and steady noise, (1, N).

    The first is that of the modulated noise reference unit (ITU-T P.810), which stands for the
    noise of codecs.
    """
    low, high = range_db
    ratios_db = low + (high - low) * torch.rand(2, generator=generator)
    modulated, steady = 10 ** (-ratios_db / 20)
    noise_2N = torch.randn(2, samples_1N.shape[1], generator=generator)
    rms = samples_1N.square().mean().sqrt()
    return samples_1N * modulated * noise_2N[:1] + rms * steady * noise_2N[1:]


def draw_characters(logits_TV: Tensor, lines: Sequence[str]) -> Image:
    """Draw the probability of each character, from left to right, above some lines of text."""
    probability_VT = logits_TV.detach().float().softmax(-1).T.cpu().numpy()
    pixels = probability_VT.repeat(ROW_PIXELS, 0).repeat(FRAME_PIXELS, 1)
    drawn = PIL.Image.fromarray((255 * pixels).round().astype(np.uint8))
    width = max(drawn.width, 8 * max(map(len, lines)))
    canvas = PIL.Image.new("RGB", (width, drawn.height + len(lines) * TEXT_PIXELS))
    canvas.paste(drawn, (0, 0))
    draw = PIL.ImageDraw.Draw(canvas)
    for line, text in enumerate(lines):
        draw.text((2, drawn.height + line * TEXT_PIXELS), text, fill="white")
    return Image(np.array(canvas))
