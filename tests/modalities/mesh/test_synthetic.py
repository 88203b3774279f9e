"""Synthetic meshes: reproducible, well-formed and varied, with captions that are true."""

from __future__ import annotations

import pickle
import re
from collections import Counter, defaultdict

import numpy as np
import pytest

from tessera.modalities.mesh.adjacency import count_edges
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.synthetic import (
    KINDS,
    MIN_FACES,
    NUMBERS,
    SyntheticMeshes,
    SyntheticObject,
    generate_object,
    merge_meshes,
    stairs,
    table,
)

OBJECTS = [generate_object(0, number) for number in range(600)]
MORE_OBJECTS = [generate_object(1, number) for number in range(900)]
RNG = np.random.default_rng(0)


def dimensions(item: SyntheticObject) -> np.ndarray:
    """Return width, depth and height."""
    return np.ptp(item.mesh.vertices, axis=0)


def parts(mesh: Mesh) -> list[np.ndarray]:
    """Return the vertices of each connected component."""
    labels = np.arange(len(mesh.vertices))
    for _ in range(len(labels)):
        lowest = labels[mesh.faces].min(axis=1)
        before = labels.copy()
        np.minimum.at(labels, mesh.faces.ravel(), np.repeat(lowest, 4))
        if np.array_equal(labels, before):
            break
    return [mesh.vertices[labels == part] for part in np.unique(labels)]


def count_in_caption(item: SyntheticObject, noun: str) -> int | None:
    """Return 4 for "leg" in "with four legs", and None if the noun does not occur."""
    match = re.search(rf"({'|'.join(NUMBERS)}) {noun}s?\b", item.caption)
    return NUMBERS.index(match[1]) if match else None


def test_an_object_depends_only_on_seed_and_number():
    one, other = SyntheticMeshes(20, 64, seed=5), SyntheticMeshes(3, 64, seed=5, first=7)
    first, second = one.item(9, np.random.default_rng(1)), other.item(2, np.random.default_rng(2))
    assert one.name(9) == other.name(
        2
    ) == "synthetic-000009" and first.caption == second.caption == one.caption(9)
    assert np.array_equal(first.vertices, second.vertices) and np.array_equal(
        first.faces, second.faces
    )
    assert first.caption != SyntheticMeshes(20, 64, seed=6).item(9, RNG).caption


def test_the_first_objects_never_change():
    """Metrics are compared between versions: a change here would be a new dataset."""
    assert [item.caption for item in OBJECTS[:3]] == [
        "a ladder with six rungs",
        "a wide bed with a high headboard and two pillows",
        "a hammer with a short handle and a round head",
    ]
    assert sum(len(item.mesh.faces) for item in OBJECTS[:50]) == 2162


def test_objects_are_watertight_with_outward_faces():
    for item in OBJECTS:
        assert count_edges(item.mesh.faces).watertight, item.caption
        directed = np.stack(
            [item.mesh.faces, np.roll(item.mesh.faces, -1, axis=1)], axis=-1
        ).reshape(-1, 2)
        assert len(np.unique(directed, axis=0)) == len(directed), (
            f"{item.caption}: adjacent faces have the same orientation"
        )
        one, two, three = item.mesh.vertices[item.mesh.triangles()].transpose(1, 0, 2)
        assert np.einsum("fc,fc->", one, np.cross(two, three)) > 0, (
            f"{item.caption} has a positive volume"
        )


def test_every_part_has_outward_faces():
    for item in OBJECTS[:80]:
        mesh = item.mesh
        for vertices in parts(mesh):
            inside = np.isin(mesh.vertices, vertices).all(axis=1)
            faces = mesh.triangles()[inside[mesh.triangles()].all(axis=1)]
            one, two, three = (mesh.vertices[faces] - vertices.mean(axis=0)).transpose(1, 0, 2)
            assert np.einsum("fc,fc->", one, np.cross(two, three)) > 0, item.caption


def test_objects_have_few_faces_and_rest_on_the_ground():
    faces = [2 * len(item.mesh.faces) for item in OBJECTS]
    assert min(faces) >= 12 and max(faces) <= 200
    assert all(abs(item.mesh.vertices[:, 2].min()) < 1e-9 for item in OBJECTS)


def test_no_part_floats():
    """Every part reaches the ground or touches the bounding box of another part."""
    for item in OBJECTS[:200]:
        boxes = [(part.min(axis=0) - 1e-6, part.max(axis=0) + 1e-6) for part in parts(item.mesh)]
        for number, (low, high) in enumerate(boxes):
            others = boxes[:number] + boxes[number + 1 :]
            assert low[2] < 1e-5 or any(
                (low <= top).all() and (bottom <= high).all() for bottom, top in others
            ), item.caption


def test_nearly_all_objects_stay_intact_with_128_bins():
    dataset = SyntheticMeshes(200, 128)
    examples = [dataset.item(index, RNG) for index in range(200)]
    intact = [
        len(example.faces) == 2 * len(dataset.generate(index).mesh.faces)
        for index, example in enumerate(examples)
    ]
    assert np.mean(intact) > 0.97
    assert np.mean([count_edges(example.faces).watertight for example in examples]) > 0.95


