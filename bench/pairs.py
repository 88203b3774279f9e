"""Two ways of doing the same work, timed side by side in one run, because only a ratio says
anything on a shared machine.

Both take turns in blocks of a few steps, and who begins changes with each turn, so that a machine
that slows down slows both. A block gives one number, its time per step; told are the medians over
the blocks, and the median of the ratios of blocks that were neighbours. Wall time is what a person
waits for; CPU time is little disturbed by other work on the machine, and knows nothing of waiting
for a disk.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median, quantiles


@dataclass(frozen=True)
class Spent:
    """Seconds per step, in one block."""

    wall_s: float
    cpu_s: float


Side = Callable[[int], Spent]
"""Does so many steps."""


def timed(step: Callable[[], object]) -> Side:
    def block(steps: int) -> Spent:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        return Spent((time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps)

    return block


@dataclass
class Pairs:
    """Blocks of two sides; block i of the one ran beside block i of the other."""

    ours: list[Spent]
    theirs: list[Spent]

    @property
    def wall(self) -> Ratio:
        return Ratio.of(
            [spent.wall_s for spent in self.ours], [spent.wall_s for spent in self.theirs]
        )

    @property
    def cpu(self) -> Ratio:
        return Ratio.of(
            [spent.cpu_s for spent in self.ours], [spent.cpu_s for spent in self.theirs]
        )


@dataclass(frozen=True)
class Ratio:
    """Medians in milliseconds per step, and how the times compare: ours / theirs, with its
    quartiles."""

    ours_ms: float
    theirs_ms: float
    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, ours: list[float], theirs: list[float]) -> Ratio:
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        return cls(1e3 * median(ours), 1e3 * median(theirs), middle, low, high)


def alternate(ours: Side, theirs: Side, *, blocks: int, steps: int, warm_up: int) -> Pairs:
    """Both sides in turn; a first block of each, not counted, fills caches and memory."""
    ours(warm_up)
    theirs(warm_up)
    pairs = Pairs([], [])
    for block in range(blocks):
        if block % 2:
            pairs.theirs.append(theirs(steps))
            pairs.ours.append(ours(steps))
        else:
            pairs.ours.append(ours(steps))
            pairs.theirs.append(theirs(steps))
    return pairs


def pin(threads: int) -> None:
    """So many compute threads, here and in every process started from here; before torch is
    imported."""
    os.environ.update(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    import torch

    torch.set_num_threads(threads)


def circumstances() -> str:
    """What a reader must know to trust the numbers."""
    import torch

    load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
    return (
        f"{torch.get_num_threads()} thread(s), {os.cpu_count()} cores, load {load} | "
        f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )


def as_json(pairs: Pairs) -> dict[str, dict[str, float]]:
    return {"wall": asdict(pairs.wall), "cpu": asdict(pairs.cpu)}
