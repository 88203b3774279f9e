"""Settings of all tests: one thread, fixed seeds, reproducible property tests and cheap garbage
collection.

The number of threads is set before torch is imported, because it changes the bits of a sum. Torch
itself is not imported here, since many tests do not need it.
"""

from __future__ import annotations

import gc
import os
import random
import sys

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np
import pytest
from hypothesis import settings

from bench.browser import find_chromium
from tests.garbage import freeze_for_good

SEED = 20_261_115
gc.disable()  # until all tests are imported

# No deadline: the time of a single case depends on what else runs on the machine.
settings.register_profile("tessera", derandomize=True, database=None, deadline=None)
settings.load_profile("tessera")


def pytest_collection_finish() -> None:
    freeze_for_good()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tests that need a browser are left out where there is none, and never silently."""
    if find_chromium() is None:
        terminalreporter.write_line(
            "Chromium is not installed: tests/view/test_browser.py was left out. To install it on "
            "Debian: apt-get install --no-install-recommends chromium"
        )


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test with the same global generators and one thread.

    A test file that uses torch's generator imports torch at its top, because the first import seeds
    it.
    """
    random.seed(SEED)
    np.random.seed(SEED)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(SEED)
        torch.set_num_threads(1)
