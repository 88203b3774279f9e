"""The masked task: which symbols are hidden? (Chang 2022, arXiv 2202.04200; Chang 2023,
2301.00704.)

Some symbols of a mosaic are hidden, the model guesses them from the rest, from the caption and from
coarser symbols of the same example, if there are any. A critic, if there is one, is a second
update: it learns to tell the symbols that were drawn from those that were there. The medium is the
tokenizer's: it says what an example's codes are and what codes look like; nothing here knows
pictures from sounds. Examples may differ in length: where one has ended its codes are -1, and
nobody sees them.

B batch, N places, S symbols in a place, L levels, M hidden symbols, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, BestMetric, Loss, Update
from tessera.modalities.audio.external_tokens import Streams
from tessera.nn.masked_transformer import (
    Condition,
    CriticConfig,
    CriticHeadConfig,
    FirstLayerCache,
    MaskedModel,
    MaskedTransformer,
    MaskedTransformerConfig,
    TokenSpec,
)
from tessera.nn.precision import to_fp32
from tessera.nn.token_layout import Layout
from tessera.objectives.generation import (
    PROMPT_IGNORED,
    GenerationRequest,
    GeneratorTask,
    TokenizerProtocol,
    refuse_augmentation,
)
from tessera.objectives.masking import (
    ExampleRandomness,
    LevelMaskingConfig,
    Masked,
    MaskingConfig,
    TokenBatch,
)
from tessera.sampling.guidance import Guidance, guided
from tessera.sampling.logits import sample_from_logits
from tessera.sampling.maskgit import MaskedSampling, halton_order, maskgit_decode


class Guide:
    """The model's guess under guidance: with the prompt and without in one pass, and without
    guidance half of that."""

    def __init__(
        self,
        network: MaskedTransformer,
        wanted: GenerationRequest,
        guidance: Guidance,
        device: torch.device,
        real_BN: Tensor | None = None,
    ):
        self.network, self.real_BN = network, real_BN
        self.guidance = (
            guidance if self.network.text is not None else dataclasses.replace(guidance, scale=1.0)
        )
        self.count = len(wanted.texts)
        texts, dropped = list(wanted.texts), [False] * self.count
        coarser = wanted.coarser.to(device) if wanted.coarser is not None else None
        if self.guidance.scale != 1:
            texts += list(wanted.negative) if wanted.negative is not None else list(wanted.texts)
            dropped += [wanted.negative is None] * self.count
        self.both = self.network.condition(texts, dropped, coarser)
        self.alone = first_of(self.both, self.count)
        self.previous: Tensor | None = None
        self.last = FirstLayerCache()

    def __call__(self, tokens_BNS: Tensor, asked_BNS: Tensor, progress: float) -> Tensor:
        scale = self.guidance.at(progress)
        if scale == 1:
            return self.logits(tokens_BNS, asked_BNS, self.alone)
        doubled = self.logits(tokens_BNS, torch.cat([asked_BNS] * 2), self.both)
        with_prompt, without = doubled.chunk(2)
        return guided(with_prompt, without, scale)

    def logits(self, tokens: Tensor, asked: Tensor, condition: Condition) -> Tensor:
        if self.network.self_cond_proj is None:
            return to_fp32(
                self.network.masked_token_loss(tokens, asked, condition, self.real_BN, self.last)
            )
        previous = self.previous
        if previous is not None and len(previous) != len(asked):
            previous = torch.cat([previous[: self.count]] * (len(asked) // self.count))
        self.previous = self.network.states(tokens, condition, previous, self.real_BN)
        return to_fp32(self.network.logits(self.previous, asked))


def first_of(condition: Condition, count: int) -> Condition:
    context_kv = condition.context_kv
    return Condition(
        [one.first(count) for one in context_kv] if context_kv is not None else None,
        condition.base_embedding,
    )


@dataclass(frozen=True, kw_only=True)
class MaskedConfig:
    entry_point: ClassVar[str] = "Generator"
    """What opens such a run in Python."""
    tokenizer: str = "runs/images-vqgan"
    """The run whose symbols are learnt; it is copied into this run's folder."""
    smaller: str | None = None
    """For super-resolution: the run of the tokenizer of the smaller pictures that larger ones are
    made from."""
    semantic: str | None = None
    """For sound: the run of the tokenizer whose symbols say what is said, and how the rest is to be
    sounded out."""
    streams: Streams | None = None
    """Instead of these runs, for symbols that a caller brings himself (SoundStormTrainer): what is
    known of them."""
    tokens: str = "cache"
    """cache: examples are tokenized once, before the first step. live: at every step, which
    augmentation needs. Or a folder that `tessera tokenize` wrote."""
    places: int | None = None
    """The most places of the transformer: where an example has more symbols, squares of 2 x 2, 4 x
    4, ... of them share one.
    None: a place for each. A quarter of the places costs a quarter or less."""
    model: MaskedTransformerConfig = field(default_factory=MaskedTransformerConfig)
    critic: CriticConfig | CriticHeadConfig | None = None
    """Learns to tell drawn symbols from real ones; sampling may then keep what it believes."""
    critic_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train_only: Literal["all", "generator", "critic"] = "all"
    """Which of the two networks moves, where there is a critic."""
    masking: MaskingConfig | LevelMaskingConfig = field(default_factory=MaskingConfig)
    cond_drop_prob: float = 0.1
    """The share of examples whose caption is left out, so that guidance has something to lead away
    from."""
    label_smoothing: float = 0.0
    sampling: MaskedSampling = field(default_factory=MaskedSampling)
    guidance: Guidance = field(default_factory=Guidance)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        for name in ("drop_condition", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"{name} is a share, at least 0 and below 1, but it is {getattr(self, name)}."
                )
        if self.places is not None and self.places < 1:
            raise ValueError(f"A transformer needs at least 1 place, but places is {self.places}.")
        if self.train_only == "critic" and self.critic is None:
            raise ValueError(
                "The critic alone is to learn, but there is none: --critic own or head."
            )
        if self.sampling.order == "critic" and self.critic is None:
            raise ValueError(
                "Sampling in the critic's order needs a critic (--critic head or own), and this model has none."
            )

    def validate_data(self, data: Any) -> None:
        refuse_augmentation(self.tokens, data)

    def parts(self) -> dict[str, str]:
        """The runs that this one stands on."""
        if self.streams is not None:
            return {}
        coarser = {"smaller": self.smaller, "semantic": self.semantic}
        return {"tokenizer": self.tokenizer} | {
            name: path for name, path in coarser.items() if path is not None
        }

    def notice(self) -> str:
        return f"It stands on the tokenizer in {self.tokenizer}."

    def build(
        self, tokenizer: TokenizerProtocol | None = None, **coarser: TokenizerProtocol
    ) -> MaskedTask:
        if self.streams is not None:
            return MaskedTask(
                self, self.streams.acoustic.build(), {"semantic": self.streams.semantic.build()}
            )
        assert tokenizer is not None, "parts() names it"
        return MaskedTask(self, tokenizer, coarser)


