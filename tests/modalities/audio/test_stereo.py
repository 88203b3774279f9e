"""Stereo: files with two channels, networks over mid and side, metrics, and all commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from tessera.api.tokenizer import Tokenizer
from tessera.engine.task import Batch
from tessera.metrics.audio import si_sdr_B
from tessera.modalities.audio.codec import AudioCodec, AudioCodecConfig, to_left_right, to_mid_side
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.discriminators import PeriodDiscriminatorConfig
from tessera.modalities.audio.media import Audio, AudioBatch
from tessera.modalities.audio.reconstruction import (
    AudioReconstructionConfig,
    AudioReconstructionLoss,
    find_end,
    view_valid,
)
from tests.cli_runner import run_invalid, tessera
from tests.modalities.audio.test_codec import SOUNDSTREAM, SPECTRAL
from tests.networks import perturb_weights

RATE_HZ = 8_000
NETWORKS = {"soundstream": SOUNDSTREAM, "spectral": SPECTRAL}
"""One frame is 10 samples in each."""


@pytest.fixture(params=NETWORKS)
def config(request: pytest.FixtureRequest) -> AudioCodecConfig:
    return replace(NETWORKS[request.param], channels=2)


def build_codec(config: AudioCodecConfig) -> AudioCodec:
    torch.manual_seed(0)
    return perturb_weights(config.build()).eval().double()


def random_audio(samples: int = 60, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(count, 2, samples, generator=generator, dtype=torch.float64) * 2 - 1


# ---- the networks


@torch.no_grad()
def test_codes_of_stereo_decode_to_its_reconstruction(config: AudioCodecConfig) -> None:
    model, audio = build_codec(config), random_audio(57)
    reconstruction = model(audio)
    assert reconstruction.output.shape == audio.shape
    assert reconstruction.codes.shape == (2, 6, 3)
    assert torch.equal(model.encode(audio), reconstruction.codes)
    assert torch.equal(model.decode(reconstruction.codes)[..., :57], reconstruction.output)


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(1,) * 57, (13, 1, 20, 23), (57,)])
def test_stereo_in_chunks_equals_the_whole(config: AudioCodecConfig, sizes: Any) -> None:
    model, audio = build_codec(config), random_audio(57)
    codes = torch.cat(list(model.encode_chunks(audio.split(sizes, dim=2))), dim=1)
    assert torch.equal(codes, model.encode(audio))
    decoded = torch.cat(list(model.decode_chunks(codes.split([1, 3, 2], dim=1))), dim=2)
    torch.testing.assert_close(decoded, model.decode(codes))


@torch.no_grad()
def test_padding_and_other_examples_do_not_change_stereo(config: AudioCodecConfig) -> None:
    model, audio = build_codec(config), random_audio()
    padded = audio.clone()
    padded[1, :, 30:] = 0.7
    together = model(padded, torch.tensor([60, 30]))
    alone = model(audio[1:, :, :30])
    assert torch.equal(together.codes[1, :3], alone.codes[0])
    assert (together.codes[1, 3:] == -1).all()
    torch.testing.assert_close(model(padded).output[:1], model(audio[:1]).output)


@torch.no_grad()
def test_frames_of_stereo_do_not_depend_on_later_samples(config: AudioCodecConfig) -> None:
    model, audio = build_codec(config), random_audio()
    later = audio.clone()
    later[..., 30:] *= -1
    latents = model.encode_latent(audio), model.encode_latent(later)
    torch.testing.assert_close(latents[0][:, :3], latents[1][:, :3])
    assert not torch.allclose(latents[0][:, 3:], latents[1][:, 3:])


def test_both_channels_have_gradients(config: AudioCodecConfig) -> None:
    model, audio = build_codec(config), random_audio().requires_grad_()
    latent = model.encode_latent(audio)
    model.decode_latent(latent)[:, 0].square().sum().backward()
    assert audio.grad is not None and (audio.grad.abs().sum((0, 2)) > 0).all()


def test_networks_get_mid_and_side(config: AudioCodecConfig) -> None:
    model, audio = build_codec(config), random_audio()
    torch.testing.assert_close(to_left_right(to_mid_side(audio)), audio)
    mid_BN, side_BN = model.to_channels_last(audio).unbind(2)
    torch.testing.assert_close(mid_BN, audio.mean(1))
    torch.testing.assert_close(side_BN, (audio[:, 0] - audio[:, 1]) / 2)
    equal = audio[:, :1].expand(-1, 2, -1)
    assert not model.to_channels_last(equal)[..., 1].any(), "mono has no side"


def test_audio_of_other_channels_gets_an_error(config: AudioCodecConfig) -> None:
    with pytest.raises(ValueError, match=r"\(batch, 2, samples\).*Give left and right"):
        build_codec(config).encode(random_audio()[:, :1])
    with pytest.raises(ValueError, match="The audio has 1 channel.*the model has 2"):
        config.validate_data(AudioDataConfig(channels=1))
    assert config.fit_data(AudioDataConfig(channels=1)).channels == 1


# ---- files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a mono file, two stereo files (one of 16 kHz), and one of four channels."""
    folder = tmp_path_factory.mktemp("stereo")
    time = np.arange(20_000) / RATE_HZ
    tones = [0.4 * np.sin(2 * np.pi * hz * time) for hz in (220, 330, 440, 550)]
    soundfile.write(folder / "four.wav", np.stack(tones, axis=1), RATE_HZ, subtype="FLOAT")
    soundfile.write(folder / "mono.wav", tones[0], RATE_HZ, subtype="FLOAT")
    for name, rate_hz in (("stereo.wav", RATE_HZ), ("stereo16.wav", 2 * RATE_HZ)):
        stereo = np.stack([tones[0], 0.25 * tones[1]], axis=1)
        soundfile.write(folder / name, stereo, rate_hz, subtype="FLOAT")
    return folder


