"""An order in which to lay symbols that spreads evenly over the grid, whatever the picture (Besnier 2025, arXiv 2503.17076)."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def halton_order(cells_NSA: Tensor) -> Tensor:
    """The rank of each symbol in an order that spreads over the grid: (N, S), 0 first.

    Halton points, base 2, 3, 5 along the axes, fall into cells of the grid; a cell's rank is that of the first point in it.
    Symbols of one cell follow each other.
    """
    flat = cells_NSA.reshape(-1, cells_NSA.shape[-1])
    sides = (flat.max(0).values + 1).tolist()
    bases = (2, 3, 5)[: len(sides)]
    rank: dict[tuple[int, ...], int] = {}
    number = 0
    while len(rank) < math.prod(sides):
        number += 1
        cell = tuple(int(radical_inverse(number, base) * side) for base, side in zip(bases, sides, strict=True))
        rank.setdefault(cell, len(rank))
    of_cell = torch.tensor([rank[tuple(cell)] for cell in flat.tolist()])
    return (of_cell * len(flat) + torch.arange(len(flat))).argsort().argsort().view(cells_NSA.shape[:-1])


def radical_inverse(number: int, base: int) -> float:
    """The digits of a number, mirrored at the point."""
    value, weight = 0.0, 1.0
    while number:
        weight /= base
        number, digit = divmod(number, base)
        value += digit * weight
    return value
