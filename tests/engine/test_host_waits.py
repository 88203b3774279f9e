"""Steps that are not logged never make the host wait for the device.

There is no GPU in the tests: `tests/device_stand_in.py` is a device that counts what would wait.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.host_waits import COMPARED
from tests.runs import CASES

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    completed = subprocess.run(
        [sys.executable, "-m", "tests.engine.host_waits"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr[-5000:]
    return json.loads(completed.stdout)


@pytest.mark.parametrize("case", CASES)
def test_five_steps_that_are_not_logged_never_wait(case: str, results: dict[str, Any]) -> None:
    assert results["waits"][case] == []


@pytest.mark.parametrize("case", COMPARED)
def test_a_device_skips_a_step_as_the_cpu_does(case: str, results: dict[str, Any]) -> None:
    compared = results["comparisons"][case]
    assert compared["changed"] == []
    # Not to the bit: backward passes of a device accumulate gradients in another order.
    assert compared["norms"] == pytest.approx(compared["host_norms"], rel=1e-3, nan_ok=True)


def test_the_stand_in_counts_what_waits() -> None:
    """In a process of its own, since the device would be found by other tests."""
    script = """
import torch
from tests import device_stand_in
device = device_stand_in.register_device()
with device_stand_in.counting_waits() as waits:
    x = torch.arange(4.0).to(device, non_blocking=True)
    assert waits == [] and x.device == device
    (x * 2 + torch.ones(4, device=device)).sum().backward
    assert waits == []
    float(x.sum()), x[x > 1], x.nonzero(), x.cpu(), torch.tensor([1.0], device=device)
    x[torch.tensor([0])], torch.bincount(x.long()), x.tolist(), bool(x.any())
    print(len(waits))
    try:
        x + torch.ones(4)
    except RuntimeError as error:
        print(error)
"""
    completed = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    count, error = completed.stdout.splitlines()
    assert int(count) == 9
    assert "got tensors of stand_in and of the CPU" in error
