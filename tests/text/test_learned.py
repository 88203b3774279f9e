"""The text encoder that learns: a text by itself is the text among others, and what is learnt is
learnt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tessera.text.encoder import LearnedText, LearnedTextConfig
from tests.networks import awake
from tests.texts import CAPTIONS, real

TINY = LearnedTextConfig(dim=16, depth=2, heads=2, tokens=300, max_len=24)


def learned(**settings: Any) -> LearnedText:
    torch.manual_seed(0)
    encoder = replace(TINY, **settings).build()
    encoder.prepare_text(CAPTIONS)
    awake(encoder)
    return encoder


def test_a_text_is_a_vector_for_each_symbol():
    encoder = learned()
    states = encoder(CAPTIONS)
    lengths = [len(encoder.bpe.encode(text)) for text in CAPTIONS]
    assert states.values.shape == (5, max(lengths), 16) and encoder.dim == 16
    assert states.mask.dtype == torch.bool and states.mask.sum(1).tolist() == lengths
    assert lengths[-1] == 1, "a text of nothing has something to look at"


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_text_does_not_depend_on_what_else_is_in_the_batch(mode):
    """In double precision, where rounding (1.5e-6 in single) cannot hide a small influence."""
    encoder = learned().double().train(mode == "train")
    for number, text in enumerate(CAPTIONS):
        torch.testing.assert_close(
            real(encoder, CAPTIONS, number), real(encoder, [text]), rtol=0, atol=1e-12
        )
        states = encoder([text, "a small circle above a blue square"])
        assert not states.values[~states.mask].any(), "padding is zero"


def test_the_order_of_words_matters():
    encoder = learned()
    one, other = real(encoder, ["red blue"]), real(encoder, ["blue red"])
    assert one.shape == other.shape and not torch.allclose(one.mean(0), other.mean(0), atol=1e-3)


def test_every_weight_learns():
    encoder = learned()
    states = encoder(CAPTIONS)
    (states.values * torch.randn(states.values.shape)).sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() and p.grad.any()
        for p in encoder.parameters()
    )


def test_it_learns_what_the_words_of_a_caption_mean():
    encoder = learned()
    head = nn.Linear(16, 1)
    texts = [
        f"{count} {colour} {shape}"
        for count in ("a", "two")
        for colour in ("red", "blue")
        for shape in ("circle", "square")
    ]
    truth = torch.tensor([float("red" in text) for text in texts])
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(60):
        states = encoder(texts)
        guess = head(states.values.sum(1) / states.mask.sum(1, keepdim=True))[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(guess, truth)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


def test_the_alphabet_is_in_the_checkpoint_and_nowhere_else(tmp_path):
    encoder = learned()
    encoder.prepare_text(CAPTIONS, tmp_path)
    assert "alphabet.merges" in encoder.state_dict() and not list(tmp_path.iterdir())
    other = TINY.build()
    other.load_state_dict(encoder.state_dict())
    assert torch.equal(other(CAPTIONS).values, encoder(CAPTIONS).values)


def test_meeting_the_same_captions_again_changes_nothing():
    encoder = learned()
    before = encoder.state_dict()["alphabet.merges"].clone()
    encoder.prepare_text(iter(reversed(CAPTIONS)))
    assert torch.equal(encoder.bpe.merges, before)


def test_a_long_text_is_cut_and_somebody_can_tell():
    encoder = learned(max_len=6)
    short, long = "a red circle", "a red zebra, a blue zebra and a small zebra"
    assert encoder.fits(short) and not encoder.fits(long)
    assert encoder.cut([long, short, long]) == [long]
    states = encoder([short, long])
    assert states.mask.sum(1).tolist()[1] == 6
    assert torch.equal(encoder([long]).values, encoder([long + " and more"]).values)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"width": 0}, "width is at least 1, but it is 0"),
        ({"depth": 0}, "depth is at least 1"),
        ({"heads": -2}, "heads is at least 1"),
        ({"longest": 1}, "at least 2, but it is 1"),
        ({"symbols": 200}, "200 symbols .* 258"),
    ],
)
def test_an_encoder_that_cannot_be_is_refused_by_its_configuration(settings, says):
    with pytest.raises(ValueError, match=says):
        replace(TINY, **settings)


def test_one_text_that_is_no_list_is_refused():
    with pytest.raises(TypeError, match="'a red circle': put it in a list"):
        learned()("a red circle")
