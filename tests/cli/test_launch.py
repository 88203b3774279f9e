"""Signals outside of a run."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
from tessera.cli.launch import stop_process

number = int(sys.argv[1])
signal.signal(number, stop_process)

class Closing:
    def __del__(self):
        os.kill(os.getpid(), number)
        os.waitpid  # the handler runs before this

print("before")
Closing()
print("after")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_a_destructor_ends_the_process(number):
    command = [sys.executable, "-c", PROGRAM, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 128 + number, done.stderr
    assert done.stdout == "before\n"
    assert done.stderr == "tessera: stopped\n"
