"""What something takes of memory: each way of doing it in a fresh process, which tells how far it
grew."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from math import isclose
from pathlib import Path
from typing import Any

from compared import Act

STATUS = Path("/proc/self/status")
"""Where Linux tells a process about itself."""
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""For the environment of a process that is measured. Left alone, glibc keeps much of what was
freed, and not the same amount in each run (10 s in pieces: 380 MB and 473; so: 283 and 285), while
what is asked here is how much the work needs."""


@dataclass(frozen=True)
class Used:
    """What something took."""

    mb: float
    """How much larger the process was at its largest than before (2^20 bytes)."""
    outcome: float
    """What came of it, for other ways of doing the same: frames, a penalty, a loss."""


def measured(act: Callable[[], float]) -> Used:
    """`act` must be the largest thing that this process has done."""
    before = memory_mb("VmRSS")
    outcome = act()
    return Used(memory_mb("VmHWM") - before, outcome)


def memory_mb(what: str) -> float:
    """VmRSS is what this process takes now, VmHWM the most it ever took. (The peak that getrusage
    tells is of no use here: Linux hands it down through exec, so a child of a large parent was
    large from the beginning.)"""
    with STATUS.open() as lines:
        [kilobytes] = [line.split()[1] for line in lines if line.startswith(f"{what}:")]
    return int(kilobytes) / 1024


def told_by(name: str, command: list[str]) -> dict[str, Any]:
    """What a process says in its last line. It is a fresh one: what one leaves in memory must not
    be there when the next begins."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | GIVEN_BACK)
    if done.returncode:
        raise SystemExit(
            f"The process for '{name}' has ended with exit code {done.returncode}; its words are above."
        )
    return json.loads(done.stdout.splitlines()[-1])


def acts(ways: dict[str, Callable[[], Used]]) -> dict[str, Act]:
    """For `Script`: processes that are a way, and tell what it took."""
    return {name: partial(take, way) for name, way in ways.items()}


def take(way: Callable[[], Used], asked: argparse.Namespace) -> None:
    print(json.dumps(asdict(way())))


def refuse_other_work(
    found: dict[str, Used], one: str, other: str, what: str, *, rel_tol: float
) -> None:
    """Two ways of the same work come to the same."""
    if not isclose(found[one].outcome, found[other].outcome, rel_tol=rel_tol):
        raise SystemExit(
            f"The {what} is {found[one].outcome:.6f} of {one}, and {found[other].outcome:.6f} of {other}: they are not the "
            "same work, so their memory says nothing."
        )
