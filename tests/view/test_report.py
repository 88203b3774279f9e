"""Reports are self-contained, bounded in size, and hold texts as data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tessera.run.directory import Json
from tessera.view import report
from tessera.view.library import RunLibrary
from tests.cli_runner import run_invalid
from tests.view.test_runs import write_run


def write_samples(run: Path, steps: int, size: int) -> None:
    for step in range(1, steps + 1):
        folder = run / "samples" / f"{step:06d}"
        folder.mkdir(parents=True)
        (folder / "0000.png").write_bytes(bytes([step]) * size)
        settings = {"step": step, "captions": ["</script><script>alert(1)</script>"]}
        (folder / "settings.json").write_text(json.dumps(settings))


def build(run: Path) -> tuple[str, Json]:
    """Return a report and its data."""
    text = report.build_report(RunLibrary([run]).get(run.name))
    [content] = re.findall(r'<script type="application/json" id="report">(.*?)</script>', text)
    return text, json.loads(content)


def test_a_report_has_curves_samples_and_settings(tmp_path):
    run = write_run(tmp_path / "a")
    write_samples(run, steps=3, size=100)
    text, content = build(run)
    assert content["metrics"]["columns"]["model/loss"]["steps"] == list(range(1, 21))
    assert [step["step"] for step in content["steps"]] == [1, 2, 3]
    assert set(content["files"]) == {f"{step:06d}/0000.png" for step in (1, 2, 3)}
    assert content["run"]["config"]["data"]["path"] == "photos"
    assert content["left_out"] == 0
    assert "import" in text and 'src="http' not in text and "/static/" not in text


def test_texts_cannot_end_the_data(tmp_path):
    run = write_run(tmp_path / "a")
    write_samples(run, steps=1, size=1)
    text, content = build(run)
    assert content["steps"][0]["samples"][0]["label"] == "</script><script>alert(1)</script>"
    assert "<script>alert" not in text


def test_every_module_of_a_report_is_inside(tmp_path):
    modules = report.read_modules()
    assert {"tessera/report.js", "tessera/curves.js", "tessera/vendor/uplot.js"} <= set(modules)
    assert "tessera/playground.js" not in modules
    assert all(value.startswith("data:text/javascript;base64,") for value in modules.values())


def test_a_long_run_keeps_the_first_and_the_last_samples(tmp_path, monkeypatch):
    run = write_run(tmp_path / "a")
    write_samples(run, steps=30, size=20_000)
    frame = len(report.build_report(RunLibrary([write_run(tmp_path / "b")]).get("b")))
    monkeypatch.setattr(report, "MAX_BYTES", frame + 200_000)
    text, content = build(run)
    assert len(text.encode()) <= frame + 200_000
    steps = [step["step"] for step in content["steps"]]
    assert steps[0] == 1 and steps[-1] == 30 and 4 <= len(steps) < 10
    assert steps == sorted(steps)
    assert content["left_out"] == 30 - len(steps)


@pytest.mark.parametrize("count", range(8))
def test_steps_are_added_from_the_ends_to_the_middle(count):
    order = list(report.order_steps(count))
    assert sorted(order) == list(range(count))
    assert order[:2] == [count - 1, 0][: min(count, 2)] if count != 1 else order == [0]


def test_a_report_is_of_one_run(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name)
    text = run_invalid("view", tmp_path, "--export", tmp_path / "report.html")
    assert "2 were found (a, b)" in text
    assert not (tmp_path / "report.html").exists()
