"""The autoregressive task: which symbol comes next? One after the other, from the beginning of an example to its end.

The examples are meshes as their tokenizer writes them, faces of S symbols in a canonical order, and -1 after the last. The
model's end is a symbol too, so it learns how long a mesh is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, Headline, Loss, Update
from tessera.modalities.mesh.transformer import Guesses, MeshTransformer, MeshTransformerConfig
from tessera.nn.precision import wide
from tessera.objectives.generation import PROMPT_IGNORED, Codec, GeneratorTask, Wanted, refuse_augmentation
from tessera.sampling.autoregressive import AutoregressiveSampling, led, write
from tessera.sampling.guidance import Guidance


@dataclass(frozen=True, kw_only=True)
class AutoregressiveConfig:
    door: ClassVar[str] = "Generator"
    """What opens such a run in Python."""
    tokenizer: str = "runs/meshes-autoencoder"
    """The run whose symbols are learnt; it is copied into this run's folder."""
    codes: str = "cache"
    """cache: examples are tokenized once, before the first step. live: at every step, which augmentation needs. Or a folder
    that `tessera tokenize` wrote."""
    model: MeshTransformerConfig = field(default_factory=MeshTransformerConfig)
    drop_condition: float = 0.1
    """The share of examples whose caption is left out, so that guidance has something to lead away from."""
    sampling: AutoregressiveSampling = field(default_factory=AutoregressiveSampling)
    guidance: Guidance = field(default_factory=lambda: Guidance(scale=1.0))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.drop_condition < 1:
            raise ValueError(f"drop_condition is a share, at least 0 and below 1, but it is {self.drop_condition}.")

    def suits(self, data: Any) -> None:
        refuse_augmentation(self.codes, data)
        if data.most_faces > self.model.longest:
            raise ValueError(
                f"Meshes may have {data.most_faces} faces, and this transformer knows {self.model.longest} at most: set "
                f"--data.most-faces {self.model.longest}, or --task.model.longest {data.most_faces}."
            )

    def parts(self) -> dict[str, str]:
        """The runs that this one stands on."""
        return {"tokenizer": self.tokenizer}

    def remark(self) -> str:
        return f"It stands on the tokenizer in {self.tokenizer}."

    def build(self, tokenizer: Codec) -> AutoregressiveTask:
        return AutoregressiveTask(self, tokenizer)


