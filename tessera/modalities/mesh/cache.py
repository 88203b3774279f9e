"""Cache prepared meshes on disk: in canonical form, with the pairs of adjacent faces.

Reading and simplifying dominate the cost: 725 pieces of furniture took a minute at the start of a
run. The name of a cache file is a hash of everything that the example depends on, so a stale file
is never found, and a damaged file is created again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from tessera.modalities.mesh.canonical import MeshExample
from tessera.run.directory import replacing_file


def load_or_create(
    folder: str, depends_on: Sequence[object], create: Callable[[], MeshExample]
) -> MeshExample:
    """Return the cached example, or create and cache it. Safe for several processes at once."""
    key = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:24]
    file = Path(folder) / f"{key}.safetensors"
    try:
        return read_example(file)
    except (OSError, SafetensorError, KeyError, ValueError):
        example = create()
    file.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"vertices": example.vertices, "faces": example.faces, "edges": example.edges}
    with replacing_file(file, f".{os.getpid()}") as temporary:
        save_file(tensors, temporary, metadata={"checksum": hash_tensors(tensors)})
    return example


def read_example(file: Path) -> MeshExample:
    """Read a cached example; raise ValueError if its bytes have changed."""
    tensors = load_file(file)
    with safe_open(file, "numpy") as opened:
        checksum = (opened.metadata() or {}).get("checksum")
    if checksum != hash_tensors(tensors):
        raise ValueError("its checksum does not match")
    return MeshExample(tensors["vertices"], tensors["faces"], tensors["edges"], caption="")


def hash_tensors(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + tensor.tobytes())
    return digest.hexdigest()
