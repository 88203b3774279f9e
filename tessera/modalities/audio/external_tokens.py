"""Describe tokens that another tokenizer produced, so that a model can be trained on them.

Such tokens cannot be computed from audio or decoded here. They can only be shown, as an image of
their indices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from tessera.modalities.image.media import Image
from tessera.nn.token_embedding import TokenSpec
from tessera.nn.token_layout import Layout

TOLERANCE_FRAMES = 2
"""Frames, of the longer kind, by which two streams of the same audio may differ. A speech model
without padding produces one frame less at the end, and tokenizers differ in whether they keep an
incomplete last frame."""
FRAME_PIXELS, ROW_PIXELS = 4, 8
"""Width of a frame and height of a codebook in an image of tokens."""


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """A sequence of frames with one token per codebook."""

    vocab_size: int
    """Codebook size."""
    frames: int
    """Frames of the longest example."""
    seconds: float
    """Duration of a frame."""
    num_quantizers: int = 1
    """Tokens per frame, the coarsest first."""

    def __post_init__(self) -> None:
        if min(self.vocab_size, self.frames, self.num_quantizers) < 1 or not self.seconds > 0:
            raise ValueError(
                "vocab_size, frames and num_quantizers must be at least 1 and seconds greater than "
                f"0, but got {self}."
            )

    @classmethod
    def from_spec(cls, spec: TokenSpec) -> TokenStream:
        """Describe the tokens that a network was built for."""
        if len(spec.layout.grid) != 1 or spec.seconds is None:
            raise ValueError(
                f"The network was built for a grid of {spec.layout.grid} with {spec.seconds} "
                "seconds per position, but audio tokens need a grid of one dimension and a frame "
                "duration."
            )
        [frames] = spec.layout.grid
        return cls(
            vocab_size=spec.vocab_size,
            frames=frames,
            seconds=spec.seconds,
            num_quantizers=spec.layout.num_quantizers,
        )

    def to_spec(self) -> TokenSpec:
        layout = Layout((self.frames,), self.num_quantizers)
        return TokenSpec(self.vocab_size, layout, seconds=self.seconds)

    def build(self) -> ExternalTokenizer:
        return ExternalTokenizer(self)


@dataclass(frozen=True, kw_only=True)
class TokenStreams:
    """The acoustic and the semantic tokens of the same audio."""

    acoustic: TokenStream
    semantic: TokenStream

    def __post_init__(self) -> None:
        if self.semantic.num_quantizers > 1:
            raise ValueError(
                "The semantic stream must have 1 token per frame, but has "
                f"{self.semantic.num_quantizers}."
            )
        if not self.same_duration(self.acoustic.frames, self.semantic.frames):
            durations = self.describe_durations(self.acoustic.frames, self.semantic.frames)
            raise ValueError(
                f"The acoustic and the semantic stream must have the same duration, but have "
                f"{durations}: correct the frames or the seconds of one of them."
            )

    def same_duration(self, acoustic_frames: int, semantic_frames: int) -> bool:
        """Return whether the durations are equal within TOLERANCE_FRAMES."""
        acoustic_seconds = acoustic_frames * self.acoustic.seconds
        semantic_seconds = semantic_frames * self.semantic.seconds
        longer = max(self.acoustic.seconds, self.semantic.seconds)
        return abs(acoustic_seconds - semantic_seconds) <= TOLERANCE_FRAMES * longer + 1e-9

    def describe_durations(self, acoustic_frames: int, semantic_frames: int) -> str:
        acoustic_seconds = acoustic_frames * self.acoustic.seconds
        semantic_seconds = semantic_frames * self.semantic.seconds
        return (
            f"{acoustic_seconds:.2f} s ({acoustic_frames} frames) and "
            f"{semantic_seconds:.2f} s ({semantic_frames} frames)"
        )


class ExternalTokenizer:
    """Stand-in for a tokenizer, for tokens that were computed elsewhere."""

    features: Tensor | None = None
    is_external = True

    def __init__(self, stream: TokenStream):
        self.network: nn.Module = nn.Identity()
        self.vocab_size = stream.vocab_size
        self.num_quantizers = stream.num_quantizers
        self.seconds = stream.seconds
        self.grid = (stream.frames,)

    def encode_examples(self, examples: object) -> Tensor:
        raise ValueError(
            "The examples are not tokens, and a model of external tokens has no tokenizer: give "
            "the tokens themselves."
        )

    def to_media(self, codes: Tensor) -> list[Image]:
        """Draw tokens: time from left to right, one row per codebook, brighter for higher codes."""
        codes_BTL = codes.reshape(*codes.shape[:2], self.num_quantizers).cpu().numpy()
        return [self.draw(codes_TL[codes_TL[:, 0] >= 0]) for codes_TL in codes_BTL]

    def draw(self, codes_TL: np.ndarray) -> Image:
        level_TL = 2 * codes_TL / max(1, self.vocab_size - 1) - 1
        pixels = level_TL.T.repeat(ROW_PIXELS, 0).repeat(FRAME_PIXELS, 1)
        return Image.from_floats(np.broadcast_to(pixels, (3, *pixels.shape)))
