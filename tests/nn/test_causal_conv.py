"""Layers for clips: no frame looks ahead, pieces come out as the whole, and what is kept in between
stays small."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.causal_conv import (
    CausalConv,
    Chain,
    GateLoop,
    Kernel,
    LinearSpaceAttention,
    PlaceNorm,
    Residual,
    SeparateFirstFrameConv,
    SpaceAttention,
    SpatialUpsample2x,
    StreamingState,
    TimeAttention,
    TimeUpsample2x,
    decaying_sum,
    spatial_downsample_2x,
    taylor_features,
    time_downsample_2x,
)
from tests.networks import stirred

WIDTH = 16

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: CausalConv(WIDTH, WIDTH, Kernel(3, 3)),
    "long convolution": lambda: CausalConv(WIDTH, WIDTH, Kernel(7, 1)),
    "first frame apart": lambda: SeparateFirstFrameConv(WIDTH, WIDTH, Kernel(3, 3)),
    "norm": lambda: PlaceNorm(WIDTH),
    "residual": lambda: Residual(WIDTH),
    "halved space": lambda: spatial_downsample_2x(WIDTH, 24),
    "doubled space": lambda: SpatialUpsample2x(WIDTH, 8),
    "halved time": lambda: time_downsample_2x(WIDTH, 24),
    "doubled time": lambda: TimeUpsample2x(WIDTH, 8),
    "space attention": lambda: SpaceAttention(WIDTH, 2, 8),
    "linear space attention": lambda: LinearSpaceAttention(WIDTH, 2, 8),
    "time attention": lambda: TimeAttention(WIDTH, 2, 8, window=4),
    "gateloop": lambda: GateLoop(WIDTH),
    "a chain": lambda: Chain(
        time_downsample_2x(WIDTH, WIDTH),
        Residual(WIDTH),
        time_downsample_2x(WIDTH, WIDTH),
        GateLoop(WIDTH),
        TimeUpsample2x(WIDTH, WIDTH),
    ),
}
every_layer = pytest.mark.parametrize("name", LAYERS)

COMES_OUT = {
    "halved time": lambda frames: (frames + 1) // 2,
    "doubled time": lambda frames: 2 * frames - 1,
}
COMES_OUT["a chain"] = lambda frames: 2 * ((frames + 3) // 4) - 1
"""How many frames are certain once so many have come in, where it is not as many."""


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return stirred(LAYERS[name]())


def frames(
    count: int = 9, batch: int = 2, side: int = 4, dim: int = WIDTH, seed: int = 5
) -> Tensor:
    return torch.randn(batch, count, side, side, dim, generator=torch.Generator().manual_seed(seed))


def in_pieces(layer: nn.Module, clip: Tensor, lengths: Sequence[int]) -> Tensor:
    passage = StreamingState(memory={})
    out = [layer(piece, passage) for piece in clip.split(list(lengths), dim=1)]
    return torch.cat([piece for piece in out if piece.shape[1]], dim=1)


# ------------------------------------------------------------------------------------------------- nothing looks ahead


@every_layer
@pytest.mark.parametrize("known", [1, 3, 5])
def test_what_a_frame_becomes_does_not_depend_on_later_ones(name, known):
    layer, clip = made(name), frames()
    other = clip.clone()
    other[:, known:] = 3 * frames(seed=6)[:, known:] + 1
    certain = COMES_OUT.get(name, int)(known)
    with torch.no_grad():
        one, two = layer(clip, StreamingState()), layer(other, StreamingState())
    assert torch.equal(one[:, :certain], two[:, :certain])
    assert not torch.equal(one[:, certain:], two[:, certain:]), (
        "the later frames were not seen at all"
    )


@every_layer
def test_an_image_is_the_first_frame_of_a_clip(name):
    layer, clip = made(name), frames()
    with torch.no_grad():
        alone, first = layer(clip[:, :1], StreamingState()), layer(clip, StreamingState())[:, :1]
    torch.testing.assert_close(alone, first, rtol=1e-5, atol=1e-5)


@every_layer
def test_examples_do_not_see_each_other(name):
    layer, clip = made(name), frames(batch=3)
    other = clip.clone()
    other[1:] = 2 * frames(batch=3, seed=6)[1:]
    with torch.no_grad():
        assert torch.equal(layer(clip, StreamingState())[0], layer(other, StreamingState())[0])


# -------------------------------------------------------------------------------------------------------------- pieces


@every_layer
@pytest.mark.parametrize(
    "lengths", [[1] * 9, [2, 2, 2, 2, 1], [4, 5], [1, 3, 5], [3, 1, 1, 4], [8, 1], [9]], ids=str
)
def test_pieces_come_out_as_the_whole(name, lengths):
    layer, clip = made(name), frames()
    with torch.no_grad():
        whole = layer(clip, StreamingState())
        torch.testing.assert_close(in_pieces(layer, clip, lengths), whole, rtol=1e-5, atol=1e-5)
    assert whole.shape[1] == COMES_OUT.get(name, int)(9)


@every_layer
def test_what_is_kept_does_not_grow_with_the_clip_and_holds_on_to_no_more_than_it_shows(name):
    layer, passage = made(name), StreamingState(memory={})

    def kept() -> int:
        assert passage.memory is not None
        assert not any(tensor.requires_grad for tensor in passage.memory.values())
        return sum(tensor.untyped_storage().nbytes() for tensor in passage.memory.values())

    for piece in frames(count=24).split(8, dim=1):
        layer(piece, passage)
    early = kept()
    for piece in frames(count=64).split(8, dim=1):
        layer(piece, passage)
    assert kept() == early


def test_a_whole_clip_leaves_nothing_behind():
    layer, passage = made("a chain"), StreamingState()
    one = layer(frames(), passage)
    assert passage.memory is None and torch.equal(one, layer(frames(), passage))


# ------------------------------------------------------------------------------------------------------------ learning


@every_layer
@pytest.mark.parametrize("count", [1, 9])
def test_every_parameter_has_a_gradient_also_where_there_is_but_one_frame(name, count):
    """A parameter without one fails on several processes."""
    layer = made(name)
    layer(frames(count), StreamingState()).square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in layer.parameters()
    )


@pytest.mark.parametrize(
    "name", ["residual", "space attention", "linear space attention", "time attention", "gateloop"]
)
def test_what_is_added_starts_as_nothing_and_learns(name):
    layer, clip = LAYERS[name](), frames()
    assert torch.equal(layer(clip, StreamingState()), clip)
    (layer(clip, StreamingState()) - frames(seed=6)).square().sum().backward()
    assert any(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())


# --------------------------------------------------------------------------------------------------------- convolution


def test_a_causal_convolution_is_a_convolution_after_copies_of_the_first_frame():
    layer, clip = made("convolution"), frames()
    seen = torch.cat([clip[:, :1], clip[:, :1], clip], dim=1).permute(0, 4, 1, 2, 3)
    expected = F.conv3d(seen, layer.weight, layer.convolution.bias, padding=(0, 1, 1)).permute(
        0, 2, 3, 4, 1
    )
    torch.testing.assert_close(layer(clip, StreamingState()), expected)


@pytest.mark.parametrize(
    "name",
    [
        "convolution",
        "long convolution",
        "norm",
        "residual",
        "halved time",
        "time attention",
        "gateloop",
    ],
)
def test_a_clip_in_which_nothing_moves_stays_one(name):
    with torch.no_grad():
        out = made(name)(frames(1).expand(-1, 9, -1, -1, -1), StreamingState())
    torch.testing.assert_close(out, out[:, :1].expand_as(out), rtol=1e-5, atol=1e-5)


def test_halving_time_takes_every_second_frame_and_two_before_it():
    layer = time_downsample_2x(1, 1)
    nn.init.zeros_(layer.convolution.bias)
    layer.weight.data.copy_(torch.tensor([100.0, 10.0, 1.0]).view(1, 1, 3, 1, 1))
    clip = torch.arange(1.0, 6.0).view(1, 5, 1, 1, 1)
    assert layer(clip, StreamingState()).flatten().tolist() == [111.0, 123.0, 345.0]


def test_a_first_frame_apart_has_weights_of_its_own():
    layer, clip = made("first frame apart"), frames()
    plain = layer(clip, StreamingState())
    nn.init.zeros_(layer.first.weight)
    without_first = layer(clip, StreamingState())
    assert torch.equal(without_first[:, 1:], plain[:, 1:]) and not torch.equal(
        without_first[:, :1], plain[:, :1]
    )
    nn.init.zeros_(layer.others.weight)
    without_both = layer(clip, StreamingState())
    assert torch.equal(without_both[:, :1], without_first[:, :1]) and not torch.equal(
        without_both[:, 1:], plain[:, 1:]
    )


# ---------------------------------------------------------------------------------------------------------- resampling


def test_a_pixel_becomes_the_square_in_its_place_at_first_of_one_colour():
    layer, clip = SpatialUpsample2x(WIDTH, 8), frames()
    grown = layer(clip, StreamingState())
    assert grown.shape == (2, 9, 8, 8, 8)
    squares = grown.unflatten(3, (4, 2)).unflatten(2, (4, 2))  # B T h 2 w 2 C
    assert torch.equal(squares, squares[:, :, :, :1, :, :1].expand_as(squares))

    other = clip.clone()
    other[0, 2, 1, 3] += 1
    changed = (
        (stirred(layer)(other, StreamingState()) != layer(clip, StreamingState())).any(-1).nonzero()
    )
    assert changed.tolist() == [[0, 2, row, column] for row in (2, 3) for column in (6, 7)]


def test_a_frame_becomes_two_in_its_place_at_first_alike_but_the_first_stays_one():
    layer, clip = TimeUpsample2x(WIDTH, 8), frames(3)
    grown = layer(clip, StreamingState())
    assert grown.shape == (2, 5, 4, 4, 8)
    assert torch.equal(grown[:, 1], grown[:, 2]) and torch.equal(grown[:, 3], grown[:, 4])

    other = clip.clone()
    other[:, 1] += 1
    changed = (
        (stirred(layer)(other, StreamingState()) != layer(clip, StreamingState())).flatten(2).any(2)
    )
    assert changed.tolist() == [[False, True, True, False, False]] * 2


# --------------------------------------------------------------------------------------------------------------- norms


def test_a_place_is_normed_by_itself():
    norm, clip = stirred(PlaceNorm(WIDTH)), frames()
    expected = F.layer_norm(clip[1, 3, 2, 0], (WIDTH,), norm.norm.weight, norm.norm.bias)
    torch.testing.assert_close(norm(clip, StreamingState())[1, 3, 2, 0], expected)


def test_a_condition_starts_without_effect_and_then_has_one():
    norm, clip = PlaceNorm(WIDTH, condition=3), frames()
    one, two = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(norm(clip, StreamingState(one)), norm(clip, StreamingState(two)))
    assert not torch.equal(
        stirred(norm)(clip, StreamingState(one)), norm(clip, StreamingState(two))
    )
    swapped = norm(clip.flip(0), StreamingState(one.flip(0))).flip(0)
    torch.testing.assert_close(swapped, norm(clip, StreamingState(one)))


def test_a_missing_condition_is_asked_for():
    with pytest.raises(ValueError, match=r"pass `condition`, \(batch, width\)"):
        PlaceNorm(WIDTH, condition=3)(frames(), StreamingState())


# ----------------------------------------------------------------------------------------------------------- attention


def test_attention_over_time_sees_its_window_and_nothing_older():
    layer = made("time attention")
    clip = frames(10).requires_grad_()
    layer(clip, StreamingState())[0, 8].square().sum().backward()
    seen = clip.grad.flatten(2).abs().sum(2)[0] > 0
    assert seen.nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_attention_over_time_keeps_to_its_pixel():
    layer, clip = made("time attention"), frames()
    layer.norm.norm = nn.Identity()  # which looks at the whole frame
    other = clip.clone()
    other[:, 2, 1, 1] += 1
    changed = (layer(clip, StreamingState()) != layer(other, StreamingState())).any(-1)
    assert changed.any(1).nonzero().tolist() == [[0, 1, 1], [1, 1, 1]]


def test_attention_over_time_knows_which_frame_came_when():
    layer, clip = made("time attention"), frames(4)
    swapped = clip[:, [1, 0, 2, 3]]
    assert not torch.allclose(
        layer(clip, StreamingState())[:, 3], layer(swapped, StreamingState())[:, 3], atol=1e-4
    )


def test_attention_over_time_is_the_same_after_very_many_frames():
    """Positions are counted within the window: after a million frames the angles would differ in
    the second digit."""
    layer = made("time attention")
    passage, late = StreamingState(memory={}), StreamingState(memory={})
    with torch.no_grad():
        for piece in frames(40).split(8, dim=1):
            layer(piece, late)
        for piece in (frames(12, seed=7)[:, :9], frames(12, seed=7)[:, 9:]):
            new, old = layer(piece, passage)[:, -3:], layer(piece, late)[:, -3:]
    torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["space attention", "linear space attention"])
def test_every_place_of_a_frame_sees_every_other_and_where_it_is(name):
    layer, clip = made(name), frames(1, batch=1).requires_grad_()
    layer.norm.norm = nn.Identity()
    layer(clip, StreamingState())[0, 0, 0, 0].square().sum().backward()
    assert (clip.grad.abs().sum(-1) > 0).all()
    rope = clip.detach().clone()
    rope[:, :, 1:] = rope[:, :, 1:].flip(3)
    assert not torch.allclose(
        layer(clip, StreamingState())[0, 0, 0, 0],
        layer(rope, StreamingState())[0, 0, 0, 0],
        atol=1e-4,
    )


def test_linear_attention_weighs_by_the_second_taylor_polynomial_of_the_exponential():
    q, k, v = (torch.randn(3, 2, 50, 8, dtype=torch.float64) for _ in range(3))
    scores = q @ k.mT / math.sqrt(8)
    weights = 1 + scores + scores**2 / 2
    torch.testing.assert_close(taylor_features(q) @ taylor_features(k).mT, weights)
    layer = LinearSpaceAttention(WIDTH, 2, 8)
    torch.testing.assert_close(layer.attend(q, k, v), weights / weights.sum(-1, keepdim=True) @ v)
    near = F.scaled_dot_product_attention(0.02 * q, k, v)
    torch.testing.assert_close(layer.attend(0.02 * q, k, v), near, rtol=0, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------- recurrence


def one_by_one(log_decay: Tensor, new: Tensor, before: Tensor) -> Tensor:
    states = []
    for log, value in zip(log_decay.unbind(1), new.unbind(1)):
        before = log.exp() * before + value
        states.append(before)
    return torch.stack(states, dim=1)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 33])
def test_the_sum_by_doubling_is_the_sum_one_by_one(count):
    log_decay = -torch.rand(2, count, 3, dtype=torch.float64) * 2
    new, before = (
        torch.randn(2, count, 3, dtype=torch.float64),
        torch.randn(2, 3, dtype=torch.float64),
    )
    inputs = [log_decay.requires_grad_(), new.requires_grad_(), before.requires_grad_()]
    fast, slow = decaying_sum(*inputs), one_by_one(*inputs)
    torch.testing.assert_close(fast, slow)
    ours, theirs = (torch.autograd.grad(states.square().sum(), inputs) for states in (fast, slow))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("log", [0.0, -1e-6, -30.0, -1e4])
def test_no_decay_is_too_weak_or_too_strong_and_no_clip_too_long(log):
    log_decay = torch.full((1, 2000, 2), log, requires_grad=True)
    new = torch.ones(1, 2000, 2, requires_grad=True)
    state = decaying_sum(log_decay, new, torch.ones(1, 2))
    torch.testing.assert_close(
        state, one_by_one(log_decay, new, torch.ones(1, 2)), rtol=1e-4, atol=1e-4
    )
    state.sum().backward()
    assert log_decay.grad.isfinite().all() and new.grad.isfinite().all()


def test_a_gateloop_remembers_further_back_than_any_window():
    layer, clip = made("gateloop"), frames(40).requires_grad_()
    layer(clip, StreamingState())[:, -1].square().sum().backward()
    assert clip.grad[:, 0].abs().max() > 1e-6


def test_a_gateloop_in_half_precision_adds_in_full():
    layer, clip = made("gateloop"), frames(300)
    with torch.no_grad():
        exact = layer(clip, StreamingState())
        with torch.autocast("cpu", torch.bfloat16):
            coarse = layer(clip, StreamingState())
    assert (coarse - exact)[:, 200:].abs().mean() < 1.5 * (coarse - exact)[:, :100].abs().mean()
    assert (coarse - exact).abs().mean() < 0.02 * (exact - clip).abs().mean() + 0.01
