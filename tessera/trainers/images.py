"""Trainers for images: VQGAN and MaskGIT, with the parameters of muse-maskgit-pytorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tessera.engine.optim.config import OptimizerConfig
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.generation import ImageGeneratorConfig
from tessera.modalities.image.perceptual import PerceptualConfig
from tessera.modalities.image.reconstruction import (
    ImageAdversaryConfig,
    ImageReconstructionConfig,
    ImageTokenizerConfig,
)
from tessera.modalities.image.vqgan import VQGAN
from tessera.nn.masked_transformer import (
    CriticConfig,
    CriticHeadConfig,
    MaskedModel,
    MaskedTransformerConfig,
)
from tessera.objectives.masking import MaskingConfig
from tessera.run.config import Run
from tessera.run.train import build_task
from tessera.sampling.schedules import Schedule
from tessera.trainers.arguments import build_ema_config, build_engine_config
from tessera.trainers.base import Trainer

DISCRIMINATOR = PatchDiscriminatorConfig()
TRANSFORMER = MaskedTransformerConfig()


class VQGanVAETrainer(Trainer[VQGAN]):
    """Train an image tokenizer on a folder of images, with a discriminator unless it is None.

    A step has `batch_size * grad_accum_every` examples, divided between the processes. Training
    starts from the weights of `vae`; the trained network is `trainer.model`.
    """

    def __init__(
        self,
        vae: VQGAN,
        *,
        folder: str | Path,
        num_train_steps: int,
        batch_size: int,
        image_size: int,
        lr: float = 3e-4,
        grad_accum_every: int = 1,
        max_grad_norm: float | None = None,
        discr_max_grad_norm: float | None = None,
        save_results_every: int = 100,
        save_model_every: int = 1000,
        results_folder: str | Path = "./results",
        valid_frac: float = 0.05,
        random_split_seed: int = 42,
        use_ema: bool = True,
        ema_beta: float = 0.995,
        ema_update_after_step: int = 0,
        ema_update_every: int = 1,
        apply_grad_penalty_every: int = 4,
        accelerate_kwargs: Mapping[str, object] | None = None,
        discriminator: PatchDiscriminatorConfig | None = DISCRIMINATOR,
        perceptual: PerceptualConfig | None = None,
    ) -> None:
        optimizer = OptimizerConfig(
            name="adam", lr=lr, betas=(0.9, 0.999), max_grad_norm=max_grad_norm
        )
        adversary = None
        if discriminator is not None:
            adversary = ImageAdversaryConfig(
                discriminator=discriminator,
                adaptive=True,
                weight=1.0,
                gp_weight=10.0,
                gp_center=1.0,
                gp_every=apply_grad_penalty_every,
                optimizer=replace(optimizer, max_grad_norm=discr_max_grad_norm),
            )
        run = Run(
            recipe="images-vqgan",
            task=ImageTokenizerConfig(
                model=vae.config,
                reconstruction=ImageReconstructionConfig(perceptual=perceptual),
                adversary=adversary,
                optimizer=optimizer,
            ),
            data=ImageDataConfig(
                path=str(folder),
                size=image_size,
                flip=True,
                crop="centre",
                val_fraction=valid_frac,
                split_seed=random_split_seed,
            ),
            engine=build_engine_config(
                steps=num_train_steps,
                micro_batch_size=batch_size,
                grad_accum_steps=grad_accum_every,
                validate_every=save_results_every,
                checkpoint_every=save_model_every,
                ema=build_ema_config(use_ema, ema_beta, ema_update_after_step, ema_update_every),
                accelerate_kwargs=accelerate_kwargs,
            ),
        )
        task = build_task(run)
        task.model.load_state_dict(vae.state_dict())
        super().__init__(run, results_folder, task)


class MaskGitTrainer(Trainer[MaskedModel]):
    """Train text-to-image generation on a folder of images with captions.

    `tokenizer` is the run directory of a trained tokenizer. The research package has the networks
    but no trainer for them; the parameters are those of its tokenizer's trainer and of its MaskGit.
    With `low_res_tokenizer`, the run of a tokenizer of low-resolution images, super-resolution is
    trained.
    """

    def __init__(
        self,
        tokenizer: str | Path,
        *,
        folder: str | Path,
        num_train_steps: int,
        batch_size: int,
        image_size: int,
        low_res_tokenizer: str | Path | None = None,
        transformer: MaskedTransformerConfig = TRANSFORMER,
        token_critic: CriticConfig | CriticHeadConfig | None = None,
        noise_schedule: Schedule = "cosine",
        cond_drop_prob: float = 0.1,
        lr: float = 3e-4,
        grad_accum_every: int = 1,
        max_grad_norm: float | None = None,
        save_results_every: int = 100,
        save_model_every: int = 1000,
        results_folder: str | Path = "./results",
        valid_frac: float = 0.05,
        random_split_seed: int = 42,
        use_ema: bool = True,
        ema_beta: float = 0.995,
        ema_update_after_step: int = 0,
        ema_update_every: int = 1,
        accelerate_kwargs: Mapping[str, object] | None = None,
    ) -> None:
        optimizer = OptimizerConfig(
            name="adam", lr=lr, betas=(0.9, 0.999), max_grad_norm=max_grad_norm
        )
        run = Run(
            recipe="images-maskgit" if low_res_tokenizer is None else "images-maskgit-superres",
            task=ImageGeneratorConfig(
                tokenizer=str(tokenizer),
                low_res_tokenizer=str(low_res_tokenizer) if low_res_tokenizer is not None else None,
                model=transformer,
                critic=token_critic,
                critic_optimizer=optimizer,
                masking=MaskingConfig(schedule=noise_schedule),
                cond_drop_prob=cond_drop_prob,
                optimizer=optimizer,
            ),
            data=ImageDataConfig(
                path=str(folder),
                size=image_size,
                crop="centre",
                val_fraction=valid_frac,
                split_seed=random_split_seed,
            ),
            engine=build_engine_config(
                steps=num_train_steps,
                micro_batch_size=batch_size,
                grad_accum_steps=grad_accum_every,
                validate_every=save_results_every,
                checkpoint_every=save_model_every,
                ema=build_ema_config(use_ema, ema_beta, ema_update_after_step, ema_update_every),
                accelerate_kwargs=accelerate_kwargs,
            ),
        )
        super().__init__(run, results_folder)
