"""The meshes of the mesh rows: the same canonical meshes for all sides.

`prepare` reads a folder of meshes in canonical form, 64 bins and at most 200 triangles, and writes
two files, `train.npz` and `held-out.npz`, by the split of the recipes. All sides get the meshes
sorted and on the grid, and none trains on held-out ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

BINS, MAX_FACES = 64, 200
VAL_FRACTION = 0.1


@dataclass(frozen=True)
class MeshSet:
    path: Path

    def load(self) -> list[tuple[Any, Any]]:
        """Return vertices as bin indices (V, 3) and faces (F, 3) of each mesh."""
        import numpy as np

        with np.load(self.path) as arrays:
            count = len(arrays.files) // 2
            return [(arrays[f"vertices{n}"], arrays[f"faces{n}"]) for n in range(count)]


def train_set(work: Path) -> MeshSet:
    return MeshSet(work / "meshes" / "train.npz")


def held_out_set(work: Path) -> MeshSet:
    return MeshSet(work / "meshes" / "held-out.npz")


def data_config(**settings: Any) -> Any:
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return MeshDataConfig(bins=BINS, max_faces=MAX_FACES, **settings)


def prepare(data: Path, work: Path) -> None:
    """Write both files, unless that has been done."""
    split = data_config(path=str(data), val_fraction=VAL_FRACTION).build(captions=False)
    for dataset, one in ((split.train, train_set(work)), (split.validation, held_out_set(work))):
        if not one.path.exists():
            write_meshes(dataset, one.path)


def write_meshes(dataset: Any, path: Path) -> None:
    import numpy as np

    from tessera.data.errors import UnreadableFile

    arrays: dict[str, Any] = {}
    for index in range(len(dataset)):
        try:
            example = dataset.item(index, np.random.default_rng(0))
        except UnreadableFile:
            continue
        number = len(arrays) // 2
        arrays |= {f"vertices{number}": example.vertices, f"faces{number}": example.faces}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, **arrays)
    unfinished.rename(path)


def build_dataset(meshes: MeshSet) -> Any:
    """Build a dataset of ours from a file; adjacency is found once, as for files."""
    from tessera.data.dataset import ExampleDataset
    from tessera.modalities.mesh.adjacency import find_adjacent_faces
    from tessera.modalities.mesh.canonical import MeshExample, collate

    class CanonicalMeshes(ExampleDataset):
        def __init__(self) -> None:
            self.examples = [
                MeshExample(vertices, faces, find_adjacent_faces(faces), "")
                for vertices, faces in meshes.load()
            ]

        def __len__(self) -> int:
            return len(self.examples)

        def name(self, index: int) -> str:
            return str(index)

        def signature(self, index: int) -> str:
            return meshes.path.stem

        def item(self, index: int, rng: Any) -> MeshExample:
            return self.examples[index]

        def collate(self, examples: list[MeshExample]) -> Any:
            return collate(examples)

    return CanonicalMeshes()


def face_coordinates(vertices: Any, faces: Any) -> Any:
    """Return the bins of the corners of each face, (F, 9)."""
    return vertices[faces].reshape(len(faces), 9)


def pad_faces(meshes: list[Any]) -> Any:
    """Stack face coordinates (F, 9) of several meshes to (meshes, MAX_FACES, 9), padded by -1."""
    import numpy as np

    padded = np.full((len(meshes), MAX_FACES, 9), -1, dtype=np.int16)
    for row, faces in zip(padded, meshes, strict=True):
        row[: len(faces)] = faces[:MAX_FACES]
    return padded
