"""Garbage collection that leaves out what stays until the end of a test process."""

from __future__ import annotations

import gc


def freeze_for_good() -> None:
    """Exclude everything that exists now from garbage collection.

    A training begins with a collection, which took 0.6 s with the 1.2 million objects of imported
    modules and collected tests, and ends with `gc.unfreeze`, which would include them again.
    """
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    gc.enable()
