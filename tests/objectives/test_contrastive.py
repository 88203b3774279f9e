"""The contrastive task: many small batches on several processes are one large batch; what is
measured is the whole set's."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tessera.engine.guards import AlarmMonitor
from tessera.engine.modes import only
from tessera.engine.task import Batch, Rows
from tessera.modalities.music.contrastive import MusicContrastiveConfig
from tessera.modalities.music.mulan import MuLaNConfig
from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig
from tessera.objectives.contrastive import NOTHING_TOLD_APART, ContrastiveTask, number_of
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


def build_task(loss: str = "softmax", layers: int = 0) -> ContrastiveTask:
    torch.manual_seed(5)
    task = MusicContrastiveConfig(model=MODEL, loss=loss, layers=layers).build().double()
    for parameter in task.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return task.train()


def batch_of(first: int, step: int = 1, count: int = 8) -> Batch:
    """The examples number first, first + step, ... of eight."""
    numbers = list(range(first, count, step))
    sounds = torch.stack(
        [
            torch.randn(1, 1500, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
            for n in numbers
        ]
    )
    lengths = torch.tensor([1500 - 100 * n for n in numbers])
    captions = [CAPTIONS[n] for n in numbers]
    examples = SimpleNamespace(samples=sounds / 4, lengths=lengths, captions=captions, rate_hz=8000)
    return Batch(examples, [f"clip {n}" for n in numbers], [1000 + n for n in numbers])


def part(batch: Batch, rows: list[int]) -> Batch:
    examples = SimpleNamespace(
        samples=batch.examples.samples[rows],
        lengths=batch.examples.lengths[rows],
        captions=[batch.examples.captions[row] for row in rows],
        rate_hz=8000,
    )
    return Batch(examples, [batch.names[row] for row in rows], [batch.seeds[row] for row in rows])


class Alone:
    rank, processes = 0, 1

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


class Pretended:
    """Two processes in one: what the other one would have sent was computed before."""

    processes = 2

    def __init__(self, rank: int, others: list[torch.Tensor] | None = None):
        self.rank, self.sent, self.others = rank, [], iter(others or [])

    def rows(self, tensor: torch.Tensor) -> torch.Tensor:
        self.sent.append(tensor)
        other = next(self.others, tensor)
        both = [tensor, other] if self.rank == 0 else [other, tensor]
        return torch.stack(both, dim=1).flatten(0, 1)


def gradients(task: ContrastiveTask, losses: list[Any]) -> tuple[float, list[torch.Tensor]]:
    """As the engine has it: the mean over micro-batches."""
    task.zero_grad()
    total = 0.0
    for loss in losses:
        share = sum(loss.terms.values()) / len(losses)
        share.backward()
        total += float(share.detach())
    return total, [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in task.parameters()
    ]


def assert_equal(
    one: tuple[float, list[torch.Tensor]], other: tuple[float, list[torch.Tensor]]
) -> None:
    assert one[0] == pytest.approx(other[0], abs=1e-10)
    assert max(float((a - b).abs().max()) for a, b in zip(one[1], other[1], strict=True)) < 1e-10
    assert max(float(gradient.abs().max()) for gradient in one[1]) > 1e-3


every_loss = pytest.mark.parametrize(
    ("loss", "layers"), [("softmax", 0), ("decoupled", 1), ("sigmoid", 1)]
)


@every_loss
@pytest.mark.parametrize("micros", [2, 4, 8])
def test_micro_batches_are_one_batch_with_all_its_negatives(
    loss: str, layers: int, micros: int
) -> None:
    task, whole = build_task(loss, layers), batch_of(0)
    task.look_at_whole_batch([whole], 0, Alone())
    assert whole.scratch == {}, "nothing is computed twice"
    expected = gradients(task, [task.contrastive_loss(whole, 0)])
    size = 8 // micros
    parts = [part(whole, list(range(start, start + size))) for start in range(0, 8, size)]
    task.look_at_whole_batch(parts, 0, Alone())
    assert_equal(gradients(task, [task.contrastive_loss(batch, 0) for batch in parts]), expected)


@every_loss
def test_two_processes_with_two_micro_batches_each_are_one_batch(loss: str, layers: int) -> None:
    """Blocks of four are dealt like cards: the first process has 0 and 2, then 4 and 6."""
    task, whole = build_task(loss, layers), batch_of(0)
    expected = gradients(task, [task.contrastive_loss(whole, 0)])
    hands = [[part(whole, [block + rank, block + rank + 2]) for block in (0, 4)] for rank in (0, 1)]
    sent = []
    for rank, hand in enumerate(hands):
        dist = Pretended(rank)
        task.look_at_whole_batch(hand, 0, dist)
        sent.append(dist.sent)
    for rank, hand in enumerate(hands):
        task.look_at_whole_batch(hand, 0, Pretended(rank, sent[1 - rank]))
    assert_equal(
        gradients(task, [task.contrastive_loss(batch, 0) for hand in hands for batch in hand]),
        expected,
    )


def test_plain_accumulation_would_be_something_else() -> None:
    task, whole = build_task(), batch_of(0)
    expected = gradients(task, [task.contrastive_loss(whole, 0)])
    parts = [part(whole, [0, 1, 2, 3]), part(whole, [4, 5, 6, 7])]
    assert gradients(task, [task.contrastive_loss(batch, 0) for batch in parts])[
        0
    ] != pytest.approx(expected[0], abs=1e-2)


def test_a_caption_that_stands_there_twice_pushes_nobody_away() -> None:
    """But for capitals and spaces 0 and 2 say the same."""
    task = build_task()
    twice, otherwise = batch_of(0), batch_of(0)
    otherwise.examples.captions[2] = "A  slow tune ."
    assert float(task.contrastive_loss(twice, 0).terms["contrast"].detach()) != pytest.approx(
        float(task.contrastive_loss(otherwise, 0).terms["contrast"].detach()), abs=1e-3
    )
    same = part(twice, [0, 2])
    assert float(task.contrastive_loss(same, 0).terms["contrast"].detach()) == pytest.approx(
        0, abs=1e-12
    )


def test_the_scale_is_brought_back_before_each_step() -> None:
    task = build_task()
    task.model.log_scale.data.fill_(20.0)
    task.look_at_whole_batch([batch_of(0)], 0, Alone())
    assert task.model.scale().item() == pytest.approx(100)
    assert task.contrastive_loss(batch_of(0), 0).total().isfinite()


# ---- the alarm


class One(torch.nn.Module):
    """All is one point."""

    def forward(self, state):
        return torch.nn.functional.normalize(
            torch.ones(len(state), 8, dtype=state.dtype) + 0 * state[:, :1], dim=-1
        )


def collapsed(*towers: str) -> ContrastiveTask:
    task = build_task()
    for tower in towers:
        setattr(task.model, f"{tower}_heads", torch.nn.ModuleList([One()]))
    return task


def test_the_alarm_is_raised_by_a_model_that_tells_nothing_apart_and_by_no_other() -> None:
    both, one = (
        collapsed(*towers).contrastive_loss(batch_of(0), 0).metrics["of_chance"]()
        for towers in (("audio", "text"), ("audio",))
    )
    assert float(both.detach()) == pytest.approx(1, abs=1e-9) and float(one.detach()) > 0.995
    ill, well = AlarmMonitor((NOTHING_TOLD_APART,)), AlarmMonitor((NOTHING_TOLD_APART,))
    heard = [ill.listen(200 + 10 * n, {"model/of_chance": float(both.detach())}) for n in range(12)]
    assert [bool(one) for one in heard] == [False] * 9 + [True] + [False] * 2
    assert "ln(candidates)" in heard[9][0]
    assert not any(well.listen(200 + 10 * n, {"model/of_chance": 0.6}) for n in range(12))


# ---- validation


def totals_of(task: ContrastiveTask, *batches: Batch) -> dict[str, torch.Tensor]:
    seen = [task.eval_step(batch) for batch in batches]
    assert all(isinstance(value, Rows) for one in seen for value in one.values())
    return {
        name: torch.cat([one[name].values for one in seen if name in one])
        for name in {k for one in seen for k in one}
    }


def test_numbers_are_those_of_the_whole_set_however_it_is_cut() -> None:
    task, whole = build_task().eval(), batch_of(0)
    with torch.no_grad():
        at_once = task.compute_metrics(totals_of(task, whole))
        in_parts = task.compute_metrics(
            totals_of(task, part(whole, [0, 1, 2]), part(whole, [3, 4, 5]), part(whole, [6, 7]))
        )
    assert at_once == pytest.approx(in_parts)
    assert at_once["chance_r1"] == pytest.approx((6 / 8 + 2 / 7) / 8), (
        "two of the eight say the same"
    )
    assert set(at_once) >= {
        "by_text_r1",
        "by_text_r5",
        "by_text_r10",
        "by_text_median_rank",
        "by_media_r1",
        "chance_r10",
    }


def test_points_that_lie_together_are_found() -> None:
    task = build_task()
    embeddings = torch.nn.functional.normalize(torch.randn(40, 8), dim=-1)
    numbers = task.compute_metrics(
        {"media": embeddings, "text": embeddings, "said": torch.arange(40), "example": torch.arange(40)}
    )
    assert (
        numbers["by_text_r1"] == numbers["by_media_r1"] == numbers["by_text_r10"] == 1
        and numbers["by_text_median_rank"] == 1
    )
    turned = task.compute_metrics(
        {
            "media": embeddings,
            "text": embeddings.roll(1, 0),
            "said": torch.arange(40),
            "example": torch.arange(40),
        }
    )
    assert turned["by_text_r1"] < 0.1 and "tag_auc" not in turned


def test_in_validation_nothing_is_left_out_of_a_clip() -> None:
    task, batch = build_task().eval(), batch_of(0)
    other = dataclasses.replace(batch, seeds=[seed + 1 for seed in batch.seeds])
    with torch.no_grad():
        assert torch.equal(
            task.eval_step(batch)["media"].values, task.eval_step(other)["media"].values
        )
        assert not torch.equal(task.train().embed_media(batch), task.embed_media(other))


def test_tags_are_told_by_nearness_alone() -> None:
    task, batch = build_task().eval(), batch_of(0)
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
    for tags in batch.examples.tags:
        assert "everywhere" not in tags or len(tags) == 2
    with torch.no_grad():
        totals = totals_of(
            task, part_with_tags(batch, [0, 1, 2, 3]), part_with_tags(batch, [4, 5, 6, 7])
        )
        found = task.compute_metrics(totals)["tag_auc"]
        slow = totals["media"] @ task.model.get_text_latents(["slow"])[0]
    assert 0 <= found <= 1
    alone = {**totals, "tagged": totals["tagged"][totals["tagged"][:, 1] == number_of("slow")]}
    having, others = slow[[0, 2, 7]], slow[[1, 3, 4, 5, 6]]
    assert task.compute_metrics(alone)["tag_auc"] == pytest.approx(
        float((having[:, None] > others).double().mean())
    )


def part_with_tags(batch: Batch, rows: list[int]) -> Batch:
    some = part(batch, rows)
    some.examples.tags = [batch.examples.tags[row] for row in rows]
    return some


def test_examples_without_a_caption_are_not_measured() -> None:
    task, batch = build_task().eval(), batch_of(0)
    batch.examples.captions[3] = ""
    with torch.no_grad():
        assert len(totals_of(task, batch)["media"]) == 7
        batch.examples.captions = [""] * 8
        assert task.eval_step(batch) == {}


# ---- before the first step, and samples


def test_without_a_single_caption_there_is_nothing_to_learn(tmp_path) -> None:
    with pytest.raises(ValueError, match="Not one example has a caption"):
        build_task().prepare_text(["", ""], tmp_path)


def test_samples_are_clips_with_captions_and_a_sheet_on_which_they_meet(tmp_path) -> None:
    task = build_task().eval()
    with torch.no_grad():
        made = task.sample(batch_of(0))
    assert [one.caption for one in made] == CAPTIONS and made[3].media.samples.shape == (1, 1200)
    sheet = type(made[0]).sheet(made).save(tmp_path / "sheet")
    assert sheet.stat().st_size > 1000 and (tmp_path / "sheet.txt").read_text().count("of 8)") == 8
    made[0].save(tmp_path / "0000")
    assert (tmp_path / "0000.txt").read_text() == "a slow tune\n" and (
        tmp_path / "0000.wav"
    ).exists()


def test_only_one_network_moves_and_it_moves_whole() -> None:
    task = build_task("sigmoid", layers=1)
    with only(task, task.updates[0].trains):
        task.contrastive_loss(batch_of(0), 0).total().backward()
    assert [
        name for name, p in task.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0
    ] == []
