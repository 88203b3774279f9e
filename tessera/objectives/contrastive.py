"""The contrastive task: which text belongs?

Two towers give each example a point and each caption a point; what belongs together is drawn
together, and told apart from all else in the batch. So the loss is no mean over examples: every
example is a question in which all others are the candidates. The whole step is one batch all the
same, over micro-batches and processes (gradient caching, Gao 2021, arXiv 2101.06983):

- `prepare` computes the points of all micro-batches without gradients, and the processes lay theirs
  together;
- the loss of a micro-batch is the loss of the whole batch, in which only its own points are live.

The engine takes the mean over micro-batches and processes, k in all. The whole batch's gradient is
a sum over points, so the live ones are passed on as `p.detach() + k (p - p.detach())`: as they are,
with k times their gradient. The scale of the similarities is in each of the k losses in full, and
their mean is its gradient already. A single micro-batch on a single process is the whole batch, and
nothing is computed twice.

What is drawn for an example, of what it shows in training, comes from its own generator, and is the
same in both passes.

B examples of a micro-batch, N of the whole batch or held-out set, L points of each, D numbers of a
point.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Generator, Tensor

from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Alarm, Batch, BestMetric, Loss, ProcessGroup, Rows, Task, Update
from tessera.losses.contrastive import (
    apart,
    auc,
    decoupled_contrast,
    loss_over_chance,
    ranks,
    recall_by_chance,
    sigmoid_contrast,
    softmax_contrast,
)
from tessera.modalities.music.similarity_sheet import SimilarityRow
from tessera.nn.precision import full_precision, to_fp32

Kind = Literal["softmax", "decoupled", "sigmoid"]

CONTRASTS: dict[Kind, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": softmax_contrast,
    "decoupled": decoupled_contrast,
    "sigmoid": sigmoid_contrast,
}
FOUND_AMONG = (1, 5, 10)


class Towers(Protocol):
    """What a model of this task is."""

    text: Any
    """reads captions: a TextEncoder"""
    bias: Tensor | None
    """(L,), where the loss has one"""

    def first(self, examples: Any, chances: Sequence[Generator] | None = None) -> Tensor:
        """(B, L, D) of examples, on the unit sphere; the last point of each is what counts."""

    def second(self, captions: Sequence[str]) -> Tensor:
        """(B, L, D) of texts."""

    def scale(self) -> Tensor:
        """(L,)"""

    def hold_scale(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class ContrastiveConfig:
    """A medium says in a subclass what the model can be, and how an example is shown."""

    entry_point: ClassVar[str] = "Search"
    """What opens such a run in Python."""
    least_batch: ClassVar[int] = 2
    """An example by itself has nothing to be told apart from."""
    model: Any
    loss: Kind = "decoupled"
    """softmax: which of the batch belongs (InfoNCE). decoupled: the same without the right answer
    among the candidates, better in small batches. sigmoid: of each pair, whether it belongs
    together."""
    layers: int = 0
    """Layers before the last at which the question is asked too."""
    layers_weight: float = 0.5
    """How much they count, all together, beside the last."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def validate_data(self, data: Any) -> None:
        self.model.validate_data(data)

    def parts(self) -> dict[str, str]:
        """It stands on no other run."""
        return {}

    def notice(self) -> str:
        return ""

    def for_inference(self) -> ContrastiveConfig:
        return self

    def shown(self, examples: Any) -> list[Any]:
        """Examples as media."""
        raise NotImplementedError

    def build(self) -> ContrastiveTask:
        return ContrastiveTask(self)


