"""The contrastive objective: micro-batches and processes are one batch, and metrics are those of
the whole held-out set."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tessera.engine.guards import AlarmMonitor
from tessera.engine.modes import train_only
from tessera.engine.task import Batch, Loss, Rows
from tessera.losses.contrastive import negative_mask
from tessera.modalities.music.contrastive import MusicContrastiveConfig
from tessera.modalities.music.mulan import MuLaNConfig
from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig
from tessera.objectives.contrastive import (
    COLLAPSED,
    ContrastiveTask,
    caption_ids_of,
    hash_text,
)
from tessera.text.learned import LearnedTextConfig

MODEL = MuLaNConfig(
    audio=SpectrogramTransformerConfig(
        rate_hz=8000, window=256, hop=128, bands=16, patch=(8, 4), dim=16, depth=2, heads=2
    ),
    text=LearnedTextConfig(dim=16, depth=2, heads=2, vocab_size=300),
    latent=8,
)
CAPTIONS = [
    "a slow tune",
    "drums",
    "A  slow tune",
    "a harp",
    "bells and more bells",
    "fast",
    "a voice, far away",
    "wind",
]
"""The first and the third are equal up to case and white space."""


def build_task(loss: Any = "softmax", layers: int = 0) -> ContrastiveTask:
    torch.manual_seed(5)
    task = MusicContrastiveConfig(model=MODEL, loss=loss, layers=layers).build().double()
    for parameter in task.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return task.train()


def build_batch() -> Batch[Any]:
    """Return eight examples of different lengths."""
    samples = torch.stack(
        [
            torch.randn(1, 1500, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
            for n in range(8)
        ]
    )
    examples = SimpleNamespace(
        samples=samples / 4,
        lengths=torch.tensor([1500 - 100 * n for n in range(8)]),
        captions=list(CAPTIONS),
        rate_hz=8000,
    )
    return Batch(examples, [f"example {n}" for n in range(8)], [1000 + n for n in range(8)])


def select_rows(batch: Batch[Any], rows: list[int]) -> Batch[Any]:
    examples = SimpleNamespace(
        samples=batch.examples.samples[rows],
        lengths=batch.examples.lengths[rows],
        captions=[batch.examples.captions[row] for row in rows],
        rate_hz=8000,
    )
    if hasattr(batch.examples, "tags"):
        examples.tags = [batch.examples.tags[row] for row in rows]
    return Batch(examples, [batch.names[row] for row in rows], [batch.seeds[row] for row in rows])


class SingleProcess:
    rank, world_size = 0, 1

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        return tensor


class SimulatedProcess(SingleProcess):
    """One of two processes; the tensors of the other one were recorded before."""

    world_size = 2

    def __init__(self, rank: int, received: list[Tensor] | None = None):
        self.rank, self.received = rank, iter(received or [])
        self.sent: list[Tensor] = []

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        self.sent.append(tensor)
        other = next(self.received, tensor)
        both = [tensor, other] if self.rank == 0 else [other, tensor]
        return torch.stack(both, dim=1).flatten(0, 1)


Gradients = tuple[float, list[Tensor]]


def compute_gradients(task: ContrastiveTask, losses: list[Loss]) -> Gradients:
    """Return the mean loss over micro-batches and its gradients, as the engine computes them."""
    task.zero_grad()
    total = 0.0
    for loss in losses:
        part = torch.stack(list(loss.terms.values())).sum() / len(losses)
        part.backward()
        total += float(part.detach())
    gradients = [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in task.parameters()
    ]
    return total, gradients


def assert_equal(one: Gradients, other: Gradients) -> None:
    assert one[0] == pytest.approx(other[0], abs=1e-10)
    assert max(float((a - b).abs().max()) for a, b in zip(one[1], other[1], strict=True)) < 1e-10
    assert max(float(gradient.abs().max()) for gradient in one[1]) > 1e-3


# ---- the whole batch

every_loss = pytest.mark.parametrize(
    ("loss", "layers"), [("softmax", 0), ("decoupled", 1), ("sigmoid", 1)]
)


@every_loss
@pytest.mark.parametrize("count", [2, 4, 8])
def test_micro_batches_are_one_batch_with_all_negatives(loss: str, layers: int, count: int) -> None:
    task, whole = build_task(loss, layers), build_batch()
    task.gather_embeddings([whole], 0, SingleProcess())
    assert whole.scratch == {}, "a single micro-batch is not embedded twice"
    expected = compute_gradients(task, [task.contrastive_loss(whole, 0)])
    size = 8 // count
    parts = [select_rows(whole, list(range(start, start + size))) for start in range(0, 8, size)]
    task.gather_embeddings(parts, 0, SingleProcess())
    losses = [task.contrastive_loss(batch, 0) for batch in parts]
    assert_equal(compute_gradients(task, losses), expected)


@every_loss
def test_two_processes_with_two_micro_batches_are_one_batch(loss: str, layers: int) -> None:
    """Examples alternate between the processes: the first one has 0 and 2, then 4 and 6."""
    task, whole = build_task(loss, layers), build_batch()
    expected = compute_gradients(task, [task.contrastive_loss(whole, 0)])
    by_rank = [
        [select_rows(whole, [start + rank, start + rank + 2]) for start in (0, 4)]
        for rank in (0, 1)
    ]
    sent = []
    for rank, batches in enumerate(by_rank):
        process = SimulatedProcess(rank)
        task.gather_embeddings(batches, 0, process)
        sent.append(process.sent)
    for rank, batches in enumerate(by_rank):
        task.gather_embeddings(batches, 0, SimulatedProcess(rank, sent[1 - rank]))
    losses = [task.contrastive_loss(batch, 0) for batches in by_rank for batch in batches]
    assert_equal(compute_gradients(task, losses), expected)


def test_micro_batches_without_gathered_embeddings_have_another_loss() -> None:
    task, whole = build_task(), build_batch()
    expected, _ = compute_gradients(task, [task.contrastive_loss(whole, 0)])
    parts = [select_rows(whole, [0, 1, 2, 3]), select_rows(whole, [4, 5, 6, 7])]
    total, _ = compute_gradients(task, [task.contrastive_loss(batch, 0) for batch in parts])
    assert total != pytest.approx(expected, abs=1e-2)


# ---- negatives


def contrastive_term(task: ContrastiveTask, batch: Batch[Any]) -> float:
    return float(task.contrastive_loss(batch, 0).terms["contrastive"].detach())


def test_examples_with_equal_captions_are_not_negatives() -> None:
    task = build_task()
    equal, different = build_batch(), build_batch()
    different.examples.captions[2] = "A  slow tune ."
    assert contrastive_term(task, equal) != pytest.approx(
        contrastive_term(task, different), abs=1e-3
    )
    assert contrastive_term(task, select_rows(equal, [0, 2])) == pytest.approx(0, abs=1e-12)


def test_examples_with_equal_caption_sets_are_not_negatives() -> None:
    """The caption of a step is drawn from the set, so equal sets may have different captions."""
    task, pair = build_task(), select_rows(build_batch(), [0, 1])
    assert contrastive_term(task, pair) > 1e-3
    pair.examples.caption_sets = [("a slow tune", "drums"), ("Drums", "a  slow tune")]
    assert contrastive_term(task, pair) == pytest.approx(0, abs=1e-12)
    pair.examples.caption_sets = [("a slow tune", "drums"), ("drums", "a harp")]
    assert contrastive_term(task, pair) > 1e-3, "sets that only overlap are negatives"


def test_caption_ids_hash_the_caption_and_its_set() -> None:
    batch = build_batch()
    ids = caption_ids_of(batch)
    assert ids.shape == (8, 2) and ids.dtype == torch.int64 and bool((ids >= 0).all())
    assert torch.equal(ids[0], ids[2]) and len(set(ids[:, 0].tolist())) == 7
    assert torch.equal(ids[:, 0], ids[:, 1]), "a single caption is its own set"
    batch.examples.caption_sets = [(caption, "more") for caption in CAPTIONS]
    with_sets = caption_ids_of(batch)
    assert torch.equal(with_sets[:, 0], ids[:, 0])
    assert not (with_sets[:, 1] == ids[:, 1]).any()
    assert negative_mask(with_sets).sum() == 8 * 8 - 8 - 2


def test_scale_is_clamped_before_each_step() -> None:
    task = build_task()
    task.model.log_scale.data.fill_(20.0)
    task.gather_embeddings([build_batch()], 0, SingleProcess())
    assert task.model.scale().item() == pytest.approx(100)
    assert task.contrastive_loss(build_batch(), 0).total().isfinite()


# ---- the alarm


class ConstantHead(torch.nn.Module):
    """Return the same embedding for every input."""

    def forward(self, state: Tensor) -> Tensor:
        ones = torch.ones(len(state), 8, dtype=state.dtype) + 0 * state[:, :1]
        return torch.nn.functional.normalize(ones, dim=-1)


def build_collapsed(*towers: str) -> ContrastiveTask:
    task = build_task()
    for tower in towers:
        setattr(task.model, f"{tower}_heads", torch.nn.ModuleList([ConstantHead()]))
    return task


def loss_over_chance(task: ContrastiveTask) -> float:
    compute = task.contrastive_loss(build_batch(), 0).metrics["loss_over_chance"]
    assert callable(compute), "it is computed only at steps that are logged"
    return float(compute().detach())


def test_alarm_is_raised_only_for_collapsed_embeddings() -> None:
    both = loss_over_chance(build_collapsed("audio", "text"))
    one = loss_over_chance(build_collapsed("audio"))
    assert both == pytest.approx(1, abs=1e-9) and one > 0.995
    collapsed, healthy = AlarmMonitor((COLLAPSED,)), AlarmMonitor((COLLAPSED,))
    messages = [collapsed.check(200 + 10 * n, {"model/loss_over_chance": both}) for n in range(12)]
    assert [bool(one) for one in messages] == [False] * 9 + [True] + [False] * 2
    assert "ln(candidates)" in messages[9][0]
    records = ({"model/loss_over_chance": 0.6} for _ in range(12))
    assert not any(healthy.check(200 + 10 * n, record) for n, record in enumerate(records))


# ---- validation


def collect_rows(task: ContrastiveTask, *batches: Batch[Any]) -> dict[str, Tensor]:
    results = [task.eval_step(batch) for batch in batches]
    assert all(isinstance(value, Rows) for one in results for value in one.values())
    return {
        name: torch.cat([one[name].values for one in results if name in one])
        for name in {key for one in results for key in one}
    }


def test_metrics_are_those_of_the_whole_set() -> None:
    task, whole = build_task().eval(), build_batch()
    parts = [select_rows(whole, rows) for rows in ([0, 1, 2], [3, 4, 5], [6, 7])]
    with torch.no_grad():
        at_once = task.compute_metrics(collect_rows(task, whole))
        in_parts = task.compute_metrics(collect_rows(task, *parts))
    assert at_once == pytest.approx(in_parts)
    assert at_once["chance_R@1"] == pytest.approx((6 / 8 + 2 / 7) / 8), "two captions are equal"
    assert set(at_once) == {
        *(f"{name}_R@{k}" for name in ("text_to_media", "media_to_text") for k in (1, 5, 10)),
        "text_to_media_median_rank",
        "media_to_text_median_rank",
        *(f"chance_R@{k}" for k in (1, 5, 10)),
    }
    assert task.best_metric.name in at_once


def test_equal_embeddings_are_retrieved_first() -> None:
    task = build_task()
    embeddings = torch.nn.functional.normalize(torch.randn(40, 8), dim=-1)
    totals = {
        "media": embeddings,
        "text": embeddings,
        "caption_ids": torch.arange(80).view(40, 2),
        "example": torch.arange(40),
    }
    metrics = task.compute_metrics(totals)
    assert metrics["text_to_media_R@1"] == metrics["media_to_text_R@1"] == 1
    assert metrics["text_to_media_R@10"] == metrics["text_to_media_median_rank"] == 1
    shuffled = task.compute_metrics(totals | {"text": embeddings.roll(1, 0)})
    assert shuffled["text_to_media_R@1"] < 0.1 and "tag_auc" not in shuffled


def test_patch_dropout_is_for_training_only() -> None:
    task, batch = build_task().eval(), build_batch()
    other = dataclasses.replace(batch, seeds=[seed + 1 for seed in batch.seeds])
    with torch.no_grad():
        assert torch.equal(
            task.eval_step(batch)["media"].values, task.eval_step(other)["media"].values
        )
        assert not torch.equal(task.train().embed_media(batch), task.embed_media(other))


def test_tag_auc_is_that_of_the_similarity_to_the_tag() -> None:
    task, batch = build_task().eval(), build_batch()
    batch.examples.tags = [
        ("slow",),
        ("drums", "loud"),
        ("slow",),
        (),
        ("loud",),
        ("drums",),
        (),
        ("slow", "everywhere"),
    ]
    parts = [select_rows(batch, rows) for rows in ([0, 1, 2, 3], [4, 5, 6, 7])]
    with torch.no_grad():
        totals = collect_rows(task, *parts)
        value = task.compute_metrics(totals)["tag_auc"]
        similarity = totals["media"] @ task.model.get_text_latents(["slow"])[0]
    assert 0 <= value <= 1
    is_slow = totals["tagged"][:, 1] == hash_text("slow")
    only_slow = {**totals, "tagged": totals["tagged"][is_slow]}
    tagged, others = similarity[[0, 2, 7]], similarity[[1, 3, 4, 5, 6]]
    assert task.compute_metrics(only_slow)["tag_auc"] == pytest.approx(
        float((tagged[:, None] > others).double().mean())
    )


def test_examples_without_a_caption_are_not_evaluated() -> None:
    task, batch = build_task().eval(), build_batch()
    batch.examples.captions[3] = ""
    with torch.no_grad():
        assert len(collect_rows(task, batch)["media"]) == 7
        batch.examples.captions = [""] * 8
        assert task.eval_step(batch) == {}


# ---- captions, samples, gradients


def test_data_without_any_caption_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No example has a caption"):
        build_task().prepare_text(["", ""], tmp_path)


def test_samples_are_audio_with_captions_and_a_similarity_sheet(tmp_path: Path) -> None:
    task = build_task().eval()
    with torch.no_grad():
        rows = task.sample(build_batch())
    assert [row.caption for row in rows] == CAPTIONS and rows[3].media.samples.shape == (1, 1200)
    sheet = type(rows[0]).sheet(rows).save(tmp_path / "sheet")
    assert sheet.stat().st_size > 1000
    assert (tmp_path / "sheet.txt").read_text().count("of 8)") == 8
    rows[0].save(tmp_path / "0000")
    assert (tmp_path / "0000.txt").read_text() == "a slow tune\n"
    assert (tmp_path / "0000.wav").exists()


def test_every_parameter_of_the_model_gets_a_gradient() -> None:
    task = build_task("sigmoid", layers=1)
    with train_only(task, task.updates[0].trains):
        task.contrastive_loss(build_batch(), 0).total().backward()
    assert [
        name for name, p in task.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0
    ] == []
