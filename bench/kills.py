"""Is a run that was killed and started again the run that was never killed? Bit for bit, at any
instant?

    python bench/kills.py --kills 100 [--seed 0] [--nproc 1] [--num-workers 0] [flags of `tessera train images-vqgan`]

A small run is done once in peace. Then it is done again and again while SIGKILL comes at seeded
moments, a third of them by the clock, the others aimed at one operation (bench/mortal.py): opening
the folder, training, logging, validation, sampling, and the write, rename and prune of a
checkpoint. After each kill the same command is started again, until it ends by itself; then its
folder is held against that of the peaceful run: every tensor of the model, the average, the other
networks and the optimizers, the counters, the lines of metrics.jsonl but for what the clock says,
the samples.

The run has all that could be forgotten: a discriminator, a codebook that moves by statistics and is
revived at random, augmentation, micro-batches, a moving average. Exit code 1 if anything differs,
or if a restart is refused.
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
from mortal import PHASES, RUN
from safetensors.numpy import load_file

MORTAL = Path(__file__).with_name("mortal.py")
CLOCK = {"examples_per_second", "data_wait_frac", "peak_memory_mb"}
"""What metrics.jsonl tells of the machine and not of the run."""

COMMAND = (
    "train images-vqgan --preset tiny --adversary on --quantizer vq --grad-accum-steps 2 --data.flip --data.min-scale 0.7 "
    f"--log-every 1 --validate-every 4 --sample-every 4 --sample-count 4 --checkpoint-every 2 --keep-last 1 --out {RUN}"
).split()

ALL = ["chance", *PHASES[:2], "chance", *PHASES[2:4], "chance", *PHASES[4:6], "chance", *PHASES[6:]]
"""Every phase its share, and a third by the clock."""

LONGEST_LIFE_S = 600


@dataclass(frozen=True)
class Death:
    """One kill: at the `count`-th moment of `phase`, or (phase "chance") `after_s` seconds from the
    start."""

    phase: str
    count: int = 0
    after_s: float = 0.0
    victim: int = 0
    """The rank that dies; beyond the last rank all die at once, and beyond that the launcher
    alone."""


@dataclass
class Peace:
    """What the run that nobody killed tells about a life: how long it is, and how many moments it
    has."""

    place: Path
    begins_s: float
    ends_s: float
    moments: dict[str, int]


@dataclass
class Tally:
    aimed: Counter[str] = field(default_factory=Counter)
    by_chance: Counter[str] = field(default_factory=Counter)
    victims: Counter[str] = field(default_factory=Counter)
    runs: int = 0
    restarts: int = 0
    problems: list[str] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def kills(self) -> int:
        return self.aimed.total() + self.by_chance.total()


# ---- one life


@dataclass(frozen=True)
class End:
    """How a life ended."""

    code: int
    killed: bool


@dataclass
class Lives:
    """Starts the same command, again and again, in folders of its own."""

    processes: int
    num_workers: int
    flags: list[str]

    def start(self, place: Path, death: Death | None = None) -> subprocess.Popen[bytes]:
        command = [*COMMAND, "--num-workers", str(self.num_workers)]
        if self.processes > 1:
            command += ["--nproc", str(self.processes)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if death is not None and death.phase != "chance":
            environment |= {"MORTAL_PHASE": death.phase, "MORTAL_COUNT": str(death.count)}
            environment |= {"MORTAL_RANK": str(death.victim)}
        (place / "moments.json").unlink(missing_ok=True)
        with open(place / "log.txt", "ab") as log:
            return subprocess.Popen(
                [sys.executable, str(MORTAL), *command, *self.flags],
                cwd=place,
                env=environment,
                stdout=log,
                stderr=log,
            )

    def live(self, place: Path, death: Death | None) -> End:
        """One life. Of several processes the survivors end in ways of their own, so the exit code
        alone says little."""
        engine_defaults = self.start(place, death)
        killed = False
        if (
            death is not None
            and death.phase == "chance"
            and not ends_within(engine_defaults, death.after_s)
        ):
            self.kill(engine_defaults, death.victim)
            killed = True
        if not ends_within(engine_defaults, LONGEST_LIFE_S):
            self.kill(engine_defaults, victim=self.processes)
            raise SystemExit(
                f"{place}: a life of {LONGEST_LIFE_S} s that was to end by {death} hangs; see log.txt there."
            )
        died = place / "died"
        killed |= died.exists()
        died.unlink(missing_ok=True)
        return End(engine_defaults.returncode, killed and engine_defaults.returncode != 0)

    def kill(self, engine_defaults: subprocess.Popen[bytes], victim: int) -> None:
        ranks = psutil.Process(engine_defaults.pid).children() if self.processes > 1 else []
        chosen = (
            [engine_defaults, *ranks]
            if victim == self.processes
            else ranks[victim : victim + 1] or [engine_defaults]
        )
        for process in chosen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def recipe_name(self, victim: int) -> str:
        return (
            "all"
            if victim == self.processes
            else "launcher"
            if victim > self.processes
            else f"rank {victim}"
        )


def ends_within(engine_defaults: subprocess.Popen[bytes], seconds: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        engine_defaults.wait(seconds)
    return engine_defaults.returncode is not None


def peaceful(lives: Lives, place: Path) -> Peace:
    """The run that is never killed."""
    place.mkdir()
    began = time.monotonic()
    engine_defaults = lives.start(place)
    while engine_defaults.poll() is None and not (place / RUN / "config.json").exists():
        time.sleep(0.01)
    begins = time.monotonic() - began
    if engine_defaults.wait(LONGEST_LIFE_S) != 0:
        raise SystemExit(f"The run fails without being killed:\n{(place / 'log.txt').read_text()}")
    return Peace(
        place,
        begins,
        time.monotonic() - began,
        json.loads((place / "moments.json").read_text())["seen"],
    )


# ---- many deaths


def shares(kills: int, phases: list[str], rng: random.Random) -> list[str]:
    """The phase of each kill: all phases alike, in any order."""
    coming = [phases[number % len(phases)] for number in range(kills)]
    rng.shuffle(coming)
    return coming


def drawn(phase: str, processes: int, peace: Peace, rng: random.Random) -> Death:
    """A moment of that phase. Early ones are favoured, so that one run dies often before it
    ends."""
    early = rng.random() ** 2
    if phase == "chance":
        victims = processes + 2 if processes > 1 else 1
        after = peace.begins_s + (peace.ends_s - peace.begins_s) * early
        return Death(phase, after_s=after, victim=rng.randrange(victims))
    everywhere = phase in ("training", "validation")
    return Death(
        phase,
        1 + int(early * peace.moments[phase]),
        victim=rng.randrange(processes) if everywhere else 0,
    )


def persecute(
    lives: Lives, peace: Peace, coming: list[str], rng: random.Random, work: Path
) -> Tally:
    """Runs that are killed until all kills have hit, each carried to its end and compared."""
    count_by_suffix = Tally()
    while coming and not count_by_suffix.problems:
        place = work / f"killed-{count_by_suffix.runs + 1}"
        place.mkdir()
        before = count_by_suffix.kills
        carry_to_its_end(lives, peace, place, coming, rng, count_by_suffix)
        count_by_suffix.runs += 1
        if not count_by_suffix.problems:
            count_by_suffix.problems += [
                f"{place.name}: {one}" for one in differences(peace.place / RUN, place / RUN)
            ]
            count_by_suffix.notes.update(leftovers(place / RUN))
        logs = "see below" if count_by_suffix.problems else "equal to the run that was never killed"
        print(f"{place.name}: {count_by_suffix.kills - before} kills, {logs}", flush=True)
    return count_by_suffix


def carry_to_its_end(
    lives: Lives,
    peace: Peace,
    place: Path,
    coming: list[str],
    rng: random.Random,
    count_by_suffix: Tally,
) -> None:
    """Lives of one run, each with its death, until one ends by itself; a death that missed stays
    for the next run."""
    for number in range(1000):
        death = drawn(coming[-1], lives.processes, peace, rng) if coming else None
        end = lives.live(place, death)
        count_by_suffix.restarts += number > 0
        if death is not None and end.killed:
            coming.pop()
            count(count_by_suffix, death, place, lives)
        elif end.code == 0:
            return
        else:
            log = (place / "log.txt").read_text()
            count_by_suffix.problems.append(
                f"{place.name}: life {number + 1} ended with {end.code}, {death}:\n{log[-3000:]}"
            )
            return
    raise SystemExit(f"{place} does not come to an end: it has been killed a thousand times.")


def count(count_by_suffix: Tally, death: Death, place: Path, lives: Lives) -> None:
    if death.phase != "chance":
        count_by_suffix.aimed[death.phase] += 1
    else:
        count_by_suffix.by_chance[last_phase(place)] += 1
    count_by_suffix.victims[lives.recipe_name(death.victim)] += 1


def last_phase(place: Path) -> str:
    """Where a kill by the clock landed. A life that had not come to its first moment was still
    being started."""
    diary = bytes_of(place / "moments.json")
    return json.loads(diary)["last"] if diary else "opening"


# ---- the comparison


def differences(peace: Path, killed: Path) -> list[str]:
    """Everything in which two finished run folders differ, but for what the clock says."""
    samples = {path.relative_to(run) for run in (peace, killed) for path in run.glob("samples/*/*")}
    files = [Path("config.json"), Path("README.md"), *sorted(samples)]
    found = [
        f"{file} differs" for file in files if bytes_of(peace / file) != bytes_of(killed / file)
    ]
    return [*found, *in_metrics(peace, killed), *in_checkpoints(peace, killed)]


def in_metrics(peace: Path, killed: Path) -> Iterator[str]:
    ours, theirs = timeless(peace / "metrics.jsonl"), timeless(killed / "metrics.jsonl")
    if len(ours) != len(theirs):
        yield f"metrics.jsonl has {len(theirs)} lines instead of {len(ours)}"
    for number, (a, b) in enumerate(zip(ours, theirs), start=1):
        names = [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]
        if names or list(a) != list(b):
            yield f"metrics.jsonl line {number}: {', '.join(f'{n} {a.get(n)} / {b.get(n)}' for n in sorted(names)[:4])}"


def timeless(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in CLOCK}
        for line in lines
    ]


def in_checkpoints(peace: Path, killed: Path) -> Iterator[str]:
    """The last one, and older ones if both kept them: the one that was best may be pruned a write
    sooner or later."""
    ours, theirs = steps_of(peace), steps_of(killed)
    if not ours or not theirs or ours[-1] != theirs[-1]:
        yield f"checkpoints end at {theirs[-1:]} instead of {ours[-1:]}"
    for step in sorted(set(ours) & set(theirs)):
        yield from in_checkpoint(peace / "checkpoints" / step, killed / "checkpoints" / step)


def in_checkpoint(peace: Path, killed: Path) -> Iterator[str]:
    names = [{path.name for path in folder.iterdir()} for folder in (peace, killed)]
    for name in sorted(names[0] ^ names[1]):
        yield f"checkpoint {killed.name}: {name} is in one of them only"
    for name in sorted(names[0] & names[1]):
        if bytes_of(peace / name) != bytes_of(killed / name):
            which = in_tensors(peace / name, killed / name) if name.endswith(".safetensors") else []
            yield f"checkpoint {killed.name}: {name} differs {which}"


def in_tensors(peace: Path, killed: Path) -> list[str]:
    ours, theirs = load_file(peace), load_file(killed)
    return [
        name
        for name in sorted(ours.keys() | theirs.keys())
        if not same(ours.get(name), theirs.get(name))
    ]


def same(a: np.ndarray | None, b: np.ndarray | None) -> bool:
    return a is not None and b is not None and a.tobytes() == b.tobytes()


def leftovers(run: Path) -> list[str]:
    """Half-made things that a dead life left and no later one cleared: harmless, but somebody's
    disk."""
    return [path.name.rstrip("0123456789") for path in run.rglob(".*")]


def steps_of(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.name.isdigit())


def bytes_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


# ---- what a person reads


def report(count_by_suffix: Tally) -> str:
    lines = [f"{'phase':<14}{'aimed':>8}{'by chance':>12}"]
    lines += [
        f"{phase:<14}{count_by_suffix.aimed[phase]:>8}{count_by_suffix.by_chance[phase]:>12}"
        for phase in PHASES
    ]
    lines.append(
        f"{'together':<14}{count_by_suffix.aimed.total():>8}{count_by_suffix.by_chance.total():>12}"
    )
    victims = ", ".join(
        f"{name} {number}" for name, number in sorted(count_by_suffix.victims.items())
    )
    lines.append(
        f"{count_by_suffix.kills} kills ({victims}), {count_by_suffix.restarts} restarts, {count_by_suffix.runs} runs"
    )
    if count_by_suffix.notes:
        lines.append(
            "left behind: "
            + ", ".join(f"{name} {number}" for name, number in count_by_suffix.notes.items())
        )
    well = "all equal, bit for bit, to the run that was never killed"
    return "\n".join(
        [
            *lines,
            *count_by_suffix.problems[:20],
            f"{len(count_by_suffix.problems)} problems" if count_by_suffix.problems else well,
        ]
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--phases", nargs="+", choices=["chance", *PHASES], default=ALL, help="kill only in these"
    )
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument(
        "--work", type=Path, help="an empty folder to keep the runs in; left out, they are not kept"
    )
    asked, flags = parser.parse_known_args(arguments)
    lives = Lives(asked.processes, asked.num_workers, ["--steps", str(asked.steps), *flags])
    with tempfile.TemporaryDirectory() as passing:
        work = asked.work or Path(passing)
        work.mkdir(parents=True, exist_ok=True)
        peace = peaceful(lives, work / "peaceful")
        print(
            f"{asked.steps} steps in peace: {peace.ends_s:.1f} s, {peace.begins_s:.1f} of them to start",
            flush=True,
        )
        rng = random.Random(asked.seed)
        count_by_suffix = persecute(lives, peace, shares(asked.kills, asked.phases, rng), rng, work)
    print(report(count_by_suffix))
    return 1 if count_by_suffix.problems else 0


if __name__ == "__main__":
    sys.exit(main())
