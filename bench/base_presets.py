"""Train the `base` preset of every recipe for a few steps on a CPU.

    python bench/base_presets.py [RECIPE ...] [--steps 3] [--overfit]

The networks, losses and optimizers are those of `base`; batches have two examples, and the data are
those of `tiny` (small images, short audio), or of `base` where the network is built for them.
Generators use the tokens of tiny tokenizers. With --overfit there are two training examples and
twenty steps. Prints the number of parameters, the loss of each step, CPU time and peak memory. Of
masked generators it is the cross-entropy per token: their loss depends on how many tokens are
masked, which is drawn at each step.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tessera.recipes.registry import RECIPES, get_recipe, recipe_name  # noqa: E402
from tests.runs import build_tiny, engine_in  # noqa: E402

NEVER = 10**6
BATCH_SIZE = 2


def build_base(name: str, overfit: bool) -> Any:
    """Return the base preset of a recipe on small data."""
    recipe = get_recipe(name)
    tiny = build_tiny(recipe)
    names = ("tokenizer", "low_res_tokenizer", "semantic", "soundstorm")
    parameters = inspect.signature(recipe).parameters
    paths = {one: getattr(tiny.task, one) for one in names if one in parameters}
    base = recipe("base", **paths)
    data = tiny.data
    try:
        base.task.validate_data(data)
    except ValueError:
        data = base.data
    if overfit:
        data = dataclasses.replace(data, num_synthetic=BATCH_SIZE)
    events = ("validate_every", "sample_every", "checkpoint_every")
    settings = dict.fromkeys(events, NEVER) | {"steps": NEVER, "log_every": 1, "num_workers": 0}
    engine = dataclasses.replace(base.engine, batch_size=BATCH_SIZE, grad_accum_steps=1, **settings)
    task = base.task
    if overfit:  # the schedule of the preset warms up for longer than twenty steps
        optimizer = dataclasses.replace(task.optimizer, schedule="constant", warmup_steps=0)
        task = dataclasses.replace(task, optimizer=optimizer)
    return dataclasses.replace(base, data=data, engine=engine, task=task.fit_data(data))


def train(name: str, steps: int, overfit: bool) -> str:
    records: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        engine = engine_in(Path(folder), build_base(name, overfit), on_log=records.append)
        count = sum(one.numel() for one in engine.task.model.parameters())
        start = time.process_time()
        stream = engine.steps()
        for _ in range(steps):
            next(stream)
        seconds = time.process_time() - start
        stream.close()
    losses = [
        record.get("model/cross_entropy_per_token", record["model/loss"])
        for record in records
        if record["kind"] == "train"
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    shown = " ".join(f"{loss:.3f}" for loss in losses)
    return f"| {name} | {count / 1e6:.1f} | {shown} | {seconds / steps:.1f} | {peak:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipes", nargs="*")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--overfit", action="store_true")
    options = parser.parse_args()
    names = options.recipes or [recipe_name(recipe) for recipe in RECIPES]
    steps = 20 if options.overfit else options.steps
    print("| recipe | million parameters | loss | CPU seconds per step | peak memory, GB |")
    print("|---|---|---|---|---|")
    for name in names:
        print(train(name, steps, options.overfit), flush=True)


if __name__ == "__main__":
    main()
