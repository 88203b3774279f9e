"""The perceptual distance of images: the distance of their features in a pretrained network.

It has the form of Zhang 2018 (arXiv 1801.03924, eq. 1) without the learned channel weights: all
channels have equal weight. The values are therefore not LPIPS and must not be reported as such, and
they are comparable only between runs with the same network (see its `fingerprint()`).

B examples, C channels, h and w height and width of a feature map.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.nn.precision import to_fp32

EPSILON = 1e-6
"""Added to the squared norm of a feature vector. Where all channels are zero there is no direction,
and without it no finite gradient."""


def perceptual_distance_B(features_a: Sequence[Tensor], features_b: Sequence[Tensor]) -> Tensor:
    """Return the mean squared distance of normalized feature vectors over pixels and layers, (B,).

    It is between 0 (equal) and 4 (opposite) for each layer, whatever its scale, so all layers have
    equal weight.
    """
    shapes_a, shapes_b = (
        [tuple(feature.shape) for feature in side] for side in (features_a, features_b)
    )
    if shapes_a != shapes_b or not shapes_a:
        raise ValueError(
            f"Features of shapes {shapes_a} and {shapes_b} cannot be compared: take both from one "
            "network, for images of one size, at one layer or more."
        )
    return torch.stack([_layer_distance_B(a, b) for a, b in zip(features_a, features_b)]).mean(0)


def _layer_distance_B(a: Tensor, b: Tensor) -> Tensor:
    return (_normalize(a) - _normalize(b)).square().sum(1).mean((1, 2))


def _normalize(feature_BChw: Tensor) -> Tensor:
    feature_BChw = to_fp32(feature_BChw)
    return feature_BChw * (feature_BChw.square().sum(1, keepdim=True) + EPSILON).rsqrt()
