"""Processes for adversary.py: children in a process group of their own, with their output.

Starting Python and importing torch takes seconds, so everything is imported once, and most attempts
are forks of this process. A share of them starts Python anew (`exec_tessera`).
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adversary_faults import Fault

ESCAPED = 99
"""The exit code of a child in which an exception was not turned into a message."""


@dataclass(frozen=True)
class Outcome:
    """How a child ended."""

    code: int
    """The exit code, or minus the number of the signal."""
    seconds: float
    cpu_seconds: float
    memory_mb: float
    output: str

    @property
    def is_orderly(self) -> bool:
        return self.code in (0, 1, 2, 130, 143) and "Traceback" not in self.output


@dataclass
class Child:
    pid: int
    output: Any
    start: float

    def ends_within(self, seconds: float) -> bool:
        descriptor = os.pidfd_open(self.pid)
        try:
            return bool(select.select([descriptor], [], [], max(0.0, seconds))[0])
        finally:
            os.close(descriptor)

    def signal_group(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, seconds: float) -> Outcome:
        """Wait for the end; a child that takes longer is killed and has the code -9."""
        if not self.ends_within(seconds):
            self.signal_group(signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        self.signal_group(signal.SIGKILL)  # processes that it started
        self.output.seek(0)
        text = self.output.read().decode(errors="replace")
        self.output.close()
        code = os.waitstatus_to_exitcode(status)
        cpu = usage.ru_utime + usage.ru_stime
        return Outcome(code, time.monotonic() - self.start, cpu, usage.ru_maxrss / 1024, text)


def start_child(function: Callable[..., Any], *args: Any, memory_mb: int = 0) -> Child:
    """Fork a process group of its own that calls a function, with its output in a file."""
    output = tempfile.TemporaryFile()  # noqa: SIM115
    start = time.monotonic()
    # Until the child has its own handlers, a signal would call those of this process there.
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        with contextlib.suppress(PermissionError):
            os.setpgid(pid, pid)
        return Child(pid, output, start)
    code = ESCAPED
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a shell's background
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        if memory_mb:
            limit = memory_mb << 20
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        function(*args)
        code = 0
    except SystemExit as stopped:
        code = stopped.code if isinstance(stopped.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        from tessera.data.workers import kill_workers

        with contextlib.suppress(BaseException):
            kill_workers()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def run_child(
    function: Callable[..., Any], *args: Any, seconds: float = 600, memory_mb: int = 0
) -> Outcome:
    return start_child(function, *args, memory_mb=memory_mb).wait(seconds)


def run_tessera(*arguments: str, folder: Path | None = None, **environment: str) -> None:
    """Run a command in this process, as the command line would."""
    os.environ.update(environment)
    if folder is not None:
        os.chdir(folder)
    from tessera.cli.main import main

    main(list(arguments))


def exec_tessera(*arguments: str, folder: Path, **environment: str) -> None:
    """Replace this process by the command line, which imports everything anew."""
    os.chdir(folder)
    command = [sys.executable, "-m", "tessera", *arguments]
    os.execve(sys.executable, command, os.environ | environment)


def train_with_fault(fault: Fault, folder: Path, arguments: list[str]) -> None:
    fault.arm()
    run_tessera(*arguments, folder=folder)


def train_rank(
    folder: Path, rank: int, world_size: int, port: int, arguments: list[str], fault: Fault | None
) -> None:
    """Train as one of several processes."""
    if fault is not None:
        fault.arm()
    run_tessera(
        *arguments,
        folder=folder,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
