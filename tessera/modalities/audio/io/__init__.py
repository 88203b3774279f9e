"""Readers of audio files."""

from __future__ import annotations
