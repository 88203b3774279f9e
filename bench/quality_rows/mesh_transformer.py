"""Generation of meshes: meshgpt-pytorch's pair of autoencoder and transformer, and meshes-tree.

All sides train without captions on the same canonical meshes (`mesh_sets.py`). The package needs a
tokenizer first: half of its budget trains the autoencoder of the row mesh_autoencoder, and the
other half a transformer over its tokens, of the width of our preset small, with its own trainers.
meshes-tree has a tokenizer that is not trained.

ours: the recipe meshes-tree with the defaults of its preset small, on 64 bins and without text.
ours-third: the same, with a schedule that ends after a third of the budget.
ours-meshgpt: our MeshGPT, the recipes meshes-autoencoder and meshes-transformer with the defaults
of their presets small, for half of the budget each; only on request.

NUM_SAMPLES meshes are generated at each validation, and judged by the measures of `tessera
evaluate`: the fraction that ended and is connected as real meshes are, the fraction of their faces
in parts of at most three, the distance of real meshes to the nearest sample, and the
1-nearest-neighbour accuracy. A side that cannot generate yet has no valid mesh.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from time_to_quality import Judge, Metric, Metrics, Outputs, Row, Setting, SideInfo, SideSpec
from worker import count_parameters, package_versions

from quality_rows import mesh_sets
from quality_rows.mesh_autoencoder import (
    NUM_QUANTIZERS,
    STEPS_AT_ONCE,
    build_adapter,
    to_bins,
    to_examples,
)

NUM_SAMPLES = 16
TOKENIZER_FRACTION = 0.5
TOKENS_PER_FACE = 3 * NUM_QUANTIZERS


# ---- the package


class PackageSide:
    """MeshAutoencoderTrainer, then MeshTransformerTrainer."""

    def __init__(self, setting: Setting, *, lr: float):
        from peers.adapters import seed_everything

        self.setting, self.lr, self.trained_s = setting, lr, 0.0
        self.adapter = build_adapter(setting, lr=1e-3)
        # A transformer freezes its autoencoder, so that this one, which is counted, has its own.
        counted = self.transformer_adapter(self.adapter.build_model()).build_model()
        seed_everything(setting.seed)
        model = self.adapter.build_model()
        self.trainer = self.adapter.build_trainer(model, setting.scratch / "tokenizer")
        self.model: Any = None
        self.info = SideInfo(
            parameters=count_parameters(counted),
            description=f"half of the time for the autoencoder; transformer of dim 128, depth 6, "
            f"learning rate {lr:g}, batch size 8; parameters of both",
            packages=package_versions("meshgpt-pytorch", "torch"),
        )

    def transformer_adapter(self, autoencoder: Any) -> Any:
        from peers.adapters import MeshTransformerAdapter

        return MeshTransformerAdapter(
            to_examples(mesh_sets.train_set(self.setting.work)),
            autoencoder=autoencoder,
            transformer={"attn_depth": 6, "max_seq_len": mesh_sets.MAX_FACES * TOKENS_PER_FACE},
            trainer={"batch_size": 8, "learning_rate": self.lr},
        )

    def step(self) -> bool:
        start = time.process_time()
        if self.model is None and self.trained_s > TOKENIZER_FRACTION * self.setting.budget_s:
            self.adapter = self.transformer_adapter(self.trainer.ema_model.ema_model)
            self.model = self.adapter.build_model()
            self.trainer = self.adapter.build_trainer(self.model, self.setting.scratch / "model")
        self.adapter.train(self.trainer, STEPS_AT_ONCE)
        self.trained_s += time.process_time() - start
        return True

    def outputs(self, final: bool) -> Outputs:
        import torch

        if self.model is None:
            return {"samples": mesh_sets.pad_faces([])}
        torch.manual_seed(0)
        self.model.eval()
        coordinates, mask = self.model.generate(batch_size=NUM_SAMPLES)
        self.model.train()
        pairs = zip(coordinates, mask, strict=True)
        return {"samples": mesh_sets.pad_faces([to_bins(one[kept]) for one, kept in pairs])}


# ---- ours


def build_ours(setting: Setting) -> Any:
    from tessera.modalities.mesh.recipes import meshes_tree

    run = meshes_tree(text="none")
    task = replace(run.task, model=replace(run.task.model, bins=mesh_sets.BINS))
    return build_generator(replace(run, task=task, data=mesh_sets.data_config()), setting)


def build_generator(run: Any, setting: Setting) -> Any:
    """Build the side of a recipe that generates meshes."""
    from quality_rows.engine_side import build_side
    from tessera.data.dataset import Split
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    dataset = mesh_sets.build_dataset(mesh_sets.train_set(setting.work))

    def build(config: Any, folder: Path) -> Any:
        split = Split(dataset, dataset)
        return build_engine(replace(run, engine=config), RunDirectory(folder), split=split)

    def compute(task: Any, final: bool) -> Outputs:
        return {"samples": generate(task)}

    return build_side(run.engine, build, setting, compute, f"recipe {run.recipe}, preset small")


class MeshGPTSide:
    """The recipe meshes-autoencoder, then meshes-transformer on its tokens."""

    def __init__(self, setting: Setting):
        from quality_rows import mesh_autoencoder

        budget_s = TOKENIZER_FRACTION * setting.budget_s
        self.setting = replace(
            setting, budget_s=setting.budget_s - budget_s, scratch=setting.scratch / "transformer"
        )
        tokenizer = replace(setting, budget_s=budget_s, scratch=setting.scratch / "tokenizer")
        self.tokenizer = mesh_autoencoder.build_ours(tokenizer)
        self.transformer: Any = None
        self.info = replace(
            self.tokenizer.info,
            description="recipes meshes-autoencoder and meshes-transformer, presets small; "
            "parameters of the autoencoder",
        )

    def step(self) -> bool:
        if self.transformer is not None:
            return bool(self.transformer.step())
        if not self.tokenizer.step():
            self.transformer = self.build_transformer(self.tokenizer.finish())
        return True

    def build_transformer(self, tokenizer: Path) -> Any:
        from tessera.modalities.mesh.recipes import meshes_transformer

        return build_generator(
            meshes_transformer(tokenizer=str(tokenizer), text="none"), self.setting
        )

    def outputs(self, final: bool) -> Outputs:
        if self.transformer is None:
            return {"samples": mesh_sets.pad_faces([])}
        return self.transformer.outputs(final)


def generate(task: Any) -> Any:
    from tessera.objectives.generation import GenerationRequest

    request = GenerationRequest(prompts=[""] * NUM_SAMPLES, seeds=list(range(NUM_SAMPLES)))
    meshes = task.tokenizers["tokenizer"].to_media(task.generate(request))
    return mesh_sets.pad_faces(
        [mesh_sets.face_coordinates(grid_vertices(mesh), mesh.faces) for mesh in meshes]
    )


def grid_vertices(mesh: Any) -> Any:
    """Return the bin indices of vertices in a cube with a side of 1, (V, 3)."""
    import numpy as np

    return np.rint((mesh.vertices + 0.5) * (mesh_sets.BINS - 1)).astype(np.int64)


# ---- metrics


@dataclass
class GenerationJudge:
    """Compares samples with held-out meshes by the metrics of `tessera evaluate`."""

    metric: Any
    real: list[Any]
    others: list[Any]

    def __call__(self, outputs: Outputs) -> Metrics:
        import numpy as np

        from tessera.modalities.mesh.sample_metrics import canonicalize_sample

        rows = [row[row[:, 0] >= 0] for row in outputs["samples"]]
        meshes = [
            canonicalize_sample(to_mesh(row), mesh_sets.BINS) if len(row) else None for row in rows
        ]
        present = [mesh for mesh in meshes if mesh is not None]
        if not present:
            return {"valid": 0.0, "loose": 1.0, "distance": 1.0, "nearest": 1.0}
        ended = np.array([len(row) < mesh_sets.MAX_FACES for row in rows])
        values = self.metric.connectivity(meshes, ended, self.real, self.others)
        values |= self.metric.surfaces(present, self.real, self.others)
        return {
            "valid": values["valid_rate"],
            "loose": values["small_parts"],
            "distance": values["min_matching_distance"],
            "nearest": values["nearest_neighbour_accuracy"],
        }


def to_mesh(faces_F9: Any) -> Any:
    """Return a mesh in a cube with a side of 1; equal corners are one vertex."""
    import numpy as np

    from tessera.modalities.mesh.canonical import dequantize_vertices
    from tessera.modalities.mesh.media import Mesh

    corners, indices = np.unique(faces_F9.reshape(-1, 3), axis=0, return_inverse=True)
    return Mesh(dequantize_vertices(corners, mesh_sets.BINS), indices.reshape(-1, 3))


def build_judge(work: Path) -> Judge:
    from tessera.modalities.mesh.sample_metrics import MeshSampleMetric

    training, held_out = (
        mesh_sets.build_dataset(one(work)) for one in (mesh_sets.train_set, mesh_sets.held_out_set)
    )
    metric = MeshSampleMetric(training, mesh_sets.BINS, held_out)
    return GenerationJudge(metric, held_out.examples, training.examples[: len(held_out)])


ROW = Row(
    title="mesh transformer",
    package="package",
    sides={
        "package": SideSpec(partial(PackageSide, lr=2e-3), is_package=True),
        "package-2e-4": SideSpec(partial(PackageSide, lr=2e-4), is_package=True, is_optional=True),
        "ours": SideSpec(build_ours),
        "ours-third": SideSpec(build_ours, budget=1 / 3),
        "ours-meshgpt": SideSpec(MeshGPTSide, is_optional=True),
    },
    metrics=(
        Metric("valid", "valid meshes", higher_is_better=True, decimals=2),
        Metric("loose", "faces in parts of at most 3", higher_is_better=False, decimals=2),
        Metric("distance", "minimum matching distance", higher_is_better=False),
        Metric("nearest", "1-nearest-neighbour accuracy", higher_is_better=False, decimals=2),
    ),
    prepare=mesh_sets.prepare,
    build_judge=build_judge,
)
