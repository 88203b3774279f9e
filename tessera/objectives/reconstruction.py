"""The tokenizer objective: reconstruct an example from a few discrete codes.

The update `model` minimises the reconstruction loss of the modality, the penalties of the quantizer
and, once they have started, the adversarial terms. Each discriminator is an update of its own that
is trained on originals and on the reconstructions of the same step.

A modality provides two things: a `MediaAdapter`, which converts examples to tensors and tensors to
media, and a `ReconstructionLoss`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Literal, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import (
    Alarm,
    AnyExamples,
    Batch,
    BestMetric,
    DataSettings,
    Inputs,
    Loss,
    Media,
    ProcessGroup,
    Task,
    TaskConfig,
    Update,
)
from tessera.losses.adversarial import (
    balance_adversarial,
    feature_matching_B,
    gradient_penalty,
    hinge_discriminator,
    hinge_generator,
    non_saturating_discriminator,
    non_saturating_generator,
)
from tessera.losses.balancer import balance_gradients
from tessera.metrics.codebook import codebook_histogram, codebook_perplexity, codebook_usage
from tessera.nn.discriminator import DiscriminatorOutput
from tessera.nn.reconstruction import Reconstruction


class CastableInput(Protocol):
    """A model input: a tensor, or several of them that are converted together."""

    def to(self, dtype: torch.dtype, /) -> Self: ...


ModelInput = TypeVar("ModelInput", bound=CastableInput)
AnyDataConfig = TypeVar("AnyDataConfig")
AnyModel: TypeAlias = Any
"""The model of a tokenizer. Each adapter annotates that of its own modality."""
AnyMedia = TypeVar("AnyMedia", bound=Media)


@runtime_checkable
class ChunkedModel(Protocol):
    """A model that encodes and decodes chunks along time, with the codes of the whole."""

    def encode_chunks(self, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield codes (B, t, ...) of a medium that arrives in chunks of any lengths."""

    def decode_chunks(self, chunks: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the output for codes that arrive in chunks."""


class MediaAdapter(Generic[AnyExamples, ModelInput, AnyDataConfig, AnyMedia]):
    """Convert examples of one modality to model inputs, and model outputs to media."""

    takes_tensors = True
    """Whether the model input is a single tensor."""

    def target(self, examples: AnyExamples) -> ModelInput:
        """Return the model input, which is also what it reconstructs."""
        raise NotImplementedError

    def model_kwargs(self, examples: AnyExamples) -> dict[str, Tensor]:
        """Return further arguments of the model, such as the lengths of the examples."""
        return {}

    def prepare_inputs(self, examples: AnyExamples) -> dict[str, Inputs]:
        """Return further arguments of the model in training that are made on the CPU, such as
        indices whose number depends on the examples."""
        return {}

    def preprocess(self, target: ModelInput, data: AnyDataConfig, dtype: torch.dtype) -> ModelInput:
        """Convert a target to the size and type that a model trained on `data` expects."""
        return target.to(dtype)

    def bound(self, output: Tensor) -> Tensor:
        """Return the output with values that a medium can have."""
        return output

    def num_bytes(self, examples: AnyExamples) -> int:
        """Return the uncompressed size of examples, by default one byte for each input value."""
        target = self.target(examples)
        assert isinstance(target, Tensor)
        return target.numel()

    def to_media(self, output: Tensor) -> list[AnyMedia]:
        raise NotImplementedError

    def show_pairs(self, output: Tensor, batch: Batch) -> list[AnyMedia]:
        """Return each original side by side with its reconstruction."""
        raise NotImplementedError

    # ---- whole recordings and videos, in pieces along time

    def encode_pieces(self, model: AnyModel, pieces: Iterable[AnyExamples]) -> Tensor:
        """Encode one medium, which arrives in pieces, as codes (t, ...)."""
        raise NotImplementedError

    def decode_pieces(
        self, model: AnyModel, codes: Tensor, length: int, rate_hz: float
    ) -> Iterator[AnyMedia]:
        """Decode codes (t, ...) to a medium of `length` samples or frames, in pieces."""
        raise NotImplementedError

    def original(self, examples: AnyExamples) -> AnyMedia:
        """Return the medium of a batch of one piece."""
        raise NotImplementedError


class ReconstructionLoss(nn.Module):
    """The loss and the evaluation metrics of reconstructions of one modality."""

    best_metric: BestMetric
    alarms: tuple[Alarm, ...] = ()
    weights: Mapping[str, float] = {}
    """The weights of the terms that the balancer can scale, by name."""

    def losses(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return weighted loss terms, each a mean over examples."""
        raise NotImplementedError

    def train_metrics(self, output: Tensor, batch: Batch) -> dict[str, Callable[[], Tensor]]:
        """Return cheap metrics that are computed only at steps that are logged."""
        return {}

    def eval_step(self, output: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return metrics of held-out examples, summed over the examples."""
        raise NotImplementedError

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ReconstructionConfig:
    """Base class of the configurations of reconstruction losses."""

    def validate_data(self, data: DataSettings) -> None:
        """Raise ValueError if reconstructions of these data cannot be measured."""

    def fit_data(self, data: DataSettings) -> Self:
        """Return the configuration without metrics that these data are too small for."""
        return self

    def notice(self, data: DataSettings) -> str:
        return ""

    def for_inference(self) -> Self:
        """Return the configuration without networks that only training and evaluation need."""
        return self

    def build(self) -> ReconstructionLoss:
        raise NotImplementedError


class DiscriminatorNetwork(Protocol):
    """Logits that are high for originals; `discriminate` also returns the features of layers."""

    def __call__(self, inputs: Tensor) -> Tensor: ...
    def discriminate(self, inputs: Tensor) -> DiscriminatorOutput: ...


@dataclass(frozen=True)
class Discriminator:
    """A discriminator and its view of originals and reconstructions."""

    network: Any
    """A `DiscriminatorNetwork`."""
    view: Callable[[Tensor, Batch], Tensor]
    """Selects the input: everything or a part, which is the same part of both."""
    weight: float = 1.0
    """The weight of its adversarial term relative to other discriminators."""


@dataclass(frozen=True, kw_only=True)
class AdversaryConfig:
    """Discriminators and their losses; a modality adds which discriminators there are."""

    loss: Literal["hinge", "non_saturating"] = "hinge"
    """The adversarial loss."""
    weight: float = 0.1
    """The weight of the adversarial term; with `adaptive`, a factor on the measured ratio."""
    feature_matching_weight: float = 0.0
    """The weight of feature matching, the distance of discriminator features between
    reconstructions and originals; 0 disables it."""
    adaptive: bool = False
    """Scale the adversarial term by the ratio of gradient norms at the last layer (Esser 2021,
    equation 7). The ratio is measured per micro-batch, so gradient accumulation is not exact."""
    adaptive_max: float = 1e4
    """The largest adaptive ratio."""
    start_step: int = 0
    """The step at which the discriminators and the adversarial term start."""
    warmup_steps: int = 0
    """The number of steps over which the adversarial term rises from 0 to its weight."""
    gp_weight: float = 0.01
    """The weight of the gradient penalty; 0 disables it. A zero-centred penalty of 0.1 already
    suppresses a small discriminator."""
    gp_every: int = 4
    """The number of steps between gradient penalties, each of which is scaled by this number."""
    gp_center: float = 0.0
    """The gradient norm without penalty: 0 (R1) or 1 (WGAN-GP)."""
    gp_on: Literal["real", "both"] = "real"
    """Whether the gradient penalty is taken at originals only, or at reconstructions too."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def validate_data(self, data: DataSettings) -> None:
        """Raise ValueError if a discriminator cannot be applied to these data."""

    def fit_data(self, data: DataSettings) -> Self:
        """Return the configuration with discriminators for these data."""
        return self

    def discriminators(self) -> dict[str, Discriminator]:
        """Build the discriminators; their names are those of their updates."""
        raise NotImplementedError


class TokenizerQuantizer(Protocol):
    """The shape of a quantizer's codes; a trained one is a `Quantizer`."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_quantizers(self) -> int: ...


class TokenizerModel(Protocol):
    """A model that encodes its input as codes and decodes codes.

    `batch_stats` is needed too if the quantizer has `needs_global_stats`, and `last_layer` for
    adaptive adversarial weights.
    """

    __call__: Callable[..., Reconstruction]

    @property
    def quantizer(self) -> TokenizerQuantizer: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def encode(self) -> Callable[..., Tensor]: ...
    @property
    def decode(self) -> Callable[..., Tensor]: ...


class TokenizerModelConfig(Protocol):
    """The configuration of a tokenizer model; `validate_data` and `fit_data` are optional."""

    @property
    def grid(self) -> Callable[..., tuple[int, ...]]:
        """A function of the data configuration that returns the shape of an example's codes."""

    def build(self) -> TokenizerModel: ...


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig(TaskConfig):
    """Base class of tokenizer configurations; a modality declares the types of the fields."""

    model: TokenizerModelConfig
    reconstruction: ReconstructionConfig
    adversary: AdversaryConfig | None = None
    balancer: bool = False
    """Scale the gradient of each loss term at the output to the fraction that its weight specifies
    (the loss balancer of EnCodec), for modalities whose terms have weights."""
    train_only: Literal["all", "decoder"] = "all"
    """Which part of the model is trained. `decoder` continues a trained model (`--init-from`) with
    the same codes, for example with discriminators."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def validate_data(self, data: object) -> None:
        for part in (self.model, self.reconstruction, self.adversary):
            if part is not None and hasattr(part, "validate_data"):
                part.validate_data(data)

    def fit_data(self, data: object) -> Self:
        parts: dict[str, object] = {
            "model": self.model,
            "reconstruction": self.reconstruction,
            "adversary": self.adversary,
        }
        fitted = {n: part.fit_data(data) for n, part in parts.items() if hasattr(part, "fit_data")}
        return replace(self, **fitted)

    def notice(self, data: DataSettings) -> str:
        return self.reconstruction.notice(data)

    def for_inference(self) -> Self:
        return replace(self, adversary=None, reconstruction=self.reconstruction.for_inference())

    def build_adapter(self) -> MediaAdapter:
        raise NotImplementedError

    def build(self, **dependencies: object) -> TokenizerTask:
        return TokenizerTask(self)


class TokenizerTask(Task):
    def __init__(self, config: TokenizerConfig):
        super().__init__()
        self.config = config
        self.model = config.model.build()
        self.adapter = config.build_adapter()
        self.reconstruction: ReconstructionLoss = config.reconstruction.build()
        self.best_metric = self.reconstruction.best_metric
        adversary = config.adversary
        self.discriminators: Mapping[str, Discriminator] = (
            adversary.discriminators() if adversary is not None else {}
        )
        trains_all = config.train_only == "all"
        needs_stats = trains_all and self.model.quantizer.needs_global_stats
        updates = [
            Update(
                name="model",
                trains=self.model if trains_all else freeze_encoder(self.model),
                loss=self.reconstruction_loss,
                optimizer=config.optimizer,
                prepare=self.set_global_stats if needs_stats else None,
            )
        ]
        for name, discriminator in self.discriminators.items():
            assert adversary is not None
            self.add_module(name, discriminator.network)
            updates.append(
                Update(
                    name=name,
                    trains=discriminator.network,
                    loss=partial(self.discriminator_loss, discriminator),
                    optimizer=adversary.optimizer,
                    start_step=adversary.start_step,
                )
            )
        self.updates = tuple(updates)
        alarms = [discriminator_alarm(name) for name in self.discriminators]
        self.alarms = (*self.reconstruction.alarms, UNUSED_CODEBOOK, *alarms)

    # ---- losses

    def reconstruction_loss(self, batch: Batch, step: int) -> Loss:
        target = self.adapter.target(batch.examples)
        reconstruction: Reconstruction = self.model(target, **self.train_kwargs(batch))
        output = reconstruction.output
        terms = self.reconstruction.losses(output, batch)
        metrics: dict[str, Tensor | Callable[[], Tensor]] = {
            **self.reconstruction.train_metrics(output.detach(), batch)
        }
        adversary = self.config.adversary
        if adversary is not None and self.discriminators:
            batch.scratch["reconstruction"] = output.detach()
            if step >= adversary.start_step:
                terms, adversarial_metrics = self.add_adversarial_terms(terms, output, batch, step)
                metrics |= adversarial_metrics
        if self.config.balancer and torch.is_grad_enabled():
            terms = self.balance(terms, output)
        return Loss(terms | reconstruction.penalties, metrics)

    def prepare_inputs(self, batch: Batch) -> dict[str, Inputs]:
        """Return arguments of the model, with the number of quantizers drawn for quantizer dropout.

        The number is drawn from the generator of each example.
        """
        inputs = self.adapter.prepare_inputs(batch.examples)
        if not self.model.quantizer.has_quantizer_dropout:
            return inputs
        u_B = torch.stack([torch.rand((), generator=one) for one in batch.generators()])
        return inputs | {"num_quantizers_B": self.model.quantizer.sample_num_quantizers(u_B)}

    def train_kwargs(self, batch: Batch) -> dict[str, Inputs]:
        """Return the model's arguments in training."""
        return self.adapter.model_kwargs(batch.examples) | self.get_inputs(batch)

    def balance(self, terms: dict[str, Tensor], output: Tensor) -> dict[str, Tensor]:
        adversary = self.config.adversary
        weights = dict(self.reconstruction.weights)
        if adversary is not None:
            weights["adversarial"] = adversary.weight
            weights["feature_matching"] = adversary.feature_matching_weight
        unweighted = {name: term / weights.get(name, 1.0) for name, term in terms.items()}
        return balance_gradients(unweighted, weights, output)

    def add_adversarial_terms(
        self, terms: dict[str, Tensor], output: Tensor, batch: Batch, step: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Add the adversarial term and feature matching; return terms and metrics."""
        adversary = self.config.adversary
        assert adversary is not None
        generator_loss = hinge_generator if adversary.loss == "hinge" else non_saturating_generator
        fakes = {
            name: one.network.discriminate(one.view(output, batch))
            for name, one in self.discriminators.items()
        }
        adversarial = torch.stack(
            [
                self.discriminators[name].weight * generator_loss(fake.logits)
                for name, fake in fakes.items()
            ]
        ).sum()
        warmup = min(1.0, (step - adversary.start_step + 1) / max(1, adversary.warmup_steps))
        if adversary.feature_matching_weight:
            matching = self.feature_matching_loss(fakes, batch)
            weight = warmup * adversary.feature_matching_weight
            terms = terms | {"feature_matching": weight * matching}
        if not adversary.adaptive:
            return terms | {"adversarial": warmup * adversary.weight * adversarial}, {}
        balanced = balance_adversarial(
            terms, adversarial, output, self.model.last_layer, adversary.adaptive_max
        )
        scaled = warmup * adversary.weight * balanced.adversarial
        terms = balanced.reconstruction | {"adversarial": scaled}
        return terms, {"adversarial_weight": balanced.weight}

    def feature_matching_loss(self, fakes: dict[str, DiscriminatorOutput], batch: Batch) -> Tensor:
        """Return the mean distance of discriminator features to those of the originals."""
        target = self.adapter.target(batch.examples)
        distances = []
        for name, fake in fakes.items():
            discriminator = self.discriminators[name]
            with torch.no_grad():
                real = discriminator.network.discriminate(discriminator.view(target, batch))
            distances.append(feature_matching_B(real.features, fake.features).mean())
        return torch.stack(distances).mean()

    def discriminator_loss(self, discriminator: Discriminator, batch: Batch, step: int) -> Loss:
        adversary = self.config.adversary
        assert adversary is not None
        real = discriminator.view(self.adapter.target(batch.examples), batch)
        fake = discriminator.view(batch.scratch["reconstruction"], batch)
        loss = hinge_discriminator if adversary.loss == "hinge" else non_saturating_discriminator
        real_logits, fake_logits = discriminator.network(torch.cat([real, fake])).chunk(2)
        terms = {"d_loss": loss(real_logits, fake_logits)}
        if adversary.gp_weight and step % adversary.gp_every == 0:
            penalty = gradient_penalty(discriminator.network, real, adversary.gp_center)
            if adversary.gp_on == "both":
                penalty = penalty + gradient_penalty(
                    discriminator.network, fake, adversary.gp_center
                )
            terms["gradient_penalty"] = adversary.gp_weight * adversary.gp_every * penalty
        real_logits, fake_logits = real_logits.detach(), fake_logits.detach()
        accuracy = partial(discriminator_accuracy, real_logits, fake_logits)
        metrics = {"accuracy": accuracy, "real": real_logits.mean, "fake": fake_logits.mean}
        return Loss(terms, dict(metrics))

    def set_global_stats(
        self, micro_batches: Sequence[Batch], step: int, dist: ProcessGroup
    ) -> None:
        """Pass statistics of the whole step to a quantizer whose penalty is not a mean."""
        if len(micro_batches) * dist.world_size == 1:
            return
        with torch.no_grad():
            stats = [
                self.model.batch_stats(
                    self.adapter.target(batch.examples), **self.train_kwargs(batch)
                )
                for batch in micro_batches
            ]
        self.model.quantizer.set_global_stats(dist.all_reduce_sum(torch.stack(stats).sum(0)))

    # ---- evaluation and samples

    def eval_step(self, batch: Batch) -> dict[str, Tensor]:
        reconstruction = self.reconstruct(batch)
        codes = reconstruction.codes
        by_quantizer = codes.unbind(-1) if self.model.quantizer.num_quantizers > 1 else (codes,)
        # -1 is padding, in modalities whose examples differ in size.
        counts_QV = torch.stack(
            [torch.bincount(q[q >= 0], minlength=self.model.vocab_size) for q in by_quantizer]
        )
        examples = torch.tensor(len(batch), device=counts_QV.device)
        metrics = self.reconstruction.eval_step(reconstruction.output, batch)
        return {"examples": examples, "codes": counts_QV, **metrics}

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        """Add codebook usage and perplexity; with several quantizers, the mean and each one."""
        metrics = self.reconstruction.compute_metrics(totals)
        for name, compute in (
            ("codebook_usage", codebook_usage),
            ("codebook_perplexity", codebook_perplexity),
        ):
            values_Q = compute(totals["codes"])
            metrics[name] = float(values_Q.mean())
            if len(values_Q) > 1:
                metrics |= {f"{name}_{q}": float(v) for q, v in enumerate(values_Q, start=1)}
        return metrics

    def compute_histograms(self, totals: dict[str, Tensor]) -> dict[str, list[float]]:
        """Return how often the codes of each quantizer occur, the most frequent first."""
        histograms_QV = codebook_histogram(totals["codes"])
        rows = [[round(count, 2) for count in row] for row in histograms_QV.tolist()]
        if len(rows) == 1:
            return {"codebook": rows[0]}
        return {f"codebook_{q}": row for q, row in enumerate(rows, start=1)}

    def reconstruct(self, batch: Batch) -> Reconstruction:
        """Reconstruct with all quantizers, as a trained model does."""
        kwargs = self.adapter.model_kwargs(batch.examples)
        return self.model(self.adapter.target(batch.examples), **kwargs)

    def sample(self, batch: Batch) -> Sequence[Media]:
        return self.adapter.show_pairs(self.reconstruct(batch).output, batch)


def freeze_encoder(model: nn.Module) -> nn.Module:
    """Freeze all of a tokenizer but its decoder, and return the decoder."""
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, nn.Module):
        raise ValueError(
            f"train_only is decoder, but {type(model).__name__} has no separate decoder: use all."
        )
    model.requires_grad_(False)
    return decoder.requires_grad_(True)


def discriminator_accuracy(real_logits: Tensor, fake_logits: Tensor) -> Tensor:
    return ((real_logits > 0).float().mean() + (fake_logits < 0).float().mean()) / 2


UNUSED_CODEBOOK = Alarm(
    name="unused codebook",
    metric="val_ema/codebook_usage",
    below=0.2,
    patience=2,
    after=500,
    hint="Most codes are never used. Use the fsq quantizer or a smaller codebook.",
)


def discriminator_alarm(name: str) -> Alarm:
    return Alarm(
        name=f"{name} too strong",
        metric=f"{name}/accuracy",
        above=0.995,
        patience=50,
        hint="It separates all reconstructions from originals. Lower its learning rate, raise the "
        "gradient penalty, or lower the adversarial weight.",
    )
