"""Errors of recognised text."""

from __future__ import annotations

from collections.abc import Sequence


def edit_distance(found: Sequence[object], expected: Sequence[object]) -> int:
    """Return the least number of insertions, deletions and substitutions (Levenshtein 1966)."""
    previous = list(range(len(expected) + 1))
    for row, one in enumerate(found, start=1):
        current = [row]
        for column, other in enumerate(expected, start=1):
            substituted = previous[column - 1] + (one != other)
            current.append(min(previous[column] + 1, current[-1] + 1, substituted))
        previous = current
    return previous[-1]


def character_error(found: Sequence[str], expected: Sequence[str]) -> float:
    """Return the edit distance of all texts, divided by the number of expected characters."""
    distance = sum(map(edit_distance, found, expected))
    return distance / max(1, sum(map(len, expected)))
