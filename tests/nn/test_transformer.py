"""The transformer: what is left out is seen by nobody, only distances between places matter, and
texts of nothing are alike."""

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
    grid_positions,
    rope_cache,
)
from tests.networks import awake, doubles, rows_through


def made(context: int | None = None, depth: int = 2) -> Transformer:
    return awake(Transformer(24, depth, 2, context=context)).double()


def said(batch: int = 2, length: int = 5, dim: int = 12) -> States:
    mask = (
        torch.arange(length) < torch.tensor([length - 2 * (i % 2) for i in range(batch)])[:, None]
    )
    return States(doubles(batch, length, dim), mask)


def test_before_it_has_learnt_anything_it_passes_on_what_it_is_given():
    network, x = Transformer(24, 2, 2, context=12).double(), doubles(2, 5, 24)
    assert torch.equal(network(x, context=said()), network.norm(x))


def test_in_half_precision_it_runs_without_a_warning_and_comes_near():
    """Torch warns, and takes the slow way, where a norm's weights are of another precision than its
    input."""
    network, x, states = made(context=12).float(), torch.randn(2, 6, 24), said()
    states = States(states.values.float(), states.mask)
    whole = network(x, context=states)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = network(x, context=states)
    assert torch.allclose(half.float(), whole, atol=0.2)


# -------------------------------------------------------------------------------------------------------------- places


@pytest.mark.parametrize(
    ("grid", "coordinates"),
    [
        ((3,), [[0], [1], [2]]),
        ((2, 2), [[0, 0], [0, 1], [1, 0], [1, 1]]),
        ((1, 2, 2), [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1]]),
    ],
)
def test_places_are_numbered_row_by_row(grid, coordinates):
    assert grid_positions(grid).tolist() == coordinates


@pytest.mark.parametrize(("axes", "head_width"), [(1, 8), (2, 8), (2, 6), (3, 8), (3, 32)])
def test_a_turn_keeps_lengths_and_leaves_the_first_place_as_it_is(axes, head_dim):
    heads = doubles(2, 3, 4, head_dim)
    places = torch.cat([torch.zeros(1, axes), torch.rand(3, axes) * 9]).double()
    rope = rope_cache(places, head_dim)(heads)
    assert torch.allclose(rope.norm(dim=-1), heads.norm(dim=-1))
    assert torch.equal(rope[:, :, 0], heads[:, :, 0])
    assert not torch.allclose(rope[:, :, 1:], heads[:, :, 1:])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_every_axis_turns_something(axis):
    places = torch.zeros(2, 3, dtype=torch.float64)
    places[1, axis] = 1
    heads = doubles(1, 1, 1, 8).expand(1, 1, 2, 8)
    rope = rope_cache(places, 8)(heads)
    assert not torch.allclose(rope[0, 0, 1], rope[0, 0, 0])


@pytest.mark.parametrize("grid", [(7,), (3, 4), (2, 2, 3)])
def test_a_query_meets_a_key_by_their_distance_alone(grid):
    """q at p against k at r gives the same whatever the origin: rotary positions are relative (Su
    2021, eq. 11)."""
    places = grid_positions(grid).double()
    moved = places + torch.tensor([5.0, -3.0, 11.0])[: len(grid)]
    q, k = doubles(1, 1, len(places), 16), doubles(1, 1, len(places), 16)
    here, there = (
        (rope(q) @ rope(k).transpose(-1, -2))
        for rope in (rope_cache(places, 16), rope_cache(moved, 16))
    )
    assert torch.allclose(here, there)
    assert not torch.allclose(here, q @ k.transpose(-1, -2))


def test_the_network_does_not_see_where_the_origin_lies_but_sees_who_is_neighbour_of_whom():
    network, x, places = made(), doubles(2, 12, 24), grid_positions((3, 4)).double()
    out = network(x, places)
    assert torch.allclose(network(x, places + torch.tensor([40.0, -7.0])), out)
    assert not torch.allclose(network(x, places * torch.tensor([1.0, 2.0])), out)
    assert not torch.allclose(network(x, places.flip(1)), out), "rows and columns are not the same"


def test_without_coordinates_places_are_in_a_row():
    network, x = made(), doubles(2, 6, 24)
    assert torch.equal(network(x), network(x, torch.arange(6.0, dtype=torch.float64)[:, None]))


def test_places_carried_along_with_their_coordinates_give_the_same():
    network, x, places = made(), doubles(1, 12, 24), grid_positions((3, 4)).double()
    order = torch.randperm(12)
    assert torch.allclose(network(x[:, order], places[order]), network(x, places)[:, order])


# ------------------------------------------------------------------------------------------------------- what is seen


def test_attention_is_what_its_formula_says():
    attention = awake(SelfAttention(24, 2)).double()
    x, rope = doubles(1, 5, 24), rope_cache(grid_positions((5,)).double(), 12)
    q, k, v = (
        attention.to_query_key_value(attention.norm(x)).view(1, 5, 3, 2, 12).permute(2, 0, 3, 1, 4)
    )
    rooted = math.sqrt(12)
    weights = (
        rope(attention.head_norm(q)) @ rope(attention.head_norm(k)).transpose(-1, -2) / rooted
    ).softmax(-1)
    expected = attention.out((weights @ v).transpose(1, 2).reshape(1, 5, 24))
    assert torch.allclose(attention(attention.parts(x), rope, None), expected)


def test_every_place_sees_every_other():
    network, x, weights = made(depth=1), doubles(1, 5, 24).requires_grad_(), doubles(24)
    for place in range(5):
        (seen,) = torch.autograd.grad(
            network(x)[0, place] @ weights, x
        )  # a plain sum is always 0 behind a norm
        assert (seen.abs().sum(-1) > 0).all()


