"""Optimizers: learning rate schedules, weight decay on matrices only, agreement with references,
and state that is restored by name."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tessera.engine.engine import Engine
from tessera.engine.optim.config import (
    OptimizerConfig,
    clip_grad_norm,
    grad_norm,
    load_optimizer_state,
    optimizer_state,
    set_lr,
    step_optimizer,
    zero_grad,
)
from tessera.engine.optim.muon import combined_factor, iterate_directly, newton_schulz
from tessera.nn.transformer import Transformer
from tests.engine.small_task import small_engine

SCHEDULES = {
    "constant": (OptimizerConfig(lr=0.5), [0.5] * 10),
    "warmup": (
        OptimizerConfig(lr=0.5, schedule="warmup", warmup_steps=4, warmup_start_lr=0.1),
        [0.2, 0.3, 0.4, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
    ),
    # Half a cosine over the 8 steps after the warm-up, from 0.5 to a tenth of it:
    # 0.275 + 0.225 cos(pi k / 8).
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
    # The last four of ten steps decay linearly from 0.5 towards a fifth of it.
    "wsd": (
        OptimizerConfig(lr=0.5, schedule="wsd", warmup_steps=2, min_lr_ratio=0.2, decay_ratio=0.4),
        [0.25, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.4, 0.3, 0.2],
    ),
}


def record_lrs(engine: Engine) -> list[list[float]]:
    """Return a list that receives the learning rates of all groups before each step."""
    used: list[list[float]] = []
    engine.updates["model"].optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.append([group["lr"] for group in optimizer.param_groups])
    )
    return used


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_optimizer_and_the_log_have_the_scheduled_learning_rate(schedule, tmp_path):
    config, expected = SCHEDULES[schedule]
    engine = small_engine(tmp_path, replace(config, weight_decay=0.01), log_every=1)
    used = record_lrs(engine)
    engine.run()
    assert [len(lrs) for lrs in used] == [2] * 10, "matrices and vectors are two groups"
    assert [lrs[0] for lrs in used] == pytest.approx(expected, abs=1e-8)
    assert [lrs[1] for lrs in used] == [lrs[0] for lrs in used]
    records = engine.directory.read_records("train")
    assert [record["model/lr"] for record in records] == [lrs[0] for lrs in used]


def test_the_learning_rate_depends_on_the_step_alone(tmp_path):
    """A run that resumes at step 6 uses the learning rates of an uninterrupted run."""
    config, expected = SCHEDULES["cosine"]
    engine = small_engine(tmp_path, config)
    engine.global_step = 6
    used = record_lrs(engine)
    engine.run()
    assert [lrs[0] for lrs in used] == pytest.approx(expected[6:], abs=1e-8)


def test_no_schedule_leaves_its_bounds():
    for schedule in ("warmup", "cosine", "wsd"):
        for warmup, steps in [(0, 1), (5, 3), (3, 3), (2, 7), (1, 1000)]:
            config = OptimizerConfig(
                lr=2.0,
                schedule=schedule,
                warmup_steps=warmup,
                min_lr_ratio=0.25,
                warmup_start_lr=0.125,
            )
            lrs = [config.lr_at(step, steps) for step in range(steps + 5)]
            assert all(0.125 < lr <= 2.0 for lr in lrs), (schedule, warmup, steps, lrs)


# ---- optimizers


def make_network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(12, 2))


def named(network: nn.Module) -> dict[str, nn.Parameter]:
    return dict(network.named_parameters())


def set_gradients(network: nn.Module, step: int) -> None:
    """Set gradients that depend on the step only."""
    generator = torch.Generator().manual_seed(step)
    for parameter in network.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def train(
    network: nn.Module, optimizer: torch.optim.Optimizer, steps: range, lr: float = 0.01
) -> dict[str, Tensor]:
    for step in steps:
        set_gradients(network, step)
        set_lr(optimizer, lr)
        optimizer.step()
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def assert_close_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_weight_decay_shrinks_matrices_and_no_vectors(name):
    network = make_network()
    before = copy.deepcopy(network.state_dict())
    optimizer = OptimizerConfig(name=name, lr=0.1, weight_decay=0.5).build(named(network))
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for key, tensor in network.state_dict().items():
        expected = before[key] * (1 - 0.1 * 0.5) if tensor.ndim >= 2 else before[key]
        torch.testing.assert_close(tensor, expected, msg=key)


def test_adam_has_no_weight_decay():
    network = make_network()
    before = copy.deepcopy(network.state_dict())
    optimizer = OptimizerConfig(name="adam", lr=0.1, weight_decay=0.5).build(named(network))
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_adamw_equals_the_adamw_of_torch():
    """The reference is torch's loop over parameters, which shares no code with the fused kernel."""
    ours, theirs = make_network(), make_network()
    config = OptimizerConfig(lr=0.01, weight_decay=0.3, betas=(0.8, 0.95), eps=1e-6)
    matrices = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors = [p for p in theirs.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.95), eps=1e-6, foreach=False)
    found = train(ours, config.build(named(ours)), range(12))
    assert_close_weights(found, train(theirs, reference, range(12)))


