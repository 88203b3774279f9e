"""Speed of SoundStorm, compared with soundstorm-pytorch.

    python bench/audio.py [--only step sample long] [--blocks 30] [--steps 2]

Needs the environment of the research packages (`make peers`). `audio_networks.py` has the sizes of
both sides and their differences.

step: training steps, without the vectors of the codes, which theirs does not use, and with them,
as all runs on a codec have them.
sample: 128 frames of 4 quantizers, in 11 forward passes.
long: 30 s of tokens, 1,500 frames of 4 quantizers, in 19 forward passes; at most 3 blocks of one
sample each, since theirs is slow.

Each side of a comparison is a process with its own packages, and the two take turns. One compute
thread, fp32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import audio_networks
import timing
from audio_networks import LONG, SHORT, SampleSize
from comparison import (
    BenchResult,
    BenchScript,
    Comparison,
    check_peers_python,
    finish,
    timed_workers,
)
from worker import Workload

Part = Literal["step", "sample", "long"]

THEIRS: dict[str, Callable[[Path], Workload]] = {
    "their trainer": audio_networks.build_their_step,
    "their sampler": partial(audio_networks.build_their_sampler, size=SHORT),
    "their 30 s": partial(audio_networks.build_their_sampler, size=LONG),
}
OURS: dict[str, Callable[[Path], Workload]] = {
    "our engine": audio_networks.build_our_step,
    "our engine, code vectors": partial(
        audio_networks.build_our_step, code_dim=audio_networks.CODE_DIM
    ),
    "our sampler": partial(audio_networks.build_our_sampler, size=SHORT),
    "our 30 s": partial(audio_networks.build_our_sampler, size=LONG),
}


def describe(size: SampleSize) -> str:
    quantizers = audio_networks.NUM_QUANTIZERS
    return f"{size.frames} frames of {quantizers} quantizers in {size.passes} forward passes"


COMPARISONS = (
    Comparison("step", "a training step", "our engine", "their trainer", 1.4),
    Comparison(
        "step",
        "a training step, ours with vectors of the codes",
        "our engine, code vectors",
        "their trainer",
        1.4,
    ),
    Comparison("sample", describe(SHORT), "our sampler", "their sampler", 4.0),
    Comparison("long", f"30 s, {describe(LONG)}", "our 30 s", "their 30 s", None),
)

MAX_LONG_BLOCKS = 3

SCRIPT = BenchScript(__file__, ours=timed_workers(OURS), theirs=timed_workers(THEIRS))


def compare(part: Part, args: argparse.Namespace) -> BenchResult:
    if part == "long":
        limits = {"blocks": min(args.blocks, MAX_LONG_BLOCKS), "steps": 1}
        args = argparse.Namespace(**vars(args) | limits)
    return SCRIPT.compare_all([one for one in COMPARISONS if one.part == part], args)


def main(arguments: list[str] | None = None) -> int:
    parser = SCRIPT.parser(
        __doc__, get_args(Part), steps=2, steps_help="training steps or samples of one block"
    )
    args = parser.parse_args(arguments)
    timing.set_threads(args.threads)
    if args.worker is not None:
        SCRIPT.run_worker(args)
        return 0
    check_peers_python(parser, args)

    print(timing.describe_machine())
    print(
        f"{args.blocks} alternating blocks of {args.steps} of each side; "
        "MFLOP of one forward pass of a batch of 4"
    )
    results = {part: compare(part, args) for part in args.only}
    print(audio_networks.DIFFERENCES, flush=True)
    return finish(results, args)


if __name__ == "__main__":
    sys.exit(main())
