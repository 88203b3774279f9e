"""Meshes: MeshGPT's autoencoder and transformer."""

from __future__ import annotations

from tessera.modalities import DemoStep, Modality, Recipe

MODALITY = Modality(
    name="mesh",
    suffixes=(".obj", ".ply", ".stl", ".glb", ".gltf", ".off"),
    media="tessera.modalities.mesh.media:Mesh",
    inspect="tessera.modalities.mesh.inspect:inspect_folder",
    measure="tessera.modalities.mesh.io:measure_file",
    recipes=(
        Recipe(
            build="tessera.modalities.mesh.recipes:meshes_autoencoder",
            task="tessera.modalities.mesh.reconstruction:MeshTokenizerConfig",
            data="tessera.modalities.mesh.dataset:MeshDataConfig",
            kind="tokenizer",
            metric="triangle_accuracy",
            media_inputs=("data",),
        ),
        Recipe(
            build="tessera.modalities.mesh.recipes:meshes_transformer",
            task="tessera.modalities.mesh.generation:MeshGeneratorConfig",
            data="tessera.modalities.mesh.dataset:MeshDataConfig",
            kind="generator",
            metric="cross_entropy",
            media_inputs=("data",),
        ),
        Recipe(
            build="tessera.modalities.mesh.recipes:meshes_tree",
            task="tessera.modalities.mesh.generation:TreeGeneratorConfig",
            data="tessera.modalities.mesh.dataset:MeshDataConfig",
            kind="generator",
            metric="cross_entropy",
            media_inputs=("data",),
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
    demo_next=(
        "train",
        "meshes-transformer",
        "--tokenizer",
        "{out}/meshes-autoencoder",
        "--out",
        "{out}/meshes-transformer",
    ),
)