class AutoregressiveTask(GeneratorTask):
    headline = Headline(metric="cross_entropy", higher_is_better=False)

    def __init__(self, config: AutoregressiveConfig, tokenizer: Codec):
        super().__init__({"tokenizer": tokenizer})
        self.config = config
        self.faces, self.corners = tokenizer.grid
        self.levels = tokenizer.levels
        self.model: MeshTransformer = config.model.build(tokenizer.vocabulary, self.corners, self.levels)
        self.updates = (Update(name="model", trains=self.model, loss=self.foretell, optimizer=config.optimizer),)
        self.alarms = (PROMPT_IGNORED,) if config.model.text is not None else ()

    @property
    def network(self) -> MeshTransformer:
        return self.model

    # ---- the loss

    def foretell(self, batch: Batch, step: int) -> Loss:
        chances = [float(torch.rand((), generator=generator)) for generator in batch.generators()]
        dropped = [chance < self.config.drop_condition for chance in chances]
        condition = self.model.condition(batch.examples.captions, dropped)
        guesses = self.model.guesses(self.symbols(batch.examples), condition)
        return Loss({"cross_entropy": guesses.cross_entropy_B().mean()}, {"accuracy": partial(share_right, *told(guesses))})

    def symbols(self, examples: Any) -> Tensor:
        """(B, F, S), cut after the last face of the largest mesh."""
        faces_BFS = self.codes(examples, "tokenizer").flatten(2)
        most = int((faces_BFS[..., 0] >= 0).sum(1).max())
        return faces_BFS[:, :most]

    # ---- validation and samples

    def observe(self, batch: Batch) -> dict[str, Tensor]:
        captions = batch.examples.captions
        guesses = self.guesses_of(batch, captions)
        likeliest_M, targets_M = guesses.logits_MV.argmax(-1), guesses.targets_M
        ends_M = targets_M == self.model.end
        seen = {
            "symbols": torch.tensor(len(targets_M), device=targets_M.device),
            "cross_entropy": summed(guesses),
            "right": (likeliest_M == targets_M).sum(),
            "ends": ends_M.sum(),
            "ends_right": (likeliest_M == targets_M)[ends_M].sum(),
        }
        if self.model.text is not None and len(batch) > 1:
            others = self.guesses_of(batch, [*captions[1:], captions[0]])
            seen |= {"gain": summed(others) - seen["cross_entropy"], "gain_symbols": seen["symbols"]}
        return seen

    def guesses_of(self, batch: Batch, captions: Sequence[str]) -> Guesses:
        return self.model.guesses(self.symbols(batch.examples), self.model.condition(captions, [False] * len(batch)))

    def conclude(self, totals: dict[str, Tensor]) -> dict[str, float]:
        cross_entropy = totals["cross_entropy"] / totals["symbols"]
        numbers = {
            "cross_entropy": float(cross_entropy),
            "perplexity": float(cross_entropy.exp()),
            "accuracy": float(totals["right"] / totals["symbols"]),
            "end_accuracy": float(totals["ends_right"] / totals["ends"]),
        }
        if "gain" in totals:
            numbers["condition_gain"] = float(totals["gain"] / totals["gain_symbols"])
        return numbers

    def sample(self, batch: Batch) -> list[Any]:
        return self.codecs["tokenizer"].media(self.generate(Wanted(batch.examples.captions, batch.seeds)))

    @torch.no_grad()
    def generate(
        self, wanted: Wanted, sampling: AutoregressiveSampling | None = None, guidance: Guidance | None = None
    ) -> Tensor:
        """Codes for what is wanted, (B, *grid), -1 after a mesh's last face. `wanted.codes` are the faces it begins with."""
        sampling, guidance = sampling or self.config.sampling, guidance or self.config.guidance
        device = next(self.model.parameters()).device
        prompt = self.prompt(wanted).to(device)
        written = write(
            self.beginning(wanted, guidance),
            prompt,
            sampling,
            [torch.Generator().manual_seed(seed) for seed in wanted.seeds],
            end=self.model.end,
            most=self.faces,
        )
        symbols_BFS = F.pad(written.symbols_BNS, (0, 0, 0, self.faces - written.symbols_BNS.shape[1]), value=-1)
        codes = symbols_BFS.unflatten(2, (self.corners, self.levels))
        return codes[..., 0] if self.levels == 1 else codes

    def prompt(self, wanted: Wanted) -> Tensor:
        """(B, F, S): the faces that the meshes begin with, and -1 where one has fewer than another."""
        if wanted.codes is None:
            return torch.empty(len(wanted.texts), 0, self.model.slots, dtype=torch.long)
        faces_BFS = wanted.codes.flatten(2)
        return faces_BFS[:, : int((faces_BFS[..., 0] >= 0).sum(1).max())]

    def beginning(self, wanted: Wanted, guidance: Guidance) -> Any:
        """How the model begins to write: under guidance it writes twice, with the prompts and without."""
        if (guidance.start, guidance.end, guidance.ramp) != (0.0, 1.0, "constant"):
            raise ValueError("Guidance that begins late, ends early or grows is for models that draw in rounds, not for this")
        texts, dropped = list(wanted.texts), [False] * len(wanted.texts)
        if guidance.scale == 1 or self.model.text is None:
            return partial(self.model.start, self.model.condition(texts, dropped))
        texts += list(wanted.negative) if wanted.negative is not None else list(wanted.texts)
        dropped += [wanted.negative is None] * len(dropped)
        return led(partial(self.model.start, self.model.condition(texts, dropped)), guidance.scale)


def summed(guesses: Guesses) -> Tensor:
    return F.cross_entropy(wide(guesses.logits_MV), guesses.targets_M, reduction="sum")


def told(guesses: Guesses) -> tuple[Tensor, Tensor, int]:
    """What a sign of health needs, and nothing as wide as the alphabet."""
    return (guesses.logits_MV.detach().argmax(-1) == guesses.targets_M).float(), guesses.mesh_M, guesses.meshes


def share_right(right_M: Tensor, mesh_M: Tensor, meshes: int) -> Tensor:
    """The mean over meshes of the share of their symbols guessed right, so that micro-batches and processes add up."""
    right_B = torch.zeros(meshes, device=right_M.device).index_add(0, mesh_M, right_M)
    return (right_B / torch.bincount(mesh_M, minlength=meshes)).mean()
