"""Time two implementations of the same work against each other in one run.

Absolute times mean little on a shared machine, so only ratios are reported. The two sides alternate
in blocks of a few steps, and the order within a pair of blocks alternates too, so that a machine
that slows down slows both. Each block yields one time per step. Reported are the medians over the
blocks and the median of the ratios of neighbouring blocks. Wall time is the result. CPU time is
reported for comparison: other work on the machine hardly affects it, but it does not include
waiting for a disk.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median, quantiles


@dataclass(frozen=True)
class StepTime:
    """Seconds per step, averaged over one block."""

    wall_s: float
    cpu_s: float


RunBlock = Callable[[int], StepTime]
"""Runs the given number of steps and returns the time per step."""


def time_blocks(step: Callable[[], object]) -> RunBlock:
    """Return a function that runs a block of steps and measures it."""

    def run_block(steps: int) -> StepTime:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        return StepTime((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps)

    return run_block


@dataclass
class PairedTimes:
    """Block times of two sides; block i of one ran next to block i of the other."""

    ours: list[StepTime]
    theirs: list[StepTime]

    @property
    def wall(self) -> Ratio:
        return Ratio.from_times([t.wall_s for t in self.ours], [t.wall_s for t in self.theirs])

    @property
    def cpu(self) -> Ratio:
        return Ratio.from_times([t.cpu_s for t in self.ours], [t.cpu_s for t in self.theirs])


@dataclass(frozen=True)
class Ratio:
    """Median milliseconds per step of both sides, and the median and quartiles of ours / theirs."""

    ours_ms: float
    theirs_ms: float
    ratio: float
    low: float
    high: float

    @classmethod
    def from_times(cls, ours: list[float], theirs: list[float]) -> Ratio:
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return cls(1e3 * median(ours), 1e3 * median(theirs), middle, low, high)


def alternate(
    ours: RunBlock, theirs: RunBlock, *, blocks: int, steps: int, warmup_steps: int
) -> PairedTimes:
    """Time both sides in alternating blocks, after one block of each that is not counted."""
    ours(warmup_steps)
    theirs(warmup_steps)
    times = PairedTimes([], [])
    for block in range(blocks):
        if block % 2:
            times.theirs.append(theirs(steps))
            times.ours.append(ours(steps))
        else:
            times.ours.append(ours(steps))
            times.theirs.append(theirs(steps))
    return times


def set_threads(threads: int) -> None:
    """Set the number of compute threads, here and in every child process.

    Must be called before torch is imported.
    """
    os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    import torch

    torch.set_num_threads(threads)


def describe_machine() -> str:
    """Return threads, cores, load and versions, which the numbers depend on."""
    import torch

    load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
    return (
        f"{torch.get_num_threads()} thread(s), {os.cpu_count()} cores, load {load} | "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )


def to_json(times: PairedTimes) -> dict[str, dict[str, float]]:
    return {"wall": asdict(times.wall), "cpu": asdict(times.cpu)}
