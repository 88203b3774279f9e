"""bench/meshes.py in small: its sides do the work they claim, and its judges are not blind. Nothing
is timed here."""

from __future__ import annotations

import importlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def meshes(monkeypatch):
    """The bench as a module; it is a script and in no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("meshes")
    monkeypatch.setattr(
        module.pairs, "pin", lambda threads: None
    )  # the threads of the tests are not the bench's to choose
    monkeypatch.setattr(module.mesh_networks, "AT_ONCE", 2)
    return module


@pytest.fixture
def adjacency(meshes):
    return meshes.mesh_adjacency


# ---- sides


@pytest.mark.parametrize(
    "name", ["meshes ready", "meshes as found", "meshes stretched", "cached codes", "live codes"]
)
def test_our_sides_learn(meshes, tmp_path, name, monkeypatch):
    moved = []
    step = importlib.import_module("tessera.engine.engine").Engine.step
    monkeypatch.setattr(
        "tessera.engine.engine.Engine.step",
        lambda self, *rest: moved.append(self) or step(self, *rest),
    )
    side = meshes.OURS[name](tmp_path)
    side.step()
    assert len(moved) == 2, "AT_ONCE"
    network = moved[0].task.model
    assert all(
        parameter.grad is None or parameter.isfinite().all() for parameter in network.parameters()
    )
    assert side.about.parameters["model"] == sum(
        parameter.numel() for parameter in network.parameters()
    )
    assert side.about.mflop["model"] > 1


def test_our_networks_are_about_as_large_as_theirs(meshes):
    """meshgpt-pytorch 1.8.1: 0.36 M for the autoencoder, 1.02 M for the transformer without it."""
    task = meshes.mesh_networks.our_task(64)
    assert meshes.mesh_networks.parameters(task.tokenizers["tokenizer"].network) == pytest.approx(
        0.36e6, rel=0.5
    )
    assert meshes.mesh_networks.parameters(task.model) == pytest.approx(1.02e6, rel=0.5)


def test_the_random_meshes_have_as_many_faces_as_theirs_and_keep_them(meshes):
    ready = meshes.mesh_networks.Ready()
    batch = ready.batch()
    assert batch.faces.shape == (4, 64, 3) and batch.face_counts.tolist() == [64] * 4
    assert (
        len(ready) == 128 and len({example.vertices.tobytes() for example in ready.examples}) == 128
    )


def test_meshes_as_found_are_the_same_meshes(meshes, tmp_path):
    data = importlib.import_module("tessera.modalities.mesh.dataset")
    folder = meshes.mesh_networks.written(tmp_path / "meshes")
    found, ready = (
        data.MeshDataConfig(path=str(folder), bins=64, max_faces=64).full(),
        meshes.mesh_networks.Ready(),
    )
    assert len(found) == len(ready) == 128
    one, other = (
        found.collate([found.item(i, np.random.default_rng(0)) for i in range(4)]),
        ready.batch(),
    )
    assert torch.equal(one.vertices, other.vertices) and torch.equal(one.faces, other.faces)
    assert torch.equal(one.edges, other.edges)


@pytest.mark.parametrize("name", ["our sampler", "our 8 at once"])
def test_our_samples_are_all_of_one_length(meshes, tmp_path, name, monkeypatch):
    made = []
    check = meshes.mesh_networks.refuse_other_work
    monkeypatch.setattr(
        meshes.mesh_networks, "refuse_other_work", lambda codes: made.append(codes) or check(codes)
    )
    side = meshes.OURS[name](tmp_path)
    side.step()
    side.step()
    count = 8 if "8" in name else 1
    assert [tuple(codes.shape) for codes in made] == [(count, 16, 3, 2)] * 2
    assert not torch.equal(*made), "another seed each time"


def test_a_shorter_sample_is_refused(meshes):
    whole = torch.zeros(2, 16, 3, 2, dtype=torch.long)
    meshes.mesh_networks.refuse_other_work(whole)
    for wrong in (whole[:, :15], whole - 1, whole + 256):
        with pytest.raises(SystemExit, match="A sample is 96 symbols"):
            meshes.mesh_networks.refuse_other_work(wrong)


# ---- adjacency


def test_a_torus_has_three_neighbours_for_every_face(adjacency):
    faces = adjacency.torus(1_000)
    assert faces.shape == (1_000, 3) and len(np.unique(faces)) == 500
    sets = [set(face) for face in faces.tolist()]
    edges: dict[frozenset, list[int]] = {}
    for number, face in enumerate(sets):
        for edge in itertools.combinations(sorted(face), 2):
            edges.setdefault(frozenset(edge), []).append(number)
    assert {len(owners) for owners in edges.values()} == {2}
    assert (np.diff(faces[:, 0]) < 0).any(), "shuffled"


def test_our_adjacency_tells_time_memory_and_pairs(adjacency):
    small, large = adjacency.ours(1_000), adjacency.ours(5_000)
    assert (small.pairs, large.pairs) == (3_000, 15_000)
    assert small.seconds > 0 and large.mb > 2 * small.mb > 0.05


def test_the_exponent_is_that_of_the_growth(adjacency):
    sizes = [1_000, 5_000, 20_000]
    for power in (1.0, 1.2, 2.0):
        assert adjacency.exponent(sizes, [3e-6 * size**power for size in sizes]) == pytest.approx(
            power
        )


@pytest.mark.parametrize(("power", "code"), [(1.0, 0), (1.19, 0), (1.25, 1), (2.0, 1)])
def test_adjacency_that_grows_too_fast_ends_in_exit_code_1(
    meshes, monkeypatch, capsys, tmp_path, power, code
):
    spent = meshes.Spent
    monkeypatch.setattr(
        meshes,
        "spent",
        lambda name, faces, asked: spent(1e-6 * faces**power, 1e-3 * faces, 3 * faces),
    )
    assert meshes.main(["--what", "adjacency", "--json", str(tmp_path / "numbers.json")]) == code
    assert f"to the power of {power:.2f} in time and 1.00 in memory" in capsys.readouterr().out
    found = json.loads((tmp_path / "numbers.json").read_text())["adjacency"]
    assert (
        found["exponents"]["time"] == pytest.approx(power)
        and found["ours"]["20000"]["pairs"] == 60_000
    )


def test_adjacency_that_finds_another_number_of_pairs_is_refused(meshes, monkeypatch, tmp_path):
    told = json.dumps({"seconds": 1.0, "mb": 1.0, "pairs": 2_999})
    script = tmp_path / "liar.py"
    script.write_text(f"print({told!r})")
    monkeypatch.setattr(
        meshes.Script, "command", lambda self, name, asked: [meshes.sys.executable, str(script)]
    )
    with pytest.raises(SystemExit, match="there are 3000 pairs, but our adjacency found 2999"):
        meshes.spent("our adjacency", 1_000, None)
    script.write_text("raise SystemExit(3)")
    with pytest.raises(SystemExit, match="exit code 3"):
        meshes.spent("our adjacency", 1_000, None)


# ---- verdicts


@pytest.mark.parametrize(("ours_s", "code"), [(0.5, 0), (0.9, 1)])
def test_a_side_that_is_too_slow_ends_in_exit_code_1(meshes, monkeypatch, capsys, ours_s, code):
    about = meshes.mesh_networks.About({"model": 1}, {"model": 1.0}, "torch")

    def compare(self, comparison, asked):
        spent = meshes.pairs.Pairs(
            [meshes.pairs.Spent(ours_s, ours_s)] * 3, [meshes.pairs.Spent(1.0, 1.0)] * 3
        )
        return importlib.import_module("compared").Compared(comparison, about, about, spent)

    monkeypatch.setattr(meshes.Script, "compare", compare)
    assert (
        meshes.main(["--what", "step", "--peer-env", "env", "--peer-adapters", "adapters"]) == code
    )
    said = capsys.readouterr().out
    assert (
        f"{1 / ours_s:.2f} times as fast; wanted: at least 1.3" in said and "not the same:" in said
    )


def test_every_comparison_names_sides_that_exist(meshes):
    for comparison in meshes.COMPARISONS:
        assert comparison.ours in meshes.OURS and comparison.theirs in meshes.PEER
    wanted = {
        (one.ours, one.theirs): one.wanted for one in meshes.COMPARISONS if one.wanted is not None
    }
    assert wanted == {
        ("meshes as found", "their autoencoder"): 1.3,
        ("meshes ready", "their autoencoder"): 1.3,
        ("cached codes", "their transformer"): 1.3,
        ("our sampler", "their sampler"): 2.0,
        ("our 8 at once", "their 8 at once"): 6.0,
    }


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["--what", "step"], "give --peer-env and --peer-adapters"),
        (["--what", "adjacency", "--peer-env", "env"], "the package needs both"),
    ],
)
def test_what_cannot_be_measured_is_refused(meshes, capsys, asked, says):
    with pytest.raises(SystemExit):
        meshes.main(asked)
    assert says in capsys.readouterr().err
