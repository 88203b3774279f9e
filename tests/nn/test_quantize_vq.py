"""VQ: lookups and averages against reference computations, and a codebook that changes only when a
finite step is committed, identically on all processes.

Residual levels commit codebooks of their own, so that is tested here too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import vector_quantize_pytorch as reference
from torch import Tensor

from tessera.nn.quantize import VQ, Quantizer, ResidualConfig, VQConfig
from tessera.nn.quantize.base import PositionMask
from tessera.nn.quantize.vq import (
    SAMPLES_PER_EXAMPLE,
    append_ones,
    find_nearest,
)

SMALL = VQConfig(codebook_size=6, code_dim=3, normalised=False, decay=0.9, expire_below=0.0)


class SingleProcess:
    """The process group of one process."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        return tensor


class TwoProcesses:
    """Two processes, simulated by two threads; `group(rank)` is the process group of each."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2, timeout=600)
        self.tensors: list[Tensor] = [torch.empty(0)] * 2
        self.num_calls = [0, 0]

    def group(self, rank: int) -> ThreadGroup:
        return ThreadGroup(self, rank)

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.num_calls[rank] += 1
        self.tensors[rank] = tensor
        self.barrier.wait()
        both = list(self.tensors)
        self.barrier.wait()
        return both


class ThreadGroup:
    def __init__(self, processes: TwoProcesses, rank: int) -> None:
        self.processes, self.rank = processes, rank

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        first, second = self.processes.exchange(self.rank, tensor)
        return first + second

    def all_gather_rows(self, tensor: Tensor) -> Tensor:
        """Example p of the global batch belongs to process p % 2."""
        both = self.processes.exchange(self.rank, tensor)
        assert both[0].shape == both[1].shape, "processes can only exchange tensors of one shape"
        return torch.stack(both, dim=1).flatten(0, 1)


def commit_all(quantizer: Quantizer, dist: SingleProcess | ThreadGroup, step: int) -> int:
    """Commit all modules that have a `commit`, as the engine does, and return their number."""
    found = [module for module in quantizer.modules() if hasattr(module, "commit")]
    for module in found:
        module.commit(dist, step)
    return len(found)


def initialized_vq(config: VQConfig, dim: int | None = None, *, seed: int = 0) -> VQ:
    """Build a VQ and commit one step."""
    torch.manual_seed(seed)
    quantizer = config.build(dim or config.code_dim)
    quantizer(torch.randn(8, 20, quantizer.dim))
    quantizer.commit(SingleProcess(), 0)
    assert quantizer.initialized
    return quantizer


def copy_state(quantizer: Quantizer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in quantizer.state_dict().items()}


def equal_states(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


# Lookup


@pytest.mark.parametrize("normalised", [True, False])
def test_a_latent_gets_the_nearest_code(normalised: bool):
    quantizer = VQConfig(codebook_size=12, code_dim=3, normalised=normalised).build(3)
    quantizer.codebook_VW *= 1.0 if normalised else torch.rand(12, 1) + 0.5
    latent = 2 * torch.randn(5, 4, 3)
    quantized = quantizer(latent)
    for row, code, value in zip(
        latent.view(-1, 3), quantized.codes.flatten(), quantized.latent.view(-1, 3)
    ):
        row = row / row.norm() if normalised else row
        distances = [
            sum((a - b) ** 2 for a, b in zip(row.tolist(), vector))
            for vector in quantizer.codebook_VW.tolist()
        ]
        assert code == distances.index(min(distances))
        assert torch.equal(value, quantizer.codebook_VW[code])


@pytest.mark.parametrize("normalised", [True, False])
def test_lookups_equal_the_reference(normalised: bool):
    theirs = reference.VectorQuantize(dim=4, codebook_size=32, use_cosine_sim=normalised).eval()
    ours = VQConfig(codebook_size=32, code_dim=4, normalised=normalised).build(4).eval()
    theirs._codebook.embed.data.copy_(ours.codebook_VW)
    latent = torch.randn(3, 50, 4)
    values, codes, _ = theirs(latent)
    quantized = ours(latent)
    assert torch.equal(quantized.codes, codes)
    torch.testing.assert_close(quantized.latent, values)


def test_a_lookup_in_chunks_gives_the_same_codes(monkeypatch: pytest.MonkeyPatch):
    rows, codebook = torch.randn(57, 4), torch.randn(10, 4)
    whole = find_nearest(rows, codebook)
    monkeypatch.setattr("tessera.nn.quantize.vq.MAX_SCORES", 50)
    assert torch.equal(find_nearest(rows, codebook), whole)


def test_commitment_is_the_weighted_squared_distance_of_the_latent_to_its_code():
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


# Commit and rollback


def test_averages_and_codebook_equal_a_manual_update():
    quantizer = initialized_vq(SMALL)
    before = copy_state(quantizer)
    latent = torch.randn(4, 5, 3)
    codes = quantizer(latent).codes.flatten()
    quantizer.commit(SingleProcess(), 1)
    for code in range(6):
        rows = latent.view(-1, 3)[codes == code]
        count = 0.9 * before["ema_count_V"][code] + 0.1 * len(rows)
        total = 0.9 * before["ema_sum_VW"][code] + 0.1 * rows.sum(0)
        torch.testing.assert_close(quantizer.ema_count_V[code], count)
        torch.testing.assert_close(quantizer.ema_sum_VW[code], total)
        if len(rows):
            torch.testing.assert_close(quantizer.codebook_VW[code], total / count)
        else:
            assert torch.equal(quantizer.codebook_VW[code], before["codebook_VW"][code])
    assert len(codes.unique()) > 1


def test_codes_stay_on_the_unit_sphere():
    quantizer = initialized_vq(VQConfig(codebook_size=10, code_dim=4, decay=0.5), dim=7)
    for step in range(1, 5):
        quantizer(torch.randn(3, 9, 7))
        quantizer.commit(SingleProcess(), step)
        torch.testing.assert_close(quantizer.codebook_VW.norm(dim=1), torch.ones(10))


def test_a_code_without_hits_does_not_move():
    quantizer = initialized_vq(SMALL)
    far = quantizer.codebook_VW[2].clone()
    near_others = quantizer.codebook_VW[[0, 1, 3, 4, 5]].unsqueeze(0)
    for step in range(1, 400):
        quantizer(near_others)
        quantizer.commit(SingleProcess(), step)
    assert torch.equal(quantizer.codebook_VW[2], far) and quantizer.codebook_VW.isfinite().all()


def test_forward_changes_no_state_and_eval_mode_accumulates_nothing():
    quantizer = initialized_vq(SMALL)
    before = copy_state(quantizer)
    quantizer(torch.randn(4, 5, 3))
    assert equal_states(copy_state(quantizer), before) and quantizer.stats is not None
    quantizer.rollback()
    quantizer.eval()(torch.randn(4, 5, 3))
    assert quantizer.stats is None
    quantizer.commit(SingleProcess(), 1)
    assert equal_states(copy_state(quantizer), before)


def test_rollback_keeps_a_batch_of_nan_out_of_the_codebook():
    poisoned, clean = initialized_vq(SMALL), initialized_vq(SMALL)
    poisoned(torch.full((4, 5, 3), float("nan")))
    poisoned.rollback()
    latent = torch.randn(4, 5, 3)
    for quantizer in (poisoned, clean):
        quantizer(latent)
        quantizer.commit(SingleProcess(), 1)
    assert (
        equal_states(copy_state(poisoned), copy_state(clean))
        and poisoned.codebook_VW.isfinite().all()
    )


def test_statistics_are_cleared_after_a_commit():
    quantizer = initialized_vq(SMALL)
    quantizer(torch.randn(4, 5, 3))
    quantizer.commit(SingleProcess(), 1)
    once = copy_state(quantizer)
    quantizer.commit(SingleProcess(), 2)
    assert equal_states(copy_state(quantizer), once)


def test_statistics_are_neither_buffers_nor_in_the_state_dict():
    quantizer = initialized_vq(SMALL)
    quantizer(torch.randn(4, 5, 3))
    saved = {"codebook_VW", "ema_count_V", "ema_sum_VW", "initialized"}
    assert set(quantizer.state_dict()) == saved
    assert {name for name, _ in quantizer.named_buffers()} == saved | {"dummy"}


EXPIRING = VQConfig(codebook_size=40, code_dim=3, decay=0.6, expire_below=0.4)
RESIDUAL = ResidualConfig(quantizer=EXPIRING, num_quantizers=3, dropout=0.5)


def masked_steps(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of eight examples of 30 positions, with masks of different counts."""
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(8, 30, 3, generator=generator), torch.rand(8, 30, generator=generator) < 0.7)
        for _ in range(steps)
    ]


