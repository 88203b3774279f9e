"""A server of `tessera view` in this process, requests to it, and tiny runs of every recipe."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import uvicorn

from tessera.recipes.registry import get_recipe
from tessera.view.main import bind
from tessera.view.server import View, build_app

SECONDS = 600


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> str:
        return self.json["error"]


@dataclass(frozen=True)
class Served:
    port: int
    view: View

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        """Send one request as it is: no part of the path is normalized."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.putrequest(method, path, skip_host="host" in given)
        if body is not None and "transfer-encoding" not in given:
            given["content-length"] = str(len(body))
        for name, value in given.items():
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        answer = Answer(
            response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
        )
        connection.close()
        return answer

    def get(self, path: str, **headers: str) -> Answer:
        return self.request("GET", path, **headers)

    def upload(self, run: str, field: str, name: str, data: bytes) -> Answer:
        path = f"/api/upload?run={quote(run)}&field={field}&name={quote(name)}"
        return self.request("POST", path, data)

    def start(self, run: str, command: str, /, **values: Any) -> Answer:
        body = json.dumps({"command": command, "values": values}).encode()
        path = f"/api/jobs?run={quote(run)}"
        return self.request("POST", path, body, content_type="application/json")

    def follow(self, job: str) -> Iterator[dict[str, Any]]:
        """Yield the states of a job until it is finished."""
        run = quote(self.view.queue.jobs[job].run)
        for _, state in self.stream(f"/api/jobs/events?run={run}"):
            if state["id"] == job:
                yield state
                if state["is_finished"]:
                    return

    def stream(self, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the names and the data of server-sent events."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        connection.request("GET", path)
        name = ""
        try:
            with connection.getresponse() as response:
                for line in response:
                    if line.startswith(b"event: "):
                        name = line[7:].decode().strip()
                    elif line.startswith(b"data: "):
                        yield name, json.loads(line[6:])
        finally:
            connection.close()

    def finish(self, job: str) -> dict[str, Any]:
        return list(self.follow(job))[-1]

    def cancel(self, job: str) -> dict[str, Any]:
        return self.request("DELETE", f"/api/jobs/{job}").json

    def list_jobs(self, run: str, *ids: str) -> list[dict[str, Any]]:
        jobs = self.get(f"/api/jobs?run={quote(run)}").json["jobs"]
        return [job for job in jobs if job["id"] in ids]

    def run_job(self, run: str, command: str, /, **values: Any) -> dict[str, Any]:
        answer = self.start(run, command, **values)
        assert answer.status == 200, answer.body
        return self.finish(answer.json["id"])


@contextmanager
def serve(*folders: Path, host: str = "127.0.0.1", **options: Any) -> Iterator[Served]:
    """Serve folders on a free port of this machine until the context ends."""
    app = build_app(list(folders), host=host, **options)
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=[[listener]], daemon=True)
    thread.start()
    try:
        yield Served(listener.getsockname()[1], app.state.view)
    finally:
        app.state.view.events.end()
        server.should_exit = True
        thread.join(SECONDS)
        listener.close()


DEPENDENCIES = {
    "images-maskgit": {"tokenizer": "images-vqgan"},
    "images-maskgit-superres": {"tokenizer": "vqgan-32", "low_res_tokenizer": "images-vqgan"},
    "videos-maskgit": {"tokenizer": "videos-magvit2"},
    "audio-soundstorm": {"tokenizer": "audio-codec", "semantic": "audio-semantic"},
    "audio-text2semantic": {"tokenizer": "semantic-ctc"},
    "meshes-transformer": {"tokenizer": "meshes-autoencoder"},
}
"""Recipe -> the runs that it depends on, in the same folder."""
VARIANTS = {"vqgan-32": "images-vqgan", "semantic-ctc": "audio-semantic"}
"""Runs that are only dependencies, with their recipes."""
CHOICES = {"semantic-ctc": {"features": "ctc"}, "audio-text2semantic": {"soundstorm": "none"}}
"""Arguments of recipes."""


def train_tiny(folder: Path, name: str, **engine: Any) -> Path:
    """Train a few steps of a recipe, and of what it depends on, in a folder of runs."""
    from tests.runs import train  # imports torch, which bench/screenshots.py does not need

    if (folder / name).exists():
        return folder / name
    recipe = VARIANTS.get(name, name)
    needed = DEPENDENCIES.get(name, {})
    for other in needed.values():
        train_tiny(folder, other)
    choices = CHOICES.get(name, {}) | {key: str(folder / one) for key, one in needed.items()}
    run = get_recipe(recipe)("tiny", **choices)
    settings = {"steps": 4, "log_every": 1, "validate_every": 2, "sample_every": 2}
    settings |= {"sample_count": 2, "checkpoint_every": 4} | engine
    run = replace(run, engine=replace(run.engine, **settings))
    if name == "vqgan-32":
        run = replace(run, data=replace(run.data, size=32))
    train(folder / name, run)
    return folder / name
