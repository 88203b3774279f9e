"""bench/meshes.py: our sides do the configured work; other work is rejected."""

from __future__ import annotations

import importlib
import itertools
import json
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def meshes(monkeypatch):
    """The bench script as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("meshes")
    monkeypatch.setattr(module.timing, "set_threads", lambda threads: None)
    monkeypatch.setattr(module.mesh_networks, "STEPS_AT_ONCE", 2)
    return module


@pytest.fixture
def adjacency(meshes):
    return meshes.mesh_adjacency


# ---- our sides


@pytest.mark.parametrize(
    "name",
    ["canonical meshes", "mesh files", "augmented files", "cached tokens", "live tokens"],
)
def test_our_sides_train(meshes, tmp_path, name, monkeypatch):
    engines = []
    step = importlib.import_module("tessera.engine.engine").Engine.run_step
    monkeypatch.setattr(
        "tessera.engine.engine.Engine.run_step",
        lambda self, *args: engines.append(self) or step(self, *args),
    )
    workload = meshes.OURS[name](tmp_path)
    workload.step()
    assert len(engines) == 2, "STEPS_AT_ONCE"
    parameters = list(engines[0].task.model.parameters())
    assert all(one.grad is None or one.isfinite().all() for one in parameters)
    assert workload.info.parameters["model"] == sum(one.numel() for one in parameters)
    assert workload.info.mflop["model"] > 1


def test_our_networks_are_about_as_large_as_theirs(meshes):
    """meshgpt-pytorch 1.8.1: 0.36 M for the autoencoder, 1.02 M for the transformer without it."""
    networks = meshes.mesh_networks
    task = networks.build_our_task(64)
    tokenizer = task.tokenizers["tokenizer"].network
    assert networks.count_parameters(tokenizer) == pytest.approx(0.36e6, rel=0.5)
    assert networks.count_parameters(task.model) == pytest.approx(1.02e6, rel=0.5)


def test_random_meshes_keep_all_their_faces(meshes):
    dataset = meshes.mesh_networks.canonical_meshes()
    batch = meshes.mesh_networks.first_batch(dataset)
    assert batch.faces.shape == (4, 64, 3) and batch.face_counts.tolist() == [64] * 4
    assert len(dataset) == 128
    assert len({example.vertices.tobytes() for example in dataset.examples}) == 128


def test_mesh_files_hold_the_same_meshes(meshes, tmp_path):
    data = importlib.import_module("tessera.modalities.mesh.dataset")
    folder = meshes.mesh_networks.write_meshes(tmp_path / "meshes")
    files = data.MeshDataConfig(path=str(folder), bins=64, max_faces=64).full()
    in_memory = meshes.mesh_networks.canonical_meshes()
    assert len(files) == len(in_memory) == 128
    one = files.collate([files.item(i, np.random.default_rng(0)) for i in range(4)])
    other = meshes.mesh_networks.first_batch(in_memory)
    assert torch.equal(one.vertices, other.vertices) and torch.equal(one.faces, other.faces)
    assert torch.equal(one.edges, other.edges)


@pytest.mark.parametrize("name", ["our tree", "our 8 trees at once"])
def test_our_trees_have_at_least_as_many_faces(meshes, tmp_path, name, monkeypatch):
    samples = []
    check = meshes.mesh_networks.check_tree_sample
    monkeypatch.setattr(
        meshes.mesh_networks, "check_tree_sample", lambda made: samples.append(made) or check(made)
    )
    workload = meshes.OURS[name](tmp_path)
    workload.step()
    assert [len(made) for made in samples] == [1], "one mesh is checked before the timing"
    assert len(samples[0][0].faces) >= 16
    assert workload.info.mflop["model"] > 1
    with pytest.raises(SystemExit, match="cannot be compared"):
        check([Namespace(faces=[[0, 1, 2]])])


@pytest.mark.parametrize("name", ["our sampler", "our 8 at once"])
def test_our_samples_all_have_the_same_length(meshes, tmp_path, name, monkeypatch):
    samples = []
    check = meshes.mesh_networks.check_sample
    monkeypatch.setattr(
        meshes.mesh_networks, "check_sample", lambda codes: samples.append(codes) or check(codes)
    )
    workload = meshes.OURS[name](tmp_path)
    workload.step()
    workload.step()
    count = 8 if "8" in name else 1
    assert [tuple(codes.shape) for codes in samples] == [(count, 16, 3, 2)] * 2
    assert not torch.equal(*samples), "each step has another seed"


def test_samples_of_another_size_are_rejected(meshes):
    codes = torch.zeros(2, 16, 3, 2, dtype=torch.long)
    meshes.mesh_networks.check_sample(codes)
    for wrong in (codes[:, :15], codes - 1, codes + 256):
        with pytest.raises(SystemExit, match="96 tokens from 0 to 255 were expected"):
            meshes.mesh_networks.check_sample(wrong)


# ---- adjacency


def test_every_face_of_a_torus_has_three_neighbors(adjacency):
    faces = adjacency.build_torus(1_000)
    assert faces.shape == (1_000, 3) and len(np.unique(faces)) == 500
    edges: dict[frozenset, list[int]] = {}
    for number, face in enumerate(faces.tolist()):
        for edge in itertools.combinations(sorted(set(face)), 2):
            edges.setdefault(frozenset(edge), []).append(number)
    assert {len(owners) for owners in edges.values()} == {2}
    assert (np.diff(faces[:, 0]) < 0).any(), "shuffled"


def test_our_adjacency_reports_time_memory_and_pairs(adjacency):
    small, large = adjacency.measure_ours(1_000), adjacency.measure_ours(5_000)
    assert (small.pairs, large.pairs) == (3_000, 15_000)
    assert small.seconds > 0 and large.mb > 2 * small.mb > 0.05


def test_the_exponent_is_that_of_the_growth(adjacency):
    sizes = [1_000, 5_000, 20_000]
    for power in (1.0, 1.2, 2.0):
        amounts = [3e-6 * size**power for size in sizes]
        assert adjacency.growth_exponent(sizes, amounts) == pytest.approx(power)


@pytest.mark.parametrize(("power", "code"), [(1.0, 0), (1.19, 0), (1.25, 1), (2.0, 1)])
def test_growth_above_the_target_is_exit_code_1(meshes, monkeypatch, capsys, tmp_path, power, code):
    def measure(name, faces, args):
        return meshes.AdjacencyCost(1e-6 * faces**power, 1e-3 * faces, 3 * faces)

    monkeypatch.setattr(meshes, "measure", measure)
    file = tmp_path / "numbers.json"
    assert meshes.main(["--only", "adjacency", "--json", str(file)]) == code
    assert f"to the power of {power:.2f} in time and 1.00 in memory" in capsys.readouterr().out
    numbers = json.loads(file.read_text())["adjacency"]
    assert numbers["exponents"]["time"] == pytest.approx(power)
    assert numbers["ours"]["20000"]["pairs"] == 60_000


def test_a_wrong_number_of_pairs_is_rejected(meshes, monkeypatch, tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(f"print({json.dumps({'seconds': 1.0, 'mb': 1.0, 'pairs': 2_999})!r})")
    monkeypatch.setattr(
        meshes.BenchScript, "command", lambda self, name, args: [sys.executable, str(script)]
    )
    with pytest.raises(SystemExit, match="found 2999 pairs .* 1000 faces, which has 3000"):
        meshes.measure("our adjacency", 1_000, Namespace())


def test_the_output_of_a_failed_process_is_printed(meshes, monkeypatch, tmp_path, capsys):
    script = tmp_path / "failing.py"
    script.write_text("import sys; print('the reason', file=sys.stderr); sys.exit(3)")
    monkeypatch.setattr(
        meshes.BenchScript, "command", lambda self, name, args: [sys.executable, str(script)]
    )
    with pytest.raises(SystemExit, match="exit code 3"):
        meshes.measure("our adjacency", 1_000, Namespace())
    assert "the reason" in capsys.readouterr().err


# ---- targets


@pytest.mark.parametrize(("ours_s", "code"), [(0.5, 0), (0.9, 1)])
def test_a_speedup_below_the_target_is_exit_code_1(meshes, monkeypatch, capsys, ours_s, code):
    comparison = importlib.import_module("comparison")
    info = comparison.ModelInfo({"model": 1}, {"model": 1.0}, "torch")

    def compare(self, one, args):
        step_time = meshes.timing.StepTime
        times = meshes.timing.PairedTimes([step_time(ours_s, ours_s)] * 3, [step_time(1, 1)] * 3)
        return comparison.ComparisonResult(one, info, info, times)

    monkeypatch.setattr(meshes.BenchScript, "compare", compare)
    assert meshes.main(["--only", "step", "--peers-python", sys.executable]) == code
    output = capsys.readouterr().out
    assert f"{1 / ours_s:.2f} times as fast (target: at least 1.3)" in output
    assert "differences:" in output


def test_every_comparison_has_its_workers_and_target(meshes):
    for one in meshes.COMPARISONS:
        assert one.ours in meshes.OURS and one.theirs in meshes.THEIRS
    targets = {
        (one.ours, one.theirs): one.target for one in meshes.COMPARISONS if one.target is not None
    }
    assert targets == {
        ("mesh files", "their autoencoder"): 1.3,
        ("canonical meshes", "their autoencoder"): 1.3,
        ("cached tokens", "their transformer"): 1.3,
        ("our sampler", "their sampler"): 2.0,
        ("our 8 at once", "their 8 at once"): 6.0,
    }


def test_missing_research_packages_are_reported(meshes, capsys, tmp_path):
    with pytest.raises(SystemExit):
        meshes.main(["--only", "step", "--peers-python", str(tmp_path / "missing")])
    assert "run `make peers`" in capsys.readouterr().err


def test_adjacency_runs_without_the_research_packages(meshes, monkeypatch, tmp_path):
    measured = []

    def measure(name, faces, args):
        measured.append(name)
        return meshes.AdjacencyCost(1e-6 * faces, 1e-3 * faces, 3 * faces)

    monkeypatch.setattr(meshes, "measure", measure)
    missing = str(tmp_path / "missing")
    assert meshes.main(["--only", "adjacency", "--peers-python", missing]) == 0
    assert set(measured) == {"our adjacency"}
