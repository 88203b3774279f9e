"""Runs are found and described without torch, also while they are written or damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tessera.view.library import RunLibrary
from tessera.view.metrics import MetricsFile, read_appended, read_last
from tessera.view.runs import Summary, describe_run
from tessera.view.samples import list_steps

CONFIG = {
    "recipe": "images-vqgan",
    "task": {"model": {}},
    "data": {"path": "photos"},
    "engine": {"steps": 100, "batch_size": 8},
    "reference": "",
}


def write_run(folder: Path, steps: int = 20, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(train_record(step)) + "\n")
            if step % 10 == 0:
                record = {"step": step, "kind": "validation", "val_ema/psnr": step / 2}
                file.write(json.dumps(record) + "\n")
    return folder


def train_record(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "kind": "train",
        "examples": 8 * step,
        "model/loss": 1 / step,
        "examples_per_second": 16.0,
    }


def summarize(*folders: Path) -> dict[str, Summary]:
    return {row.id: row for row in RunLibrary(list(folders)).summaries()}


def test_a_row_has_state_pace_metric_and_a_spark_line(tmp_path):
    write_run(tmp_path / "a")
    row = summarize(tmp_path)["a"]
    assert row.info is not None
    assert (row.state, row.step, row.info.steps, row.value) == ("stopped", 20, 100, 10.0)
    assert (row.info.data, row.info.modality, row.info.kind) == ("photos", "image", "tokenizer")
    assert row.steps_per_second == 2.0
    assert row.seconds_left is None  # it does not run
    assert row.spark[0] > row.spark[-1] == pytest.approx(1 / 20)
    assert row.spark[:-1] == sorted(set(row.spark[:-1]), reverse=True)  # no step twice


def test_a_run_at_its_last_step_is_done(tmp_path):
    write_run(tmp_path / "a", steps=100)
    assert summarize(tmp_path)["a"].state == "done"


HOLD_LOCK = """
import sys
from tessera.run.directory import RunDirectory
RunDirectory(sys.argv[1]).lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_run_is_training_while_a_process_holds_its_lock(tmp_path):
    folder = write_run(tmp_path / "a")
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_LOCK, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == "locked\n"
    for _ in range(2):  # asking does not release the lock
        row = summarize(tmp_path)["a"]
        assert row.state == "training"
        assert row.seconds_left == 40.0
    process.stdin.close()
    process.wait()
    process.stdout.close()
    assert summarize(tmp_path)["a"].state == "stopped"


def test_steps_without_finite_values_at_the_end_are_a_problem(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "nonfinite.jsonl").write_text('{"step": 21, "update": "model", "examples": []}\n')
    row = summarize(tmp_path)["a"]
    assert row.state == "problem" and "non-finite" in row.reason


def test_the_last_alarm_is_shown(tmp_path):
    folder = write_run(tmp_path / "a")
    lines = [{"step": 5, "alarm": "first: x"}, {"step": 9, "alarm": "second: y"}]
    (folder / "alarms.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert summarize(tmp_path)["a"].alarm == lines[1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ('{"recipe": "images-vqgan"}', "has no 'task'"),
        (json.dumps(CONFIG | {"recipe": "images-vqgam"}), "did you mean 'images-vqgan'"),
        (json.dumps(CONFIG | {"engine": {}}), "of another version"),
        (json.dumps(CONFIG | {"engine": {"steps": "x", "batch_size": 1}}), "of another version"),
        (json.dumps(CONFIG | {"data": None}), "of another version"),
        (None, "it has no config.json"),
    ],
)
def test_a_damaged_run_is_listed_with_the_reason(tmp_path, content, reason):
    folder = tmp_path / "a"
    (folder / "checkpoints").mkdir(parents=True)
    if content is not None:
        (folder / "config.json").write_text(content)
    row = summarize(tmp_path)["a"]
    assert row.state == "problem"
    assert reason in row.reason
    assert describe_run(RunLibrary([tmp_path]).get("a"))["summary"]["reason"] == row.reason


def test_bytes_that_are_no_text_do_not_hide_other_runs(tmp_path):
    folder = write_run(tmp_path / "a")
    for name in ("metrics.jsonl", "alarms.jsonl", "rejected.jsonl"):
        (folder / name).write_bytes(b"\xff\xfe\x00{}[\n12\n")
    write_run(tmp_path / "b")
    rows = summarize(tmp_path)
    assert rows["a"].step == 0
    assert rows["b"].step == 20
    assert describe_run(RunLibrary([tmp_path]).get("a"))["notes"]["rejected"] == []


def test_a_folder_that_is_no_run_is_listed_with_the_reason(tmp_path):
    (tmp_path / "notes").mkdir()
    assert "not a run" in summarize(tmp_path)["notes"].reason


def test_runs_in_subfolders_and_several_folders_have_different_names(tmp_path):
    write_run(tmp_path / "one" / "deep" / "a")
    write_run(tmp_path / "two" / "a")
    rows = summarize(tmp_path / "one", tmp_path / "two")
    assert set(rows) == {"one/deep/a", "two/a"}


def test_a_link_out_of_the_folder_is_not_followed(tmp_path):
    write_run(tmp_path / "elsewhere")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "elsewhere")
    row = summarize(tmp_path / "runs")["link"]
    assert row.state == "problem" and "outside" in row.reason
    details = describe_run(RunLibrary([tmp_path / "runs"]).get("link"))
    assert "photos" not in json.dumps(details)


