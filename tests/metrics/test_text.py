"""Errors of recognised text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.metrics.text import character_error, edit_distance

texts = st.text("ab ", max_size=8)


@pytest.mark.parametrize(
    ("found", "expected", "distance"),
    [("", "", 0), ("abc", "", 3), ("", "abc", 3), ("kitten", "sitting", 3), ("ab", "ba", 2)],
)
def test_edit_distance_of_known_pairs(found: str, expected: str, distance: int) -> None:
    assert edit_distance(found, expected) == distance


@given(texts, texts, texts)
def test_edit_distance_is_a_metric(a: str, b: str, c: str) -> None:
    assert edit_distance(a, b) == edit_distance(b, a)
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)


def test_character_error_is_over_all_texts() -> None:
    assert character_error(["abcd", "x"], ["abcd", "y"]) == pytest.approx(1 / 5)
    assert character_error(["abc"], [""]) == 3
