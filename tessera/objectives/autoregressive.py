"""The autoregressive task: which symbol comes next? One after the other, from the beginning of an
example to its end.

The examples are meshes as their tokenizer writes them, faces of S symbols in a canonical order, and
-1 after the last. The model's end is a symbol too, so it learns how long a mesh is.
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
from tessera.engine.task import Batch, BestMetric, Loss, Update
from tessera.modalities.mesh.transformer import Guesses, MeshTransformer, MeshTransformerConfig
from tessera.nn.precision import to_fp32
from tessera.objectives.generation import (
    PROMPT_IGNORED,
    GenerationRequest,
    GeneratorTask,
    TokenizerProtocol,
    refuse_augmentation,
)
from tessera.sampling.autoregressive import AutoregressiveSampling, with_cfg, write
from tessera.sampling.guidance import Guidance


@dataclass(frozen=True, kw_only=True)
class AutoregressiveConfig:
    entry_point: ClassVar[str] = "Generator"
    """What opens such a run in Python."""
    tokenizer: str = "runs/meshes-autoencoder"
    """The run whose symbols are learnt; it is copied into this run's folder."""
    tokens: str = "cache"
    """cache: examples are tokenized once, before the first step. live: at every step, which
    augmentation needs. Or a folder that `tessera tokenize` wrote."""
    model: MeshTransformerConfig = field(default_factory=MeshTransformerConfig)
    cond_drop_prob: float = 0.1
    """The share of examples whose caption is left out, so that guidance has something to lead away
    from."""
    sampling: AutoregressiveSampling = field(default_factory=AutoregressiveSampling)
    guidance: Guidance = field(default_factory=lambda: Guidance(scale=1.0))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.cond_drop_prob < 1:
            raise ValueError(
                f"drop_condition is a share, at least 0 and below 1, but it is {self.cond_drop_prob}."
            )

    def validate_data(self, data: Any) -> None:
        refuse_augmentation(self.tokens, data)
        if data.max_faces > self.model.max_len:
            raise ValueError(
                f"Meshes may have {data.max_faces} faces, and this transformer knows {self.model.max_len} at most: set "
                f"--data.max-faces {self.model.max_len}, or --task.model.longest {data.max_faces}."
            )

    def parts(self) -> dict[str, str]:
        """The runs that this one stands on."""
        return {"tokenizer": self.tokenizer}

    def notice(self) -> str:
        return f"It stands on the tokenizer in {self.tokenizer}."

    def build(self, tokenizer: TokenizerProtocol) -> AutoregressiveTask:
        return AutoregressiveTask(self, tokenizer)


class AutoregressiveTask(GeneratorTask):
    best_metric = BestMetric(metric="cross_entropy", higher_is_better=False)

    def __init__(self, config: AutoregressiveConfig, tokenizer: TokenizerProtocol):
        super().__init__({"tokenizer": tokenizer})
        self.config = config
        self.faces, self.corners = tokenizer.grid
        self.levels = tokenizer.levels
        self.model: MeshTransformer = config.model.build(
            tokenizer.vocab_size, self.corners, self.levels
        )
        self.updates = (
            Update(
                name="model",
                trains=self.model,
                loss=self.next_token_loss,
                optimizer=config.optimizer,
            ),
        )
        self.alarms = (PROMPT_IGNORED,) if config.model.text is not None else ()

    @property
    def network(self) -> MeshTransformer:
        return self.model

    # ---- the loss

    def next_token_loss(self, batch: Batch, step: int) -> Loss:
        chances = [float(torch.rand((), generator=generator)) for generator in batch.generators()]
        dropped = [chance < self.config.cond_drop_prob for chance in chances]
        condition = self.model.condition(batch.examples.captions, dropped)
        guesses = self.model.guesses(self.tokens(batch.examples), condition)
        return Loss(
            {"cross_entropy": guesses.cross_entropy_B().mean()},
            {"accuracy": partial(token_accuracy, *told(guesses))},
        )

    def tokens(self, examples: Any) -> Tensor:
        """(B, F, S), cut after the last face of the largest mesh."""
        faces_BFS = self.tokens(examples, "tokenizer").flatten(2)
        most = int((faces_BFS[..., 0] >= 0).sum(1).max())
        return faces_BFS[:, :most]

    # ---- validation and samples

    def eval_step(self, batch: Batch) -> dict[str, Tensor]:
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
            seen |= {
                "gain": summed(others) - seen["cross_entropy"],
                "gain_symbols": seen["symbols"],
            }
        return seen

    def guesses_of(self, batch: Batch, captions: Sequence[str]) -> Guesses:
        return self.model.guesses(
            self.tokens(batch.examples), self.model.condition(captions, [False] * len(batch))
        )

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
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
        return self.tokenizers["tokenizer"].media(
            self.generate(GenerationRequest(batch.examples.captions, batch.seeds))
        )

    @torch.no_grad()
    def generate(
        self,
        wanted: GenerationRequest,
        sampling: AutoregressiveSampling | None = None,
        guidance: Guidance | None = None,
    ) -> Tensor:
        """Codes for what is wanted, (B, *grid), -1 after a mesh's last face. `wanted.tokens` are
        the faces it begins with."""
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
        tokens_BFS = F.pad(
            written.tokens_BNS, (0, 0, 0, self.faces - written.tokens_BNS.shape[1]), value=-1
        )
        tokens = tokens_BFS.unflatten(2, (self.corners, self.levels))
        return tokens[..., 0] if self.levels == 1 else tokens

    def prompt(self, wanted: GenerationRequest) -> Tensor:
        """(B, F, S): the faces that the meshes begin with, and -1 where one has fewer than
        another."""
        if wanted.tokens is None:
            return torch.empty(len(wanted.texts), 0, self.model.slots, dtype=torch.long)
        faces_BFS = wanted.tokens.flatten(2)
        return faces_BFS[:, : int((faces_BFS[..., 0] >= 0).sum(1).max())]

    def beginning(self, wanted: GenerationRequest, guidance: Guidance) -> Any:
        """How the model begins to write: under guidance it writes twice, with the prompts and
        without."""
        if (guidance.start, guidance.end, guidance.ramp) != (0.0, 1.0, "constant"):
            raise ValueError(
                "Guidance that begins late, ends early or grows is for models that draw in rounds, not for this"
            )
        texts, dropped = list(wanted.texts), [False] * len(wanted.texts)
        if guidance.scale == 1 or self.model.text is None:
            return partial(self.model.start, self.model.condition(texts, dropped))
        texts += list(wanted.negative) if wanted.negative is not None else list(wanted.texts)
        dropped += [wanted.negative is None] * len(dropped)
        return with_cfg(
            partial(self.model.start, self.model.condition(texts, dropped)), guidance.scale
        )


def summed(guesses: Guesses) -> Tensor:
    return F.cross_entropy(to_fp32(guesses.logits_MV), guesses.targets_M, reduction="sum")


def told(guesses: Guesses) -> tuple[Tensor, Tensor, int]:
    """What a sign of health needs, and nothing as wide as the alphabet."""
    return (
        (guesses.logits_MV.detach().argmax(-1) == guesses.targets_M).float(),
        guesses.mesh_M,
        guesses.meshes,
    )


def token_accuracy(right_M: Tensor, mesh_M: Tensor, meshes: int) -> Tensor:
    """The mean over meshes of the share of their symbols guessed right, so that micro-batches and
    processes add up."""
    right_B = torch.zeros(meshes, device=right_M.device).index_add(0, mesh_M, right_M)
    return (right_B / torch.bincount(mesh_M, minlength=meshes)).mean()
