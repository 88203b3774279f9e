"""The network of SoundStream: its layers and its settings."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tessera.modalities.audio.causal_conv import CausalConv1d
from tessera.modalities.audio.soundstream import CausalConvTranspose1d, Snake, SoundStreamConfig
from tessera.nn.causal_conv import StreamingState
from tests.modalities.audio.test_codec import SOUNDSTREAM, build_codec, random_audio


def test_default_sizes():
    assert SoundStreamConfig().hop == 320
    assert SoundStreamConfig().stage_channels == [32, 64, 128, 256, 512]


def test_plain_stages_have_no_residual_units():
    def count_parameters(**settings: Any) -> int:
        return sum(parameter.numel() for parameter in build_codec(**settings).parameters())

    sizes = [count_parameters(plain_stages=stages) for stages in (0, 1, 2)]
    assert sizes[0] > sizes[1] > sizes[2] == count_parameters(dilations=())


def test_upsampling_equals_a_transposed_convolution_of_twice_the_stride():
    layer, x = CausalConvTranspose1d(3, 2, 5).double(), torch.randn(2, 4, 3, dtype=torch.float64)
    weight, bias = layer.conv.weight.detach()[:, :, 0], layer.conv.conv.bias.detach()
    current, previous = (weight[:, :, tap].unflatten(0, (5, 2)).permute(2, 1, 0) for tap in (1, 0))
    kernel = torch.cat([current, previous], dim=2)
    expected = F.conv_transpose1d(x.mT, kernel, stride=5)[..., :20].mT
    torch.testing.assert_close(layer(x, StreamingState()), expected + bias.view(5, 2).repeat(4, 1))


def test_downsampling_equals_a_left_padded_strided_convolution():
    layer, x = CausalConv1d(1, 1, 4, stride=2).double(), random_audio(8).mT
    weight, bias = layer.weight.detach()[:, :, 0], layer.conv.bias.detach()
    expected = F.conv1d(F.pad(x.mT, (2, 0)), weight, bias, stride=2).mT
    torch.testing.assert_close(layer(x, StreamingState()), expected)


def test_snake_is_monotonic_with_a_period_per_channel():
    snake = Snake(2).double()
    x = torch.linspace(-9, 9, 400, dtype=torch.float64)[:, None].repeat(1, 2)
    with torch.no_grad():
        snake.log_frequency.copy_(torch.tensor([0.0, math.log(2)]))
        y = snake(x, StreamingState())
        assert (y.diff(dim=0) > -1e-9).all()
        torch.testing.assert_close(
            snake(x + math.pi / 2, StreamingState())[:, 1], y[:, 1] + math.pi / 2
        )
        half = torch.full((1, 2), math.pi / 4, dtype=torch.float64)
        torch.testing.assert_close(
            snake(half, StreamingState()) - half, torch.tensor([[0.5, 0.5]], dtype=torch.float64)
        )


def test_initialization_preserves_the_signal_level():
    torch.manual_seed(0)
    model = SoundStreamConfig(dim=16, max_channels=64).build()
    audio = 0.1 * torch.randn(2, 1, 3200)
    with torch.no_grad():
        latent = model.encode_latent(audio)
        levels = [x.square().mean().sqrt().item() for x in (latent, model.decode_latent(latent))]
    assert all(0.02 < level < 0.5 for level in levels), levels


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strides": ()}, "such as 2 4 5 8"),
        ({"strides": (2, 0)}, "at least 1"),
        ({"dilations": (1, 0)}, "1 3 9"),
        ({"dim": 0}, "dim must be at least 1, but got 0"),
        ({"max_channels": 0}, "max_channels must be at least 1, but got 0"),
        ({"plain_stages": 3}, "0 to 2"),
    ],
)
def test_invalid_settings_give_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        replace(SOUNDSTREAM, **settings)
