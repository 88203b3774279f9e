"""The tokenizer objective for audio: padding has no influence, discriminators get silence after the
end, and metrics have the meaning of their names.

The examples are synthetic audio at 8 kHz, of which some samples are valid and zeros follow.
Everything is in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.engine.modes import eval_mode, hash_seed, train_only
from tessera.engine.task import Batch
from tessera.losses.adversarial import feature_matching_B
from tessera.metrics.audio import si_sdr_B
from tessera.metrics.speech import stoi_B
from tessera.modalities.audio import reconstruction as reconstruction_module
from tessera.modalities.audio.discriminators import (
    BandDiscriminatorConfig,
    PeriodDiscriminatorConfig,
    ScaleDiscriminatorConfig,
)
from tessera.modalities.audio.features import MFCCFeaturesConfig
from tessera.modalities.audio.media import AudioExample, collate
from tessera.modalities.audio.recipes import audio_codec, audio_semantic, audio_soundstorm
from tessera.modalities.audio.reconstruction import (
    AudioAdversaryConfig,
    AudioReconstructionConfig,
    AudioTokenizerConfig,
)
from tessera.modalities.audio.semantic import SemanticConfig
from tessera.modalities.audio.semantic_reconstruction import SemanticTokenizerConfig
from tessera.modalities.audio.soundstream import SoundStreamConfig
from tessera.modalities.audio.speech_quality import pesq
from tessera.modalities.audio.synthetic import SyntheticAudio
from tessera.nn.quantize import FSQConfig, ResidualConfig
from tessera.objectives.reconstruction import ReconstructionLoss, TokenizerTask
from tessera.recipes.presets import Preset

RATE_HZ, SAMPLES, HOP = 8_000, 2_000, 20
QUANTIZER = ResidualConfig(quantizer=FSQConfig(levels=(4, 4, 4)), num_quantizers=3)
MODEL = SoundStreamConfig(
    dim=4, max_channels=16, strides=(4, 5), dilations=(1,), quantizer=QUANTIZER
)
RECONSTRUCTION = AudioReconstructionConfig(
    rate_hz=RATE_HZ, stft=0.5, mel_windows=(64, 256), stft_windows=(128,)
)
ADVERSARY = AudioAdversaryConfig(
    periods=PeriodDiscriminatorConfig(periods=(2, 3), dim=4, max_channels=8),
    scales=ScaleDiscriminatorConfig(scales=(1,), dim=4, max_channels=8),
    bands=BandDiscriminatorConfig(dim=4, windows=(64,)),
    feature_matching_weight=2.0,
    gp_weight=0.0,
)
LENGTHS = (2_000, 1_200, 20, 860)
"""Each is a whole number of frames."""


def build_task(adversary: AudioAdversaryConfig | None = None, **model: Any) -> TokenizerTask:
    config = AudioTokenizerConfig(
        model=replace(MODEL, **model), reconstruction=RECONSTRUCTION, adversary=adversary
    )
    return config.build().double()


def build_semantic_task(hop: int = 80) -> TokenizerTask:
    """Build a task whose feature statistics are final."""
    features = MFCCFeaturesConfig(
        rate_hz=RATE_HZ, token_rate_hz=RATE_HZ / hop, window_seconds=200 / RATE_HZ
    )
    model = SemanticConfig(features=features, vocab_size=16, normalization_steps=1)
    task = SemanticTokenizerConfig(model=model).build().double()
    task.model.normalizer.steps_done.fill_(1)
    return task


def build_batch(*lengths: int, first: int = 0, samples: int = SAMPLES) -> Batch[Any]:
    """Return synthetic examples of which the given numbers of samples are valid."""
    dataset = SyntheticAudio(first + len(lengths), samples=SAMPLES, rate_hz=RATE_HZ, seed=3)
    examples = []
    for i, length in enumerate(lengths, start=first):
        whole = dataset.item(i, np.random.default_rng(0)).samples.astype(np.float64)
        padded = np.where(np.arange(samples) < length, whole[:, :samples], 0.0)
        examples.append(AudioExample(padded, length, RATE_HZ, ""))
    indices = range(first, first + len(lengths))
    return Batch(collate(examples), [str(i) for i in indices], [hash_seed(7, i) for i in indices])


def build_single_batches(*lengths: int) -> list[Batch[Any]]:
    """Return each example in its own batch, without padding."""
    return [build_batch(length, first=i, samples=length) for i, length in enumerate(lengths)]


def with_random_padding(batch: Batch[Any]) -> Batch[Any]:
    samples = batch.examples.samples.clone()
    for one, length in zip(samples, batch.examples.lengths.tolist(), strict=True):
        one[:, length:] = torch.rand_like(one[:, length:]) * 2 - 1
    return Batch(replace(batch.examples, samples=samples), batch.names, batch.seeds)


def add_sums(results: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Add the sums of several batches; a batch without speech has no sums of speech metrics."""
    names = {name for one in results for name in one}
    return {
        name: torch.stack([one[name] for one in results if name in one]).sum(0) for name in names
    }


