"""Causal layers for videos, which process a video at once or chunk by chunk.

A frame depends on itself and on earlier frames, never on later ones or on other examples. So an
image is the first frame of a video, and a video of any length can be processed in chunks: each
layer with a temporal context keeps the little it needs of the past in a `StreamingState`, and the
concatenated outputs of the chunks are the output of the whole video.

Videos are (B, T, H, W, C) in these layers. Channels last was the fastest layout of convolutions on
a CPU (3 x 3 x 3, 16 channels, forward and backward: 8 ms against 12); in it a 1 x 1 convolution is
a linear layer, and attention needs no copy.

B batch, T frames, H height, W width, C channels, P sequences, N positions, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.init import init_fan_in_, zero_init_
from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.transformer import (
    FeedForward,
    apply_rotary_emb,
    grid_positions,
    linear,
    merge_heads,
    rope_cache,
    split_heads,
)


@dataclass(eq=False)
class StreamingState:
    """The condition of a video, and what layers keep between its chunks."""

    condition: Tensor | None = None
    """(B, condition_dim): a vector for all frames, for layers that were built with a condition."""
    memory: dict[nn.Module, Tensor] | None = None
    """What each layer keeps of earlier chunks; {} before the first chunk. None if the video is
    processed at once."""

    def get(self, layer: nn.Module) -> Tensor | None:
        """Return what a layer has kept, or None at the beginning of a video."""
        return None if self.memory is None else self.memory.get(layer)

    def set(self, layer: nn.Module, frames: Tensor) -> None:
        """Keep a copy for a layer. (A slice would keep the memory of the entire chunk.)"""
        if self.memory is not None:
            self.memory[layer] = frames.detach().clone()

    def is_first_chunk(self, layer: nn.Module) -> bool:
        """Whether the layer is called for the first time; to be called once per chunk."""
        first = self.get(layer) is None
        self.set(layer, torch.empty(0))
        return first


class StreamingSequential(nn.Sequential):
    """Layers in sequence.

    A chunk too short for a frame at a lower rate ends in the layer that waits for more frames.
    """

    def forward(  # type: ignore[override]
        self, x_BTHWC: Tensor, stream: StreamingState
    ) -> Tensor:
        for layer in self:
            if not x_BTHWC.shape[1]:
                break
            x_BTHWC = layer(x_BTHWC, stream)
        return x_BTHWC


class Kernel(NamedTuple):
    """Frames and side of a convolution's kernel, or of its stride."""

    frames: int
    side: int


UNIT_STRIDE = Kernel(1, 1)


