"""The tokenizer task: rebuild an example from few symbols.

`model` descends what the medium calls a bad reconstruction, what the quantizer asks for, and, once they have started, what
the judges see. Each judge is an update of its own: it descends its error in telling apart originals and the reconstructions
that the model has just made. There is one reconstruction per step, kept with the micro-batch.

What a good reconstruction is and who judges it, a medium says in a file of its own: `modalities/image/reconstruction.py`, say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Alarm, Batch, Headline, Loss, Meeting, Task, Update
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
from tessera.modalities.image.discriminator import Judged
from tessera.modalities.image.vqgan import Reconstruction


class Fidelity(nn.Module):
    """What makes a good reconstruction of one medium: the loss, the measures on held-out examples, and how to show it."""

    headline: Headline
    alarms: tuple[Alarm, ...] = ()
    weights: Mapping[str, float] = {}
    """Of the terms, by their names: those that can be brought into balance."""

    def target(self, examples: Any) -> Any:
        """What the model sees of some examples, and has to give back."""
        raise NotImplementedError

    def alongside(self, examples: Any) -> dict[str, Tensor]:
        """What the model is told beside that, by the names of its arguments: how much of each example is real, say."""
        return {}

    def fitted(self, target: Any, data: Any, dtype: torch.dtype) -> Any:
        """As the model of a run on these data takes it."""
        raise NotImplementedError

    def media(self, output: Tensor) -> list[Any]:
        """What the model gives, as something a person can open."""
        raise NotImplementedError

    def terms(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """The loss: weighted terms, each a mean over examples."""
        raise NotImplementedError

    def watched(self, output: Tensor, batch: Batch) -> dict[str, Callable[[], Tensor]]:
        """Signs of health, which are worked out only when they are logged: they hold on to nothing large."""
        return {}

    def observe(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Measures of held-out examples, summed over them."""
        raise NotImplementedError

    def conclude(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """The numbers that these sums amount to."""
        raise NotImplementedError

    def shown(self, output: Tensor, batch: Batch) -> list[Any]:
        """Reconstructions beside their originals."""
        raise NotImplementedError


@dataclass(frozen=True)
class Judge:
    """A discriminator, and what it is shown."""

    network: nn.Module
    """Gives logits, high for what looks real; its `judged` also gives what its layers saw."""
    view: Callable[[Tensor, Batch], Tensor]
    """What it sees of originals or reconstructions: all, or a part, which is the same part of both."""
    weight: float = 1.0
    """How much the model heeds it, beside the others."""


@dataclass(frozen=True, kw_only=True)
class AdversaryConfig:
    """Any number of judges that learn to tell reconstructions from originals; a medium adds which."""

    loss: Literal["hinge", "non_saturating"] = "hinge"
    weight: float = 0.1
    """Strength of the adversarial term; with `adaptive`, a factor on the measured ratio."""
    matching: float = 0.0
    """Strength of feature matching: to the layers of the judges, reconstructions are to look as originals do. 0: none."""
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

    def suits(self, data: Any) -> None:
        """Refuses data that a judge cannot see."""

    def judges(self) -> dict[str, Judge]:
        """By name: it is their update's name, too."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """A medium says in a subclass which networks these fields can be."""

    door: ClassVar[str] = "Tokenizer"
    """What opens such a run in Python."""
    model: Any
    fidelity: Any
    adversary: Any = None
    balance: bool = False
    """Each term pulls at the output with the share of the strength that its weight says, whatever its size (EnCodec's
    balancer); for media whose terms have weights: sound."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def suits(self, data: Any) -> None:
        for part in (self.model, self.fidelity, self.adversary):
            if part is not None:
                part.suits(data)

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
    def __init__(self, config: TokenizerConfig):
        super().__init__()
        self.config = config
        self.model = config.model.build()
        self.fidelity: Any = config.fidelity.build()
        update = Update(
            name="model", trains=self.model, loss=self.rebuild, optimizer=config.optimizer, prepare=self.look_at_whole_batch
        )
        self.updates = (update,)
        self.headline = self.fidelity.headline
        self.alarms = (*self.fidelity.alarms, OUT_OF_USE)
        self.judges: Mapping[str, Judge] = config.adversary.judges() if config.adversary is not None else {}
        for name, judge in self.judges.items():
            self.add_module(name, judge.network)
            self.updates += (self.update_of(name),)
            self.alarms += (alarm_of(name),)

    def update_of(self, name: str) -> Update:
        adversary = self.config.adversary
        return Update(
            name=name,
            trains=self.judges[name].network,
            loss=partial(self.tell_apart, self.judges[name]),
            optimizer=adversary.optimizer,
            starts=adversary.starts,
        )

    # ---- losses

    def rebuild(self, batch: Batch, step: int) -> Loss:
        rebuilt = self.model(self.fidelity.target(batch.examples), **self.told(batch))
        terms = self.fidelity.terms(rebuilt.output, batch)
        metrics: dict[str, Any] = dict(self.fidelity.watched(rebuilt.output.detach(), batch))
        if self.judges:
            batch.kept["rebuilt"] = rebuilt.output.detach()
        if self.judges and step >= self.config.adversary.starts:
            terms, heard = self.heed_judges(terms, rebuilt.output, batch, step)
            metrics |= heard
        if self.config.balance and torch.is_grad_enabled():
            terms = self.in_balance(terms, rebuilt.output)
        return Loss(terms | rebuilt.penalties, metrics)

    def in_balance(self, terms: dict[str, Tensor], output: Tensor) -> dict[str, Tensor]:
        adversary = self.config.adversary
        judged = {"adversarial": adversary.weight, "matching": adversary.matching} if adversary is not None else {}
        weights = {**self.fidelity.weights, **judged}
        return balanced({name: term / weights.get(name, 1.0) for name, term in terms.items()}, weights, output)

    def told(self, batch: Batch) -> dict[str, Tensor]:
        """What the model is told beside the target. How many levels an example is written in, where some are left out, is
        drawn from its own generator."""
        told = self.fidelity.alongside(batch.examples)
        if not self.model.quantizer.drops_levels:
            return told
        chance_B = torch.stack([torch.rand((), generator=generator) for generator in batch.generators()])
        return told | {"keep_B": self.model.quantizer.levels_to_keep(chance_B).to(next(self.model.parameters()).device)}

    def heed_judges(
        self, terms: dict[str, Tensor], output: Tensor, batch: Batch, step: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Adds the adversarial term: what all judges together see, weighed as configured."""
        adversary = self.config.adversary
        unconvinced = hinge_generator if adversary.loss == "hinge" else non_saturating_generator
        judged = {name: judge.network.judged(judge.view(output, batch)) for name, judge in self.judges.items()}
        adversarial = torch.stack([self.judges[name].weight * unconvinced(one.logits) for name, one in judged.items()]).sum()
        attention = min(1.0, (step - adversary.starts + 1) / max(1, adversary.ramp))
        if adversary.matching:
            terms = terms | {"matching": attention * adversary.matching * self.mismatch(judged, batch)}
        if not adversary.adaptive:
            return terms | {"adversarial": attention * adversary.weight * adversarial}, {}
        balanced = balanced_adversarial(terms, adversarial, output, self.model.last_layer, adversary.ceiling)
        heard = attention * adversary.weight * balanced.adversarial
        return balanced.reconstruction | {"adversarial": heard}, {"adversarial_weight": balanced.weight}

    def mismatch(self, judged: dict[str, Judged], batch: Batch) -> Tensor:
        """How differently the judges' layers see reconstructions and originals."""
        original = self.fidelity.target(batch.examples)
        apart = []
        for name, fake in judged.items():
            with torch.no_grad():
                real = self.judges[name].network.judged(self.judges[name].view(original, batch))
            apart.append(feature_matching_B(real.features, fake.features).mean())
        return torch.stack(apart).mean()

    def tell_apart(self, judge: Judge, batch: Batch, step: int) -> Loss:
        adversary = self.config.adversary
        real = judge.view(self.fidelity.target(batch.examples), batch)
        fake = judge.view(batch.kept["rebuilt"], batch)
        confused = hinge_discriminator if adversary.loss == "hinge" else non_saturating_discriminator
        real_logits, fake_logits = judge.network(torch.cat([real, fake])).chunk(2)
        terms = {"apart": confused(real_logits, fake_logits)}
        if adversary.penalty and step % adversary.penalty_every == 0:
            penalty = gradient_penalty(judge.network, real, adversary.penalty_centre)
            terms["penalty"] = adversary.penalty * adversary.penalty_every * penalty
        accuracy = partial(told_apart, real_logits.detach(), fake_logits.detach())
        return Loss(terms, {"accuracy": accuracy, "real": real_logits.detach().mean, "fake": fake_logits.detach().mean})

    def look_at_whole_batch(self, micros: Sequence[Batch], step: int, meeting: Meeting) -> None:
        """A quantizer whose penalty is no mean over examples sees all micro-batches of all processes first."""
        quantizer = self.model.quantizer
        if not quantizer.whole_batch or len(micros) * meeting.processes == 1:
            return
        with torch.no_grad():
            seen = [self.model.observe(self.fidelity.target(batch.examples), **self.told(batch)) for batch in micros]
        quantizer.expect(meeting.sum(torch.stack(seen).sum(0)))

    # ---- validation and samples

    def observe(self, batch: Batch) -> dict[str, Tensor]:
        rebuilt = self.rebuilt(batch)
        counts_LV = torch.stack([self.counted(codes) for codes in self.by_level(rebuilt.codes)])
        examples = torch.tensor(len(batch), device=counts_LV.device)
        return {"examples": examples, "codes": counts_LV, **self.fidelity.observe(rebuilt.output, batch)}

    def by_level(self, codes: Tensor) -> Sequence[Tensor]:
        return codes.unbind(-1) if self.model.quantizer.levels > 1 else (codes,)

    def counted(self, codes: Tensor) -> Tensor:
        """How often each symbol was written; -1 is padding, in media whose examples differ in size."""
        return torch.bincount(codes[codes >= 0], minlength=self.model.vocabulary)

    def conclude(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Of several levels each has symbols of its own, and what is told of all is the mean over levels."""
        numbers = self.fidelity.conclude(totals)
        for name, tell in (("usage", code_usage), ("perplexity", code_perplexity)):
            told_L = tell(totals["codes"])
            numbers[name] = float(told_L.mean())
            if len(told_L) > 1:
                numbers |= {f"{name}_{level}": float(told) for level, told in enumerate(told_L, start=1)}
        return numbers

    def rebuilt(self, batch: Batch) -> Reconstruction:
        """As a finished model does it: in all levels."""
        return self.model(self.fidelity.target(batch.examples), **self.fidelity.alongside(batch.examples))

    def sample(self, batch: Batch) -> list[Any]:
        return self.fidelity.shown(self.rebuilt(batch).output, batch)


def told_apart(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    return ((real_logits > 0).float().mean() + (fake_logits < 0).float().mean()) / 2


OUT_OF_USE = Alarm(
    name="codebook out of use",
    metric="average/usage",
    below=0.2,
    patience=2,
    after=500,
    remedy="Most symbols are never used. Take the fsq quantizer or a smaller codebook.",
)


def alarm_of(judge: str) -> Alarm:
    return Alarm(
        name=f"the {judge} wins",
        metric=f"{judge}/accuracy",
        above=0.995,
        patience=50,
        remedy="It tells every reconstruction from its original. Lower its rate, raise the penalty, or lower the weight.",
    )
