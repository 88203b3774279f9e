"""The front doors of meshes: theirs in name and parameters, without the defects (shared facts:
SEEDS 5.5)."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

from tessera import Generator
from tessera.modalities.mesh.autoencoder import MeshAutoencoder, MeshAutoencoderConfig
from tessera.modalities.mesh.canonical import MeshExample
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.synthetic import generate_object
from tessera.modalities.mesh.transformer import MeshTransformer, MeshTransformerConfig
from tessera.nn.quantize import FSQConfig, ResidualConfig
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.run.load import Tokenizer, load_run
from tessera.text.learned import LearnedTextConfig
from tessera.trainers import MeshAutoencoderTrainer, MeshTransformerTrainer
from tests.fake_tracker import FakeTracker
from tests.runs import assert_same_run, read_metrics, tokenizer

BINS, MOST = 32, 64
TEXT = LearnedTextConfig(dim=16, depth=1, heads=2, vocab_size=300, max_len=32)


def toy(number: int) -> tuple[Mesh, str]:
    made = generate_object(3, number, MOST // 2)
    return Mesh(made.mesh.vertices, made.mesh.triangles()), made.caption


def meshes(count: int = 8, first: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """As the research code had them: vertices and faces, as tensors."""
    made = [toy(number)[0] for number in range(first, first + count)]
    return [
        (torch.from_numpy(mesh.vertices).float(), torch.from_numpy(mesh.faces)) for mesh in made
    ]


def captioned(count: int = 8) -> list[dict[str, Any]]:
    return [
        {"vertices": v, "faces": f, "texts": toy(number)[1]}
        for number, (v, f) in enumerate(meshes(count))
    ]


def autoencoder(**choices: Any) -> MeshAutoencoder:
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


def transformer(vocab_size: int = 16, **choices: Any) -> MeshTransformer:
    torch.manual_seed(1)
    config = MeshTransformerConfig(
        width=24, depth=1, heads=2, fine_dim=16, fine_depth=1, fine_heads=2, max_len=MOST, text=TEXT
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
    given = SMALL | {"checkpoint_folder": folder, "max_faces": MOST} | settings
    return MeshAutoencoderTrainer(
        given.pop("model", None) or autoencoder(), given.pop("dataset", meshes()), **given
    )


@pytest.fixture(scope="module")
def default_dependency(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An autoencoder's run."""
    place = tmp_path_factory.mktemp("runs") / "autoencoder"
    autoencoder_trainer(place, learning_rate=1e-3)()
    return place


def transformer_trainer(folder: Path, tokenizer: Path, **settings: Any) -> MeshTransformerTrainer:
    given = SMALL | {"checkpoint_folder": folder, "tokenizer": tokenizer} | settings
    return MeshTransformerTrainer(
        given.pop("model", None) or transformer(), given.pop("dataset", captioned()), **given
    )


def trained(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder) if record["kind"] == "train"]


# ---- their parameters


def test_their_parameters_and_defaults_are_the_documented_ones() -> None:
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
        "checkpoint_folder": "./checkpoints",
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
    for entry_point, settings in own.items():
        parameters = inspect.signature(entry_point).parameters
        documented = both | settings
        assert {name: parameters[name].default for name in documented} == documented
        for required in ("model", "dataset", "num_train_steps", "batch_size", "grad_accum_every"):
            assert parameters[required].default is inspect.Parameter.empty


def test_the_rate_asked_for_is_the_rate_used_and_the_warm_up_is_its(
    default_dependency: Path, tmp_path: Path
) -> None:
    """Theirs stayed at the rate divided by the steps of the warm-up."""
    autoencoder_trainer(tmp_path / "a", learning_rate=8e-3, warmup_steps=4)()
    transformer_trainer(
        tmp_path / "t", default_dependency, learning_rate=4e-3, warmup_steps=2, val_every=4
    )()
    assert [record["model/lr"] for record in trained(tmp_path / "a")] == pytest.approx(
        [2e-3, 4e-3, 6e-3, 8e-3]
    )
    assert [record["model/lr"] for record in trained(tmp_path / "t")] == pytest.approx(
        [2e-3, 4e-3, 4e-3, 4e-3]
    )


