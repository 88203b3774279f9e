"""The command line within the tests' own process: what it says, and the code with which it would
have ended."""

from __future__ import annotations

import signal
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from tessera.cli.main import main


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """All of it, without frames and line breaks."""
        return " ".join(f"{self.out} {self.err}".replace("│", " ").split())


def tessera(*arguments: str | Path) -> Said:
    """`tessera ARGUMENTS`, without the seconds that a new process spends on importing torch."""
    before = signal.getsignal(signal.SIGTERM)
    out, err = StringIO(), StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
    finally:
        signal.signal(signal.SIGTERM, before)
    code = ended.value.code
    assert isinstance(code, int), code
    return Said(code, out.getvalue(), err.getvalue())


def refused(*arguments: str | Path) -> str:
    """The letter of a command that is refused: exit code 2, nothing but the letter, and no
    trace."""
    said = tessera(*arguments)
    assert said.code == 2, said
    assert "Traceback" not in said.err
    return said.text


def files(*folders: Path) -> dict[str, bytes]:
    """Every file below some folders, to see that nothing was lost."""
    return {
        str(path): path.read_bytes()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