def test_what_the_mask_leaves_out_is_seen_by_nobody():
    network, mask = made(), torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    x = doubles(2, 6, 24)
    other = torch.where(mask[..., None], x, doubles(2, 6, 24) * 100)
    out, changed = network(x, mask_BN=mask), network(other, mask_BN=mask)
    assert torch.equal(out[mask], changed[mask])
    assert torch.allclose(network(x[:1, :4]), out[:1, :4]), "padding is as if it were not there"


def test_an_example_is_the_same_whoever_its_neighbours_are():
    network, x, states = made(context=12), doubles(4, 6, 24), said(4)
    together = network(x, context=states)
    for i in range(4):
        alone = network(
            x[i : i + 1], context=States(states.values[i : i + 1], states.mask[i : i + 1])
        )
        assert torch.allclose(alone[0], together[i])


# ---------------------------------------------------------------------------------------------------------- a context


def test_padding_of_a_context_changes_nothing():
    network, x, states = made(context=12), doubles(2, 6, 24), said(2, 5)
    longer = States(
        torch.cat([states.values, doubles(2, 3, 12) * 100], 1),
        nn.functional.pad(states.mask, (0, 3)),
    )
    out = network(x, context=states)
    assert torch.allclose(network(x, context=longer), out)
    rubbish = States(torch.where(states.mask[..., None], states.values, 1e3), states.mask)
    assert torch.equal(network(x, context=rubbish), out)


def test_a_context_matters_and_its_words_in_any_order_are_the_same_set():
    """Cross-attention has no positions of its own: order is the business of whoever made the
    states."""
    network, x, states = made(context=12), doubles(2, 6, 24), said()
    out = network(x, context=states)
    assert not torch.allclose(network(x, context=said()), out)
    order = torch.randperm(5)
    assert torch.allclose(
        network(x, context=States(states.values[:, order], states.mask[:, order])), out
    )


def test_of_a_context_of_nothing_only_the_learnt_place_is_left():
    network, x = made(context=12), doubles(2, 6, 24)
    nothing = torch.zeros(2, 5, dtype=torch.bool)
    one, other = (network(x, context=States(doubles(2, 5, 12), nothing)) for _ in range(2))
    assert torch.equal(one, other) and one.isfinite().all()
    empty = network(x, context=States(doubles(2, 0, 12), nothing[:, :0]))
    assert torch.allclose(empty, one)


def test_gradients_of_a_context_of_nothing_are_finite_and_reach_the_learnt_place():
    cross, x = awake(CrossAttention(24, 2, 12)).double(), doubles(2, 6, 24)
    states = States(doubles(2, 5, 12).requires_grad_(), torch.zeros(2, 5, dtype=torch.bool))
    cross(x, cross.project_context(states)).square().sum().backward()
    assert (states.values.grad == 0).all()
    assert cross.nothing.grad.isfinite().all() and (cross.nothing.grad[1] != 0).any()


@pytest.mark.parametrize("told", [[0, 2], [1], []])
def test_whoever_is_known_to_have_nothing_to_look_at_sees_what_he_would_see_anyway(told):
    network, x = awake(Transformer(24, 2, 2, context=12)).double(), doubles(3, 5, 24)
    values, mask = doubles(3, 4, 12), torch.zeros(3, 4, dtype=torch.bool)
    mask[told, :3] = True
    looking = rows_through(network.blocks[0].cross.to_query)
    short, long = (network(x, context=States(values, mask, known)) for known in (told, None))
    assert torch.allclose(short, long) and looking == [5 * len(told), 15]
    short.square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.parameters()), (
        "or processes would wait for each other"
    )


def test_the_first_of_several_contexts_are_those_of_the_first_examples():
    network = awake(Transformer(24, 1, 2, context=12)).double()
    values, mask, x = doubles(4, 3, 12), torch.ones(4, 3, dtype=torch.bool), doubles(4, 5, 24)
    mask[[1, 2]] = False
    seen = network.project_context(States(values, mask, [0, 3]))
    for count in (1, 2, 3, 4):
        expected = network(x[:count], context=States(values[:count], mask[:count]))
        assert torch.allclose(
            network(x[:count], context=[one.first(count) for one in seen]), expected
        )


def test_a_context_prepared_once_is_the_context_prepared_each_time():
    network, states = made(context=12), said()
    context_kv = network.project_context(states)
    for _ in range(3):
        x = doubles(2, 6, 24)
        assert torch.equal(network(x, context=context_kv), network(x, context=states))


def test_several_contexts_for_each_example_are_as_many_passes():
    """What guidance asks for: the examples under their texts, and then once more under others."""
    network, x, context = made(context=12), doubles(2, 5, 24), said(batch=4)
    expected = network(torch.cat([x, x]), context=context)
    assert torch.allclose(network(x, context=context), expected)
    mask = torch.tensor([[True] * 5, [True, True, True, False, False]])
    expected = network(torch.cat([x, x]), mask_BN=torch.cat([mask, mask]), context=context)
    assert torch.allclose(network(x, mask_BN=mask, context=context), expected)


def test_one_that_looks_at_a_context_must_be_given_one():
    with pytest.raises(ValueError, match="looks at a context"):
        made(context=12)(doubles(1, 3, 24))


@pytest.mark.parametrize(("width", "heads"), [(25, 2), (15, 5), (6, 4), (2, 4)])
def test_a_width_that_heads_cannot_share_is_refused_with_widths_that_work(dim, heads):
    with pytest.raises(
        ValueError, match=f"A width of {dim} cannot be shared by {heads} heads"
    ) as refused:
        Transformer(dim, 1, heads)
    offered = [int(word) for word in str(refused.value).replace(",", "").split() if word.isdigit()][
        2:
    ]
    for works in offered:
        Transformer(works, 1, heads)
