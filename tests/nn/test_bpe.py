"""The alphabet against a slow one that recounts everything after each pair; any text comes back,
whoever carries the table."""

from __future__ import annotations

import copy
import random
import unicodedata
from collections import Counter
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from tessera.engine.checkpoint import restore_network
from tessera.engine.ema import EMA, EMAConfig
from tessera.nn import bpe as module
from tessera.nn.bpe import BEGIN, BPE, FIRST_BYTE, FIRST_PAIR, PADDING, words_of

CAPTIONS = [
    "a red circle", "a blue circle", "two red squares", "a small red circle above a blue square",
    "Three green triangles", "a circle, a square; and nothing else!",
]  # fmt: skip


def learnt(texts=CAPTIONS, tokens=300, **how) -> BPE:
    bpe = BPE(tokens, **how)
    bpe.learn(texts)
    return bpe


def pairs_of(bpe: BPE) -> list[list[int]]:
    return [pair for pair in bpe.merges.tolist() if pair != [-1, -1]]


# ------------------------------------------------------------------------------------------------------ the slow one


def replaced(tokens: list[int], pair: tuple[int, int], token: int) -> list[int]:
    for place in range(len(tokens) - 1):
        if (tokens[place], tokens[place + 1]) == pair:
            return tokens[:place] + [token] + replaced(tokens[place + 2 :], pair, token)
    return tokens


def slowly_learnt(texts: list[str], most: int) -> list[tuple[int, int]]:
    words = [
        [FIRST_BYTE + byte for byte in word.encode()] for text in texts for word in words_of(text)
    ]
    pairs: list[tuple[int, int]] = []
    while len(pairs) < most:
        counts = Counter(pair for word in words for pair in pairwise(word))
        often = [
            pair for pair, count in counts.items() if count == max(counts.values()) and count > 1
        ]
        if not often:
            break
        pairs.append(min(often))
        words = [replaced(word, pairs[-1], FIRST_PAIR + len(pairs) - 1) for word in words]
    return pairs


def slowly_encoded(text: str, pairs: list[tuple[int, int]]) -> list[int]:
    tokens = [BEGIN]
    for word in words_of(text):
        spelt = [FIRST_BYTE + byte for byte in word.encode()]
        for number, pair in enumerate(pairs):
            spelt = replaced(spelt, pair, FIRST_PAIR + number)
        tokens += spelt
    return tokens


few_letters = st.text("ab é,", max_size=12).map(lambda text: " ".join(text.split()))


@given(texts=st.lists(few_letters, max_size=12), unseen=few_letters, most=st.integers(0, 12))
def test_pairs_and_symbols_are_those_of_an_alphabet_that_recounts_everything(texts, unseen, most):
    bpe = learnt(texts, FIRST_PAIR + most)
    pairs = slowly_learnt(texts, most)
    assert pairs_of(bpe) == [list(pair) for pair in pairs]
    assert bpe.encode(unseen) == slowly_encoded(unseen, pairs)


# ------------------------------------------------------------------------------------------------------------- texts


@given(text=st.text(), casefold=st.booleans())
@example(text="caf\udce9 \ud800", casefold=True)  # halves of characters, which `text` does not draw
def test_any_text_comes_back_in_the_form_in_which_it_is_read(text, casefold):
    bpe = learnt(casefold=casefold)
    read = bpe.form(text)
    tokens = bpe.encode(text)
    assert bpe.decode(tokens) == read
    assert bpe.form(read) == read and bpe.encode(read) == tokens
    assert tokens[0] == BEGIN and all(FIRST_BYTE <= token < bpe.size for token in tokens[1:])


def test_text_in_other_words_characters_and_scripts_is_spelt_without_an_unknown():
    bpe = learnt()
    for text in ("zebra", "ein süßes kätzchen", "一只红色的猫", "🚲 und 🐈‍⬛", "naïve_co-op (3%)"):
        assert bpe.decode(bpe.encode(text)) == bpe.form(text)


def test_a_text_of_nothing_is_the_symbol_that_begins_it():
    assert BPE().encode("") == learnt().encode("  \n") == [BEGIN]
    assert learnt().decode([BEGIN]) == learnt().decode([]) == ""


def test_padding_and_the_beginning_spell_nothing():
    bpe = learnt()
    assert bpe.decode([*bpe.encode("a circle"), PADDING, PADDING]) == "a circle"


def test_texts_that_look_alike_are_read_alike():
    bpe = learnt()
    composed, apart = (unicodedata.normalize(form, "a Café") for form in ("NFC", "NFD"))
    assert composed != apart and bpe.encode(composed) == bpe.encode(apart)
    assert bpe.encode("A  RED\tcircle ") == bpe.encode("a red circle")


def test_case_counts_where_it_is_told_to():
    assert (
        learnt(casefold=True).form("STRASSE") == learnt(casefold=True).form("Straße") == "strasse"
    )
    bpe = learnt(casefold=False)
    assert bpe.encode("A red circle") != bpe.encode("a red circle")
    assert bpe.decode(bpe.encode("A red Circle")) == "A red Circle"


def test_a_word_is_the_same_symbols_wherever_it_stands():
    bpe = learnt()
    circle = bpe.encode("circle")[1:]
    assert bpe.encode("a circle")[-len(circle) :] == circle
    assert len(circle) == 1, "a word that was met often enough is one symbol"


