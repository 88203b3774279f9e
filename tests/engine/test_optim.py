"""How networks move: the rates a person asked for, decay on matrices only, and memory that comes
back by name."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tessera.engine.optim.config import (
    OptimizerConfig,
    all_rounds,
    clip_grad_norm,
    grad_norm,
    newton_schulz,
    optimizer_tensors,
    restore_optimizer,
    round_by_round,
    set_lr,
)
from tessera.nn.transformer import Transformer
from tests.engine.toy import toy_engine

RATES = {
    "constant": (OptimizerConfig(lr=0.5), [0.5] * 10),
    "warmup": (
        OptimizerConfig(lr=0.5, schedule="warmup", warmup_steps=4, warmup_start_lr=0.1),
        [0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
    ),
    # Half a cosine over the 8 steps after the warm-up, from 0.5 to a tenth of it: 0.275 + 0.225
    # cos(pi k / 8).
    "cosine": (
        OptimizerConfig(lr=0.5, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1),
        [
            0.25,
            0.5,
            0.5,
            0.482872900,
            0.434099025,
            0.361103768,
            0.275,
            0.188896232,
            0.115900975,
            0.067127100,
        ],
    ),
    # The last four of ten steps go down from 0.5 towards a fifth of it.
    "wsd": (
        OptimizerConfig(lr=0.5, schedule="wsd", warmup_steps=2, min_lr_ratio=0.2, decay_ratio=0.4),
        [0.25, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2],
    ),
}


@pytest.mark.parametrize("schedule", RATES)
def test_the_rate_asked_for_is_the_rate_in_the_optimizer(schedule, tmp_path):
    config, expected = RATES[schedule]
    engine = toy_engine(tmp_path, replace(config, decay=0.01), log_every=1)
    used: list[list[float]] = []
    engine.prepared["model"].optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.append([group["lr"] for group in optimizer.param_groups])
    )
    engine.run()
    assert [len(rates) for rates in used] == [2] * 10, "matrices and vectors are two groups"
    assert [rates[0] for rates in used] == pytest.approx(expected, abs=1e-8)
    assert [rates[1] for rates in used] == [rates[0] for rates in used]
    assert [record["model/lr"] for record in engine.folder.records("train")] == [
        rates[0] for rates in used
    ]


def test_the_rate_is_a_function_of_the_step_alone(tmp_path):
    """A run that goes on from step 6 uses the rates that it would have used without the stop."""
    config, expected = RATES["cosine"]
    engine = toy_engine(tmp_path, config)
    engine.done = 6
    used: list[float] = []
    engine.prepared["model"].optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"])
    )
    engine.run()
    assert used == pytest.approx(expected[6:], abs=1e-8)


def test_no_schedule_leaves_its_bounds_however_odd_the_numbers():
    for schedule in ("warmup", "cosine", "wsd"):
        for warmup, steps in [(0, 1), (5, 3), (3, 3), (2, 7), (1, 1000)]:
            config = OptimizerConfig(
                lr=2.0,
                schedule=schedule,
                warmup_steps=warmup,
                min_lr_ratio=0.25,
                warmup_start_lr=0.125,
            )
            rates = [config.lr_at(step, steps) for step in range(steps + 5)]
            assert all(0.125 < rate <= 2.0 for rate in rates), (schedule, warmup, steps, rates)


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 2))


def push(network: nn.Module, step: int) -> None:
    """Gradients that depend on the step only."""
    generator = torch.Generator().manual_seed(step)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def trained(
    network: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rate: float
) -> dict[str, Tensor]:
    for step in steps:
        push(network, step)
        set_lr(optimizer, rate)
        optimizer.step()
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_decay_shrinks_matrices_and_leaves_vectors_alone(kind):
    results = network()
    before = copy.deepcopy(results.state_dict())
    optimizer = OptimizerConfig(name=kind, lr=0.1, weight_decay=0.5).build(results)
    for parameter in results.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, tensor in results.state_dict().items():
        shrunk = before[name] * (1 - 0.1 * 0.5) if tensor.ndim >= 2 else before[name]
        torch.testing.assert_close(tensor, shrunk, msg=name)


def test_adam_decays_nothing():
    results = network()
    before = copy.deepcopy(results.state_dict())
    optimizer = OptimizerConfig(name="adam", lr=0.1, weight_decay=0.5).build(results)
    for parameter in results.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, tensor in results.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_adamw_is_torchs_adamw():
    """Against torch's plain loop, which shares no line with the fused form that is used."""
    ours, theirs = network(), network()
    config = OptimizerConfig(lr=0.01, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-6)
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6, foreach=False)
    results, expected = (
        trained(ours, config.build(ours), range(12), 0.01),
        trained(theirs, reference, range(12), 0.01),
    )
    for name in expected:
        torch.testing.assert_close(results[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_adam_is_torchs_adam():
    ours, theirs = network(), network()
    reference = torch.optim.Adam(theirs.parameters(), betas=(0.8, 0.95), eps=1e-6, foreach=False)
    built = OptimizerConfig(name="adam", lr=0.01, betas=(0.8, 0.95), eps=1e-6).build(ours)
    results, expected = (
        trained(ours, built, range(12), 0.01),
        trained(theirs, reference, range(12), 0.01),
    )
    for name in expected:
        torch.testing.assert_close(results[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_lion_follows_its_paper_number_by_number():
    """Chen 2023, algorithm 2, one scalar at a time and in double precision."""
    results = network().double()
    names = list(results.state_dict())
    expected = {name: tensor.flatten().tolist() for name, tensor in results.state_dict().items()}
    momentum = {name: [0.0] * len(values) for name, values in expected.items()}
    towards, remember, rate, decay = 0.9, 0.98, 0.01, 0.4
    optimizer = OptimizerConfig(
        name="lion", lr=rate, betas=(towards, remember), weight_decay=decay
    ).build(results)
    for step in range(6):
        push(results, step)
        for name, parameter in results.named_parameters():
            assert parameter.grad is not None
            decayed = decay if parameter.ndim >= 2 else 0.0
            for i, g in enumerate(parameter.grad.flatten().tolist()):
                c = towards * momentum[name][i] + (1 - towards) * g
                expected[name][i] -= rate * (math.copysign(1, c) + decayed * expected[name][i])
                momentum[name][i] = remember * momentum[name][i] + (1 - remember) * g
        optimizer.step()
    for name in names:
        found = results.state_dict()[name].flatten().tolist()
        assert found == pytest.approx(expected[name], rel=1e-9), name


@pytest.mark.parametrize("kind", ["adamw", "adam", "lion"])
def test_memory_comes_back_by_name_and_exactly(kind):
    config = OptimizerConfig(name=kind, lr=0.01, weight_decay=0.1)
    straight, stopped, resumed = network(), network(), network()
    expected = trained(straight, config.build(straight), range(10), 0.01)
    first = config.build(stopped)
    resumed.load_state_dict(trained(stopped, first, range(5), 0.01))
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(first).items()}
    second = config.build(resumed)
    restore_optimizer(
        second, dict(sorted(saved.items(), reverse=True))
    )  # names decide, not the order
    for name, tensor in optimizer_tensors(second).items():
        assert torch.equal(tensor, saved[name]), name
    found = trained(resumed, second, range(5, 10), 0.01)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def test_memory_lies_as_the_parameter_does_however_it_was_kept():
    """The fused step walks through weights and memory without looking at their strides: a file
    knows none."""
    straight, stopped, resumed = (
        nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last) for _ in range(3)
    )
    resumed.load_state_dict(straight.state_dict())
    stopped.load_state_dict(straight.state_dict())
    config = OptimizerConfig(lr=0.01)

    def results(conv: nn.Conv2d, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            pictures = torch.rand(
                2, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step)
            )
            conv(pictures).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    results(straight, config.build(straight), range(6))
    first = config.build(stopped)
    results(stopped, first, range(3))
    resumed.load_state_dict(stopped.state_dict())
    second = config.build(resumed)
    restore_optimizer(
        second, {name: tensor.contiguous() for name, tensor in optimizer_tensors(first).items()}
    )
    results(resumed, second, range(3, 6))
    assert torch.equal(resumed.weight, straight.weight)


def test_memory_that_fits_no_parameter_is_refused_by_name():
    built = OptimizerConfig().build(network())
    with pytest.raises(ValueError, match="'decoder.weight'"):
        restore_optimizer(built, {"exp_avg/decoder.weight": torch.zeros(2)})
    with pytest.raises(ValueError, match=r"'3.weight' has shape \(5, 5\), the network \(2, 12\)"):
        restore_optimizer(built, {"exp_avg/3.weight": torch.zeros(5, 5)})


def test_a_gradient_is_clipped_to_its_norm_and_told_as_it_was():
    results = network()
    push(results, 0)
    parameters = list(results.parameters())
    flat = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    norm = grad_norm(parameters)
    torch.testing.assert_close(norm, flat.norm())
    clip_grad_norm(parameters, norm, None)
    assert torch.equal(
        torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]), flat
    )
    clip_grad_norm(parameters, norm, 0.5)
    clipped = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
    torch.testing.assert_close(clipped, flat * 0.5 / flat.norm(), rtol=1e-5, atol=1e-6)
    clip_grad_norm(parameters, grad_norm(parameters), 10.0)
    torch.testing.assert_close(
        torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]), clipped
    )


