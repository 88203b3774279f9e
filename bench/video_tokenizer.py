"""The sides of the video tokenizer's training step: ours, and magvit2-pytorch's by its own trainer.

Clips of 9 frames of 32 x 32 that lie ready as tensors, batch 2, widths of 16 to 64, LFQ with 256
symbols, the same layers in the same order, 4 heads of 16, Adam at 2e-5 with decay, gradients
clipped at 1, a moving average. The losses are the same: mean square of pixels, LFQ's entropy and
commitment, a hinge discriminator that sees one frame of each clip, and a gradient penalty centred
at 0 every 4 steps; no perceptual term. DIFFERENT says what is not the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import endless
from sides import About, Side, mflop, parameters, versions

SIDE, FRAMES, CLIPS, BATCH, SYMBOLS = 32, 9, 64, 2, 256
LAYERS = (
    "residual", "compress_space", "consecutive_residual:2", "compress_space", "attend_space",
    "compress_time", "consecutive_residual:2", "attend_time",
)  # fmt: skip
PENALTY_EVERY = 4

DIFFERENT = """\
  not the same:
  - For its discriminator theirs rebuilds a second batch, with a graph that nobody descends; ours shows it the first again.
  - Theirs steps its discriminator's optimizer twice for one gradient.
  - Theirs takes the penalty on originals and reconstructions, ours on originals.
  - The discriminators are other networks: at the same widths asked for, theirs is 64 wide from the first layer, with attention.
  - Ours weighs the adversarial term by gradients at the last layer; theirs has no such weight without a perceptual term.
  - Ours moves its average at every step and logs every tenth; theirs logs at every step and moves its average every tenth."""


def theirs(work: Path) -> Side:
    os.environ["PEER_WORK"] = str(work)
    from peer_adapters import Magvit2A

    adapter = Magvit2A()
    adapter.seed(0)
    model = adapter.build()
    about = About(
        parameters={
            "model": parameters(model),
            "judge": parameters(model.discr),
        },  # its parameters() leave out the judge's
        mflop={"model": clip_mflop(model), "judge": frame_mflop(model.discr)},
        packages=versions("magvit2-pytorch", "vector-quantize-pytorch", "torch"),
    )
    trainer = adapter.trainer(model, str(work / "theirs"), endless.NEVER)
    return Side(about, lambda: adapter.run(trainer, 1))


def ours(work: Path, *, judge_dim: int, judge_widest: int) -> Side:
    from tessera.data.dataset import Split
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine, build_task

    run = run_of(judge_dim, judge_widest)
    task = build_task(run)
    about = About(
        parameters={"model": parameters(task.model), "judge": parameters(task.discriminator)},
        mflop={"model": clip_mflop(task.model), "judge": frame_mflop(task.discriminator)},
        packages=versions("torch"),
    )
    clips = Clips()
    engine_defaults = build_engine(
        run, RunDirectory(work / "ours"), task=task, split=Split(clips, clips)
    ).steps()
    return Side(about, lambda: next(engine_defaults))


def run_of(judge_dim: int, judge_widest: int) -> Any:
    """The same configuration and the same losses, in our words."""
    from tessera.engine.ema import EMAConfig
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
    from tessera.modalities.video.dataset import VideoDataConfig
    from tessera.modalities.video.magvit2 import VideoTokenizerConfig
    from tessera.modalities.video.reconstruction import (
        VideoAdversaryConfig,
        VideoReconstructionConfig,
        VideoTokenizerTaskConfig,
    )
    from tessera.nn.quantize import LFQConfig
    from tessera.run.config import Run

    quantizer = LFQConfig(
        codebook_size=SYMBOLS, entropy_weight=0.1, diversity=2.5, commitment_weight=1.0
    )
    optimizer = OptimizerConfig(
        name="adamw", lr=2e-5, betas=(0.9, 0.99), weight_decay=0.01, max_grad_norm=1.0
    )
    adversary = VideoAdversaryConfig(
        frames=PatchDiscriminatorConfig(dim=judge_dim, max_channels=judge_widest),
        motion=None,
        rates=(),
        adaptive=True,
        weight=1.0,
        penalty=10
        / PENALTY_EVERY,  # ours counts as many times as it is left out, theirs once, with 10
        gp_every=PENALTY_EVERY,
        optimizer=optimizer,
    )
    task = VideoTokenizerTaskConfig(
        model=VideoTokenizerConfig(
            dim=16, max_channels=64, layers=LAYERS, quantizer=quantizer, heads=4, head_dim=16
        ),
        reconstruction=VideoReconstructionConfig(pixel="l2"),
        adversary=adversary,
        optimizer=optimizer,
    )
    engine = endless.config(batch_size=BATCH, ema=EMAConfig(decay=0.995))
    return Run(
        recipe="bench", task=task, data=VideoDataConfig(size=SIDE, frames=FRAMES), engine=engine
    )


class Clips:
    """The source: noise that lies ready, as it does for theirs."""

    def __init__(self) -> None:
        import torch

        self.clips = torch.rand(
            CLIPS, 3, FRAMES, SIDE, SIDE, generator=torch.Generator().manual_seed(7)
        ).numpy()

    def __len__(self) -> int:
        return CLIPS

    def name(self, index: int) -> str:
        return str(index)

    def item(self, index: int, rng: Any) -> Any:
        from tessera.modalities.video.media import VideoExample

        return VideoExample(self.clips[index], FRAMES, 24.0, "")

    def collate(self, examples: list[Any]) -> Any:
        from tessera.modalities.video.media import collate

        return collate(examples)


def clip_mflop(network: Any) -> float:
    import torch

    return mflop(lambda: network(torch.rand(BATCH, 3, FRAMES, SIDE, SIDE)))


def frame_mflop(network: Any) -> float:
    import torch

    return mflop(lambda: network(torch.rand(BATCH, 3, SIDE, SIDE)))
