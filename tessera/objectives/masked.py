"""The masked task: which symbols are hidden? (Chang 2022, arXiv 2202.04200; Chang 2023, 2301.00704.)

Some symbols of a mosaic are hidden, the model guesses them from the rest, from the caption and from coarser symbols of the same
example, if there are any. A critic, if there is one, is a second update: it learns to tell the symbols that were drawn from
those that were there. The medium is the tokenizer's: it says what an example's codes are and what codes look like; nothing
here knows pictures from sounds. Examples may differ in length: where one has ended its codes are -1, and nobody sees them.

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
from tessera.engine.task import Batch, Headline, Loss, Update
from tessera.modalities.audio.external_tokens import Streams
from tessera.nn.masked_transformer import (
    Condition,
    CriticConfig,
    CriticHeadConfig,
    LastRound,
    MaskedModel,
    MaskedTransformer,
    MaskedTransformerConfig,
    Symbols,
)
from tessera.nn.precision import wide
from tessera.nn.token_layout import Layout
from tessera.objectives.generation import PROMPT_IGNORED, Codec, GeneratorTask, Wanted, refuse_augmentation
from tessera.objectives.masking import Chances, LevelMaskingConfig, Masked, MaskingConfig, Mosaic
from tessera.sampling.guidance import Guidance, guided
from tessera.sampling.logits import drawn
from tessera.sampling.maskgit import MaskedSampling, fill, halton_order


class Guide:
    """The model's guess under guidance: with the prompt and without in one pass, and without guidance half of that."""

    def __init__(
        self,
        network: MaskedTransformer,
        wanted: Wanted,
        guidance: Guidance,
        device: torch.device,
        real_BN: Tensor | None = None,
    ):
        self.network, self.real_BN = network, real_BN
        self.guidance = guidance if self.network.text is not None else dataclasses.replace(guidance, scale=1.0)
        self.count = len(wanted.texts)
        texts, dropped = list(wanted.texts), [False] * self.count
        coarser = wanted.coarser.to(device) if wanted.coarser is not None else None
        if self.guidance.scale != 1:
            texts += list(wanted.negative) if wanted.negative is not None else list(wanted.texts)
            dropped += [wanted.negative is None] * self.count
        self.both = self.network.condition(texts, dropped, coarser)
        self.alone = first_of(self.both, self.count)
        self.previous: Tensor | None = None
        self.last = LastRound()

    def __call__(self, symbols_BNS: Tensor, asked_BNS: Tensor, progress: float) -> Tensor:
        scale = self.guidance.at(progress)
        if scale == 1:
            return self.logits(symbols_BNS, asked_BNS, self.alone)
        doubled = self.logits(symbols_BNS, torch.cat([asked_BNS] * 2), self.both)
        with_prompt, without = doubled.chunk(2)
        return guided(with_prompt, without, scale)

    def logits(self, symbols: Tensor, asked: Tensor, condition: Condition) -> Tensor:
        if self.network.remembered is None:
            return wide(self.network.guess(symbols, asked, condition, self.real_BN, self.last))
        previous = self.previous
        if previous is not None and len(previous) != len(asked):
            previous = torch.cat([previous[: self.count]] * (len(asked) // self.count))
        self.previous = self.network.states(symbols, condition, previous, self.real_BN)
        return wide(self.network.logits(self.previous, asked))


def first_of(condition: Condition, count: int) -> Condition:
    looked = condition.looked
    return Condition([one.first(count) for one in looked] if looked is not None else None, condition.ground)


@dataclass(frozen=True, kw_only=True)
class MaskedConfig:
    door: ClassVar[str] = "Generator"
    """What opens such a run in Python."""
    tokenizer: str = "runs/images-vqgan"
    """The run whose symbols are learnt; it is copied into this run's folder."""
    smaller: str | None = None
    """For super-resolution: the run of the tokenizer of the smaller pictures that larger ones are made from."""
    semantic: str | None = None
    """For sound: the run of the tokenizer whose symbols say what is said, and how the rest is to be sounded out."""
    streams: Streams | None = None
    """Instead of these runs, for symbols that a caller brings himself (SoundStormTrainer): what is known of them."""
    codes: str = "cache"
    """cache: examples are tokenized once, before the first step. live: at every step, which augmentation needs. Or a folder
    that `tessera tokenize` wrote."""
    places: int | None = None
    """The most places of the transformer: where an example has more symbols, squares of 2 x 2, 4 x 4, ... of them share one.
    None: a place for each. A quarter of the places costs a quarter or less."""
    model: MaskedTransformerConfig = field(default_factory=MaskedTransformerConfig)
    critic: CriticConfig | CriticHeadConfig | None = None
    """Learns to tell drawn symbols from real ones; sampling may then keep what it believes."""
    critic_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    learns: Literal["all", "generator", "critic"] = "all"
    """Which of the two networks moves, where there is a critic."""
    masking: MaskingConfig | LevelMaskingConfig = field(default_factory=MaskingConfig)
    drop_condition: float = 0.1
    """The share of examples whose caption is left out, so that guidance has something to lead away from."""
    label_smoothing: float = 0.0
    sampling: MaskedSampling = field(default_factory=MaskedSampling)
    guidance: Guidance = field(default_factory=Guidance)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        for name in ("drop_condition", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is a share, at least 0 and below 1, but it is {getattr(self, name)}.")
        if self.places is not None and self.places < 1:
            raise ValueError(f"A transformer needs at least 1 place, but places is {self.places}.")
        if self.learns == "critic" and self.critic is None:
            raise ValueError("The critic alone is to learn, but there is none: --critic own or head.")
        if self.sampling.order == "critic" and self.critic is None:
            raise ValueError("Sampling in the critic's order needs a critic (--critic head or own), and this model has none.")

    def suits(self, data: Any) -> None:
        refuse_augmentation(self.codes, data)

    def parts(self) -> dict[str, str]:
        """The runs that this one stands on."""
        if self.streams is not None:
            return {}
        coarser = {"smaller": self.smaller, "semantic": self.semantic}
        return {"tokenizer": self.tokenizer} | {name: path for name, path in coarser.items() if path is not None}

    def remark(self) -> str:
        return f"It stands on the tokenizer in {self.tokenizer}."

    def build(self, tokenizer: Codec | None = None, **coarser: Codec) -> MaskedTask:
        if self.streams is not None:
            return MaskedTask(self, self.streams.acoustic.build(), {"semantic": self.streams.semantic.build()})
        assert tokenizer is not None, "parts() names it"
        return MaskedTask(self, tokenizer, coarser)


class MaskedTask(GeneratorTask):
    headline = Headline(metric="cross_entropy", higher_is_better=False)

    def __init__(self, config: MaskedConfig, tokenizer: Codec, coarser: Mapping[str, Codec]):
        super().__init__({"tokenizer": tokenizer, **coarser})
        self.config = config
        if len(coarser) > 1:
            raise ValueError("A model stands on smaller pictures or on semantic symbols, and not on both: leave one out.")
        self.coarser = next(iter(coarser), None)
        config.masking.suits(tokenizer.levels)
        symbols = symbols_of(tokenizer, config.places)
        self.layout = symbols.layout
        below = symbols_of(coarser[self.coarser]) if self.coarser is not None else None
        critic = config.critic.build(config.model, symbols, below) if config.critic is not None else None
        self.model = MaskedModel(config.model.build(symbols, below), critic)
        starts = NEVER if config.learns == "critic" else 0
        update = Update(name="model", trains=self.model.network, loss=self.guess, optimizer=config.optimizer, starts=starts)
        self.updates = (update,)
        if critic is not None:
            starts = NEVER if config.learns == "generator" else 0
            self.updates += (
                Update(name="critic", trains=critic, loss=self.tell_drawn, optimizer=config.critic_optimizer, starts=starts),
            )
        # Coarser symbols show most of what a caption says, so there a small gain is nothing unusual.
        self.alarms = (PROMPT_IGNORED,) if config.model.text is not None and self.coarser is None else ()

    @property
    def network(self) -> MaskedTransformer:
        return self.model.network

    def readers(self) -> list[Any]:
        return [network for network in (self.model.network, self.model.critic) if getattr(network, "text", None) is not None]

    # ---- losses

    def guess(self, batch: Batch, step: int) -> Loss:
        mosaic = self.mosaic(batch.examples)
        chances = Chances.of(batch)
        masked = self.masked(mosaic, chances)
        dropped = [chance < self.config.drop_condition for chance in chances.drop]
        condition = self.condition(self.model.network, batch.examples, dropped)
        logits_MV = self.guesses(masked, condition, [chance < 0.5 for chance in chances.remember])
        wanted_M = mosaic.symbols_BNS[masked.asked]
        summed = F.cross_entropy(wide(logits_MV), wanted_M, label_smoothing=self.config.label_smoothing, reduction="sum")
        if self.model.critic is not None:
            self.keep_for_critic(batch, masked, logits_MV.detach(), chances, mosaic)
        right = partial(share_right, logits_MV.detach(), wanted_M, masked.asked)
        return Loss({"cross_entropy": summed / self.usual_count(len(batch))}, {"accuracy": right})

    def usual_count(self, examples: int) -> float:
        """Asked symbols on average, instead of those of this batch: so that micro-batches add up to the batch exactly."""
        return examples * self.config.masking.usual_count(self.layout)

    def guesses(self, masked: Masked, condition: Condition, remembering: Sequence[bool] | None = None) -> Tensor:
        """(M, V). For self-conditioning (Chen 2022, arXiv 2208.04202) examples see their states of a first look: all, or in
        training some."""
        network = self.model.network
        if not self.config.model.self_condition:
            return network.guess(masked.shown, masked.asked, condition, masked.real_BN)
        with torch.no_grad():
            before = network.states(masked.shown, condition, real_BN=masked.real_BN)
        if remembering is not None:
            before = before * torch.tensor(remembering, device=before.device)[:, None, None]
        return network.logits(network.states(masked.shown, condition, before, masked.real_BN), masked.asked)

    def keep_for_critic(
        self, batch: Batch, masked: Masked, logits_MV: Tensor, chances: Chances, mosaic: Mosaic
    ) -> None:
        uniform = torch.stack([torch.rand(masked.asked.shape[1:], generator=g) for g in chances.generators])
        symbols = drawn(logits_MV, uniform.to(logits_MV.device)[masked.asked], temperature=1.0)
        batch.kept["filled"] = masked.shown.masked_scatter(masked.asked, symbols)
        batch.kept["drawn"] = masked.asked
        batch.kept["mosaic"] = mosaic

    def tell_drawn(self, batch: Batch, step: int) -> Loss:
        """The critic's loss: each symbol of a mosaic that the model has just completed, real or drawn (Lezama 2022, eq. 5).

        Symbols that are still hidden, of finer levels, and places that are not real are no question.
        """
        if "filled" not in batch.kept:  # the model itself does not move
            with torch.no_grad():
                self.guess(batch, step)
        mosaic, filled = batch.kept["mosaic"], batch.kept["filled"]
        beliefs = self.beliefs(filled, batch.examples, mosaic)
        real = (~batch.kept["drawn"]).to(wide(beliefs).dtype)
        question = (filled != self.model.network.hidden) & mosaic.real_BN1
        questions_B = question.flatten(1).sum(1)
        right_B = (((beliefs > 0) == (real > 0)) & question).flatten(1).sum(1) / questions_B
        apart = F.binary_cross_entropy_with_logits(wide(beliefs), real, weight=question.to(real.dtype), reduction="none")
        return Loss({"apart": (apart.flatten(1).sum(1) / questions_B).mean()}, {"accuracy": right_B.mean()})

    def beliefs(self, symbols_BNS: Tensor, examples: Any, mosaic: Mosaic) -> Tensor:
        critic = self.model.critic
        assert critic is not None
        condition = self.condition(self.model.reader, examples, [False] * len(symbols_BNS))
        return critic.beliefs(self.model.reader.states(symbols_BNS, condition, real_BN=mosaic.real_BN))

    # ---- parts of them

    def mosaic(self, examples: Any) -> Mosaic:
        return Mosaic.of(self.layout.folded(self.codes(examples, "tokenizer")))

    def coarser_codes(self, examples: Any) -> Tensor | None:
        """The symbols that are a condition: of the smaller pictures, say."""
        return self.codes(examples, self.coarser) if self.coarser is not None else None

    def started_from(self, examples: Any) -> tuple[Tensor | None, list[int]]:
        """All that a sample keeps of examples beside their captions: coarser symbols, and how long each is."""
        return self.coarser_codes(examples), self.mosaic(examples).lengths

    def masked(self, mosaic: Mosaic, chances: Chances) -> Masked:
        """What is hidden of each example comes from that example's generator. Beyond its end everything is hidden, and nothing
        is asked."""
        vocabulary = self.codecs["tokenizer"].vocabulary
        shown = torch.full_like(mosaic.symbols_BNS, vocabulary, device="cpu")
        asked = torch.zeros_like(shown, dtype=torch.bool)
        rows = zip(mosaic.symbols_BNS.cpu(), mosaic.lengths, chances.generators, strict=True)
        for row, (symbols_NS, length, generator) in enumerate(rows):
            one = self.config.masking.draw(symbols_NS[:length], vocabulary, generator)
            shown[row, :length], asked[row, :length] = one.shown, one.asked
        return Masked(shown.to(mosaic.symbols_BNS.device), asked.to(mosaic.symbols_BNS.device), mosaic.real_BN)

    def condition(
        self, network: Any, examples: Any, dropped: Sequence[bool], captions: Sequence[str] | None = None
    ) -> Condition:
        said = examples.captions if captions is None else captions
        return network.condition(said, dropped, self.coarser_codes(examples))

    # ---- validation and samples

    def observe(self, batch: Batch) -> dict[str, Tensor]:
        mosaic = self.mosaic(batch.examples)
        masked = self.masked(mosaic, Chances.of(batch))
        logits_MV = self.logits_of(masked, batch, batch.examples.captions)
        wanted_M = mosaic.symbols_BNS[masked.asked]
        level_M = masked.asked.nonzero(as_tuple=True)[2] % self.layout.levels
        right_M = logits_MV.argmax(-1) == wanted_M
        seen = {
            "symbols": masked.asked.sum(),
            "symbols_L": torch.bincount(level_M, minlength=self.layout.levels),
            "cross_entropy": F.cross_entropy(wide(logits_MV), wanted_M, reduction="sum"),
            "right_L": torch.bincount(level_M[right_M], minlength=self.layout.levels),
        }
        if self.model.network.text is not None and len(batch) > 1:
            shuffled = [*batch.examples.captions[1:], batch.examples.captions[0]]
            others_MV = self.logits_of(masked, batch, shuffled)
            gain = F.cross_entropy(wide(others_MV), wanted_M, reduction="sum") - seen["cross_entropy"]
            seen |= {"gain": gain, "gain_symbols": seen["symbols"]}
        return seen

    def logits_of(self, masked: Masked, batch: Batch, captions: Sequence[str]) -> Tensor:
        return self.guesses(masked, self.condition(self.model.network, batch.examples, [False] * len(batch), captions))

    def conclude(self, totals: dict[str, Tensor]) -> dict[str, float]:
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
        wanted = Wanted(batch.examples.captions, batch.seeds, coarser=coarser, lengths=lengths)
        return self.codecs["tokenizer"].media(self.generate(wanted))

    @torch.inference_mode()
    def generate(
        self, wanted: Wanted, sampling: MaskedSampling | None = None, guidance: Guidance | None = None
    ) -> Tensor:
        """Codes for what is wanted, (B, *grid), -1 after the end; the medium is one `decode` away."""
        sampling, guidance = sampling or self.config.sampling, guidance or self.config.guidance
        network = self.model.network
        device = next(network.parameters()).device
        start, layout = self.beginning(wanted, device), self.layout_of(wanted)
        filled = fill(
            start.mosaic.symbols_BNS,
            start.hidden_BNS,
            Guide(network, wanted, guidance, device, start.mosaic.real_BN),
            sampling,
            [torch.Generator().manual_seed(seed) for seed in wanted.seeds],
            mask=network.hidden,
            first_NS=halton_order(layout.cells()) if sampling.order == "halton" else None,
            score=self.score(wanted, device, start.mosaic) if self.model.critic is not None else None,
            stages=sampling.stages(layout.count, layout.levels, device),
        )
        return layout.unfolded(filled.masked_fill(~start.mosaic.real_BN1, -1))

    def beginning(self, wanted: Wanted, device: torch.device) -> Beginning:
        """What is there before the first round: all hidden, or what is given."""
        if wanted.codes is None or wanted.hidden is None:
            symbols = torch.zeros(len(wanted.texts), self.layout.count, self.layout.slots, dtype=torch.long, device=device)
            hidden = torch.ones_like(symbols, dtype=torch.bool)
        else:
            layout = self.layout_of(wanted)
            symbols, hidden = layout.folded(wanted.codes.to(device)), layout.folded(wanted.hidden.to(device))
        lengths = wanted.lengths if wanted.lengths is not None else [symbols.shape[1]] * len(symbols)
        real_BN1 = Mosaic(symbols, list(lengths)).real_BN1
        return Beginning(Mosaic(symbols.masked_fill(~real_BN1, 0), list(lengths)), hidden & real_BN1)

    def layout_of(self, wanted: Wanted) -> Layout:
        """Of what is given, which may be longer or shorter than what was learnt from."""
        if wanted.codes is None:
            return self.layout
        return dataclasses.replace(self.layout, grid=tuple(wanted.codes.shape[1 : 1 + len(self.layout.grid)]))

    def score(self, wanted: Wanted, device: torch.device, mosaic: Mosaic) -> Any:
        """The critic's belief in each symbol, as the sampler asks for it."""
        critic, reader = self.model.critic, self.model.reader
        coarser = wanted.coarser.to(device) if wanted.coarser is not None else None
        condition = reader.condition(wanted.texts, [False] * len(wanted.texts), coarser)
        look = partial(reader.states, condition=condition, real_BN=mosaic.real_BN)
        return lambda symbols, progress: critic.beliefs(look(symbols)).float()  # type: ignore[union-attr]


@dataclass
class Beginning:
    """What sampling starts from: a mosaic, and which of its symbols are to be drawn."""

    mosaic: Mosaic
    hidden_BNS: Tensor


NEVER = 1 << 62
"""The first step of an update that is not to move."""


def symbols_of(codec: Codec, places: int | None = None) -> Symbols:
    layout = Layout(codec.grid, codec.levels).gathered(places)
    return Symbols(codec.vocabulary, layout, codec.features, codec.seconds)


def share_right(logits_MV: Tensor, wanted_M: Tensor, asked_BNS: Tensor) -> Tensor:
    """The mean over examples of the share of asked symbols guessed right, so that micro-batches and processes add up."""
    right_M = (logits_MV.argmax(-1) == wanted_M).float()
    spread = torch.zeros(asked_BNS.shape, device=right_M.device).masked_scatter(asked_BNS, right_M)
    return (spread.flatten(1).sum(1) / asked_BNS.flatten(1).sum(1)).mean()
