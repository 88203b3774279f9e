"""Trainer classes with the constructors of five research packages, on the engine of this package.

    model = VQGAN(VQGANConfig())
    trainer = VQGanVAETrainer(
        model, folder="photos", image_size=64, batch_size=8, num_train_steps=1000
    )
    trainer.train(log_fn=print)

Names and defaults of the parameters are those of the research packages. The results folder is a run
directory: the commands of `tessera` work on it, a trainer that is constructed again resumes from
the newest checkpoint, and earlier results are never deleted.
"""

from __future__ import annotations

from tessera.modalities.audio.external_tokens import TokenStream
from tessera.trainers.audio import SoundStormConfig, SoundStormTrainer
from tessera.trainers.base import Trainer
from tessera.trainers.images import MaskGitTrainer, VQGanVAETrainer
from tessera.trainers.meshes import MeshAutoencoderTrainer, MeshTransformerTrainer
from tessera.trainers.music import MuLaNTrainer
from tessera.trainers.videos import VideoGeneratorTrainer, VideoTokenizerTrainer

__all__ = [
    "MaskGitTrainer",
    "MeshAutoencoderTrainer",
    "MeshTransformerTrainer",
    "MuLaNTrainer",
    "SoundStormConfig",
    "SoundStormTrainer",
    "TokenStream",
    "Trainer",
    "VQGanVAETrainer",
    "VideoGeneratorTrainer",
    "VideoTokenizerTrainer",
]
