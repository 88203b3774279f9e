"""Jobs of the playground: the files of the command, one at a time, and no harm from failures."""

from __future__ import annotations

import base64
import io
import os
import shlex
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tessera import Image
from tessera.view.forms import forms_of, read_arguments
from tests.cli_runner import tessera
from tests.view.endless_worker import ENDLESS
from tests.view.served import Served, serve


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[0-9]*.*"))}


def folder_of(served: Served, job: dict[str, Any]) -> Path:
    return served.view.library.get(job["run"]).directory.samples / job["folder"]


def run_shell(command: str, out: Path) -> dict[str, bytes]:
    """Run a command that was copied from the page, with another output folder."""
    program, *arguments = shlex.split(command)
    assert program == "tessera"
    result = tessera(*arguments, "--out", out)
    assert result.code == 0, result
    return files_of(out)


def run_python(code: str, out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    out.mkdir()
    monkeypatch.chdir(out)
    exec(compile(code, "copied", "exec"), {})
    return files_of(out)


def test_a_prompt_gives_the_file_of_the_command_and_of_python(served, tmp_path, monkeypatch):
    values = {"prompt": ["a red circle", "a blue square"], "count": 2, "seed": 7}
    values |= {"decoding_steps": 3, "guidance": 2.5, "order": "halton"}
    states = []
    job = {}
    for job in served.follow(served.start("images-maskgit", "sample", **values).json["id"]):
        states.append(job["state"])
    assert states[-1] == "done" and (job["step"], job["steps"]) == (3, 3)
    made = files_of(folder_of(served, job))
    assert len(made) == 4 and len(set(made.values())) > 1
    assert run_shell(job["shell"], tmp_path / "shell") == made
    assert run_python(job["python"], tmp_path / "python", monkeypatch) == made


def test_an_image_is_inpainted_as_by_the_command(served, tmp_path, monkeypatch):
    pixels = np.full((16, 16, 3), 200, np.uint8)
    image, mask = (Image(pixels).save(tmp_path / f"{name}.png") for name in ("image", "mask"))
    uploads = {
        field: served.upload("images-maskgit", field, "x.png", path.read_bytes()).json
        for field, path in {"data": image, "mask": mask}.items()
    }
    job = served.run_job("images-maskgit", "sample", **uploads, count=1)
    assert job["state"] == "done", job
    made = files_of(folder_of(served, job))
    assert run_shell(job["shell"], tmp_path / "shell") == made
    assert run_python(job["python"], tmp_path / "python", monkeypatch) == made


def test_a_round_trip_gives_tokens_and_the_file_of_the_command(served, tmp_path, monkeypatch):
    import PIL.Image

    pixels = np.random.default_rng(0).integers(0, 255, (16, 16, 3), np.uint8)
    image = tmp_path / "image.tif"  # which browsers do not show
    PIL.Image.fromarray(pixels).save(image)
    upload = served.upload("images-vqgan", "data", "photo.TIF", image.read_bytes()).json
    job = served.run_job("images-vqgan", "sample", data=upload, count=1)
    assert job["state"] == "done", job
    tokens = job["result"]["tokens"]
    assert tokens["shape"] == [4, 4] and len(tokens["codes"]) == 16 == sum(tokens["counts"])
    assert tokens["bytes"] == 16 * 16 * 3
    bits = 16 * np.log2(tokens["vocab_size"])
    assert tokens["compression"] == pytest.approx(16 * 16 * 3 * 8 / bits)
    made = files_of(folder_of(served, job))
    assert list(made) == ["0000.png"]
    assert run_shell(job["shell"], tmp_path / "shell") == made
    assert run_python(job["python"], tmp_path / "python", monkeypatch) == made


def test_the_history_is_read_from_the_run_directory(served, image_runs):
    job = served.run_job("images-maskgit", "sample", prompt=["a <b>bold</b> circle"], count=1)
    with serve(image_runs) as another:  # nothing is kept in the server
        history = another.get("/api/history?run=images-maskgit").json["history"]
    [entry] = [one for one in history if one["name"] == job["folder"]]
    assert entry["request"]["shell"] == job["shell"]
    assert entry["request"]["values"] == {"prompt": ["a <b>bold</b> circle"], "count": 1}
    assert entry["samples"][0]["label"] == "a <b>bold</b> circle"


def test_two_jobs_at_once_run_one_after_the_other(served):
    first = served.start("images-maskgit", "sample", count=1, decoding_steps=ENDLESS).json
    second = served.start("images-maskgit", "sample", count=1, seed=2).json
    assert first["folder"] != second["folder"]
    for state in served.follow(first["id"]):
        assert served.view.queue.jobs[second["id"]].state == "queued" or state["is_finished"]
        if state["state"] == "running":
            [other] = served.list_jobs("images-maskgit", second["id"])
            assert (other["state"], other["position"]) == ("queued", 1)
            served.cancel(first["id"])
    assert state["state"] == "cancelled"
    assert served.finish(second["id"])["state"] == "done"


def test_a_killed_worker_fails_its_job_and_the_next_one_works(served):
    job = served.start("images-maskgit", "sample", count=1, decoding_steps=ENDLESS).json
    for state in served.follow(job["id"]):
        if state["state"] in ("loading", "running") and (pid := served.view.queue.worker_pid):
            os.kill(pid, signal.SIGKILL)
    assert state["state"] == "failed"
    assert "worker process ended" in state["message"]
    assert not folder_of(served, state).exists()
    assert served.run_job("images-maskgit", "sample", count=1)["state"] == "done"


def test_a_job_that_fails_gives_its_sentence(served):
    job = served.run_job("images-maskgit", "sample", count=1, order="critic")
    assert job["state"] == "failed" and "no critic" in job["message"]
    upload = served.upload("images-vqgan", "data", "x.png", b"not an image").json
    job = served.run_job("images-vqgan", "sample", data=upload)
    assert job["state"] == "failed" and "cannot be read" in job["message"]
    assert served.get("/api/runs").status == 200


def test_a_running_job_is_cancelled_and_shows_samples_as_they_emerge(served):
    job = served.start("images-maskgit", "sample", count=1, decoding_steps=ENDLESS).json
    preview = None
    for state in served.follow(job["id"]):
        preview = state["preview"] or preview
        if preview:
            served.cancel(job["id"])
    assert state["state"] == "cancelled"
    assert 0 < state["step"] < state["steps"] == ENDLESS
    assert preview is not None
    import PIL.Image

    assert PIL.Image.open(io.BytesIO(base64.b64decode(preview))).format == "PNG"
    assert not folder_of(served, state).exists()


def test_a_waiting_job_is_cancelled(served):
    long = served.start("images-maskgit", "sample", count=1, decoding_steps=ENDLESS).json
    waiting = served.start("images-maskgit", "sample", count=1).json
    assert served.cancel(waiting["id"])["state"] == "cancelled"
    served.cancel(long["id"])
    assert served.finish(long["id"])["state"] == "cancelled"
    assert served.finish(waiting["id"])["state"] == "cancelled"
    assert not folder_of(served, waiting).exists()


def test_a_job_is_cancelled_while_the_worker_is_started(served, image_runs):
    with serve(image_runs) as another:
        job = another.start("images-maskgit", "sample", count=1, decoding_steps=ENDLESS).json
        another.cancel(job["id"])
        assert another.finish(job["id"])["state"] == "cancelled"


def test_too_many_waiting_jobs_are_rejected(served, monkeypatch):
    monkeypatch.setattr("tessera.view.jobs.MAX_QUEUED", 0)
    answer = served.start("images-maskgit", "sample", count=1)
    assert answer.status == 429 and "waiting already" in answer.error


def test_the_worker_ends_when_it_is_unused(image_runs, monkeypatch):
    monkeypatch.setattr("tessera.view.jobs.WORKER_MODULE", "tessera.view.worker")
    with serve(image_runs, idle_seconds=0.1) as one:
        queue = one.view.queue
        assert queue.worker_pid is None  # it is started by the first job
        upload = one.upload("images-vqgan", "data", "x.png", b"not an image").json
        job = one.start("images-vqgan", "sample", data=upload).json
        assert one.finish(job["id"])["state"] == "failed"
        for _ in range(100_000):  # every request takes a moment
            if queue.worker_pid is None:
                break
            one.get("/")
        assert queue.worker_pid is None


def test_a_run_without_a_checkpoint_cannot_be_used(image_runs, tmp_path):
    shutil.copytree(image_runs / "images-vqgan", tmp_path / "a")
    for file in (tmp_path / "a" / "checkpoints").glob("*/manifest.json"):
        file.unlink()
    with serve(tmp_path) as one:
        assert not one.get("/api/forms?run=a").json["can_sample"]
        answer = one.start("a", "sample")
        assert answer.status == 400 and "no complete checkpoint" in answer.error


# ---- forms


def test_fields_are_the_flags_of_the_command_with_the_values_of_the_run(served):
    run = served.view.library.get("images-maskgit")
    [form] = forms_of(run, served.view.library)
    names = {field.name for field in form.fields}
    assert {"prompt", "data", "mask", "count", "seed", "decoding_steps", "guidance"} <= names
    assert not names & {"like", "prompt_audio", "seconds", "out", "superres"}
    sampling = run.directory.read_config()["task"]["sampling"]
    assert form.field("decoding_steps").default == sampling["decoding_steps"]
    assert form.field("order").choices == ("confidence", "critic", "halton")
    assert form.field("decoding_steps").help.startswith("The number of decoding steps")


def test_a_tokenizer_has_no_fields_of_a_generator(served):
    [form] = forms_of(served.view.library.get("images-vqgan"), served.view.library)
    assert [field.name for field in form.fields] == ["data", "count", "seed", "weights"]


def test_every_parameter_of_the_commands_has_help():
    from tessera.cli.commands import COMMANDS
    from tessera.view.forms import parameters_of

    for command in ("sample", "search", "index"):
        assert all(one.help for one in parameters_of(command).values()), command
        documented = read_arguments(COMMANDS[command].__doc__ or "")
        assert all(text.endswith(".") for text in documented.values())
