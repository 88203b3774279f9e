"""Every verb on clips, as a person gives it: a folder with good and bad files in it, a run, and
what can be done with it."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import PIL.Image
import pytest

from tessera.api.tokenizer import Tokenizer
from tessera.cli import flags
from tessera.cli import main as cli
from tessera.data.tokens import read_tokens
from tessera.modalities.image.synthetic import SyntheticImages, draw
from tessera.modalities.video.synthetic import SyntheticVideos, draw_video
from tessera.recipes.registry import named
from tests.cli_runner import run_invalid, tessera

FRAMES = 9


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six clips and a picture; a clip cut short, a file of no bytes, a text that says it is a film,
    and one with sound only."""
    folder = tmp_path_factory.mktemp("clips")
    num_synthetic = SyntheticVideos(count=7, size=32, frames=FRAMES, seed=3)
    for number in range(len(num_synthetic)):
        draw_video(num_synthetic.scene(number), 32, FRAMES).save(folder / f"{number}")
        (folder / f"{number}.gif").unlink()
    draw(SyntheticImages(count=1, size=32).scene(0), 32).save(folder / "picture")
    whole = (folder / "6.mp4").read_bytes()
    (folder / "6.mp4").unlink()
    (folder / "broken.mp4").write_bytes(whole[: len(whole) * 2 // 3])
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "text.mp4").write_text("this is not a film", encoding="utf-8")
    with av.open(str(folder / "sound.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=16000)
        sound = av.AudioFrame.from_ndarray(
            np.zeros((1, 1024), np.float32), format="fltp", layout="mono"
        )
        sound.sample_rate = 16000
        container.mux(stream.encode(sound))
        container.mux(stream.encode())
    return folder


@pytest.fixture(scope="module")
def run(clips: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run") / "moving"
    said = tessera(
        "train", "videos-magvit2", "--data", clips, "--preset", "tiny", "--steps", "4", "--out", run
    )
    assert said.code == 0, said
    return run


def test_check_finds_out_that_these_are_clips_and_what_is_wrong_with_some(clips: Path) -> None:
    said = tessera("check", clips, "--json")
    report = json.loads(said.out)
    assert said.code == 0 and (report["videos"], report["images"]) == (6, 1)
    assert {one["name"] for one in report["unusable"]} == {
        "broken.mp4",
        "empty.mp4",
        "sound.mp4",
        "text.mp4",
    }
    assert all(one["reason"] for one in report["unusable"])
    assert report["durations"]["max_frames"] == FRAMES


def test_check_can_be_told_what_to_look_for(clips: Path) -> None:
    report = json.loads(tessera("check", clips, "--medium", "image", "--json").out)
    assert (report["images"], report["usable"]) == (1, 1)


def test_bad_files_are_left_out_and_named_and_the_others_are_learnt_from(run: Path) -> None:
    rejected = [
        json.loads(line)["example"] for line in (run / "rejected.jsonl").read_text().splitlines()
    ]
    assert set(rejected) <= {"broken.mp4", "empty.mp4", "sound.mp4", "text.mp4"} and rejected
    assert not (run / "nonfinite.jsonl").exists()


def test_a_clip_is_played_beside_what_was_rebuilt_of_it(
    run: Path, clips: Path, tmp_path: Path
) -> None:
    said = tessera("sample", run, "--data", clips / "2.mp4", "--out", tmp_path)
    assert said.code == 0, said
    for name in ("0000.mp4", "0000.gif", "sheet.mp4", "sheet.gif"):
        frames = decoded(tmp_path / name)
        assert len(frames) == 5, name  # so many does the tiny preset take
        assert frames.std() > 10, f"{name} is black, or of one colour"
    with PIL.Image.open(tmp_path / "0000.gif") as gif:
        assert gif.n_frames == 5 and gif.width > 2 * 16


def decoded(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def test_evaluate_measures_frames_motion_symbols_and_bits(
    run: Path, clips: Path, tmp_path: Path
) -> None:
    said = tessera("evaluate", run, "--data", clips, "--out", tmp_path / "numbers.json")
    assert said.code == 0, said
    numbers = json.loads((tmp_path / "numbers.json").read_text())
    assert {"psnr", "ssim", "frame_difference_psnr", "usage", "bits_per_pixel"} <= numbers[
        "numbers"
    ]["ema"].keys()
    assert numbers["numbers"]["ema"]["bits_per_pixel"] == pytest.approx(
        2 * 8 * 8 * 6 / (5 * 16 * 16)
    )
    assert numbers["protocol"]["examples"] == 7
    assert "broken.mp4" in said.err and "sound.mp4" in said.err


def test_tokenize_writes_codes_in_time_and_space(run: Path, clips: Path, tmp_path: Path) -> None:
    assert tessera("tokenize", run, "--data", clips, "--out", tmp_path).code == 0
    tokenizer = Tokenizer.load(run)
    written = read_tokens(tmp_path, tokenizer.fingerprint)
    assert written.codes.shape == (7, 2, 8, 8) and "picture.png" in written.names
    assert tokenizer.decode(written.codes[:2]).shape == (2, 3, 5, 16, 16)


@pytest.mark.parametrize(
    ("flags_given", "words"),
    [
        (("--data.frames", "7"), "Use 5 or 9"),
        (("--data.size", "21"), "multiples of 2"),
        (
            ("--adversary", "on", "--data.size", "12", "--task.adversary.motion.layers", "4"),
            "halves a frame 4 times",
        ),
        (("--task.model.layers", "compress_sapce"), "did you mean 'compress_space'"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    flags_given: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    assert words in run_invalid(
        "train", "videos-magvit2", "--preset", "tiny", *flags_given, "--out", tmp_path / "run"
    )
    assert not (tmp_path / "run").exists()


def test_a_folder_without_clips_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing to see", encoding="utf-8")
    train = (
        "train",
        "videos-magvit2",
        "--data",
        tmp_path,
        "--preset",
        "tiny",
        "--out",
        tmp_path / "run",
    )
    assert "holds no clips" in run_invalid(*train)


@pytest.mark.parametrize(
    ("medium", "recipes"),
    [
        ("image", ["images-vqgan", "images-maskgit"]),
        ("video", ["videos-magvit2"]),
        ("sound", ["audio-codec"]),
        ("music", ["music-mulan"]),
        ("mesh", ["meshes-autoencoder"]),
        (
            "all",
            [
                "images-vqgan",
                "images-maskgit",
                "videos-magvit2",
                "audio-codec",
                "music-mulan",
                "meshes-autoencoder",
            ],
        ),
    ],
)
def test_the_demo_of_a_medium_trains_its_recipes(
    medium: str, recipes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[str, ...]] = []
    monkeypatch.setattr(cli, "train", lambda *arguments: given.append(arguments))
    monkeypatch.setattr(cli, "evaluate", lambda run: given.append(("evaluated", run)))
    assert tessera("demo", "--medium", medium).code == 0
    trained = [arguments for arguments in given if arguments[0] != "evaluated"]
    assert [recipe for recipe, *_ in trained] == recipes
    for recipe, *arguments in trained:
        assert flags.parse(named(recipe), arguments).run.recipe == recipe
