"""The tokenizer task: rebuild an example from few symbols.

Two updates. `model` descends what the medium calls a bad reconstruction, what the quantizer asks for, and, once they have
started, what the judges see. Each discriminator descends its own error on the reconstruction the model has just made:
there is one reconstruction per step, kept with the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from tessera.engine.optimizer import OptimizerConfig
from tessera.engine.task import Alarm, Batch, Headline, Loss, Meeting, Task, Update
from tessera.losses.adversarial import (
    balanced_adversarial,
    gradient_penalty,
    hinge_discriminator,
    hinge_generator,
    non_saturating_discriminator,
    non_saturating_generator,
)
from tessera.losses.metrics import code_perplexity, code_usage
from tessera.models.patch_discriminator import PatchDiscriminatorConfig
from tessera.models.vqgan import VQGANConfig
from tessera.tasks.fidelity import ImageFidelityConfig


@dataclass(frozen=True, kw_only=True)
class AdversaryConfig:
    discriminator: PatchDiscriminatorConfig = field(default_factory=PatchDiscriminatorConfig)
    loss: Literal["hinge", "non_saturating"] = "hinge"
    weight: float = 0.1
    """Strength of the adversarial term; with `adaptive`, a factor on the measured ratio."""
    adaptive: bool = False
    """Weigh the term by the ratio of gradient norms at the last layer (Esser 2021, eq. 7). It is measured per micro-batch, so
    accumulation is then no longer exactly one batch."""
    ceiling: float = 1e4
    """Largest adaptive ratio."""
    starts: int = 0
    """The discriminator learns, and the model listens to it, from this step on."""
    ramp: int = 0
    """Steps over which the model's attention to it grows from nothing."""
    penalty: float = 0.01
    """Weight of the gradient penalty; 0 leaves it out. A zero-centred one of 0.1 already silences a small judge."""
    penalty_every: int = 4
    """Steps between gradient penalties; each then counts that many times."""
    penalty_centre: float = 0.0
    """The gradient norm that is not penalised: 0 (R1) or 1 (WGAN-GP)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    door: ClassVar[str] = "Tokenizer"
    """What opens such a run in Python."""
    model: VQGANConfig = field(default_factory=VQGANConfig)
    fidelity: ImageFidelityConfig = field(default_factory=ImageFidelityConfig)
    adversary: AdversaryConfig | None = None
    """A discriminator that learns to tell reconstructions from originals; none leaves nothing of it behind."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def suits(self, data: Any) -> None:
        self.model.suits(data)
        self.fidelity.suits(data)

    def parts(self) -> dict[str, str]:
        """It stands on no other run."""
        return {}

    def remark(self) -> str:
        """What a person should know of this choice before it runs."""
        return self.fidelity.remark()

    def published(self) -> TokenizerConfig:
        """All that using it needs: no judges, no networks that only training and measuring ask."""
        return replace(self, adversary=None, fidelity=self.fidelity.bare())

    def build(self) -> TokenizerTask:
        return TokenizerTask(self)


