"""The trainers for meshes: parameters of the research package, items in memory and tracking."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from tessera import Generator, Tokenizer
from tessera.modalities.mesh.autoencoder import MeshAutoencoder, MeshAutoencoderConfig
from tessera.modalities.mesh.canonical import MeshExample
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.synthetic import generate_object
from tessera.modalities.mesh.transformer import MeshTransformer, MeshTransformerConfig
from tessera.nn.quantize import FSQConfig, ResidualConfig
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.text.learned import LearnedTextConfig
from tessera.trainers import MeshAutoencoderTrainer, MeshTransformerTrainer
from tests.fake_tracker import FakeTracker
from tests.runs import assert_same_run, read_metrics, tokenizer

BINS, MAX_FACES = 32, 64
TEXT = LearnedTextConfig(dim=16, depth=1, heads=2, vocab_size=300, max_len=32)


def make_mesh(number: int) -> tuple[Mesh, str]:
    created = generate_object(3, number, MAX_FACES // 2)
    return Mesh(created.mesh.vertices, created.mesh.triangles()), created.caption


def make_items(count: int = 8, first: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return tuples of vertices and faces, the items of the research package."""
    created = [make_mesh(number)[0] for number in range(first, first + count)]
    return [
        (torch.from_numpy(mesh.vertices).float(), torch.from_numpy(mesh.faces)) for mesh in created
    ]


def make_items_with_texts(count: int = 8) -> list[dict[str, Any]]:
    return [
        {"vertices": vertices, "faces": faces, "texts": make_mesh(number)[1]}
        for number, (vertices, faces) in enumerate(make_items(count))
    ]


def build_autoencoder(**choices: Any) -> MeshAutoencoder:
    torch.manual_seed(0)
    config = MeshAutoencoderConfig(
        bins=BINS,
        coordinate_dim=8,
        angle_dim=4,
        area_dim=4,
        normal_dim=4,
        encoder=(12, 12),
        code_dim=8,
        decoder=(12,),
        quantizer=ResidualConfig(quantizer=FSQConfig(levels=(4, 4)), num_quantizers=2),
    )
    return MeshAutoencoder(replace(config, **choices))


def build_transformer(vocab_size: int = 16, **choices: Any) -> MeshTransformer:
    torch.manual_seed(1)
    config = MeshTransformerConfig(
        dim=24,
        depth=1,
        heads=2,
        fine_dim=16,
        fine_depth=1,
        fine_heads=2,
        max_len=MAX_FACES,
        text=TEXT,
    )
    return replace(config, **choices).build(vocab_size, 3, 2)


SMALL = {
    "num_train_steps": 4,
    "batch_size": 2,
    "grad_accum_every": 1,
    "val_every": 2,
    "val_num_batches": 2,
    "checkpoint_every": 2,
    "warmup_steps": 0,
}


def autoencoder_trainer(folder: Path, **settings: Any) -> MeshAutoencoderTrainer:
    arguments = SMALL | {"checkpoint_folder": folder, "max_faces": MAX_FACES} | settings
    model = arguments.pop("model", None) or build_autoencoder()
    return MeshAutoencoderTrainer(model, arguments.pop("dataset", make_items()), **arguments)


