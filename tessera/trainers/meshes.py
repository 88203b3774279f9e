"""The front doors of meshes: MeshGPT's autoencoder, and the transformer over its symbols.

    autoencoder = MeshAutoencoderTrainer(
        MeshAutoencoder(MeshAutoencoderConfig()), dataset, num_train_steps=2000, batch_size=8, grad_accum_every=1,
        checkpoint_folder="runs/meshes-autoencoder",
    )
    autoencoder()                                       # calling a trainer trains

    transformer = MeshTransformerTrainer(
        MeshTransformerConfig().build(autoencoder.model.vocabulary, corners=3, num_quantizers=2), captioned,
        tokenizer="runs/meshes-autoencoder", num_train_steps=2000, batch_size=8, grad_accum_every=1,
        checkpoint_folder="runs/meshes-transformer",
    )
    transformer()

A dataset is a folder of meshes, or anything with a length whose items are tuples or dictionaries:
vertices (V, 3), faces (F, 3) or (F, 4) and, for the transformer, a text
(`trainers/in_memory_meshes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tessera.data.dataset import Split, Subset
from tessera.engine.engine import EngineConfig
from tessera.engine.modes import eval_mode
from tessera.engine.optim.config import OptimizerConfig, Schedule
from tessera.modalities.mesh.autoencoder import MeshAutoencoder
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.mesh.reconstruction import MeshTokenizerConfig
from tessera.modalities.mesh.transformer import MeshTransformer
from tessera.objectives.autoregressive import AutoregressiveConfig
from tessera.recipes import registry as recipes
from tessera.run.config import Run
from tessera.run.dependencies import find_dependencies
from tessera.run.directory import RunDirectory
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
from tessera.trainers.base import Logs
from tessera.trainers.in_memory_meshes import InMemoryMeshes, names_of
from tessera.trainers.tracked import TrackedTrainer

Dataset = Sequence[Any] | str | Path
OPTIMIZER = {"betas": "betas", "eps": "eps", "kind": "kind"}
"""What may stand in optimizer_kwargs; the decay has a parameter of its own."""


class MeshTrainer(TrackedTrainer):
    """What both share: calling it trains."""

    tracking = "wandb_tracking"

    def __call__(self, log_fn: Callable[[Logs], None] | None = None) -> None:
        self.train(log_fn)

    def wandb_tracking(
        self, project: str, run: str | None = None, hps: Mapping[str, Any] | None = None
    ) -> AbstractContextManager[None]:
        """Inside, every record also goes to this project of Weights & Biases, with `hps`, whatever
        else is worth telling."""
        return self.tracked_in(project, run, hps)


class MeshAutoencoderTrainer(MeshTrainer):
    """Trains a mesh tokenizer.

    `batch_size * grad_accum_every` meshes make a step, whatever the number of processes that share
    them. Measured are, with the averaged weights, the first `val_num_batches * grad_accum_every`
    batches of `val_dataset`, each time the same; without one, of the training meshes. Samples are
    made as often as checkpoints. `checkpoint_folder` is the run's folder. Meshes of more than
    `max_faces` are left out, and listed.
    """

    def __init__(
        self,
        model: MeshAutoencoder,
        dataset: Dataset,
        *,
        num_train_steps: int,
        batch_size: int,
        grad_accum_every: int,
        val_dataset: Dataset | None = None,
        val_every: int = 100,
        val_num_batches: int = 5,
        learning_rate: float = 1e-4,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = None,
        ema_kwargs: Mapping[str, Any] | None = None,
        scheduler: Schedule | None = None,
        scheduler_kwargs: Mapping[str, Any] | None = None,
        warmup_steps: int = 1000,
        accelerator_kwargs: Mapping[str, Any] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        checkpoint_every: int = 1000,
        checkpoint_folder: str | Path = "./checkpoints",
        data_kwargs: Sequence[str] = ("vertices", "faces", "face_edges"),
        use_wandb_tracking: bool = False,
        max_faces: int = 800,
    ) -> None:
        data = MeshDataConfig(
            path=place_of(dataset),
            bins=model.config.bins,
            polygons=model.config.polygons,
            max_faces=max_faces,
            val_fraction=0.0,
        )
        run = Run(
            recipe="meshes-autoencoder",
            task=MeshTokenizerConfig(
                model=model.config,
                optimizer=optimizer_of(
                    learning_rate,
                    weight_decay,
                    max_grad_norm,
                    scheduler,
                    scheduler_kwargs,
                    warmup_steps,
                    optimizer_kwargs,
                ),
            ),
            data=data,
            engine=mesh_engine_config(
                num_train_steps,
                batch_size,
                grad_accum_every,
                val_every,
                checkpoint_every,
                ema_kwargs,
                accelerator_kwargs,
            ),
        )
        split = split_of(
            dataset, val_dataset, val_num_batches * grad_accum_every * batch_size, data_kwargs, data
        )
        task = build_task(run)
        task.model.load_state_dict(model.state_dict())
        self._data_kwargs = tuple(data_kwargs)
        super().__init__(run, checkpoint_folder, task, split, use_wandb_tracking=use_wandb_tracking)

    def tokenize(self, meshes: Sequence[Any]) -> Tensor:
        """Items as in a dataset to symbols, with the averaged weights: (B, F, K), or (B, F, K, L)
        of a residual quantizer.

        Faces are in canonical order, and -1 stands where a mesh has fewer than another.
        """
        source = InMemoryMeshes(meshes, names_of(meshes, self._data_kwargs), self.run.data)
        batch = source.collate(
            [source.item(index, np.random.default_rng(0)) for index in range(len(source))]
        )
        with self.engine.ema.applied(), eval_mode(self.engine.task):
            return self.model.tokenize(batch.to(self.engine.device))


class MeshTransformerTrainer(MeshTrainer):
    """Trains a mesh transformer over the symbols of a finished autoencoder run, `tokenizer`, which
    is copied into this one's.

    Meshes are prepared as for the autoencoder, tokenized once, before the first step, and never
    again. The rest is as in MeshAutoencoderTrainer. `cond_drop_prob` is the share of texts left
    out, for guidance.
    """

    def __init__(
        self,
        model: MeshTransformer,
        dataset: Dataset,
        *,
        tokenizer: str | Path,
        num_train_steps: int,
        batch_size: int,
        grad_accum_every: int,
        val_dataset: Dataset | None = None,
        val_every: int = 1,
        val_num_batches: int = 5,
        learning_rate: float = 2e-4,
        weight_decay: float = 0.0,
        max_grad_norm: float | None = 0.5,
        ema_kwargs: Mapping[str, Any] | None = None,
        scheduler: Schedule | None = None,
        scheduler_kwargs: Mapping[str, Any] | None = None,
        warmup_steps: int = 1000,
        accelerator_kwargs: Mapping[str, Any] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        checkpoint_every: int = 1000,
        checkpoint_folder: str | Path = "./checkpoints",
        data_kwargs: Sequence[str] = ("vertices", "faces", "face_edges", "texts"),
        use_wandb_tracking: bool = False,
        cond_drop_prob: float = 0.25,
    ) -> None:
        folder = RunDirectory(checkpoint_folder)
        data = replace(data_beneath(folder, tokenizer), path=place_of(dataset), val_fraction=0.0)
        run = Run(
            recipe="meshes-transformer",
            task=AutoregressiveConfig(
                tokenizer=str(tokenizer),
                model=model.config,
                cond_drop_prob=cond_drop_prob,
                optimizer=optimizer_of(
                    learning_rate,
                    weight_decay,
                    max_grad_norm,
                    scheduler,
                    scheduler_kwargs,
                    warmup_steps,
                    optimizer_kwargs,
                ),
            ),
            data=data,
            engine=mesh_engine_config(
                num_train_steps,
                batch_size,
                grad_accum_every,
                val_every,
                checkpoint_every,
                ema_kwargs,
                accelerator_kwargs,
            ),
        )
        split = split_of(
            dataset, val_dataset, val_num_batches * grad_accum_every * batch_size, data_kwargs, data
        )
        task = build_task(run, find_dependencies(run, folder))
        refuse_stranger(model, task.model)
        task.model.load_state_dict(model.state_dict())
        super().__init__(run, checkpoint_folder, task, split, use_wandb_tracking=use_wandb_tracking)


# ---- their words in ours


def optimizer_of(
    rate: float,
    decay: float,
    clip: float | None,
    scheduler: Schedule | None,
    scheduler_kwargs: Mapping[str, Any] | None,
    warmup_steps: int,
    optimizer_kwargs: Mapping[str, Any] | None,
) -> OptimizerConfig:
    return OptimizerConfig(
        lr=rate,
        weight_decay=decay,
        max_grad_norm=clip,
        **scheduled(scheduler, warmup_steps),
        **translated(scheduler_kwargs, "scheduler_kwargs", SCHEDULE),
        **translated(optimizer_kwargs, "optimizer_kwargs", OPTIMIZER),
    )


def mesh_engine_config(
    steps: int,
    batch_size: int,
    grad_accum_steps: int,
    val_every: int,
    checkpoint_every: int,
    ema_kwargs: Mapping[str, Any] | None,
    accelerator_kwargs: Mapping[str, Any] | None,
) -> EngineConfig:
    """Theirs makes no samples. Validation may come at every step, but to write meshes that often
    would take all the time."""
    ema = ema_config_from_kwargs(ema_kwargs)
    engine_defaults = engine_config(
        steps,
        batch_size,
        grad_accum_steps,
        val_every,
        checkpoint_every,
        ema,
        accelerator_kwargs,
        "accelerator_kwargs",
    )
    return replace(engine_defaults, sample_every=checkpoint_every)


def place_of(dataset: Dataset) -> str:
    return str(dataset) if isinstance(dataset, (str, Path)) else GIVEN


def split_of(
    dataset: Dataset,
    val_dataset: Dataset | None,
    measured: int,
    data_kwargs: Sequence[str],
    data: MeshDataConfig,
) -> Split:
    if measured < 1:
        raise UserError("val_num_batches must be 1 or more: the last step is always measured.")
    train = source_of(dataset, data_kwargs, data)
    held_out = source_of(val_dataset, data_kwargs, data) if val_dataset is not None else train
    if val_dataset is not None and not len(held_out):
        raise UserError(
            "val_dataset is empty, so nothing could be measured: leave it out, or put a mesh in."
        )
    return Split(train, Subset(held_out, range(measured)))


def source_of(dataset: Dataset, data_kwargs: Sequence[str], data: MeshDataConfig) -> Any:
    if isinstance(dataset, (str, Path)):
        return replace(data, path=str(dataset)).full()
    data.require_libraries()
    return InMemoryMeshes(dataset, names_of(dataset, data_kwargs), data)


def data_beneath(folder: RunDirectory, tokenizer: str | Path) -> MeshDataConfig:
    """How meshes were prepared for the autoencoder: as in its copy in this run's folder, once there
    is one."""
    copy = folder.parts / "tokenizer"
    run = recipes.stored(RunDirectory(copy if copy.exists() else tokenizer))
    if not isinstance(run.data, MeshDataConfig):
        raise UserError(
            f"The run in {tokenizer} is of recipe {run.recipe!r}, but a mesh transformer stands on meshes-autoencoder."
        )
    return run.data.plain()


def refuse_stranger(model: MeshTransformer, fitting: MeshTransformer) -> None:
    """A transformer that was built for the symbols of another autoencoder."""
    if (model.vocab_size, model.tokens_per_position) != (fitting.vocab_size, fitting.tokens_per_position):
        raise UserError(
            f"The transformer was built for {model.vocab_size} symbols, {model.tokens_per_position} in a face, but its tokenizer writes "
            f"{fitting.vocab_size}, {fitting.tokens_per_position} in a face: build it with the tokenizer's vocabulary, corners and levels."
        )