def test_a_file_of_a_run_may_not_be_a_link_out_of_the_folder(tmp_path):
    folder = write_run(tmp_path / "runs" / "a")
    (tmp_path / "secret").write_text("password")
    (folder / "README.md").symlink_to(tmp_path / "secret")
    details = describe_run(RunLibrary([tmp_path / "runs"]).get("a"))
    assert "README.md is a link" in details["summary"]["reason"]
    assert "password" not in json.dumps(details)


def test_dependencies_name_other_runs(tmp_path):
    write_run(tmp_path / "runs" / "tokenizer-a")
    path = "runs/tokenizer-a"  # relative to where the run was started
    write_run(tmp_path / "runs" / "b", task={"tokenizer": path})
    (tmp_path / "runs" / "b" / "dependencies" / "tokenizer").mkdir(parents=True)
    assert summarize(tmp_path / "runs")["b"].depends_on == {"tokenizer": "tokenizer-a"}


# ---- metrics


def test_appended_lines_are_added_and_a_partial_line_waits(tmp_path):
    folder = write_run(tmp_path / "a", steps=3)
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.update()
    line = json.dumps(train_record(4)) + "\n"
    with open(metrics.path, "a") as file:
        file.write(line[:20])
    metrics.update()
    assert metrics.columns["model/loss"].steps == [1, 2, 3]
    cursor = metrics.cursor
    with open(metrics.path, "a") as file:
        file.write(line[20:])
    metrics.update()
    assert metrics.columns["model/loss"].steps == [1, 2, 3, 4]
    assert [one["step"] for one in read_appended(metrics.path, cursor).records] == [4]
    assert read_appended(metrics.path, metrics.cursor).records == []


def test_a_replaced_file_is_read_again(tmp_path):
    """A resumed run replaces the file by one that ends earlier."""
    folder = write_run(tmp_path / "a", steps=5)
    metrics = MetricsFile(folder / "metrics.jsonl")
    metrics.update()
    new = tmp_path / "new"
    new.write_text(json.dumps(train_record(1)) + "\n")
    os.replace(new, metrics.path)
    assert read_appended(metrics.path, metrics.cursor).is_new_file
    metrics.update()
    assert metrics.columns["model/loss"].steps == [1]


def test_values_that_are_not_finite_become_gaps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "model/loss": null}\n{"step": 2, "model/loss": 3}\n')
    metrics = MetricsFile(path)
    metrics.update()
    assert metrics.columns["model/loss"].sampled(10) == {"steps": [1, 2], "values": [None, 3]}


def test_long_curves_keep_their_extremes(tmp_path):
    path = tmp_path / "metrics.jsonl"
    values = [0.0] * 5000
    values[1234], values[4321] = 9.0, -9.0
    lines = (json.dumps({"step": i, "x": value}) for i, value in enumerate(values))
    path.write_text("\n".join(lines) + "\n")
    metrics = MetricsFile(path)
    metrics.update()
    sampled = metrics.columns["x"].sampled(100)
    assert len(sampled["steps"]) <= 100
    assert {9.0, -9.0} <= set(sampled["values"])
    assert (sampled["steps"][0], sampled["steps"][-1]) == (0, 4999)


def test_the_last_validation_is_found_far_from_the_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    validation = json.dumps({"step": 1, "kind": "validation", "val_ema/psnr": 7})
    lines = [validation, *(json.dumps(train_record(step)) for step in range(2, 2000))]
    path.write_text("\n".join(lines) + "\n")
    last = read_last(path)
    assert last.train["step"] == 1999
    assert last.validation["val_ema/psnr"] == 7
    assert len(last.spark) > 20


def test_the_rows_of_a_table_do_not_read_whole_files(tmp_path, monkeypatch):
    """The time of the first page must not grow with the length of the runs."""
    folder = write_run(tmp_path / "a", steps=20_000)
    size = (folder / "metrics.jsonl").stat().st_size
    with open(folder / "metrics.jsonl", "rb") as file:
        read = CountingReader(file)
        monkeypatch.setattr("tessera.view.metrics.open", lambda *_: read, raising=False)
        summarize(tmp_path)
    assert read.count < size / 10


class CountingReader:
    def __init__(self, file: Any):
        self.file, self.count = file, 0

    def __enter__(self) -> CountingReader:
        return self

    def __exit__(self, *_: object) -> None: ...

    def fileno(self) -> int:
        return self.file.fileno()

    def seek(self, offset: int) -> None:
        self.file.seek(offset)

    def read(self, size: int) -> bytes:
        data = self.file.read(size)
        self.count += len(data)
        return data


def test_samples_have_the_captions_as_labels(tmp_path):
    folder = write_run(tmp_path / "a")
    samples = folder / "samples" / "000010"
    samples.mkdir(parents=True)
    for name in ("0000.png", "0001.png", "sheet.png"):
        (samples / name).write_bytes(b"")
    settings = {"step": 10, "examples": ["x", "y"], "captions": ["a red circle", "a dog"]}
    (samples / "settings.json").write_text(json.dumps(settings))
    (folder / "samples" / ".000020.writing").mkdir()
    [step] = list_steps(RunLibrary([tmp_path]).get("a"))
    assert [one["label"] for one in step["samples"]] == ["a red circle", "a dog"]
    assert step["step"] == 10 and step["sheet"] == "sheet.png"


def test_reading_runs_imports_no_torch(tmp_path):
    write_run(tmp_path / "a")
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tessera.view.server import build_app\n"
        "app = build_app([Path(sys.argv[1])])\n"
        "view = app.state.view\n"
        "from tessera.view.forms import forms_of\n"
        "run = view.library.get('a')\n"
        "assert run.summarize().step == 20\n"
        "assert forms_of(run, view.library)\n"
        "view.storage.close()\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
