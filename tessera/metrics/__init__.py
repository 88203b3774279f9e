"""Metrics: functions of tensors that are reported and never trained on; they import only torch."""

from __future__ import annotations
