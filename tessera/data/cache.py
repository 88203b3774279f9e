"""The cache of this computer: indexes and downloads, which can be deleted at any time."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "TESSERA_CACHE"
"""The variable of the environment that names the folder; by default tessera in the user's cache."""


def cache_folder(name: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.environ.get(VARIABLE) or os.path.join(base, "tessera")) / name
