"""Runs: configuration, directory, training, loading and dependencies."""

from __future__ import annotations
