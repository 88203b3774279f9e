"""Procedures that draw symbols, over any function that gives logits: they know no network."""
