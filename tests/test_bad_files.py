"""Tests of files that are damaged, hostile or too large: each costs one example and no command.

Every file goes through the reader, `tessera check` and the dataset that training reads from.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import PIL.Image
import PIL.TiffImagePlugin
import pytest
import soundfile

from tessera.data.budget import VARIABLE, max_decoded_bytes
from tessera.data.dataset import DataConfig, read_item
from tessera.data.errors import UnreadableFile
from tessera.data.workers import WorkerError
from tessera.modalities import MODALITIES, Modality, inspect_folder
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.io.files import read_samples
from tessera.modalities.image.dataset import ImageDataConfig
from tessera.modalities.image.media import Image
from tessera.modalities.mesh.dataset import MeshDataConfig
from tessera.modalities.video.dataset import VideoDataConfig
from tessera.modalities.video.io.animation import Animation
from tessera.run.errors import UserError
from tests.cli_runner import tessera

TRIANGLE = "v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 3\n"


def find_modality(config: type[DataConfig]) -> Modality:
    medium = {ImageDataConfig: "image", VideoDataConfig: "video", AudioDataConfig: "audio"}
    return MODALITIES[medium.get(config, "mesh")]


def find_reason(config: DataConfig, file: Path) -> str:
    """Return why training leaves out a file, and assert that `tessera check` reports it too."""
    dataset = type(config)(path=str(file)).full(captions=False)
    with pytest.raises(UnreadableFile) as raised:
        read_item(dataset, 0, np.random.default_rng(0))
    report = inspect_folder(str(file), find_modality(type(config)))
    assert report.usable == 0 and len(report.unusable) == 1
    return str(raised.value)


# ---- audio of many channels


def write_channels(path: Path, layout: str, codec: str = "pcm_s16le") -> Path:
    """Write one second in which channel c has the constant value (c + 1) / 100."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=48_000, layout=layout)
        channels = stream.codec_context.layout.nb_channels
        levels = np.arange(1, channels + 1) / 100 * 2**15
        samples = np.tile(levels.round().astype(np.int16), (48_000, 1))
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout=layout)
        frame.sample_rate = 48_000
        container.mux([*stream.encode(frame), *stream.encode(None)])
    return path


@pytest.mark.parametrize("layout", ["stereo", "5.1", "7.1", "hexadecagonal"])
def test_audio_of_any_number_of_channels_is_read(layout, tmp_path):
    path = write_channels(tmp_path / "a.mka", layout)
    samples = read_samples(path)
    expected = np.arange(1, len(samples) + 1) / 100
    assert samples.shape[1] == 48_000
    np.testing.assert_allclose(samples[:, 24_000], expected, atol=1e-4)
    assert inspect_folder(str(tmp_path), MODALITIES["audio"]).usable == 1


# ---- meshes

BAD_MESHES: dict[str, tuple[str | bytes, str]] = {
    "cut.off": ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1", "a face of 3 corners has 2 indices"),
    "ended.off": ("OFF\n3 1 0\n0 0 0\n1 0 0\n", "damaged"),
    "flat.obj": ("v 0 0 0\nv 0 1\nv 1 1 1\nf 1 2 3\n", "a vertex has 2 coordinates"),
    "negative.off": ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n-3 0 1 2\n", "corners"),
    "huge.off": ("OFF\n3 1 0\n0 0 0\n1 0 0\n0 1 0\n3 0 1 99999999999999999999\n", "damaged"),
    "latin.stl": (
        b"solid caf\xe9\nfacet normal 0 0 1\nouter loop\nvertex 0 0 0\nvertex 1 0 0\n"
        b"vertex 0 \xe9 0\nendloop\nendfacet\nendsolid",
        "damaged",
    ),
    "list.gltf": ('{"asset": {"version": "2.0"}, "accessors": [5]}', "a value of a wrong type"),
    "null.gltf": ('{"asset": {"version": "2.0"}, "meshes": null}', "a value of a wrong type"),
    "empty.gltf": ('{"asset": {"version": "2.0"}, "meshes": [{"primitives": []}]}', ""),
}


@pytest.mark.parametrize("name", BAD_MESHES)
def test_a_bad_mesh_costs_one_example(name, tmp_path):
    content, expected = BAD_MESHES[name]
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    reason = find_reason(MeshDataConfig(), file)
    assert reason.startswith(f"{file}: ") and expected in reason


def write_gltf(path: Path, **changes: Any) -> Path:
    """Write a triangle as glTF, with some entries of the scene replaced."""
    data = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0]], np.float32).tobytes()
    (path.parent / "triangle.bin").write_bytes(data)
    scene = {
        "asset": {"version": "2.0"},
        "buffers": [{"uri": "triangle.bin", "byteLength": len(data)}],
        "bufferViews": [{"buffer": 0, "byteLength": len(data)}],
        "accessors": [{"bufferView": 0, "componentType": 5126, "count": 3, "type": "VEC3"}],
        "meshes": [{"primitives": [{"attributes": {"POSITION": 0}}]}],
        "nodes": [{"mesh": 0}],
        "scenes": [{"nodes": [0]}],
        "scene": 0,
    }
    path.write_text(json.dumps(scene | changes))
    return path