def test_decay_clipping_and_average_are_as_asked_and_else_theirs(tmp_path: Path) -> None:
    plain = autoencoder_trainer(tmp_path / "a")
    assert (
        plain.run.task.optimizer.betas,
        plain.run.task.optimizer.weight_decay,
        plain.run.task.optimizer.max_grad_norm,
    ) == ((0.9, 0.99), 0.0, None)
    assert (plain.run.engine.ema.decay, plain.run.engine.ema.update_after) == (0.9999, 100)
    told = autoencoder_trainer(
        tmp_path / "b",
        weight_decay=0.5,
        max_grad_norm=0.25,
        optimizer_kwargs={"eps": 1e-6},
        ema_kwargs={"beta": 0.5},
    )
    groups = told.engine.prepared["model"].optimizer.param_groups
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]  # matrices, and the rest
    assert {group["eps"] for group in groups} == {1e-6}
    assert (told.run.task.optimizer.max_grad_norm, told.run.engine.ema.decay) == (0.25, 0.5)


def test_accumulation_draws_as_many_meshes_as_it_says(tmp_path: Path) -> None:
    autoencoder_trainer(tmp_path, grad_accum_every=2, num_train_steps=1)()
    assert trained(tmp_path)[0]["examples"] == 4


def test_what_a_caller_gives_is_never_written_to(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "accelerator_kwargs": {"mixed_precision": "no"},
        "ema_kwargs": {"beta": 0.9},
        "optimizer_kwargs": {"eps": 1e-7},
        "scheduler_kwargs": {"floor": 0.1},
        "data_kwargs": ["vertices", "faces"],
    }
    before = json.dumps(given)
    autoencoder_trainer(tmp_path, **given)
    assert json.dumps(given) == before


# ---- what they learn from


def examples(entry_point: Any) -> list[MeshExample]:
    source = entry_point.engine.training.source
    return [source.item(index, np.random.default_rng(0)) for index in range(len(source))]


def test_tuples_and_dictionaries_are_the_same_meshes(tmp_path: Path) -> None:
    plain = meshes(4)
    edges = torch.zeros(3, 2, dtype=torch.long)

    class Named(list):
        data_kwargs = ("faces", "vertices")

    shapes: list[Any] = [
        plain,
        [(v.numpy(), f.numpy()) for v, f in plain],
        [(v, f, edges) for v, f in plain],
        [{"vertices": v, "faces": f, "texts": "a mesh"} for v, f in plain],
        Named([(f, v) for v, f in plain]),
    ]
    expected = [MeshExample.from_mesh(Mesh(v.numpy(), f.numpy()), BINS, "") for v, f in plain]
    for number, dataset in enumerate(shapes):
        found = examples(autoencoder_trainer(tmp_path / f"{number}", dataset=dataset))
        for one, other in zip(found, expected, strict=True):
            assert np.array_equal(one.vertices, other.vertices) and np.array_equal(
                one.faces, other.faces
            )
            assert np.array_equal(one.edges, other.edges), (
                "those that came along are of faces in another order"
            )