@pytest.mark.parametrize("polygons", ["triangles", "quads"])
def test_max_faces_is_respected(polygons):
    dataset = SyntheticMeshes(100, 64, polygons=polygons, max_faces=MIN_FACES)
    examples = [dataset.item(index, RNG) for index in range(100)]
    assert max(len(example.faces) for example in examples) <= MIN_FACES
    assert {example.faces.shape[1] for example in examples} == {3 if polygons == "triangles" else 4}
    assert len({dataset.generate(index).kind for index in range(100)}) >= 6


def test_all_objects_differ():
    assert len({item.mesh.vertices.tobytes() for item in OBJECTS}) == len(OBJECTS)
    captions = Counter(item.caption for item in OBJECTS)
    assert len(captions) > 150 and max(captions.values()) < 0.05 * len(OBJECTS)


def test_every_kind_occurs_and_is_named():
    kinds = Counter(item.kind for item in OBJECTS)
    assert len(kinds) == len(KINDS) == 13 and min(kinds.values()) > 20
    assert all(re.search(rf"\b{item.kind}\b", item.caption) for item in OBJECTS)
    assert all(re.match(r"an? |.*stairs", item.caption) for item in OBJECTS)


@pytest.mark.parametrize(
    ("kind", "words", "measure"),
    [
        ("table", ("low", "", "high"), lambda w, d, h: h / d),
        ("table", ("square", "", "wide"), lambda w, d, h: w / d),
        ("stool", ("low", "", "tall"), lambda w, d, h: h / w),
        ("bench", ("short", "", "long"), lambda w, d, h: w / d),
        ("shelf", ("low", "", "tall"), lambda w, d, h: h / d),
        ("shelf", ("narrow", "", "wide"), lambda w, d, h: w / d),
        ("bed", ("narrow", "wide"), lambda w, d, h: w / d),
        ("cabinet", ("low", "", "tall"), lambda w, d, h: h / w),
        ("stairs", ("gentle", "", "steep"), lambda w, d, h: h / w),
        ("stairs", ("narrow", "", "wide"), lambda w, d, h: d / w),
        ("mug", ("low", "", "tall"), lambda w, d, h: h / d),
    ],
)
def test_ranges_of_proportions_do_not_overlap(kind, words, measure):
    found = defaultdict(list)
    for item in MORE_OBJECTS:
        words_used = item.caption.split(" with ")[0].split()
        if item.kind == kind and not (kind == "table" and "round" in words_used):
            word = next((word for word in words if word in words_used), "")
            depth = depth_without_back(item) if kind in ("shelf", "bench") else dimensions(item)[1]
            found[word].append(measure(dimensions(item)[0], depth, dimensions(item)[2]))
    assert set(found) == set(words)
    for lower, higher in zip(words, words[1:]):
        assert max(found[lower]) < min(found[higher]), (lower, higher)


def depth_without_back(item: SyntheticObject) -> float:
    """Return the depth of the deepest part, to which a back would be added."""
    return max(np.ptp(part[:, 1]) for part in parts(item.mesh))


def test_counts_in_captions_match_the_mesh():
    checked = Counter()
    for item in OBJECTS:
        pieces = [np.ptp(part, axis=0) for part in parts(item.mesh)]
        on_ground = sum(part[:, 2].min() < 1e-9 for part in parts(item.mesh))
        if (legs := count_in_caption(item, "leg")) is not None:
            assert on_ground == legs, item.caption
        if (boards := count_in_caption(item, "board")) is not None:
            assert len(pieces) == 2 + boards + ("a back" in item.caption), item.caption
        if (steps := count_in_caption(item, "step")) is not None:
            assert len(np.unique(item.mesh.vertices[:, 2])) == steps + 1, item.caption
        if (rungs := count_in_caption(item, "rung")) is not None:
            assert len(pieces) == 2 + rungs, item.caption
        if (drawers := count_in_caption(item, "drawer")) is not None:
            assert len(pieces) == 5 + 2 * drawers, item.caption
        if (cushions := count_in_caption(item, "cushion")) is not None:
            assert len(pieces) == 8 + cushions, item.caption
        if (pillows := count_in_caption(item, "pillow")) is not None:
            assert sum(abs(piece[0] - 0.48) < 1e-6 for piece in pieces) == pillows, item.caption
        checked.update(
            noun
            for noun in "leg board step rung drawer cushion pillow".split()
            if count_in_caption(item, noun) is not None
        )
    assert len(checked) == 7 and min(checked.values()) > 10


def test_a_dataset_can_be_pickled_and_has_a_signature():
    dataset = SyntheticMeshes(5, 64)
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy.all_captions(3) == [dataset.caption(3)]
    signatures = {
        SyntheticMeshes(5, **settings).signature(0)
        for settings in (
            {"bins": 64},
            {"bins": 32},
            {"bins": 64, "seed": 1},
            {"bins": 64, "polygons": "quads"},
        )
    }
    assert len(signatures) == 4


def test_captions_are_grammatical():
    plan = table(np.random.default_rng(0))
    plan.words, plan.details = ["low", "", "round"], ["four legs", "a shelf below", "a cloth"]
    assert plan.caption("table") == "a low round table with four legs, a shelf below and a cloth"
    plan.words, plan.details = [], []
    assert plan.caption("oven") == "an oven"
    assert (
        stairs(np.random.default_rng(0)).caption("stairs").split(" with ")[0].split()[-1]
        == "stairs"
    )
    assert len(merge_meshes(plan.parts).faces) == sum(len(part.faces) for part in plan.parts)