# ---- padding


@pytest.mark.parametrize("adversary", [None, ADVERSARY], ids=["no adversary", "adversary"])
def test_padding_does_not_change_any_loss(adversary: AudioAdversaryConfig | None) -> None:
    task, batch = build_task(adversary), build_batch(*LENGTHS)
    other = with_random_padding(batch)
    assert not torch.equal(batch.examples.samples, other.examples.samples)
    for update in task.updates:
        terms, others = update.loss(batch, 0).terms, update.loss(other, 0).terms
        assert terms.keys() == others.keys()
        for name, term in terms.items():
            torch.testing.assert_close(others[name], term, msg=f"{update.name}: {name}")


def test_losses_of_a_padded_batch_are_means_over_its_examples() -> None:
    task, singles = build_task(), build_single_batches(*LENGTHS)
    terms = task.reconstruction_loss(build_batch(*LENGTHS), 0).terms
    assert {"samples", "mel", "stft"} <= terms.keys()
    for name in ("samples", "mel", "stft"):
        expected = [task.reconstruction_loss(one, 0).terms[name] for one in singles]
        torch.testing.assert_close(terms[name], torch.stack(expected).mean(), msg=name)


@pytest.mark.parametrize("speech_metrics", ["auto", "always"])
def test_eval_sums_of_a_padded_batch_are_those_of_its_examples(speech_metrics: Any) -> None:
    """Also for lengths that are not a whole number of frames: the last frame is padded."""
    lengths = (2_000, 1_207, 333, 21)
    reconstruction = replace(RECONSTRUCTION, speech_metrics=speech_metrics)
    task = AudioTokenizerConfig(model=MODEL, reconstruction=reconstruction).build().double()
    with eval_mode(task):
        together = task.eval_step(build_batch(*lengths))
        singles = add_sums([task.eval_step(one) for one in build_single_batches(*lengths)])
    assert together.keys() == singles.keys()
    assert ("stoi" in together) or speech_metrics == "auto"
    for name, value in together.items():
        torch.testing.assert_close(value, singles[name], msg=name)


def test_all_examples_count_equally_so_micro_batches_are_one_batch() -> None:
    task, whole = build_task(ADVERSARY), build_batch(*LENGTHS)
    parts = [build_batch(*LENGTHS[:2]), build_batch(*LENGTHS[2:], first=2)]
    compared = set()
    for update in task.updates:
        terms, halves = update.loss(whole, 0).terms, [update.loss(part, 0).terms for part in parts]
        means = {"samples", "mel", "stft", "adversarial", "feature_matching", "d_loss"}
        for name in terms.keys() & means:
            expected = torch.stack([half[name] for half in halves]).mean()
            torch.testing.assert_close(expected, terms[name], msg=f"{update.name}: {name}")
            compared.add(name)
    assert compared == {"samples", "mel", "stft", "adversarial", "feature_matching", "d_loss"}


