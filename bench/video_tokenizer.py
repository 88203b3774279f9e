"""A training step of the video tokenizer: ours, and that of magvit2-pytorch's own trainer.

Videos of 9 frames of 32 x 32 as tensors in memory, batch size 2, 16 to 64 channels, LFQ with 256
codes, the same layers in the same order, 4 heads of dim 16, Adam at 2e-5 with weight decay,
gradient norm clipped to 1, EMA. The losses are the same: mean squared error of pixels, entropy and
commitment loss of LFQ, a hinge discriminator loss on one frame of each video, and a gradient
penalty centered at 0 every 4 steps; no perceptual loss. DIFFERENCES lists what is not the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import endless_training
from worker import ModelInfo, Workload, count_mflop, count_parameters, package_versions

FRAME_SIZE, FRAMES, NUM_VIDEOS, BATCH_SIZE, CODEBOOK_SIZE = 32, 9, 64, 2, 256
LAYERS = (
    "residual",
    "compress_space",
    "consecutive_residual:2",
    "compress_space",
    "attend_space",
    "compress_time",
    "consecutive_residual:2",
    "attend_time",
)
GP_EVERY = 4

DIFFERENCES = """\
  differences:
  - For its discriminator step theirs reconstructs a second batch, and builds a graph for it that is
    never used in a backward pass; ours uses the reconstruction of the first batch again.
  - Theirs steps the optimizer of the discriminator twice for one gradient.
  - Theirs applies the gradient penalty to originals and reconstructions, ours to originals.
  - The discriminators are different networks: at the same configured channels, theirs has 64
    channels from the first layer on, and attention.
  - Ours weights the adversarial loss by gradients at the last layer; theirs does not without a
    perceptual loss.
  - Ours updates its EMA at every step and logs every 10 steps; theirs logs at every step and
    updates its EMA every 10 steps."""


def build_theirs(work_dir: Path) -> Workload:
    from peers.adapters import VideoTokenizerAdapter, seed_everything

    adapter = VideoTokenizerAdapter()
    seed_everything(0)
    model = adapter.build_model()
    info = ModelInfo(
        # parameters() of their model leaves out the discriminator
        parameters={
            "model": count_parameters(model),
            "discriminator": count_parameters(model.discr),
        },
        mflop={
            "model": count_video_mflop(model),
            "discriminator": count_frame_mflop(model.discr),
        },
        packages=package_versions("magvit2-pytorch", "vector-quantize-pytorch", "torch"),
    )
    trainer = adapter.build_trainer(model, work_dir / "theirs")
    return Workload(info, lambda: adapter.train(trainer, steps=1))


def build_ours(work_dir: Path, *, disc_dim: int, disc_max_channels: int) -> Workload:
    from tessera.data.dataset import Split
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine, build_task

    run = build_run(disc_dim, disc_max_channels)
    task = build_task(run)
    info = ModelInfo(
        parameters={
            "model": count_parameters(task.model),
            "discriminator": count_parameters(task.discriminator),
        },
        mflop={
            "model": count_video_mflop(task.model),
            "discriminator": count_frame_mflop(task.discriminator),
        },
        packages=package_versions("torch"),
    )
    dataset = random_videos()
    engine = build_engine(
        run, RunDirectory(work_dir / "ours"), task=task, split=Split(dataset, dataset)
    )
    steps = engine.steps()
    return Workload(info, lambda: next(steps))


def build_run(disc_dim: int, disc_max_channels: int) -> Any:
    """Build our run with the configuration and the losses of theirs."""
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
        codebook_size=CODEBOOK_SIZE, entropy_weight=0.1, diversity=2.5, commitment_weight=1.0
    )
    optimizer = OptimizerConfig(
        name="adamw", lr=2e-5, betas=(0.9, 0.99), weight_decay=0.01, max_grad_norm=1.0
    )
    adversary = VideoAdversaryConfig(
        frames=PatchDiscriminatorConfig(dim=disc_dim, max_channels=disc_max_channels),
        motion=None,
        rates=(),
        adaptive=True,
        weight=1.0,
        # ours multiplies the penalty by the steps that it leaves out; theirs is 10 without a factor
        gp_weight=10 / GP_EVERY,
        gp_every=GP_EVERY,
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
    engine = endless_training.engine_config(batch_size=BATCH_SIZE, ema=EMAConfig(decay=0.995))
    data = VideoDataConfig(size=FRAME_SIZE, frames=FRAMES)
    return Run(recipe="bench", task=task, data=data, engine=engine)


def random_videos() -> Any:
    """Build a dataset of noise in memory, as on their side."""
    import torch

    from tessera.data.dataset import ExampleDataset
    from tessera.modalities.video.media import VideoExample, collate

    shape = (NUM_VIDEOS, 3, FRAMES, FRAME_SIZE, FRAME_SIZE)
    videos = torch.rand(shape, generator=torch.Generator().manual_seed(7)).numpy()

    class RandomVideos(ExampleDataset):
        def __len__(self) -> int:
            return NUM_VIDEOS

        def name(self, index: int) -> str:
            return str(index)

        def item(self, index: int, rng: Any) -> VideoExample:
            return VideoExample(videos[index], FRAMES, 24.0, "")

        def collate(self, examples: list[VideoExample]) -> Any:
            return collate(examples)

    return RandomVideos()


def count_video_mflop(network: Any) -> float:
    import torch

    return count_mflop(lambda: network(torch.rand(BATCH_SIZE, 3, FRAMES, FRAME_SIZE, FRAME_SIZE)))


def count_frame_mflop(network: Any) -> float:
    import torch

    return count_mflop(lambda: network(torch.rand(BATCH_SIZE, 3, FRAME_SIZE, FRAME_SIZE)))
