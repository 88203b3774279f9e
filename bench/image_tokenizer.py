"""The sides of the image tokenizer's training step: ours, and muse-maskgit-pytorch's by its own
trainer.

Pictures of 64 x 64 from PNG files, batch 4, dim 32, 3 halvings, LFQ with 256 symbols, discriminator
with 3 layers, moving average each step. Both do whole steps, pictures read and decoded, with the
same losses: L1, a perceptual term on two strided convolutions of 8 channels, LFQ's entropy, a hinge
discriminator weighed by gradients at the last layer, and a gradient penalty. Theirs takes the
penalty at every step, whatever it is asked for; ours as often as it is told.

Our network has their widths (`late=1`: 32, 32, 64, 128).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import endless
from sides import About, Side, mflop, parameters, versions

SIDE, BATCH, SYMBOLS = 64, 4, 256


def theirs(work: Path) -> Side:
    os.environ["PEER_WORK"] = str(work)
    from peer_adapters import VqganA

    adapter = VqganA()
    adapter.seed(0)
    model = adapter.build()
    judge, features = parameters(model.discr), parameters(model.vgg)
    about = About(
        parameters={"model": parameters(model) - judge - features, "judge": judge},
        mflop={"model": picture_mflop(model), "judge": picture_mflop(model.discr)},
        packages=versions("muse-maskgit-pytorch", "vector-quantize-pytorch", "torch"),
    )
    trainer = adapter.trainer(model, str(work / "theirs"), endless.NEVER)
    return Side(about, lambda: adapter.run(trainer, 1))


def ours(work: Path, *, gp_every: int) -> Side:
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine, build_task

    run = run_of(gp_every, work / "data" / "images")
    task = build_task(run)
    about = About(
        parameters={"model": parameters(task.model), "judge": parameters(task.discriminator)},
        mflop={"model": picture_mflop(task.model), "judge": picture_mflop(task.discriminator)},
        packages=versions("torch"),
    )
    engine_defaults = build_engine(run, RunDirectory(work / "ours"), task=task).steps()
    return Side(about, lambda: next(engine_defaults))


def run_of(gp_every: int, pictures: Path) -> Any:
    """The same configuration and the same losses, in our words."""
    from tessera.engine.ema import EMAConfig
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.image.dataset import ImageDataConfig
    from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
    from tessera.modalities.image.reconstruction import (
        ImageAdversaryConfig,
        ImageReconstructionConfig,
        ImageTokenizerConfig,
    )
    from tessera.modalities.image.vqgan import VQGANConfig
    from tessera.nn.quantize import LFQConfig
    from tessera.run.config import Run

    quantizer = LFQConfig(codebook_size=SYMBOLS, diversity=4.0)
    optimizer = OptimizerConfig(name="adam", lr=3e-4, betas=(0.9, 0.999), max_grad_norm=1.0)
    adversary = ImageAdversaryConfig(
        discriminator=PatchDiscriminatorConfig(dim=32, max_channels=128, layers=3),
        adaptive=True,
        weight=1.0,
        penalty=10.0,
        gp_every=gp_every,
        gp_center=1.0,
        optimizer=optimizer,
    )
    task = ImageTokenizerConfig(
        model=VQGANConfig(
            dim=32, max_channels=128, late=1, layers=3, blocks=(0, 0, 1), quantizer=quantizer
        ),
        reconstruction=ImageReconstructionConfig(pixel="l1", perceptual=stand_in()),
        adversary=adversary,
        optimizer=optimizer,
    )
    engine = endless.config(batch_size=BATCH, ema=EMAConfig(decay=0.995))
    return Run(
        recipe="bench",
        task=task,
        data=ImageDataConfig(path=str(pictures), size=SIDE, flip=True),
        engine=engine,
    )


def stand_in() -> Any:
    """The small network on which both sides take their perceptual term, in place of a VGG that has
    to be fetched."""
    from torch import Tensor, nn

    from tessera.modalities.image.perceptual import PerceptualConfig

    class TwoConvolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 4, 1)
            )

        def features(self, images: Tensor) -> list[Tensor]:
            return [self.layers(images)]

    @dataclass(frozen=True, kw_only=True)
    class StandIn(PerceptualConfig):
        def build(self) -> nn.Module:
            return TwoConvolutions()

    return StandIn()


def picture_mflop(network: Any) -> float:
    import torch

    return mflop(lambda: network(torch.rand(BATCH, 3, SIDE, SIDE)))
