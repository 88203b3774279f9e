"""Every verb on recordings, as a person gives it: a folder with good and bad files, three runs, and
what they can do."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from tessera.data.tokens import read_tokens
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.recipes import audio_codec, audio_soundstorm
from tessera.modalities.audio.synthetic import SyntheticAudio
from tessera.run.load import Tokenizer, load_run
from tests.cli_runner import run_invalid, tessera
from tests.runs import engine_in, train

RATE, CODEC_HOP, SEMANTIC_HOP = 8_000, 20, 80
LENGTHS = {0: 0.5, 1: 0.3, 2: 1.2, 3: 0.5, 4: 0.8, 5: 0.6, 6: 0.47, 7: 0.9, 8: 0.5, 9: 0.7}
"""in seconds; some are shorter than the half second that the tiny presets take"""
ODD = {"silence.wav", "offset.wav", "clipped.wav"}
BAD = {"one-sample.wav", "text.wav", "empty.wav"}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten toys at three rates, some in stereo; silence, an offset and a clipped tone; and three
    files that are no recording."""
    folder = tmp_path_factory.mktemp("recordings")
    for number, seconds in LENGTHS.items():
        rate = (8_000, 16_000, 44_100)[number % 3]
        num_synthetic = SyntheticAudio(10, samples=round(seconds * rate), rate_hz=rate, seed=2)
        samples = num_synthetic.item(number, np.random.default_rng(0)).samples
        soundfile.write(
            folder / f"{number}.wav", np.repeat(samples, 1 + number % 2, axis=0).T, rate
        )
    tone = np.sin(np.arange(4_000) / 5)
    soundfile.write(folder / "silence.wav", np.zeros(4_000), RATE)
    soundfile.write(folder / "offset.wav", np.full(4_000, 0.4), RATE)
    soundfile.write(folder / "clipped.wav", (4 * tone).clip(-1, 1), RATE)
    soundfile.write(folder / "one-sample.wav", np.zeros(1), RATE)
    (folder / "text.wav").write_text("this is not a recording", encoding="utf-8")
    (folder / "empty.wav").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def runs(recordings: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three recipes, one after the other, in the shortest of lives."""
    place = tmp_path_factory.mktemp("runs")
    engine_defaults = ("--data", recordings, "--preset", "tiny", "--steps", "6")
    below = ("--tokenizer", place / "codec", "--semantic", place / "semantic", "--critic", "own")
    for recipe, name, more in (
        ("audio-codec", "codec", ("--adversary", "on", "--task.adversary.starts", "2")),
        ("audio-semantic", "semantic", ()),
        ("audio-soundstorm", "storm", below),
    ):
        said = tessera("train", recipe, *engine_defaults, *more, "--out", place / name)
        assert said.code == 0, said
    return place


def heard(path: Path) -> Audio:
    return Audio.load(path)


# ---- a folder


def test_check_tells_rates_channels_and_lengths_and_names_what_is_odd_or_no_recording(
    recordings: Path,
) -> None:
    said = tessera("check", recordings, "--json")
    report = json.loads(said.out)
    assert said.code == 0 and (report["recordings"], report["usable"]) == (16, 13)
    assert report["rates"].keys() == {"8,000 Hz", "16,000 Hz", "44,100 Hz"} and report[
        "channels"
    ].keys() == {"mono", "stereo"}
    assert {one["name"] for one in report["unusable"]} == BAD and all(
        one["reason"] for one in report["unusable"]
    )
    named = {
        kind: [one["name"] for one in report[kind]] for kind in ("silent", "clipped", "off_centre")
    }
    assert (
        "silence.wav" in named["silent"]
        and "clipped.wav" in named["clipped"]
        and "offset.wav" in named["off_centre"]
    )


@pytest.mark.parametrize("name", ["codec", "semantic"])
def test_no_recording_is_left_out_but_those_that_are_none(runs: Path, name: str) -> None:
    rejected = [
        json.loads(line)["example"]
        for line in (runs / name / "rejected.jsonl").read_text().splitlines()
    ]
    assert rejected and set(rejected) <= BAD
    assert not (runs / name / "nonfinite.jsonl").exists()


@pytest.mark.parametrize("recipe", ["audio-codec", "audio-semantic"])
def test_nothing_but_silence_does_no_harm(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "quiet").mkdir()
    for number in range(4):
        soundfile.write(tmp_path / f"quiet/{number}.wav", np.zeros(4_000), RATE)
    engine_defaults = (
        "--data",
        tmp_path / "quiet",
        "--preset",
        "tiny",
        "--steps",
        "5",
        "--data.val-fraction",
        "0",
    )
    said = tessera("train", recipe, *engine_defaults, "--out", tmp_path / "run")
    assert said.code == 0, said
    assert not (tmp_path / "run/nonfinite.jsonl").exists()


# ---- the codec


def test_a_recording_is_heard_before_what_was_rebuilt_of_it(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    said = tessera("sample", runs / "codec", "--data", recordings / "2.wav", "--out", tmp_path)
    assert said.code == 0, said
    assert {file.name for file in tmp_path.iterdir()} == {
        "0000.wav",
        "0000.png",
        "sheet.png",
        "settings.json",
    }
    both = heard(tmp_path / "0000.wav")
    assert both.rate_hz == RATE and both.seconds == pytest.approx(0.5 + 0.4 + 0.5)
    assert abs(both.samples[:, : RATE // 2]).max() > 0.1


def test_evaluate_measures_decibels_distances_bits_and_every_level(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    said = tessera(
        "evaluate", runs / "codec", "--data", recordings, "--out", tmp_path / "numbers.json"
    )
    assert said.code == 0, said
    told = json.loads((tmp_path / "numbers.json").read_text())
    numbers = told["numbers"]["ema"]
    assert {
        "si_sdr",
        "mel_distance",
        "stft_distance",
        "rms_ratio",
        "usage",
        "usage_1",
        "usage_2",
    } <= numbers.keys()
    assert all(np.isfinite(number) for number in numbers.values())
    assert numbers["kilobits_per_second"] == pytest.approx(
        2 * 6 * RATE / CODEC_HOP / 1000, rel=0.01
    )
    assert told["protocol"]["examples"] == 13 and told["protocol"]["transform"]["rate_hz"] == RATE
    assert all(name in said.err for name in BAD)


def test_tokenize_writes_both_kinds_of_symbols_in_step(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    written = {}
    for name in ("codec", "semantic"):
        said = tessera("tokenize", runs / name, "--data", recordings, "--out", tmp_path / name)
        assert said.code == 0 and "13 of 16 examples" in said.out, said
        written[name] = read_tokens(tmp_path / name, Tokenizer(load_run(runs / name)).fingerprint)
    assert written["codec"].names == written["semantic"].names
    assert written["codec"].codes.shape == (13, 200, 2) and written["semantic"].codes.shape == (
        13,
        50,
    )
    for name, codes, said in zip(
        written["codec"].names, written["codec"].codes, written["semantic"].codes, strict=True
    ):
        samples = min(
            4_000, round(LENGTHS.get(int(name[0]) if name[0].isdigit() else -1, 0.5) * RATE)
        )
        ends = {"codec": (codes[:, 0] >= 0).sum().item(), "semantic": (said >= 0).sum().item()}
        assert ends == {
            "codec": -(-samples // CODEC_HOP),
            "semantic": -(-samples // SEMANTIC_HOP),
        }, name
    said = tessera("tokenize", runs / "storm", "--data", recordings, "--out", tmp_path / "both")
    assert said.code == 0, said
    for part, name in (("tokenizer", "codec"), ("semantic", "semantic")):
        again = read_tokens(tmp_path / "both" / part, written[name].about.fingerprint)
        assert again.names == written[name].names and torch.equal(again.codes, written[name].codes)


# ---- semantic tokens


def test_what_was_heard_and_what_symbols_tell_of_it_are_pictures_and_numbers(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    said = tessera(
        "sample", runs / "semantic", "--data", recordings / "0.wav", "--out", tmp_path / "seen"
    )
    assert said.code == 0 and (tmp_path / "seen/0000.png").exists(), said
    said = tessera(
        "evaluate", runs / "semantic", "--data", recordings, "--out", tmp_path / "numbers.json"
    )
    numbers = json.loads((tmp_path / "numbers.json").read_text())["numbers"]["ema"]
    assert said.code == 0 and {"explained_variance", "bits_per_second", "usage"} <= numbers.keys()
    assert numbers["bits_per_second"] == pytest.approx(4 * RATE / SEMANTIC_HOP, rel=0.05)


# ---- SoundStorm


def test_a_recording_is_followed_in_the_voice_of_another_for_so_many_seconds(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    follow = ("sample", runs / "storm", "--like", recordings / "2.wav", "--count", "2")
    for name, more, seconds in (
        ("all", (), 1.2),
        ("some", ("--seconds", "0.4"), 0.4),
        ("quick", ("--seconds", "0.4", "--decoding-steps-per-level", "3", "2"), 0.4),
        ("voice", ("--prompt-audio", recordings / "4.wav", "--seconds", "0.4"), 0.4),
        ("again", ("--prompt-audio", recordings / "4.wav", "--seconds", "0.4"), 0.4),
    ):
        said = tessera(*follow, *more, "--out", tmp_path / name)
        assert said.code == 0, said
        sounds = [heard(tmp_path / name / f"000{number}.wav") for number in range(2)]
        assert all(sound.rate_hz == RATE for sound in sounds)
        assert all(
            sound.seconds == pytest.approx(seconds, abs=2 * CODEC_HOP / RATE) for sound in sounds
        ), name
    some, voice, again = (
        (tmp_path / name / "0000.wav").read_bytes() for name in ("some", "voice", "again")
    )
    assert voice == again and voice != some
    told = json.loads((tmp_path / "voice/settings.json").read_text())
    assert (
        told["like"].endswith("2.wav")
        and told["prompt_audio"].endswith("4.wav")
        and told["seconds"] == 0.4
    )
    assert told["sampling"]["level_rounds"] == [16, 1]
    assert json.loads((tmp_path / "quick/settings.json").read_text())["sampling"][
        "level_rounds"
    ] == [3, 2]


def test_held_out_recordings_and_those_of_a_folder_are_drawn_again(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    said = tessera("sample", runs / "storm", "--count", "2", "--out", tmp_path / "held")
    assert said.code == 0 and len(list((tmp_path / "held").glob("0*.wav"))) == 2, said
    said = tessera(
        "sample", runs / "storm", "--data", recordings / "1.wav", "--out", tmp_path / "given"
    )
    assert said.code == 0, said
    assert heard(tmp_path / "given/0000.wav").seconds <= 0.3 + SEMANTIC_HOP / RATE, (
        "no longer than the recording"
    )


def test_evaluate_tells_how_much_of_each_level_is_guessed(runs: Path, tmp_path: Path) -> None:
    said = tessera("evaluate", runs / "storm", "--out", tmp_path / "numbers.json")
    assert said.code == 0, said
    numbers = json.loads((tmp_path / "numbers.json").read_text())["numbers"]["ema"]
    assert {"cross_entropy", "accuracy", "accuracy_1", "accuracy_2"} <= numbers.keys()


def test_codes_that_were_written_before_are_learnt_from(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    assert (
        tessera("tokenize", runs / "codec", "--data", recordings, "--out", tmp_path / "codes").code
        == 0
    )
    engine_defaults = (
        "--data",
        recordings,
        "--preset",
        "tiny",
        "--steps",
        "2",
        "--tokenizer",
        runs / "codec",
    )
    given = (
        "--semantic",
        runs / "semantic",
        "--task.tokens",
        tmp_path / "codes",
        "--out",
        tmp_path / "run",
    )
    said = tessera("train", "audio-soundstorm", *engine_defaults, *given)
    assert said.code == 0, said
    assert not list((tmp_path / "run/cache").glob("tokenizer-*/index.json")), (
        "nothing was tokenized again"
    )


@pytest.mark.parametrize("learns", ["generator", "critic"])
def test_only_the_network_that_is_to_learn_moves(
    runs: Path, train_only: str, tmp_path: Path
) -> None:
    run = audio_soundstorm(
        "tiny", tokenizer=str(runs / "codec"), semantic=str(runs / "semantic"), critic="own"
    )
    run = dataclasses.replace(
        run,
        task=dataclasses.replace(run.task, train_only=train_only),
        engine=dataclasses.replace(run.engine, steps=3),
    )
    engine = engine_in(tmp_path, run)
    before = {name: tensor.clone() for name, tensor in engine.task.model.state_dict().items()}
    engine.run()
    moved = {
        name.split(".")[0]
        for name, tensor in engine.task.model.state_dict().items()
        if not torch.equal(tensor, before[name])
    }
    assert moved == {"network" if train_only == "generator" else "critic"}


# ---- what does not fit


def test_five_seconds_are_not_thirty(runs: Path, recordings: Path, tmp_path: Path) -> None:
    follow = ("sample", runs / "storm", "--like", recordings / "2.wav")
    assert "lasts 1.20 s, but 30 s are asked for" in run_invalid(*follow, "--seconds", "30")
    (tmp_path / "short").mkdir()
    for number in range(6):
        soundfile.write(tmp_path / f"short/{number}.wav", np.zeros(5 * RATE), RATE)
    long = (
        "--data",
        tmp_path / "short",
        "--preset",
        "tiny",
        "--data.seconds",
        "30",
        "--data.on-short",
        "skip",
    )
    said = run_invalid(
        "train", "audio-codec", *long, "--data.val-fraction", "0", "--out", tmp_path / "run"
    )
    assert "it lasts 5.00 s, less than the 30.00 s asked for" in said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--seconds", "0"), "more than 0"),
        (("--seconds", "nan"), "more than 0"),
        (("--seconds", "0.003"), "no whole frame"),
        (("--prompt-audio", "nowhere.wav"), "nowhere.wav"),
        (("--decoding-steps", "8"), "--decoding-steps-per-level 16 1"),
        (("--decoding-steps-per-level", "8", "0"), "must be at least 1"),
        (("--prompt", "hello"), "without prompts"),
        (("--mask", "mask.png"), "A mask is for a picture"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused(
    runs: Path, recordings: Path, more: tuple[str, ...], words: str
) -> None:
    assert words in run_invalid("sample", runs / "storm", "--like", recordings / "2.wav", *more)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text.wav", "text.wav"),
        ("empty.wav", "empty"),
        ("one-sample.wav", "holds 1 sample"),
        ("no.wav", "no.wav"),
    ],
)
def test_what_is_no_recording_cannot_be_followed(
    runs: Path, recordings: Path, name: str, words: str
) -> None:
    assert words in run_invalid("sample", runs / "storm", "--like", recordings / name)


def test_where_nothing_can_be_read_nothing_is_drawn_again(runs: Path, recordings: Path) -> None:
    assert "Not one example could be read" in run_invalid(
        "sample", runs / "storm", "--data", recordings / "text.wav"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("storm", "--prompt", "hello"), "takes no prompt"),
        (("storm", "--seconds", "1"), "say which with --like"),
        (("storm", "--prompt-audio", "a.wav"), "say which with --like"),
        (("codec", "--like", "a.wav"), "rebuilds what it is shown"),
        (("semantic", "--like", "a.wav"), "rebuilds what it is shown"),
    ],
    ids=str,
)
def test_what_a_run_does_not_take_is_refused(
    runs: Path, arguments: tuple[str, ...], words: str
) -> None:
    name, *more = arguments
    assert words in run_invalid("sample", runs / name, *more)


def test_tokenizers_that_are_missing_or_of_another_kind_are_refused(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    engine_defaults = (
        "train",
        "audio-soundstorm",
        "--data",
        recordings,
        "--preset",
        "tiny",
        "--out",
        tmp_path / "run",
    )
    codec, semantic = ("--tokenizer", runs / "codec"), ("--semantic", runs / "semantic")
    assert "tessera train audio-codec" in run_invalid(
        *engine_defaults, "--tokenizer", tmp_path / "none", *semantic
    )
    assert "tessera train audio-semantic" in run_invalid(
        *engine_defaults, *codec, "--semantic", tmp_path / "none"
    )
    assert "one level" in run_invalid(*engine_defaults, "--tokenizer", runs / "semantic", *semantic)
    assert "'rate_hz': 8000" in run_invalid(
        *engine_defaults, *codec, *semantic, "--data.rate-hz", "16000"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("what", ["levels", "rate"])
def test_a_codec_of_another_rate_or_number_of_levels_is_refused(
    runs: Path, recordings: Path, what: str, tmp_path: Path
) -> None:
    """Of another rate from the beginning; of other levels where the run began with another one."""
    other = audio_codec("tiny")
    if what == "levels":
        quantizer = dataclasses.replace(other.task.model.quantizer, num_quantizers=3)
        model = dataclasses.replace(other.task.model, quantizer=quantizer)
        other = dataclasses.replace(other, task=dataclasses.replace(other.task, model=model))
    else:
        reconstruction = dataclasses.replace(other.task.reconstruction, rate_hz=16_000)
        data = dataclasses.replace(other.data, rate_hz=16_000)
        other = dataclasses.replace(
            other, task=dataclasses.replace(other.task, reconstruction=reconstruction), data=data
        )
    train(
        tmp_path / "other",
        dataclasses.replace(other, engine=dataclasses.replace(other.engine, steps=1)),
    )
    place = runs / "storm" if what == "levels" else tmp_path / "new"
    said = run_invalid(
        "train",
        "audio-soundstorm",
        "--data",
        recordings,
        "--preset",
        "tiny",
        "--steps",
        "9",
        "--critic",
        "own",
        "--tokenizer",
        tmp_path / "other",
        "--semantic",
        runs / "semantic",
        "--out",
        place,
    )
    assert ("another one" if what == "levels" else "'rate_hz': 16000") in said


def test_streams_of_another_length_are_refused(
    runs: Path, recordings: Path, tmp_path: Path
) -> None:
    """Codes that were written of clips of half a second, where the run takes a quarter."""
    assert (
        tessera("tokenize", runs / "codec", "--data", recordings, "--out", tmp_path / "codes").code
        == 0
    )
    said = run_invalid(
        "train",
        "audio-soundstorm",
        "--data",
        recordings,
        "--preset",
        "tiny",
        "--data.seconds",
        "0.25",
        "--tokenizer",
        runs / "codec",
        "--semantic",
        runs / "semantic",
        "--task.tokens",
        tmp_path / "codes",
        "--out",
        tmp_path / "run",
    )
    assert "tokenize examples of the same length" in said
