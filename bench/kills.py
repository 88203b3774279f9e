"""Check that a run that is killed and resumed equals the run that was never killed, bit for bit.

    python bench/kills.py --kills 100 [--seed 0] [--nproc 1] [--num-workers 0] [TRAIN FLAGS]

TRAIN FLAGS are those of `tessera train images-vqgan`.

A small run is trained once without interruption: the reference. Then it is trained again, and
killed with SIGKILL at points that a seed selects: a third of them after a random time, the others
at one operation (kill_worker.py): opening the folder, training, logging, validation, sampling, and
the write, rename and prune of a checkpoint. After each kill the same command is started again,
until it finishes; then its folder is compared with that of the reference: every tensor of the
model, the EMA, the other networks and the optimizers, the counters, the lines of metrics.jsonl
except for timings, and the samples.

The run has everything that has state: a discriminator, a codebook that is updated by statistics and
whose unused codes are replaced at random, augmentation, gradient accumulation, an EMA. Exit code 1
if anything differs, or if the command fails when it is started again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from kill_worker import PHASES, RUN
from safetensors.numpy import load_file

KILL_WORKER = Path(__file__).with_name("kill_worker.py")
TIMING_KEYS = {"examples_per_second", "data_wait_frac", "peak_memory_mb"}
"""The values in metrics.jsonl that depend on the machine."""

COMMAND = (
    "train images-vqgan --preset tiny --adversary on --quantizer vq --grad-accum-steps 2 "
    "--data.flip --data.min-scale 0.7 --log-every 1 --validate-every 4 --sample-every 4 "
    f"--sample-count 4 --checkpoint-every 2 --keep-last 1 --out {RUN}"
).split()

TIMER = "timer"
"""The pseudo-phase of kills after a random time."""
DEFAULT_PHASES = [
    *(TIMER, *PHASES[:2]),
    *(TIMER, *PHASES[2:4]),
    *(TIMER, *PHASES[4:6]),
    *(TIMER, *PHASES[6:]),
]
"""Every phase once, and a third of the kills by timer."""

TIMEOUT_S = 600


@dataclass(frozen=True)
class Kill:
    """One kill: at the `count`-th kill point of `phase`, or `after_s` seconds after the start."""

    phase: str
    count: int = 0
    after_s: float = 0.0
    victim: int = 0
    """The rank that is killed; `nproc` for all processes at once, `nproc + 1` for the launcher
    only."""


@dataclass
class Reference:
    """The run that was never killed: its duration, and the number of its kill points."""

    folder: Path
    started_s: float
    """When the run's folder existed."""
    ended_s: float
    kill_points: dict[str, int]


@dataclass
class Summary:
    """What has happened so far."""

    by_phase: Counter[str] = field(default_factory=Counter)
    by_timer: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    restarts: int = 0
    problems: list[str] = field(default_factory=list)
    leftovers: Counter[str] = field(default_factory=Counter)

    @property
    def kills(self) -> int:
        return self.by_phase.total() + self.by_timer.total()


# ---- one process


@dataclass(frozen=True)
class Exit:
    """How a process ended."""

    code: int
    killed: bool


