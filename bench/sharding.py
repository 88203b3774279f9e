"""Measure the memory of parameters, optimizer state and EMA on each of two processes.

    python bench/sharding.py

Trains one step of two recipes in their `small` presets with DDP and with --shard, in two processes
of a CPU, and prints a table.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tessera.recipes.registry import get_recipe  # noqa: E402
from tests.runs import build_tiny, engine_in  # noqa: E402
from tests.worker_pool import call_together  # noqa: E402

NPROC = 2
CASES = ("images-vqgan", "images-maskgit")


def measure(name: str, shard: bool, out: str) -> None:
    """Train one step and write the bytes that this process holds."""
    recipe = get_recipe(name)
    tiny = build_tiny(recipe)
    paths = {"tokenizer": tiny.task.tokenizer} if hasattr(tiny.task, "tokenizer") else {}
    run = recipe("small", **paths)
    engine = dataclasses.replace(tiny.engine, steps=1, nproc=NPROC, shard=shard)
    run = dataclasses.replace(run, data=tiny.data, engine=engine)
    trained = engine_in(Path(out, "run"), run)
    next(trained.steps())
    local, _ = trained.count_memory()
    Path(out, f"{trained.dist.rank}.json").write_text(json.dumps(local))


def main() -> None:
    print("| recipe, `small` | DDP | `--shard` | ratio |")
    print("|---|---|---|---|")
    for name in CASES:
        build_tiny(get_recipe(name))  # trains the tokenizer that it needs
        held = []
        for shard in (False, True):
            with tempfile.TemporaryDirectory() as out:
                arguments = {"name": name, "shard": shard, "out": out}
                call_together("bench.sharding:measure", nproc=NPROC, **arguments)
                ranks = [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(NPROC)]
            held.append(max(ranks))
        ddp, sharded = held
        print(f"| `{name}` | {ddp / 1e6:.1f} MB | {sharded / 1e6:.1f} MB | {sharded / ddp:.3f} |")


if __name__ == "__main__":
    main()
