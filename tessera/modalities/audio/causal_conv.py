"""A causal convolution over time, for audio at once or in chunks.

B batch, T samples or frames, C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.causal_conv import StreamingState
from tessera.nn.init import init_fan_in_


class CausalConv1d(nn.Module):
    """A convolution over time that is padded with zeros on the left only.

    With a stride, the kernel of output frame t ends at the last sample of that frame.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        dilation: int = 1,
        stride: int = 1,
        groups: int = 1,
    ):
        super().__init__()
        self.receptive_field, self.stride = (kernel_size - 1) * dilation + 1, stride
        # Two-dimensional with height 1: torch has no channels-last layout for one dimension.
        self.conv = nn.Conv2d(
            in_channels,
            out_channels,
            (1, kernel_size),
            stride=(1, stride),
            dilation=(1, dilation),
            groups=groups,
        )
        init_fan_in_(self.conv, gain=1.0)

    @property
    def weight(self) -> nn.Parameter:
        return self.conv.weight  # type: ignore[return-value]

    def forward(self, x_BTC: Tensor, stream: StreamingState) -> Tensor:
        x_BTC = self.prepend_past(x_BTC, stream)
        num_outputs = max(0, (x_BTC.shape[1] - self.receptive_field) // self.stride + 1)
        stream.set(self, x_BTC[:, num_outputs * self.stride :])
        return self.conv(x_BTC.mT.unsqueeze(2)).squeeze(2).mT if num_outputs else x_BTC[:, :0]

    def prepend_past(self, x_BTC: Tensor, stream: StreamingState) -> Tensor:
        past = stream.get(self)
        if past is None:
            return F.pad(x_BTC, (0, 0, self.receptive_field - self.stride, 0))
        return torch.cat([past, x_BTC], dim=1)
