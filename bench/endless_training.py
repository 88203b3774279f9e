"""Our side of a training step: a run without an end, in which only metrics are logged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NEVER = 10**9
"""For the last step and for events: the bench stops requesting steps long before."""


def engine_config(**settings: Any) -> Any:
    """Build an engine config without end, validation, samples and checkpoints."""
    from tessera.engine.config import EngineConfig

    return make_endless(EngineConfig(**settings))


def make_endless(config: Any) -> Any:
    return replace(
        config, steps=NEVER, validate_every=NEVER, sample_every=NEVER, checkpoint_every=NEVER
    )


def iterate_steps(task: Any, dataset: Any, config: Any, work_dir: Path) -> Iterator[Any]:
    """Run the engine with all its features and its data loader, without a recipe."""
    return build_engine(task, dataset, config, work_dir / "ours").steps()


def build_engine(task: Any, dataset: Any, config: Any, folder: Path) -> Any:
    """Build an engine for a task without a recipe."""
    from tessera.data.loader import EvalLoader, TrainLoader
    from tessera.engine.engine import Engine
    from tessera.run.directory import RunDirectory

    directory = RunDirectory(folder)
    directory.create()
    settings = {"seed": config.seed, "batch_size": config.batch_size}
    train, validation = TrainLoader(dataset, **settings), EvalLoader(dataset, **settings)
    engine = Engine(task, train, validation, config, directory)
    engine.open({})
    return engine


def stub_tokenizer(
    vocab_size: int,
    grid: tuple[int, ...],
    *,
    num_quantizers: int = 1,
    seconds: float | None = None,
    features: Any = None,
) -> Any:
    """Return the sizes of a tokenizer without its network.

    Without `features` the vectors of the codes are unknown, as they are to the networks that ours
    are compared with.
    """
    from torch import nn

    return SimpleNamespace(
        is_external=True,
        network=nn.Identity(),
        vocab_size=vocab_size,
        grid=grid,
        num_quantizers=num_quantizers,
        features=features,
        seconds=seconds,
    )
