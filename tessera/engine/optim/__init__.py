"""Optimizers, learning rate schedules and operations on gradients."""

from __future__ import annotations
