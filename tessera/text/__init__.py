"""Text encoders, which turn captions and prompts into states that a network attends to."""

from __future__ import annotations
