"""Tests of the causal video layers: causality, streaming in chunks, and bounded memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.causal_conv import (
    CausalConv,
    ChannelLayerNorm,
    GateLoop,
    Kernel,
    LinearSpaceAttention,
    Residual,
    SeparateFirstFrameConv,
    SpaceAttention,
    SpatialDownsample2x,
    SpatialUpsample2x,
    StreamingSequential,
    StreamingState,
    TimeAttention,
    TimeDownsample2x,
    TimeUpsample2x,
    scan_decayed_sum,
    taylor_features,
)
from tests.networks import perturb_weights

DIM = 16

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: CausalConv(DIM, DIM, Kernel(3, 3)),
    "long convolution": lambda: CausalConv(DIM, DIM, Kernel(7, 1)),
    "separate first frame": lambda: SeparateFirstFrameConv(DIM, DIM, Kernel(3, 3)),
    "norm": lambda: ChannelLayerNorm(DIM),
    "residual": lambda: Residual(DIM),
    "spatial downsampling": lambda: SpatialDownsample2x(DIM, 24),
    "spatial upsampling": lambda: SpatialUpsample2x(DIM, 8),
    "time downsampling": lambda: TimeDownsample2x(DIM, 24),
    "time upsampling": lambda: TimeUpsample2x(DIM, 8),
    "space attention": lambda: SpaceAttention(DIM, 2, 8),
    "linear space attention": lambda: LinearSpaceAttention(DIM, 2, 8),
    "time attention": lambda: TimeAttention(DIM, 2, 8, window=4),
    "gateloop": lambda: GateLoop(DIM),
    "sequential": lambda: StreamingSequential(
        TimeDownsample2x(DIM, DIM),
        Residual(DIM),
        TimeDownsample2x(DIM, DIM),
        GateLoop(DIM),
        TimeUpsample2x(DIM, DIM),
    ),
}
every_layer = pytest.mark.parametrize("name", LAYERS)

OUTPUT_FRAMES = {
    "time downsampling": lambda frames: (frames + 1) // 2,
    "time upsampling": lambda frames: 2 * frames - 1,
    "sequential": lambda frames: 2 * ((frames + 3) // 4) - 1,
}
"""The number of output frames that depend on so many input frames only, if it is not as many."""


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return perturb_weights(LAYERS[name]())


def make_video(
    frames: int = 9, batch: int = 2, side: int = 4, dim: int = DIM, seed: int = 5
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, frames, side, side, dim, generator=generator)


def run_in_chunks(layer: nn.Module, video: Tensor, lengths: Sequence[int]) -> Tensor:
    stream = StreamingState(memory={})
    out = [layer(chunk, stream) for chunk in video.split(list(lengths), dim=1)]
    return torch.cat([chunk for chunk in out if chunk.shape[1]], dim=1)


# ---- causality


@every_layer
@pytest.mark.parametrize("known", [1, 3, 5])
def test_frames_do_not_depend_on_later_ones(name, known):
    layer, video = build(name), make_video()
    other = video.clone()
    other[:, known:] = 3 * make_video(seed=6)[:, known:] + 1
    certain = OUTPUT_FRAMES.get(name, int)(known)
    with torch.no_grad():
        one, two = layer(video, StreamingState()), layer(other, StreamingState())
    assert torch.equal(one[:, :certain], two[:, :certain])
    assert not torch.equal(one[:, certain:], two[:, certain:]), "later frames have no effect"


@every_layer
def test_image_equals_the_first_frame_of_a_video(name):
    layer, video = build(name), make_video()
    with torch.no_grad():
        alone, first = layer(video[:, :1], StreamingState()), layer(video, StreamingState())[:, :1]
    torch.testing.assert_close(alone, first, rtol=1e-5, atol=1e-5)


@every_layer
def test_examples_do_not_depend_on_the_batch(name):
    layer, video = build(name), make_video(batch=3)
    other = video.clone()
    other[1:] = 2 * make_video(batch=3, seed=6)[1:]
    with torch.no_grad():
        assert torch.equal(layer(video, StreamingState())[0], layer(other, StreamingState())[0])


# ---- chunks


@every_layer
@pytest.mark.parametrize(
    "lengths", [[1] * 9, [2, 2, 2, 2, 1], [4, 5], [1, 3, 5], [3, 1, 1, 4], [8, 1], [9]], ids=str
)
def test_chunks_give_the_output_of_the_whole_video(name, lengths):
    layer, video = build(name), make_video()
    with torch.no_grad():
        whole = layer(video, StreamingState())
        chunks = run_in_chunks(layer, video, lengths)
        torch.testing.assert_close(chunks, whole, rtol=1e-5, atol=1e-5)
    assert whole.shape[1] == OUTPUT_FRAMES.get(name, int)(9)


@every_layer
def test_streaming_memory_does_not_grow_with_the_video(name):
    """Storage is measured, so that no view keeps a larger tensor alive."""
    layer, stream = build(name), StreamingState(memory={})

    def memory_bytes() -> int:
        assert stream.memory is not None
        assert not any(tensor.requires_grad for tensor in stream.memory.values())
        return sum(tensor.untyped_storage().nbytes() for tensor in stream.memory.values())

    for chunk in make_video(24).split(8, dim=1):
        layer(chunk, stream)
    early = memory_bytes()
    for chunk in make_video(64).split(8, dim=1):
        layer(chunk, stream)
    assert memory_bytes() == early


def test_whole_video_leaves_no_state():
    layer, stream = build("sequential"), StreamingState()
    one = layer(make_video(), stream)
    assert stream.memory is None and torch.equal(one, layer(make_video(), stream))


# ---- gradients and initialization


@every_layer
@pytest.mark.parametrize("frames", [1, 9])
def test_every_parameter_has_a_gradient(name, frames):
    """DDP fails for a parameter without one, also if the batch holds only images."""
    layer = build(name)
    layer(make_video(frames), StreamingState()).square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in layer.parameters()
    )


@pytest.mark.parametrize(
    "name", ["residual", "space attention", "linear space attention", "time attention", "gateloop"]
)
def test_residual_layers_start_as_the_identity_and_have_gradients(name):
    layer, video = LAYERS[name](), make_video()
    assert torch.equal(layer(video, StreamingState()), video)
    (layer(video, StreamingState()) - make_video(seed=6)).square().sum().backward()
    assert any(parameter.grad.abs().sum() > 0 for parameter in layer.parameters())


# ---- convolution


def test_convolution_is_padded_with_copies_of_the_first_frame():
    layer, video = build("convolution"), make_video()
    padded = torch.cat([video[:, :1], video[:, :1], video], dim=1).permute(0, 4, 1, 2, 3)
    expected = F.conv3d(padded, layer.weight, layer.convolution.bias, padding=(0, 1, 1)).permute(
        0, 2, 3, 4, 1
    )
    torch.testing.assert_close(layer(video, StreamingState()), expected)


@pytest.mark.parametrize(
    "name",
    [
        "convolution",
        "long convolution",
        "norm",
        "residual",
        "time downsampling",
        "time attention",
        "gateloop",
    ],
)
def test_static_videos_stay_static(name):
    with torch.no_grad():
        out = build(name)(make_video(1).expand(-1, 9, -1, -1, -1), StreamingState())
    torch.testing.assert_close(out, out[:, :1].expand_as(out), rtol=1e-5, atol=1e-5)


def test_time_downsampling_combines_every_second_frame_with_the_two_before():
    layer = TimeDownsample2x(1, 1)
    nn.init.zeros_(layer.convolution.bias)
    layer.weight.data.copy_(torch.tensor([100.0, 10.0, 1.0]).view(1, 1, 3, 1, 1))
    video = torch.arange(1.0, 6.0).view(1, 5, 1, 1, 1)
    assert layer(video, StreamingState()).flatten().tolist() == [111.0, 123.0, 345.0]


def test_separate_first_frame_has_its_own_weights():
    layer, video = build("separate first frame"), make_video()
    full = layer(video, StreamingState())
    nn.init.zeros_(layer.first.weight)
    without_first = layer(video, StreamingState())
    assert torch.equal(without_first[:, 1:], full[:, 1:])
    assert not torch.equal(without_first[:, :1], full[:, :1])
    nn.init.zeros_(layer.others.weight)
    without_both = layer(video, StreamingState())
    assert torch.equal(without_both[:, :1], without_first[:, :1])
    assert not torch.equal(without_both[:, 1:], full[:, 1:])


# ---- resampling


def test_spatial_upsampling_expands_pixels_to_squares_of_equal_pixels():
    """Equal at initialization only."""
    layer, video = SpatialUpsample2x(DIM, 8), make_video()
    upsampled = layer(video, StreamingState())
    assert upsampled.shape == (2, 9, 8, 8, 8)
    squares = upsampled.unflatten(3, (4, 2)).unflatten(2, (4, 2))  # B T h 2 w 2 C
    assert torch.equal(squares, squares[:, :, :, :1, :, :1].expand_as(squares))

    other = video.clone()
    other[0, 2, 1, 3] += 1
    perturb_weights(layer)
    difference = layer(other, StreamingState()) != layer(video, StreamingState())
    changed = difference.any(-1).nonzero()
    assert changed.tolist() == [[0, 2, row, column] for row in (2, 3) for column in (6, 7)]


def test_time_upsampling_expands_all_frames_but_the_first_to_two():
    """The two are equal at initialization only."""
    layer, video = TimeUpsample2x(DIM, 8), make_video(3)
    upsampled = layer(video, StreamingState())
    assert upsampled.shape == (2, 5, 4, 4, 8)
    assert torch.equal(upsampled[:, 1], upsampled[:, 2])
    assert torch.equal(upsampled[:, 3], upsampled[:, 4])

    other = video.clone()
    other[:, 1] += 1
    perturb_weights(layer)
    difference = layer(other, StreamingState()) != layer(video, StreamingState())
    assert difference.flatten(2).any(2).tolist() == [[False, True, True, False, False]] * 2


# ---- norms


def test_norm_is_over_the_channels_of_each_pixel():
    norm, video = perturb_weights(ChannelLayerNorm(DIM)), make_video()
    expected = F.layer_norm(video[1, 3, 2, 0], (DIM,), norm.norm.weight, norm.norm.bias)
    torch.testing.assert_close(norm(video, StreamingState())[1, 3, 2, 0], expected)


def test_condition_has_no_effect_at_initialization_and_then_has():
    norm, video = ChannelLayerNorm(DIM, condition_dim=3), make_video()
    one, two = torch.randn(2, 3), torch.randn(2, 3)
    assert torch.equal(norm(video, StreamingState(one)), norm(video, StreamingState(two)))
    perturb_weights(norm)
    assert not torch.equal(norm(video, StreamingState(one)), norm(video, StreamingState(two)))
    flipped = norm(video.flip(0), StreamingState(one.flip(0))).flip(0)
    torch.testing.assert_close(flipped, norm(video, StreamingState(one)))


def test_missing_condition_is_an_error():
    with pytest.raises(ValueError, match=r"pass `condition`, \(batch, dim\)"):
        ChannelLayerNorm(DIM, condition_dim=3)(make_video(), StreamingState())


# ---- attention


def test_time_attention_covers_its_window_and_nothing_older():
    layer = build("time attention")
    video = make_video(10).requires_grad_()
    layer(video, StreamingState())[0, 8].square().sum().backward()
    attended = video.grad.flatten(2).abs().sum(2)[0] > 0
    assert attended.nonzero().flatten().tolist() == [5, 6, 7, 8]


def test_time_attention_does_not_mix_pixels():
    layer, video = build("time attention"), make_video()
    layer.norm.norm = nn.Identity()
    other = video.clone()
    other[:, 2, 1, 1] += 1
    changed = (layer(video, StreamingState()) != layer(other, StreamingState())).any(-1)
    assert changed.any(1).nonzero().tolist() == [[0, 1, 1], [1, 1, 1]]


def test_time_attention_depends_on_the_order_of_frames():
    layer, video = build("time attention"), make_video(4)
    swapped = video[:, [1, 0, 2, 3]]
    assert not torch.allclose(
        layer(video, StreamingState())[:, 3], layer(swapped, StreamingState())[:, 3], atol=1e-4
    )


def test_time_attention_does_not_depend_on_the_frame_number():
    """Positions are relative to the window: after a million frames angles from the beginning would
    differ in the second digit."""
    layer = build("time attention")
    early, late = StreamingState(memory={}), StreamingState(memory={})
    with torch.no_grad():
        for chunk in make_video(40).split(8, dim=1):
            layer(chunk, late)
        for chunk in (make_video(12, seed=7)[:, :9], make_video(12, seed=7)[:, 9:]):
            new, old = layer(chunk, early)[:, -3:], layer(chunk, late)[:, -3:]
    torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["space attention", "linear space attention"])
def test_space_attention_covers_the_frame_and_depends_on_positions(name):
    layer, video = build(name), make_video(1, batch=1).requires_grad_()
    layer.norm.norm = nn.Identity()
    layer(video, StreamingState())[0, 0, 0, 0].square().sum().backward()
    assert (video.grad.abs().sum(-1) > 0).all()
    flipped = video.detach().clone()
    flipped[:, :, 1:] = flipped[:, :, 1:].flip(3)
    assert not torch.allclose(
        layer(video, StreamingState())[0, 0, 0, 0],
        layer(flipped, StreamingState())[0, 0, 0, 0],
        atol=1e-4,
    )


def test_linear_attention_has_the_second_taylor_polynomial_of_exp_as_weights():
    q, k, v = (torch.randn(3, 2, 50, 8, dtype=torch.float64) for _ in range(3))
    scores = q @ k.mT / math.sqrt(8)
    weights = 1 + scores + scores**2 / 2
    torch.testing.assert_close(taylor_features(q) @ taylor_features(k).mT, weights)
    layer = LinearSpaceAttention(DIM, 2, 8)
    torch.testing.assert_close(layer.attend(q, k, v), weights / weights.sum(-1, keepdim=True) @ v)
    softmax = F.scaled_dot_product_attention(0.02 * q, k, v)
    torch.testing.assert_close(layer.attend(0.02 * q, k, v), softmax, rtol=0, atol=1e-4)


# ---- recurrence


def decayed_sum_loop(log_decay: Tensor, new: Tensor, state: Tensor) -> Tensor:
    states = []
    for log, value in zip(log_decay.unbind(1), new.unbind(1)):
        state = log.exp() * state + value
        states.append(state)
    return torch.stack(states, dim=1)


@pytest.mark.parametrize("frames", [1, 2, 3, 7, 8, 33])
def test_parallel_scan_equals_the_loop(frames):
    log_decay = -torch.rand(2, frames, 3, dtype=torch.float64) * 2
    new, initial = (
        torch.randn(2, frames, 3, dtype=torch.float64),
        torch.randn(2, 3, dtype=torch.float64),
    )
    inputs = [log_decay.requires_grad_(), new.requires_grad_(), initial.requires_grad_()]
    scanned, looped = scan_decayed_sum(*inputs), decayed_sum_loop(*inputs)
    torch.testing.assert_close(scanned, looped)
    grads, expected = (
        torch.autograd.grad(states.square().sum(), inputs) for states in (scanned, looped)
    )
    torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("log", [0.0, -1e-6, -30.0, -1e4])
def test_parallel_scan_is_stable_for_any_decay(log):
    log_decay = torch.full((1, 2000, 2), log, requires_grad=True)
    new = torch.ones(1, 2000, 2, requires_grad=True)
    state = scan_decayed_sum(log_decay, new, torch.ones(1, 2))
    torch.testing.assert_close(
        state, decayed_sum_loop(log_decay, new, torch.ones(1, 2)), rtol=1e-4, atol=1e-4
    )
    state.sum().backward()
    assert log_decay.grad.isfinite().all() and new.grad.isfinite().all()


def test_gateloop_has_a_longer_memory_than_any_window():
    layer, video = build("gateloop"), make_video(40).requires_grad_()
    layer(video, StreamingState())[:, -1].square().sum().backward()
    assert video.grad[:, 0].abs().max() > 1e-6


def test_gateloop_accumulates_in_float32_under_autocast():
    layer, video = build("gateloop"), make_video(300)
    with torch.no_grad():
        exact = layer(video, StreamingState())
        with torch.autocast("cpu", torch.bfloat16):
            half = layer(video, StreamingState())
    error = (half - exact).abs()
    assert error[:, 200:].mean() < 1.5 * error[:, :100].mean()
    assert error.mean() < 0.02 * (exact - video).abs().mean() + 0.01
