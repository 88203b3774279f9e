"""All commands on runs of meshes: metrics of samples, completion, and unsuitable tokenizers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.recipes import meshes_autoencoder, meshes_transformer
from tests.cli_runner import run_invalid, tessera
from tests.runs import build_tiny, mesh_tokenizer, tiny, train

SAMPLE_METRICS = {"eos_rate", "valid_rate", "valid_rate_real"}
NOVELTY_METRICS = {"novelty", "nearest_chamfer_bins"}


def build_box() -> Mesh:
    vertices = np.array([[x, y, z] for x in (0, 1.0) for y in (0, 1.0) for z in (0, 1.0)])
    quads = np.array(
        [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
    )
    return Mesh(vertices, quads)


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "captioned"
    train(folder, build_tiny(meshes_transformer))
    return folder


@pytest.fixture(scope="module")
def unconditional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "unconditional"
    train(folder, tiny("meshes-transformer without text", steps=2))
    return folder


def evaluate(run: str | Path, out: Path, *flags: str | Path) -> dict[str, Any]:
    result = tessera("evaluate", run, *flags, "--out", out)
    assert result.code == 0, result
    return json.loads(out.read_text())


@pytest.mark.parametrize("kind", ["captioned", "unconditional"])
def test_samples_of_mesh_generators_are_evaluated(kind, request, tmp_path):
    run = request.getfixturevalue(kind)
    evaluation = evaluate(run, tmp_path / "evaluation.json", "--samples", "3")
    raw, ema = evaluation["metrics"]["raw"], evaluation["metrics"]["ema"]
    assert ema.keys() >= SAMPLE_METRICS and not raw.keys() & SAMPLE_METRICS
    assert {"perplexity", "accuracy", "eos_accuracy"} <= ema.keys()
    protocol = evaluation["protocol"]["sample_metrics"]
    assert protocol["samples"] == 3 and "sampling" in protocol
    assert all(0 <= ema[name] <= 1 for name in SAMPLE_METRICS)


def test_no_samples_are_evaluated_on_request_or_on_other_data(captioned, tmp_path):
    meshes = tmp_path / "meshes"
    meshes.mkdir()
    (meshes / "box.obj").write_text(build_box().to_obj())
    for flags in (("--samples", "0"), ("--data", meshes)):
        evaluation = evaluate(captioned, tmp_path / "evaluation.json", *flags)
        metrics = evaluation["metrics"]["ema"]
        assert not metrics.keys() & (SAMPLE_METRICS | NOVELTY_METRICS)
        assert "sample_metrics" not in evaluation["protocol"]


def test_mesh_tokenizer_is_evaluated_by_its_reconstructions_only(tmp_path):
    metrics = evaluate(mesh_tokenizer(), tmp_path / "evaluation.json")["metrics"]["ema"]
    assert {"triangle_accuracy", "coordinate_accuracy", "chamfer_bins"} <= metrics.keys()
    assert not metrics.keys() & SAMPLE_METRICS


def test_prompts_and_partial_meshes_give_glb_and_obj_files(captioned, tmp_path):
    (tmp_path / "part.obj").write_text(build_box().to_obj())
    for name, flags in (
        ("prompt", ("--prompt", "a wide table")),
        ("completion", ("--data", tmp_path / "part.obj")),
    ):
        out = tmp_path / name
        common = ("--count", "2", "--temperature", "0.5", "--out", out)
        result = tessera("sample", captioned, *flags, *common)
        assert result.code == 0, result
        names = {file.name for file in out.iterdir()}
        assert names >= {"0000.glb", "0001.obj", "sheet.png", "settings.json"}


def test_meshes_are_decoded_under_the_names_of_their_originals(tmp_path):
    codes, out = tmp_path / "codes", tmp_path / "decoded"
    (tmp_path / "meshes").mkdir()
    (tmp_path / "meshes/box.obj").write_text(build_box().to_obj())
    run = mesh_tokenizer()
    assert tessera("tokenize", run, "--data", tmp_path / "meshes", "--out", codes).code == 0
    result = tessera("decode", run, codes, "--out", out)
    assert result.code == 0, result
    assert len(Mesh.load(out / "box.obj").faces)


@pytest.mark.parametrize("polygons", ["triangles", "quads"])
def test_both_recipes_train_on_boxes_and_single_faces(polygons, tmp_path):
    """A mesh of one face has no neighbouring faces."""
    meshes = tmp_path / "meshes"
    meshes.mkdir()
    face = Mesh(build_box().vertices, build_box().faces[:1])
    for number, mesh in enumerate([face, build_box()] * 6):
        (meshes / f"{number:02}.obj").write_text(mesh.to_obj())
        (meshes / f"{number:02}.txt").write_text("a box" if number % 2 else "a face")
    common = (
        *("--preset", "tiny", "--steps", "2"),
        *("--data", meshes, "--data.polygons", polygons),
    )
    corners = ("--task.model.corners", "4" if polygons == "quads" else "3")
    autoencoder, transformer = tmp_path / "autoencoder", tmp_path / "transformer"
    for command in (
        ("train", "meshes-autoencoder", *common, *corners, "--out", autoencoder),
        ("train", "meshes-transformer", *common, "--tokenizer", autoencoder, "--out", transformer),
        (
            "sample",
            transformer,
            "--data",
            meshes / "00.obj",
            "--count",
            "2",
            "--out",
            tmp_path / "samples",
        ),
    ):
        result = tessera(*command)
        assert result.code == 0, result
    assert len(list((tmp_path / "samples").glob("*.obj"))) == 2


@pytest.mark.parametrize("change", ["bins", "quantizers"])
def test_autoencoder_of_another_kind_is_rejected(captioned, change, tmp_path):
    """Other bins do not fit the data; other quantizers are not those the run was started with.

    Without `--data.bins` a run takes the bins of its tokenizer.
    """
    run = meshes_autoencoder("tiny")
    data, model = run.data, run.task.model
    if change == "bins":
        data, model = dataclasses.replace(data, bins=16), dataclasses.replace(model, bins=16)
    else:
        quantizer = dataclasses.replace(model.quantizer, num_quantizers=3)
        model = dataclasses.replace(model, quantizer=quantizer)
    task = dataclasses.replace(run.task, model=model)
    engine = dataclasses.replace(run.engine, steps=1)
    train(tmp_path / "other", dataclasses.replace(run, task=task, data=data, engine=engine))
    message = run_invalid(
        *("train", "meshes-transformer", "--preset", "tiny", "--steps", "30"),
        *("--tokenizer", tmp_path / "other"),
        *(("--data.bins", "32") if change == "bins" else ()),
        *("--out", captioned if change == "quantizers" else tmp_path / "new"),
    )
    assert ("is another one" if change == "quantizers" else "--data.bins 16") in message
