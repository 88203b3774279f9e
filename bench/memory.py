"""Measure the memory of a computation in a fresh process, as the growth of the process."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

from comparison import RunWorker

STATUS = Path("/proc/self/status")
"""Where Linux reports the memory of a process."""
RELEASE_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Environment of a measured process. By default glibc keeps part of the freed memory, and not the
same amount in each run (10 s in chunks: 380 MB and 473 MB; with this setting: 283 and 285)."""


@dataclass(frozen=True)
class MemoryUse:
    """The memory that a computation needed."""

    mb: float
    """Peak size of the process minus its size before, in units of 2^20 bytes."""
    outcome: float
    """A result of the computation that other variants can be checked against: frames, a penalty, a
    loss."""


def measure_memory(compute: Callable[[], float]) -> MemoryUse:
    """Run a computation, which must need more memory than anything this process did before."""
    before = read_status_mb("VmRSS")
    outcome = compute()
    return MemoryUse(read_status_mb("VmHWM") - before, outcome)


def read_status_mb(field: str) -> float:
    """Read the current size (VmRSS) or the peak size (VmHWM) of this process.

    The peak that getrusage reports cannot be used: Linux keeps it across exec, so a child of a
    large parent starts with a large peak.
    """
    with STATUS.open() as lines:
        [kilobytes] = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(kilobytes) / 1024


def run_process(name: str, command: list[str]) -> dict[str, Any]:
    """Run a worker in a fresh process and return the JSON in the last line of its stdout."""
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | RELEASE_FREED_MEMORY
    )
    if done.returncode:
        sys.stderr.write(done.stderr)
        raise SystemExit(
            f"The process for '{name}' ended with exit code {done.returncode}; "
            "its output is printed above."
        )
    return json.loads(done.stdout.splitlines()[-1])


def memory_workers(variants: dict[str, Callable[[], MemoryUse]]) -> dict[str, RunWorker]:
    """Turn measurements into worker processes for a `BenchScript`."""
    return {name: partial(print_memory_use, measure) for name, measure in variants.items()}


def print_memory_use(measure: Callable[[], MemoryUse], args: argparse.Namespace) -> None:
    print(json.dumps(asdict(measure())))


def check_same_outcome(
    uses: dict[str, MemoryUse], one: str, other: str, quantity: str, *, rel_tol: float
) -> None:
    """Exit if two variants of the same computation have different results."""
    a, b = uses[one].outcome, uses[other].outcome
    if not isclose(a, b, rel_tol=rel_tol):
        raise SystemExit(
            f"The {quantity} of {one} is {a:.6f} and that of {other} is {b:.6f}, but they must be "
            "equal: they are not the same work, so their memory cannot be compared."
        )
