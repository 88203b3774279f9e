"""How fast are pictures learnt and made? Beside muse-maskgit-pytorch, the published package, and beside ourselves, in one run.

    python bench/images.py --peer-env DIR --peer-adapters DIR [--what tokenizer masked cache] [--blocks 30] [--steps 8]
    python bench/images.py --what cache

DIR of the first is an environment in which that package is installed (DIR/venv/bin/python), DIR of the second holds
`peer_adapters.py`, which builds its trainer at the small configuration, and `peershim.py`, which lets it start; nothing of
them is part of this project.

tokenizer: a training step of the image tokenizer (`image_tokenizer.py` says of what size and from what).
masked: a training step of the masked generator, and one sample (`masked.py`).
cache: a training step of the masked generator from cached codes, beside one that tokenizes its pictures (`masked.py`).

Each side is a process of its own, with its own packages; one works while the other waits. One compute thread, fp32. Both do
the whole work; no validation, samples or checkpoints on either side. The networks are not the same, so their sizes, in
parameters and operations, are printed beside the times.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import image_tokenizer
import masked
import pairs
from sides import About, Side, Worker, answer, working

What = Literal["tokenizer", "masked", "cache"]

PEER: dict[str, Callable[[Path], Side]] = {
    "their tokenizer": image_tokenizer.theirs,
    "their generator": masked.their_step,
    "their sampler": masked.their_sample,
}
OURS: dict[str, Callable[[Path], Side]] = {
    "penalty each step": partial(image_tokenizer.ours, penalty_every=1),
    "penalty each 4th": partial(image_tokenizer.ours, penalty_every=4),
    "our generator": masked.our_step,
    "our sampler": masked.our_sample,
    "cached, 64 pixels": partial(masked.from_codes, pixels=64, codes="cache"),
    "live, 64 pixels": partial(masked.from_codes, pixels=64, codes="live"),
    "cached, 256 pixels": partial(masked.from_codes, pixels=256, codes="cache"),
    "live, 256 pixels": partial(masked.from_codes, pixels=256, codes="live"),
}
"""The names by which processes are told what to do."""


@dataclass(frozen=True)
class Comparison:
    what: What
    does: str
    ours: str
    theirs: str
    wanted: float | None
    """How many times as fast ours should be; None is told and not judged."""


COMPARISONS = (
    Comparison("tokenizer", "a training step of the tokenizer", "penalty each step", "their tokenizer", None),
    # The same work as configured: the penalty every fourth step is what both are asked for.
    Comparison("tokenizer", "a training step of the tokenizer", "penalty each 4th", "their tokenizer", 1.5),
    Comparison("masked", "a training step of the generator", "our generator", "their generator", 1.3),
    Comparison("masked", "a sample", "our sampler", "their sampler", 3.0),
    # How much a cache saves depends on how much there is to tokenize: the generator is the same in both.
    Comparison("cache", "a training step of the small recipe", "cached, 64 pixels", "live, 64 pixels", None),
    Comparison("cache", "a training step of the small recipe", "cached, 256 pixels", "live, 256 pixels", 2.0),
)


@dataclass(frozen=True)
class Compared:
    comparison: Comparison
    us: About
    them: About
    spent: pairs.Pairs

    @property
    def times_as_fast(self) -> float:
        return 1 / self.spent.wall.ratio

    @property
    def well(self) -> bool:
        return self.comparison.wanted is None or self.times_as_fast >= self.comparison.wanted


def compare(comparison: Comparison, asked: argparse.Namespace) -> Compared:
    """Theirs starts first: it draws the pictures from which both learn. Each pair has a folder of its own, since their trainer
    asks the keyboard what to do with one that is not empty."""
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        with side(comparison.theirs, asked, work) as them, side(comparison.ours, asked, work) as us:
            spent = pairs.alternate(us, them, blocks=asked.blocks, steps=asked.steps, warm_up=asked.steps)
            return Compared(comparison, us.about, them.about, spent)


def side(name: str, asked: argparse.Namespace, work: Path) -> AbstractContextManager[Worker]:
    """The side of this name at work, in the environment that has its packages."""
    command = (__file__, "--worker", name, "--work", work, "--threads", str(asked.threads))
    if name in PEER:
        return working(asked.peer_env / "venv" / "bin" / "python", *command, "--peer-adapters", asked.peer_adapters)
    return working(sys.executable, *command)


def work(asked: argparse.Namespace) -> None:
    """In a process that is a side: its packages are found first."""
    project = Path(__file__).resolve().parent.parent
    sys.path.insert(0, str(asked.peer_adapters if asked.worker in PEER else project))
    answer(lambda: (PEER | OURS)[asked.worker](asked.work))


def told(compared: Compared) -> str:
    """Sizes, times and verdict."""
    comparison, spent = compared.comparison, compared.spent
    wanted = f"; wanted: at least {comparison.wanted}" if comparison.wanted is not None else ""
    lines = [
        f"{comparison.does}: {comparison.ours} beside {comparison.theirs}",
        size_line(comparison.ours, compared.us),
        size_line(comparison.theirs, compared.them),
        f"  {'ms':<20}{'ours':>8}{'theirs':>8}   times as fast (quartiles)",
        time_line("wall", spent.wall),
        time_line("CPU", spent.cpu),
        f"  {compared.times_as_fast:.2f} times as fast{wanted}",
    ]
    return "\n".join(lines)


def size_line(name: str, about: About) -> str:
    sizes = [f"{network} {count / 1e6:.2f} M, {about.mflop[network]:.0f} MFLOP" for network, count in about.parameters.items()]
    return f"  {name:<20}{'; '.join(sizes)} | {about.packages}"


def time_line(name: str, ratio: pairs.Ratio) -> str:
    """The ratio upside down: how many times as fast we are."""
    times = f"{ratio.ours_ms:>8.1f}{ratio.theirs_ms:>8.1f}"
    return f"  {name:<20}{times}{1 / ratio.ratio:>10.2f} ({1 / ratio.high:.2f}-{1 / ratio.low:.2f})"


def as_json(compared: Compared) -> dict[str, object]:
    return {
        **asdict(compared.comparison), **pairs.as_json(compared.spent),
        "sizes": {"ours": asdict(compared.us), "theirs": asdict(compared.them)},
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=get_args(What), default=list(get_args(What)), help="all unless it is said")
    parser.add_argument("--peer-env", type=Path, help="where the package is installed: DIR/venv/bin/python")
    parser.add_argument("--peer-adapters", type=Path, help="the folder of peer_adapters.py and peershim.py")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=8, help="in one block")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    for hidden, kind in (("--worker", str), ("--work", Path)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    pairs.pin(asked.threads)
    if asked.worker is not None:
        work(asked)
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
    found = []
    for comparison in COMPARISONS:
        if comparison.what in asked.what:
            found.append(compare(comparison, asked))
            print(told(found[-1]), flush=True)
    if asked.json is not None:
        numbers = {"circumstances": pairs.circumstances(), "compared": [as_json(one) for one in found]}
        asked.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0 if all(one.well for one in found) else 1


if __name__ == "__main__":
    sys.exit(main())
