"""The judges of sound: each kind hears what it is for, its networks count alike, and examples do
not see each other."""

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
every_judge = pytest.mark.parametrize("kind", SMALL)


def built(kind: str) -> AudioDiscriminator:
    torch.manual_seed(0)
    return SMALL[kind].build()


def sounds(count: int = 2, samples: int = 600) -> Tensor:
    return torch.rand(count, 1, samples) * 2 - 1


@every_judge
@pytest.mark.parametrize("samples", [1, 50, 599, 600])
def test_sounds_of_any_length_are_judged_at_many_places(kind, samples):
    judge, batch = built(kind), sounds(2, samples)
    discriminate = judge.discriminate(batch)
    assert (
        discriminate.logits.shape[0] == 2
        and discriminate.logits.ndim == 2
        and discriminate.logits.isfinite().all()
    )
    assert torch.equal(judge(batch), discriminate.logits)
    assert all(feature.shape[0] == 2 and feature.ndim == 4 for feature in discriminate.features)


@pytest.mark.parametrize(
    ("kind", "layers"), [("periods", 2 * 3), ("scales", 2 * 4), ("bands", 2 * 3 * 4)]
)
def test_every_layer_of_every_network_gives_a_feature(kind, layers):
    assert len(built(kind).discriminate(sounds()).features) == layers


@pytest.mark.parametrize(
    "kind", [PeriodDiscriminatorConfig, ScaleDiscriminatorConfig, BandDiscriminatorConfig]
)
def test_in_a_mean_over_logits_its_networks_count_alike(kind):
    judge, second = kind(dim=1).build(), sounds(1, 16000)
    counts = [network(second).logits.shape[1] for network in judge.networks]
    assert max(counts) < 1.1 * min(counts)


@every_judge
def test_every_parameter_takes_part(kind):
    judge = built(kind)
    judge(sounds()).square().mean().backward()
    for name, parameter in judge.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


@every_judge
def test_examples_do_not_see_each_other(kind):
    judge, batch = built(kind), sounds(4)
    torch.testing.assert_close(judge(batch)[2:3], judge(batch[2:3]), rtol=1e-4, atol=1e-5)


@every_judge
def test_four_micro_batches_are_one_batch_penalty_included(kind):
    judge, real, fake = built(kind).double(), sounds(8, 200).double(), sounds(8, 200).double()

    def gradients(parts: int) -> list[Tensor]:
        judge.zero_grad()
        for some_real, some_fake in zip(real.chunk(parts), fake.chunk(parts)):
            told_apart = non_saturating_discriminator(judge(some_real), judge(some_fake))
            ((told_apart + 10 * gradient_penalty(judge, some_real)) / parts).backward()
        return [parameter.grad.clone() for parameter in judge.parameters()]

    for micro, whole in zip(gradients(4), gradients(1)):
        torch.testing.assert_close(micro, whole, rtol=0, atol=1e-10)
        assert whole.abs().max() > 0


@every_judge
def test_logits_start_small_and_alive_for_sounds_of_usual_loudness(kind):
    with torch.no_grad():
        logits = built(kind)(0.3 * torch.randn(8, 1, 1000))
    assert 0.02 < logits.square().mean().sqrt() < 2


@every_judge
def test_it_learns_to_tell_a_hum_from_the_same_hum_with_hiss(kind):
    judge = built(kind)
    optimizer = torch.optim.Adam(judge.parameters(), lr=5e-3)
    time = torch.arange(400) / 8000
    for _ in range(40):
        hum = 0.5 * torch.sin(2 * math.pi * (100 + 200 * torch.rand(8, 1, 1)) * time)
        real, fake = judge(hum), judge(hum + 0.1 * torch.randn_like(hum))
        optimizer.zero_grad()
        hinge_discriminator(real, fake).backward()
        optimizer.step()
    assert (real.mean(1) > fake.mean(1)).all()


