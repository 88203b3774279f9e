"""The time of the first page of `tessera view`, and what following a run costs.

    python bench/view.py [--runs 200] [--lines 20000]

It writes run directories with long metrics.jsonl files, starts a new server process for them, and
measures the CPU time of that server for the table of runs, the second request, the curves of one
run, and a minute of following one run. CPU time does not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST_PAGE_SECONDS = 1.0
FOLLOW_FRACTION = 0.05
"""The targets: CPU seconds of the first page, and CPU time per second of following."""
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


def follow(port: int, path: str, seconds: float) -> None:
    """Keep a stream of events open for some time, and read what arrives."""
    end = time.monotonic() + seconds
    with socket.create_connection(("127.0.0.1", port)) as connection:
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
        connection.sendall(request.encode())
        while (rest := end - time.monotonic()) > 0:
            if select.select([connection], [], [], rest)[0] and not connection.recv(1 << 16):
                raise ConnectionError("the server ended the stream")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--lines", type=int, default=20_000)
    parser.add_argument("--follow-seconds", type=float, default=60)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tessera-view-") as name:
        folder = Path(name)
        write_runs(folder, arguments.runs, arguments.lines)
        command = [sys.executable, "-m", "tessera", "view", name, "--port", "0", "--no-browser"]
        server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        port = int(server.stdout.readline().partition("127.0.0.1:")[2].partition("/")[0])

        def measure(path: str) -> tuple[float, float]:
            cpu, start = cpu_seconds(server.pid), time.monotonic()
            assert get(port, path), path
            return cpu_seconds(server.pid) - cpu, time.monotonic() - start

        try:
            get(port, "/static/app.js")
            first, second = measure("/api/runs"), measure("/api/runs")
            curves = measure("/api/metrics?run=run-000")
            before = cpu_seconds(server.pid)
            follow(port, "/api/run/events?run=run-000&cursor=", arguments.follow_seconds)
            following = (cpu_seconds(server.pid) - before) / arguments.follow_seconds
        finally:
            server.terminate()
            server.wait()
            server.stdout.close()
    print(f"{arguments.runs} runs of {arguments.lines:,} lines, CPU time of the server")
    for label, (cpu, wall) in {
        "table, first request": first,
        "table, second request": second,
        "curves of one run": curves,
    }.items():
        print(f"{label:24}{cpu:8.2f} s   ({wall:.2f} s by the clock)")
    print(f"{'following a run':24}{100 * following:8.2f} % of one core")
    reached = first[0] < FIRST_PAGE_SECONDS and following < FOLLOW_FRACTION
    print("Targets reached." if reached else "A target was missed.")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
