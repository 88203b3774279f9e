"""What tests of networks do to them: residual parts start as nothing, and a network of nothing
proves nothing."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def awake(network: Network) -> Network:
    """Parts that start as nothing are given weights, so that they take part."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network


def stirred(network: Network, by: float = 0.1) -> Network:
    """All weights are moved a little: then no two parts that start alike stay so, and none is
    nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * by)
    return network


def rows_through(layer: nn.Module) -> list[int]:
    """How many rows come to a layer each time, noted from here on."""
    rows: list[int] = []
    layer.register_forward_pre_hook(
        lambda _, inputs: rows.append(inputs[0].flatten(0, -2).shape[0])
    )
    return rows


def doubles(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)