def test_pairs_stay_inside_words():
    bpe = learnt(["red, red, red, red, (red)"], 600)
    spelt = [bpe.decode([token]) for token in range(FIRST_PAIR, FIRST_PAIR + len(pairs_of(bpe)))]
    assert "red" in spelt and not any(sign in piece for piece in spelt for sign in ",()")


def test_half_a_character_is_shown_as_such():
    bpe = BPE()
    assert bpe.decode(bpe.encode("aé")[:-1]) == "a\ufffd"


@pytest.mark.parametrize("symbol", [-1, 299, 10_000])
def test_a_symbol_that_was_never_learnt_is_named(token):
    with pytest.raises(ValueError, match=f"The symbol {token} .* learnt those from 0 to 298 only"):
        learnt(CAPTIONS * 2, 299).decode([BEGIN, token])


# ---------------------------------------------------------------------------------------------------------- learning


def test_the_order_of_the_texts_changes_nothing():
    shuffled = CAPTIONS * 3
    random.shuffle(shuffled)
    assert torch.equal(learnt(shuffled).merges, learnt(CAPTIONS * 3).merges)


def test_what_was_learnt_before_is_forgotten():
    bpe = learnt(["something else entirely, entirely else something"])
    bpe.learn(CAPTIONS)
    assert torch.equal(bpe.merges, learnt().merges)
    bpe.learn([])
    assert (bpe.merges == -1).all()


def test_the_table_has_its_size_before_anything_is_learnt():
    bpe = BPE(400)
    assert (
        bpe.size == 400 and bpe.merges.shape == (400 - FIRST_PAIR, 2) and (bpe.merges == -1).all()
    )
    assert bpe.encode("ab") == [BEGIN, *(FIRST_BYTE + byte for byte in b" ab")]


def test_texts_get_shorter_by_what_was_learnt():
    plain, taught = BPE(), learnt(CAPTIONS, 512)
    assert (
        sum(len(taught.encode(text)) for text in CAPTIONS)
        < sum(len(plain.encode(text)) for text in CAPTIONS) / 2
    )


def test_an_alphabet_without_room_for_the_bytes_is_refused():
    assert BPE(FIRST_PAIR).encode("a") == [BEGIN, 2 + 32, 2 + 97]
    with pytest.raises(ValueError, match="257 symbols .* 258"):
        BPE(257)


# ----------------------------------------------------------------------------------------------- a tensor like others


def asked_and_answered(bpe: BPE) -> dict[str, list[int]]:
    return {text: bpe.encode(text) for text in CAPTIONS}


def loaded(bpe: BPE, state: dict[str, torch.Tensor]) -> None:
    bpe.load_state_dict(state)


def restored(bpe: BPE, state: dict[str, torch.Tensor]) -> None:
    restore_network(bpe, state, "model")


@pytest.mark.parametrize("way", [loaded, restored])
def test_a_table_that_comes_from_a_checkpoint_counts_at_once(way):
    """Whatever was remembered of the old one is not asked again."""
    other = learnt(["squares and triangles and squares and triangles"])
    assert asked_and_answered(other) != asked_and_answered(learnt())
    way(other, learnt().state_dict())
    assert asked_and_answered(other) == asked_and_answered(learnt())


def test_learning_again_counts_at_once():
    bpe = learnt()
    before = asked_and_answered(bpe)
    bpe.learn(["squares and triangles and squares and triangles"])
    assert asked_and_answered(bpe) != before


def test_the_average_has_its_table_and_gives_the_live_one_back():
    bpe = learnt()
    average = EMA(EMAConfig(), nn.ModuleList([bpe, nn.Linear(1, 1)]))
    averaged = asked_and_answered(bpe)
    bpe.learn(["squares and triangles and squares and triangles"])
    live = asked_and_answered(bpe)
    with average.applied():
        assert asked_and_answered(bpe) == averaged != live
    assert asked_and_answered(bpe) == live
    average.update(1)
    with average.applied():
        assert asked_and_answered(bpe) == live


def test_a_copy_learns_by_itself():
    bpe = learnt()
    answers = asked_and_answered(bpe)
    twin = copy.deepcopy(bpe)
    twin.learn(["squares and triangles and squares and triangles"])
    assert asked_and_answered(bpe) == answers != asked_and_answered(twin)


def test_whoever_changes_an_answer_changes_no_later_one():
    bpe = learnt()
    bpe.encode("a red circle").append(7)
    assert bpe.encode("a red circle") == learnt().encode("a red circle")


def test_what_is_remembered_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "REMEMBERED", 4)
    bpe = learnt()
    answers = [bpe.encode(text) for text in CAPTIONS * 2]
    assert answers == [learnt().encode(text) for text in CAPTIONS * 2]
    assert len(bpe.spelling().texts) <= 4 and len(bpe.spelling().words) <= 4


@pytest.mark.parametrize("row", [[1, 5], [5, 259], [-1, -1]])
def test_a_table_that_no_alphabet_learnt_is_refused(row):
    bpe = learnt()
    bpe.merges[1] = torch.tensor(row)
    with pytest.raises(ValueError, match=f"Row 1 .* joins {row[0]} and {row[1]}"):
        bpe.encode("a")
