"""The front door of music and texts: trains a MuLaN on pairs that are in memory, or on a folder.

trainer = MuLaNTrainer(MuLaNConfig().build(), dataset, batch_size=64, num_train_steps=1000)
trainer.train()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tessera.data.dataset import Split, Subset, split_names
from tessera.engine.ema import EMAConfig
from tessera.engine.optim.config import OptimizerConfig
from tessera.modalities.music.contrastive import MusicContrastiveConfig
from tessera.modalities.music.dataset import MusicDataConfig
from tessera.modalities.music.mulan import MuLaN
from tessera.objectives.contrastive import Kind
from tessera.run.config import Run
from tessera.run.errors import UserError
from tessera.run.train import build_task
from tessera.text.token_ids import TokenIdTextConfig
from tessera.trainers.arguments import GIVEN, engine_config, refuse_clearing
from tessera.trainers.base import Trainer
from tessera.trainers.in_memory_music import InMemoryMusic, max_len

SECONDS = 10.0
"""Of a folder's clips, where data_max_length does not say otherwise."""


class MuLaNTrainer(Trainer):
    """Trains a MuLaN on `dataset`, anything with a length whose items are a wave and a text
    (`trainers/in_memory_music.py` says how they may look), or on a `folder` of recordings with
    captions.

    `batch_size * grad_accum_every` examples make a step, and each of them is told apart from all
    the others: accumulation really enlarges what a text is compared with. Without `num_train_steps`
    each example is met once. `results_folder` is the run's folder; a second construction goes on
    where the first stopped, and nothing is asked or deleted.
    """

    def __init__(
        self,
        mulan: MuLaN,
        dataset: Sequence[Any] | None = None,
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
        accelerate_kwargs: Mapping[str, Any] | None = None,
        use_lion: bool = False,
        force_clear_prev_results: bool | None = None,
        loss: Kind | None = None,
    ) -> None:
        refuse_clearing(force_clear_prev_results)
        refuse_unclear(dataset, folder, batch_size, grad_accum_every)
        audio = mulan.config.audio
        clip = data_max_length or (
            max_len(dataset) if dataset is not None else round(SECONDS * audio.rate_hz)
        )
        data = MusicDataConfig(
            path=str(folder) if folder is not None else GIVEN,
            rate_hz=audio.rate_hz,
            samples=clip,
            val_fraction=valid_frac,
            split_seed=random_split_seed,
        )
        split = given_split(dataset, data, mulan) if dataset is not None else data.build()
        steps = num_train_steps or max(1, len(split.train) // (batch_size * grad_accum_every))
        run = Run(
            recipe="music-mulan",
            task=MusicContrastiveConfig(
                model=mulan.config,
                loss=loss_of(mulan, loss),
                layers=len(mulan.log_scale) - 1,
                optimizer=OptimizerConfig(
                    name="lion" if use_lion else "adam",
                    lr=lr,
                    betas=betas,
                    max_grad_norm=max_grad_norm,
                ),
            ),
            data=data,
            engine=engine_config(
                steps,
                batch_size,
                grad_accum_every,
                save_model_every,
                save_model_every,
                EMAConfig(decay=0.0),
                accelerate_kwargs,
            ),
        )
        task = build_task(run)
        task.model.load_state_dict(mulan.state_dict())
        super().__init__(run, results_folder, task, split)


def given_split(dataset: Sequence[Any], data: MusicDataConfig, mulan: MuLaN) -> Split:
    numbers = isinstance(mulan.config.text, TokenIdTextConfig)
    source = InMemoryMusic(dataset, data.length, data.rate_hz, numbers)
    train, validation = split_names(
        [source.name(i) for i in range(len(source))], data.val_fraction, data.split_seed
    )
    return Split(Subset(source, train), Subset(replace(source, crop="centre"), validation))


def loss_of(mulan: MuLaN, asked: Kind | None) -> Kind:
    """As asked; else by what the network was built for."""
    fits = "sigmoid" if mulan.bias is not None else asked or "decoupled"
    if asked is not None and (asked == "sigmoid") != (mulan.bias is not None):
        built = (
            "for the sigmoid loss"
            if mulan.bias is not None
            else "without a bias, which the sigmoid loss needs"
        )
        raise UserError(
            f"The loss asked for is {asked!r}, but the network was built {built}: build it with biased={asked == 'sigmoid'}."
        )
    return fits


def refuse_unclear(dataset: Any, folder: Any, batch_size: int, grad_accum_steps: int) -> None:
    if (dataset is None) == (folder is None):
        met = "neither a dataset nor a folder" if dataset is None else "both a dataset and a folder"
        raise UserError(f"A trainer learns from one place, but was given {met}: give one of them.")
    if dataset is not None and len(dataset) < 2:
        raise UserError(
            f"What belongs to what can be learnt from 2 pairs or more, but the dataset has {len(dataset)}."
        )
    if batch_size * grad_accum_steps < 2:
        raise UserError(
            "A batch of one pair has nothing to be told apart from: give a batch_size of 2 or more, better 64."
        )
