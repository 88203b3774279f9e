"""Mirrors of metrics.jsonl: they get every number, and whatever they do, the run does not hear of
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from tessera.engine.distributed import Distributed
from tessera.engine.logging import TRACKERS, Trackers
from tessera.modalities.image.recipes import images_vqgan
from tessera.run.config import encode, flat

Distributed.from_environment()  # Accelerate's trackers ask which process is the main one


class Diary(GeneralTracker):
    """A tracker that writes down what it is told, and fails where it is told to."""

    name = "diary"
    requires_logging_directory = False
    fails_in = ""

    def __init__(self, run_name: str):
        super().__init__()
        self.run_name = run_name
        self.told: list[Any] = []
        type(self).last = self

    @property
    def tracker(self) -> list[Any]:
        return self.told

    def act(self, what: str, *told: Any) -> None:
        if what == self.fails_in:
            raise ConnectionError("nobody answers")
        self.told.append((what, *told))

    def start(self) -> None:
        self.act("start")

    def store_init_configuration(self, values: dict) -> None:
        self.act("config", values)

    def log(self, values: dict, step: int | None = None, **_: Any) -> None:
        self.act("log", step, values)

    def finish(self) -> None:
        self.act("finish")


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> type[Diary]:
    kind = type("OneDiary", (Diary,), {})
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", kind)
    return kind


def test_a_mirror_is_told_the_settings_and_every_number_under_its_step(diary, tmp_path):
    said: list[str] = []
    trackers = Trackers(("tensorboard",), tmp_path / "my-run", {"engine.steps": 3}, said.append)
    trackers.log(
        {"step": 1, "kind": "train", "model/loss": 0.5, "model/nothing": None, "skipped_steps": 0}
    )
    trackers.log({"step": 2, "kind": "validation", "val_ema/psnr": 20.0})
    trackers.close()
    assert diary.last.run_name == "my-run"
    assert diary.last.told == [
        ("start",),
        ("config", {"engine.steps": 3}),
        ("log", 1, {"model/loss": 0.5, "skipped_steps": 0}),
        ("log", 2, {"val_ema/psnr": 20.0}),
        ("finish",),
    ]
    assert not said


@pytest.mark.parametrize("place", ["start", "config", "log", "finish"])
def test_a_mirror_that_breaks_is_named_once_and_left_alone(place, diary, tmp_path):
    diary.fails_in = place
    said: list[str] = []
    trackers = Trackers(("tensorboard",), tmp_path, {}, said.append)
    for step in (1, 2, 3):
        trackers.log({"step": step, "model/loss": 0.5})
    trackers.close()
    assert len(said) == 1
    assert (
        "tensorboard" in said[0]
        and "nobody answers" in said[0]
        and "metrics.jsonl has everything" in said[0]
    )


def test_a_mirror_that_is_not_installed_is_told_and_the_others_work(diary, tmp_path, monkeypatch):
    def absent(*_: Any) -> None:
        raise ModuleNotFoundError("No module named 'wandb'")

    absent.requires_logging_directory = False  # type: ignore[attr-defined]
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", absent)
    said: list[str] = []
    trackers = Trackers(("wandb", "tensorboard"), tmp_path, {}, said.append)
    trackers.log({"step": 1, "model/loss": 0.5})
    trackers.close()
    assert ("log", 1, {"model/loss": 0.5}) in diary.last.told
    assert len(said) == 1 and "No module named 'wandb'" in said[0]


def test_accelerate_knows_every_tracker_that_may_be_asked_for():
    for name in TRACKERS:
        assert issubclass(LOGGER_TYPE_TO_CLASS[name], GeneralTracker)


def test_tensorboard_really_takes_a_whole_run_and_its_numbers(tmp_path):
    """With the settings of a real recipe: None, lists and all."""
    said: list[str] = []
    config = flat(encode(images_vqgan(preset="tiny")))
    trackers = Trackers(("tensorboard",), tmp_path / "run", config, said.append)
    trackers.log({"step": 1, "kind": "train", "model/loss": 0.5})
    trackers.close()
    assert not said
    files: list[Path] = list(tmp_path.rglob("events.out.tfevents.*"))
    assert any(b"model/loss" in file.read_bytes() for file in files)
    assert any(b"task.model.dim" in file.read_bytes() for file in files)
