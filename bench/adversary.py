"""Attack the package with kills, failing disks, signals, damaged files and odd input.

    python bench/adversary.py [kills faults signals files commands configurations endurance]
        [--seed 0] [--seconds 60] [--work-dir DIR]

Each section runs for `--seconds` of wall time or until its `--count`, whichever comes first, and
adds a row to the table: what was tried, how often, and how often a promise of docs/reliability.md
was broken. The first broken promises are printed with what reproduces them. Exit code 1 if there
are any. With `--results FILE` the rows of several calls, with other seeds, are added up in a file.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import inspect
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import adversary_inputs as inputs
import kills
import psutil
import torch
from adversary_faults import ERRORS, Fault, is_preloaded, run_preloaded
from adversary_process import (
    Child,
    Outcome,
    exec_tessera,
    run_child,
    run_tessera,
    start_child,
    train_rank,
    train_with_fault,
)
from adversary_table import Row, current_commit, format_table, save_rows

from tessera.cli.launch import find_free_port
from tessera.modalities import recipes
from tessera.recipes.registry import default_dependency, get_recipe

RUN = "run"
FLAGS = (
    "--preset tiny --steps 4 --batch-size 4 --log-every 1 --validate-every 2 --sample-every 4 "
    "--sample-count 1 --checkpoint-every 1 --keep-last 1 --data.num-synthetic 16"
).split()
TOKENIZERS = {
    ("images-maskgit-superres", "tokenizer"): ["--data.size", "32"],
    ("audio-text2semantic", "tokenizer"): ["--features", "ctc"],
}
"""The flags of tokenizers that are not trained by the defaults of their recipe."""
IMPORTED = (
    "torch._dynamo",  # by the constructor of an optimizer
    *("tessera.run.train", "tessera.cli.main", "tessera.cli.sample", "tessera.api.generator"),
    *("tessera.objectives.masked", "tessera.objectives.autoregressive", "tessera.text.learned"),
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

    def attempts(self, row: Row) -> Iterator[int]:
        """Count attempts until the time is used up or a row has its number."""
        deadline = time.monotonic() + self.seconds
        for number in itertools.count():
            if row.tried >= self.count or time.monotonic() > deadline:
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
        if "soundstorm" in parameters:
            given += ["--soundstorm", "none"]
        return ["train", recipe, *FLAGS, *given, *flags, "--out", RUN]

    def tokenizer(self, recipe: str, name: str) -> Path:
        """Train the tokenizer of a recipe, once."""
        default = default_dependency(recipe, name)
        wanted = default if default in recipes() else "images-vqgan"
        special = TOKENIZERS.get((recipe, name), [])
        run = self.work_dir / f"{wanted}{''.join(special)}"
        if not run.exists():
            check(run_child(run_tessera, "train", wanted, *FLAGS, *special, "--out", str(run)))
        return run

    def reference(self, recipe: str, *flags: str, nproc: int = 1) -> Reference:
        """Train a run that is never disturbed, once; its operations are logged."""
        run = self.work_dir / f"reference-{recipe}{''.join(flags)}-{nproc}" / RUN
        log = run.with_suffix(".log")
        if not run.exists():
            run.parent.mkdir()
            watched = Fault(run, log=log)
            check(train(run.parent, self.command(recipe, *flags), nproc, watched))
        operations = [line.partition(" ")[2] for line in log.read_text().splitlines()]
        return Reference(run, operations)

    def new_run(self) -> Path:
        """Return the path of a run in an empty folder."""
        folder = self.work_dir / "attacked"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        return folder / RUN


@dataclass(frozen=True)
class Reference:
    """A run that was never disturbed."""

    run: Path
    operations: list[str]
    """The paths of the operations that change files, in order."""


def check(outcome: Outcome) -> None:
    if outcome.code != 0:
        raise SystemExit(f"A command fails without an attack:\n{outcome.output[-3000:]}")


def train_in(folder: Path, command: list[str]) -> None:
    run_tessera(*command, folder=folder)


def exec_in(folder: Path, command: list[str], environment: dict[str, str]) -> None:
    exec_tessera(*command, folder=folder, **environment)


def start_ranks(folder: Path, command: list[str], fault: Fault | None = None) -> list[Child]:
    """Start a command in two processes that train together; the main one may have a fault."""
    port = find_free_port()
    faults = (fault, None)
    return [
        start_child(train_rank, folder, rank, 2, port, command, faults[rank]) for rank in (0, 1)
    ]


def train(folder: Path, command: list[str], nproc: int, fault: Fault | None = None) -> Outcome:
    """Train to the end or to a fault; return the outcome of the main process.

    If it is killed, so is the other process, as the launcher does.
    """
    if nproc == 1:
        return run_child(train_with_fault, fault or Fault(folder / RUN), folder, command)
    main, other = start_ranks(folder, command, fault)
    outcome = main.wait(600)
    if outcome.code != 0:
        other.signal(signal.SIGKILL)
    ended = other.wait(600)
    return ended if outcome.code == 0 and ended.code != 0 else outcome


# ---- sections


def attack_with_kills(attack: Attack) -> Row:
    """Kill runs at file operations and by the clock; each must end equal to its reference."""
    row = Row("SIGKILL at a file operation or by the clock, then resumed", unit="kills")
    for number in attack.attempts(row):
        recipe = attack.recipes[number % len(attack.recipes)]
        nproc, workers = 1 + (number % 5 == 4), number % 2
        flags = ["--num-workers", str(workers)]
        reference = attack.reference(recipe, *flags, nproc=nproc)
        run = attack.new_run()
        command = attack.command(recipe, *flags)
        for _ in range(attack.rng.randint(3, 6)):
            how = kill_once(attack, command, reference, run, nproc)
            if how is None:
                break
            row.tried += 1
            row.counts.update([how, f"with {nproc} process(es) and {workers} worker(s)"])
        outcome = train(run.parent, command, nproc)
        row.counts["runs"] += 1
        if outcome.code != 0:
            row.fail(f"{recipe}: exit code {outcome.code}\n{outcome.output[-2000:]}")
        elif found := kills.list_differences(reference.run, run):
            row.fail(f"{recipe}, {flags}, {nproc} process(es): {found[:3]}")
        print_progress(row, recipe)
    return row


def kill_once(
    attack: Attack, command: list[str], reference: Reference, run: Path, nproc: int
) -> str | None:
    """Start a command and kill it; return how, or None if it ended before."""
    at = 1 + int(len(reference.operations) * attack.rng.random() ** 2)
    fault = Fault(run, at)
    choice = attack.rng.random()
    if choice < 0.06:
        how = "in a new Python"
        launched = [*command, "--nproc", str(nproc)] if nproc > 1 else command
        environment = fault.environment if nproc == 1 else {}
        child = start_child(exec_in, run.parent, launched, environment)
        if nproc > 1 and not child.ends_within(attack.rng.uniform(3.0, 12.0)):
            child.signal(signal.SIGKILL)
        outcome = child.wait(600)
    elif choice < 0.3:
        how = "by the clock"
        children = (
            start_ranks(run.parent, command)
            if nproc == 2
            else [start_child(train_in, run.parent, command)]
        )
        if not children[0].ends_within(attack.rng.uniform(0.0, 2.0 * nproc)):
            children[attack.rng.randrange(nproc)].signal(signal.SIGKILL)
            for child in children:  # as the launcher does
                child.signal(signal.SIGKILL)
        outcome = [child.wait(600) for child in children][0]
    else:
        how = "at an operation"
        outcome = train(run.parent, command, nproc, fault)
    return how if outcome.code == -signal.SIGKILL else None


def attack_with_faults(attack: Attack) -> Row:
    """Let each operation of the last save fail; the run can be resumed to the same end.

    The errors take turns. An operation fails once, and in a second run so do those after it.
    """
    row = Row("EIO, ENOSPC, EDQUOT or EROFS at each operation of a save, resumed", unit="faults")
    planned = [
        (recipe, at, is_lasting)
        for recipe in attack.recipes
        for at in operations_of_last_save(attack.reference(recipe, "--num-workers", "0"))
        for is_lasting in (False, True)
    ]
    for number in attack.attempts(row):
        if number >= len(planned):
            break
        recipe, at, is_lasting = planned[number]
        command = attack.command(recipe, "--num-workers", "0")
        run = attack.new_run()
        error = ERRORS[(number // 2 + is_lasting) % len(ERRORS)]
        fault = Fault(run / "checkpoints", at, error, is_lasting)
        outcome = train(run.parent, command, 1, fault)
        where = f"{recipe}, operation {at}, {os.strerror(error)}, lasting {is_lasting}"
        row.tried += 1
        row.counts["that last"] += is_lasting
        row.counts["that end the run with a message"] += outcome.code != 0
        if not outcome.is_orderly:
            row.fail(f"{where}: {outcome.code}\n{outcome.output[-2000:]}")
        again = train(run.parent, command, 1) if outcome.code else outcome
        reference = attack.reference(recipe, "--num-workers", "0")
        found = [] if again.code else kills.list_differences(reference.run, run)
        if again.code or found:
            row.fail(f"{where}, resumed: {again.output[-1500:]}{found}")
        print_progress(row, where)
    row.counts["operations of all recipes"] = len(planned) // 2
    return row


def operations_of_last_save(reference: Reference) -> range:
    """Return the numbers of the operations of the last save among those in checkpoints/."""
    folder = str(reference.run / "checkpoints")
    saving = [path for path in reference.operations if path.startswith(folder)]
    last = kills.list_checkpoints(reference.run)[-1]
    first = next(number for number, path in enumerate(saving, start=1) if f"-{last}" in path)
    return range(first, len(saving) + 1)


def attack_with_signals(attack: Attack) -> list[Row]:
    """Signal groups of processes at any time: a checkpoint is there if a step was finished."""
    late = Row("SIGTERM or SIGINT to a process group with workers, in training", unit="signals")
    early = Row("the same before the first step, also while workers start", unit="signals")
    for number in attack.attempts(late):
        recipe = attack.recipes[number % len(attack.recipes)]
        run = attack.new_run()
        flags = ["--steps", "100000", "--checkpoint-every", "7", "--num-workers", "2"]
        command = attack.command(recipe, *flags)
        code = signal.SIGTERM if number % 5 else signal.SIGINT
        children, how = start_group(run.parent, command, attack.rng.random())
        row = early if number % 4 == 3 else late
        metrics = run / "metrics.jsonl"
        if row is late:
            while not has_content(metrics) and not children[0].ends_within(0.02):
                pass
        delay = attack.rng.uniform(0.0, 1.0)
        if children[0].ends_within(delay):
            row.fail(f"{recipe} ended before the signal: {children[0].wait(1).output[-1500:]}")
            continue
        for child in children:
            child.signal_group(code)
        row.tried += 1
        outcomes = [child.wait(600) for child in children]
        has_checkpoint = any((run / "checkpoints").glob("[0-9]*"))
        row.counts.update([code.name, how])
        row.counts["with a checkpoint"] += has_checkpoint
        # Before the first instruction of a command, the signal itself ends the process.
        are_stopped = all(one.code in (128 + code, -code) for one in outcomes)
        has_traceback = any("Traceback" in one.output for one in outcomes)
        if not are_stopped or has_traceback or (has_content(metrics) and not has_checkpoint):
            row.fail(
                f"{recipe}, {code.name}, {how}: {[one.code for one in outcomes]}, checkpoint "
                f"{has_checkpoint}\n" + "\n".join(one.output[-2000:] for one in outcomes)
            )
        print_progress(row, recipe)
    return [late, early]


def start_group(folder: Path, command: list[str], choice: float) -> tuple[list[Child], str]:
    """Start a command in one process, in two, or with the launcher and a new Python."""
    if choice < 0.05:
        launched = [*command, "--nproc", "2"]
        return [start_child(exec_in, folder, launched, {})], "in a new Python with --nproc 2"
    if choice < 0.1:
        return [start_child(exec_in, folder, command, {})], "in a new Python"
    if choice < 0.25:
        return start_ranks(folder, command), "with two processes"
    return [start_child(train_in, folder, command)], "with one process"


def has_content(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def print_progress(row: Row, what: str) -> None:
    print(
        f"{row.tried} {row.unit}, {len(row.problems)} broken: {what}", file=sys.stderr, flush=True
    )


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
            print_progress(row, medium)
        rows.append(row)
    return rows


def attack_with_commands(attack: Attack) -> Row:
    """Run odd command lines."""
    row = Row("odd command lines", unit="commands")
    run = attack.tokenizer("images-maskgit", "tokenizer")
    folder = attack.work_dir / "odd"
    shutil.rmtree(folder, ignore_errors=True)
    for _ in attack.attempts(row):
        folder.mkdir(exist_ok=True)
        arguments = inputs.odd_command(attack.rng, run)
        outcome = run_child(train_in, folder, arguments, seconds=600, memory_mb=16_000)
        row.tried += 1
        row.counts[f"with exit code {outcome.code}"] += 1
        if not outcome.is_orderly:
            row.fail(f"{arguments}: {outcome.code}\n{outcome.output[-2000:]}")
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
    return row


def attack_endurance(attack: Attack) -> Row:
    """Train with everything on; memory and descriptors must not grow after the first third."""
    row = Row("one run with workers, adversary, EMA, validation, samples and checkpoints", unit="s")
    run = attack.new_run()
    flags = ["--steps", "1000000", "--num-workers", "2", "--adversary", "on", "--quantizer", "vq"]
    every = ["--validate-every", "20", "--sample-every", "20", "--checkpoint-every", "20"]
    command = attack.command("images-vqgan", *flags, *every)
    child = start_child(train_in, run.parent, command)
    sizes: list[Sizes] = []
    start = time.monotonic()
    while time.monotonic() < start + attack.seconds and not child.ends_within(2.0):
        sizes.append(measure_sizes(child.pid))
    child.signal(signal.SIGTERM)
    outcome = child.wait(600)
    row.tried = round(time.monotonic() - start)
    if outcome.code != 128 + signal.SIGTERM:
        row.fail(f"exit code {outcome.code}\n{outcome.output[-2000:]}")
    third = len(sizes) // 3
    middle, late = largest_sizes(sizes[third : 2 * third]), largest_sizes(sizes[2 * third :])
    row.counts["steps"] = max(map(int, kills.list_checkpoints(run)))
    row.measure(
        growth_of_memory_in_the_last_third_MB=late.memory_mb - middle.memory_mb,
        peak_MB=late.memory_mb,
        growth_in_descriptors=late.descriptors - middle.descriptors,
        open_descriptors=late.descriptors,
    )
    if late.memory_mb > middle.memory_mb + 30 or late.descriptors > middle.descriptors + 2:
        row.fail(row.remark)
    return row


@dataclass(frozen=True)
class Sizes:
    """What a run and its workers use."""

    memory_mb: float
    descriptors: int


def measure_sizes(pid: int) -> Sizes:
    main = psutil.Process(pid)
    memory, descriptors = 0, 0
    for process in [main, *main.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory += process.memory_info().rss
            descriptors += process.num_fds()
    return Sizes(memory / 2**20, descriptors)


def largest_sizes(sizes: list[Sizes]) -> Sizes:
    return Sizes(max(one.memory_mb for one in sizes), max(one.descriptors for one in sizes))


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
        for name in args.sections:
            rng = random.Random(f"{args.seed} {name}")
            attack = Attack(work_dir, rng, args.seconds, args.count, args.recipes)
            start, commit = cpu_seconds(), current_commit(Path(__file__).parent)
            found = SECTIONS[name](attack)
            found = found if isinstance(found, list) else [found]
            for row in found:
                row.cpu_seconds = (cpu_seconds() - start) / len(found)
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
