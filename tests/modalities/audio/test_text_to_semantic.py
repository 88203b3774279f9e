"""The transformer from text to semantic tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tessera.modalities.audio.ctc import CTCTokenizer, CTCTokenizerConfig
from tessera.modalities.audio.text_to_semantic import (
    CharacterEncoderConfig,
    SpokenText,
    TextToSemantic,
    TextToSemanticConfig,
    predict_durations,
)
from tessera.modalities.audio.text_to_semantic_task import SpeechSampling
from tessera.sampling.autoregressive import generate

TEXTS = ["mee soo", "tah", "moo see tee"]
MAX_LEN = 60


def build_recognizer() -> CTCTokenizer:
    config = CTCTokenizerConfig(
        rate_hz=8_000,
        bands=8,
        dim=16,
        encoder_depth=1,
        context_depth=1,
        context_kernel=3,
        heads=2,
        vocab_size=8,
        code_dim=4,
    )
    recognizer = config.build()
    recognizer.vocab.train_from(TEXTS)
    return recognizer


def build(dropout: float = 0.0) -> TextToSemantic:
    torch.manual_seed(0)
    config = TextToSemanticConfig(
        dim=16, depth=2, heads=2, dropout=dropout, text=CharacterEncoderConfig(depth=1, max_len=20)
    )
    model = config.build(build_recognizer(), MAX_LEN).eval()
    for parameter in model.parameters():  # residual branches are zero at initialization
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def random_tokens(*frames: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    tokens_BNS = torch.randint(8, (len(frames), max(frames), 1), generator=generator)
    for row, count in enumerate(frames):
        tokens_BNS[row, count:] = -1
    return tokens_BNS


def condition(model: TextToSemantic, texts: list[str] = TEXTS) -> SpokenText:
    return model.condition(texts, [False] * len(texts))


@torch.no_grad()
def test_padding_and_other_texts_change_nothing() -> None:
    model, tokens_BNS = build(), random_tokens(20, 9, 30)
    together = model.predict(tokens_BNS, condition(model))
    for row, frames in enumerate((20, 9, 30)):
        alone = model.predict(tokens_BNS[row : row + 1, :frames], condition(model, [TEXTS[row]]))
        rows = together.example_M == row
        torch.testing.assert_close(together.logits_MV[rows], alone.logits_MV)
        torch.testing.assert_close(together.duration_loss_B[row], alone.duration_loss_B[0])
        assert len(alone.logits_MV) == frames


@torch.no_grad()
def test_a_token_depends_on_the_text_and_on_earlier_tokens_only() -> None:
    model, tokens_BNS = build(), random_tokens(20)
    spoken = condition(model, TEXTS[:1])
    durations = [[2, 3, 2, 3, 2, 3, 2, 3]]

    def logits(tokens: torch.Tensor, text: SpokenText = spoken) -> torch.Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "align", lambda *_: durations)
            return model.predict(tokens, text).logits_MV

    changed = tokens_BNS.clone()
    changed[:, 11] = (changed[:, 11] + 1) % 8
    same_M = (logits(tokens_BNS) == logits(changed)).all(1)
    assert same_M[:12].all() and not same_M[12]
    assert not torch.allclose(
        logits(tokens_BNS)[0], logits(tokens_BNS, condition(model, ["tee sah"]))[0]
    )


@torch.no_grad()
def test_decoding_equals_prediction() -> None:
    """Token by token, with the durations that the model predicts."""
    model = build()
    spoken = condition(model)
    durations = predict_durations(spoken, MAX_LEN)
    frames = [sum(one) for one in durations]
    tokens_BNS = random_tokens(*frames)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "align", lambda *_: durations)
        expected = model.predict(tokens_BNS, spoken)
    decode = model.start_decoding(spoken, tokens_BNS[:, :0])
    previous = None
    for position in range(max(frames)):
        logits_BV = decode(previous)
        for row, count in enumerate(frames):
            if position < count:
                [index] = (expected.example_M == row).nonzero()[position]
                torch.testing.assert_close(logits_BV[row, :-1], expected.logits_MV[index])
            assert logits_BV[row, :-1].isfinite().all() == (position < count)
            assert logits_BV[row, -1].isfinite() == (position >= count)
        previous = tokens_BNS[:, position, 0].clamp_min(0)


@torch.no_grad()
def test_a_sample_does_not_depend_on_the_batch() -> None:
    model = build()

    def sample(texts: list[str], seeds: list[int]) -> list[list[int]]:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        prompt = torch.empty(len(texts), 0, 1, dtype=torch.long)
        found = generate(
            lambda prefix: model.start_decoding(condition(model, texts), prefix),
            prompt,
            SpeechSampling(),
            generators,
            eos_token_id=model.eos_token_id,
            max_positions=MAX_LEN,
        )
        return [[int(token) for token in row[:, 0] if token >= 0] for row in found.tokens_BNS]

    together = sample(TEXTS, [5, 6, 7])
    assert [sample([text], [5 + i])[0] for i, text in enumerate(TEXTS)] == together


@torch.no_grad()
def test_speed_divides_the_number_of_frames() -> None:
    model = build()
    spoken = condition(model, ["moo see tee mee soo"])
    usual, slow, fast = (
        sum(predict_durations(replace(spoken, speed=speed))[0]) for speed in (1.0, 0.5, 2.0)
    )
    assert slow == pytest.approx(2 * usual, abs=1) and fast == pytest.approx(usual / 2, abs=1)
    assert sum(predict_durations(spoken, 7)[0]) == 7
    with pytest.raises(ValueError, match="speed must be between 0.25 and 4, got 0"):
        SpeechSampling(speed=0.0)


def test_durations_are_those_of_the_alignment() -> None:
    model, tokens_BNS = build(), random_tokens(20, 9, 30)
    labels = condition(model).labels
    frames_B = torch.tensor([20, 9, 30])
    durations = model.align(tokens_BNS[..., 0], frames_B, labels)
    assert [sum(one) for one in durations] == [20, 9, 30]
    assert [len(one) - 1 for one in durations] == [len(one) for one in labels]
    # A text with more characters than frames is spread evenly.
    [spread] = model.align(tokens_BNS[:1, :3, 0], torch.tensor([3]), [labels[2]])
    assert sum(spread) == 3 and max(spread) == 1


def test_dropout_comes_from_the_generators_of_the_examples() -> None:
    model, tokens_BNS = build(dropout=0.5).train(), random_tokens(12, 12)
    texts = [TEXTS[0]] * 2

    def logits(*seeds: int) -> torch.Tensor:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        inputs = model.prepare_inputs(tokens_BNS, generators, texts)
        return model.predict(tokens_BNS, condition(model, texts), inputs).logits_MV

    assert torch.equal(logits(1, 2)[:12], logits(1, 3)[:12])
    assert not torch.equal(logits(1, 2)[12:], logits(1, 3)[12:])
