"""Convert a checkpoint of a research package to a run directory that a trainer resumes from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from torch import nn

from tessera.engine import checkpoint
from tessera.engine.config import EngineConfig
from tessera.engine.engine import Engine
from tessera.engine.optim.config import OptimizerConfig
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.trainers.foreign import ForeignTask
from tessera.trainers.foreign_audio import ForeignSoundStormTask
from tessera.trainers.foreign_images import ForeignVQGANTask
from tessera.trainers.foreign_meshes import ForeignMeshAutoencoderTask, ForeignMeshTransformerTask
from tessera.trainers.foreign_music import ForeignMuLaNTask
from tessera.trainers.foreign_videos import ForeignVideoTask
from tessera.trainers.package_checkpoints import read_package_checkpoint

OPTIMIZER = OptimizerConfig()

TASKS: dict[str, Callable[[nn.Module], ForeignTask]] = {
    "soundstorm": lambda model: ForeignSoundStormTask(
        model, OPTIMIZER, only_train_generator=False, only_train_critic=False
    ),
    "mulan": lambda model: ForeignMuLaNTask(model, OPTIMIZER),
    "video": lambda model: ForeignVideoTask(model, OPTIMIZER, start_step=0, gp_every=4),
    "vqgan": lambda model: ForeignVQGANTask(model, OPTIMIZER, OPTIMIZER),
    "mesh-autoencoder": lambda model: ForeignMeshAutoencoderTask(model, OPTIMIZER),
    "mesh-transformer": lambda model: ForeignMeshTransformerTask(model, OPTIMIZER),
}
"""Trainer -> the task of its contract."""


class NoData:
    """The examples of an engine that only converts a checkpoint."""

    batch_size = 1

    def __len__(self) -> int:
        return 0

    def micro_batches(self, *args: object) -> NoReturn:
        raise UserError("An imported checkpoint has no data: train it with a trainer.")

    batches = spread = micro_batches


def import_checkpoint(trainer: str, model: nn.Module, file: Path, out: Path) -> Path:
    """Write the first checkpoint of a new run directory, and return its path."""
    directory = RunDirectory(out)
    if directory.checkpoints.exists() and checkpoint.list_steps(directory.checkpoints):
        raise UserError(f"{out} has checkpoints already. Give another --out.")
    if not file.is_file():
        raise UserError(f"There is no file {file}: give a checkpoint of the research package.")
    engine = Engine(TASKS[trainer](model), NoData(), NoData(), EngineConfig(), directory)
    snapshot = read_package_checkpoint(file, engine)
    engine.restore(snapshot)  # raises UserError if a tensor is missing or has another shape
    directory.create()
    return checkpoint.write(directory.checkpoints, engine.saver.snapshot(engine.global_step))
