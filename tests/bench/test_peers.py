"""bench/peers: the environment of the research packages is fixed and described correctly."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
PEERS = BENCH / "peers"


@pytest.fixture
def shims(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("peers.shims")


def read_requirements(path: Path) -> dict[str, str | None]:
    """Return name -> version, None without one."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    pairs = (line.partition("==") for line in lines if line)
    return {name.lower().replace("_", "-"): version or None for name, _, version in pairs}


def test_every_required_package_has_exactly_one_version():
    required = read_requirements(PEERS / "requirements.txt")
    pinned = read_requirements(ROOT / "constraints.txt")
    assert pinned["torch"] is not None and "torch" not in required, "setup.sh installs it first"
    for name, version in required.items():
        assert (version is None) == (name in pinned), name


def test_the_readme_has_the_versions_that_are_installed(shims):
    required = read_requirements(PEERS / "requirements.txt")
    readme = " ".join((BENCH / "README.md").read_text().split())
    for package in shims.PACKAGES:
        assert f"{package} {required[package]}" in readme


def test_the_setup_script_is_valid_and_reachable_by_make():
    subprocess.run(["bash", "-n", str(PEERS / "setup.sh")], check=True)
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^peers:\n\t.*bash bench/peers/setup\.sh$", makefile, re.MULTILINE)


def test_an_empty_module_replaces_only_what_is_missing(shims, monkeypatch):
    monkeypatch.setitem(sys.modules, "missing_package", None)
    monkeypatch.delitem(sys.modules, "missing_package")
    shims.add_empty_module("missing_package")
    first = importlib.import_module("missing_package")
    shims.add_empty_module("missing_package")
    assert importlib.import_module("missing_package") is first
    shims.add_empty_module("json")
    assert hasattr(importlib.import_module("json"), "dumps")


def test_only_their_workers_run_in_their_environment(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    images = importlib.import_module("images")
    args = Namespace(peers_python=Path("other/python"), threads=1)
    for name in images.THEIRS:
        assert images.SCRIPT.command(name, args)[0] == "other/python"
    for name in images.OURS:
        assert images.SCRIPT.command(name, args)[0] == sys.executable
