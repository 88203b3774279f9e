"""The masked task: which symbols are hidden? (Chang 2022, arXiv 2202.04200; Chang 2023, 2301.00704.)

Some symbols of a mosaic are hidden, the model guesses them from the rest and from the caption. A critic, if there is one, is a
second update: it learns to tell the symbols that were drawn from those that were there. The medium is the tokenizer's: it
says what an example's codes are and what codes look like; nothing here knows pictures from sounds.

B batch, N places, S symbols in a place, M hidden symbols, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.engine.optimizer import OptimizerConfig
from tessera.engine.task import Batch, Headline, Loss, Update
from tessera.models.masked_transformer import (
    Condition,
    CriticConfig,
    CriticHeadConfig,
    MaskedModel,
    MaskedTransformer,
    MaskedTransformerConfig,
    Symbols,
)
from tessera.nn.layout import Layout
from tessera.nn.precision import wide
from tessera.sampling.guidance import Guidance
from tessera.sampling.halton import halton_order
from tessera.sampling.masked import MaskedSampling, drawn, fill
from tessera.sampling.schedules import mean_share
from tessera.tasks.generator import PROMPT_IGNORED, Codec, GeneratorTask, Wanted, refuse_augmentation
from tessera.tasks.guide import Guide
from tessera.tasks.masking import Chances, Masked, MaskingConfig


@dataclass(frozen=True, kw_only=True)
class MaskedConfig:
    door: ClassVar[str] = "Generator"
    """What opens such a run in Python."""
    tokenizer: str = "runs/images-vqgan"
    """The run whose symbols are learnt; it is copied into this run's folder."""
    smaller: str | None = None
    """For super-resolution: the run of the tokenizer of the smaller pictures that larger ones are made from."""
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
    masking: MaskingConfig = field(default_factory=MaskingConfig)
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
        if self.sampling.order == "critic" and self.critic is None:
            raise ValueError("Sampling in the critic's order needs a critic (--critic head or own), and this model has none.")

    def suits(self, data: Any) -> None:
        refuse_augmentation(self.codes, data)

    def parts(self) -> dict[str, str]:
        """The runs that this one stands on."""
        return {"tokenizer": self.tokenizer} | ({"smaller": self.smaller} if self.smaller is not None else {})

    def remark(self) -> str:
        return f"It stands on the tokenizer in {self.tokenizer}."

    def build(self, tokenizer: Codec, smaller: Codec | None = None) -> MaskedTask:
        return MaskedTask(self, tokenizer, smaller)


