"""The contract of magvit2-pytorch's VideoTokenizer: three calls with flags.

    model(videos, return_loss=True, adversarial_loss_weight=...)       -> loss, breakdown
    model(videos, return_discr_loss=True, apply_gradient_penalty=...)  -> loss, breakdown
    model(videos, return_recon_loss_only=True)                         -> loss, reconstruction

Videos are (B, C, T, H, W), or images (B, C, H, W), in [0, 1].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from tessera.data.dataset import Split
from tessera.data.errors import UnreadableFile
from tessera.data.source import Items
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, BestMetric, Loss, Update
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.modalities.video.io.base import DEFAULT_RATE_HZ
from tessera.modalities.video.media import Video, VideoExample
from tessera.run.errors import UserError
from tessera.trainers.foreign import (
    DISCRIMINATOR,
    MODEL,
    ForeignDataset,
    ForeignLoss,
    ForeignTask,
    ModelPart,
    breakdown_values,
    check_contract,
    convert_split,
    forward_parameters,
    freeze_vgg,
    seed_model,
    split_model,
)

PARAMETERS = ("return_loss", "return_discr_loss", "return_recon_loss_only")
DISCRIMINATORS = ("discr", "multiscale_discrs")


class ForeignVideoTask(ForeignTask):
    best_metric = BestMetric(name="recon_loss", higher_is_better=False)
    optimizer_keys = {"model": "optimizer", "discriminator": "discr_optimizer"}

    def __init__(
        self,
        model: object,
        optimizer: OptimizerConfig,
        *,
        start_step: int,
        gp_every: int,
    ):
        checked = check_contract(
            model,
            trainer="VideoTokenizerTrainer",
            ours="a VideoTokenizer of VideoTokenizerConfig",
            parameters=PARAMETERS,
            attributes=("image_size",),
        )
        super().__init__(checked)
        self.gp_every, self.start_step = gp_every, start_step
        self.has_gan = bool(getattr(self.model, "has_gan", getattr(self.model, "use_gan", False)))
        others = [*freeze_vgg(self.model), *DISCRIMINATORS]
        self.updates = (
            Update(
                name="model",
                trains=split_model(self.model, others),
                loss=self.reconstruction_loss,
                optimizer=optimizer,
                find_unused=True,
                also_train=(self.model,),
            ),
        )
        if self.has_gan:
            self.updates += (
                Update(
                    name="discriminator",
                    trains=ModelPart(self.model, DISCRIMINATORS),
                    loss=self.discriminator_loss,
                    optimizer=optimizer,
                    start_step=start_step,
                    find_unused=True,
                ),
            )
        else:
            for name in DISCRIMINATORS:
                for parameter in getattr(self.model, name, torch.nn.Module()).parameters():
                    parameter.requires_grad = False

    def reconstruction_loss(self, batch: Batch, step: int) -> Loss:
        seed_model(batch, MODEL)
        weights = {}
        if not self.has_gan or step < self.start_step:
            names = forward_parameters(self.model)
            weights = {
                name: 0.0
                for name in ("adversarial_loss_weight", "multiscale_adversarial_loss_weight")
                if name in names
            }
        total, breakdown = self.model(batch.examples.data, return_loss=True, **weights)
        return ForeignLoss(total, dict(breakdown_values(breakdown))).to_loss()

    def discriminator_loss(self, batch: Batch, step: int) -> Loss:
        seed_model(batch, DISCRIMINATOR)
        total, breakdown = self.model(
            batch.examples.data.detach().clone(),
            return_discr_loss=True,
            apply_gradient_penalty=step % self.gp_every == 0,
        )
        return ForeignLoss(total, dict(breakdown_values(breakdown))).to_loss()

    def eval_loss(self, batch: Batch) -> dict[str, Tensor]:
        loss, _ = self.model(batch.examples.data, return_recon_loss_only=True)
        return {"recon_loss": loss}

    @property
    def has_samples(self) -> bool:
        """Whether the package that writes videos is installed, which training does not need."""
        return find_spec("av") is not None

    def sample(self, batch: Batch) -> Sequence[Video]:
        """Return each original side by side with its reconstruction."""
        videos = batch.examples.data
        _, made = self.model(videos, return_recon_loss_only=True)
        return [
            Video.side_by_side(to_video(real), to_video(fake))
            for real, fake in zip(videos, made, strict=True)
        ]


def to_video(values: Tensor) -> Video:
    """Convert a video or an image with values in [0, 1] and any number of channels."""
    video = values.detach().float().cpu().clamp(0, 1) * 2 - 1
    video = video.unsqueeze(1) if video.ndim == 3 else video
    video = video[:3] if len(video) >= 3 else video[:1].expand(3, -1, -1, -1)
    return Video.from_floats(video.numpy(), DEFAULT_RATE_HZ)


def build_videos(dataset: Items) -> ForeignDataset:
    """Return videos in memory; of an item with several values, the video is the largest."""
    return ForeignDataset(dataset, stack_videos, parse=parse_video)


def parse_video(item: object) -> Tensor:
    """Return the video (C, T, H, W) or the image (C, H, W) of an item."""
    values = [item]
    if isinstance(item, Mapping):
        values = list(item.values())
    elif isinstance(item, (tuple, list)):
        values = list(item)
    tensors = [torch.as_tensor(one) for one in values if isinstance(one, (Tensor, np.ndarray))]
    video = max(tensors, key=lambda one: one.ndim, default=torch.zeros(()))
    if video.ndim not in (3, 4) or not video.is_floating_point():
        found = [f"{one.dtype} of shape {tuple(one.shape)}" for one in tensors]
        raise UnreadableFile(
            f"it is a {type(item).__name__} with {', '.join(found) or 'no tensors'}, but must have "
            "a video (channels, frames, height, width) or an image (channels, height, width) of "
            "floats from 0 to 1"
        )
    return video.float()


def stack_videos(videos: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(video.shape) for video in videos}
    if len(shapes) > 1:
        raise UserError(
            f"The videos have different shapes, such as {' and '.join(map(str, sorted(shapes)))}, "
            "but must be equal to be trained in one batch: crop and resize them in the dataset."
        )
    return torch.stack(list(videos))


def read_videos(data: VideoDataConfig) -> Split:
    """Return the videos of a folder, in [0, 1]."""
    return convert_split(data.build(captions=False), to_unit)


def to_unit(example: VideoExample) -> Tensor:
    video = torch.from_numpy(example.video)
    return (video + 1) / 2
