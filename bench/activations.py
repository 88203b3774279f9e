"""Peak memory of a forward and a backward pass, with and without activation checkpointing.

    python bench/activations.py

Each measurement is a process of its own, with one thread: a transformer of dim 128 and 12 blocks
over 64 sequences of 256 positions, and a VQGAN of 32 to 128 channels with two residual blocks at
each of three resolutions on 8 images of 128 x 128.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import timing
from comparison import PROJECT

NETWORKS = ("transformer", "vqgan")


def main(arguments: list[str]) -> None:
    timing.set_threads(1)
    sys.path.insert(0, str(PROJECT))
    if arguments:
        print(f"{measure_peak(arguments[0], 'checkpoint' in arguments):.0f}")
        return
    print(timing.describe_machine())
    for name in NETWORKS:
        plain, checkpointed = (measure_in_process(name, *more) for more in ((), ("checkpoint",)))
        print(f"{name}: {plain} MB, with --checkpoint-activations {checkpointed} MB")


def measure_in_process(*arguments: str) -> str:
    command = [sys.executable, __file__, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def measure_peak(name: str, is_checkpointed: bool) -> float:
    """Return the peak resident memory of this process in MB."""
    from tessera.engine.modes import checkpoint_activations

    network, inputs = build(name)
    if is_checkpointed:
        checkpoint_activations(network)
    output = network(inputs)
    output = output.output if name == "vqgan" else output[-1]
    output.square().mean().backward()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def build(name: str) -> tuple[Any, Any]:
    import torch

    from tessera.modalities.image.vqgan import VQGANConfig
    from tessera.nn.transformer import Transformer

    torch.manual_seed(0)
    if name == "transformer":
        return Transformer(128, 12, 4), torch.randn(64, 256, 128)
    config = VQGANConfig(dim=32, max_channels=128, layers=3, blocks=(2, 2, 2))
    return config.build(), torch.randn(8, 3, 128, 128)


if __name__ == "__main__":
    main(sys.argv[1:])
