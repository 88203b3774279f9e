"""Helpers for tests of networks, whose residual branches are zero at initialization."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def randomize_zero_weights(network: Network) -> Network:
    """Give random weights to all parameters that are zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return network


def perturb_weights(network: Network, std: float = 0.1) -> Network:
    """Add noise to all weights, so that no parameter is zero and no two are equal."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * std)
    return network


def record_row_counts(layer: nn.Module) -> list[int]:
    """Return a list to which each call of the layer appends its number of input rows."""
    rows: list[int] = []
    layer.register_forward_pre_hook(
        lambda _, inputs: rows.append(inputs[0].flatten(0, -2).shape[0])
    )
    return rows


def randn_double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)
