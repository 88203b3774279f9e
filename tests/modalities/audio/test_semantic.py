"""Semantic tokens: online k-means over features, with the guarantees of a codebook."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.features import MFCCFeaturesConfig, VoiceFeaturesConfig
from tessera.modalities.audio.semantic import SemanticConfig, SemanticTokenizer
from tessera.run.config import decode, encode
from tests.cli_runner import run_invalid, tessera
from tests.nn.test_quantize_vq import SingleProcess, TwoProcesses

TINY = SemanticConfig(
    features=MFCCFeaturesConfig(
        token_rate_hz=800.0,
        window_seconds=0.0025,
        bands=8,
        coefficients=3,
        normalize_recordings=False,
    ),
    vocab_size=8,
    normalization_steps=2,
    context=3,
)


@dataclass
class AudioData:
    length: int
    rate_hz: int = 16_000
    channels: int = 1
    check_mono = AudioDataConfig.check_mono


def make_tones(count: int = 6, samples: int = 400, seed: int = 0) -> Tensor:
    """Return tones that change to one of four pitches every 100 samples."""
    generator = torch.Generator().manual_seed(seed)
    pitches = torch.tensor([500.0, 1500.0, 3000.0, 6000.0])[
        torch.randint(4, (count, samples // 100), generator=generator)
    ]
    phase = (2 * math.pi * pitches.repeat_interleave(100, dim=1) / 16_000).cumsum(1)
    noise = torch.randn(count, samples, generator=generator)
    return (0.5 * torch.sin(phase) + 1e-3 * noise)[:, None]


def commit(model: SemanticTokenizer, dist, step: int) -> None:
    for module in model.modules():
        if hasattr(module, "commit"):
            module.commit(dist, step)


def train(config: SemanticConfig = TINY, steps: int = 60, lr: float = 1e-2) -> SemanticTokenizer:
    torch.manual_seed(0)
    model = config.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        output = model(make_tones(seed=step))
        optimizer.zero_grad()
        sum(output.penalties.values()).backward()
        optimizer.step()
        commit(model, SingleProcess(), step)
    return model.eval()


def test_tokens_predict_features_and_context_improves_the_prediction():
    audio = make_tones(seed=1000)
    output, single = train()(audio), train(replace(TINY, context=1), lr=0.0)(audio)
    assert output.distance_B.mean() < 0.9 * single.distance_B.mean()
    assert single.distance_B.mean() < 0.4
    assert len(output.codes.unique()) == 8, "all centroids are used"


def test_a_constant_tone_has_one_token():
    model = train()
    tone = 0.5 * torch.sin(2 * math.pi * 3000 * torch.arange(2000) / 16_000)[None, None]
    codes = model.encode(torch.cat([tone, tone.roll(7)]))[:, 5:-5]
    assert (codes == codes[0, 0]).all()


def test_decoding_the_codes_gives_exactly_the_reconstruction():
    model, audio = train(), make_tones()
    with torch.no_grad():
        for lengths_B in (None, torch.tensor([400, 400, 61, 400, 1, 200])):
            output = model(audio, lengths_B)
            assert torch.equal(output.codes, model.encode(audio, lengths_B))
            assert torch.equal(output.output[:, :, 0], model.decode(output.codes))
            assert output.output.shape == (6, 20, 2, 9)
    assert [int((row >= 0).sum()) for row in output.codes] == [20, 20, 4, 20, 1, 10]


def test_features_are_normalized_before_the_codebook_is_initialized():
    model = TINY.build()
    features = []
    for step in range(2):
        assert not model.normalizer.is_ready and not model.quantizer.initialized
        features.append(model(make_tones(seed=step)).output[:, :, 1].flatten(0, 1))
        assert model.quantizer.stats is None
        commit(model, SingleProcess(), step)
    features_PD = torch.cat(features)
    rows = model.normalizer(features_PD)
    torch.testing.assert_close(rows.mean(0), torch.zeros(9), rtol=0, atol=1e-3)
    torch.testing.assert_close(rows.std(0, correction=0), torch.ones(9), rtol=0, atol=1e-3)
    restored = model.normalizer.denormalize(rows)
    torch.testing.assert_close(restored, features_PD, rtol=1e-4, atol=1e-4)
    before = model.normalizer.totals.clone()
    model(make_tones(seed=9))
    commit(model, SingleProcess(), 2)
    assert model.quantizer.initialized
    assert torch.equal(model.normalizer.totals, before), "the statistics are final"


def test_constant_features_give_finite_outputs_and_gradients():
    model = TINY.build()
    for step in range(4):
        output = model(torch.zeros(2, 1, 400))
        sum(output.penalties.values()).backward()
        commit(model, SingleProcess(), step)
    assert output.output.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("step", [0, 3], ids=["normalization", "codebook update"])
def test_micro_batches_and_processes_equal_one_batch(step: int):
    audio = make_tones(8).double()
    lengths_B = torch.tensor([400, 30, 200, 399, 400, 1, 250, 400])

    def build_model() -> SemanticTokenizer:
        torch.manual_seed(0)
        model = TINY.build().double()
        for earlier in range(step):
            model(make_tones(seed=50 + earlier).double())
            commit(model, SingleProcess(), earlier)
        return model

    def run_step(
        model: SemanticTokenizer, parts: list[list[int]], dist
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        for rows in parts:
            (sum(model(audio[rows], lengths_B[rows]).penalties.values()) / len(parts)).backward()
        commit(model, dist, step)
        return [parameter.grad for parameter in model.parameters()], model.state_dict()

    whole = build_model()
    sum(whole(audio, lengths_B).penalties.values()).backward()
    commit(whole, SingleProcess(), step)
    micro_batches = [[0, 1], [2, 3], [4, 5], [6, 7]]
    gradients, state = run_step(build_model(), micro_batches, SingleProcess())
    for gradient, parameter in zip(gradients, whole.parameters()):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-9, atol=1e-12)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)

    processes, results = TwoProcesses(), {}
    # Built here and not in the threads, which share one random generator.
    replicas = [build_model(), build_model()]

    def run_process(rank: int) -> None:
        """Process `rank` gets every second micro-batch."""
        rows = [[rank, rank + 2], [rank + 4, rank + 6]]
        results[rank] = run_step(replicas[rank], rows, processes.group(rank))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run_process, (0, 1)))
    for name in state:
        assert torch.equal(results[0][1][name], results[1][1][name]), "replicas are equal"
        torch.testing.assert_close(results[0][1][name], state[name], rtol=1e-9, atol=1e-12)


def test_a_rolled_back_step_leaves_no_statistics():
    model = TINY.build()
    model(make_tones() * float("nan"))
    for module in model.modules():
        if hasattr(module, "rollback"):
            module.rollback()
    commit(model, SingleProcess(), 0)
    assert int(model.normalizer.steps_done) == 0 and not model.normalizer.totals.any()


def test_evaluation_does_not_change_the_state():
    model = train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(make_tones())
    model.encode(make_tones())
    commit(model, SingleProcess(), 99)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_only_the_context_convolution_is_trained():
    model = TINY.build()
    sum(model(make_tones()).penalties.values()).backward()
    names = [name for name, _ in model.named_parameters()]
    assert names == ["context_conv.weight", "context_conv.bias"]
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_hop_codebook_and_token_grid():
    model = TINY.build()
    assert (model.hop, model.num_quantizers, model.vocab_size, model.rate_hz) == (20, 1, 8, 16_000)
    assert not model.quantizer.needs_global_stats and not model.quantizer.has_quantizer_dropout
    assert TINY.grid(AudioData(400)) == (20,) and TINY.grid(AudioData(401)) == (21,)
    TINY.validate_data(AudioData(20))
    assert SemanticConfig().hop == 320
    assert SemanticConfig(features=VoiceFeaturesConfig()).hop == 1280


def test_the_token_rate_is_the_same_at_other_sampling_rates(tmp_path):
    flags = ("--preset", "tiny", "--steps", "1", "--data.rate-hz", "24000", "--out")
    result = tessera("train", "audio-semantic", *flags, tmp_path / "usual")
    assert result.code == 0 and "100 tokens per second, vocabulary size 16." in result.out, result
    slower = tessera("train", "audio-semantic", *flags, tmp_path / "40", "--token-rate-hz", "40")
    assert "40 tokens per second" in slower.out


def test_rates_without_whole_frames_are_reported():
    message = run_invalid("train", "audio-semantic", "--data.rate-hz", "11025", "--dry-run")
    assert "token_rate_hz must divide the rate of 11,025 Hz, but got 50" in message
    flags = ("--features", "voice", "--data.rate-hz", "24000", "--dry-run")
    assert "use --data.rate-hz 16000" in run_invalid("train", "audio-semantic", *flags)


def test_the_configuration_survives_json():
    for config in (TINY, SemanticConfig(features=VoiceFeaturesConfig())):
        assert decode(SemanticConfig, encode(config)) == config


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: SemanticConfig(normalization_steps=0), "normalization_steps must be at least 1"),
        (lambda: SemanticConfig(context=4), "context must be an odd number"),
        (lambda: SemanticConfig(vocab_size=1), "codebook_size"),
        (lambda: TINY.validate_data(AudioData(400, rate_hz=8000)), "8000 Hz, .* 16000 Hz"),
        (lambda: TINY.validate_data(AudioData(19)), "shorter than one frame of 20"),
        (lambda: TINY.build()(torch.zeros(2, 2, 400)), r"\(batch, 1, samples\).*\(2, 2, 400\)"),
        (lambda: TINY.build()(torch.zeros(2, 1, 0)), "0 samples cannot be tokenized"),
        (
            lambda: TINY.build().decode(torch.zeros(2, 3, 1, dtype=torch.long)),
            r"\(batch, frames\), but got \(2, 3, 1\)",
        ),
        (lambda: TINY.build().decode(torch.full((2, 3), 8)), "0 to 7"),
    ],
)
def test_invalid_settings_and_inputs_give_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()
