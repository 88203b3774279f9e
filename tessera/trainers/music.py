"""The trainer for music and text: MuLaN, on pairs in memory or on a folder.

    trainer = MuLaNTrainer(MuLaNConfig().build(), pairs, batch_size=64, num_train_steps=1000)
    trainer.train()

The parameters are those of musiclm-pytorch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from tessera.data.dataset import Split, split_dataset
from tessera.data.source import require_items
from tessera.engine.ema import EMAConfig
from tessera.engine.optim.config import OptimizerConfig
from tessera.modalities.music.contrastive import MusicContrastiveConfig
from tessera.modalities.music.dataset import MusicDataConfig
from tessera.modalities.music.mulan import MuLaN
from tessera.objectives.contrastive import ContrastiveLoss
from tessera.run.config import Run, encode
from tessera.run.errors import UserError
from tessera.run.train import build_task
from tessera.text.token_ids import TokenIdTextConfig
from tessera.trainers.arguments import (
    IN_MEMORY,
    build_engine_config,
    check_arguments,
    check_clear_results,
)
from tessera.trainers.base import Trainer, adopt_model
from tessera.trainers.foreign import ForeignRun
from tessera.trainers.foreign_music import ForeignMuLaNTask, build_pairs
from tessera.trainers.in_memory_music import InMemoryMusic, find_max_samples

DEFAULT_SECONDS = 10.0
"""The length of an example from a folder without `data_max_length`."""


class MuLaNTrainer(Trainer[MuLaN]):
    """Train MuLaN on pairs of music and text.

    The pairs are `dataset`, any object with a length whose items are a waveform and a text
    (`trainers/in_memory_music.py` describes them), or a `folder` of recordings with captions.

    A step has `batch_size * grad_accum_every` examples, and the loss compares each of them with all
    others, so gradient accumulation increases the number of negatives. Without `num_train_steps`
    training takes one epoch. `results_folder` is the run directory: a trainer that is constructed
    again resumes, and nothing is deleted. `workers` is the number of processes that load data.

    A model of another package is trained as it is if it is called like that of musiclm-pytorch
    (`trainers/foreign_music.py`); it has its own loss, which compares the pairs of a micro-batch.
    """

    @check_arguments
    def __init__(
        self,
        mulan: MuLaN | nn.Module,
        dataset: Sequence[object] | None = None,
        *,
        num_train_steps: int | None = None,
        batch_size: int,
        data_max_length: int | None = None,
        folder: str | Path | None = None,
        lr: float = 3e-4,
        grad_accum_every: int = 1,
        betas: tuple[float, float] = (0.9, 0.99),
        max_grad_norm: float | None = 0.5,
        valid_frac: float = 0.05,
        random_split_seed: int = 42,
        save_model_every: int = 1000,
        results_folder: str | Path = "./results",
        accelerate_kwargs: Mapping[str, object] | None = None,
        use_lion: bool = False,
        force_clear_prev_results: bool | None = None,
        loss: ContrastiveLoss | None = None,
        workers: int = 0,
    ) -> None:
        check_clear_results(force_clear_prev_results)
        check_data_arguments(dataset, folder, batch_size, grad_accum_every)
        optimizer = OptimizerConfig(
            name="lion" if use_lion else "adam", lr=lr, betas=betas, max_grad_norm=max_grad_norm
        )
        build_engine = partial(
            build_engine_config,
            micro_batch_size=batch_size,
            grad_accum_steps=grad_accum_every,
            validate_every=save_model_every,
            checkpoint_every=save_model_every,
            num_workers=workers,
            ema=EMAConfig(decay=0.0),
            accelerate_kwargs=accelerate_kwargs,
        )
        if not isinstance(mulan, MuLaN):
            foreign = ForeignMuLaNTask(mulan, optimizer)
            if dataset is None or loss is not None:
                raise UserError(
                    "folder and loss are for a MuLaN of this package, but the model is another one "
                    "with a loss of its own: give a dataset of pairs, and leave them out."
                )
            pairs = build_pairs(dataset, data_max_length)
            split = split_dataset(pairs, valid_frac, random_split_seed)
            steps = num_train_steps or steps_per_epoch(split, batch_size * grad_accum_every)
            arguments = {"optimizer": encode(optimizer), "data_max_length": data_max_length}
            run = ForeignRun(foreign, split, build_engine(steps=steps), arguments)
            super().__init__(run, results_folder)
            return
        rate_hz = mulan.config.audio.rate_hz
        if dataset is None:
            samples = data_max_length or round(DEFAULT_SECONDS * rate_hz)
        else:
            samples = data_max_length or find_max_samples(dataset)
        data = MusicDataConfig(
            path=IN_MEMORY if folder is None else str(folder),
            rate_hz=rate_hz,
            samples=samples,
            val_fraction=valid_frac,
            split_seed=random_split_seed,
        )
        split = data.build() if dataset is None else split_pairs(dataset, data, mulan)
        steps = num_train_steps or steps_per_epoch(split, batch_size * grad_accum_every)
        own_run = Run(
            recipe="music-mulan",
            task=MusicContrastiveConfig(
                model=mulan.config,
                loss=choose_loss(mulan, loss),
                layers=len(mulan.log_scale) - 1,
                optimizer=optimizer,
            ),
            data=data,
            engine=build_engine(steps=steps),
        )
        task = build_task(own_run)
        adopt_model(task, mulan)
        super().__init__(own_run, results_folder, task, split)


def steps_per_epoch(split: Split, batch_size: int) -> int:
    return max(1, len(split.train) // batch_size)


def split_pairs(dataset: Sequence[object], data: MusicDataConfig, mulan: MuLaN) -> Split:
    """Split pairs in memory; held-out examples are cropped in the middle."""
    takes_token_ids = isinstance(mulan.config.text, TokenIdTextConfig)
    examples = InMemoryMusic(dataset, data.length, data.rate_hz, takes_token_ids)
    without_augmentation = replace(examples, crop="centre")
    return split_dataset(examples, data.val_fraction, data.split_seed, without_augmentation)


def choose_loss(mulan: MuLaN, loss: ContrastiveLoss | None) -> ContrastiveLoss:
    """Return the requested loss if the model was built for it; by default one that it fits."""
    has_bias = mulan.bias is not None
    if loss is not None and (loss == "sigmoid") != has_bias:
        built = "with the bias of the sigmoid loss" if has_bias else "without its bias"
        raise UserError(
            f"The loss is {loss!r}, but the model was built {built}: build it with "
            f"biased={loss == 'sigmoid'}, or leave the loss out."
        )
    if has_bias:
        return "sigmoid"
    return loss or "decoupled"


def check_data_arguments(
    dataset: Sequence[object] | None,
    folder: str | Path | None,
    batch_size: int,
    grad_accum_steps: int,
) -> None:
    """Raise UserError unless there is one source of data with at least two pairs per step."""
    if (dataset is None) == (folder is None):
        found = "neither a dataset nor" if dataset is None else "both a dataset and"
        raise UserError(f"Got {found} a folder, but training needs one of them: give one.")
    if dataset is not None:
        require_items(dataset)
    if dataset is not None and len(dataset) < 2:
        raise UserError(
            f"dataset has {len(dataset)} pair(s), but the loss compares pairs with each other: "
            "give 2 or more."
        )
    if batch_size * grad_accum_steps < 2:
        raise UserError(
            f"A step has {batch_size * grad_accum_steps} pair(s), but the loss compares pairs with "
            "each other: use a batch_size of 2 or, better, 64 or more."
        )
