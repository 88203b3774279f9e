"""The front doors that the research systems had, as thin constructors over the one engine.

    trainer = VQGanVAETrainer(VQGAN(VQGANConfig()), folder="pictures", image_size=64, batch_size=8, num_train_steps=1000)
    trainer.train(log_fn=print)

The parameters and their defaults are theirs; what they do is what they say. The results folder is a run's folder: the
command line's verbs work on it, a second construction goes on where the first stopped, and nothing is asked or deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tessera.config import Run
from tessera.data.images import Images
from tessera.engine import checkpoint
from tessera.engine.average import AverageConfig
from tessera.engine.engine import Engine, EngineConfig, Moved, Precision, averaged
from tessera.engine.optimizer import OptimizerConfig
from tessera.engine.task import Task
from tessera.folder import Refused, RunFolder
from tessera.models.masked_transformer import CriticConfig, CriticHeadConfig, MaskedTransformerConfig
from tessera.models.patch_discriminator import PatchDiscriminatorConfig
from tessera.models.vqgan import VQGAN
from tessera.sampling.schedules import Schedule
from tessera.start import card_of, engine_of, task_of, write_card
from tessera.tasks.fidelity import ImageFidelityConfig, PerceptualConfig
from tessera.tasks.masked import MaskedConfig, MaskingConfig
from tessera.tasks.tokenizer import AdversaryConfig, TokenizerConfig

Logs = dict[str, Any]
JUDGE = PatchDiscriminatorConfig()
TRANSFORMER = MaskedTransformerConfig()


class Trainer:
    """What all front doors share: train, one step, save, load."""

    def __init__(self, run: Run, results_folder: str | Path, task: Task | None = None) -> None:
        self._heard: Callable[[Logs], None] | None = None
        self.run = run
        self.engine: Engine = engine_of(run, RunFolder(results_folder), task=task, on_log=self._tell)
        self._steps: Iterator[dict[str, Moved]] = self.engine.steps()

    @property
    def steps(self) -> int:
        """Steps done so far."""
        return self.engine.done

    @property
    def model(self) -> Any:
        """The network in training, as the optimizer left it."""
        return self.engine.task.model

    def train(self, log_fn: Callable[[Logs], None] | None = None) -> None:
        """All steps that are left; `log_fn` hears each record: a step's numbers, or a validation's."""
        self._heard = log_fn
        for _ in self._steps:
            pass
        if self.engine.meeting.main:
            write_card(self.run, self.engine.folder, card_of(self.engine.folder))

    def train_step(self) -> Logs:
        """One step, and its losses; nothing once the last step is done."""
        moved = next(self._steps, None)
        if moved is None:
            return {}
        return {f"{name}/{k}": float(v) for name, one in moved.items() for k, v in averaged(one.losses).items()}

    def save(self, path: str | Path) -> None:
        """Everything needed to go on, as a folder of its own: complete, or not there."""
        if self.engine.meeting.main:
            checkpoint.write_at(Path(path), self.engine.snapshot())

    def load(self, path: str | Path) -> None:
        """Goes to the step that `save`, or the run itself, wrote: weights, average, optimizers, step."""
        problem = checkpoint.damage(Path(path))
        if problem is not None:
            raise Refused(f"{path} cannot be loaded: {problem}.")
        self.engine.restore(checkpoint.read(Path(path)))
        self.engine.meeting.main_does(lambda: self.engine.folder.forget_after(self.steps))
        self._steps = self.engine.steps()

    def _tell(self, record: Logs) -> None:
        if self._heard is not None:
            self._heard(record)


class VQGanVAETrainer(Trainer):
    """Trains an image tokenizer on a folder of pictures, with a discriminator unless it is None.

    `batch_size * grad_accum_every` examples make a step, whatever the number of processes that share them.
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
        adversary = AdversaryConfig(
            discriminator=discriminator,
            adaptive=True,
            weight=1.0,
            penalty=10.0,
            penalty_centre=1.0,
            penalty_every=apply_grad_penalty_every,
            optimizer=OptimizerConfig(kind="adam", rate=lr, betas=(0.9, 0.999), clip=discr_max_grad_norm),
        ) if discriminator is not None else None  # fmt: skip
        run = Run(
            recipe="images-vqgan",
            task=TokenizerConfig(
                model=vae.config,
                fidelity=ImageFidelityConfig(perceptual=perceptual),
                adversary=adversary,
                optimizer=OptimizerConfig(kind="adam", rate=lr, betas=(0.9, 0.999), clip=max_grad_norm),
            ),
            data=Images(
                path=str(folder), size=image_size, flip=True, crop="centre", validation_share=valid_frac,
                split_seed=random_split_seed,
            ),
            engine=life_of(
                num_train_steps, batch_size, grad_accum_every, save_results_every, save_model_every,
                averaged_by(use_ema, ema_beta, ema_update_after_step, ema_update_every), accelerate_kwargs,
            ),
        )  # fmt: skip
        task = task_of(run)
        task.model.load_state_dict(vae.state_dict())
        super().__init__(run, results_folder, task)


