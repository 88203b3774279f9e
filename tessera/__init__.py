"""Tessera: discrete-token generative models of images, videos, audio, music and meshes.

Public names are imported on first use, so that `import tessera` is fast and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    "Audio": "tessera.modalities.audio.media",
    "Engine": "tessera.engine.engine",
    "EngineConfig": "tessera.engine.config",
    "Frozen": "tessera.engine.task",
    "Generator": "tessera.api.generator",
    "Image": "tessera.modalities.image.media",
    "Index": "tessera.api.search",
    "Loss": "tessera.engine.task",
    "LossTask": "tessera.engine.loss_task",
    "MaskGitTrainer": "tessera.trainers",
    "Mesh": "tessera.modalities.mesh.media",
    "MeshAutoencoderTrainer": "tessera.trainers",
    "MeshTransformerTrainer": "tessera.trainers",
    "MuLaN": "tessera.modalities.music.mulan",
    "MuLaNConfig": "tessera.modalities.music.mulan",
    "MuLaNTrainer": "tessera.trainers",
    "OptimizerConfig": "tessera.engine.optim.config",
    "Run": "tessera.run.config",
    "Search": "tessera.api.search",
    "Speaker": "tessera.api.speaker",
    "SoundStormConfig": "tessera.trainers",
    "SoundStormTrainer": "tessera.trainers",
    "Task": "tessera.engine.task",
    "Tokenizer": "tessera.api.tokenizer",
    "Update": "tessera.engine.task",
    "VQGAN": "tessera.modalities.image.vqgan",
    "VQGANConfig": "tessera.modalities.image.vqgan",
    "VQGanVAETrainer": "tessera.trainers",
    "Video": "tessera.modalities.video.media",
    "VideoTokenizer": "tessera.modalities.video.magvit2",
    "VideoTokenizerConfig": "tessera.modalities.video.magvit2",
    "VideoGeneratorTrainer": "tessera.trainers",
    "VideoTokenizerTrainer": "tessera.trainers",
    "fit": "tessera.run.fit",
    "load_weights": "tessera.run.fit",
}

__all__ = ["__version__", *_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tessera' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
