"""bench/speech_quality.py and speaking.py: which files are measured, and how metrics rank them.

The two pretrained networks are in packages that the tests do not need; simple functions replace
them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tessera.losses.spectrogram import mfcc
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.synthetic_voices import SPEAKERS, Syllable, synthesize_speech

BENCH = Path(__file__).resolve().parents[2] / "bench"


class FakeDNSMOS:
    """Rates audio by the level of its quietest tenth."""

    def __call__(self, samples_N: np.ndarray) -> float:
        return -float(np.quantile(np.abs(samples_N), 0.1))


class FakeSpeakerEncoder:
    """Represents a speaker by the mean MFCC."""

    def __call__(self, samples_N: np.ndarray) -> torch.Tensor:
        features = mfcc(torch.from_numpy(samples_N)[None], rate_hz=16_000, window=640, hop=320)
        mean = features[0, 1:].mean(1)
        return mean / mean.norm()


@pytest.fixture
def speaking(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("speaking")


@pytest.fixture
def bench(monkeypatch):
    """The bench script as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("speech_quality")
    monkeypatch.setattr(module, "DNSMOS", FakeDNSMOS)
    monkeypatch.setattr(module, "SpeakerEncoder", FakeSpeakerEncoder)
    monkeypatch.setattr(module.torch, "set_num_threads", lambda threads: None)
    return module


def speech(speaker: int, seed: int, vowels: str = "ah ee oo eh") -> Audio:
    words = tuple(Syllable("m", vowel) for vowel in vowels.split())
    rng = np.random.default_rng(seed)
    samples = synthesize_speech(SPEAKERS[speaker], words, False, 1.6, 0.4, 16_000, rng)
    return Audio((0.5 * samples / np.abs(samples).max())[None].astype(np.float32), 16_000)


class TwoLevelCodec(torch.nn.Module):
    """Rounds to steps of 1/8, and the remainder to steps of 1/128."""

    def __init__(self):
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(()))

    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        first = (samples[:, 0] * 8).round()
        return torch.stack([first, ((samples[:, 0] - first / 8) * 128).round()], dim=-1).long()

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes * torch.tensor([1 / 8, 1 / 128])[: codes.shape[-1]]).sum(-1)[:, None].float()


@pytest.fixture
def folder(tmp_path):
    """Four files of two speakers, and one that is too short."""
    path = tmp_path / "audio"
    path.mkdir()
    for number in range(4):
        speech(1 + number % 2, number).write(path / f"{number}.wav")
    Audio(np.zeros((1, 800), np.float32), 16_000).write(path / "short.wav")
    return path


def test_a_codec_is_measured_with_each_number_of_quantizers(
    bench, folder, tmp_path, monkeypatch, capsys
):
    data = AudioDataConfig(path=str(folder), seconds=0.1, val_fraction=0.0)
    codec = SimpleNamespace(
        model=TwoLevelCodec(),
        num_quantizers=2,
        trained=SimpleNamespace(steps=7),
        run=SimpleNamespace(data=data),
    )
    monkeypatch.setattr(bench.Tokenizer, "load", lambda run: codec)
    file = tmp_path / "numbers.json"
    arguments = f"RUN --num-quantizers 1 2 8 --count 9 --json {file}"
    assert bench.main(arguments.split()) == 0
    results = json.loads(file.read_text())
    assert results["files"] == 4, "files of less than a second are left out"
    assert results["seconds"] == pytest.approx(4 * speech(1, 0).seconds), "whole files are read"
    assert set(results["num_quantizers"]) == {"1", "2"}
    coarse, fine = results["num_quantizers"]["1"], results["num_quantizers"]["2"]
    assert fine["si_sdr"] > coarse["si_sdr"] + 10
    assert fine["stoi"] > coarse["stoi"] and fine["pesq"] > coarse["pesq"]
    assert fine["mel_distance"] < coarse["mel_distance"]
    assert fine["speaker_similarity"] > coarse["speaker_similarity"]
    assert "2 of 2 quantizers" in capsys.readouterr().out


def test_generated_audio_is_more_similar_to_its_prompt_than_chance(bench, folder, tmp_path, capsys):
    generated = tmp_path / "generated"
    for number in range(4):
        speech(1 + number % 2, 10 + number, "oo ah eh ee").save(generated / str(number))
    assert bench.main(["--generated", str(generated), "--prompts", str(folder)]) == 0
    metrics = dict(line.split() for line in capsys.readouterr().out.splitlines()[1:])
    similarity, by_chance = metrics["speaker_similarity"], metrics["similarity_by_chance"]
    assert float(similarity) > float(by_chance) + 0.05


