"""The trainer for videos: a MAGVIT-v2 tokenizer, on a folder or on videos in memory.

    model = VideoTokenizer(VideoTokenizerConfig())
    trainer = VideoTokenizerTrainer(
        model, dataset_folder="videos", image_size=128, batch_size=4, num_train_steps=1000
    )
    trainer.train()
    codes = trainer.tokenize(videos)        # (B, 3, T, H, W) in [-1, 1] -> (B, t, h, w)

The parameters are those of magvit2-pytorch.

B videos of T frames of H x W pixels become t x h x w codes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import Tensor

from tessera.engine.checkpoint import step_name
from tessera.engine.modes import eval_mode
from tessera.engine.optim.config import OptimizerConfig, Schedule
from tessera.modalities.image.perceptual import PerceptualConfig
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.modalities.video.magvit2 import VideoTokenizer
from tessera.modalities.video.reconstruction import (
    VideoAdversaryConfig,
    VideoReconstructionConfig,
    VideoTokenizerTaskConfig,
)
from tessera.run.config import Run
from tessera.run.directory import Json
from tessera.run.errors import UserError
from tessera.run.train import build_task
from tessera.trainers.arguments import (
    SCHEDULER_KWARGS,
    build_engine_config,
    translate_ema_kwargs,
    translate_kwargs,
    translate_scheduler,
)
from tessera.trainers.in_memory import IN_MEMORY, split_dataset
from tessera.trainers.in_memory_videos import InMemoryVideos
from tessera.trainers.tracked import TrackedTrainer

ADVERSARY = VideoAdversaryConfig()
OPTIMIZER_KWARGS = {"wd": "weight_decay", "betas": "betas", "eps": "eps", "name": "name"}
"""The names that `optimizer_kwargs` may have, and the fields of OptimizerConfig."""
DATASET_KWARGS = {
    name: name
    for name in ("rate_hz", "stride", "crop", "min_scale", "flip", "on_short", "images", "folders")
}
"""The names that `dataset_kwargs` may have, and the fields of VideoDataConfig."""
ADVERSARY_PARAMETERS = {
    "start_step": "discr_start_after_step",
    "gp_every": "apply_gradient_penalty_every",
    "optimizer": "learning_rate, max_grad_norm and optimizer_kwargs",
}
"""The fields of VideoAdversaryConfig that are parameters of the trainer."""


class VideoTokenizerTrainer(TrackedTrainer[VideoTokenizer]):
    """Train a video tokenizer, with frame and motion discriminators unless they are None.

    The videos are those of `dataset_folder`, or `dataset`: any object with a length whose items are
    videos (3, T, H, W) of at most `num_frames` frames, or images (3, H, W), as floats in [0, 1] and
    of `image_size`. With the `dataset_type` "images" an example is a single frame, whatever
    `num_frames` is.

    A step has `batch_size * grad_accum_every` examples, divided between the processes.
    `results_folder` is the run directory with the checkpoints that training resumes from;
    `checkpoints_folder` is where `save` writes. Learning rate, schedule, gradient clipping and
    weight decay are the same for the tokenizer and for each discriminator.
    """

    tracking_method = "trackers"

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
        scheduler_kwargs: Mapping[str, object] | None = None,
        accelerate_kwargs: Mapping[str, object] | None = None,
        ema_kwargs: Mapping[str, object] | None = None,
        optimizer_kwargs: Mapping[str, object] | None = None,
        dataset_kwargs: Mapping[str, object] | None = None,
        discriminators: VideoAdversaryConfig | None = ADVERSARY,
        perceptual: PerceptualConfig | None = None,
    ) -> None:
        check_data_arguments(dataset, dataset_folder, dataset_type, dataset_kwargs)
        self._checkpoints_folder = Path(checkpoints_folder)
        optimizer_fields: Json = {"weight_decay": 1e-2}
        optimizer_fields |= translate_scheduler(scheduler, warmup_steps)
        optimizer_fields |= translate_kwargs(scheduler_kwargs, "scheduler_kwargs", SCHEDULER_KWARGS)
        optimizer_fields |= translate_kwargs(optimizer_kwargs, "optimizer_kwargs", OPTIMIZER_KWARGS)
        optimizer = OptimizerConfig(
            lr=learning_rate, max_grad_norm=max_grad_norm, **optimizer_fields
        )
        data = VideoDataConfig(
            path=IN_MEMORY if dataset_folder is None else str(dataset_folder),
            size=image_size,
            frames=num_frames if dataset_type == "videos" else 1,
            val_fraction=valid_frac,
            split_seed=random_split_seed,
            **translate_kwargs(dataset_kwargs, "dataset_kwargs", DATASET_KWARGS),
        )
        run = Run(
            recipe="videos-magvit2",
            task=VideoTokenizerTaskConfig(
                model=model.config,
                reconstruction=VideoReconstructionConfig(perceptual=perceptual),
                adversary=build_adversary_config(
                    discriminators,
                    start_step=round(discr_start_after_step),
                    gp_every=apply_gradient_penalty_every,
                    optimizer=optimizer,
                ),
                optimizer=optimizer,
            ),
            data=data,
            engine=build_engine_config(
                steps=num_train_steps,
                micro_batch_size=batch_size,
                grad_accum_steps=grad_accum_every,
                validate_every=validate_every_step,
                checkpoint_every=checkpoint_every_step,
                ema=translate_ema_kwargs(ema_kwargs),
                accelerate_kwargs=accelerate_kwargs,
            ),
        )
        task = build_task(run)
        task.model.load_state_dict(model.state_dict())
        split = None
        if dataset is not None:
            split = split_dataset(InMemoryVideos(dataset, data.size, data.frames), data)
        super().__init__(run, results_folder, task, split, use_wandb_tracking=use_wandb_tracking)

    def save(self, path: str | Path | None = None) -> None:
        """Write a checkpoint to `path`, or to a folder of the step in `checkpoints_folder`."""
        super().save(self._checkpoints_folder / step_name(self.steps) if path is None else path)

    # ---- EMA weights

    @property
    def ema_tokenizer(self) -> VideoTokenizer:
        """A copy of the tokenizer with the current EMA weights."""
        tokenizer = copy.deepcopy(self.model)
        tokenizer.load_state_dict(self.engine.ema.state_dict())
        return tokenizer.eval().requires_grad_(False)

    def tokenize(self, videos: Tensor) -> Tensor:
        """Encode videos (B, 3, T, H, W) or images (B, 3, H, W) in [-1, 1] with the EMA weights.

        Returns:
            Codes (B, t, h, w).
        """
        with self.engine.ema.applied(), eval_mode(self.engine.task):
            return self.model.tokenize(videos.to(self.engine.device))

    # ---- Weights & Biases

    def trackers(
        self,
        project_name: str,
        run_name: str | None = None,
        hps: Mapping[str, object] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context in which records are also logged to a project of Weights & Biases.

        `hps` are further settings to store with those of the run.
        """
        return self._track(project_name, run_name, hps)


