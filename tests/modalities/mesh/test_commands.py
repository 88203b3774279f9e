"""The verbs on runs of meshes: what `evaluate` tells of samples, what `sample` completes, and which
tokenizers do not fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.recipes import meshes_autoencoder, meshes_transformer
from tests.cli_runner import run_invalid, tessera
from tests.runs import build_tiny, mesh_tokenizer, tiny, train

OF_SAMPLES = {"eos_rate", "valid_rate", "training_valid_rate"}
OF_WHAT_IS_NEW = {"novelty", "nearest_chamfer_bins"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "meshes"
    train(place, build_tiny(meshes_transformer))
    return place


@pytest.fixture(scope="module")
def wordless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs") / "wordless"
    train(place, tiny("meshes-transformer without text", steps=2))
    return place


@pytest.mark.parametrize("kind", ["run", "wordless"])
def test_a_mesh_generator_is_evaluated_with_a_judge_with_and_without_words(kind, request, tmp_path):
    place = request.getfixturevalue(kind)
    said = tessera("evaluate", place, "--samples", "3", "--out", tmp_path / "numbers.json")
    assert said.code == 0 and "valid_rate" in said.out, said
    found = json.loads((tmp_path / "numbers.json").read_text())
    assert (
        found["numbers"]["ema"].keys() >= OF_SAMPLES
        and not found["numbers"]["raw"].keys() & OF_SAMPLES
    )
    assert {"perplexity", "accuracy", "end_accuracy"} <= found["numbers"]["ema"].keys()
    assert found["protocol"]["judged"]["samples"] == 3 and "sampling" in found["protocol"]["judged"]
    assert all(0 <= found["numbers"]["ema"][name] <= 1 for name in OF_SAMPLES)


def test_without_samples_and_on_other_data_no_judge_is_asked(run, tmp_path):
    imagined = tmp_path / "meshes"
    imagined.mkdir()
    (imagined / "box.obj").write_text(box().to_obj())
    for flags in (["--samples", "0"], ["--data", imagined]):
        assert tessera("evaluate", run, *flags, "--out", tmp_path / "numbers.json").code == 0
        found = json.loads((tmp_path / "numbers.json").read_text())
        assert (
            not found["numbers"]["ema"].keys() & (OF_SAMPLES | OF_WHAT_IS_NEW)
            and "judged" not in found["protocol"]
        )


def test_a_mesh_tokenizer_is_evaluated_by_what_it_rebuilds_alone(tmp_path):
    assert tessera("evaluate", mesh_tokenizer(), "--out", tmp_path / "numbers.json").code == 0
    numbers = json.loads((tmp_path / "numbers.json").read_text())["numbers"]["ema"]
    assert {
        "triangle_accuracy",
        "coordinate_accuracy",
        "chamfer_bins",
    } <= numbers.keys() and not numbers.keys() & OF_SAMPLES


def test_samples_of_prompts_and_completions_are_glb_and_obj_with_a_sheet(run, tmp_path):
    (tmp_path / "part.obj").write_text(box().to_obj())
    for name, flags in (
        ("asked", ["--prompt", "a wide table"]),
        ("completed", ["--data", tmp_path / "part.obj"]),
    ):
        said = tessera(
            "sample", run, *flags, "--count", "2", "--temperature", "0.5", "--out", tmp_path / name
        )
        assert said.code == 0, said
        assert {file.name for file in (tmp_path / name).iterdir()} >= {
            "0000.glb",
            "0001.obj",
            "sheet.png",
            "settings.json",
        }


@pytest.mark.parametrize("polygons", ["triangles", "quads"])
def test_from_a_folder_of_boxes_and_single_faces_to_new_meshes(polygons, tmp_path):
    """The shortest life of both runs, on the least there is: meshes of one face, which has no
    neighbour, and of a few."""
    meshes = tmp_path / "meshes"
    meshes.mkdir()
    alone = Mesh(box().vertices, box().faces[:1])
    for number, mesh in enumerate([alone, box()] * 6):
        (meshes / f"{number:02}.obj").write_text(mesh.to_obj())
        (meshes / f"{number:02}.txt").write_text("a box" if number % 2 else "a face")
    engine_defaults = [
        "--preset",
        "tiny",
        "--steps",
        "2",
        "--data",
        meshes,
        "--data.polygons",
        polygons,
    ]
    corners = ["--task.model.corners", "4" if polygons == "quads" else "3"]
    assert (
        tessera(
            "train", "meshes-autoencoder", *engine_defaults, *corners, "--out", tmp_path / "solid"
        ).code
        == 0
    )
    said = tessera(
        "train",
        "meshes-transformer",
        *engine_defaults,
        "--tokenizer",
        tmp_path / "solid",
        "--out",
        tmp_path / "written",
    )
    assert said.code == 0, said
    said = tessera(
        "sample",
        tmp_path / "written",
        "--data",
        meshes / "00.obj",
        "--count",
        "2",
        "--out",
        tmp_path / "made",
    )
    assert said.code == 0, said
    assert len(list((tmp_path / "made").glob("*.obj"))) == 2


@pytest.mark.parametrize("what", ["bins", "levels"])
def test_an_autoencoder_of_another_kind_is_refused(run, what, tmp_path):
    """With other bins the data does not fit it; with other levels it is another one than the run
    began with."""
    other = meshes_autoencoder("tiny")
    model = other.task.model
    quantizer = (
        dataclasses.replace(model.quantizer, num_quantizers=3)
        if what == "levels"
        else model.quantizer
    )
    bins = 16 if what == "bins" else model.bins
    other = dataclasses.replace(
        other,
        task=dataclasses.replace(
            other.task, model=dataclasses.replace(model, bins=bins, quantizer=quantizer)
        ),
        data=dataclasses.replace(other.data, bins=bins),
        engine=dataclasses.replace(other.engine, steps=1),
    )
    train(tmp_path / "other", other)
    place = run if what == "levels" else tmp_path / "new"
    said = run_invalid(
        "train",
        "meshes-transformer",
        "--preset",
        "tiny",
        "--steps",
        "30",
        "--tokenizer",
        tmp_path / "other",
        "--out",
        place,
    )
    assert ("another one" if what == "levels" else "bins") in said


def box() -> Mesh:
    vertices = np.array([[x, y, z] for x in (0, 1.0) for y in (0, 1.0) for z in (0, 1.0)])
    quads = np.array(
        [[0, 1, 3, 2], [4, 6, 7, 5], [0, 4, 5, 1], [2, 3, 7, 6], [0, 2, 6, 4], [1, 5, 7, 3]]
    )
    return Mesh(vertices, quads)
