"""Tests of the Conformer: padding, convolutions, and the interface of the Transformer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.nn.conformer import Conformer, ConformerConfig, Convolution
from tessera.nn.transformer import Rotary, States, Transformer, rope_cache
from tessera.run.config import decode, encode
from tests.networks import randn_double, randomize_zero_weights


def build(context_dim: int | None = None, depth: int = 2, kernel: int = 5) -> Conformer:
    network = ConformerConfig(kernel=kernel).build(24, depth, 2, context_dim=context_dim)
    return randomize_zero_weights(network).double()


def make_context(batch: int = 2, length: int = 4, dim: int = 12) -> States:
    return States(randn_double(batch, length, dim), torch.ones(batch, length, dtype=torch.bool))


def length_mask(lengths: list[int], positions: int) -> Tensor:
    return torch.arange(positions) < torch.tensor(lengths)[:, None]


def test_network_is_the_identity_and_a_norm_at_initialization():
    network, x = ConformerConfig().build(24, 2, 2, context_dim=12).double(), randn_double(2, 5, 24)
    assert torch.equal(network(x, context=make_context()), network.norm(x))


# ---- padding


@pytest.mark.parametrize("kernel", [1, 5, 31])
@pytest.mark.parametrize("context_dim", [None, 12])
def test_padded_batch_equals_its_examples_one_by_one(kernel, context_dim):
    network, lengths = build(context_dim, kernel=kernel), [9, 4, 1]
    states = make_context(3) if context_dim else None
    alone = [randn_double(1, length, 24) for length in lengths]
    batch = torch.cat(
        [torch.cat([x, 100 * randn_double(1, 9 - x.shape[1], 24)], dim=1) for x in alone]
    )
    train_together = network(batch, mask_BN=length_mask(lengths, 9), context=states)
    for row, x in enumerate(alone):
        own = States(states.values[row : row + 1], states.mask[row : row + 1]) if states else None
        torch.testing.assert_close(
            train_together[row : row + 1, : x.shape[1]], network(x, context=own)
        )


def test_mask_of_valid_positions_only_changes_nothing():
    network, x = build(), randn_double(2, 6, 24)
    torch.testing.assert_close(network(x, mask_BN=length_mask([6, 6], 6)), network(x))


def test_examples_do_not_depend_on_the_batch():
    network, x = build().train(), randn_double(3, 6, 24)
    torch.testing.assert_close(network(x)[1:2], network(x[1:2]))


# ---- convolution


def test_convolution_is_centered():
    convolution = randomize_zero_weights(Convolution(5, 24)).double()
    x = randn_double(1, 9, 24).requires_grad_()
    convolution(x, None)[0, 4].square().sum().backward()
    reached = (x.grad.abs().sum((0, 2)) > 0).tolist()
    assert reached == [False, False, True, True, True, True, True, False, False]


def test_convolution_depends_on_order_without_positions():
    """Without rotations attention is equivariant to permutations; the convolution is not."""
    no_rope = Rotary(torch.ones(6, 12).double(), torch.zeros(6, 12).double())
    x, order = randn_double(1, 6, 24), torch.tensor([3, 1, 0, 5, 2, 4])
    conformer, transformer = build(), randomize_zero_weights(Transformer(24, 2, 2)).double()
    torch.testing.assert_close(transformer(x[:, order], no_rope), transformer(x, no_rope)[:, order])
    assert not torch.allclose(conformer(x[:, order], no_rope), conformer(x, no_rope)[:, order])


def test_network_learns_to_copy_the_previous_token():
    torch.manual_seed(0)
    network, head = ConformerConfig(kernel=3).build(32, 1, 2), nn.Linear(32, 4)
    embedding = nn.Embedding(4, 32)
    parameters = [*network.parameters(), *head.parameters(), *embedding.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(80):
        tokens = torch.randint(4, (16, 12))
        logits = head(network(embedding(tokens)))[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, :-1].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


# ---- the interface of the Transformer


def test_positions_can_be_coordinates_or_rotations():
    network, x = build(), randn_double(2, 6, 24)
    positions = torch.arange(6, dtype=torch.float64)[:, None]
    torch.testing.assert_close(network(x, rope_cache(positions, network.head_dim)), network(x))
    torch.testing.assert_close(network(x, positions + 3), network(x))
    assert not torch.allclose(network(x, 2 * positions), network(x))


def test_two_contexts_per_example_equal_two_passes():
    network, x, mask = build(context_dim=12), randn_double(2, 6, 24), length_mask([6, 3], 6)
    one, two = make_context(), make_context()
    both = States(torch.cat([one.values, two.values]), torch.cat([one.mask, two.mask]))
    at_once = network(x, mask_BN=mask, context=network.project_context(both))
    separate = torch.cat(
        [network(x, mask_BN=mask, context=one), network(x, mask_BN=mask, context=two)]
    )
    torch.testing.assert_close(at_once, separate)
    assert not torch.allclose(separate[0], separate[2])


def test_missing_context_is_an_error():
    with pytest.raises(ValueError, match="got no context"):
        build(context_dim=12)(randn_double(1, 3, 24))


def test_matrices_are_marked_for_muon_and_kernels_are_not():
    marked = {
        name
        for name, weight in build(context_dim=12).named_parameters()
        if getattr(weight, "use_muon", False)
    }
    assert {
        "blocks.0.attention.out.weight",
        "blocks.1.convolution.to_inner.weight",
        "blocks.0.first_feed_forward.out.weight",
    } <= marked
    assert not any("depthwise" in name or "norm" in name for name in marked)


def test_autocast_emits_no_warning_and_is_close_to_float32():
    network, x = build().float(), torch.randn(2, 6, 24)
    exact = network(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = network(x, mask_BN=length_mask([6, 6], 6))
    assert torch.allclose(half.float(), exact, atol=0.2)


def test_config_survives_json():
    assert decode(ConformerConfig, encode(ConformerConfig(kernel=31))) == ConformerConfig(kernel=31)


@pytest.mark.parametrize("kernel", [0, 4, -3])
def test_kernel_without_a_center_is_an_error(kernel):
    with pytest.raises(ValueError, match=f"kernel must be odd .* got {kernel}"):
        ConformerConfig(kernel=kernel)


def test_indivisible_dim_is_an_error():
    with pytest.raises(ValueError, match="another number of heads"):
        ConformerConfig().build(30, 1, 4)
