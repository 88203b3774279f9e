"""Front doors of pictures: the tokenizer's trainer, and the one of text to image over its
symbols."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.engine.optim.config import OptimizerConfig
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.discriminator import PatchDiscriminatorConfig
from tessera.modalities.image.perceptual import PerceptualConfig
from tessera.modalities.image.reconstruction import (
    ImageAdversaryConfig,
    ImageReconstructionConfig,
    ImageTokenizerConfig,
)
from tessera.modalities.image.vqgan import VQGAN
from tessera.nn.masked_transformer import CriticConfig, CriticHeadConfig, MaskedTransformerConfig
from tessera.objectives.masked import MaskedConfig, MaskingConfig
from tessera.run.config import Run
from tessera.run.train import build_task
from tessera.sampling.schedules import Schedule
from tessera.trainers.arguments import ema_config, engine_config
from tessera.trainers.base import Trainer

JUDGE = PatchDiscriminatorConfig()
TRANSFORMER = MaskedTransformerConfig()


class VQGanVAETrainer(Trainer):
    """Trains an image tokenizer on a folder of pictures, with a discriminator unless it is None.

    `batch_size * grad_accum_every` examples make a step, whatever the number of processes that
    share them.
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
        accelerate_kwargs: Mapping[str, Any] | None = None,
        discriminator: PatchDiscriminatorConfig | None = JUDGE,
        perceptual: PerceptualConfig | None = None,
    ) -> None:
        adversary = (
            ImageAdversaryConfig(
                discriminator=discriminator,
                adaptive=True,
                weight=1.0,
                gp_weight=10.0,
                gp_center=1.0,
                gp_every=apply_grad_penalty_every,
                optimizer=OptimizerConfig(
                    name="adam", lr=lr, betas=(0.9, 0.999), max_grad_norm=discr_max_grad_norm
                ),
            )
            if discriminator is not None
            else None
        )
        run = Run(
            recipe="images-vqgan",
            task=ImageTokenizerConfig(
                model=vae.config,
                reconstruction=ImageReconstructionConfig(perceptual=perceptual),
                adversary=adversary,
                optimizer=OptimizerConfig(
                    name="adam", lr=lr, betas=(0.9, 0.999), max_grad_norm=max_grad_norm
                ),
            ),
            data=ImageDataConfig(
                path=str(folder),
                size=image_size,
                flip=True,
                crop="centre",
                val_fraction=valid_frac,
                split_seed=random_split_seed,
            ),
            engine=engine_config(
                num_train_steps,
                batch_size,
                grad_accum_every,
                save_results_every,
                save_model_every,
                ema_config(use_ema, ema_beta, ema_update_after_step, ema_update_every),
                accelerate_kwargs,
            ),
        )
        task = build_task(run)
        task.model.load_state_dict(vae.state_dict())
        super().__init__(run, results_folder, task)


class MaskGitTrainer(Trainer):
    """Trains text to image on a folder of captioned pictures, over the symbols of a finished
    tokenizer run.

    The research system has the networks and no trainer; the parameters here are those of its
    tokenizer's trainer and of its MaskGit. With `low_res_tokenizer`, the run of a tokenizer of smaller
    pictures, it trains super-resolution.
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
        accelerate_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        optimizer = OptimizerConfig(
            name="adam", lr=lr, betas=(0.9, 0.999), max_grad_norm=max_grad_norm
        )
        run = Run(
            recipe="images-maskgit" if low_res_tokenizer is None else "images-maskgit-superres",
            task=MaskedConfig(
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
            engine=engine_config(
                num_train_steps,
                batch_size,
                grad_accum_every,
                save_results_every,
                save_model_every,
                ema_config(use_ema, ema_beta, ema_update_after_step, ema_update_every),
                accelerate_kwargs,
            ),
        )
        super().__init__(run, results_folder)