class MaskedTask(GeneratorTask):
    headline = Headline(metric="cross_entropy", higher_is_better=False)

    def __init__(self, config: MaskedConfig, tokenizer: Codec, smaller: Codec | None):
        super().__init__({"tokenizer": tokenizer} | ({"smaller": smaller} if smaller is not None else {}))
        self.config = config
        self.layout = Layout(tokenizer.grid, tokenizer.levels).gathered(config.places)
        symbols = Symbols(tokenizer.vocabulary, self.layout, tokenizer.features)
        below = None
        if smaller is not None:
            below = Symbols(smaller.vocabulary, Layout(smaller.grid, smaller.levels), smaller.features)
        critic = config.critic.build(config.model, symbols, below) if config.critic is not None else None
        self.model = MaskedModel(config.model.build(symbols, below), critic)
        self.updates = (Update(name="model", trains=self.model.network, loss=self.guess, optimizer=config.optimizer),)
        if critic is not None:
            self.updates += (Update(name="critic", trains=critic, loss=self.tell_drawn, optimizer=config.critic_optimizer),)
        # A smaller picture shows most of what its caption says, so there a small gain is nothing unusual.
        self.alarms = (PROMPT_IGNORED,) if config.model.text is not None and smaller is None else ()

    @property
    def network(self) -> MaskedTransformer:
        return self.model.network

    def readers(self) -> list[Any]:
        return [network for network in (self.model.network, self.model.critic) if getattr(network, "text", None) is not None]

    # ---- losses

    def guess(self, batch: Batch, step: int) -> Loss:
        symbols_BNS = self.symbols(batch.examples)
        chances = Chances.of(batch)
        masked = self.masked(symbols_BNS, chances)
        dropped = [chance < self.config.drop_condition for chance in chances.drop]
        condition = self.condition(self.model.network, batch.examples, dropped)
        previous = self.previous(masked, condition, chances)
        states = self.model.network.states(masked.shown, condition, previous)
        logits_MV = self.model.network.logits(states, masked.asked)
        wanted_M = symbols_BNS[masked.asked]
        summed = F.cross_entropy(wide(logits_MV), wanted_M, label_smoothing=self.config.label_smoothing, reduction="sum")
        if self.model.critic is not None:
            self.keep_for_critic(batch, masked, logits_MV.detach(), chances)
        right = partial(share_right, logits_MV.detach(), wanted_M, masked.asked)
        return Loss({"cross_entropy": summed / self.usual_count(len(batch))}, {"accuracy": right})

    def usual_count(self, examples: int) -> float:
        """Hidden symbols on average, instead of those of this batch: so that micro-batches add up to the batch exactly."""
        return examples * self.layout.count * self.layout.slots * mean_share(self.config.masking.schedule)

    def previous(self, masked: Masked, condition: Condition, chances: Chances) -> Tensor | None:
        """For self-conditioning (Chen 2022, arXiv 2208.04202): the states of a first look, shown to half of the examples."""
        if not self.config.model.self_condition:
            return None
        with torch.no_grad():
            states = self.model.network.states(masked.shown, condition)
        shown = torch.tensor([chance < 0.5 for chance in chances.remember], device=states.device)
        return states * shown[:, None, None]

    def keep_for_critic(self, batch: Batch, masked: Masked, logits_MV: Tensor, chances: Chances) -> None:
        uniform = torch.stack([torch.rand(masked.asked.shape[1:], generator=g) for g in chances.generators])
        symbols = drawn(logits_MV, uniform.to(logits_MV.device)[masked.asked], temperature=1.0)
        batch.kept["filled"] = masked.shown.masked_scatter(masked.asked, symbols)
        batch.kept["drawn"] = masked.asked

    def tell_drawn(self, batch: Batch, step: int) -> Loss:
        """The critic's loss: each symbol of a mosaic that the model has just completed, real or drawn (Lezama 2022, eq. 5)."""
        beliefs = self.beliefs(batch.kept["filled"], batch.examples)
        real = (~batch.kept["drawn"]).to(wide(beliefs).dtype)
        right = ((beliefs > 0) == (real > 0)).float().mean()
        return Loss({"apart": F.binary_cross_entropy_with_logits(wide(beliefs), real)}, {"accuracy": right})

    def beliefs(self, symbols_BNS: Tensor, examples: Any) -> Tensor:
        critic = self.model.critic
        assert critic is not None
        condition = self.condition(self.model.reader, examples, [False] * len(symbols_BNS))
        return critic.beliefs(self.model.reader.states(symbols_BNS, condition))

    # ---- parts of them

    def symbols(self, examples: Any) -> Tensor:
        return self.layout.folded(self.codes(examples, "tokenizer"))

    def smaller_codes(self, examples: Any) -> Tensor | None:
        """For super-resolution: the symbols of the smaller pictures."""
        return self.codes(examples, "smaller") if "smaller" in self.codecs else None

    def masked(self, symbols_BNS: Tensor, chances: Chances) -> Masked:
        """What is hidden of each example comes from that example's generator."""
        vocabulary = self.codecs["tokenizer"].vocabulary
        drawn = [
            self.config.masking.draw(one, vocabulary, generator)
            for one, generator in zip(symbols_BNS.cpu(), chances.generators, strict=True)
        ]
        device = symbols_BNS.device
        shown, asked = (torch.stack(parts).to(device) for parts in zip(*((one.shown, one.asked) for one in drawn)))
        return Masked(shown, asked)

    def condition(
        self, network: Any, examples: Any, dropped: Sequence[bool], captions: Sequence[str] | None = None
    ) -> Condition:
        said = examples.captions if captions is None else captions
        return network.condition(said, dropped, self.smaller_codes(examples))

    # ---- validation and samples

    def observe(self, batch: Batch) -> dict[str, Tensor]:
        symbols = self.symbols(batch.examples)
        masked = self.masked(symbols, Chances.of(batch))
        logits_MV = self.logits_of(masked, batch, batch.examples.captions)
        wanted_M = symbols[masked.asked]
        seen = {
            "symbols": masked.asked.sum(),
            "cross_entropy": F.cross_entropy(wide(logits_MV), wanted_M, reduction="sum"),
            "right": (logits_MV.argmax(-1) == wanted_M).sum(),
        }
        if self.model.network.text is not None and len(batch) > 1:
            shuffled = [*batch.examples.captions[1:], batch.examples.captions[0]]
            others_MV = self.logits_of(masked, batch, shuffled)
            gain = F.cross_entropy(wide(others_MV), wanted_M, reduction="sum") - seen["cross_entropy"]
            seen |= {"gain": gain, "gain_symbols": seen["symbols"]}
        return seen

    def logits_of(self, masked: Masked, batch: Batch, captions: Sequence[str]) -> Tensor:
        network = self.model.network
        condition = self.condition(network, batch.examples, [False] * len(batch), captions)
        previous = network.states(masked.shown, condition) if self.config.model.self_condition else None
        return network.logits(network.states(masked.shown, condition, previous), masked.asked)

    def conclude(self, totals: dict[str, Tensor]) -> dict[str, float]:
        numbers = {
            "cross_entropy": float(totals["cross_entropy"] / totals["symbols"]),
            "accuracy": float(totals["right"] / totals["symbols"]),
        }
        if "gain" in totals:
            numbers["condition_gain"] = float(totals["gain"] / totals["gain_symbols"])
        return numbers

    def sample(self, batch: Batch) -> list[Any]:
        wanted = Wanted(batch.examples.captions, batch.seeds, smaller=self.smaller_codes(batch.examples))
        codes = self.generate(wanted)
        return self.codecs["tokenizer"].media(codes)

    @torch.inference_mode()
    def generate(
        self, wanted: Wanted, sampling: MaskedSampling | None = None, guidance: Guidance | None = None
    ) -> Tensor:
        """Codes for what is wanted, (B, *grid); the medium is one `decode` away."""
        sampling, guidance = sampling or self.config.sampling, guidance or self.config.guidance
        network = self.model.network
        device = next(network.parameters()).device
        shape = (len(wanted.texts), self.layout.count, self.layout.slots)
        if wanted.codes is None or wanted.hidden is None:
            symbols = torch.zeros(shape, dtype=torch.long, device=device)
            hidden = torch.ones(shape, dtype=torch.bool, device=device)
        else:
            symbols, hidden = self.layout.folded(wanted.codes.to(device)), self.layout.folded(wanted.hidden.to(device))
        filled = fill(
            symbols,
            hidden,
            Guide(network, wanted, guidance, device),
            sampling,
            [torch.Generator().manual_seed(seed) for seed in wanted.seeds],
            mask=network.hidden,
            first_NS=halton_order(self.layout.cells()) if sampling.order == "halton" else None,
            score=self.score(wanted, device) if self.model.critic is not None else None,
        )
        return self.layout.unfolded(filled)

    def score(self, wanted: Wanted, device: torch.device) -> Any:
        """The critic's belief in each symbol, as the sampler asks for it."""
        critic, reader = self.model.critic, self.model.reader
        smaller = wanted.smaller.to(device) if wanted.smaller is not None else None
        condition = reader.condition(wanted.texts, [False] * len(wanted.texts), smaller)
        return lambda symbols, progress: critic.beliefs(reader.states(symbols, condition)).float()  # type: ignore[union-attr]


def share_right(logits_MV: Tensor, wanted_M: Tensor, asked_BNS: Tensor) -> Tensor:
    """The mean over examples of the share of asked symbols guessed right, so that micro-batches and processes add up."""
    right_M = (logits_MV.argmax(-1) == wanted_M).float()
    spread = torch.zeros(asked_BNS.shape, device=right_M.device).masked_scatter(asked_BNS, right_M)
    return (spread.flatten(1).sum(1) / asked_BNS.flatten(1).sum(1)).mean()
