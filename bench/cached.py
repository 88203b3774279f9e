"""A training step of text to image from cached codes, beside one that reads and tokenizes its
pictures.

The recipe `images-maskgit` at its small size, as `tessera train` runs it, on a folder of pictures.
They become 16 x 16 symbols always, so the generator is the same, and what differs is only what the
cache saves: to read a picture, to cut it and to tokenize it. The tokenizers have the small recipe's
widths, and are trained for one step: what symbols are worth takes no time.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import endless
from masked import masked_mflop
from sides import About, Side, mflop, parameters, versions

PICTURES = 256


@dataclass(frozen=True)
class Size:
    """Pictures, and the residual blocks of their tokenizer after each halving."""

    pixels: int
    blocks: tuple[int, ...]
    encoder_blocks: tuple[int, ...]


SIZES = {
    "64": Size(64, (0, 2), (0, 0)),
    "256, light": Size(256, (0, 0, 0, 2), (0, 0, 0, 0)),
    "256": Size(256, (2, 2, 2, 2), (2, 2, 2, 2)),
}
"""As the small recipe has them, the same with two halvings more, and as the presets have them that
are made for 256 x 256."""


def step(work: Path, *, size: str, codes: Literal["cache", "raw"]) -> Side:
    """What the cache takes to fill comes before the first step."""
    from tessera.modalities.image.recipes import images_maskgit
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    run = images_maskgit("small", tokenizer=str(tokenizer_in(work / "tokenizer", SIZES[size])))
    run = dataclasses.replace(
        run,
        task=dataclasses.replace(run.task, codes=codes),
        data=dataclasses.replace(
            run.data, path=str(pictures_in(work / "pictures")), size=SIZES[size].pixels
        ),
        engine=endless.made_endless(run.engine),
    )
    engine = build_engine(run, RunDirectory(work / codes))
    engine_defaults = engine.steps()
    return Side(about(engine.task, run), lambda: next(engine_defaults))


def pictures_in(place: Path) -> Path:
    """Toys as the files that people have: JPEG of 640 x 480, as in the usual sets of captioned
    photographs, a caption beside each. They have shades and textures, since a photograph is not
    flat. Whichever side comes first makes them."""
    import numpy as np
    import PIL.Image

    from tessera.modalities.image.media import Image
    from tessera.modalities.image.synthetic import SyntheticImages

    if not place.exists():
        place.mkdir(parents=True)
        toys = SyntheticImages(PICTURES, size=640)
        for number in range(PICTURES):
            toy = toys.item(number, np.random.default_rng(number))
            photograph = PIL.Image.fromarray(Image.from_floats(toy.pixels[:, 80:560]).pixels)
            photograph.save(place / f"{number}.jpg", quality=90)
            (place / f"{number}.txt").write_text(toy.caption)
    return place


def tokenizer_in(place: Path, size: Size) -> Path:
    """After one step; whichever side comes first makes it."""
    from tessera.modalities.image.dataset import ImageDataConfig
    from tessera.modalities.image.recipes import images_vqgan
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    if not place.exists():
        run = images_vqgan("small")
        shape = {
            "layers": len(size.blocks),
            "blocks": size.blocks,
            "encoder_blocks": size.encoder_blocks,
        }
        short = dataclasses.replace(
            run,
            task=dataclasses.replace(run.task, model=dataclasses.replace(run.task.model, **shape)),
            data=ImageDataConfig(size=size.pixels, toys=16, val_fraction=0.25),
            engine=dataclasses.replace(run.engine, steps=1, sample_count=1),
        )
        build_engine(short, RunDirectory(place)).run()
    return place


def about(task: Any, run: Any) -> About:
    import numpy as np

    source, codec = run.data.build().train, task.codecs["tokenizer"]
    examples = source.collate(
        [
            source.item(number, np.random.default_rng(number))
            for number in range(run.engine.batch_size)
        ]
    )
    return About(
        parameters={"model": parameters(task.model), "tokenizer": parameters(codec.model)},
        mflop={
            "model": masked_mflop(task, codec.codes(examples), examples.captions),
            "tokenizer": mflop(lambda: codec.codes(examples)),
        },
        packages=versions("torch"),
    )
