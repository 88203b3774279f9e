"""Texts come back from their files as they were, and a sheet of them is read line by line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tessera.media.errors import Unreadable
from tessera.media.text import Text

WRITABLE = st.text(st.characters(exclude_categories=["Cs"]))


@given(words=WRITABLE.filter(lambda words: not words.startswith("\ufeff")))
def test_a_saved_text_comes_back_as_it_was(words, tmp_path_factory):
    path = Text(words).save(tmp_path_factory.getbasetemp() / "texts" / "again")
    assert Text.load(path) == Text(words)


def test_the_name_of_a_text_is_kept_whole_and_its_folder_is_made(tmp_path):
    assert Text("a red circle").save(tmp_path / "samples" / "guidance-1.5") == tmp_path / "samples" / "guidance-1.5.txt"


def test_a_mark_that_editors_put_in_front_is_no_part_of_the_text(tmp_path):
    tmp_path.joinpath("marked.txt").write_bytes(b"\xef\xbb\xbfa red circle\r\n")
    assert Text.load(tmp_path / "marked.txt") == Text("a red circle\r\n")


def test_half_a_character_is_written_so_that_it_can_be_read(tmp_path):
    assert Text.load(Text("caf\udce9").save(tmp_path / "half")) == Text("caf\\udce9")


@pytest.mark.parametrize(
    ("data", "says"),
    [(None, r"gone.txt: the file cannot be opened"), (b"caf\xe9 au lait", r"gone.txt: it is no UTF-8 text .* at byte 3")],
)
def test_what_cannot_be_read_says_which_file_and_why(data, says, tmp_path):
    if data is not None:
        tmp_path.joinpath("gone.txt").write_bytes(data)
    with pytest.raises(Unreadable, match=says):
        Text.load(tmp_path / "gone.txt")


def test_a_sheet_has_one_numbered_line_for_each_text():
    sheet = Text.sheet([Text("a red circle"), Text(""), Text("two lines\n  of one text")])
    assert sheet.words == "0000  a red circle\n0001\n0002  two lines of one text\n"


def test_a_sheet_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Text.sheet([])
