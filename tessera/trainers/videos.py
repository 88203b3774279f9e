"""The front door of clips: trains a MAGVIT-v2 tokenizer on a folder, or on clips that are already
in memory.

    trainer = VideoTokenizerTrainer(
        VideoTokenizer(VideoTokenizerConfig()), dataset_folder="clips", image_size=128, batch_size=4, num_train_steps=1000
    )
    trainer.train()
    codes = trainer.tokenize(clips)        # (B, 3, T, H, W) in [-1, 1] -> (B, t, h, w)

B clips of T frames, H x W pixels, become t x h x w symbols.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tessera.data.dataset import Split, Subset, split_names
from tessera.data.errors import UnreadableFile
from tessera.engine.checkpoint import name_of
from tessera.engine.modes import eval_mode
from tessera.engine.optim.config import OptimizerConfig, Schedule
from tessera.modalities.image.perceptual import PerceptualConfig
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.modalities.video.io.base import CLOCK_HZ
from tessera.modalities.video.magvit2 import VideoTokenizer
from tessera.modalities.video.media import VideoBatch, VideoExample, collate
from tessera.modalities.video.reconstruction import (
    VideoAdversaryConfig,
    VideoReconstructionConfig,
    VideoTokenizerTaskConfig,
)
from tessera.run.config import Run
from tessera.run.errors import UserError
from tessera.run.train import build_task
from tessera.trainers.arguments import (
    GIVEN,
    SCHEDULE,
    ema_config_from_kwargs,
    engine_config,
    scheduled,
    translated,
)
from tessera.trainers.tracked import TrackedTrainer

JUDGES = VideoAdversaryConfig()
OPTIMIZER = {"wd": "decay", "betas": "betas", "eps": "eps", "kind": "kind"}
DATASET = {
    name: name
    for name in ("rate_hz", "stride", "crop", "min_scale", "flip", "short", "images", "folders")
}
"""What may stand in optimizer_kwargs and dataset_kwargs, and our words for it."""


class VideoTokenizerTrainer(TrackedTrainer):
    """Trains a video tokenizer, with judges of frames and of motion unless they are None.

    Clips come from `dataset_folder`, or from `dataset`: anything with a length whose items are
    clips (3, T, H, W) of at most `num_frames` frames, or pictures (3, H, W), as floats in [0, 1]
    and in `image_size`. With a dataset_type of "images" an example is a single frame, whatever
    `num_frames` says.

    `batch_size * grad_accum_every` examples make a step, whatever the number of processes that
    share them. `results_folder` is the run's folder and holds the checkpoints that it goes on from;
    `checkpoints_folder` is where `save` puts those that are asked for by hand. The rate, its
    schedule, clipping and decay are the same for the tokenizer and for each judge.
    """

    tracking = "trackers"

    def __init__(
        self,
        model: VideoTokenizer,
        *,
        batch_size: int,
        num_train_steps: int,
        image_size: int,
        learning_rate: float = 1e-5,
        grad_accum_every: int = 1,
        apply_gradient_penalty_every: int = 4,
        max_grad_norm: float | None = None,
        dataset: Sequence[Tensor] | None = None,
        dataset_folder: str | Path | None = None,
        dataset_type: Literal["videos", "images"] = "videos",
        checkpoints_folder: str | Path = "./checkpoints",
        results_folder: str | Path = "./results",
        random_split_seed: int = 42,
        valid_frac: float = 0.05,
        validate_every_step: int = 100,
        checkpoint_every_step: int = 100,
        num_frames: int = 17,
        use_wandb_tracking: bool = False,
        discr_start_after_step: float = 0.0,
        warmup_steps: int = 1000,
        scheduler: Schedule | None = None,
        scheduler_kwargs: Mapping[str, Any] | None = None,
        accelerate_kwargs: Mapping[str, Any] | None = None,
        ema_kwargs: Mapping[str, Any] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        dataset_kwargs: Mapping[str, Any] | None = None,
        discriminators: VideoAdversaryConfig | None = JUDGES,
        perceptual: PerceptualConfig | None = None,
    ) -> None:
        refuse_unclear_data(dataset, dataset_folder, dataset_type, dataset_kwargs)
        self._checkpoints_folder = Path(checkpoints_folder)
        optimizer = OptimizerConfig(
            lr=learning_rate,
            max_grad_norm=max_grad_norm,
            **scheduled(scheduler, warmup_steps),
            **({"decay": 1e-2} | translated(optimizer_kwargs, "optimizer_kwargs", OPTIMIZER)),
            **translated(scheduler_kwargs, "scheduler_kwargs", SCHEDULE),
        )
        run = Run(
            recipe="videos-magvit2",
            task=VideoTokenizerTaskConfig(
                model=model.config,
                reconstruction=VideoReconstructionConfig(perceptual=perceptual),
                adversary=told(
                    discriminators, discr_start_after_step, apply_gradient_penalty_every, optimizer
                ),
                optimizer=optimizer,
            ),
            data=VideoDataConfig(
                path=str(dataset_folder) if dataset_folder is not None else GIVEN,
                size=image_size,
                frames=num_frames if dataset_type == "videos" else 1,
                val_fraction=valid_frac,
                split_seed=random_split_seed,
                **translated(dataset_kwargs, "dataset_kwargs", DATASET),
            ),
            engine=engine_config(
                num_train_steps,
                batch_size,
                grad_accum_every,
                validate_every_step,
                checkpoint_every_step,
                ema_config_from_kwargs(ema_kwargs),
                accelerate_kwargs,
            ),
        )
        task = build_task(run)
        task.model.load_state_dict(model.state_dict())
        split = Clips.split(dataset, run.data) if dataset is not None else None
        super().__init__(run, results_folder, task, split, use_wandb_tracking=use_wandb_tracking)

    def save(self, path: str | Path | None = None) -> None:
        """Everything needed to go on, as a folder of its own: at `path`, or under the step's number
        in checkpoints_folder."""
        super().save(path if path is not None else self._checkpoints_folder / name_of(self.steps))

    # ---- the averaged tokenizer

    @property
    def ema_tokenizer(self) -> VideoTokenizer:
        """A tokenizer of its own with the averaged weights of this moment."""
        tokenizer: VideoTokenizer = copy.deepcopy(self.model)
        tokenizer.load_state_dict(self.engine.ema.state_dict())
        return tokenizer.eval().requires_grad_(False)

    def tokenize(self, clips: Tensor) -> Tensor:
        """Clips (B, 3, T, H, W) or pictures (B, 3, H, W), in [-1, 1], to symbols (B, t, h, w), with
        the averaged weights."""
        with self.engine.ema.applied(), eval_mode(self.engine.task):
            return self.model.tokenize(clips.to(self.engine.device))

    # ---- Weights & Biases

    def trackers(
        self, project_name: str, run_name: str | None = None, hps: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        """Inside, every record also goes to this project of Weights & Biases, with `hps`, whatever
        else is worth telling."""
        return self.tracked_in(project_name, run_name, hps)


# ---- their words in ours


def told(
    discriminators: VideoAdversaryConfig | None,
    start_step: float,
    gp_every: int,
    optimizer: OptimizerConfig,
) -> VideoAdversaryConfig | None:
    """The judges, with what the trainer's own parameters say of them."""
    if discriminators is None:
        return None
    said_here = {
        "starts": "discr_start_after_step",
        "penalty_every": "apply_gradient_penalty_every",
        "optimizer": "learning_rate, max_grad_norm and optimizer_kwargs",
    }
    for name, parameter in said_here.items():
        if getattr(discriminators, name) != getattr(JUDGES, name):
            raise UserError(
                f"judges has {name}={getattr(discriminators, name)!r}, but this trainer takes that from {parameter}."
            )
    return replace(
        discriminators, start_step=round(start_step), gp_every=gp_every, optimizer=optimizer
    )


