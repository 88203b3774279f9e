"""Procedural sources, one per medium, with true captions: what a recipe learns from when it is given no data."""
