"""Meshes as a traversal of their edges: exact for every mesh, without invalid sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tessera.data.errors import UnreadableFile
from tessera.modalities.mesh import tree
from tessera.modalities.mesh.adjacency import count_edges
from tessera.modalities.mesh.canonical import CanonicalMesh, canonicalize
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.mesh.simplify import BOX_CORNERS, BOX_TRIANGLES
from tessera.modalities.mesh.synthetic import generate_object
from tessera.modalities.mesh.tree_context import NUM_ROLES, read_context
from tessera.modalities.mesh.tree_tokenizer import TreeTokenizer
from tessera.run.errors import UserError

BOX, BOX_FACES = BOX_CORNERS.astype(float), BOX_TRIANGLES
INSIDE_OUT = BOX_FACES[:, ::-1]
"""A box that is no box: its triangles are encoded along their edges."""


def random_soup(seed: int, count: int, vertices: int) -> Mesh:
    """Return random triangles between few vertices: edges of many faces, flipped neighbours,
    faces in one plane and separate parts."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 6, (vertices, 3)).astype(float)
    return Mesh(corners, np.array([rng.permutation(vertices)[:3] for _ in range(count)]))


def synthetic_mesh(number: int, bins: int = 64) -> CanonicalMesh:
    mesh = generate_object(0, number).mesh
    return canonicalize(Mesh(mesh.vertices, mesh.triangles()), bins)


def assert_exact(mesh: CanonicalMesh, bins: int) -> list[int]:
    tokens = tree.encode_mesh(mesh, bins)
    decoded = tree.decode_mesh(tokens, bins)
    assert np.array_equal(decoded.vertices, mesh.vertices)
    assert np.array_equal(decoded.faces, mesh.faces)
    assert not tokens or 0 <= min(tokens) <= max(tokens) < tree.vocab_size(bins)
    return tokens


@settings(max_examples=200)
@given(
    st.integers(0, 10**6),
    st.integers(1, 40),
    st.sampled_from([4, 8, 30]),
    st.sampled_from([2, 3, 8, 64]),
)
def test_the_round_trip_is_exact_for_any_set_of_triangles(seed, count, vertices, bins):
    try:
        mesh = canonicalize(random_soup(seed, count, vertices), bins)
    except UnreadableFile:
        return
    assert_exact(mesh, bins)


def test_synthetic_meshes_take_at_most_one_and_a_half_tokens_per_face():
    meshes = [synthetic_mesh(number) for number in range(40)]
    tokens = [assert_exact(mesh, 64) for mesh in meshes]
    assert sum(map(len, tokens)) / sum(len(mesh.faces) for mesh in meshes) < 1.5


def test_a_closed_part_takes_two_and_a_half_tokens_per_face_and_no_stop():
    tokens = assert_exact(canonicalize(Mesh(BOX, INSIDE_OUT), 16), 16)
    assert len(tokens) == 30 and tree.STOP not in tokens and tree.NEW not in tokens


# ---- boxes


def divide_sides(diagonals: int) -> np.ndarray:
    """Return the triangles of BOX, with the other diagonal on the sides of these bits."""
    faces = BOX_FACES.copy()
    for side in range(6):
        if diagonals >> side & 1:
            one, other = faces[2 * side].tolist(), faces[2 * side + 1].tolist()
            [start] = set(one) - set(other)
            [end] = set(other) - set(one)
            first, second = (np.roll(one, -one.index(start))[1:]).tolist()
            faces[2 * side : 2 * side + 2] = [[start, first, end], [start, end, second]]
    return faces


@pytest.mark.parametrize("diagonals", range(64))
def test_a_box_takes_seven_tokens_whatever_its_diagonals(diagonals):
    mesh = canonicalize(Mesh(BOX * [3, 2, 1], divide_sides(diagonals)), 16)
    assert count_edges(mesh.faces).watertight and len(mesh.faces) == 12
    tokens = assert_exact(mesh, 16)
    assert len(tokens) == 7 and tree.BOX <= tokens[0] < tree.PAD


def count_boxes(tokens: list[int]) -> int:
    return sum(tree.BOX <= token < tree.PAD for token in tokens)


