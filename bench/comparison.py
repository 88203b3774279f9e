"""Compare Tessera with other implementations, pair by pair, and report and check the speed-ups.

A bench script is also the program of its worker processes: it starts itself again with
`--worker NAME`, in the environment that has the packages of that worker. `BenchScript` holds the
workers by name, and defines the arguments that all these scripts have in common.
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

import timing
from worker import ModelInfo, Worker, Workload, serve, start_worker

PROJECT = Path(__file__).resolve().parent.parent
PEERS_PYTHON = PROJECT / ".venv-peers" / "bin" / "python"

RunWorker = Callable[[argparse.Namespace], None]
"""The main function of a worker process."""


@dataclass(frozen=True)
class Comparison:
    """Two workers that do the same work."""

    part: str
    """The value of --only that selects it."""
    work: str
    """What one step is, in words."""
    ours: str
    theirs: str
    target: float | None
    """The speed-up that ours must reach; with None the speed-up is reported and not checked."""


@dataclass(frozen=True)
class ComparisonResult:
    """The measured times of a comparison."""

    comparison: Comparison
    our_info: ModelInfo
    their_info: ModelInfo
    times: timing.PairedTimes

    @property
    def speedup(self) -> float:
        return 1 / self.times.wall.ratio

    @property
    def passed(self) -> bool:
        return self.comparison.target is None or self.speedup >= self.comparison.target


@dataclass(frozen=True)
class BenchResult:
    """What one part of a bench measured."""

    numbers: Any
    """The numbers in a form that JSON can hold."""
    passed: bool
    """Whether every target was reached."""


def timed_workers(builders: dict[str, Callable[[Path], Workload]]) -> dict[str, RunWorker]:
    """Turn functions that build workloads into worker processes that run steps on request."""
    return {name: partial(serve_workload, build) for name, build in builders.items()}


def serve_workload(build: Callable[[Path], Workload], args: argparse.Namespace) -> None:
    serve(lambda: build(args.work_dir))


@dataclass(frozen=True)
class BenchScript:
    """A script that compares, and the worker processes that it starts."""

    file: str
    ours: dict[str, RunWorker]
    theirs: dict[str, RunWorker]
    """Workers that need the environment of the research packages."""

    # ---- in the parent process

    def parser(
        self, description: str | None, parts: Sequence[str], *, steps: int, steps_help: str
    ) -> argparse.ArgumentParser:
        """Build the parser with the arguments that all bench scripts share."""
        parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument(
            "--only",
            nargs="+",
            choices=parts,
            default=list(parts),
            help="run only these parts (default: all)",
        )
        parser.add_argument(
            "--peers-python",
            type=Path,
            default=PEERS_PYTHON,
            help="Python of the environment with the research packages "
            "(default: .venv-peers/bin/python, which `make peers` creates)",
        )
        parser.add_argument("--blocks", type=int, default=30, help="timed blocks of each side")
        parser.add_argument("--steps", type=int, default=steps, help=steps_help)
        parser.add_argument("--threads", type=int, default=1, help="compute threads of each side")
        parser.add_argument("--json", type=Path, help="also write the numbers to this file")
        for internal, kind in (("--worker", str), ("--work-dir", Path)):
            parser.add_argument(internal, type=kind, help=argparse.SUPPRESS)
        return parser

    def compare_all(
        self, comparisons: Iterable[Comparison], args: argparse.Namespace
    ) -> BenchResult:
        """Run and print the comparisons, one after the other."""
        results = []
        for comparison in comparisons:
            results.append(self.compare(comparison, args))
            print(format_result(results[-1]), flush=True)
        return BenchResult([to_json(one) for one in results], all(one.passed for one in results))

    def compare(self, comparison: Comparison, args: argparse.Namespace) -> ComparisonResult:
        """Run one comparison in a fresh directory.

        Some of the trainers prompt on the terminal if their results directory is not empty.
        """
        with tempfile.TemporaryDirectory() as directory:
            work_dir = Path(directory)
            with (
                self.start(comparison.theirs, args, work_dir) as theirs,
                self.start(comparison.ours, args, work_dir) as ours,
            ):
                times = timing.alternate(
                    ours, theirs, blocks=args.blocks, steps=args.steps, warmup_steps=args.steps
                )
                return ComparisonResult(comparison, ours.info, theirs.info, times)

    def start(
        self, name: str, args: argparse.Namespace, work_dir: Path
    ) -> AbstractContextManager[Worker]:
        return start_worker(*self.command(name, args), "--work-dir", work_dir)

    def command(self, name: str, args: argparse.Namespace) -> list[str]:
        """Return the command of a worker process, with the Python that has its packages."""
        python = str(args.peers_python) if name in self.theirs else sys.executable
        return [python, self.file, "--worker", name, "--threads", str(args.threads)]

    # ---- in a worker process

    def run_worker(self, args: argparse.Namespace) -> None:
        """Run the worker that --worker names."""
        if args.worker in self.ours:
            sys.path.insert(0, str(PROJECT))
        (self.ours | self.theirs)[args.worker](args)


def check_peers_python(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with a usage error if the environment of the research packages does not exist."""
    if not args.peers_python.exists():
        parser.error(
            f"{args.peers_python} does not exist, and the comparison needs the research packages: "
            "run `make peers`, or select parts without a comparison (--only)"
        )


# ---- reporting


def format_result(result: ComparisonResult) -> str:
    """Format sizes, times and speed-up."""
    comparison, times = result.comparison, result.times
    target = f" (target: at least {comparison.target})" if comparison.target is not None else ""
    lines = [
        f"{comparison.work}: {comparison.ours} / {comparison.theirs}",
        format_sizes(comparison.ours, result.our_info),
        format_sizes(comparison.theirs, result.their_info),
        f"  {'ms':<20}{'ours':>8}{'theirs':>8}   speed-up (quartiles)",
        format_times("wall", times.wall),
        format_times("CPU", times.cpu),
        f"  {result.speedup:.2f} times as fast{target}",
    ]
    return "\n".join(lines)


def format_sizes(name: str, info: ModelInfo) -> str:
    sizes = [
        f"{network} {count / 1e6:.2f} M, {info.mflop[network]:.0f} MFLOP"
        for network, count in info.parameters.items()
    ]
    return f"  {name:<20}{'; '.join(sizes)} | {info.packages}"


def format_times(name: str, ratio: timing.Ratio) -> str:
    """Format one row; the speed-up is the inverse of the ratio of times."""
    times = f"{ratio.ours_ms:>8.1f}{ratio.theirs_ms:>8.1f}"
    return f"  {name:<20}{times}{1 / ratio.ratio:>10.2f} ({1 / ratio.high:.2f}-{1 / ratio.low:.2f})"


def to_json(result: ComparisonResult) -> dict[str, object]:
    return {
        **asdict(result.comparison),
        **timing.to_json(result.times),
        "sizes": {"ours": asdict(result.our_info), "theirs": asdict(result.their_info)},
    }


def finish(results: dict[str, BenchResult], args: argparse.Namespace) -> int:
    """Write the numbers if --json is given; return exit code 1 if any target was missed."""
    if args.json is not None:
        numbers = {"machine": timing.describe_machine()} | {
            part: result.numbers for part, result in results.items()
        }
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0 if all(result.passed for result in results.values()) else 1