# ---- quantizer dropout and codebook metrics


def test_quantizer_dropout_is_drawn_per_example_in_training_only() -> None:
    task = build_task(quantizer=replace(QUANTIZER, dropout=0.9))
    lengths = (2_000,) * 24
    num_quantizers_B = task.train_kwargs(build_batch(*lengths))["num_quantizers_B"]
    assert set(num_quantizers_B.tolist()) == {1, 2, 3}
    singles = [build_batch(2_000, first=i) for i in range(24)]
    alone = [task.train_kwargs(one)["num_quantizers_B"].item() for one in singles]
    assert alone == num_quantizers_B.tolist(), "independent of the batch"
    again = task.train_kwargs(build_batch(*lengths))["num_quantizers_B"]
    assert torch.equal(again, num_quantizers_B), "the same at each call within a step"
    with eval_mode(task):
        codes = task.eval_step(build_batch(*lengths))["codes"]
    assert codes.sum(1).tolist() == [24 * 100] * 3, "evaluated with all quantizers"
    assert "num_quantizers_B" not in build_task().train_kwargs(build_batch(20))


def test_codebook_metrics_count_valid_frames_of_each_quantizer() -> None:
    task, batch = build_task(), build_batch(*LENGTHS)
    with eval_mode(task):
        metrics = task.compute_metrics(task.eval_step(batch))
        codes = task.model(batch.examples.samples, batch.examples.lengths).codes
    frames = [length // HOP for length in LENGTHS]
    for q in range(3):
        valid = torch.cat([row[:count, q] for row, count in zip(codes, frames, strict=True)])
        counts = torch.bincount(valid, minlength=64).double()
        p = counts[counts > 0] / counts.sum()
        usage, perplexity = float((counts > 0).double().mean()), float((-p * p.log()).sum().exp())
        assert metrics[f"codebook_usage_{q + 1}"] == pytest.approx(usage)
        assert metrics[f"codebook_perplexity_{q + 1}"] == pytest.approx(perplexity)
    for name in ("codebook_usage", "codebook_perplexity"):
        assert metrics[name] == pytest.approx(np.mean([metrics[f"{name}_{q}"] for q in (1, 2, 3)]))


# ---- discriminators


def test_discriminators_get_silence_after_the_end() -> None:
    """Of originals and of reconstructions, whatever the model outputs there."""
    task, batch = build_task(ADVERSARY), with_random_padding(build_batch(*LENGTHS))
    views: dict[str, list[Tensor]] = {name: [] for name in task.discriminators}
    for name, discriminator in task.discriminators.items():
        view = discriminator.view

        def record(audio: Tensor, batch: Batch, name: str = name, view: Any = view) -> Tensor:
            views[name].append(view(audio, batch))
            return views[name][-1]

        recorded = replace(discriminator, view=record)
        task.discriminators = {**task.discriminators, name: recorded}
    task.reconstruction_loss(batch, 0)
    for name, discriminator in task.discriminators.items():
        task.discriminator_loss(discriminator, batch, 0)
        assert len(views[name]) == 4, "reconstruction and original, for model and discriminator"
        for audio in views[name]:
            for one, length in zip(audio, LENGTHS, strict=True):
                assert not one[:, length:].any() and one[:, :length].any()


def test_feature_matching_is_the_mean_over_discriminators() -> None:
    task, batch = build_task(ADVERSARY), build_batch(2_000, 2_000)
    output = task.model(batch.examples.samples, batch.examples.lengths).output
    distances = []
    for name in ("periods", "scales", "bands"):
        network: Any = task.get_submodule(name)
        real, fake = (
            network.discriminate(audio).features for audio in (batch.examples.samples, output)
        )
        distances.append(feature_matching_B(real, fake).mean())
    terms = task.reconstruction_loss(batch, 0).terms
    torch.testing.assert_close(terms["feature_matching"], 2.0 * torch.stack(distances).mean())
    without = build_task(replace(ADVERSARY, feature_matching_weight=0.0))
    assert "feature_matching" not in without.reconstruction_loss(batch, 0).terms


def parts_with_gradient(task: TokenizerTask) -> set[str]:
    named = task.named_parameters()
    return {name.split(".")[0] for name, parameter in named if parameter.grad is not None}


def test_feature_matching_has_gradients_for_the_model_only() -> None:
    task, batch = build_task(ADVERSARY), build_batch(2_000, 1_200)
    [model, *discriminators] = task.updates
    with train_only(task, model.trains):
        model.loss(batch, 0).terms["feature_matching"].backward()
    assert parts_with_gradient(task) == {"model"}
    for update in discriminators:
        assert "feature_matching" not in update.loss(batch, 0).terms


def test_each_update_has_gradients_for_its_whole_network_only() -> None:
    task, batch = build_task(ADVERSARY), build_batch(2_000, 1_200)
    assert [update.name for update in task.updates] == ["model", "periods", "scales", "bands"]
    for update in task.updates:
        task.zero_grad()
        with train_only(task, update.trains):
            update.loss(batch, 0).total().backward()
        assert [name for name, p in update.trains.named_parameters() if p.grad is None] == []
        assert parts_with_gradient(task) == {update.name}


def test_adversarial_terms_begin_at_the_start_step() -> None:
    task, batch = build_task(replace(ADVERSARY, start_step=3)), build_batch(2_000)
    adversarial = {"adversarial", "feature_matching"}
    assert not adversarial & task.reconstruction_loss(batch, 2).terms.keys()
    assert adversarial <= task.reconstruction_loss(batch, 3).terms.keys()


# ---- metrics


def compute_metrics(
    reconstruction: ReconstructionLoss, output: Tensor, batch: Batch[Any]
) -> dict[str, float]:
    totals = {"examples": torch.tensor(len(batch)), "codes": torch.ones(3, 64, dtype=torch.long)}
    return reconstruction.compute_metrics(totals | reconstruction.eval_step(output, batch))


def test_si_sdr_and_rms_ratio_exclude_silent_examples() -> None:
    reconstruction, batch = RECONSTRUCTION.build(), build_batch(2_000, 1_200, 860)
    batch.examples.samples[1] = 0
    original, lengths = batch.examples.samples, batch.examples.lengths
    output = 0.5 * original + 0.01 * torch.randn_like(original)
    metrics = compute_metrics(reconstruction, output, batch)
    si_sdr = [si_sdr_B(output[[i]], original[[i]], lengths_B=lengths[[i]]).item() for i in (0, 2)]
    assert metrics["si_sdr"] == pytest.approx(np.mean(si_sdr))
    assert metrics["rms_ratio"] == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("speech_metrics", ["auto", "always"])
def test_metrics_of_silence_are_finite(speech_metrics: Any) -> None:
    reconstruction = replace(RECONSTRUCTION, speech_metrics=speech_metrics)
    task = AudioTokenizerConfig(model=MODEL, reconstruction=reconstruction).build().double()
    batch = build_batch(2_000, 1_200)
    batch.examples.samples.zero_()
    with eval_mode(task):
        metrics = task.compute_metrics(task.eval_step(batch))
    assert all(math.isfinite(value) for value in metrics.values())
    assert all(bool(term.isfinite()) for term in task.reconstruction_loss(batch, 0).terms.values())


def test_bitrate_is_that_of_the_codes() -> None:
    """3 quantizers of 64 codes, 6 bits each, for every 20 samples; over any batches."""
    task = build_task()
    with eval_mode(task):
        results = [
            task.eval_step(build_batch(*LENGTHS)),
            task.eval_step(build_batch(2_000, first=4)),
        ]
    metrics = task.compute_metrics(add_sums(results))
    assert metrics["kilobits_per_second"] == pytest.approx(3 * 6 * RATE_HZ / HOP / 1000)


# ---- speech metrics

DRUMS, VOICES = (10, 21, 27), (2, 3, 15)
"""Indices of synthetic examples with drums only, and with a voice only."""


def build_long_batch(*indices: int) -> Batch[Any]:
    """Return two seconds of each example, enough to detect speech."""
    dataset = SyntheticAudio(max(indices) + 1, samples=16_000, rate_hz=RATE_HZ, seed=3)
    examples = [dataset.item(i, np.random.default_rng(0)) for i in indices]
    for i, example in zip(indices, examples, strict=True):
        assert ("drums" in example.caption) == (i in DRUMS)
        assert ("voice" in example.caption) == (i in VOICES)
    batch = collate(examples)
    batch = replace(batch, samples=batch.samples.double())
    return Batch(batch, [str(i) for i in indices], [hash_seed(7, i) for i in indices])


def speech_metrics_of(setting: Any, *batches: Batch[Any]) -> dict[str, float]:
    """Return STOI and PESQ, if they are reported, of reconstructions with some noise."""
    reconstruction = replace(RECONSTRUCTION, speech_metrics=setting).build()
    results = [reconstruction.eval_step(add_noise(batch), batch) for batch in batches]
    totals = {
        "examples": torch.tensor(sum(map(len, batches))),
        "codes": torch.ones(3, 64, dtype=torch.long),
    }
    metrics = reconstruction.compute_metrics(totals | add_sums(results))
    assert {"si_sdr", "mel_distance", "stft_distance", "rms_ratio"} <= metrics.keys()
    return {name: metrics[name] for name in ("stoi", "pesq") if name in metrics}


def add_noise(batch: Batch[Any]) -> Tensor:
    samples = batch.examples.samples
    noise = torch.randn(samples.shape, generator=torch.Generator().manual_seed(1))
    return samples + 0.02 * noise


def test_speech_metrics_are_absent_for_drums() -> None:
    assert speech_metrics_of("auto", build_long_batch(*DRUMS)) == {}


def test_speech_metrics_are_present_for_voices() -> None:
    batch = build_long_batch(*VOICES)
    metrics = speech_metrics_of("auto", batch)
    output, original = add_noise(batch), batch.examples.samples
    stoi = stoi_B(output, original, rate_hz=RATE_HZ, lengths_B=batch.examples.lengths)
    assert metrics["stoi"] == pytest.approx(stoi.mean().item()) and 0.5 < metrics["stoi"] < 1
    scores = [
        pesq(real[0].numpy(), made[0].numpy(), RATE_HZ)
        for real, made in zip(original, output, strict=True)
    ]
    assert metrics["pesq"] == pytest.approx(np.mean([score for score in scores if score]))
    assert 1 < metrics["pesq"] < 4.6 and metrics == speech_metrics_of("always", batch)


def test_speech_metrics_are_means_over_the_voices_of_mixed_data() -> None:
    """Whether drums are in the same batch as voices or in another one."""
    expected = speech_metrics_of("auto", build_long_batch(*VOICES))
    drums_first = [build_long_batch(*DRUMS), build_long_batch(*VOICES)]
    assert speech_metrics_of("auto", *drums_first) == pytest.approx(expected)
    voice, *others = VOICES
    mixed = [build_long_batch(voice, *DRUMS), build_long_batch(*others)]
    metrics = speech_metrics_of("auto", *mixed)
    assert metrics.keys() == expected.keys()
    with_drums, voices_only = (
        stoi_B(
            add_noise(batch),
            batch.examples.samples,
            rate_hz=RATE_HZ,
            lengths_B=batch.examples.lengths,
        )
        for batch in mixed
    )
    stoi = torch.cat([with_drums[:1], voices_only]).mean().item()
    assert metrics["stoi"] == pytest.approx(stoi)


def test_speech_metrics_setting_overrides_the_detection() -> None:
    drums, voices = build_long_batch(*DRUMS), build_long_batch(*VOICES)
    assert "stoi" in speech_metrics_of("always", drums)
    assert speech_metrics_of("never", voices) == {}


def test_speech_is_detected_only_with_setting_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    detected: list[int] = []

    def detect(samples: np.ndarray, rate_hz: int) -> bool:
        assert samples.dtype == np.float32 and samples.ndim == 1 and rate_hz == RATE_HZ
        detected.append(len(samples))
        return True

    monkeypatch.setattr(reconstruction_module, "detect_speech", detect)
    batch = build_batch(2_000, 1_200)
    for setting in ("never", "always"):
        speech_metrics_of(setting, batch)
    assert detected == []
    speech_metrics_of("auto", batch)
    assert detected == [2_000, 1_200], "padding is not analysed"


# ---- media


def test_samples_are_originals_followed_by_reconstructions_without_padding() -> None:
    task, batch = build_task(), build_batch(2_000, 860)
    with eval_mode(task):
        pairs = task.sample(batch)
    for pair, original, length in zip(pairs, batch.examples.samples, (2_000, 860), strict=True):
        assert pair.left.samples.shape == pair.right.samples.shape == (1, length)
        np.testing.assert_allclose(pair.left.samples, original[:, :length], atol=1e-6)
        assert pair.rate_hz == RATE_HZ and pair.samples.shape[1] > 2 * length


def test_decoded_audio_ends_with_its_codes() -> None:
    task, batch = build_task(), build_batch(*LENGTHS)
    with eval_mode(task):
        codes = task.model.encode(batch.examples.samples, batch.examples.lengths)
        decoded = task.adapter.to_media(task.model.decode(codes))
        empty = task.adapter.to_media(torch.zeros(1, 1, 100, dtype=torch.float64))
    assert [audio.samples.shape[1] for audio in decoded] == list(LENGTHS)
    assert empty[0].samples.shape == (1, 1), "silence can be saved too"


# ---- semantic tokens


def test_features_of_padding_do_not_change_any_eval_sum() -> None:
    """Also for lengths that are not a whole number of frames."""
    task, lengths = build_semantic_task(), (1_990, 1_201, 33, 80)
    padded = build_batch(*lengths, samples=1_990)
    with eval_mode(task):
        together = task.eval_step(padded)
        singles = add_sums([task.eval_step(one) for one in build_single_batches(*lengths)])
        other = task.eval_step(with_random_padding(padded))
    frames = sum(math.ceil(length / 80) for length in lengths)
    assert int(together["frames"]) == frames == int(together["codes"].sum())
    for name, value in together.items():
        torch.testing.assert_close(value, singles[name], msg=name)
        torch.testing.assert_close(value, other[name], msg=name)


def test_distance_of_a_padded_batch_is_the_mean_over_its_examples() -> None:
    task = build_semantic_task()
    with eval_mode(task):
        terms = task.reconstruction_loss(build_batch(*LENGTHS), 0).terms
        singles = build_single_batches(*LENGTHS)
        expected = [task.reconstruction_loss(one, 0).terms["distance"] for one in singles]
    assert terms.keys() == {"distance"}
    torch.testing.assert_close(terms["distance"], torch.stack(expected).mean())


@pytest.mark.parametrize(("decoded", "explained_variance"), [("features", 1.0), ("mean", 0.0)])
def test_explained_variance_is_one_minus_error_over_variance(
    decoded: str, explained_variance: float
) -> None:
    task, batch = build_semantic_task(), build_batch(2_000, 1_200)
    with eval_mode(task):
        output = task.model(batch.examples.samples, batch.examples.lengths).output
        features_BTD = output[:, :, 1]
        mean_D = features_BTD[features_BTD.isfinite().all(-1)].mean(0)
        decoded_BTD = features_BTD if decoded == "features" else mean_D.expand_as(features_BTD)
        output = torch.stack([decoded_BTD, features_BTD], dim=2)
        totals = task.reconstruction.eval_step(output, batch) | {"codes": torch.full((1, 16), 2)}
    metrics = task.reconstruction.compute_metrics(totals)
    assert metrics["explained_variance"] == pytest.approx(explained_variance, abs=1e-6)
    assert metrics["bits_per_second"] == pytest.approx(32 * 4 / (3_200 / RATE_HZ))
    assert task.best_metric.name in metrics


def test_features_are_drawn_beside_decoded_features_without_padding() -> None:
    task, batch = build_semantic_task(), build_batch(2_000, 400)
    with eval_mode(task):
        long, short = task.sample(batch)
    assert long.pixels.shape[1] > short.pixels.shape[1] > 2 * 4 * (400 // 80)


# ---- invalid settings


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: AudioReconstructionConfig(samples=-1.0), "samples must be at least 0, got -1.0"),
        (lambda: AudioReconstructionConfig(samples=0, mel=0, stft=0), "All loss weights are 0"),
        (
            lambda: AudioAdversaryConfig(bands=None),
            "no discriminator: set periods, scales or bands",
        ),
    ],
)
def test_invalid_settings_are_errors(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_data_of_another_rate_is_an_error() -> None:
    run: Any = audio_codec("tiny")
    with pytest.raises(ValueError, match=r"--data.rate-hz and --task.reconstruction.rate-hz"):
        replace(run, data=replace(run.data, rate_hz=16_000))
    run = audio_semantic("tiny")
    with pytest.raises(ValueError, match="a rate of 16000 Hz, but the features need 8000 Hz"):
        replace(run, data=replace(run.data, rate_hz=16_000))


@pytest.mark.parametrize("preset", get_args(Preset))
def test_three_recipes_of_a_preset_have_the_same_preprocessing(preset: Preset) -> None:
    """Otherwise the third could not use the tokenizers of the first two."""
    runs: list[Any] = [recipe(preset) for recipe in (audio_codec, audio_semantic, audio_soundstorm)]
    codec, semantic, soundstorm = runs
    assert codec.data.preprocessing() == semantic.data.preprocessing()
    assert codec.data.preprocessing() == soundstorm.data.preprocessing()
    step = math.lcm(codec.task.model.hop, semantic.task.model.hop)
    assert soundstorm.data.length % step == 0, "examples are whole frames of both tokenizers"


# ---- the difference of samples


def test_low_pass_attenuates_high_frequencies_of_the_difference() -> None:
    kernel = reconstruction_module.low_pass_kernel(1_000.0, 16_000)
    time = torch.arange(16_000) / 16_000
    levels = {}
    for hertz in (50, 1_000, 4_000):
        tone = torch.sin(2 * math.pi * hertz * time)[None, None]
        difference_B = reconstruction_module.sample_difference_B
        lengths = torch.tensor([16_000])
        zero = torch.zeros_like(tone)
        levels[hertz] = difference_B(tone, zero, lengths, kernel) / difference_B(
            tone, zero, lengths
        )
    assert levels[50] == pytest.approx(1, abs=0.01)
    assert levels[1_000] == pytest.approx(0.5, abs=0.03) and levels[4_000] < 0.1


def test_padding_does_not_change_the_filtered_difference() -> None:
    kernel = reconstruction_module.low_pass_kernel(500.0, RATE_HZ).double()
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1, 1, 400, generator=generator, dtype=torch.float64)
    length = torch.tensor([300])
    long = reconstruction_module.sample_difference_B(a, b, length, kernel)
    short = reconstruction_module.sample_difference_B(a[..., :300], b[..., :300], length, kernel)
    torch.testing.assert_close(long, short)


def test_invalid_cutoff_is_rejected() -> None:
    with pytest.raises(ValueError, match="samples_cutoff_hz must be above 0"):
        AudioReconstructionConfig(samples_cutoff_hz=0.0)
