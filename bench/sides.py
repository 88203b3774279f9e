"""One side of a comparison as a process of its own, with its own packages: it does steps when it is
told to, and else waits.

The parent has one `working`, and asks it for blocks of steps; the child, started with the name of a
side, `answer`s. They speak in lines of JSON. Only the child imports what the side is made of.
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

import pairs


@dataclass(frozen=True)
class About:
    """How large a side is, network by network."""

    parameters: dict[str, int]
    mflop: dict[str, float]
    """Millions of floating-point operations of one forward pass of a batch."""
    packages: str


@dataclass(frozen=True)
class Side:
    about: About
    step: Callable[[], object]


# ---- in the child


def answer(make: Callable[[], Side]) -> None:
    """Answers on what was stdout; whatever the packages print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = make()
    tell(answers, asdict(side.about))
    block = pairs.timed(side.step)
    for line in sys.stdin:
        tell(answers, asdict(block(int(line))))


def tell(answers: TextIO, values: dict[str, Any]) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def parameters(network: Any) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def mflop(forward: Callable[[], object]) -> float:
    """Attention is done step by step here: torch 2.13 counts nothing for the kernel that it would
    take on a CPU."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        forward()
    return counter.get_total_flops() / 1e6


def versions(*packages: str) -> str:
    from importlib.metadata import version

    return ", ".join(f"{package} {version(package)}" for package in packages)


# ---- in the parent


class Worker:
    """A side in its own process and environment."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.about = About(**self._answer())

    def __call__(self, steps: int) -> pairs.Spent:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return pairs.Spent(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"A side has died with exit code {self._process.wait()}; its words are above."
            )
        return json.loads(line)


@contextmanager
def working(*command: str | Path) -> Iterator[Worker]:
    """A side for as long as it is needed. Its words are shown only if it dies."""
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True,
            env=os.environ | {"TQDM_DISABLE": "1"},  # bars are for a person; torch reads this as it is imported
        )  # fmt: skip
        try:
            yield Worker(process)
        except SystemExit:
            words.seek(0)
            sys.stderr.write(words.read())
            raise
        finally:
            process.kill()
            process.wait()