class ContrastiveTask(Task):
    best_metric = BestMetric(metric="by_text_r1")

    def __init__(self, config: ContrastiveConfig):
        super().__init__()
        self.config = config
        self.model = config.model.build(biased=config.loss == "sigmoid", layers=config.layers)
        self.updates = (
            Update(
                name="model", trains=self.model, loss=self.contrastive_loss, optimizer=config.optimizer,
                prepare=self.look_at_whole_batch,
            ),
        )  # fmt: skip
        self.alarms = (NOTHING_TOLD_APART,)

    def prepare_text(self, captions: Sequence[str], place: Path) -> None:
        """Before the first step: the text encoder hears all captions."""
        if not any(captions):
            raise ValueError(
                "Not one example has a caption, and this recipe learns which caption belongs to which example: put name.txt "
                "beside each file, or a metadata.jsonl, or sort the files into named folders."
            )
        self.model.text.prepare_text(captions, place)

    # ---- the loss

    def contrastive_loss(self, batch: Batch, step: int) -> Loss:
        first_BLD, second_BLD = self.first(batch), self.second(batch)
        said_N = batch.scratch["said"] if "said" in batch.scratch else said(batch)
        first_NLD = among(batch.scratch.get("first"), first_BLD, batch)
        second_NLD = among(batch.scratch.get("second"), second_BLD, batch)
        against_NN = apart(said_N.to(first_NLD.device))
        with full_precision(first_NLD.device.type):
            logits = [
                self.logits(first_NLD, second_NLD, layer) for layer in range(first_NLD.shape[1])
            ]
            *before, last = [CONTRASTS[self.config.loss](one, against_NN) for one in logits]
        terms = {"contrast": last}
        if before:
            terms["layers"] = self.config.layers_weight * torch.stack(before).mean()
        stuck = partial(loss_over_chance, logits[-1].detach(), against_NN)
        return Loss(terms, {"of_chance": stuck, "scale": self.model.scale()[-1]})

    def first(self, batch: Batch) -> Tensor:
        return self.model.first(batch.examples, batch.generators() if self.model.training else None)

    def second(self, batch: Batch) -> Tensor:
        return self.model.second(batch.examples.captions)

    def logits(self, first_NLD: Tensor, second_NLD: Tensor, layer: int) -> Tensor:
        nearness_NN = to_fp32(first_NLD[:, layer]) @ to_fp32(second_NLD[:, layer]).T
        scaled_NN = self.model.scale()[layer] * nearness_NN
        return scaled_NN if self.model.bias is None else scaled_NN + self.model.bias[layer]

    def look_at_whole_batch(self, micros: Sequence[Batch], step: int, dist: ProcessGroup) -> None:
        """Leaves with each micro-batch the points of all, and which of them are its own."""
        self.model.hold_scale()
        if len(micros) * dist.world_size == 1:
            return
        with torch.no_grad():
            first_NLD = torch.cat([dist.all_gather_rows(self.first(batch)) for batch in micros])
            second_NLD = torch.cat([dist.all_gather_rows(self.second(batch)) for batch in micros])
        said_N = torch.cat(
            [dist.all_gather_rows(said(batch).to(first_NLD.device)) for batch in micros]
        )
        begins = 0
        for batch in micros:
            everybody = len(batch) * dist.world_size  # dealt to the processes like cards
            own_B = torch.arange(
                begins + dist.rank, begins + everybody, dist.world_size, device=first_NLD.device
            )
            batch.scratch |= {
                "first": first_NLD,
                "second": second_NLD,
                "said": said_N,
                "own": own_B,
            }
            begins += everybody

    # ---- validation and samples

    def eval_step(self, batch: Batch) -> dict[str, Rows]:
        """Points, and who said what: ranks need the whole set at once. What has no caption takes no
        part."""
        captioned = [place for place, caption in enumerate(batch.examples.captions) if caption]
        if not captioned:
            return {}
        rows = (
            self.first(batch)[:, -1],
            self.second(batch)[:, -1],
            said(batch),
            torch.tensor(batch.seeds),
        )
        seen = {
            name: Rows(one[captioned])
            for name, one in zip(("first", "second", "said", "example"), rows, strict=True)
        }
        tagged = [
            (example, tag)
            for example, tags in enumerate(getattr(batch.examples, "tags", ()))
            for tag in tags
        ]
        if tagged:
            tags = sorted({tag for _, tag in tagged})
            where = [[batch.seeds[example], number_of(tag)] for example, tag in tagged]
            seen |= {
                "tagged": Rows(torch.tensor(where)),
                "tag": Rows(torch.tensor([number_of(tag) for tag in tags])),
                "tag_point": Rows(self.model.second(tags)[:, -1]),
            }
        return seen

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        first_ND, second_ND, said_N = totals["first"], totals["second"], totals["said"]
        numbers: dict[str, float] = {}
        for way, asking, answering in (
            ("by_text", second_ND, first_ND),
            ("by_media", first_ND, second_ND),
        ):
            places_N = ranks(asking, answering, said_N)
            numbers |= {
                f"{way}_r{most}": float((places_N <= most).double().mean()) for most in FOUND_AMONG
            }
            numbers[f"{way}_median_rank"] = float(places_N.double().quantile(0.5))
        numbers |= {
            f"chance_r{most}": float(recall_by_chance(said_N, most)) for most in FOUND_AMONG
        }
        if (tags := tag_auc(totals)) is not None:
            numbers["tag_auc"] = tags
        return numbers

    def sample(self, batch: Batch) -> list[Any]:
        first_BD, second_BD = (
            rows[:, -1].cpu().numpy() for rows in (self.first(batch), self.second(batch))
        )
        media = self.config.shown(batch.examples)
        return [
            SimilarityRow(*one)
            for one in zip(
                batch.names, batch.examples.captions, media, first_BD, second_BD, strict=True
            )
        ]


def among(rows_NLD: Tensor | None, own_BLD: Tensor, batch: Batch) -> Tensor:
    """The points of the whole batch, of which those of this micro-batch are live, with the gradient
    that the mean will want."""
    if rows_NLD is None:
        return own_BLD
    share = len(rows_NLD) // len(own_BLD)
    still_BLD = own_BLD.detach()
    return rows_NLD.index_copy(0, batch.scratch["own"], still_BLD + share * (own_BLD - still_BLD))


def said(batch: Batch) -> Tensor:
    """(B,): equal where captions are, but for capitals and spaces."""
    return torch.tensor(
        [number_of(" ".join(caption.casefold().split())) for caption in batch.examples.captions]
    )


def number_of(text: str) -> int:
    """63 bits, the same on every machine."""
    return (
        int.from_bytes(
            hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "big"
        )
        >> 1
    )


def tag_auc(totals: dict[str, Tensor]) -> float | None:
    """How well nearness to a tag tells who has it: the mean over tags that some have and some do
    not (zero-shot tagging)."""
    if "tag" not in totals:
        return None
    points = dict(zip(totals["tag"].tolist(), totals["tag_point"], strict=True))
    holders: dict[int, set[int]] = {}
    for example, tag in totals["tagged"].tolist():
        holders.setdefault(tag, set()).add(example)
    first_ND, examples = totals["first"], totals["example"].tolist()
    found = []
    for tag, having in sorted(holders.items()):
        has_N = torch.tensor([example in having for example in examples])
        if not bool(has_N.all()):
            found.append(auc(first_ND @ points[tag], has_N))
    return float(torch.stack(found).mean()) if found else None


NOTHING_TOLD_APART = Alarm(
    name="nothing is told apart",
    metric="model/of_chance",
    above=0.995,
    patience=10,
    after=200,
    hint="The loss sits at ln(candidates): all examples, or all captions, have become one point. Lower the rate, warm up "
    "longer, or look at the captions (`tessera check`): do they say what is to be heard?",
)
