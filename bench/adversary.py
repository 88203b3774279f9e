"""Attack the package with kills, failing disks, signals, damaged files and odd input.

    python bench/adversary.py [kills faults signals files commands configurations endurance]
        [--seed 0] [--seconds 60] [--work-dir DIR]

Each section runs for `--seconds` of wall time or until its `--count`, whichever comes first, and
adds a row to the table: what was tried, how often, and how often a promise of docs/reliability.md
was broken. The first broken promises are printed with what reproduces them. Exit code 1 if there
are any.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import adversary_inputs as inputs
import kills
import torch
from adversary_process import (
    ERRORS,
    Child,
    Operations,
    Outcome,
    run_child,
    run_tessera,
    start_child,
    train_rank,
    train_with_faults,
)
from adversary_table import Row, current_commit, format_table, save_rows

from tessera.cli.launch import find_free_port
from tessera.modalities import recipes
from tessera.recipes.registry import default_dependency, get_recipe

RUN = "run"
FLAGS = (
    "--preset tiny --steps 4 --batch-size 4 --log-every 1 --validate-every 2 --sample-every 4 "
    "--sample-count 1 --checkpoint-every 2 --keep-last 1 --data.num-synthetic 16"
).split()
IMPORTED = (
    "torch._dynamo",  # by the constructor of an optimizer
    *("tessera.run.train", "tessera.cli.flags", "tessera.cli.sample", "tessera.api.generator"),
    *(f"tessera.modalities.{name}.reconstruction" for name in ("image", "video", "audio", "mesh")),
)
"""What commands import when they need it, before the forks: each would do so again, which were 1.5
of the 2 s of a tiny run."""


@dataclass
class Attack:
    """What all sections share."""

    work_dir: Path
    rng: random.Random
    seconds: float
    count: int
    recipes: list[str]

    def until_end(self) -> Iterator[int]:
        """Count attempts until the time or the number is used up."""
        deadline = time.monotonic() + self.seconds
        for number in range(self.count):
            if time.monotonic() > deadline:
                return
            yield number

    def command(self, recipe: str, *flags: str) -> list[str]:
        """Return the command that trains a tiny run of a recipe, on tiny tokenizers.

        It writes to the folder RUN of the current folder, whose path is part of the model card.
        """
        parameters = inspect.signature(get_recipe(recipe)).parameters
        given: list[str] = []
        for name in ("tokenizer", "semantic", "low_res_tokenizer"):
            if name in parameters:
                run = self.tokenizer(recipe, name)
                given += [f"--{name.replace('_', '-')}", str(run)]
        return ["train", recipe, *FLAGS, *given, *flags, "--out", RUN]

    def tokenizer(self, recipe: str, name: str) -> Path:
        """Train the tokenizer of a recipe, once."""
        default = default_dependency(recipe, name)
        wanted = default if default in recipes() else "images-vqgan"
        is_large = recipe == "images-maskgit-superres" and name == "tokenizer"
        run = self.work_dir / f"{wanted}{'-large' if is_large else ''}"
        if not run.exists():
            size = ["--data.size", "32"] if is_large else []
            check(run_child(run_tessera, "train", wanted, *FLAGS, *size, "--out", str(run)))
        return run

    def reference(self, recipe: str, *flags: str) -> tuple[Path, int]:
        """Train a run that is never disturbed; return it and the number of its operations."""
        run = self.work_dir / f"reference-{recipe}{''.join(flags)}" / RUN
        counted = run.with_suffix(".count")
        if not run.exists():
            run.parent.mkdir()
            watched = Operations(str(run), count_file=counted)
            check(run_child(train_with_faults, watched, self.command(recipe, *flags)))
        return run, int(counted.read_text())

    def reference_of_two(self, recipe: str, *flags: str) -> Path:
        """Train a run in two processes that is never disturbed."""
        run = self.work_dir / f"reference-{recipe}{''.join(flags)}-two" / RUN
        if not run.exists():
            run.parent.mkdir()
            check(train_on_two(run.parent, self.command(recipe, *flags)))
        return run

    def new_run(self) -> Path:
        """Return the path of a run in an empty folder."""
        folder = self.work_dir / "attacked"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder / RUN


def check(outcome: Outcome) -> None:
    if outcome.code != 0:
        raise SystemExit(f"A command fails without an attack:\n{outcome.output[-3000:]}")


def train_in(folder: Path, command: list[str]) -> None:
    run_tessera(*command, folder=folder)


def start_ranks(folder: Path, command: list[str]) -> list[Child]:
    """Start a command in two processes that train together."""
    port = find_free_port()
    return [start_child(train_rank, folder, rank, 2, port, command) for rank in range(2)]


def train_on_two(folder: Path, command: list[str]) -> Outcome:
    """Train in two processes; return the outcome of the first that failed, or of the main one."""
    outcomes = [child.wait(600) for child in start_ranks(folder, command)]
    return next((one for one in outcomes if one.code != 0), outcomes[0])


# ---- sections


def attack_with_kills(attack: Attack) -> Row:
    """Kill runs at file operations and by the clock; each must end equal to its reference."""
    row = Row("SIGKILL at an operation or by the clock, then resumed", unit="kills")
    runs = Counter[int]()
    chosen = attack.recipes
    for number in attack.until_end():
        recipe = chosen[number % len(chosen)]
        nproc = 2 if number % 7 == 6 else 1
        workers = ["--num-workers", str(number % 2)]
        reference, operations = attack.reference(recipe, *workers)
        if nproc == 2:
            reference = attack.reference_of_two(recipe, *workers)
        run = attack.new_run()
        command = attack.command(recipe, *workers)
        for _ in range(attack.rng.randint(1, 4)):
            if kill_once(attack, command, run, operations, nproc):
                row.tried += 1
        finish = train_on_two if nproc == 2 else partial(run_child, train_in)
        outcome = finish(run.parent, command)
        runs[nproc] += 1
        if outcome.code != 0:
            row.fail(f"{recipe}: exit code {outcome.code}\n{outcome.output[-2000:]}")
        elif found := kills.list_differences(reference, run):
            row.fail(f"{recipe}, {workers}, {nproc} process(es): {found[:3]}")
    row.remark = (
        f"{runs[1]} runs on one process and {runs[2]} on two, of {len(chosen)} recipes, "
        "half of them with a worker"
    )
    return row


def kill_once(attack: Attack, command: list[str], run: Path, operations: int, nproc: int) -> bool:
    """Start a command and kill it; return whether it was killed before it ended."""
    if nproc == 2:
        children = start_ranks(run.parent, command)
        if not children[0].ends_within(attack.rng.uniform(0.3, 4.0)):
            children[attack.rng.randrange(2)].signal(signal.SIGKILL)
            for child in children:  # as the launcher does
                child.signal(signal.SIGKILL)
        outcomes = [child.wait(600) for child in children]
        return any(outcome.code == -signal.SIGKILL for outcome in outcomes)
    if attack.rng.random() < 0.3:
        child = start_child(train_in, run.parent, command)
        if not child.ends_within(attack.rng.uniform(0.0, 2.5)):
            child.signal(signal.SIGKILL)
        return child.wait(600).code == -signal.SIGKILL
    at = 1 + int(operations * attack.rng.random() ** 2)
    return run_child(train_with_faults, Operations(str(run), at), command).code == -signal.SIGKILL


def attack_with_faults(attack: Attack) -> Row:
    """Let operations fail, each once; the run ends in order and can be resumed to the same end."""
    row = Row("EIO, ENOSPC, EDQUOT or EROFS at one operation, then resumed", unit="faults")
    at = dict.fromkeys(attack.recipes, 0)
    for number in attack.until_end():
        open_recipes = [name for name in attack.recipes if at[name] >= 0]
        if not open_recipes:
            break
        recipe = open_recipes[number % len(open_recipes)]
        reference, operations = attack.reference(recipe)
        at[recipe] += 1
        run = attack.new_run()
        command = attack.command(recipe)
        fault = Operations(str(run), at[recipe], attack.rng.choice(ERRORS))
        outcome = run_child(train_with_faults, fault, command)
        row.tried += 1
        if not outcome.is_orderly:
            row.fail(f"{recipe}, operation {fault.at}: {outcome.code}\n{outcome.output[-2000:]}")
        again = run_child(train_in, run.parent, command)
        differences = list(kills.compare_checkpoints(reference, run)) if again.code == 0 else []
        if again.code != 0 or differences:
            row.fail(
                f"{recipe}, operation {fault.at}, resumed: {again.output[-1500:]}{differences}"
            )
        if at[recipe] >= operations:
            at[recipe] = -1
    finished = sum(count == -1 for count in at.values())
    row.remark = f"all operations of {finished} of {len(at)} recipes"
    return row


def attack_with_signals(attack: Attack) -> Row:
    """Signal groups of processes at any time: a checkpoint is there if a step was finished."""
    row = Row("SIGTERM or SIGINT to a process group with workers", unit="signals")
    for number in attack.until_end():
        recipe = attack.recipes[number % len(attack.recipes)]
        run = attack.new_run()
        flags = ["--steps", "100000", "--checkpoint-every", "100000", "--num-workers", "2"]
        command = attack.command(recipe, *flags)
        code = signal.SIGTERM if number % 4 else signal.SIGINT
        if number % 10 == 9:
            children = start_ranks(run.parent, command)
        else:
            children = [start_child(train_in, run.parent, command)]
        if children[0].ends_within(attack.rng.uniform(0.05, 3.0)):
            row.fail(f"{recipe} ended before the signal: {children[0].wait(1).output[-1500:]}")
            continue
        for child in children:
            child.signal_group(code)
        row.tried += 1
        for outcome in [child.wait(600) for child in children]:
            metrics = run / "metrics.jsonl"
            has_stepped = metrics.exists() and metrics.stat().st_size > 0
            has_checkpoint = any((run / "checkpoints").glob("[0-9]*"))
            lost = has_stepped and not has_checkpoint
            # Before the first instruction of a command, the signal itself ends the process.
            is_stopped = outcome.code in (128 + code, -code)
            if not is_stopped or "Traceback" in outcome.output or lost:
                row.fail(
                    f"{recipe}, {code.name}: {outcome.code}, checkpoint {has_checkpoint}\n"
                    f"{outcome.output[-2000:]}"
                )
    return row


def attack_with_files(attack: Attack) -> list[Row]:
    """Read damaged files: none may crash, hang, take gigabytes or raise another error."""
    rows = []
    for medium in inputs.MEDIA:
        row = Row(f"damaged {medium} files, read and inspected", unit="files")
        folder = attack.work_dir / medium
        sources = inputs.write_sources(medium, folder)
        deadline = time.monotonic() + attack.seconds / len(inputs.MEDIA)
        while row.tried < attack.count and time.monotonic() < deadline:
            size = min(250, attack.count - row.tried)
            seed = attack.rng.randrange(1 << 62)
            report = folder / "report.txt"
            child = start_child(inputs.read_mutations, medium, sources, seed, size, report)
            outcome = child.wait(10 * 60)
            done = inputs.read_report(report)
            row.tried += done.files
            row.measure(slowest_s=done.slowest, peak_MB=outcome.memory_mb)
            if outcome.code != 0 or done.slowest > inputs.MAX_SECONDS:
                row.fail(
                    f"seed {seed}: {outcome.code} {done.slowest:.1f} s\n{outcome.output[-2000:]}"
                )
            if outcome.memory_mb > inputs.MAX_MEMORY_MB:
                row.fail(f"seed {seed}: {outcome.memory_mb:,.0f} MB")
        rows.append(row)
    return rows


def attack_with_commands(attack: Attack) -> Row:
    """Run odd command lines."""
    row = Row("odd command lines", unit="commands")
    run = attack.tokenizer("images-maskgit", "tokenizer")
    folder = attack.work_dir / "odd"
    shutil.rmtree(folder, ignore_errors=True)
    for _ in attack.until_end():
        folder.mkdir(exist_ok=True)
        arguments = inputs.odd_command(attack.rng, run)
        outcome = run_child(train_in, folder, arguments, seconds=600, memory_mb=16_000)
        row.tried += 1
        if not outcome.is_orderly:
            row.fail(f"{arguments}: {outcome.code}\n{outcome.output[-2000:]}")
    return row


def attack_with_configurations(attack: Attack) -> Row:
    """Load runs whose config.json was changed at random."""
    row = Row("config.json with changed values or bytes", unit="files")
    trained = [attack.tokenizer("images-maskgit", "tokenizer")]
    trained += [attack.reference(name)[0] for name in attack.recipes if "maskgit" in name][:1]
    for number in attack.until_end():
        source = trained[number % len(trained)]
        run = attack.new_run()
        shutil.copytree(source, run)
        inputs.mutate_config(run / "config.json", attack.rng)
        command = ["sample", str(run), "--count", "1", "--out", str(run / "out")]
        outcome = run_child(run_tessera, *command, seconds=600, memory_mb=16_000)
        row.tried += 1
        if not outcome.is_orderly:
            text = (run / "config.json").read_text(errors="replace")[:1500]
            row.fail(f"{outcome.code}\n{outcome.output[-1500:]}\n{text}")
    return row


def attack_endurance(attack: Attack) -> Row:
    """Train with everything on; memory and descriptors must not grow after the first third."""
    row = Row("one run with workers, adversary, validation and samples", unit="s")
    run = attack.new_run()
    flags = ["--steps", "1000000", "--num-workers", "2", "--adversary", "on", "--quantizer", "vq"]
    every = ["--validate-every", "20", "--sample-every", "20", "--checkpoint-every", "20"]
    command = attack.command("images-vqgan", *flags, *every)
    child = start_child(train_in, run.parent, command)
    samples: list[tuple[float, int]] = []
    start = time.monotonic()
    while time.monotonic() < start + attack.seconds and not child.ends_within(2.0):
        status = Path(f"/proc/{child.pid}/statm").read_text().split()
        memory = int(status[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        samples.append((memory, len(os.listdir(f"/proc/{child.pid}/fd"))))
    child.signal(signal.SIGTERM)
    outcome = child.wait(600)
    row.tried = round(time.monotonic() - start)
    third = len(samples) // 3
    early, late = samples[third : 2 * third], samples[2 * third :]
    if outcome.code != 143:
        row.fail(f"exit code {outcome.code}\n{outcome.output[-2000:]}")
    if early and late:
        growth = max(m for m, _ in late) - max(m for m, _ in early)
        descriptors = max(d for _, d in late) - max(d for _, d in early)
        row.remark = f"{growth:+.0f} MB and {descriptors:+d} descriptors in the last third"
        if growth > 30 or descriptors > 2:
            row.fail(row.remark)
    return row


SECTIONS: dict[str, Callable[[Attack], Row | list[Row]]] = {
    "kills": attack_with_kills,
    "faults": attack_with_faults,
    "signals": attack_with_signals,
    "files": attack_with_files,
    "commands": attack_with_commands,
    "configurations": attack_with_configurations,
    "endurance": attack_endurance,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help="which to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="of each section")
    parser.add_argument("--count", type=int, default=1_000_000, help="of attempts in a section")
    parser.add_argument("--recipes", nargs="+", default=list(recipes()), help="of the runs")
    parser.add_argument("--work-dir", type=Path, help="keep everything in this folder")
    parser.add_argument("--results", type=Path, help="add the rows to those of this JSON file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as temporary:
        work_dir = (args.work_dir or Path(temporary)).resolve()
        work_dir.mkdir(parents=True, exist_ok=True)
        for module in IMPORTED:
            importlib.import_module(module)
        for name in args.sections:
            rng = random.Random(f"{args.seed} {name}")
            attack = Attack(work_dir, rng, args.seconds, args.count, args.recipes)
            start = cpu_seconds()
            found = SECTIONS[name](attack)
            found = found if isinstance(found, list) else [found]
            for row in found:
                row.cpu_seconds = (cpu_seconds() - start) / len(found)
                row.seeds, row.commits = [args.seed], [current_commit(Path(__file__).parent)]
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
