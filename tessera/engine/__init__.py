"""The training engine, independent of tasks, models and data."""

from __future__ import annotations
