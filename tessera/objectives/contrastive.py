"""The contrastive objective: match examples with their captions.

Two towers embed examples and captions on the unit sphere; matching pairs are pulled together and
pushed apart from all other pairs of the batch. The loss is therefore not a mean over examples. The
whole step is still one batch, over micro-batches and processes (gradient caching, Gao 2021, arXiv
2101.06983):

- `gather_embeddings` computes the embeddings of all micro-batches without gradients and gathers
  those of all processes;
- the loss of a micro-batch is the loss of the whole batch, in which only its own embeddings have
  gradients.

The engine takes the mean over k micro-batches and processes. The gradient of the whole batch is a
sum over embeddings, so those with gradients are passed on as `e.detach() + k (e - e.detach())`: the
same value with k times the gradient. The scale of the similarities is in each of the k losses, and
their mean is already its gradient. A single micro-batch on a single process is the whole batch.

Two examples with the same caption, or with the same set of captions, are never negatives of each
other.

B examples of a micro-batch, N of the whole batch or held-out set, L layers, D embedding dimension.
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
from tessera.engine.task import (
    Alarm,
    Batch,
    BestMetric,
    Inputs,
    Loss,
    Media,
    ProcessGroup,
    Rows,
    Task,
    TaskConfig,
    Update,
)
from tessera.losses.contrastive import (
    decoupled_contrastive_loss,
    loss_over_chance,
    negative_mask,
    sigmoid_contrastive_loss,
    softmax_contrastive_loss,
)
from tessera.metrics.retrieval import auc, recall_at_chance, retrieval_ranks
from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.transformer import States
from tessera.text.encoder import TextEncoder, Texts

ContrastiveLoss = Literal["softmax", "decoupled", "sigmoid"]

LOSSES: dict[ContrastiveLoss, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": softmax_contrastive_loss,
    "decoupled": decoupled_contrastive_loss,
    "sigmoid": sigmoid_contrastive_loss,
}
RECALL_AT = (1, 5, 10)


class TwoTowerModel(Protocol):
    """A model with a tower for examples and a tower for captions."""

    @property
    def text(self) -> TextEncoder:
        """The text encoder."""

    @property
    def bias(self) -> Tensor | None:
        """The bias of the logits of each layer, (L,), where the loss has one."""

    def draw(self, examples: Any, generators: Sequence[Generator]) -> Inputs:
        """Draw everything that is random about the embeddings of examples, on the CPU."""

    def embed_media(self, examples: Any, draws: Inputs = None) -> Tensor:
        """Return unit embeddings (B, L, D); the last layer is the embedding."""

    def embed_text(self, captions: Texts) -> Tensor:
        """Return unit embeddings (B, L, D)."""

    def scale(self) -> Tensor:
        """Return the scale of the similarities of each layer, (L,)."""

    def clamp_scale(self) -> None: ...


class TwoTowerModelConfig(Protocol):
    """The configuration of a `TwoTowerModel`."""

    @property
    def validate_data(self) -> Callable[..., None]:
        """A function that raises ValueError if the model cannot read a data configuration."""

    def build(self, *, biased: bool, layers: int) -> TwoTowerModel: ...


@dataclass(frozen=True, kw_only=True)
class ContrastiveConfig(TaskConfig):
    """Base class: a modality declares the type of `model` and how examples are shown."""

    entry_point: ClassVar[str] = "Search"
    min_batch_size: ClassVar[int] = 2

    model: TwoTowerModelConfig
    loss: ContrastiveLoss = "decoupled"
    """The loss: `softmax` (InfoNCE), `decoupled` (without the positive pair in the denominator,
    better for small batches), or `sigmoid` (binary classification of each pair)."""
    layers: int = 0
    """The number of layers before the last to which the loss is applied too."""
    layers_weight: float = 0.5
    """The weight of these layers together, relative to the last one."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    @property
    def uses_captions(self) -> bool:
        return True

    def validate_data(self, data: object) -> None:
        self.model.validate_data(data)

    def show(self, batch: Batch, media_BD: Tensor, text_BD: Tensor) -> Sequence[Media]:
        """Return one medium for each example that shows its similarity to the captions."""
        raise NotImplementedError

    def build(self, **dependencies: object) -> ContrastiveTask:
        return ContrastiveTask(self)


@dataclass
class ContrastiveInputs:
    """What the loss of a batch needs beside its examples."""

    draws: Inputs
    """The result of the model's `draw` in training."""
    text: Tensor | States
    caption_ids: Tensor
    """Hashes (B, 2), see `caption_ids_of`."""


