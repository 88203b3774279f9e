"""The learned text encoder: independence of the batch, gradients, vocabulary and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tessera.text.learned import LearnedTextConfig, LearnedTextEncoder
from tests.networks import randomize_zero_weights
from tests.texts import CAPTIONS, unpadded_states

TINY = LearnedTextConfig(dim=16, depth=2, heads=2, vocab_size=300, max_len=24)


def build_encoder(**settings: Any) -> LearnedTextEncoder:
    torch.manual_seed(0)
    encoder = replace(TINY, **settings).build()
    encoder.prepare_text(CAPTIONS)
    randomize_zero_weights(encoder)
    return encoder


def test_a_text_has_one_state_per_token():
    encoder = build_encoder()
    states = encoder(CAPTIONS)
    lengths = [len(encoder.bpe.encode(text)) for text in CAPTIONS]
    assert states.values.shape == (5, max(lengths), 16) and encoder.dim == 16
    assert states.mask.dtype == torch.bool and states.mask.sum(1).tolist() == lengths
    assert lengths[-1] == 1, "an empty text has one state"


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_states_of_a_text_do_not_depend_on_the_batch(mode):
    """In double precision, where rounding (1.5e-6 in single) cannot mask a small influence."""
    encoder = build_encoder().double().train(mode == "train")
    for index, text in enumerate(CAPTIONS):
        torch.testing.assert_close(
            unpadded_states(encoder, CAPTIONS, index),
            unpadded_states(encoder, [text]),
            rtol=0,
            atol=1e-12,
        )
        states = encoder([text, "a small circle above a blue square"])
        assert not states.values[~states.mask].any(), "padding is zero"


def test_the_order_of_words_matters():
    encoder = build_encoder()
    one, other = unpadded_states(encoder, ["red blue"]), unpadded_states(encoder, ["blue red"])
    assert one.shape == other.shape and not torch.allclose(one.mean(0), other.mean(0), atol=1e-3)


def test_every_parameter_gets_a_gradient():
    encoder = build_encoder()
    states = encoder(CAPTIONS)
    (states.values * torch.randn(states.values.shape)).sum().backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() and p.grad.any()
        for p in encoder.parameters()
    )


def test_training_learns_the_color_in_a_caption():
    encoder = build_encoder()
    head = nn.Linear(16, 1)
    texts = [
        f"{count} {color} {shape}"
        for count in ("a", "two")
        for color in ("red", "blue")
        for shape in ("circle", "square")
    ]
    target = torch.tensor([float("red" in text) for text in texts])
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(60):
        states = encoder(texts)
        logits = head(states.values.sum(1) / states.mask.sum(1, keepdim=True))[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


def test_the_vocabulary_is_saved_in_the_checkpoint_only(tmp_path):
    encoder = build_encoder()
    encoder.prepare_text(CAPTIONS, tmp_path)
    assert "bpe.merges" in encoder.state_dict() and not list(tmp_path.iterdir())
    other = TINY.build()
    other.load_state_dict(encoder.state_dict())
    assert torch.equal(other(CAPTIONS).values, encoder(CAPTIONS).values)


def test_preparing_the_same_captions_again_has_no_effect():
    encoder = build_encoder()
    before = encoder.state_dict()["bpe.merges"].clone()
    encoder.prepare_text(iter(reversed(CAPTIONS)))
    assert torch.equal(encoder.bpe.merges, before)


def test_a_long_text_is_truncated_and_reported():
    encoder = build_encoder(max_len=6)
    short, long = "a red circle", "a red zebra, a blue zebra and a small zebra"
    assert encoder.fits(short) and not encoder.fits(long)
    assert encoder.find_truncated([long, short, long]) == [long]
    states = encoder([short, long])
    assert states.mask.sum(1).tolist()[1] == 6
    assert torch.equal(encoder([long]).values, encoder([long + " and more"]).values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dim": 0}, "dim of a text encoder is 0, but it must be at least 1"),
        ({"depth": 0}, "depth of a text encoder is 0, .* at least 1"),
        ({"heads": -2}, "heads of a text encoder is -2, .* at least 1"),
        ({"max_len": 1}, "`max_len` is 1, .* at least 2"),
        ({"vocab_size": 200}, "vocab_size is 200, .* 258"),
    ],
)
def test_invalid_settings_raise_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(TINY, **settings)


def test_a_single_text_raises_an_error():
    with pytest.raises(TypeError, match="'a red circle': put it in a list"):
        build_encoder()("a red circle")
