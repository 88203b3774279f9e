"""Training and evaluation of semantic tokens by masked prediction (`hubert.py`)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tessera.engine.task import Batch, Inputs, Loss
from tessera.modalities.audio.features import num_frames
from tessera.modalities.audio.hubert import HubertReconstruction, HubertTokenizer, draw_spans
from tessera.modalities.audio.media import AudioBatch
from tessera.objectives.reconstruction import TokenizerTask


class HubertTask(TokenizerTask):
    model: HubertTokenizer

    def prepare_inputs(self, batch: Batch[AudioBatch]) -> dict[str, Inputs]:
        """Draw the masked spans of each example, from its generator and its own length."""
        inputs, config = super().prepare_inputs(batch), self.model.config
        rows = zip(batch.examples.lengths.tolist(), batch.generators(), strict=True)
        spans = [
            draw_spans(
                num_frames(max(1, length), config.hop),
                config.mask_fraction,
                config.mask_frames,
                generator,
            )
            for length, generator in rows
        ]
        masked_BT = pad_sequence(spans, batch_first=True)
        frames = num_frames(batch.examples.samples.shape[2], config.hop)
        return inputs | {"masked_BT": F.pad(masked_BT, (0, frames - masked_BT.shape[1]))}

    def reconstruction_loss(self, batch: Batch[AudioBatch], step: int) -> Loss:
        output: HubertReconstruction = self.model(
            batch.examples.samples, **self.train_kwargs(batch)
        )
        assert output.prediction is not None
        return Loss(output.penalties, {"masked_accuracy": output.prediction.accuracy_B.mean})

    def eval_step(self, batch: Batch[AudioBatch]) -> dict[str, Tensor]:
        sums = super().eval_step(batch)
        output: HubertReconstruction = self.model(
            batch.examples.samples, **self.train_kwargs(batch)
        )
        assert output.prediction is not None
        return sums | {
            "masked_prediction": output.prediction.cross_entropy_B.double().sum(),
            "masked_accuracy": output.prediction.accuracy_B.double().sum(),
        }

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        names = ("masked_prediction", "masked_accuracy")
        means = {name: float(totals[name] / totals["examples"]) for name in names}
        return super().compute_metrics(totals) | means
