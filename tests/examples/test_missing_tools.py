"""What an example fetches with a tool of the system cannot be had without it: a sentence says so,
and nothing is begun."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("example", "tool"),
    [("emoji", "npm"), ("animated_emoji", "npm"), ("furniture", "apt-get"), ("prompts", "apt-get")],
)
def test_without_its_tool_an_example_ends_in_a_sentence(
    tmp_path: Path, example: str, tool: str
) -> None:
    tried = subprocess.run(
        [sys.executable, str(ROOT / f"examples/{example}.py"), str(tmp_path / "out")],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert tried.returncode == 1
    assert f"there is no {tool}" in tried.stderr and "Traceback" not in tried.stderr
    assert not (tmp_path / "out").exists()
