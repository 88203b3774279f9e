"""Make the research packages importable in an environment without CUDA, fairseq and wandb.

`install()` must run before the first import of torchvision, audiolm-pytorch or a package that
imports them. It declares names only: no function that a benchmark calls is replaced.

    PYTHONPATH=bench .venv-peers/bin/python -m peers.shims      import every package, print versions
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import torch

PACKAGES = (
    "soundstorm-pytorch",
    "musiclm-pytorch",
    "magvit2-pytorch",
    "muse-maskgit-pytorch",
    "meshgpt-pytorch",
)

_libraries: list[torch.library.Library] = []
"""Operators stay declared only as long as their library object exists."""


def install() -> None:
    """Install every shim; a second call does nothing."""
    declare_torchvision_operators()
    for name in ("fairseq", "wandb"):
        add_empty_module(name)


def declare_torchvision_operators() -> None:
    """Declare the operators that torchvision registers at import, if its own library does not load.

    The library of a CUDA build does not load beside a CPU build of torch. No operator is called by
    the networks that are measured, so their signatures are enough.
    """
    if _libraries or loads_torchvision_library():
        return
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def loads_torchvision_library() -> bool:
    """Load torchvision's native library, and return whether that worked."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    try:
        torch.ops.load_library(str(Path(spec.origin).with_name("_C.so")))
    except OSError:
        return False
    return True


def add_empty_module(name: str) -> None:
    """Register an empty module under a name that audiolm-pytorch imports and the benches never use.

    fairseq 0.12.2, which is for pretrained speech encoders, fails to import on Python 3.11.
    """
    if name not in sys.modules:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = module


if __name__ == "__main__":
    install()
    for package in PACKAGES:
        importlib.import_module(package.replace("-", "_"))
    print(", ".join(f"{package} {version(package)}" for package in ("torch", *PACKAGES)))
