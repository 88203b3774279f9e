"""Train the models of the research packages with their own trainer and with ours.

    PYTHONPATH=.:bench .venv-peers/bin/python -m peers.loss_curves [NAME ...] [--steps 200]

Both sides run the same program (`programs.py`): the same weights at the start, the same
examples and settings, one after the other in one process. The order of the examples and the random
numbers differ, so the curves are compared by eye and by the mean of the last quarter. The warm-up
has one step, because the published trainers for videos and meshes divide the learning rate by the
warm-up steps for good. Writes NAME.json to the folder `--out`; `plot_curves.py` plots it.
"""

from __future__ import annotations

import argparse
import io
import json
import tempfile
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from peers.adapters import NEVER
from peers.programs import EXAMPLES, Example
from peers.readme_examples import build_package_trainer, execute

SETTINGS: dict[str, Any] = {"steps": NEVER, "every": NEVER}


def compare(example: Example, steps: int, folder: Path) -> dict[str, list[float]]:
    """Return the losses of both trainers."""
    theirs = record_package(example, steps, folder / "theirs/run")
    trainer = execute(example.ours, example.head, folder / "ours/run", **SETTINGS)["trainer"]
    with redirect_stdout(io.StringIO()):
        ours = [trainer.train_step()[example.loss] for _ in range(steps)]
    return {"package": theirs, "tessera": ours}


def record_package(example: Example, steps: int, folder: Path) -> list[float]:
    """Train with the package's trainer; some return their losses and others log them."""
    trainer = build_package_trainer(example, folder, **SETTINGS)
    logged: list[float] = []

    def log(**values: float) -> None:
        if example.loss in values:
            logged.append(float(values[example.loss]))

    if hasattr(trainer, "log"):
        trainer.log = log
    with redirect_stdout(io.StringIO()):
        returned = example.train(trainer, steps)
    if isinstance(returned, list):
        return [float(one[example.loss]) for one in returned]
    return logged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(EXAMPLES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("loss-curves"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name in arguments.names:
        with tempfile.TemporaryDirectory() as folder:
            losses = compare(EXAMPLES[name], arguments.steps, Path(folder))
        content = {"loss": EXAMPLES[name].loss, **losses}
        (arguments.out / f"{name}.json").write_text(json.dumps(content) + "\n")
        quarter = max(1, arguments.steps // 4)
        means = {side: sum(one[-quarter:]) / quarter for side, one in losses.items()}
        print(name, {side: round(mean, 4) for side, mean in means.items()}, flush=True)


if __name__ == "__main__":
    main()