@every_judge
def test_its_features_lead_a_fake_towards_the_real(kind):
    judge, real = built(kind), 0.3 * torch.randn(1, 1, 300)
    fake = (0.3 * torch.randn(1, 1, 300)).requires_grad_()
    optimizer = torch.optim.Adam([fake], lr=0.02)
    away = (fake - real).abs().mean().item()
    seen = judge.discriminate(real).features
    for _ in range(60):
        optimizer.zero_grad()
        feature_matching_B(seen, judge.discriminate(fake).features).sum().backward()
        optimizer.step()
    assert (fake - real).abs().mean() < 0.7 * away


def test_a_judge_of_periods_sees_them_as_rows():
    """What repeats every three samples is constant along the rows of period 3: the first layer says
    the same all along."""
    judge = PeriodDiscriminatorConfig(periods=(3,), dim=4, max_channels=4, layers=1).build()
    repeating = torch.randn(1, 1, 3).repeat(1, 1, 40)
    first = judge.discriminate(repeating).features[0]
    assert first.shape == (1, 4, 14, 3)
    torch.testing.assert_close(first[:, :, 1:-1], first[:, :, 1:2].expand(-1, -1, 12, -1))


def test_a_judge_of_bands_knows_two_phases_of_one_tone_apart():
    judge = built("bands")
    time = torch.arange(600) / 8000
    sine, cosine = (
        torch.sin(2 * math.pi * 500 * time + phase)[None, None] for phase in (0.0, math.pi / 2)
    )
    assert (judge(sine) - judge(cosine)).abs().max() > 1e-3


def test_each_band_is_heard_by_layers_of_its_own():
    network = (
        BandDiscriminatorConfig(windows=(64,), bands=(0.5,), dim=4, layers=1).build().networks[0]
    )
    time = torch.arange(640) / 8000
    low, high = (0.5 * torch.sin(2 * math.pi * hertz * time)[None, None] for hertz in (500, 3500))
    strengths = [
        [part.abs().mean().item() for part in network.spectrum(tone).split(network.sizes, 3)]
        for tone in (low, high)
    ]
    assert strengths[0][0] > 10 * strengths[0][1] and strengths[1][1] > 10 * strengths[1][0]
    assert sum(network.sizes) == 33 and len(network.bands) == 2


@every_judge
def test_in_half_precision_it_comes_near(kind):
    judge, batch = built(kind), sounds()
    with torch.no_grad():
        whole = judge(batch)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = judge(batch)
    assert (half.float() - whole).abs().mean() < 0.1 * whole.abs().mean() + 0.01


@every_judge
def test_its_configuration_survives_json(kind):
    assert decode(type(SMALL[kind]), encode(SMALL[kind])) == SMALL[kind]


@every_judge
@pytest.mark.parametrize("shape", [(2, 600), (2, 2, 600), (2, 1, 0)])
def test_what_is_no_sound_is_refused(kind, shape):
    with pytest.raises(ValueError, match=r"judges \(B, 1, N\)"):
        built(kind)(torch.zeros(shape))


@pytest.mark.parametrize(
    ("config", "settings", "letter"),
    [
        (PeriodDiscriminatorConfig, {"periods": ()}, "one or more periods"),
        (PeriodDiscriminatorConfig, {"layers": 0}, "layers 0"),
        (ScaleDiscriminatorConfig, {"scales": (1, 0)}, "one or more scales"),
        (ScaleDiscriminatorConfig, {"dim": 0}, "dim 0"),
        (BandDiscriminatorConfig, {"windows": (16,)}, "windows of 64 or more"),
        (BandDiscriminatorConfig, {"bands": (0.5, 0.25)}, "rising"),
        (
            BandDiscriminatorConfig,
            {"windows": (64,), "bands": (0.01,)},
            "fewer bands or longer windows",
        ),
    ],
)
def test_a_judge_that_cannot_be_is_refused(config, settings, letter):
    with pytest.raises(ValueError, match=letter):
        config(**settings)