def test_wrong_arguments_are_reported(bench, folder, tmp_path):
    with pytest.raises(SystemExit):
        bench.main([])
    with pytest.raises(SystemExit):
        bench.main(["RUN", "--generated", str(folder), "--prompts", str(folder)])
    (tmp_path / "other").mkdir()
    speech(1, 0).write(tmp_path / "other/different.wav")
    with pytest.raises(SystemExit, match="has the same name as one in"):
        bench.main(["--generated", str(tmp_path / "other"), "--prompts", str(folder)])


def test_a_missing_package_is_named_with_the_install_command(bench):
    metrics = importlib.import_module("speech_metrics")
    with pytest.raises(SystemExit, match="no_such_package.*\n.*pip install"):
        metrics.find_package_file("no_such_package", "weights.pt")


def test_mel_filters_have_equal_areas_and_rising_peaks(bench):
    filters = importlib.import_module("speech_metrics").slaney_filters()
    torch.testing.assert_close(filters[20:].sum(1) * 40.0, torch.ones(20), rtol=0.02, atol=0)
    assert (filters.argmax(1).diff() >= 0).all() and filters.shape == (40, 201)


def test_a_voice_needs_recordings_for_sentences_prompt_and_reference(speaking):
    speaking.check_enough("low", recordings=5, num_sentences=3)
    with pytest.raises(SystemExit, match="low has 4 recordings, but 3 sentences, a prompt and a"):
        speaking.check_enough("low", recordings=4, num_sentences=3)


def test_only_held_out_recordings_of_some_length_are_spoken(speaking, folder):
    for number in range(4):
        (folder / f"{number}.txt").write_text(f"sentence {number}")
    data = AudioDataConfig(path="elsewhere", rate_hz=16_000, seconds=1.0, val_fraction=0.5)
    speaker = SimpleNamespace(trained=SimpleNamespace(run=SimpleNamespace(data=data)))
    every = speaking.read_examples(speaker, str(folder), [])
    assert [one.text for one in every] == [f"sentence {number}" for number in range(4)]
    held_out = speaking.read_examples(speaker, str(folder), [], held_out=True)
    expected = dataclasses.replace(data, path=str(folder)).build().validation
    names = {expected.name(i) for i in range(len(expected))} - {"short.wav"}
    assert 0 < len(names) < 4
    assert {Path(one.path).name for one in held_out} == names


def test_voices_speak_different_sentences_after_other_recordings(speaking):
    examples = [
        speaking.Example(voice, f"{voice}/{number}.flac", f"sentence {number}")
        for voice in ("low", "high")
        for number in range(20)
    ]
    low, high = speaking.choose_sets(examples, num_sentences=4)
    assert not {one.text for one in low.sentences} & {one.text for one in high.sentences}
    for one in (low, high):
        assert len(one.sentences) == len(one.prompts) == 4 and len(one.reference) == 8
        assert all(a != b for a, b in zip(one.sentences, one.prompts, strict=True))
        spoken = {example.path for example in one.sentences + one.prompts}
        assert not spoken & {example.path for example in one.reference}


def test_the_nearest_voice_is_the_most_similar_reference(speaking):
    references = {"low": torch.tensor([1.0, 0.0]), "high": torch.tensor([0.0, 1.0])}
    embeddings = [torch.tensor([0.8, 0.6]), torch.tensor([0.8, 0.6])]
    results = speaking.compare_voices(embeddings, ["low", "high"], references)
    assert results == pytest.approx({"nearest_voice": 0.5, "speaker_similarity": 0.7})


def test_speech_without_any_pitch_counts_as_wrong(speaking):
    errors = [float("nan"), float("nan"), 0.01]
    kind = speaking.Kind(texts=["a"], pitch_errors=errors, dnsmos=[2.0])
    assert speaking.summarize(kind, ["a"])["median_pitch_error"] == 1.0


def test_a_band_that_is_lost_has_a_low_correlation(bench):
    original = speech(1, 0).samples[0]
    spectrum = np.fft.rfft(original)
    hertz = np.fft.rfftfreq(len(original), 1 / 16_000)
    noise = np.fft.rfft(0.05 * np.random.default_rng(0).normal(size=len(original)))
    is_lost = (hertz > 800) & (hertz < 1400)
    decoded = np.fft.irfft(np.where(is_lost, noise, spectrum), len(original))
    correlations = bench.envelope_correlations(original, decoded.astype(np.float32))
    by_band = dict(zip(bench.ENVELOPE_BANDS_HZ, correlations, strict=True))
    lost = [value for hertz, value in by_band.items() if 900 < hertz < 1250]
    kept = [value for hertz, value in by_band.items() if hertz < 600 or hertz > 1800]
    assert max(lost) < 0.5 and min(kept) > 0.95
    assert bench.envelope_correlations(original, np.zeros_like(original)) == [None] * 16
