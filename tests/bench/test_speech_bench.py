"""bench/speech_quality.py in small: which recordings are taken, what is told of them, and that its
numbers are not blind.

The two networks that listen lie in packages that tests do not need; here a simple ear is in their
place.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tessera.losses.spectra import mfcc
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.synthetic_voices import SPEAKERS, Syllable, spoken

BENCH = Path(__file__).resolve().parents[2] / "bench"


class Ear:
    """Quality is how quiet the quietest tenth is; a voice is its mean MFCC."""

    def __call__(self, samples_N: np.ndarray) -> float:
        return -float(np.quantile(np.abs(samples_N), 0.1))


class Timbre:
    def __call__(self, samples_N: np.ndarray) -> torch.Tensor:
        heard = mfcc(torch.from_numpy(samples_N)[None], rate_hz=16_000, window=640, hop=320)[
            0, 1:
        ].mean(1)
        return heard / heard.norm()


@pytest.fixture
def bench(monkeypatch):
    """The bench as a module; it is a script and in no package."""
    monkeypatch.syspath_prepend(str(BENCH))
    module = importlib.import_module("speech_quality")
    monkeypatch.setattr(module, "Listener", Ear)
    monkeypatch.setattr(module, "Voices", Timbre)
    monkeypatch.setattr(module.torch, "set_num_threads", lambda threads: None)
    return module


def said(speaker: int, seed: int, vowels: str = "ah ee oo eh") -> Audio:
    words = tuple(Syllable("m", vowel) for vowel in vowels.split())
    samples = spoken(SPEAKERS[speaker], words, False, 1.6, 0.4, 16_000, np.random.default_rng(seed))
    return Audio((0.5 * samples / np.abs(samples).max())[None].astype(np.float32), 16_000)


class Coarse(torch.nn.Module):
    """A codec of two levels: the first rounds to steps of 1/8, the second what is left to steps of
    1/128."""

    def __init__(self):
        super().__init__()
        self.nothing = torch.nn.Parameter(torch.zeros(()))

    def encode(self, samples: torch.Tensor) -> torch.Tensor:
        first = (samples[:, 0] * 8).round()
        return torch.stack([first, ((samples[:, 0] - first / 8) * 128).round()], dim=-1).long()

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes * torch.tensor([1 / 8, 1 / 128])[: codes.shape[-1]]).sum(-1)[:, None].float()


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "recordings"
    place.mkdir()
    for number in range(4):
        said(1 + number % 2, number).write(place / f"{number}.wav")
    Audio(np.zeros((1, 800), np.float32), 16_000).write(place / "short.wav")
    return place


def test_a_codec_is_told_of_level_by_level_on_whole_recordings(
    bench, folder, tmp_path, monkeypatch, capsys
):
    data = AudioDataConfig(path=str(folder), seconds=0.1, val_fraction=0.0)
    codec = SimpleNamespace(model=Coarse(), levels=2, steps=7, run=SimpleNamespace(data=data))
    monkeypatch.setattr(bench, "finished", lambda run: run)
    monkeypatch.setattr(bench, "Codec", lambda made: codec)
    assert (
        bench.main(
            [
                "RUN",
                "--levels",
                "1",
                "2",
                "8",
                "--count",
                "9",
                "--json",
                str(tmp_path / "numbers.json"),
            ]
        )
        == 0
    )
    found = json.loads((tmp_path / "numbers.json").read_text())
    assert found["recordings"] == 4, "what is shorter than a second is left out"
    assert found["seconds"] == pytest.approx(sum(said(1, 0).seconds for _ in range(4)))
    coarse, fine = found["levels"]["1"], found["levels"]["2"]
    assert set(found["levels"]) == {"1", "2"} and fine["si_sdr"] > coarse["si_sdr"] + 10
    assert (
        fine["stoi"] > coarse["stoi"]
        and fine["pesq"] > coarse["pesq"]
        and fine["mel_distance"] < coarse["mel_distance"]
    )
    assert fine["voice"] > coarse["voice"] and "2 of 2 levels" in capsys.readouterr().out


def test_recordings_are_told_of_beside_their_prompts_and_chance_is_lower(
    bench, folder, tmp_path, capsys
):
    made = tmp_path / "made"
    for number in range(4):
        said(1 + number % 2, 10 + number, "oo ah eh ee").save(made / str(number))
    assert bench.main(["--made", str(made), "--after", str(folder)]) == 0
    told = dict(line.split() for line in capsys.readouterr().out.splitlines()[1:])
    assert float(told["voice"]) > float(told["voice_by_chance"]) + 0.05


def test_what_cannot_be_done_is_said(bench, folder, tmp_path):
    with pytest.raises(SystemExit):
        bench.main([])
    with pytest.raises(SystemExit):
        bench.main(["RUN", "--made", str(folder), "--after", str(folder)])
    (tmp_path / "elsewhere").mkdir()
    said(1, 0).write(tmp_path / "elsewhere/different.wav")
    with pytest.raises(SystemExit, match="has the name of one in"):
        bench.main(["--made", str(tmp_path / "elsewhere"), "--after", str(folder)])


def test_a_missing_package_is_named_with_what_to_install(bench):
    discriminators = importlib.import_module("speech_judges")
    with pytest.raises(SystemExit, match="no_such_package.*\n.*pip install"):
        discriminators.file_of("no_such_package", "weights.pt")


def test_mel_bands_of_voices_have_equal_areas_and_rising_peaks(bench):
    filters = importlib.import_module("speech_judges").slaney_filters()
    torch.testing.assert_close(filters[20:].sum(1) * 40.0, torch.ones(20), rtol=0.02, atol=0)
    assert (filters.argmax(1).diff() >= 0).all() and filters.shape == (40, 201)
