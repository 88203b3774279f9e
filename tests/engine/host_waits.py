"""Train every case on a device that stands in for a GPU; run by test_host_waits.py in a process of
its own.

Prints JSON: the operators for which the host waited in five steps of each case, and comparisons
with runs on the CPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tessera.engine.distributed import Distributed
from tessera.engine.engine import Engine
from tests import device_stand_in
from tests.garbage import freeze_for_good
from tests.runs import CASES, NEVER, endless, engine_in
from tests.test_guarantees import inject_nan

WARM_UP = 12
"""Steps in which codebooks and feature statistics may be initialised, level by level."""
COUNTED = 5
COMPARED = ("images-vqgan adversarial vq", "images-maskgit critic", "meshes-tree")
"""Cases of fused AdamW, Muon and codebooks that are compared with the CPU."""


def build_engine(case: str) -> Engine:
    run = endless(case, log_every=NEVER, batch_size=2)
    return engine_in(Path(tempfile.mkdtemp()), run)


def on_device(device: torch.device) -> Any:
    return mock.patch.object(Distributed, "from_environment", lambda: Distributed(device=device))


def count_waits(case: str, device: torch.device) -> list[str]:
    with device_stand_in.counting_waits() as waits, on_device(device):
        engine = build_engine(case)
        steps = engine.steps()
        for _ in range(WARM_UP if engine.updates["model"].stateful_modules else 1):
            next(steps)
        waits.clear()
        for _ in range(COUNTED):
            next(steps)
        counted = list(waits)
        engine.unresolved.clear()
        steps.close()
    return counted


def compare_with_host(case: str, device: torch.device) -> dict[str, Any]:
    """Return the tensors that a step with NaN changes on the device, and the norms of the gradients
    of all steps on the device and on the CPU."""
    _, on_host = train_with_nan(case)
    with device_stand_in.counting_waits(), on_device(device):
        (before, after), norms = train_with_nan(case)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return {"changed": changed, "norms": norms, "host_norms": on_host}


def train_with_nan(case: str) -> tuple[list[dict[str, torch.Tensor]], list[float]]:
    """Train with NaN in the fourth step; return weights and optimizer state before and after it."""
    engine = build_engine(case)
    inject_nan(engine, 3)
    steps, states, norms = engine.steps(), [], []
    for number in range(5):
        norms += [float(result.norm) for result in next(steps).values()]
        if number in (2, 3):
            tensors = engine.saver.snapshot(engine.global_step).tensors
            del tensors["ema"]  # it goes on towards the weights
            states.append({f"{f}/{n}": t.clone() for f in tensors for n, t in tensors[f].items()})
    engine.resolve_checks()
    assert engine.guard.skipped == len(engine.task.updates)
    steps.close()
    return states, norms


def main() -> None:
    freeze_for_good()
    results, sys.stdout = sys.stdout, sys.stderr
    device = device_stand_in.register_device()
    torch.accelerator.is_available = lambda *args: False  # tokenizers are trained on the CPU
    waits = {case: count_waits(case, device) for case in sys.argv[1:] or CASES}
    compared = [case for case in COMPARED if case in waits]
    comparisons = {case: compare_with_host(case, device) for case in compared}
    print(json.dumps({"waits": waits, "comparisons": comparisons}), file=results)


if __name__ == "__main__":
    main()