class CausalConv(nn.Module):
    """A 3D convolution that is causal in time (MAGVIT-v2, arXiv 2310.05737, section 3.2).

    The padding before a video is its first frame, repeated, so that an image is equal to a video in
    which nothing moves. With a temporal stride of n, frames 0, n, 2n, ... are the output.
    """

    def __init__(self, inputs: int, outputs: int, kernel: Kernel, stride: Kernel = UNIT_STRIDE):
        super().__init__()
        self.kernel, self.stride = kernel, stride
        padding = (kernel.side - 1) // 2
        self.convolution = nn.Conv3d(
            inputs,
            outputs,
            (kernel.frames, kernel.side, kernel.side),
            stride=(stride.frames, stride.side, stride.side),
            padding=(0, padding, padding),
        )
        init_fan_in_(self.convolution, gain=1.0)

    @property
    def weight(self) -> nn.Parameter:
        return self.convolution.weight  # type: ignore[return-value]

    def forward(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        padded = self.prepend_past(x_BTHWC, stream)
        ready = max(0, (padded.shape[1] - self.kernel.frames) // self.stride.frames + 1)
        stream.set(self, padded[:, ready * self.stride.frames :])
        if not ready:
            return padded[:, :0]
        if self.kernel.side == 1:
            return self.mix_frames(padded, ready)
        return self.convolution(padded.movedim(-1, 1)).movedim(1, -1)

    def mix_frames(self, padded_BTHWC: Tensor, count: int) -> Tensor:
        """Apply a kernel of one pixel as a linear layer of several frames.

        On a CPU this takes 0.6 of the time of the convolution (64 channels, 9 x 16 x 16 pixels).
        """
        stride, last = self.stride.frames, count * self.stride.frames
        frames = [padded_BTHWC[:, i : i + last : stride] for i in range(self.kernel.frames)]
        weight = self.weight.flatten(2).transpose(1, 2).flatten(1)
        return F.linear(torch.cat(frames, dim=-1), weight, self.convolution.bias)

    def prepend_past(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        past = stream.get(self)
        if past is None:
            past = x_BTHWC[:, :1].expand(-1, self.kernel.frames - 1, -1, -1, -1)
        return torch.cat([past, x_BTHWC], dim=1) if past.shape[1] else x_BTHWC


class SeparateFirstFrameConv(nn.Module):
    """A causal convolution with a separate 2D convolution for the first frame of a video."""

    def __init__(self, inputs: int, outputs: int, kernel: Kernel):
        super().__init__()
        self.first = CausalConv(inputs, outputs, Kernel(1, kernel.side))
        self.others = CausalConv(inputs, outputs, kernel)

    @property
    def weight(self) -> nn.Parameter:
        return self.others.weight

    def forward(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        others = self.others(x_BTHWC, stream)
        if not stream.is_first_chunk(self):
            return others
        return torch.cat([self.first(x_BTHWC[:, :1], StreamingState()), others[:, 1:]], dim=1)


class ChannelLayerNorm(nn.Module):
    """Layer norm over the channels of each pixel of each frame.

    A norm over several frames would not be causal. With a norm over a whole frame, the tokens of a
    static background would change with the moving foreground (`modalities/image/vqgan.py` has
    measurements).

    With a condition, the vector scales and shifts the normalized values (Dhariwal 2021, arXiv
    2105.05233, section 3.1); at initialization it has no effect.
    """

    def __init__(self, dim: int, condition_dim: int | None = None):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.to_scale_shift = (
            zero_init_(linear(condition_dim, 2 * dim)) if condition_dim is not None else None
        )

    def forward(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        normalized = self.norm(x_BTHWC)
        if self.to_scale_shift is None:
            return normalized
        if stream.condition is None:
            raise ValueError(
                "This layer is conditioned on a vector, but got none: pass `condition`, "
                "(batch, dim)."
            )
        scale, shift = self.to_scale_shift(stream.condition)[:, None, None, None].chunk(2, dim=-1)
        return normalized * (1 + scale) + shift


class Residual(nn.Module):
    """A residual block with a causal 3 x 3 x 3 convolution; the identity at initialization."""

    is_block = True

    def __init__(self, dim: int, condition_dim: int | None = None):
        super().__init__()
        self.norm = ChannelLayerNorm(dim, condition_dim)
        self.convolution = CausalConv(dim, dim, Kernel(3, 3))
        self.out = zero_init_(linear(dim, dim))

    def forward(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        mixed = self.convolution(F.silu(self.norm(x_BTHWC, stream)), stream)
        return x_BTHWC + self.out(F.silu(mixed))


class FactorizedResidual(nn.Module):
    """A residual block that mixes pixels, then frames; the identity at initialization.

    A 3 x 3 convolution within frames and one over three frames (Tran 2018, arXiv 1711.11248) need
    less than half of the arithmetic of a 3 x 3 x 3 convolution.
    """

    is_block = True

    def __init__(self, dim: int, condition_dim: int | None = None):
        super().__init__()
        self.norm = ChannelLayerNorm(dim, condition_dim)
        self.space = CausalConv(dim, dim, Kernel(1, 3))
        self.time = zero_init_(CausalConv(dim, dim, Kernel(3, 1)))

    def forward(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        mixed = self.space(F.silu(self.norm(x_BTHWC, stream)), stream)
        return x_BTHWC + self.time(F.silu(mixed), stream)


# ---- resampling


class SpatialDownsample2x(CausalConv):
    """A convolution with a spatial stride of 2."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, Kernel(1, 3), stride=Kernel(1, 2))


class TimeDownsample2x(CausalConv):
    """A convolution with a temporal stride of 2: 1 + 2k frames become 1 + k."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs, Kernel(3, 1), stride=Kernel(2, 1))


class SpatialUpsample2x(nn.Module):
    """Expands each pixel to 2 x 2.

    At initialization the four are equal (Aitken 2017, arXiv 1707.02937), which avoids checkerboard
    patterns.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.expand = nn.Linear(inputs, 4 * outputs)
        init_repeated_(self.expand, 4)

    def forward(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        batch, frames, height, width, _ = x_BTHWC.shape
        squares = F.silu(self.expand(x_BTHWC)).view(batch, frames, height, width, 2, 2, -1)
        return squares.transpose(3, 4).reshape(batch, frames, 2 * height, 2 * width, -1)


class OverlappingUpsample2x(nn.Module):
    """Expands each pixel to 4 x 4 that overlap by half, so that no blocks are visible."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.expand = nn.ConvTranspose3d(
            inputs, outputs, (1, 4, 4), stride=(1, 2, 2), padding=(0, 1, 1)
        )
        with torch.no_grad():  # four of the sixteen taps add up at each pixel
            nn.init.normal_(self.expand.weight, std=(2 / (4 * inputs)) ** 0.5)
            nn.init.zeros_(self.expand.bias)  # type: ignore[arg-type]

    def forward(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        return F.silu(self.expand(x_BTHWC.movedim(-1, 1)).movedim(1, -1))


class TimeUpsample2x(nn.Module):
    """Expands 1 + k frames to 1 + 2k: each frame to two, but the first of a video to one.

    At initialization the two are equal.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.expand = nn.Linear(inputs, 2 * outputs)
        init_repeated_(self.expand, 2)

    def forward(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        pairs = F.silu(self.expand(x_BTHWC)).unflatten(-1, (2, -1)).movedim(-2, 2).flatten(1, 2)
        return pairs[:, 1:] if stream.is_first_chunk(self) else pairs


@torch.no_grad()
def init_repeated_(layer: nn.Linear, copies: int) -> None:
    """Initialize a layer whose output consists of `copies` equal parts."""
    init_fan_in_(layer, gain=2**0.5)  # the SiLU after it keeps about a third of the mean square
    first = layer.weight[: len(layer.weight) // copies]
    layer.weight.copy_(torch.cat([first] * copies))


# ---- attention


class Attention(nn.Module):
    """The base of the attention layers: normalized queries and keys, rotary positions, a
    zero-initialized output projection, followed by a feed-forward layer."""

    def __init__(self, dim: int, heads: int, head_dim: int, condition_dim: int | None = None):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.norm = ChannelLayerNorm(dim, condition_dim)
        self.to_qkv = linear(dim, 3 * heads * head_dim)
        self.query_norm, self.key_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        self.out = zero_init_(linear(heads * head_dim, dim))
        self.feed_forward = FeedForward(dim)

    def forward(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        x_BTHWC = x_BTHWC + self.self_attend(self.norm(x_BTHWC, stream), stream)
        return x_BTHWC + self.feed_forward(cast_to_weight(x_BTHWC, self.feed_forward.norm))

    def self_attend(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        raise NotImplementedError

    def project_qkv(self, x_PNC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys in the precision of the weights, for the rotations, and values
        in that of the input."""
        q, k, v = split_heads(self.to_qkv(x_PNC), 3, self.heads)
        q, k = cast_to_weight(q, self.query_norm), cast_to_weight(k, self.key_norm)
        return self.query_norm(q), self.key_norm(k), v


def cast_to_weight(x: Tensor, norm: nn.LayerNorm | nn.RMSNorm) -> Tensor:
    """Cast to the precision of a norm's weight.

    Under autocast the input is in half precision, for which torch's RMS norm with float32 weights
    has no fused kernel and emits a warning.
    """
    return x.to(norm.weight.dtype)


class SpaceAttention(Attention):
    """Full attention within each frame."""

    def self_attend(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        q, k, v = self.project_qkv(x_BTHWC.flatten(0, 1).flatten(1, 2))
        rope = rope_cache(grid_positions(x_BTHWC.shape[2:4]).to(q), self.head_dim)
        q, k = apply_rotary_emb(q, rope).to(v), apply_rotary_emb(k, rope).to(v)
        return self.out(merge_heads(self.attend(q, k, v))).view(x_BTHWC.shape)

    def attend(self, q_PHND: Tensor, k_PHND: Tensor, v_PHND: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q_PHND, k_PHND, v_PHND)


class LinearSpaceAttention(SpaceAttention):
    """Attention within each frame at a cost linear in its positions, for large frames and small
    heads.

    exp(s) is replaced by 1 + s + s^2 / 2, which is at least 1/2 and is an inner product of features
    of query and key (Arora 2024, arXiv 2402.18668), so that keys and values are summed once for all
    queries.
    """

    def attend(self, q_PHND: Tensor, k_PHND: Tensor, v_PHND: Tensor) -> Tensor:
        with full_precision(q_PHND.device.type):
            q, k = taylor_features(to_fp32(q_PHND)), taylor_features(to_fp32(k_PHND))
            weighted = q @ (k.mT @ to_fp32(v_PHND))
            weights = q @ k.sum(dim=2).unsqueeze(-1)
        return (weighted / weights).to(v_PHND.dtype)


def taylor_features(x: Tensor) -> Tensor:
    """Compute features whose inner products are 1 + s + s^2 / 2 with s = x . y / sqrt(D).

    (..., D) -> (..., 1 + D + D^2).
    """
    scaled = x * x.shape[-1] ** -0.25
    squares = (scaled.unsqueeze(-1) * scaled.unsqueeze(-2)).flatten(-2) * 0.5**0.5
    return torch.cat([torch.ones_like(x[..., :1]), scaled, squares], dim=-1)


class TimeAttention(Attention):
    """Causal attention of each pixel over the last `window` frames, its own included.

    The window bounds the memory of streaming. It applies to videos that are processed at once too,
    so that the results are equal.
    """

    def __init__(
        self, dim: int, heads: int, head_dim: int, window: int, condition_dim: int | None = None
    ):
        super().__init__(dim, heads, head_dim, condition_dim)
        self.window = window

    def self_attend(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        pixels_BHWTC = x_BTHWC.movedim(1, 3)
        q, k, v = self.project_qkv(pixels_BHWTC.flatten(0, 2))
        k, v = self.prepend_past(k, v, stream)
        queries, keys = q.shape[2], k.shape[2]
        # Positions are counted from the oldest key and not from the beginning of the video: only
        # differences matter, and the angles of an hour of frames would not be exact.
        positions = torch.arange(keys, device=x_BTHWC.device)
        lag = positions[keys - queries :, None] - positions
        rope_q, rope_k = (
            rope_cache(some[:, None].to(q), self.head_dim)
            for some in (positions[keys - queries :], positions)
        )
        in_window = (lag >= 0) & (lag < self.window)
        q, k = apply_rotary_emb(q, rope_q).to(v), apply_rotary_emb(k, rope_k).to(v)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=in_window)
        return self.out(merge_heads(attended)).view(pixels_BHWTC.shape).movedim(3, 1)

    def prepend_past(
        self, k_PHTD: Tensor, v_PHTD: Tensor, stream: StreamingState
    ) -> tuple[Tensor, Tensor]:
        both = torch.stack([k_PHTD, v_PHTD.to(k_PHTD)])
        past = stream.get(self)
        if past is not None:
            both = torch.cat([past, both], dim=3)
        stream.set(self, both[..., max(0, both.shape[3] - self.window + 1) :, :])
        keys, values = both
        return keys, values.to(v_PHTD)


# ---- recurrence


class GateLoop(nn.Module):
    """A recurrence over time with a data-dependent decay (Katsch 2023, arXiv 2311.01927).

    state = a state + (1 - a) value, with a in (0, 1) for each pixel and channel, and the first
    value as the first state. The state is a weighted mean of the past and keeps its scale at any
    length. At initialization the channels have memories of 2 to 50 frames.
    """

    def __init__(self, dim: int, condition_dim: int | None = None):
        super().__init__()
        self.norm = ChannelLayerNorm(dim, condition_dim)
        self.to_value_decay_gate = linear(dim, 3 * dim)
        self.decay_bias = nn.Parameter(torch.linspace(0.0, 4.0, dim))
        self.out = zero_init_(linear(dim, dim))

    def forward(self, x_BTHWC: Tensor, stream: StreamingState) -> Tensor:
        value, decay, gate = self.to_value_decay_gate(self.norm(x_BTHWC, stream)).chunk(3, dim=-1)
        with full_precision(x_BTHWC.device.type):
            value, decay_logit = to_fp32(value), to_fp32(decay) + to_fp32(self.decay_bias)
            initial = stream.get(self)
            initial = value[:, 0] if initial is None else initial
            state = scan_decayed_sum(
                F.logsigmoid(decay_logit), torch.sigmoid(-decay_logit) * value, initial
            )
        stream.set(self, state[:, -1])
        return x_BTHWC + self.out((F.silu(gate) * state).to(x_BTHWC.dtype))


def scan_decayed_sum(log_decay_BT: Tensor, new_BT: Tensor, initial_B: Tensor) -> Tensor:
    """Compute state[t] = exp(log_decay[t]) state[t - 1] + new[t] for all t, (B, T, ...).

    `initial_B` is the state before the first. A parallel scan by doubling (Hillis & Steele 1986,
    doi.org/10.1145/7902.7903): after n rounds a state covers the last 2^n frames, so log2 T rounds
    suffice. Decays are multiplied as sums of logarithms, all of them at most 0: there is no
    division, and nothing overflows.
    """
    reach, frames = 1, new_BT.shape[1]
    log_decay, state = log_decay_BT, new_BT
    while reach < frames:
        state = state + log_decay.exp() * shift_right(state, reach)
        log_decay = log_decay + shift_right(log_decay, reach)
        reach *= 2
    return state + log_decay.exp() * initial_B.unsqueeze(1)


def shift_right(frames_BT: Tensor, by: int) -> Tensor:
    """Move frames to later positions, with zeros before them."""
    return F.pad(frames_BT[:, :-by], (0, 0) * (frames_BT.ndim - 2) + (by, 0))
