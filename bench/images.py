"""Speed of image tokenizer and text-to-image generator, compared with muse-maskgit-pytorch.

    python bench/images.py [--only tokenizer masked cache] [--blocks 30] [--steps 8]

The parts `tokenizer` and `masked` need the environment of the research packages (`make peers`).

tokenizer: a training step of the image tokenizer (`image_tokenizer.py`).
masked: a training step of the masked generator, and one sample (`masked_generator.py`).
cache: a training step of the masked generator from cached tokens, compared with one that tokenizes
its images (`token_cache.py`); both sides are ours.

Each side is a process with its own packages, and the two take turns. One compute thread, fp32. Both
sides run complete training steps, without validation, samples and checkpoints. The networks are not
identical, so their parameters and operations are printed next to the times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import image_tokenizer
import masked_generator
import timing
import token_cache
from comparison import BenchScript, Comparison, check_peers_python, finish, timed_workers
from worker import Workload

Part = Literal["tokenizer", "masked", "cache"]

THEIRS: dict[str, Callable[[Path], Workload]] = {
    "their tokenizer": image_tokenizer.build_theirs,
    "their generator": masked_generator.build_their_step,
    "their sampler": masked_generator.build_their_sampler,
}
OURS: dict[str, Callable[[Path], Workload]] = {
    "ours, GP every step": partial(image_tokenizer.build_ours, gp_every=1),
    "ours, GP every 4": partial(image_tokenizer.build_ours, gp_every=4),
    "our generator": masked_generator.build_our_step,
    "our sampler": masked_generator.build_our_sampler,
    **{
        f"cached, {size}": partial(token_cache.build_step, size=size, tokens="cache")
        for size in token_cache.SIZES
    },
    **{
        f"live, {size}": partial(token_cache.build_step, size=size, tokens="live")
        for size in token_cache.SIZES
    },
}
SCRIPT = BenchScript(__file__, ours=timed_workers(OURS), theirs=timed_workers(THEIRS))

TOKENIZER_STEP = "a training step of the tokenizer"
CACHE_STEP = "a training step of images-maskgit, preset small"
COMPARISONS = (
    # Both are configured for a gradient penalty (GP) every 4 steps; theirs ignores the setting.
    Comparison("tokenizer", TOKENIZER_STEP, "ours, GP every step", "their tokenizer", None),
    Comparison("tokenizer", TOKENIZER_STEP, "ours, GP every 4", "their tokenizer", 1.5),
    Comparison(
        "masked", "a training step of the generator", "our generator", "their generator", 1.3
    ),
    Comparison("masked", "a sample", "our sampler", "their sampler", 3.0),
    # The generator is the same; what the cache saves depends on the cost of the tokenizer.
    Comparison("cache", CACHE_STEP, "cached, 64", "live, 64", None),
    Comparison("cache", CACHE_STEP, "cached, 256, light", "live, 256, light", None),
    Comparison("cache", CACHE_STEP, "cached, 256", "live, 256", 2.0),
)


def main(arguments: list[str] | None = None) -> int:
    parser = SCRIPT.parser(__doc__, get_args(Part), steps=8, steps_help="steps of one block")
    args = parser.parse_args(arguments)
    timing.set_threads(args.threads)
    if args.worker is not None:
        SCRIPT.run_worker(args)
        return 0
    if set(args.only) != {"cache"}:
        check_peers_python(parser, args)

    print(timing.describe_machine())
    print(
        f"{args.blocks} alternating blocks of {args.steps} step(s) of each side; "
        "MFLOP of one forward pass of a batch",
        flush=True,
    )
    result = SCRIPT.compare_all([one for one in COMPARISONS if one.part in args.only], args)
    return finish({"comparisons": result}, args)


if __name__ == "__main__":
    sys.exit(main())
