"""Samples in trackers: real event files of TensorBoard, and the classes of wandb and trackio."""

from __future__ import annotations

import io
import sys
import wave
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import PIL.Image
import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tessera.engine.distributed import Distributed
from tessera.engine.evaluation import Sample
from tessera.engine.logging import Trackers
from tessera.engine.tracked_media import describe_samples
from tessera.modalities.audio.media import Audio
from tessera.modalities.image.media import Image
from tessera.modalities.mesh.media import Mesh
from tessera.modalities.music.similarity_sheet import SimilarityRow
from tessera.modalities.video.media import Video
from tests.engine.small_task import TextMedia, small_engine
from tests.fake_tracker import FakeTracker

Distributed.from_environment()  # Accelerate's trackers need its process state

RNG = np.random.default_rng(0)
IMAGE = Image(RNG.integers(0, 256, (8, 12, 3), dtype=np.uint8))
VIDEO = Video(RNG.integers(0, 256, (3, 16, 16, 3), dtype=np.uint8), 5.0)
AUDIO = Audio(RNG.uniform(-0.5, 0.5, (1, 800)).astype(np.float32), 8000)
MESH = Mesh(np.eye(4, 3), np.array([[0, 1, 2], [0, 2, 3]]))
MATCH = SimilarityRow("a.wav", "a harp", AUDIO, np.ones(2), np.ones(2))
MEDIA: dict[str, Any] = {"image": IMAGE, "video": VIDEO, "audio": AUDIO, "mesh": MESH}


def make_samples(media: Any, count: int = 2) -> list[Sample]:
    return [Sample(media, f"{i}.png", f"caption {i}") for i in range(count)]


# ---- what media offer


@pytest.mark.parametrize("kind", MEDIA)
def test_a_medium_has_an_array_and_a_file(kind: str) -> None:
    tracked = MEDIA[kind].to_tracker()
    assert tracked.kind == kind
    shapes = {"image": (8, 12, 3), "video": (3, 16, 16, 3), "audio": (1, 800), "mesh": (4, 3)}
    assert tuple(tracked.array.shape) == shapes[kind]
    starts = {"image": b"\x89PNG", "video": b"GIF89a", "audio": b"RIFF", "mesh": b"v "}
    assert tracked.content.startswith(starts[kind])
    suffixes = {"image": ".png", "video": ".gif", "audio": ".wav", "mesh": ".obj"}
    assert tracked.suffix == suffixes[kind]


def test_the_sheet_and_every_sample_are_described() -> None:
    described = describe_samples(make_samples(AUDIO))
    assert [one.tag for one in described] == ["samples/sheet", "samples/0000", "samples/0001"]
    assert [one.media.kind for one in described] == ["image", "audio", "audio"]
    assert [one.caption for one in described] == ["", "caption 0", "caption 1"]
    assert [one.media.kind for one in describe_samples(make_samples(MATCH))] == [
        "image",
        "audio",
        "audio",
    ]


def test_media_without_a_description_are_left_out() -> None:
    assert describe_samples([Sample(TextMedia("red"), "a")]) == []
    assert describe_samples([]) == []


# ---- TensorBoard


def read_events(folder: Path) -> EventAccumulator:
    (file,) = [file for file in folder.rglob("events.*") if b"samples/sheet" in file.read_bytes()]
    return EventAccumulator(str(file)).Reload()


def write_events(folder: Path, media: Any) -> EventAccumulator:
    warnings: list[str] = []
    trackers = Trackers(("tensorboard",), folder, {}, warnings.append)
    trackers.log_samples(make_samples(media), 7)
    trackers.close()
    assert not warnings
    return read_events(folder)


def test_tensorboard_shows_images_and_their_sheet(tmp_path: Path) -> None:
    events = write_events(tmp_path, IMAGE)
    (image,) = events.Images("samples/0001")
    assert (image.step, image.width, image.height) == (7, 12, 8)
    shown = np.asarray(PIL.Image.open(io.BytesIO(image.encoded_image_string)))
    assert np.array_equal(shown, IMAGE.pixels)
    assert events.Images("samples/sheet")[0].width > 2 * 96


def test_tensorboard_shows_videos_as_animations(tmp_path: Path) -> None:
    events = write_events(tmp_path, VIDEO)
    for tag in ("samples/0000", "samples/sheet"):
        with PIL.Image.open(io.BytesIO(events.Images(tag)[0].encoded_image_string)) as shown:
            assert (shown.format, shown.n_frames) == ("GIF", 3)


