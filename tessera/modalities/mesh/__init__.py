"""Meshes: MeshGPT's autoencoder and transformer, and a transformer along the edges."""

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
            description="A text-to-mesh model is trained on 4,000 synthetic pieces of furniture.",
            command=(
                "train",
                "meshes-tree",
                "--task.model.dropout",
                "0",
                "--steps",
                "1000",
                "--out",
                "{out}/meshes-tree",
            ),
        ),
        DemoStep(
            description="New meshes are generated for prompts.",
            command=(
                "sample",
                "{out}/meshes-tree",
                "--prompt",
                "a wide table with four legs",
                "a narrow ladder with five rungs",
                "a short bench with four legs and a back",
                "a narrow bed with a low headboard and one pillow",
                "--count",
                "2",
                "--out",
                "{out}/samples",
            ),
        ),
    ),
    demo_next=("evaluate", "{out}/meshes-tree"),
)
