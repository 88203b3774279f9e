"""Tests of worker processes: one that dies is replaced and costs only the example it read."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tessera.data import workers
from tessera.data.errors import UnreadableFile
from tessera.data.loader import EvalLoader, TrainLoader
from tessera.data.workers import Monitor, WorkerError, WorkerPool
from tessera.run.errors import UserError
from tests.data.test_loader import Numbers

ROOT = Path(__file__).resolve().parents[2]


class Deadly(Numbers):
    """Examples that end the process that reads them, or are unreadable."""

    def __init__(self, count: int, deadly: dict[int, int], unreadable: set[int] | None = None):
        super().__init__(count, unreadable)
        self.deadly = deadly

    def item(self, index: int, rng: np.random.Generator) -> np.ndarray:
        if index in self.deadly:
            os.kill(os.getpid(), self.deadly[index])
        return super().item(index, rng)


def load_all(dataset: Numbers, num_workers: int, steps: int = 6) -> list[Any]:
    loader = TrainLoader(dataset, seed=3, batch_size=8, num_workers=num_workers)
    return [batch for (batch,) in loader.micro_batches(0, steps, 0, 1)]


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_training_leaves_out_an_example_that_ends_its_worker(number, num_workers):
    batches = load_all(Deadly(16, {2: number, 9: number}), num_workers)
    assert all(len(batch) == 8 for batch in batches)
    assert not {"2.png", "9.png"} & {name for batch in batches for name in batch.names}
    rejected = dict(pair for batch in batches for pair in batch.rejected)
    assert rejected.keys() == {"2.png", "9.png"}
    assert f"died ({signal.Signals(number).name})" in rejected["2.png"]
    assert not multiprocessing.active_children()


def test_replacements_do_not_depend_on_the_number_of_workers():
    dataset = Deadly(16, {2: signal.SIGSEGV}, unreadable={4, 5})
    names = [[batch.names for batch in load_all(dataset, count)] for count in (1, 3)]
    assert names[0] == names[1]


def test_evaluation_leaves_out_an_example_that_ends_its_worker():
    loader = EvalLoader(Deadly(9, {4: signal.SIGBUS}), seed=3, batch_size=4, num_workers=2)
    batches = list(loader.batches())
    assert [len(batch) for batch in batches] == [4, 3, 1]
    assert batches[1].rejected == [("4.png", "the process that read it died (SIGBUS)")]


def test_a_worker_that_is_killed_from_outside_costs_no_example(tmp_path):
    """The second attempt at the same example succeeds."""

    class KilledOnce(Numbers):
        def item(self, index: int, rng: np.random.Generator) -> np.ndarray:
            if index == 3 and not (tmp_path / "killed").exists():
                (tmp_path / "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().item(index, rng)

    expected = [batch.names for batch in load_all(Numbers(16), 0)]
    batches = load_all(KilledOnce(16), 2)
    assert (tmp_path / "killed").exists()
    assert [batch.names for batch in batches] == expected
    assert not any(batch.rejected for batch in batches)


def test_workers_that_die_again_and_again_end_in_an_error():
    def load(block: Sequence[int], monitor: Monitor) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match=r"ended 5 times \(SIGKILL\).*--num-workers"):
        list(WorkerPool(load, 2).results([[0], [1], [2]]))


def test_an_error_in_the_code_keeps_its_traceback():
    def load(block: Sequence[int], monitor: Monitor) -> None:
        raise KeyError("missing")

    with pytest.raises(WorkerError, match=r"in load[\s\S]*KeyError: 'missing'"):
        list(WorkerPool(load, 1).results([[0]]))


def wait_long(block: Sequence[int], monitor: Monitor) -> str:
    try:
        monitor.begin(block[0])
    except UnreadableFile as error:
        return str(error)
    if block[0] == 1:
        time.sleep(3600)
    return "read"


def test_a_key_that_takes_too_long_is_left_out(tmp_path, monkeypatch):
    """The limit passes when only the key that takes for ever is being read: a slow machine may need
    any time to start a worker."""
    is_read, late_seconds = tmp_path / "is read", [0.0]

    def load(block: Sequence[int], monitor: Monitor) -> str:
        if block == [1]:
            is_read.touch()
        return wait_long(block, monitor)

    def wait_until_late(connections: list[Any], timeout: float) -> list[Any]:
        late_seconds[0] = 0.0
        while not (ready := wait(connections, 0.01)):
            if len(connections) == 1 and is_read.exists():
                is_read.unlink()
                late_seconds[0] = 61.0
                return []
        return ready

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_seconds[0])
    monkeypatch.setattr(workers, "time", clock)
    monkeypatch.setattr(workers, "wait", wait_until_late)
    results = list(WorkerPool(load, 2, max_seconds=60).results([[0], [1], [2]]))
    assert results == ["read", "reading it took more than 60 seconds", "read"]


def test_workers_that_return_nothing_end_the_run(monkeypatch):
    monkeypatch.setattr(workers, "STALLED_SECONDS", 0.5)
    with pytest.raises(UserError, match="No worker that loads data has returned an example"):
        list(WorkerPool(wait_long, 1).results([[1]]))
    assert not multiprocessing.active_children()


def test_many_large_batches_need_few_descriptors_and_no_shared_memory():
    """A handle of shared memory for each tensor would need a descriptor each."""

    def load(block: Sequence[int], monitor: Monitor) -> list[torch.Tensor]:
        return [torch.full((64, 64), float(block[0])) for _ in range(8)]

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 64
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 24, hard))
    try:
        kept = list(WorkerPool(load, 2).results([number] for number in range(40)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [batch[7][0, 0].item() for batch in kept] == list(range(40))


GROUP = """
import os, signal
from tessera.data.workers import WorkerPool
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
os.setpgrp()

def load(block, monitor):
    return block[0]

for turn in range(10):
    pool = WorkerPool(load, 2)
    start = pool._start
    def start_and_signal():
        worker = start()
        os.killpg(0, signal.SIGTERM)
        return worker
    pool._start = start_and_signal
    assert list(pool.results([[n] for n in range(8)])) == list(range(8))
assert len(stopped) > 0
print("all results")
"""


def test_a_signal_to_the_process_group_ends_no_worker_that_is_starting():
    done = subprocess.run(
        [sys.executable, "-c", GROUP], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.stdout == "all results\n", done.stderr
