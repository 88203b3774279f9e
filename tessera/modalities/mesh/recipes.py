"""Recipes over meshes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tessera.recipes.presets import Preset, engine_defaults, for_transformer, text_of

if TYPE_CHECKING:
    from tessera.run.config import Run

MESHGPT = (
    "MeshGPT (Siddiqui 2023, arXiv 2311.15475): 128 bins, 2 symbols for each corner from a codebook of 16,384; "
    "the sources at hand state no parameter count for its autoencoder."
)


def meshes_autoencoder(
    preset: Preset = "small", quantizer: Literal["lfq", "vq", "fsq"] = "lfq"
) -> Run:
    """A mesh tokenizer (MeshGPT's autoencoder): triangles to symbols of their corners, and back.

    Args: preset: tiny (seconds, for tests), small (minutes on a laptop), base (one GPU), paper (as
        published). quantizer: lfq and fsq need no codebook; vq learns its own.
    """
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.mesh.autoencoder import MeshAutoencoderConfig
    from tessera.modalities.mesh.dataset import MeshDataConfig
    from tessera.modalities.mesh.reconstruction import MeshTokenizerConfig
    from tessera.nn.quantize import ResidualConfig
    from tessera.recipes.presets import quantizer_of
    from tessera.run.config import Run

    bits = {"tiny": 6, "small": 10, "base": 13, "paper": 14}[preset]
    # A corner among 128^3 places takes 21 bits, and among 64^3 18; its symbols must be able to say
    # at least that. Of furniture, after 1,000 steps, 1.8 % of held-out triangles were right with 2
    # x 10 bits for 128 bins, and 70 % with 3 x 10 for 64.
    cascade = ResidualConfig(
        quantizer=quantizer_of(quantizer, bits), num_quantizers=3 if preset == "small" else 2
    )
    model = {
        "tiny": MeshAutoencoderConfig(
            bins=32,
            coordinate_dim=16,
            angle_dim=8,
            area_dim=8,
            normal_dim=8,
            encoder=(16, 32),
            code_dim=32,
            decoder=(32, 32),
            quantizer=cascade,
        ),
        "small": MeshAutoencoderConfig(
            bins=64, encoder=(64, 128, 128), code_dim=128, decoder=(128, 128), quantizer=cascade
        ),
        "base": MeshAutoencoderConfig(
            encoder=(64, 128, 256, 256, 576), decoder=(128, 192, 256, 384), quantizer=cascade
        ),
        "paper": MeshAutoencoderConfig(
            encoder=(64, 128, 256, 256, 576), decoder=(128, 192, 256, 384), quantizer=cascade
        ),
    }[preset]
    engine = engine_defaults(
        preset,
        steps={"tiny": 20, "small": 2000, "base": 100_000, "paper": 500_000}[preset],
        batch_size={"tiny": 4, "small": 8, "base": 32, "paper": 64}[preset],
        num_workers=4 if preset in ("base", "paper") else 0,
    )
    data = {
        "tiny": MeshDataConfig(bins=32, max_faces=200, num_synthetic=24, val_fraction=0.25),
        "small": MeshDataConfig(bins=64, max_faces=200),
        "base": MeshDataConfig(scale=0.25, on_large="decimate"),
        "paper": MeshDataConfig(scale=0.25),
    }[preset]
    warmup = max(10, engine.steps // 50)
    optimizer = OptimizerConfig(
        lr={"tiny": 2e-3, "small": 2e-3, "base": 3e-4, "paper": 1e-4}[preset],
        schedule="cosine",
        warmup_steps=warmup,
        min_lr_ratio=0.05,
    )
    return Run(
        recipe="meshes-autoencoder",
        task=MeshTokenizerConfig(model=model, optimizer=optimizer),
        data=data,
        engine=engine,
        reference=MESHGPT if preset == "paper" else "",
    )


def meshes_transformer(
    preset: Preset = "small", tokenizer: str = "runs/meshes-autoencoder", text: str = "learned"
) -> Run:
    """Text to mesh (MeshGPT's transformer): new meshes for prompts, face by face, and the rest of
    meshes that are begun.

    Args: preset: tiny (seconds, for tests), small (minutes on a laptop), base (one GPU), paper (as
        published). tokenizer: the run folder of the tokenizer whose symbols are learnt. text:
        learned (from the captions, no downloads), none (no prompts), or a Hugging Face encoder: a
        local path or a hub id.
    """
    from tessera.modalities.mesh.dataset import MeshDataConfig
    from tessera.modalities.mesh.transformer import MeshTransformerConfig
    from tessera.modalities.mesh.generation import MeshGeneratorConfig
    from tessera.run.config import Run

    dim, depth, heads = {
        "tiny": (32, 2, 2),
        "small": (128, 4, 4),
        "base": (512, 12, 8),
        "paper": (768, 24, 16),
    }[preset]
    fine_dim, fine_depth = {
        "tiny": (32, 1),
        "small": (128, 1),
        "base": (512, 3),
        "paper": (512, 6),
    }[preset]
    max_len = {"tiny": 200, "small": 200, "base": 800, "paper": 800}[preset]
    engine = engine_defaults(
        preset,
        steps={"tiny": 20, "small": 2000, "base": 100_000, "paper": 500_000}[preset],
        batch_size={"tiny": 4, "small": 8, "base": 32, "paper": 64}[preset],
        sample_count=8,
    )
    num_synthetic, held_out = (24, 0.25) if preset == "tiny" else (2000, 0.05)
    data = MeshDataConfig(
        bins={"tiny": 32, "small": 64, "base": 128, "paper": 128}[preset],
        max_faces=max_len,
        num_synthetic=num_synthetic,
        val_fraction=held_out,
        on_large="decimate" if preset == "base" else "skip",
    )
    optimizer = for_transformer(preset, warmup=max(10, engine.steps // 20))
    return Run(
        recipe="meshes-transformer",
        task=MeshGeneratorConfig(
            tokenizer=tokenizer,
            model=MeshTransformerConfig(
                dim=dim,
                depth=depth,
                heads=heads,
                fine_dim=fine_dim,
                fine_depth=fine_depth,
                fine_heads=max(2, fine_dim // 32),
                max_len=max_len,
                text=text_of(preset, text),
            ),
            optimizer=optimizer,
        ),
        data=data,
        engine=engine,
        reference=MESHGPT_TRANSFORMER if preset == "paper" else "",
    )


MESHGPT_TRANSFORMER = (
    "MeshGPT (Siddiqui 2023, arXiv 2311.15475): a decoder-only transformer of GPT-2 medium's size."
)