@pytest.mark.parametrize("config", [EXPIRING, RESIDUAL], ids=["single", "residual"])
def test_four_micro_batches_equal_one_batch(config: VQConfig | ResidualConfig):
    torch.manual_seed(1)
    whole = config.build(3)
    torch.manual_seed(1)
    parts = config.build(3)
    for step, (latent, mask) in enumerate(masked_steps(8)):
        whole(latent, mask)
        for part in zip(latent.chunk(4), mask.chunk(4)):
            parts(*part)
        commit_all(whole, SingleProcess(), step)
        commit_all(parts, SingleProcess(), step)
    torch.testing.assert_close(copy_state(parts), copy_state(whole), rtol=1e-4, atol=1e-5)


def test_the_sample_of_an_example_does_not_depend_on_the_batch():
    rows_BTC = append_ones(torch.randn(5 * 450, 2)).unflatten(0, (5, 450))
    sizes = [0, 300, 256, 7, 437]
    mask_BT = torch.stack([torch.randperm(450) < size for size in sizes])
    batch = sample_positions(rows_BTC, mask_BT)
    single = [sample_positions(rows[None], mask[None]) for rows, mask in zip(rows_BTC, mask_BT)]
    assert batch.shape == (5, SAMPLES_PER_EXAMPLE, 3) and torch.equal(batch, torch.cat(single))
    assert batch[..., -1].sum(1).tolist() == [0, 256, 256, 7, 256]
    assert torch.equal(batch[2], rows_BTC[2, mask_BT[2]])
    assert torch.equal(batch[3, :7], rows_BTC[3, mask_BT[3]])
    assert torch.equal(batch[4, -1], rows_BTC[4, mask_BT[4]][255 * 437 // 256]), (
        "the sample reaches the end of the example"
    )


def sample_positions(rows_BTC: Tensor, mask_BT: Tensor) -> Tensor:
    used = PositionMask(mask_BT.shape, mask_BT.flatten())
    return used.sample_per_example(rows_BTC.flatten(0, 1), SAMPLES_PER_EXAMPLE)


def run_on_two_processes(work: Callable[[int, ThreadGroup], None]) -> TwoProcesses:
    processes, errors = TwoProcesses(), []

    def process(rank: int) -> None:
        try:
            work(rank, processes.group(rank))
        except BaseException as error:
            errors.append(error)
            processes.barrier.abort()

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return processes


@pytest.mark.parametrize("config", [EXPIRING, RESIDUAL], ids=["single", "residual"])
def test_two_processes_stay_bitwise_equal_and_match_one(config: VQConfig | ResidualConfig):
    replicas = []
    for _ in range(3):
        torch.manual_seed(1)
        replicas.append(config.build(3))
    steps = masked_steps(8)

    def work(rank: int, group: ThreadGroup) -> None:
        for step, (latent, mask) in enumerate(steps):
            replicas[rank](latent[rank::2], mask[rank::2])
            commit_all(replicas[rank], group, step)

    processes = run_on_two_processes(work)
    assert processes.num_calls[0] == processes.num_calls[1] > 8
    for step, (latent, mask) in enumerate(steps):
        replicas[2](latent, mask)
        commit_all(replicas[2], SingleProcess(), step)
    assert equal_states(copy_state(replicas[0]), copy_state(replicas[1]))
    torch.testing.assert_close(
        copy_state(replicas[0]), copy_state(replicas[2]), rtol=1e-4, atol=1e-5
    )


# Initialization


@pytest.mark.parametrize("normalised", [True, False])
def test_the_first_commit_finds_the_clusters(normalised: bool):
    """Codes become the means of the rows that are near them."""
    corners = torch.eye(4) * (1.0 if normalised else 3.0)
    latent = corners.repeat(10, 5, 1) + 0.1 * torch.randn(10, 20, 4)
    quantizer = VQConfig(codebook_size=12, code_dim=4, normalised=normalised).build(4)
    quantizer(latent)
    assert not quantizer.initialized
    quantizer.commit(SingleProcess(), 0)
    assert quantizer.initialized
    assert torch.cdist(quantizer.codebook_VW, corners).min(1).values.max() < 0.3, (
        "every code is in a cluster"
    )
    assert torch.cdist(corners, quantizer.codebook_VW).min(1).values.max() < 0.15, (
        "every cluster has a code"
    )
    rows = quantizer.bound(latent.view(-1, 4))
    codes = quantizer(latent).codes.flatten()
    for code in range(12):
        mean = rows[codes == code].mean(0)
        expected = mean / mean.norm() if normalised else mean
        torch.testing.assert_close(quantizer.codebook_VW[code], expected, rtol=0, atol=0.03)
        assert quantizer.ema_count_V[code] == pytest.approx((codes == code).sum(), abs=4)


def test_a_restored_codebook_is_not_initialized_again():
    trained = initialized_vq(SMALL)
    restored = SMALL.build(3)
    restored.load_state_dict(trained.state_dict())
    latent = torch.randn(4, 5, 3)
    for quantizer in (trained, restored):
        quantizer(latent)
        quantizer.commit(SingleProcess(), 1)
    assert equal_states(copy_state(restored), copy_state(trained))


def test_with_few_rows_each_becomes_a_code_and_other_codes_expire():
    quantizer = VQConfig(codebook_size=50, code_dim=3, normalised=False, expire_below=0.1).build(3)
    first = torch.randn(1, 20, 3)
    quantizer(first)
    quantizer.commit(SingleProcess(), 0)
    torch.testing.assert_close(quantizer.eval()(first).latent, first)
    used = []
    for step in range(1, 4):
        quantizer.train()(torch.randn(1, 20, 3))
        quantizer.commit(SingleProcess(), step)
        used.append(int((quantizer.ema_count_V > 0).sum()))
    assert used[0] >= 40 and used[1:] == [50, 50]


def test_a_first_step_of_only_padding_does_not_initialize_the_codebook():
    quantizer = SMALL.build(3)
    before = copy_state(quantizer)
    quantizer(torch.randn(2, 3, 3), torch.zeros(2, 3, dtype=torch.bool))
    quantizer.commit(SingleProcess(), 0)
    assert equal_states(copy_state(quantizer), before)


def test_k_means_lowers_the_commitment_loss_of_a_random_codebook():
    quantizer = VQConfig(codebook_size=64).build(8)
    latent = torch.randn(16, 64, 8)
    random = quantizer(latent).penalties["commitment"]
    quantizer.commit(SingleProcess(), 0)
    assert quantizer(latent).penalties["commitment"] < 0.8 * random


# Expired codes


def vq_with_unused_code(config: VQConfig) -> tuple[VQ, Tensor]:
    """Return a VQ whose code 3 is far from all latents, and a batch."""
    quantizer = initialized_vq(config)
    quantizer.codebook_VW[3] = 100.0
    quantizer.ema_sum_VW[3] = 100.0 * quantizer.ema_count_V[3]
    return quantizer, torch.randn(4, 50, 3)


def commit_until_expired(quantizer: VQ, latent: Tensor) -> int:
    """Repeat a batch until code 3 is replaced, and return the step."""
    for step in range(1, 100):
        quantizer(latent)
        quantizer.commit(SingleProcess(), step)
        if quantizer.codebook_VW[3].max() < 99:
            return step
    raise AssertionError("code 3 never expired")


def test_an_expired_code_is_replaced_by_a_row_of_the_batch():
    quantizer, latent = vq_with_unused_code(
        VQConfig(codebook_size=6, code_dim=3, normalised=False, decay=0.9, expire_below=0.2)
    )
    commit_until_expired(quantizer, latent)
    assert (latent.view(-1, 3) == quantizer.codebook_VW[3]).all(1).any()


def test_the_averages_of_a_replaced_code_are_reset():
    quantizer, latent = vq_with_unused_code(
        VQConfig(codebook_size=6, code_dim=3, normalised=False, decay=0.9, expire_below=0.2)
    )
    step = commit_until_expired(quantizer, latent)
    replaced = quantizer.codebook_VW[3].clone()
    torch.testing.assert_close(quantizer.ema_sum_VW[3] / quantizer.ema_count_V[3], replaced)
    for later in range(step + 1, step + 20):
        assert (quantizer(latent).codes == 3).any()
        quantizer.commit(SingleProcess(), later)
        assert quantizer.codebook_VW[3].abs().max() < latent.abs().max()


def test_codes_never_expire_with_a_threshold_of_zero():
    quantizer, latent = vq_with_unused_code(SMALL)
    with pytest.raises(AssertionError, match="never expired"):
        commit_until_expired(quantizer, latent)


def test_replacements_depend_only_on_the_step():
    def replaced_at(step: int, global_seed: int) -> Tensor:
        quantizer, latent = vq_with_unused_code(
            VQConfig(codebook_size=6, code_dim=3, normalised=False, decay=0.0, expire_below=0.2)
        )
        torch.manual_seed(global_seed)
        quantizer(latent)
        quantizer.commit(SingleProcess(), step)
        return quantizer.codebook_VW[3].clone()

    assert torch.equal(replaced_at(7, global_seed=0), replaced_at(7, global_seed=1))
    assert not torch.equal(replaced_at(7, global_seed=0), replaced_at(8, global_seed=0))


def test_expiring_codes_brings_the_whole_codebook_into_use():
    """The latents fill only a corner of the space, where few codes of a large codebook are."""
    usage = {}
    for expire_below in (0.0, 0.1):
        torch.manual_seed(0)
        quantizer = VQConfig(
            codebook_size=128, code_dim=4, decay=0.8, expire_below=expire_below
        ).build(4)
        quantizer(torch.randn(1, 16, 4))
        quantizer.commit(SingleProcess(), 0)
        for step in range(1, 40):
            quantizer(0.5 * torch.randn(8, 64, 4) + 2)
            quantizer.commit(SingleProcess(), step)
        codes = quantizer.eval()(0.5 * torch.randn(8, 512, 4) + 2).codes
        usage[expire_below] = len(codes.unique()) / 128
    assert usage[0.1] > 0.95 > 0.5 > usage[0.0]


# Residual levels


def test_each_residual_level_commits_once():
    residual = RESIDUAL.build(5)
    assert not hasattr(residual, "commit")
    assert commit_all(residual, SingleProcess(), 0) == 3
    assert commit_all(EXPIRING.build(5), SingleProcess(), 0) == 1


def test_a_level_is_initialized_after_the_level_above():
    residual = ResidualConfig(
        quantizer=VQConfig(codebook_size=16, code_dim=4), num_quantizers=3
    ).build(4)
    latent = torch.randn(8, 32, 4)
    for step in range(3):
        residual(latent)
        commit_all(residual, SingleProcess(), step)
        assert [bool(quantizer.initialized) for quantizer in residual.quantizers] == [
            level <= step for level in range(3)
        ]


def test_a_level_is_updated_only_by_the_examples_that_use_it():
    residual = ResidualConfig(quantizer=SMALL, num_quantizers=2).build(3)
    latent = torch.randn(6, 10, 3)
    for step in range(2):
        residual(latent)
        commit_all(residual, SingleProcess(), step)
    residual(latent, num_quantizers_B=torch.tensor([1, 2, 2, 1, 1, 2]))
    first, second = (quantizer.stats.total_VC[:, -1].sum() for quantizer in residual.quantizers)
    assert (first, second) == (60, 30)
    sampled = torch.cat(residual.quantizers[1].stats.samples)[..., -1].sum(1)
    assert sampled.tolist() == [0, 10, 10, 0, 0, 10]


def test_residual_vq_equals_the_reference():
    theirs = reference.ResidualVQ(dim=4, num_quantizers=3, codebook_size=16).eval()
    ours = (
        ResidualConfig(
            quantizer=VQConfig(codebook_size=16, code_dim=4, normalised=False), num_quantizers=3
        )
        .build(4)
        .eval()
    )
    for quantizer, layer in zip(ours.quantizers, theirs.layers):
        layer._codebook.embed.data.copy_(quantizer.codebook_VW)
    latent = torch.randn(2, 30, 4)
    values, codes, _ = theirs(latent)
    quantized = ours(latent)
    assert torch.equal(quantized.codes, codes)
    torch.testing.assert_close(quantized.latent, values)
