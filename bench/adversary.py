"""Attack the package with kills, failing disks, signals, damaged files and odd input.

    python bench/adversary.py [SECTION ...] [--seed 0] [--seconds 60] [--work-dir DIR]

Each section runs for `--seconds` of wall time or until its `--count`, whichever comes first, and
adds a row to the table: what was tried, how often, and how often a promise of docs/reliability.md
was broken. The first broken promises are printed with what reproduces them. Exit code 1 if there
are any. With `--results FILE` the rows of several calls, with other seeds, are added up in a file.
SIGTERM ends a section after its present attempt.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import adversary_inputs as inputs
import torch
from adversary_attack import Attack, print_progress, train_in
from adversary_faults import is_preloaded, run_preloaded
from adversary_process import run_child
from adversary_runs import (
    attack_endurance,
    attack_with_faults,
    attack_with_kills,
    attack_with_signals,
)
from adversary_table import Row, current_commit, format_table, save_rows

from tessera.modalities import recipes

IMPORTED = (
    "torch._dynamo",  # by the constructor of an optimizer
    *("tessera.run.train", "tessera.cli.main", "tessera.cli.sample", "tessera.api.generator"),
    *("tessera.objectives.masked", "tessera.objectives.autoregressive", "tessera.text.learned"),
    *("tessera.cli.flags", "tessera.run.dry_run", "tessera.run.resolve", "tessera.run.token_cache"),
    *("tessera.engine.optim.muon", "tessera.engine.optim.lion", "tessera.run.dependencies"),
    *(f"tessera.modalities.{name}.reconstruction" for name in ("image", "video", "audio", "mesh")),
)
"""What commands import when they need it, before the forks: each would do so again, which were 1.5
of the 2 s of a tiny run."""


def attack_with_files(medium: str, attack: Attack) -> Row:
    """Read damaged files: none may crash, hang, take gigabytes or raise another error."""
    row = Row(f"damaged {medium} files, read and inspected", unit="files")
    folder = attack.work_dir / medium
    sources = inputs.write_sources(medium, folder)
    for _ in attack.attempts(row):
        size = min(250, attack.count - row.tried)
        seed = attack.rng.randrange(1 << 62)
        report = folder / "report.txt"
        outcome = run_child(inputs.read_mutations, medium, sources, seed, size, report)
        done = inputs.read_report(report)
        row.tried += done.files
        row.measure(slowest_s=done.slowest, peak_MB=outcome.memory_mb)
        if outcome.code != 0 or done.slowest > inputs.MAX_SECONDS:
            row.fail(f"seed {seed}: {outcome.code} {done.slowest:.1f} s\n{outcome.output[-2000:]}")
        if outcome.memory_mb > inputs.MAX_MEMORY_MB:
            row.fail(f"seed {seed}: {outcome.memory_mb:,.0f} MB")
        print_progress(row, medium)
    return row


def attack_with_commands(attack: Attack) -> Row:
    """Run odd command lines."""
    row = Row("odd command lines", unit="commands")
    trained = attack.tokenizer("images-maskgit", "tokenizer")
    for _ in attack.attempts(row):
        run = attack.new_run()
        shutil.copytree(trained, run)
        arguments = inputs.odd_command(attack.rng, run)
        outcome = run_child(train_in, run.parent, arguments, seconds=600, memory_mb=16_000)
        row.tried += 1
        row.counts[f"with exit code {outcome.code}"] += 1
        if not outcome.is_orderly:
            row.fail(f"{arguments}: {outcome.code}\n{outcome.output[-2000:]}")
        print_progress(row, str(arguments))
    return row


def attack_with_configurations(attack: Attack) -> Row:
    """Sample from runs, and resume them, after their config.json was changed at random."""
    row = Row("config.json with changed values or bytes", unit="files")
    for number in attack.attempts(row):
        recipe = attack.recipes[number % len(attack.recipes)]
        run = attack.new_run()
        shutil.copytree(attack.reference(recipe, "--num-workers", "0").run, run)
        inputs.mutate_config(run / "config.json", attack.rng)
        command = ["sample", str(run), "--count", "1", "--out", str(run.with_name("out"))]
        if number % 5 == 4:
            command = attack.command(recipe, "--num-workers", "0")
        outcome = run_child(train_in, run.parent, command, seconds=600, memory_mb=16_000)
        row.tried += 1
        row.counts[f"with exit code {outcome.code}"] += 1
        if not outcome.is_orderly:
            text = (run / "config.json").read_text(errors="replace")[:1500]
            row.fail(f"{recipe}: {outcome.code}\n{outcome.output[-1500:]}\n{text}")
        print_progress(row, recipe)
    return row


SECTIONS: dict[str, Callable[[Attack], Row | list[Row]]] = {
    "kills": attack_with_kills,
    "faults": attack_with_faults,
    "signals": attack_with_signals,
    **{f"{medium}-files": partial(attack_with_files, medium) for medium in inputs.MEDIA},
    "commands": attack_with_commands,
    "configurations": attack_with_configurations,
    "endurance": attack_endurance,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", help=f"which to run, of {', '.join(SECTIONS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="of each section")
    parser.add_argument("--count", type=int, default=1_000_000, help="of attempts in a section")
    parser.add_argument("--recipes", nargs="+", default=list(recipes()), help="of the runs")
    parser.add_argument("--work-dir", type=Path, help="keep everything in this folder")
    parser.add_argument("--results", type=Path, help="add the rows to those of this JSON file")
    args = parser.parse_args(arguments)
    if unknown := set(args.sections) - set(SECTIONS):
        parser.error(
            f"unknown sections {', '.join(unknown)}; expected some of {', '.join(SECTIONS)}"
        )
    if not is_preloaded():
        return run_preloaded([sys.executable, __file__, *(arguments or sys.argv[1:])])
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        work_dir = (args.work_dir or Path(temporary)).resolve()
        work_dir.mkdir(parents=True, exist_ok=True)
        for module in IMPORTED:
            importlib.import_module(module)
        gc.freeze()  # else each fork copies what its collections touch, a quarter of its time
        for name in args.sections or SECTIONS:
            rng = random.Random(f"{args.seed} {name}")
            attack = Attack(work_dir, args.seed, rng, args.seconds, args.count, args.recipes)
            signal.signal(signal.SIGTERM, attack.interrupt)
            start, commit = cpu_seconds(), current_commit(Path(__file__).parent)
            found = SECTIONS[name](attack)
            found = found if isinstance(found, list) else [found]
            for row in found:
                row.cpu_seconds = row.cpu_seconds or cpu_seconds() - start
                row.seeds, row.commits = [args.seed], [commit]
                for problem in row.problems[:5]:
                    print(f"\n{name}: {problem}", flush=True)
            rows = save_rows(args.results or work_dir / "results.json", found)
            print(format_table(rows), flush=True)
    return 1 if any(row.problems for row in rows) else 0


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    times = os.times()
    return sum(times[:4])


if __name__ == "__main__":
    sys.exit(main())
