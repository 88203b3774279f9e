"""Several training processes that are kept for many runs (`worker_process.py`)."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Timer
from typing import Any

from tessera.cli.launch import find_free_port
from tests.runs import tiny

TIMEOUT_SECONDS = 1200
_pools: dict[int, WorkerPool] = {}


def train_together(
    folder: Path, case: str, *, nproc: int, write_digest: bool = False, **engine: Any
) -> None:
    """Train one case in several processes."""
    tiny(case)  # trains the tokenizers that the processes need
    if nproc not in _pools:
        _pools[nproc] = WorkerPool(nproc)
    request = {
        "folder": str(folder),
        "case": case,
        "engine": engine | {"nproc": nproc},
        "write_digest": write_digest,
    }
    if not _pools[nproc].train(request):
        raise AssertionError(_pools.pop(nproc).read_errors())


def call_together(function: str, *, nproc: int, **arguments: Any) -> None:
    """Call `module:function` with these arguments in several processes."""
    if nproc not in _pools:
        _pools[nproc] = WorkerPool(nproc)
    if not _pools[nproc].train({"function": function, "arguments": arguments}):
        raise AssertionError(_pools.pop(nproc).read_errors())


class WorkerPool:
    def __init__(self, nproc: int):
        self._errors = [tempfile.TemporaryFile("w+") for _ in range(nproc)]  # noqa: SIM115
        port = find_free_port()
        self._children = [self._start(rank, nproc, port) for rank in range(nproc)]
        atexit.register(self.stop)

    def _start(self, rank: int, nproc: int, port: int) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("worker_process.py")
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": "1",
        }
        return subprocess.Popen(
            [sys.executable, "-W", "error", str(script)],
            env=environment,
            cwd=script.parent.parent,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors[rank],
        )

    def train(self, request: dict[str, Any]) -> bool:
        """Return whether all processes finished the run in time."""
        timer = Timer(TIMEOUT_SECONDS, self.stop)
        timer.start()
        try:
            for child in self._children:
                assert child.stdin is not None
                child.stdin.write(json.dumps(request) + "\n")
                child.stdin.flush()
            replies = [child.stdout for child in self._children]
            return all(reply is not None and reply.readline() == "done\n" for reply in replies)
        finally:
            timer.cancel()

    def read_errors(self) -> str:
        """Stop the processes and return what they wrote to stderr."""
        self.stop()
        for file in self._errors:
            file.seek(0)
        return "\n".join(file.read()[-10_000:] for file in self._errors)

    def stop(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