def test_a_mesh_that_no_node_shows_is_reported(tmp_path):
    assert inspect_folder(str(write_gltf(tmp_path / "a.gltf")), MODALITIES["mesh"]).usable == 1
    file = write_gltf(tmp_path / "b.gltf", nodes=[{}], scenes=[{"nodes": [0]}])
    assert "in no node" in find_reason(MeshDataConfig(), file)


def test_arrays_that_a_scene_only_declares_are_not_allocated(tmp_path):
    accessors = [
        {"bufferView": 0, "componentType": 5126, "count": 3, "type": "VEC3"},
        {"componentType": 5126, "count": 150_000_000, "type": "VEC3"},
    ]
    meshes = [{"primitives": [{"attributes": {"POSITION": 0, "NORMAL": 1}}]}]
    file = write_gltf(tmp_path / "a.gltf", accessors=accessors, meshes=meshes)
    assert "an array of 150,000,000 rows" in find_reason(MeshDataConfig(), file)
    header = "ply\nformat ascii 1.0\nelement vertex 90000000\nproperty float x\nend_header\n"
    (tmp_path / "a.ply").write_text(header)
    assert "90,000,000 elements" in find_reason(MeshDataConfig(), tmp_path / "a.ply")


def test_a_mesh_file_of_empty_lines_is_rejected_in_linear_time(tmp_path):
    file = tmp_path / "a.obj"
    file.write_bytes(b"\n" * 3_000_000)
    start = time.process_time()
    assert "not an OBJ" in find_reason(MeshDataConfig(), file)
    assert time.process_time() - start < 10


def test_a_traceback_never_ends_training_on_a_bad_mesh(tmp_path):
    """The guard covers everything between the file and the example, also with workers."""
    for number in range(12):
        (tmp_path / f"{number}.obj").write_text(TRIANGLE.replace("v 1 0 0", f"v 1 0 {number}"))
    for name, (content, _) in BAD_MESHES.items():
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
    for num_workers in ("0", "1"):
        out = tmp_path / f"run-{num_workers}"
        flags = ("--steps", "3", "--batch-size", "8", "--num-workers", num_workers, "--out", out)
        result = tessera(
            "train", "meshes-autoencoder", "--preset", "tiny", "--data", tmp_path, *flags
        )
        assert result.code == 0, result.err
        assert "Skipped" in result.out


# ---- bombs


def write_gif_bomb(path: Path, frames: int) -> Path:
    """Write an animation of many large frames of one colour, in a few kilobytes."""
    first = PIL.Image.new("L", (8, 8))
    rest = [PIL.Image.new("L", (8, 8), color=5 * n + 5) for n in range(frames - 1)]
    first.save(path, save_all=True, append_images=rest, duration=20)
    data = bytearray(path.read_bytes())
    data[6:10] = struct.pack("<HH", 9_000, 9_000)  # the screen, on which frames are drawn
    path.write_bytes(data)
    return path


def test_an_animation_that_unfolds_to_too_many_pixels_is_not_decoded(tmp_path):
    file = write_gif_bomb(tmp_path / "a.gif", 40)
    assert file.stat().st_size < 20_000
    start = time.process_time()
    assert "40 frames of 9000 x 9000 pixels" in find_reason(VideoDataConfig(), file)
    assert time.process_time() - start < 10


def test_a_frame_that_enlarges_an_animation_too_much_is_not_decoded(tmp_path):
    file = tmp_path / "a.gif"
    frames = [PIL.Image.new("L", (8, 8), color=n) for n in (0, 50, 100)]
    frames[0].save(file, save_all=True, append_images=frames[1:], duration=20)
    data = bytearray(file.read_bytes())
    header = b"," + struct.pack("<HHHH", 0, 0, 8, 8)
    second = data.index(header, data.index(header) + 1)
    data[second + 5 : second + 9] = struct.pack("<HH", 9_000, 12_000)
    file.write_bytes(data)
    read = Animation(file).frames(0.0, None)
    assert next(read).pixels().shape == (8, 8, 3)
    with pytest.raises(UnreadableFile, match="declares 9000 x 12000 pixels"):
        next(read)


def test_an_image_above_the_limit_is_not_decoded(tmp_path, monkeypatch):
    PIL.Image.new("RGB", (600, 600)).save(tmp_path / "a.png")
    assert Image.load(tmp_path / "a.png").pixels.shape == (600, 600, 3)
    monkeypatch.setenv(VARIABLE, "1")
    reason = find_reason(ImageDataConfig(), tmp_path / "a.png")
    assert "600 x 600 pixels, which are 1 MB decoded, and the limit is 1 MB" in reason
    monkeypatch.setenv(VARIABLE, "many")
    with pytest.raises(UserError, match=f"{VARIABLE} must be a number of megabytes, got 'many'"):
        max_decoded_bytes()


