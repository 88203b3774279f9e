"""Train two implementations for equal CPU time, and compare how soon they reach a quality.

A *row* is one system, such as VQGAN; its *sides* are the published package and ours. A side is
trained in a process of its own, with its own packages. Its budget is CPU time of that process spent
in training steps: building, validation and what other processes do on the machine do not count. At
fixed times the side stops and computes its *outputs* for the held-out examples, for example
reconstructed images. The parent process computes the metrics of these outputs, with the same code
for all sides.

Each pair of a side and a seed has a result file: a line of JSON about the side, then one for each
validation. The file gets its name when the run is complete, so a call that was interrupted repeats
only what was under way.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from worker import redirect_output, send, start_process

EARLY_POINTS_S = (15.0, 30.0)
POINT_EVERY_S = 60.0

Outputs = dict[str, Any]
"""NumPy arrays by name."""
Metrics = dict[str, float]


@dataclass(frozen=True)
class Setting:
    """What a side is built from."""

    work: Path
    """A folder that all rows share; `Row.prepare` has put the data there."""
    scratch: Path
    """An empty folder for this run of the side."""
    seed: int
    budget_s: float
    """The CPU time that the side will be trained for."""


@dataclass(frozen=True)
class SideInfo:
    """A side in words and numbers, for the result file."""

    parameters: int
    """The parameters of the network that is used after training."""
    description: str
    packages: str


class Side(Protocol):
    """One implementation in training."""

    info: SideInfo

    def step(self) -> bool:
        """Run one training step; return False if the training had ended before."""

    def outputs(self, final: bool) -> Outputs:
        """Compute what is validated, for all held-out examples; `final` is the last time."""


@dataclass(frozen=True)
class SideSpec:
    """How to build a side, and where."""

    build: Callable[[Setting], Side]
    is_package: bool = False
    """Whether it needs the environment of the research packages."""
    is_optional: bool = False
    """Whether it runs only if it is requested by name."""
    budget: float = 1.0
    """The fraction of the budget for which it is trained."""


@dataclass(frozen=True)
class Metric:
    name: str
    label: str
    higher_is_better: bool
    decimals: int = 3


Judge = Callable[[Outputs], Metrics]


@dataclass(frozen=True)
class Row:
    """One system, implemented by several sides."""

    title: str
    package: str
    """The name of the side that the others are compared with."""
    sides: dict[str, SideSpec]
    metrics: tuple[Metric, ...]
    """The metrics of every validation."""
    prepare: Callable[[Path, Path], None]
    """Takes the folder of the data and the work folder, and does what all sides share, once."""
    build_judge: Callable[[Path], Judge]
    """Takes the work folder."""
    final_metrics: tuple[Metric, ...] = ()
    """The metrics that are computed only at the end."""


# ---- in the process of a side


class TrainingClock:
    """The CPU time of this process while the clock is running."""

    def __init__(self, process_time: Callable[[], float] = time.process_time):
        self.seconds = 0.0
        self._process_time = process_time

    @contextmanager
    def running(self) -> Iterator[None]:
        start = self._process_time()
        try:
            yield
        finally:
            self.seconds += self._process_time() - start


class TimedTraining:
    """A side with the clock of its training."""

    def __init__(self, side: Side, clock: TrainingClock):
        self.side, self.clock, self.steps, self.has_ended = side, clock, 0, False

    def train_until(self, seconds: float) -> None:
        """Train until the clock shows this time, or until the training ends."""
        while self.clock.seconds < seconds and not self.has_ended:
            with self.clock.running():
                self.has_ended = not self.side.step()
            self.steps += not self.has_ended


def serve_side(build: Callable[[Setting], Side], setting: Setting) -> None:
    """Build a side, send its description, then train up to each time that is read from stdin.

    Outputs are saved as an npz file, whose path is sent.
    """
    import numpy as np

    results = redirect_output()
    side = build(setting)
    send(results, asdict(side.info))
    training = TimedTraining(side, TrainingClock())
    for line in sys.stdin:
        request = json.loads(line)
        training.train_until(request["seconds"])
        path = setting.scratch / "outputs.npz"
        np.savez(path, **side.outputs(request["final"]))
        reply = {"cpu_s": training.clock.seconds, "steps": training.steps, "outputs": str(path)}
        send(results, reply | {"has_ended": training.has_ended})


# ---- in the parent process


@dataclass(frozen=True)
class Point:
    """One validation."""

    cpu_s: float
    steps: int
    metrics: Metrics


@dataclass(frozen=True)
class Curve:
    """The validations of one side with one seed."""

    side: str
    seed: int
    budget_s: float
    info: dict[str, Any]
    points: list[Point]

    @property
    def final(self) -> Point:
        return self.points[-1]

    def values(self, metric: str) -> list[tuple[float, float]]:
        """Return pairs of CPU time and value, without those that are not finite."""
        pairs = [(point.cpu_s, point.metrics[metric]) for point in self.points]
        return [pair for pair in pairs if math.isfinite(pair[1])]


def point_times(budget_s: float) -> list[float]:
    """Return the times of validations: two early ones, then one every minute, and the end."""
    every = [POINT_EVERY_S * number for number in range(1, int(budget_s / POINT_EVERY_S) + 1)]
    return sorted({t for t in (*EARLY_POINTS_S, *every) if t < budget_s} | {budget_s})


def result_path(folder: Path, side: str, seed: int) -> Path:
    return folder / f"{side}-seed{seed}.jsonl"


def run_once(
    path: Path, side: str, seed: int, budget_s: float, command: Sequence[str | Path], judge: Judge
) -> Curve:
    """Return the curve in a result file; train the side for it first if there is none."""
    if not path.exists():
        unfinished = path.with_suffix(".part")
        with unfinished.open("w") as file:
            for record in measure(side, seed, budget_s, command, judge):
                file.write(json.dumps(record) + "\n")
                file.flush()
        unfinished.rename(path)
    curve = read_curve(path)
    if curve.budget_s != budget_s:
        raise SystemExit(
            f"{path} is the result of {curve.budget_s:g} s of CPU time, not of {budget_s:g} s: use "
            "the same --minutes, or another --work."
        )
    return curve


def measure(
    side: str, seed: int, budget_s: float, command: Sequence[str | Path], judge: Judge
) -> Iterator[dict[str, Any]]:
    """Train a side in a process of its own, and yield the records of its result file."""
    with start_process(*command) as process:
        yield {"side": side, "seed": seed, "budget_s": budget_s, "info": process.receive()}
        for seconds in point_times(budget_s):
            reply = process.request({"seconds": seconds, "final": seconds == budget_s})
            metrics = judge(load_outputs(reply["outputs"]))
            shown = "  ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            print(f"{side}, seed {seed}, {reply['cpu_s']:.0f} s: {shown}", flush=True)
            yield {"cpu_s": reply["cpu_s"], "steps": reply["steps"], "metrics": metrics}


def load_outputs(path: str) -> Outputs:
    import numpy as np

    with np.load(path) as arrays:
        return dict(arrays)


def read_curve(path: Path) -> Curve:
    head, *records = map(json.loads, path.read_text().splitlines())
    points = [Point(**record) for record in records]
    return Curve(**head, points=points)


def time_to_reach(curve: Curve, metric: Metric, value: float) -> float | None:
    """Return the CPU time at which a curve first reaches a value, or None if it never does.

    Between two validations the metric is interpolated linearly. A value that is reached before the
    first one counts as reached at that one; no curve reaches a value that is not finite.
    """
    sign = 1 if metric.higher_is_better else -1
    before: tuple[float, float] | None = None
    for cpu_s, reached in curve.values(metric.name):
        if sign * reached >= sign * value:
            if before is None:
                return cpu_s
            fraction = (value - before[1]) / (reached - before[1])
            return before[0] + fraction * (cpu_s - before[0])
        before = (cpu_s, reached)
    return None


def time_ratio(curve: Curve, package: Curve, metric: Metric) -> float | None:
    """Return the time in which a side reaches the package's final value, as a fraction of the
    package's time."""
    reached_s = time_to_reach(curve, metric, package.final.metrics[metric.name])
    return None if reached_s is None else reached_s / package.final.cpu_s
