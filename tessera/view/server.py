"""The server: routes of the page, its data, live events, files, uploads and jobs.

Functions that read files run in threads, so that a slow disk does not block other requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tessera import __version__
from tessera.run.directory import Json, next_free_folder
from tessera.run.errors import UserError
from tessera.view import samples, uploads
from tessera.view.forms import Call, Field, forms_of, parse_value
from tessera.view.jobs import Job, JobQueue, QueueFull
from tessera.view.metrics import read_appended
from tessera.view.runs import FoundRun, RunLibrary, describe_run
from tessera.view.safety import Guard

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
POLL_SECONDS = 0.5
TABLE_SECONDS = 2.0
PING_SECONDS = 15.0
"""How often files are looked at, and how often a quiet connection is kept alive."""
EVENT_SECONDS = 0.05
"""The shortest time between two events of a job."""
MAX_BODY = 1_000_000
INPUTS = "inputs"
"""The folder of uploads among the samples of a run."""


class View:
    """The state of the server."""

    def __init__(self, library: RunLibrary, idle_seconds: float = 300.0):
        self.library = library
        self.queue = JobQueue(idle_seconds)
        self.temporary = Path(tempfile.mkdtemp(prefix="tessera-view-"))
        """Uploads and samples of runs whose folders cannot be written."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = asyncio.Event()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue.start()

    def end_streams(self) -> None:
        """End all streams of events, which otherwise last as long as the page is open.

        It may be called from a signal handler or another thread.
        """
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._ending.set)

    async def pause(self, seconds: float) -> bool:
        """Wait, and return whether the streams go on."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
        return not self._ending.is_set()

    def close(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)

    # ---- runs

    def get_run(self, request: Request) -> FoundRun:
        run_id = request.query_params.get("run", "")
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

        def read() -> Json:
            run.metrics.update()
            return run.metrics.as_json(POINTS)

        return json_response(await run_in_threadpool(read))

    async def show_samples(self, request: Request) -> Response:
        run = self.get_readable(request)
        return json_response({"steps": await run_in_threadpool(samples.list_steps, run)})

    async def show_history(self, request: Request) -> Response:
        run = self.get_readable(request)
        return json_response({"history": await run_in_threadpool(samples.list_history, run)})

    async def send_file(self, request: Request) -> Response:
        """Send one file of a folder of samples."""
        run = self.get_readable(request)
        folder = request.query_params.get("folder", "")
        name = request.query_params.get("name", "")
        path = await run_in_threadpool(self.find_file, run, folder, name)
        if path.suffix not in samples.MEDIA_TYPES:
            raise HTTPException(404, "There is no such file.")
        headers = {"cache-control": "private, max-age=3600"}
        return FileResponse(path, media_type=samples.MEDIA_TYPES[path.suffix], headers=headers)

    def find_file(self, run: FoundRun, folder: str, name: str) -> Path:
        """Return the path of a file of samples; it cannot be outside of the given folders."""
        is_plain = all(
            part and part not in (".", "..") and not {"/", "\\", "\0"} & set(part)
            for part in (folder, name)
        )
        if not is_plain:
            raise HTTPException(404, "There is no such file.")
        for base in (run.directory.samples, self.scratch(run)):
            path = base / folder / name
            is_inside = self.library.contains(path) or path.resolve().is_relative_to(
                self.temporary.resolve()
            )
            if is_inside and path.is_file():
                return path
        raise HTTPException(404, "There is no such file.")

    def scratch(self, run: FoundRun) -> Path:
        """Return a folder outside of the run, for one that cannot be written."""
        return self.temporary / run.id.replace("/", "_")

    # ---- events

    async def follow_runs(self, request: Request) -> Response:
        """Send rows of the table when they change."""

        async def events() -> AsyncIterator[bytes]:
            known: dict[str, str] = {}
            while not await request.is_disconnected():
                rows = await run_in_threadpool(self.library.summaries)
                texts = {row.id: json.dumps(row.as_json()) for row in rows}
                changed = [text for name, text in texts.items() if known.get(name) != text]
                gone = [name for name in known if name not in texts]
                if known and (changed or gone):
                    content = f'{{"changed": [{", ".join(changed)}], "gone": {json.dumps(gone)}}}'
                    yield format_event("runs", content)
                else:
                    yield b": \n\n"
                known = texts
                if not await self.pause(TABLE_SECONDS):
                    return

        return event_stream(events())

    async def follow_run(self, request: Request) -> Response:
        """Send the records of one run as they are logged."""
        run = self.get_readable(request)
        start = request.headers.get("last-event-id") or request.query_params.get("cursor", "")

        async def events() -> AsyncIterator[bytes]:
            cursor, quiet, unchecked = start, 0.0, 0.0
            shown = await run_in_threadpool(self.describe_progress, run)
            while not await request.is_disconnected():
                found = await run_in_threadpool(read_appended, run.directory.metrics, cursor)
                cursor = found.cursor
                if found.is_new_file:
                    yield format_event("reset", "{}", cursor)
                elif found.records:
                    yield format_event("records", json.dumps(found.records), cursor)
                # Most polls look at the size of one file only.
                if found.records or unchecked >= TABLE_SECONDS:
                    unchecked = 0.0
                    progress = await run_in_threadpool(self.describe_progress, run)
                    if progress != shown:
                        shown, quiet = progress, 0.0
                        yield format_event("state", json.dumps(progress))
                unchecked += POLL_SECONDS
                quiet += POLL_SECONDS
                if quiet >= PING_SECONDS:
                    quiet = 0.0
                    yield b": \n\n"
                if not await self.pause(POLL_SECONDS):
                    return

        return event_stream(events())

    def describe_progress(self, run: FoundRun) -> Json:
        """Return what changes while a run trains."""
        summary = run.summarize()
        folders = [one.name for one in samples.list_folders(run.directory.samples)]
        return {
            "state": summary.state,
            "reason": summary.reason,
            "step": summary.step,
            "steps_per_second": summary.steps_per_second,
            "seconds_left": summary.seconds_left,
            "alarm": summary.alarm,
            "samples": [name for name in folders if name.isdigit()],
        }

    # ---- playground

    async def show_forms(self, request: Request) -> Response:
        run = self.get_readable(request)
        forms = await run_in_threadpool(forms_of, run, self.library)
        is_kept = await run_in_threadpool(can_write, run.directory.samples)
        content = {
            "forms": [form.as_json() for form in forms],
            "indexes": await run_in_threadpool(self.library.indexes),
            "can_sample": run.has_checkpoint(),
            "is_kept": is_kept,
        }
        return json_response(content)

    async def upload(self, request: Request) -> Response:
        """Store a file for a field of a form; the body is the file."""
        run = self.get_readable(request)
        field = await self.find_field(request, run)
        suffix = uploads.check_suffix(request.query_params.get("name", ""), field.suffixes)
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > uploads.MAX_BYTES:
            raise HTTPException(
                413, f"The file has more than {uploads.MAX_BYTES / 1e6:,.0f} MB, the limit here."
            )
        folder = await run_in_threadpool(self.writable_folder, run)
        path = await uploads.receive(request.stream(), folder / INPUTS, suffix)
        return json_response({"upload": path.name})

    async def find_field(self, request: Request, run: FoundRun) -> Field:
        forms = await run_in_threadpool(forms_of, run, self.library)
        name = request.query_params.get("field", "")
        for form in forms:
            for field in form.fields:
                if field.name == name and field.input == "file":
                    return field
        raise UserError(f"This run has no field {name!r} for a file.")

    def writable_folder(self, run: FoundRun) -> Path:
        """Return the folder for uploads and samples: that of the run, if it can be written."""
        return run.directory.samples if can_write(run.directory.samples) else self.scratch(run)

    async def start_job(self, request: Request) -> Response:
        run = self.get_readable(request)
        body = await read_body(request)
        try:
            job = await run_in_threadpool(self.build_job, run, body)
            self.queue.add(job)
        except QueueFull as error:
            raise HTTPException(429, str(error)) from None
        return json_response(await self.describe_job(job))

    def build_job(self, run: FoundRun, body: Json) -> Job:
        """Turn the values of a form into a call of its command."""
        if not run.has_checkpoint():
            raise UserError("This run has no complete checkpoint yet.")
        forms = {form.command: form for form in forms_of(run, self.library)}
        command, values = body.get("command"), body.get("values")
        if command not in forms or not isinstance(values, dict):
            raise UserError("The request names no form of this run.")
        form, files, options = forms[command], [], {}
        for name, value in values.items():
            field = form.field(name)
            if value is None or value == "" or value == []:
                continue
            if field.input == "file":
                path = self.find_input(run, value)
                files.append({"path": str(path), "modality": field.modality})
                options[name] = str(path)
            else:
                options[name] = parse_value(field, value)
        # A field that was left empty takes the form's default, which may not be the command's.
        for name in ("count", "seed", "top"):
            if name not in options and name in {field.name for field in form.fields}:
                options[name] = form.field(name).default
        positional = self.positional_arguments(run, form.command, options)
        out = self.new_folder(run, form.command)
        shown_out = shown_path(out) if command == "index" else None
        call = Call(form.command, positional, options, run.read_info().kind, shown_out)
        return Job(self.queue.new_id(), run.id, call, out, files, values)

    def positional_arguments(
        self, run: FoundRun, command: str, options: dict[str, Any]
    ) -> tuple[str, ...]:
        """Take the arguments without a flag out of the options."""
        if command == "search":
            recording = options.pop("query_file", None)
            query = options.pop("query", None)
            if (recording is None) == (query is None):
                raise UserError("Give either a text or a recording to search for.")
            if "index" not in options:
                raise UserError("Choose an index, or build one first.")
            return options.pop("index"), recording or query
        base, superres = options.pop("run", None), options.pop("superres", None)
        if base is not None:
            return shown_path(self.library.get(base).path), shown_path(run.path)
        if superres is not None:
            return shown_path(run.path), shown_path(self.library.get(superres).path)
        return (shown_path(run.path),)

    def find_input(self, run: FoundRun, value: Any) -> Path:
        """Return the path of an upload, or of a sample to start from."""
        if not isinstance(value, dict):
            raise UserError("A file must be uploaded first.")
        if isinstance(value.get("upload"), str):
            return self.find_file(run, INPUTS, value["upload"])
        folder, name = value.get("folder"), value.get("name")
        if isinstance(folder, str) and isinstance(name, str):
            return self.find_file(run, folder, name)
        raise UserError("A file must be uploaded first.")

    def new_folder(self, run: FoundRun, command: str) -> Path:
        """Create the folder of a job, so that no other job takes its name."""
        is_kept = can_write(run.directory.samples)
        base = run.directory.samples if is_kept else self.scratch(run)
        if command == "index":
            base, name = (run.directory.cache if is_kept else base), "index"
        else:
            name = "by-hand"
        base.mkdir(parents=True, exist_ok=True)
        while True:  # another request may take the same name meanwhile
            folder = next_free_folder(base, name)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder

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

    async def follow_job(self, request: Request) -> Response:
        """Send the state of a job until it is finished."""
        job = self.get_job(request)

        async def events() -> AsyncIterator[bytes]:
            while not await request.is_disconnected():
                changed = job.changed
                content = await self.describe_job(job)
                yield format_event("job", json.dumps(content))
                if content["is_finished"] or not await self.pause(EVENT_SECONDS):
                    return
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), TABLE_SECONDS)

        return event_stream(events())


# ---- responses


def json_response(content: Json) -> JSONResponse:
    return JSONResponse(content, headers={"cache-control": "no-store"})


def event_stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def format_event(name: str, data: str, event_id: str = "") -> bytes:
    prefix = f"id: {event_id}\n" if event_id else ""
    return f"{prefix}event: {name}\ndata: {data}\n\n".encode()


async def read_body(request: Request) -> Json:
    """Return the JSON object of a request of limited size."""
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise HTTPException(415, "The body must be JSON.")
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MAX_BODY:
            raise HTTPException(413, f"The body has more than {MAX_BODY:,} bytes.")
    try:
        content = json.loads(data)
    except ValueError:
        raise HTTPException(400, "The body is not valid JSON.") from None
    if not isinstance(content, dict):
        raise HTTPException(400, "The body must be a JSON object.")
    return content


def can_write(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK)


def shown_path(path: Path) -> str:
    """Return a path relative to the working directory if it is below it, for commands to copy."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


