"""Build each research package's model and trainer at the small configuration of the comparisons.

One adapter per trainer. The packages are imported as installed; none of their code is copied or
changed. Our side of each comparison (`image_tokenizer.py`, `video_tokenizer.py`, ...) uses the same
sizes, data and optimizer settings.

The module is imported only by processes of the environment that `setup.sh` creates.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from peers import shims
from torch import nn
from torch.utils.data import Dataset

shims.install()

NEVER = 10**9
"""For steps at which a trainer would validate, sample, save or stop."""
WARMUP_STEPS = 10
DATA_SEED = 7


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class ExampleList(Dataset):
    """A dataset of examples in memory."""

    def __init__(self, examples: list[Any]):
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]

    def batch(self, size: int) -> tuple[torch.Tensor, ...]:
        """Stack the first examples, field by field."""
        return tuple(torch.stack(field) for field in zip(*self.examples[:size], strict=True))


class PeerAdapter(ABC):
    """One trainer of a research package."""

    @abstractmethod
    def build_model(self) -> Any:
        """Build the package's model with untrained weights."""

    @abstractmethod
    def build_trainer(self, model: Any, folder: Path) -> Any:
        """Build the package's trainer. `folder` must not exist: some trainers prompt otherwise."""

    def train(self, trainer: Any, steps: int) -> None:
        """Run training steps of the package's own trainer."""
        for _ in range(steps):
            trainer.train_step()


# ---- muse-maskgit-pytorch


class VQGANAdapter(PeerAdapter):
    """VQGanVAETrainer on image files.

    `model` and `trainer` replace settings of the small configuration. `perceptual` is the network
    of the perceptual loss, in place of a VGG16 whose weights would be downloaded; by default it has
    two untrained convolutions.
    """

    def __init__(
        self,
        images: Path,
        *,
        model: Mapping[str, Any] = MappingProxyType({}),
        trainer: Mapping[str, Any] = MappingProxyType({}),
        perceptual: nn.Module | None = None,
    ):
        self.images, self.model, self.trainer = images, model, trainer
        self.perceptual = perceptual

    def build_model(self) -> Any:
        from muse_maskgit_pytorch import VQGanVAE

        perceptual = self.perceptual
        if perceptual is None:
            perceptual = nn.Sequential(
                nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 4, 1)
            ).requires_grad_(False)
        settings = {"dim": 32, "layers": 3, "discr_layers": 3, "codebook_size": 256, **self.model}
        return VQGanVAE(vgg=perceptual, **settings)

    def build_trainer(self, model: Any, folder: Path) -> Any:
        from muse_maskgit_pytorch import VQGanVAETrainer

        settings = {
            "batch_size": 4,
            "image_size": 64,
            "max_grad_norm": 1.0,
            "discr_max_grad_norm": 1.0,
            **self.trainer,
        }
        return VQGanVAETrainer(
            model,
            folder=str(self.images),
            num_train_steps=NEVER,
            save_results_every=NEVER,
            save_model_every=NEVER,
            results_folder=str(folder),
            accelerate_kwargs={},
            **settings,
        )


# ---- magvit2-pytorch