def test_boxes_that_share_corners_and_edges_are_boxes():
    """A board on a board, a board beside them, and a triangle at an edge of the first."""
    boxes = [BOX * [4, 2, 1], BOX * [4, 2, 1] + [0, 0, 1], BOX * [1, 2, 3] + [4, 0, 0]]
    corners = np.concatenate([*boxes, [[0.0, -1.0, 3.0]]])
    triangles = np.concatenate([*(BOX_FACES + 8 * n for n in range(3)), [[0, 1, 24]]])
    mesh = canonicalize(Mesh(corners, triangles), 64)
    assert len(mesh.vertices) < len(corners) and len(mesh.faces) == 37
    assert count_boxes(assert_exact(mesh, 64)) == 3


def test_equal_boards_on_each_other_stay_apart_on_the_grid():
    """Corners that round to the same bin: one board moves as a whole, and both stay boxes."""
    boards = [BOX * [4, 2, 0.01] + [0, 0, 1 + 0.012 * number] for number in range(2)]
    post = BOX * [0.1, 0.1, 4] + [4, 2, 0.001]
    corners = np.concatenate([*boards, post])
    faces = np.concatenate([BOX_FACES + 8 * number for number in range(3)])
    mesh = canonicalize(Mesh(corners, faces), 64)
    assert count_edges(mesh.faces).watertight and len(mesh.vertices) == 24
    assert count_boxes(assert_exact(mesh, 64)) == 3


@settings(max_examples=100)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([16, 64, 128]))
def test_boxes_stay_boxes_on_the_grid_and_are_quantized_to_themselves(seed, count, bins):
    """Boards thinner than a bin and boxes whose corners round to the same bin stay closed, with
    right angles, and a mesh on the grid is quantized to itself."""
    rng = np.random.default_rng(seed)
    low = rng.integers(0, 5, (count, 1, 3)) / 4 + rng.uniform(0, 0.01, (count, 1, 3))
    size = rng.choice([0.002, 0.1, 0.5], (count, 1, 3))
    faces = np.concatenate([BOX_FACES + 8 * number for number in range(count)])
    mesh = canonicalize(Mesh((low + BOX * size).reshape(-1, 3), faces), bins)
    tokens = assert_exact(mesh, bins)
    merged = len(mesh.vertices) < 8 * count
    assert count_boxes(tokens) == count or merged, "only boxes with common corners may be lost"
    again = canonicalize(Mesh(mesh.vertices / (bins - 1), mesh.faces), bins)
    assert np.array_equal(again.vertices, mesh.vertices)
    assert np.array_equal(again.faces, mesh.faces)


def test_positions_of_three_hold_a_vertex_or_one_token():
    tokens = tree.encode_mesh(canonicalize(random_soup(3, 12, 8), 5), 5)
    positions = tree.to_positions(tokens)
    assert [token for three in positions for token in three if token != tree.PAD] == tokens
    for first, *others in positions:
        is_vertex = first >= tree.FIRST_COORDINATE
        assert is_vertex or others == [tree.PAD] * 2
        assert not is_vertex or min(others) >= tree.FIRST_COORDINATE
    start = next(n for n, token in enumerate(tokens) if token >= tree.FIRST_COORDINATE)
    assert len(tree.to_positions(tokens[: start + 2])) == start, "an unfinished vertex is left out"


def test_an_open_part_is_left_with_one_token():
    corner = BOX[[0, 1, 2]]
    two = Mesh(np.concatenate([corner, corner + 3]), np.array([[0, 1, 2], [3, 4, 5]]))
    tokens = assert_exact(canonicalize(two, 32), 32)
    assert len(tokens) == 19 and tokens[9] == tree.NEW and tree.STOP not in tokens


def test_orientation_is_kept():
    turned = BOX_FACES.copy()
    turned[::3] = turned[::3, ::-1]
    for faces in (BOX_FACES, BOX_FACES[:, ::-1], turned):
        assert_exact(canonicalize(Mesh(BOX, faces), 16), 16)


def test_parts_follow_the_order_of_the_faces():
    mesh = synthetic_mesh(3)
    shuffled = CanonicalMesh(mesh.vertices, mesh.faces[::-1])
    one, other = (tree.encode_mesh(each, 64) for each in (mesh, shuffled))
    assert one != other
    assert np.array_equal(tree.decode_mesh(other, 64).faces, mesh.faces)


