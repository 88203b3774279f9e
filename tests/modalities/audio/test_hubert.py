"""Semantic tokens by masked prediction: targets, masks, stages of the training, and learning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tessera.engine.distributed import Distributed
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.hubert import HubertTokenizer, HubertTokenizerConfig, draw_spans
from tessera.modalities.audio.recipes import audio_semantic
from tests.runs import read_metrics, train

CONFIG = HubertTokenizerConfig(
    rate_hz=8_000,
    token_rate_hz=100.0,
    bands=8,
    dim=16,
    encoder_depth=1,
    context_depth=2,
    context_kernel=3,
    heads=2,
    layer=1,
    num_targets=6,
    normalization_steps=1,
    target_steps=3,
    mask_seconds=0.03,
    vocab_size=8,
    codebook_start=4,
)


def random_audio(samples: int = 1_600, count: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return 0.1 * torch.randn(count, 1, samples, generator=generator)


def build(config: HubertTokenizerConfig = CONFIG) -> HubertTokenizer:
    torch.manual_seed(0)
    model = config.build().eval()
    for parameter in model.parameters():  # residual branches are zero at initialization
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def train_step(model: HubertTokenizer, samples: Tensor) -> None:
    model.train()
    model(samples)
    for module in model.modules():
        if hasattr(module, "commit"):
            module.commit(Distributed(), 1)
    model.eval()


def spans(frames: int = 20, rows: int = 3) -> Tensor:
    masked = torch.zeros(rows, frames, dtype=torch.bool)
    masked[:, 4:9] = True
    return masked


def test_padding_changes_neither_tokens_nor_predictions() -> None:
    model, audio = build(), random_audio()
    lengths_B = torch.tensor([1_600, 810, 80])
    audio[1, :, 810:] = 7.0  # is ignored
    masked = spans()
    masked[2, 0] = True
    together = model(audio, lengths_B, masked_BT=masked)
    codes = model.encode(audio, lengths_B)
    assert torch.equal(codes, together.codes)
    for row, length in enumerate(lengths_B.tolist()):
        samples = audio[row : row + 1, :, :length]
        frames = -(-length // model.hop)
        alone = model(samples, masked_BT=masked[row : row + 1, :frames])
        assert torch.equal(codes[row, :frames], alone.codes[0])
        assert (codes[row, frames:] == -1).all()
        torch.testing.assert_close(together.output[row, :frames], alone.output[0])
        torch.testing.assert_close(
            together.prediction.cross_entropy_B[row], alone.prediction.cross_entropy_B[0]
        )
        torch.testing.assert_close(together.distance_B[row], alone.distance_B[0])


def test_predictions_do_not_depend_on_masked_frames() -> None:
    model = build()
    mel_BTM, mask_BT = model.compute_mel(random_audio(), None)
    masked = spans()
    _, states = model.hidden_states(mel_BTM, mask_BT, masked)
    other = mel_BTM.clone()
    other[:, 4:9] += torch.randn(3, 5, 16)
    assert torch.equal(model.hidden_states(other, mask_BT, masked)[1], states)
    other[:, 9] += 1.0
    assert not torch.allclose(model.hidden_states(other, mask_BT, masked)[1], states)


def test_only_masked_frames_count_in_the_loss() -> None:
    model, audio = build(), random_audio()
    mel_BTM, mask_BT = model.compute_mel(audio, None)
    _, target_BT = model.compute_targets(audio, None, None, mask_BT)
    losses = []
    for frames in ([5], [6, 7], [5, 6, 7]):
        counted = target_BT.clone()
        others = [frame for frame in range(20) if frame not in frames]
        counted[:, others] = (counted[:, others] + 1) % 6
        masked = torch.zeros(3, 20, dtype=torch.bool)
        masked[:, frames] = True
        right = model.predict_targets(mel_BTM, mask_BT, masked, target_BT).cross_entropy_B
        wrong = model.predict_targets(mel_BTM, mask_BT, masked, counted).cross_entropy_B
        assert torch.equal(right, wrong)
        losses.append(right)
    assert not torch.allclose(losses[0], losses[1])


def test_targets_are_fixed_before_the_inner_layer_is_clustered() -> None:
    model, audio = build(), random_audio(3_200)
    for step in range(8):
        before, codebook = model.targets.codebook_VW.clone(), model.quantizer.codebook_VW.clone()
        train_step(model, audio + 0.01 * torch.randn(3, 1, 3_200))
        assert torch.equal(model.targets.codebook_VW, before) is (step == 0 or step > 2), step
        assert torch.equal(model.quantizer.codebook_VW, codebook) is (step < 4), step
    assert model.targets.is_initialized and model.quantizer.is_initialized


def test_masked_prediction_starts_with_the_targets() -> None:
    model, audio = build(), random_audio(3_200)
    masked = spans(40)
    assert model(audio, masked_BT=masked).penalties["masked_prediction"] == 0
    for _ in range(2):
        train_step(model, audio)
    assert model(audio, masked_BT=masked).penalties["masked_prediction"] > 0
    assert "masked_prediction" not in model(audio).penalties


def test_decoding_the_codes_gives_the_predicted_features() -> None:
    model, audio = build(), random_audio(3_200)
    for _ in range(6):
        train_step(model, audio)
    output = model(audio)
    torch.testing.assert_close(model.decode(output.codes), output.output[:, :, 0])
    with pytest.raises(ValueError, match=r"shape \(batch, frames\)"):
        model.decode(output.codes[..., None])


def test_tokens_get_no_gradient_of_the_features() -> None:
    """The inner layer is trained by masked prediction only."""
    model, audio = build(), random_audio()
    model(audio).penalties["distance"].backward()
    assert model.to_features.weight.grad is not None
    assert model.to_states.weight.grad is None


def test_spans_cover_the_requested_fraction() -> None:
    generator = torch.Generator().manual_seed(0)
    masked = torch.stack([draw_spans(400, 0.5, 10, generator) for _ in range(100)])
    assert float(masked.float().mean()) == pytest.approx(0.5, abs=0.03)
    runs = torch.diff(torch.nn.functional.pad(masked.int(), (1, 1)))
    starts, ends = (runs == 1).nonzero(), (runs == -1).nonzero()
    lengths = (ends - starts)[:, 1]
    assert (lengths[ends[:, 1] < 400] >= 10).all()
    assert draw_spans(1, 0.01, 10, generator).tolist() == [True]


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 24_000, 44_100])
def test_other_sampling_rates_keep_the_token_rate(rate_hz: int) -> None:
    data = AudioDataConfig(rate_hz=rate_hz, seconds=2.0)
    fitted = replace(CONFIG, token_rate_hz=25.0).fit_data(data)
    assert (fitted.hop, fitted.grid(data)) == (rate_hz // 25, (50,))
    assert fitted.build().mfcc.hop == fitted.hop


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer": 3}, "layer must be 1 to 2"),
        ({"mask_fraction": 1.0}, "mask_fraction must be between 0 and 1"),
        ({"mask_seconds": 0.0}, "mask_seconds must be above 0"),
        ({"dim": 0}, "dim must be at least 1"),
        ({"target_steps": -1}, "target_steps must be at least 0"),
        ({"token_rate_hz": 96.0}, "must be a multiple of 2"),
    ],
)
def test_invalid_settings_give_an_error(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **settings)


def test_the_recipe_needs_no_transcripts_and_sets_the_token_rate() -> None:
    run = audio_semantic("small", features="hubert", token_rate_hz=40.0)
    assert run.task.model.hop == 400 and not run.task.uses_captions


def test_masked_frames_are_predicted_after_a_short_training(tmp_path: Path) -> None:
    """Of 16 targets; without training about one in ten frames is right."""
    run = audio_semantic("tiny", features="hubert")
    data = replace(run.data, num_synthetic=4, val_fraction=0.0, crop="centre")
    engine = replace(run.engine, steps=150, validate_every=150, sample_every=150)
    train(tmp_path / "run", replace(run, data=data, engine=engine))
    metrics = read_metrics(tmp_path / "run")[-1]
    assert metrics["val/masked_accuracy"] > 0.5
    assert metrics["val/explained_variance"] > 0.2
    assert metrics["val/codebook_usage"] > 0.5
