"""The toy meshes are the same for everybody, well built and various, and what is said about them is
true."""

from __future__ import annotations

import pickle
import re
from collections import Counter, defaultdict

import numpy as np
import pytest

from tessera.modalities.mesh.adjacency import count_edges
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.synthetic import (
    FEWEST_FACES,
    KINDS,
    NUMBERS,
    SyntheticMeshes,
    imagine,
    joined,
    stairs,
    table,
)

TOYS = [imagine(0, number) for number in range(600)]
MORE = [imagine(1, number) for number in range(900)]
ANYTHING = np.random.default_rng(0)


def sides(toy) -> np.ndarray:
    """Width, depth and height."""
    return np.ptp(toy.mesh.vertices, axis=0)


def parts(mesh: Mesh) -> list[np.ndarray]:
    """The vertices of each part, by what faces connect."""
    above = np.arange(len(mesh.vertices))
    for _ in range(len(above)):
        lowest = above[mesh.faces].min(axis=1)
        before = above.copy()
        np.minimum.at(above, mesh.faces.ravel(), np.repeat(lowest, 4))
        if np.array_equal(above, before):
            break
    return [mesh.vertices[above == part] for part in np.unique(above)]


def told(toy, noun: str) -> int | None:
    """ "with four legs" -> 4"""
    match = re.search(rf"({'|'.join(NUMBERS)}) {noun}s?\b", toy.caption)
    return NUMBERS.index(match[1]) if match else None


def test_a_toy_depends_on_its_seed_and_number_alone():
    one, other = SyntheticMeshes(20, 64, seed=5), SyntheticMeshes(3, 64, seed=5, first=7)
    mine, yours = one.item(9, np.random.default_rng(1)), other.item(2, np.random.default_rng(2))
    assert one.name(9) == other.name(
        2
    ) == "toy-000009" and mine.caption == yours.caption == one.caption(9)
    assert np.array_equal(mine.vertices, yours.vertices) and np.array_equal(mine.faces, yours.faces)
    assert mine.caption != SyntheticMeshes(20, 64, seed=6).item(9, ANYTHING).caption


def test_the_first_toys_are_those_they_have_always_been():
    """Runs compare numbers with those of last year: a change here is a new data set."""
    assert [toy.caption for toy in TOYS[:3]] == [
        "a ladder with six rungs",
        "a wide bed with a high headboard and two pillows",
        "a hammer with a short handle and a round head",
    ]
    assert sum(len(toy.mesh.faces) for toy in TOYS[:50]) == 2162


def test_toys_are_closed_and_turned_outward():
    for toy in TOYS:
        assert count_edges(toy.mesh.faces).watertight, toy.caption
        one_way = np.stack([toy.mesh.faces, np.roll(toy.mesh.faces, -1, axis=1)], axis=-1).reshape(
            -1, 2
        )
        assert len(np.unique(one_way, axis=0)) == len(one_way), (
            f"{toy.caption}: neighbours are turned alike"
        )
        one, two, three = toy.mesh.vertices[toy.mesh.triangles()].transpose(1, 0, 2)
        assert np.einsum("fc,fc->", one, np.cross(two, three)) > 0, f"{toy.caption} has a volume"


def test_every_part_of_a_toy_is_turned_outward():
    for toy in TOYS[:80]:
        mesh = toy.mesh
        for vertices in parts(mesh):
            inside = np.isin(mesh.vertices, vertices).all(axis=1)
            faces = mesh.triangles()[inside[mesh.triangles()].all(axis=1)]
            one, two, three = (mesh.vertices[faces] - vertices.mean(axis=0)).transpose(1, 0, 2)
            assert np.einsum("fc,fc->", one, np.cross(two, three)) > 0, toy.caption


def test_toys_have_few_faces_and_stand_on_the_ground():
    faces = [2 * len(toy.mesh.faces) for toy in TOYS]
    assert min(faces) >= 12 and max(faces) <= 200
    assert all(abs(toy.mesh.vertices[:, 2].min()) < 1e-9 for toy in TOYS)


def test_no_part_of_a_toy_floats():
    """Every part reaches the ground, or touches the box around another one."""
    for toy in TOYS[:200]:
        boxes = [(part.min(axis=0) - 1e-6, part.max(axis=0) + 1e-6) for part in parts(toy.mesh)]
        for number, (low, high) in enumerate(boxes):
            others = boxes[:number] + boxes[number + 1 :]
            assert low[2] < 1e-5 or any(
                (low <= top).all() and (bottom <= high).all() for bottom, top in others
            ), toy.caption