def refuse_unclear_data(
    dataset: Any, folder: Any, kind: str, kwargs: Mapping[str, Any] | None
) -> None:
    if (dataset is None) == (folder is None):
        met = (
            "neither a dataset nor a dataset_folder"
            if dataset is None
            else "both a dataset and a dataset_folder"
        )
        raise UserError(f"A trainer learns from one place, but was given {met}: give one of them.")
    if kind not in ("videos", "images"):
        raise UserError(f"dataset_type is {kind!r}, but there are only 'videos' and 'images'.")
    if dataset is not None and kwargs:
        raise UserError(
            f"dataset_kwargs ({', '.join(kwargs)}) say how clips are cut from a folder's files, but a dataset was given, "
            "which is taken as it is: leave them out."
        )


# ---- clips that are already there


@dataclass(frozen=True)
class Clips:
    """The source: somebody's own clips, not cut or mirrored."""

    clips: Sequence[Tensor]
    size: int
    frames: int

    @classmethod
    def split(cls, clips: Sequence[Tensor], data: VideoDataConfig) -> Split:
        source = cls(clips, data.size, data.frames)
        names = [source.name(i) for i in range(len(source))]
        train, validation = split_names(names, data.val_fraction, data.split_seed)
        return Split(Subset(source, train), Subset(source, validation))

    def __len__(self) -> int:
        return len(self.clips)

    def name(self, index: int) -> str:
        return f"clip-{index:06d}"

    def caption(self, index: int) -> str:
        return ""

    def item(self, index: int, rng: np.random.Generator) -> VideoExample:
        clip = torch.as_tensor(self.clips[index]).detach().cpu()
        clip = clip.unsqueeze(1) if clip.ndim == 3 else clip
        self.refuse(index, clip)
        length = clip.shape[1]
        padded = clip[:, torch.arange(self.frames).clamp_max(length - 1)]
        return VideoExample(padded.float().numpy() * 2 - 1, length, CLOCK_HZ, self.caption(index))

    def collate(self, examples: list[VideoExample]) -> VideoBatch:
        return collate(examples)

    def refuse(self, index: int, clip: Tensor) -> None:
        """As a file that cannot be read would be: one among many is left out and listed, and many
        in a row end the run."""
        fits = clip.ndim == 4 and clip.shape[0] == 3 and clip.shape[2:] == (self.size, self.size)
        if not fits or not 1 <= clip.shape[1] <= self.frames:
            raise UnreadableFile(
                f"{self.name(index)}: its shape is {tuple(clip.shape)}, but a clip is (3, frames, {self.size}, {self.size}) "
                f"with 1 to {self.frames} frames here"
            )
        lowest, highest = clip.aminmax()
        if not clip.is_floating_point() or lowest < 0 or highest > 1:
            raise UnreadableFile(
                f"{self.name(index)}: it holds {clip.dtype} from {lowest:g} to {highest:g}, but a clip is floats from 0 to 1"
            )
