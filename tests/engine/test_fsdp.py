"""Sharded training; tests/test_guarantees.py compares it with one process for every case."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.run.errors import UserError
from tests.runs import engine_in, read_checkpoint, tiny
from tests.worker_pool import call_together

MAX_MEMORY = 0.55


def measure_memory(case: str, shard: bool, out: str) -> None:
    """Train one step and write the memory of this process; called in two processes."""
    folder = Path(out, "shard" if shard else "ddp")
    engine = engine_in(folder, tiny(case, steps=1, nproc=2, shard=shard))
    engine.run()
    memory = engine.count_memory()
    folder.with_name(f"{folder.name}-{engine.dist.rank}.json").write_text(json.dumps(memory))


@pytest.mark.parametrize("case", ["images-vqgan adversarial", "images-maskgit"])
def test_each_of_two_processes_holds_half_of_the_memory(case: str, tmp_path: Path) -> None:
    tiny(case)
    for shard in (False, True):
        arguments = {"case": case, "shard": shard, "out": str(tmp_path)}
        call_together("tests.engine.test_fsdp:measure_memory", nproc=2, **arguments)
    [unsharded, whole] = json.loads((tmp_path / "ddp-0.json").read_text())
    assert unsharded == whole
    for rank in (0, 1):
        [local, same] = json.loads((tmp_path / f"shard-{rank}.json").read_text())
        assert same == whole and local <= MAX_MEMORY * whole
    # A sharded run writes whole tensors.
    shapes = [
        {name: one.shape for name, one in read_checkpoint(tmp_path / run, 1).items()}
        for run in ("ddp", "shard")
    ]
    assert shapes[0] == shapes[1]


def test_sharding_with_one_process_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--shard divides a model .* use --nproc 2"):
        engine_in(tmp_path, tiny("images-vqgan", shard=True))