class ContrastiveTask(Task):
    best_metric = BestMetric(name="text_to_media_R@1")

    def __init__(self, config: ContrastiveConfig):
        super().__init__()
        self.config = config
        self.model = config.model.build(biased=config.loss == "sigmoid", layers=config.layers)
        update = Update(
            name="model",
            trains=self.model,
            loss=self.contrastive_loss,
            optimizer=config.optimizer,
            prepare=self.gather_embeddings,
        )
        self.updates = (update,)
        self.alarms = (COLLAPSED,)

    def prepare_text(self, captions: Sequence[str], cache_dir: Path) -> None:
        if not any(captions):
            raise ValueError(
                "No example has a caption, but this recipe is trained on pairs of examples and "
                "captions: put name.txt beside each file, or a metadata.jsonl, or sort the files "
                "into named folders."
            )
        self.model.text.prepare_text(captions, cache_dir)

    # ---- the loss

    def prepare_inputs(self, batch: Batch) -> ContrastiveInputs:
        is_training = self.model.training
        draws = self.model.draw(batch.examples, batch.generators()) if is_training else None
        text = self.model.text.encode_inputs(batch.examples.captions)
        return ContrastiveInputs(draws, text, caption_ids_of(batch))

    def contrastive_loss(self, batch: Batch, step: int) -> Loss:
        inputs: ContrastiveInputs = self.get_inputs(batch)
        media_BLD = self.model.embed_media(batch.examples, inputs.draws)
        text_BLD = self.model.embed_text(inputs.text)
        scratch = batch.scratch
        caption_ids = scratch["caption_ids"] if scratch else inputs.caption_ids
        media_NLD = insert_own(scratch.get("media"), media_BLD, batch)
        text_NLD = insert_own(scratch.get("text"), text_BLD, batch)
        negatives_NN = negative_mask(caption_ids)
        loss = LOSSES[self.config.loss]
        with full_precision(media_NLD.device.type):
            logits = [
                self.logits(media_NLD, text_NLD, layer) for layer in range(media_NLD.shape[1])
            ]
            *inner, last = [loss(one, negatives_NN) for one in logits]
        terms = {"contrastive": last}
        if inner:
            terms["layers"] = self.config.layers_weight * torch.stack(inner).mean()
        relative = partial(loss_over_chance, logits[-1].detach(), negatives_NN)
        return Loss(terms, {"loss_over_chance": relative, "scale": self.model.scale()[-1]})

    def embed_media(self, batch: Batch) -> Tensor:
        return self.model.embed_media(batch.examples, self.get_inputs(batch).draws)

    def embed_text(self, batch: Batch) -> Tensor:
        return self.model.embed_text(self.get_inputs(batch).text)

    def logits(self, media_NLD: Tensor, text_NLD: Tensor, layer: int) -> Tensor:
        similarity_NN = to_fp32(media_NLD[:, layer]) @ to_fp32(text_NLD[:, layer]).T
        scaled_NN = self.model.scale()[layer] * similarity_NN
        return scaled_NN if self.model.bias is None else scaled_NN + self.model.bias[layer]

    def gather_embeddings(
        self, micro_batches: Sequence[Batch], step: int, dist: ProcessGroup
    ) -> None:
        """Leave the embeddings of the whole batch with each micro-batch."""
        self.model.clamp_scale()
        if len(micro_batches) * dist.world_size == 1:
            return
        gather = dist.all_gather_rows
        with torch.no_grad():
            media_NLD = torch.cat([gather(self.embed_media(one)) for one in micro_batches])
            text_NLD = torch.cat([gather(self.embed_text(one)) for one in micro_batches])
        device = media_NLD.device
        ids = torch.cat([gather(self.get_inputs(one).caption_ids) for one in micro_batches])
        start = 0
        for batch in micro_batches:
            # Example i of a micro-batch is on process i modulo the number of processes.
            stop = start + len(batch) * dist.world_size
            own_B = torch.arange(start + dist.rank, stop, dist.world_size, device=device)
            batch.scratch |= {
                "media": media_NLD,
                "text": text_NLD,
                "caption_ids": ids,
                "own": own_B,
            }
            start = stop

    # ---- evaluation and samples

    def eval_step(self, batch: Batch) -> dict[str, Rows]:
        """Return embeddings and caption ids as rows; examples without a caption are left out."""
        captioned = [i for i, caption in enumerate(batch.examples.captions) if caption]
        if not captioned:
            return {}
        rows = {
            "media": self.embed_media(batch)[:, -1],
            "text": self.embed_text(batch)[:, -1],
            "caption_ids": caption_ids_of(batch),
            "example": torch.tensor(batch.seeds),
        }
        results = {name: Rows(values[captioned]) for name, values in rows.items()}
        tags_of = getattr(batch.examples, "tags", ())
        tagged = [(i, tag) for i, tags in enumerate(tags_of) for tag in tags]
        if tagged:
            tags = sorted({tag for _, tag in tagged})
            pairs = [[batch.seeds[i], hash_text(tag)] for i, tag in tagged]
            results |= {
                "tagged": Rows(torch.tensor(pairs)),
                "tag": Rows(torch.tensor([hash_text(tag) for tag in tags])),
                "tag_embedding": Rows(self.model.embed_text(tags)[:, -1]),
            }
        return results

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        media_ND, text_ND, ids = totals["media"], totals["text"], totals["caption_ids"]
        metrics: dict[str, float] = {}
        for direction, queries, candidates in (
            ("text_to_media", text_ND, media_ND),
            ("media_to_text", media_ND, text_ND),
        ):
            ranks_N = retrieval_ranks(queries, candidates, ids)
            for k in RECALL_AT:
                metrics[f"{direction}_R@{k}"] = float((ranks_N <= k).double().mean())
            metrics[f"{direction}_median_rank"] = float(ranks_N.double().quantile(0.5))
        metrics |= {f"chance_R@{k}": float(recall_at_chance(ids, k)) for k in RECALL_AT}
        if (value := tag_auc(totals)) is not None:
            metrics["tag_auc"] = value
        return metrics

    def sample(self, batch: Batch) -> Sequence[Media]:
        media_BD, text_BD = self.embed_media(batch)[:, -1], self.embed_text(batch)[:, -1]
        return self.config.show(batch, media_BD, text_BD)


