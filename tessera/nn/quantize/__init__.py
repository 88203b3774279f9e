"""Interchangeable quantizers: `config.build(dim)` builds any of them as a `Quantizer`.

FSQ rounds, LFQ takes signs, and VQ learns a codebook. The residual form stacks several quantizers
of one kind, and the grouped form applies residual quantizers to parts of the latent.
"""

from __future__ import annotations

from tessera.nn.quantize.base import Quantized, Quantizer
from tessera.nn.quantize.fsq import FSQ, FSQConfig
from tessera.nn.quantize.grouped import GroupedConfig, GroupedQuantizer
from tessera.nn.quantize.lfq import LFQ, LFQConfig
from tessera.nn.quantize.residual import LevelQuantizerConfig, ResidualConfig, ResidualQuantizer
from tessera.nn.quantize.vq import VQ, ProcessGroup, VQConfig

QuantizerConfig = FSQConfig | LFQConfig | VQConfig | ResidualConfig
"""Quantizers of tokenizers with any number of codes per position: images, videos and meshes."""

MultiCodeQuantizerConfig = ResidualConfig | GroupedConfig
"""Quantizers with several codes per position, as codecs of audio use them."""

__all__ = [
    "FSQ",
    "LFQ",
    "VQ",
    "FSQConfig",
    "GroupedConfig",
    "GroupedQuantizer",
    "LFQConfig",
    "LevelQuantizerConfig",
    "MultiCodeQuantizerConfig",
    "ProcessGroup",
    "Quantized",
    "Quantizer",
    "QuantizerConfig",
    "ResidualConfig",
    "ResidualQuantizer",
    "VQConfig",
]
