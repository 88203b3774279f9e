"""Trainers for images: VQGAN and MaskGIT, with the parameters of muse-maskgit-pytorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

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
from tessera.run.config import Run, encode
from tessera.run.directory import RunDirectory
from tessera.run.resolve import resolve_run
from tessera.run.train import build_task
from tessera.sampling.schedules import Schedule
from tessera.trainers.arguments import build_ema_config, build_engine_config, check_arguments
from tessera.trainers.base import Trainer, adopt_model
from tessera.trainers.foreign import ForeignRun
from tessera.trainers.foreign_images import ForeignVQGANTask, read_images

DISCRIMINATOR = PatchDiscriminatorConfig()
TRANSFORMER = MaskedTransformerConfig()


class VQGanVAETrainer(Trainer[VQGAN]):
    """Train an image tokenizer on a folder of images, with a discriminator unless it is None.

    A step has `batch_size * grad_accum_every` examples, divided between the processes. `vae` itself
    is trained. `workers` is the number of processes that load data.

    As in the research package, the adversarial term is scaled by the adaptive ratio of gradient
    norms and the gradient penalty has the weight 10; those of the recipe `images-vqgan` are lower.

    A model of another package is trained as it is if it is called like the VQGanVAE of
    muse-maskgit-pytorch (`trainers/foreign_images.py`), with its own losses and discriminator.
    """

    result_names = {"discr_loss": ("discriminator/loss",)}

    @check_arguments
    def __init__(
        self,
        vae: VQGAN | nn.Module,
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
        workers: int = 0,
    ) -> None:
        optimizer = OptimizerConfig(
            name="adam", lr=lr, betas=(0.9, 0.999), max_grad_norm=max_grad_norm
        )
        discriminator_optimizer = replace(optimizer, max_grad_norm=discr_max_grad_norm)
        data = ImageDataConfig(
            path=str(folder),
            size=image_size,
            channels=find_channels(vae),
            flip=True,
            crop="centre",
            val_fraction=valid_frac,
            split_seed=random_split_seed,
        )
        engine = build_engine_config(
            steps=num_train_steps,
            micro_batch_size=batch_size,
            grad_accum_steps=grad_accum_every,
            validate_every=save_results_every,
            checkpoint_every=save_model_every,
            num_workers=workers,
            ema=build_ema_config(use_ema, ema_beta, ema_update_after_step, ema_update_every),
            accelerate_kwargs=accelerate_kwargs,
        )
        if not isinstance(vae, VQGAN):
            foreign = ForeignVQGANTask(vae, optimizer, discriminator_optimizer)
            arguments = {
                "optimizer": encode(optimizer),
                "discr_max_grad_norm": discr_max_grad_norm,
                "data": encode(data),
            }
            run = ForeignRun(foreign, read_images(data), engine, arguments)
            super().__init__(run, results_folder)
            return
        adversary = None
        if discriminator is not None:
            adversary = ImageAdversaryConfig(
                discriminator=replace(discriminator, channels=vae.config.channels),
                adaptive=True,
                weight=1.0,
                gp_weight=10.0,
                gp_center=1.0,
                gp_every=apply_grad_penalty_every,
                optimizer=discriminator_optimizer,
            )
        own_run = Run(
            recipe="images-vqgan",
            task=ImageTokenizerConfig(
                model=vae.config,
                reconstruction=ImageReconstructionConfig(perceptual=perceptual),
                adversary=adversary,
                optimizer=optimizer,
            ),
            data=data,
            engine=engine,
        )
        task = build_task(own_run)
        adopt_model(task, vae)
        super().__init__(own_run, results_folder, task)


def find_channels(vae: VQGAN | nn.Module) -> int:
    """Return the number of channels of a model's images, by default 3."""
    return vae.config.channels if isinstance(vae, VQGAN) else int(getattr(vae, "channels", 3))


class MaskGitTrainer(Trainer[MaskedModel]):
    """Train text-to-image generation on a folder of images with captions.

    `tokenizer` is the run directory of a trained tokenizer. The research package has the networks
    but no trainer for them; the parameters are those of its tokenizer's trainer and of its MaskGit.
    With `low_res_tokenizer`, the run of a tokenizer of low-resolution images, super-resolution is
    trained.
    """

    @check_arguments
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
        workers: int = 0,
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
                num_workers=workers,
                ema=build_ema_config(use_ema, ema_beta, ema_update_after_step, ema_update_every),
                accelerate_kwargs=accelerate_kwargs,
            ),
        )
        resolved = resolve_run(run, {"data.size"}, RunDirectory(results_folder))
        super().__init__(resolved.run, results_folder)
