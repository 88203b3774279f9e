"""The tokenizer of `modalities/mesh/tree.py`: it encodes meshes exactly and is not trained.

tokenizer = TreeTokenizer(bins=64)
codes = tokenizer.encode("chair.glb")        # (1, max_len, 3), -1 after the last position
tokenizer.to_media(codes)[0].save("chair on the grid.obj")
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from tessera.data.tokens import TokensInfo
from tessera.engine.task import Examples
from tessera.modalities.mesh import tree
from tessera.modalities.mesh.canonical import (
    CanonicalMesh,
    MeshBatch,
    MeshExample,
    collate,
    dequantize_vertices,
)
from tessera.modalities.mesh.media import Mesh
from tessera.run.errors import UserError

if TYPE_CHECKING:
    from tessera.modalities.mesh.dataset import MeshDataConfig

VERSION = 3
"""The version of the tokens; it is part of the fingerprint."""
RECIPE = "meshes-tree"


class TreeTokenizer:
    """Encodes meshes as at most `max_len` positions of three tokens, with -1 after the last."""

    is_external = False
    features: Tensor | None = None
    seconds: float | None = None
    num_quantizers = 1

    def __init__(self, bins: int = 128, max_len: int = 1024):
        self.bins, self.max_len = bins, max_len
        self.network: nn.Module = nn.Identity()

    def __repr__(self) -> str:
        return f"TreeTokenizer(bins={self.bins}, max_len={self.max_len})"

    @property
    def vocab_size(self) -> int:
        return tree.vocab_size(self.bins)

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.max_len, tree.POSITION_SIZE)

    @property
    def fingerprint(self) -> str:
        settings = json.dumps({"tree": VERSION, "bins": self.bins})
        return hashlib.sha256(settings.encode()).hexdigest()

    def info(self) -> TokensInfo:
        """Return the description that is stored with codes."""
        return TokensInfo(self.fingerprint, self.vocab_size, RECIPE, 0, {"bins": self.bins})

    def with_data(self, data: MeshDataConfig) -> TreeTokenizer:
        """Return the same tokenizer; its tokens do not depend on the data."""
        return self

    # ---- encoding and decoding

    def encode(self, media: object) -> Tensor:
        """Encode a Mesh, a path, a pair of arrays (vertices, faces) or a list of these as codes
        (B, max_len, 3).

        Raises:
            UserError: If a mesh has more than `max_len` positions.
        """
        items = media if isinstance(media, list) else [media]
        if not items:
            raise UserError("There is nothing to encode: the list is empty.")
        examples = collate([self.load_example(item) for item in items])
        lengths = [len(positions) for positions in self.tokenize(examples)]
        if max(lengths) > self.max_len:
            raise UserError(
                f"The mesh has {max(lengths):,} positions, but the maximum is {self.max_len:,}: "
                "simplify it (Mesh.simplify), or use a larger max_len."
            )
        return self.encode_examples(examples)

    def load_example(self, media: object) -> MeshExample:
        from tessera.modalities.mesh.dataset import MeshDataConfig
        from tessera.modalities.mesh.synthetic import MIN_FACES

        # A triangle takes at least one position, so that no mesh that fits is rejected.
        data = MeshDataConfig(bins=self.bins, max_faces=max(self.max_len, MIN_FACES))
        if isinstance(media, (str, Path)):
            example = data.example_from_file(str(media))
        else:
            example = data.example_from_media(media)
        assert isinstance(example, MeshExample)
        return example

    def encode_examples(self, examples: Examples) -> Tensor:
        """Return codes (B, max_len, 3), with -1 after the last; longer meshes are cut off."""
        assert isinstance(examples, MeshBatch)
        codes = np.full((len(examples.vertices), *self.grid), -1, dtype=np.int64)
        for row, positions in zip(codes, self.tokenize(examples), strict=True):
            row[: len(positions)] = positions[: self.max_len]
        return torch.from_numpy(codes).to(examples.vertices.device)

    def tokenize(self, examples: MeshBatch) -> list[list[tuple[int, int, int]]]:
        """Return the positions of each mesh."""
        rows = zip(
            examples.vertices.cpu().numpy(),
            examples.faces.cpu().numpy(),
            examples.vertex_counts.tolist(),
            examples.face_counts.tolist(),
            strict=True,
        )
        meshes = [
            CanonicalMesh(vertices[:num_vertices], faces[:num_faces])
            for vertices, faces, num_vertices, num_faces in rows
        ]
        return [tree.to_positions(tree.encode_mesh(mesh, self.bins)) for mesh in meshes]

    def decode(self, codes: Tensor) -> list[CanonicalMesh]:
        """Decode codes (B, N, 3), or (N, 3) of one mesh, to meshes on the grid; an unfinished
        triangle at the end is left out."""
        rows = codes[None] if codes.ndim == 2 else codes
        try:
            return [
                tree.decode_mesh(row[(row >= 0) & (row != tree.PAD)].tolist(), self.bins)
                for row in rows.cpu()
            ]
        except tree.InvalidToken as error:
            raise UserError(f"The codes are not those of a mesh. {error}") from None

    def to_media(self, codes: Tensor) -> Sequence[Mesh]:
        """Decode codes to meshes in a cube with a side of 1."""
        return [
            Mesh(dequantize_vertices(mesh.vertices, self.bins), mesh.faces)
            for mesh in self.decode(codes)
        ]
