"""A mesh as a sequence of tokens in which every triangle but the first of a part is attached to an
edge that exists already.

The traversal keeps a stack of open edges, as EdgeBreaker does (Rossignac 1999,
doi.org/10.1109/2945.764870); that an autoregressive model predicts only the vertex opposite to the
edge on top follows TreeMeshGPT (Lionar 2025, arXiv 2503.11629, section 3). An edge u -> v on the
stack is one that the next triangle would contain. One token answers it:

- a vertex of an open edge at u or at v (`CLOSE`): a triangle between known vertices;
- the coordinates of any other vertex, known or new, in three tokens: z, y, x;
- `STOP`: no triangle is attached to this edge;
- `NEW`: no further triangle is attached to any edge on the stack; another part begins.

Edges that a later triangle has closed leave the stack without a token, and so do all edges at the
end of the sequence. A part begins with the nine coordinates of a triangle. The triangles that an
edge of more than two of them leaves out begin parts of their own, on known vertices: any set of
triangles has a sequence.

A box along the axes is a part of its own, whatever it touches (`modalities/mesh/boxes.py`): a token
of `BOX` for the diagonals of its sides, and the coordinates of two opposite corners, 7 tokens for
12 triangles, where the traversal takes 30.

The tokens are stored in positions of three: the coordinates of a vertex, or another token and two
of `PAD`. A model needs one step of its transformer for a position, as in TreeMeshGPT (section 3.3).

Vertices are tuples (z, y, x) of bin indices. A `Traversal` is the state after some tokens; encoding
and decoding are both written with it, and it determines which tokens may follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tessera.modalities.mesh.boxes import NUM_DIAGONALS, Box, Vertex, box_faces, find_boxes
from tessera.modalities.mesh.canonical import CanonicalMesh, sort_faces

Edge = tuple[Vertex, Vertex]

STOP, NEW = 0, 1
NUM_SIDE = 2
"""The number of open edges at each end of an edge whose vertices have a token of their own."""
CLOSE = 2
"""The first of 2 * NUM_SIDE tokens: vertices of open edges at u, then at v, the newest first."""
BOX = CLOSE + 2 * NUM_SIDE
"""The first of NUM_DIAGONALS tokens: a box along the axes, with these diagonals."""
PAD = BOX + NUM_DIAGONALS
"""Fills the position of a token that is no coordinate."""
FIRST_COORDINATE = PAD + 1
POSITION_SIZE = 3
"""The number of tokens of a position."""

ROOT, EDGE, BOX_LOW, BOX_HIGH = 0, 9, 12, 15
"""Slots: the nine coordinates of the first triangle of a part, the first of which may be a box; the
answer to an edge, which may be a z coordinate, and the y and the x coordinate that follow it; and
the coordinates of the lower and of the higher corner of a box."""
NUM_SLOTS = 18
AXIS = (0, 1, 2) * 6
"""The axis of the coordinate that each slot takes: 0 for z, 1 for y, 2 for x."""

ABSENT: Vertex = (-1, -1, -1)
MIN_BINS = 4
"""On a smaller grid, triangles can exhaust the vertices that a third one could have."""


def vocab_size(bins: int) -> int:
    """Return the number of tokens, without the end of the sequence."""
    return FIRST_COORDINATE + 3 * bins


def slot_masks(bins: int) -> np.ndarray:
    """Return (slots, V + 1) bool: which tokens a slot can have; the last one is the end."""
    masks = np.zeros((NUM_SLOTS, vocab_size(bins) + 1), dtype=bool)
    for slot, axis in enumerate(AXIS):
        first = FIRST_COORDINATE + axis * bins
        masks[slot, first : first + bins] = True
    masks[EDGE, :BOX] = True
    masks[ROOT, BOX:PAD] = True
    masks[[ROOT, EDGE], -1] = True
    return masks


class Gate(NamedTuple):
    """An open edge: the next triangle would contain u -> v; `apex` is the third vertex of the
    triangle that contains v -> u."""

    u: Vertex
    v: Vertex
    apex: Vertex


class InvalidToken(ValueError):
    """A token that cannot follow the tokens before it."""


class Traversal:
    """A mesh under construction."""

    def __init__(self, bins: int):
        self.bins = bins
        self.faces: list[tuple[Vertex, Vertex, Vertex]] = []
        self.slot = ROOT
        self.stack: list[Gate] = []
        self.pending: list[int] = []
        """The coordinates so far of the vertex that is being named."""
        self.candidates: list[Vertex | None] = [None] * (2 * NUM_SIDE)
        """The vertices of the CLOSE tokens at the edge on top of the stack."""
        self.part: list[Vertex] = []
        """The vertices of the current part that were named by coordinates, in order; two opposite
        corners of a box."""
        self.earlier_parts: list[list[Vertex]] = []
        """The same for the parts before it."""
        self.low: Vertex = ABSENT
        self.high: Vertex = ABSENT
        """The corners of the bounding box of all triangles."""
        self._diagonals = 0
        """The diagonals of the box whose corners are being named."""
        self._edges: set[Edge] = set()
        self._thirds: defaultdict[Edge, list[Vertex]] = defaultdict(list)
        self._leaving: defaultdict[Vertex, list[Vertex]] = defaultdict(list)
        self._entering: defaultdict[Vertex, list[Vertex]] = defaultdict(list)

    @property
    def gate(self) -> Gate:
        return self.stack[-1]

    # ---- tokens

    def append(self, token: int) -> None:
        """Advance by one token.

        Raises:
            InvalidToken: If the token cannot follow; the state is unchanged.
        """
        if self.slot == EDGE and 0 <= token < BOX:
            self._answer(token)
            return
        if self.slot == ROOT and BOX <= token < PAD:
            self._diagonals = token - BOX
            self.slot = BOX_LOW
            return
        axis = AXIS[self.slot]
        value = token - FIRST_COORDINATE - axis * self.bins
        if not 0 <= value < self.bins:
            raise InvalidToken(f"Token {token} cannot follow here (slot {self.slot}).")
        if self.slot >= BOX_LOW and not self._first_corner(axis) <= value <= self._last_corner():
            raise InvalidToken(f"A box has no corner at {value} of axis {axis} here.")
        if axis < 2:
            self.pending.append(value)
            self.slot += 1
            return
        vertex = (self.pending[0], self.pending[1], value)
        if self.slot < EDGE:
            self._extend_root(vertex)
        elif self.slot < BOX_LOW:
            self._attach_named(vertex)
        elif self.slot < BOX_HIGH:
            self._begin_part(vertex)
            self.slot += 1
        else:
            self._add_box(vertex)

    def _answer(self, token: int) -> None:
        if token == STOP:
            self.stack.pop()
            self._advance()
        elif token == NEW:
            self.stack.clear()
            self._advance()
        else:
            vertex = self.candidates[token - CLOSE]
            if vertex is None:
                raise InvalidToken(f"Token {token} cannot follow here: there is no such open edge.")
            self._attach(vertex)

    def _extend_root(self, vertex: Vertex) -> None:
        first = self.slot == ROOT + 2
        named = [] if first else self.part
        if vertex in named or (len(named) == 2 and not self.may_add(named[0], named[1], vertex)):
            raise InvalidToken(f"Vertex {vertex} makes no new triangle with area.")
        if first:
            self._begin_part(vertex)
        else:
            self.part.append(vertex)
        self.pending = []
        self.slot += 1
        if len(self.part) == 3:
            a, b, c = self.part
            for corner in self.part:
                self._extend_bounds(corner)
            self._add_face(a, b, c)
            self.stack = [Gate(a, c, b), Gate(c, b, a), Gate(b, a, c)]
            self._advance()

    def _begin_part(self, vertex: Vertex) -> None:
        if self.part:
            self.earlier_parts.append(self.part)
        self.part, self.pending = [vertex], []

    def _add_box(self, high: Vertex) -> None:
        """Add the triangles of a box that are not there already."""
        low = self.part[0]
        self.part.append(high)
        self._extend_bounds(low)
        self._extend_bounds(high)
        for u, v, w in box_faces(Box(low, high, self._diagonals)):
            if self.may_add(u, v, w):
                self._add_face(u, v, w)
        self._advance()

    def _first_corner(self, axis: int) -> int:
        """Return the lowest coordinate that the corner of a box can have."""
        return 0 if self.slot < BOX_HIGH else self.part[0][axis] + 1

    def _last_corner(self) -> int:
        return self.bins - 2 if self.slot < BOX_HIGH else self.bins - 1

    def _attach_named(self, vertex: Vertex) -> None:
        gate = self.gate
        if not self.may_add(gate.u, gate.v, vertex):
            raise InvalidToken(f"Vertex {vertex} makes no new triangle with area.")
        self.part.append(vertex)
        self._attach(vertex)

    def _attach(self, vertex: Vertex) -> None:
        gate = self.stack.pop()
        self._extend_bounds(vertex)
        self._add_face(gate.u, gate.v, vertex)
        self.stack.append(Gate(gate.u, vertex, gate.v))
        self.stack.append(Gate(vertex, gate.v, gate.u))
        self._advance()

    def _advance(self) -> None:
        """Remove closed edges from the stack, and set the slot of the next token."""
        self.pending = []
        while self.stack and not self.is_open(self.stack[-1]):
            self.stack.pop()
        if not self.stack:
            self.slot = ROOT
            return
        self.slot = EDGE
        u, v = self.gate.u, self.gate.v
        at_u = self._usable(self._leaving[u], u, v, ())
        at_v = self._usable(self._entering[v], u, v, at_u)
        self.candidates = [
            *at_u,
            *[None] * (NUM_SIDE - len(at_u)),
            *at_v,
            *[None] * (NUM_SIDE - len(at_v)),
        ]

    def _usable(
        self, vertices: list[Vertex], u: Vertex, v: Vertex, taken: Sequence[Vertex]
    ) -> list[Vertex]:
        found: list[Vertex] = []
        for vertex in reversed(vertices):
            if vertex not in taken and vertex not in found and self.may_add(u, v, vertex):
                found.append(vertex)
                if len(found) == NUM_SIDE:
                    break
        return found

    # ---- triangles

    def is_open(self, gate: Gate) -> bool:
        """Return whether no triangle contains the edge u -> v yet."""
        return (gate.u, gate.v) not in self._edges

    def may_add(self, u: Vertex, v: Vertex, w: Vertex) -> bool:
        """Return whether a triangle has an area and is not there already, either way round."""
        return not is_collinear(u, v, w) and w not in self._thirds.get(undirected(u, v), ())

    def _add_face(self, u: Vertex, v: Vertex, w: Vertex) -> None:
        self.faces.append((u, v, w))
        for one, other, third in ((u, v, w), (v, w, u), (w, u, v)):
            self._thirds[undirected(one, other)].append(third)
            if (one, other) in self._edges:
                continue
            if (other, one) in self._edges:
                self._leaving[other].remove(one)
                self._entering[one].remove(other)
            else:
                self._leaving[one].append(other)
                self._entering[other].append(one)
            self._edges.add((one, other))

    def _extend_bounds(self, vertex: Vertex) -> None:
        if self.low is ABSENT:
            self.low = self.high = vertex
            return
        (z, y, x), (lz, ly, lx), (hz, hy, hx) = vertex, self.low, self.high
        self.low = (z if z < lz else lz, y if y < ly else ly, x if x < lx else lx)
        self.high = (z if z > hz else hz, y if y > hy else hy, x if x > hx else hx)

    # ---- which tokens may follow

    def allowed(self, masks: np.ndarray) -> np.ndarray:
        """Return (V + 1,) bool: which tokens may follow; `masks` are those of `slot_masks`."""
        mask = masks[self.slot].copy()
        mask[self.excluded()] = False
        return mask

    def excluded(self) -> list[int]:
        """Return the tokens that the slot can have, but that cannot follow here."""
        if self.slot == EDGE:
            return [CLOSE + k for k, vertex in enumerate(self.candidates) if vertex is None]
        axis = AXIS[self.slot]
        first = FIRST_COORDINATE + axis * self.bins
        if self.slot >= BOX_LOW:
            last = first + self._last_corner() + 1
            below = range(first, first + self._first_corner(axis))
            return [*below, *range(last, first + self.bins)]
        if self.slot < 3 or axis == 0:
            return []
        named = self.part if self.slot < EDGE else self.gate[:2]
        if axis == 2:
            return [first + x for x in self._taken_on(self.pending[0], self.pending[1], named)]
        z = self.pending[0]
        full = (y for y in self._risky_lines(z, named) if self._is_full(z, y, named))
        return [first + y for y in full]

    def _risky_lines(self, z: int, named: Sequence[Vertex]) -> Iterable[int]:
        """Return the y of lines along x that may have no free bin: the line of the edge excludes at
        most one bin of the others, and existing triangles none."""
        known = self._thirds.get(undirected(*named), ()) if len(named) == 2 else ()
        return {vertex[1] for vertex in (*named, *known) if vertex[0] == z}

    def _is_full(self, z: int, y: int, named: Sequence[Vertex]) -> bool:
        return len(set(self._taken_on(z, y, named))) == self.bins

    def _taken_on(self, z: int, y: int, named: Sequence[Vertex]) -> Iterable[int]:
        """Return the x of a line along x at which there can be no vertex."""
        if len(named) == 1:
            return [named[0][2]] if named[0][:2] == (z, y) else []
        u, v = named
        known = self._thirds.get(undirected(u, v), ())
        taken = [vertex[2] for vertex in known if vertex[:2] == (z, y)]
        dz, dy, dx = v[0] - u[0], v[1] - u[1], v[2] - u[2]
        if not dz and not dy:
            return range(self.bins) if u[:2] == (z, y) else taken
        if (z - u[0]) * dy != (y - u[1]) * dz:
            return taken
        # The point at which the line through u and v meets this line.
        x, rest = divmod((z - u[0]) * dx, dz) if dz else divmod((y - u[1]) * dx, dy)
        x += u[2]
        return [*taken, x] if not rest and 0 <= x < self.bins else taken


def undirected(u: Vertex, v: Vertex) -> Edge:
    return (u, v) if u < v else (v, u)


def is_collinear(u: Vertex, v: Vertex, w: Vertex) -> bool:
    a, b, c = v[0] - u[0], v[1] - u[1], v[2] - u[2]
    d, e, f = w[0] - u[0], w[1] - u[1], w[2] - u[2]
    return a * e == b * d and b * f == c * e and a * f == c * d


# ---- whole meshes


def encode_mesh(mesh: CanonicalMesh, bins: int) -> list[int]:
    """Return the tokens of a mesh of triangles in canonical form, without the end."""
    vertices = [(z, y, x) for x, y, z in mesh.vertices.tolist()]
    faces = [(vertices[a], vertices[b], vertices[c]) for a, b, c in mesh.faces.tolist()]
    by_edge: defaultdict[Edge, list[tuple[int, Vertex]]] = defaultdict(list)
    for number, (a, b, c) in enumerate(faces):
        for u, v, w in ((a, b, c), (b, c, a), (c, a, b)):
            by_edge[u, v].append((number, w))
    traversal, tokens = Traversal(bins), list[int]()
    visited = [False] * len(faces)
    boxes: dict[int, Box] = {}
    """Boxes by the first of their triangles, in whose place they are encoded."""
    for found_box in find_boxes(faces):
        boxes[min(found_box.numbers)] = found_box.box
        for number in found_box.numbers:
            visited[number] = True

    def find(gate: Gate) -> tuple[int, Vertex] | None:
        for number, third in by_edge.get((gate.u, gate.v), ()):
            if not visited[number]:
                return number, third
        return None

    def emit(new: Iterable[int]) -> None:
        for token in new:
            traversal.append(token)
            tokens.append(token)

    for root, face in enumerate(faces):
        box = boxes.get(root)
        if visited[root] and box is None:
            continue
        if traversal.slot == EDGE:
            emit([NEW])
        if box is not None:
            emit([BOX + box.diagonals])
            emit(coordinate_tokens(box.low, bins))
            emit(coordinate_tokens(box.high, bins))
            continue
        visited[root] = True
        for vertex in face:
            emit(coordinate_tokens(vertex, bins))
        while traversal.slot == EDGE:
            found = find(traversal.gate)
            if found is not None:
                number, third = found
                visited[number] = True
                emit(vertex_tokens(traversal, third))
            elif any(traversal.is_open(gate) and find(gate) for gate in traversal.stack):
                emit([STOP])
            else:
                break
    return tokens


def to_positions(tokens: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return tokens in positions of three; an unfinished vertex at the end is left out."""
    positions, start = [], 0
    while start < len(tokens):
        if tokens[start] < FIRST_COORDINATE:
            positions.append((tokens[start], PAD, PAD))
            start += 1
            continue
        if start + POSITION_SIZE <= len(tokens):
            positions.append((tokens[start], tokens[start + 1], tokens[start + 2]))
        start += POSITION_SIZE
    return positions


