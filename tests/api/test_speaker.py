"""`Speaker` and `tessera speak`, with tiny runs of all four recipes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from tessera.api.speaker import MAX_VOICE_SECONDS, Speaker
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.level import speech_level
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.recipes import audio_soundstorm, audio_text2semantic
from tessera.modalities.audio.synthetic_speech import SyntheticSpeech
from tessera.run.errors import UserError
from tests.cli_runner import run_invalid, tessera
from tests.runs import tiny_dependency, tiny_recognizer, train

TEXT = "mee soo tah"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train SoundStorm and text to speech for a few steps, on the same synthetic speech."""
    folder = tmp_path_factory.mktemp("runs")
    tokenizers = {"tokenizer": tiny_dependency("audio-codec"), "semantic": tiny_recognizer()}
    storm = audio_soundstorm("tiny", **tokenizers)
    data = dataclasses.replace(storm.data, synthetic_content="speech")
    engine = dataclasses.replace(storm.engine, steps=4)
    train(folder / "storm", dataclasses.replace(storm, data=data, engine=engine))
    speech = audio_text2semantic("tiny", tiny_recognizer(), str(folder / "storm"))
    train(folder / "speech", dataclasses.replace(speech, engine=engine))
    (folder / "storm").rename(folder / "storm-moved")  # the run has copies of all parts
    return folder / "speech"


@pytest.fixture(scope="module")
def speaker(run: Path) -> Speaker:
    return Speaker.load(run)


@pytest.fixture(scope="module")
def voice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    example = SyntheticSpeech(1, samples=12_000, rate_hz=8_000).item(0, np.random.default_rng(0))
    samples = np.repeat(example.samples[:, : example.length], 2, axis=0)
    file = tmp_path_factory.mktemp("voice") / "voice.wav"
    return Audio(samples, 8_000).resample(16_000).write(file)


def test_text_becomes_audio_of_the_predicted_length(speaker: Speaker) -> None:
    speech = speaker.speak(TEXT, seed=1)
    assert isinstance(speech.media[0], Audio) and speech.names == [TEXT]
    frames = speaker.expected_frames(TEXT)
    seconds = frames * (speaker.semantic.seconds or 0)
    assert speech.media[0].seconds == pytest.approx(seconds, abs=0.02)
    again, other = speaker.speak(TEXT, seed=1), speaker.speak(TEXT, seed=2)
    assert torch.equal(again.codes[0], speech.codes[0])
    assert not torch.equal(other.codes[0], speech.codes[0])


def test_speed_changes_the_length(speaker: Speaker) -> None:
    usual, fast = speaker.speak(TEXT), speaker.speak(TEXT, speed=2.0)
    assert len(fast.codes[0]) == pytest.approx(len(usual.codes[0]) / 2, abs=8)


def test_the_voice_is_a_prompt_of_whole_frames(speaker: Speaker, voice: Path) -> None:
    """The file is stereo and of another rate."""
    prompt = speaker.read_voice(voice)
    ratio = (speaker.semantic.hop or 0) // (speaker.codec.hop or 1)
    assert prompt.codes.shape[1] == ratio * prompt.semantic.shape[1] > 0
    spoken = speaker.speak(TEXT, voice=voice)
    assert not torch.equal(spoken.codes[0], speaker.speak(TEXT).codes[0])
    assert len(spoken.codes[0]) == len(speaker.speak(TEXT).codes[0])
    # The run has few steps, after which the prompt changes probabilities by little.
    guided = speaker.speak(TEXT, voice=voice, guidance=100.0)
    assert not torch.equal(guided.codes[0], spoken.codes[0])


def test_speech_has_the_level_of_the_voice(speaker: Speaker, voice: Path, tmp_path: Path) -> None:
    recording = Audio.load(voice)
    for gain in (0.1, 0.5):
        file = Audio(gain * recording.samples, recording.rate_hz).write(tmp_path / f"{gain}.wav")
        [spoken] = speaker.speak(TEXT, voice=file).media
        assert speech_level(spoken) == pytest.approx(speech_level(Audio.load(file)), rel=0.01)


