"""The server: routes of the page, its data, live events, files, uploads and jobs.

Functions that read files run in threads, so that a slow disk does not block other requests.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from tessera import __version__
from tessera.run.directory import Json
from tessera.view import samples, uploads
from tessera.view.events import EventStreams
from tessera.view.jobs import Job, JobQueue, QueueFull
from tessera.view.library import RunLibrary
from tessera.view.playground import Playground
from tessera.view.responses import ERROR_HANDLERS, event_stream, json_response, read_body
from tessera.view.runs import FoundRun, describe_run
from tessera.view.safety import Guard
from tessera.view.storage import INPUTS, Storage, shown_path

STATIC = Path(__file__).with_name("static")
STATIC_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".md": "text/plain; charset=utf-8",
}
POINTS = 1000
"""The number of points of a curve; a screen has hardly more columns."""


class View:
    """The state of the server, and its responses."""

    def __init__(self, library: RunLibrary, idle_seconds: float = 300.0):
        self.library = library
        self.queue = JobQueue(idle_seconds)
        self.storage = Storage(library)
        self.playground = Playground(library, self.storage)
        self.events = EventStreams(library, self.queue)

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.events.start()
        self.queue.start()
        try:
            yield
        finally:
            await self.queue.stop()
            self.storage.close()

    # ---- runs

    def get_run(self, request: Request) -> FoundRun:
        return self.find_run(request.query_params.get("run", ""))

    def find_run(self, run_id: str) -> FoundRun:
        try:
            return self.library.get(run_id)
        except KeyError:
            raise HTTPException(404, f"There is no run {run_id!r}.") from None

    def get_readable(self, request: Request) -> FoundRun:
        run = self.get_run(request)
        run.read_info()
        return run

    async def list_runs(self, request: Request) -> Response:
        rows = await run_in_threadpool(self.library.summaries)
        folders = [shown_path(folder) for folder in self.library.folders]
        content = {"version": __version__, "folders": folders, "runs": [r.as_json() for r in rows]}
        return json_response(content)

    async def show_run(self, request: Request) -> Response:
        run = self.get_run(request)
        content = await run_in_threadpool(describe_run, run)
        content["summary"]["depends_on"] = await run_in_threadpool(self.find_links, run)
        return json_response(content)

    def find_links(self, run: FoundRun) -> dict[str, str]:
        rows = {row.id: row for row in self.library.summaries()}
        return rows[run.id].depends_on if run.id in rows else {}

    async def show_metrics(self, request: Request) -> Response:
        run = self.get_readable(request)
        return json_response(await run_in_threadpool(run.metrics.read, POINTS))

    async def show_samples(self, request: Request) -> Response:
        run = self.get_readable(request)
        return json_response({"steps": await run_in_threadpool(samples.list_steps, run)})

    async def show_histograms(self, request: Request) -> Response:
        run = self.get_readable(request)
        found = await run_in_threadpool(run.metrics.read_histograms)
        return json_response({"validations": found})

    async def show_history(self, request: Request) -> Response:
        run = self.get_readable(request)
        return json_response({"history": await run_in_threadpool(samples.list_history, run)})

    async def send_file(self, request: Request) -> Response:
        """Send one file of a folder of samples."""
        run = self.get_readable(request)
        folder = request.query_params.get("folder", "")
        name = request.query_params.get("name", "")
        path = await run_in_threadpool(self.storage.find, run, folder, name)
        if path is None or path.suffix not in samples.MEDIA_TYPES:
            raise HTTPException(404, "There is no such file.")
        headers = {"cache-control": "private, max-age=3600"}
        return FileResponse(path, media_type=samples.MEDIA_TYPES[path.suffix], headers=headers)

    # ---- events

    async def follow_table(self, request: Request) -> Response:
        return event_stream(self.events.follow_table(request))

    async def follow_runs(self, request: Request) -> Response:
        runs = [self.find_run(run_id) for run_id in request.query_params.getlist("run")]
        for run in runs:
            run.read_info()
        given = request.headers.get("last-event-id") or request.query_params.get("cursors", "")
        cursors = given.split(",") if given else []
        return event_stream(self.events.follow_runs(request, runs, cursors))

    async def follow_jobs(self, request: Request) -> Response:
        run = self.get_run(request)
        return event_stream(self.events.follow_jobs(request, run.id, self.describe_job))

    # ---- playground

    async def show_forms(self, request: Request) -> Response:
        run = self.get_readable(request)
        return json_response(await run_in_threadpool(self.playground.describe_forms, run))

    async def upload(self, request: Request) -> Response:
        """Store a file for a field of a form; the body is the file."""
        run = self.get_readable(request)
        name = request.query_params.get("field", "")
        field = await run_in_threadpool(self.playground.find_file_field, run, name)
        suffix = uploads.check_suffix(request.query_params.get("name", ""), field.suffixes)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > uploads.MAX_BYTES:
            raise HTTPException(
                413, f"The file has more than {uploads.MAX_BYTES / 1e6:,.0f} MB, the limit here."
            )
        folder = await run_in_threadpool(self.storage.folder_of, run)
        path = await uploads.receive(request.stream(), folder / INPUTS, suffix)
        return json_response({"upload": path.name})

    async def start_job(self, request: Request) -> Response:
        run = self.get_readable(request)
        body = await read_body(request)
        try:
            self.queue.check_room()
        except QueueFull as error:
            raise HTTPException(429, str(error)) from None
        job_id = self.queue.new_id()
        job = await run_in_threadpool(self.playground.build_job, run, body, job_id)
        self.queue.add(job)
        return json_response(await self.describe_job(job))

    def get_job(self, request: Request) -> Job:
        job = self.queue.jobs.get(request.path_params["job"])
        if job is None:
            raise HTTPException(404, "There is no such job.")
        return job

    async def describe_job(self, job: Job) -> Json:
        """Return one state of a job, which may change while its files are read."""
        content = job.as_json() | {"position": self.queue.position(job)}
        if content["state"] == "done":
            run = self.library.get(job.run)
            content["result"] = await run_in_threadpool(samples.describe_folder, run, job.out)
        return content

    async def list_jobs(self, request: Request) -> Response:
        run = self.get_run(request)
        jobs = [job for job in self.queue.jobs.values() if job.run == run.id]
        return json_response({"jobs": [await self.describe_job(job) for job in jobs]})

    async def cancel_job(self, request: Request) -> Response:
        job = self.get_job(request)
        await self.queue.cancel(job)
        return json_response(await self.describe_job(job))


# ---- static files


async def send_index(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})


async def send_static(request: Request) -> Response:
    path = STATIC / request.path_params["path"]
    is_inside = path.resolve().is_relative_to(STATIC)
    if not is_inside or not path.is_file() or path.suffix not in STATIC_TYPES:
        raise HTTPException(404, "There is no such file.")
    headers = {"cache-control": "no-cache"}
    return FileResponse(path, media_type=STATIC_TYPES[path.suffix], headers=headers)


# ---- the application


def build_app(
    folders: list[Path],
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    idle_seconds: float = 300.0,
) -> Starlette:
    """Return the application for the runs below some folders."""
    view = View(RunLibrary(folders), idle_seconds)
    gets: dict[str, Callable[[Request], Any]] = {
        "/": send_index,
        "/static/{path:path}": send_static,
        "/api/runs": view.list_runs,
        "/api/runs/events": view.follow_table,
        "/api/run": view.show_run,
        "/api/run/events": view.follow_runs,
        "/api/metrics": view.show_metrics,
        "/api/samples": view.show_samples,
        "/api/histograms": view.show_histograms,
        "/api/history": view.show_history,
        "/api/file": view.send_file,
        "/api/forms": view.show_forms,
        "/api/jobs": view.list_jobs,
        "/api/jobs/events": view.follow_jobs,
    }
    posts = {"/api/upload": view.upload, "/api/jobs": view.start_job}
    routes = [
        *(Route(path, function, methods=["GET"]) for path, function in gets.items()),
        *(Route(path, function, methods=["POST"]) for path, function in posts.items()),
        Route("/api/jobs/{job}", view.cancel_job, methods=["DELETE"]),
    ]
    app = Starlette(
        routes=routes,
        lifespan=view.lifespan,
        middleware=[Middleware(Guard, host=host, token=token)],
        exception_handlers=ERROR_HANDLERS,
    )
    app.state.view = view
    return app