class MaskGitTrainer(Trainer):
    """Trains text to image on a folder of captioned pictures, over the symbols of a finished tokenizer run.

    The research system has the networks and no trainer; the parameters here are those of its tokenizer's trainer and of its
    MaskGit. With `smaller`, the run of a tokenizer of smaller pictures, it trains super-resolution.
    """

    def __init__(
        self,
        tokenizer: str | Path,
        *,
        folder: str | Path,
        num_train_steps: int,
        batch_size: int,
        image_size: int,
        smaller: str | Path | None = None,
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
        optimizer = OptimizerConfig(kind="adam", rate=lr, betas=(0.9, 0.999), clip=max_grad_norm)
        run = Run(
            recipe="images-maskgit" if smaller is None else "images-maskgit-superres",
            task=MaskedConfig(
                tokenizer=str(tokenizer),
                smaller=str(smaller) if smaller is not None else None,
                model=transformer,
                critic=token_critic,
                critic_optimizer=optimizer,
                masking=MaskingConfig(schedule=noise_schedule),
                drop_condition=cond_drop_prob,
                optimizer=optimizer,
            ),
            data=Images(
                path=str(folder), size=image_size, crop="centre", validation_share=valid_frac, split_seed=random_split_seed
            ),
            engine=life_of(
                num_train_steps, batch_size, grad_accum_every, save_results_every, save_model_every,
                averaged_by(use_ema, ema_beta, ema_update_after_step, ema_update_every), accelerate_kwargs,
            ),
        )  # fmt: skip
        super().__init__(run, results_folder)


def life_of(
    steps: int,
    batch_size: int,
    accumulate: int,
    results_every: int,
    model_every: int,
    average: AverageConfig,
    accelerate_kwargs: Mapping[str, Any] | None,
) -> EngineConfig:
    """Their words for the life of a run, in the engine's: a batch of theirs is a micro-batch of ours."""
    return EngineConfig(
        steps=steps,
        batch_size=batch_size * accumulate,
        accumulate=accumulate,
        log_every=1,
        validate_every=results_every,
        sample_every=results_every,
        checkpoint_every=model_every,
        average=average,
        **understood(accelerate_kwargs or {}),
    )


def averaged_by(used: bool, beta: float, update_after: int, update_every: int) -> AverageConfig:
    return AverageConfig(decay=beta if used else 0.0, update_after=update_after, update_every=update_every)


def understood(accelerate_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's words for what was meant for Accelerate; what it has no word for is refused, not dropped."""
    precisions: dict[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
    meant: dict[str, Any] = {}
    for name, value in accelerate_kwargs.items():
        if name == "mixed_precision" and value in precisions:
            meant["precision"] = precisions[value]
        elif name == "log_with":
            meant["track"] = tuple([value] if isinstance(value, str) else value)
        else:
            raise Refused(
                f"accelerate_kwargs has {name}={value!r}, which this engine does not know. It takes mixed_precision "
                "(no, bf16 or fp16) and log_with (tensorboard, wandb, trackio)."
            )
    return meant
