"""Several processes that train together, as the command line starts them: kept for run after run
(`one_of_several.py`)."""

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

from tessera.cli.launch import _free_port
from tests.runs import tiny

PATIENCE_S = 120
_kept: dict[int, Several] = {}


def together(
    folder: Path, case: str, *, processes: int, tell_replicas: bool = False, **engine: Any
) -> None:
    """One run of a case in that many processes."""
    tiny(case)  # the tokenizer that it may stand on is there before the processes look for it
    if processes not in _kept:
        _kept[processes] = Several(processes)
    asked = {
        "folder": str(folder),
        "case": case,
        "engine": engine | {"processes": processes},
        "tell_replicas": tell_replicas,
    }
    if not _kept[processes].did(asked):
        raise AssertionError(_kept.pop(processes).words())


class Several:
    def __init__(self, processes: int):
        self._words = [tempfile.TemporaryFile("w+") for _ in range(processes)]  # noqa: SIM115  # as long as they are
        port = _free_port()
        self._children = [self._start(rank, processes, port) for rank in range(processes)]
        atexit.register(self.end)

    def _start(self, rank: int, processes: int, port: int) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("one_of_several.py")
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
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
            stderr=self._words[rank],
        )

    def did(self, asked: dict[str, Any]) -> bool:
        """Whether all came to the end of it, in good time."""
        watch = Timer(PATIENCE_S, self.end)
        watch.start()
        try:
            for child in self._children:
                child.stdin.write(json.dumps(asked) + "\n")  # type: ignore[union-attr]
                child.stdin.flush()  # type: ignore[union-attr]
            return all(child.stdout.readline() == "done\n" for child in self._children)  # type: ignore[union-attr]
        finally:
            watch.cancel()

    def words(self) -> str:
        """What they said before they failed; they are ended."""
        self.end()
        for file in self._words:
            file.seek(0)
        return "\n".join(file.read()[-10_000:] for file in self._words)

    def end(self) -> None:
        for child in self._children:
            child.kill()
            child.wait()
