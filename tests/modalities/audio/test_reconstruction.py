"""The tokenizer task on sounds: what follows the end counts nowhere, judges hear it as silence, and
measures are what they are called.

B sounds of N samples. Examples are toys at 8 kHz, of which so many samples are real and silence
follows. In double precision, where equal is equal to many digits.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.engine.modes import eval_mode, hash_seed, only
from tessera.engine.task import Batch
from tessera.losses.adversarial import feature_matching_B
from tessera.metrics.audio import si_sdr_B
from tessera.modalities.audio.codec import AudioCodecConfig
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
from tessera.modalities.audio.synthetic import SyntheticAudio
from tessera.nn.quantize import FSQConfig, ResidualConfig
from tessera.objectives.reconstruction import TokenizerTask
from tessera.recipes.presets import Preset

RATE, SAMPLES, HOP = 8_000, 2_000, 20
MODEL = AudioCodecConfig(
    dim=4,
    max_channels=16,
    strides=(4, 5),
    dilations=(1,),
    quantizer=ResidualConfig(quantizer=FSQConfig(levels=(4, 4, 4)), num_quantizers=3),
)
FIDELITY = AudioReconstructionConfig(
    rate_hz=RATE, stft=0.5, mel_windows=(64, 256), stft_windows=(128,)
)
JUDGES = AudioAdversaryConfig(
    periods=PeriodDiscriminatorConfig(periods=(2, 3), dim=4, max_channels=8),
    scales=ScaleDiscriminatorConfig(scales=(1,), dim=4, max_channels=8),
    bands=BandDiscriminatorConfig(dim=4, windows=(64,)),
    feature_matching_weight=2.0,
    penalty=0.0,
)
LENGTHS = (2_000, 1_200, 20, 860)
"""whole frames all"""


def build_task(adversary: AudioAdversaryConfig | None = None, **model: Any) -> TokenizerTask:
    return (
        AudioTokenizerConfig(
            model=replace(MODEL, **model), reconstruction=FIDELITY, adversary=adversary
        )
        .build()
        .double()
    )


def semantic_task(hop: int = 80) -> TokenizerTask:
    """Whose scale and table are settled: 16 symbols at chosen features."""
    features = MFCCFeaturesConfig(rate_hz=RATE, window=200, hop=hop)
    task = (
        SemanticTokenizerConfig(model=SemanticConfig(features=features, vocab_size=16, normalization_steps=1))
        .build()
        .double()
    )
    task.model.scale.done.fill_(1)
    return task


def batch_of(*lengths: int, first: int = 0, samples: int = SAMPLES) -> Batch:
    """Toys number `first` and following, of which so many samples are real."""
    num_synthetic = SyntheticAudio(first + len(lengths), samples=SAMPLES, rate_hz=RATE, seed=3)
    examples = []
    for i, length in enumerate(lengths, start=first):
        whole = num_synthetic.item(i, np.random.default_rng(0)).samples.astype(np.float64)
        padded = np.where(np.arange(samples) < length, whole[:, :samples], 0.0)
        examples.append(AudioExample(padded, length, RATE, ""))
    numbers = range(first, first + len(lengths))
    return Batch(collate(examples), [str(i) for i in numbers], [hash_seed(7, i) for i in numbers])


def one_by_one(*lengths: int) -> list[Batch]:
    """Each alone, with nothing after its end."""
    return [batch_of(length, first=i, samples=length) for i, length in enumerate(lengths)]


def with_other_padding(batch: Batch) -> Batch:
    samples = batch.examples.samples.clone()
    for sound, length in zip(samples, batch.examples.lengths.tolist(), strict=True):
        sound[:, length:] = torch.rand_like(sound[:, length:]) * 2 - 1
    return Batch(replace(batch.examples, samples=samples), batch.names, batch.seeds)


def added(seen: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([one[name] for one in seen]).sum(0) for name in seen[0]}


# ---- what is padding, and what is real


@pytest.mark.parametrize("adversary", [None, JUDGES], ids=["alone", "judged"])
def test_what_follows_the_end_changes_no_loss(adversary: AudioAdversaryConfig | None) -> None:
    task, batch = build_task(adversary), batch_of(*LENGTHS)
    other = with_other_padding(batch)
    assert not torch.equal(batch.examples.samples, other.examples.samples)
    for update in task.updates:
        terms, others = update.loss(batch, 0).terms, update.loss(other, 0).terms
        assert terms.keys() == others.keys()
        for name, term in terms.items():
            torch.testing.assert_close(others[name], term, msg=f"{update.name}: {name}")


def test_a_padded_batch_costs_what_its_sounds_cost_one_by_one() -> None:
    task, alone = build_task(), one_by_one(*LENGTHS)
    terms = task.reconstruction_loss(batch_of(*LENGTHS), 0).terms
    assert {"samples", "mel", "stft"} <= terms.keys()
    for name in ("samples", "mel", "stft"):
        each = [task.reconstruction_loss(one, 0).terms[name] for one in alone]
        torch.testing.assert_close(terms[name], torch.stack(each).mean(), msg=name)


def test_a_padded_batch_is_measured_as_its_sounds_one_by_one() -> None:
    """Lengths that fill no frame included: a frame is filled with silence."""
    task, lengths = build_task(), (2_000, 1_207, 333, 21)
    with eval_mode(task):
        train_together, alone = (
            task.batch_stats(batch_of(*lengths)),
            added([task.batch_stats(one) for one in one_by_one(*lengths)]),
        )
    assert train_together.keys() == alone.keys()
    for name, value in train_together.items():
        torch.testing.assert_close(value, alone[name], msg=name)


def test_every_sound_counts_the_same_so_micro_batches_are_one_batch() -> None:
    task = build_task(JUDGES)
    whole, parts = batch_of(*LENGTHS), [batch_of(*LENGTHS[:2]), batch_of(*LENGTHS[2:], first=2)]
    for update in task.updates:
        terms, halves = update.loss(whole, 0).terms, [update.loss(part, 0).terms for part in parts]
        for name in terms.keys() & {"samples", "mel", "stft", "adversarial", "matching", "apart"}:
            torch.testing.assert_close(
                sum(half[name] for half in halves) / 2, terms[name], msg=f"{update.name}: {name}"
            )


# ---- levels


def test_how_many_levels_a_sound_is_written_in_is_its_own_draw_and_for_training_only() -> None:
    task = build_task(quantizer=replace(MODEL.quantizer, dropout=0.9))
    lengths = (2_000,) * 24
    num_quantizers_B = task.told(batch_of(*lengths))["keep_B"]
    assert set(num_quantizers_B.tolist()) == {1, 2, 3}
    alone = [task.told(batch_of(2_000, first=i))["keep_B"].item() for i in range(24)]
    assert alone == num_quantizers_B.tolist(), "in any company"
    assert torch.equal(task.told(batch_of(*lengths))["keep_B"], num_quantizers_B), (
        "and whenever it is asked"
    )
    with eval_mode(task):
        codes = task.batch_stats(batch_of(*lengths))["codes"]
    assert codes.sum(1).tolist() == [24 * 100] * 3, "measured in all levels"
    assert "keep_B" not in build_task().told(batch_of(20))


def test_each_level_has_its_use_and_its_perplexity_counted_over_real_frames() -> None:
    task, batch = build_task(), batch_of(*LENGTHS)
    with eval_mode(task):
        numbers = task.compute_metrics(task.batch_stats(batch))
        codes = task.model(batch.examples.samples, batch.examples.lengths).codes
    frames = [length // HOP for length in LENGTHS]
    for level in range(3):
        written = torch.cat([row[:count, level] for row, count in zip(codes, frames, strict=True)])
        counts = torch.bincount(written, minlength=64).double()
        shares = counts[counts > 0] / counts.sum()
        assert numbers[f"usage_{level + 1}"] == pytest.approx(float((counts > 0).double().mean()))
        assert numbers[f"perplexity_{level + 1}"] == pytest.approx(
            float((-shares * shares.log()).sum().exp())
        )
    assert numbers["usage"] == pytest.approx(
        np.mean([numbers[f"usage_{level}"] for level in (1, 2, 3)])
    )


# ---- the judges


def test_judges_hear_silence_after_the_end_on_both_sides() -> None:
    """Whatever the model makes there."""
    task, batch = build_task(JUDGES), with_other_padding(batch_of(*LENGTHS))
    heard: dict[str, list[Tensor]] = {name: [] for name in task.discriminators}
    for name, judge in task.discriminators.items():
        view = judge.view

        def noted(sounds: Tensor, batch: Batch, name: str = name, view: Any = view) -> Tensor:
            heard[name].append(view(sounds, batch))
            return heard[name][-1]

        task.discriminators = {**task.discriminators, name: replace(judge, view=noted)}
    task.reconstruction_loss(batch, 0)
    for name, judge in task.discriminators.items():
        task.discriminator_loss(judge, batch, 0)
        assert len(heard[name]) == 4, (
            "a reconstruction and an original for the model, and for the judge"
        )
        for sounds in heard[name]:
            for sound, length in zip(sounds, LENGTHS, strict=True):
                assert not sound[:, length:].any() and sound[:, :length].any()


def test_matching_is_the_mean_over_judges_of_how_differently_their_layers_hear() -> None:
    task, batch = build_task(JUDGES), batch_of(2_000, 2_000)
    output = task.model(batch.examples.samples, batch.examples.lengths).output
    apart = []
    for name in ("periods", "scales", "bands"):
        judge = task.get_submodule(name)
        real, fake = (
            judge.discriminate(sounds).features for sounds in (batch.examples.samples, output)
        )
        apart.append(feature_matching_B(real, fake).mean())
    torch.testing.assert_close(
        task.reconstruction_loss(batch, 0).terms["matching"], 2.0 * torch.stack(apart).mean()
    )
    assert (
        "matching"
        not in build_task(replace(JUDGES, feature_matching_weight=0.0))
        .reconstruction_loss(batch, 0)
        .terms
    )


def test_matching_pulls_at_the_model_and_at_nobody_else() -> None:
    task, batch = build_task(JUDGES), batch_of(2_000, 1_200)
    [model, *discriminators] = task.updates
    with only(task, model.trains):
        model.loss(batch, 0).terms["matching"].backward()
    pulled = {
        name.split(".")[0]
        for name, parameter in task.named_parameters()
        if parameter.grad is not None
    }
    assert pulled == {"model"}
    for update in discriminators:
        assert "matching" not in update.loss(batch, 0).terms


def test_each_update_gives_all_of_its_own_network_a_gradient() -> None:
    task, batch = build_task(JUDGES), batch_of(2_000, 1_200)
    assert [update.name for update in task.updates] == ["model", "periods", "scales", "bands"]
    for update in task.updates:
        task.zero_grad()
        with only(task, update.trains):
            update.loss(batch, 0).total().backward()
        still = [
            name for name, parameter in update.trains.named_parameters() if parameter.grad is None
        ]
        assert still == []
        pulled = {
            name.split(".")[0]
            for name, parameter in task.named_parameters()
            if parameter.grad is not None
        }
        assert pulled == {update.name}


def test_judges_that_have_not_started_are_neither_heard_nor_matched() -> None:
    task, batch = build_task(replace(JUDGES, starts=3)), batch_of(2_000)
    assert not {"adversarial", "matching"} & task.reconstruction_loss(batch, 2).terms.keys()
    assert {"adversarial", "matching"} <= task.reconstruction_loss(batch, 3).terms.keys()


# ---- measures


def concluded(task: TokenizerTask, output: Tensor, batch: Batch) -> dict[str, float]:
    totals = {"examples": torch.tensor(len(batch)), "codes": torch.ones(3, 64, dtype=torch.long)}
    return task.reconstruction.compute_metrics(
        totals | task.reconstruction.batch_stats(output, batch)
    )


def test_si_sdr_and_loudness_are_means_over_what_can_be_heard() -> None:
    task, batch = build_task(), batch_of(2_000, 1_200, 860)
    batch.examples.samples[1] = 0  # silence
    output = 0.5 * batch.examples.samples + 0.01 * torch.randn_like(batch.examples.samples)
    numbers = concluded(task, output, batch)
    heard = [
        si_sdr_B(
            output[[i]], batch.examples.samples[[i]], lengths_B=batch.examples.lengths[[i]]
        ).item()
        for i in (0, 2)
    ]
    assert numbers["si_sdr"] == pytest.approx(np.mean(heard))
    assert numbers["rms_ratio"] == pytest.approx(0.5, abs=0.05)


def test_where_all_is_silent_the_numbers_are_numbers() -> None:
    task, batch = build_task(), batch_of(2_000, 1_200)
    batch.examples.samples.zero_()
    with eval_mode(task):
        numbers = task.compute_metrics(task.batch_stats(batch))
    assert all(math.isfinite(number) for number in numbers.values())
    assert all(bool(term.isfinite()) for term in task.reconstruction_loss(batch, 0).terms.values())


def test_kilobits_per_second_are_counted_by_hand() -> None:
    """3 levels of 64 symbols, which are 6 bits each, for every 20 samples of 8,000 a second; over
    any batches."""
    task = build_task()
    with eval_mode(task):
        numbers = task.compute_metrics(
            added(
                [task.batch_stats(batch_of(*LENGTHS)), task.batch_stats(batch_of(2_000, first=4))]
            )
        )
    assert numbers["kilobits_per_second"] == pytest.approx(3 * 6 * RATE / HOP / 1000)


# ---- what is shown and written


def test_a_sound_is_shown_before_its_reconstruction_as_long_as_it_is() -> None:
    task, batch = build_task(), batch_of(2_000, 860)
    with eval_mode(task):
        shown = task.sample(batch)
    for pair, sound, length in zip(shown, batch.examples.samples, (2_000, 860), strict=True):
        assert pair.left.samples.shape == pair.right.samples.shape == (1, length)
        np.testing.assert_allclose(pair.left.samples, sound[:, :length], atol=1e-6)
        assert pair.rate_hz == RATE and pair.samples.shape[1] > 2 * length


def test_what_is_written_of_symbols_ends_with_them() -> None:
    task, batch = build_task(), batch_of(*LENGTHS)
    with eval_mode(task):
        codes = task.model.encode(batch.examples.samples, batch.examples.lengths)
        made = task.reconstruction.media(task.model.decode(codes))
        nothing = task.reconstruction.media(torch.zeros(1, 1, 100, dtype=torch.float64))
    assert [sound.samples.shape[1] for sound in made] == list(LENGTHS)
    assert nothing[0].samples.shape == (1, 1), "what holds nothing can be written all the same"


# ---- semantic tokens


def test_features_beyond_the_end_count_nowhere() -> None:
    """Lengths that fill no frame included, and sounds that do not fill their last one."""
    task, lengths = semantic_task(), (1_990, 1_201, 33, 80)
    padded = batch_of(*lengths, samples=1_990)
    with eval_mode(task):
        train_together, alone = (
            task.batch_stats(padded),
            added([task.batch_stats(one) for one in one_by_one(*lengths)]),
        )
        other = task.batch_stats(with_other_padding(padded))
    assert (
        int(train_together["frames"])
        == sum(math.ceil(length / 80) for length in lengths)
        == int(train_together["codes"].sum())
    )
    for name, value in train_together.items():
        torch.testing.assert_close(value, alone[name], msg=name)
        torch.testing.assert_close(value, other[name], msg=name)


def test_a_padded_batch_loses_what_its_sounds_lose_one_by_one() -> None:
    task = semantic_task()
    with eval_mode(task):
        loss = task.reconstruction_loss(batch_of(*LENGTHS), 0).terms
        each = [task.reconstruction_loss(one, 0).terms["distance"] for one in one_by_one(*LENGTHS)]
    assert loss.keys() == {"distance"}
    torch.testing.assert_close(loss["distance"], torch.stack(each).mean())


@pytest.mark.parametrize(("told", "explained_variance"), [("all", 1.0), ("the mean", 0.0)])
def test_explained_is_the_share_of_the_variance_that_symbols_tell(
    told: str, explained: float
) -> None:
    task, batch = semantic_task(), batch_of(2_000, 1_200)
    with eval_mode(task):
        heard_BTD = task.model(batch.examples.samples, batch.examples.lengths).output[:, :, 1]
        mean_D = heard_BTD[heard_BTD.isfinite().all(-1)].mean(0)
        output = torch.stack(
            [heard_BTD if told == "all" else mean_D.expand_as(heard_BTD), heard_BTD], dim=2
        )
        totals = task.reconstruction.batch_stats(output, batch) | {"codes": torch.full((1, 16), 2)}
    numbers = task.reconstruction.compute_metrics(totals)
    assert numbers["explained_variance"] == pytest.approx(explained, abs=1e-6)
    assert numbers["bits_per_second"] == pytest.approx(32 * 4 / (3_200 / RATE))


def test_what_was_heard_is_drawn_beside_what_symbols_tell_of_it() -> None:
    task, batch = semantic_task(), batch_of(2_000, 400)
    with eval_mode(task):
        long, short = task.sample(batch)
    assert long.pixels.shape[1] > short.pixels.shape[1] > 2 * 4 * (400 // 80)


# ---- what does not fit


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda: AudioReconstructionConfig(samples=-1.0), "0 or more"),
        (lambda: AudioReconstructionConfig(samples=0, mel=0, stft=0), "learn nothing"),
        (lambda: AudioAdversaryConfig(bands=None), "not one is to judge"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        wrong()


def test_data_of_another_rate_are_refused_with_both_flags() -> None:
    run = audio_codec("tiny")
    with pytest.raises(ValueError, match=r"--data.rate-hz and --task.reconstruction.rate-hz"):
        replace(run, data=replace(run.data, rate_hz=16_000))
    run = audio_semantic("tiny")
    with pytest.raises(ValueError, match="16000 samples a second came to features for 8000"):
        replace(run, data=replace(run.data, rate_hz=16_000))


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_three_recipes_of_a_preset_prepare_sounds_alike(preset: Preset) -> None:
    """Or the third could not stand on the first two."""
    codec, semantic, soundstorm = (
        audio_codec(preset),
        audio_semantic(preset),
        audio_soundstorm(preset),
    )
    assert (
        codec.data.preprocessing()
        == semantic.data.preprocessing()
        == soundstorm.data.preprocessing()
    )
    step = math.lcm(codec.task.model.hop, semantic.task.model.hop)
    assert soundstorm.data.length % step == 0, "a clip fills whole frames of both"
