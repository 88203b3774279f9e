"""All commands on a folder of valid and invalid videos, with a run that was trained on it."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import PIL.Image
import pytest

from tessera.api.tokenizer import Tokenizer
from tessera.data.tokens import read_tokens
from tessera.modalities.image.synthetic import SyntheticImages, draw
from tessera.modalities.video.media import Video
from tessera.modalities.video.synthetic import SyntheticVideos, draw_video
from tests.cli_runner import run_invalid, tessera

FRAMES = 9
UNREADABLE = {"broken.mp4", "empty.mp4", "audio.mp4", "text.mp4"}


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write six videos, an image, and the files UNREADABLE."""
    folder = tmp_path_factory.mktemp("videos")
    dataset = SyntheticVideos(count=7, size=32, frames=FRAMES, seed=3)
    for number in range(len(dataset)):
        draw_video(dataset.scene(number), 32, FRAMES).save(folder / f"{number}")
        (folder / f"{number}.gif").unlink()
    draw(SyntheticImages(count=1, size=32).scene(0), 32).save(folder / "image")
    content = (folder / "6.mp4").read_bytes()
    (folder / "6.mp4").unlink()
    (folder / "broken.mp4").write_bytes(content[: len(content) * 2 // 3])
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.mp4").write_text("this is not a video", encoding="utf-8")
    with av.open(str(folder / "audio.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        samples = np.zeros((1, 1024), np.float32)
        audio = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
        audio.sample_rate = 16000
        container.mux(stream.encode(audio))
        container.mux(stream.encode())
    return folder


@pytest.fixture(scope="module")
def run(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "magvit2"
    flags = ("--data", videos, "--preset", "tiny", "--steps", "4", "--out", run)
    result = tessera("train", "videos-magvit2", *flags)
    assert result.code == 0, result
    return run


def test_check_detects_videos_and_lists_unusable_files(videos: Path) -> None:
    result = tessera("check", videos, "--json")
    report = json.loads(result.out)
    assert result.code == 0 and (report["videos"], report["images"]) == (6, 1)
    assert {one["name"] for one in report["unusable"]} == UNREADABLE
    assert all(one["reason"] for one in report["unusable"])
    assert report["durations"]["max_frames"] == FRAMES


def test_medium_of_a_check_can_be_chosen(videos: Path) -> None:
    report = json.loads(tessera("check", videos, "--medium", "image", "--json").out)
    assert (report["images"], report["usable"]) == (1, 1)


def test_unreadable_files_are_skipped_and_named(run: Path) -> None:
    lines = (run / "rejected.jsonl").read_text().splitlines()
    rejected = {json.loads(line)["example"] for line in lines}
    assert rejected and rejected <= UNREADABLE
    assert not (run / "nonfinite.jsonl").exists()


def read_frames(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_whole_video_is_rebuilt_under_its_own_name(run: Path, videos: Path, tmp_path: Path) -> None:
    result = tessera("sample", run, "--data", videos / "2.mp4", "--out", tmp_path)
    assert result.code == 0, result
    frames = read_frames(tmp_path / "2.mp4")
    assert len(frames) == len(read_frames(videos / "2.mp4")) > 5, "more than an example has"
    for name in ("sheet.mp4", "sheet.gif"):
        frames = read_frames(tmp_path / name)
        assert frames.std() > 10, f"{name} is black or of one colour"
    with PIL.Image.open(tmp_path / "sheet.gif") as gif:
        assert gif.n_frames > 5 and gif.width > 2 * 16
    settings = json.loads((tmp_path / "settings.json").read_text())
    assert settings["examples"] == settings["files"] == ["2.mp4"]


def test_evaluation_has_frame_motion_codebook_and_bit_metrics(
    run: Path, videos: Path, tmp_path: Path
) -> None:
    out = tmp_path / "evaluation.json"
    result = tessera("evaluate", run, "--data", videos, "--out", out)
    assert result.code == 0, result
    evaluation = json.loads(out.read_text())
    metrics = evaluation["metrics"]["ema"]
    assert {"psnr", "ssim", "frame_difference_psnr", "codebook_usage"} <= metrics.keys()
    assert metrics["bits_per_pixel"] == pytest.approx(2 * 8 * 8 * 6 / (5 * 16 * 16))
    assert evaluation["protocol"]["examples"] == 7
    assert all(f"Skipped {name}:" in result.err for name in UNREADABLE)


def test_codes_have_axes_of_time_and_space(run: Path, videos: Path, tmp_path: Path) -> None:
    assert tessera("tokenize", run, "--no-whole", "--data", videos, "--out", tmp_path).code == 0
    tokenizer = Tokenizer.load(run)
    stored = read_tokens(tmp_path, tokenizer.fingerprint)
    assert stored.codes.shape == (7, 2, 8, 8) and "image.png" in stored.names
    assert tokenizer.decode(stored.codes[:2]).shape == (2, 3, 5, 16, 16)


def test_decoded_videos_have_all_frames_and_their_rate(
    run: Path, videos: Path, tmp_path: Path
) -> None:
    codes, out = tmp_path / "codes", tmp_path / "decoded"
    assert tessera("tokenize", run, "--data", videos, "--out", codes).code == 0
    stored = read_tokens(codes, Tokenizer.load(run).fingerprint)
    lengths = dict(zip(stored.names, stored.extents, strict=True))
    assert lengths["image.png"].length == 1 and lengths["2.mp4"].length > 5
    for name, row in zip(stored.names, stored.rows, strict=True):
        assert len(row) == 1 + -(-(lengths[name].length - 1) // 4), name
    assert tessera("decode", run, codes, "--out", out).code == 0
    for name in ("0.mp4", "2.mp4"):
        original, decoded = Video.load(videos / name), Video.load(out / name)
        assert len(decoded.frames) == len(original.frames) == lengths[name].length
        assert decoded.rate_hz == pytest.approx(original.rate_hz, rel=0.01)
    assert tessera("decode", run, codes, "--out", tmp_path / "gifs", "--format", "gif").code == 0
    assert (tmp_path / "gifs/2.gif").is_file()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--data.frames", "7"), "use 5 or 9"),
        (("--data.size", "21"), "multiples of 2"),
        (
            ("--adversary", "on", "--data.size", "12", "--task.adversary.motion.layers", "4"),
            "halves a frame 4 times, but the frame size is 12: use --data.size 16",
        ),
        (("--task.model.layers", "compress_sapce"), "did you mean 'compress_space'"),
    ],
)
def test_invalid_settings_are_rejected_with_valid_ones(
    flags: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    message = run_invalid("train", "videos-magvit2", "--preset", "tiny", *flags, "--out", out)
    assert expected in message and not out.exists()


def test_folder_without_videos_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a video", encoding="utf-8")
    flags = ("--data", tmp_path, "--preset", "tiny", "--out", tmp_path / "run")
    message = run_invalid("train", "videos-magvit2", *flags)
    assert f"{tmp_path} has no videos" in message and not (tmp_path / "run").exists()