# ---- which tokens may follow


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([tree.MIN_BINS, 5, 16]))
def test_any_sequence_of_allowed_tokens_is_a_well_formed_mesh(seed, bins):
    """Random tokens among the allowed ones: there always is one, and no face is degenerate."""
    rng, masks, traversal = np.random.default_rng(seed), tree.slot_masks(bins), tree.Traversal(bins)
    for _ in range(120):
        allowed = np.flatnonzero(traversal.allowed(masks))
        assert len(allowed), "a mesh that can be neither continued nor ended"
        token = int(rng.choice(allowed))
        if token == tree.vocab_size(bins):
            break
        if rng.random() < 0.5 and tree.CLOSE in allowed:
            token = tree.CLOSE
        traversal.append(token)
    mesh = tree.build_mesh(traversal.faces)
    assert len(mesh.faces) == len(traversal.faces), "no face twice"
    assert all(not tree.is_collinear(*face) for face in traversal.faces)
    assert_exact(mesh, bins)


def test_exactly_the_tokens_that_can_be_appended_are_allowed():
    bins = 5
    masks = tree.slot_masks(bins)
    soup, box = canonicalize(random_soup(3, 12, 8), bins), canonicalize(Mesh(BOX, BOX_FACES), bins)
    tokens = tree.encode_mesh(soup, bins)
    if replay(tokens, bins).slot == tree.EDGE:
        tokens.append(tree.NEW)
    tokens += tree.encode_mesh(box, bins)
    for length in range(len(tokens) + 1):
        traversal = replay(tokens[:length], bins)
        allowed = traversal.allowed(masks)
        for token in set(range(tree.vocab_size(bins))) - {tree.PAD}:
            fresh = replay(tokens[:length], bins)
            try:
                fresh.append(token)
            except tree.InvalidToken:
                assert not allowed[token]
            else:
                # A line without a free bin is excluded one token before it would lead nowhere.
                assert allowed[token] or not fresh.allowed(masks).any()


def replay(tokens: list[int], bins: int) -> tree.Traversal:
    traversal = tree.Traversal(bins)
    for token in tokens:
        traversal.append(token)
    return traversal


def test_the_end_is_allowed_after_faces_and_not_within_a_vertex():
    masks = tree.slot_masks(16)

    def may_end(faces: np.ndarray) -> list[bool]:
        tokens = tree.encode_mesh(canonicalize(Mesh(BOX, faces), 16), 16)
        return [bool(replay(tokens[:n], 16).allowed(masks)[-1]) for n in range(len(tokens) + 1)]

    parts = may_end(INSIDE_OUT)
    assert parts[0] and not any(parts[1:9]) and parts[9] and not parts[10] and parts[-1]
    assert may_end(BOX_FACES) == [True, *[False] * 6, True]


@pytest.mark.parametrize("number", range(6))
def test_open_edges_are_exactly_those_that_tokens_leave_open(number):
    """Without STOP and NEW, and with an empty stack at the end, a mesh has no boundary."""
    mesh = synthetic_mesh(number)
    for faces in (mesh.faces, mesh.faces[3:]):
        tokens = tree.encode_mesh(CanonicalMesh(mesh.vertices, faces), 64)
        left_open = tree.STOP in tokens or tree.NEW in tokens
        left_open |= replay(tokens, 64).slot == tree.EDGE
        assert left_open == (count_edges(faces).boundary > 0)


# ---- context


def test_the_context_names_the_points_around_the_edge():
    bins = 16
    tokens = tree.encode_mesh(canonicalize(Mesh(BOX, INSIDE_OUT), bins), bins)
    traversal = replay(tokens[:9], bins)
    slot, *points = read_context(traversal)
    u, v, apex, opposite, *_ = np.reshape(points, (NUM_ROLES, 3)).tolist()
    assert slot == tree.EDGE and (tuple(u), tuple(v)) == (traversal.gate.u, traversal.gate.v)
    assert sorted(map(tuple, (u, v, apex))) == sorted(traversal.part)
    expected = np.clip(np.add(u, v) - apex, 0, bins - 1)
    assert opposite == expected.tolist()


def test_a_repeated_part_is_named_in_advance():
    """The second of two equal parts: the moved vertex of the first is the one that follows."""
    bins = 32
    twice = Mesh(
        np.concatenate([BOX, BOX + [3, 0, 0]]), np.concatenate([INSIDE_OUT, INSIDE_OUT + 8])
    )
    tokens = tree.encode_mesh(canonicalize(twice, bins), bins)
    traversal, right = tree.Traversal(bins), []
    for token in tokens:
        if tree.AXIS[traversal.slot] == 0:
            context = read_context(traversal)
        if token >= tree.FIRST_COORDINATE and traversal.earlier_parts and len(traversal.part) >= 1:
            axis = tree.AXIS[traversal.slot]
            repeated = context[1 + 3 * 6 + axis]
            right.append(repeated == token - tree.FIRST_COORDINATE - axis * bins)
        traversal.append(token)
    assert len(right) >= 15 and np.mean(right) > 0.7


