"""What every test may count on: one thread, the same seeds, and property tests that draw the same
cases each time.

The thread count is settled here, before anything can import torch, because it changes the bits of a
sum. Torch itself is not imported here: the tests of start-up, folders and files need none of it,
and it costs more than they do.
"""

from __future__ import annotations

import os
import random
import sys

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np
import pytest
from hypothesis import settings

SEED = 20_261_115

# No deadline: two test processes share two cores with whatever else runs, so the time of one case
# says nothing.
settings.register_profile("tessera", derandomize=True, database=None, deadline=None)
settings.load_profile("tessera")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same global generators and one thread, whatever ran before it in
    this process.

    A test file that draws from torch imports it at its top: torch seeds itself by chance when it is
    first imported.
    """
    random.seed(SEED)
    np.random.seed(SEED)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(SEED)
        torch.set_num_threads(1)
