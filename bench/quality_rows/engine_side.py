"""Our side of every row: a run of the engine whose schedule fits the budget."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from endless_training import make_endless
from time_to_quality import Outputs, Setting, SideInfo
from worker import count_parameters, package_versions

BuildEngine = Callable[[Any, Path], Any]
"""Takes an engine config and an empty folder, and builds an engine."""

TRIAL_FRACTIONS = (0.1, 0.3, 0.5, 0.7, 0.9)
"""The parts of a run at which the cost of a step is measured."""
TRIAL_WARMUP_STEPS, TRIAL_STEPS = 2, 8
SAFETY = 0.97
"""The fraction of the budget that is planned, since the cost of a step varies."""


class EngineSide:
    """An engine in training; its outputs are those of the EMA weights."""

    def __init__(self, engine: Any, info: SideInfo, compute: Callable[[Any, bool], Outputs]):
        self.engine, self.info, self._compute = engine, info, compute
        self._steps = engine.steps()

    def step(self) -> bool:
        # The last step of a run also validates, samples and saves, so it is left out.
        if self.engine.global_step + 1 >= self.engine.config.steps:
            return False
        next(self._steps)
        return True

    def finish(self) -> Path:
        """Run what is left of the training, and return the run directory with its checkpoint."""
        for _ in self._steps:
            pass
        self.engine.directory.unlock()
        return self.engine.directory.path

    def outputs(self, final: bool) -> Outputs:
        from tessera.engine.modes import eval_mode

        with self.engine.ema.applied(), eval_mode(self.engine.task):
            return self._compute(self.engine.task, final)


def build_side(
    config: Any,
    build_engine: BuildEngine,
    setting: Setting,
    compute: Callable[[Any, bool], Outputs],
    description: str,
) -> EngineSide:
    """Build a side with as many steps as fit the budget, so that its learning rate decays in it."""
    config = replace(make_endless(config), seed=setting.seed)
    cost_s = measure_step(config, build_engine, setting.budget_s)
    steps = max(2, int(SAFETY * setting.budget_s / cost_s))
    engine = build_engine(replace(config, steps=steps), setting.scratch / "run")
    info = SideInfo(
        parameters=count_parameters(engine.task.model),
        description=f"{description}; {steps} steps of {config.batch_size} planned",
        packages=package_versions("torch"),
    )
    return EngineSide(engine, info, compute)


def measure_step(config: Any, build_engine: BuildEngine, budget_s: float) -> float:
    """Return the mean CPU time of a step, from a trial that is discarded.

    A step may cost more when networks or losses start later in the run, so steps of several parts
    of a run that fits the budget are measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        engine = build_engine(config, Path(folder))
        batches = engine.load_batches()

        def measure_at(step: int) -> float:
            return time_steps(lambda: engine.run_step(step, next(batches)))

        steps = budget_s / measure_at(0)
        costs = [measure_at(int(fraction * steps)) for fraction in TRIAL_FRACTIONS]
        engine.directory.unlock()
    return sum(costs) / len(costs)


def time_steps(step: Callable[[], object]) -> float:
    for _ in range(TRIAL_WARMUP_STEPS):
        step()
    start = time.process_time()
    for _ in range(TRIAL_STEPS):
        step()
    return (time.process_time() - start) / TRIAL_STEPS
