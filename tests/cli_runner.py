"""Run the command line within the test process."""

from __future__ import annotations

import signal
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from tessera.cli.main import main


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """All output, without frames and line breaks."""
        return " ".join(f"{self.out} {self.err}".replace("│", " ").split())


def tessera(*arguments: str | Path) -> CommandResult:
    """Run `tessera ARGUMENTS` without starting a process, which would import torch again."""
    previous = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    out, err = StringIO(), StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as exited:
            main([str(argument) for argument in arguments])
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    code = exited.value.code
    assert isinstance(code, int), code
    return CommandResult(code, out.getvalue(), err.getvalue())


def run_invalid(*arguments: str | Path) -> str:
    """Run a command that must fail with exit code 2 and a message without a traceback."""
    result = tessera(*arguments)
    assert result.code == 2, result
    assert "Traceback" not in result.err
    return result.text


def read_files(*folders: Path) -> dict[str, bytes]:
    """Return every file below some folders, to compare them later."""
    return {
        str(path): path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