class TokenizerTask(Task):
    headline = Headline(metric="psnr")

    def __init__(self, config: TokenizerConfig):
        super().__init__()
        self.config = config
        self.model = config.model.build()
        self.fidelity = config.fidelity.build()
        update = Update(
            name="model", trains=self.model, loss=self.rebuild, optimizer=config.optimizer, prepare=self.look_at_whole_batch
        )
        self.updates = (update,)
        self.alarms = ALARMS
        if config.adversary is not None:
            self.discriminator = config.adversary.discriminator.build()
            judge = Update(
                name="discriminator",
                trains=self.discriminator,
                loss=self.tell_apart,
                optimizer=config.adversary.optimizer,
                starts=config.adversary.starts,
            )
            self.updates += (judge,)
            self.alarms += ADVERSARY_ALARMS

    # ---- losses

    def rebuild(self, batch: Batch, step: int) -> Loss:
        target = self.fidelity.target(batch.examples)
        rebuilt = self.model(target)
        if self.config.adversary is not None:
            batch.kept["rebuilt"] = rebuilt.output.detach()
        terms = self.fidelity.terms(rebuilt.output, target)
        metrics: dict[str, Any] = {"contrast": partial(contrast, thinned(rebuilt.output.detach()), target)}
        if self.config.adversary is not None and step >= self.config.adversary.starts:
            terms, heard = self.heed_judge(terms, rebuilt.output, step)
            metrics |= heard
        return Loss(terms | rebuilt.penalties, metrics)

    def heed_judge(self, terms: dict[str, Tensor], output: Tensor, step: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Adds the adversarial term, weighed as configured."""
        adversary = self.config.adversary
        assert adversary is not None
        hinge = adversary.loss == "hinge"
        fooled = (hinge_generator if hinge else non_saturating_generator)(self.discriminator(output))
        attention = min(1.0, (step - adversary.starts + 1) / max(1, adversary.ramp))
        if not adversary.adaptive:
            return terms | {"adversarial": attention * adversary.weight * fooled}, {}
        balanced = balanced_adversarial(terms, fooled, output, self.model.last_layer, adversary.ceiling)
        heard = attention * adversary.weight * balanced.adversarial
        return balanced.reconstruction | {"adversarial": heard}, {"adversarial_weight": balanced.weight}

    def tell_apart(self, batch: Batch, step: int) -> Loss:
        adversary = self.config.adversary
        assert adversary is not None
        real, fake = self.fidelity.target(batch.examples), batch.kept["rebuilt"]
        hinge = adversary.loss == "hinge"
        real_logits, fake_logits = self.discriminator(torch.cat([real, fake])).chunk(2)
        terms = {"apart": (hinge_discriminator if hinge else non_saturating_discriminator)(real_logits, fake_logits)}
        if adversary.penalty and step % adversary.penalty_every == 0:
            penalty = gradient_penalty(self.discriminator, real, adversary.penalty_centre)
            terms["penalty"] = adversary.penalty * adversary.penalty_every * penalty
        accuracy = partial(told_apart, real_logits.detach(), fake_logits.detach())
        return Loss(terms, {"accuracy": accuracy, "real": real_logits.detach().mean, "fake": fake_logits.detach().mean})

    def look_at_whole_batch(self, micros: Sequence[Batch], step: int, meeting: Meeting) -> None:
        """A quantizer whose penalty is no mean over examples sees all micro-batches of all processes first."""
        quantizer = self.model.quantizer
        if not quantizer.whole_batch or len(micros) * meeting.processes == 1:
            return
        with torch.no_grad():
            seen = [quantizer.observe(self.model.latent(self.fidelity.target(batch.examples))) for batch in micros]
        quantizer.expect(meeting.sum(torch.stack(seen).sum(0)))

    # ---- validation and samples

    def observe(self, batch: Batch) -> dict[str, Tensor]:
        target = self.fidelity.target(batch.examples)
        rebuilt = self.model(target)
        counts = torch.bincount(rebuilt.codes.flatten(), minlength=self.model.vocabulary)
        examples = torch.tensor(len(batch), device=target.device)
        return {"examples": examples, "codes": counts, **self.fidelity.observe(rebuilt.output, target)}

    def conclude(self, totals: dict[str, Tensor]) -> dict[str, float]:
        numbers = self.fidelity.conclude(totals)
        return numbers | {"usage": float(code_usage(totals["codes"])), "perplexity": float(code_perplexity(totals["codes"]))}

    def sample(self, batch: Batch) -> list[Any]:
        target = self.fidelity.target(batch.examples)
        return self.fidelity.shown(self.model(target).output, target)


def told_apart(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    return ((real_logits > 0).float().mean() + (fake_logits < 0).float().mean()) / 2


def thinned(values: Tensor) -> Tensor:
    """Every 16th number of each example, as a copy: a sign of health may not hold on to what it watches over."""
    return values.flatten(1)[:, ::16].clone()


@torch.no_grad()
def contrast(output: Tensor, target: Tensor) -> Tensor:
    """A cheap sign of health: the spread of a thinned reconstruction against that of its original, near 0 if it is flat."""
    made_B, real_B = spread(torch.stack([output, thinned(target)]).float())
    return (made_B / real_B.clamp_min(1e-3)).mean()


def spread(rows: Tensor) -> Tensor:
    """The standard deviation along the last axis, from two moments, since torch's own takes ten times as long on a CPU."""
    return (rows.square().mean(-1) - rows.mean(-1).square()).clamp_min(0).sqrt()


ALARMS = (
    Alarm(
        name="flat output",
        metric="model/contrast",
        below=0.1,
        patience=5,
        after=100,
        remedy="The reconstructions have almost no contrast. Lower the learning rate, or start the discriminator later.",
    ),
    Alarm(
        name="codebook out of use",
        metric="average/usage",
        below=0.2,
        patience=2,
        after=500,
        remedy="Most symbols are never used. Take the fsq quantizer or a smaller codebook.",
    ),
    Alarm(
        name="the average lags",
        metric="average/psnr",
        below=5.0,
        patience=3,
        after=500,
        remedy="The averaged model is far from the pictures. Lower the average's decay for so short a run.",
    ),
)

ADVERSARY_ALARMS = (
    Alarm(
        name="the discriminator wins",
        metric="discriminator/accuracy",
        above=0.995,
        patience=50,
        remedy="It tells every reconstruction from its original. Lower its rate, raise the penalty, or lower the weight.",
    ),
)
