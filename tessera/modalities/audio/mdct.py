"""The modified discrete cosine transform (MDCT) and its inverse, at once or in chunks.

A frame of h coefficients describes a window of 2h samples that overlaps each of its neighbours by
half; their aliasing cancels where the inverse windows are added (Princen and Bradley 1986, IEEE
Transactions on Acoustics, Speech, and Signal Processing 34(5)). The transform is orthonormal: there
are as many coefficients as samples, with the same energy.

`stack` consecutive MDCT frames form one frame of stack * h coefficients. Frame t ends with its last
sample, so the transform is causal; the inverse completes h samples only with the next MDCT frame,
and its output is therefore h samples late.

B batch, N samples, T frames, M MDCT frames, h coefficients of an MDCT frame.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.causal_conv import StreamingState
from tessera.nn.precision import full_precision, to_fp32


def mdct_basis(hop: int) -> Tensor:
    """Return the windowed cosines, (2h, h), with the sine window."""
    n = torch.arange(2 * hop, dtype=torch.float64)[:, None] + 0.5
    k = torch.arange(hop, dtype=torch.float64) + 0.5
    window = torch.sin(math.pi / (2 * hop) * n)
    return math.sqrt(2 / hop) * window * torch.cos(math.pi / hop * (n + hop / 2) * k)


class MDCTLayer(nn.Module):
    """The basis that both directions share."""

    basis: Tensor

    def __init__(self, hop: int, stack: int):
        super().__init__()
        self.hop, self.stack = hop, stack
        self.register_buffer("basis", mdct_basis(hop).float(), persistent=False)

    @property
    def frame(self) -> int:
        """Samples, and coefficients, of one frame."""
        return self.hop * self.stack


class MDCT(MDCTLayer):
    """From samples (B, N, 1) to coefficients (B, T, stack * h); zeros precede the first sample."""

    def forward(self, x_BN1: Tensor, stream: StreamingState) -> Tensor:
        x_BN = to_fp32(x_BN1).squeeze(2)
        past = stream.get(self)
        x_BN = F.pad(x_BN, (self.hop, 0)) if past is None else torch.cat([past, x_BN], dim=1)
        frames = (x_BN.shape[1] - self.hop) // self.frame
        stream.set(self, x_BN[:, frames * self.frame :])
        if not frames:
            return x_BN1.new_zeros(len(x_BN1), 0, self.frame)
        windows_BMW = x_BN[:, : frames * self.frame + self.hop].unfold(1, 2 * self.hop, self.hop)
        with full_precision(x_BN.device.type):
            return (windows_BMW @ self.basis).reshape(len(x_BN), frames, self.frame)


class InverseMDCT(MDCTLayer):
    """From coefficients (B, T, stack * h) to samples (B, N, 1), late by h samples."""

    def forward(self, x_BTC: Tensor, stream: StreamingState) -> Tensor:
        with full_precision(x_BTC.device.type):
            windows_BMW = to_fp32(x_BTC).reshape(len(x_BTC), -1, self.hop) @ self.basis.mT
        begins_BMh, ends_BMh = windows_BMW.chunk(2, dim=2)
        past = stream.get(self)
        if past is None:
            past = ends_BMh.new_zeros(len(x_BTC), 1, self.hop)
        stream.set(self, ends_BMh[:, -1:])
        overlaps_BMh = torch.cat([past, ends_BMh[:, :-1]], dim=1)
        return (begins_BMh + overlaps_BMh).reshape(len(x_BTC), -1, 1)
