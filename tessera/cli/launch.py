"""`--nproc N`: the same command N times on this machine, as torchrun would start it, but with
signals and exit codes kept.

torchrun and `accelerate launch` work as they are; this is for the common case of one machine, where
a person's Ctrl-C must end in a checkpoint and exit code 130, which torchrun turns into 1.
(`accelerate launch --cpu` silently starts one process.)
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from types import FrameType
from typing import NoReturn


def is_launched() -> bool:
    """Whether this process is one of several already."""
    return "LOCAL_RANK" in os.environ


def launch_processes(nproc: int, arguments: list[str]) -> int:
    """Runs `tessera *arguments` in N processes and gives back the exit code of the first that did
    not end well."""
    children = [
        _start(rank, nproc, arguments, port) for port in [_free_port()] for rank in range(nproc)
    ]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return _wait(children)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(code: int) -> NoReturn:
    """One of several processes leaves without Python's farewell.

    Everything of a run is closed by then, and gloo's threads abort some finished processes on the
    way out (3 of 11 seen) with exit code 134 (pytorch #190489); destroying the group does not help
    while gradients' hooks hold on to it.
    """
    if is_launched():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _start(rank: int, nproc: int, arguments: list[str], port: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # As torchrun: several processes that each take all cores only stand in each other's way.
        "OMP_NUM_THREADS": os.environ.get(
            "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc))
        ),
    }
    # A group of its own: a Ctrl-C on the terminal must reach it once, from us, and not twice.
    return subprocess.Popen(
        [sys.executable, "-m", "tessera", *arguments],
        env=environment,
        start_new_session=True,
        preexec_fn=_end_with_parent,
    )


def _end_with_parent() -> None:
    """If the launcher is killed outright, its processes hear SIGTERM: they save and go, and the
    folder is free again."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _wait(children: list[subprocess.Popen[bytes]]) -> int:
    """When one ends badly the others would wait for it for ever, so they are ended too."""
    running = set(range(len(children)))
    worst = 0
    while running:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        for rank in [rank for rank in running if children[rank].pid == pid]:
            running.remove(rank)
            children[rank].returncode = code
            if code and not worst:
                worst = code if code > 0 else 128 - code
        if worst and worst not in (130, 143):  # those are agreed stops: everybody is saving
            for rank in running:
                children[rank].kill()
    return worst


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