# ---- configurations from the arguments


def build_adversary_config(
    adversary: VideoAdversaryConfig | None,
    *,
    start_step: int,
    gp_every: int,
    optimizer: OptimizerConfig,
) -> VideoAdversaryConfig | None:
    """Return the discriminators with the settings that are parameters of the trainer."""
    if adversary is None:
        return None
    for name, parameter in ADVERSARY_PARAMETERS.items():
        value = getattr(adversary, name)
        if value != getattr(ADVERSARY, name):
            raise UserError(
                f"discriminators has {name}={value!r}, but this is a parameter of the trainer: use "
                f"{parameter}."
            )
    return replace(adversary, start_step=start_step, gp_every=gp_every, optimizer=optimizer)


def check_data_arguments(
    dataset: Sequence[Tensor] | None,
    folder: str | Path | None,
    dataset_type: str,
    dataset_kwargs: Mapping[str, object] | None,
) -> None:
    """Raise UserError unless the arguments describe one source of data."""
    if (dataset is None) == (folder is None):
        found = "neither a dataset nor" if dataset is None else "both a dataset and"
        raise UserError(f"Got {found} a dataset_folder, but training needs one of them: give one.")
    if dataset_type not in ("videos", "images"):
        raise UserError(f"dataset_type must be 'videos' or 'images', got {dataset_type!r}.")
    if dataset is not None and dataset_kwargs:
        raise UserError(
            f"dataset_kwargs ({', '.join(dataset_kwargs)}) are for the files of a folder, but a "
            "dataset was given, which is used unchanged: leave them out."
        )
