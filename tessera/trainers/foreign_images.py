"""The contract of muse-maskgit-pytorch's VQGanVAE: three calls with flags.

    model(images, return_loss=True)        -> loss
    model(images, return_discr_loss=True)  -> loss
    model(images)                          -> reconstruction

Images are (B, C, H, W) in [0, 1]. The discriminator is `model.discr`, or None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.data.dataset import Split
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, BestMetric, Loss, Update
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.media import Image, ImageExample
from tessera.trainers.foreign import (
    DISCRIMINATOR,
    MODEL,
    ForeignLoss,
    ForeignTask,
    check_contract,
    convert_split,
    freeze_vgg,
    seed_model,
    split_model,
)

PARAMETERS = ("return_loss", "return_discr_loss")


class ForeignVQGANTask(ForeignTask):
    best_metric = BestMetric(name="recon_loss", higher_is_better=False)
    optimizer_keys = {}  # the published trainer stores its state in an order that is random

    def __init__(
        self,
        model: object,
        optimizer: OptimizerConfig,
        discriminator_optimizer: OptimizerConfig,
    ):
        checked = check_contract(
            model,
            trainer="VQGanVAETrainer",
            ours="a VQGAN of VQGANConfig",
            parameters=PARAMETERS,
            attributes=("discr",),
        )
        super().__init__(checked)
        others = [*freeze_vgg(self.model), "discr"]
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
        if self.model.discr is not None:
            self.updates += (
                Update(
                    name="discriminator",
                    trains=self.model.discr,
                    loss=self.discriminator_loss,
                    optimizer=discriminator_optimizer,
                    find_unused=True,
                ),
            )

    def reconstruction_loss(self, batch: Batch, step: int) -> Loss:
        seed_model(batch, MODEL)
        return ForeignLoss(self.model(batch.examples.data, return_loss=True)).to_loss()

    def discriminator_loss(self, batch: Batch, step: int) -> Loss:
        """Return the discriminator's loss, with the gradient penalty at every step.

        The published model fails in this call without it.
        """
        seed_model(batch, DISCRIMINATOR)
        images = batch.examples.data.detach().clone()  # the model makes its input require gradients
        return ForeignLoss(self.model(images, return_discr_loss=True)).to_loss()

    def eval_loss(self, batch: Batch) -> dict[str, Tensor]:
        return {"recon_loss": F.l1_loss(self.model(batch.examples.data), batch.examples.data)}

    def sample(self, batch: Batch) -> Sequence[Image]:
        """Return each original side by side with its reconstruction."""
        images = batch.examples.data
        pairs = zip(images, self.model(images), strict=True)
        return [Image.side_by_side(to_image(real), to_image(fake)) for real, fake in pairs]


def to_image(values: Tensor) -> Image:
    """Convert an image with values in [0, 1] and any number of channels."""
    image = values.detach().float().cpu().clamp(0, 1) * 2 - 1
    image = image[:3] if len(image) >= 3 else image[:1].expand(3, -1, -1)
    return Image.from_floats(image.numpy())


def read_images(data: ImageDataConfig) -> Split:
    """Return the images of a folder, in [0, 1]."""
    return convert_split(data.build(captions=False), to_unit)


def to_unit(example: ImageExample) -> Tensor:
    return (torch.from_numpy(example.pixels) + 1) / 2
