"""Cache prepared meshes on disk: in canonical form, with the pairs of adjacent faces.

Reading and simplifying dominate the cost: 725 pieces of furniture took a minute at the start of a
run. The name of a cache file is a hash of everything that the example depends on, so a stale file
is never found, and a damaged file is created again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tessera.modalities.mesh.canonical import MeshExample


def load_or_create(
    folder: str, depends_on: Sequence[object], create: Callable[[], MeshExample]
) -> MeshExample:
    """Return the cached example, or create and cache it. Safe for several processes at once."""
    key = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:24]
    file = Path(folder) / f"{key}.safetensors"
    try:
        tensors = load_file(file)
        return MeshExample(tensors["vertices"], tensors["faces"], tensors["edges"], caption="")
    except (OSError, SafetensorError, KeyError):
        example = create()
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.writing")
    save_file(
        {"vertices": example.vertices, "faces": example.faces, "edges": example.edges}, temporary
    )
    os.replace(temporary, file)
    return example
