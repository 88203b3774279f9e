"""Meshes: MeshGPT's autoencoder and transformer."""

from __future__ import annotations

from tessera.modalities import DemoStep, Modality, Recipe

MODALITY = Modality(
    name="mesh",
    suffixes=(".obj", ".ply", ".stl", ".glb", ".gltf", ".off"),
    media="tessera.modalities.mesh.media:Mesh",
    inspect="tessera.modalities.mesh.inspect:check",
    recipes=(
        Recipe(
            build="tessera.modalities.mesh.recipes:meshes_autoencoder",
            task="tessera.modalities.mesh.reconstruction:TokenizeMeshes",
            data="tessera.modalities.mesh.dataset:Meshes",
        ),
        Recipe(
            build="tessera.modalities.mesh.recipes:meshes_transformer",
            task="tessera.objectives.autoregressive:AutoregressiveConfig",
            data="tessera.modalities.mesh.dataset:Meshes",
        ),
    ),
    demo=(
        DemoStep(
            description="A mesh tokenizer is trained on 2,000 synthetic pieces of furniture.",
            command=(
                "train",
                "meshes-autoencoder",
                "--steps",
                "1000",
                "--out",
                "{out}/meshes-autoencoder",
            ),
        ),
    ),
)
