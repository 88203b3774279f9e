"""Tests of the transformer: masking, relative positions, and cross-attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tessera.nn.transformer import (
    CrossAttention,
    SelfAttention,
    States,
    Transformer,
    apply_rotary_emb,
    grid_positions,
    rope_cache,
)
from tests.networks import randn_double, randomize_zero_weights, record_row_counts


def build(context_dim: int | None = None, depth: int = 2) -> Transformer:
    return randomize_zero_weights(Transformer(24, depth, 2, context_dim=context_dim)).double()


def make_context(batch: int = 2, length: int = 5, dim: int = 12) -> States:
    """States of which every second example has two positions of padding."""
    mask = (
        torch.arange(length) < torch.tensor([length - 2 * (i % 2) for i in range(batch)])[:, None]
    )
    return States(randn_double(batch, length, dim), mask)


def test_network_is_the_identity_and_a_norm_at_initialization():
    network, x = Transformer(24, 2, 2, context_dim=12).double(), randn_double(2, 5, 24)
    assert torch.equal(network(x, context=make_context()), network.norm(x))


def test_autocast_emits_no_warning_and_is_close_to_float32():
    """Torch warns and uses a slow kernel where weights and input of a norm differ in precision."""
    network, x, states = build(context_dim=12).float(), torch.randn(2, 6, 24), make_context()
    states = States(states.values.float(), states.mask)
    exact = network(x, context=states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = network(x, context=states)
    assert torch.allclose(half.float(), exact, atol=0.2)


# ---- positions


@pytest.mark.parametrize(
    ("grid", "coordinates"),
    [
        ((3,), [[0], [1], [2]]),
        ((2, 2), [[0, 0], [0, 1], [1, 0], [1, 1]]),
        ((1, 2, 2), [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]),
    ],
)
def test_grid_positions_are_in_row_major_order(grid, coordinates):
    assert grid_positions(grid).tolist() == coordinates


@pytest.mark.parametrize(("axes", "head_dim"), [(1, 8), (2, 8), (2, 6), (3, 8), (3, 32)])
def test_rotation_keeps_norms_and_leaves_the_origin_unchanged(axes, head_dim):
    x = randn_double(2, 3, 4, head_dim)
    positions = torch.cat([torch.zeros(1, axes), torch.rand(3, axes) * 9]).double()
    rotated = apply_rotary_emb(x, rope_cache(positions, head_dim))
    assert torch.allclose(rotated.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotated[:, :, 0], x[:, :, 0])
    assert not torch.allclose(rotated[:, :, 1:], x[:, :, 1:])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_every_axis_rotates_some_pairs(axis):
    positions = torch.zeros(2, 3, dtype=torch.float64)
    positions[1, axis] = 1
    x = randn_double(1, 1, 1, 8).expand(1, 1, 2, 8)
    rotated = apply_rotary_emb(x, rope_cache(positions, 8))
    assert not torch.allclose(rotated[0, 0, 1], rotated[0, 0, 0])


@pytest.mark.parametrize("grid", [(7,), (3, 4), (2, 2, 3)])
def test_attention_scores_depend_on_relative_positions_only(grid):
    """Su 2021, eq. 11."""
    positions = grid_positions(grid).double()
    moved = positions + torch.tensor([5.0, -3.0, 11.0])[: len(grid)]
    q, k = randn_double(1, 1, len(positions), 16), randn_double(1, 1, len(positions), 16)
    scores, moved_scores = (
        apply_rotary_emb(q, rope) @ apply_rotary_emb(k, rope).transpose(-1, -2)
        for rope in (rope_cache(positions, 16), rope_cache(moved, 16))
    )
    assert torch.allclose(scores, moved_scores)
    assert not torch.allclose(scores, q @ k.transpose(-1, -2))


def test_network_depends_on_relative_positions_only():
    network, x, positions = build(), randn_double(2, 12, 24), grid_positions((3, 4)).double()
    out = network(x, positions)
    assert torch.allclose(network(x, positions + torch.tensor([40.0, -7.0])), out)
    assert not torch.allclose(network(x, positions * torch.tensor([1.0, 2.0])), out)
    assert not torch.allclose(network(x, positions.flip(1)), out), "rows and columns differ"


def test_default_positions_are_consecutive():
    network, x = build(), randn_double(2, 6, 24)
    assert torch.equal(network(x), network(x, torch.arange(6.0, dtype=torch.float64)[:, None]))


def test_network_is_equivariant_to_permutations_of_positions():
    network, x, positions = build(), randn_double(1, 12, 24), grid_positions((3, 4)).double()
    order = torch.randperm(12)
    assert torch.allclose(network(x[:, order], positions[order]), network(x, positions)[:, order])


# ---- self-attention and masks


def test_self_attention_matches_its_formula():
    attention = randomize_zero_weights(SelfAttention(24, 2)).double()
    x, rope = randn_double(1, 5, 24), rope_cache(grid_positions((5,)).double(), 12)
    q, k, v = attention.to_qkv(attention.norm(x)).view(1, 5, 3, 2, 12).permute(2, 0, 3, 1, 4)
    q, k = (apply_rotary_emb(attention.head_norm(each), rope) for each in (q, k))
    weights = (q @ k.transpose(-1, -2) / math.sqrt(12)).softmax(-1)
    expected = attention.out((weights @ v).transpose(1, 2).reshape(1, 5, 24))
    assert torch.allclose(attention(attention.project_qkv(x), rope, None), expected)


def test_every_position_attends_to_every_other():
    network, x, weights = build(depth=1), randn_double(1, 5, 24).requires_grad_(), randn_double(24)
    for position in range(5):
        # A weighted sum, because the plain sum after a norm is always 0.
        (grad,) = torch.autograd.grad(network(x)[0, position] @ weights, x)
        assert (grad.abs().sum(-1) > 0).all()


def test_masked_positions_affect_no_other():
    network, mask = build(), torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    x = randn_double(2, 6, 24)
    other = torch.where(mask[..., None], x, randn_double(2, 6, 24) * 100)
    out, changed = network(x, mask_BN=mask), network(other, mask_BN=mask)
    assert torch.equal(out[mask], changed[mask])
    assert torch.allclose(network(x[:1, :4]), out[:1, :4]), "as without padding"


def test_examples_do_not_depend_on_the_batch():
    network, x, states = build(context_dim=12), randn_double(4, 6, 24), make_context(4)
    train_together = network(x, context=states)
    for i in range(4):
        alone = network(
            x[i : i + 1], context=States(states.values[i : i + 1], states.mask[i : i + 1])
        )
        assert torch.allclose(alone[0], train_together[i])


# ---- cross-attention


def test_padding_of_a_context_changes_nothing():
    network, x, states = build(context_dim=12), randn_double(2, 6, 24), make_context(2, 5)
    longer = States(
        torch.cat([states.values, randn_double(2, 3, 12) * 100], 1),
        nn.functional.pad(states.mask, (0, 3)),
    )
    out = network(x, context=states)
    assert torch.allclose(network(x, context=longer), out)
    garbage = States(torch.where(states.mask[..., None], states.values, 1e3), states.mask)
    assert torch.equal(network(x, context=garbage), out)


def test_context_is_used_as_a_set():
    """Cross-attention has no positions: order is up to the encoder of the context."""
    network, x, states = build(context_dim=12), randn_double(2, 6, 24), make_context()
    out = network(x, context=states)
    assert not torch.allclose(network(x, context=make_context()), out)
    order = torch.randperm(5)
    assert torch.allclose(
        network(x, context=States(states.values[:, order], states.mask[:, order])), out
    )


def test_empty_contexts_are_all_equal():
    network, x = build(context_dim=12), randn_double(2, 6, 24)
    mask = torch.zeros(2, 5, dtype=torch.bool)
    one, other = (network(x, context=States(randn_double(2, 5, 12), mask)) for _ in range(2))
    assert torch.equal(one, other) and one.isfinite().all()
    empty = network(x, context=States(randn_double(2, 0, 12), mask[:, :0]))
    assert torch.allclose(empty, one)


def test_empty_contexts_have_finite_gradients_that_reach_the_null_position():
    cross, x = randomize_zero_weights(CrossAttention(24, 2, 12)).double(), randn_double(2, 6, 24)
    states = States(randn_double(2, 5, 12).requires_grad_(), torch.zeros(2, 5, dtype=torch.bool))
    cross(x, cross.project_context(states)).square().sum().backward()
    assert (states.values.grad == 0).all()
    assert cross.null_kv.grad.isfinite().all() and (cross.null_kv.grad[1] != 0).any()


@pytest.mark.parametrize("index", [[0, 2], [1], []])
def test_skipping_empty_contexts_gives_the_same_result(index):
    network = randomize_zero_weights(Transformer(24, 2, 2, context_dim=12)).double()
    x, values, mask = randn_double(3, 5, 24), randn_double(3, 4, 12), torch.zeros(3, 4).bool()
    mask[index, :3] = True
    rows = record_row_counts(network.blocks[0].cross_attention.to_q)
    given = torch.tensor(index, dtype=torch.long)
    skipped, full = (network(x, context=States(values, mask, known)) for known in (given, None))
    assert torch.allclose(skipped, full) and rows == [5 * len(index), 15]
    skipped.square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters()), (
        "DDP waits for every gradient"
    )


def test_first_examples_of_a_projected_context_are_those_of_the_states():
    network = randomize_zero_weights(Transformer(24, 1, 2, context_dim=12)).double()
    values, mask, x = randn_double(4, 3, 12), torch.ones(4, 3).bool(), randn_double(4, 5, 24)
    mask[[1, 2]] = False
    context_kv = network.project_context(States(values, mask, torch.tensor([0, 3])))
    for count in (1, 2, 3, 4):
        expected = network(x[:count], context=States(values[:count], mask[:count]))
        assert torch.allclose(
            network(x[:count], context=[one.first(count) for one in context_kv]), expected
        )


def test_projected_context_can_be_reused():
    network, states = build(context_dim=12), make_context()
    context_kv = network.project_context(states)
    for _ in range(3):
        x = randn_double(2, 6, 24)
        assert torch.equal(network(x, context=context_kv), network(x, context=states))


def test_several_contexts_per_example_equal_several_passes():
    """Guidance runs each example with its text and once more without it."""
    network, x, context = build(context_dim=12), randn_double(2, 5, 24), make_context(batch=4)
    expected = network(torch.cat([x, x]), context=context)
    assert torch.allclose(network(x, context=context), expected)
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    expected = network(torch.cat([x, x]), mask_BN=torch.cat([mask, mask]), context=context)
    assert torch.allclose(network(x, mask_BN=mask, context=context), expected)


def test_missing_and_unexpected_contexts_are_errors():
    with pytest.raises(ValueError, match="got no context: pass `context`"):
        build(context_dim=12)(randn_double(1, 3, 24))
    with pytest.raises(ValueError, match="has no cross-attention: build it with `context_dim`"):
        build()(randn_double(1, 3, 24), context=make_context())


@pytest.mark.parametrize(("dim", "heads"), [(25, 2), (15, 5), (6, 4), (2, 4)])
def test_indivisible_dim_is_an_error_that_suggests_valid_ones(dim, heads):
    with pytest.raises(
        ValueError, match=f"A dim of {dim} cannot be split into {heads} heads"
    ) as error:
        Transformer(dim, 1, heads)
    numbers = [int(word) for word in str(error.value).replace(",", "").split() if word.isdigit()]
    assert len(numbers) == 4
    for suggested in numbers[2:]:
        Transformer(suggested, 1, heads)
