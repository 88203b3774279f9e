"""Plot the losses that `loss_curves.py` wrote, in the project's environment with matplotlib.

.venv/bin/python bench/peers/plot_curves.py loss-curves docs/figures
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

WINDOW = 10
"""The number of steps of the running mean."""


def plot(losses: Path, path: Path) -> None:
    content = json.loads(losses.read_text())
    figure, axes = pyplot.subplots(figsize=(6, 3), dpi=100)
    for side, colour in (("package", "#888888"), ("tessera", "#1f5fbf")):
        values = content[side]
        means = [sum(values[i - WINDOW : i]) / WINDOW for i in range(WINDOW, len(values) + 1)]
        axes.plot(range(1, len(values) + 1), values, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(range(WINDOW, len(values) + 1), means, color=colour, label=f"{side} trainer")
    axes.set_xlabel("step")
    axes.set_ylabel(content["loss"].replace("_", " "))
    axes.set_title(f"{losses.stem}: one model, two trainers", fontsize=10)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    for file in sorted(source.glob("*.json")):
        plot(file, target / f"migrating-{file.stem}.png")
