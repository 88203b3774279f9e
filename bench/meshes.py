"""Speed of mesh autoencoder and mesh transformer, compared with meshgpt-pytorch, and the cost of
face adjacency.

    python bench/meshes.py [--only step sample adjacency] [--blocks 30] [--steps 1]

The parts `step` and `sample` need the environment of the research packages (`make peers`); without
it, `adjacency` measures our side only.

step: training steps of autoencoder and transformer (`mesh_networks.py`).
sample: generation of meshes, one at a time and 8 at once (`mesh_networks.py`).
adjacency: time and memory for meshes of 1,000 to 20,000 faces, and how they grow
(`mesh_adjacency.py`).

Each side of a comparison is a process with its own packages, and the two take turns. One compute
thread, fp32.
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
import timing
from comparison import (
    BenchResult,
    BenchScript,
    Comparison,
    check_peers_python,
    finish,
    timed_workers,
)
from mesh_adjacency import AdjacencyCost, growth_exponent
from mesh_networks import SAMPLED_FACES, STEPS_AT_ONCE
from worker import Workload

Part = Literal["step", "sample", "adjacency"]

THEIRS: dict[str, Callable[[Path], Workload]] = {
    "their autoencoder": mesh_networks.build_their_autoencoder,
    "their transformer": mesh_networks.build_their_transformer,
    "their sampler": partial(mesh_networks.build_their_sampler, meshes=1, batch_size=1),
    "their 8 at once": partial(mesh_networks.build_their_sampler, meshes=8, batch_size=8),
    "their 8 in turn": partial(mesh_networks.build_their_sampler, meshes=8, batch_size=1),
}
OURS: dict[str, Callable[[Path], Workload]] = {
    "canonical meshes": partial(mesh_networks.build_our_autoencoder, meshes="canonical"),
    "mesh files": partial(mesh_networks.build_our_autoencoder, meshes="files"),
    "augmented files": partial(mesh_networks.build_our_autoencoder, meshes="augmented"),
    "cached tokens": partial(mesh_networks.build_our_transformer, tokens="cache"),
    "live tokens": partial(mesh_networks.build_our_transformer, tokens="live"),
    "our sampler": partial(mesh_networks.build_our_sampler, meshes=1, batch_size=1),
    "our 8 at once": partial(mesh_networks.build_our_sampler, meshes=8, batch_size=8),
    "our tree": partial(mesh_networks.build_our_tree_sampler, meshes=1, batch_size=1),
    "our 8 trees at once": partial(mesh_networks.build_our_tree_sampler, meshes=8, batch_size=8),
}
OUR_ADJACENCY, THEIR_ADJACENCY = "our adjacency", "their adjacency"

AUTOENCODER_STEPS = f"{STEPS_AT_ONCE} training steps of the autoencoder"
TRANSFORMER_STEPS = f"{STEPS_AT_ONCE} training steps of the transformer"
COMPARISONS = (
    # Ours sorts every mesh into canonical order, once per file; theirs expects sorted meshes. So
    # ours is measured on files, and on meshes that are sorted already, which is the work that
    # theirs does. With augmentation ours sorts at every access, which has no target.
    Comparison("step", AUTOENCODER_STEPS, "mesh files", "their autoencoder", 1.3),
    Comparison("step", AUTOENCODER_STEPS, "canonical meshes", "their autoencoder", 1.3),
    Comparison("step", AUTOENCODER_STEPS, "augmented files", "their autoencoder", None),
    # Theirs tokenizes at every step. The second line is ours doing the same, for information.
    Comparison("step", TRANSFORMER_STEPS, "cached tokens", "their transformer", 1.3),
    Comparison("step", TRANSFORMER_STEPS, "live tokens", "their transformer", None),
    Comparison("sample", f"a mesh of {SAMPLED_FACES} faces", "our sampler", "their sampler", 2.0),
    Comparison(
        "sample", f"8 meshes of {SAMPLED_FACES} faces", "our 8 at once", "their 8 at once", 6.0
    ),
    Comparison(
        "sample", f"8 meshes of {SAMPLED_FACES} faces", "our 8 at once", "their 8 in turn", None
    ),
    Comparison("sample", f"a mesh of {SAMPLED_FACES} faces", "our tree", "their sampler", None),
    Comparison(
        "sample",
        f"8 meshes of {SAMPLED_FACES} faces",
        "our 8 trees at once",
        "their 8 at once",
        None,
    ),
)
MAX_EXPONENT = 1.2
"""The most that time and memory of adjacency may grow, as a power of the number of faces."""


# ---- comparisons


def compare(part: Part, args: argparse.Namespace) -> BenchResult:
    print(
        f"{args.blocks} alternating blocks of {args.steps} of each side; "
        "MFLOP of one forward pass of a batch of 4"
    )
    result = SCRIPT.compare_all([one for one in COMPARISONS if one.part == part], args)
    if part == "step":
        print(mesh_networks.DIFFERENCES, flush=True)
    return result


# ---- adjacency


def measure_adjacency(args: argparse.Namespace) -> BenchResult:
    ours = {faces: measure(OUR_ADJACENCY, faces, args) for faces in mesh_adjacency.GRIDS}
    theirs = {}
    if args.peers_python.exists():
        theirs = {
            faces: measure(THEIR_ADJACENCY, faces, args) for faces in mesh_adjacency.THEIR_SIZES
        }
    print(format_adjacency(ours, theirs), flush=True)
    numbers = {
        name: {faces: asdict(cost) for faces, cost in costs.items()}
        for name, costs in (("ours", ours), ("theirs", theirs))
    }
    time, memory = growth_exponents(ours)
    exponents = {"exponents": {"time": time, "memory": memory}}
    return BenchResult(numbers | exponents, max(time, memory) <= MAX_EXPONENT)


def measure(name: str, faces: int, args: argparse.Namespace) -> AdjacencyCost:
    command = [*SCRIPT.command(name, args), "--faces", str(faces)]
    cost = AdjacencyCost(**memory.run_process(name, command))
    if cost.pairs != 3 * faces:
        raise SystemExit(
            f"{name} found {cost.pairs} pairs on a torus of {faces} faces, which has {3 * faces}: "
            "its result is wrong, so its cost cannot be compared."
        )
    return cost


def growth_exponents(costs: dict[int, AdjacencyCost]) -> tuple[float, float]:
    """Return the exponents of time and of memory."""
    sizes = list(costs)
    return (
        growth_exponent(sizes, [cost.seconds for cost in costs.values()]),
        growth_exponent(sizes, [cost.mb for cost in costs.values()]),
    )


def format_adjacency(ours: dict[int, AdjacencyCost], theirs: dict[int, AdjacencyCost]) -> str:
    lines = ["pairs of faces that share an edge, on tori of triangles"]
    for name, costs in (("ours", ours), ("theirs", theirs)):
        for faces, cost in costs.items():
            lines.append(
                f"  {name:<8}{faces:>8,} faces{1e3 * cost.seconds:>10.2f} ms{cost.mb:>10.2f} MB"
            )
        if costs:
            time, memory = growth_exponents(costs)
            lines.append(
                f"  {name:<8}growth with the number of faces to the power of {time:.2f} in time "
                f"and {memory:.2f} in memory"
            )
    return "\n".join([*lines, f"  target of ours: at most {MAX_EXPONENT}"])


PARTS: dict[Part, Callable[[argparse.Namespace], BenchResult]] = {
    "step": partial(compare, "step"),
    "sample": partial(compare, "sample"),
    "adjacency": measure_adjacency,
}


def print_adjacency_cost(
    measure_cost: Callable[[int], AdjacencyCost], args: argparse.Namespace
) -> None:
    """Run in a worker process."""
    print(json.dumps(asdict(measure_cost(args.faces))))


SCRIPT = BenchScript(
    __file__,
    ours=timed_workers(OURS)
    | {OUR_ADJACENCY: partial(print_adjacency_cost, mesh_adjacency.measure_ours)},
    theirs=timed_workers(THEIRS)
    | {THEIR_ADJACENCY: partial(print_adjacency_cost, mesh_adjacency.measure_theirs)},
)


def main(arguments: list[str] | None = None) -> int:
    steps_help = f"in one block: this many times {STEPS_AT_ONCE} training steps, or samples"
    parser = SCRIPT.parser(__doc__, get_args(Part), steps=1, steps_help=steps_help)
    parser.add_argument("--faces", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    timing.set_threads(args.threads)
    if args.worker is not None:
        SCRIPT.run_worker(args)
        return 0
    if set(args.only) != {"adjacency"}:
        check_peers_python(parser, args)

    print(timing.describe_machine(), flush=True)
    return finish({part: run(args) for part, run in PARTS.items() if part in args.only}, args)


if __name__ == "__main__":
    sys.exit(main())
