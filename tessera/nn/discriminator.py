"""What the discriminators of all modalities have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, nn

LEAKY_SLOPE = 0.2
"""Negative slope of the leaky ReLUs."""


@dataclass
class DiscriminatorOutput:
    """Logits and the intermediate features that feature matching compares."""

    logits: Tensor
    """High where the input is classified as real."""
    features: list[Tensor]
    """(B, C, ...) of every layer, always in the same order."""


def run_layers(layers: Iterable[nn.Module], head: nn.Module, x: Tensor) -> DiscriminatorOutput:
    """Apply the layers in order and then the head that computes the logits."""
    features = []
    for layer in layers:
        x = layer(x)
        features.append(x)
    return DiscriminatorOutput(head(x), features)
