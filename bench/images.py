"""How fast are pictures learnt and made? Beside muse-maskgit-pytorch, the published package, and
beside ourselves, in one run.

    python bench/images.py --peer-env DIR --peer-adapters DIR [--what tokenizer masked cache] [--blocks 30] [--steps 8]
    python bench/images.py --what cache

DIR of the first is an environment in which that package is installed (DIR/venv/bin/python), DIR of
the second holds `peer_adapters.py`, which builds its trainer at the small configuration, and
`peershim.py`, which lets it start; nothing of them is part of this project.

tokenizer: a training step of the image tokenizer (`image_tokenizer.py` says of what size and from
what).
masked: a training step of the masked generator, and one sample (`masked.py`).
cache: a training step of the masked generator from cached codes, beside one that tokenizes its
pictures (`cached.py`).

Each side is a process of its own, with its own packages; one works while the other waits. One
compute thread, fp32. Both do the whole work; no validation, samples or checkpoints on either side.
The networks are not the same, so their sizes, in parameters and operations, are printed beside the
times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import cached
import image_tokenizer
import masked
import pairs
from compared import Comparison, Script, as_sides, concluded
from sides import Side

What = Literal["tokenizer", "masked", "cache"]

PEER: dict[str, Callable[[Path], Side]] = {
    "their tokenizer": image_tokenizer.theirs,
    "their generator": masked.their_step,
    "their sampler": masked.their_sample,
}
OURS: dict[str, Callable[[Path], Side]] = {
    "penalty each step": partial(image_tokenizer.ours, gp_every=1),
    "penalty each 4th": partial(image_tokenizer.ours, gp_every=4),
    "our generator": masked.our_step,
    "our sampler": masked.our_sample,
    **{f"cached, {size}": partial(cached.step, size=size, tokens="cache") for size in cached.SIZES},
    **{f"live, {size}": partial(cached.step, size=size, codes="raw") for size in cached.SIZES},
}
"""The names by which processes are told what to do."""
SCRIPT = Script(__file__, ours=as_sides(OURS), theirs=as_sides(PEER))

COMPARISONS = (
    Comparison(
        "tokenizer",
        "a training step of the tokenizer",
        "penalty each step",
        "their tokenizer",
        None,
    ),
    # The same work as configured: the penalty every fourth step is what both are asked for.
    Comparison(
        "tokenizer", "a training step of the tokenizer", "penalty each 4th", "their tokenizer", 1.5
    ),
    Comparison(
        "masked", "a training step of the generator", "our generator", "their generator", 1.3
    ),
    Comparison("masked", "a sample", "our sampler", "their sampler", 3.0),
    # How much a cache saves depends on how much there is to tokenize: the generator is the same in
    # both.
    Comparison("cache", "a training step of the small recipe", "cached, 64", "live, 64", None),
    Comparison(
        "cache",
        "a training step of the small recipe",
        "cached, 256, light",
        "live, 256, light",
        None,
    ),
    Comparison("cache", "a training step of the small recipe", "cached, 256", "live, 256", 2.0),
)


def main(arguments: list[str] | None = None) -> int:
    parser = SCRIPT.parser(__doc__, get_args(What), steps=8, of_steps="in one block")
    asked = parser.parse_args(arguments)
    pairs.pin(asked.threads)
    if asked.worker is not None:
        SCRIPT.work(asked)
        return 0
    if set(asked.what) != {"cache"} and None in (asked.peer_env, asked.peer_adapters):
        parser.error(
            "the package is one of the sides: give --peer-env and --peer-adapters, or --what cache, which needs neither"
        )

    print(pairs.circumstances())
    print(
        f"{asked.blocks} blocks of {asked.steps} on each side, in turn; MFLOP are those of one forward pass of a batch",
        flush=True,
    )
    found = SCRIPT.find(
        [comparison for comparison in COMPARISONS if comparison.what in asked.what], asked
    )
    return concluded({"compared": found}, asked)


if __name__ == "__main__":
    sys.exit(main())
