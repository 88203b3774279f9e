"""Tests of `resolve_suffix`, which all media classes use when they save."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.data.files import resolve_suffix

ALLOWED = (".png", ".jpg", ".jpeg", ".webp")


@pytest.mark.parametrize("name", ["a.png", "a.JPG", "guidance-1.5.jpeg", "b.c.webp", "x.tga.png"])
def test_allowed_suffix_is_kept(name):
    assert resolve_suffix(Path("out") / name, ".png", ALLOWED) == Path("out") / name


@pytest.mark.parametrize(
    "name", ["a", "guidance-1.5", "1.5e", "step.1000", "a.", "..", ".cache", "v.x", "a.abcdefg"]
)
def test_default_suffix_is_appended_to_any_other_name(name):
    assert resolve_suffix(f"out/{name}", ".png", ALLOWED).as_posix() == f"out/{name}.png"


@pytest.mark.parametrize("name", ["a.tga", "a.gif", "a.MP4", "a.jpeg2"])
def test_other_suffixes_are_an_error_that_lists_the_allowed_ones(name):
    with pytest.raises(ValueError, match=r"formats that can be written are \.png, \.jpg, \.jpeg"):
        resolve_suffix(name, ".png", ALLOWED)
