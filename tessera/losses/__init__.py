"""Training losses: functions of tensors, without networks and media."""

from __future__ import annotations
