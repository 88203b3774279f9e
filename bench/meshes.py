"""How fast are meshes learnt and made, beside meshgpt-pytorch, and what does it take to know which
faces touch?

    python bench/meshes.py --peer-env DIR --peer-adapters DIR [--what step sample adjacency] [--blocks 30]
    python bench/meshes.py --what adjacency

DIR of the first is an environment in which that package is installed (DIR/venv/bin/python), DIR of
the second holds `peer_adapters.py`, which builds its networks and trainers at the small
configuration, and `peershim.py`, which lets it start; nothing of them is part of this project.
Without them only our side of the adjacency is told.

step: training steps of autoencoder and transformer (`mesh_networks.py` says of what size and from
what).
sample: meshes, one at a time and 8 at once (`mesh_networks.py`).
adjacency: time and memory for meshes of 1,000 to 20,000 faces, and how they grow
(`mesh_adjacency.py`).

Each side of a comparison is a process of its own, with its own packages, and one works while the
other waits. One compute thread, fp32.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import memory
import mesh_adjacency
import mesh_networks
import pairs
from compared import Comparison, Finding, Script, as_sides, concluded
from mesh_adjacency import Spent, exponent
from mesh_networks import AT_ONCE, SAMPLED_FACES
from sides import Side

What = Literal["step", "sample", "adjacency"]

PEER: dict[str, Callable[[Path], Side]] = {
    "their autoencoder": mesh_networks.their_autoencoder,
    "their transformer": mesh_networks.their_transformer,
    "their sampler": partial(mesh_networks.their_sample, meshes=1, at_once=1),
    "their 8 at once": partial(mesh_networks.their_sample, meshes=8, at_once=8),
    "their 8 in turn": partial(mesh_networks.their_sample, meshes=8, at_once=1),
}
OURS: dict[str, Callable[[Path], Side]] = {
    "meshes ready": partial(mesh_networks.our_autoencoder, meshes="ready"),
    "meshes as found": partial(mesh_networks.our_autoencoder, meshes="as found"),
    "meshes stretched": partial(mesh_networks.our_autoencoder, meshes="stretched"),
    "cached codes": partial(mesh_networks.our_transformer, codes="cached"),
    "live codes": partial(mesh_networks.our_transformer, codes="raw"),
    "our sampler": partial(mesh_networks.our_sample, meshes=1, at_once=1),
    "our 8 at once": partial(mesh_networks.our_sample, meshes=8, at_once=8),
}
OUR_ADJACENCY, THEIR_ADJACENCY = "our adjacency", "their adjacency"
"""The names by which processes are told what to do."""

COMPARISONS = (
    # As from a folder: ours brings every mesh into its order once, which theirs leaves to whoever
    # makes the data. And with meshes that are in order already, so that both do the same. Both are
    # judged. Where meshes are stretched anew at every visit, ours has that to do as well.
    Comparison(
        "step",
        f"{AT_ONCE} training steps of the autoencoder",
        "meshes as found",
        "their autoencoder",
        1.3,
    ),
    Comparison(
        "step",
        f"{AT_ONCE} training steps of the autoencoder",
        "meshes ready",
        "their autoencoder",
        1.3,
    ),
    Comparison(
        "step",
        f"{AT_ONCE} training steps of the autoencoder",
        "meshes stretched",
        "their autoencoder",
        None,
    ),
    Comparison(
        "step",
        f"{AT_ONCE} training steps of the transformer",
        "cached codes",
        "their transformer",
        1.3,
    ),
    # Theirs tokenizes at every step. So does ours if it is asked to, and then only the networks
    # differ.
    Comparison(
        "step",
        f"{AT_ONCE} training steps of the transformer",
        "live codes",
        "their transformer",
        None,
    ),
    Comparison("sample", f"a mesh of {SAMPLED_FACES} faces", "our sampler", "their sampler", 2.0),
    Comparison(
        "sample", f"8 meshes of {SAMPLED_FACES} faces", "our 8 at once", "their 8 at once", 6.0
    ),
    Comparison(
        "sample", f"8 meshes of {SAMPLED_FACES} faces", "our 8 at once", "their 8 in turn", None
    ),
)
STEEPEST = 1.2
"""The exponent with which adjacency may grow."""


# ---- side by side


def find_compared(what: What, asked: argparse.Namespace) -> Finding:
    print(
        f"{asked.blocks} blocks of {asked.steps} on each side, in turn; MFLOP are those of one forward pass of a batch of 4"
    )
    found = SCRIPT.find(
        [comparison for comparison in COMPARISONS if comparison.what == what], asked
    )
    if what == "step":
        print(mesh_networks.DIFFERENT, flush=True)
    return found


# ---- which faces touch


def find_adjacency(asked: argparse.Namespace) -> Finding:
    ours = {faces: spent(OUR_ADJACENCY, faces, asked) for faces in mesh_adjacency.SIDES}
    has_peer = asked.peer_env is not None
    theirs = (
        {faces: spent(THEIR_ADJACENCY, faces, asked) for faces in mesh_adjacency.THEIRS}
        if has_peer
        else {}
    )
    print(told_adjacency(ours, theirs), flush=True)
    numbers = {
        name: {faces: asdict(one) for faces, one in found.items()}
        for name, found in (("ours", ours), ("theirs", theirs))
    }
    time, memory = growth(ours)
    return Finding(
        numbers | {"exponents": {"time": time, "memory": memory}}, max(time, memory) <= STEEPEST
    )


def spent(name: str, faces: int, asked: argparse.Namespace) -> Spent:
    found = Spent(**memory.told_by(name, [*SCRIPT.command(name, asked), "--faces", str(faces)]))
    if found.pairs != 3 * faces:
        raise SystemExit(
            f"On a torus of {faces} faces there are {3 * faces} pairs, but {name} found {found.pairs}."
        )
    return found


def growth(found: dict[int, Spent]) -> tuple[float, float]:
    """The exponents of time and of memory."""
    seconds, mb = [one.seconds for one in found.values()], [one.mb for one in found.values()]
    return exponent(list(found), seconds), exponent(list(found), mb)


def told_adjacency(ours: dict[int, Spent], theirs: dict[int, Spent]) -> str:
    lines = ["which faces share an edge, on tori of triangles"]
    for name, found in (("ours", ours), ("theirs", theirs)):
        for faces, one in found.items():
            lines.append(
                f"  {name:<8}{faces:>8,} faces{1e3 * one.seconds:>10.2f} ms{one.mb:>10.2f} MB"
            )
        if found:
            time, memory = growth(found)
            lines.append(
                f"  {name:<8}grows with the faces to the power of {time:.2f} in time and {memory:.2f} in memory"
            )
    return "\n".join([*lines, f"  wanted of ours: at most {STEEPEST}"])


FIND: dict[What, Callable[[argparse.Namespace], Finding]] = {
    "step": partial(find_compared, "step"),
    "sample": partial(find_compared, "sample"),
    "adjacency": find_adjacency,
}


def measure(adjacency: Callable[[int], Spent], asked: argparse.Namespace) -> None:
    """In a process that finds which faces touch."""
    print(json.dumps(asdict(adjacency(asked.faces))))


SCRIPT = Script(
    __file__,
    ours=as_sides(OURS) | {OUR_ADJACENCY: partial(measure, mesh_adjacency.ours)},
    theirs=as_sides(PEER) | {THEIR_ADJACENCY: partial(measure, mesh_adjacency.theirs)},
)


def main(arguments: list[str] | None = None) -> int:
    steps = f"in one block: times {AT_ONCE} training steps, or samples"
    parser = SCRIPT.parser(__doc__, get_args(What), steps=1, of_steps=steps)
    parser.add_argument("--faces", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    pairs.pin(asked.threads)
    if asked.worker is not None:
        SCRIPT.work(asked)
        return 0
    if set(asked.what) != {"adjacency"} and None in (asked.peer_env, asked.peer_adapters):
        parser.error(
            "the package is one of the sides: give --peer-env and --peer-adapters, or --what adjacency, which can do without"
        )
    if (asked.peer_env is None) != (asked.peer_adapters is None):
        parser.error("the package needs both: give --peer-env and --peer-adapters, or neither")

    print(pairs.circumstances(), flush=True)
    found = {what: find(asked) for what, find in FIND.items() if what in asked.what}
    return concluded(found, asked)


if __name__ == "__main__":
    sys.exit(main())
