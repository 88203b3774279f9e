"""The Conformer: padding is seen by nobody, neighbours are, and it can stand where a Transformer
stood."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.nn.conformer import Conformer, ConformerConfig, Convolution
from tessera.nn.transformer import Rotary, States, Transformer, rope_cache
from tessera.run.config import decode, encode
from tests.networks import awake, doubles


def made(context: int | None = None, depth: int = 2, kernel: int = 5) -> Conformer:
    return awake(ConformerConfig(kernel=kernel).build(24, depth, 2, context=context)).double()


def said(batch: int = 2, length: int = 4, dim: int = 12) -> States:
    return States(doubles(batch, length, dim), torch.ones(batch, length, dtype=torch.bool))


def first(lengths: list[int], places: int) -> Tensor:
    return torch.arange(places) < torch.tensor(lengths)[:, None]


def test_before_it_has_learnt_anything_it_passes_on_what_it_is_given():
    network, x = ConformerConfig().build(24, 2, 2, context=12).double(), doubles(2, 5, 24)
    assert torch.equal(network(x, context=said()), network.norm(x))


# ------------------------------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize("kernel", [1, 5, 31])
@pytest.mark.parametrize("context", [None, 12])
def test_a_padded_batch_is_its_examples_one_by_one(kernel, context):
    network, lengths = made(context, kernel=kernel), [9, 4, 1]
    states = said(3) if context else None
    alone = [doubles(1, length, 24) for length in lengths]
    batch = torch.cat([torch.cat([x, 100 * doubles(1, 9 - x.shape[1], 24)], dim=1) for x in alone])
    together = network(batch, mask_BN=first(lengths, 9), context=states)
    for row, x in enumerate(alone):
        own = States(states.values[row : row + 1], states.mask[row : row + 1]) if states else None
        torch.testing.assert_close(together[row : row + 1, : x.shape[1]], network(x, context=own))


def test_a_mask_that_leaves_nothing_out_changes_nothing():
    network, x = made(), doubles(2, 6, 24)
    torch.testing.assert_close(network(x, mask_BN=first([6, 6], 6)), network(x))


def test_examples_do_not_see_each_other():
    network, x = made().train(), doubles(3, 6, 24)
    torch.testing.assert_close(network(x)[1:2], network(x[1:2]))


# --------------------------------------------------------------------------------------------------------- neighbours


def test_the_convolution_looks_equally_far_to_both_sides():
    convolution, x = awake(Convolution(5, 24)).double(), doubles(1, 9, 24).requires_grad_()
    convolution(x, None)[0, 4].square().sum().backward()
    assert (x.grad.abs().sum((0, 2)) > 0).tolist() == [
        False,
        False,
        True,
        True,
        True,
        True,
        True,
        False,
        False,
    ]


def test_it_hears_order_without_being_told_of_places():
    """With all places turned alike, attention cannot tell how examples are ordered; the convolution
    can."""
    still = Rotary(torch.ones(6, 12, dtype=torch.float64), torch.zeros(6, 12, dtype=torch.float64))
    x, order = doubles(1, 6, 24), torch.tensor([3, 1, 0, 5, 2, 4])
    conformer, transformer = made(), awake(Transformer(24, 2, 2)).double()
    torch.testing.assert_close(transformer(x[:, order], still), transformer(x, still)[:, order])
    assert not torch.allclose(conformer(x[:, order], still), conformer(x, still)[:, order])


def test_it_learns_what_only_the_place_before_knows():
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


# ------------------------------------------------------------------------------------------ in a transformer's place


def test_places_may_be_given_as_rotations():
    network, x = made(), doubles(2, 6, 24)
    places = torch.arange(6, dtype=torch.float64)[:, None]
    torch.testing.assert_close(network(x, rope_cache(places, network.head_dim)), network(x))
    torch.testing.assert_close(network(x, places + 3), network(x))
    assert not torch.allclose(network(x, 2 * places), network(x))


def test_each_example_may_be_read_under_two_contexts_at_once():
    network, x, mask = made(context=12), doubles(2, 6, 24), first([6, 3], 6)
    one, two = said(), said()
    both = States(torch.cat([one.values, two.values]), torch.cat([one.mask, two.mask]))
    at_once = network(x, mask_BN=mask, context=network.project_context(both))
    apart = torch.cat(
        [network(x, mask_BN=mask, context=one), network(x, mask_BN=mask, context=two)]
    )
    torch.testing.assert_close(at_once, apart)
    assert not torch.allclose(apart[0], apart[2])


def test_a_context_that_it_was_not_given_is_asked_for():
    with pytest.raises(ValueError, match="was given none"):
        made(context=12)(doubles(1, 3, 24))


def test_its_matrices_are_marked_for_muon_and_its_kernels_are_not():
    marked = {
        name
        for name, weight in made(context=12).named_parameters()
        if getattr(weight, "between_states", False)
    }
    assert {
        "blocks.0.attention.out.weight",
        "blocks.1.convolution.to_inner.weight",
        "blocks.0.feed_before.out.weight",
    } <= marked
    assert not any("neighbours" in name or "norm" in name for name in marked)


def test_in_half_precision_it_runs_without_a_warning_and_comes_near():
    network, x = made().float(), torch.randn(2, 6, 24)
    whole = network(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = network(x, mask_BN=first([6, 6], 6))
    assert torch.allclose(half.float(), whole, atol=0.2)


def test_its_configuration_survives_json():
    assert decode(ConformerConfig, encode(ConformerConfig(kernel=31))) == ConformerConfig(kernel=31)


@pytest.mark.parametrize("kernel", [0, 4, -3])
def test_a_kernel_without_a_middle_is_refused(kernel):
    with pytest.raises(ValueError, match="odd"):
        ConformerConfig(kernel=kernel)


def test_a_width_that_heads_cannot_share_is_refused():
    with pytest.raises(ValueError, match="another number of heads"):
        ConformerConfig().build(30, 1, 4)
