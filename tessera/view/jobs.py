"""The jobs of the playground: a queue, and one worker process that is started when it is needed.

One job runs at a time. The worker is ended when it was unused for some time, which frees its
memory, and a job that ends it does no harm to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tessera.run.directory import Json
from tessera.view.calls import Call
from tessera.view.samples import REQUEST_FILE

JobState = Literal["queued", "loading", "running", "done", "failed", "cancelled"]

MAX_QUEUED = 16
MAX_FINISHED = 100
"""Finished jobs that are remembered; their files stay in the run directory."""
CANCEL_SECONDS = 10
"""After this time a worker that does not react to a cancellation is killed."""
LINE_LIMIT = 1 << 26
"""The longest event: a preview of 64 large samples."""
WORKER_MODULE = "tessera.view.worker"
"""What the worker process runs."""


@dataclass
class Job:
    id: str
    run: str
    call: Call
    out: Path
    uploads: list[Json]
    values: Json
    """What was filled in, to fill the form again."""
    state: JobState = "queued"
    step: int = 0
    steps: int = 0
    preview: str | None = None
    message: str = ""
    is_cancelling: bool = False
    """The cancellation was requested, and the job has not ended yet."""
    notices: list[str] = field(default_factory=list)
    created: float = field(default_factory=time.time)
    version: int = 0
    """The number of changes so far."""
    notify: Callable[[], None] = lambda: None
    """Called after each change."""

    @property
    def is_finished(self) -> bool:
        return self.state in ("done", "failed", "cancelled")

    def as_json(self) -> Json:
        names = "id run state is_finished step steps preview message notices created values"
        return {name: getattr(self, name) for name in names.split()} | {
            "command": self.call.command,
            "folder": self.out.name,
            "shell": self.call.as_shell(),
            "python": self.call.as_python(),
        }

    def update(self, **values: object) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        self.version += 1
        self.notify()


class QueueFull(Exception):
    """Too many jobs are waiting."""


class JobQueue:
    def __init__(self, idle_seconds: float = 300.0):
        self.idle_seconds = idle_seconds
        self.jobs: dict[str, Job] = {}
        self.changed = asyncio.Event()
        """Set at the next change of any job; every change makes a new event."""
        self._waiting: asyncio.Queue[Job] = asyncio.Queue()
        self._worker: asyncio.subprocess.Process | None = None
        self._current: Job | None = None
        self._numbers = itertools.count(1)
        self._task: asyncio.Task[None] | None = None

    # ---- for the server

    def start(self) -> None:
        self._task = asyncio.create_task(self._run_jobs())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._end_worker()

    def new_id(self) -> str:
        return f"{next(self._numbers)}"

    def check_room(self) -> None:
        """Raise QueueFull if no further job is accepted."""
        if self._waiting.qsize() >= MAX_QUEUED:
            raise QueueFull(f"{MAX_QUEUED} jobs are waiting already: wait for some of them.")

    def add(self, job: Job) -> None:
        finished = [one for one in self.jobs.values() if one.is_finished]
        for old in finished[: max(0, len(finished) - MAX_FINISHED)]:
            del self.jobs[old.id]
        self.jobs[job.id] = job
        job.notify = self.notify
        self._waiting.put_nowait(job)
        self.notify()

    def notify(self) -> None:
        """Wake those that wait for a change of a job."""
        self.changed.set()
        self.changed = asyncio.Event()

    def position(self, job: Job) -> int:
        """Return the number of jobs that run or wait before this one."""
        pending = [one.id for one in self.jobs.values() if not one.is_finished]
        return pending.index(job.id) if job.id in pending else 0

    async def cancel(self, job: Job) -> None:
        if job.is_finished:
            return
        if job is not self._current:
            job.update(state="cancelled")
            self._clean_up(job)
            return
        job.is_cancelling = True  # also while the worker is being started
        worker = self._worker
        if worker is not None and worker.stdin is not None:
            with contextlib.suppress(OSError):
                worker.stdin.write(json.dumps({"cancel": job.id}).encode() + b"\n")
            asyncio.get_running_loop().call_later(CANCEL_SECONDS, self._kill_if_stuck, job, worker)

    @property
    def worker_pid(self) -> int | None:
        return self._worker.pid if self._worker is not None else None

    # ---- the worker

    def _kill_if_stuck(self, job: Job, worker: asyncio.subprocess.Process) -> None:
        if job is self._current and not job.is_finished and worker.returncode is None:
            job.update(state="cancelled")
            worker.kill()

    async def _run_jobs(self) -> None:
        while True:
            try:
                job = await asyncio.wait_for(self._waiting.get(), self.idle_seconds)
            except TimeoutError:
                await self._end_worker()
                continue
            if job.is_finished:  # cancelled while it waited
                continue
            self._current = job
            try:
                await self._run(job)
            except (OSError, ValueError, asyncio.LimitOverrunError) as error:
                job.update(state="failed", message=f"The worker process failed ({error}).")
                await self._end_worker()
            finally:
                self._current = None
                self._clean_up(job)

    async def _run(self, job: Job) -> None:
        worker = await self._get_worker()
        assert worker.stdin is not None and worker.stdout is not None
        if job.is_cancelling:
            job.update(state="cancelled")
            return
        request = {
            "job": job.id,
            "command": job.call.command,
            "positional": list(job.call.positional),
            "options": dict(job.call.options),
            "kind": job.call.kind,
            "out": str(job.out),
            "uploads": job.uploads,
        }
        worker.stdin.write(json.dumps(request).encode() + b"\n")
        job.update(state="loading")
        while not job.is_finished:
            line = await worker.stdout.readline()
            if not line:
                await worker.wait()
                self._worker = None
                if not job.is_finished:
                    job.update(
                        state="failed",
                        message=f"The worker process ended (exit code {worker.returncode}), for "
                        "example because memory ran out. The next job starts a new one.",
                    )
                return
            event = json.loads(line)
            if event["job"] == job.id:
                self._apply(job, event)

    def _apply(self, job: Job, event: Json) -> None:
        match event["event"]:
            case "loading":
                job.update(state="loading")
            case "progress":
                preview = event["preview"] or job.preview
                progress = {"step": event["step"], "steps": event["steps"], "preview": preview}
                job.update(state="running", **progress)
            case "done":
                self._note_request(job)
                job.update(state="done", preview=None, notices=event["notices"])
            case "cancelled":
                job.update(state="cancelled", preview=None)
            case "failed":
                job.update(state="failed", preview=None, message=event["message"])

    def _note_request(self, job: Job) -> None:
        """Write how the samples were made beside them; a read-only folder has none."""
        content = job.as_json()
        kept = {name: content[name] for name in "command values shell python created".split()}
        with contextlib.suppress(OSError):
            text = json.dumps(kept, indent=1) + "\n"
            (job.out / REQUEST_FILE).write_text(text, encoding="utf-8")

    def _clean_up(self, job: Job) -> None:
        """Remove the folder of a job that left nothing complete."""
        if job.state != "done" and not (job.out / "settings.json").exists():
            shutil.rmtree(job.out, ignore_errors=True)

    async def _get_worker(self) -> asyncio.subprocess.Process:
        if self._worker is None or self._worker.returncode is not None:
            self._worker = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                WORKER_MODULE,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=LINE_LIMIT,
            )
        return self._worker

    async def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None and worker.returncode is None:
            worker.kill()
            await worker.wait()
