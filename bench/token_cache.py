"""A training step of text-to-image from cached tokens, and one that reads and tokenizes its images.

The recipe `images-maskgit` at preset small, as `tessera train` runs it, on a folder of images.
Every image becomes 16 x 16 tokens, so the generator is the same on both sides and the difference is
what the cache saves: reading, cropping and tokenizing. The tokenizers have the channels of the
small preset and are trained for one step, since the quality of the tokens does not affect the time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import endless_training
from masked_generator import count_masked_mflop
from worker import ModelInfo, Workload, count_mflop, count_parameters, package_versions

NUM_IMAGES = 256


@dataclass(frozen=True)
class Size:
    """The side of the images, and the residual blocks of their tokenizer at each resolution."""

    pixels: int
    blocks: tuple[int, ...]
    encoder_blocks: tuple[int, ...]


SIZES = {
    "64": Size(64, (0, 2), (0, 0)),
    "256, light": Size(256, (0, 0, 0, 2), (0, 0, 0, 0)),
    "256": Size(256, (2, 2, 2, 2), (2, 2, 2, 2)),
}
"""The small preset, the same with two more downsampling layers, and one with as many residual
blocks as the presets for 256 x 256 have."""


def build_step(work_dir: Path, *, size: str, tokens: Literal["cache", "live"]) -> Workload:
    """Build a training step; the cache is filled here, before anything is timed."""
    from tessera.modalities.image.recipes import images_maskgit
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    tokenizer = train_tokenizer(work_dir / "tokenizer", SIZES[size])
    run: Any = images_maskgit("small", tokenizer=str(tokenizer))
    run = dataclasses.replace(
        run,
        task=dataclasses.replace(run.task, tokens=tokens),
        data=dataclasses.replace(
            run.data, path=str(write_images(work_dir / "images")), size=SIZES[size].pixels
        ),
        engine=endless_training.make_endless(run.engine),
    )
    engine = build_engine(run, RunDirectory(work_dir / tokens))
    steps = engine.steps()
    return Workload(model_info(engine.task, run), lambda: next(steps))


def write_images(folder: Path) -> Path:
    """Write synthetic images as captioned JPEG files, unless the other side has done so.

    They are 640 x 480, which is common in sets of captioned photographs. The images have shading
    and textures, so that they compress like photographs.
    """
    import numpy as np
    import PIL.Image

    from tessera.modalities.image.media import Image
    from tessera.modalities.image.synthetic import SyntheticImages

    if not folder.exists():
        folder.mkdir(parents=True)
        dataset = SyntheticImages(NUM_IMAGES, size=640)
        for number in range(NUM_IMAGES):
            example = dataset.item(number, np.random.default_rng(number))
            image = PIL.Image.fromarray(Image.from_floats(example.pixels[:, 80:560]).pixels)
            image.save(folder / f"{number}.jpg", quality=90)
            (folder / f"{number}.txt").write_text(example.caption)
    return folder


def train_tokenizer(folder: Path, size: Size) -> Path:
    """Train a tokenizer for one step, unless the other side has done so."""
    from tessera.modalities.image.dataset import ImageDataConfig
    from tessera.modalities.image.recipes import images_vqgan
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    if not folder.exists():
        run: Any = images_vqgan("small")
        shape = {
            "layers": len(size.blocks),
            "blocks": size.blocks,
            "encoder_blocks": size.encoder_blocks,
        }
        one_step = dataclasses.replace(
            run,
            task=dataclasses.replace(run.task, model=dataclasses.replace(run.task.model, **shape)),
            data=ImageDataConfig(size=size.pixels, num_synthetic=16, val_fraction=0.25),
            engine=dataclasses.replace(run.engine, steps=1, sample_count=1),
        )
        build_engine(one_step, RunDirectory(folder)).run()
    return folder


def model_info(task: Any, run: Any) -> ModelInfo:
    import numpy as np

    dataset, tokenizer = run.data.build().train, task.tokenizers["tokenizer"]
    examples = dataset.collate(
        [
            dataset.item(number, np.random.default_rng(number))
            for number in range(run.engine.batch_size)
        ]
    )
    codes = tokenizer.encode_examples(examples)
    return ModelInfo(
        parameters={
            "model": count_parameters(task.model),
            "tokenizer": count_parameters(tokenizer.model),
        },
        mflop={
            "model": count_masked_mflop(task, codes, examples.captions),
            "tokenizer": count_mflop(lambda: tokenizer.encode_examples(examples)),
        },
        packages=package_versions("torch"),
    )
