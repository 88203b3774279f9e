"""One side of a comparison in a process of its own, with its own packages.

The parent process starts a worker (`start_worker`) and requests blocks of steps from it; the worker
process (`serve`) runs them and returns their times. They exchange lines of JSON over pipes. Only
the worker process imports the packages that its side needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import timing


@dataclass(frozen=True)
class ModelInfo:
    """The size of a side, network by network."""

    parameters: dict[str, int]
    mflop: dict[str, float]
    """Millions of floating-point operations of one forward pass of a batch."""
    packages: str
    """The packages that the side depends on, with versions."""


@dataclass(frozen=True)
class Workload:
    """What a worker runs: one step at a time."""

    info: ModelInfo
    step: Callable[[], object]


# ---- in the worker process


def serve(build: Callable[[], Workload]) -> None:
    """Build the workload, send its sizes, then run a block for every number read from stdin.

    Results are written to the original stdout.
    """
    results = redirect_output()
    workload = build()
    send(results, asdict(workload.info))
    run_block = timing.time_blocks(workload.step)
    for line in sys.stdin:
        send(results, asdict(run_block(int(line))))


def redirect_output() -> TextIO:
    """Return the original stdout; from now on, what the packages print goes to stderr."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return results


def send(results: TextIO, values: dict[str, Any]) -> None:
    results.write(json.dumps(values) + "\n")
    results.flush()


def count_parameters(network: Any) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def count_mflop(forward: Callable[[], object]) -> float:
    """Count the operations of a forward pass, in millions.

    Attention uses the math backend here: torch 2.13 counts zero operations for the fused CPU
    kernel.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        forward()
    return counter.get_total_flops() / 1e6


def package_versions(*packages: str) -> str:
    from importlib.metadata import version

    return ", ".join(f"{package} {version(package)}" for package in packages)


# ---- in the parent process


class WorkerProcess:
    """A running worker process, which answers each line of JSON with another one."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process

    def request(self, value: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()
        return self.receive()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"A worker process ended with exit code {self._process.wait()}; "
                "its output is printed above."
            )
        return json.loads(line)


class Worker:
    """A worker process that runs blocks of steps."""

    def __init__(self, process: WorkerProcess):
        self._process = process
        self.info = ModelInfo(**process.receive())

    def __call__(self, steps: int) -> timing.StepTime:
        return timing.StepTime(**self._process.request(steps))


@contextmanager
def start_worker(*command: str | Path) -> Iterator[Worker]:
    """Run a worker for the duration of the context."""
    with start_process(*command) as process:
        yield Worker(process)


@contextmanager
def start_process(*command: str | Path) -> Iterator[WorkerProcess]:
    """Run a process for the duration of the context; print its stderr only if it fails."""
    with (
        tempfile.TemporaryFile("w+") as stderr,
        subprocess.Popen(
            list(map(str, command)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"TQDM_DISABLE": "1"},
        ) as process,
    ):
        try:
            yield WorkerProcess(process)
        except SystemExit:
            stderr.seek(0)
            sys.stderr.write(stderr.read())
            raise
        finally:
            process.kill()
