"""Measure the memory of parameters, optimizer state and EMA on each of two processes.

    python bench/sharding.py [RECIPE ...] [--preset small]

Trains one step of recipes with DDP and with --shard, in two processes of a CPU, and prints a table:
what a process holds between steps, and, of parameters, how much of the network of an update is
gathered at most at any time of a sharded step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tessera.engine.updates import count_memory  # noqa: E402
from tessera.recipes.registry import get_recipe  # noqa: E402
from tests.runs import build_tiny, engine_in  # noqa: E402
from tests.worker_pool import call_together  # noqa: E402

NPROC = 2
CASES = ("images-vqgan", "images-maskgit")


class GatheredBytes:
    """The bytes of parameters that FSDP has gathered, now and at most.

    torch has no hook for this: two methods of a private class are wrapped.
    """

    def __init__(self) -> None:
        from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

        self.now: dict[int, int] = {}
        self.peak = 0
        gather, free = FSDPParamGroup._to_unsharded, FSDPParamGroup._to_sharded

        def note_gather(group: FSDPParamGroup) -> None:
            gather(group)
            self.now[id(group)] = sum(one.unsharded_param.nbytes for one in group.fsdp_params)
            self.peak = max(self.peak, sum(self.now.values()))

        def note_free(group: FSDPParamGroup) -> None:
            free(group)
            self.now.pop(id(group), None)

        FSDPParamGroup._to_unsharded = note_gather  # type: ignore[method-assign]
        FSDPParamGroup._to_sharded = note_free  # type: ignore[method-assign]


def measure(name: str, preset: str, shard: bool, out: str) -> None:
    """Train one step and write the bytes that this process holds."""
    recipe = get_recipe(name)
    tiny = build_tiny(recipe)
    paths = {"tokenizer": tiny.task.tokenizer} if hasattr(tiny.task, "tokenizer") else {}
    run = recipe(preset, **paths)
    engine = dataclasses.replace(tiny.engine, steps=2, nproc=NPROC, shard=shard)
    task = run.task.fit_data(tiny.data)
    run = dataclasses.replace(run, data=tiny.data, engine=engine, task=task)
    trained = engine_in(Path(out, "run"), run)
    gathered = GatheredBytes()
    steps = trained.steps()
    next(steps)
    peak = gathered.peak
    local, whole = count_memory(trained.task, trained.ema, trained.updates)
    parameters = sum(one.numel() * one.element_size() for one in trained.task.parameters())
    found = {"local": local, "whole": whole, "gathered": peak, "parameters": parameters}
    Path(out, f"{trained.dist.rank}.json").write_text(json.dumps(found))
    steps.close()


def measure_together(name: str, preset: str, shard: bool) -> dict[str, int]:
    """Return the largest values of the processes."""
    with tempfile.TemporaryDirectory() as out:
        arguments = {"name": name, "preset": preset, "shard": shard, "out": out}
        call_together("bench.sharding:measure", nproc=NPROC, **arguments)
        ranks = [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(NPROC)]
    return {key: max(one[key] for one in ranks) for key in ranks[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*", default=CASES)
    parser.add_argument("--preset", default="small")
    options = parser.parse_args()
    print("| recipe | DDP | `--shard` | ratio | parameters | gathered at once |")
    print("|---|---|---|---|---|---|")
    for name in options.recipes:
        build_tiny(get_recipe(name))  # trains the tokenizer that it needs
        ddp, sharded = (measure_together(name, options.preset, shard) for shard in (False, True))
        ratio = sharded["local"] / ddp["local"]
        values = [ddp["local"], sharded["local"], sharded["parameters"], sharded["gathered"]]
        ddp_mb, sharded_mb, whole_mb, peak_mb = (f"{value / 1e6:.1f} MB" for value in values)
        label = f"`{name}`, `{options.preset}`"
        print(f"| {label} | {ddp_mb} | {sharded_mb} | {ratio:.3f} | {whole_mb} | {peak_mb} |")


if __name__ == "__main__":
    main()
