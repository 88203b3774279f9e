"""Recipes for meshes: a tokenizer, and text to mesh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tessera.recipes.presets import (
    Preset,
    build_quantizer_config,
    build_text_config,
    engine_defaults,
    tokenizer_optimizer,
    transformer_optimizer,
)

if TYPE_CHECKING:
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.mesh.autoencoder import MeshAutoencoderConfig
    from tessera.modalities.mesh.dataset import MeshDataConfig
    from tessera.nn.quantize import ResidualConfig
    from tessera.objectives.autoregressive import AutoregressiveConfig
    from tessera.run.config import Run

MeshQuantizerChoice = Literal["lfq", "vq", "fsq"]

MESHGPT = (
    "MeshGPT (Siddiqui 2023, arXiv 2311.15475): 128 bins, 2 tokens for each corner from a codebook "
    "of 16,384; no published parameter count of its autoencoder was found."
)

MESHGPT_TRANSFORMER = (
    "MeshGPT (Siddiqui 2023, arXiv 2311.15475): a decoder-only transformer of GPT-2 medium's size."
)

TREEMESHGPT = (
    "TreeMeshGPT (Lionar 2025, arXiv 2503.11629): 24 blocks of dimension 1,024, 7-bit coordinates, "
    "meshes of up to 5,500 faces."
)


# ---- tokenizer


def meshes_autoencoder(preset: Preset = "small", quantizer: MeshQuantizerChoice = "lfq") -> Run:
    """Train a mesh tokenizer (MeshGPT's autoencoder): triangles to tokens, and back.

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (as published).
        quantizer: The quantizer of each level: lfq and fsq have no codebook to learn; vq learns
            one.
    """
    from tessera.modalities.mesh.reconstruction import MeshTokenizerConfig
    from tessera.run.config import Run

    builders = {
        "tiny": _autoencoder_tiny,
        "small": _autoencoder_small,
        "base": _autoencoder_base,
        "paper": _autoencoder_paper,
    }
    parts = builders[preset](quantizer)
    return Run(
        recipe="meshes-autoencoder",
        task=MeshTokenizerConfig(
            model=parts.model, optimizer=tokenizer_optimizer(parts.lr, steps=parts.steps)
        ),
        data=parts.data,
        engine=engine_defaults(
            preset,
            steps=parts.steps,
            batch_size=parts.batch_size,
            num_workers=parts.num_workers,
        ),
        reference=parts.reference,
    )


@dataclass(frozen=True, kw_only=True)
class _AutoencoderPreset:
    model: MeshAutoencoderConfig
    data: MeshDataConfig
    steps: int
    batch_size: int
    lr: float
    num_workers: int = 0
    reference: str = ""


def _autoencoder_tiny(quantizer: MeshQuantizerChoice) -> _AutoencoderPreset:
    from tessera.modalities.mesh.autoencoder import MeshAutoencoderConfig
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return _AutoencoderPreset(
        model=MeshAutoencoderConfig(
            bins=32,
            coordinate_dim=16,
            angle_dim=8,
            area_dim=8,
            normal_dim=8,
            encoder=(16, 32),
            code_dim=32,
            decoder=(32, 32),
            quantizer=_build_residual_config(quantizer, bits=6),
        ),
        data=MeshDataConfig(bins=32, max_faces=200, num_synthetic=24, val_fraction=0.25),
        steps=20,
        batch_size=4,
        lr=2e-3,
    )


def _autoencoder_small(quantizer: MeshQuantizerChoice) -> _AutoencoderPreset:
    from tessera.modalities.mesh.autoencoder import MeshAutoencoderConfig
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return _AutoencoderPreset(
        model=MeshAutoencoderConfig(
            bins=64,
            encoder=(64, 128, 128),
            code_dim=128,
            decoder=(128, 128),
            quantizer=_build_residual_config(quantizer, bits=10, num_quantizers=3),
        ),
        data=MeshDataConfig(bins=64, max_faces=200),
        steps=2000,
        batch_size=8,
        lr=2e-3,
    )


def _autoencoder_base(quantizer: MeshQuantizerChoice) -> _AutoencoderPreset:
    from tessera.modalities.mesh.autoencoder import MeshAutoencoderConfig
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return _AutoencoderPreset(
        model=MeshAutoencoderConfig(
            encoder=(64, 128, 256, 256, 576),
            decoder=(128, 192, 256, 384),
            quantizer=_build_residual_config(quantizer, bits=13),
        ),
        data=MeshDataConfig(scale=0.25, on_large="decimate"),
        steps=100_000,
        batch_size=32,
        lr=3e-4,
        num_workers=4,
    )


def _autoencoder_paper(quantizer: MeshQuantizerChoice) -> _AutoencoderPreset:
    from tessera.modalities.mesh.autoencoder import MeshAutoencoderConfig
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return _AutoencoderPreset(
        model=MeshAutoencoderConfig(
            encoder=(64, 128, 256, 256, 576),
            decoder=(128, 192, 256, 384),
            quantizer=_build_residual_config(quantizer, bits=14),
        ),
        data=MeshDataConfig(scale=0.25),
        steps=500_000,
        batch_size=64,
        lr=1e-4,
        num_workers=4,
        reference=MESHGPT,
    )


def _build_residual_config(
    quantizer: MeshQuantizerChoice, *, bits: int, num_quantizers: int = 2
) -> ResidualConfig:
    """Return the quantizer of a corner.

    A corner takes 21 bits with 128 bins per axis and 18 bits with 64, and its tokens need at least
    that many together. On furniture, after 1,000 steps, 1.8 % of held-out triangles were
    reconstructed with 2 x 10 bits for 128 bins, and 70 % with 3 x 10 bits for 64.
    """
    from tessera.nn.quantize import ResidualConfig

    level = build_quantizer_config(quantizer, bits)
    return ResidualConfig(quantizer=level, num_quantizers=num_quantizers)


# ---- text to mesh


def meshes_transformer(
    preset: Preset = "small", tokenizer: str = "runs/meshes-autoencoder", text: str = "learned"
) -> Run:
    """Train a text-to-mesh model (MeshGPT's transformer), which also completes partial meshes.

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (as published).
        tokenizer: The run directory of the tokenizer whose tokens are generated.
        text: The text encoder: learned (trained on the captions, without downloads), none (without
            prompts), or the local path or hub id of a Hugging Face encoder.
    """
    from tessera.modalities.mesh.generation import MeshGeneratorConfig
    from tessera.modalities.mesh.transformer import MeshTransformerConfig

    builders = {
        "tiny": _transformer_tiny,
        "small": _transformer_small,
        "base": _transformer_base,
        "paper": _transformer_paper,
    }
    parts = builders[preset]()
    task = MeshGeneratorConfig(
        tokenizer=tokenizer,
        model=MeshTransformerConfig(
            dim=parts.dim,
            depth=parts.depth,
            heads=parts.heads,
            fine_dim=parts.fine_dim,
            fine_depth=parts.fine_depth,
            fine_heads=parts.fine_heads,
            max_len=parts.data.max_faces,
            text=build_text_config(preset, text),
        ),
        optimizer=parts.optimizer(preset),
    )
    return _build_generator_run("meshes-transformer", preset, parts, task)


@dataclass(frozen=True, kw_only=True)
class _GeneratorPreset:
    dim: int
    depth: int
    heads: int
    data: MeshDataConfig
    steps: int
    batch_size: int
    reference: str = ""

    def optimizer(self, preset: Preset) -> OptimizerConfig:
        return transformer_optimizer(preset, warmup_steps=max(10, self.steps // 20))


def _build_generator_run(
    recipe: str, preset: Preset, parts: _GeneratorPreset, task: AutoregressiveConfig
) -> Run:
    from tessera.run.config import Run

    return Run(
        recipe=recipe,
        task=task,
        data=parts.data,
        engine=engine_defaults(
            preset, steps=parts.steps, batch_size=parts.batch_size, sample_count=8
        ),
        reference=parts.reference,
    )


@dataclass(frozen=True, kw_only=True)
class _TransformerPreset(_GeneratorPreset):
    fine_dim: int
    fine_depth: int
    fine_heads: int


def _transformer_tiny() -> _TransformerPreset:
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return _TransformerPreset(
        dim=32,
        depth=2,
        heads=2,
        fine_dim=32,
        fine_depth=1,
        fine_heads=2,
        data=MeshDataConfig(bins=32, max_faces=200, num_synthetic=24, val_fraction=0.25),
        steps=20,
        batch_size=4,
    )


def _transformer_small() -> _TransformerPreset:
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return _TransformerPreset(
        dim=128,
        depth=4,
        heads=4,
        fine_dim=128,
        fine_depth=1,
        fine_heads=4,
        data=MeshDataConfig(bins=64, max_faces=200, num_synthetic=2000, val_fraction=0.05),
        steps=2000,
        batch_size=8,
    )


def _transformer_base() -> _TransformerPreset:
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return _TransformerPreset(
        dim=512,
        depth=12,
        heads=8,
        fine_dim=512,
        fine_depth=3,
        fine_heads=16,
        data=MeshDataConfig(
            bins=128, max_faces=800, num_synthetic=2000, val_fraction=0.05, on_large="decimate"
        ),
        steps=100_000,
        batch_size=32,
    )


def _transformer_paper() -> _TransformerPreset:
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return _TransformerPreset(
        dim=768,
        depth=24,
        heads=16,
        fine_dim=512,
        fine_depth=6,
        fine_heads=16,
        data=MeshDataConfig(bins=128, max_faces=800, num_synthetic=2000, val_fraction=0.05),
        steps=500_000,
        batch_size=64,
        reference=MESHGPT_TRANSFORMER,
    )


# ---- text to mesh along the edges


def meshes_tree(preset: Preset = "small", text: str = "learned") -> Run:
    """Train a text-to-mesh model whose triangles are connected (a traversal of the edges).

    Args:
        preset: The size of the run: tiny (seconds, for tests), small (minutes on a laptop),
            base (one GPU) or paper (as published).
        text: The text encoder: learned (trained on the captions, without downloads), none (without
            prompts), or the local path or hub id of a Hugging Face encoder.
    """
    from tessera.modalities.mesh.generation import TreeGeneratorConfig
    from tessera.modalities.mesh.tree_transformer import TreeTransformerConfig
    from tessera.sampling.autoregressive import AutoregressiveSampling
    from tessera.sampling.guidance import Guidance

    builders = {
        "tiny": _tree_tiny,
        "small": _tree_small,
        "base": _tree_base,
        "paper": _tree_paper,
    }
    parts = builders[preset]()
    task = TreeGeneratorConfig(
        model=TreeTransformerConfig(
            bins=parts.data.bins,
            dim=parts.dim,
            depth=parts.depth,
            heads=parts.heads,
            max_len=parts.max_len,
            dropout=parts.dropout,
            text=build_text_config(preset, text),
        ),
        sampling=AutoregressiveSampling(temperature=0.7, top_p=0.9, retries=3),
        guidance=Guidance(scale=1.2),
        optimizer=parts.optimizer(preset),
    )
    return _build_generator_run("meshes-tree", preset, parts, task)


@dataclass(frozen=True, kw_only=True)
class _TreePreset(_GeneratorPreset):
    max_len: int
    dropout: float = 0.1


def _tree_tiny() -> _TreePreset:
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return _TreePreset(
        dim=32,
        depth=2,
        heads=2,
        max_len=100,
        data=MeshDataConfig(bins=32, max_faces=64, num_synthetic=24, val_fraction=0.25),
        steps=20,
        batch_size=4,
    )


def _tree_small() -> _TreePreset:
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return _TreePreset(
        dim=128,
        depth=6,
        heads=4,
        max_len=300,
        data=MeshDataConfig(bins=128, max_faces=200, num_synthetic=4000, val_fraction=0.025),
        steps=2000,
        batch_size=8,
    )


def _tree_base() -> _TreePreset:
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return _TreePreset(
        dim=512,
        depth=12,
        heads=8,
        max_len=1200,
        data=MeshDataConfig(bins=128, max_faces=800, on_large="decimate", scale=0.25),
        steps=100_000,
        batch_size=32,
    )


def _tree_paper() -> _TreePreset:
    from tessera.modalities.mesh.dataset import MeshDataConfig

    return _TreePreset(
        dim=1024,
        depth=24,
        heads=16,
        max_len=8_000,
        dropout=0.0,
        data=MeshDataConfig(bins=128, max_faces=5500, scale=0.25),
        steps=500_000,
        batch_size=64,
        reference=TREEMESHGPT,
    )
