"""Presets that recipes share, and recipes by name."""

from __future__ import annotations
