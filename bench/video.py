"""Speed of the video tokenizer, compared with magvit2-pytorch, and memory of long videos and large
codebooks.

    python bench/video.py [--only step long lfq] [--blocks 30] [--steps 4]

The part `step` needs the environment of the research packages (`make peers`).

step: a training step of the video tokenizer (`video_tokenizer.py`).
long: memory of encoding and decoding videos of 10 s and of 2 s (`video_memory.py`).
lfq: memory of LFQ's entropy penalty at 2^18 codes, compared with a direct implementation
(`video_memory.py`).

Each side of a step is a process with its own packages, and the two take turns; each memory is that
of a fresh process. One compute thread, fp32. The steps of a block are a multiple of 4, so that
every block has the same number of gradient penalties.
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
import timing
import video_memory
import video_tokenizer
from comparison import (
    BenchResult,
    BenchScript,
    Comparison,
    check_peers_python,
    finish,
    timed_workers,
)
from memory import MemoryUse
from video_memory import DIRECT, EXACT, GROUPED, GROUPED_MANY, LONG, SHORT, SHORT_AT_ONCE
from video_tokenizer import GP_EVERY
from worker import Workload

Part = Literal["step", "long", "lfq"]

THEIRS = "their tokenizer"
OURS: dict[str, Callable[[Path], Workload]] = {
    "our tokenizer": partial(video_tokenizer.build_ours, disc_dim=16, disc_max_channels=64),
    "larger discriminator": partial(
        video_tokenizer.build_ours, disc_dim=128, disc_max_channels=512
    ),
}

STEP = "a training step of the video tokenizer"
COMPARISONS = (
    Comparison("step", STEP, "our tokenizer", THEIRS, 1.3),
    # At the configured channels their discriminator has many times the operations of ours. Here
    # ours has at least as many as theirs.
    Comparison("step", STEP, "larger discriminator", THEIRS, 1.3),
)
MAX_MEMORY_RATIO = 1.1
"""The most memory that a video of 10 s may need, in multiples of that of a video of 2 s."""


# ---- steps


def compare_steps(args: argparse.Namespace) -> BenchResult:
    print(
        f"{args.blocks} alternating blocks of {args.steps} step(s) of each side; "
        "MFLOP of one forward pass of a batch"
    )
    result = SCRIPT.compare_all(COMPARISONS, args)
    print(video_tokenizer.DIFFERENCES, flush=True)
    return result


# ---- memory


def measure(name: str, args: argparse.Namespace) -> MemoryUse:
    return MemoryUse(**memory.run_process(name, SCRIPT.command(name, args)))


def measure_long_videos(args: argparse.Namespace) -> BenchResult:
    uses = {name: measure(name, args) for name in (LONG, SHORT, SHORT_AT_ONCE)}
    print(format_long_videos(uses), flush=True)
    bounded = uses[LONG].mb <= MAX_MEMORY_RATIO * uses[SHORT].mb
    return BenchResult({name: asdict(use) for name, use in uses.items()}, bounded)


def format_long_videos(uses: dict[str, MemoryUse]) -> str:
    size = video_memory.FRAME_SIZE
    lines = [f"encoding and decoding videos of {size} x {size}, preset small"]
    for name, use in uses.items():
        lines.append(f"  {name:<34}{use.mb:>9.0f} MB{use.outcome:>8.0f} frames")
    ratios = {name: use.mb / uses[SHORT].mb for name, use in uses.items()}
    lines.append(
        f"  {LONG}: {ratios[LONG]:.2f} times the memory of {SHORT} "
        f"(target: at most {MAX_MEMORY_RATIO})"
    )
    lines.append(f"  {SHORT_AT_ONCE}: {ratios[SHORT_AT_ONCE]:.2f} times the memory of {SHORT}")
    return "\n".join(lines)


def measure_lfq(args: argparse.Namespace) -> BenchResult:
    uses = {name: measure(name, args) for name in (DIRECT, EXACT, GROUPED, GROUPED_MANY)}
    # With one group our penalty is exact; with two groups it is an approximation.
    memory.check_same_outcome(uses, EXACT, DIRECT, "penalty", rel_tol=1e-4)
    print(format_lfq(uses), flush=True)
    return BenchResult({name: asdict(use) for name, use in uses.items()}, passed=True)


def format_lfq(uses: dict[str, MemoryUse]) -> str:
    lines = [
        f"LFQ's entropy penalty and its gradient, 2^{video_memory.BITS} codes, "
        f"{video_memory.ROWS} rows"
    ]
    for name, use in uses.items():
        lines.append(f"  {name:<34}{use.mb:>9.1f} MB{use.outcome:>10.5f} penalty")
    lines.append(f"  {DIRECT}: {uses[DIRECT].mb / uses[EXACT].mb:.0f} times the memory of {EXACT}")
    return "\n".join(lines)


PARTS: dict[Part, Callable[[argparse.Namespace], BenchResult]] = {
    "step": compare_steps,
    "long": measure_long_videos,
    "lfq": measure_lfq,
}


SCRIPT = BenchScript(
    __file__,
    ours=timed_workers(OURS) | memory.memory_workers(video_memory.VARIANTS),
    theirs=timed_workers({THEIRS: video_tokenizer.build_theirs}),
)


def main(arguments: list[str] | None = None) -> int:
    parser = SCRIPT.parser(
        __doc__,
        get_args(Part),
        steps=GP_EVERY,
        steps_help=f"steps of one block, a multiple of {GP_EVERY}",
    )
    args = parser.parse_args(arguments)
    timing.set_threads(args.threads)
    if args.worker is not None:
        SCRIPT.run_worker(args)
        return 0
    if "step" in args.only:
        check_peers_python(parser, args)
    if set(args.only) != {"step"} and not memory.STATUS.exists():
        parser.error(
            f"memory is read from {memory.STATUS}, which exists only on Linux: use --only step"
        )
    if args.steps % GP_EVERY:
        parser.error(
            f"--steps is {args.steps}, but every {GP_EVERY}th step has a gradient penalty, so the "
            f"blocks would not be equal: use a multiple of {GP_EVERY}"
        )

    print(timing.describe_machine(), flush=True)
    return finish({part: run(args) for part, run in PARTS.items() if part in args.only}, args)


if __name__ == "__main__":
    sys.exit(main())
