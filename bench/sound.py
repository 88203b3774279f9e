"""How fast is speech learnt and made, beside soundstorm-pytorch?

    python bench/sound.py --peer-env DIR --peer-adapters DIR [--what step sample long] [--blocks 30]

DIR of the first is an environment in which that package is installed (DIR/venv/bin/python), DIR of
the second holds `peer_adapters.py`, which builds its network and trainer at the small
configuration, and `peershim.py`, which lets it start; nothing of them is part of this project.
`sound_networks.py` says of what size the two are and how they differ.

step: training steps.
sample: 128 frames of 4 levels, in 11 passes.
long: 30 s of symbols, 1,500 frames of 4 levels, in 19 passes; at most 3 blocks of one sample each,
since theirs takes a while.

Each side of a comparison is a process of its own, with its own packages, and one works while the
other waits. One compute thread, fp32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import pairs
import sound_networks
from compared import Comparison, Finding, Script, as_sides, concluded
from sides import Side
from sound_networks import LONG, SHORT, Length

What = Literal["step", "sample", "long"]

PEER: dict[str, Callable[[Path], Side]] = {
    "their trainer": sound_networks.their_step,
    "their sampler": partial(sound_networks.their_sample, length=SHORT),
    "their 30 s": partial(sound_networks.their_sample, length=LONG),
}
OURS: dict[str, Callable[[Path], Side]] = {
    "our engine": sound_networks.our_step,
    "our sampler": partial(sound_networks.our_sample, length=SHORT),
    "our 30 s": partial(sound_networks.our_sample, length=LONG),
}
"""The names by which processes are told what to do."""


def in_words(length: Length) -> str:
    return f"{length.frames} frames of {sound_networks.LEVELS} levels in {length.passes} passes"


COMPARISONS = (
    Comparison("step", "a training step", "our engine", "their trainer", 1.4),
    Comparison("sample", in_words(SHORT), "our sampler", "their sampler", 4.0),
    Comparison("long", f"30 s, {in_words(LONG)}", "our 30 s", "their 30 s", None),
)

LONG_BLOCKS = 3

SCRIPT = Script(__file__, ours=as_sides(OURS), theirs=as_sides(PEER))


def find(what: What, asked: argparse.Namespace) -> Finding:
    if what == "long":
        asked = argparse.Namespace(
            **vars(asked) | {"blocks": min(asked.blocks, LONG_BLOCKS), "steps": 1}
        )
    return SCRIPT.find([comparison for comparison in COMPARISONS if comparison.what == what], asked)


def main(arguments: list[str] | None = None) -> int:
    parser = SCRIPT.parser(
        __doc__, get_args(What), steps=2, of_steps="training steps or samples in one block"
    )
    asked = parser.parse_args(arguments)
    pairs.pin(asked.threads)
    if asked.worker is not None:
        SCRIPT.work(asked)
        return 0
    if None in (asked.peer_env, asked.peer_adapters):
        parser.error("the package is one of the sides: give --peer-env and --peer-adapters")

    print(pairs.circumstances())
    print(
        f"{asked.blocks} blocks of {asked.steps} on each side, in turn; MFLOP are those of one forward pass of a batch of 4"
    )
    found = {what: find(what, asked) for what in asked.what}
    print(sound_networks.DIFFERENT, flush=True)
    return concluded(found, asked)


if __name__ == "__main__":
    sys.exit(main())
