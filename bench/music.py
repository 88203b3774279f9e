"""How fast are music and texts brought together, beside musiclm-pytorch, and what do large batches
take of memory?

    python bench/music.py --peer-env DIR --peer-adapters DIR [--what step memory] [--blocks 30] [--steps 4]
    python bench/music.py --what memory

DIR of the first is an environment in which that package is installed (DIR/venv/bin/python), DIR of
the second holds `peer_adapters.py`, which builds its MuLaN and trainer at the small configuration,
and `peershim.py`, which lets it start; nothing of them is part of this project.

step: a training step (`music_networks.py` says of what size and from what).
memory: of a step with a batch of 256 whose negatives are all of it, in micro-batches of 32, beside
a batch of 32.

Each side of a step is a process of its own, with its own packages, and one works while the other
waits; each memory is that of a fresh process. One compute thread, fp32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Literal, get_args

import memory
import music_networks
import pairs
from compared import Comparison, Finding, Script, as_sides, concluded
from memory import Used
from music_networks import AT_ONCE, CACHED, SMALL

What = Literal["step", "memory"]

OURS, THEIRS = "our MuLaN", "their MuLaN"
COMPARISONS = (Comparison("step", "a training step of MuLaN", OURS, THEIRS, 1.3),)
GIVEN_BACK = ("env", f"MALLOC_MMAP_THRESHOLD_={2**16}")
"""Freed memory is given back from 64 KB on: most tensors here are below the 1 MB of `memory.py`,
and glibc then keeps holes of many shapes, twice what the work needs (82 MB and 54)."""
BOUND = 1.5
"""How many times the memory of a batch of 32 one of 256 may take."""


def find_steps(asked: argparse.Namespace) -> Finding:
    print(
        f"{asked.blocks} blocks of {asked.steps} steps on each side, in turn; MFLOP are those of one forward pass of a batch"
    )
    found = SCRIPT.find(COMPARISONS, asked)
    print(music_networks.DIFFERENT, flush=True)
    return found


def find_memory(asked: argparse.Namespace) -> Finding:
    found = {
        name: Used(**memory.told_by(name, [*GIVEN_BACK, *SCRIPT.command(name, asked)]))
        for name in music_networks.WAYS
    }
    memory.refuse_other_work(
        found, CACHED, AT_ONCE, "loss", rel_tol=1e-3
    )  # 256 are 256, in parts or at once
    print(logs(found), flush=True)
    return Finding(
        {name: asdict(one) for name, one in found.items()},
        found[CACHED].mb <= BOUND * found[SMALL].mb,
    )


def logs(found: dict[str, Used]) -> str:
    lines = ["a training step of the small preset"]
    lines += [
        f"  {name:<20}{one.mb:>9.0f} MB, loss {one.outcome:.4f}" for name, one in found.items()
    ]
    lines.append(
        f"  {CACHED} takes {found[CACHED].mb / found[SMALL].mb:.2f} times the memory of {SMALL}; wanted: at most {BOUND}"
    )
    lines.append(f"  {AT_ONCE} takes {found[AT_ONCE].mb / found[SMALL].mb:.2f} times as much")
    return "\n".join(lines)


FIND: dict[What, Callable[[argparse.Namespace], Finding]] = {
    "step": find_steps,
    "memory": find_memory,
}


SCRIPT = Script(
    __file__,
    ours=as_sides({OURS: music_networks.ours}) | memory.acts(music_networks.WAYS),
    theirs=as_sides({THEIRS: music_networks.theirs}),
)


def main(arguments: list[str] | None = None) -> int:
    parser = SCRIPT.parser(__doc__, get_args(What), steps=4, of_steps="training steps in one block")
    asked = parser.parse_args(arguments)
    pairs.pin(asked.threads)
    if asked.worker is not None:
        SCRIPT.work(asked)
        return 0
    if "step" in asked.what and None in (asked.peer_env, asked.peer_adapters):
        parser.error(
            "the package is one of the sides: give --peer-env and --peer-adapters, or --what memory, which can do without"
        )

    print(pairs.circumstances(), flush=True)
    found = {what: find(asked) for what, find in FIND.items() if what in asked.what}
    return concluded(found, asked)


if __name__ == "__main__":
    sys.exit(main())
