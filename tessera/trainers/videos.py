"""Trainers for videos: a MAGVIT-v2 tokenizer, on a folder or on videos in memory, and a generator.

    model = VideoTokenizer(VideoTokenizerConfig())
    trainer = VideoTokenizerTrainer(
        model, dataset_folder="videos", image_size=128, batch_size=4, num_train_steps=1000
    )
    trainer.train()
    codes = trainer.tokenize(videos)        # (B, 3, T, H, W) in [0, 1] -> (B, t, h, w)

    generator = VideoGeneratorTrainer(
        "results", folder="videos", image_size=128, batch_size=8, num_train_steps=1000
    )

The parameters are those of magvit2-pytorch. It has no generator; those of its trainer are the
parameters of `MaskGitTrainer`.

B videos of T frames of H x W pixels become t x h x w codes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Literal

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from tessera.data.dataset import split_dataset
from tessera.data.source import require_items
from tessera.engine.checkpoint import step_name
from tessera.engine.modes import eval_mode
from tessera.engine.optim.config import OptimizerConfig, Schedule
from tessera.modalities.image.perceptual import PerceptualConfig
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.modalities.video.generation import VideoGeneratorConfig
from tessera.modalities.video.magvit2 import VideoTokenizer
from tessera.modalities.video.masking import VideoMaskingConfig
from tessera.modalities.video.reconstruction import (
    VideoAdversaryConfig,
    VideoReconstructionConfig,
    VideoTokenizerTaskConfig,
)
from tessera.nn.masked_transformer import (
    CriticConfig,
    CriticHeadConfig,
    MaskedModel,
    MaskedTransformerConfig,
)
from tessera.run.config import Run, encode
from tessera.run.directory import Json, RunDirectory
from tessera.run.errors import UserError
from tessera.run.resolve import resolve_run
from tessera.run.train import build_task
from tessera.trainers.arguments import (
    IN_MEMORY,
    build_ema_config,
    build_engine_config,
    check_arguments,
    translate_ema_kwargs,
    translate_kwargs,
)
from tessera.trainers.base import Trainer, adopt_model
from tessera.trainers.foreign import ForeignRun
from tessera.trainers.foreign_videos import ForeignVideoTask, build_videos, read_videos
from tessera.trainers.in_memory_videos import InMemoryVideos
from tessera.trainers.schedulers import parse_schedule
from tessera.trainers.tracked import TrackedTrainer

ADVERSARY = VideoAdversaryConfig()
PACKAGE_ADVERSARY = VideoAdversaryConfig(motion=None, weight=1.0, gp_weight=10.0, gp_on="both")
"""The adversarial weight and the gradient penalty of the research package. They are not the default
because such a penalty suppresses a discriminator of our size."""
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
    weight decay are the same for the tokenizer and for each discriminator. `workers` is the number
    of processes that load data.

    The discriminators of this package have an adversarial weight of 0.1 and a gradient penalty of
    0.01, on originals; those of the research package have 1 and 10, on reconstructions too, which
    is `discriminators=PACKAGE_ADVERSARY` of this module.

    A model of another package is trained as it is if it is called like the VideoTokenizer of
    magvit2-pytorch (`trainers/foreign_videos.py`), with its own losses and discriminators;
    `image_size` is then that of the model.
    """

    result_names = {
        "total_loss": ("model/loss",),
        "recon_loss": ("model/recon_loss", "model/pixel"),
        "perceptual_loss": ("model/perceptual_loss", "model/perceptual"),
        "adversarial_gen_loss": ("model/adversarial_gen_loss", "model/adversarial"),
        "discr_loss": ("discriminator/discr_loss", "discriminator/d_loss"),
        "gradient_penalty_loss": (
            "discriminator/gradient_penalty",
            "discriminator/gradient_penalty_loss",
        ),
    }

    tracking_method = "trackers"

    @check_arguments
    def __init__(
        self,
        model: VideoTokenizer | nn.Module,
        *,
        batch_size: int,
        num_train_steps: int,
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
        scheduler: Schedule | type[LRScheduler] | None = None,
        scheduler_kwargs: Mapping[str, object] | None = None,
        accelerate_kwargs: Mapping[str, object] | None = None,
        ema_kwargs: Mapping[str, object] | None = None,
        optimizer_kwargs: Mapping[str, object] | None = None,
        dataset_kwargs: Mapping[str, object] | None = None,
        image_size: int | None = None,
        discriminators: VideoAdversaryConfig | None = ADVERSARY,
        perceptual: PerceptualConfig | None = None,
        workers: int = 0,
    ) -> None:
        check_data_arguments(dataset, dataset_folder, dataset_type, dataset_kwargs)
        self._checkpoints_folder = Path(checkpoints_folder)
        schedule = parse_schedule(scheduler, scheduler_kwargs, warmup_steps)
        optimizer_fields: Json = {"weight_decay": 1e-2, **schedule.fields}
        optimizer_fields |= translate_kwargs(optimizer_kwargs, "optimizer_kwargs", OPTIMIZER_KWARGS)
        optimizer = OptimizerConfig(
            lr=learning_rate, max_grad_norm=max_grad_norm, **optimizer_fields
        )
        data = VideoDataConfig(
            path=IN_MEMORY if dataset_folder is None else str(dataset_folder),
            size=find_image_size(model, image_size),
            frames=num_frames if dataset_type == "videos" else 1,
            val_fraction=valid_frac,
            split_seed=random_split_seed,
            **translate_kwargs(dataset_kwargs, "dataset_kwargs", DATASET_KWARGS),
        )
        engine = build_engine_config(
            steps=num_train_steps,
            micro_batch_size=batch_size,
            grad_accum_steps=grad_accum_every,
            validate_every=validate_every_step,
            checkpoint_every=checkpoint_every_step,
            num_workers=workers,
            ema=translate_ema_kwargs(ema_kwargs),
            accelerate_kwargs=accelerate_kwargs,
        )
        start_step = round(discr_start_after_step)
        if not isinstance(model, VideoTokenizer):
            foreign = ForeignVideoTask(
                model,
                schedule.configure(optimizer),
                start_step=start_step,
                gp_every=apply_gradient_penalty_every,
            )
            if dataset is None:
                split = read_videos(data)
            else:
                split = split_dataset(build_videos(dataset), valid_frac, random_split_seed)
            arguments = {"optimizer": encode(optimizer), "data": encode(data), **schedule.settings}
            run = ForeignRun(foreign, split, engine, arguments)
            super().__init__(run, results_folder, use_wandb_tracking=use_wandb_tracking)
            return
        own_run = Run(
            recipe="videos-magvit2",
            task=VideoTokenizerTaskConfig(
                model=model.config,
                reconstruction=VideoReconstructionConfig(perceptual=perceptual),
                adversary=build_adversary_config(
                    discriminators,
                    start_step=start_step,
                    gp_every=apply_gradient_penalty_every,
                    optimizer=optimizer,
                ),
                optimizer=optimizer,
            ),
            data=data,
            engine=engine,
        )
        task = build_task(own_run)
        adopt_model(task, model)
        schedule.apply(task)
        own_split = None
        if dataset is not None:
            videos = InMemoryVideos(dataset, data.size, data.frames)
            own_split = split_dataset(videos, valid_frac, random_split_seed)
        super().__init__(
            own_run,
            results_folder,
            task,
            own_split,
            extra_settings=schedule.settings,
            use_wandb_tracking=use_wandb_tracking,
        )

    def save(self, path: str | Path | None = None, overwrite: bool = True) -> None:
        """Write a checkpoint to `path`, or to a folder of the step in `checkpoints_folder`."""
        chosen = self._checkpoints_folder / step_name(self.steps) if path is None else path
        super().save(chosen, overwrite)

    # ---- EMA weights

    @property
    def ema_tokenizer(self) -> VideoTokenizer:
        """A copy of the tokenizer with the current EMA weights."""
        return self.ema_model

    def tokenize(self, videos: Tensor) -> Tensor:
        """Encode videos (B, 3, T, H, W) or images (B, 3, H, W) with the EMA weights.

        Values are floats in [0, 1], like those of a dataset. For a model of another package they
        are passed on unchanged.

        Returns:
            Codes (B, t, h, w).
        """
        inputs = videos.to(self.engine.device)
        if not isinstance(self.run, ForeignRun):
            lowest, highest = videos.aminmax()
            if not videos.is_floating_point() or lowest < 0 or highest > 1:
                raise UserError(
                    f"The videos have values of {videos.dtype} from {lowest:g} to {highest:g}, but "
                    "must be floats from 0 to 1, like those of the dataset: rescale them, with "
                    "(x + 1) / 2 if they are from -1 to 1."
                )
            inputs = inputs * 2 - 1
        with self.engine.ema.applied(), eval_mode(self.engine.task):
            return self.model.tokenize(inputs)

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


