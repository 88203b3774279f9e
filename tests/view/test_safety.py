"""Who may read what: hosts, origins, tokens, paths, names, uploads and the number of jobs."""

from __future__ import annotations

import json
import os
import queue
import shutil
from pathlib import Path
from urllib.parse import quote, urlencode

import pytest

from tessera.view import server, storage, uploads
from tests.cli_runner import run_invalid
from tests.view.served import SECONDS, Served, serve
from tests.view.test_runs import write_run

EVIL = "evil.example"
FILE = "/api/file?run=a&folder=000010&name=0000.png"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with one run, and files beside it that nobody may read."""
    base = tmp_path_factory.mktemp("safety")
    run = write_run(base / "runs" / "a")
    samples = run / "samples" / "000010"
    samples.mkdir(parents=True)
    (samples / "0000.png").write_bytes(b"png")
    (samples / "settings.json").write_text('{"step": 10, "examples": ["<b>x</b>"]}')
    for name in ("secret.png", "secret.txt"):
        (base / name).write_text("secret")
    (samples / "0001.png").symlink_to(base / "secret.png")
    (run / "samples" / "outside").symlink_to(base)
    (samples / "page.html").write_text("<script>alert(1)</script>")
    (samples / "0002.svg").write_text("<svg onload='alert(1)'/>")
    return base


@pytest.fixture(scope="module")
def safe(folder) -> Served:
    with serve(folder / "runs") as one:
        yield one


# ---- who


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil", ""])
def test_other_hosts_are_not_answered(safe, host):
    """A name of another site that resolves to this machine (DNS rebinding)."""
    for path in ("/", "/api/runs", FILE, "/static/app.js"):
        assert safe.get(path, host=host).status == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"])
def test_names_of_this_machine_are_answered(safe, host):
    assert safe.get("/api/runs", host=f"{host}:{safe.port}").status == 200


@pytest.mark.parametrize("origin", [f"http://{EVIL}", "null", "http://127.0.0.1:1"])
def test_other_origins_are_not_answered(safe, origin):
    assert safe.get("/api/runs", origin=origin).status == 403
    body = b'{"command": "sample", "values": {}}'
    answer = safe.request(
        "POST", "/api/jobs?run=a", body, origin=origin, content_type="application/json"
    )
    assert answer.status == 403
    assert safe.request("DELETE", "/api/jobs/1", origin=origin).status == 403


def test_requests_that_the_browser_calls_cross_site_are_not_answered(safe):
    for site in ("cross-site", "same-site"):
        assert safe.get("/api/runs", sec_fetch_site=site, sec_fetch_mode="no-cors").status == 403
        assert safe.request("POST", "/api/jobs", b"", sec_fetch_site=site).status == 403
    navigation = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    assert safe.get("/", **navigation).status == 200  # a link to the page
    same = {"sec_fetch_site": "same-origin", "origin": f"http://127.0.0.1:{safe.port}"}
    assert safe.get("/api/runs", **same).status == 200


def test_every_response_has_a_strict_policy(safe):
    for path in ("/", "/static/app.js", "/api/runs", "/nothing", FILE):
        headers = safe.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers


def test_a_token_is_required_where_one_is_set(folder):
    with serve(folder / "runs", token="secret-token") as one:
        for path in ("/", "/api/runs", FILE, "/static/app.js"):
            assert one.get(path).status == 403
        assert one.get("/api/runs?token=wrong").status == 403
        entered = one.get("/?token=secret-token&x=1")
        assert (entered.status, entered.headers["location"]) == (303, "/?x=1")
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie
        assert one.get("/api/runs", cookie=cookie.partition(";")[0]).status == 200
        assert one.get("/api/runs", cookie="tessera-token=wrong").status == 403
        assert (
            one.get("/api/runs", cookie=cookie.partition(";")[0], host="evil.example").status == 403
        )


def test_other_addresses_accept_only_addresses_and_own_names(folder):
    with serve(folder / "runs", host="0.0.0.0", token="t") as one:
        cookie = "tessera-token=t"
        assert one.get("/api/runs", cookie=cookie, host="192.168.1.5:7860").status == 200
        assert one.get("/api/runs", cookie=cookie, host="evil.example").status == 403


def test_an_open_address_gets_a_token(monkeypatch, capsys, folder):
    started = {}

    def run(self, sockets):
        started["app"] = self.config.app
        sockets[0].close()

    monkeypatch.setattr("uvicorn.Server.run", run)
    from tessera.view.main import serve as serve_forever

    options = {"port": 0, "token": None, "open_browser": False}
    serve_forever([folder / "runs"], host="0.0.0.0", **options)
    started["app"].state.view.storage.close()
    assert "?token=" in capsys.readouterr().out
    serve_forever([folder / "runs"], host="127.0.0.1", **options)
    started["app"].state.view.storage.close()
    assert "token" not in capsys.readouterr().out


def test_the_page_is_opened_where_there_is_a_browser(monkeypatch, capsys, folder):
    from tessera.view.main import serve as serve_forever

    def run(self, sockets):
        self.config.app.state.view.storage.close()
        sockets[0].close()

    opened = queue.SimpleQueue()
    monkeypatch.setattr("uvicorn.Server.run", run)
    monkeypatch.setattr("webbrowser.open", opened.put)
    monkeypatch.setenv("DISPLAY", ":0")
    options = {"host": "127.0.0.1", "port": 0, "token": None}
    serve_forever([folder / "runs"], **options, open_browser=False)
    serve_forever([folder / "runs"], **options, open_browser=True)
    first, second = capsys.readouterr().out.splitlines()
    address = opened.get(timeout=SECONDS)
    assert address in second and address not in first and opened.empty()


# ---- what

PATHS = [
    {"folder": "..", "name": "config.json"},
    {"folder": "000010/..", "name": "config.json"},
    {"folder": "000010", "name": "../../config.json"},
    {"folder": "000010", "name": "../../../../secret.png"},
    {"folder": "", "name": "config.json"},
    {"folder": ".", "name": "x.png"},
    {"folder": "000010", "name": "/etc/passwd"},
    {"folder": "/etc", "name": "passwd"},
    {"folder": "000010", "name": "0001.png"},
    {"folder": "outside", "name": "secret.png"},
    {"folder": "000010", "name": "0000.png\0.html"},
    {"folder": "000010", "name": "page.html"},
    {"folder": "000010", "name": "0002.svg"},
    {"folder": "000010", "name": "missing.png"},
]


@pytest.mark.parametrize("path", PATHS, ids=str)
def test_no_path_leaves_the_samples_of_a_run(safe, path):
    answer = safe.get("/api/file?" + urlencode({"run": "a", **path}))
    assert answer.status == 404
    assert b"secret" not in answer.body


def test_a_sample_is_sent_with_its_type(safe):
    answer = safe.get(FILE)
    assert (answer.status, answer.body) == (200, b"png")
    assert answer.headers["content-type"] == "image/png"


@pytest.mark.parametrize("run", ["..", "../runs/a", "/etc", "a/..", "", "a/samples"])
def test_no_path_is_a_run(safe, run):
    for kind in ("run", "metrics", "samples", "history", "forms", "jobs", "file"):
        assert safe.get(f"/api/{kind}?run={quote(run)}").status == 404


@pytest.mark.parametrize(
    "path",
    [
        "/static/../server.py",
        "/static/..%2fserver.py",
        "/static//etc/passwd",
        "/static/%2fetc/passwd",
    ],
)
def test_static_files_are_only_those_of_the_package(safe, path):
    assert safe.get(path).status == 404


def test_names_and_captions_are_data_and_never_html(safe):
    """The page is one file without any text of a run; runs are sent as JSON."""
    index = safe.get("/").body
    assert b"<b>" not in index
    answer = safe.get("/api/samples?run=a")
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["steps"][0]["samples"][0]["label"] == "<b>x</b>"
    error = safe.get("/api/run?run=" + quote("<script>alert(1)</script>"))
    assert error.headers["content-type"] == "application/json"


def test_no_script_builds_html_from_text():
    for file in sorted(server.STATIC.glob("*.js")):
        code = file.read_text()
        for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert name not in code, file


def test_nothing_of_the_page_is_fetched_from_elsewhere():
    for file in [*server.STATIC.glob("*.*"), server.STATIC / "vendor" / "uplot.css"]:
        addresses = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in addresses.replace("http-equiv", ""), file


# ---- uploads and jobs


def test_uploads_are_bounded_in_bytes(served, monkeypatch):
    folder = served.view.library.get("images-vqgan").directory.samples / "inputs"
    before = sorted(folder.glob("*"))
    monkeypatch.setattr(uploads, "MAX_BYTES", 1000)
    answer = served.upload("images-vqgan", "data", "x.png", b"x" * 1001)
    assert answer.status == 413
    chunked = served.request(
        "POST",
        "/api/upload?run=images-vqgan&field=data&name=x.png",
        b"7d0\r\n" + b"x" * 2000 + b"\r\n0\r\n\r\n",
        transfer_encoding="chunked",
    )
    assert chunked.status == 400 and "limit of uploads" in chunked.error
    assert sorted(folder.glob("*")) == before


def test_an_upload_with_too_many_pixels_is_not_decoded(served, image_runs):
    """A PNG whose header declares more pixels than are accepted."""
    import struct
    import zlib

    header = struct.pack(">IIBBBBB", 9000, 9000, 8, 2, 0, 0, 0)
    chunk = b"IHDR" + header
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    data += struct.pack(">I", zlib.crc32(chunk)) + struct.pack(">I", 100) + b"IDAT"
    upload = served.upload("images-vqgan", "data", "big.png", data).json
    job = served.run_job("images-vqgan", "sample", data=upload)
    assert job["state"] == "failed"
    assert "81,000,000 pixels" in job["message"] and "50,000,000" in job["message"]


@pytest.mark.parametrize(
    ("modality", "content", "message"),
    [
        ("mesh", b"ply\nformat ascii 1.0\nelement face 300000\nend_header\n", "300,000 faces"),
        ("image", b"GIF89a", "cannot be read"),
        ("audio", b"RIFF....", "cannot be read"),
        ("video", b"nothing", "cannot be read"),
    ],
)
def test_files_are_measured_before_they_are_decoded(tmp_path, modality, content, message):
    from tessera.run.errors import UserError

    suffix = {"mesh": ".ply", "image": ".gif", "audio": ".wav", "video": ".mp4"}[modality]
    path = tmp_path / f"file{suffix}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        uploads.check_size(str(path), modality)


def test_long_audio_is_not_decoded(tmp_path, monkeypatch):
    import numpy as np

    from tessera.modalities.audio.media import Audio
    from tessera.run.errors import UserError

    path = Audio(np.zeros((1, 16_000), np.float32), 16_000).write(tmp_path / "a.wav")
    uploads.check_size(str(path), "audio")
    monkeypatch.setitem(uploads.MAX_SIZES, "seconds", 0.5)
    with pytest.raises(UserError, match="1 seconds"):
        uploads.check_size(str(path), "audio")


@pytest.mark.parametrize("name", ["x.html", "x.svg", "x", "x.png.exe", ""])
def test_uploads_of_other_kinds_are_rejected(served, name):
    answer = served.upload("images-vqgan", "data", name, b"x")
    assert answer.status == 400 and "cannot be used here" in answer.error


def test_the_name_of_an_upload_is_never_a_path(served):
    upload = served.upload("images-vqgan", "data", "../../../<b>evil</b>.png", b"x").json
    assert set(upload) == {"upload"}
    folder = served.view.library.get("images-vqgan").directory.samples / "inputs"
    assert upload["upload"] in os.listdir(folder)
    assert "evil" not in upload["upload"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"run": "x"}, "no field 'run'"),
        ({"out": "elsewhere"}, "no field 'out'"),
        ({"data": "/etc/passwd"}, "must be uploaded"),
        ({"data": {"upload": "../../config.json"}}, "no such file"),
        ({"data": {"folder": "..", "name": "config.json"}}, "no such file"),
        ({"count": 10**9}, "at most 64"),
        ({"count": "many"}, "whole number"),
        ({"count": [1]}, "whole number"),
        ({"weights": "best"}, "one of ema, raw"),
        ({"seed": 2**40}, "at most"),
    ],
    ids=str,
)
def test_values_of_a_form_are_checked(served, values, message):
    answer = served.start("images-vqgan", "sample", **values)
    assert answer.status in (400, 404)
    assert message in answer.error


def test_only_the_commands_of_the_forms_can_be_called(served):
    for command in ("train", "evaluate", "tokenize", "demo", "__import__", None):
        assert served.start("images-vqgan", command).status == 400
    for body in (b"", b"[]", b"{", b'{"command": "sample"}', b"x" * 2_000_000):
        answer = served.request(
            "POST", "/api/jobs?run=images-vqgan", body, content_type="application/json"
        )
        assert answer.status in (400, 413)
    form = b'{"command": "sample", "values": {}}'
    answer = served.request("POST", "/api/jobs?run=images-vqgan", form, content_type="text/plain")
    assert answer.status == 415


def test_a_text_to_search_for_is_never_opened_as_a_path(tmp_path):
    run = write_run(tmp_path / "runs" / "a", recipe="music-mulan")
    (run / "checkpoints" / "000020").mkdir(parents=True)
    (run / "checkpoints" / "000020" / "manifest.json").write_text("{}")
    index = tmp_path / "runs" / "index"
    index.mkdir()
    (index / "index.json").write_text("{}")
    (index / "embeddings.safetensors").write_bytes(b"")
    secret = tmp_path / "secret.wav"
    secret.write_bytes(b"RIFF")
    with serve(tmp_path / "runs") as one:
        answer = one.start("a", "search", index=str(index), query=str(secret))
        assert answer.status == 400 and "Upload the recording" in answer.error
        answer = one.start("a", "search", index=str(secret), query="a slow harp")
        assert answer.status == 400 and "must be one of" in answer.error
        found = one.view.library.get("a")
        long = {"command": "search", "values": {"index": str(index), "query": "slow harp " * 60}}
        assert (
            one.view.playground.build_job(found, long, "1").call.positional[1] == "slow harp " * 60
        )


def test_texts_are_bounded(served):
    answer = served.start("images-maskgit", "sample", prompt=["x" * 5000])
    assert answer.status == 400 and "at most 4,000" in answer.error


def test_html_in_the_name_of_a_run_stays_text(tmp_path):
    write_run(tmp_path / "<img src=x onerror=alert(1)>")
    with serve(tmp_path) as one:
        [row] = one.get("/api/runs").json["runs"]
        assert row["id"] == "<img src=x onerror=alert(1)>"
        assert one.get("/api/metrics?run=" + quote(row["id"])).status == 200


def test_samples_of_a_run_that_cannot_be_written_are_kept_elsewhere(tmp_path, monkeypatch):
    run = write_run(tmp_path / "a")
    (run / "checkpoints" / "000020").mkdir(parents=True)
    (run / "checkpoints" / "000020" / "manifest.json").write_text("{}")
    monkeypatch.setattr(storage, "can_write", lambda folder: False)
    before = sorted(run.rglob("*"))
    with serve(tmp_path) as one:
        upload = one.upload("a", "data", "x.png", b"x").json
        found = one.view.library.get("a")
        playground, temporary = one.view.playground, one.view.storage.temporary
        assert Path(playground.find_input(found, upload)).is_relative_to(temporary)
        job = playground.build_job(found, {"command": "sample", "values": {"data": upload}}, "1")
        assert job.out.is_relative_to(temporary)
        assert sorted(run.rglob("*")) == before
    assert not temporary.exists()
    shutil.rmtree(run)


def test_a_folder_that_does_not_exist_is_explained(tmp_path):
    assert "is not a folder" in run_invalid("view", tmp_path / "nowhere")


def test_a_port_in_use_is_explained(folder, safe):
    text = run_invalid("view", folder / "runs", "--port", str(safe.port))
    assert "cannot be used" in text and "--port" in text


def test_settings_of_samples_may_be_anything(tmp_path):
    run = write_run(tmp_path / "a")
    for name, content in {"000001": "[1]", "000002": "{", "000003": '{"prompts": 3}'}.items():
        folder = run / "samples" / name
        folder.mkdir(parents=True)
        (folder / "settings.json").write_text(content)
        (folder / "0000.png").write_bytes(b"")
    with serve(tmp_path) as one:
        steps = one.get("/api/samples?run=a").json["steps"]
    assert [step["samples"][0]["label"] for step in steps] == ["0", "0", "0"]
    assert json.dumps(steps)


def test_the_command_ends_quietly_while_a_page_is_open(folder):
    import http.client
    import signal
    import subprocess
    import sys

    command = [sys.executable, "-m", "tessera", "view", str(folder / "runs"), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--no-browser"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    port = int(process.stdout.readline().partition("127.0.0.1:")[2].partition("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("GET", "/api/runs/events")
    response = connection.getresponse()
    assert response.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    connection.close()
    assert errors == "" or errors == "tessera: stopped\n"
    assert process.returncode in (0, 130)
