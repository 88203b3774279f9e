"""Interchangeable quantizers: `config.build(dim)` makes any of them, and all keep the contract of
`Quantizer`.

FSQ rounds, LFQ takes signs, VQ learns a table; the residual form stacks levels of one of them, and
the grouped form sets residual ones side by side.
"""

from __future__ import annotations

from tessera.nn.quantize.base import Quantized, Quantizer
from tessera.nn.quantize.fsq import FSQ, FSQConfig
from tessera.nn.quantize.grouped import GroupedConfig, GroupedQuantizer
from tessera.nn.quantize.lfq import LFQ, LFQConfig
from tessera.nn.quantize.residual import ResidualConfig, ResidualQuantizer
from tessera.nn.quantize.vq import VQ, ProcessGroup, VQConfig

QuantizerConfig = FSQConfig | LFQConfig | VQConfig | ResidualConfig | GroupedConfig
"""The type of a model's field that lets the user choose."""

__all__ = [
    "FSQ",
    "LFQ",
    "VQ",
    "FSQConfig",
    "GroupedConfig",
    "GroupedQuantizer",
    "LFQConfig",
    "Meeting",
    "Quantized",
    "Quantizer",
    "QuantizerConfig",
    "ResidualConfig",
    "ResidualQuantizer",
    "VQConfig",
]
