"""The modified discrete cosine transform (MDCT) and its inverse, at once or in chunks.

A frame of h coefficients describes a window of 2h samples that overlaps each of its neighbours by
half; their aliasing cancels where the inverse windows are added (Princen and Bradley 1986, IEEE
Transactions on Acoustics, Speech, and Signal Processing 34(5)). The transform is orthonormal: there
are as many coefficients as samples, with the same energy.

`stack` consecutive MDCT frames form one frame of stack * h coefficients. Frame t ends with its last
sample, so the transform is causal; the inverse completes h samples only with the next MDCT frame,
and its output is therefore h samples late.

B batch, N samples, C channels, T frames, M MDCT frames, h coefficients of an MDCT frame, R = B C
rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.causal_conv import StreamingState
from tessera.nn.precision import full_precision, to_fp32


def mdct_basis(hop: int) -> Tensor:
    """Return the windowed cosines, (2h, h), with the sine window."""
    return windowed(torch.cos, hop)


def mdst_basis(hop: int) -> Tensor:
    """Return the windowed sines of the same frequencies, (2h, h).

    The energy of both transforms together does not depend on the phase of a sine, as that of the
    MDCT alone does (Malvar 1999, "A modulated complex lapped transform").
    """
    return windowed(torch.sin, hop)


def windowed(wave: Callable[[Tensor], Tensor], hop: int) -> Tensor:
    n = torch.arange(2 * hop, dtype=torch.float64)[:, None] + 0.5
    k = torch.arange(hop, dtype=torch.float64) + 0.5
    window = torch.sin(math.pi / (2 * hop) * n)
    return math.sqrt(2 / hop) * window * wave(math.pi / hop * (n + hop / 2) * k)


class MDCTLayer(nn.Module):
    """The basis that both directions share."""

    basis: Tensor

    def __init__(self, hop: int, stack: int, channels: int = 1):
        super().__init__()
        self.hop, self.stack, self.channels = hop, stack, channels
        self.register_buffer("basis", mdct_basis(hop).float(), persistent=False)

    @property
    def frame(self) -> int:
        """Samples, and coefficients, of one channel of a frame."""
        return self.hop * self.stack


class MDCT(MDCTLayer):
    """From samples (B, N, C) to coefficients (B, T, C * stack * h), one channel after the other.

    Zeros precede the first sample.
    """

    def forward(self, x_BNC: Tensor, stream: StreamingState) -> Tensor:
        windows_RMW = self.split_windows(x_BNC, stream)
        with full_precision(windows_RMW.device.type):
            return self.join_frames(windows_RMW @ self.basis)

    def split_windows(self, x_BNC: Tensor, stream: StreamingState) -> Tensor:
        """Return the windows of the frames that these samples complete, (R, M, 2h)."""
        x_RN = to_fp32(x_BNC).mT.flatten(0, 1)
        past = stream.get(self)
        x_RN = F.pad(x_RN, (self.hop, 0)) if past is None else torch.cat([past, x_RN], dim=1)
        frames = (x_RN.shape[1] - self.hop) // self.frame
        stream.set(self, x_RN[:, frames * self.frame :])
        if not frames:
            return x_RN.new_zeros(len(x_RN), 0, 2 * self.hop)
        return x_RN[:, : frames * self.frame + self.hop].unfold(1, 2 * self.hop, self.hop)

    def join_frames(self, values_RMF: Tensor) -> Tensor:
        """Return the values of whole frames, (B, T, C * stack * F), one channel after the other."""
        rows, mdct_frames, width = values_RMF.shape
        shape = rows // self.channels, self.channels, mdct_frames // self.stack, self.stack * width
        return values_RMF.reshape(shape).transpose(1, 2).flatten(2)


class InverseMDCT(MDCTLayer):
    """From coefficients (B, T, C * stack * h) to samples (B, N, C), late by h samples."""

    def forward(self, x_BTF: Tensor, stream: StreamingState) -> Tensor:
        x_RTF = to_fp32(x_BTF).unflatten(2, (self.channels, self.frame)).transpose(1, 2)
        with full_precision(x_BTF.device.type):
            windows_RMW = x_RTF.reshape(len(x_BTF) * self.channels, -1, self.hop) @ self.basis.mT
        begins_RMh, ends_RMh = windows_RMW.chunk(2, dim=2)
        past = stream.get(self)
        if past is None:
            past = ends_RMh.new_zeros(len(ends_RMh), 1, self.hop)
        stream.set(self, ends_RMh[:, -1:])
        overlaps_RMh = torch.cat([past, ends_RMh[:, :-1]], dim=1)
        return (begins_RMh + overlaps_RMh).reshape(len(x_BTF), self.channels, -1).mT
