"""Tiny runs that the tests of the page share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.browser import find_chromium
from tests.view.served import Served, serve, train_tiny

collect_ignore = [] if find_chromium() else ["test_browser.py"]


@pytest.fixture(scope="session", autouse=True)
def endless_jobs() -> Iterator[None]:
    """Let jobs of `ENDLESS` decoding steps last until they are cancelled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tessera.view.jobs.WORKER_MODULE", "tests.view.endless_worker")
        yield


@pytest.fixture(scope="session")
def image_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an image tokenizer and a generator on it."""
    folder = tmp_path_factory.mktemp("view") / "runs"
    train_tiny(folder, "images-maskgit")
    return folder


@pytest.fixture(scope="session")
def served(image_runs: Path) -> Iterator[Served]:
    with serve(image_runs) as server:
        yield server
