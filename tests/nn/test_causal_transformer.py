"""The causal transformer: nobody sees a later place, and asked place by place it says the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.nn.causal_transformer import ROOM, CausalTransformer, KVCache
from tessera.nn.transformer import ContextKV, States, Transformer
from tests.networks import doubles


def made(depth: int = 2, max_len: int = 100, context: int | None = None) -> CausalTransformer:
    """Residual parts start as nothing, and nothing would prove anything: they are given something
    to say."""
    network = CausalTransformer(24, depth, 2, max_len, context=context)
    for name, parameter in network.named_parameters():
        if name.endswith("out.weight"):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return network.double().eval()


def said(network: CausalTransformer, batch: int) -> list[ContextKV]:
    return network.project_context(
        States(doubles(batch, 4, 12), torch.arange(4) < torch.arange(1, batch + 1)[:, None])
    )


def test_a_place_sees_every_earlier_place_and_no_later_one():
    network, x = made(), doubles(1, 7, 24)
    before = network(x)
    for place in range(7):
        other = x.clone()
        other[0, place] = doubles(24)
        changed = (network(other) - before).abs().amax(-1)[0] > 0
        assert changed.tolist() == [number >= place for number in range(7)]


@torch.no_grad()
@pytest.mark.parametrize("first", [1, 5], ids=["from nothing", "after some"])
@pytest.mark.parametrize("context", [None, 12], ids=["alone", "with a text"])
def test_place_by_place_it_says_what_it_says_at_once(first, context):
    """For long enough that the cache must grow twice."""
    network, x = made(context=context), doubles(3, 2 * ROOM + 9, 24)
    context_kv = said(network, 3) if context else None
    cache = KVCache()
    states = [network(x[:, :first], context_kv, cache)]
    states += [
        network(x[:, place : place + 1], context_kv, cache) for place in range(first, x.shape[1])
    ]
    assert cache.length == x.shape[1]
    assert torch.allclose(torch.cat(states, dim=1), network(x, context_kv))


@torch.no_grad()
def test_a_cache_that_is_emptied_forgets():
    network, x = made(), doubles(2, 6, 24)
    cache = KVCache()
    for place in range(6):
        network(x[:, place : place + 1], cache=cache)
    cache.length = 0
    assert torch.allclose(network(x[:, 3:4], cache=cache), network(x[:, 3:4]))


def test_at_its_last_place_it_is_the_transformer_that_sees_all():
    torch.manual_seed(3)
    network = made(depth=1)
    both = Transformer(24, 1, 2).double()
    both.blocks, both.norm = network.blocks, network.norm
    x = doubles(2, 5, 24)
    assert torch.allclose(both(x)[:, -1], network(x)[:, -1])
    assert not torch.allclose(both(x)[:, 0], network(x)[:, 0])


@torch.no_grad()
def test_only_distances_between_places_matter(monkeypatch):
    """Places 40 to 43, with nothing before them in sight, say what places 0 to 3 do."""
    network, x, attention = made(), doubles(1, 4, 24), nn.functional.scaled_dot_product_attention
    layer_input = network(x)

    def from_40_on(q: Tensor, k: Tensor, v: Tensor, **how: object) -> Tensor:
        return attention(q, k[:, :, 40:], v[:, :, 40:], **how)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", from_40_on)
    cache = KVCache(length=40)
    later = [network(x[:, place : place + 1], cache=cache) for place in range(4)]
    assert torch.allclose(torch.cat(later, dim=1), layer_input)


def test_what_leads_from_states_to_states_is_marked_for_muon():
    network = CausalTransformer(24, 1, 2, 10, context=12)
    marked = {
        name
        for name, parameter in network.named_parameters()
        if getattr(parameter, "between_states", False)
    }
    assert marked == {name for name, parameter in network.named_parameters() if parameter.ndim == 2}


def test_more_places_than_it_knows_are_refused():
    with pytest.raises(
        ValueError, match="A sequence of 6 places came to a transformer that knows 5"
    ):
        made(max_len=5)(doubles(1, 6, 24))
    cache = KVCache(length=5)
    with pytest.raises(
        ValueError, match="A sequence of 6 places came to a transformer that knows 5"
    ):
        made(max_len=5)(doubles(1, 1, 24), cache=cache)


def test_several_places_at_once_after_others_are_refused():
    network, cache = made(), KVCache()
    with torch.no_grad():
        network(doubles(1, 2, 24), cache=cache)
    with pytest.raises(
        ValueError, match="3 places came at once after 2 others: give them one by one"
    ):
        network(doubles(1, 3, 24), cache=cache)


def test_a_context_that_is_missing_is_asked_for():
    with pytest.raises(ValueError, match="looks at a context, but was given none"):
        made(context=12)(doubles(1, 2, 24))
