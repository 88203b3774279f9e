"""Faults at file operations, by a library that is built here and preloaded (adversary_faults.c)."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")
ERRORS = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
KILL = 0


@dataclass(frozen=True)
class Fault:
    """What happens at one of the operations that change files below a folder."""

    folder: Path
    at: int = 0
    """The number of the operation; 0 for none."""
    error: int = KILL
    """The error number; KILL ends the process with SIGKILL, after half of a write."""
    is_lasting: bool = False
    """Whether all later operations that need space fail as well."""
    log: Path | None = None
    """A file that gets a line for each operation."""

    def arm(self) -> None:
        """Arm this process; the processes that it starts are not affected."""
        ctypes.CDLL(None).arm_faults(
            os.fsencode(self.folder),
            ctypes.c_long(self.at),
            self.error,
            int(self.is_lasting),
            os.fsencode(self.log or ""),
        )

    @property
    def environment(self) -> dict[str, str]:
        """The variables that arm a process that is started instead of forked."""
        names = {"FOLDER": self.folder, "AT": self.at, "ERROR": self.error}
        return {f"FAULTS_{name}": str(value) for name, value in names.items()}


def is_preloaded() -> bool:
    return SOURCE.stem in os.environ.get("LD_PRELOAD", "")


def run_preloaded(command: list[str]) -> int:
    """Build the library and run a command with it; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/{SOURCE.stem}.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
        return subprocess.call(command, env=os.environ | {"LD_PRELOAD": library})
