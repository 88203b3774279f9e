"""Small models that are called like those of the research packages, and trainers for them.

They have what makes the published models difficult: random numbers of the global generator, inputs
that are written to, discriminators and perceptual networks inside the model, parameters without a
gradient, `parameters()` without the discriminator, and frozen parts.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.modalities.image.media import Image
from tessera.trainers import (
    MeshAutoencoderTrainer,
    MeshTransformerTrainer,
    MuLaNTrainer,
    SoundStormTrainer,
    Trainer,
    VideoTokenizerTrainer,
    VQGanVAETrainer,
)

SoundStormBreakdown = namedtuple("SoundStormBreakdown", ["generator_loss", "critic_loss"])
VideoBreakdown = namedtuple("VideoBreakdown", ["recon_loss", "perceptual_loss", "parts"])
DiscrBreakdown = namedtuple("DiscrBreakdown", ["discr_loss", "gradient_penalty"])


class SoundStorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.semantic = nn.Embedding(5, 8)
        self.to_logits = nn.Linear(8, 8)
        self.unused = nn.Linear(2, 2)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        cond_semantic_token_ids: Tensor | None = None,
        only_train_generator: bool = False,
        only_train_critic: bool = False,
    ) -> tuple[Tensor, SoundStormBreakdown]:
        target = x.clone()
        hidden = torch.rand(x.shape) < torch.rand(())
        hidden[:, 0] = True
        x[hidden] = 8
        cond = self.semantic(cond_semantic_token_ids.clamp_min(0)).mean(1)[:, None, None]
        loss = F.cross_entropy(self.to_logits(self.embed(x) + cond)[hidden], target[hidden])
        return loss, SoundStormBreakdown(loss, None)

    def generate(self, num_latents: int) -> Tensor:
        return self.to_logits.weight[:num_latents].argmax(-1)


class MuLaN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.audio = nn.Linear(16, 4)
        self.text = nn.Embedding(10, 4)
        self.dropout = nn.Dropout(0.2)

    def forward(
        self, wavs: Tensor, texts: Tensor | None = None, raw_texts: list[str] | None = None
    ) -> Tensor:
        if texts is None:
            texts = torch.tensor([[len(text) % 10] for text in raw_texts])
        audio = F.normalize(self.dropout(self.audio(wavs)), dim=-1)
        text = F.normalize(self.text(texts).mean(1), dim=-1)
        return F.cross_entropy(8 * audio @ text.T, torch.arange(len(wavs)))


class VideoTokenizer(nn.Module):
    image_size, channels, use_gan, has_multiscale_discrs = 8, 3, True, False

    def __init__(self) -> None:
        super().__init__()
        self.conv_in = nn.Conv3d(3, 4, 1)
        self.conv_out = nn.Conv3d(4, 3, 1)
        self.discr = nn.Conv2d(3, 1, 3)
        self.vgg = nn.Conv2d(3, 2, 3)
        self.multiscale_discrs = nn.ModuleList([])

    def parameters(self) -> Any:
        return [*self.conv_in.parameters(), *self.conv_out.parameters()]

    def discr_parameters(self) -> Any:
        return self.discr.parameters()

    def tokenize(self, videos: Tensor) -> Tensor:
        return (self.conv_in(videos) > 0).sum(1)

    def forward(
        self,
        video: Tensor,
        return_loss: bool = False,
        return_discr_loss: bool = False,
        return_recon_loss_only: bool = False,
        apply_gradient_penalty: bool = True,
        adversarial_loss_weight: float | None = None,
    ) -> Any:
        made = self.conv_out(torch.tanh(self.conv_in(video)))
        recon = F.mse_loss(made, video)
        if return_recon_loss_only:
            return recon, made
        frame = int(torch.randint(video.shape[2], ()))
        real, fake = video[:, :, frame], made[:, :, frame]
        if return_discr_loss:
            real = real.requires_grad_()
            logits = self.discr(real)
            loss = F.softplus(-logits).mean() + F.softplus(self.discr(fake.detach())).mean()
            penalty = torch.zeros(())
            if apply_gradient_penalty:
                (grad,) = torch.autograd.grad(logits.sum(), real, create_graph=True)
                penalty = grad.square().mean()
            return loss + penalty, DiscrBreakdown(loss, penalty)
        assert self.training and self.conv_in.training and not self.discr.training
        perceptual = F.mse_loss(self.vgg(real), self.vgg(fake))
        weight = 1.0 if adversarial_loss_weight is None else adversarial_loss_weight
        total = recon + 0.1 * perceptual - weight * 0.1 * self.discr(fake).mean()
        return total, VideoBreakdown(recon, perceptual, [recon])


class VQGanVAE(nn.Module):
    def __init__(self, discriminator: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.enc_dec = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1))
        self.discr = nn.Conv2d(3, 1, 3) if discriminator else None
        self._vgg = nn.Conv2d(3, 2, 3)

    def forward(
        self,
        img: Tensor,
        return_loss: bool = False,
        return_discr_loss: bool = False,
        return_recons: bool = False,
        add_gradient_penalty: bool = True,
    ) -> Tensor:
        made = self.scale * self.enc_dec(img)
        if return_discr_loss:
            made.detach_()
            img.requires_grad_()
            logits = self.discr(img)
            (grad,) = torch.autograd.grad(logits.sum(), img, create_graph=True)
            loss = F.softplus(-logits).mean() + F.softplus(self.discr(made)).mean()
            return loss + grad.square().mean()
        if not return_loss:
            return made
        loss = F.l1_loss(made, img) + F.mse_loss(self._vgg(made), self._vgg(img))
        return loss if self.discr is None else loss - 0.1 * self.discr(made).mean()


class MeshAutoencoder(nn.Module):
    pad_id = -1

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(9, 9)

    def forward(
        self,
        *,
        vertices: Tensor,
        faces: Tensor,
        face_edges: Tensor | None = None,
        return_loss_breakdown: bool = False,
    ) -> Any:
        batch = torch.arange(len(faces))[:, None, None]
        corners = vertices[batch, faces.clamp_min(0)].flatten(2)
        valid = (faces >= 0).all(-1)
        recon = (self.net(corners) - corners).square().mean(-1)[valid].mean()
        commit = torch.stack([self.net.weight.square().mean(), self.net.bias.square().mean()])
        return recon + commit.sum(), (recon, commit)

    def tokenize(self, vertices: Tensor, faces: Tensor) -> Tensor:
        return faces * 0 + int(self.net.weight.sum() > 0)


class MeshTransformer(nn.Module):
    pad_id = -1

    def __init__(self) -> None:
        super().__init__()
        self.autoencoder = MeshAutoencoder().requires_grad_(False)
        self.net = nn.Linear(9, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(
        self,
        *,
        vertices: Tensor,
        faces: Tensor,
        face_edges: Tensor | None = None,
        texts: list[str] | None = None,
    ) -> Tensor:
        batch = torch.arange(len(faces))[:, None, None]
        corners = vertices[batch, faces.clamp_min(0)].flatten(2)
        codes = self.autoencoder.net(corners)
        wanted = torch.tensor([float(len(text)) for text in texts])
        return (self.net(self.dropout(codes)).mean((1, 2)) - wanted).square().mean()


# ---- datasets


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def token_pairs() -> list[Any]:
    """Pairs in the order of the package, in the other order, and as dictionaries."""
    pairs = []
    for i in range(24):
        semantic = (numbers(4, seed=i) * 5).long()
        acoustic = (numbers(6, 2, seed=100 + i) * 8).long()
        named = {"semantic_token_ids": semantic, "acoustic_token_ids": acoustic}
        pairs.append([(semantic, acoustic), (acoustic, semantic), named][i % 3])
    return pairs


def music() -> list[Any]:
    clips = [numbers(16 + i % 3, seed=i) - 0.5 for i in range(24)]
    texts = [(numbers(3 + i % 2, seed=50 + i) * 10).long() for i in range(24)]
    return [(w, t) if i % 2 else (t, w) for i, (w, t) in enumerate(zip(clips, texts))]


def videos() -> list[Tensor]:
    return [numbers(3, 3, 8, 8, seed=i) for i in range(24)]


def meshes() -> list[Any]:
    items: list[Any] = []
    for i in range(24):
        faces = torch.tensor([[0, 1, 2], [1, 2, 3], [0, 2, 3]][: 2 + i % 2])
        named = {"vertices": numbers(4, 3, seed=i), "faces": faces, "texts": "a" * (i % 4)}
        items.append(named)
    return items


def write_images(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(24):
        pixels = (numbers(8, 8, 3, seed=i).numpy() * 255).astype(np.uint8)
        Image(pixels).save(folder / f"{i:02d}")
    return folder


# ---- trainers


@dataclass(frozen=True)
class Contract:
    """A stand-in and how its trainer is constructed."""

    build_model: Callable[[], nn.Module]
    build_trainer: Callable[..., Trainer[Any]]
    names: tuple[str, ...]
    """Names of the research package that `train_step` returns."""


def soundstorm(model: nn.Module, folder: Path, **settings: Any) -> Trainer[Any]:
    defaults: dict[str, Any] = {
        "num_warmup_steps": 2,
        "dataset": token_pairs(),
        "save_model_every": 2,
        "save_results_every": 2,
    }
    return SoundStormTrainer(model, results_folder=folder / "run", **(defaults | settings))


def mulan(model: nn.Module, folder: Path, **settings: Any) -> Trainer[Any]:
    defaults: dict[str, Any] = {"save_model_every": 2, "data_max_length": 16}
    return MuLaNTrainer(model, music(), results_folder=folder / "run", **(defaults | settings))


def video(model: nn.Module, folder: Path, **settings: Any) -> Trainer[Any]:
    defaults: dict[str, Any] = {
        "dataset": videos(),
        "checkpoint_every_step": 2,
        "validate_every_step": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 1,
        "discr_start_after_step": 1,
    }
    return VideoTokenizerTrainer(model, results_folder=folder / "run", **(defaults | settings))


def vqgan(model: nn.Module, folder: Path, **settings: Any) -> Trainer[Any]:
    images = folder / "images"
    defaults: dict[str, Any] = {
        "folder": images if images.exists() else write_images(images),
        "image_size": 8,
        "save_model_every": 2,
        "save_results_every": 2,
    }
    return VQGanVAETrainer(model, results_folder=folder / "run", **(defaults | settings))


def mesh_autoencoder(model: nn.Module, folder: Path, **settings: Any) -> Trainer[Any]:
    defaults: dict[str, Any] = {"checkpoint_every": 2, "grad_accum_every": 1, "warmup_steps": 1}
    folder = folder / "run"
    return MeshAutoencoderTrainer(
        model, meshes(), checkpoint_folder=folder, **(defaults | settings)
    )


def mesh_transformer(model: nn.Module, folder: Path, **settings: Any) -> Trainer[Any]:
    defaults: dict[str, Any] = {"checkpoint_every": 2, "grad_accum_every": 1, "warmup_steps": 1}
    folder = folder / "run"
    return MeshTransformerTrainer(
        model, meshes(), checkpoint_folder=folder, **(defaults | settings)
    )


CONTRACTS = {
    "soundstorm": Contract(SoundStorm, soundstorm, ("loss", "generator_loss")),
    "mulan": Contract(MuLaN, mulan, ("loss",)),
    "video": Contract(VideoTokenizer, video, ("total_loss", "recon_loss", "discr_loss")),
    "vqgan": Contract(VQGanVAE, vqgan, ("loss", "discr_loss")),
    "mesh-autoencoder": Contract(
        MeshAutoencoder, mesh_autoencoder, ("total_loss", "recon_loss", "commit_loss")
    ),
    "mesh-transformer": Contract(MeshTransformer, mesh_transformer, ("loss",)),
}


def build(contract: str, folder: Path, **settings: Any) -> Trainer[Any]:
    """Build a trainer of a new stand-in with weights that are always the same."""
    torch.manual_seed(0)
    defaults = {"num_train_steps": 4, "batch_size": 4}
    one = CONTRACTS[contract]
    return one.build_trainer(one.build_model(), folder, **(defaults | settings))


def train_and_store(folder: str, contract: str, settings: dict[str, Any]) -> None:
    """Train a stand-in; the main process stores its weights. Called by worker processes."""
    trainer = build(contract, Path(folder), **settings)
    path = Path(folder) / "saved"
    trainer.save(path)
    trainer.load(path)
    trainer.train()
    if trainer.is_main:
        torch.save(trainer.model.state_dict(), Path(folder) / "weights.pt")
