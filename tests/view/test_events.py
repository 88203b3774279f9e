"""Streams of events: they begin with the present state, and nothing is lost in between."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tessera.view import events
from tessera.view.library import RunLibrary
from tests.view.served import Served, serve
from tests.view.test_runs import train_record, write_run


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(events, "TABLE_SECONDS", 0.01)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path) as one:
        yield one


def follow(site: Served, *runs: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Follow runs from what a page that shows their curves has read."""
    cursors = [site.get(f"/api/metrics?run={run}").json["cursor"] for run in runs]
    names = "&".join(f"run={run}" for run in runs)
    return site.stream(f"/api/run/events?{names}&cursors={quote(','.join(cursors))}")


def append(folder: Path, record: dict[str, Any]) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record) + "\n")


def next_named(stream: Iterator[tuple[str, dict[str, Any]]], name: str) -> dict[str, Any]:
    return next(content for found, content in stream if found == name)


def test_the_table_begins_with_all_runs_and_sends_the_first_new_one(site, tmp_path):
    stream = site.stream("/api/runs/events")
    assert next(stream) == ("all", {"runs": []})
    write_run(tmp_path / "a")
    while "a" not in [row["id"] for row in next_named(stream, "runs")["changed"]]:
        pass
    os.rename(tmp_path / "a", tmp_path / "b")
    while "a" not in next_named(stream, "runs")["gone"]:
        pass


def test_the_state_of_a_run_is_sent_first(site, tmp_path):
    """A run may end between the request for its page and the stream."""
    write_run(tmp_path / "a", steps=100)
    name, state = next(follow(site, "a"))
    assert (name, state["run"], state["state"], state["step"]) == ("state", "a", "done", 100)


def test_several_runs_share_a_stream(site, tmp_path):
    folders = {name: write_run(tmp_path / name, steps=3) for name in ("a", "b")}
    stream = follow(site, *folders)
    assert {next(stream)[1]["run"] for _ in folders} == set(folders)
    for name in ("b", "a"):
        append(folders[name], train_record(4))
        content = next_named(stream, "records")
        assert content["run"] == name and [one["step"] for one in content["records"]] == [4]


def test_an_interrupted_stream_continues_where_it_ended(site, tmp_path):
    folder = write_run(tmp_path / "a", steps=3)
    cursor = site.get("/api/metrics?run=a").json["cursor"]
    append(folder, train_record(4))
    for step in (5, 6):
        stream = site.stream(f"/api/run/events?run=a&cursors={quote(cursor)}")
        content = next_named(stream, "records")
        assert [one["step"] for one in content["records"]] == list(range(4, step))
        append(folder, train_record(step))


def test_replaced_metrics_end_the_stream(site, tmp_path):
    """A resumed run replaces its metrics; records of the new file would be drawn twice."""
    folder = write_run(tmp_path / "a", steps=5)
    stream = follow(site, "a")
    assert next(stream)[0] == "state"
    (tmp_path / "new").write_text(json.dumps(train_record(1)) + "\n")
    os.replace(tmp_path / "new", folder / "metrics.jsonl")
    assert list(stream) == [("reset", {"run": "a"})]


def test_without_cursors_only_states_are_sent(site, tmp_path):
    write_run(tmp_path / "a", steps=5)
    stream = site.stream("/api/run/events?run=a")
    assert next(stream)[0] == "state"
    append(tmp_path / "a", train_record(6))
    name, state = next(stream)
    assert (name, state["step"]) == ("state", 6)


def test_numbers_that_json_lacks_hide_no_run(site, tmp_path):
    folder = write_run(tmp_path / "a")
    values = {"model/loss": float("nan"), "examples_per_second": float("inf")}
    append(folder, train_record(21) | values)
    append(folder, {"step": 21, "kind": "validation", "val_ema/psnr": float("nan")})
    (folder / "alarms.jsonl").write_text('{"step": 21, "alarm": "x: y", "value": NaN}\n')
    [row] = site.get("/api/runs").json["runs"]
    assert (row["step"], row["value"], row["alarm"]["value"]) == (21, None, None)
    assert site.get("/api/metrics?run=a").json["columns"]["model/loss"]["values"][-1] is None
    assert next(follow(site, "a"))[0] == "state"


def test_requests_at_once_read_every_line_once(tmp_path):
    write_run(tmp_path / "a", steps=2000)
    metrics = RunLibrary([tmp_path]).get("a").metrics
    with ThreadPoolExecutor(8) as threads:
        for result in threads.map(lambda _: metrics.read(10_000), range(8)):
            assert result["columns"]["model/loss"]["steps"] == list(range(1, 2001))


def test_requests_at_once_get_different_folders(site, tmp_path):
    run = write_run(tmp_path / "a")
    (run / "samples").mkdir()
    found = site.view.library.get("a")
    with ThreadPoolExecutor(8) as threads:
        folders = list(
            threads.map(lambda _: site.view.storage.new_folder(found, "sample"), "x" * 8)
        )
    assert len(set(folders)) == 8


def test_validations_have_the_use_of_the_codebook(site, tmp_path):
    folder = write_run(tmp_path / "a", steps=5)
    histogram = {"step": 5, "kind": "validation", "histogram/codebook": [3, 1, 0]}
    append(folder, histogram)
    assert site.get("/api/histograms?run=a").json == {
        "validations": [{"step": 5, "histograms": {"codebook": [3, 1, 0]}}]
    }
    assert "histogram/codebook" not in site.get("/api/metrics?run=a").json["columns"]
