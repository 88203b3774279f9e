"""Run a tessera command that kills itself at a chosen kill point; `kills.py` starts it.

    python bench/kill_worker.py train RECIPE --out run ...

A kill point is the instant before a file operation in the folder `run`, an update of a network, or
a batch of validation. Every kill point belongs to a phase. File operations are observed through
Python's audit events, so the package runs unchanged; three functions are wrapped to count their
calls.

The environment selects the kill point: KILL_PHASE and KILL_COUNT (for example the third of
`prune`), and KILL_RANK, the process. The process is killed with SIGKILL: no handler, no `finally`,
no flush. In the current directory, the file `killed` marks that it happened, and `kill_points.json`
holds the number of kill points of each phase so far, and the phase of the last one.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

PHASES = ("opening", "training", "logging", "validation", "sampling", "write", "rename", "prune")
RUN = "run"
"""The folder of the run, in the current directory."""

WRITE_EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


class KillPoints:
    """Counts the kill points of this process and kills it at the chosen one."""

    def __init__(self, phase: str, count: int, write_counts: bool):
        self.phase, self.count = phase, count
        self.counts: Counter[str] = Counter()
        self.local = threading.local()
        self.file = None
        if write_counts:
            self.file = os.open("kill_points.json", os.O_CREAT | os.O_WRONLY, 0o644)

    def reach(self, phase: str) -> None:
        """Count a kill point of a phase; does not return if it is the chosen one."""
        self.counts[phase] += 1
        if self.file is not None:
            # Padded and in a single write, so that the file is valid JSON at any time.
            text = json.dumps({"last": phase, "counts": self.counts}).ljust(400)
            os.pwrite(self.file, text.encode(), 0)
        if phase == self.phase and self.counts[phase] == self.count:
            if phase == "logging":
                write_half_line()
            os.close(os.open("killed", os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handle an audit event, which Python raises before every file operation of any thread."""
        if event == "open" or event in WRITE_EVENTS:
            phase = find_phase(event, self.find_path(event, arguments), arguments)
            if phase is not None:
                self.reach(phase)

    def find_path(self, event: str, arguments: tuple[Any, ...]) -> str:
        """Return the path of an operation.

        Inside rmtree the events have only a name, so the path is that of the tree being removed.
        """
        path = os.fspath(arguments[0]) if isinstance(arguments[0], (str, os.PathLike)) else ""
        if event == "shutil.rmtree":
            self.local.removing = path
        inside_rmtree = event in ("os.remove", "os.rmdir") and arguments[1] != -1
        return getattr(self.local, "removing", "") if inside_rmtree else path


def find_phase(event: str, path: str, arguments: tuple[Any, ...]) -> str | None:
    """Return the phase of a file operation; None if it only reads, or is outside the run."""
    if path.split("/", 1)[0] != RUN:
        return None
    reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if path.startswith(f"{RUN}/checkpoints"):
        target = os.fspath(arguments[1]) if event == "os.rename" else ""
        if ".deleting-" in path + target:
            return "prune"
        flush_after_rename = event == "open" and path == f"{RUN}/checkpoints"
        if event == "os.rename" or flush_after_rename:
            return "rename"
        return "write" if ".writing-" in path else None
    if reads:
        return None
    if path.startswith(f"{RUN}/samples/"):
        return "sampling"
    return "logging" if path == f"{RUN}/metrics.jsonl" and event == "open" else "opening"


def write_half_line() -> None:
    """Append half a line to the metrics, as a power failure can, and a kill hardly ever does."""
    os.write(
        os.open(f"{RUN}/metrics.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND),
        b'{"step": 1, "kind": "tra',
    )


def call_first(function: Callable[..., Any], hook: Callable[[], None]) -> Callable[..., Any]:
    """Wrap a function so that a hook runs before each call."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        hook()
        return function(*args, **kwargs)

    return wrapped


def install_hooks(points: KillPoints) -> None:
    """Count the kill points of this process from now on."""
    from tessera.engine import checkpoint
    from tessera.engine.engine import Engine
    from tessera.objectives.reconstruction import TokenizerTask

    def patch(owner: Any, name: str, phase: str) -> None:
        setattr(owner, name, call_first(getattr(owner, name), lambda: points.reach(phase)))

    sys.addaudithook(points.audit)
    patch(checkpoint, "save_file", "write")  # implemented in Rust, so there is no audit event
    patch(Engine, "run_update", "training")
    patch(TokenizerTask, "eval_step", "validation")


def launch_this_script() -> None:
    """Make `--nproc N` start this script N times instead of `python -m tessera`."""
    start = subprocess.Popen
    subprocess.Popen = lambda command, **how: start([sys.executable, __file__, *command[3:]], **how)  # type: ignore


def kill_points_from_environment() -> KillPoints:
    rank = os.environ.get("RANK", "0")
    chosen = os.environ.get("KILL_RANK", "0") == rank
    phase = os.environ.get("KILL_PHASE", "") if chosen else ""
    count = int(os.environ.get("KILL_COUNT", "0"))
    return KillPoints(phase, count, write_counts=rank == "0")


if __name__ == "__main__":
    from tessera.cli import launch
    from tessera.cli import main as cli

    if "--nproc" in sys.argv and not launch.is_launched():
        launch_this_script()
    else:
        install_hooks(kill_points_from_environment())
    cli.main(sys.argv[1:])