def read(files: Path, name: str, **settings: Any) -> np.ndarray:
    """Return an example of 0.5 s from the start of a file."""
    config = AudioDataConfig(
        path=str(files / name), rate_hz=RATE_HZ, seconds=0.5, crop="start", **settings
    )
    return config.full().item(0, np.random.default_rng(0)).samples


def test_channels_of_files_become_left_and_right(files: Path) -> None:
    left, right = soundfile.read(files / "stereo.wav", dtype="float32", always_2d=True)[0][:4000].T
    assert read(files, "stereo.wav", channels=2) == pytest.approx(np.stack([left, right]))
    assert read(files, "stereo.wav") == pytest.approx((left + right)[None] / 2)
    mono = read(files, "mono.wav", channels=2)
    assert mono.shape == (2, 4000) and np.array_equal(mono[0], mono[1])
    four = read(files, "four.wav", channels=2)
    assert np.array_equal(four[0], four[1])
    assert np.array_equal(four[:1], read(files, "four.wav"))


def test_loudness_of_stereo_is_that_of_both_channels(files: Path) -> None:
    samples = read(files, "stereo.wav", channels=2, loudness_db=-20.0)
    assert 20 * np.log10(np.sqrt(np.square(samples).mean())) == pytest.approx(-20, abs=0.01)
    assert np.abs(samples[0]).max() == pytest.approx(4 * np.abs(samples[1]).max(), rel=0.01)
    config = AudioDataConfig(
        path=str(files / "stereo.wav"), rate_hz=RATE_HZ, channels=2, loudness_db=-20.0
    )
    dataset: Any = config.full()
    whole = config.example_from_file(str(files / "stereo.wav")).samples
    pieces = [dataset.load_piece(0, start, 5_000).samples for start in range(0, 20_000, 5_000)]
    assert abs(np.concatenate(pieces, axis=1) - whole).max() < 1e-6


@pytest.mark.parametrize("content", ["mixed", "speech"])
def test_synthetic_stereo_is_placed_between_left_and_right(content: Any) -> None:
    config = AudioDataConfig(
        rate_hz=RATE_HZ, seconds=0.5, num_synthetic=8, channels=2, synthetic_content=content
    )
    dataset, mono = config.synthetic_dataset(), replace(config, channels=1).synthetic_dataset()
    assert dataset.signature(0) != mono.signature(0)
    ratios = []
    for index in range(8):
        samples = dataset.item(index, np.random.default_rng(0)).samples
        assert samples.shape == (2, 4000)
        levels = np.sqrt(np.square(samples).sum(axis=1))
        ratios.append(levels[0] / levels.sum())
        [same] = mono.item(index, np.random.default_rng(0)).samples
        assert np.square(samples).sum() == pytest.approx(np.square(same).sum(), rel=1e-4)
    assert min(ratios) < 0.3 and max(ratios) > 0.7