def test_adamw_equals_the_fused_adamw_of_torch_bit_for_bit():
    """Also with two types, a parameter without a gradient, and a step that is skipped."""
    ours, theirs = make_network(), make_network()
    for network in (ours, theirs):
        network[3].double()
    config = OptimizerConfig(lr=0.01, weight_decay=0.0)
    optimizer = config.build(named(ours))
    reference = torch.optim.AdamW(
        theirs.parameters(), lr=0.01, betas=config.betas, weight_decay=0.0, fused=True
    )
    for step in range(6):
        for network, one in ((ours, optimizer), (theirs, reference)):
            set_gradients(network, step)
            if step == 0:
                network[0].bias.grad = None
            step_optimizer(one, torch.tensor(float(step == 4)))
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(parameter, other)
        state, expected = optimizer.state[parameter], reference.state[other]
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in expected)
    assert optimizer.state[ours[3].weight]["step"] == 5, "a skipped step is not counted"


def test_the_gradient_norm_equals_that_of_torch_bit_for_bit():
    network = make_network()
    set_gradients(network, 0)
    network[0].bias.grad = None
    grads = [one.grad for one in network.parameters() if one.grad is not None]
    assert torch.equal(grad_norm(list(network.parameters())), torch.nn.utils.get_total_norm(grads))


def test_adam_equals_the_adam_of_torch():
    ours, theirs = make_network(), make_network()
    reference = torch.optim.Adam(theirs.parameters(), betas=(0.8, 0.95), eps=1e-6, foreach=False)
    config = OptimizerConfig(name="adam", lr=0.01, betas=(0.8, 0.95), eps=1e-6)
    found = train(ours, config.build(named(ours)), range(12))
    assert_close_weights(found, train(theirs, reference, range(12)))


def test_lion_equals_the_algorithm_of_its_paper():
    """Chen 2023, algorithm 2, one scalar at a time in double precision."""
    network = make_network().double()
    expected = {name: tensor.flatten().tolist() for name, tensor in network.state_dict().items()}
    momentum = {name: [0.0] * len(values) for name, values in expected.items()}
    beta1, beta2, lr, weight_decay = 0.9, 0.98, 0.01, 0.4
    optimizer = OptimizerConfig(
        name="lion", lr=lr, betas=(beta1, beta2), weight_decay=weight_decay
    ).build(named(network))
    for step in range(6):
        set_gradients(network, step)
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None
            decay = weight_decay if parameter.ndim >= 2 else 0.0
            for i, g in enumerate(parameter.grad.flatten().tolist()):
                c = beta1 * momentum[name][i] + (1 - beta1) * g
                expected[name][i] -= lr * (math.copysign(1, c) + decay * expected[name][i])
                momentum[name][i] = beta2 * momentum[name][i] + (1 - beta2) * g
        optimizer.step()
    for name, tensor in network.state_dict().items():
        assert tensor.flatten().tolist() == pytest.approx(expected[name], rel=1e-9), name


