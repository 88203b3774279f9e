"""Our side of a training step: a run that does not end, in which nothing is due but lines in the
log."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NEVER = 10**9
"""The last step, with all that is due then, does not come: whoever asks for steps stops before."""


def config(**settings: Any) -> Any:
    from tessera.engine.engine import EngineConfig

    return made_endless(EngineConfig(**settings))


def made_endless(config: Any) -> Any:
    return replace(
        config, steps=NEVER, validate_every=NEVER, sample_every=NEVER, checkpoint_every=NEVER
    )


def steps(task: Any, source: Any, config: Any, work: Path) -> Iterator[Any]:
    """The engine with everything on, and its stream of examples; no recipe stands behind it."""
    from tessera.data.loader import EvalLoader, TrainLoader
    from tessera.engine.engine import Engine
    from tessera.run.directory import RunDirectory

    folder = RunDirectory(work / "ours")
    folder.make()
    drawn = {"seed": config.seed, "batch_size": config.batch_size}
    engine = Engine(task, TrainLoader(source, **drawn), EvalLoader(source, **drawn), config, folder)
    engine.open({})
    return engine.steps()


def tokens(
    vocab_size: int, grid: tuple[int, ...], *, levels: int = 1, seconds: float | None = None
) -> Any:
    """A tokenizer of whose symbols nothing is known: the networks beside ours know nothing of
    theirs either."""
    from torch import nn

    return SimpleNamespace(
        network=nn.Identity(),
        vocab_size=vocab_size,
        grid=grid,
        levels=levels,
        features=None,
        seconds=seconds,
    )