def test_the_engine_clips_each_update_and_logs_the_norm_before(tmp_path):
    engine = toy_engine(tmp_path, OptimizerConfig(max_grad_norm=1e-3), steps=1)
    norms: list[Tensor] = []
    engine.prepared["model"].optimizer.register_step_pre_hook(
        lambda *_: norms.append(grad_norm(engine.prepared["model"].parameters))
    )
    engine.run()
    assert float(norms[0]) == pytest.approx(1e-3, rel=1e-3)
    assert engine.folder.records("train")[0]["model/grad_norm"] > 0.1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rate": 0.0}, "above zero, but it is 0.0"),
        ({"rate": float("nan")}, "above zero, but it is nan"),
        ({"clip": 0.0}, "not to 0.0"),
        ({"warmup": 5}, "use warmup, cosine or wsd"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_a_way_out(settings, says):
    with pytest.raises(ValueError, match=says):
        OptimizerConfig(**settings)


# ---- Muon


def test_muon_makes_a_direction_of_every_shape_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    for shape in ((8, 8), (6, 20), (20, 6)):
        values = torch.linalg.svdvals(newton_schulz(torch.randn(3, *shape), iterations=5))
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_all_rounds_at_once_are_one_round_after_the_other() -> None:
    torch.manual_seed(0)
    to_fp32 = torch.randn(3, 6, 40, dtype=torch.float64) @ torch.diag(
        torch.logspace(0, -3, 40, dtype=torch.float64)
    )
    x = to_fp32 / to_fp32.flatten(1).norm(dim=1)[:, None, None]
    torch.testing.assert_close(all_rounds(x, 5) @ x, round_by_round(x, 5))
    torch.testing.assert_close(newton_schulz(to_fp32, 5), round_by_round(x, 5))
    torch.testing.assert_close(newton_schulz(to_fp32.mT, 5), round_by_round(x, 5).mT)


def test_muon_moves_marked_matrices_by_the_rate_and_the_rest_as_adamw_does() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(Transformer(16, 1, 2), nn.Linear(16, 4))
    twin = copy.deepcopy(network)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    config = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1)
    pairs = [
        (network, config.build(network)),
        (twin, OptimizerConfig(lr=1e-2, weight_decay=0.1).build(twin)),
    ]
    x = torch.randn(2, 5, 16)
    for one, optimizer in pairs:
        one(x).square().mean().backward()
        optimizer.step()
    for (name, results), other in zip(network.named_parameters(), twin.parameters(), strict=True):
        if getattr(results, "between_states", False):
            change = results.detach() - before[name] * (1 - 1e-3)
            far = float(change.square().mean().sqrt())
            assert (
                far == pytest.approx(1e-2, rel=0.5) or far == 0
            )  # a gradient of low rank moves less
        else:
            torch.testing.assert_close(results, other)


def test_muon_needs_a_transformer() -> None:
    with pytest.raises(ValueError, match="muon is for the matrices of a transformer"):
        OptimizerConfig(name="muon").build(nn.Linear(2, 2))


def test_muons_memory_comes_back() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(Transformer(16, 1, 2), nn.Linear(16, 4))
    optimizer = OptimizerConfig(name="muon").build(network)
    network(torch.randn(2, 5, 16)).square().mean().backward()
    optimizer.step()
    scratch = {name: value.clone() for name, value in optimizer_tensors(optimizer).items()}
    again = OptimizerConfig(name="muon").build(network)
    restore_optimizer(again, scratch)
    assert optimizer_tensors(again).keys() == scratch.keys()
    assert any(name.startswith("momentum/") for name in scratch)
    assert any(name.startswith("exp_avg/") for name in scratch)
    assert all(
        torch.equal(value, scratch[name]) for name, value in optimizer_tensors(again).items()
    )