def test_the_corners_of_a_repeated_box_are_named_in_advance():
    """Four equal legs: mirror images of the one before, of the same size."""
    bins = 32
    legs = [BOX * [1, 1, 4] + [x, y, 0] for y in (0, 8) for x in (0, 8)]
    faces = np.concatenate([BOX_FACES + 8 * number for number in range(4)])
    tokens = tree.encode_mesh(canonicalize(Mesh(np.concatenate(legs), faces), bins), bins)
    positions, traversal = tree.to_positions(tokens), tree.Traversal(bins)
    for number, position in enumerate(positions):
        points = np.reshape(read_context(traversal)[1:], (NUM_ROLES, 3))
        if number > 3 and position[0] >= tree.FIRST_COORDINATE:
            corner = np.subtract(position, tree.coordinate_tokens((0, 0, 0), bins))
            assert (points == corner).any(axis=0).all(), "each coordinate is that of a point"
            is_high = number % 3 == 2
            assert not is_high or points[1].tolist() == corner.tolist()
        for token in position:
            if token != tree.PAD:
                traversal.append(token)


# ---- bad input


def test_tokens_that_cannot_follow_are_an_error_and_change_nothing():
    traversal = tree.Traversal(8)
    for token in (tree.STOP, tree.NEW, tree.CLOSE, tree.vocab_size(8), -1, tree.vocab_size(8) - 1):
        with pytest.raises(tree.InvalidToken):
            traversal.append(token)
    assert traversal.slot == tree.ROOT and not traversal.faces
    tokens = [*tree.coordinate_tokens((0, 0, 0), 8), *tree.coordinate_tokens((0, 0, 1), 8)]
    traversal = replay([*tokens, *tree.coordinate_tokens((0, 0, 2), 8)[:2]], 8)
    with pytest.raises(tree.InvalidToken, match="no new triangle with area"):
        traversal.append(tree.coordinate_tokens((0, 0, 2), 8)[2])


def test_the_tokenizer_encodes_media_files_and_arrays(tmp_path):
    tokenizer = TreeTokenizer(bins=32, max_len=20)
    path = Mesh(BOX, BOX_FACES).save(tmp_path / "box.ply")
    codes = tokenizer.encode([Mesh(BOX, BOX_FACES), str(path), (BOX * 3 + 1, BOX_FACES)])
    assert codes.shape == (3, 20, 3) and (codes[0, :, 0] >= 0).sum() == 3
    assert torch.equal(codes[0], codes[1]) and torch.equal(codes[0], codes[2])
    [mesh] = tokenizer.decode(codes[0])
    assert len(mesh.faces) == 12 and len(tokenizer.to_media(codes)) == 3
    assert tokenizer.fingerprint == TreeTokenizer(bins=32).fingerprint
    assert tokenizer.fingerprint != TreeTokenizer(bins=64).fingerprint


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ([], "the list is empty"),
        (generate_object(0, 1).mesh, "simplify it"),
        (Mesh(BOX, INSIDE_OUT), "14 positions, but the maximum is 13"),
        ("nothing.obj", "nothing.obj"),
        (Mesh(np.full((3, 3), np.nan), np.array([[0, 1, 2]])), "not finite"),
    ],
    ids=["empty list", "huge", "too long", "missing file", "NaN"],
)
def test_media_that_cannot_be_encoded_are_an_error(media, message):
    with pytest.raises(UserError, match=message):
        TreeTokenizer(bins=32, max_len=13).encode(media)


def test_codes_of_no_mesh_are_an_error_and_unfinished_ones_are_not():
    tokenizer = TreeTokenizer(bins=32, max_len=20)
    codes = tokenizer.encode(Mesh(BOX, INSIDE_OUT))
    with pytest.raises(UserError, match="not those of a mesh"):
        tokenizer.decode(codes.flip(1))
    [cut] = tokenizer.decode(codes[:, :6])
    assert 0 < len(cut.faces) < 12
    [empty] = tokenizer.decode(torch.full((1, 8, 3), -1))
    assert len(empty.faces) == 0