def test_other_numbers_of_channels_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"channels must be 1 \(mono\) or 2 \(stereo\), got 6"):
        AudioDataConfig(channels=6)


# ---- losses and metrics


def build_batch(samples: Tensor, lengths: list[int]) -> Batch[AudioBatch]:
    examples = AudioBatch(samples, torch.tensor(lengths), RATE_HZ, [""] * len(samples))
    return Batch(examples, [str(i) for i in range(len(samples))], list(range(len(samples))))


def build_loss() -> AudioReconstructionLoss:
    return AudioReconstructionConfig(
        rate_hz=RATE_HZ, stft=1.0, mel_windows=(64, 256), samples_cutoff_hz=500.0
    ).build()


def test_losses_of_equal_channels_are_those_of_mono() -> None:
    loss, audio = build_loss(), 0.3 * random_audio(2_000, count=3)
    mono, output = audio[:, :1], audio[:, :1].roll(5, dims=2)
    lengths = [2_000, 1_500, 700]
    alone = loss.losses(output, build_batch(mono, lengths))
    both = loss.losses(output.expand(-1, 2, -1), build_batch(mono.expand(-1, 2, -1), lengths))
    assert alone.keys() == both.keys() == {"samples", "mel", "stft"}
    for name, term in alone.items():
        torch.testing.assert_close(both[name], term)
    metrics = loss.eval_step(output, build_batch(mono, lengths))
    stereo = loss.eval_step(output.expand(-1, 2, -1), build_batch(mono.expand(-1, 2, -1), lengths))
    for name, value in metrics.items():
        torch.testing.assert_close(stereo[name], value, msg=name)
    assert stereo["wide"] == 0, "equal channels have no side"


def test_a_channel_that_is_lost_costs() -> None:
    loss, audio = build_loss(), 0.3 * random_audio(2_000, count=1)
    batch = build_batch(audio, [2_000])
    lost = torch.cat([audio[:, :1], audio[:, :1]], dim=1)
    for name, term in loss.losses(lost, batch).items():
        assert term > loss.losses(audio, batch)[name] + 0.01, name


def test_padding_changes_no_loss_of_stereo() -> None:
    loss, audio = build_loss(), 0.3 * random_audio(2_000, count=2)
    output = audio.roll(3, dims=2)
    padded, other = audio.clone(), output.clone()
    padded[1, :, 900:], other[1, :, 900:] = 0.5, -0.5
    first = loss.losses(output, build_batch(audio, [2_000, 900]))
    second = loss.losses(other, build_batch(padded, [2_000, 900]))
    for name, term in first.items():
        torch.testing.assert_close(second[name], term)


def test_metrics_of_stereo_are_those_of_both_channels_as_one_signal() -> None:
    """The right channel is silent, and its reconstruction too: nothing is lost."""
    loss, audio = build_loss(), 0.3 * random_audio(2_000, count=1)
    audio[:, 1] = 0
    output = 0.5 * audio + 0.001 * random_audio(2_000, count=1)
    sums = loss.eval_step(output, build_batch(audio, [2_000]))
    joined = [one.flatten(1)[:, None] for one in (output, audio)]
    torch.testing.assert_close(sums["si_sdr"], si_sdr_B(*joined).double()[0])
    totals = sums | {"examples": torch.tensor(1), "codes": torch.ones(1, 4)}
    metrics = loss.compute_metrics(totals)
    assert metrics["rms_ratio"] == pytest.approx(0.5, abs=0.02)
    assert metrics["side_rms_ratio"] == pytest.approx(0.5, abs=0.02)


def test_discriminators_get_each_channel() -> None:
    audio = random_audio(100)
    view = view_valid(audio, build_batch(audio, [100, 40]))
    assert view.shape == (4, 1, 100)
    assert torch.equal(view[1, 0], audio[0, 1]) and not view[3, 0, 40:].any()
    network = PeriodDiscriminatorConfig(periods=(2,), dim=4, max_channels=8).build().double()
    assert network(view).shape[0] == 4


def test_the_end_of_stereo_is_that_of_the_longer_channel() -> None:
    samples = torch.zeros(2, 10)
    samples[0, 3], samples[1, 6] = 1, -1
    assert find_end(samples) == 7


