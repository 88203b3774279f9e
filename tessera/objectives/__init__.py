"""Training objectives, independent of modalities."""

from __future__ import annotations
