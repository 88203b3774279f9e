"""VQ: lookups by loops, averages by hand, and a table that moves only when a finite step is
settled, alike everywhere.

Levels of a residual cascade settle as tables of their own, so that side of the residual form is
told here too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import vector_quantize_pytorch as oracle
from torch import Tensor

from tessera.nn.quantize import VQ, Quantizer, ResidualConfig, VQConfig
from tessera.nn.quantize.vq import SAMPLE_PER_EXAMPLE, marked, nearest_rows, sample_of

SMALL = VQConfig(codebook_size=6, code_dim=3, normalised=False, decay=0.9, expire_below=0.0)


class Alone:
    """The meeting of one process."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def rows(self, tensor: Tensor) -> Tensor:
        return tensor


class Table:
    """Two processes as two threads: `seat(rank)` is what each takes to its meetings."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=10)
        self.brought: list[Tensor] = [torch.empty(0)] * 2
        self.meetings = [0, 0]

    def seat(self, rank: int) -> Seat:
        return Seat(self, rank)

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.meetings[rank] += 1
        self.brought[rank] = tensor
        self.barrier.wait()
        both = list(self.brought)
        self.barrier.wait()
        return both


class Seat:
    def __init__(self, table: Table, rank: int) -> None:
        self.table, self.rank = table, rank

    def sum(self, tensor: Tensor) -> Tensor:
        first, second = self.table.exchange(self.rank, tensor)
        return first + second

    def rows(self, tensor: Tensor) -> Tensor:
        """Example p of the global batch was dealt to process p % 2."""
        both = self.table.exchange(self.rank, tensor)
        assert both[0].shape == both[1].shape, "processes can only exchange tensors of one shape"
        return torch.stack(both, dim=1).flatten(0, 1)


def settle_all(quantizer: Quantizer, dist: Alone | Seat, step: int) -> int:
    """As the engine does: whatever has `commit` is settled."""
    found = [module for module in quantizer.modules() if hasattr(module, "settle")]
    for module in found:
        module.commit(dist, step)
    return len(found)


def started(config: VQConfig, dim: int | None = None, *, seed: int = 0) -> VQ:
    """A table that has had its first step."""
    torch.manual_seed(seed)
    quantizer = config.build(dim or config.code_dim)
    quantizer(torch.randn(8, 20, quantizer.dim))
    quantizer.commit(Alone(), 0)
    assert quantizer.started
    return quantizer


def state(quantizer: Quantizer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in quantizer.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


# Looking up


@pytest.mark.parametrize("normalised", [True, False])
def test_a_latent_gets_the_symbol_that_a_loop_finds_nearest(normalised: bool):
    quantizer = VQConfig(codebook_size=12, code_dim=3, normalised=normalised).build(3)
    quantizer.table_VW *= 1.0 if normalised else torch.rand(12, 1) + 0.5
    latent = 2 * torch.randn(5, 4, 3)
    quantized = quantizer(latent)
    for row, code, value in zip(
        latent.view(-1, 3), quantized.codes.flatten(), quantized.latent.view(-1, 3)
    ):
        row = row / row.norm() if normalised else row
        distances = [
            sum((a - b) ** 2 for a, b in zip(row.tolist(), token))
            for token in quantizer.table_VW.tolist()
        ]
        assert code == distances.index(min(distances))
        assert torch.equal(value, quantizer.table_VW[code])


@pytest.mark.parametrize("normalised", [True, False])
def test_lookups_equal_those_of_the_oracle(normalised: bool):
    theirs = oracle.VectorQuantize(dim=4, codebook_size=32, use_cosine_sim=normalised).eval()
    ours = VQConfig(codebook_size=32, code_dim=4, normalised=normalised).build(4).eval()
    theirs._codebook.embed.data.copy_(ours.table_VW)
    latent = torch.randn(3, 50, 4)
    values, codes, _ = theirs(latent)
    quantized = ours(latent)
    assert torch.equal(quantized.codes, codes)
    torch.testing.assert_close(quantized.latent, values)


def test_a_lookup_in_chunks_is_the_same_lookup(monkeypatch: pytest.MonkeyPatch):
    rows, table = torch.randn(57, 4), torch.randn(10, 4)
    whole = nearest_rows(rows, table)
    monkeypatch.setattr("tessera.nn.quantize.vq.SCORES_AT_ONCE", 50)
    assert torch.equal(nearest_rows(rows, table), whole)


def test_commitment_is_the_weighted_mean_square_to_the_symbol_and_moves_the_latent_alone():
    quantizer = VQConfig(
        codebook_size=6, code_dim=3, normalised=False, commitment_weight=0.7
    ).build(3)
    latent = torch.randn(2, 5, 3, requires_grad=True)
    quantized = quantizer(latent)
    values = quantized.latent.detach()
    expected = 0.7 * ((latent - values) ** 2).mean()
    torch.testing.assert_close(quantized.penalties["commitment"], expected)
    (gradient,) = torch.autograd.grad(quantized.penalties["commitment"], latent)
    torch.testing.assert_close(gradient, 0.7 * 2 * (latent.detach() - values) / latent.numel())


# Settling


def test_the_averages_and_the_table_follow_as_computed_by_hand():
    quantizer = started(SMALL)
    before = state(quantizer)
    latent = torch.randn(4, 5, 3)
    codes = quantizer(latent).codes.flatten()
    quantizer.commit(Alone(), 1)
    for token in range(6):
        rows = latent.view(-1, 3)[codes == token]
        count = 0.9 * before["average_count_V"][token] + 0.1 * len(rows)
        total = 0.9 * before["average_sum_VW"][token] + 0.1 * rows.sum(0)
        torch.testing.assert_close(quantizer.average_count_V[token], count)
        torch.testing.assert_close(quantizer.average_sum_VW[token], total)
        if len(rows):
            torch.testing.assert_close(quantizer.table_VW[token], total / count)
        else:
            assert torch.equal(quantizer.table_VW[token], before["table_VW"][token])
    assert len(codes.unique()) > 1


def test_symbols_on_the_sphere_stay_on_it():
    quantizer = started(VQConfig(codebook_size=10, code_dim=4, decay=0.5), dim=7)
    for step in range(1, 5):
        quantizer(torch.randn(3, 9, 7))
        quantizer.commit(Alone(), step)
        torch.testing.assert_close(quantizer.table_VW.norm(dim=1), torch.ones(10))


def test_a_symbol_that_nobody_chooses_stays_exactly_where_it_is():
    quantizer = started(SMALL)
    far = quantizer.table_VW[2].clone()
    near_others = quantizer.table_VW[[0, 1, 3, 4, 5]].unsqueeze(0)
    for step in range(1, 400):
        quantizer(near_others)
        quantizer.commit(Alone(), step)
    assert torch.equal(quantizer.table_VW[2], far) and quantizer.table_VW.isfinite().all()


def test_nothing_moves_before_settle_and_eval_takes_no_notes():
    quantizer = started(SMALL)
    before = state(quantizer)
    quantizer(torch.randn(4, 5, 3))
    assert same(state(quantizer), before) and quantizer.notes is not None
    quantizer.rollback()
    quantizer.eval()(torch.randn(4, 5, 3))
    assert quantizer.notes is None
    quantizer.commit(Alone(), 1)
    assert same(state(quantizer), before)


def test_a_batch_that_is_not_finite_never_reaches_the_table():
    poisoned, spared = started(SMALL), started(SMALL)
    poisoned(torch.full((4, 5, 3), float("nan")))
    poisoned.rollback()
    latent = torch.randn(4, 5, 3)
    for quantizer in (poisoned, spared):
        quantizer(latent)
        quantizer.commit(Alone(), 1)
    assert same(state(poisoned), state(spared)) and poisoned.table_VW.isfinite().all()


def test_notes_are_dropped_once_settled():
    quantizer = started(SMALL)
    quantizer(torch.randn(4, 5, 3))
    quantizer.commit(Alone(), 1)
    once = state(quantizer)
    quantizer.commit(Alone(), 2)
    assert same(state(quantizer), once)


def test_notes_are_neither_buffers_nor_saved():
    quantizer = started(SMALL)
    quantizer(torch.randn(4, 5, 3))
    saved = {"table_VW", "average_count_V", "average_sum_VW", "started"}
    assert set(quantizer.state_dict()) == saved
    assert {name for name, _ in quantizer.named_buffers()} == saved | {"like"}


REVIVING = VQConfig(codebook_size=40, code_dim=3, decay=0.6, expire_below=0.4)
CASCADE = ResidualConfig(quantizer=REVIVING, levels=3, dropout=0.5)


def masked_steps(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Eight examples of 30 places, real ones uneven in number."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 30, 3, generator=generator), torch.rand(8, 30, generator=generator) < 0.7)
        for _ in range(steps)
    ]


@pytest.mark.parametrize("config", [REVIVING, CASCADE], ids=["alone", "cascade"])
def test_four_micro_batches_are_one_batch(config: VQConfig | ResidualConfig):
    torch.manual_seed(1)
    whole = config.build(3)
    torch.manual_seed(1)
    parts = config.build(3)
    for step, (latent, mask) in enumerate(masked_steps(8)):
        whole(latent, mask)
        for part in zip(latent.chunk(4), mask.chunk(4)):
            parts(*part)
        settle_all(whole, Alone(), step)
        settle_all(parts, Alone(), step)
    torch.testing.assert_close(state(parts), state(whole), rtol=1e-4, atol=1e-5)


def test_what_is_sampled_does_not_depend_on_how_examples_are_dealt():
    rows = marked(torch.randn(1000, 2))
    per_example = torch.tensor([0, 300, 256, 7, 437])
    together = sample_of(rows, per_example)
    apart = [
        sample_of(part, size[None])
        for part, size in zip(rows.split(per_example.tolist()), per_example)
    ]
    assert together.shape == (5, SAMPLE_PER_EXAMPLE, 3) and torch.equal(together, torch.cat(apart))
    assert together[..., -1].sum(1).tolist() == [0, 256, 256, 7, 256]
    assert torch.equal(together[2], rows[300:556]) and torch.equal(together[3, :7], rows[556:563])
    assert torch.equal(together[4, -1], rows[563 + 255 * 437 // 256]), (
        "spread to the end of the example"
    )


def on_two_processes(work: Callable[[int, Seat], None]) -> Table:
    table, failures = Table(), []

    def process(rank: int) -> None:
        try:
            work(rank, table.seat(rank))
        except BaseException as failure:
            failures.append(failure)
            table.barrier.abort()

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return table


@pytest.mark.parametrize("config", [REVIVING, CASCADE], ids=["alone", "cascade"])
def test_two_processes_stay_equal_to_the_bit_and_equal_one(config: VQConfig | ResidualConfig):
    replicas = []
    for _ in range(3):
        torch.manual_seed(1)
        replicas.append(config.build(3))
    steps = masked_steps(8)

    def work(rank: int, seat: Seat) -> None:
        for step, (latent, mask) in enumerate(steps):
            replicas[rank](latent[rank::2], mask[rank::2])
            settle_all(replicas[rank], seat, step)

    table = on_two_processes(work)
    assert table.meetings[0] == table.meetings[1] > 8
    for step, (latent, mask) in enumerate(steps):
        replicas[2](latent, mask)
        settle_all(replicas[2], Alone(), step)
    assert same(state(replicas[0]), state(replicas[1]))
    torch.testing.assert_close(state(replicas[0]), state(replicas[2]), rtol=1e-4, atol=1e-5)


# Starting


@pytest.mark.parametrize("normalised", [True, False])
def test_the_first_settle_finds_the_clusters(normalised: bool):
    """Symbols become the means of what is near them: closer to it than the rows that k-means began
    with."""
    corners = torch.eye(4) * (1.0 if normalised else 3.0)
    latent = corners.repeat(10, 5, 1) + 0.1 * torch.randn(10, 20, 4)
    quantizer = VQConfig(codebook_size=12, code_dim=4, normalised=normalised).build(4)
    quantizer(latent)
    assert not quantizer.started
    quantizer.commit(Alone(), 0)
    assert quantizer.started
    assert torch.cdist(quantizer.table_VW, corners).min(1).values.max() < 0.3, (
        "every symbol is in a cluster"
    )
    assert torch.cdist(corners, quantizer.table_VW).min(1).values.max() < 0.15, (
        "every cluster has a symbol"
    )
    rows = quantizer.bound(latent.view(-1, 4))
    codes = quantizer(latent).codes.flatten()
    for token in range(12):
        mean = rows[codes == token].mean(0)
        expected = mean / mean.norm() if normalised else mean
        torch.testing.assert_close(quantizer.table_VW[token], expected, rtol=0, atol=0.03)
        assert quantizer.average_count_V[token] == pytest.approx((codes == token).sum(), abs=4)


def test_a_restored_table_does_not_start_again():
    trained = started(SMALL)
    restored = SMALL.build(3)
    restored.load_state_dict(trained.state_dict())
    latent = torch.randn(4, 5, 3)
    for quantizer in (trained, restored):
        quantizer(latent)
        quantizer.commit(Alone(), 1)
    assert same(state(restored), state(trained))


def test_with_fewer_rows_than_symbols_every_row_becomes_one_and_the_rest_follow():
    quantizer = VQConfig(codebook_size=50, code_dim=3, normalised=False, expire_below=0.1).build(3)
    first = torch.randn(1, 20, 3)
    quantizer(first)
    quantizer.commit(Alone(), 0)
    torch.testing.assert_close(quantizer.eval()(first).latent, first)
    used = []
    for step in range(1, 4):
        quantizer.train()(torch.randn(1, 20, 3))
        quantizer.commit(Alone(), step)
        used.append(int((quantizer.average_count_V > 0).sum()))
    assert used[0] >= 40 and used[1:] == [50, 50]


def test_a_first_step_of_nothing_but_padding_does_not_start_the_table():
    quantizer = SMALL.build(3)
    before = state(quantizer)
    quantizer(torch.randn(2, 3, 3), torch.zeros(2, 3, dtype=torch.bool))
    quantizer.commit(Alone(), 0)
    assert same(state(quantizer), before)


def test_a_started_table_beats_the_random_one():
    quantizer = VQConfig(codebook_size=64).build(8)
    latent = torch.randn(16, 64, 8)
    random = quantizer(latent).penalties["commitment"]
    quantizer.commit(Alone(), 0)
    assert quantizer(latent).penalties["commitment"] < 0.8 * random


# Reviving


def lonely(config: VQConfig) -> tuple[VQ, Tensor]:
    """A table of which symbol 3 sits where no latent ever comes, and a batch."""
    quantizer = started(config)
    quantizer.table_VW[3] = 100.0
    quantizer.average_sum_VW[3] = 100.0 * quantizer.average_count_V[3]
    return quantizer, torch.randn(4, 50, 3)


def settled_until_dead(quantizer: VQ, latent: Tensor) -> int:
    for step in range(1, 100):
        quantizer(latent)
        quantizer.commit(Alone(), step)
        if quantizer.table_VW[3].max() < 99:
            return step
    raise AssertionError("symbol 3 was never revived")


def test_a_dead_code_is_revived_from_the_batch():
    quantizer, latent = lonely(
        VQConfig(codebook_size=6, code_dim=3, normalised=False, decay=0.9, expire_below=0.2)
    )
    settled_until_dead(quantizer, latent)
    assert (latent.view(-1, 3) == quantizer.table_VW[3]).all(1).any()


def test_a_revived_code_is_not_pulled_back_by_the_averages_of_its_former_life():
    quantizer, latent = lonely(
        VQConfig(codebook_size=6, code_dim=3, normalised=False, decay=0.9, expire_below=0.2)
    )
    step = settled_until_dead(quantizer, latent)
    born = quantizer.table_VW[3].clone()
    torch.testing.assert_close(quantizer.average_sum_VW[3] / quantizer.average_count_V[3], born)
    for later in range(step + 1, step + 20):
        assert (quantizer(latent).codes == 3).any()
        quantizer.commit(Alone(), later)
        assert quantizer.table_VW[3].abs().max() < latent.abs().max()


def test_without_revival_a_dead_code_stays_dead():
    quantizer, latent = lonely(SMALL)
    with pytest.raises(AssertionError, match="never revived"):
        settled_until_dead(quantizer, latent)


def test_who_is_revived_as_what_depends_on_the_step_alone():
    def revived_at(step: int, noise: int) -> Tensor:
        quantizer, latent = lonely(
            VQConfig(codebook_size=6, code_dim=3, normalised=False, decay=0.0, expire_below=0.2)
        )
        torch.manual_seed(noise)
        quantizer(latent)
        quantizer.commit(Alone(), step)
        return quantizer.table_VW[3].clone()

    assert torch.equal(revived_at(7, noise=0), revived_at(7, noise=1))
    assert not torch.equal(revived_at(7, noise=0), revived_at(8, noise=0))


def test_revival_puts_the_whole_table_to_use():
    """Latents that fill a corner only: without revival most of a large table would never be
    chosen."""
    shares = {}
    for expire_below in (0.0, 0.1):
        torch.manual_seed(0)
        quantizer = VQConfig(
            codebook_size=128, code_dim=4, decay=0.8, expire_below=expire_below
        ).build(4)
        quantizer(torch.randn(1, 16, 4))
        quantizer.commit(Alone(), 0)
        for step in range(1, 40):
            quantizer(0.5 * torch.randn(8, 64, 4) + 2)
            quantizer.commit(Alone(), step)
        codes = quantizer.eval()(0.5 * torch.randn(8, 512, 4) + 2).codes
        shares[expire_below] = len(codes.unique()) / 128
    assert shares[0.1] > 0.95 > 0.5 > shares[0.0]


# Levels of a cascade


def test_only_the_levels_of_a_cascade_settle_and_each_once():
    cascade = CASCADE.build(5)
    assert not hasattr(cascade, "settle")
    assert settle_all(cascade, Alone(), 0) == 3
    assert settle_all(REVIVING.build(5), Alone(), 0) == 1


def test_a_level_starts_only_after_the_level_above():
    cascade = ResidualConfig(quantizer=VQConfig(codebook_size=16, code_dim=4), levels=3).build(4)
    latent = torch.randn(8, 32, 4)
    for step in range(3):
        cascade(latent)
        settle_all(cascade, Alone(), step)
        assert [bool(level.started) for level in cascade.cascade] == [
            number <= step for number in range(3)
        ]


def test_a_level_learns_only_from_the_examples_that_reach_it():
    cascade = ResidualConfig(quantizer=SMALL, levels=2).build(3)
    latent = torch.randn(6, 10, 3)
    for step in range(2):
        cascade(latent)
        settle_all(cascade, Alone(), step)
    cascade(latent, num_quantizers_B=torch.tensor([1, 2, 2, 1, 1, 2]))
    first, second = (level.notes.total_VC[:, -1].sum() for level in cascade.cascade)
    assert (first, second) == (60, 30)
    sampled = torch.cat(cascade.cascade[1].notes.samples)[..., -1].sum(1)
    assert sampled.tolist() == [0, 10, 10, 0, 0, 10]


def test_a_cascade_equals_the_oracle():
    theirs = oracle.ResidualVQ(dim=4, num_quantizers=3, codebook_size=16).eval()
    ours = (
        ResidualConfig(quantizer=VQConfig(codebook_size=16, code_dim=4, normalised=False), levels=3)
        .build(4)
        .eval()
    )
    for level, layer in zip(ours.cascade, theirs.layers):
        layer._codebook.embed.data.copy_(level.table_VW)
    latent = torch.randn(2, 30, 4)
    values, codes, _ = theirs(latent)
    quantized = ours(latent)
    assert torch.equal(quantized.codes, codes)
    torch.testing.assert_close(quantized.latent, values)
