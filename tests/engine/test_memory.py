"""Freed memory stays with the process, unless somebody has chosen otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ROUNDS, PAGES = 20, 24 * 512
LIFE = f"""
import resource
import numpy
from tessera.engine.memory import keep_freed_memory

def work():
    held = [numpy.ones(1 << 18) for _ in range(24)]  # 48 MB, as a step holds its activations, and gives them back

keep_freed_memory()
work()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({ROUNDS}):
    work()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / {ROUNDS})
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems go on as they are")
def test_a_step_gets_the_memory_of_the_last_one_and_a_choice_made_outside_is_kept() -> None:
    assert faults({}) < PAGES / 100
    assert (
        faults({"MALLOC_TRIM_THRESHOLD_": "131072", "MALLOC_MMAP_THRESHOLD_": "131072"}) > PAGES / 2
    )


def faults(chosen: dict[str, str]) -> float:
    """Pages that each round had to ask the system for."""
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    told = subprocess.run(
        [sys.executable, "-c", LIFE], env=plain | chosen, capture_output=True, text=True, check=True
    )
    return float(told.stdout)
