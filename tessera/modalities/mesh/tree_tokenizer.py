"""The tokenizer of `modalities/mesh/tree.py`: it encodes meshes exactly and is not trained."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from tessera.modalities.mesh import tree
from tessera.modalities.mesh.canonical import CanonicalMesh, MeshBatch, dequantize_vertices
from tessera.modalities.mesh.media import Mesh

VERSION = 1
"""The version of the tokens; it is part of the fingerprint."""


class TreeTokenizer:
    """Encodes meshes as sequences of at most `max_len` tokens, with -1 after the last."""

    is_external = False
    features: Tensor | None = None
    seconds: float | None = None
    num_quantizers = 1

    def __init__(self, bins: int, max_len: int):
        self.bins, self.max_len = bins, max_len
        self.network: nn.Module = nn.Identity()

    @property
    def vocab_size(self) -> int:
        return tree.vocab_size(self.bins)

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.max_len,)

    @property
    def fingerprint(self) -> str:
        settings = json.dumps({"tree": VERSION, "bins": self.bins})
        return hashlib.sha256(settings.encode()).hexdigest()

    def encode_examples(self, examples: MeshBatch) -> Tensor:
        """Return codes (B, max_len), with -1 after the last; longer meshes are cut off."""
        device = examples.vertices.device
        arrays = [one.cpu().numpy() for one in (examples.vertices, examples.faces)]
        counts = zip(examples.vertex_counts.tolist(), examples.face_counts.tolist(), strict=True)
        codes = np.full((len(arrays[0]), self.max_len), -1, dtype=np.int64)
        for row, (vertices, faces, (num_vertices, num_faces)) in enumerate(
            zip(*arrays, counts, strict=True)
        ):
            mesh = CanonicalMesh(vertices[:num_vertices], faces[:num_faces])
            tokens = tree.encode_mesh(mesh, self.bins)[: self.max_len]
            codes[row, : len(tokens)] = tokens
        return torch.from_numpy(codes).to(device)

    def to_media(self, codes: Tensor) -> Sequence[Mesh]:
        """Decode codes (B, N) to meshes in a cube with a side of 1."""
        return [self.to_mesh(row[row >= 0].tolist()) for row in codes.cpu()]

    def to_mesh(self, tokens: Sequence[int]) -> Mesh:
        mesh = tree.decode_mesh(tokens, self.bins)
        return Mesh(dequantize_vertices(mesh.vertices, self.bins), mesh.faces)
