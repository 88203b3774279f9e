"""Characters of transcripts as labels."""

from __future__ import annotations

import pytest
import torch

from tessera.text.characters import CharacterVocab, normalize_text


def build(*texts: str, size: int = 32) -> CharacterVocab:
    vocab = CharacterVocab(size)
    vocab.train_from(texts)
    return vocab


def test_case_punctuation_and_spaces_do_not_matter() -> None:
    assert normalize_text("  Don’t —  STOP, now! ") == "don't stop now"
    assert normalize_text("...") == ""


def test_labels_decode_to_the_normalized_text() -> None:
    vocab = build("the quick brown fox", "it's")
    labels = vocab.encode("The fox, it's QUICK")
    assert min(labels) > 0 and vocab.decode(labels) == "the fox it's quick"
    assert vocab.decode([0, *labels, 99]) == "the fox it's quick"


def test_accents_are_dropped_where_they_were_not_trained_on() -> None:
    assert build("cafe").decode(build("cafe").encode("café")) == "cafe"
    vocab = build("café cafe")
    assert vocab.decode(vocab.encode("café")) == "café"


def test_unknown_characters_are_listed_and_left_out() -> None:
    vocab = build("abc cab")
    assert vocab.find_unknown("a дом, 3 cab!") == ["д", "о", "м", "3"]
    assert vocab.decode(vocab.encode("a дом cab")) == "a cab"
    assert vocab.find_unknown("b, a.") == []


def test_the_order_of_transcripts_does_not_matter_and_state_is_saved() -> None:
    vocab, other = build("abc", "xyz"), build("xyz", "abc")
    assert torch.equal(vocab.code_points, other.code_points)
    loaded = CharacterVocab(32)
    loaded.load_state_dict(vocab.state_dict())
    assert loaded.characters == "abcxyz"
    loaded.code_points.copy_(build("xyz").code_points)  # as a checkpoint is read
    assert loaded.characters == "xyz"


def test_missing_and_too_many_characters_give_an_error() -> None:
    with pytest.raises(ValueError, match="No example has a transcript"):
        build("", " . ")
    with pytest.raises(ValueError, match="26 different characters.*--task.model.max-characters 26"):
        build("abcdefghijklmnopqrstuvwxyz", size=4)
