"""Blocks that two models or more are built from. Nothing here knows a model, a task or the
engine."""
