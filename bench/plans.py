"""The table of docs/scale.md: sizes, memory and FLOPs of the presets base and paper.

    python bench/plans.py [--preset base] [--recipe images-vqgan]

Everything is computed on meta tensors, as by `tessera train RECIPE --preset PRESET --dry-run
--plan-only`; no network is trained. Hours are an estimate: the FLOPs of all steps at a fraction of
the peak of one GPU, which was never measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PEAK_TFLOPS = {"A100": 312, "H100": 989, "RTX 4090": 165}
"""Dense bf16 peaks of the makers' data sheets."""
UTILIZATION = 0.3
"""The fraction of the peak that is assumed."""
HEADER = (
    "recipe",
    "preset",
    "parameters",
    "batch",
    "weights, optimizer, EMA",
    "activations of one example",
    "TFLOPs of a step",
    "steps",
    *(f"hours on {name}" for name in PEAK_TFLOPS),
)


def plan_row(recipe: str, preset: str) -> list[str]:
    """Return the cells of one preset."""
    from tessera.recipes.registry import get_recipe
    from tessera.run.plan import format_bytes, plan_run

    plan = plan_run(get_recipe(recipe)(preset), preset)
    total = plan.steps * plan.flops_per_step
    example = max(update.activation_bytes for update in plan.updates)
    return [
        f"`{recipe}`",
        f"`{preset}`",
        f"{plan.parameters / 1e6:,.1f} M",
        f"{plan.batch_size}",
        format_bytes(plan.state_bytes),
        format_bytes(example),
        f"{plan.flops_per_step / 1e12:,.2f}",
        f"{plan.steps:,}",
        *(f"{total / (UTILIZATION * peak * 1e12) / 3600:,.1f}" for peak in PEAK_TFLOPS.values()),
    ]


def main() -> int:
    from tessera.recipes.registry import RECIPES, recipe_name
    from tessera.run.errors import UserError

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=("base", "paper"), action="append")
    parser.add_argument("--recipe", action="append")
    arguments = parser.parse_args()
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    for recipe in arguments.recipe or [recipe_name(one) for one in RECIPES]:
        for preset in arguments.preset or ("base", "paper"):
            try:
                print(f"| {' | '.join(plan_row(recipe, preset))} |", flush=True)
            except UserError as error:
                print(f"{recipe} {preset}: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