@pytest.fixture(scope="module")
def autoencoder_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of a trained autoencoder."""
    folder = tmp_path_factory.mktemp("runs") / "autoencoder"
    autoencoder_trainer(folder, learning_rate=1e-3)()
    return folder


def transformer_trainer(folder: Path, tokenizer: Path, **settings: Any) -> MeshTransformerTrainer:
    arguments = SMALL | {"checkpoint_folder": folder, "tokenizer": tokenizer} | settings
    model = arguments.pop("model", None) or build_transformer()
    dataset = arguments.pop("dataset", make_items_with_texts())
    return MeshTransformerTrainer(model, dataset, **arguments)


def read_train_records(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder) if record["kind"] == "train"]


def canonicalize(item: Sequence[torch.Tensor]) -> MeshExample:
    vertices, faces = item
    return MeshExample.from_mesh(Mesh(vertices.numpy(), faces.numpy()), BINS, "")


# ---- parameters


def test_parameters_and_defaults_are_those_of_the_research_package() -> None:
    both = {
        "val_dataset": None,
        "val_num_batches": 5,
        "weight_decay": 0.0,
        "ema_kwargs": None,
        "scheduler": None,
        "scheduler_kwargs": None,
        "warmup_steps": 1000,
        "accelerator_kwargs": None,
        "optimizer_kwargs": None,
        "checkpoint_every": 1000,
        "use_wandb_tracking": False,
    }
    edges = ("vertices", "faces", "face_edges")
    own = {
        MeshAutoencoderTrainer: {
            "val_every": 100,
            "learning_rate": 1e-4,
            "max_grad_norm": None,
            "data_kwargs": edges,
        },
        MeshTransformerTrainer: {
            "val_every": 1,
            "learning_rate": 2e-4,
            "max_grad_norm": 0.5,
            "data_kwargs": (*edges, "texts"),
        },
    }
    for trainer_class, settings in own.items():
        parameters = inspect.signature(trainer_class).parameters
        documented = both | settings
        assert {name: parameters[name].default for name in documented} == documented
        for required in ("model", "dataset", "num_train_steps", "batch_size", "grad_accum_every"):
            assert parameters[required].default is inspect.Parameter.empty


def test_the_learning_rate_reaches_its_peak_after_the_warm_up(
    autoencoder_run: Path, tmp_path: Path
) -> None:
    """In the research package it stays at the peak divided by the number of warm-up steps."""
    autoencoder_trainer(tmp_path / "a", learning_rate=8e-3, warmup_steps=4)()
    transformer_trainer(
        tmp_path / "t", autoencoder_run, learning_rate=4e-3, warmup_steps=2, val_every=4
    )()
    assert [record["model/lr"] for record in read_train_records(tmp_path / "a")] == pytest.approx(
        [2e-3, 4e-3, 6e-3, 8e-3]
    )
    assert [record["model/lr"] for record in read_train_records(tmp_path / "t")] == pytest.approx(
        [2e-3, 4e-3, 4e-3, 4e-3]
    )


def test_optimizer_and_ema_settings_are_used_and_default_to_the_research_package(
    tmp_path: Path,
) -> None:
    default = autoencoder_trainer(tmp_path / "a").run
    optimizer, ema = default.task.optimizer, default.engine.ema
    assert optimizer.betas == (0.9, 0.99)
    assert (optimizer.weight_decay, optimizer.max_grad_norm) == (0.0, None)
    assert (ema.decay, ema.update_after) == (0.9999, 100)
    trainer = autoencoder_trainer(
        tmp_path / "b",
        weight_decay=0.5,
        max_grad_norm=0.25,
        optimizer_kwargs={"eps": 1e-6},
        ema_kwargs={"beta": 0.5},
    )
    groups = trainer.engine.updates["model"].optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]  # matrices, and the rest
    assert {group["eps"] for group in groups} == {1e-6}
    assert trainer.run.task.optimizer.max_grad_norm == 0.25
    assert trainer.run.engine.ema.decay == 0.5


def test_gradient_accumulation_multiplies_the_meshes_of_a_step(tmp_path: Path) -> None:
    autoencoder_trainer(tmp_path, grad_accum_every=2, num_train_steps=1)()
    assert read_train_records(tmp_path)[0]["examples"] == 4


def test_dictionaries_of_the_caller_are_never_modified(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "accelerator_kwargs": {"mixed_precision": "no"},
        "ema_kwargs": {"beta": 0.9},
        "optimizer_kwargs": {"eps": 1e-7},
        "scheduler_kwargs": {"min_lr_ratio": 0.1},
        "data_kwargs": ["vertices", "faces"],
    }
    before = json.dumps(given)
    autoencoder_trainer(tmp_path, **given)
    assert json.dumps(given) == before


# ---- datasets


def load_examples(trainer: Any) -> list[MeshExample]:
    dataset = trainer.engine.training.dataset
    return [dataset.item(index, np.random.default_rng(0)) for index in range(len(dataset))]


def test_tuples_and_dictionaries_give_the_same_examples(tmp_path: Path) -> None:
    items = make_items(4)
    edges = torch.zeros(3, 2, dtype=torch.long)

    class NamedItems(list):
        data_kwargs = ("faces", "vertices")

    datasets: list[Any] = [
        items,
        [(vertices.numpy(), faces.numpy()) for vertices, faces in items],
        [(vertices, faces, edges) for vertices, faces in items],
        [{"vertices": v, "faces": f, "texts": "a mesh"} for v, f in items],
        NamedItems([(faces, vertices) for vertices, faces in items]),
    ]
    expected = [canonicalize(item) for item in items]
    for number, dataset in enumerate(datasets):
        examples = load_examples(autoencoder_trainer(tmp_path / f"{number}", dataset=dataset))
        for example, other in zip(examples, expected, strict=True):
            assert np.array_equal(example.vertices, other.vertices)
            assert np.array_equal(example.faces, other.faces)
            assert np.array_equal(example.edges, other.edges), "given edges are of another order"


def test_quads_become_triangles_unless_the_model_has_quads(tmp_path: Path) -> None:
    objects = [generate_object(3, number, MAX_FACES // 2) for number in range(4)]
    quads = [(one.mesh.vertices, one.mesh.faces) for one in objects]
    triangles = load_examples(autoencoder_trainer(tmp_path / "triangles", dataset=quads))
    model = build_autoencoder(corners=4)
    kept = load_examples(autoencoder_trainer(tmp_path / "quads", dataset=quads, model=model))
    assert [example.faces.shape[1] for example in triangles + kept] == [3] * 4 + [4] * 4
    with pytest.raises(UserError, match="its faces are triangles, but the model was built for qu"):
        autoencoder_trainer(tmp_path / "none", model=model)()


def test_unusable_meshes_are_skipped_and_listed_unless_all_are_unusable(tmp_path: Path) -> None:
    vertices, faces = make_items(1)[0]
    unusable = {
        "NaN": (vertices * float("nan"), faces),
        "must refer to vertices 0 to 25": (vertices, faces + 1000),
        "none is left": (vertices, faces[:0]),
        "more than max_faces 64": (vertices, faces.repeat(40, 1)),
        "at most 3": (vertices, faces, faces, faces, faces),
        "did you mean 'vertices'": {"vertexes": vertices, "faces": faces},
        "it has no faces": {"vertices": vertices},
        "its face_edges are a text": (vertices, faces, "a table"),
        "it is a Tensor": vertices,
        "its vertices are a str, but must be a tensor": ("a table", faces),
    }
    settings = {
        "val_dataset": make_items(2),
        "batch_size": 4,
        "val_every": 4,
        "checkpoint_every": 4,
    }
    # 16 meshes in 4 steps: each of them is loaded once.
    readable = 16 - len(unusable)
    dataset = [*make_items(readable), *unusable.values()]
    autoencoder_trainer(tmp_path, dataset=dataset, **settings)()
    notes = RunDirectory(tmp_path).read_notes("rejected.jsonl")
    reasons = {note["example"]: note["reason"] for note in notes}
    assert reasons.keys() == {f"mesh-{number:06d}" for number in range(readable, 16)}
    for number, (reason, item) in enumerate(unusable.items(), start=readable):
        assert reason in reasons[f"mesh-{number:06d}"]
        with pytest.raises(UserError, match=reason):
            autoencoder_trainer(tmp_path / f"only {number}", dataset=[item] * 4)()


def test_training_on_a_folder_leaves_complete_run_directories(tmp_path: Path) -> None:
    for number in range(8):
        mesh, caption = make_mesh(number)
        mesh.save(tmp_path / f"meshes/{number}")
        (tmp_path / f"meshes/{number}.glb").unlink()
        (tmp_path / f"meshes/{number}.txt").write_text(caption)
    folder = tmp_path / "autoencoder"
    meshes = tmp_path / "meshes"
    autoencoder_trainer(folder, dataset=meshes, val_dataset=str(meshes))()
    assert Tokenizer.load(folder).grid == (MAX_FACES, 3)
    assert (folder / "samples/000004/sheet.png").is_file() and (folder / "README.md").is_file()
    transformer_trainer(tmp_path / "transformer", folder, dataset=meshes)()
    generator = Generator.load(tmp_path / "transformer")
    [mesh] = generator.generate("a table", seed=1).media
    assert isinstance(mesh, Mesh)


def test_the_transformer_is_trained_on_the_texts_of_a_dataset(
    autoencoder_run: Path, tmp_path: Path
) -> None:
    dataset = transformer_trainer(tmp_path, autoencoder_run).engine.training.dataset
    captions = sorted(dataset.caption(index) for index in range(len(dataset)))
    assert captions == sorted(make_mesh(number)[1] for number in range(8))
    with pytest.raises(UserError, match="No example has a caption"):
        transformer_trainer(tmp_path / "no texts", autoencoder_run, dataset=make_items())
    transformer_trainer(
        tmp_path / "without text encoder",
        autoencoder_run,
        dataset=make_items(),
        model=build_transformer(text=None),
    )()


def test_validation_evaluates_the_requested_number_of_batches(tmp_path: Path) -> None:
    held_out = make_items(7, first=100)
    for number, (batches, grad_accum_steps, expected) in enumerate(
        [(2, 1, 4), (1, 2, 4), (9, 1, 7)]
    ):
        folder = tmp_path / f"{number}"
        trainer = autoencoder_trainer(
            folder, val_dataset=held_out, val_num_batches=batches, grad_accum_every=grad_accum_steps
        )
        trainer()
        validations = [record for record in read_metrics(folder) if record["kind"] == "validation"]
        assert [(record["step"], record["examples"]) for record in validations] == [
            (2, expected),
            (4, expected),
        ]
    first = trainer.engine.validation.dataset.item(0, np.random.default_rng(0))
    assert np.array_equal(first.faces, canonicalize(held_out[0]).faces)


# ---- training, resuming and saving


def test_calling_a_trainer_trains_from_the_given_weights(
    autoencoder_run: Path, tmp_path: Path
) -> None:
    models = build_autoencoder(), build_transformer()
    settings: dict[str, Any] = {"learning_rate": 1e-3}
    trainers = [
        autoencoder_trainer(tmp_path / "a", model=models[0], **settings),
        transformer_trainer(tmp_path / "t", autoencoder_run, model=models[1], **settings),
    ]
    for trainer, given in zip(trainers, models, strict=True):
        assert trainer.model is given
        initial = {name: value.clone() for name, value in given.named_parameters()}
        losses = trainer.train_step()
        assert trainer.steps == 1
        assert losses and all(np.isfinite(value) for value in losses.values())
        records: list[dict[str, Any]] = []
        trainer(records.append)
        assert trainer.steps == 4
        assert [record["step"] for record in records if record["kind"] == "train"] == [2, 3, 4]
        assert not all(
            torch.equal(value, initial[name]) for name, value in trainer.model.named_parameters()
        )
        assert trainer.train_step() == {}


def test_validation_at_every_step_does_not_end_train_mode(
    autoencoder_run: Path, tmp_path: Path
) -> None:
    """The research package stays in eval mode, in which no condition is dropped any more."""
    trainer = transformer_trainer(
        tmp_path,
        autoencoder_run,
        val_every=1,
        cond_drop_prob=0.5,
        num_train_steps=12,
        checkpoint_every=12,
    )
    dropped: list[bool] = []
    training: list[bool] = []
    condition = trainer.model.condition

    def record_condition(texts: Any, is_dropped: Any = ()) -> Any:
        if torch.is_grad_enabled():
            dropped.extend((~texts.has_text_B).tolist())
            training.append(trainer.model.training)
        return condition(texts, is_dropped)

    trainer.model.condition = record_condition
    trainer()
    assert training == [True] * 12
    assert 5 <= sum(dropped) <= 19, "of 24"
    assert sum(dropped[12:]) > 0


@pytest.mark.parametrize("kind", ["autoencoder", "transformer"])
def test_a_trainer_constructed_again_resumes_the_same_run(
    autoencoder_run: Path, tmp_path: Path, kind: str
) -> None:
    def build_trainer(name: str) -> Any:
        settings: dict[str, Any] = {
            "learning_rate": 1e-3,
            "ema_kwargs": {"beta": 0.9, "update_after_step": 0},
        }
        if kind == "autoencoder":
            return autoencoder_trainer(tmp_path / name, **settings)
        return transformer_trainer(tmp_path / name, autoencoder_run, **settings)

    build_trainer("whole")()
    first = build_trainer("resumed")
    for _ in range(3):
        first.train_step()
    first.engine.saver.writer.wait()
    del first
    again = build_trainer("resumed")
    assert again.steps == 2
    again()
    assert_same_run(tmp_path / "whole", tmp_path / "resumed", 4)


def test_a_saved_checkpoint_can_be_loaded_by_another_trainer(
    autoencoder_run: Path, tmp_path: Path
) -> None:
    trainers = {
        "a": lambda folder: autoencoder_trainer(folder, learning_rate=1e-3),
        "t": lambda folder: transformer_trainer(folder, autoencoder_run, learning_rate=1e-3),
    }
    for name, build_trainer in trainers.items():
        trainer = build_trainer(tmp_path / name)
        for _ in range(3):
            trainer.train_step()
        trainer.save(tmp_path / f"{name}-saved")
        other = build_trainer(tmp_path / f"{name}-other")
        other.load(tmp_path / f"{name}-saved")
        assert other.steps == 3
        saved = trainer.engine.task.state_dict()
        for key, value in other.engine.task.state_dict().items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, saved[key])
        other()
        assert other.steps == 4


def test_tokenize_encodes_items_with_the_ema_weights(tmp_path: Path) -> None:
    trainer = autoencoder_trainer(
        tmp_path,
        learning_rate=0.05,
        ema_kwargs={"beta": 0.9, "update_after_step": 0, "update_every": 1},
    )
    trainer()
    items = make_items(3)
    codes = trainer.tokenize(items)
    counts = [len(canonicalize(item).faces) for item in items]
    assert codes.shape == (3, max(counts), 3, 2)
    assert (codes[..., 0, 0] >= 0).sum(1).tolist() == counts
    batch = trainer.engine.training.dataset.collate(
        load_examples(autoencoder_trainer(tmp_path / "b", dataset=items))
    )
    assert torch.equal(codes, Tokenizer.load(tmp_path).model.encode(batch))
    assert not torch.equal(codes, trainer.model.tokenize(batch)), "the raw weights differ"


# ---- trackers


def test_records_are_tracked_inside_wandb_tracking_and_rejected_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = type("OneTracker", (FakeTracker,), {"calls": []})
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", tracker)
    trainer = autoencoder_trainer(tmp_path, use_wandb_tracking=True)
    for train in (trainer, trainer.train, trainer.train_step):
        with pytest.raises(UserError, match="no project was given"):
            train()
    assert tracker.calls == []
    with trainer.wandb_tracking("meshgpt", run="baseline", hps={"why": "to see"}):
        trainer()
    assert tracker.calls[0] == ("project", "meshgpt", "baseline")
    settings = tracker.calls[1][1]
    assert (settings["run_name"], settings["why"], settings["engine.steps"]) == (
        "baseline",
        "to see",
        4,
    )
    *logged, last = tracker.calls[2:]
    assert [call[:2] for call in logged] == [("log", step) for step in (1, 2, 2, 3, 4, 4)]
    assert last == ("finish",)
    other = autoencoder_trainer(tmp_path / "other")
    with (
        pytest.raises(UserError, match="without use_wandb_tracking=True"),
        other.wandb_tracking("meshgpt"),
    ):
        pass


# ---- invalid arguments


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data_kwargs": ("vertices", "face")}, "'face'.*did you mean 'faces'"),
        ({"data_kwargs": ("vertices", "texts")}, "has only vertices, texts, but a mesh needs"),
        ({"val_dataset": []}, "val_dataset is empty"),
        ({"val_num_batches": 0}, "val_num_batches is less than 1, .*: use 1 or more"),
        ({"dataset": []}, "The batch size is 2, but the training set has 0 examples"),
        (
            {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            "ReduceLROnPlateau.*'constant', 'warmup', 'cosine', 'wsd'",
        ),
        ({"scheduler_kwargs": {"T_max": 10}}, "scheduler_kwargs has T_max=10"),
        (
            {"optimizer_kwargs": {"filter_by_requires_grad": True}},
            "optimizer_kwargs has filter_by_requires_grad=True",
        ),
        ({"ema_kwargs": {"use_foreach": True}}, "ema_kwargs has use_foreach=True"),
        ({"accelerator_kwargs": {"split_batches": True}}, "accelerator_kwargs has split_batches"),
    ],
)
def test_invalid_arguments_are_rejected_before_anything_is_written(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        autoencoder_trainer(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_transformer_that_does_not_fit_its_tokenizer_is_rejected(
    autoencoder_run: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError,
        match="built for 99 codes and 6 tokens per face, but its tokenizer has 16 codes and 6",
    ):
        model = build_transformer(vocab_size=99)
        transformer_trainer(tmp_path / "run", autoencoder_run, model=model)
    with pytest.raises(
        ValueError, match="Meshes may have 64 faces, but the transformer supports at most 10"
    ):
        transformer_trainer(tmp_path / "run", autoencoder_run, model=build_transformer(max_len=10))
    with pytest.raises(UserError, match="There is no run in"):
        transformer_trainer(tmp_path / "run", tmp_path / "nowhere")
    with pytest.raises(
        UserError, match="'images-vqgan', but a mesh transformer needs .* run of meshes-autoencoder"
    ):
        transformer_trainer(tmp_path / "run", Path(tokenizer()))
    assert not (tmp_path / "run").exists()


# ---- defaults


def test_both_trainers_have_a_folder_of_their_own_by_default() -> None:
    folders = {
        inspect.signature(trainer).parameters["checkpoint_folder"].default
        for trainer in (MeshAutoencoderTrainer, MeshTransformerTrainer)
    }
    assert folders == {"./checkpoints/mesh-autoencoder", "./checkpoints/mesh-transformer"}


def test_without_a_val_dataset_validation_is_as_rare_as_checkpoints(
    autoencoder_run: Path, tmp_path: Path
) -> None:
    settings = {"val_every": 1, "checkpoint_every": 3}
    transformer_trainer(tmp_path / "none", autoencoder_run, **settings)()
    held_out = make_items_with_texts(2)
    transformer_trainer(tmp_path / "given", autoencoder_run, val_dataset=held_out, **settings)()
    steps = {
        name: [one["step"] for one in read_metrics(tmp_path / name) if one["kind"] == "validation"]
        for name in ("none", "given")
    }
    assert steps == {"none": [3, 4], "given": [1, 2, 3, 4]}


class CountingItems(list):
    """Items that count how often they are read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return super().__getitem__(index)


def test_the_constructor_reads_each_item_once(autoencoder_run: Path, tmp_path: Path) -> None:
    items = CountingItems([*make_items_with_texts(8), ("unreadable", None, None, "text")])
    transformer_trainer(tmp_path, autoencoder_run, dataset=items)
    assert items.reads == len(items)