# ---- optimizer state


@pytest.mark.parametrize("name", ["adamw", "adam", "lion"])
def test_optimizer_state_is_restored_by_name_and_exactly(name):
    config = OptimizerConfig(name=name, lr=0.01, weight_decay=0.1)
    uninterrupted, stopped, resumed = make_network(), make_network(), make_network()
    expected = train(uninterrupted, config.build(named(uninterrupted)), range(10))
    first = config.build(named(stopped))
    resumed.load_state_dict(train(stopped, first, range(5)))
    saved = {key: tensor.clone() for key, tensor in optimizer_state(first).items()}
    second = config.build(named(resumed))
    load_optimizer_state(second, dict(sorted(saved.items(), reverse=True)))  # in another order
    assert optimizer_state(second).keys() == saved.keys()
    for key, tensor in optimizer_state(second).items():
        assert torch.equal(tensor, saved[key]), key
    found = train(resumed, second, range(5, 10))
    for key in expected:
        assert torch.equal(found[key], expected[key]), key


def test_restored_moments_have_the_memory_format_of_their_parameter():
    """The fused kernel ignores strides, and files store none."""
    uninterrupted, stopped, resumed = (
        nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last) for _ in range(3)
    )
    resumed.load_state_dict(uninterrupted.state_dict())
    stopped.load_state_dict(uninterrupted.state_dict())
    config = OptimizerConfig(lr=0.01)

    def train_conv(conv: nn.Conv2d, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            images = torch.rand(2, 3, 5, 5, dtype=torch.float64, generator=generator)
            conv(images).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    train_conv(uninterrupted, config.build(named(uninterrupted)), range(6))
    first = config.build(named(stopped))
    train_conv(stopped, first, range(3))
    resumed.load_state_dict(stopped.state_dict())
    second = config.build(named(resumed))
    load_optimizer_state(
        second, {name: tensor.contiguous() for name, tensor in optimizer_state(first).items()}
    )
    train_conv(resumed, second, range(3, 6))
    assert torch.equal(resumed.weight, uninterrupted.weight)


def test_optimizer_state_that_fits_no_parameter_is_rejected_by_name():
    optimizer = OptimizerConfig().build(named(make_network()))
    with pytest.raises(ValueError, match="'decoder.weight', which this network does not have"):
        load_optimizer_state(optimizer, {"exp_avg/decoder.weight": torch.zeros(2)})
    with pytest.raises(
        ValueError,
        match=r"'3.weight' has shape \(5, 5\), the network's parameter has shape \(2, 12\)",
    ):
        load_optimizer_state(optimizer, {"exp_avg/3.weight": torch.zeros(5, 5)})


# ---- gradients


def flatten_gradients(parameters: list[nn.Parameter]) -> Tensor:
    return torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])


def test_gradients_are_clipped_to_a_norm_only_if_larger():
    network = make_network()
    set_gradients(network, 0)
    parameters = list(network.parameters())
    before = flatten_gradients(parameters)
    norm = grad_norm(parameters)
    torch.testing.assert_close(norm, before.norm())
    clip_grad_norm(parameters, norm, None)
    assert torch.equal(flatten_gradients(parameters), before)
    clip_grad_norm(parameters, norm, 0.5)
    clipped = flatten_gradients(parameters)
    torch.testing.assert_close(clipped, before * 0.5 / before.norm(), rtol=1e-5, atol=1e-6)
    clip_grad_norm(parameters, grad_norm(parameters), 10.0)
    torch.testing.assert_close(flatten_gradients(parameters), clipped)


def test_zero_grad_removes_all_gradients():
    network = make_network()
    set_gradients(network, 0)
    zero_grad(list(network.parameters()))
    assert all(parameter.grad is None for parameter in network.parameters())


