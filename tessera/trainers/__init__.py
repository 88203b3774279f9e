"""The front doors that the research systems had, as thin constructors over the one engine.

    trainer = VQGanVAETrainer(VQGAN(VQGANConfig()), folder="pictures", image_size=64, batch_size=8, num_train_steps=1000)
    trainer.train(log_fn=print)

The parameters and their defaults are theirs; what they do is what they say. The results folder is a
run's folder: the command line's verbs work on it, a second construction goes on where the first
stopped, and nothing is asked or deleted.
"""

from __future__ import annotations

from tessera.modalities.audio.external_tokens import TokenStream
from tessera.trainers.audio import SoundStormConfig, SoundStormTrainer
from tessera.trainers.base import Trainer
from tessera.trainers.images import MaskGitTrainer, VQGanVAETrainer
from tessera.trainers.meshes import MeshAutoencoderTrainer, MeshTransformerTrainer
from tessera.trainers.music import MuLaNTrainer
from tessera.trainers.videos import VideoTokenizerTrainer

__all__ = [
    "MaskGitTrainer",
    "MeshAutoencoderTrainer",
    "MeshTransformerTrainer",
    "MuLaNTrainer",
    "SoundStormConfig",
    "SoundStormTrainer",
    "Stream",
    "Trainer",
    "VQGanVAETrainer",
    "VideoTokenizerTrainer",
]
