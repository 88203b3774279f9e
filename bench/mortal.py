"""A tessera command that can die at a chosen moment: what bench/kills.py starts in place of
`tessera`.

    python bench/mortal.py train RECIPE --out run ...

A *moment* is an instant just before something happens: a file operation in the folder `run`, a
movement of a network, a batch of validation. Each belongs to a *phase* of the run's life. Python's
audit events tell of file operations before they happen, so the product is run as it is; only three
functions are wrapped, to hear when they are called.

The environment says when: MORTAL_PHASE and MORTAL_COUNT name the moment (the third of `prune`),
MORTAL_RANK the process. The death is SIGKILL: no handler, no `finally`, no flush. Beside the folder
the file `died` says that it came, and `moments.json` how many moments of each phase there were, and
the phase of the last.
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
"""The run's folder; this process stands beside it."""

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}


class Life:
    """Counts the moments of this process and ends it at the chosen one."""

    def __init__(self, phase: str, count: int, tells: bool):
        self.phase, self.count = phase, count
        self.seen: Counter[str] = Counter()
        self.place = threading.local()
        self.diary = os.open("moments.json", os.O_CREAT | os.O_WRONLY, 0o644) if tells else None

    def reach(self, phase: str) -> None:
        self.seen[phase] += 1
        if self.diary is not None:
            # Padded and in one write, so that it can be read after any death.
            os.pwrite(
                self.diary, json.dumps({"last": phase, "seen": self.seen}).ljust(400).encode(), 0
            )
        if phase == self.phase and self.seen[phase] == self.count:
            if phase == "logging":
                tear_a_line()
            os.close(os.open("died", os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python's audit hook: called before every file operation of any thread."""
        if event == "open" or event in CHANGES:
            phase = phase_of(event, self.located(event, arguments), arguments)
            if phase is not None:
                self.reach(phase)

    def located(self, event: str, arguments: tuple[Any, ...]) -> str:
        """The path in question; inside rmtree only a name is told, so the tree that is being
        removed stands for it."""
        path = os.fspath(arguments[0]) if isinstance(arguments[0], (str, os.PathLike)) else ""
        if event == "shutil.rmtree":
            self.place.removing = path
        inside = event in ("os.remove", "os.rmdir") and arguments[1] != -1
        return getattr(self.place, "removing", "") if inside else path


def phase_of(event: str, path: str, arguments: tuple[Any, ...]) -> str | None:
    """The phase to which a file operation belongs; None for reading, and for whatever lies
    elsewhere."""
    if path.split("/", 1)[0] != RUN:
        return None
    reads = event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR)
    if path.startswith(f"{RUN}/checkpoints"):
        to = os.fspath(arguments[1]) if event == "os.rename" else ""
        if ".deleting-" in path + to:
            return "prune"
        if event == "os.rename" or (
            event == "open" and path == f"{RUN}/checkpoints"
        ):  # the flush after the renaming
            return "rename"
        return "write" if ".writing-" in path else None
    if reads:
        return None
    if path.startswith(f"{RUN}/samples/"):
        return "sampling"
    return "logging" if path == f"{RUN}/metrics.jsonl" and event == "open" else "opening"


def tear_a_line() -> None:
    """What a power cut leaves, and a kill hardly ever: half a line."""
    os.write(
        os.open(f"{RUN}/metrics.jsonl", os.O_CREAT | os.O_WRONLY | os.O_APPEND),
        b'{"step": 1, "kind": "tra',
    )


def heard(method: Callable[..., Any], before: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        before()
        return method(*arguments, **named)

    return wrapped


def listen(engine_defaults: Life) -> None:
    from tessera.engine import checkpoint
    from tessera.engine.engine import Engine
    from tessera.objectives.reconstruction import TokenizerTask

    sys.addaudithook(engine_defaults.hear)
    checkpoint.save_file = heard(
        checkpoint.save_file, lambda: engine_defaults.reach("write")
    )  # written in Rust: no audit event
    Engine.move = heard(Engine.move, lambda: engine_defaults.reach("training"))  # type: ignore[method-assign]
    TokenizerTask.observe = heard(
        TokenizerTask.observe, lambda: engine_defaults.reach("validation")
    )  # type: ignore[method-assign]


def start_mortals() -> None:
    """`--nproc N` starts `python -m tessera ...` N times: here those are mortal too."""
    start = subprocess.Popen
    subprocess.Popen = lambda command, **how: start([sys.executable, __file__, *command[3:]], **how)  # type: ignore


def born() -> Life:
    """This process's life, as the environment wants it."""
    rank = os.environ.get("RANK", "0")
    chosen = os.environ.get("MORTAL_RANK", "0") == rank
    phase = os.environ.get("MORTAL_PHASE", "") if chosen else ""
    return Life(phase, int(os.environ.get("MORTAL_COUNT", "0")), tells=rank == "0")


if __name__ == "__main__":
    from tessera.cli import launch
    from tessera.cli import main as cli

    if "--nproc" in sys.argv and not launch.is_launched():
        start_mortals()
    else:
        listen(born())
    cli.main(sys.argv[1:])
