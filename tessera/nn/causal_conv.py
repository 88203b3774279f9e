"""Layers for clips in which no frame looks ahead, and through which a clip may come in pieces.

What a frame becomes depends on itself and on frames before it, never on later ones or on other
examples. So an image is the first frame of a clip, and a clip of any length can pass through a
network piece by piece: every layer that looks back keeps the little it will need again
(`StreamingState`), and the pieces come out as the whole would have.

Inside, clips are (B, T, H, W, C): channels last in memory, the layout in which convolutions were
fastest on a CPU (3 x 3 x 3, 16 channels, forward and backward: 8 ms against 12), in which a
convolution of one pixel is a linear layer, and attention needs no copy.

B batch, T frames, H and W sides, C channels, P sequences, N places, D width of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.init import start
from tessera.nn.precision import full_precision, to_fp32
from tessera.nn.transformer import (
    FeedForward,
    grid_positions,
    joined,
    linear,
    rope_cache,
    split_heads,
    zero_init_,
)


@dataclass(eq=False)
class StreamingState:
    """A clip's way through a network: what it is conditioned on, and what the layers remember if it
    comes in pieces."""

    condition: Tensor | None = None
    """(B, W), the same for all frames; for layers that were built with a condition."""
    memory: dict[nn.Module, Tensor] | None = None
    """What each layer kept of the pieces before this one; {} before the first. None: the clip comes
    whole."""

    def recall(self, layer: nn.Module) -> Tensor | None:
        """What this layer kept, or None at the beginning of a clip."""
        return None if self.memory is None else self.memory.get(layer)

    def keep(self, layer: nn.Module, frames: Tensor) -> None:
        """A copy, since a slice would hold on to all of the piece it was cut from."""
        if self.memory is not None:
            self.memory[layer] = frames.detach().clone()

    def begins(self, layer: nn.Module) -> bool:
        """Whether this layer meets the clip's first frame now; asked once per piece."""
        first = self.recall(layer) is None
        self.keep(layer, torch.empty(0))
        return first