@dataclass
class Launcher:
    """Starts the same command, again and again."""

    nproc: int
    num_workers: int
    flags: list[str]

    def start(self, folder: Path, kill: Kill | None = None) -> subprocess.Popen[bytes]:
        command = [*COMMAND, "--num-workers", str(self.num_workers)]
        if self.nproc > 1:
            command += ["--nproc", str(self.nproc)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if kill is not None and kill.phase != TIMER:
            environment |= {"KILL_PHASE": kill.phase, "KILL_COUNT": str(kill.count)}
            environment |= {"KILL_RANK": str(kill.victim)}
        (folder / "kill_points.json").unlink(missing_ok=True)
        with open(folder / "log.txt", "ab") as log:
            return subprocess.Popen(
                [sys.executable, str(KILL_WORKER), *command, *self.flags],
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def run(self, folder: Path, kill: Kill | None) -> Exit:
        """Run the command until it ends or is killed.

        With several processes the exit code alone is not enough: the survivors end in other ways.
        """
        process = self.start(folder, kill)
        killed = False
        if kill is not None and kill.phase == TIMER and not ends_within(process, kill.after_s):
            self.kill(process, kill.victim)
            killed = True
        if not ends_within(process, TIMEOUT_S):
            self.kill(process, victim=self.nproc)
            raise SystemExit(
                f"{folder}: a process that should end by {kill} still runs after {TIMEOUT_S} s; "
                "its output is in log.txt there."
            )
        marker = folder / "killed"
        killed |= marker.exists()
        marker.unlink(missing_ok=True)
        return Exit(process.returncode, killed and process.returncode != 0)

    def kill(self, process: subprocess.Popen[bytes], victim: int) -> None:
        ranks = psutil.Process(process.pid).children() if self.nproc > 1 else []
        if victim == self.nproc:
            chosen = [process, *ranks]
        else:
            chosen = ranks[victim : victim + 1] or [process]
        for one in chosen:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()

    def victim_name(self, victim: int) -> str:
        if victim == self.nproc:
            return "all"
        return "launcher" if victim > self.nproc else f"rank {victim}"


def ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    return process.returncode is not None


def run_reference(launcher: Launcher, folder: Path) -> Reference:
    """Train the run that is never killed."""
    folder.mkdir()
    start = time.monotonic()
    process = launcher.start(folder)
    while process.poll() is None and not (folder / RUN / "config.json").exists():
        time.sleep(0.01)
    started_s = time.monotonic() - start
    if process.wait(TIMEOUT_S) != 0:
        raise SystemExit(f"The run fails without being killed:\n{(folder / 'log.txt').read_text()}")
    ended_s = time.monotonic() - start
    counts = json.loads((folder / "kill_points.json").read_text())["counts"]
    return Reference(folder, started_s, ended_s, counts)


# ---- many kills


def schedule_phases(kills: int, phases: list[str], rng: random.Random) -> list[str]:
    """Return the phase of each kill: all phases equally often, in random order."""
    schedule = [phases[number % len(phases)] for number in range(kills)]
    rng.shuffle(schedule)
    return schedule


def sample_kill(phase: str, nproc: int, reference: Reference, rng: random.Random) -> Kill:
    """Draw a kill of a phase; early ones are more likely, so that one run is killed many times."""
    early = rng.random() ** 2
    if phase == TIMER:
        victims = nproc + 2 if nproc > 1 else 1
        after_s = reference.started_s + (reference.ended_s - reference.started_s) * early
        return Kill(phase, after_s=after_s, victim=rng.randrange(victims))
    on_every_rank = phase in ("training", "validation")
    return Kill(
        phase,
        1 + int(early * reference.kill_points[phase]),
        victim=rng.randrange(nproc) if on_every_rank else 0,
    )


def kill_runs(
    launcher: Launcher,
    reference: Reference,
    schedule: list[str],
    rng: random.Random,
    work_dir: Path,
) -> Summary:
    """Train runs until all kills have happened; finish each run and compare it."""
    summary = Summary()
    while schedule and not summary.problems:
        folder = work_dir / f"killed-{summary.runs + 1}"
        folder.mkdir()
        before = summary.kills
        kill_until_finished(launcher, reference, folder, schedule, rng, summary)
        summary.runs += 1
        if not summary.problems:
            found = list_differences(reference.folder / RUN, folder / RUN)
            summary.problems += [f"{folder.name}: {one}" for one in found]
            summary.leftovers.update(find_leftovers(folder / RUN))
        outcome = "see below" if summary.problems else "equal to the run that was never killed"
        print(f"{folder.name}: {summary.kills - before} kills, {outcome}", flush=True)
    return summary


def kill_until_finished(
    launcher: Launcher,
    reference: Reference,
    folder: Path,
    schedule: list[str],
    rng: random.Random,
    summary: Summary,
) -> None:
    """Start one run again after each kill until it finishes; a kill that came too late stays in the
    schedule."""
    for attempt in range(1000):
        kill = sample_kill(schedule[-1], launcher.nproc, reference, rng) if schedule else None
        end = launcher.run(folder, kill)
        summary.restarts += attempt > 0
        if kill is not None and end.killed:
            schedule.pop()
            count_kill(summary, kill, folder, launcher)
        elif end.code == 0:
            return
        else:
            log = (folder / "log.txt").read_text()
            summary.problems.append(
                f"{folder.name}: attempt {attempt + 1} ended with exit code {end.code}, {kill}:\n"
                f"{log[-3000:]}"
            )
            return
    raise SystemExit(f"{folder}: the run has been killed 1,000 times and is not finished.")


def count_kill(summary: Summary, kill: Kill, folder: Path, launcher: Launcher) -> None:
    if kill.phase != TIMER:
        summary.by_phase[kill.phase] += 1
    else:
        summary.by_timer[last_phase(folder)] += 1
    summary.victims[launcher.victim_name(kill.victim)] += 1


def last_phase(folder: Path) -> str:
    """Return the phase that a killed process had reached; "opening" before the first kill point."""
    points = read_bytes(folder / "kill_points.json")
    return json.loads(points)["last"] if points else "opening"


# ---- the comparison


def list_differences(reference: Path, killed: Path) -> list[str]:
    """List everything in which two finished run folders differ, except for timings."""
    samples = {
        path.relative_to(run) for run in (reference, killed) for path in run.glob("samples/*/*")
    }
    files = [Path("config.json"), Path("README.md"), *sorted(samples)]
    found = [
        f"{file} differs"
        for file in files
        if read_bytes(reference / file) != read_bytes(killed / file)
    ]
    return [*found, *compare_metrics(reference, killed), *compare_checkpoints(reference, killed)]


def compare_metrics(reference: Path, killed: Path) -> Iterator[str]:
    expected, found = (read_metrics(run / "metrics.jsonl") for run in (reference, killed))
    if len(expected) != len(found):
        yield f"metrics.jsonl has {len(found)} lines instead of {len(expected)}"
    for number, (a, b) in enumerate(zip(expected, found), start=1):
        names = [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]
        if names or list(a) != list(b):
            values = ", ".join(
                f"{name} {a.get(name)} / {b.get(name)}" for name in sorted(names)[:4]
            )
            yield f"metrics.jsonl line {number}: {values}"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read the lines of metrics.jsonl without timings."""
    lines = path.read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMING_KEYS}
        for line in lines
    ]


def compare_checkpoints(reference: Path, killed: Path) -> Iterator[str]:
    """Compare the last checkpoint, and older ones that both folders have.

    The best checkpoint may be pruned one write earlier or later.
    """
    expected, found = list_checkpoints(reference), list_checkpoints(killed)
    if not expected or not found or expected[-1] != found[-1]:
        yield f"checkpoints end at {found[-1:]} instead of {expected[-1:]}"
    for step in sorted(set(expected) & set(found)):
        yield from compare_checkpoint(
            reference / "checkpoints" / step, killed / "checkpoints" / step
        )


def compare_checkpoint(reference: Path, killed: Path) -> Iterator[str]:
    expected, found = ({path.name for path in folder.iterdir()} for folder in (reference, killed))
    for name in sorted(expected ^ found):
        yield f"checkpoint {killed.name}: {name} is in one of them only"
    for name in sorted(expected & found):
        if read_bytes(reference / name) != read_bytes(killed / name):
            tensors = []
            if name.endswith(".safetensors"):
                tensors = differing_tensors(reference / name, killed / name)
            yield f"checkpoint {killed.name}: {name} differs {tensors}"


def differing_tensors(reference: Path, killed: Path) -> list[str]:
    expected, found = load_file(reference), load_file(killed)
    names = sorted(expected.keys() | found.keys())
    return [name for name in names if not same_bits(expected.get(name), found.get(name))]


def same_bits(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is not None and b is not None and a.tobytes() == b.tobytes()


def find_leftovers(run: Path) -> list[str]:
    """List partial files that no later start has removed: harmless, but they use disk space."""
    return [path.name.rstrip("0123456789") for path in run.rglob(".*")]


def list_checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit())


def read_bytes(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


# ---- reporting


def format_summary(summary: Summary) -> str:
    lines = [f"{'phase':<14}{'at point':>10}{'by timer':>12}"]
    lines += [
        f"{phase:<14}{summary.by_phase[phase]:>10}{summary.by_timer[phase]:>12}" for phase in PHASES
    ]
    lines.append(f"{'total':<14}{summary.by_phase.total():>10}{summary.by_timer.total():>12}")
    victims = ", ".join(f"{name} {number}" for name, number in sorted(summary.victims.items()))
    lines.append(
        f"{summary.kills} kills ({victims}), {summary.restarts} restarts, {summary.runs} runs"
    )
    if summary.leftovers:
        names = (f"{name} {number}" for name, number in summary.leftovers.items())
        lines.append(f"partial files left: {', '.join(names)}")
    if summary.problems:
        lines += [*summary.problems[:20], f"{len(summary.problems)} problems"]
    else:
        lines.append("all equal, bit for bit, to the run that was never killed")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="the number of kills")
    parser.add_argument("--seed", type=int, default=0, help="selects the kill points")
    parser.add_argument(
        "--phases",
        nargs="+",
        choices=[TIMER, *PHASES],
        default=DEFAULT_PHASES,
        help="kill only in these phases",
    )
    parser.add_argument("--nproc", type=int, default=1, help="processes of the run")
    parser.add_argument("--num-workers", type=int, default=0, help="data loading workers")
    parser.add_argument("--steps", type=int, default=36, help="training steps of the run")
    parser.add_argument(
        "--work-dir", type=Path, help="keep the runs in this empty folder (default: delete them)"
    )
    args, flags = parser.parse_known_args(arguments)
    launcher = Launcher(args.nproc, args.num_workers, ["--steps", str(args.steps), *flags])
    with tempfile.TemporaryDirectory() as temporary:
        work_dir = args.work_dir or Path(temporary)
        work_dir.mkdir(parents=True, exist_ok=True)
        reference = run_reference(launcher, work_dir / "reference")
        print(
            f"{args.steps} steps without a kill: {reference.ended_s:.1f} s, "
            f"of which {reference.started_s:.1f} s to start",
            flush=True,
        )
        rng = random.Random(args.seed)
        schedule = schedule_phases(args.kills, args.phases, rng)
        summary = kill_runs(launcher, reference, schedule, rng, work_dir)
    print(format_summary(summary))
    return 1 if summary.problems else 0


if __name__ == "__main__":
    sys.exit(main())
