"""A short form of bench/adversary.py: a few attacks of every kind, none of which succeeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[2] / "bench"
MEDIA = "image video audio mesh".split()
SECTIONS = [
    *("kills", "faults", "signals", "commands", "configurations"),
    *(f"{medium}-files" for medium in MEDIA),
]


def test_a_few_attacks_of_every_kind_break_no_promise(tmp_path):
    flags = ["--count", "3", "--seconds", "1500", "--recipes", "images-vqgan"]
    command = [sys.executable, BENCH / "adversary.py", *SECTIONS, *flags, "--work-dir", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stdout + done.stderr
    table = done.stdout[done.stdout.rindex("| attack |") :].splitlines()
    assert len(table) == 2 + len(SECTIONS) + 1, "one row a section, and two of signals"
    assert all("| 3 files | 0 |" in line for line in table if "damaged" in line)
