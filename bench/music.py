"""Speed of MuLaN, compared with musiclm-pytorch, and memory of large contrastive batches.

    python bench/music.py [--only step memory] [--blocks 30] [--steps 4]

The part `step` needs the environment of the research packages (`make peers`).

step: a training step (`music_networks.py`).
memory: a training step on a batch of 256 in micro-batches of 32, with the whole batch as negatives,
compared with a batch of 32.

Each side of a step is a process with its own packages, and the two take turns; each memory is that
of a fresh process. One compute thread, fp32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Literal, get_args

import memory
import music_networks
import timing
from comparison import (
    BenchResult,
    BenchScript,
    Comparison,
    check_peers_python,
    finish,
    timed_workers,
)
from memory import MemoryUse
from music_networks import AT_ONCE, IN_MICRO_BATCHES, SMALL_BATCH

Part = Literal["step", "memory"]

OURS, THEIRS = "our MuLaN", "their MuLaN"
COMPARISONS = (Comparison("step", "a training step of MuLaN", OURS, THEIRS, 1.3),)
RELEASE_FREED_MEMORY = ("env", f"MALLOC_MMAP_THRESHOLD_={2**16}")
"""A prefix of commands with which freed blocks of 64 KB and more are released: most tensors here
are below the 1 MB of `memory.py`, and by default glibc keeps fragments of twice the size (82 MB
instead of 54 MB)."""
MAX_MEMORY_RATIO = 1.5
"""The most memory that a batch of 256 may need, in multiples of that of a batch of 32."""


def compare_steps(args: argparse.Namespace) -> BenchResult:
    print(
        f"{args.blocks} alternating blocks of {args.steps} step(s) of each side; "
        "MFLOP of one forward pass of a batch"
    )
    result = SCRIPT.compare_all(COMPARISONS, args)
    print(music_networks.DIFFERENCES, flush=True)
    return result


def measure_memory(args: argparse.Namespace) -> BenchResult:
    uses = {}
    for name in music_networks.VARIANTS:
        command = [*RELEASE_FREED_MEMORY, *SCRIPT.command(name, args)]
        uses[name] = MemoryUse(**memory.run_process(name, command))
    memory.check_same_outcome(uses, IN_MICRO_BATCHES, AT_ONCE, "loss", rel_tol=1e-3)
    print(format_memory(uses), flush=True)
    bounded = uses[IN_MICRO_BATCHES].mb <= MAX_MEMORY_RATIO * uses[SMALL_BATCH].mb
    return BenchResult({name: asdict(use) for name, use in uses.items()}, bounded)


def format_memory(uses: dict[str, MemoryUse]) -> str:
    lines = ["a training step of music-mulan, preset small"]
    lines += [
        f"  {name:<20}{use.mb:>9.0f} MB, loss {use.outcome:.4f}" for name, use in uses.items()
    ]
    ratios = {name: use.mb / uses[SMALL_BATCH].mb for name, use in uses.items()}
    lines.append(
        f"  {IN_MICRO_BATCHES}: {ratios[IN_MICRO_BATCHES]:.2f} times the memory of {SMALL_BATCH} "
        f"(target: at most {MAX_MEMORY_RATIO})"
    )
    lines.append(f"  {AT_ONCE}: {ratios[AT_ONCE]:.2f} times the memory of {SMALL_BATCH}")
    return "\n".join(lines)


PARTS: dict[Part, Callable[[argparse.Namespace], BenchResult]] = {
    "step": compare_steps,
    "memory": measure_memory,
}


SCRIPT = BenchScript(
    __file__,
    ours=timed_workers({OURS: music_networks.build_ours})
    | memory.memory_workers(music_networks.VARIANTS),
    theirs=timed_workers({THEIRS: music_networks.build_theirs}),
)


def main(arguments: list[str] | None = None) -> int:
    parser = SCRIPT.parser(__doc__, get_args(Part), steps=4, steps_help="steps of one block")
    args = parser.parse_args(arguments)
    timing.set_threads(args.threads)
    if args.worker is not None:
        SCRIPT.run_worker(args)
        return 0
    if "step" in args.only:
        check_peers_python(parser, args)

    print(timing.describe_machine(), flush=True)
    return finish({part: run(args) for part, run in PARTS.items() if part in args.only}, args)


if __name__ == "__main__":
    sys.exit(main())
