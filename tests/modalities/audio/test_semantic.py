"""Semantic tokens: k-means over features that keeps an engine's promises, and symbols that stand
for what was heard."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from tessera.modalities.audio.features import MelFeatures, VoiceFeatures
from tessera.modalities.audio.semantic import SemanticConfig, SemanticTokenizer
from tessera.run.config import decode, encode
from tests.nn.test_quantize_vq import Alone, Table

TINY = SemanticConfig(
    features=MelFeatures(window=40, hop=20, bands=8, coefficients=3),
    vocab_size=8,
    measured=2,
    context=3,
)


@dataclass
class AudioDataConfig:
    length: int
    rate_hz: int = 16_000


def sounds(count: int = 6, samples: int = 400, seed: int = 0) -> Tensor:
    """Tones that change their pitch every 100 samples, each at one of four."""
    chance = torch.Generator().manual_seed(seed)
    pitches = torch.tensor([500.0, 1500.0, 3000.0, 6000.0])[
        torch.randint(4, (count, samples // 100), generator=chance)
    ]
    phase = (2 * math.pi * pitches.repeat_interleave(100, dim=1) / 16_000).cumsum(1)
    noise = torch.randn(count, samples, generator=chance)
    return (0.5 * torch.sin(phase) + 1e-3 * noise)[:, None]


def commit(model: SemanticTokenizer, dist, step: int) -> None:
    for module in model.modules():
        if hasattr(module, "settle"):
            module.commit(dist, step)


def trained(
    config: SemanticConfig = TINY, steps: int = 60, rate: float = 1e-2
) -> SemanticTokenizer:
    torch.manual_seed(0)
    model = config.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    for step in range(steps):
        told = model(sounds(seed=step))
        optimizer.zero_grad()
        sum(told.penalties.values()).backward()
        optimizer.step()
        commit(model, Alone(), step)
    return model.eval()


def test_the_symbols_keep_most_of_what_is_heard_and_neighbours_tell_more():
    heard = sounds(seed=1000)
    told, centre = trained()(heard), trained(replace(TINY, context=1), rate=0.0)(heard)
    assert (
        told.distance_B.mean() < 0.9 * centre.distance_B.mean() and centre.distance_B.mean() < 0.4
    )
    assert len(told.codes.unique()) == 8, "all symbols are in use"


def test_a_tone_has_the_same_symbol_whenever_it_sounds():
    model = trained()
    pad_for_batch_invariance = torch.sin(2 * math.pi * 3000 * torch.arange(2000) / 16_000)[
        None, None
    ]
    codes = model.encode(
        torch.cat([pad_for_batch_invariance * 0.5, pad_for_batch_invariance.roll(7) * 0.5])
    )[:, 5:-5]
    assert (codes == codes[0, 0]).all()


def test_decoding_the_symbols_of_a_sound_gives_its_reconstruction_exactly():
    model, heard, lengths_B = trained(), sounds(), torch.tensor([400, 400, 61, 400, 1, 200])
    with torch.no_grad():
        for lengths in (None, lengths_B):
            told = model(heard, lengths)
            assert torch.equal(told.codes, model.encode(heard, lengths))
            assert torch.equal(told.output[:, :, 0], model.decode(told.codes))
            assert told.output.shape == (6, 20, 2, 9)
    assert [int((row >= 0).sum()) for row in told.codes] == [20, 20, 4, 20, 1, 10]


def test_features_are_brought_to_a_mean_of_0_and_a_spread_of_1_before_a_symbol_is_found():
    model = TINY.build()
    seen = []
    for step in range(2):
        assert not model.scale.known and not model.quantizer.started
        seen.append(model(sounds(seed=step)).output[:, :, 1].flatten(0, 1))
        assert model.quantizer.notes is None
        commit(model, Alone(), step)
    rows = model.scale(torch.cat(seen))
    torch.testing.assert_close(rows.mean(0), torch.zeros(9), rtol=0, atol=1e-3)
    torch.testing.assert_close(rows.std(0, correction=0), torch.ones(9), rtol=0, atol=1e-3)
    torch.testing.assert_close(model.scale.undo(rows), torch.cat(seen), rtol=1e-4, atol=1e-4)
    before = model.scale.totals.clone()
    model(sounds(seed=9))
    commit(model, Alone(), 2)
    assert model.quantizer.started and torch.equal(model.scale.totals, before), (
        "and then the scale stays"
    )


def test_a_feature_that_never_changes_does_no_harm():
    model = TINY.build()
    for step in range(4):
        told = model(torch.zeros(2, 1, 400))
        sum(told.penalties.values()).backward()
        commit(model, Alone(), step)
    assert told.output.isfinite().all() and all(
        parameter.grad.isfinite().all() for parameter in model.parameters()
    )


@pytest.mark.parametrize("step", [0, 3])
def test_four_micro_batches_are_one_batch_and_two_processes_are_one(step: int):
    """In the steps that measure, and in those that move the table. Sounds are of different
    lengths."""
    heard, lengths_B = sounds(8).double(), torch.tensor([400, 30, 200, 399, 400, 1, 250, 400])

    def beginning() -> SemanticTokenizer:
        torch.manual_seed(0)
        model = TINY.build().double()
        for earlier in range(step):
            model(sounds(seed=50 + earlier).double())
            commit(model, Alone(), earlier)
        return model

    def stepped(
        model: SemanticTokenizer, parts: list[list[int]], dist
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        for rows in parts:
            (sum(model(heard[rows], lengths_B[rows]).penalties.values()) / len(parts)).backward()
        commit(model, dist, step)
        return [parameter.grad for parameter in model.parameters()], model.state_dict()

    whole = beginning()
    sum(whole(heard, lengths_B).penalties.values()).backward()
    commit(whole, Alone(), step)
    gradients, state = stepped(beginning(), [[0, 1], [2, 3], [4, 5], [6, 7]], Alone())
    for ours, theirs in zip(gradients, whole.parameters()):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-9, atol=1e-12)
    for name, tensor in whole.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)

    table, results = Table(), {}
    replicas = [
        beginning(),
        beginning(),
    ]  # here, and not in the threads, which would share one generator

    def process(rank: int) -> None:
        """Micro-batches are dealt to processes like cards."""
        results[rank] = stepped(
            replicas[rank], [[rank, rank + 2], [rank + 4, rank + 6]], table.seat(rank)
        )

    run_both(process)
    for name in state:
        assert torch.equal(results[0][1][name], results[1][1][name]), (
            "replicas stay equal to the bit"
        )
        torch.testing.assert_close(results[0][1][name], state[name], rtol=1e-9, atol=1e-12)


def run_both(process) -> None:
    with ThreadPoolExecutor(2) as both:
        list(both.map(process, (0, 1)))


def test_what_was_noted_in_a_step_that_is_skipped_is_forgotten():
    model = TINY.build()
    model(sounds() * float("nan"))
    for module in model.modules():
        if hasattr(module, "discard"):
            module.rollback()
    commit(model, Alone(), 0)
    assert int(model.scale.done) == 0 and not model.scale.totals.any()


def test_measuring_and_validating_change_nothing_that_is_saved():
    model = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model(sounds())
    model.encode(sounds())
    commit(model, Alone(), 99)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_every_parameter_learns_and_no_feature_network_is_among_them():
    model = TINY.build()
    sum(model(sounds()).penalties.values()).backward()
    assert [name for name, _ in model.named_parameters()] == [
        "neighbours.weight",
        "neighbours.bias",
    ]
    assert all(parameter.grad.any() for parameter in model.parameters())


def test_it_says_what_becomes_of_sounds():
    model = TINY.build()
    assert (model.hop, model.levels, model.vocab_size, model.rate_hz) == (20, 1, 8, 16_000)
    assert not model.quantizer.needs_global_stats and not model.quantizer.has_quantizer_dropout
    assert TINY.grid(AudioDataConfig(400)) == (20,) and TINY.grid(AudioDataConfig(401)) == (21,)
    TINY.validate_data(AudioDataConfig(20))
    assert (SemanticConfig().hop, SemanticConfig(features=VoiceFeatures()).hop) == (320, 1280)


def test_its_configuration_survives_json():
    for config in (TINY, SemanticConfig(features=VoiceFeatures())):
        assert decode(SemanticConfig, encode(config)) == config


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SemanticConfig(measured=0), "1 step or more"),
        (lambda: SemanticConfig(context=4), "context.*odd"),
        (lambda: SemanticConfig(vocab_size=1), "1 symbols"),
        (
            lambda: TINY.validate_data(AudioDataConfig(400, rate_hz=8000)),
            "8000 samples a second.*16000",
        ),
        (lambda: TINY.validate_data(AudioDataConfig(19)), "do not fill one frame of 20"),
        (lambda: TINY.build()(torch.zeros(2, 2, 400)), r"\(2, 2, 400\).*no batch of sounds"),
        (lambda: TINY.build()(torch.zeros(2, 1, 0)), "sound of 0 samples.*nothing to write"),
        (
            lambda: TINY.build().decode(torch.zeros(2, 3, 1, dtype=torch.long)),
            r"give \(batch, frames\)",
        ),
        (lambda: TINY.build().decode(torch.full((2, 3), 8)), "0 to 7"),
    ],
)
def test_what_cannot_be_is_refused_with_a_letter(make, words):
    with pytest.raises(ValueError, match=words):
        make()
