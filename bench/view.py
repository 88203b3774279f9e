"""The time of the first page of `tessera view`, and what following a run costs.

    python bench/view.py [--runs 200] [--lines 20000] [--pairs 5]

It writes run directories with long metrics.jsonl files, starts a new server process for them, and
measures the CPU time of that server for the table of runs, the second request, the curves of one
run, and a minute of following one run. Then it trains the same run in pairs, once alone and once
followed by a page with its curves and one with the table, and compares the CPU time of the training
processes. CPU time depends little on what else the machine does.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST_PAGE_SECONDS = 1.0
FOLLOW_FRACTION = 0.05
"""The targets: CPU seconds of the first page, and CPU time per second of following. The CPU time of
a training that is followed must not differ more than that of equal trainings that are not."""
LOGGED = ("loss", "pixel", "perceptual", "contrast", "grad_norm", "lr")


def write_runs(folder: Path, runs: int, lines: int) -> None:
    """Write directories as training does: a line each 10 steps and a validation each 500."""
    config = {
        "recipe": "images-vqgan",
        "task": {"model": {}},
        "data": {"path": None},
        "engine": {"steps": 10 * lines, "batch_size": 16},
        "reference": "",
    }
    records = []
    for number in range(1, lines + 1):
        record = {"step": 10 * number, "kind": "train", "examples": 160 * number}
        record |= {f"model/{name}": 1 / number + i for i, name in enumerate(LOGGED)}
        records.append(record | {"skipped_steps": 0, "examples_per_second": 99.83})
        if number % 50 == 0:
            values = {f"{prefix}/psnr": number / lines for prefix in ("val", "val_ema")}
            records.append({"step": 10 * number, "kind": "validation", "examples": 100} | values)
    metrics = folder / "metrics.jsonl"
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    for number in range(runs):
        run = folder / f"run-{number:03d}"
        run.mkdir()
        (run / "config.json").write_text(json.dumps(config))
        shutil.copyfile(metrics, run / "metrics.jsonl")
    metrics.unlink()


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its threads so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def get(port: int, path: str) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", path)
    body = connection.getresponse().read()
    connection.close()
    return body


def follow(port: int, path: str, ended: threading.Event, *, repeat: bool = False) -> None:
    """Keep a stream of events open until an event is set, and read what arrives."""
    while not ended.is_set():
        with socket.create_connection(("127.0.0.1", port)) as connection:
            request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
            connection.sendall(request.encode())
            is_open = True
            while is_open and not ended.is_set():
                if select.select([connection], [], [], 0.2)[0]:
                    is_open = bool(connection.recv(1 << 16))
        if not repeat and not ended.is_set():
            raise ConnectionError("the server ended the stream")
        ended.wait(0.5)


@contextmanager
def serve(folder: Path) -> Iterator[tuple[int, int]]:
    """Start a server for a folder of runs, and yield its port and its process."""
    command = [sys.executable, "-m", "tessera", "view", str(folder), "--port", "0", "--no-browser"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        port = int(server.stdout.readline().partition("127.0.0.1:")[2].partition("/")[0])
        yield port, server.pid
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()


def train(folder: Path, steps: int) -> float:
    """Train a tiny run that logs every step, and return the CPU seconds of its process."""
    options = ["--preset", "tiny", "--steps", str(steps), "--log-every", "1", "--out", str(folder)]
    command = [sys.executable, "-m", "tessera", "train", "images-vqgan", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.returncode
    return usage.ru_utime + usage.ru_stime


def train_followed(folder: Path, steps: int) -> float:
    """Train as above while two pages follow the run."""
    run, ended = folder / "run", threading.Event()
    run.mkdir(parents=True)
    with serve(folder) as (port, _):
        # The stream of a run ends until the run has written its settings, and is opened again.
        paths = ["/api/runs/events", "/api/run/events?run=run&cursors=0:0"]
        threads = [
            threading.Thread(target=follow, args=[port, path, ended], kwargs={"repeat": True})
            for path in paths
        ]
        for thread in threads:
            thread.start()
        try:
            return train(run, steps)
        finally:
            ended.set()
            for thread in threads:
                thread.join()


def compare_trainings(pairs: int, steps: int) -> bool:
    """Train alone and followed; return whether the difference is within the spread of the first."""
    alone, followed = [], []
    for number in range(pairs):
        with tempfile.TemporaryDirectory(prefix="tessera-view-") as name:
            folder = Path(name)
            # Which one is first alternates, because the machine may become slower or faster.
            order = [False, True] if number % 2 else [True, False]
            for is_followed in order:
                if is_followed:
                    followed.append(train_followed(folder / "followed", steps))
                else:
                    alone.append(train(folder / "alone", steps))
    print(f"CPU time of {pairs} trainings of {steps} steps: median, smallest to largest")
    for label, seconds in {"alone": alone, "followed": followed}.items():
        print(f"{label:24}{describe_spread(seconds)}")
    difference = statistics.median(followed) - statistics.median(alone)
    return difference < max(alone) - min(alone)


def describe_spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):8.2f} s   ({min(seconds):.2f} to {max(seconds):.2f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--follow-seconds", type=float, default=60)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tessera-view-") as name:
        folder = Path(name)
        write_runs(folder, arguments.runs, arguments.lines)
        with serve(folder) as (port, pid):

            def measure(path: str) -> tuple[float, float]:
                cpu, start = cpu_seconds(pid), time.monotonic()
                assert get(port, path), path
                return cpu_seconds(pid) - cpu, time.monotonic() - start

            get(port, "/static/app.js")
            first, second = measure("/api/runs"), measure("/api/runs")
            curves = measure("/api/metrics?run=run-000")
            cursor = json.loads(get(port, "/api/metrics?run=run-000"))["cursor"]
            before, ended = cpu_seconds(pid), threading.Event()
            threading.Timer(arguments.follow_seconds, ended.set).start()
            follow(port, f"/api/run/events?run=run-000&cursors={cursor}", ended)
            following = (cpu_seconds(pid) - before) / arguments.follow_seconds
    print(f"{arguments.runs} runs of {arguments.lines:,} lines, CPU time of the server")
    for label, (cpu, wall) in {
        "table, first request": first,
        "table, second request": second,
        "curves of one run": curves,
    }.items():
        print(f"{label:24}{cpu:8.2f} s   ({wall:.2f} s by the clock)")
    print(f"{'following a run':24}{100 * following:8.2f} % of one core")
    is_within_spread = compare_trainings(arguments.pairs, arguments.steps)
    reached = first[0] < FIRST_PAGE_SECONDS and following < FOLLOW_FRACTION and is_within_spread
    print("Targets reached." if reached else "A target was missed.")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
