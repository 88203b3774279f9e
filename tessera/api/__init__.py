"""Trained runs in Python: Tokenizer, Generator and Search."""

from __future__ import annotations