class Chain(nn.Sequential):
    """Layers in a row. A piece too short to become a frame further down ends where it waits for the
    next."""

    def forward(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        for layer in self:
            if not x_BTHWC.shape[1]:
                break
            x_BTHWC = layer(x_BTHWC, passage)
        return x_BTHWC


class Kernel(NamedTuple):
    """So many frames, and a square of so many pixels: the size of a convolution, or its stride."""

    frames: int
    side: int


EVERY = Kernel(1, 1)
"""The stride that leaves nothing out."""


class CausalConv(nn.Module):
    """A convolution over time and space whose kernel ends at the frame it speaks of (MAGVIT-v2,
    arXiv 2310.05737, section 3.2).

    Before the first frame stands the first frame again and again, so that an image is a clip in
    which nothing moves. With a stride of n in time, frames 0, n, 2n, ... come out.
    """

    def __init__(self, inputs: int, outputs: int, kernel: Kernel, stride: Kernel = EVERY):
        super().__init__()
        self.kernel, self.stride = kernel, stride
        around = (kernel.side - 1) // 2
        self.convolution = nn.Conv3d(
            inputs,
            outputs,
            (kernel.frames, kernel.side, kernel.side),
            stride=(stride.frames, stride.side, stride.side),
            padding=(0, around, around),
        )
        start(self.convolution, gain=1.0)

    @property
    def weight(self) -> nn.Parameter:
        return self.convolution.weight  # type: ignore[return-value]

    def forward(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        seen = self.with_past(x_BTHWC, passage)
        ready = max(0, (seen.shape[1] - self.kernel.frames) // self.stride.frames + 1)
        passage.keep(self, seen[:, ready * self.stride.frames :])
        return self.convolution(seen.movedim(-1, 1)).movedim(1, -1) if ready else seen[:, :0]

    def with_past(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        past = passage.recall(self)
        if past is None:
            past = x_BTHWC[:, :1].expand(-1, self.kernel.frames - 1, -1, -1, -1)
        return torch.cat([past, x_BTHWC], dim=1) if past.shape[1] else x_BTHWC


class SeparateFirstFrameConv(nn.Module):
    """A causal convolution that leaves a clip's first frame to a convolution of its own, which
    knows no time."""

    def __init__(self, inputs: int, outputs: int, kernel: Kernel):
        super().__init__()
        self.first = CausalConv(inputs, outputs, Kernel(1, kernel.side))
        self.others = CausalConv(inputs, outputs, kernel)

    @property
    def weight(self) -> nn.Parameter:
        return self.others.weight

    def forward(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        others = self.others(x_BTHWC, passage)
        if not passage.begins(self):
            return others
        return torch.cat([self.first(x_BTHWC[:, :1], StreamingState()), others[:, 1:]], dim=1)


class PlaceNorm(nn.Module):
    """Over the channels of each place of each frame by itself.

    Over several frames it would carry the future into the past; over a whole frame, the symbols of
    a still background would change with what moves before it (`modalities/image/vqgan.py` has
    numbers).

    With a condition, the vector scales and shifts what was normed (Dhariwal 2021, arXiv 2105.05233,
    section 3.1); it starts without effect.
    """

    def __init__(self, dim: int, condition: int | None = None):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.adapt = zero_init_(linear(condition, 2 * dim)) if condition is not None else None

    def forward(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        normed = self.norm(x_BTHWC)
        if self.adapt is None:
            return normed
        if passage.condition is None:
            raise ValueError(
                "This layer is conditioned on a vector, but was given none: pass `condition`, (batch, width)."
            )
        scale, shift = self.adapt(passage.condition)[:, None, None, None].chunk(2, dim=-1)
        return normed * (1 + scale) + shift


class Residual(nn.Module):
    """x + f(x), where f looks one pixel around and two frames back, and starts as nothing."""

    def __init__(self, dim: int, condition: int | None = None):
        super().__init__()
        self.norm = PlaceNorm(dim, condition)
        self.convolution = CausalConv(dim, dim, Kernel(3, 3))
        self.out = zero_init_(linear(dim, dim))

    def forward(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        around = self.convolution(F.silu(self.norm(x_BTHWC, passage)), passage)
        return x_BTHWC + self.out(F.silu(around))


# ---------------------------------------------------------------------------------------------------------- resampling


def spatial_downsample_2x(inputs: int, outputs: int) -> CausalConv:
    return CausalConv(inputs, outputs, Kernel(1, 3), stride=Kernel(1, 2))


def time_downsample_2x(inputs: int, outputs: int) -> CausalConv:
    """1 + 2k frames become 1 + k: each but the first stands for two."""
    return CausalConv(inputs, outputs, Kernel(3, 1), stride=Kernel(2, 1))


class SpatialUpsample2x(nn.Module):
    """Each pixel becomes a square of four; at the start four alike (Aitken 2017, arXiv 1707.02937),
    so no grid shows."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.spread = nn.Linear(inputs, 4 * outputs)
        start_alike(self.spread, 4)

    def forward(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        batch, frames, high, to_fp32, _ = x_BTHWC.shape
        squares = F.silu(self.spread(x_BTHWC)).view(batch, frames, high, to_fp32, 2, 2, -1)
        return squares.transpose(3, 4).reshape(batch, frames, 2 * high, 2 * to_fp32, -1)


class TimeUpsample2x(nn.Module):
    """The way back from 1 + k frames to 1 + 2k: a frame becomes two, at the start two alike, but a
    clip's first stays one."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.spread = nn.Linear(inputs, 2 * outputs)
        start_alike(self.spread, 2)

    def forward(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        pairs = F.silu(self.spread(x_BTHWC)).unflatten(-1, (2, -1)).movedim(-2, 2).flatten(1, 2)
        return pairs[:, 1:] if passage.begins(self) else pairs


@torch.no_grad()
def start_alike(spread: nn.Linear, copies: int) -> None:
    start(spread, gain=2**0.5)  # the activation after it leaves about a third of the square
    one = spread.weight[: len(spread.weight) // copies]
    spread.weight.copy_(torch.cat([one] * copies))


# ----------------------------------------------------------------------------------------------------------- attention


class Attention(nn.Module):
    """What all kinds share: queries and keys of unit size, positions by rotation, a part that
    starts as nothing, and after it a feed-forward part."""

    def __init__(self, dim: int, heads: int, head_dim: int, condition: int | None = None):
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.norm = PlaceNorm(dim, condition)
        self.to_query_key_value = linear(dim, 3 * heads * head_dim)
        self.query_norm, self.key_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        self.out = zero_init_(linear(heads * head_dim, dim))
        self.feed = FeedForward(dim)

    def forward(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        x_BTHWC = x_BTHWC + self.seen(self.norm(x_BTHWC, passage), passage)
        return x_BTHWC + self.feed(as_its_weights(x_BTHWC, self.feed.norm))

    def seen(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        raise NotImplementedError

    def query_key_value(self, places_PNC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys in the precision of the weights, in which they are to be turned; values
        as they come."""
        q, k, v = split_heads(self.to_query_key_value(places_PNC), 3, self.heads)
        q, k = as_its_weights(q, self.query_norm), as_its_weights(k, self.key_norm)
        return self.query_norm(q), self.key_norm(k), v


def as_its_weights(x: Tensor, norm: nn.RMSNorm) -> Tensor:
    """Autocast hands on half precision, of which torch's RMS norm makes no fused thing with weights
    in full, and warns."""
    return x.to(norm.weight.dtype)


class SpaceAttention(Attention):
    """Every place of a frame looks at every place of the same frame."""

    def seen(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        q, k, v = self.query_key_value(x_BTHWC.flatten(0, 1).flatten(1, 2))
        rope = rope_cache(grid_positions(x_BTHWC.shape[2:4]).to(q), self.head_dim)
        return self.out(joined(self.attend(rope(q).to(v), rope(k).to(v), v))).view(x_BTHWC.shape)

    def attend(self, q_PHND: Tensor, k_PHND: Tensor, v_PHND: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q_PHND, k_PHND, v_PHND)


class LinearSpaceAttention(SpaceAttention):
    """The same at a cost that grows with the places and not with their square, for large frames and
    narrow heads.

    exp(s) is replaced by 1 + s + s^2 / 2, which is never below 1/2 and is a product of features of
    the query and of the key (Arora 2024, arXiv 2402.18668), so that keys and values are summed once
    for all queries.
    """

    def attend(self, q_PHND: Tensor, k_PHND: Tensor, v_PHND: Tensor) -> Tensor:
        with full_precision(q_PHND.device.type):
            q, k = taylor_features(to_fp32(q_PHND)), taylor_features(to_fp32(k_PHND))
            weighed = q @ (k.mT @ to_fp32(v_PHND))
            weights = q @ k.sum(dim=2).unsqueeze(-1)
        return (weighed / weights).to(v_PHND.dtype)


def taylor_features(x: Tensor) -> Tensor:
    """(..., D) -> (..., 1 + D + D^2), whose inner products are 1 + s + s^2 / 2 with s = x . y /
    sqrt(D)."""
    scaled = x * x.shape[-1] ** -0.25
    squares = (scaled.unsqueeze(-1) * scaled.unsqueeze(-2)).flatten(-2) * 0.5**0.5
    return torch.cat([torch.ones_like(x[..., :1]), scaled, squares], dim=-1)


class TimeAttention(Attention):
    """Every pixel looks at itself in the `window` newest frames, its own among them.

    The window is what keeps a clip of any length within bounds; it holds for whole clips too, so
    that pieces agree.
    """

    def __init__(
        self, dim: int, heads: int, head_dim: int, window: int, condition: int | None = None
    ):
        super().__init__(dim, heads, head_dim, condition)
        self.window = window

    def seen(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        pixels_BHWTC = x_BTHWC.movedim(1, 3)
        q, k, v = self.query_key_value(pixels_BHWTC.flatten(0, 2))
        k, v = self.with_past(k, v, passage)
        new, known = q.shape[2], k.shape[2]
        # Counted from the oldest that is still seen and not from the clip's beginning: only
        # differences matter, and the angles of an hour's frames would not be exact.
        places = torch.arange(known, device=x_BTHWC.device)
        lag = places[known - new :, None] - places
        turned_q, turned_k = (
            rope_cache(some[:, None].to(q), self.head_dim)
            for some in (places[known - new :], places)
        )
        near = (lag >= 0) & (lag < self.window)
        seen = F.scaled_dot_product_attention(
            turned_q(q).to(v), turned_k(k).to(v), v, attn_mask=near
        )
        return self.out(joined(seen)).view(pixels_BHWTC.shape).movedim(3, 1)

    def with_past(
        self, k_PHTD: Tensor, v_PHTD: Tensor, passage: StreamingState
    ) -> tuple[Tensor, Tensor]:
        both = torch.stack([k_PHTD, v_PHTD.to(k_PHTD)])
        past = passage.recall(self)
        if past is not None:
            both = torch.cat([past, both], dim=3)
        passage.keep(self, both[..., max(0, both.shape[3] - self.window + 1) :, :])
        keys, values = both
        return keys, values.to(v_PHTD)


# ---------------------------------------------------------------------------------------------------------- recurrence


class GateLoop(nn.Module):
    """A recurrence over time whose decay is read off the frame itself (Katsch 2023, arXiv
    2311.01927).

    state = a state + (1 - a) value, with a in (0, 1) for each pixel and channel, and the first
    value as the first state: a mean of what was, and so of its size, however long the clip.
    Channels start with memories of 2 to 50 frames.
    """

    def __init__(self, dim: int, condition: int | None = None):
        super().__init__()
        self.norm = PlaceNorm(dim, condition)
        self.to_value_decay_gate = linear(dim, 3 * dim)
        self.patience = nn.Parameter(torch.linspace(0.0, 4.0, dim))
        self.out = zero_init_(linear(dim, dim))

    def forward(self, x_BTHWC: Tensor, passage: StreamingState) -> Tensor:
        value, decay, gate = self.to_value_decay_gate(self.norm(x_BTHWC, passage)).chunk(3, dim=-1)
        with full_precision(x_BTHWC.device.type):
            value, patience = to_fp32(value), to_fp32(decay) + to_fp32(self.patience)
            before = passage.recall(self)
            before = value[:, 0] if before is None else before
            state = decaying_sum(F.logsigmoid(patience), torch.sigmoid(-patience) * value, before)
        passage.keep(self, state[:, -1])
        return x_BTHWC + self.out((F.silu(gate) * state).to(x_BTHWC.dtype))


def decaying_sum(log_decay_BT: Tensor, new_BT: Tensor, before_B: Tensor) -> Tensor:
    """state[t] = exp(log_decay[t]) state[t - 1] + new[t] for all t, (B, T, ...); `before` is the
    state before the first.

    By doubling (Hillis & Steele 1986, doi.org/10.1145/7902.7903): after n rounds a state holds the
    2^n newest frames, so log2 T rounds do. Decays are multiplied as sums of logarithms, all 0 or
    less: nothing is divided and nothing overflows.
    """
    reach, frames = 1, new_BT.shape[1]
    log, state = log_decay_BT, new_BT
    while reach < frames:
        state = state + log.exp() * later(state, reach)
        log = log + later(log, reach)
        reach *= 2
    return state + log.exp() * before_B.unsqueeze(1)


def later(frames_BT: Tensor, by: int) -> Tensor:
    """Each frame `by` places later, zeros before."""
    return F.pad(frames_BT[:, :-by], (0, 0) * (frames_BT.ndim - 2) + (by, 0))
