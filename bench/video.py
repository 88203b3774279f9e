"""How fast are clips learnt, and how much memory do long clips and large codebooks take?

    python bench/video.py --peer-env DIR --peer-adapters DIR [--what step long lfq] [--blocks 30] [--steps 4]
    python bench/video.py --what long lfq

DIR of the first is an environment in which magvit2-pytorch is installed (DIR/venv/bin/python), DIR
of the second holds `peer_adapters.py`, which builds its trainer at the small configuration, and
`peershim.py`, which lets it start; nothing of them is part of this project.

step: a training step of the video tokenizer beside that package's (`video_tokenizer.py` says of
what size and from what).
long: memory that a clip takes to symbols and back, for clips of 10 s and of 2 s
(`video_memory.py`).
lfq: memory of LFQ's entropy penalty at 2^18 symbols, beside the penalty as it is written down
(`video_memory.py`).

Each side of a step is a process of its own, with its own packages, and one works while the other
waits; each memory is that of a fresh process. One compute thread, fp32. The steps of a block are a
multiple of 4, so that each has its gradient penalties.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import memory
import pairs
import video_memory
import video_tokenizer
from compared import Comparison, Finding, Script, as_sides, concluded
from memory import Used
from sides import Side
from video_memory import EXACT, GROUPED, LONG, MANY, NAIVE, SHORT, SHORT_AT_ONCE
from video_tokenizer import PENALTY_EVERY

What = Literal["step", "long", "lfq"]

THEIRS = "their tokenizer"
OURS: dict[str, Callable[[Path], Side]] = {
    "our tokenizer": partial(video_tokenizer.ours, judge_dim=16, judge_widest=64),
    "a costlier judge": partial(video_tokenizer.ours, judge_dim=128, judge_widest=512),
}
"""The names by which processes are told what to do."""

COMPARISONS = (
    Comparison("tokenizer", "a training step of the video tokenizer", "our tokenizer", THEIRS, 1.3),
    # The widths that both are asked for give them a judge of many times our operations: here is
    # ours with as many.
    Comparison(
        "tokenizer", "a training step of the video tokenizer", "a costlier judge", THEIRS, 1.3
    ),
)
BOUND = 1.1
"""How many times the memory of 2 s a clip of 10 s may take."""


# ---- steps


def find_steps(asked: argparse.Namespace) -> Finding:
    print(
        f"{asked.blocks} blocks of {asked.steps} steps on each side, in turn; MFLOP are those of one forward pass of a batch"
    )
    found = SCRIPT.find(COMPARISONS, asked)
    print(video_tokenizer.DIFFERENT, flush=True)
    return found


# ---- memory


def used(name: str, asked: argparse.Namespace) -> Used:
    return Used(**memory.told_by(name, SCRIPT.command(name, asked)))


def find_long(asked: argparse.Namespace) -> Finding:
    found = {name: used(name, asked) for name in (LONG, SHORT, SHORT_AT_ONCE)}
    print(told_long(found), flush=True)
    return Finding({name: asdict(one) for name, one in found.items()}, bounded(found))


def bounded(found: dict[str, Used]) -> bool:
    return found[LONG].mb <= BOUND * found[SHORT].mb


def told_long(found: dict[str, Used]) -> str:
    lines = [
        f"a clip of {video_memory.SIDE} x {video_memory.SIDE} to symbols and back, by the small preset"
    ]
    for name, one in found.items():
        lines.append(f"  {name:<34}{one.mb:>9.0f} MB{one.outcome:>8.0f} frames")
    times_short = {name: one.mb / found[SHORT].mb for name, one in found.items()}
    lines.append(
        f"  {LONG} takes {times_short[LONG]:.2f} times the memory of {SHORT}; wanted: at most {BOUND}"
    )
    lines.append(f"  {SHORT_AT_ONCE} takes {times_short[SHORT_AT_ONCE]:.2f} times as much")
    return "\n".join(lines)


def find_lfq(asked: argparse.Namespace) -> Finding:
    found = {name: used(name, asked) for name in (NAIVE, EXACT, GROUPED, MANY)}
    # In one group ours is exact, and so the same number; in two it is a bound, and another.
    memory.refuse_other_work(found, EXACT, NAIVE, "penalty", rel_tol=1e-4)
    print(told_lfq(found), flush=True)
    return Finding({name: asdict(one) for name, one in found.items()}, well=True)


def told_lfq(found: dict[str, Used]) -> str:
    lines = [
        f"LFQ's entropy penalty and its gradient, 2^{video_memory.BITS} symbols, {video_memory.ROWS} rows"
    ]
    for name, one in found.items():
        lines.append(f"  {name:<34}{one.mb:>9.1f} MB{one.outcome:>10.5f} penalty")
    lines.append(
        f"  the same penalty, {NAIVE}, takes {found[NAIVE].mb / found[EXACT].mb:.0f} times the memory of {EXACT}"
    )
    return "\n".join(lines)


FIND: dict[What, Callable[[argparse.Namespace], Finding]] = {
    "step": find_steps,
    "long": find_long,
    "lfq": find_lfq,
}


SCRIPT = Script(
    __file__,
    ours=as_sides(OURS) | memory.acts(video_memory.WAYS),
    theirs=as_sides({THEIRS: video_tokenizer.theirs}),
)


def main(arguments: list[str] | None = None) -> int:
    steps = f"in one block: a multiple of {PENALTY_EVERY}"
    parser = SCRIPT.parser(__doc__, get_args(What), steps=PENALTY_EVERY, of_steps=steps)
    asked = parser.parse_args(arguments)
    pairs.pin(asked.threads)
    if asked.worker is not None:
        SCRIPT.work(asked)
        return 0
    if "step" in asked.what and None in (asked.peer_env, asked.peer_adapters):
        parser.error(
            "the package is one of the sides of a step: give --peer-env and --peer-adapters, or --what long lfq, which needs "
            "neither"
        )
    if set(asked.what) != {"step"} and not memory.STATUS.exists():
        parser.error(
            f"memory is read from {memory.STATUS}, which only Linux has: ask for --what step"
        )
    if asked.steps % PENALTY_EVERY:
        parser.error(
            f"every {PENALTY_EVERY}th step has a gradient penalty, so blocks of {asked.steps} would not be alike: use "
            f"{PENALTY_EVERY}, or a multiple"
        )

    print(pairs.circumstances(), flush=True)
    found = {what: find(asked) for what, find in FIND.items() if what in asked.what}
    return concluded(found, asked)


if __name__ == "__main__":
    sys.exit(main())
