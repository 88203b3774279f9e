"""`--nproc N`: start the same command N times on this machine, as torchrun would.

torchrun and `accelerate launch` work too. This launcher keeps signals and exit codes: Ctrl-C must
end in a checkpoint and exit code 130, which torchrun turns into 1. (`accelerate launch --cpu`
silently starts one process.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn, TextIO


def is_launched() -> bool:
    """Return whether a launcher started this process."""
    return "LOCAL_RANK" in os.environ


def launch_processes(nproc: int, arguments: list[str]) -> int:
    """Run `tessera *arguments` in N processes; return the exit code of the first that failed."""
    port = find_free_port()
    children = [start_process(rank, nproc, arguments, port) for rank in range(nproc)]

    def forward(number: int, frame: FrameType | None) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    signals = (signal.SIGTERM, signal.SIGINT)
    previous = {number: signal.signal(number, forward) for number in signals}
    try:
        return wait_for_all(children)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def exit_process(code: int) -> NoReturn:
    """Exit; one of several processes skips Python's finalisation.

    Everything of a run is closed by then, and gloo's threads abort some finished processes during
    finalisation (3 of 11 in a test) with exit code 134 (pytorch #190489). Destroying the process
    group does not help while gradient hooks refer to it.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a closed pipe or a full disk: Python would report it once more
            discard_output(stream)
    if is_launched():
        os._exit(code)
    sys.exit(code)


def discard_output(stream: TextIO) -> None:
    """Send what is written to a stream nowhere, from now on."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


class ForgivingStream:
    """A stream whose writes never fail: a run outlives the program that reads its output, and a
    full disk that holds its log."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            discard_output(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            discard_output(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def forgiving_output() -> Iterator[None]:
    """Ignore failed writes to the output inside this context."""
    previous = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = ForgivingStream(sys.stdout), ForgivingStream(sys.stderr)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = previous


def stop_process(number: int, frame: FrameType | None) -> None:
    """Handle SIGINT and SIGTERM outside of a run: end with the usual exit code.

    An exception inside an import leaves modules half initialised, and one of several processes
    would end in an error of the connection to the others, so these exit at once. So does a process
    in which Python ignores the exception, as in destructors and generators that are closed by them.
    """
    if is_launched() or is_importing(frame):
        exit_at_once(number)

    def exit_if_ignored(ignored: sys.UnraisableHookArgs) -> None:
        if issubclass(ignored.exc_type, (KeyboardInterrupt, SystemExit)):
            exit_at_once(number)
        sys.__unraisablehook__(ignored)

    sys.unraisablehook = exit_if_ignored
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def exit_at_once(number: int) -> NoReturn:
    sys.stdout.flush()
    os.write(2, b"tessera: stopped\n")
    os._exit(128 + number)


def is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def start_process(
    rank: int, nproc: int, arguments: list[str], port: int
) -> subprocess.Popen[bytes]:
    threads = str(max(1, (os.cpu_count() or 1) // nproc))
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # As torchrun does: several processes that each use all cores slow each other down.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
    }
    # A session of its own: Ctrl-C on the terminal must reach it once, from the launcher.
    return subprocess.Popen(
        [sys.executable, "-m", "tessera", *arguments],
        env=environment,
        start_new_session=True,
        preexec_fn=end_with_parent,
    )


def end_with_parent() -> None:
    """Receive SIGTERM if the launcher is killed, so that the run is saved and unlocked."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def wait_for_all(children: list[subprocess.Popen[bytes]]) -> int:
    """Wait for all processes; if one fails, kill the others, which would wait for it forever."""
    running = set(range(len(children)))
    exit_code = 0
    while running:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        for rank in [rank for rank in running if children[rank].pid == pid]:
            running.remove(rank)
            children[rank].returncode = code
            if code and not exit_code:
                exit_code = code if code > 0 else 128 - code
        if exit_code and exit_code not in (130, 143):  # after a signal all processes are saving
            for rank in running:
                children[rank].kill()
    return exit_code


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
