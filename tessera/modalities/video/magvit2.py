"""MAGVIT-v2: clips as a small grid of symbols in time and space, and back (Yu et al. 2023, arXiv
2310.05737).

The first frame stands alone, and then each symbol covers `time_factor` frames and a square of
`stride` pixels. No frame looks ahead, so a picture is a clip of one frame, with the codes it would
have as any clip's first, and clips of any length pass in pieces (`encode_chunks`, `decode_chunks`).
Clips are (B, C, T, H, W) in [-1, 1]; codes are (B, t, h, w) with T = 1 + time_factor * (t - 1) and
H = stride * h; residual quantizers add a last dimension of levels.

The network is a list of layers by name, in the order of the encoder; the decoder has them mirrored:

    residual                looks one pixel around and two frames back; consecutive_residual:3 is three of them
    compress_space          halves both sides and doubles the width, up to `max_channels`; compress_space:96 makes it 96
    compress_time           halves the frames after the first, and widens likewise
    attend_space            every place of a frame looks at every other; linear_attend_space: at a lower cost, for large frames
    attend_time             every place looks at itself in the newest `attend_time_window` frames
    gateloop_time           a recurrence over time: remembers further back than any window, at a cost that does not grow
    cond_...                any of these but the compressions and consecutive_residual, conditioned on a vector
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tessera.modalities.image.vqgan import Reconstruction
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
    spatial_downsample_2x,
    time_downsample_2x,
)
from tessera.nn.precision import to_fp32
from tessera.nn.quantize import FSQConfig, LFQConfig, Quantizer, ResidualConfig, VQConfig

Kind = Literal[
    "residual",
    "consecutive_residual",
    "compress_space",
    "compress_time",
    "attend_space",
    "linear_attend_space",
    "attend_time",
    "gateloop_time",
]

WRITTEN = re.compile(r"(cond_)?([a-z_]+)(?::(\d+))?")
"""A layer as it is written: `cond_` or not, its name, a number or none."""


@dataclass(frozen=True)
class Layer:
    """A layer of the encoder, and its mirror image in the decoder."""

    kind: Kind
    inputs: int
    outputs: int
    """Channels that leave it; other than `inputs` only where it compresses."""
    repeats: int = 1
    conditioned: bool = False


@dataclass(frozen=True, kw_only=True)
class VideoTokenizerConfig:
    channels: int = 3
    """Colour channels of the clips."""
    dim: int = 64
    """Width at full resolution; it doubles with each compression, up to `max_channels`."""
    max_channels: int = 512
    layers: tuple[str, ...] = (
        "residual",
        "compress_space",
        "consecutive_residual:2",
        "compress_space",
        "consecutive_residual:2",
        "compress_space",
        "consecutive_residual:2",
        "attend_space",
        "compress_time",
        "consecutive_residual:2",
        "compress_time",
        "consecutive_residual:2",
        "attend_time",
    )
    """The encoder's layers, in order; the decoder mirrors them. The top of
    modalities/video/magvit2.py tells what there is."""
    quantizer: FSQConfig | LFQConfig | VQConfig | ResidualConfig = field(default_factory=LFQConfig)
    separate_first_frame: bool = False
    """The first frame, and so every picture, has the first and the last convolution to itself."""
    input_kernel: int = 7
    """Side of the first convolution, in pixels and in frames."""
    output_kernel: int = 3
    """Side of the last one."""
    heads: int = 8
    """Of attention."""
    head_dim: int = 32
    linear_heads: int = 16
    """Of linear attention, whose cost grows with the square of its heads' width: many and
    narrow."""
    linear_head_dim: int = 8
    attend_time_window: int = 16
    """Frames that attend_time looks at, counted where it stands: the present one and those before
    it."""
    cond_dim: int | None = None
    """Width of the vector that the cond_ layers are conditioned on."""

    def __post_init__(self) -> None:
        for name in ("channels", "dim", "widest", "heads", "linear_heads", "attend_time_window"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"There is no clip tokenizer with {name} of {getattr(self, name)}: use 1 or more."
                )
        for name in ("input_kernel", "output_kernel"):
            if (side := getattr(self, name)) < 1 or side % 2 == 0:
                raise ValueError(
                    f"A convolution looks equally far to all sides, so {name} is odd, not {side}: use 3, say."
                )
        for name in ("head_width", "linear_head_width"):
            if (width := getattr(self, name)) < 4 or width % 2:
                raise ValueError(
                    f"A head turns pairs of its channels by their place in two directions, so {name} is even and 4 or more, "
                    f"not {width}: use {max(4, width // 2 * 2)}."
                )
        conditioned = [text for text, layer in zip(self.layers, self.plan) if layer.conditioned]
        if conditioned and (self.cond_dim is None or self.cond_dim < 1):
            raise ValueError(
                f"The layer {conditioned[0]!r} is conditioned on a vector, but condition_width is {self.cond_dim}: give "
                f"the vector's width, or write {conditioned[0].removeprefix('cond_')!r}."
            )
        if self.cond_dim is not None and not conditioned:
            raise ValueError(
                f"condition_width is {self.cond_dim}, but no layer is conditioned, so the vector would be ignored: "
                "write 'cond_residual' for 'residual', say, or leave condition_width out."
            )

    @property
    def plan(self) -> list[Layer]:
        """The layers as they are meant; what cannot be meant is refused."""
        plan: list[Layer] = []
        for text in self.layers:
            plan.append(planned(text, plan[-1].outputs if plan else self.dim, self.max_channels))
        return plan

    @property
    def deepest(self) -> int:
        """Channels of the latent."""
        return self.plan[-1].outputs if self.layers else self.dim

    @property
    def stride(self) -> int:
        """Pixels along a side of the square that one symbol stands for."""
        return 2 ** sum(layer.kind == "compress_space" for layer in self.plan)

    @property
    def time_factor(self) -> int:
        """Frames that one symbol stands for, after the first."""
        return 2 ** sum(layer.kind == "compress_time" for layer in self.plan)

    def validate_data(self, data: Any) -> None:
        """Refuses data whose clips this network cannot take; pictures are clips of one frame."""
        if self.channels != 3:
            raise ValueError(
                f"Clips are read in three colours, but this tokenizer has channels of {self.channels}: use 3."
            )
        if self.cond_dim is not None:
            raise ValueError(
                "Layers that are conditioned on a vector are for whoever has one to give, from Python: a folder of clips has "
                "none. Leave cond_ and condition_width out."
            )
        self.refuse_size(data.size, data.size)
        self.refuse_frames(getattr(data, "frames", 1))

    def grid(self, data: Any) -> tuple[int, ...]:
        """The sides of the grid of symbols that such clips become."""
        frames = getattr(data, "frames", 1)
        return (
            1 + (frames - 1) // self.time_factor,
            data.size // self.stride,
            data.size // self.stride,
        )

    def refuse_size(self, high: int, to_fp32: int) -> None:
        """A letter if frames of this size do not fit the grid."""
        for side in (high, to_fp32):
            if side < 1 or side % self.stride:
                below = side // self.stride * self.stride
                raise ValueError(
                    f"Frames of {high} x {to_fp32} do not fit: one symbol stands for a square of {self.stride} pixels, so both "
                    f"sides must be multiples of {self.stride}. Instead of {side}, use "
                    f"{f'{below} or ' if below else ''}{below + self.stride}."
                )

    def refuse_frames(self, frames: int) -> None:
        """A letter if so many frames do not fill whole symbols."""
        factor = self.time_factor
        if frames < 1 or (frames - 1) % factor:
            below = 1 + max(0, frames - 1) // factor * factor
            above = below + factor
            raise ValueError(
                f"A clip of {frames} frames does not fit: after the first frame, which stands alone, this tokenizer takes "
                f"{factor} at a time, so their number must be 1 more than a multiple of {factor}. Use {below} or {above}: "
                f"{above} frames at time factor {factor} give {1 + (above - 1) // factor} latent frames."
            )

    def build(self) -> VideoTokenizer:
        return VideoTokenizer(self)


def planned(text: str, inputs: int, max_channels: int) -> Layer:
    """The layer that a name means, for so many channels; a letter if it means none."""
    found = WRITTEN.fullmatch(text)
    name = found[2] if found else text
    if found is None or name not in get_args(Kind):
        near = difflib.get_close_matches(
            text.partition(":")[0].removeprefix("cond_"), get_args(Kind), n=1, cutoff=0.5
        )
        meant = f": did you mean {near[0]!r}?" if near else "."
        raise ValueError(
            f"There is no layer {text!r}{meant} There are {', '.join(get_args(Kind))}; some take a number, as in "
            "consecutive_residual:2 or compress_space:96, and some a condition, as in cond_residual."
        )
    kind: Kind = name
    conditioned, number = found[1] is not None, int(found[3]) if found[3] else None
    compresses = kind in ("compress_space", "compress_time")
    if conditioned and (compresses or kind == "consecutive_residual"):
        raise ValueError(
            f"The layer {text!r} has no conditioned form: write {text.removeprefix('cond_')!r}."
        )
    if number is not None and not compresses and kind != "consecutive_residual":
        raise ValueError(f"The layer {text!r} takes no number: write {text.partition(':')[0]!r}.")
    if number == 0 or (number is None and kind == "consecutive_residual"):
        raise ValueError(
            f"The layer {text!r} needs a number of 1 or more after its name, such as {kind}:2."
        )
    if compresses:
        return Layer(kind, inputs, number or min(2 * inputs, max_channels))
    return Layer(kind, inputs, inputs, repeats=number or 1, conditioned=conditioned)


class VideoTokenizer(nn.Module):
    def __init__(self, config: VideoTokenizerConfig):
        super().__init__()
        self.config = config
        self.encoder = encoder(config)
        self.quantizer: Quantizer = config.quantizer.build(config.deepest)
        self.decoder = decoder(config)

    @property
    def vocab_size(self) -> int:
        return self.quantizer.vocab_size

    @property
    def levels(self) -> tuple[int, ...]:
        """The last dimension of codes, where the quantizer writes several symbols for one place."""
        return (self.quantizer.levels,) if self.quantizer.levels > 1 else ()

    @property
    def last_layer(self) -> nn.Parameter:
        """Where the strengths of two losses are compared (Esser 2021, arXiv 2012.09841, eq. 7)."""
        return self.decoder[-1].weight  # type: ignore[return-value]

    def forward(
        self,
        clip: Tensor,
        condition: Tensor | None = None,
        *,
        num_quantizers_B: Tensor | None = None,
    ) -> Reconstruction:
        quantized = self.quantizer(self.latent(clip, condition), num_quantizers_B=num_quantizers_B)
        return Reconstruction(
            self.clip(quantized.latent, condition), quantized.codes, quantized.penalties
        )

    def encode(self, clip: Tensor, condition: Tensor | None = None) -> Tensor:
        """Clips (B, C, T, H, W), or pictures (B, C, H, W), to symbols (B, t, h, w)."""
        return self.quantizer(self.latent(clip, condition)).codes

    def decode(self, codes: Tensor, condition: Tensor | None = None) -> Tensor:
        """Symbols (B, t, h, w) to clips (B, C, T, H, W)."""
        self.refuse_codes(codes)
        return self.clip(self.quantizer.decode(codes), condition)

    @torch.no_grad()
    def tokenize(self, clip: Tensor, condition: Tensor | None = None) -> Tensor:
        """`encode`, by the name that the research code gave it, and without gradients."""
        return self.encode(clip, condition)

    def decode_from_code_indices(
        self,
        codes: Tensor,
        condition: Tensor | None = None,
        *,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """`decode`, which also takes symbols in a row, (B, t*h*w), as a language model writes them.

        `shape` is their grid, (t, h, w) or (h, w); it may be left out only where there is but one
        with square frames.
        """
        if codes.ndim == 2 + len(self.levels):
            codes = codes.unflatten(1, grid_of(codes.shape[1], shape))
        return self.decode(codes, condition)

    # ---- clips of any length

    @torch.no_grad()
    def encode_chunks(
        self, clips: Iterable[Tensor], condition: Tensor | None = None
    ) -> Iterator[Tensor]:
        """A clip in pieces (B, C, t_i, H, W) of any lengths, to the codes of the whole in pieces,
        as soon as each is certain.

        Only what the layers look back on stays in memory. Whatever the pieces are, all frames
        together must fill whole symbols.
        """
        passage, frames, like = StreamingState(self.checked(condition), memory={}), 0, None
        for piece in clips:
            new_BTHWC = self.frames(piece)
            like = refuse_mixture(new_BTHWC.shape, like)
            frames += new_BTHWC.shape[1]
            latent = self.encoder(new_BTHWC, passage)
            if latent.shape[1]:
                yield self.quantizer(latent).codes
        self.config.refuse_frames(frames)

    @torch.no_grad()
    def decode_chunks(
        self, codes: Iterable[Tensor], condition: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Codes in pieces (B, t_i, h, w) of any lengths, to the clip in pieces (B, C, T_i, H,
        W)."""
        passage, like = StreamingState(self.checked(condition), memory={}), None
        for piece in codes:
            self.refuse_codes(piece)
            like = refuse_mixture(piece.shape, like)
            yield painted(self.decoder(self.quantizer.decode(piece), passage))

    # ---- halves of the way

    def latent(self, clip: Tensor, condition: Tensor | None = None) -> Tensor:
        """(B, C, T, H, W) -> (B, t, h, w, D), before quantization."""
        frames_BTHWC = self.frames(clip)
        self.config.refuse_frames(frames_BTHWC.shape[1])
        return self.encoder(frames_BTHWC, StreamingState(self.checked(condition)))

    def batch_stats(self, clip: Tensor, *, num_quantizers_B: Tensor | None = None) -> Tensor:
        """Their share of what the quantizer expects; see `Quantizer.batch_stats`."""
        return self.quantizer.batch_stats(self.latent(clip), num_quantizers_B=num_quantizers_B)

    def clip(self, latent: Tensor, condition: Tensor | None = None) -> Tensor:
        """(B, t, h, w, D) -> (B, C, T, H, W)."""
        return painted(self.decoder(latent, StreamingState(self.checked(condition))))

    def frames(self, clip: Tensor) -> Tensor:
        """Clips (B, C, T, H, W), or pictures as clips of one frame, laid out as the layers take
        them: (B, T, H, W, C)."""
        if (
            clip.ndim not in (4, 5)
            or clip.shape[1] != self.config.channels
            or not clip.is_floating_point()
        ):
            raise ValueError(
                f"A tensor of shape {tuple(clip.shape)} and type {clip.dtype} is no batch of clips: give floats in [-1, 1] of "
                f"shape (batch, {self.config.channels}, frames, height, width), without the frames for pictures."
            )
        self.config.refuse_size(clip.shape[-2], clip.shape[-1])
        return (clip.unsqueeze(2) if clip.ndim == 4 else clip).movedim(1, -1).contiguous()

    # ---- refusals

    def refuse_codes(self, codes: Tensor) -> None:
        if (
            codes.ndim != 4 + len(self.levels)
            or codes.shape[4:] != self.levels
            or not all(codes.shape)
        ):
            axes = ", ".join(["batch", "frames", "height", "width", *map(str, self.levels)])
            raise ValueError(
                f"Codes of shape {tuple(codes.shape)} are not on a grid of time and space: give ({axes}), or codes in a row to "
                "decode_from_code_indices together with their shape."
            )

    def checked(self, condition: Tensor | None) -> Tensor | None:
        expected = self.config.cond_dim
        if expected is None and condition is not None:
            raise ValueError(
                "A condition was given, but no layer of this tokenizer looks at one: leave it out."
            )
        if expected is not None and (
            condition is None or condition.ndim != 2 or condition.shape[1] != expected
        ):
            met = (
                "none was given"
                if condition is None
                else f"one of shape {tuple(condition.shape)} was given"
            )
            raise ValueError(
                f"This tokenizer is conditioned on a vector of shape (batch, {expected}), but {met}."
            )
        return condition


