"""The tokenizer task: rebuild an example from few symbols.

`model` descends what the medium calls a bad reconstruction, what the quantizer asks for, and, once
they have started, what the judges see. Each judge is an update of its own: it descends its error in
telling apart originals and the reconstructions that the model has just made. There is one
reconstruction per step, kept with the micro-batch.

What a good reconstruction is and who judges it, a medium says in a file of its own:
`modalities/image/reconstruction.py`, say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Alarm, Batch, BestMetric, Loss, ProcessGroup, Task, Update
from tessera.losses.adversarial import (
    balanced_adversarial,
    feature_matching_B,
    gradient_penalty,
    hinge_discriminator,
    hinge_generator,
    non_saturating_discriminator,
    non_saturating_generator,
)
from tessera.losses.balancer import balanced
from tessera.metrics.image import code_perplexity, code_usage
from tessera.modalities.image.discriminator import Discriminated
from tessera.modalities.image.vqgan import Reconstruction


class ReconstructionLoss(nn.Module):
    """What makes a good reconstruction of one medium: the loss, the measures on held-out examples,
    and how to show it."""

    best_metric: BestMetric
    alarms: tuple[Alarm, ...] = ()
    weights: Mapping[str, float] = {}
    """Of the terms, by their names: those that can be brought into balance."""

    def target(self, examples: Any) -> Any:
        """What the model sees of some examples, and has to give back."""
        raise NotImplementedError

    def model_kwargs(self, examples: Any) -> dict[str, Tensor]:
        """What the model is told beside that, by the names of its arguments: how much of each
        example is real, say."""
        return {}

    def preprocess(self, target: Any, data: Any, dtype: torch.dtype) -> Any:
        """As the model of a run on these data takes it."""
        raise NotImplementedError

    def media(self, output: Tensor) -> list[Any]:
        """What the model gives, as something a person can open."""
        raise NotImplementedError

    def terms(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The loss: weighted terms, each a mean over examples."""
        raise NotImplementedError

    def train_metrics(self, output: Tensor, batch: Batch) -> dict[str, Callable[[], Tensor]]:
        """Signs of health, which are worked out only when they are logged: they hold on to nothing
        large."""
        return {}

    def eval_step(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Measures of held-out examples, summed over them."""
        raise NotImplementedError

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """The numbers that these sums amount to."""
        raise NotImplementedError

    def shown(self, output: Tensor, batch: Batch) -> list[Any]:
        """Reconstructions beside their originals."""
        raise NotImplementedError


@dataclass(frozen=True)
class Discriminator:
    """A discriminator, and what it is shown."""

    network: nn.Module
    """Gives logits, high for what looks real; its `judged` also gives what its layers saw."""
    view: Callable[[Tensor, Batch], Tensor]
    """What it sees of originals or reconstructions: all, or a part, which is the same part of
    both."""
    weight: float = 1.0
    """How much the model heeds it, beside the others."""


@dataclass(frozen=True, kw_only=True)
class AdversaryConfig:
    """Any number of judges that learn to tell reconstructions from originals; a medium adds
    which."""

    loss: Literal["hinge", "non_saturating"] = "hinge"
    weight: float = 0.1
    """Strength of the adversarial term; with `adaptive`, a factor on the measured ratio."""
    feature_matching_weight: float = 0.0
    """Strength of feature matching: to the layers of the judges, reconstructions are to look as
    originals do. 0: none."""
    adaptive: bool = False
    """Weigh the term by the ratio of gradient norms at the last layer (Esser 2021, eq. 7). It is
    measured per micro-batch, so accumulation is then no longer exactly one batch."""
    adaptive_max: float = 1e4
    """Largest adaptive ratio."""
    start_step: int = 0
    """The discriminator learns, and the model listens to it, from this step on."""
    warmup_steps: int = 0
    """Steps over which the model's attention to it grows from nothing."""
    penalty: float = 0.01
    """Weight of the gradient penalty; 0 leaves it out. A zero-centred one of 0.1 already silences a
    small judge."""
    gp_every: int = 4
    """Steps between gradient penalties; each then counts that many times."""
    gp_center: float = 0.0
    """The gradient norm that is not penalised: 0 (R1) or 1 (WGAN-GP)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def validate_data(self, data: Any) -> None:
        """Refuses data that a judge cannot see."""

    def discriminators(self) -> dict[str, Discriminator]:
        """By name: it is their update's name, too."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """A medium says in a subclass which networks these fields can be."""

    entry_point: ClassVar[str] = "Tokenizer"
    """What opens such a run in Python."""
    model: Any
    reconstruction: Any
    adversary: Any = None
    balancer: bool = False
    """Each term pulls at the output with the share of the strength that its weight says, whatever
    its size (EnCodec's balancer); for media whose terms have weights: sound."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def validate_data(self, data: Any) -> None:
        for part in (self.model, self.reconstruction, self.adversary):
            if part is not None:
                part.validate_data(data)

    def parts(self) -> dict[str, str]:
        """It stands on no other run."""
        return {}

    def notice(self) -> str:
        """What a person should know of this choice before it runs."""
        return self.reconstruction.notice()

    def for_inference(self) -> TokenizerConfig:
        """All that using it needs: no judges, no networks that only training and measuring ask."""
        return replace(self, adversary=None, reconstruction=self.reconstruction.for_inference())

    def build(self) -> TokenizerTask:
        return TokenizerTask(self)


class TokenizerTask(Task):
    def __init__(self, config: TokenizerConfig):
        super().__init__()
        self.config = config
        self.model = config.model.build()
        self.reconstruction: Any = config.reconstruction.build()
        update = Update(
            name="model",
            trains=self.model,
            loss=self.reconstruction_loss,
            optimizer=config.optimizer,
            prepare=self.look_at_whole_batch,
        )
        self.updates = (update,)
        self.best_metric = self.reconstruction.best_metric
        self.alarms = (*self.reconstruction.alarms, OUT_OF_USE)
        self.discriminators: Mapping[str, Discriminator] = (
            config.adversary.discriminators() if config.adversary is not None else {}
        )
        for name, judge in self.discriminators.items():
            self.add_module(name, judge.network)
            self.updates += (self.update_of(name),)
            self.alarms += (alarm_of(name),)

    def update_of(self, name: str) -> Update:
        adversary = self.config.adversary
        return Update(
            name=name,
            trains=self.discriminators[name].network,
            loss=partial(self.discriminator_loss, self.discriminators[name]),
            optimizer=adversary.optimizer,
            start_step=adversary.start_step,
        )

    # ---- losses

    def reconstruction_loss(self, batch: Batch, step: int) -> Loss:
        rebuilt = self.model(self.reconstruction.target(batch.examples), **self.told(batch))
        terms = self.reconstruction.terms(rebuilt.output, batch)
        metrics: dict[str, Any] = dict(
            self.reconstruction.train_metrics(rebuilt.output.detach(), batch)
        )
        if self.discriminators:
            batch.scratch["rebuilt"] = rebuilt.output.detach()
        if self.discriminators and step >= self.config.adversary.start_step:
            terms, heard = self.adversarial_terms(terms, rebuilt.output, batch, step)
            metrics |= heard
        if self.config.balancer and torch.is_grad_enabled():
            terms = self.in_balance(terms, rebuilt.output)
        return Loss(terms | rebuilt.penalties, metrics)

    def in_balance(self, terms: dict[str, Tensor], output: Tensor) -> dict[str, Tensor]:
        adversary = self.config.adversary
        judged = (
            {"adversarial": adversary.weight, "matching": adversary.feature_matching_weight}
            if adversary is not None
            else {}
        )
        weights = {**self.reconstruction.weights, **judged}
        return balanced(
            {name: term / weights.get(name, 1.0) for name, term in terms.items()}, weights, output
        )

    def told(self, batch: Batch) -> dict[str, Tensor]:
        """What the model is told beside the target. How many levels an example is written in, where
        some are left out, is drawn from its own generator."""
        told = self.reconstruction.model_kwargs(batch.examples)
        if not self.model.quantizer.has_quantizer_dropout:
            return told
        chance_B = torch.stack(
            [torch.rand((), generator=generator) for generator in batch.generators()]
        )
        return told | {
            "keep_B": self.model.quantizer.num_quantizers_to_keep(chance_B).to(
                next(self.model.parameters()).device
            )
        }

    def adversarial_terms(
        self, terms: dict[str, Tensor], output: Tensor, batch: Batch, step: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Adds the adversarial term: what all judges together see, weighed as configured."""
        adversary = self.config.adversary
        unconvinced = hinge_generator if adversary.loss == "hinge" else non_saturating_generator
        judged = {
            name: judge.network.judged(judge.view(output, batch))
            for name, judge in self.discriminators.items()
        }
        adversarial = torch.stack(
            [
                self.discriminators[name].weight * unconvinced(one.logits)
                for name, one in judged.items()
            ]
        ).sum()
        attention = min(1.0, (step - adversary.start_step + 1) / max(1, adversary.warmup_steps))
        if adversary.feature_matching_weight:
            terms = terms | {
                "matching": attention
                * adversary.feature_matching_weight
                * self.feature_matching_loss(judged, batch)
            }
        if not adversary.adaptive:
            return terms | {"adversarial": attention * adversary.weight * adversarial}, {}
        balanced = balanced_adversarial(
            terms, adversarial, output, self.model.last_layer, adversary.adaptive_max
        )
        heard = attention * adversary.weight * balanced.adversarial
        return balanced.reconstruction | {"adversarial": heard}, {
            "adversarial_weight": balanced.weight
        }

    def feature_matching_loss(self, judged: dict[str, Discriminated], batch: Batch) -> Tensor:
        """How differently the judges' layers see reconstructions and originals."""
        original = self.reconstruction.target(batch.examples)
        apart = []
        for name, fake in judged.items():
            with torch.no_grad():
                real = self.discriminators[name].network.judged(
                    self.discriminators[name].view(original, batch)
                )
            apart.append(feature_matching_B(real.features, fake.features).mean())
        return torch.stack(apart).mean()

    def discriminator_loss(self, judge: Discriminator, batch: Batch, step: int) -> Loss:
        adversary = self.config.adversary
        real = judge.view(self.reconstruction.target(batch.examples), batch)
        fake = judge.view(batch.scratch["rebuilt"], batch)
        confused = (
            hinge_discriminator if adversary.loss == "hinge" else non_saturating_discriminator
        )
        real_logits, fake_logits = judge.network(torch.cat([real, fake])).chunk(2)
        terms = {"apart": confused(real_logits, fake_logits)}
        if adversary.penalty and step % adversary.gp_every == 0:
            penalty = gradient_penalty(judge.network, real, adversary.gp_center)
            terms["penalty"] = adversary.penalty * adversary.gp_every * penalty
        accuracy = partial(told_apart, real_logits.detach(), fake_logits.detach())
        return Loss(
            terms,
            {
                "accuracy": accuracy,
                "real": real_logits.detach().mean,
                "fake": fake_logits.detach().mean,
            },
        )

    def look_at_whole_batch(self, micros: Sequence[Batch], step: int, dist: ProcessGroup) -> None:
        """A quantizer whose penalty is no mean over examples sees all micro-batches of all
        processes first."""
        quantizer = self.model.quantizer
        if not quantizer.needs_global_stats or len(micros) * dist.world_size == 1:
            return
        with torch.no_grad():
            seen = [
                self.model.eval_step(self.reconstruction.target(batch.examples), **self.told(batch))
                for batch in micros
            ]
        quantizer.set_global_stats(dist.all_reduce_sum(torch.stack(seen).sum(0)))

    # ---- validation and samples

    def eval_step(self, batch: Batch) -> dict[str, Tensor]:
        rebuilt = self.rebuilt(batch)
        counts_LV = torch.stack([self.counted(tokens) for tokens in self.by_level(rebuilt.tokens)])
        examples = torch.tensor(len(batch), device=counts_LV.device)
        return {
            "examples": examples,
            "codes": counts_LV,
            **self.reconstruction.eval_step(rebuilt.output, batch),
        }

    def by_level(self, tokens: Tensor) -> Sequence[Tensor]:
        return tokens.unbind(-1) if self.model.quantizer.levels > 1 else (tokens,)

    def counted(self, tokens: Tensor) -> Tensor:
        """How often each symbol was written; -1 is padding, in media whose examples differ in
        size."""
        return torch.bincount(tokens[tokens >= 0], minlength=self.model.vocab_size)

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Of several levels each has symbols of its own, and what is told of all is the mean over
        levels."""
        numbers = self.reconstruction.compute_metrics(totals)
        for name, tell in (("usage", code_usage), ("perplexity", code_perplexity)):
            told_L = tell(totals["codes"])
            numbers[name] = float(told_L.mean())
            if len(told_L) > 1:
                numbers |= {
                    f"{name}_{level}": float(told) for level, told in enumerate(told_L, start=1)
                }
        return numbers

    def rebuilt(self, batch: Batch) -> Reconstruction:
        """As a finished model does it: in all levels."""
        return self.model(
            self.reconstruction.target(batch.examples),
            **self.reconstruction.model_kwargs(batch.examples),
        )

    def sample(self, batch: Batch) -> list[Any]:
        return self.reconstruction.shown(self.rebuilt(batch).output, batch)


def told_apart(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    return ((real_logits > 0).float().mean() + (fake_logits < 0).float().mean()) / 2


OUT_OF_USE = Alarm(
    name="codebook out of use",
    metric="val_ema/usage",
    below=0.2,
    patience=2,
    after=500,
    hint="Most symbols are never used. Take the fsq quantizer or a smaller codebook.",
)


def alarm_of(judge: str) -> Alarm:
    return Alarm(
        name=f"the {judge} wins",
        metric=f"{judge}/accuracy",
        above=0.995,
        patience=50,
        hint="It tells every reconstruction from its original. Lower its rate, raise the penalty, or lower the weight.",
    )
