"""Discriminators of audio: outputs of equal weight, independent examples, and what each detects."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.losses.adversarial import (
    feature_matching_B,
    gradient_penalty,
    hinge_discriminator,
    non_saturating_discriminator,
)
from tessera.modalities.audio.discriminators import (
    AudioDiscriminator,
    BandDiscriminatorConfig,
    PeriodDiscriminatorConfig,
    ScaleDiscriminatorConfig,
)
from tessera.run.config import decode, encode

SMALL: dict[str, Any] = {
    "periods": PeriodDiscriminatorConfig(periods=(2, 3), dim=4, max_channels=16, layers=2),
    "scales": ScaleDiscriminatorConfig(scales=(1, 2), dim=4, max_channels=16, layers=2),
    "bands": BandDiscriminatorConfig(windows=(128, 64), bands=(0.25, 0.5), dim=4, layers=2),
}
every_kind = pytest.mark.parametrize("kind", SMALL)


def build_discriminator(kind: str) -> AudioDiscriminator:
    torch.manual_seed(0)
    return SMALL[kind].build()


def random_audio(count: int = 2, samples: int = 600) -> Tensor:
    return torch.rand(count, 1, samples) * 2 - 1


@every_kind
@pytest.mark.parametrize("samples", [1, 50, 599, 600])
def test_audio_of_any_length_gives_several_logits(kind, samples):
    discriminator, batch = build_discriminator(kind), random_audio(2, samples)
    output = discriminator.discriminate(batch)
    assert output.logits.shape[0] == 2 and output.logits.ndim == 2
    assert output.logits.isfinite().all()
    assert torch.equal(discriminator(batch), output.logits)
    assert all(feature.shape[0] == 2 and feature.ndim == 4 for feature in output.features)


@pytest.mark.parametrize(
    ("kind", "layers"), [("periods", 2 * 3), ("scales", 2 * 4), ("bands", 2 * 3 * 4)]
)
def test_every_layer_of_every_network_gives_a_feature(kind, layers):
    assert len(build_discriminator(kind).discriminate(random_audio()).features) == layers


@pytest.mark.parametrize(
    "config", [PeriodDiscriminatorConfig, ScaleDiscriminatorConfig, BandDiscriminatorConfig]
)
def test_networks_have_about_the_same_number_of_logits(config):
    discriminator, audio = config(dim=1).build(), random_audio(1, 16000)
    counts = [network(audio).logits.shape[1] for network in discriminator.networks]
    assert max(counts) < 1.1 * min(counts)


@every_kind
def test_every_parameter_has_a_gradient(kind):
    discriminator = build_discriminator(kind)
    discriminator(random_audio()).square().mean().backward()
    for name, parameter in discriminator.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@every_kind
def test_examples_of_a_batch_are_independent(kind):
    discriminator, batch = build_discriminator(kind), random_audio(4)
    single = discriminator(batch[2:3])
    torch.testing.assert_close(discriminator(batch)[2:3], single, rtol=1e-4, atol=1e-5)


@every_kind
def test_four_micro_batches_equal_one_batch_with_gradient_penalty(kind):
    discriminator = build_discriminator(kind).double()
    real, fake = random_audio(8, 200).double(), random_audio(8, 200).double()

    def gradients(num_parts: int) -> list[Tensor]:
        discriminator.zero_grad()
        for real_part, fake_part in zip(real.chunk(num_parts), fake.chunk(num_parts)):
            loss = non_saturating_discriminator(discriminator(real_part), discriminator(fake_part))
            penalty = gradient_penalty(discriminator, real_part)
            ((loss + 10 * penalty) / num_parts).backward()
        return [parameter.grad.clone() for parameter in discriminator.parameters()]

    for micro, whole in zip(gradients(4), gradients(1)):
        torch.testing.assert_close(micro, whole, rtol=0, atol=1e-10)
        assert whole.abs().max() > 0


@every_kind
def test_initial_logits_are_small_but_not_zero(kind):
    with torch.no_grad():
        logits = build_discriminator(kind)(0.3 * torch.randn(8, 1, 1000))
    assert 0.02 < logits.square().mean().sqrt() < 2


@every_kind
def test_training_separates_tones_from_tones_with_noise(kind):
    discriminator = build_discriminator(kind)
    optimizer = torch.optim.Adam(discriminator.parameters(), lr=5e-3)
    time = torch.arange(400) / 8000
    for _ in range(40):
        tone = 0.5 * torch.sin(2 * math.pi * (100 + 200 * torch.rand(8, 1, 1)) * time)
        real, fake = discriminator(tone), discriminator(tone + 0.1 * torch.randn_like(tone))
        optimizer.zero_grad()
        hinge_discriminator(real, fake).backward()
        optimizer.step()
    assert (real.mean(1) > fake.mean(1)).all()


@every_kind
def test_feature_matching_moves_a_fake_towards_the_real_audio(kind):
    discriminator, real = build_discriminator(kind), 0.3 * torch.randn(1, 1, 300)
    fake = (0.3 * torch.randn(1, 1, 300)).requires_grad_()
    optimizer = torch.optim.Adam([fake], lr=0.02)
    distance = (fake - real).abs().mean().item()
    features = discriminator.discriminate(real).features
    for _ in range(60):
        optimizer.zero_grad()
        feature_matching_B(features, discriminator.discriminate(fake).features).sum().backward()
        optimizer.step()
    assert (fake - real).abs().mean() < 0.7 * distance


def test_periodic_audio_is_constant_along_the_rows_of_its_period():
    discriminator = PeriodDiscriminatorConfig(periods=(3,), dim=4, max_channels=4, layers=1).build()
    periodic = torch.randn(1, 1, 3).repeat(1, 1, 40)
    first = discriminator.discriminate(periodic).features[0]
    assert first.shape == (1, 4, 14, 3)
    torch.testing.assert_close(first[:, :, 1:-1], first[:, :, 1:2].expand(-1, -1, 12, -1))


def test_the_band_discriminator_is_sensitive_to_phase():
    discriminator = build_discriminator("bands")
    time = torch.arange(600) / 8000
    sine, cosine = (
        torch.sin(2 * math.pi * 500 * time + phase)[None, None] for phase in (0.0, math.pi / 2)
    )
    assert (discriminator(sine) - discriminator(cosine)).abs().max() > 1e-3


def test_each_band_has_its_own_layers():
    network = (
        BandDiscriminatorConfig(windows=(64,), bands=(0.5,), dim=4, layers=1).build().networks[0]
    )
    time = torch.arange(640) / 8000
    low, high = (0.5 * torch.sin(2 * math.pi * hertz * time)[None, None] for hertz in (500, 3500))
    levels = [
        [
            band.abs().mean().item()
            for band in network.spectrogram(tone).split(network.band_sizes, dim=3)
        ]
        for tone in (low, high)
    ]
    assert levels[0][0] > 10 * levels[0][1] and levels[1][1] > 10 * levels[1][0]
    assert sum(network.band_sizes) == 33 and len(network.bands) == 2


@every_kind
def test_bfloat16_autocast_is_close_to_float32(kind):
    discriminator, batch = build_discriminator(kind), random_audio()
    with torch.no_grad():
        full = discriminator(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = discriminator(batch)
    assert (half.float() - full).abs().mean() < 0.1 * full.abs().mean() + 0.01


@every_kind
def test_the_configuration_survives_json(kind):
    assert decode(type(SMALL[kind]), encode(SMALL[kind])) == SMALL[kind]


@every_kind
@pytest.mark.parametrize("shape", [(2, 600), (2, 2, 600), (2, 1, 0)])
def test_other_shapes_than_batches_of_audio_give_an_error(kind, shape):
    with pytest.raises(ValueError, match=r"shape \(batch, 1, samples\)"):
        build_discriminator(kind)(torch.zeros(shape))


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (PeriodDiscriminatorConfig, {"periods": ()}, "periods must be one or more"),
        (PeriodDiscriminatorConfig, {"layers": 0}, "layers 0"),
        (ScaleDiscriminatorConfig, {"scales": (1, 0)}, "scales must be one or more"),
        (ScaleDiscriminatorConfig, {"dim": 0}, "dim 0"),
        (BandDiscriminatorConfig, {"windows": (16,)}, "windows must be .* at least 64"),
        (BandDiscriminatorConfig, {"bands": (0.5, 0.25)}, "increasing"),
        (
            BandDiscriminatorConfig,
            {"windows": (64,), "bands": (0.01,)},
            "fewer bands or longer windows",
        ),
    ],
)
def test_invalid_settings_give_an_error(config, settings, message):
    with pytest.raises(ValueError, match=message):
        config(**settings)