def refuse_mixture(shape: torch.Size, like: torch.Size | None) -> torch.Size:
    """Pieces of one clip differ in nothing but their length, the second dimension."""
    if like is not None and (shape[:1], shape[2:]) != (like[:1], like[2:]):
        raise ValueError(
            f"A piece of (batch, frames, height, width, ...) = {tuple(shape)} came after one of {tuple(like)}: pieces of one "
            "clip differ in their number of frames only."
        )
    return shape


def painted(frames_BTHWC: Tensor) -> Tensor:
    return to_fp32(frames_BTHWC.movedim(-1, 1).contiguous())


def grid_of(count: int, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """The grid (t, h, w) of so many symbols in a row."""
    if shape is not None:
        to_fp32 = (count // max(1, math.prod(shape)), *shape) if len(shape) == 2 else shape
        if len(to_fp32) != 3 or math.prod(to_fp32) != count:
            raise ValueError(
                f"{count} codes in a row do not fill a grid of {shape}: give (frames, height, width) of the codes."
            )
        return to_fp32
    squares = [
        (count // side**2, side, side)
        for side in range(1, math.isqrt(count) + 1)
        if count % side**2 == 0
    ]
    if len(squares) != 1:
        some = " or ".join(str(grid) for grid in squares[::-1][:3])
        raise ValueError(
            f"{count} codes in a row may be a grid of {some}: say which, as shape=(frames, height, width)."
        )
    return squares[0]


# ---------------------------------------------------------------------------------------------------------- the layers


def encoder(config: VideoTokenizerConfig) -> Chain:
    layers = [made for layer in config.plan for made in downward(layer, config)]
    return Chain(
        outermost(config, config.channels, config.dim, config.input_kernel),
        *layers,
        PlaceNorm(config.deepest),
    )


def decoder(config: VideoTokenizerConfig) -> Chain:
    layers = [made for layer in reversed(config.plan) for made in upward(layer, config)]
    return Chain(*layers, outermost(config, config.dim, config.channels, config.output_kernel))


def outermost(config: VideoTokenizerConfig, inputs: int, outputs: int, side: int) -> nn.Module:
    convolution = SeparateFirstFrameConv if config.separate_first_frame else CausalConv
    return convolution(inputs, outputs, Kernel(side, side))


def downward(layer: Layer, config: VideoTokenizerConfig) -> list[nn.Module]:
    match layer.kind:
        case "compress_space":
            return [spatial_downsample_2x(layer.inputs, layer.outputs)]
        case "compress_time":
            return [time_downsample_2x(layer.inputs, layer.outputs)]
        case _:
            return [level(layer, config) for _ in range(layer.repeats)]


def upward(layer: Layer, config: VideoTokenizerConfig) -> list[nn.Module]:
    match layer.kind:
        case "compress_space":
            return [SpatialUpsample2x(layer.outputs, layer.inputs)]
        case "compress_time":
            return [TimeUpsample2x(layer.outputs, layer.inputs)]
        case _:
            return [level(layer, config) for _ in range(layer.repeats)]


def level(layer: Layer, config: VideoTokenizerConfig) -> nn.Module:
    """A layer that keeps the shape, the same in both directions."""
    width, condition = layer.inputs, config.cond_dim if layer.conditioned else None
    match layer.kind:
        case "attend_space":
            return SpaceAttention(width, config.heads, config.head_dim, condition)
        case "linear_attend_space":
            return LinearSpaceAttention(
                width, config.linear_heads, config.linear_head_dim, condition
            )
        case "attend_time":
            return TimeAttention(
                width, config.heads, config.head_dim, config.attend_time_window, condition
            )
        case "gateloop_time":
            return GateLoop(width, condition)
        case _:
            return Residual(width, condition)
