"""What the tokenizer task has to know of meshes: what a good reconstruction is, and which network
there is.

A reconstruction says of each coordinate of each corner of each face how likely each bin is: (B, F,
C, bins), where C = 3 K coordinates of K corners. Meshes differ in how many faces they have; every
mesh counts the same, whatever stands beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tessera.engine.task import Batch, BestMetric
from tessera.losses.smoothed_cross_entropy import smoothed_cross_entropy
from tessera.modalities.mesh.autoencoder import MeshAutoencoderConfig, true_bins
from tessera.modalities.mesh.media import Mesh, tidy
from tessera.modalities.mesh.polygons import has_area
from tessera.objectives.reconstruction import ReconstructionLoss, TokenizerConfig


@dataclass(frozen=True, kw_only=True)
class MeshReconstructionConfig:
    smoothing: float = 0.4
    """How far the loss spreads the true bin over its neighbours: the sigma of a Gaussian, in bins.
    0: not at all."""

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < math.inf:
            raise ValueError(
                f"`smoothing` is a width in bins, 0 or more, but it is {self.smoothing}."
            )

    def validate_data(self, data: Any) -> None:
        """Meshes of any size can be measured."""

    def notice(self) -> str:
        return ""

    def for_inference(self) -> MeshReconstructionConfig:
        return self

    def build(self) -> MeshReconstructionLoss:
        return MeshReconstructionLoss(self)


class MeshReconstructionLoss(ReconstructionLoss):
    best_metric = BestMetric(metric="triangle_accuracy")

    def __init__(self, config: MeshReconstructionConfig):
        super().__init__()
        self.config = config

    def target(self, examples: Any) -> Any:
        return examples

    def preprocess(self, target: Any, data: Any, dtype: torch.dtype) -> Any:
        """Meshes are whole numbers, and have been brought to as many bins by their source."""
        return target

    def media(self, output: Tensor) -> list[Mesh]:
        """The likeliest mesh each: corners at the same place become one vertex, and a face of no
        extent is no face."""
        return [mesh_of(bins_FC, output.shape[-1]) for bins_FC in output.argmax(-1).cpu().numpy()]

    def terms(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {
            "coordinates": smoothed_cross_entropy(
                output, true_bins(batch.examples), self.config.smoothing
            )
        }

    def eval_step(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Coordinates and whole faces that are right, and how far corners are from where they
        should be."""
        guessed_BFC, true_BFC = output.argmax(-1), true_bins(batch.examples)
        real_BF, right_BFC = true_BFC[..., 0] >= 0, guessed_BFC == true_BFC
        faces_B = real_BF.sum(1)
        pairs = zip(guessed_BFC, true_BFC, real_BF, strict=True)
        return {
            "coordinates": (
                (right_BFC & real_BF[..., None]).sum((1, 2)) / (faces_B * true_BFC.shape[2])
            )
            .double()
            .sum(),
            "triangles": ((right_BFC.all(2) & real_BF).sum(1) / faces_B).double().sum(),
            "chamfer": torch.stack(
                [chamfer(guessed[real], true[real]) for guessed, true, real in pairs]
            )
            .double()
            .sum(),
        }

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {
            "triangle_accuracy": float(totals["triangles"] / totals["examples"]),
            "coordinate_accuracy": float(totals["coordinates"] / totals["examples"]),
            "chamfer_bins": float(totals["chamfer"] / totals["examples"]),
        }

    def shown(self, output: Tensor, batch: Batch) -> list[Mesh]:
        """Each original beside its reconstruction."""
        bins = output.shape[-1]
        pairs = zip(
            true_bins(batch.examples),
            output.argmax(-1),
            batch.examples.face_counts.tolist(),
            strict=True,
        )
        return [
            Mesh.beside(*(mesh_of(one[:count].cpu().numpy(), bins) for one in pair))
            for *pair, count in pairs
        ]


def mesh_of(bins_FC: np.ndarray, bins: int) -> Mesh:
    """Faces as bins of their coordinates, in a cube with a side of 1; those whose corners lie on a
    line are none."""
    steps = bins_FC.reshape(-1, 3)
    faces = np.arange(len(steps)).reshape(len(bins_FC), bins_FC.shape[1] // 3)
    return Mesh(*tidy(steps / (bins - 1) - 0.5, faces[has_area(steps, faces)]))


def chamfer(guessed_FC: Tensor, true_FC: Tensor) -> Tensor:
    """How far, in bins, a corner of either is from the nearest of the other: the mean over both."""
    guessed, true = (
        bins_FC.reshape(-1, 3).double().unique(dim=0) for bins_FC in (guessed_FC, true_FC)
    )
    apart = torch.cdist(guessed, true)
    return (apart.min(0).values.mean() + apart.min(1).values.mean()) / 2


@dataclass(frozen=True, kw_only=True)
class MeshTokenizerConfig(TokenizerConfig):
    model: MeshAutoencoderConfig = field(default_factory=MeshAutoencoderConfig)
    reconstruction: MeshReconstructionConfig = field(default_factory=MeshReconstructionConfig)
    adversary: None = None
    """Nobody judges meshes: whether a corner is right can be counted."""
