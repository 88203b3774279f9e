"""Tests of data at addresses: a server on the loopback interface, and the local cache."""

from __future__ import annotations

import hashlib
import io
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import fsspec
import pytest

from tessera.data.dataset import DataConfig
from tessera.data.remote import cached_file, check_address
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.run.errors import UserError
from tests.cli_runner import run_invalid, tessera
from tests.data.test_shards import png, write_tar


@dataclass
class Server:
    """A server of files in memory that records what it is asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    cut: bool = False
    """Whether the connection ends in the middle of a file."""
    address: str = ""


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[Server]:
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.respond(with_body=False)

        def do_GET(self) -> None:
            self.respond(with_body=True)

        def respond(self, with_body: bool) -> None:
            state.requests.append(f"{self.command} {self.path}")
            content = state.files.get(self.path)
            self.send_response(200 if content is not None else 404)
            self.send_header("Content-Length", str(len(content or b"")))
            self.send_header("ETag", f'"{hash(content)}"')
            self.end_headers()
            if with_body and content:
                self.wfile.write(content[: len(content) // 2] if state.cut else content)

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    running = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{running.server_address[1]}"
    thread = threading.Thread(target=running.serve_forever, args=(0.01,))
    thread.start()
    yield state
    running.shutdown()
    thread.join()
    running.server_close()


def shard(tmp_path: Path, name: str, *values: int) -> bytes:
    members = {f"{name}{value}.png": png(value) for value in values}
    return write_tar(tmp_path / "source.tar", members).read_bytes()


def config(server: Server, **settings: bool) -> DataConfig:
    return ImageDataConfig(path=f"{server.address}/s-{{0..1}}.tar", size=8, **settings)


def test_shards_are_downloaded_once_and_then_read_without_a_connection(server, tmp_path):
    server.files = {"/s-0.tar": shard(tmp_path, "a", 1, 2), "/s-1.tar": shard(tmp_path, "b", 3)}
    assert list(config(server, download=True).full().names) == ["a1.png", "a2.png", "b3.png"]
    downloads = [one for one in server.requests if one.startswith("GET")]
    assert downloads == ["GET /s-0.tar", "GET /s-1.tar"]
    server.requests.clear()
    assert len(config(server).full()) == 3 and server.requests == []
    assert len(config(server, download=True).full()) == 3
    assert not [one for one in server.requests if one.startswith("GET")]


def test_nothing_is_downloaded_without_the_flag(server, tmp_path):
    server.files = {"/s-0.tar": shard(tmp_path, "a", 1)}
    message = run_invalid("train", "images-vqgan", "--data", f"{server.address}/s-0.tar")
    assert "1 of 1 files are not in the cache" in message and "--data.download" in message
    result = tessera("check", f"{server.address}/s-0.tar")
    assert result.code == 1 and "not in the cache" in result.text
    assert server.requests == [] and not (tmp_path / "cache").exists()


def test_check_and_train_download_with_the_flag(server, tmp_path):
    server.files = {"/s-0.tar": shard(tmp_path, "a", *range(12))}
    address = f"{server.address}/s-0.tar"
    result = tessera("check", address, "--download")
    assert result.code == 0 and "12 images, 12 usable" in result.text
    command = ("train", "images-vqgan", "--preset", "tiny", "--batch-size", "4", "--data", address)
    out = ("--out", tmp_path / "run", "--steps", "1")
    assert tessera(*command, *out).code == 0  # from the cache
    stored = (tmp_path / "run/config.json").read_text()
    assert '"download": false' in stored


def test_a_changed_shard_is_downloaded_again(server, tmp_path):
    server.files = {"/s-0.tar": shard(tmp_path, "a", 1), "/s-1.tar": shard(tmp_path, "b", 3)}
    assert len(config(server, download=True).full()) == 2
    server.files["/s-1.tar"] = shard(tmp_path, "b", 3, 4)
    assert len(config(server).full()) == 2
    assert len(config(server, download=True).full()) == 3


def test_a_connection_that_ends_early_leaves_nothing(server, tmp_path):
    server.files = {"/s-0.tar": shard(tmp_path, "a", 1)}
    server.cut = True
    address = f"{server.address}/s-0.tar"
    with pytest.raises(UserError, match="s-0.tar"):
        ImageDataConfig(path=address, download=True).full()
    assert not cached_file(address).exists()


@pytest.fixture
def bucket(tmp_path, monkeypatch) -> Iterator[dict[str, bytes]]:
    """The files of s3://bucket, on a file system of fsspec in memory in place of s3fs."""
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    files: dict[str, bytes] = {}

    class S3FileSystem(fsspec.AbstractFileSystem):
        protocol = "s3"

        def info(self, path: str, **_: object) -> dict[str, object]:
            content = files.get(self._strip_protocol(path))
            if content is None:
                raise FileNotFoundError(path)
            tag = hashlib.sha256(content).hexdigest()
            return {"name": path, "size": len(content), "ETag": tag, "type": "file"}

        def _open(self, path: str, **_: object) -> io.BytesIO:
            return io.BytesIO(files[path])

    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, "s3", S3FileSystem)
    yield files


def test_shards_in_a_bucket_are_downloaded_once(bucket, tmp_path):
    bucket |= {f"bucket/s-{n}.tar": shard(tmp_path, "ab"[n], n) for n in (0, 1)}
    path = "s3://bucket/s-{0..1}.tar"
    assert list(ImageDataConfig(path=path, download=True).full().names) == ["a0.png", "b1.png"]
    bucket["bucket/s-1.tar"] = shard(tmp_path, "b", 1, 2)
    assert len(ImageDataConfig(path=path).full()) == 2
    assert len(ImageDataConfig(path=path, download=True).full()) == 3
    with pytest.raises(UserError, match=r"s3://bucket/c\.tar cannot be downloaded \(FileNotFound"):
        ImageDataConfig(path="s3://bucket/c.tar", download=True).full()


def test_the_package_that_an_address_needs_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path / "cache"))
    with (
        mock.patch.dict(sys.modules, {"s3fs": None}),
        pytest.raises(UserError, match="s3 addresses needs another package .*[Ii]nstall s3fs"),
    ):
        ImageDataConfig(path="s3://bucket/a.tar", download=True).full()


def test_a_missing_shard_is_named(server):
    with pytest.raises(UserError, match=r"s-0\.tar cannot be downloaded \(FileNotFoundError"):
        config(server, download=True).full()


@pytest.mark.parametrize(
    "address",
    ["file:///etc/a.tar", "ftp://host/a.tar", "simplecache::http://host/a.tar", "http://h/*.tar"],
)
def test_other_protocols_and_wildcards_are_rejected(address):
    with pytest.raises(UserError):
        check_address(address)


def test_the_name_of_a_download_stays_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TESSERA_CACHE", str(tmp_path))
    for address in ("http://host/../../a.tar", "http://host/..", "s3://bucket/"):
        assert (tmp_path / "downloads") in cached_file(address).resolve().parents
