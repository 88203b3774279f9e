"""MAGVIT-v2: a causal video tokenizer (Yu et al. 2023, arXiv 2310.05737).

The first frame is encoded separately; after it, each code covers `time_factor` frames and a square
of `stride` pixels. All layers are causal in time, so an image is a video of one frame and has the
codes that it would have as the first frame of any video, and videos of any length can be processed
in chunks (`encode_chunks`, `decode_chunks`). Videos are (B, C, T, H, W) in [-1, 1]; codes are
(B, t, h, w) with T = 1 + time_factor * (t - 1) and H = stride * h; residual quantizers add a last
dimension, one code per quantizer.

The network is a list of layer names in the order of the encoder; the decoder mirrors them:

    residual             3D convolutions over adjacent pixels and the two previous frames;
                         consecutive_residual:3 is three of them
    factorized_residual  a convolution over adjacent pixels, then one over the two previous frames,
                         at less than half of the cost
    compress_space       halves both sides and doubles the channels, up to `max_channels`;
                         compress_space:96 sets the channels to 96
    compress_time        halves the frames after the first, with channels as above
    attend_space         self-attention over all positions of a frame
    linear_attend_space  the same with linear attention, at a lower cost for large frames
    attend_time          self-attention of each position over the last `attend_time_window` frames
    gateloop_time        a recurrence over time, with a longer memory than any window at constant
                         cost
    cond_...             any of these except the compressions and consecutive_residual,
                         conditioned on a vector
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast, get_args

import torch
from torch import Tensor, nn

from tessera.nn.causal_conv import (
    CausalConv,
    ChannelLayerNorm,
    FactorizedResidual,
    GateLoop,
    Kernel,
    LinearSpaceAttention,
    OverlappingUpsample2x,
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
)
from tessera.nn.precision import to_fp32
from tessera.nn.quantize import LFQConfig, Quantizer, QuantizerConfig
from tessera.nn.reconstruction import Reconstruction

if TYPE_CHECKING:
    from tessera.modalities.image.dataset import ImageDataConfig
    from tessera.modalities.video.dataset import VideoDataConfig

LayerKind = Literal[
    "residual",
    "consecutive_residual",
    "factorized_residual",
    "compress_space",
    "compress_time",
    "attend_space",
    "linear_attend_space",
    "attend_time",
    "gateloop_time",
]

MAX_LATENT_FRAMES = 8
"""The number of latent frames that are decoded at once without gradients."""

LAYER_PATTERN = re.compile(r"(cond_)?([a-z_]+)(?::(\d+))?")
"""A layer name: an optional `cond_`, the kind and an optional number."""


@dataclass(frozen=True)
class LayerSpec:
    """A layer of the encoder and its counterpart in the decoder."""

    kind: LayerKind
    inputs: int
    """Input channels in the encoder."""
    outputs: int
    """Output channels in the encoder; different from `inputs` only for compressions."""
    repeats: int = 1
    conditioned: bool = False


@dataclass(frozen=True, kw_only=True)
class VideoTokenizerConfig:
    channels: int = 3
    """Colour channels of the videos."""
    dim: int = 64
    """Channels at full resolution; they double with each compression, up to `max_channels`."""
    max_channels: int = 512
    """The maximum number of channels."""
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
    """The layers of the encoder in order, mirrored in the decoder; all layers are listed at the top
    of modalities/video/magvit2.py. From Python, `("compress_space", 96)` is the same as
    `"compress_space:96"`."""
    decoder_layers: tuple[str, ...] | None = None
    """The layers of the decoder, in the order of the encoder and with the same compressions; None
    for the same layers."""
    overlapping_upsample: bool = False
    """Whether the decoder expands pixels to squares that overlap, which costs more and leaves no
    blocks."""
    quantizer: QuantizerConfig = field(default_factory=LFQConfig)
    """The quantizer."""
    separate_first_frame: bool = False
    """Whether the first frame, and so every image, has separate first and last convolutions."""
    input_kernel: int = 7
    """The size of the first convolution, in pixels and in frames."""
    output_kernel: int = 3
    """The size of the last convolution, in pixels and in frames."""
    heads: int = 8
    """The number of attention heads."""
    head_dim: int = 32
    """Channels of each attention head."""
    linear_heads: int = 16
    """The number of heads of linear attention, whose cost grows with the square of the channels of
    a head: use many small ones."""
    linear_head_dim: int = 8
    """Channels of each head of linear attention."""
    attend_time_window: int = 16
    """The number of frames that attend_time attends to, at its own frame rate: the current one and
    those before it."""
    cond_dim: int | None = None
    """Channels of the vector that the cond_ layers are conditioned on."""

    def __post_init__(self) -> None:
        for name in ("layers", "decoder_layers"):
            if (layers := getattr(self, name)) is not None:
                named = tuple(":".join(map(str, join_layer(layer))) for layer in layers)
                object.__setattr__(self, name, named)
        if compressions(self.decoder_specs) != compressions(self.layer_specs):
            raise ValueError(
                "decoder_layers must have the compressions of layers, in the same order and with "
                f"the same channels: got {', '.join(self.decoder_layers or ())}, but layers is "
                f"{', '.join(self.layers)}."
            )
        for name in (
            "channels",
            "dim",
            "max_channels",
            "heads",
            "linear_heads",
            "attend_time_window",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("input_kernel", "output_kernel"):
            if (side := getattr(self, name)) < 1 or side % 2 == 0:
                raise ValueError(f"{name} must be odd and at least 1, got {side}: use 3, say.")
        for name in ("head_dim", "linear_head_dim"):
            if (dim := getattr(self, name)) < 4 or dim % 2:
                raise ValueError(
                    f"{name} must be even and at least 4, since pairs of channels are rotated by "
                    f"the position in two directions, got {dim}: use {max(4, dim // 2 * 2)}."
                )
        conditioned = [
            text
            for layers in (self.layers, self.decoder_layers or ())
            for text, spec in zip(layers, self.parse_layers(layers))
            if spec.conditioned
        ]
        if conditioned and (self.cond_dim is None or self.cond_dim < 1):
            raise ValueError(
                f"The layer {conditioned[0]!r} is conditioned on a vector, but cond_dim is "
                f"{self.cond_dim}: set cond_dim to the size of the vector, or use "
                f"{conditioned[0].removeprefix('cond_')!r}."
            )
        if self.cond_dim is not None and not conditioned:
            raise ValueError(
                f"cond_dim is {self.cond_dim}, but no layer is conditioned, so the vector would "
                "have no effect: use layers such as 'cond_residual', or leave cond_dim out."
            )

    @property
    def layer_specs(self) -> list[LayerSpec]:
        """The parsed layers; invalid names raise a ValueError."""
        return self.parse_layers(self.layers)

    @property
    def decoder_specs(self) -> list[LayerSpec]:
        """The parsed layers of the decoder, in the order of the encoder."""
        return self.parse_layers(
            self.layers if self.decoder_layers is None else self.decoder_layers
        )

    def parse_layers(self, layers: tuple[str, ...]) -> list[LayerSpec]:
        specs: list[LayerSpec] = []
        for text in layers:
            inputs = specs[-1].outputs if specs else self.dim
            specs.append(parse_layer(text, inputs, self.max_channels))
        return specs

    @property
    def latent_dim(self) -> int:
        """Channels of the latent."""
        return self.layer_specs[-1].outputs if self.layers else self.dim

    @property
    def stride(self) -> int:
        """The side of the square that one code covers, in pixels."""
        return 2 ** sum(spec.kind == "compress_space" for spec in self.layer_specs)

    @property
    def time_factor(self) -> int:
        """The number of frames that one code covers, after the first."""
        return 2 ** sum(spec.kind == "compress_time" for spec in self.layer_specs)

    def validate_data(self, data: ImageDataConfig | VideoDataConfig) -> None:
        """Raise a ValueError if the videos or images of a data configuration do not fit."""
        if self.channels != 3:
            raise ValueError(
                f"Videos are read with 3 colour channels, but channels is {self.channels}: use 3."
            )
        if self.cond_dim is not None:
            raise ValueError(
                "Layers that are conditioned on a vector can be used only from Python, since a "
                "folder of videos provides no vectors: leave out the cond_ layers and cond_dim."
            )
        self.validate_size(data.size, data.size)
        self.validate_frames(getattr(data, "frames", 1))

    def grid(self, data: ImageDataConfig | VideoDataConfig) -> tuple[int, ...]:
        """Return the shape of the code grid for videos of a data configuration."""
        frames = getattr(data, "frames", 1)
        return (
            1 + (frames - 1) // self.time_factor,
            data.size // self.stride,
            data.size // self.stride,
        )

    def validate_size(self, height: int, width: int) -> None:
        """Raise a ValueError unless both sides are multiples of the stride."""
        for side in (height, width):
            if side < 1 or side % self.stride:
                below = side // self.stride * self.stride
                raise ValueError(
                    f"The frames are {height} x {width}, but one code covers a square of "
                    f"{self.stride} pixels, so both sides must be multiples of {self.stride}: "
                    f"instead of {side}, use {f'{below} or ' if below else ''}"
                    f"{below + self.stride}."
                )

    def validate_frames(self, frames: int) -> None:
        """Raise a ValueError unless the number of frames is 1 plus a multiple of `time_factor`."""
        factor = self.time_factor
        if frames < 1 or (frames - 1) % factor:
            below = 1 + max(0, frames - 1) // factor * factor
            above = below + factor
            raise ValueError(
                f"The video has {frames} frames, but after the first frame one code covers "
                f"{factor} frames, so their number must be 1 more than a multiple of {factor}: use "
                f"{below} or {above}, for example {above} frames for "
                f"{1 + (above - 1) // factor} latent frames."
            )

    def build(self) -> VideoTokenizer:
        return VideoTokenizer(self)


def compressions(specs: list[LayerSpec]) -> list[LayerSpec]:
    """Return the layers that change the shape."""
    return [one for one in specs if one.kind in ("compress_space", "compress_time")]


def join_layer(layer: object) -> tuple[object, ...]:
    """Return the parts of a layer: a name, or a pair of a name and a number."""
    if isinstance(layer, (tuple, list)) and len(layer) in (1, 2):
        return tuple(layer)
    return (layer,)


def parse_layer(text: str, inputs: int, max_channels: int) -> LayerSpec:
    """Parse a layer name for the given number of input channels."""
    found = LAYER_PATTERN.fullmatch(text)
    name = found[2] if found else text
    if found is None or name not in get_args(LayerKind):
        close = difflib.get_close_matches(
            text.partition(":")[0].removeprefix("cond_"), get_args(LayerKind), n=1, cutoff=0.5
        )
        suggestion = f": did you mean {close[0]!r}?" if close else "."
        raise ValueError(
            f"There is no layer {text!r}{suggestion} The layers are "
            f"{', '.join(get_args(LayerKind))}; some take a number, as in consecutive_residual:2 "
            "or compress_space:96, and some a condition, as in cond_residual."
        )
    kind = cast(LayerKind, name)
    conditioned, number = found[1] is not None, int(found[3]) if found[3] else None
    compresses = kind in ("compress_space", "compress_time")
    if conditioned and (compresses or kind == "consecutive_residual"):
        raise ValueError(
            f"The layer {text!r} has no conditioned form: use {text.removeprefix('cond_')!r}."
        )
    repeats = kind in ("consecutive_residual", "factorized_residual")
    if number is not None and not compresses and not repeats:
        raise ValueError(f"The layer {text!r} takes no number: use {text.partition(':')[0]!r}.")
    if number == 0 or (number is None and kind == "consecutive_residual"):
        raise ValueError(
            f"The layer {text!r} needs a number of at least 1 after its name, such as {kind}:2."
        )
    if compresses:
        return LayerSpec(kind, inputs, number or min(2 * inputs, max_channels))
    return LayerSpec(kind, inputs, inputs, repeats=number or 1, conditioned=conditioned)


class VideoTokenizer(nn.Module):
    """A causal 3D autoencoder with a quantized bottleneck."""

    def __init__(self, config: VideoTokenizerConfig):
        super().__init__()
        self.config = config
        self.encoder = build_encoder(config)
        self.quantizer: Quantizer = config.quantizer.build(config.latent_dim)
        self.decoder = build_decoder(config)

    @property
    def vocab_size(self) -> int:
        """The number of different codes."""
        return self.quantizer.vocab_size

    @property
    def level_axes(self) -> tuple[int, ...]:
        """The last dimension of the codes, for quantizers with several codes per position."""
        return (self.quantizer.num_quantizers,) if self.quantizer.num_quantizers > 1 else ()

    @property
    def last_layer(self) -> nn.Parameter:
        """The weight at which the gradients of two losses are compared (Esser 2021, arXiv
        2012.09841, eq. 7)."""
        return self.decoder[-1].weight  # type: ignore[return-value]

    def forward(
        self,
        video: Tensor,
        condition: Tensor | None = None,
        *,
        num_quantizers_B: Tensor | None = None,
    ) -> Reconstruction:
        quantized = self.quantizer(
            self.encode_latent(video, condition), num_quantizers_B=num_quantizers_B
        )
        return Reconstruction(
            self.decode_latent(quantized.latent, condition), quantized.codes, quantized.penalties
        )

    def encode(self, video: Tensor, condition: Tensor | None = None) -> Tensor:
        """Encode videos (B, C, T, H, W), or images (B, C, H, W), to codes (B, t, h, w)."""
        return self.quantizer(self.encode_latent(video, condition)).codes

    def decode(self, codes: Tensor, condition: Tensor | None = None) -> Tensor:
        """Decode codes (B, t, h, w) to videos (B, C, T, H, W).

        Without gradients, long videos are decoded in chunks, so that the memory of activations does
        not grow with their length.
        """
        self.validate_codes(codes)
        if codes.shape[1] > MAX_LATENT_FRAMES and not torch.is_grad_enabled():
            chunks = codes.split(MAX_LATENT_FRAMES, dim=1)
            return torch.cat(list(self.decode_chunks(chunks, condition)), dim=2)
        return self.decode_latent(self.quantizer.decode(codes), condition)

    @torch.no_grad()
    def tokenize(self, video: Tensor, condition: Tensor | None = None) -> Tensor:
        """Call `encode` without gradients; the name is that of the research code."""
        return self.encode(video, condition)

    def decode_from_code_indices(
        self,
        codes: Tensor,
        condition: Tensor | None = None,
        *,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Call `decode`, also for flattened codes (B, t*h*w), as a language model generates them.

        `shape` is their grid, (t, h, w) or (h, w). It may be left out only if exactly one grid with
        square frames is possible.
        """
        if codes.ndim == 2 + len(self.level_axes):
            codes = codes.unflatten(1, infer_grid(codes.shape[1], shape))
        return self.decode(codes, condition)

    # ---- chunks

    @torch.no_grad()
    def encode_chunks(
        self, videos: Iterable[Tensor], condition: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Encode one video given in chunks (B, C, T_i, H, W) of any lengths.

        Yields the codes in chunks, as soon as they are determined. Only the temporal context of the
        layers is kept in memory. The total number of frames must be valid, the chunks need not be.
        """
        stream, frames, previous = self.open_stream(condition), 0, None
        for chunk in videos:
            new_BTHWC = self.to_channels_last(chunk)
            previous = validate_chunk(new_BTHWC.shape, previous)
            frames += new_BTHWC.shape[1]
            latent = self.encoder(new_BTHWC, stream)
            if latent.shape[1]:
                yield self.quantizer(latent).codes
        self.config.validate_frames(frames)

    @torch.no_grad()
    def decode_chunks(
        self, codes: Iterable[Tensor], condition: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Decode codes given in chunks (B, t_i, h, w), to the video in chunks (B, C, T_i, H, W)."""
        stream, previous = self.open_stream(condition), None
        for chunk in codes:
            self.validate_codes(chunk)
            previous = validate_chunk(chunk.shape, previous)
            yield to_channels_first(self.decoder(self.quantizer.decode(chunk), stream))

    def open_stream(self, condition: Tensor | None) -> StreamingState:
        """Return the state with which a video is processed in chunks."""
        return StreamingState(self.validate_condition(condition), memory={})

    # ---- latents

    def encode_latent(self, video: Tensor, condition: Tensor | None = None) -> Tensor:
        """Encode (B, C, T, H, W) to (B, t, h, w, D), before quantization."""
        frames_BTHWC = self.to_channels_last(video)
        self.config.validate_frames(frames_BTHWC.shape[1])
        return self.encoder(frames_BTHWC, StreamingState(self.validate_condition(condition)))

    def decode_latent(self, latent: Tensor, condition: Tensor | None = None) -> Tensor:
        """Decode (B, t, h, w, D) to (B, C, T, H, W)."""
        state = StreamingState(self.validate_condition(condition))
        return to_channels_first(self.decoder(latent, state))

    def batch_stats(self, video: Tensor, *, num_quantizers_B: Tensor | None = None) -> Tensor:
        """Return what the quantizer needs from the whole batch; see `Quantizer.batch_stats`."""
        return self.quantizer.batch_stats(
            self.encode_latent(video), num_quantizers_B=num_quantizers_B
        )

    def to_channels_last(self, video: Tensor) -> Tensor:
        """Convert videos (B, C, T, H, W), or images (B, C, H, W), to (B, T, H, W, C)."""
        if (
            video.ndim not in (4, 5)
            or video.shape[1] != self.config.channels
            or not video.is_floating_point()
        ):
            raise ValueError(
                f"The input has the shape {tuple(video.shape)} and the type {video.dtype}, but "
                "videos are floats in [-1, 1] of shape "
                f"(batch, {self.config.channels}, frames, height, width), and images the same "
                "without the frames."
            )
        self.config.validate_size(video.shape[-2], video.shape[-1])
        return (video.unsqueeze(2) if video.ndim == 4 else video).movedim(1, -1).contiguous()

    # ---- validation

    def validate_codes(self, codes: Tensor) -> None:
        """Raise a ValueError unless codes have the shape (B, t, h, w), plus `level_axes`."""
        if (
            codes.ndim != 4 + len(self.level_axes)
            or codes.shape[4:] != self.level_axes
            or not all(codes.shape)
        ):
            axes = ", ".join(["batch", "frames", "height", "width", *map(str, self.level_axes)])
            raise ValueError(
                f"The codes have the shape {tuple(codes.shape)}, but ({axes}) is expected: give "
                "this shape, or call decode_from_code_indices with flattened codes and their shape."
            )

    def validate_condition(self, condition: Tensor | None) -> Tensor | None:
        """Return the condition, or raise a ValueError if it does not fit the layers."""
        expected = self.config.cond_dim
        if expected is None and condition is not None:
            raise ValueError(
                "A condition was given, but no layer of this tokenizer is conditioned: leave it "
                "out."
            )
        if expected is not None and (
            condition is None or condition.ndim != 2 or condition.shape[1] != expected
        ):
            found = "None" if condition is None else f"the shape {tuple(condition.shape)}"
            raise ValueError(
                f"This tokenizer needs a condition of shape (batch, {expected}), got {found}."
            )
        return condition


def validate_chunk(shape: torch.Size, previous: torch.Size | None) -> torch.Size:
    """Return the shape, or raise a ValueError if it differs in more than the second dimension."""
    if previous is not None and (shape[:1], shape[2:]) != (previous[:1], previous[2:]):
        raise ValueError(
            f"A chunk of (batch, frames, height, width, ...) = {tuple(shape)} follows one of "
            f"{tuple(previous)}, but the chunks of a video may differ only in their number of "
            "frames."
        )
    return shape


def to_channels_first(frames_BTHWC: Tensor) -> Tensor:
    """Convert decoded frames to float32 of shape (B, C, T, H, W)."""
    return to_fp32(frames_BTHWC.movedim(-1, 1).contiguous())


def infer_grid(count: int, shape: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return the grid (t, h, w) of `count` flattened codes."""
    if shape is not None:
        grid = (count // max(1, math.prod(shape)), *shape) if len(shape) == 2 else shape
        if len(grid) != 3 or math.prod(grid) != count:
            raise ValueError(
                f"{count} flattened codes do not fill a grid of {shape}: give "
                "(frames, height, width) of the codes."
            )
        return grid
    squares = [
        (count // side**2, side, side)
        for side in range(1, math.isqrt(count) + 1)
        if count % side**2 == 0
    ]
    if len(squares) != 1:
        candidates = " or ".join(str(grid) for grid in squares[::-1][:3])
        raise ValueError(
            f"The grid of {count} flattened codes is ambiguous, it may be {candidates}: give "
            "shape=(frames, height, width)."
        )
    return squares[0]


# ---- layers


def build_encoder(config: VideoTokenizerConfig) -> StreamingSequential:
    """Build the encoder: (B, T, H, W, C) to (B, t, h, w, D)."""
    layers = [layer for spec in config.layer_specs for layer in build_encoder_layers(spec, config)]
    return StreamingSequential(
        build_outer_conv(config, config.channels, config.dim, config.input_kernel),
        *layers,
        ChannelLayerNorm(config.latent_dim),
    )


def build_decoder(config: VideoTokenizerConfig) -> StreamingSequential:
    """Build the decoder: (B, t, h, w, D) to (B, T, H, W, C)."""
    layers = [
        layer
        for spec in reversed(config.decoder_specs)
        for layer in build_decoder_layers(spec, config)
    ]
    return StreamingSequential(
        *layers, build_outer_conv(config, config.dim, config.channels, config.output_kernel)
    )


def build_outer_conv(
    config: VideoTokenizerConfig, inputs: int, outputs: int, side: int
) -> nn.Module:
    """Build the first or the last convolution."""
    convolution = SeparateFirstFrameConv if config.separate_first_frame else CausalConv
    return convolution(inputs, outputs, Kernel(side, side))


def build_encoder_layers(spec: LayerSpec, config: VideoTokenizerConfig) -> list[nn.Module]:
    """Build the modules of one layer of the encoder."""
    match spec.kind:
        case "compress_space":
            return [SpatialDownsample2x(spec.inputs, spec.outputs)]
        case "compress_time":
            return [TimeDownsample2x(spec.inputs, spec.outputs)]
        case _:
            return [build_layer(spec, config) for _ in range(spec.repeats)]


def build_decoder_layers(spec: LayerSpec, config: VideoTokenizerConfig) -> list[nn.Module]:
    """Build the modules of one layer of the decoder."""
    match spec.kind:
        case "compress_space":
            upsample = OverlappingUpsample2x if config.overlapping_upsample else SpatialUpsample2x
            return [upsample(spec.outputs, spec.inputs)]
        case "compress_time":
            return [TimeUpsample2x(spec.outputs, spec.inputs)]
        case _:
            return [build_layer(spec, config) for _ in range(spec.repeats)]


def build_layer(spec: LayerSpec, config: VideoTokenizerConfig) -> nn.Module:
    """Build a layer that preserves the shape, which is the same in encoder and decoder."""
    dim, cond_dim = spec.inputs, config.cond_dim if spec.conditioned else None
    match spec.kind:
        case "attend_space":
            return SpaceAttention(dim, config.heads, config.head_dim, cond_dim)
        case "linear_attend_space":
            return LinearSpaceAttention(dim, config.linear_heads, config.linear_head_dim, cond_dim)
        case "attend_time":
            return TimeAttention(
                dim, config.heads, config.head_dim, config.attend_time_window, cond_dim
            )
        case "gateloop_time":
            return GateLoop(dim, cond_dim)
        case "factorized_residual":
            return FactorizedResidual(dim, cond_dim)
        case _:
            return Residual(dim, cond_dim)
