"""Reconstruction of meshes: adapter, loss and metrics of the tokenizer objective.

The model's output are logits over bins for each coordinate of each corner of each face: (B, F, C,
bins), with C = 3 K coordinates of K corners. Meshes differ in their number of faces, and all meshes
count the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tessera.engine.task import Batch, BestMetric
from tessera.losses.smoothed_cross_entropy import smoothed_cross_entropy
from tessera.modalities.mesh.autoencoder import (
    FaceGraph,
    MeshAutoencoderConfig,
    build_graph,
    target_bins,
)
from tessera.modalities.mesh.canonical import MeshBatch
from tessera.modalities.mesh.grid_report import describe_training_grid
from tessera.modalities.mesh.media import Mesh, clean_mesh
from tessera.modalities.mesh.polygons import has_area
from tessera.objectives.reconstruction import (
    MediaAdapter,
    ReconstructionConfig,
    ReconstructionLoss,
    TokenizerConfig,
)

if TYPE_CHECKING:
    from tessera.modalities.mesh.dataset import MeshDataConfig


class MeshAdapter(MediaAdapter):
    takes_tensors = False

    def target(self, examples: MeshBatch) -> MeshBatch:
        return examples

    def prepare_inputs(self, examples: MeshBatch) -> dict[str, FaceGraph]:
        """Build the graph on the CPU, which knows the number of faces and edges."""
        return {"graph": build_graph(examples)}

    def preprocess(self, target: MeshBatch, data: MeshDataConfig, dtype: torch.dtype) -> MeshBatch:
        """Meshes are integers that the dataset has quantised already."""
        return target

    def num_bytes(self, examples: MeshBatch) -> int:
        """Return the size of the corners of all faces as 32-bit floats."""
        return 4 * target_bins(examples).shape[2] * int(examples.face_counts.sum())

    def to_media(self, output: Tensor) -> list[Mesh]:
        """Return the most likely meshes; equal corners are merged and empty faces are dropped."""
        return [bins_to_mesh(bins, output.shape[-1]) for bins in output.argmax(-1).cpu().numpy()]

    def show_pairs(self, output: Tensor, batch: Batch[MeshBatch]) -> list[Mesh]:
        num_bins, examples = output.shape[-1], batch.examples
        counts = examples.face_counts.tolist()
        rows = zip(target_bins(examples), output.argmax(-1), counts, strict=True)
        return [
            Mesh.side_by_side(*(bins_to_mesh(one[:count].cpu().numpy(), num_bins) for one in pair))
            for *pair, count in rows
        ]


@dataclass(frozen=True, kw_only=True)
class MeshReconstructionConfig(ReconstructionConfig):
    smoothing: float = 0.4
    """The standard deviation in bins of the Gaussian that smooths the target; 0 disables it."""

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < math.inf:
            raise ValueError(f"smoothing must be at least 0 bins, got {self.smoothing}.")

    def build(self) -> MeshReconstructionLoss:
        return MeshReconstructionLoss(self)


class MeshReconstructionLoss(ReconstructionLoss):
    best_metric = BestMetric(name="triangle_accuracy")

    def __init__(self, config: MeshReconstructionConfig):
        super().__init__()
        self.config = config

    def losses(self, output: Tensor, batch: Batch[MeshBatch]) -> dict[str, Tensor]:
        targets = target_bins(batch.examples)
        return {"coordinates": smoothed_cross_entropy(output, targets, self.config.smoothing)}

    def eval_step(self, output: Tensor, batch: Batch[MeshBatch]) -> dict[str, Tensor]:
        """Return the accuracy of coordinates and faces, and the Chamfer distance in bins."""
        predicted_BFC, target_BFC = output.argmax(-1), target_bins(batch.examples)
        valid_BF, correct_BFC = target_BFC[..., 0] >= 0, predicted_BFC == target_BFC
        faces_B = valid_BF.sum(1)
        coordinates_B = (correct_BFC & valid_BF[..., None]).sum((1, 2))
        coordinates_B = coordinates_B / (faces_B * target_BFC.shape[2])
        triangles_B = (correct_BFC.all(2) & valid_BF).sum(1) / faces_B
        rows = zip(predicted_BFC, target_BFC, valid_BF, strict=True)
        distances = [chamfer_distance(one[valid], target[valid]) for one, target, valid in rows]
        return {
            "coordinates": coordinates_B.double().sum(),
            "triangles": triangles_B.double().sum(),
            "chamfer": torch.stack(distances).double().sum(),
        }

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {
            "triangle_accuracy": float(totals["triangles"] / totals["examples"]),
            "coordinate_accuracy": float(totals["coordinates"] / totals["examples"]),
            "chamfer_bins": float(totals["chamfer"] / totals["examples"]),
        }


def bins_to_mesh(bins_FC: np.ndarray, num_bins: int) -> Mesh:
    """Convert the bins of faces to a mesh in a unit cube; faces without area are dropped."""
    corners = bins_FC.reshape(-1, 3)
    faces = np.arange(len(corners)).reshape(len(bins_FC), bins_FC.shape[1] // 3)
    vertices = corners / (num_bins - 1) - 0.5
    return Mesh(*clean_mesh(vertices, faces[has_area(corners, faces)]))


def chamfer_distance(predicted_FC: Tensor, target_FC: Tensor) -> Tensor:
    """Return the mean distance, in bins, of the corners of one mesh to the nearest of the other."""
    predicted, target = (
        bins_FC.reshape(-1, 3).double().unique(dim=0) for bins_FC in (predicted_FC, target_FC)
    )
    distances = torch.cdist(predicted, target)
    return (distances.min(0).values.mean() + distances.min(1).values.mean()) / 2


@dataclass(frozen=True, kw_only=True)
class MeshTokenizerConfig(TokenizerConfig):
    model: MeshAutoencoderConfig = field(default_factory=MeshAutoencoderConfig)
    reconstruction: MeshReconstructionConfig = field(default_factory=MeshReconstructionConfig)
    adversary: None = None
    """Mesh tokenizers have no discriminator."""

    def notice(self, data: MeshDataConfig) -> str:
        return describe_training_grid(data)

    def build_adapter(self) -> MeshAdapter:
        return MeshAdapter()
