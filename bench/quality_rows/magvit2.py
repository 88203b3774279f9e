"""The video tokenizer: magvit2-pytorch's VideoTokenizer with its own trainer, and ours.

All sides train on the same clips of 9 frames of 64 x 64 pixels in memory, eight of each training
video, and turn a clip into 3 x 16 x 16 tokens; they are compared on the middle of held-out videos.
The package has its own trainer, LFQ with 4,096 codes, and layers and channels of the size of our
preset; ours has FSQ with 4,096. Its perceptual loss would download a VGG16 and is off.

The package's trainer has a learning rate of 1e-5 by default, with which it hardly learns in
minutes; the side `package` has 1e-3 and no discriminators, and other choices are optional sides.

ours: the recipe videos-magvit2 with the defaults of its preset small.
ours-third: the same, with a schedule that ends after a third of the budget.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from time_to_quality import Judge, Metric, Metrics, Outputs, Row, Setting, SideInfo, SideSpec
from worker import count_parameters, package_versions

SIZE, FRAMES, CLIPS_PER_VIDEO, CODEBOOK_SIZE = 64, 9, 8, 4096
EVAL_BATCH_SIZE = 4
LAYERS = (
    "compress_space",
    "compress_space",
    "residual",
    "compress_time",
    "residual",
    "compress_time",
    "residual",
)
"""The layers of the package; without one before the first compression, which takes most time."""


# ---- data


def clips_file(work: Path, name: str) -> Path:
    return work / "videos" / f"{name}.npy"


def prepare(data: Path, work: Path) -> None:
    """Write the clips of both sets as bytes, (N, 3, T, S, S), unless that has been done."""
    import numpy as np

    from tessera.modalities.video.dataset import VideoDataConfig

    config = VideoDataConfig(path=str(data), size=SIZE, frames=FRAMES, crop="centre")
    split = config.build(captions=False)
    for name, dataset in (("train", split.train), ("held-out", split.validation)):
        file = clips_file(work, name)
        if file.exists():
            continue
        file.parent.mkdir(parents=True, exist_ok=True)
        clips = []
        for index in range(len(dataset)):
            path = str(data / dataset.name(index))
            if name == "held-out":
                clips.append(dataset.item(index, np.random.default_rng(0)).video)
                continue
            video = config.read_beginning(path, CLIPS_PER_VIDEO * FRAMES).to_floats()
            count = video.shape[1] // FRAMES
            clips += np.split(video[:, : count * FRAMES], count, axis=1) if count else []
        bytes_ = np.rint((np.stack(clips) + 1) * 127.5).astype(np.uint8)
        temporary = file.with_suffix(".writing.npy")
        np.save(temporary, bytes_)
        temporary.rename(file)


def load_clips(work: Path, name: str) -> Any:
    """Load clips as floats in [-1, 1], (N, 3, T, S, S)."""
    import numpy as np
    import torch

    return torch.from_numpy(np.load(clips_file(work, name))).float() / 127.5 - 1


def reconstruct_in_batches(videos: Any, reconstruct: Any) -> Any:
    """Return the reconstructions of videos in [-1, 1] as bytes."""
    import torch

    with torch.no_grad():
        made = torch.cat([reconstruct(batch) for batch in videos.split(EVAL_BATCH_SIZE)])
    return ((made.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).numpy()


# ---- the package


class PackageSide:
    """VideoTokenizerTrainer; its outputs are those of its EMA weights, and of the raw ones."""

    def __init__(self, setting: Setting, *, lr: float, use_gan: bool, batch_size: int = 2):
        from peers.adapters import VideoTokenizerAdapter, seed_everything

        seed_everything(setting.seed)
        clips = (load_clips(setting.work, "train") + 1) / 2
        self.adapter = VideoTokenizerAdapter(
            list(clips),
            model={
                "image_size": SIZE,
                "codebook_size": CODEBOOK_SIZE,
                "layers": LAYERS,
                "use_gan": use_gan,
            },
            trainer={"learning_rate": lr, "batch_size": batch_size, "valid_frac": 0.0},
        )
        model = self.adapter.build_model()
        self.trainer = self.adapter.build_trainer(model, setting.scratch / "results")
        self.videos = load_clips(setting.work, "held-out")
        self.info = SideInfo(
            parameters=count_parameters(model),
            description=f"dim 16 to 64, {len(LAYERS)} layers, LFQ of {CODEBOOK_SIZE} codes, "
            f"learning rate {lr:g}, batch size {batch_size}, gradients clipped to 1, "
            f"{'a discriminator' if use_gan else 'no discriminator'}, no perceptual loss",
            packages=package_versions("magvit2-pytorch", "torch"),
        )

    def step(self) -> bool:
        self.adapter.train(self.trainer, steps=1)
        return True

    def outputs(self, final: bool) -> Outputs:
        return {
            "videos": self.reconstruct(self.trainer.ema_model.ema_model),
            "raw": self.reconstruct(self.trainer.model),
        }

    def reconstruct(self, model: Any) -> Any:
        was_training = model.training
        model.eval()
        made = reconstruct_in_batches(
            self.videos, lambda batch: model((batch + 1) / 2, return_recon=True) * 2 - 1
        )
        model.train(was_training)
        return made


# ---- ours


class Clips:
    """The training clips as a dataset of the engine."""

    def __init__(self, videos: Any):
        self.videos = videos.numpy()

    def build(self) -> Any:
        from tessera.data.dataset import ExampleDataset
        from tessera.modalities.video.media import VideoExample, collate

        videos = self.videos

        class Dataset(ExampleDataset):
            def __len__(self) -> int:
                return len(videos)

            def name(self, index: int) -> str:
                return str(index)

            def item(self, index: int, rng: Any) -> VideoExample:
                return VideoExample(videos[index], FRAMES, 24.0, "")

            def collate(self, examples: list[VideoExample]) -> Any:
                return collate(examples)

        return Dataset()


def build_ours(setting: Setting) -> Any:
    from quality_rows.engine_side import build_side
    from tessera.data.dataset import Split
    from tessera.modalities.video.recipes import videos_magvit2
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    run = videos_magvit2()
    run = replace(run, data=replace(run.data, size=SIZE, frames=FRAMES))
    dataset = Clips(load_clips(setting.work, "train")).build()
    videos = load_clips(setting.work, "held-out")

    def build(config: Any, folder: Path) -> Any:
        split = Split(dataset, dataset)
        return build_engine(replace(run, engine=config), RunDirectory(folder), split=split)

    def compute(task: Any, final: bool) -> Outputs:
        return {"videos": reconstruct_in_batches(videos, lambda batch: task.model(batch).output)}

    description = "recipe videos-magvit2, preset small"
    return build_side(run.engine, build, setting, compute, description)


# ---- metrics


@dataclass
class VideoJudge:
    """Compares reconstructions with the held-out originals."""

    originals: Any

    def __call__(self, outputs: Outputs) -> Metrics:
        """Return the metrics of `videos`, and those of other weights with a prefix."""
        metrics = self.compare(outputs["videos"])
        for name in outputs.keys() - {"videos"}:
            metrics |= {f"{name}/{key}": one for key, one in self.compare(outputs[name]).items()}
        return metrics

    def compare(self, pixels: Any) -> Metrics:
        import torch

        from tessera.metrics.image import DATA_RANGE, psnr_B, ssim_B
        from tessera.modalities.video.reconstruction import apply_per_frame

        made, real = torch.from_numpy(pixels).float() / 127.5 - 1, self.originals
        error = (made.diff(dim=2) - real.diff(dim=2)).double().square().mean((1, 3, 4))
        motion = 10 * torch.log10(DATA_RANGE**2 / error.clamp_min(1e-12))
        return {
            "psnr": float(apply_per_frame(psnr_B, made, real).double().mean()),
            "ssim": float(apply_per_frame(ssim_B, made, real).double().mean()),
            "motion": float(motion.mean()),
        }


def build_judge(work: Path) -> Judge:
    return VideoJudge(load_clips(work, "held-out"))


ROW = Row(
    title="MAGVIT-v2",
    package="package",
    sides={
        "package": SideSpec(partial(PackageSide, lr=1e-3, use_gan=False), is_package=True),
        "package-3e-4": SideSpec(
            partial(PackageSide, lr=3e-4, use_gan=False), is_package=True, is_optional=True
        ),
        "package-gan": SideSpec(
            partial(PackageSide, lr=1e-3, use_gan=True), is_package=True, is_optional=True
        ),
        "ours": SideSpec(build_ours),
        "ours-third": SideSpec(build_ours, budget=1 / 3),
    },
    metrics=(
        Metric("psnr", "PSNR (dB)", higher_is_better=True, decimals=2),
        Metric("ssim", "SSIM", higher_is_better=True),
        Metric("motion", "PSNR of frame differences (dB)", higher_is_better=True, decimals=2),
    ),
    prepare=prepare,
    build_judge=build_judge,
)
