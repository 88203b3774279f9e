"""A training step of the image tokenizer: ours, and that of muse-maskgit-pytorch's own trainer.

Images of 64 x 64 from PNG files, batch size 4, dim 32, 3 downsampling layers, LFQ with 256 codes, a
discriminator of 3 layers, EMA updated at each step. Both sides run complete steps, including
reading and decoding of images, with the same losses: L1, a perceptual loss on two strided
convolutions of 8 channels, the entropy loss of LFQ, a hinge discriminator loss with adaptive
weight, and a gradient penalty. Theirs applies the penalty at every step whatever is configured;
ours every `gp_every` steps.

Our network has the same channels as theirs (`constant_stages=1`: 32, 32, 64, 128).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import endless_training
from worker import ModelInfo, Workload, count_mflop, count_parameters, package_versions

IMAGE_SIZE, NUM_IMAGES, BATCH_SIZE, CODEBOOK_SIZE = 64, 128, 4, 256


def build_theirs(work_dir: Path) -> Workload:
    from peers.adapters import VQGANAdapter, seed_everything

    adapter = VQGANAdapter(write_images(work_dir / "images"))
    seed_everything(0)
    model = adapter.build_model()
    discriminator, perceptual = count_parameters(model.discr), count_parameters(model.vgg)
    info = ModelInfo(
        parameters={
            "model": count_parameters(model) - discriminator - perceptual,
            "discriminator": discriminator,
        },
        mflop={
            "model": count_image_mflop(model),
            "discriminator": count_image_mflop(model.discr),
        },
        packages=package_versions("muse-maskgit-pytorch", "vector-quantize-pytorch", "torch"),
    )
    trainer = adapter.build_trainer(model, work_dir / "theirs")
    return Workload(info, lambda: adapter.train(trainer, steps=1))


def build_ours(work_dir: Path, *, gp_every: int) -> Workload:
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine, build_task

    run = build_run(gp_every, write_images(work_dir / "images"))
    task = build_task(run)
    info = ModelInfo(
        parameters={
            "model": count_parameters(task.model),
            "discriminator": count_parameters(task.discriminator),
        },
        mflop={
            "model": count_image_mflop(task.model),
            "discriminator": count_image_mflop(task.discriminator),
        },
        packages=package_versions("torch"),
    )
    steps = build_engine(run, RunDirectory(work_dir / "ours"), task=task).steps()
    return Workload(info, lambda: next(steps))


def build_run(gp_every: int, images: Path) -> Any:
    """Build our run with the configuration and the losses of theirs."""
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

    quantizer = LFQConfig(codebook_size=CODEBOOK_SIZE, diversity=4.0)
    optimizer = OptimizerConfig(name="adam", lr=3e-4, betas=(0.9, 0.999), max_grad_norm=1.0)
    adversary = ImageAdversaryConfig(
        discriminator=PatchDiscriminatorConfig(dim=32, max_channels=128, layers=3),
        adaptive=True,
        weight=1.0,
        gp_weight=10.0,
        gp_every=gp_every,
        gp_center=1.0,
        optimizer=optimizer,
    )
    task = ImageTokenizerConfig(
        model=VQGANConfig(
            dim=32,
            max_channels=128,
            constant_stages=1,
            layers=3,
            blocks=(0, 0, 1),
            quantizer=quantizer,
        ),
        reconstruction=ImageReconstructionConfig(pixel="l1", perceptual=perceptual_config()),
        adversary=adversary,
        optimizer=optimizer,
    )
    engine = endless_training.engine_config(batch_size=BATCH_SIZE, ema=EMAConfig(decay=0.995))
    return Run(
        recipe="bench",
        task=task,
        data=ImageDataConfig(path=str(images), size=IMAGE_SIZE, flip=True),
        engine=engine,
    )


def perceptual_config() -> Any:
    """Return the config of the perceptual network that both sides use in place of a VGG16, whose
    weights would have to be downloaded."""
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
    class TwoConvolutionsConfig(PerceptualConfig):
        def build(self) -> nn.Module:
            return TwoConvolutions()

    return TwoConvolutionsConfig()


def write_images(folder: Path) -> Path:
    """Write noise as PNG files, unless the other side has done so."""
    import numpy as np
    import PIL.Image

    if not folder.exists():
        folder.mkdir()
        rng = np.random.RandomState(7)
        for number in range(NUM_IMAGES):
            pixels = rng.randint(0, 255, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(folder / f"{number:04d}.png")
    return folder


def count_image_mflop(network: Any) -> float:
    import torch

    return count_mflop(lambda: network(torch.rand(BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE)))