def test_quads_are_cut_for_a_network_of_triangles_and_kept_by_one_of_quads(tmp_path: Path) -> None:
    quads = [
        (made.mesh.vertices, made.mesh.faces)
        for made in (generate_object(3, number, MOST // 2) for number in range(4))
    ]
    cut = examples(autoencoder_trainer(tmp_path / "cut", dataset=quads))
    kept = examples(
        autoencoder_trainer(tmp_path / "kept", dataset=quads, model=autoencoder(corners=4))
    )
    assert [example.faces.shape[1] for example in cut + kept] == [3] * 4 + [4] * 4
    with pytest.raises(UserError, match="this network is one of quads"):
        autoencoder_trainer(tmp_path / "none", model=autoencoder(corners=4))()


def test_a_mesh_that_cannot_be_used_is_left_out_and_said_and_a_whole_set_of_them_is_refused(
    tmp_path: Path,
) -> None:
    vertices, faces = meshes(1)[0]
    wrong = {
        "NaN": (vertices * float("nan"), faces),
        "name vertices": (vertices, faces + 1000),
        "none is left": (vertices, faces[:0]),
        "more than the 64 allowed": (vertices, faces.repeat(40, 1)),
        "at most 3": (vertices, faces, faces, faces, faces),
        "did you mean 'vertices'": {"vertexes": vertices, "faces": faces},
        "it has no faces": {"vertices": vertices},
        "a text stands where face_edges": (vertices, faces, "a table"),
        "it is a Tensor": vertices,
    }
    settings = {"val_dataset": meshes(2), "batch_size": 4, "val_every": 4, "checkpoint_every": 4}
    autoencoder_trainer(
        tmp_path, dataset=[*meshes(7), *wrong.values()], **settings
    )()  # 16 in 4 steps: each comes once
    told = {one["example"]: one["reason"] for one in RunDirectory(tmp_path).noted("rejected.jsonl")}
    assert told.keys() == {f"mesh-{number:06d}" for number in range(7, 7 + len(wrong))}
    for number, (reason, item) in enumerate(wrong.items(), start=7):
        assert reason in told[f"mesh-{number:06d}"]
        with pytest.raises(UserError, match=reason):
            autoencoder_trainer(tmp_path / f"only {number}", dataset=[item] * 4)()


def test_they_learn_from_a_folder_and_theirs_is_a_run(tmp_path: Path) -> None:
    for number in range(8):
        mesh, caption = toy(number)
        mesh.save(tmp_path / f"meshes/{number}")
        (tmp_path / f"meshes/{number}.glb").unlink()
        (tmp_path / f"meshes/{number}.txt").write_text(caption)
    place = tmp_path / "autoencoder"
    autoencoder_trainer(place, dataset=tmp_path / "meshes", val_dataset=str(tmp_path / "meshes"))()
    assert Tokenizer(load_run(place)).grid == (MOST, 3)
    assert (place / "samples/000004/sheet.png").is_file() and (place / "README.md").is_file()
    transformer_trainer(tmp_path / "transformer", place, dataset=tmp_path / "meshes")()
    generator = Generator.load(tmp_path / "transformer")
    [made] = generator.generate("a table", seed=1)
    assert isinstance(made, Mesh)


def test_captions_of_a_dataset_are_learnt_from(default_dependency: Path, tmp_path: Path) -> None:
    entry_point = transformer_trainer(tmp_path, default_dependency)
    source = entry_point.engine.training.source
    assert sorted(source.caption(index) for index in range(len(source))) == sorted(
        toy(number)[1] for number in range(8)
    )
    with pytest.raises(UserError, match="Not one example has a caption"):
        transformer_trainer(tmp_path / "silent", default_dependency, dataset=meshes())
    transformer_trainer(
        tmp_path / "mute", default_dependency, dataset=meshes(), model=transformer(text=None)
    )()


def test_what_is_measured_is_as_many_batches_as_asked_of_the_set_that_was_given(
    tmp_path: Path,
) -> None:
    held_out = meshes(7, first=100)
    for number, (batches, grad_accum_steps, expected) in enumerate(
        [(2, 1, 4), (1, 2, 4), (9, 1, 7)]
    ):
        place = tmp_path / f"{number}"
        entry_point = autoencoder_trainer(
            place, val_dataset=held_out, val_num_batches=batches, grad_accum_every=grad_accum_steps
        )
        entry_point()
        validations = [record for record in read_metrics(place) if record["kind"] == "validation"]
        assert [(record["step"], record["examples"]) for record in validations] == [
            (2, expected),
            (4, expected),
        ]
    first = entry_point.engine.validation.source.item(0, np.random.default_rng(0))
    assert np.array_equal(
        first.faces, MeshExample.from_mesh(Mesh(*(part.numpy() for part in held_out[0])), BINS, "").faces
    )


# ---- their life


def test_calling_trains_and_the_weights_given_are_where_it_starts(
    default_dependency: Path, tmp_path: Path
) -> None:
    doors = [
        (autoencoder_trainer(tmp_path / "a", learning_rate=1e-3), autoencoder()),
        (
            transformer_trainer(tmp_path / "t", default_dependency, learning_rate=1e-3),
            transformer(),
        ),
    ]
    for entry_point, given in doors:
        start = dict(given.named_parameters())
        assert all(
            torch.equal(value, start[name]) for name, value in entry_point.model.named_parameters()
        )
        losses = entry_point.train_step()
        assert (
            entry_point.steps == 1
            and all(np.isfinite(value) for value in losses.values())
            and losses
        )
        heard: list[dict[str, Any]] = []
        entry_point(heard.append)
        assert entry_point.steps == 4 and [
            record["step"] for record in heard if record["kind"] == "train"
        ] == [2, 3, 4]
        assert not all(
            torch.equal(value, start[name]) for name, value in entry_point.model.named_parameters()
        )
        assert entry_point.train_step() == {}


def test_after_a_validation_at_every_step_the_transformer_learns_on_and_drops_conditions(
    default_dependency: Path, tmp_path: Path
) -> None:
    """Theirs stayed in eval mode after the first, and with it the share of dropped conditions
    became 0."""
    entry_point = transformer_trainer(
        tmp_path,
        default_dependency,
        val_every=1,
        cond_drop_prob=0.5,
        num_train_steps=12,
        checkpoint_every=12,
    )
    dropped: list[bool] = []
    training: list[bool] = []
    condition = entry_point.model.condition

    def noted(texts: Any, which: Any) -> Any:
        if torch.is_grad_enabled():
            dropped.extend(which)
            training.append(entry_point.model.training)
        return condition(texts, which)

    entry_point.model.condition = noted
    entry_point()
    assert training == [True] * 12
    assert 5 <= sum(dropped) <= 19, "of 24"
    assert sum(dropped[12:]) > 0


@pytest.mark.parametrize("kind", ["autoencoder", "transformer"])
def test_a_second_construction_goes_on_and_is_the_same_run(
    default_dependency: Path, tmp_path: Path, kind: str
) -> None:
    def entry_point(place: str) -> Any:
        settings: dict[str, Any] = {
            "learning_rate": 1e-3,
            "ema_kwargs": {"beta": 0.9, "update_after_step": 0},
        }
        if kind == "autoencoder":
            return autoencoder_trainer(tmp_path / place, **settings)
        return transformer_trainer(tmp_path / place, default_dependency, **settings)

    entry_point("whole")()
    first = entry_point("cut")
    for _ in range(3):
        first.train_step()
    first.engine.writer.wait()
    del first
    again = entry_point("cut")
    assert again.steps == 2
    again()
    assert_same_run(tmp_path / "whole", tmp_path / "cut", 4)


def test_what_was_saved_can_be_loaded(default_dependency: Path, tmp_path: Path) -> None:
    doors = {
        "a": lambda place: autoencoder_trainer(place, learning_rate=1e-3),
        "t": lambda place: transformer_trainer(place, default_dependency, learning_rate=1e-3),
    }
    for name, make in doors.items():
        entry_point = make(tmp_path / name)
        for _ in range(3):
            entry_point.train_step()
        entry_point.save(tmp_path / f"{name}-kept")
        other = make(tmp_path / f"{name}-other")
        other.load(tmp_path / f"{name}-kept")
        assert other.steps == 3
        mine = entry_point.engine.task.state_dict()
        for key, value in other.engine.task.state_dict().items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, mine[key])
        other()
        assert other.steps == 4


def test_tokenize_takes_items_and_gives_symbols_by_the_averaged_weights(tmp_path: Path) -> None:
    entry_point = autoencoder_trainer(
        tmp_path,
        learning_rate=0.05,
        ema_kwargs={"beta": 0.9, "update_after_step": 0, "update_every": 1},
    )
    entry_point()
    items = meshes(3)
    codes = entry_point.tokenize(items)
    counts = [len(MeshExample.from_mesh(Mesh(v.numpy(), f.numpy()), BINS, "").faces) for v, f in items]
    assert (
        codes.shape == (3, max(counts), 3, 2) and (codes[..., 0, 0] >= 0).sum(1).tolist() == counts
    )
    codec = Tokenizer(load_run(tmp_path))
    batch = entry_point.engine.training.source.collate(
        examples(autoencoder_trainer(tmp_path / "b", dataset=items))
    )
    assert torch.equal(codes, codec.model.encode(batch))
    assert not torch.equal(codes, entry_point.model.tokenize(batch)), "the live weights are others"


# ---- trackers


def test_inside_wandb_tracking_every_record_goes_to_the_project_and_outside_none_is_lost_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = type("OneTracker", (FakeTracker,), {"calls": []})
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", kind)
    entry_point = autoencoder_trainer(tmp_path, use_wandb_tracking=True)
    for start in (entry_point, entry_point.train, entry_point.train_step):
        with pytest.raises(UserError, match="no project was named"):
            start()
    assert kind.calls == []
    with entry_point.wandb_tracking("meshgpt", run="baseline", hps={"why": "to see"}):
        entry_point()
    assert kind.calls[0] == ("project", "meshgpt")
    settings = kind.calls[1][1]
    assert (settings["run_name"], settings["why"], settings["engine.steps"]) == (
        "baseline",
        "to see",
        4,
    )
    *logged, finished_last = kind.calls[2:]
    assert [entry[:2] for entry in logged] == [
        ("log", step) for step in (1, 2, 2, 3, 4, 4)
    ] and finished_last == ("finish",)
    other = autoencoder_trainer(tmp_path / "other")
    with (
        pytest.raises(UserError, match="without use_wandb_tracking=True"),
        other.wandb_tracking("meshgpt"),
    ):
        pass


# ---- refusals


@pytest.mark.parametrize(
    ("settings", "letter"),
    [
        ({"data_kwargs": ("vertices", "face")}, "'face'.*did you mean 'faces'"),
        ({"data_kwargs": ("vertices", "texts")}, "names only vertices, texts"),
        ({"val_dataset": []}, "val_dataset is empty"),
        ({"val_num_batches": 0}, "val_num_batches must be 1 or more"),
        ({"dataset": []}, "takes 2 examples, but the training set has 0"),
        (
            {"scheduler": torch.optim.lr_scheduler.StepLR},
            "StepLR.*'constant', 'warmup', 'cosine', 'wsd'",
        ),
        ({"scheduler_kwargs": {"T_max": 10}}, "scheduler_kwargs has T_max=10"),
        (
            {"optimizer_kwargs": {"filter_by_requires_grad": True}},
            "optimizer_kwargs has filter_by_requires_grad=True",
        ),
        ({"ema_kwargs": {"use_foreach": True}}, "ema_kwargs has use_foreach=True"),
        ({"accelerator_kwargs": {"split_batches": True}}, "split_batches"),
    ],
)
def test_what_has_no_meaning_here_is_refused_by_name_and_nothing_is_written(
    settings: dict[str, Any], letter: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=letter):
        autoencoder_trainer(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_a_transformer_that_does_not_fit_its_tokenizer_is_refused(
    default_dependency: Path, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError,
        match="built for 99 symbols, 6 in a face, but its tokenizer writes 16, 6 in a face",
    ):
        transformer_trainer(tmp_path / "run", default_dependency, model=transformer(vocab_size=99))
    with pytest.raises(
        ValueError, match="Meshes may have 64 faces, and this transformer knows 10 at most"
    ):
        transformer_trainer(tmp_path / "run", default_dependency, model=transformer(max_len=10))
    with pytest.raises(UserError, match="There is no run in"):
        transformer_trainer(tmp_path / "run", tmp_path / "nowhere")
    with pytest.raises(
        UserError, match="'images-vqgan', but a mesh transformer stands on meshes-autoencoder"
    ):
        transformer_trainer(tmp_path / "run", Path(tokenizer()))
    assert not (tmp_path / "run").exists()
