"""Tessera: discrete-token generative models over images, video, sound, music and meshes, on one
engine.

The public names are imported when they are first asked for, so that `import tessera` costs nothing
and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Engine": "tessera.engine.engine",
    "EngineConfig": "tessera.engine.engine",
    "Frozen": "tessera.engine.task",
    "Generator": "tessera.api.generator",
    "Index": "tessera.api.search",
    "Loss": "tessera.engine.task",
    "MaskGitTrainer": "tessera.trainers",
    "MeshAutoencoderTrainer": "tessera.trainers",
    "MeshTransformerTrainer": "tessera.trainers",
    "MuLaN": "tessera.modalities.music.mulan",
    "MuLaNConfig": "tessera.modalities.music.mulan",
    "MuLaNTrainer": "tessera.trainers",
    "OptimizerConfig": "tessera.engine.optim.config",
    "Run": "tessera.run.config",
    "Search": "tessera.api.search",
    "SoundStormConfig": "tessera.trainers",
    "SoundStormTrainer": "tessera.trainers",
    "Task": "tessera.engine.task",
    "Tokenizer": "tessera.api.tokenizer",
    "Update": "tessera.engine.task",
    "VQGAN": "tessera.modalities.image.vqgan",
    "VQGANConfig": "tessera.modalities.image.vqgan",
    "VQGanVAETrainer": "tessera.trainers",
    "VideoTokenizer": "tessera.modalities.video.magvit2",
    "VideoTokenizerConfig": "tessera.modalities.video.magvit2",
    "VideoTokenizerTrainer": "tessera.trainers",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tessera' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
