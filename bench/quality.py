"""Time to quality: a published package and ours, trained on the same data for equal CPU time.

    python bench/quality.py vqgan --data FOLDER --work DIR [--minutes 10] [--seeds 2]
    python bench/quality.py maskgit --data FOLDER --work DIR
    python bench/quality.py soundstorm --data FOLDER --work DIR

A row is one system (`quality_rows/`). Each of its sides is trained with one thread in a process of
its own until it has used so many minutes of CPU time; validation is not counted. The table has the
final metrics, and the time in which a side reached the final value of the package as a fraction of
the package's time. A call that was interrupted continues: what is complete in DIR is not repeated.
The sides that are packages need `make peers`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import timing
from comparison import PEERS_PYTHON, PROJECT
from quality_report import format_table, plot_curves
from quality_rows import ROWS, load_row, row_folder
from time_to_quality import Curve, Judge, Row, Setting, result_path, run_once, serve_side


def main(arguments: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(arguments)
    timing.set_threads(1)
    sys.path.insert(0, str(PROJECT))
    row = load_row(args.row)
    if args.worker is not None:
        setting = Setting(args.work, args.scratch, args.seed, args.budget_s)
        serve_side(row.sides[args.worker].build, setting)
        return 0
    sides = select_sides(row, args.sides, parser)
    if any(row.sides[side].is_package for side in sides) and not args.peers_python.exists():
        parser.error(
            f"{args.peers_python} does not exist, and some sides need the research packages: run "
            "`make peers`, or select other sides with --sides"
        )
    print(f"{row.title} | {timing.describe_machine()}", flush=True)
    args.work.mkdir(parents=True, exist_ok=True)
    row.prepare(args.data, args.work)
    curves = train_sides(row, sides, args, row.build_judge(args.work))
    print(format_table(row, curves))
    if args.plot is not None:
        plot_curves(row, curves, args.plot)
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", choices=ROWS, help="the system that is compared")
    parser.add_argument("--data", type=Path, required=True, help="a folder of data with captions")
    parser.add_argument("--work", type=Path, required=True, help="the folder of all results")
    parser.add_argument("--minutes", type=float, default=10, help="CPU time of a side")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each side")
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first run")
    parser.add_argument("--sides", nargs="+", help="train only these sides")
    parser.add_argument("--plot", type=Path, help="write the curves to this PNG file")
    parser.add_argument(
        "--peers-python",
        type=Path,
        default=PEERS_PYTHON,
        help="Python of the environment with the research packages "
        "(default: .venv-peers/bin/python, which `make peers` creates)",
    )
    for internal, kind in (
        ("--worker", str),
        ("--scratch", Path),
        ("--seed", int),
        ("--budget-s", float),
    ):
        parser.add_argument(internal, type=kind, help=argparse.SUPPRESS)
    return parser


def select_sides(
    row: Row, requested: list[str] | None, parser: argparse.ArgumentParser
) -> list[str]:
    """Return the requested sides, by default all that are not optional."""
    if requested is None:
        return [name for name, side in row.sides.items() if not side.is_optional]
    for name in requested:
        if name not in row.sides:
            parser.error(f"{name!r} is no side of this row: choose from {', '.join(row.sides)}")
    return requested


def train_sides(row: Row, sides: list[str], args: argparse.Namespace, judge: Judge) -> list[Curve]:
    """Train each side with each seed, one after the other, unless that has been done."""
    folder = row_folder(args.work, args.row)
    folder.mkdir(exist_ok=True)
    curves = []
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        for side in sides:
            budget_s = 60 * args.minutes * row.sides[side].budget
            with tempfile.TemporaryDirectory() as scratch:
                command = side_command(row, side, seed, budget_s, Path(scratch), args)
                path = result_path(folder, side, seed)
                curves.append(run_once(path, side, seed, budget_s, command, judge))
    return curves


def side_command(
    row: Row, side: str, seed: int, budget_s: float, scratch: Path, args: argparse.Namespace
) -> list[str]:
    """Return the command of the process that trains a side."""
    python = args.peers_python if row.sides[side].is_package else sys.executable
    flags = {
        "--data": args.data,
        "--work": args.work,
        "--worker": side,
        "--scratch": scratch,
        "--seed": seed,
        "--budget-s": budget_s,
    }
    pairs = [str(part) for pair in flags.items() for part in pair]
    return [str(python), __file__, args.row, *pairs]


if __name__ == "__main__":
    sys.exit(main())