def insert_own(all_NLD: Tensor | None, own_BLD: Tensor, batch: Batch) -> Tensor:
    """Insert the embeddings with gradients into those of the whole batch."""
    if all_NLD is None:
        return own_BLD
    parts = len(all_NLD) // len(own_BLD)
    constant_BLD = own_BLD.detach()
    with_gradient = constant_BLD + parts * (own_BLD - constant_BLD)
    return all_NLD.index_copy(0, batch.scratch["own"], with_gradient)


def caption_ids_of(batch: Batch) -> Tensor:
    """Return hashes (B, 2) of the drawn caption and of the set of captions of each example.

    Case and white space are ignored. Examples are negatives only if both hashes differ.
    """
    captions = batch.examples.captions
    sets = getattr(batch.examples, "caption_sets", None) or [(one,) for one in captions]
    rows = []
    for caption, caption_set in zip(captions, sets, strict=True):
        joined = "\n".join(sorted({normalise(one) for one in caption_set}))
        rows.append([hash_text(normalise(caption)), hash_text(joined)])
    return torch.tensor(rows)


def normalise(text: str) -> str:
    return " ".join(text.casefold().split())


def hash_text(text: str) -> int:
    """Hash a text to 63 bits, the same on every machine."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def tag_auc(totals: dict[str, Tensor]) -> float | None:
    """Return the mean AUC of the similarity to a tag for having it (zero-shot tagging)."""
    if "tag" not in totals:
        return None
    embeddings = dict(zip(totals["tag"].tolist(), totals["tag_embedding"], strict=True))
    examples_of: dict[int, set[int]] = {}
    for example, tag in totals["tagged"].tolist():
        examples_of.setdefault(tag, set()).add(example)
    media_ND, examples = totals["media"], totals["example"].tolist()
    values = []
    for tag, tagged in sorted(examples_of.items()):
        has_tag_N = torch.tensor([example in tagged for example in examples])
        if not bool(has_tag_N.all()):
            values.append(auc(media_ND @ embeddings[tag], has_tag_N))
    return float(torch.stack(values).mean()) if values else None


COLLAPSED = Alarm(
    name="collapsed embeddings",
    metric="model/loss_over_chance",
    above=0.995,
    patience=10,
    after=200,
    hint="The loss is ln(candidates): all examples, or all captions, have the same embedding. "
    "Lower the learning rate, use a longer warm-up, or inspect the captions (`tessera check`).",
)