class MaskedTask(GeneratorTask):
    best_metric = BestMetric(metric="cross_entropy", higher_is_better=False)

    def __init__(
        self,
        config: MaskedConfig,
        tokenizer: TokenizerProtocol,
        coarser: Mapping[str, TokenizerProtocol],
    ):
        super().__init__({"tokenizer": tokenizer, **coarser})
        self.config = config
        if len(coarser) > 1:
            raise ValueError(
                "A model stands on smaller pictures or on semantic symbols, and not on both: leave one out."
            )
        self.coarser = next(iter(coarser), None)
        config.masking.validate_data(tokenizer.levels)
        tokens = token_spec(tokenizer, config.places)
        self.layout = tokens.layout
        below = token_spec(coarser[self.coarser]) if self.coarser is not None else None
        critic = (
            config.critic.build(config.model, tokens, below) if config.critic is not None else None
        )
        self.model = MaskedModel(config.model.build(tokens, below), critic)
        start_step = NEVER if config.train_only == "critic" else 0
        update = Update(
            name="model",
            trains=self.model.network,
            loss=self.masked_token_loss,
            optimizer=config.optimizer,
            start_step=start_step,
        )
        self.updates = (update,)
        if critic is not None:
            start_step = NEVER if config.train_only == "generator" else 0
            self.updates += (
                Update(
                    name="critic",
                    trains=critic,
                    loss=self.critic_loss,
                    optimizer=config.critic_optimizer,
                    start_step=start_step,
                ),
            )
        # Coarser symbols show most of what a caption says, so there a small gain is nothing
        # unusual.
        self.alarms = (
            (PROMPT_IGNORED,) if config.model.text is not None and self.coarser is None else ()
        )

    @property
    def network(self) -> MaskedTransformer:
        return self.model.network

    def readers(self) -> list[Any]:
        return [
            network
            for network in (self.model.network, self.model.critic)
            if getattr(network, "text", None) is not None
        ]

    # ---- losses

    def masked_token_loss(self, batch: Batch, step: int) -> Loss:
        token_batch = self.token_batch(batch.examples)
        chances = ExampleRandomness.of(batch)
        masked = self.masked(token_batch, chances)
        dropped = [chance < self.config.cond_drop_prob for chance in chances.drop]
        condition = self.condition(self.model.network, batch.examples, dropped)
        logits_MV = self.guesses(masked, condition, [chance < 0.5 for chance in chances.remember])
        wanted_M = token_batch.tokens_BNS[masked.asked]
        summed = F.cross_entropy(
            to_fp32(logits_MV),
            wanted_M,
            label_smoothing=self.config.label_smoothing,
            reduction="sum",
        )
        if self.model.critic is not None:
            self.keep_for_critic(batch, masked, logits_MV.detach(), chances, token_batch)
        right = partial(token_accuracy, logits_MV.detach(), wanted_M, masked.asked)
        return Loss(
            {"cross_entropy": summed / self.expected_num_masked(len(batch))}, {"accuracy": right}
        )

    def expected_num_masked(self, examples: int) -> float:
        """Asked symbols on average, instead of those of this batch: so that micro-batches add up to
        the batch exactly."""
        return examples * self.config.masking.expected_num_masked(self.layout)

    def guesses(
        self, masked: Masked, condition: Condition, remembering: Sequence[bool] | None = None
    ) -> Tensor:
        """(M, V). For self-conditioning (Chen 2022, arXiv 2208.04202) examples see their states of
        a first look: all, or in training some."""
        network = self.model.network
        if not self.config.model.self_condition:
            return network.masked_token_loss(masked.shown, masked.asked, condition, masked.real_BN)
        with torch.no_grad():
            before = network.states(masked.shown, condition, real_BN=masked.real_BN)
        if remembering is not None:
            before = before * torch.tensor(remembering, device=before.device)[:, None, None]
        return network.logits(
            network.states(masked.shown, condition, before, masked.real_BN), masked.asked
        )

    def keep_for_critic(
        self,
        batch: Batch,
        masked: Masked,
        logits_MV: Tensor,
        chances: ExampleRandomness,
        token_batch: TokenBatch,
    ) -> None:
        uniform = torch.stack(
            [torch.rand(masked.asked.shape[1:], generator=g) for g in chances.generators]
        )
        tokens = sample_from_logits(
            logits_MV, uniform.to(logits_MV.device)[masked.asked], temperature=1.0
        )
        batch.scratch["filled"] = masked.shown.masked_scatter(masked.asked, tokens)
        batch.scratch["drawn"] = masked.asked
        batch.scratch["mosaic"] = token_batch

    def critic_loss(self, batch: Batch, step: int) -> Loss:
        """The critic's loss: each symbol of a mosaic that the model has just completed, real or
        drawn (Lezama 2022, eq. 5).

        Symbols that are still hidden, of finer levels, and places that are not real are no
        question.
        """
        if "filled" not in batch.scratch:  # the model itself does not move
            with torch.no_grad():
                self.masked_token_loss(batch, step)
        token_batch, filled = batch.scratch["mosaic"], batch.scratch["filled"]
        realness_logits = self.realness_logits(filled, batch.examples, token_batch)
        real = (~batch.scratch["drawn"]).to(to_fp32(realness_logits).dtype)
        question = (filled != self.model.network.hidden) & token_batch.real_BN1
        questions_B = question.flatten(1).sum(1)
        right_B = (((realness_logits > 0) == (real > 0)) & question).flatten(1).sum(1) / questions_B
        apart = F.binary_cross_entropy_with_logits(
            to_fp32(realness_logits), real, weight=question.to(real.dtype), reduction="none"
        )
        return Loss(
            {"apart": (apart.flatten(1).sum(1) / questions_B).mean()}, {"accuracy": right_B.mean()}
        )

    def realness_logits(self, tokens_BNS: Tensor, examples: Any, token_batch: TokenBatch) -> Tensor:
        critic = self.model.critic
        assert critic is not None
        condition = self.condition(self.model.reader, examples, [False] * len(tokens_BNS))
        return critic.realness_logits(
            self.model.reader.states(tokens_BNS, condition, real_BN=token_batch.real_BN)
        )

    # ---- parts of them

    def token_batch(self, examples: Any) -> TokenBatch:
        return TokenBatch.of(self.layout.patchify(self.tokens(examples, "tokenizer")))

    def coarser_codes(self, examples: Any) -> Tensor | None:
        """The symbols that are a condition: of the smaller pictures, say."""
        return self.tokens(examples, self.coarser) if self.coarser is not None else None

    def started_from(self, examples: Any) -> tuple[Tensor | None, list[int]]:
        """All that a sample keeps of examples beside their captions: coarser symbols, and how long
        each is."""
        return self.coarser_codes(examples), self.token_batch(examples).lengths

    def masked(self, token_batch: TokenBatch, chances: ExampleRandomness) -> Masked:
        """What is hidden of each example comes from that example's generator. Beyond its end
        everything is hidden, and nothing is asked."""
        vocab_size = self.tokenizers["tokenizer"].vocab_size
        shown = torch.full_like(token_batch.tokens_BNS, vocab_size, device="cpu")
        asked = torch.zeros_like(shown, dtype=torch.bool)
        rows = zip(
            token_batch.tokens_BNS.cpu(), token_batch.lengths, chances.generators, strict=True
        )
        for row, (tokens_NS, length, generator) in enumerate(rows):
            one = self.config.masking.draw(tokens_NS[:length], vocab_size, generator)
            shown[row, :length], asked[row, :length] = one.shown, one.asked
        return Masked(
            shown.to(token_batch.tokens_BNS.device),
            asked.to(token_batch.tokens_BNS.device),
            token_batch.real_BN,
        )

    def condition(
        self,
        network: Any,
        examples: Any,
        dropped: Sequence[bool],
        captions: Sequence[str] | None = None,
    ) -> Condition:
        said = examples.captions if captions is None else captions
        return network.condition(said, dropped, self.coarser_codes(examples))

    # ---- validation and samples

    def eval_step(self, batch: Batch) -> dict[str, Tensor]:
        token_batch = self.token_batch(batch.examples)
        masked = self.masked(token_batch, ExampleRandomness.of(batch))
        logits_MV = self.logits_of(masked, batch, batch.examples.captions)
        wanted_M = token_batch.tokens_BNS[masked.asked]
        level_M = masked.asked.nonzero(as_tuple=True)[2] % self.layout.levels
        right_M = logits_MV.argmax(-1) == wanted_M
        seen = {
            "symbols": masked.asked.sum(),
            "symbols_L": torch.bincount(level_M, minlength=self.layout.levels),
            "cross_entropy": F.cross_entropy(to_fp32(logits_MV), wanted_M, reduction="sum"),
            "right_L": torch.bincount(level_M[right_M], minlength=self.layout.levels),
        }
        if self.model.network.text is not None and len(batch) > 1:
            shuffled = [*batch.examples.captions[1:], batch.examples.captions[0]]
            others_MV = self.logits_of(masked, batch, shuffled)
            gain = (
                F.cross_entropy(to_fp32(others_MV), wanted_M, reduction="sum")
                - seen["cross_entropy"]
            )
            seen |= {"gain": gain, "gain_symbols": seen["symbols"]}
        return seen

    def logits_of(self, masked: Masked, batch: Batch, captions: Sequence[str]) -> Tensor:
        return self.guesses(
            masked,
            self.condition(self.model.network, batch.examples, [False] * len(batch), captions),
        )

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        numbers = {
            "cross_entropy": float(totals["cross_entropy"] / totals["symbols"]),
            "accuracy": float(totals["right_L"].sum() / totals["symbols"]),
        }
        if self.layout.levels > 1:
            shares = (totals["right_L"] / totals["symbols_L"].clamp_min(1)).tolist()
            numbers |= {f"accuracy_{level}": share for level, share in enumerate(shares, start=1)}
        if "gain" in totals:
            numbers["condition_gain"] = float(totals["gain"] / totals["gain_symbols"])
        return numbers

    def sample(self, batch: Batch) -> list[Any]:
        coarser, lengths = self.started_from(batch.examples)
        wanted = GenerationRequest(
            batch.examples.captions, batch.seeds, coarser=coarser, lengths=lengths
        )
        return self.tokenizers["tokenizer"].media(self.generate(wanted))

    @torch.inference_mode()
    def generate(
        self,
        wanted: GenerationRequest,
        sampling: MaskedSampling | None = None,
        guidance: Guidance | None = None,
    ) -> Tensor:
        """Codes for what is wanted, (B, *grid), -1 after the end; the medium is one `decode`
        away."""
        sampling, guidance = sampling or self.config.sampling, guidance or self.config.guidance
        network = self.model.network
        device = next(network.parameters()).device
        start, layout = self.beginning(wanted, device), self.layout_of(wanted)
        filled = maskgit_decode(
            start.token_batch.tokens_BNS,
            start.hidden_BNS,
            Guide(network, wanted, guidance, device, start.token_batch.real_BN),
            sampling,
            [torch.Generator().manual_seed(seed) for seed in wanted.seeds],
            mask=network.hidden,
            first_NS=halton_order(layout.cells()) if sampling.order == "halton" else None,
            score=self.score(wanted, device, start.token_batch)
            if self.model.critic is not None
            else None,
            stages=sampling.stages(layout.count, layout.levels, device),
        )
        return layout.unpatchify(filled.masked_fill(~start.token_batch.real_BN1, -1))

    def beginning(self, wanted: GenerationRequest, device: torch.device) -> Beginning:
        """What is there before the first round: all hidden, or what is given."""
        if wanted.tokens is None or wanted.hidden is None:
            tokens = torch.zeros(
                len(wanted.texts),
                self.layout.count,
                self.layout.slots,
                dtype=torch.long,
                device=device,
            )
            hidden = torch.ones_like(tokens, dtype=torch.bool)
        else:
            layout = self.layout_of(wanted)
            tokens, hidden = (
                layout.patchify(wanted.tokens.to(device)),
                layout.patchify(wanted.hidden.to(device)),
            )
        lengths = wanted.lengths if wanted.lengths is not None else [tokens.shape[1]] * len(tokens)
        real_BN1 = TokenBatch(tokens, list(lengths)).real_BN1
        return Beginning(
            TokenBatch(tokens.masked_fill(~real_BN1, 0), list(lengths)), hidden & real_BN1
        )

    def layout_of(self, wanted: GenerationRequest) -> Layout:
        """Of what is given, which may be longer or shorter than what was learnt from."""
        if wanted.tokens is None:
            return self.layout
        return dataclasses.replace(
            self.layout, grid=tuple(wanted.tokens.shape[1 : 1 + len(self.layout.grid)])
        )

    def score(
        self, wanted: GenerationRequest, device: torch.device, token_batch: TokenBatch
    ) -> Any:
        """The critic's belief in each symbol, as the sampler asks for it."""
        critic, reader = self.model.critic, self.model.reader
        coarser = wanted.coarser.to(device) if wanted.coarser is not None else None
        condition = reader.condition(wanted.texts, [False] * len(wanted.texts), coarser)
        look = partial(reader.states, condition=condition, real_BN=token_batch.real_BN)
        return lambda tokens, progress: critic.realness_logits(look(tokens)).float()  # type: ignore[union-attr]


@dataclass
class Beginning:
    """What sampling starts from: a mosaic, and which of its symbols are to be drawn."""

    token_batch: TokenBatch
    hidden_BNS: Tensor


NEVER = 1 << 62
"""The first step of an update that is not to move."""


def token_spec(codec: TokenizerProtocol, places: int | None = None) -> TokenSpec:
    layout = Layout(codec.grid, codec.levels).with_max_positions(places)
    return TokenSpec(codec.vocab_size, layout, codec.features, codec.seconds)


def token_accuracy(logits_MV: Tensor, wanted_M: Tensor, asked_BNS: Tensor) -> Tensor:
    """The mean over examples of the share of asked symbols guessed right, so that micro-batches and
    processes add up."""
    right_M = (logits_MV.argmax(-1) == wanted_M).float()
    spread = torch.zeros(asked_BNS.shape, device=right_M.device).masked_scatter(asked_BNS, right_M)
    return (spread.flatten(1).sum(1) / asked_BNS.flatten(1).sum(1)).mean()
