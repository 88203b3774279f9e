"""Initialization of layers: signal-preserving weights, and residual branches that start at zero."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

Layer = TypeVar("Layer", bound=nn.Module)


def zero_init_(layer: Layer) -> Layer:
    """Set all parameters of a layer to zero and return it.

    For the last layer of a residual branch, so that the block is the identity at the start of
    training.
    """
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def init_fan_in_(layer: nn.Conv2d | nn.Conv3d | nn.Linear, gain: float) -> None:
    """Initialize a layer so that its output has `gain` times the scale of its input, at any depth.

    Weights are normal with standard deviation gain / sqrt(fan-in) (He 2015, arXiv 1502.01852,
    section 2.2) and the bias is zero. With torch's default initialization, under which the signal
    fades from layer to layer, a video tokenizer was 1.4 dB behind after 100 steps (four synthetic
    videos of 5 x 32 x 32, squared error, unquantized, one seed).
    """
    nn.init.normal_(layer.weight, std=gain * layer.weight[0].numel() ** -0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
