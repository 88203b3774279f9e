"""Sharded training; tests/test_guarantees.py compares it with one process for every case."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tessera.engine.fsdp import is_sharded
from tessera.engine.updates import count_memory
from tessera.run.errors import UserError
from tests.runs import engine_in, read_checkpoint, tiny
from tests.worker_pool import call_together

MAX_MEMORY = 0.55


def measure_memory(case: str, shard: bool, out: str) -> None:
    """Train one step and write the memory of this process; called in two processes."""
    folder = Path(out, "shard" if shard else "ddp")
    engine = engine_in(folder, tiny(case, steps=1, nproc=2, shard=shard))
    gathered: list[int] = []
    for state in engine.updates.values():
        if state.sharded is not None:
            note_gathered(state.sharded.blocks, gathered)
    engine.run()
    local, whole = count_memory(engine.task, engine.ema, engine.updates)
    found = {"local": local, "whole": whole, "gathered": gathered}
    folder.with_name(f"{folder.name}-{engine.dist.rank}.json").write_text(json.dumps(found))


def note_gathered(blocks: Sequence[Any], gathered: list[int]) -> None:
    """Note how many blocks are gathered whenever one of them is called in training."""

    def note(block: nn.Module, args: object) -> None:
        if block.training:
            whole = [one for one in blocks if not any(map(is_sharded, one.parameters()))]
            gathered.append(len(whole))

    for block in blocks:
        block.register_forward_pre_hook(note)


@pytest.mark.parametrize("case", ["images-vqgan adversarial", "images-maskgit"])
def test_two_processes_hold_half_each_and_gather_block_by_block(case: str, tmp_path: Path) -> None:
    tiny(case)
    for shard in (False, True):
        arguments = {"case": case, "shard": shard, "out": str(tmp_path)}
        call_together("tests.engine.test_fsdp:measure_memory", nproc=2, **arguments)
    unsharded = json.loads((tmp_path / "ddp-0.json").read_text())
    assert unsharded["local"] == unsharded["whole"]
    for rank in (0, 1):
        sharded = json.loads((tmp_path / f"shard-{rank}.json").read_text())
        assert sharded["whole"] == unsharded["whole"]
        assert sharded["local"] <= MAX_MEMORY * sharded["whole"]
        assert len(sharded["gathered"]) >= 2 and set(sharded["gathered"]) == {1}
    # A sharded run writes whole tensors.
    shapes = [
        {name: one.shape for name, one in read_checkpoint(tmp_path / run, 1).items()}
        for run in ("ddp", "shard")
    ]
    assert shapes[0] == shapes[1]


def test_sharding_with_one_process_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--shard divides a model .* use --nproc 2"):
        engine_in(tmp_path, tiny("images-vqgan", shard=True))