# ---- commands


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "codec"
    flags = ("--preset", "tiny", "--steps", "4", "--data.channels", "2", "--adversary", "on")
    result = tessera("train", "audio-codec", *flags, "--out", folder)
    assert result.code == 0, result
    return folder


def test_training_writes_stereo_samples_and_the_channels_of_the_model(run: Path) -> None:
    settings = json.loads((run / "config.json").read_text())
    assert settings["task"]["model"]["channels"] == settings["data"]["channels"] == 2
    sample = Audio.load(run / "samples/000004/0000.wav")
    assert sample.samples.shape[0] == 2
    assert np.abs(sample.samples[0] - sample.samples[1]).max() > 0.05


def test_whole_stereo_files_are_encoded_decoded_and_evaluated(
    run: Path, files: Path, tmp_path: Path
) -> None:
    codes, decoded, rebuilt = (tmp_path / name for name in ("codes", "decoded", "rebuilt"))
    assert tessera("tokenize", run, "--data", files, "--out", codes).code == 0
    assert tessera("decode", run, codes, "--out", decoded).code == 0
    assert tessera("sample", run, "--data", files, "--out", rebuilt).code == 0
    tokenizer = Tokenizer.load(run)
    for name, samples in (("mono.wav", 20_000), ("stereo.wav", 20_000), ("stereo16.wav", 10_000)):
        audio = Audio.load(decoded / name).samples
        assert audio.shape == (2, samples)
        whole = tokenizer.decode(tokenizer.encode(files / name))[0, :, :samples].clamp(-1, 1)
        assert np.abs(audio - whole.numpy()).max() < 1e-3
        assert np.abs(Audio.load(rebuilt / name).samples - audio).max() < 1e-3
    metrics = tmp_path / "metrics.json"
    assert tessera("evaluate", run, "--data", files, "--out", metrics).code == 0
    assert "side_rms_ratio" in json.loads(metrics.read_text())["metrics"]["ema"]


def test_exports_of_stereo_decode_as_the_run(run: Path, files: Path, tmp_path: Path) -> None:
    for kind in ("safetensors", "onnx"):
        result = tessera("export", run, "--out", tmp_path / kind, "--format", kind)
        assert result.code == 0, result
    codes = Tokenizer.load(run).encode(files / "stereo.wav")
    exported = Tokenizer.load(tmp_path / "safetensors")
    assert torch.equal(exported.encode(files / "stereo.wav"), codes)
    assert (tmp_path / "onnx/encoder.onnx").is_file()


def test_a_mono_codec_averages_the_channels_of_a_stereo_file(files: Path, tmp_path: Path) -> None:
    flags = ("--preset", "tiny", "--steps", "2", "--out", tmp_path / "mono")
    assert tessera("train", "audio-codec", *flags).code == 0
    tokenizer = Tokenizer.load(tmp_path / "mono")
    left_right = Audio.load(files / "stereo.wav")
    codes = tokenizer.encode(files / "stereo.wav")
    assert torch.equal(codes, tokenizer.encode(left_right.to_mono()))
    out = tmp_path / "samples"
    result = tessera("sample", tmp_path / "mono", "--data", files / "stereo.wav", "--out", out)
    assert result.code == 0 and Audio.load(out / "stereo.wav").samples.shape == (1, 20_000)


def test_models_of_mono_have_an_error_for_stereo(run: Path, tmp_path: Path) -> None:
    tiny = ("--preset", "tiny", "--data.channels", "2", "--out", tmp_path / "other")
    for recipe, flags in (
        ("audio-semantic", ()),
        ("audio-semantic", ("--features", "ctc")),
        ("music-mulan", ()),
    ):
        message = run_invalid("train", recipe, *tiny, *flags)
        assert "has one channel, but the audio has 2: use --data.channels 1" in message
    assert tessera("train", "audio-semantic", *tiny[:2], "--out", tmp_path / "semantic").code == 0
    tokenizers = ("--tokenizer", run, "--semantic", tmp_path / "semantic")
    for channels in ("1", "2"):
        flags = (*tiny, "--data.channels", channels, *tokenizers)
        message = run_invalid("train", "audio-soundstorm", *flags)
        assert "is stereo, but SoundStorm generates mono audio" in message
