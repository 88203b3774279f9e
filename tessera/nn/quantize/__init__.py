"""Interchangeable quantizers: `config.build(dim)` builds any of them as a `Quantizer`.

FSQ rounds, LFQ takes signs, VQ learns a codebook, and SimVQ a linear map of a fixed codebook. The
residual form stacks several quantizers of one kind, and the grouped form applies residual
quantizers to parts of the latent.
"""

from __future__ import annotations

from tessera.nn.quantize.base import GradientEstimator, Quantized, Quantizer
from tessera.nn.quantize.fsq import FSQ, FSQConfig
from tessera.nn.quantize.grouped import GroupedConfig, GroupedQuantizer
from tessera.nn.quantize.lfq import LFQ, LFQConfig
from tessera.nn.quantize.residual import LevelQuantizerConfig, ResidualConfig, ResidualQuantizer
from tessera.nn.quantize.simvq import SimVQ, SimVQConfig
from tessera.nn.quantize.vq import VQ, ProcessGroup, VQConfig

QuantizerConfig = FSQConfig | LFQConfig | VQConfig | SimVQConfig | ResidualConfig
"""Quantizers of tokenizers with any number of codes per position: images, videos and meshes."""

MultiCodeQuantizerConfig = ResidualConfig | GroupedConfig
"""Quantizers with several codes per position, as codecs of audio use them."""

__all__ = [
    "FSQ",
    "LFQ",
    "VQ",
    "FSQConfig",
    "GradientEstimator",
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
    "SimVQ",
    "SimVQConfig",
    "VQConfig",
]
