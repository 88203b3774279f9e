"""Tests of the causal transformer: causality, and equality of cached and uncached decoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tessera.nn.causal_transformer import INITIAL_CAPACITY, CausalTransformer, KVCache
from tessera.nn.transformer import ContextKV, States, Transformer
from tests.networks import randn_double


def build(depth: int = 2, max_len: int = 100, context_dim: int | None = None) -> CausalTransformer:
    """Build a network whose zero-initialized output projections have random weights."""
    network = CausalTransformer(24, depth, 2, max_len, context_dim=context_dim)
    for name, parameter in network.named_parameters():
        if name.endswith("out.weight"):
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    return network.double().eval()


def make_context(network: CausalTransformer, batch: int) -> list[ContextKV]:
    return network.project_context(
        States(randn_double(batch, 4, 12), torch.arange(4) < torch.arange(1, batch + 1)[:, None])
    )


def test_positions_attend_to_all_earlier_ones_and_no_later_one():
    network, x = build(), randn_double(1, 7, 24)
    before = network(x)
    for position in range(7):
        other = x.clone()
        other[0, position] = randn_double(24)
        changed = (network(other) - before).abs().amax(-1)[0] > 0
        assert changed.tolist() == [number >= position for number in range(7)]


@torch.no_grad()
@pytest.mark.parametrize("prefix", [1, 5], ids=["without a prefix", "with a prefix"])
@pytest.mark.parametrize("context_dim", [None, 12], ids=["unconditional", "with a context"])
def test_cached_decoding_equals_one_forward_pass(prefix, context_dim):
    """For so many positions that the cache has to grow twice."""
    network, x = build(context_dim=context_dim), randn_double(3, 2 * INITIAL_CAPACITY + 9, 24)
    context_kv = make_context(network, 3) if context_dim else None
    cache = KVCache()
    states = [network(x[:, :prefix], context_kv, cache)]
    states += [
        network(x[:, position : position + 1], context_kv, cache)
        for position in range(prefix, x.shape[1])
    ]
    assert cache.length == x.shape[1]
    assert torch.allclose(torch.cat(states, dim=1), network(x, context_kv))


@torch.no_grad()
def test_cache_of_length_zero_is_empty():
    network, x = build(), randn_double(2, 6, 24)
    cache = KVCache()
    for position in range(6):
        network(x[:, position : position + 1], cache=cache)
    cache.length = 0
    assert torch.allclose(network(x[:, 3:4], cache=cache), network(x[:, 3:4]))


def test_last_position_equals_that_of_a_bidirectional_transformer():
    torch.manual_seed(3)
    network = build(depth=1)
    bidirectional = Transformer(24, 1, 2).double()
    bidirectional.load_state_dict(network.state_dict())
    x = randn_double(2, 5, 24)
    assert torch.allclose(bidirectional(x)[:, -1], network(x)[:, -1])
    assert not torch.allclose(bidirectional(x)[:, 0], network(x)[:, 0])


@torch.no_grad()
def test_only_relative_positions_matter(monkeypatch):
    """Positions 40 to 43, without attention to earlier ones, equal positions 0 to 3."""
    network, x = build(), randn_double(1, 4, 24)
    attention = nn.functional.scaled_dot_product_attention
    expected = network(x)

    def attend_from_40(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        return attention(q, k[:, :, 40:], v[:, :, 40:], **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", attend_from_40)
    cache = KVCache(length=40)
    later = [network(x[:, position : position + 1], cache=cache) for position in range(4)]
    assert torch.allclose(torch.cat(later, dim=1), expected)


def test_all_matrices_are_marked_for_muon():
    network = CausalTransformer(24, 1, 2, 10, context_dim=12)
    marked = {
        name
        for name, parameter in network.named_parameters()
        if getattr(parameter, "use_muon", False)
    }
    assert marked == {name for name, parameter in network.named_parameters() if parameter.ndim == 2}


def test_sequences_longer_than_max_len_are_errors():
    message = "A sequence of 6 positions is longer than max_len, which is 5"
    with pytest.raises(ValueError, match=message):
        build(max_len=5)(randn_double(1, 6, 24))
    cache = KVCache(length=5)
    with pytest.raises(ValueError, match=message):
        build(max_len=5)(randn_double(1, 1, 24), cache=cache)


def test_several_positions_after_a_prefix_are_an_error():
    network, cache = build(), KVCache()
    with torch.no_grad():
        network(randn_double(1, 2, 24), cache=cache)
    with pytest.raises(
        ValueError, match="Got 3 positions after 2 cached ones: .* takes one position at a time"
    ):
        network(randn_double(1, 3, 24), cache=cache)


def test_missing_context_is_an_error():
    with pytest.raises(ValueError, match="got no context: pass `context`"):
        build(context_dim=12)(randn_double(1, 2, 24))