TRANSFORMER = MaskedTransformerConfig()
MASKING = VideoMaskingConfig()


class VideoGeneratorTrainer(Trainer[MaskedModel]):
    """Train masked generation of videos on a folder of videos with captions.

    `tokenizer` is the run directory of a trained tokenizer. `masking` states how often frames,
    boxes or nothing are given in training. With `transformer=MaskedTransformerConfig(text=None)` no
    captions are needed.
    """

    @check_arguments
    def __init__(
        self,
        tokenizer: str | Path,
        *,
        folder: str | Path,
        num_train_steps: int,
        batch_size: int,
        image_size: int,
        num_frames: int = 17,
        transformer: MaskedTransformerConfig = TRANSFORMER,
        token_critic: CriticConfig | CriticHeadConfig | None = None,
        masking: VideoMaskingConfig = MASKING,
        max_positions: int | None = None,
        cond_drop_prob: float = 0.1,
        lr: float = 3e-4,
        grad_accum_every: int = 1,
        max_grad_norm: float | None = None,
        save_results_every: int = 100,
        save_model_every: int = 1000,
        results_folder: str | Path = "./results",
        valid_frac: float = 0.05,
        random_split_seed: int = 42,
        use_ema: bool = True,
        ema_beta: float = 0.995,
        ema_update_after_step: int = 0,
        ema_update_every: int = 1,
        accelerate_kwargs: Mapping[str, object] | None = None,
        workers: int = 0,
    ) -> None:
        optimizer = OptimizerConfig(
            name="adam", lr=lr, betas=(0.9, 0.999), max_grad_norm=max_grad_norm
        )
        run = Run(
            recipe="videos-maskgit",
            task=VideoGeneratorConfig(
                tokenizer=str(tokenizer),
                model=transformer,
                critic=token_critic,
                critic_optimizer=optimizer,
                masking=masking,
                max_positions=max_positions,
                cond_drop_prob=cond_drop_prob,
                optimizer=optimizer,
            ),
            data=VideoDataConfig(
                path=str(folder),
                size=image_size,
                frames=num_frames,
                crop="centre",
                val_fraction=valid_frac,
                split_seed=random_split_seed,
            ),
            engine=build_engine_config(
                steps=num_train_steps,
                micro_batch_size=batch_size,
                grad_accum_steps=grad_accum_every,
                validate_every=save_results_every,
                checkpoint_every=save_model_every,
                num_workers=workers,
                ema=build_ema_config(use_ema, ema_beta, ema_update_after_step, ema_update_every),
                accelerate_kwargs=accelerate_kwargs,
            ),
        )
        given = {"data.size", "data.frames"}
        resolved = resolve_run(run, given, RunDirectory(results_folder))
        super().__init__(resolved.run, results_folder)


# ---- configurations from the arguments


def find_image_size(model: nn.Module, image_size: int | None) -> int:
    """Return the size that was given, or that of a model which is built for one size."""
    built_for = getattr(model, "image_size", None)
    if image_size is None and isinstance(built_for, int):
        return built_for
    if image_size is None:
        raise UserError(
            "image_size is missing: give the side of the frames in pixels, since the model can be "
            "trained on frames of any size."
        )
    return image_size


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
    if dataset is not None:
        require_items(dataset)
    if dataset_type not in ("videos", "images"):
        raise UserError(f"dataset_type must be 'videos' or 'images', got {dataset_type!r}.")
    if dataset is not None and dataset_kwargs:
        raise UserError(
            f"dataset_kwargs ({', '.join(dataset_kwargs)}) are for the files of a folder, but a "
            "dataset was given, which is used unchanged: leave them out."
        )
