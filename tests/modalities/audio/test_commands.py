"""All commands on a folder of valid and invalid audio files, with runs of the three recipes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from tessera.api.tokenizer import Tokenizer
from tessera.data.tokens import read_tokens
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.recipes import audio_codec, audio_soundstorm
from tessera.modalities.audio.synthetic import SyntheticAudio
from tessera.modalities.audio.synthetic_speech import SyntheticSpeech
from tests.cli_runner import run_invalid, tessera
from tests.runs import engine_in, train

RATE_HZ, CODEC_HOP, SEMANTIC_HOP = 8_000, 20, 80
SECONDS = (0.5, 0.3, 1.2, 0.5, 0.8, 0.6, 0.47, 0.9, 0.5, 0.7)
"""Some files are shorter than the half second that the tiny presets use."""
UNREADABLE = {"one-sample.wav", "text.wav", "empty.wav"}


@pytest.fixture(scope="module")
def audio_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write synthetic audio at three rates, mono and stereo, unusual files, and UNREADABLE."""
    folder = tmp_path_factory.mktemp("audio")
    for number, seconds in enumerate(SECONDS):
        rate_hz = (8_000, 16_000, 44_100)[number % 3]
        dataset = SyntheticAudio(10, samples=round(seconds * rate_hz), rate_hz=rate_hz, seed=2)
        samples = dataset.item(number, np.random.default_rng(0)).samples
        stereo = np.repeat(samples, 1 + number % 2, axis=0)
        soundfile.write(folder / f"{number}.wav", stereo.T, rate_hz)
    tone = np.sin(np.arange(4_000) / 5)
    soundfile.write(folder / "silence.wav", np.zeros(4_000), RATE_HZ)
    soundfile.write(folder / "offset.wav", np.full(4_000, 0.4), RATE_HZ)
    soundfile.write(folder / "clipped.wav", (4 * tone).clip(-1, 1), RATE_HZ)
    soundfile.write(folder / "one-sample.wav", np.zeros(1), RATE_HZ)
    (folder / "text.wav").write_text("this is not audio", encoding="utf-8")
    (folder / "empty.wav").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def runs(audio_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train all three recipes for a few steps; return the folder of the runs."""
    folder = tmp_path_factory.mktemp("runs")
    common = ("--data", audio_files, "--preset", "tiny", "--steps", "6")
    tokenizers = ("--tokenizer", folder / "codec", "--semantic", folder / "semantic")
    for recipe, name, flags in (
        ("audio-codec", "codec", ("--adversary", "on", "--task.adversary.start-step", "2")),
        ("audio-semantic", "semantic", ()),
        ("audio-soundstorm", "soundstorm", (*tokenizers, "--critic", "own")),
    ):
        result = tessera("train", recipe, *common, *flags, "--out", folder / name)
        assert result.code == 0, result
    return folder


def read_json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


# ---- a folder


def test_check_lists_rates_channels_and_unusual_files(audio_files: Path) -> None:
    result = tessera("check", audio_files, "--json")
    report = json.loads(result.out)
    assert result.code == 0 and (report["files"], report["usable"]) == (16, 13)
    assert report["rates"].keys() == {"8,000 Hz", "16,000 Hz", "44,100 Hz"}
    assert report["channels"].keys() == {"mono", "stereo"}
    assert {one["name"] for one in report["unusable"]} == UNREADABLE
    assert all(one["reason"] for one in report["unusable"])
    for kind, name in {
        "silent": "silence.wav",
        "clipped": "clipped.wav",
        "off_centre": "offset.wav",
    }.items():
        assert name in [one["name"] for one in report[kind]]


@pytest.mark.parametrize("name", ["codec", "semantic"])
def test_only_unreadable_files_are_skipped(runs: Path, name: str) -> None:
    lines = (runs / name / "rejected.jsonl").read_text().splitlines()
    rejected = {json.loads(line)["example"] for line in lines}
    assert rejected and rejected <= UNREADABLE
    assert not (runs / name / "nonfinite.jsonl").exists()


@pytest.mark.parametrize("recipe", ["audio-codec", "audio-semantic"])
def test_silence_alone_causes_no_non_finite_step(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "silence").mkdir()
    for number in range(4):
        soundfile.write(tmp_path / f"silence/{number}.wav", np.zeros(4_000), RATE_HZ)
    flags = ("--data", tmp_path / "silence", "--data.val-fraction", "0", "--out", tmp_path / "run")
    result = tessera("train", recipe, "--preset", "tiny", "--steps", "5", *flags)
    assert result.code == 0, result
    assert not (tmp_path / "run/nonfinite.jsonl").exists()


# ---- the codec


def test_synthetic_original_is_followed_by_its_reconstruction(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert tessera("train", "audio-codec", "--preset", "tiny", "--steps", 2, "--out", run).code == 0
    result = tessera("sample", run, "--count", 1, "--out", tmp_path / "samples")
    assert result.code == 0, result
    names = {file.name for file in (tmp_path / "samples").iterdir()}
    assert names == {"0000.wav", "0000.png", "sheet.png", "settings.json"}
    pair = Audio.load(tmp_path / "samples/0000.wav")
    assert pair.rate_hz == RATE_HZ and pair.seconds == pytest.approx(0.5 + 0.4 + 0.5)
    assert abs(pair.samples[:, : RATE_HZ // 2]).max() > 0.1


def test_evaluation_of_a_codec_has_distances_bits_and_codebook_usage(
    runs: Path, audio_files: Path, tmp_path: Path
) -> None:
    out = tmp_path / "evaluation.json"
    result = tessera("evaluate", runs / "codec", "--data", audio_files, "--out", out)
    assert result.code == 0, result
    evaluation = read_json(out)
    metrics = evaluation["metrics"]["ema"]
    usage = {"codebook_usage", "codebook_usage_1", "codebook_usage_2"}
    assert usage | {"si_sdr", "mel_distance", "stft_distance", "rms_ratio"} <= metrics.keys()
    assert all(np.isfinite(value) for value in metrics.values())
    kilobits = 2 * 6 * RATE_HZ / CODEC_HOP / 1000
    assert metrics["kilobits_per_second"] == pytest.approx(kilobits, rel=0.01)
    protocol = evaluation["protocol"]
    assert protocol["examples"] == 13 and protocol["preprocessing"]["rate_hz"] == RATE_HZ
    assert all(f"Skipped {name}:" in result.err for name in UNREADABLE)


def test_codec_and_semantic_codes_are_written_for_the_same_files(
    runs: Path, audio_files: Path, tmp_path: Path
) -> None:
    """Codes are -1 after the end of a file; a generator writes those of both tokenizers."""
    stored = {}
    for name in ("codec", "semantic"):
        flags = ("--no-whole", "--data", audio_files, "--out", tmp_path / name)
        result = tessera("tokenize", runs / name, *flags)
        assert result.code == 0 and "13 of 16 examples" in result.out, result
        stored[name] = read_tokens(tmp_path / name, Tokenizer.load(runs / name).fingerprint)
    codec, semantic = stored["codec"], stored["semantic"]
    assert codec.names == semantic.names and not codec.extents
    assert codec.codes.shape == (13, 200, 2) and semantic.codes.shape == (13, 50)
    for name, codec_codes, semantic_codes in zip(
        codec.names, codec.codes, semantic.codes, strict=True
    ):
        seconds = SECONDS[int(name[0])] if name[0].isdigit() else 0.5
        samples = min(4_000, round(seconds * RATE_HZ))
        assert (codec_codes[:, 0] >= 0).sum() == -(-samples // CODEC_HOP), name
        assert (semantic_codes >= 0).sum() == -(-samples // SEMANTIC_HOP), name
    flags = ("--no-whole", "--data", audio_files, "--out", tmp_path / "both")
    result = tessera("tokenize", runs / "soundstorm", *flags)
    assert result.code == 0, result
    for dependency, expected in (("tokenizer", codec), ("semantic", semantic)):
        found = read_tokens(tmp_path / "both" / dependency, expected.info.fingerprint)
        assert found.names == expected.names and torch.equal(found.codes, expected.codes)


# ---- semantic tokens


def test_semantic_tokens_are_shown_as_images_and_evaluated(
    runs: Path, audio_files: Path, tmp_path: Path
) -> None:
    flags = ("--data", audio_files / "0.wav", "--out", tmp_path / "samples")
    result = tessera("sample", runs / "semantic", *flags)
    assert result.code == 0 and (tmp_path / "samples/0000.png").exists(), result
    out = tmp_path / "evaluation.json"
    result = tessera("evaluate", runs / "semantic", "--data", audio_files, "--out", out)
    assert result.code == 0, result
    metrics = read_json(out)["metrics"]["ema"]
    assert {"explained_variance", "bits_per_second", "codebook_usage"} <= metrics.keys()
    bits = 4 * RATE_HZ / SEMANTIC_HOP
    assert metrics["bits_per_second"] == pytest.approx(bits, rel=0.05)


# ---- SoundStorm


def test_audio_is_followed_for_some_seconds_in_another_voice(
    runs: Path, audio_files: Path, tmp_path: Path
) -> None:
    like = ("sample", runs / "soundstorm", "--like", audio_files / "2.wav", "--count", "2")
    voice = ("--prompt-audio", audio_files / "4.wav", "--seconds", "0.4")
    for name, flags, seconds in (
        ("all", (), 1.2),
        ("some", ("--seconds", "0.4"), 0.4),
        ("fast", ("--seconds", "0.4", "--decoding-steps-per-level", "3", "2"), 0.4),
        ("voice", voice, 0.4),
        ("again", voice, 0.4),
    ):
        result = tessera(*like, *flags, "--out", tmp_path / name)
        assert result.code == 0, result
        for number in range(2):
            audio = Audio.load(tmp_path / name / f"000{number}.wav")
            assert audio.rate_hz == RATE_HZ
            assert audio.seconds == pytest.approx(seconds, abs=2 * CODEC_HOP / RATE_HZ), name
    some, voiced, again = (
        (tmp_path / name / "0000.wav").read_bytes() for name in ("some", "voice", "again")
    )
    assert voiced == again and voiced != some
    settings = read_json(tmp_path / "voice/settings.json")
    assert settings["like"].endswith("2.wav") and settings["prompt_audio"].endswith("4.wav")
    assert settings["seconds"] == 0.4
    assert settings["guidance"]["scale"] == 1 and "decoding_steps" not in settings["sampling"]
    assert "guidance" not in read_json(tmp_path / "some/settings.json"), "it needs a prompt"
    assert settings["sampling"]["decoding_steps_per_level"] == [16, 1]
    fast = read_json(tmp_path / "fast/settings.json")
    assert fast["sampling"]["decoding_steps_per_level"] == [3, 2]


def test_held_out_and_given_audio_are_generated_again(
    runs: Path, audio_files: Path, tmp_path: Path
) -> None:
    result = tessera("sample", runs / "soundstorm", "--count", "2", "--out", tmp_path / "held-out")
    assert result.code == 0 and len(list((tmp_path / "held-out").glob("0*.wav"))) == 2, result
    names = read_json(tmp_path / "held-out/settings.json")["examples"]
    assert len(names) == 2 and all((audio_files / name).exists() for name in names)
    flags = ("--data", audio_files / "1.wav", "--out", tmp_path / "given")
    result = tessera("sample", runs / "soundstorm", *flags)
    assert result.code == 0, result
    seconds = Audio.load(tmp_path / "given/0000.wav").seconds
    assert seconds <= 0.3 + SEMANTIC_HOP / RATE_HZ, "no longer than the file"
    assert read_json(tmp_path / "given/settings.json")["examples"] == ["1.wav"]


def test_generated_audio_is_written_in_the_requested_format(runs: Path, tmp_path: Path) -> None:
    common = ("sample", runs / "soundstorm", "--count", "2", "--out", tmp_path / "samples")
    message = run_invalid(*common, "--format", "xyz")
    assert "--format xyz cannot be written for this medium: its formats are wav" in message
    assert not (tmp_path / "samples").exists()
    assert tessera(*common, "--format", "mp3").code == 0
    assert [path.name for path in sorted((tmp_path / "samples").glob("*.*3"))] == [
        "0000.mp3",
        "0001.mp3",
    ]
    assert Audio.load(tmp_path / "samples/0000.mp3").seconds > 0


def test_evaluation_has_the_accuracy_of_each_level(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "evaluation.json"
    result = tessera("evaluate", runs / "soundstorm", "--out", out)
    assert result.code == 0, result
    metrics = read_json(out)["metrics"]["ema"]
    assert {"cross_entropy", "accuracy", "accuracy_1", "accuracy_2"} <= metrics.keys()


def test_training_uses_stored_codes(runs: Path, audio_files: Path, tmp_path: Path) -> None:
    codes = tmp_path / "codes"
    flags = ("--no-whole", "--data", audio_files, "--out", codes)
    assert tessera("tokenize", runs / "codec", *flags).code == 0
    result = tessera(
        *("train", "audio-soundstorm", "--data", audio_files, "--preset", "tiny", "--steps", "2"),
        *("--tokenizer", runs / "codec", "--semantic", runs / "semantic"),
        *("--task.tokens", codes, "--out", tmp_path / "run"),
    )
    assert result.code == 0, result
    cached = list((tmp_path / "run/cache").glob("*/index.json"))
    assert cached and all(path.parent.name.startswith("semantic-") for path in cached)


@pytest.mark.parametrize("train_only", ["generator", "critic"])
def test_only_the_chosen_network_is_trained(runs: Path, train_only: str, tmp_path: Path) -> None:
    run = audio_soundstorm(
        "tiny", tokenizer=str(runs / "codec"), semantic=str(runs / "semantic"), critic="own"
    )
    task = dataclasses.replace(run.task, train_only=train_only)
    engine = dataclasses.replace(run.engine, steps=3)
    trainer = engine_in(tmp_path, dataclasses.replace(run, task=task, engine=engine))
    before = {name: tensor.clone() for name, tensor in trainer.task.model.state_dict().items()}
    trainer.run()
    after = trainer.task.model.state_dict()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    expected = "network" if train_only == "generator" else "critic"
    assert {name.split(".")[0] for name in changed} == {expected}


# ---- invalid requests


def test_more_seconds_than_the_audio_has_are_rejected(
    runs: Path, audio_files: Path, tmp_path: Path
) -> None:
    like = ("sample", runs / "soundstorm", "--like", audio_files / "2.wav")
    assert "has 1.20 s, but --seconds is 30" in run_invalid(*like, "--seconds", "30")
    (tmp_path / "short").mkdir()
    for number in range(6):
        soundfile.write(tmp_path / f"short/{number}.wav", np.zeros(5 * RATE_HZ), RATE_HZ)
    message = run_invalid(
        *("train", "audio-codec", "--preset", "tiny", "--data", tmp_path / "short"),
        *("--data.seconds", "30", "--data.on-short", "skip", "--data.val-fraction", "0"),
        *("--out", tmp_path / "run"),
    )
    assert "it has 5.00 s, less than the requested 30.00 s" in message


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--seconds", "0"), "--seconds must be above 0, got 0"),
        (("--seconds", "nan"), "--seconds must be above 0, got nan"),
        (("--seconds", "0.003"), "less than a frame of 0.010 s"),
        (("--prompt-audio", "nowhere.wav"), "nowhere.wav"),
        (("--decoding-steps", "8"), "use --decoding-steps-per-level, for example 16 1"),
        (("--decoding-steps-per-level", "8", "0"), "must be at least 1"),
        (("--prompt", "hello"), "supports no prompt"),
        (("--mask", "mask.png"), "does not support --mask"),
        (("--data", "a.wav"), "--like and --data cannot be combined"),
    ],
    ids=str,
)
def test_invalid_flags_beside_like_are_rejected(
    runs: Path, audio_files: Path, flags: tuple[str, ...], expected: str
) -> None:
    like = ("--like", audio_files / "2.wav")
    assert expected in run_invalid("sample", runs / "soundstorm", *like, *flags)


def test_prompts_without_a_voice_are_rejected(
    runs: Path, audio_files: Path, tmp_path: Path
) -> None:
    tone = 0.3 * np.sin(np.arange(800) / 5)
    for name, samples, expected in (
        ("short.wav", tone, "short.wav has 0.10 s, too little for a voice: give a recording of"),
        ("silence.wav", np.zeros(8_000), "silence.wav is silent: give a recording of somebody"),
    ):
        soundfile.write(tmp_path / name, samples, RATE_HZ)
        flags = ("--like", audio_files / "2.wav", "--prompt-audio", tmp_path / name)
        assert expected in run_invalid("sample", runs / "soundstorm", *flags)


def test_a_codec_of_another_rate_is_rejected(runs: Path, tmp_path: Path) -> None:
    tokenizers = ("--tokenizer", runs / "codec", "--semantic", runs / "semantic")
    flags = ("--preset", "tiny", "--data.rate-hz", "16000", "--out", tmp_path / "run")
    message = run_invalid("train", "audio-soundstorm", *flags, *tokenizers)
    assert "was trained on examples with rate_hz 8000, but this run has rate_hz 16000" in message
    assert "use --data.rate-hz 8000, or another tokenizer (--tokenizer RUN)" in message


def test_recordings_without_a_transcript_are_reported(tmp_path: Path) -> None:
    """A recogniser trains its codebook on them; text to speech leaves them out."""
    data = tmp_path / "data"
    data.mkdir()
    dataset = SyntheticSpeech(6, samples=6_400, rate_hz=RATE_HZ, seed=2)
    for number in range(6):
        example = dataset.item(number, np.random.default_rng(0))
        soundfile.write(data / f"{number}.wav", example.samples[0, : example.length], RATE_HZ)
        if number < 4:
            (data / f"{number}.txt").write_text(example.caption, encoding="utf-8")
    common = ("--data", data, "--data.val-fraction", "0", "--preset", "tiny", "--steps", "1")
    recogniser = tmp_path / "recogniser"
    result = tessera("train", "audio-semantic", "--features", "ctc", *common, "--out", recogniser)
    assert result.code == 0, result
    assert "2 of 6 recordings have no transcript: the codebook is trained on them" in result.out
    flags = ("--tokenizer", recogniser, "--soundstorm", "none", "--out", tmp_path / "speech")
    result = tessera("train", "audio-text2semantic", *common, *flags)
    assert result.code == 0, result
    assert "2 of 6 recordings have no transcript and are left out." in result.out


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("text.wav", "text.wav"),
        ("empty.wav", "empty"),
        ("one-sample.wav", "it holds 1 sample"),
        ("no.wav", "no.wav"),
    ],
)
def test_unreadable_audio_cannot_be_followed(
    runs: Path, audio_files: Path, name: str, expected: str
) -> None:
    message = run_invalid("sample", runs / "soundstorm", "--like", audio_files / name)
    assert expected in message


def test_samples_of_unreadable_files_are_an_error(runs: Path, audio_files: Path) -> None:
    message = run_invalid("sample", runs / "soundstorm", "--data", audio_files / "text.wav")
    assert "No example could be read. `tessera check` shows the reasons." in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("soundstorm", "--prompt", "hello"), "supports no prompt"),
        (("soundstorm", "--seconds", "1"), "give it with --like RECORDING"),
        (("soundstorm", "--prompt-audio", "a.wav"), "give it with --like RECORDING"),
        (("codec", "--like", "a.wav"), "reconstructs examples (--data)"),
        (("semantic", "--like", "a.wav"), "reconstructs examples (--data)"),
    ],
    ids=str,
)
def test_inputs_that_a_run_does_not_support_are_rejected(
    runs: Path, arguments: tuple[str, ...], expected: str
) -> None:
    name, *flags = arguments
    assert expected in run_invalid("sample", runs / name, *flags)


def test_missing_and_unsuitable_tokenizers_are_rejected(
    runs: Path, audio_files: Path, tmp_path: Path
) -> None:
    command = (
        *("train", "audio-soundstorm", "--data", audio_files, "--preset", "tiny"),
        *("--out", tmp_path / "run"),
    )
    codec, semantic = ("--tokenizer", runs / "codec"), ("--semantic", runs / "semantic")
    for flags, expected in (
        (("--tokenizer", tmp_path / "none", *semantic), "tessera train audio-codec"),
        ((*codec, "--semantic", tmp_path / "none"), "tessera train audio-semantic"),
        (
            ("--tokenizer", runs / "semantic", *semantic),
            "needs a tokenizer with several quantizers",
        ),
        ((*codec, *semantic, "--data.rate-hz", "16000"), "run has rate_hz 16000"),
    ):
        assert expected in run_invalid(*command, *flags)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("change", ["quantizers", "rate"])
def test_codec_with_another_rate_or_other_quantizers_is_rejected(
    runs: Path, audio_files: Path, change: str, tmp_path: Path
) -> None:
    """Another rate in a new run; other quantizers in a run that was started with another codec."""
    run = audio_codec("tiny")
    data, task = run.data, run.task
    if change == "quantizers":
        quantizer = dataclasses.replace(task.model.quantizer, num_quantizers=3)
        model = dataclasses.replace(task.model, quantizer=quantizer)
        task = dataclasses.replace(task, model=model)
    else:
        reconstruction = dataclasses.replace(task.reconstruction, rate_hz=16_000)
        task = dataclasses.replace(task, reconstruction=reconstruction)
        data = dataclasses.replace(data, rate_hz=16_000)
    engine = dataclasses.replace(run.engine, steps=1)
    train(tmp_path / "other", dataclasses.replace(run, task=task, data=data, engine=engine))
    out = runs / "soundstorm" if change == "quantizers" else tmp_path / "new"
    message = run_invalid(
        *("train", "audio-soundstorm", "--data", audio_files, "--preset", "tiny", "--steps", "9"),
        *("--critic", "own", "--tokenizer", tmp_path / "other"),
        *("--semantic", runs / "semantic", "--out", out),
    )
    expected = "is another one" if change == "quantizers" else "this run has rate_hz 16000"
    assert expected in message


def test_stored_codes_of_another_length_are_rejected(
    runs: Path, audio_files: Path, tmp_path: Path
) -> None:
    """The codes are of half a second, and the run uses a quarter."""
    codes = tmp_path / "codes"
    flags = ("--no-whole", "--data", audio_files, "--out", codes)
    assert tessera("tokenize", runs / "codec", *flags).code == 0
    message = run_invalid(
        *("train", "audio-soundstorm", "--data", audio_files, "--preset", "tiny"),
        *("--data.seconds", "0.25", "--tokenizer", runs / "codec"),
        *("--semantic", runs / "semantic", "--task.tokens", codes, "--out", tmp_path / "run"),
    )
    assert "tokenize examples of the same length" in message