def test_almost_every_toy_keeps_its_faces_in_128_steps_and_is_still_closed():
    source = SyntheticMeshes(200, 128)
    examples = [source.item(index, ANYTHING) for index in range(200)]
    whole = [
        len(example.faces) == 2 * len(source.toy(index).mesh.faces)
        for index, example in enumerate(examples)
    ]
    assert np.mean(whole) > 0.97
    assert np.mean([count_edges(example.faces).watertight for example in examples]) > 0.95


@pytest.mark.parametrize("polygons", ["triangles", "quads"])
def test_toys_are_held_to_the_most_faces_that_are_asked_for(polygons):
    source = SyntheticMeshes(100, 64, polygons=polygons, max_faces=FEWEST_FACES)
    examples = [source.item(index, ANYTHING) for index in range(100)]
    assert max(len(example.faces) for example in examples) <= FEWEST_FACES
    assert {example.faces.shape[1] for example in examples} == {3 if polygons == "triangles" else 4}
    assert len({source.toy(index).kind for index in range(100)}) >= 6


def test_no_two_toys_are_alike():
    assert len({toy.mesh.vertices.tobytes() for toy in TOYS}) == len(TOYS)
    captions = Counter(toy.caption for toy in TOYS)
    assert len(captions) > 150 and max(captions.values()) < 0.05 * len(TOYS)


def test_every_kind_occurs_and_is_named():
    kinds = Counter(toy.kind for toy in TOYS)
    assert len(kinds) == len(KINDS) == 13 and min(kinds.values()) > 20
    assert all(re.search(rf"\b{toy.kind}\b", toy.caption) for toy in TOYS)
    assert all(re.match(r"an? |.*stairs", toy.caption) for toy in TOYS)


@pytest.mark.parametrize(("kind", "words", "measure"), [
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
])  # fmt: skip
def test_a_word_has_proportions_that_no_other_has(kind, words, measure):
    found = defaultdict(list)
    for toy in MORE:
        said = toy.caption.split(" with ")[0].split()
        if toy.kind == kind and not (kind == "table" and "round" in said):
            word = next((word for word in words if word in said), "")
            depth = without_back(toy) if kind in ("shelf", "bench") else sides(toy)[1]
            found[word].append(measure(sides(toy)[0], depth, sides(toy)[2]))
    assert set(found) == set(words)
    for lower, higher in zip(words, words[1:]):
        assert max(found[lower]) < min(found[higher]), (lower, higher)


def without_back(toy) -> float:
    """The depth of the deepest single part: a back comes on top of it."""
    return max(np.ptp(part[:, 1]) for part in parts(toy.mesh))


def test_legs_boards_steps_rungs_drawers_and_cushions_are_as_many_as_is_said():
    seen = Counter()
    for toy in TOYS:
        pieces = [np.ptp(part, axis=0) for part in parts(toy.mesh)]
        on_ground = sum(part[:, 2].min() < 1e-9 for part in parts(toy.mesh))
        if (legs := told(toy, "leg")) is not None:
            assert on_ground == legs, toy.caption
        if (boards := told(toy, "board")) is not None:
            assert len(pieces) == 2 + boards + ("a back" in toy.caption), toy.caption
        if (steps := told(toy, "step")) is not None:
            assert len(np.unique(toy.mesh.vertices[:, 2])) == steps + 1, toy.caption
        if (rungs := told(toy, "rung")) is not None:
            assert len(pieces) == 2 + rungs, toy.caption
        if (drawers := told(toy, "drawer")) is not None:
            assert len(pieces) == 5 + 2 * drawers, toy.caption
        if (cushions := told(toy, "cushion")) is not None:
            assert len(pieces) == 8 + cushions, toy.caption
        if (pillows := told(toy, "pillow")) is not None:
            assert sum(abs(piece[0] - 0.48) < 1e-6 for piece in pieces) == pillows, toy.caption
        seen.update(
            noun
            for noun in "leg board step rung drawer cushion pillow".split()
            if told(toy, noun) is not None
        )
    assert len(seen) == 7 and min(seen.values()) > 10


def test_a_source_can_be_sent_to_a_worker_and_says_what_it_depends_on():
    source = SyntheticMeshes(5, 64)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.caption(3) == source.caption(3) and copy.captioned == 5
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


def test_a_plan_is_told_in_a_sentence():
    plan = table(np.random.default_rng(0))
    plan.words, plan.details = ["low", "", "round"], ["four legs", "a shelf below", "a cloth"]
    assert plan.caption("table") == "a low round table with four legs, a shelf below and a cloth"
    plan.words, plan.details = [], []
    assert plan.caption("oven") == "an oven"
    assert (
        stairs(np.random.default_rng(0)).caption("stairs").split(" with ")[0].split()[-1]
        == "stairs"
    )
    assert len(joined(plan.parts).faces) == sum(len(part.faces) for part in plan.parts)