def test_long_texts_are_spoken_in_parts(speaker: Speaker) -> None:
    two = speaker.speak("Mee soo. Tah, moo!")
    assert two.settings["sentences"] == ["Mee soo.", "Tah, moo!"] and len(two.codes) == 2
    long = " ".join(["mee soo tah moo"] * 20)
    parts = speaker.split(long)
    assert len(parts) > 1 and " ".join(parts) == long
    assert all(speaker.expected_frames(part) <= speaker.task.model.max_len for part in parts)


def test_later_sentences_have_the_voice_of_the_first(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = []
    generate = speaker.generate_codes

    def record(semantic, prompt, seed, guidance):  # type: ignore[no-untyped-def]
        prompts.append(prompt)
        return generate(semantic, prompt, seed, guidance)

    monkeypatch.setattr(speaker, "generate_codes", record)
    spoken = speaker.speak("mee soo. tah moo. see")
    assert prompts[0] is None and prompts[1] is prompts[2]
    count = prompts[1].codes.shape[1]
    assert torch.equal(prompts[1].codes[0], spoken.codes[0][:count])
    assert count * (speaker.codec.seconds or 0) <= MAX_VOICE_SECONDS


def test_the_candidate_most_like_the_voice_is_kept(
    speaker: Speaker, voice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speaker, "transcribe", lambda audio: "")
    prompt = speaker.read_voice(voice)
    noise = torch.randint(16, prompt.codes.shape, generator=torch.Generator().manual_seed(0))
    candidates = torch.cat([noise, noise.flip(1), prompt.codes, noise.roll(3, 1)])
    codes, audio = speaker.choose_candidate(candidates, TEXT, prompt)
    assert torch.equal(codes, prompt.codes[0])
    assert audio.samples.shape[1] == len(codes) * (speaker.codec.hop or 0)
    assert speaker.choose_candidate(noise, TEXT, prompt)[0] is not None  # a single one


def test_the_candidate_with_the_fewest_errors_is_kept(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = iter(["moo", "mee soo", TEXT, ""])
    monkeypatch.setattr(speaker, "transcribe", lambda audio: next(texts))
    candidates = torch.arange(4)[:, None, None].expand(4, 40, speaker.codec.num_quantizers)
    assert speaker.choose_candidate(candidates, TEXT, None)[0].unique().tolist() == [2]


def test_one_candidate_is_the_first_of_several(
    speaker: Speaker, voice: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = []
    generate = speaker.generate_codes

    def record(semantic, prompt, seeds, guidance):  # type: ignore[no-untyped-def]
        several.append(generate(semantic, prompt, seeds, guidance))
        return several[-1]

    monkeypatch.setattr(speaker, "generate_codes", record)
    one = speaker.speak(TEXT, voice=voice, candidates=1, seed=3)
    best = speaker.speak(TEXT, voice=voice, candidates=3, seed=3)
    assert torch.equal(several[1][0], one.codes[0]) and len(several[1]) == 3
    assert any(torch.equal(candidate, best.codes[0]) for candidate in several[1])
    assert best.settings["candidates"] == 3
    with pytest.raises(UserError, match="candidates must be at least 1, got 0"):
        speaker.speak(TEXT, candidates=0)


def test_the_recogniser_reads_a_recording(speaker: Speaker, voice: Path) -> None:
    text = speaker.transcribe(voice)
    assert text == speaker.transcribe(Audio.load(voice)) and set(text) <= set("aehmostw ")


def test_the_command_writes_audio_and_settings(run: Path, voice: Path, tmp_path: Path) -> None:
    flags = ("--text", TEXT, "--voice", voice, "--speed", "1.2", "--out", tmp_path / "out")
    result = tessera("speak", run, *flags)
    assert result.code == 0 and "The recogniser reads" in result.out, result
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {"0000.wav", "0000.png", "settings.json"}
    settings = json.loads((tmp_path / "out/settings.json").read_text())
    assert settings["text"] == TEXT and settings["sampling"]["speed"] == 1.2
    assert tessera("speak", run, *flags).code == 0  # earlier samples are moved


def test_speech_is_written_to_a_file_of_the_chosen_format(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "new" / "speech.mp3"
    flags = ("--text", TEXT, "--candidates", "1", "--out", file)
    result = tessera("speak", run, *flags)
    assert result.code == 0 and soundfile.info(file).format == "MP3", result
    assert "exists already" in run_invalid("speak", run, *flags)


def test_speech_in_a_format_that_cannot_be_written_is_an_error(run: Path, tmp_path: Path) -> None:
    message = run_invalid("speak", run, "--text", TEXT, "--out", tmp_path / "speech.aac")
    assert "speech.aac ends in .aac, but the formats that can be written are .wav, " in message
    assert not (tmp_path / "speech.aac").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "The text is empty"),
        (" ... ", "The text is empty"),
        ("привет", "п р и в е т were not in the transcripts .* write the text with aehmostw"),
        ("mee 2", "The characters 2 were not in the transcripts"),
    ],
)
def test_texts_that_cannot_be_spoken_are_reported(
    speaker: Speaker, text: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        speaker.speak(text)


def test_recordings_without_a_voice_are_reported(speaker: Speaker, tmp_path: Path) -> None:
    short = Audio(np.full((1, 800), 0.1, np.float32), 8_000).write(tmp_path / "short.wav")
    silent = Audio(np.zeros((1, 16_000), np.float32), 8_000).write(tmp_path / "silent.wav")
    with pytest.raises(UserError, match=r"short.wav has 0.10 s, too little for a voice"):
        speaker.speak(TEXT, voice=short)
    with pytest.raises(UserError, match="silent.wav is silent"):
        speaker.speak(TEXT, voice=silent)
    with pytest.raises(UserError, match="missing.wav"):
        speaker.speak(TEXT, voice=tmp_path / "missing.wav")
    with pytest.raises(UserError, match="speed must be between"):
        speaker.speak(TEXT, speed=9.0)


def test_runs_that_do_not_belong_together_are_reported(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="which cannot speak"):
        Speaker.load(tiny_recognizer(), run.parent / "storm-moved")
    with pytest.raises(UserError, match="which cannot speak"):
        Speaker.load(tiny_recognizer())
    tokenizers = {
        "tokenizer": tiny_dependency("audio-codec"),
        "semantic": tiny_dependency("audio-semantic"),
    }
    other = audio_soundstorm("tiny", **tokenizers)
    train(tmp_path / "other", dataclasses.replace(other, engine=_one_step(other.engine)))
    with pytest.raises(UserError, match="another semantic tokenizer"):
        Speaker.load(run, tmp_path / "other")
    new = tmp_path / "new"
    flags = ("--preset", "tiny", "--tokenizer", tiny_recognizer(), "--out", new)
    result = run_invalid("train", "audio-text2semantic", *flags, "--soundstorm", tmp_path / "other")
    assert "was trained with other tokenizers than" in result
    result = run_invalid("train", "audio-text2semantic", *flags, "--soundstorm", tmp_path / "no")
    assert "There is no run in" in result and "--soundstorm none" in result


def test_text_to_speech_needs_a_recogniser(tmp_path: Path) -> None:
    flags = ("--preset", "tiny", "--soundstorm", "none", "--out", tmp_path / "run")
    mel = tiny_dependency("audio-semantic")
    result = run_invalid("train", "audio-text2semantic", *flags, "--tokenizer", mel)
    assert "audio-semantic --features ctc" in result
    without = audio_text2semantic("tiny", tiny_recognizer(), "none")
    train(tmp_path / "alone", dataclasses.replace(without, engine=_one_step(without.engine)))
    with pytest.raises(UserError, match="was trained without SoundStorm"):
        Speaker.load(tmp_path / "alone")


def test_descriptions_are_no_transcripts() -> None:
    run = audio_text2semantic("tiny", tiny_recognizer(), "none")
    with pytest.raises(ValueError, match="--data.synthetic-content speech"):
        run.task.validate_data(dataclasses.replace(run.data, synthetic_content="mixed"))
    with pytest.raises(ValueError, match="--data.on-long skip"):
        run.task.validate_data(AudioDataConfig(path="x", crop="start"))


def _one_step(engine):  # type: ignore[no-untyped-def]
    return dataclasses.replace(engine, steps=1, sample_count=1)
