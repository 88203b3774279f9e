"""Meshes on disk as they are learnt from: in canonical order, and with which faces touch.

What costs is reading and simplifying: 725 pieces of furniture took a minute of a run's beginning. A
file is asked for by a hash of all that it depends on, so one that is stale is simply not found; one
that is damaged is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from tessera.modalities.mesh.canonical import MeshExample


def kept(place: str, depends_on: list[Any], make: Callable[[], MeshExample]) -> MeshExample:
    """The example that is kept in the folder, or made and then kept there. Several processes may do
    so at once."""
    key = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()[:24]
    file = Path(place) / f"{key}.safetensors"
    try:
        found = load_file(file)
        return MeshExample(found["vertices"], found["faces"], found["edges"], caption="")
    except (OSError, SafetensorError, KeyError):
        example = make()
    file.parent.mkdir(parents=True, exist_ok=True)
    writing = file.with_suffix(f".{os.getpid()}.writing")
    save_file(
        {"vertices": example.vertices, "faces": example.faces, "edges": example.edges}, writing
    )
    os.replace(writing, file)
    return example
