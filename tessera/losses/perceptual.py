"""How different two images look to a network that has seen many: its features, compared depth by
depth.

The form is that of Zhang 2018 (arXiv 1801.03924, eq. 1) without its learnt weights for channels:
every channel counts the same. The numbers are therefore not LPIPS and are never to be called that;
they can be compared only with numbers of the same network (see its `fingerprint()`).

B examples, C channels, h and w places.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tessera.losses import to_fp32

NO_LENGTH = 1e-6
"""Added to the squared length of a feature vector: where all channels are silent there is no
direction, and without it no finite gradient."""


def perceptual_distance_B(features_a: Sequence[Tensor], features_b: Sequence[Tensor]) -> Tensor:
    """(B,): the squared distance of the directions of two feature vectors at one place, over places
    and depths.

    Between 0 (equal) and 4 (opposite), whatever the scale of a depth, so all depths are weighted
    alike.
    """
    shapes_a, shapes_b = (
        [tuple(feature.shape) for feature in side] for side in (features_a, features_b)
    )
    if shapes_a != shapes_b or not shapes_a:
        raise ValueError(
            f"Features of shapes {shapes_a} and {shapes_b} cannot be compared: take both from one network, for images "
            "of one size, at one depth or more."
        )
    return torch.stack([_at_one_depth_B(a, b) for a, b in zip(features_a, features_b)]).mean(0)


def _at_one_depth_B(a: Tensor, b: Tensor) -> Tensor:
    return (_directions(a) - _directions(b)).square().sum(1).mean((1, 2))


def _directions(feature_BChw: Tensor) -> Tensor:
    feature_BChw = to_fp32(feature_BChw)
    return feature_BChw * (feature_BChw.square().sum(1, keepdim=True) + NO_LENGTH).rsqrt()
