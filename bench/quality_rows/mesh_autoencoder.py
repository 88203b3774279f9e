"""The mesh tokenizer: meshgpt-pytorch's MeshAutoencoder with its own trainer, and ours.

All sides train on the same canonical meshes (`mesh_sets.py`) and have 3 tokens of 1,024 codes for
each corner of a face. The package has the channels of our preset small in its encoder and decoder,
its default losses, batch size 8 and a learning rate of 1e-3, of which its warm-up leaves a tenth in
the version that is compared; "package-1e-2" has ten times that.

ours: the recipe meshes-autoencoder with the defaults of its preset small.
ours-third: the same, with a schedule that ends after a third of the budget.

A mesh counts by the fraction of its held-out triangles of which all nine coordinates are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from time_to_quality import Judge, Metric, Metrics, Outputs, Row, Setting, SideInfo, SideSpec
from worker import count_parameters, package_versions

from quality_rows import mesh_sets

CODEBOOK_SIZE, NUM_QUANTIZERS = 1024, 3
STEPS_AT_ONCE = 8
"""Steps of one call of the package's loop, which restarts its data loader at each call."""
EVAL_BATCH_SIZE = 16


# ---- the package


def build_adapter(setting: Setting, lr: float) -> Any:
    """Return the adapter of the package's autoencoder, with the meshes of the row."""
    from peers.adapters import MeshAutoencoderAdapter

    return MeshAutoencoderAdapter(
        to_examples(mesh_sets.train_set(setting.work)),
        model={
            "num_discrete_coors": mesh_sets.BINS,
            "dim_coor_embed": 64,
            "dim_normal_embed": 64,
            "encoder_dims_through_depth": (64, 128, 128),
            "decoder_dims_through_depth": (128, 128, 128, 128),
            "dim_codebook": 128,
            "num_quantizers": NUM_QUANTIZERS,
            "codebook_size": CODEBOOK_SIZE,
        },
        trainer={"batch_size": 8, "learning_rate": lr},
    )


class PackageSide:
    """MeshAutoencoderTrainer; its outputs are those of its EMA weights, and of the raw ones."""

    def __init__(self, setting: Setting, *, lr: float):
        from peers.adapters import seed_everything

        seed_everything(setting.seed)
        self.adapter = build_adapter(setting, lr)
        model = self.adapter.build_model()
        self.trainer = self.adapter.build_trainer(model, setting.scratch / "results")
        self.meshes = to_examples(mesh_sets.held_out_set(setting.work))
        self.info = SideInfo(
            parameters=count_parameters(model),
            description=f"encoder 64, 128, 128, decoder of 4 x 128, LFQ of {NUM_QUANTIZERS} x "
            f"{CODEBOOK_SIZE} codes, learning rate {lr:g}, batch size 8",
            packages=package_versions("meshgpt-pytorch", "torch"),
        )

    def step(self) -> bool:
        self.adapter.train(self.trainer, STEPS_AT_ONCE)
        return True

    def outputs(self, final: bool) -> Outputs:
        return {
            "faces": self.reconstruct(self.trainer.ema_model.ema_model),
            "raw": self.reconstruct(self.trainer.unwrapped_model),
        }

    def reconstruct(self, model: Any) -> Any:
        import torch

        was_training = model.training
        model.eval()
        made = []
        with torch.no_grad():
            for vertices, faces in self.meshes:
                coordinates = model(
                    vertices=vertices[None], faces=faces[None], only_return_recon_faces=True
                )
                made.append(to_bins(coordinates[0]))
        model.train(was_training)
        return mesh_sets.pad_faces(made)


def to_examples(meshes: mesh_sets.MeshSet) -> list[tuple[Any, Any]]:
    """Return vertices at the centres of their bins in [-1, 1], and faces."""
    import torch

    return [
        (
            (torch.from_numpy(vertices).float() + 0.5) / mesh_sets.BINS * 2 - 1,
            torch.from_numpy(faces),
        )
        for vertices, faces in meshes.load()
    ]


def to_bins(coordinates_F33: Any) -> Any:
    """Convert the package's coordinates of faces to bin indices, (F, 9)."""
    bins = ((coordinates_F33 + 1) / 2 * mesh_sets.BINS - 0.5).round()
    return bins.reshape(-1, 9).numpy()


# ---- ours


def build_ours(setting: Setting) -> Any:
    from quality_rows.engine_side import build_side
    from tessera.data.dataset import Split
    from tessera.modalities.mesh.recipes import meshes_autoencoder
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    run = meshes_autoencoder()
    dataset = mesh_sets.build_dataset(mesh_sets.train_set(setting.work))
    held_out = mesh_sets.build_dataset(mesh_sets.held_out_set(setting.work))
    if run.data.bins != mesh_sets.BINS:
        raise SystemExit(f"The recipe has {run.data.bins} bins, the row {mesh_sets.BINS}.")

    def build(config: Any, folder: Path) -> Any:
        split = Split(dataset, dataset)
        return build_engine(replace(run, engine=config), RunDirectory(folder), split=split)

    def compute(task: Any, final: bool) -> Outputs:
        return {"faces": reconstruct(task, held_out)}

    return build_side(run.engine, build, setting, compute, "recipe meshes-autoencoder, small")


def reconstruct(task: Any, dataset: Any) -> Any:
    import torch

    made = []
    for start in range(0, len(dataset), EVAL_BATCH_SIZE):
        examples = dataset.examples[start : start + EVAL_BATCH_SIZE]
        with torch.no_grad():
            bins = task.model(dataset.collate(examples)).output.argmax(-1).numpy()
        made += [row[: len(example.faces)] for row, example in zip(bins, examples, strict=True)]
    return mesh_sets.pad_faces(made)


# ---- metrics


@dataclass
class TriangleJudge:
    """Compares reconstructed triangles with the held-out originals."""

    originals: list[Any]

    def __call__(self, outputs: Outputs) -> Metrics:
        """Return the metrics of `faces`, and those of other weights with a prefix."""
        metrics = self.compare(outputs["faces"])
        for name in outputs.keys() - {"faces"}:
            metrics |= {f"{name}/{key}": one for key, one in self.compare(outputs[name]).items()}
        return metrics

    def compare(self, made: Any) -> Metrics:
        import numpy as np

        pairs = [(row[: len(one)], one) for row, one in zip(made, self.originals, strict=True)]
        return {
            "triangles": float(np.mean([(a == b).all(1).mean() for a, b in pairs])),
            "coordinates": float(np.mean([(a == b).mean() for a, b in pairs])),
            "distance": float(np.mean([np.abs(a - b).mean() for a, b in pairs])),
        }


def build_judge(work: Path) -> Judge:
    meshes = mesh_sets.held_out_set(work).load()
    return TriangleJudge([mesh_sets.face_coordinates(*mesh).astype(int) for mesh in meshes])


ROW = Row(
    title="mesh autoencoder",
    package="package",
    sides={
        "package": SideSpec(partial(PackageSide, lr=1e-3), is_package=True),
        "package-1e-2": SideSpec(partial(PackageSide, lr=1e-2), is_package=True, is_optional=True),
        "ours": SideSpec(build_ours),
        "ours-third": SideSpec(build_ours, budget=1 / 3),
    },
    metrics=(
        Metric("triangles", "exact triangles", higher_is_better=True),
        Metric("coordinates", "exact coordinates", higher_is_better=True),
        Metric("distance", "distance of coordinates (bins)", higher_is_better=False, decimals=2),
    ),
    prepare=mesh_sets.prepare,
    build_judge=build_judge,
)