def test_the_engine_clips_gradients_and_logs_the_norm_before(tmp_path):
    engine = small_engine(tmp_path, OptimizerConfig(max_grad_norm=1e-3), steps=1)
    norms: list[Tensor] = []
    engine.updates["model"].optimizer.register_step_pre_hook(
        lambda *_: norms.append(grad_norm(engine.updates["model"].parameters))
    )
    engine.run()
    assert float(norms[0]) == pytest.approx(1e-3, rel=1e-3)
    assert engine.directory.read_records("train")[0]["model/grad_norm"] > 0.1


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "learning rate must be above 0 and finite, got 0.0"),
        ({"lr": float("nan")}, "learning rate must be above 0 and finite, got nan"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be above 0, got 0.0; None disables clipping"),
        ({"warmup_steps": 5}, "got warmup_steps 5: use the schedule warmup, cosine or wsd"),
    ],
)
def test_invalid_settings_are_rejected_with_a_remedy(settings, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**settings)


# ---- Muon


def test_newton_schulz_makes_matrices_of_any_shape_nearly_orthogonal() -> None:
    torch.manual_seed(0)
    for shape in ((8, 8), (6, 20), (20, 6)):
        values = torch.linalg.svdvals(newton_schulz(torch.randn(3, *shape), iterations=5))
        assert values.min() > 0.5
        assert values.max() < 1.3


def test_the_combined_factor_equals_one_iteration_after_the_other() -> None:
    torch.manual_seed(0)
    scales = torch.diag(torch.logspace(0, -3, 40, dtype=torch.float64))
    matrices = torch.randn(3, 6, 40, dtype=torch.float64) @ scales
    x = matrices / matrices.flatten(1).norm(dim=1)[:, None, None]
    torch.testing.assert_close(combined_factor(x, 5) @ x, iterate_directly(x, 5))
    torch.testing.assert_close(newton_schulz(matrices, 5), iterate_directly(x, 5))
    torch.testing.assert_close(newton_schulz(matrices.mT, 5), iterate_directly(x, 5).mT)


def test_muon_changes_marked_matrices_by_the_learning_rate() -> None:
    """All other parameters are updated as by AdamW."""
    torch.manual_seed(0)
    network = nn.Sequential(Transformer(16, 1, 2), nn.Linear(16, 4))
    twin = copy.deepcopy(network)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    config = OptimizerConfig(name="muon", lr=1e-2, weight_decay=0.1)
    pairs = [
        (network, config.build(named(network))),
        (twin, OptimizerConfig(lr=1e-2, weight_decay=0.1).build(named(twin))),
    ]
    x = torch.randn(2, 5, 16)
    for one, optimizer in pairs:
        one(x).square().mean().backward()
        optimizer.step()
    sizes: list[float] = []
    for (name, ours), other in zip(network.named_parameters(), twin.parameters(), strict=True):
        if getattr(ours, "use_muon", False):
            change = ours.detach() - before[name] * (1 - 1e-3)
            sizes.append(float(change.square().mean().sqrt()))
        else:
            torch.testing.assert_close(ours, other)
    # A gradient of low rank changes a matrix less, and a gradient of zero not at all.
    assert all(size == pytest.approx(1e-2, rel=0.5) or size == 0 for size in sizes)
    assert any(sizes)


def test_muon_needs_a_transformer() -> None:
    with pytest.raises(ValueError, match="muon is for the matrices of a transformer"):
        OptimizerConfig(name="muon").build(named(nn.Linear(2, 2)))


def test_the_state_of_muon_is_restored_exactly() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(Transformer(16, 1, 2), nn.Linear(16, 4))
    optimizer = OptimizerConfig(name="muon").build(named(network))
    network(torch.randn(2, 5, 16)).square().mean().backward()
    optimizer.step()
    saved = {name: value.clone() for name, value in optimizer_state(optimizer).items()}
    restored = OptimizerConfig(name="muon").build(named(network))
    load_optimizer_state(restored, saved)
    assert optimizer_state(restored).keys() == saved.keys()
    assert any(name.startswith("momentum/") for name in saved)
    assert any(name.startswith("exp_avg/") for name in saved)
    assert all(torch.equal(value, saved[name]) for name, value in optimizer_state(restored).items())
