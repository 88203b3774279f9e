"""Send samples to trackers as images, videos, audio and meshes.

A medium that has the method `to_tracker` describes itself as a `TrackedMedia`: its kind, an array
and a file in memory. TensorBoard stores the files in its event files; Weights & Biases and Trackio
have a class for each kind that reads a file.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from accelerate.tracking import GeneralTracker

from tessera.engine.evaluation import Sample, make_sheet
from tessera.engine.task import Trackable, TrackedMedia

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

CLASSES = {"image": "Image", "video": "Video", "audio": "Audio", "mesh": "Object3D"}
"""Kind -> the class of that name in the packages wandb and trackio."""


@dataclass(frozen=True)
class TrackedSample:
    tag: str
    """The key under which the tracker shows it: `samples/0000`."""
    caption: str
    media: TrackedMedia


def describe_samples(samples: list[Sample]) -> list[TrackedSample]:
    """Return the contact sheet and every sample, without media that trackers cannot show."""
    if not samples:
        return []
    named = [("samples/sheet", "", make_sheet(samples))]
    named += [(f"samples/{i:04d}", one.label, one.media) for i, one in enumerate(samples)]
    return [
        TrackedSample(tag, caption, media.to_tracker())
        for tag, caption, media in named
        if isinstance(media, Trackable)
    ]


def log_samples(name: str, tracker: GeneralTracker, samples: list[Sample], step: int) -> None:
    """Send samples and their contact sheet to the tracker of this name."""
    described = describe_samples(samples)
    if name == "tensorboard":
        for sample in described:
            add_to_tensorboard(tracker.tracker, sample, step)
        tracker.tracker.flush()
    elif described:
        log_files(importlib.import_module(name), tracker, described, step)


def add_to_tensorboard(writer: SummaryWriter, sample: TrackedSample, step: int) -> None:
    """Add a summary. TensorBoard has no videos, but shows GIFs among its images."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    tag, media, content = sample.tag, sample.media, sample.media.content
    if media.kind == "mesh":
        assert media.faces is not None
        writer.add_mesh(tag, media.array.float()[None], faces=media.faces[None], global_step=step)
        return
    if media.kind == "audio":
        channels, length = media.array.shape
        audio = Summary.Audio(
            sample_rate=media.rate_hz,
            num_channels=channels,
            length_frames=length,
            encoded_audio_string=content,
            content_type="audio/wav",
        )
        value = Summary.Value(tag=tag, audio=audio)
    else:
        height, width, channels = media.array.shape[-3:]
        image = Summary.Image(
            height=height, width=width, colorspace=channels, encoded_image_string=content
        )
        value = Summary.Value(tag=tag, image=image)
    writer._get_file_writer().add_summary(Summary(value=[value]), step)


def log_files(
    module: ModuleType, tracker: GeneralTracker, samples: Sequence[TrackedSample], step: int
) -> None:
    """Log files through the classes of wandb or trackio, which copy them."""
    with tempfile.TemporaryDirectory() as folder:
        values = {}
        for number, sample in enumerate(samples):
            media_class = getattr(module, CLASSES[sample.media.kind], None)
            if media_class is not None:
                path = Path(folder, f"{number:04d}{sample.media.suffix}")
                path.write_bytes(sample.media.content)
                values[sample.tag] = media_class(str(path), caption=sample.caption or None)
        tracker.log(values, step=step)
