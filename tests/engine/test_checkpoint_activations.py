"""--checkpoint-activations changes no bit and needs less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tessera.engine.modes import checkpoint_activations
from tests.runs import assert_same_run, tiny, train

SAVED = ["images-vqgan adversarial", "images-maskgit", "videos-magvit2", "meshes-tree"]


@pytest.mark.parametrize("case", SAVED)
def test_activation_checkpointing_changes_no_bit(case: str, tmp_path: Path) -> None:
    for is_checkpointed in (False, True):
        run = tiny(case, steps=3, checkpoint_activations=is_checkpointed)
        train(tmp_path / f"{is_checkpointed}", run)
    assert_same_run(tmp_path / "False", tmp_path / "True", 3)


def count_saved_bytes(network: nn.Module, *args: Any) -> int:
    """Return the memory of the activations that a forward pass keeps for its backward pass."""
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = network(*args)
    output.square().sum().backward()
    return sum(saved.values())


def test_activations_of_a_transformer_take_less_memory() -> None:
    from tessera.nn.transformer import Transformer

    torch.manual_seed(0)
    network, x = Transformer(64, 4, 4), torch.randn(2, 64, 64)
    weights = sum(one.untyped_storage().nbytes() for one in network.parameters())
    plain = count_saved_bytes(network, x) - weights
    checkpoint_activations(network)
    assert count_saved_bytes(network, x) - weights < 0.6 * plain