def vertex_tokens(traversal: Traversal, vertex: Vertex) -> list[int]:
    """Return the tokens that attach a vertex to the edge on top of the stack."""
    if vertex in traversal.candidates:
        return [CLOSE + traversal.candidates.index(vertex)]
    return coordinate_tokens(vertex, traversal.bins)


def coordinate_tokens(vertex: Vertex, bins: int) -> list[int]:
    return [FIRST_COORDINATE + axis * bins + value for axis, value in enumerate(vertex)]


def decode_mesh(tokens: Iterable[int], bins: int) -> CanonicalMesh:
    """Return the mesh of some tokens; an unfinished vertex or first triangle is left out.

    Raises:
        InvalidToken: If a token cannot follow those before it.
    """
    traversal = Traversal(bins)
    for token in tokens:
        traversal.append(token)
    return build_mesh(traversal.faces)


def build_mesh(faces: Sequence[tuple[Vertex, Vertex, Vertex]]) -> CanonicalMesh:
    """Return triangles in canonical order."""
    vertices = sorted({vertex for face in faces for vertex in face})
    indices = {vertex: index for index, vertex in enumerate(vertices)}
    rows = [[indices[vertex] for vertex in face] for face in faces]
    zyx = np.array(vertices, dtype=np.int64).reshape(-1, 3)
    numbered = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return CanonicalMesh(zyx[:, ::-1], sort_faces(numbered) if rows else numbered)
