"""Attacks on runs in training: kills, failing file operations, signals, and much time."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import kills
import psutil
from adversary_attack import Attack, Reference, print_progress, start_ranks, train, train_in
from adversary_faults import ERRORS, Fault
from adversary_process import Child, Outcome, exec_tessera, start_child
from adversary_table import Row

# ---- kills


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
        for _ in range(attack.rng.randint(4, 8)):
            how, outcome = kill_once(attack, command, reference, run, nproc)
            if outcome.code != -signal.SIGKILL:
                break
            row.tried += 1
            row.counts.update([how, f"with --nproc {nproc} --num-workers {workers}"])
        if outcome.code == -signal.SIGKILL:
            outcome = train(run.parent, command, nproc)
        row.counts["runs"] += 1
        if outcome.code != 0:
            row.fail(f"{recipe}: exit code {outcome.code}\n{outcome.output[-2000:]}")
        elif found := kills.list_differences(reference.run, run):
            row.fail(f"{recipe}, {flags}, --nproc {nproc}: {found[:3]}")
        print_progress(row, recipe)
    return row


def exec_in(folder: Path, command: list[str], environment: dict[str, str]) -> None:
    exec_tessera(*command, folder=folder, **environment)


def kill_once(
    attack: Attack, command: list[str], reference: Reference, run: Path, nproc: int
) -> tuple[str, Outcome]:
    """Start a command and kill it, unless it ends before; return how, and the outcome.

    Early operations are more likely: a run that is resumed has fewer of them.
    """
    at = 1 + int(len(reference.operations) * attack.rng.random() ** 3)
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
        outcomes = [child.wait(600) for child in children]
        outcome = min(outcomes, key=lambda one: one.code)  # killed rather than cut off
    else:
        how = "at an operation"
        outcome = train(run.parent, command, nproc, fault)
    return how, outcome


# ---- failing operations


def attack_with_faults(attack: Attack) -> Row:
    """Let each operation of the last save fail; the run can be resumed to the same end.

    The errors take turns. Every second operation fails once; at the others, and at the first ones
    with an odd seed, the disk stays as it is, and later operations that need space fail as well.
    """
    row = Row("EIO, ENOSPC, EDQUOT or EROFS at each operation of a save, resumed", unit="faults")
    planned = [
        (recipe, at)
        for recipe in attack.recipes
        for at in operations_of_last_save(attack.reference(recipe, "--num-workers", "0"))
    ]
    for number in attack.attempts(row):
        if number >= len(planned):
            break
        recipe, at = planned[number]
        is_lasting = (number + attack.seed) % 2 == 1
        command = attack.command(recipe, "--num-workers", "0")
        run = attack.new_run()
        error = ERRORS[number // 2 % len(ERRORS)]
        fault = Fault(run / "checkpoints", at, error, is_lasting)
        outcome = train(run.parent, command, 1, fault)
        where = f"{recipe}, operation {at}, {os.strerror(error)}, lasting {is_lasting}"
        row.tried += 1
        row.counts["that last"] += is_lasting
        row.counts["named in the output"] += os.strerror(error) in outcome.output
        row.counts["that end the run"] += outcome.code != 0
        if not outcome.is_orderly:
            row.fail(f"{where}: {outcome.code}\n{outcome.output[-2000:]}")
        again = train(run.parent, command, 1) if outcome.code else outcome
        reference = attack.reference(recipe, "--num-workers", "0")
        found = [] if again.code else kills.list_differences(reference.run, run)
        if again.code or found:
            row.fail(f"{where}, resumed: {again.output[-1500:]}{found}")
        print_progress(row, where)
    row.counts["operations not reached"] = max(0, len(planned) - row.tried)
    return row


def operations_of_last_save(reference: Reference) -> range:
    """Return the numbers of the operations of the last save among those in checkpoints/."""
    folder = str(reference.run / "checkpoints")
    saving = [path for path in reference.operations if path.startswith(folder)]
    last = kills.list_checkpoints(reference.run)[-1]
    first = next(number for number, path in enumerate(saving, start=1) if f"-{last}" in path)
    return range(first, len(saving) + 1)


# ---- signals


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
        row.cpu_seconds += sum(one.cpu_seconds for one in outcomes)
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


# ---- endurance


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