def test_tensorboard_plays_audio(tmp_path: Path) -> None:
    events = write_events(tmp_path, AUDIO)
    (audio,) = events.Audio("samples/0000")
    assert (audio.step, audio.sample_rate, audio.length_frames) == (7, 8000, 800)
    with wave.open(io.BytesIO(audio.encoded_audio_string)) as file:
        assert (file.getframerate(), file.getnframes()) == (8000, 800)
    assert events.Images("samples/sheet")


def test_tensorboard_shows_meshes(tmp_path: Path) -> None:
    events = write_events(tmp_path, MESH)
    assert {"samples/0000_VERTEX", "samples/0000_FACE"} <= set(events.Tags()["tensors"])
    vertices = events.Tensors("samples/0000_VERTEX")[0].tensor_proto
    assert [dim.size for dim in vertices.tensor_shape.dim] == [1, 4, 3]


# ---- wandb and trackio


class FileReader:
    """A class of wandb or trackio: it copies a file."""

    def __init__(self, path: str, caption: str | None = None):
        self.suffix, self.content, self.caption = (
            Path(path).suffix,
            Path(path).read_bytes(),
            caption,
        )


@pytest.fixture
def tracker(monkeypatch: pytest.MonkeyPatch) -> type[FakeTracker]:
    """A tracker in place of that of Weights & Biases, and a package of its media classes."""
    new_class = type("OneTracker", (FakeTracker,), {"calls": []})
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", new_class)
    module = ModuleType("wandb")
    for name in ("Image", "Video", "Audio", "Object3D"):
        setattr(module, name, type(name, (FileReader,), {}))
    monkeypatch.setitem(sys.modules, "wandb", module)
    return new_class


@pytest.mark.parametrize(
    ("kind", "name"),
    [("image", "Image"), ("video", "Video"), ("audio", "Audio"), ("mesh", "Object3D")],
)
def test_trackers_receive_files_with_captions(kind: str, name: str, tracker, tmp_path) -> None:
    warnings: list[str] = []
    trackers = Trackers(("wandb",), tmp_path, {}, warnings.append)
    trackers.log_samples(make_samples(MEDIA[kind]), 7)
    assert not warnings and tracker.calls[-1] == (
        *("log", 7),
        ["samples/0000", "samples/0001", "samples/sheet"],
    )
    (values,) = tracker.values
    second = values["samples/0001"]
    assert (type(second).__name__, second.caption) == (name, "caption 1")
    assert second.content == MEDIA[kind].to_tracker().content
    assert type(values["samples/sheet"]).__name__ == ("Video" if kind == "video" else "Image")


def test_media_without_a_class_of_the_tracker_are_left_out(tracker, tmp_path) -> None:
    del sys.modules["wandb"].Object3D  # type: ignore[attr-defined]
    trackers = Trackers(("wandb",), tmp_path, {}, pytest.fail)
    trackers.log_samples(make_samples(MESH), 7)
    assert tracker.calls[-1] == ("log", 7, ["samples/sheet"])


def test_a_tracker_that_cannot_show_samples_still_receives_metrics(
    tracker, tmp_path, monkeypatch
) -> None:
    monkeypatch.delattr(sys.modules["wandb"], "Image")
    monkeypatch.setattr(sys.modules["wandb"], "Audio", 3, raising=False)
    warnings: list[str] = []
    trackers = Trackers(("wandb",), tmp_path, {}, warnings.append)
    for step in (1, 2):
        trackers.log_samples(make_samples(AUDIO), step)
        trackers.log({"step": step, "model/loss": 0.5})
    assert len(warnings) == 1 and "cannot show samples" in warnings[0]
    assert [call[1:] for call in tracker.calls if call[0] == "log"] == [
        (1, ["model/loss"]),
        (2, ["model/loss"]),
    ]


def test_a_run_sends_its_samples_at_the_steps_of_samples(tracker, tmp_path, monkeypatch) -> None:
    engine = small_engine(
        tmp_path, steps=4, sample_every=2, sample_count=3, log_every=4, log_with=("wandb",)
    )
    monkeypatch.setattr(engine.task, "sample", lambda batch: [IMAGE] * len(batch))
    engine.run()
    sent = [call[1:] for call in tracker.calls if call[0] == "log" and "samples/sheet" in call[2]]
    tags = ["samples/0000", "samples/0001", "samples/0002", "samples/sheet"]
    assert sent == [(2, tags), (4, tags)]
