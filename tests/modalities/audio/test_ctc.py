"""Semantic tokens of a recogniser."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.engine.distributed import Distributed
from tessera.engine.task import Batch
from tessera.losses.spectrogram import log_mel_spectrogram
from tessera.modalities.audio.ctc import CTCTokenizer, CTCTokenizerConfig
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.media import AudioBatch
from tessera.modalities.audio.normalized_mel import warp_frequencies
from tessera.modalities.audio.recipes import audio_semantic
from tessera.modalities.audio.recognition import draw_noise
from tessera.nn.delayed_start import DelayedStart

CONFIG = CTCTokenizerConfig(
    rate_hz=8_000,
    token_rate_hz=100.0,
    bands=8,
    dim=16,
    encoder_depth=2,
    context_depth=1,
    context_kernel=3,
    heads=2,
    vocab_size=8,
    code_dim=4,
    codebook_start=2,
)


def random_audio(samples: int, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 0.1 * torch.randn(count, 1, samples, generator=generator)


def build() -> CTCTokenizer:
    torch.manual_seed(0)
    model = CONFIG.build().eval()
    for parameter in model.parameters():  # residual branches are zero at initialization
        torch.nn.init.normal_(parameter, std=0.2)
    model.vocab.train_from(["abcdefgh"])
    return model


def train_step(model: CTCTokenizer, samples: Tensor) -> None:
    model.train()
    model(samples)
    for module in (model.quantizer, model.start):
        module.commit(Distributed(), 1)


def test_the_start_counts_steps_that_a_device_did_not_undo() -> None:
    start = DelayedStart(3).train()
    reached = []
    for step in range(4):
        start.note_step()
        reached.append(start.is_reached)
        start.commit(Distributed(), step)
        if step == 1:  # as after a step that was not finite
            start.steps_done -= 1
    assert reached == [False] * 4 and start.is_reached


def test_padding_does_not_change_tokens_and_characters() -> None:
    model, audio = build(), random_audio(1_600)
    lengths_B = torch.tensor([1_600, 810, 80])
    audio[1, :, 810:] = 7.0  # is ignored
    together = model(audio, lengths_B)
    codes = model.encode(audio, lengths_B)
    assert together.frames_B.tolist() == [20, 11, 1]
    for row, length in enumerate(lengths_B.tolist()):
        alone = model(audio[row : row + 1, :, :length])
        frames = alone.output.shape[1]
        assert torch.equal(codes[row, :frames], model.encode(audio[row : row + 1, :, :length])[0])
        assert (codes[row, frames:] == -1).all()
        torch.testing.assert_close(together.output[row, :frames], alone.output[0])


def test_loudness_does_not_change_tokens() -> None:
    model, audio = build(), random_audio(1_600)
    assert torch.equal(model.encode(audio), model.encode(3 * audio))


def test_the_codebook_is_used_only_after_its_start() -> None:
    model, audio = build(), random_audio(3_200)
    for expected in (False, False, True):
        train_step(model, audio)
        assert model.quantizer.is_initialized is expected
    output = model.eval()(audio)
    torch.testing.assert_close(output.output, model.decode(output.codes))
    assert "commitment" in output.penalties


def test_text_is_read_from_tokens_alone() -> None:
    model, audio = build(), random_audio(3_200)
    for _ in range(3):
        train_step(model, audio)
    model.eval()
    codes = model.encode(audio, torch.tensor([3_200, 1_600, 800]))
    alone = [model.recognize(row[row >= 0][None])[0] for row in codes]
    assert model.recognize(codes) == alone and any(alone)


def test_noise_follows_the_amplitude_at_the_requested_ratios() -> None:
    """The first half of the samples is ten times as loud as the second."""
    samples_1N = torch.cat([torch.full((1, 40_000), 0.5), torch.full((1, 40_000), 0.05)], dim=1)
    generator = torch.Generator().manual_seed(0)
    loud, quiet = draw_noise(samples_1N, (20.0, 20.0), generator).split(40_000, dim=1)
    steady = samples_1N.square().mean().sqrt() / 10
    assert float(quiet.std()) == pytest.approx(float((steady**2 + 0.005**2).sqrt()), rel=0.02)
    assert float(loud.std()) == pytest.approx(float((steady**2 + 0.05**2).sqrt()), rel=0.02)


def test_frequencies_are_scaled_by_the_drawn_factor() -> None:
    """A tone of 1 kHz at 1.15 times its frequency has the bands of one of 1.15 kHz."""
    time = torch.arange(8_000) / 16_000
    tones = torch.stack([torch.sin(2 * torch.pi * hz * time) for hz in (1_000.0, 1_150.0)])
    settings = {"rate_hz": 16_000, "window": 400, "hop": 160, "bands": 40}
    low, high = log_mel_spectrogram(tones, **settings).mT.unbind(0)
    factor = torch.tensor([1.15, 1.0])
    warped, same = warp_frequencies(torch.stack([low, low]), factor, 16_000)
    torch.testing.assert_close(same, low, rtol=1e-3, atol=1e-3)
    assert warped[25].argmax() == high[25].argmax() != low[25].argmax()


def test_the_scale_of_frequencies_is_drawn_for_each_example() -> None:
    run = audio_semantic("tiny", features="ctc")
    task: Any = run.task.build()
    samples = random_audio(800, count=40)
    examples = AudioBatch(samples, torch.full((40,), 800), 8_000, [""] * 40)
    batch = Batch(examples, [str(i) for i in range(40)], list(range(40)))
    factor_B = task.prepare_inputs(batch)["warp_B"]
    assert factor_B.min() >= 1 / 1.15 and factor_B.max() <= 1.15 and factor_B.std() > 0.05
    one = Batch(replace(examples, samples=samples[3:4]), ["3"], [3])
    assert task.prepare_inputs(one)["warp_B"] == factor_B[3]


@pytest.mark.parametrize("settings", [(0, 1), (1, 0), (2, 0)])
def test_the_quantizer_can_be_before_or_after_the_context(settings: tuple[int, int]) -> None:
    before, after = settings
    config = replace(CONFIG, encoder_context_depth=before, context_depth=after)
    torch.manual_seed(0)
    model, audio = config.build(), random_audio(3_200)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.vocab.train_from(["abcdefgh"])
    for _ in range(3):
        train_step(model, audio)
    output = model.eval()(audio)
    torch.testing.assert_close(output.output, model.decode(output.codes))
    states, mask = torch.randn(2, 20, 16), torch.ones(2, 20, dtype=torch.bool)
    changed = torch.cat([states[:, :15], -states[:, 15:]], dim=1)
    first, second = (model.encoder_context(one, mask_BN=mask)[:, :5] for one in (states, changed))
    assert torch.equal(first, second) is (before == 0)


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 24_000, 44_100])
def test_other_sampling_rates_keep_the_token_rate(rate_hz: int) -> None:
    data = AudioDataConfig(rate_hz=rate_hz, seconds=2.0)
    fitted = replace(CONFIG, token_rate_hz=25.0).fit_data(data)
    assert (fitted.hop, fitted.grid(data)) == (rate_hz // 25, (50,))


@pytest.mark.parametrize("features", ["mel", "ctc"])
def test_the_recipe_sets_the_token_rate(features: str) -> None:
    run = audio_semantic("small", features=features, token_rate_hz=40.0)
    assert run.task.model.hop == 400
    assert run.task.model.grid(replace(run.data, seconds=2.0)) == (80,)


def test_invalid_settings_give_an_error() -> None:
    with pytest.raises(ValueError, match="must be a multiple of 2"):
        replace(CONFIG, token_rate_hz=96.0)
    with pytest.raises(ValueError, match="noise_db must be a range"):
        replace(CONFIG, noise_db=(20.0, 10.0))
    with pytest.raises(ValueError, match="token_rate_hz must be above 0"):
        replace(CONFIG, token_rate_hz=0.0)
    with pytest.raises(ValueError, match="the shape"):
        build().decode(torch.zeros(1, 2, 3, dtype=torch.long))
