"""The two towers: nothing beside a clip or a text changes it, what is drawn is the example's own,
and nothing is drawn in use."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from tessera.modalities.music.mulan import LARGEST_SCALE, MuLaN, MuLaNConfig
from tessera.modalities.music.spectrogram_transformer import (
    CENTRE,
    SILENCE,
    Heard,
    SpecAugmentConfig,
    SpectrogramTransformerConfig,
    augmented,
    hidden,
    some_of,
    stretched,
)
from tessera.text.encoder import LearnedTextConfig
from tessera.text.token_ids import TokenIdTextConfig

AUDIO = SpectrogramTransformerConfig(
    rate_hz=8000, window=256, hop=64, bands=16, patch=(8, 4), width=32, depth=2, heads=2
)
TEXT = LearnedTextConfig(width=32, depth=2, heads=2, tokens=300)
TEXTS = ["a slow tune", "drums", "something quick, loud and rather long, to be read to its end"]


@pytest.fixture
def mulan() -> MuLaN:
    torch.manual_seed(3)
    model = MuLaNConfig(audio=AUDIO, text=TEXT, latent=16).build().double()
    for parameter in model.parameters():  # parts that start as nothing would hide what they do
        torch.nn.init.normal_(parameter, std=0.2) if parameter.ndim > 1 else None
    return model.eval()


def clips(count: int = 3, samples: int = 3000) -> torch.Tensor:
    return torch.randn(count, samples, dtype=torch.float64).clamp(-3, 3) / 3


def examples(samples: torch.Tensor, lengths: torch.Tensor) -> SimpleNamespace:
    return SimpleNamespace(samples=samples.unsqueeze(1), lengths=lengths)


def chances(*seeds: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed) for seed in seeds]


# ---- what is beside it


@pytest.mark.parametrize("length", [1, 64, 700, 1024, 2999])
def test_silence_after_a_clip_changes_nothing(mulan: MuLaN, length: int) -> None:
    sound = clips(1, length)
    padded = torch.cat([sound, torch.zeros(1, 3000 - length, dtype=torch.float64)], dim=1)
    alone = mulan.get_audio_latents(sound)
    in_company = mulan.get_audio_latents(
        torch.cat([padded, clips(2)]), torch.tensor([length, 3000, 3000])
    )
    assert torch.allclose(alone[0], in_company[0], atol=1e-12)
    assert not torch.allclose(alone[0], in_company[1], atol=1e-3)


def test_what_stands_after_the_real_samples_is_not_heard(mulan: MuLaN) -> None:
    """Not even by the last real frame's window: that much of what follows must be silent, and
    `collate` sees to it."""
    sound = clips(1)
    sound[:, 1024:] = 0
    other = sound.clone()
    other[:, 1024 + AUDIO.window :] = clips(1)[:, 1024 + AUDIO.window :]
    lengths = torch.tensor([1024])
    assert torch.equal(
        mulan.get_audio_latents(sound, lengths), mulan.get_audio_latents(other, lengths)
    )


def test_a_longer_text_beside_it_changes_nothing(mulan: MuLaN) -> None:
    together = mulan.train().get_text_latents(TEXTS)
    for text, point in zip(TEXTS, together, strict=True):
        assert torch.allclose(mulan.get_text_latents([text])[0], point, atol=1e-12)


def test_points_lie_on_the_sphere_and_similarity_is_their_cosine(mulan: MuLaN) -> None:
    sound, text = mulan.get_audio_latents(clips()), mulan.get_text_latents(TEXTS)
    assert sound.shape == text.shape == (3, 16)
    assert torch.allclose(sound.norm(dim=1), torch.ones(3).double()) and torch.allclose(
        text.norm(dim=1), torch.ones(3).double()
    )
    again = clips()
    assert torch.allclose(mulan.similarity(again, TEXTS), mulan.get_audio_latents(again) @ text.T)


def test_clips_of_several_channels_are_refused(mulan: MuLaN) -> None:
    with pytest.raises(ValueError, match="one channel, but these are"):
        mulan.get_audio_latents(clips().reshape(1, 3, -1))


def test_loudness_is_heard(mulan: MuLaN) -> None:
    sound = clips()
    assert not torch.allclose(
        mulan.get_audio_latents(sound), mulan.get_audio_latents(sound / 30), atol=1e-2
    )


# ---- what is drawn


def test_in_use_nothing_is_left_out_and_in_training_something_is(mulan: MuLaN) -> None:
    batch = examples(clips(), torch.tensor([3000, 2000, 500]))
    used = mulan.first(batch, chances(1, 2, 3))
    assert torch.equal(used, mulan.first(batch))
    learnt = mulan.train().first(batch, chances(1, 2, 3))
    assert not torch.allclose(learnt, used, atol=1e-3)
    assert torch.equal(mulan.first(batch, None), used), "without generators nothing is drawn"


def test_what_is_drawn_for_a_clip_is_its_own_whoever_is_beside_it(mulan: MuLaN) -> None:
    sounds, lengths = clips(), torch.tensor([3000, 2000, 500])
    together = mulan.train().first(examples(sounds, lengths), chances(1, 2, 3))
    for i in range(3):
        alone = mulan.first(examples(sounds[i : i + 1], lengths[i : i + 1]), chances(i + 1))
        assert torch.allclose(alone[0], together[i], atol=1e-12)


def picture(frames: int = 40, real: int = 40, bands: int = 16) -> Heard:
    ramp = torch.arange(frames, dtype=torch.float64).expand(1, bands, frames)
    return Heard(ramp.masked_fill(torch.arange(frames) >= real, SILENCE), torch.tensor([real]))


def test_a_clip_is_really_stretched() -> None:
    faster = stretched(picture(), torch.tensor([1.25], dtype=torch.float64))
    assert faster.frames_B.tolist() == [32] and torch.allclose(
        faster.spectrum_BMF[0, 0, :32], torch.arange(32).double() * 1.25
    )
    assert (faster.spectrum_BMF[0, :, 32:] == SILENCE).all()
    slower = stretched(picture(real=20), torch.tensor([0.8], dtype=torch.float64))
    assert slower.frames_B.tolist() == [25] and torch.allclose(
        slower.spectrum_BMF[0, 0, :24], torch.arange(24).double() * 0.8
    )


def test_masks_hide_a_share_of_bands_and_of_what_is_real() -> None:
    shares = []
    for seed in range(200):
        found = augmented(
            picture(real=30),
            SpecAugmentConfig(stretch=0, band_masks=0, time_share=0.5),
            chances(seed),
        )
        hides = (found.spectrum_BMF[0] == CENTRE).all(0)
        assert not hides[30:].any()
        shares.append(float(hides.sum()) / 30)
    assert 0 < sum(shares) / 200 < 0.3 and 0.4 < max(shares) <= 0.5, "never all of a clip"
    settings = SpecAugmentConfig(stretch=0, time_masks=0, band_share=0.5)
    bands = [
        int((augmented(picture(), settings, chances(seed)).spectrum_BMF[0] == CENTRE).all(1).sum())
        for seed in range(200)
    ]
    assert max(bands) in (7, 8) and min(bands) == 0


def test_a_mask_lies_within_what_is_real() -> None:
    drawn = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    assert hidden(torch.tensor([10, 10]), 12, 0.3, drawn).int().tolist() == [
        [0] * 7 + [1] * 3 + [0] * 2,
        [1] * 3 + [0] * 9,
    ]


def test_of_each_clip_its_share_of_patches_is_kept() -> None:
    kept, real = some_of(torch.tensor([40, 8, 1]), 0.25, chances(1, 2, 3))
    assert real.tolist() == [30, 6, 1] and kept.shape == (3, 30)
    assert len(set(kept[1, :6].tolist())) == 6 and kept[1, :6].max() < 8


# ---- settings


def test_points_of_layers_before_the_last(mulan: MuLaN) -> None:
    several = MuLaNConfig(audio=dataclasses.replace(AUDIO, depth=4), text=TEXT, latent=16).build(
        layers=1, biased=True
    )
    assert several.audio_layers == (2,) and several.text_layers == (1,)
    assert several.second(TEXTS).shape == (
        3,
        2,
        16,
    ) and several.scale().shape == several.bias.shape == (2,)
    batch = examples(clips().float(), torch.tensor([3000, 2000, 500]))
    assert several.first(batch).shape == (3, 2, 16)


@pytest.mark.parametrize("layers", [2, -1])
def test_more_layers_than_there_are_is_refused(layers: int) -> None:
    with pytest.raises(ValueError, match="tower has 2 block"):
        MuLaNConfig(audio=AUDIO, text=TEXT).build(layers=layers)


def test_towers_of_one_block_work() -> None:
    shallow = MuLaNConfig(
        audio=dataclasses.replace(AUDIO, depth=1), text=dataclasses.replace(TEXT, depth=1)
    ).build()
    assert shallow.get_text_latents(TEXTS).shape == (3, 128)


def test_the_scale_is_held_and_comes_back(mulan: MuLaN) -> None:
    mulan.log_scale.data.fill_(9.0)
    assert mulan.scale().item() == pytest.approx(LARGEST_SCALE)
    mulan.hold_scale()
    assert mulan.log_scale.item() == pytest.approx(math.log(LARGEST_SCALE))
    mulan.scale().sum().backward()
    assert mulan.log_scale.grad.item() > 0, "at its bound it still feels what would lead it back"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"patch": (5, 4)}, "cannot be cut into patches"),
        ({"hop": 0}, "A hop is at least 1 sample"),
        ({"depth": 0}, "at least 1 block"),
        ({"drop": 1.0}, "drop is a share"),
    ],
)
def test_wrong_settings_are_refused(settings: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(AUDIO, **settings)


def test_data_at_another_rate_is_refused_with_both_flags() -> None:
    with pytest.raises(
        ValueError, match="--data.rate-hz 8000, or --task.model.audio.rate-hz 16000"
    ):
        MuLaNConfig(audio=AUDIO).validate_data(SimpleNamespace(rate_hz=16000))


# ---- texts that come as numbers


def test_texts_that_come_as_numbers_are_read_and_others_refused() -> None:
    reader = TokenIdTextConfig(tokens=20, width=32, depth=1, heads=2, max_len=6).build()
    states = reader(["3 4 5", "0", "7 7 7 7 7 7 7 7"])
    assert states.mask.sum(1).tolist() == [3, 1, 6] and (states.values[1, 1:] == 0).all()
    assert reader.fits("3 4 5") and not reader.fits("7 " * 7)
    reader.meet(["1 2", "", "19"])
    for wrong in ("1 20", "-1", "piano"):
        with pytest.raises(ValueError, match="reads numbers from 0 to 19"):
            reader.meet([wrong])
