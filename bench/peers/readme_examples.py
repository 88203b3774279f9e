"""Programs for the research packages, run with only the import of the trainer changed.

    PYTHONPATH=.:bench .venv-peers/bin/python -m peers.readme_examples [NAME ...]

Each program (`programs.py`) builds the published model at a small size, trains it and uses it. With
our trainer it must train, be ended by SIGKILL in the middle of a step and resume to the same
weights bit for bit, on one process and on two, and on two processes equal one process with twice
the micro-batches. A checkpoint that the package's own trainer wrote is loaded too, and training
goes on from it. Prints a row for each program; exits with code 1 if something does not hold.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import tempfile
import traceback
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from peers import adapters, example_data
from peers.programs import EXAMPLES, Example
from vector_quantize_pytorch import lookup_free_quantization

from tessera.cli.launch import find_free_port
from tessera.engine.engine import Engine

STEPS = 4
ROUNDING = 1e-4
"""The largest difference of weights that is due to the order of sums. Adam's first steps have the
size of the learning rate, 0.001, also where a gradient is nearly 0."""
KILLED_STEP = 3
"""The step in which a program is killed; checkpoints are written every second step."""


# ---- running a program


def build_names(folder: Path, **settings: Any) -> dict[str, Any]:
    """Return what the programs refer to."""
    images = folder.parent / "images"
    if not images.exists():
        example_data.write_images(images)
    names = {
        "token_pairs": example_data.token_pairs(),
        "music": example_data.music(),
        "videos": example_data.videos(),
        "meshes": example_data.meshes(),
        "images": str(images),
        "perceptual_network": torch.nn.Conv2d(3, 4, 3, 4).requires_grad_(False),
        "folder": str(folder),
        "steps": STEPS,
        "every": 2,
        "learning_rate": 1e-3,
        "batch_size": 4,
        "grad_accum_every": 1,
    }
    return names | settings


def execute(import_line: str, program: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """Run a program without its output, and return its names."""
    adapters.seed_everything(0)
    names = build_names(folder, **settings)
    with redirect_stdout(io.StringIO()):
        exec(compile(f"{import_line}\n{program}", "program", "exec"), names)
    return names


def run(
    example: Example,
    folder: Path,
    *,
    nproc: int = 1,
    is_killed: bool = False,
    local_entropy: bool = False,
    **settings: Any,
) -> None:
    """Run a program with our trainer in processes of its own; the first stores the weights.

    On n processes the lookup-free quantizer of vector-quantize-pytorch 1.32 divides its mean
    probabilities by n and discards their sum over the processes, which changes its loss; with
    `local_entropy` it computes them as on one process.
    """
    images = folder.parent / "images"
    if not images.exists():  # two processes would write them at the same time
        example_data.write_images(images)
    port, children = str(find_free_port()), []
    for rank in range(nproc):
        child = os.fork()
        if child == 0:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc))
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            os.environ.update(LOCAL_WORLD_SIZE=str(nproc))
            PartialState._reset_state()  # of the parent, which is a single process
            lookup_free_quantization.is_distributed.cache_clear()  # of the parent, too
            if local_entropy:
                lookup_free_quantization.is_distributed = lambda: False
            if is_killed:
                kill_in_step(KILLED_STEP)
            try:
                names = execute(example.ours, example.script, folder, **settings)
                if rank == 0:
                    torch.save(names["trainer"].model.state_dict(), folder.parent / "weights.pt")
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if codes != [-signal.SIGKILL if is_killed else 0] * nproc:
        raise RuntimeError(f"the processes ended with {codes}")


def read_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Read the weights that a program ended with."""
    return torch.load(folder.parent / "weights.pt", weights_only=True)


def kill_in_step(killed_step: int) -> None:
    """Make a process end by SIGKILL after the updates of a step, before the step is counted."""
    original = Engine.run_step

    def run_step(engine: Engine, step: int, micro_batches: Any) -> Any:
        results = original(engine, step, micro_batches)
        if step == killed_step:
            os.kill(os.getpid(), signal.SIGKILL)
        return results

    Engine.run_step = run_step  # type: ignore[method-assign]


def build_package_trainer(example: Example, folder: Path, **settings: Any) -> Any:
    """Run the program up to its training with the package's own trainer."""
    return execute(example.theirs, example.head, folder, **settings)["trainer"]


def write_package_checkpoint(example: Example, folder: Path) -> Path:
    """Train one step with the package's trainer and return its checkpoint."""
    trainer, path = build_package_trainer(example, folder), folder.parent / "package.0.pt"
    with redirect_stdout(io.StringIO()):
        example.train(trainer, 1)
        trainer.save(str(path))
    return path


# ---- checks


def kill_and_resume(example: Example, folder: Path, nproc: int) -> str:
    """Compare a program that is killed and started again with one that is not."""
    whole, killed = folder / "whole/run", folder / "killed/run"
    run(example, whole, nproc=nproc)
    run(example, killed, nproc=nproc, is_killed=True)
    run(example, killed, nproc=nproc)
    expected, found = read_weights(whole), read_weights(killed)
    same_names = expected.keys() == found.keys()
    is_equal = same_names and all(torch.equal(expected[name], found[name]) for name in expected)
    return "equal" if is_equal else "DIFFERS"


def largest_difference(one: Path, other: Path) -> float:
    a, b = read_weights(one), read_weights(other)
    difference = max(float((a[name].double() - b[name].double()).abs().max()) for name in a)
    return float(f"{difference:.1e}")


def check(example: Example, folder: Path) -> dict[str, object]:
    """Return the row of an example."""
    row: dict[str, object] = {"lines": example.lines_changed()}
    for nproc in (1, 2):
        row[f"killed, {nproc} process(es)"] = kill_and_resume(example, folder / f"{nproc}", nproc)
    one, two = folder / "one/run", folder / "2/whole/run"
    run(example, one, batch_size=2, grad_accum_every=2)
    difference = row["two processes"] = largest_difference(one, two)
    if difference > ROUNDING:
        run(example, folder / "local/run", nproc=2, local_entropy=True)
        row["with local entropy"] = largest_difference(one, folder / "local/run")
    path = write_package_checkpoint(example, folder / "package/run")
    names = execute(example.ours, example.script, folder / "last/run")
    trainer = names["trainer"]
    row |= {"trains": f"step {trainer.steps}", "result": tuple(names["result"].shape)}
    with redirect_stdout(io.StringIO()):
        trainer.load(path)
        row["checkpoint"] = f"step {trainer.steps}"
        trainer.train_step()
    return row


def holds(row: dict[str, object]) -> bool:
    killed = [value for name, value in row.items() if name.startswith("killed")]
    difference = row.get("with local entropy", row["two processes"])
    return killed == ["equal", "equal"] and isinstance(difference, float) and difference < ROUNDING


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(EXAMPLES))
    torch.set_num_threads(1)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # or Accelerate starts several threads in
        os.environ[name] = "1"  # a single process, which changes the order of sums
    failed = False
    for name in parser.parse_args().names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = check(EXAMPLES[name], Path(folder))
                failed |= not holds(row)
            except Exception:
                traceback.print_exc()
                row, failed = {"failed": "see above"}, True
        print(name, row, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