def test_images_below_the_limit_of_pillow_give_no_warning(tmp_path):
    file = tmp_path / "a.png"
    PIL.Image.new("1", (10_000, 9_500)).save(file)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset = ImageDataConfig(path=str(file)).full(captions=False)
        read_item(dataset, 0, np.random.default_rng(0))


SPARSE: list[tuple[str, Callable[..., DataConfig]]] = [
    ("a.png", ImageDataConfig),
    ("a.gif", VideoDataConfig),
    ("a.obj", MeshDataConfig),
]


@pytest.mark.parametrize(("name", "config"), SPARSE)
def test_a_sparse_file_of_nine_gigabytes_is_not_read(name, config, tmp_path):
    with open(tmp_path / name, "wb") as file:
        file.truncate(9 << 30)
    assert "it has 9,664 MB, and at most 400 MB are read" in find_reason(config(), tmp_path / name)


def test_a_long_recording_is_read_in_parts_but_not_as_a_whole(tmp_path, monkeypatch):
    write_channels(tmp_path / "a.mka", "7.1")
    monkeypatch.setenv(VARIABLE, "1")
    assert read_samples(tmp_path / "a.mka", 0, 16_000).shape == (8, 16_000)
    with pytest.raises(UnreadableFile, match="48,000 samples of 8 channels"):
        read_samples(tmp_path / "a.mka")


# ---- mistakes in the code


def write_medium(config: type[DataConfig], folder: Path) -> Path:
    """Write a small file of a medium."""
    if config is AudioDataConfig:
        soundfile.write(folder / "a.wav", np.full(800, 0.1), 8_000)
        return folder / "a.wav"
    if config is MeshDataConfig:
        (folder / "a.obj").write_text(TRIANGLE)
        return folder / "a.obj"
    frames = [PIL.Image.new("L", (8, 8), color=n) for n in (0, 50, 100)]
    name, more = ("a.gif", frames[1:]) if config is VideoDataConfig else ("a.tiff", [])
    frames[0].save(folder / name, save_all=True, append_images=more, duration=20)
    return folder / name


FUNCTIONS = [
    (ImageDataConfig, "tessera.modalities.image.dataset.crop_image", False),
    (ImageDataConfig, "tessera.modalities.image.media.check_image_size", True),
    (AudioDataConfig, "tessera.modalities.audio.io.files.validate_samples", True),
    (AudioDataConfig, "tessera.modalities.audio.io.files.Block", True),
    (VideoDataConfig, "tessera.modalities.video.io.animation.frame_duration", True),
    (VideoDataConfig, "tessera.modalities.video.io.files.display_times", False),
    (MeshDataConfig, "tessera.modalities.mesh.io.parse_vertex", True),
    (MeshDataConfig, "tessera.modalities.mesh.dataset.load_example", False),
]


@pytest.mark.parametrize(("config", "function", "is_checked"), FUNCTIONS)
def test_a_mistake_in_a_reader_is_no_unreadable_file(
    config, function, is_checked, tmp_path, monkeypatch
):
    file = write_medium(config, tmp_path)
    monkeypatch.setattr(function, None)
    dataset = config(path=str(file)).full(captions=False)
    with pytest.raises(TypeError, match="'NoneType' object is not callable") as raised:
        read_item(dataset, 0, np.random.default_rng(0))
    assert raised.value.__notes__ == [f"This happened while {file} was read."]
    if is_checked:
        with pytest.raises(WorkerError, match="'NoneType' object is not callable"):
            inspect_folder(str(file), find_modality(config))


@pytest.mark.parametrize("error", [TypeError, AttributeError, NotImplementedError, KeyError])
def test_any_error_of_a_library_means_a_damaged_file(error, tmp_path, monkeypatch):
    def load(image: PIL.Image.Image) -> None:
        raise error("of a decoder")

    file = write_medium(ImageDataConfig, tmp_path)
    monkeypatch.setattr(PIL.TiffImagePlugin.TiffImageFile, "load", load)
    assert "damaged or truncated" in find_reason(ImageDataConfig(), file)


# ---- crashes


def test_check_reports_a_file_that_ends_the_process_that_reads_it(tmp_path, monkeypatch):
    for name in ("a.png", "b.png", "c.png"):
        PIL.Image.new("RGB", (8, 8)).save(tmp_path / name)
    from tessera.modalities.image import inspect

    decode = inspect.decode

    def crash(data: bytes) -> Any:
        if (tmp_path / "b.png").read_bytes() == data and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGSEGV)
        return decode(data)

    PIL.Image.new("RGB", (9, 9)).save(tmp_path / "b.png")
    parent = os.getpid()
    monkeypatch.setattr(inspect, "decode", crash)
    result = tessera("check", tmp_path)
    assert result.code == 0 and "3 images, 2 usable" in result.text
    assert "b.png: the process that read it died (SIGSEGV)" in result.text
