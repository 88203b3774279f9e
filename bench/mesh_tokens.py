"""The length and the exactness of the tokens of meshes-tree, on synthetic meshes and on folders.

    python bench/mesh_tokens.py [FOLDER ...] [--bins 128] [--max-faces 3000]

Every mesh is quantized, encoded and decoded, and must have the same faces afterwards. Files that
cannot be read, and those of more than `--max-faces` triangles, are left out and counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PROJECT = Path(__file__).parents[1]
NUM_SYNTHETIC = 500


@dataclass
class Totals:
    """Sums over the meshes of one set."""

    meshes: int = 0
    exact: int = 0
    faces: int = 0
    tokens: int = 0
    left_out: int = 0
    longest: float = 0.0
    """The most tokens per face of a mesh."""
    seconds: float = 0.0

    def add(self, mesh: object, bins: int) -> None:
        from tessera.modalities.mesh.tree import decode_mesh, encode_mesh

        start = time.process_time()
        tokens = encode_mesh(mesh, bins)
        decoded = decode_mesh(tokens, bins)
        self.seconds += time.process_time() - start
        self.meshes += 1
        self.exact += np.array_equal(decoded.vertices, mesh.vertices) and np.array_equal(
            decoded.faces, mesh.faces
        )
        self.faces += len(mesh.faces)
        self.tokens += len(tokens) + 1  # with the end
        self.longest = max(self.longest, (len(tokens) + 1) / len(mesh.faces))

    def describe(self, name: str) -> str:
        rate = self.tokens / max(1, self.faces)
        per_mesh_ms = 1e3 * self.seconds / max(1, self.meshes)
        return (
            f"{name:<20}{self.exact:>6,} of {self.meshes:,} meshes exact, {self.faces:,} faces, "
            f"{rate:.2f} tokens per face, at most {self.longest:.1f}; {per_mesh_ms:.1f} ms a mesh; "
            f"{self.left_out:,} left out"
        )


def synthetic_meshes(bins: int) -> Iterator[object]:
    from tessera.modalities.mesh.dataset import MeshDataConfig

    dataset = MeshDataConfig(bins=bins, num_synthetic=NUM_SYNTHETIC).full()
    for index in range(len(dataset)):
        yield dataset.item(index, np.random.default_rng(0))


def measure_folder(folder: Path, bins: int, max_faces: int) -> Totals:
    from tessera.data.errors import UnreadableFile
    from tessera.modalities.mesh.dataset import MeshDataConfig

    totals = Totals()
    dataset = MeshDataConfig(path=str(folder), bins=bins, max_faces=max_faces).full(captions=False)
    for index in range(len(dataset)):
        try:
            example = dataset.item(index, np.random.default_rng(0))
        except UnreadableFile:
            totals.left_out += 1
        else:
            totals.add(example, bins)
    return totals


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER")
    parser.add_argument("--bins", type=int, default=128)
    parser.add_argument("--max-faces", type=int, default=3000)
    args = parser.parse_args(arguments)
    sys.path.insert(0, str(PROJECT))
    synthetic = Totals()
    for mesh in synthetic_meshes(args.bins):
        synthetic.add(mesh, args.bins)
    print(synthetic.describe("synthetic"), flush=True)
    is_exact = synthetic.exact == synthetic.meshes
    for folder in args.folders:
        totals = measure_folder(folder, args.bins, args.max_faces)
        print(totals.describe(folder.name), flush=True)
        is_exact &= totals.exact == totals.meshes
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