async def send_index(request: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})


async def send_static(request: Request) -> Response:
    path = STATIC / request.path_params["path"]
    is_inside = path.resolve().is_relative_to(STATIC)
    if not is_inside or not path.is_file() or path.suffix not in STATIC_TYPES:
        raise HTTPException(404, "There is no such file.")
    headers = {"cache-control": "no-cache"}
    return FileResponse(path, media_type=STATIC_TYPES[path.suffix], headers=headers)


async def explain_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, error.status_code)


async def explain_invalid(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, 400)


async def explain_unreadable(request: Request, error: Exception) -> Response:
    """Answer when a file of a run cannot be read, or the disk is full."""
    assert isinstance(error, OSError)
    reason = error.strerror or error
    return JSONResponse({"error": f"A file cannot be used ({reason})."}, 500)


def build_app(
    folders: list[Path],
    *,
    host: str = "127.0.0.1",
    token: str | None = None,
    idle_seconds: float = 300.0,
) -> Starlette:
    """Return the application for the runs below some folders."""
    view = View(RunLibrary(folders), idle_seconds)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        view.start()
        try:
            yield
        finally:
            await view.queue.stop()
            view.close()

    gets: dict[str, Callable[[Request], Any]] = {
        "/": send_index,
        "/static/{path:path}": send_static,
        "/api/runs": view.list_runs,
        "/api/runs/events": view.follow_runs,
        "/api/run": view.show_run,
        "/api/run/events": view.follow_run,
        "/api/metrics": view.show_metrics,
        "/api/samples": view.show_samples,
        "/api/history": view.show_history,
        "/api/file": view.send_file,
        "/api/forms": view.show_forms,
        "/api/jobs": view.list_jobs,
        "/api/jobs/{job}/events": view.follow_job,
    }
    posts = {"/api/upload": view.upload, "/api/jobs": view.start_job}
    routes = [
        *(Route(path, function, methods=["GET"]) for path, function in gets.items()),
        *(Route(path, function, methods=["POST"]) for path, function in posts.items()),
        Route("/api/jobs/{job}", view.cancel_job, methods=["DELETE"]),
    ]
    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        middleware=[Middleware(Guard, host=host, token=token)],
        exception_handlers={
            HTTPException: explain_http,
            UserError: explain_invalid,
            OSError: explain_unreadable,
        },
    )
    app.state.view = view
    return app