class VideoTokenizerAdapter(PeerAdapter):
    """VideoTokenizerTrainer on videos in memory, by default random ones of 9 frames of 32 x 32.

    `model` and `trainer` replace settings of the small configuration.
    """

    def __init__(
        self,
        videos: list[torch.Tensor] | None = None,
        *,
        model: Mapping[str, Any] = MappingProxyType({}),
        trainer: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.videos, self.model, self.trainer = videos, model, trainer
        self._batches: Iterator[Any] | None = None

    def dataset(self) -> ExampleList:
        if self.videos is not None:
            return ExampleList(self.videos)
        generator = torch.Generator().manual_seed(DATA_SEED)
        return ExampleList([torch.rand(3, 9, 32, 32, generator=generator) for _ in range(64)])

    def build_model(self) -> Any:
        from magvit2_pytorch import VideoTokenizer

        settings = {
            "image_size": 32,
            "init_dim": 16,
            "max_dim": 64,
            "codebook_size": 256,
            "layers": (
                "residual",
                "compress_space",
                ("consecutive_residual", 2),
                "compress_space",
                "attend_space",
                "compress_time",
                ("consecutive_residual", 2),
                "attend_time",
            ),
            "attn_dim_head": 16,
            "attn_heads": 4,
            "perceptual_loss_weight": 0.0,
            "use_gan": True,
            **self.model,
        }
        discriminator = {"dim": 16, "image_size": settings["image_size"], "channels": 3}
        return VideoTokenizer(**settings, discr_kwargs=discriminator | {"max_dim": 64})

    def build_trainer(self, model: Any, folder: Path) -> Any:
        from magvit2_pytorch import VideoTokenizerTrainer

        settings = {
            "batch_size": 2,
            "learning_rate": 2e-5,
            "max_grad_norm": 1.0,
            "warmup_steps": WARMUP_STEPS,
            **self.trainer,
        }
        return VideoTokenizerTrainer(
            model,
            num_train_steps=NEVER,
            dataset=self.dataset(),
            checkpoints_folder=str(folder),
            results_folder=str(folder),
            validate_every_step=NEVER,
            checkpoint_every_step=NEVER,
            **settings,
        )

    def train(self, trainer: Any, steps: int) -> None:
        if self._batches is None:
            self._batches = repeat(trainer.dataloader)
        for _ in range(steps):
            trainer.train_step(self._batches)


def repeat(loader: Any) -> Iterator[Any]:
    """Iterate over a loader without end; unlike `itertools.cycle`, it reshuffles each time."""
    while True:
        yield from loader


# ---- meshgpt-pytorch


class MeshAdapter(PeerAdapter):
    """What the two trainers for meshes share: random meshes of 40 vertices and 64 faces by default,
    and arguments that replace those of the model and of the trainer."""

    def __init__(
        self,
        examples: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
        *,
        model: Mapping[str, Any] = MappingProxyType({}),
        trainer: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.examples, self.model_settings, self.trainer_changes = examples, model, trainer

    def dataset(self) -> ExampleList:
        if self.examples is not None:
            return ExampleList(self.examples)
        generator = torch.Generator().manual_seed(DATA_SEED)
        return ExampleList(
            [
                (
                    torch.rand(40, 3, generator=generator) * 2 - 1,
                    torch.randint(0, 40, (64, 3), generator=generator),
                )
                for _ in range(128)
            ]
        )

    def build_autoencoder(self) -> Any:
        from meshgpt_pytorch import MeshAutoencoder

        settings = {
            "num_discrete_coors": 64,
            "dim_coor_embed": 32,
            "dim_area_embed": 16,
            "dim_normal_embed": 32,
            "dim_angle_embed": 16,
            "encoder_dims_through_depth": (32, 64, 64),
            "decoder_dims_through_depth": (64, 64, 96, 96),
            "dim_codebook": 64,
            "num_quantizers": 2,
            "codebook_size": 256,
        }
        return MeshAutoencoder(**settings | dict(self.model_settings))

    def trainer_settings(self, folder: Path) -> dict[str, Any]:
        """Arguments that both trainers take."""
        return {
            "dataset": self.dataset(),
            "num_train_steps": NEVER,
            "batch_size": 4,
            "grad_accum_every": 1,
            "max_grad_norm": 0.5,
            "checkpoint_every": NEVER,
            "checkpoint_folder": str(folder),
            "warmup_steps": WARMUP_STEPS,
        } | dict(self.trainer_changes)

    def train(self, trainer: Any, steps: int) -> None:
        """Run the package's loop, which has no entry point for one step, until `steps` are done."""
        trainer.num_train_steps = int(trainer.step.item()) + steps
        trainer()


class MeshAutoencoderAdapter(MeshAdapter):
    """MeshAutoencoderTrainer."""

    def build_model(self) -> Any:
        return self.build_autoencoder()

    def build_trainer(self, model: Any, folder: Path) -> Any:
        from meshgpt_pytorch import MeshAutoencoderTrainer

        settings = {"learning_rate": 1e-4} | self.trainer_settings(folder)
        return MeshAutoencoderTrainer(model, **settings)


class MeshTransformerAdapter(MeshAdapter):
    """MeshTransformerTrainer, on an untrained autoencoder unless one is given."""

    def __init__(
        self,
        examples: list[tuple[torch.Tensor, torch.Tensor]] | None = None,
        *,
        autoencoder: nn.Module | None = None,
        transformer: Mapping[str, Any] = MappingProxyType({}),
        trainer: Mapping[str, Any] = MappingProxyType({}),
    ):
        super().__init__(examples, trainer=trainer)
        self.autoencoder, self.transformer_settings = autoencoder, transformer

    def build_model(self) -> Any:
        from meshgpt_pytorch import MeshTransformer

        settings = {
            "dim": 128,
            "max_seq_len": 384,
            "attn_depth": 2,
            "attn_dim_head": 32,
            "attn_heads": 4,
            "coarse_pre_gateloop_depth": 0,
            "fine_pre_gateloop_depth": 0,
            "fine_attn_depth": 1,
            "fine_attn_dim_head": 32,
            "fine_attn_heads": 4,
        }
        autoencoder = self.autoencoder or self.build_autoencoder()
        return MeshTransformer(autoencoder, **settings | dict(self.transformer_settings))

    def build_trainer(self, model: Any, folder: Path) -> Any:
        from meshgpt_pytorch import MeshTransformerTrainer

        settings = {"learning_rate": 2e-4} | self.trainer_settings(folder)
        return MeshTransformerTrainer(model, **settings)


# ---- musiclm-pytorch


class MuLaNAdapter(PeerAdapter):
    """MuLaNTrainer on waveforms and token ids, by default noise and random ids.

    `audio` and `text` replace settings of the towers, and `trainer` those of the trainer.
    """

    def __init__(
        self,
        *,
        examples: ExampleList | None = None,
        audio: Mapping[str, Any] = MappingProxyType({}),
        text: Mapping[str, Any] = MappingProxyType({}),
        trainer: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.examples, self.audio, self.text, self.trainer = examples, audio, text, trainer

    def dataset(self) -> ExampleList:
        if self.examples is not None:
            return self.examples
        generator = torch.Generator().manual_seed(DATA_SEED)
        return ExampleList(
            [
                (
                    torch.randn(4096, generator=generator),
                    torch.randint(1, 1000, (32,), generator=generator),
                )
                for _ in range(320)
            ]
        )

    def build_model(self) -> Any:
        from musiclm_pytorch import AudioSpectrogramTransformer, MuLaN, TextTransformer

        size = {"dim": 128, "depth": 2, "heads": 4, "dim_head": 32}
        spectrogram = {"spec_n_fft": 128, "spec_win_length": 24, "spec_aug_stretch_factor": 0.8}
        audio = AudioSpectrogramTransformer(**size | spectrogram | dict(self.audio))
        text = TextTransformer(**size | {"num_tokens": 1000, "max_seq_len": 64} | dict(self.text))
        return MuLaN(audio_transformer=audio, text_transformer=text, dim_latent=128)

    def build_trainer(self, model: Any, folder: Path) -> Any:
        from musiclm_pytorch.trainer import MuLaNTrainer

        return MuLaNTrainer(
            mulan=model,
            dataset=self.dataset(),
            num_train_steps=NEVER,
            save_model_every=NEVER,
            results_folder=str(folder),
            force_clear_prev_results=False,
            **{"batch_size": 8, **self.trainer},
        )


# ---- soundstorm-pytorch


class SoundStormAdapter(PeerAdapter):
    """SoundStormTrainer on semantic and acoustic token ids, by default random ones.

    `trainer` replaces settings of the trainer.
    """

    def __init__(
        self,
        *,
        examples: ExampleList | None = None,
        trainer: Mapping[str, Any] = MappingProxyType({}),
    ):
        self.examples, self.trainer = examples, trainer

    def dataset(self) -> ExampleList:
        if self.examples is not None:
            return self.examples
        generator = torch.Generator().manual_seed(DATA_SEED)
        return ExampleList(
            [
                (
                    torch.randint(0, 100, (128,), generator=generator),
                    torch.randint(0, 256, (128, 4), generator=generator),
                )
                for _ in range(128)
            ]
        )

    def build_model(self) -> Any:
        from soundstorm_pytorch import ConformerWrapper, SoundStorm

        network = ConformerWrapper(
            codebook_size=256,
            num_quantizers=4,
            conformer={
                "dim": 128,
                "depth": 2,
                "heads": 4,
                "dim_head": 32,
                "ff_mult": 4,
                "conv_kernel_size": 31,
                "num_residual_streams": 4,
            },
        )
        return SoundStorm(
            network,
            steps=8,
            schedule="cosine",
            num_semantic_token_ids=100,
            wav2vec_target_sample_hz=16_000,
            wav2vec_downsample_factor=320,
            codec_target_sample_hz=16_000,
            codec_downsample_factor=320,
        )

    def build_trainer(self, model: Any, folder: Path) -> Any:
        from soundstorm_pytorch.trainer import SoundStormTrainer

        return SoundStormTrainer(
            model,
            num_train_steps=NEVER,
            num_warmup_steps=WARMUP_STEPS,
            dataset=self.dataset(),
            save_results_every=NEVER,
            save_model_every=NEVER,
            results_folder=str(folder),
            force_clear_prev_results=False,
            **{"batch_size": 4, **self.trainer},
        )
