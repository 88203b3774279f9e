"""Streams of server-sent events: the table of runs, the metrics of some runs, and jobs.

Every stream begins with the present state, so that nothing is lost between the request that built
a page and its stream, or while a stream was interrupted. A page has one stream: browsers open few
connections to one server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from tessera.run.directory import Json
from tessera.view import samples
from tessera.view.jobs import Job, JobQueue
from tessera.view.library import RunLibrary
from tessera.view.metrics import read_appended
from tessera.view.responses import format_event
from tessera.view.runs import FoundRun

POLL_SECONDS = 0.5
TABLE_SECONDS = 2.0
PING_SECONDS = 15.0
"""How often files are looked at, and how often a quiet connection is kept alive."""
JOB_SECONDS = 0.05
"""The shortest time between two events of a job."""
PING = b": \n\n"


class EventStreams:
    def __init__(self, library: RunLibrary, queue: JobQueue):
        self.library, self.queue = library, queue
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def end(self) -> None:
        """End all streams, which otherwise last as long as the page is open.

        It may be called from a signal handler or another thread.
        """
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        self._ending.set()
        self.queue.notify()

    async def _pause(self, seconds: float) -> bool:
        """Wait, and return whether the streams are to be continued."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
        return not self._ending.is_set()

    async def follow_table(self, request: Request) -> AsyncIterator[bytes]:
        """Yield all rows of the table of runs, then those that changed."""
        known: dict[str, Json] | None = None
        while not await request.is_disconnected():
            summaries = await run_in_threadpool(self.library.summaries)
            rows = {row.id: row.as_json() for row in summaries}
            if known is None:
                yield format_event("all", {"runs": list(rows.values())})
            else:
                changed = [row for name, row in rows.items() if known.get(name) != row]
                gone = [name for name in known if name not in rows]
                is_quiet = not changed and not gone
                yield PING if is_quiet else format_event("runs", {"changed": changed, "gone": gone})
            known = rows
            if not await self._pause(TABLE_SECONDS):
                return

    async def follow_runs(
        self, request: Request, runs: list[FoundRun], cursors: list[str]
    ) -> AsyncIterator[bytes]:
        """Yield the states of runs, and if there are cursors the records after them.

        The stream ends when the metrics of a run were replaced: its page must read them again.
        """
        shown: dict[str, Json] = {}
        cursors, quiet, unchecked = list(cursors), 0.0, TABLE_SECONDS
        while not await request.is_disconnected():
            is_new = False
            for number, (run, cursor) in enumerate(zip(runs, cursors)):
                found = await run_in_threadpool(read_appended, run.directory.metrics, cursor)
                if found.is_new_file:
                    yield format_event("reset", {"run": run.id})
                    return
                cursors[number] = found.cursor
                if found.records:
                    is_new = True
                    content = {"run": run.id, "records": found.records}
                    yield format_event("records", content, ",".join(cursors))
            # Most polls look at the sizes of the metrics only.
            if is_new or unchecked >= TABLE_SECONDS:
                unchecked = 0.0
                for run in runs:
                    state = await run_in_threadpool(describe_progress, run)
                    if shown.get(run.id) != state:
                        shown[run.id], quiet = state, 0.0
                        yield format_event("state", {"run": run.id, **state})
            unchecked += POLL_SECONDS
            quiet += POLL_SECONDS
            if quiet >= PING_SECONDS:
                quiet = 0.0
                yield PING
            if not await self._pause(POLL_SECONDS):
                return

    async def follow_jobs(
        self, request: Request, run: str, describe: Callable[[Job], Awaitable[Json]]
    ) -> AsyncIterator[bytes]:
        """Yield the states of the jobs of a run whenever they change."""
        sent: Json = {}
        while not await request.is_disconnected():
            changed = self.queue.changed
            jobs = [job for job in self.queue.jobs.values() if job.run == run]
            for job in jobs:
                version = (job.version, self.queue.position(job))
                if sent.get(job.id) != version:
                    sent[job.id] = version
                    yield format_event("job", await describe(job))
            if not await self._pause(JOB_SECONDS):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), PING_SECONDS)
            if not changed.is_set():
                yield PING


def describe_progress(run: FoundRun) -> Json:
    """Return what changes while a run trains."""
    summary = run.summarize()
    folders = [one.name for one in samples.list_folders(run.directory.samples)]
    return {
        "state": summary.state,
        "reason": summary.reason,
        "step": summary.step,
        "value": summary.value,
        "steps_per_second": summary.steps_per_second,
        "seconds_left": summary.seconds_left,
        "alarm": summary.alarm,
        "samples": [name for name in folders if name.isdigit()],
    }
