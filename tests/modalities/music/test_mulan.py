"""MuLan: embeddings do not depend on the batch, and nothing is random at inference."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.music.mulan import MAX_SCALE, MuLaN, MuLaNConfig
from tessera.modalities.music.spectrogram_transformer import (
    MEAN,
    SILENCE,
    SpecAugmentConfig,
    Spectrogram,
    SpectrogramTransformerConfig,
    augment_spectrogram,
    sample_patches,
    span_mask,
    stretched_frames,
    time_stretch,
)
from tessera.text.learned import LearnedTextConfig
from tessera.text.token_ids import TokenIdTextConfig

AUDIO = SpectrogramTransformerConfig(
    rate_hz=8000, window=256, hop=64, bands=16, patch=(8, 4), dim=32, depth=2, heads=2
)
TEXT = LearnedTextConfig(dim=32, depth=2, heads=2, vocab_size=300)
TEXTS = [
    "a slow tune",
    "drums",
    "something quick, loud and rather long, which must be encoded completely",
]


@pytest.fixture
def mulan() -> MuLaN:
    torch.manual_seed(3)
    model = MuLaNConfig(audio=AUDIO, text=TEXT, latent=16).build().double()
    for parameter in model.parameters():  # layers with zero weights would have no effect
        torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else None
    return model.eval()


def random_audio(count: int = 3, samples: int = 3000) -> torch.Tensor:
    return torch.randn(count, samples, dtype=torch.float64).clamp(-3, 3) / 3


def examples(samples: torch.Tensor, lengths: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(samples=samples.unsqueeze(1), lengths=lengths)


def generators(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


# ---- independence of padding and of the batch


@pytest.mark.parametrize("length", [1, 64, 700, 1024, 2999])
def test_padding_does_not_change_an_embedding(mulan: MuLaN, length: int) -> None:
    audio = random_audio(1, length)
    padded = torch.cat([audio, torch.zeros(1, 3000 - length, dtype=torch.float64)], dim=1)
    alone = mulan.get_audio_latents(audio)
    in_batch = mulan.get_audio_latents(
        torch.cat([padded, random_audio(2)]), torch.tensor([length, 3000, 3000])
    )
    assert torch.allclose(alone[0], in_batch[0], atol=1e-12)
    assert not torch.allclose(alone[0], in_batch[1], atol=1e-3)


def test_samples_after_the_real_ones_have_no_influence(mulan: MuLaN) -> None:
    """The window of the last real frame reaches beyond the real samples, so these must be silent;
    `collate` ensures it."""
    audio = random_audio(1)
    audio[:, 1024:] = 0
    other = audio.clone()
    other[:, 1024 + AUDIO.window :] = random_audio(1)[:, 1024 + AUDIO.window :]
    lengths = torch.tensor([1024])
    assert torch.equal(
        mulan.get_audio_latents(audio, lengths), mulan.get_audio_latents(other, lengths)
    )


def test_a_longer_text_in_the_batch_changes_nothing(mulan: MuLaN) -> None:
    train_together = mulan.train().get_text_latents(TEXTS)
    for text, embedding in zip(TEXTS, train_together, strict=True):
        assert torch.allclose(mulan.get_text_latents([text])[0], embedding, atol=1e-12)


def test_embeddings_have_unit_norm_and_similarity_is_their_cosine(mulan: MuLaN) -> None:
    audio, text = mulan.get_audio_latents(random_audio()), mulan.get_text_latents(TEXTS)
    assert audio.shape == text.shape == (3, 16)
    assert torch.allclose(audio.norm(dim=1), torch.ones(3).double()) and torch.allclose(
        text.norm(dim=1), torch.ones(3).double()
    )
    again = random_audio()
    assert torch.allclose(mulan.similarity(again, TEXTS), mulan.get_audio_latents(again) @ text.T)


def test_several_channels_raise_an_error(mulan: MuLaN) -> None:
    with pytest.raises(ValueError, match="must have one channel"):
        mulan.get_audio_latents(random_audio().reshape(1, 3, -1))


def test_loudness_matters(mulan: MuLaN) -> None:
    audio = random_audio()
    assert not torch.allclose(
        mulan.get_audio_latents(audio), mulan.get_audio_latents(audio / 30), atol=1e-2
    )


# ---- randomness


def test_augmentation_and_dropping_apply_only_in_training(mulan: MuLaN) -> None:
    batch = examples(random_audio(), torch.tensor([3000, 2000, 500]))
    inference = mulan.embed_media(batch, mulan.draw(batch, generators(1, 2, 3)))
    assert torch.equal(inference, mulan.embed_media(batch))
    training = mulan.train().embed_media(batch, mulan.draw(batch, generators(1, 2, 3)))
    assert not torch.allclose(training, inference, atol=1e-3)
    assert torch.equal(mulan.embed_media(batch, None), inference), (
        "no randomness without generators"
    )


def test_randomness_comes_from_the_generator_of_each_example(mulan: MuLaN) -> None:
    audio, lengths = random_audio(), torch.tensor([3000, 2000, 500])
    batch = examples(audio, lengths)
    train_together = mulan.train().embed_media(batch, mulan.draw(batch, generators(1, 2, 3)))
    for i in range(3):
        one = examples(audio[i : i + 1], lengths[i : i + 1])
        alone = mulan.embed_media(one, mulan.draw(one, generators(i + 1)))
        assert torch.allclose(alone[0], train_together[i], atol=1e-12)


def ramp_spectrogram(frames: int = 40, real: int = 40, bands: int = 16) -> Spectrogram:
    ramp = torch.arange(frames, dtype=torch.float64).expand(1, bands, frames)
    return Spectrogram(
        ramp.masked_fill(torch.arange(frames) >= real, SILENCE), torch.tensor([real])
    )


def test_time_stretch_interpolates_frames() -> None:
    faster = stretch(ramp_spectrogram(), 1.25)
    assert faster.frames_B.tolist() == [32] and torch.allclose(
        faster.values_BMF[0, 0, :32], torch.arange(32).double() * 1.25
    )
    assert (faster.values_BMF[0, :, 32:] == SILENCE).all()
    slower = stretch(ramp_spectrogram(real=20), 0.8)
    assert slower.frames_B.tolist() == [25] and torch.allclose(
        slower.values_BMF[0, 0, :24], torch.arange(24).double() * 0.8
    )


def stretch(spectrogram: Spectrogram, tempo: float) -> Spectrogram:
    tempo_B = torch.tensor([tempo], dtype=torch.float64)
    count = spectrogram.values_BMF.shape[2]
    frames_B = stretched_frames(spectrogram.frames_B, tempo_B, count)
    return time_stretch(spectrogram, tempo_B, frames_B)


def augment(spectrogram: Spectrogram, settings: SpecAugmentConfig, seed: int) -> Spectrogram:
    count = spectrogram.values_BMF.shape[2]
    draws = settings.draw(spectrogram.frames_B, count, generators(seed), torch.float64)
    return augment_spectrogram(spectrogram, settings, draws)


def test_masks_cover_a_fraction_of_bands_and_of_real_frames() -> None:
    fractions = []
    for seed in range(200):
        settings = SpecAugmentConfig(stretch=0, band_masks=0, max_time_fraction=0.5)
        augmented = augment(ramp_spectrogram(real=30), settings, seed)
        masked = (augmented.values_BMF[0] == MEAN).all(0)
        assert not masked[30:].any()
        fractions.append(float(masked.sum()) / 30)
    assert 0 < sum(fractions) / 200 < 0.3 and 0.4 < max(fractions) <= 0.5, "never a whole segment"
    settings = SpecAugmentConfig(stretch=0, time_masks=0, max_band_fraction=0.5)
    bands = [
        int((augment(ramp_spectrogram(), settings, seed).values_BMF[0] == MEAN).all(1).sum())
        for seed in range(200)
    ]
    assert max(bands) in (7, 8) and min(bands) == 0


def test_a_mask_stays_within_the_real_positions() -> None:
    random = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert span_mask(torch.tensor([10, 10]), 12, 0.3, random).int().tolist() == [
        [0] * 7 + [1] * 3 + [0] * 2,
        [1] * 3 + [0] * 9,
    ]


def test_each_segment_keeps_its_fraction_of_patches() -> None:
    kept, real = sample_patches(torch.tensor([40, 8, 1]), 0.25, generators(1, 2, 3))
    assert real.tolist() == [30, 6, 1] and kept.shape == (3, 30)
    assert len(set(kept[1, :6].tolist())) == 6 and kept[1, :6].max() < 8


# ---- settings


def test_intermediate_layers_have_embeddings(mulan: MuLaN) -> None:
    several = MuLaNConfig(audio=dataclasses.replace(AUDIO, depth=4), text=TEXT, latent=16).build(
        layers=1, biased=True
    )
    assert several.audio_layers == (2,) and several.text_layers == (1,)
    assert several.embed_text(TEXTS).shape == (
        3,
        2,
        16,
    ) and several.scale().shape == several.bias.shape == (2,)
    batch = examples(random_audio().float(), torch.tensor([3000, 2000, 500]))
    assert several.embed_media(batch).shape == (3, 2, 16)


@pytest.mark.parametrize("layers", [2, -1])
def test_too_many_layers_raise_an_error(layers: int) -> None:
    with pytest.raises(ValueError, match="tower has 2 block"):
        MuLaNConfig(audio=AUDIO, text=TEXT).build(layers=layers)


def test_towers_may_have_one_block() -> None:
    shallow = MuLaNConfig(
        audio=dataclasses.replace(AUDIO, depth=1), text=dataclasses.replace(TEXT, depth=1)
    ).build()
    assert shallow.get_text_latents(TEXTS).shape == (3, 128)


def test_the_scale_is_clamped_and_keeps_a_gradient(mulan: MuLaN) -> None:
    mulan.log_scale.data.fill_(9.0)
    assert mulan.scale().item() == pytest.approx(MAX_SCALE)
    mulan.clamp_scale()
    assert mulan.log_scale.item() == pytest.approx(math.log(MAX_SCALE))
    mulan.scale().sum().backward()
    assert mulan.log_scale.grad.item() > 0, "at the bound there is still a gradient"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patch": (5, 4)}, "cannot be divided into patches"),
        ({"hop": 0}, "hop must be at least 1"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"drop": 1.0}, "drop must be at least 0 and less than 1"),
    ],
)
def test_invalid_settings_raise_an_error(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(AUDIO, **settings)


def test_another_sampling_rate_raises_an_error_with_both_flags() -> None:
    with pytest.raises(
        ValueError, match="--data.rate-hz 8000, or --task.model.audio.rate-hz 16000"
    ):
        MuLaNConfig(audio=AUDIO).validate_data(AudioDataConfig(rate_hz=16000))


# ---- texts as token ids


def test_texts_of_token_ids_are_encoded_and_others_raise_errors() -> None:
    encoder = TokenIdTextConfig(vocab_size=20, dim=32, depth=1, heads=2, max_len=6).build()
    states = encoder(["3 4 5", "0", "7 7 7 7 7 7 7 7"])
    assert states.mask.sum(1).tolist() == [3, 1, 6] and (states.values[1, 1:] == 0).all()
    assert encoder.fits("3 4 5") and not encoder.fits("7 " * 7)
    encoder.prepare_text(["1 2", "", "19"])
    for wrong in ("1 20", "-1", "piano"):
        with pytest.raises(ValueError, match="token ids from 0 to 19"):
            encoder.prepare_text([wrong])
