"""Tessera: discrete-token generative models over images, video, sound, music and meshes, on one engine.

The public names are imported when they are first asked for, so that `import tessera` costs nothing and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Engine": "tessera.engine.engine",
    "EngineConfig": "tessera.engine.engine",
    "Frozen": "tessera.engine.task",
    "Generator": "tessera.generator",
    "Index": "tessera.search",
    "Loss": "tessera.engine.task",
    "MaskGitTrainer": "tessera.trainers",
    "MeshAutoencoderTrainer": "tessera.trainers",
    "MeshTransformerTrainer": "tessera.trainers",
    "MuLaN": "tessera.models.mulan",
    "MuLaNConfig": "tessera.models.mulan",
    "MuLaNTrainer": "tessera.trainers",
    "OptimizerConfig": "tessera.engine.optimizer",
    "Run": "tessera.config",
    "Search": "tessera.search",
    "SoundStormConfig": "tessera.trainers",
    "SoundStormTrainer": "tessera.trainers",
    "Task": "tessera.engine.task",
    "Tokenizer": "tessera.tokenizer",
    "Update": "tessera.engine.task",
    "VQGAN": "tessera.models.vqgan",
    "VQGANConfig": "tessera.models.vqgan",
    "VQGanVAETrainer": "tessera.trainers",
    "VideoTokenizer": "tessera.models.video_tokenizer",
    "VideoTokenizerConfig": "tessera.models.video_tokenizer",
    "VideoTokenizerTrainer": "tessera.trainers",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tessera' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
