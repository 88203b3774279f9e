"""A stand-in of Hugging Face's hub on the loopback interface: repositories of files in memory.

It has the requests that huggingface_hub sends to create a repository, to upload files in a commit,
to list a repository and to download its files.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """The files of each repository."""
    requests: list[str] = field(default_factory=list)
    private: dict[str, bool] = field(default_factory=dict)

    def commit(self, name: str) -> str:
        content = json.dumps(sorted(self.repositories[name]))
        return hashlib.sha1(content.encode()).hexdigest()


class HubHandler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def answer(self, content: object, status: int = 200, **headers: str) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def parts(self) -> list[str]:
        self.hub.requests.append(f"{self.command} {self.path}")
        return [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]

    def do_GET(self) -> None:
        parts = self.parts()
        if parts[:2] == ["api", "models"]:
            name = "/".join(parts[2:4])
            if name not in self.hub.repositories:
                return self.answer(
                    {"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound"
                )
            if parts[4:5] == ["tree"]:
                return self.answer(
                    [
                        {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
                        for path, content in self.hub.repositories[name].items()
                    ]
                )
            files = [{"rfilename": one} for one in self.hub.repositories[name]]
            commit = self.hub.commit(name)
            return self.answer({"id": name, "sha": commit, "siblings": files, "tags": []})
        return self.send_file(parts)

    def do_HEAD(self) -> None:
        self.send_file(self.parts())

    def send_file(self, parts: list[str]) -> None:
        name, path = "/".join(parts[:2]), "/".join(parts[4:])
        content = self.hub.repositories.get(name, {}).get(path)
        if parts[2:3] != ["resolve"] or content is None:
            return self.answer({"error": "Entry not found"}, 404, X_Error_Code="EntryNotFound")
        tag = f'"{hashlib.sha1(content).hexdigest()}"'
        self.answer(content, ETag=tag, X_Repo_Commit=self.hub.commit(name))
        return None

    def do_POST(self) -> None:
        parts = self.parts()
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if parts == ["api", "repos", "create"]:
            request = json.loads(body)
            name = f"{request.get('organization') or 'user'}/{request['name']}"
            self.hub.repositories.setdefault(name, {})
            self.hub.private[name] = bool(
                request.get("private") or request.get("visibility") == "private"
            )
            return self.answer({"url": f"{self.hub.address}/{name}", "name": name})
        name = "/".join(parts[2:4])
        if parts[4:5] == ["preupload"]:
            files = [
                {"path": one["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for one in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if parts[4:5] == ["commit"]:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.hub.repositories[name][entry["value"]["path"]] = content
            commit = self.hub.commit(name)
            address = f"{self.hub.address}/{name}/commit/{commit}"
            return self.answer({"success": True, "commitOid": commit, "commitUrl": address})
        return self.answer({})  # such as the check of a model card


@contextmanager
def serve_hub() -> Iterator[Hub]:
    hub = Hub()
    handler = type("Handler", (HubHandler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
