"""Samplers: functions of logits, which import nothing but torch."""

from __future__ import annotations
