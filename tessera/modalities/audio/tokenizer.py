"""The base class of audio tokenizers, and the validation of their inputs.

Audio is (B, C, N) in [-1, 1], where C is 1, or 2 for stereo; each frame of `hop` samples becomes
one or more tokens, and the last frame is padded with zeros.

B batch, C channels, N samples, T frames, L codebooks of a residual quantizer.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class FrameConfig(Protocol):
    """A configuration with a frame size."""

    @property
    def hop(self) -> int:
        """Samples per frame."""


class FrameQuantizer(Protocol):
    """A quantizer of frames, of which only the shape of the codes is read."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def num_quantizers(self) -> int: ...


class AudioTokenizer(nn.Module):
    """A subclass sets `config` and `quantizer`."""

    config: FrameConfig
    quantizer: FrameQuantizer

    def encode(self, samples: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Encode (B, C, N) as codes (B, T, L) or (B, T), with -1 in frames of padding."""
        raise NotImplementedError

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes; -1 marks padding."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """Codebook size of each quantizer."""
        return self.quantizer.vocab_size

    @property
    def num_quantizers(self) -> int:
        """Tokens per frame."""
        return self.quantizer.num_quantizers

    @property
    def hop(self) -> int:
        """Samples per frame."""
        return self.config.hop

    def frame_mask(self, lengths_B: Tensor, frames: int) -> Tensor:
        """Return (B, T): True for frames that hold at least one real sample."""
        frames_B = -(-lengths_B // self.hop)
        return torch.arange(frames, device=lengths_B.device) < frames_B[:, None]

    def check_codes(self, codes: Tensor) -> None:
        """Raise ValueError unless codes are (B, T, L) with L at most `num_quantizers`."""
        if codes.ndim != 3 or not all(codes.shape) or codes.shape[2] > self.num_quantizers:
            raise ValueError(
                f"Codes of shape {tuple(codes.shape)} do not fit a codec with "
                f"{self.num_quantizers} quantizers: give (batch, frames, quantizers) with 1 to "
                f"{self.num_quantizers} quantizers, encoded by this codec."
            )


def check_audio_batch(samples: Tensor, channels: int = 1) -> None:
    """Raise ValueError unless `samples` is a float tensor of shape (B, channels, N)."""
    if samples.ndim != 3 or samples.shape[1] != channels or not samples.is_floating_point():
        advice = "Average the channels to get one." if channels == 1 else "Give left and right."
        raise ValueError(
            f"Expected audio of shape (batch, {channels}, samples) as floats in [-1, 1], but got "
            f"shape {tuple(samples.shape)} and type {samples.dtype}. {advice}"
        )


def check_not_empty(num_samples: int) -> None:
    """Raise ValueError if there are no samples."""
    if num_samples < 1:
        raise ValueError(
            f"Audio of {num_samples} samples cannot be tokenized: it needs at least 1 sample."
        )
