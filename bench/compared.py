"""Ours beside theirs, pair by pair: what is compared, which processes do it, and how it is told and
judged.

A script that compares is also the program of every process it needs: it starts itself again with
`--worker NAME`, in the environment that has what the name needs. `Script` knows the names, and the
arguments that all such scripts understand.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pairs
from sides import About, Side, Worker, answer, working

PROJECT = Path(__file__).resolve().parent.parent

Act = Callable[[argparse.Namespace], None]
"""What a process does that was started with a name."""


@dataclass(frozen=True)
class Comparison:
    what: str
    """The word by which a person asks for it, or another for whoever reads the JSON."""
    does: str
    ours: str
    theirs: str
    wanted: float | None
    """How many times as fast ours should be; None is told and not judged."""


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


@dataclass(frozen=True)
class Finding:
    numbers: Any
    """For JSON."""
    well: bool
    """Whether what is wanted was reached."""


def as_sides(made_by: dict[str, Callable[[Path], Side]]) -> dict[str, Act]:
    """Processes that do steps when they are told to."""
    return {name: partial(be, make) for name, make in made_by.items()}


def be(make: Callable[[Path], Side], asked: argparse.Namespace) -> None:
    answer(lambda: make(asked.work))


@dataclass(frozen=True)
class Script:
    file: str
    ours: dict[str, Act]
    theirs: dict[str, Act]
    """What needs the environment of the package that we are compared with."""

    # ---- in the parent

    def parser(
        self, description: str | None, whats: Sequence[str], *, steps: int, of_steps: str
    ) -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument(
            "--what", nargs="+", choices=whats, default=list(whats), help="all unless it is said"
        )
        parser.add_argument(
            "--peer-env", type=Path, help="where the package is installed: DIR/venv/bin/python"
        )
        parser.add_argument(
            "--peer-adapters", type=Path, help="the folder of peer_adapters.py and peershim.py"
        )
        parser.add_argument("--blocks", type=int, default=30)
        parser.add_argument("--steps", type=int, default=steps, help=of_steps)
        parser.add_argument("--threads", type=int, default=1)
        parser.add_argument("--json", type=Path, help="write the numbers here as well")
        for hidden, kind in (("--worker", str), ("--work", Path)):
            parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
        return parser

    def find(self, comparisons: Iterable[Comparison], asked: argparse.Namespace) -> Finding:
        found = []
        for comparison in comparisons:
            found.append(self.compare(comparison, asked))
            print(logs(found[-1]), flush=True)
        return Finding([as_json(one) for one in found], all(one.well for one in found))

    def compare(self, comparison: Comparison, asked: argparse.Namespace) -> Compared:
        """Theirs starts first: it may draw what both learn from. Each pair has a folder of its own,
        since their trainers ask the keyboard what to do with one that is not empty."""
        with tempfile.TemporaryDirectory() as place:
            work = Path(place)
            with (
                self.side(comparison.theirs, asked, work) as them,
                self.side(comparison.ours, asked, work) as us,
            ):
                spent = pairs.alternate(
                    us, them, blocks=asked.blocks, steps=asked.steps, warm_up=asked.steps
                )
                return Compared(comparison, us.about, them.about, spent)

    def side(
        self, name: str, asked: argparse.Namespace, work: Path
    ) -> AbstractContextManager[Worker]:
        return working(*self.command(name, asked), "--work", work)

    def command(self, name: str, asked: argparse.Namespace) -> list[str]:
        """A process of this name, in the environment that has its packages."""
        words = [self.file, "--worker", name, "--threads", str(asked.threads)]
        if name in self.theirs:
            return [
                str(asked.peer_env / "venv" / "bin" / "python"),
                *words,
                "--peer-adapters",
                str(asked.peer_adapters),
            ]
        return [sys.executable, *words]

    # ---- in the process that was started

    def work(self, asked: argparse.Namespace) -> None:
        """What the name says. Its packages are found first."""
        sys.path.insert(0, str(asked.peer_adapters if asked.worker in self.theirs else PROJECT))
        (self.ours | self.theirs)[asked.worker](asked)


# ---- what is told


def logs(compared: Compared) -> str:
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
    sizes = [
        f"{network} {count / 1e6:.2f} M, {about.mflop[network]:.0f} MFLOP"
        for network, count in about.parameters.items()
    ]
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


def concluded(found: dict[str, Finding], asked: argparse.Namespace) -> int:
    """The numbers, where they were asked for, and the exit code: 1 if anything wanted was not
    reached."""
    if asked.json is not None:
        numbers = {"circumstances": pairs.circumstances()} | {
            what: finding.numbers for what, finding in found.items()
        }
        asked.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0 if all(finding.well for finding in found.values()) else 1
