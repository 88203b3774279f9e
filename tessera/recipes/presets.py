"""The sizes in which every recipe comes."""

from __future__ import annotations

from typing import Literal

Preset = Literal["tiny", "small", "base", "paper"]
"""tiny: seconds, for tests. small: minutes on a laptop, the default. base: one GPU. paper: as published."""
