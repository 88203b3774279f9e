"""Cost of the engine: the same training by the engine with all its features and by a minimal loop.

    python bench/overhead.py [--sizes 5 15 40 100] [--blocks 120] [--steps 2] [--log-every 10]

The engine's side is `Engine.steps()` as `tessera train` runs it, on the tokenizer task: seeds,
checks for finite values, freezing and modes, clipping, learning rates, EMA, training metrics,
signals, and lines in metrics.jsonl. The minimal loop does forward, loss, backward, clipping, fused
AdamW, zero_grad, and the same EMA; it computes no metrics and writes nothing. Both train on the
same batches in memory, so that data loading costs neither anything, and both must end with the
same weights and the same EMA, bit for bit.

The timed steps contain no validation, samples or checkpoints; the time of one of each is printed.
The target is a ratio of at most 1.01 for steps of 15 ms and more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import endless_training
import timing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from tessera.engine.engine import Engine
    from tessera.engine.task import Batch, Task
    from tessera.modalities.image.vqgan import VQGAN

MAX_RATIO, MIN_STEP_MS = 1.01, 15
LR, MAX_GRAD_NORM = 1e-4, 1.0


@dataclass(frozen=True)
class Size:
    """A network and its images."""

    dim: int
    pixels: int
    batch_size: int


SIZES = {
    5: Size(dim=8, pixels=16, batch_size=4),
    15: Size(dim=16, pixels=32, batch_size=7),
    40: Size(dim=16, pixels=64, batch_size=4),
    100: Size(dim=32, pixels=64, batch_size=3),
}
"""Approximate milliseconds per step on one thread -> size."""


def build_task(size: Size) -> Task:
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.image.reconstruction import ImageTokenizerConfig
    from tessera.modalities.image.vqgan import VQGANConfig

    model = VQGANConfig(dim=size.dim, layers=2, blocks=(0, 1))
    return ImageTokenizerConfig(
        model=model, optimizer=OptimizerConfig(lr=LR, max_grad_norm=MAX_GRAD_NORM)
    ).build()


class NoiseBatches:
    """Batches of noise in memory: the training and validation loader of the engine, and the data of
    the minimal loop."""

    def __init__(self, size: Size):
        import torch

        from tessera.modalities.image.media import ImageBatch

        self.batch_size = size.batch_size
        shape = (size.batch_size, 3, size.pixels, size.pixels)
        self.examples = [
            ImageBatch(torch.rand(shape) * 2 - 1, [""] * size.batch_size) for _ in range(4)
        ]

    def __len__(self) -> int:
        return self.batch_size * len(self.examples)

    def spread(self, count: int) -> list[int]:
        return list(range(min(count, len(self))))

    def batches(
        self, rank: int, world_size: int, indices: Sequence[int] | None = None
    ) -> Iterator[Batch[Any]]:
        from tessera.engine.task import Batch

        names = [str(number) for number in range(self.batch_size)]
        return (Batch(examples, names, list(range(self.batch_size))) for examples in self.examples)

    def micro_batches(
        self, first_step: int, steps: int, rank: int, world_size: int
    ) -> Iterator[list[Batch[Any]]]:
        return ([batch] for batch in itertools.cycle(self.batches(rank, world_size)))


class MinimalLoop:
    """Training without anything that could be left out."""

    def __init__(self, model: VQGAN, batches: NoiseBatches, decay_at: Callable[[int], float]):
        import torch

        self.model, self.decay_at, self.steps_done = model.train(), decay_at, 0
        self.batches = itertools.cycle(batches.examples)
        self.parameters = list(model.parameters())
        self.ema = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=LR, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )

    def step(self) -> None:
        import torch
        import torch.nn.functional as F

        from tessera.losses.pixels import clip_overshoot

        pixels = next(self.batches).pixels
        reconstruction = self.model(pixels)
        output = clip_overshoot(reconstruction.output, pixels)
        loss = F.l1_loss(output, pixels) + sum(reconstruction.penalties.values())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        with torch.no_grad():
            weight = 1 - self.decay_at(self.steps_done)
            torch._foreach_lerp_(self.ema, self.parameters, weight)  # type: ignore[arg-type]


def compare(
    size: Size, args: argparse.Namespace, folder: Path
) -> tuple[timing.PairedTimes, dict[str, float]]:
    """Time both sides, then a validation, samples and a checkpoint."""
    from tessera.engine.engine import Engine
    from tessera.engine.modes import seed
    from tessera.run.directory import RunDirectory

    seed(0)
    task, twin = build_task(size), build_task(size)
    twin.load_state_dict(task.state_dict())
    batches = NoiseBatches(size)
    config = endless_training.engine_config(batch_size=size.batch_size, log_every=args.log_every)
    directory = RunDirectory(folder)
    directory.create()
    engine = Engine(task, batches, batches, config, directory)
    engine.open({})
    steps = cast(Generator, engine.steps())
    loop = MinimalLoop(twin.model, batches, engine.ema.decay_at)
    times = timing.alternate(
        timing.time_blocks(lambda: next(steps)),
        timing.time_blocks(loop.step),
        blocks=args.blocks,
        steps=args.steps,
        warmup_steps=10,
    )
    check_same_weights(engine, loop)
    events_ms = time_events(engine)
    steps.close()
    return times, events_ms


def check_same_weights(engine: Engine, loop: MinimalLoop) -> None:
    """Exit if the two sides did different work."""
    import torch

    ema = engine.ema.state_dict()
    for (name, parameter), other, other_ema in zip(
        engine.task.model.named_parameters(), loop.parameters, loop.ema, strict=True
    ):
        if not torch.equal(parameter, other) or not torch.equal(ema[name], other_ema):
            raise SystemExit(
                f"After {loop.steps_done} steps {name} differs between the two sides, but must be "
                "equal: they did different work, so their times cannot be compared."
            )


def time_events(engine: Engine) -> dict[str, float]:
    """Time the events of a run, in milliseconds.

    A checkpoint blocks the step only for its staging copy; the rest runs in the background.
    """
    events = {
        "validation": engine.validate,
        "samples": engine.sample,
        "checkpoint, blocking": engine.checkpoint,
        "checkpoint, until on disk": lambda: engine.saver.ensure_saved(engine.global_step),
    }
    return {name: time_call_ms(call) for name, call in events.items()}


def time_call_ms(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


HEADER = (
    f"{'~ms':>6}{'engine':>10}{'loop':>10}{'wall ratio (quartiles)':>23}"
    f"{'engine':>10}{'loop':>10}  CPU ratio"
)


def format_row(step_ms: int, times: timing.PairedTimes) -> str:
    return f"{step_ms:>6}{format_ratio(times.wall)}{format_ratio(times.cpu)}"


def format_ratio(ratio: timing.Ratio) -> str:
    return (
        f"{ratio.ours_ms:>10.2f}{ratio.theirs_ms:>10.2f}{ratio.ratio:>9.3f} "
        f"({ratio.low:.3f}-{ratio.high:.3f})"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes",
        type=int,
        nargs="+",
        choices=SIZES,
        default=list(SIZES),
        help="approximate milliseconds per step",
    )
    parser.add_argument("--blocks", type=int, default=120, help="timed blocks of each side")
    parser.add_argument(
        "--steps", type=int, default=2, help="steps of one block; few, so that neighbors are alike"
    )
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument(
        "--log-every", type=int, default=10, help="as in a run, where 10 is the default"
    )
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(arguments)
    timing.set_threads(args.threads)
    print(timing.describe_machine())
    print(
        f"{args.blocks} alternating blocks of {args.steps} step(s) of each side, "
        f"metrics logged every {args.log_every} step(s)"
    )
    print(HEADER)
    results, passed = {}, True
    for step_ms in args.sizes:
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
            times, events_ms = compare(SIZES[step_ms], args, Path(folder))
        print(format_row(step_ms, times), flush=True)
        events = ", ".join(f"{event} {ms:.1f} ms" for event, ms in events_ms.items())
        print(f"       {events}", flush=True)
        results[step_ms] = timing.to_json(times) | {"events_ms": events_ms}
        passed &= step_ms < MIN_STEP_MS or times.wall.ratio <= MAX_RATIO
    if args.json is not None:
        numbers = {"machine": timing.describe_machine(), "sizes": results}
        args.json.write_text(json.dumps(numbers, indent=1) + "\n")
    print(
        f"target: at most {MAX_RATIO} for steps of {MIN_STEP_MS} ms and more: "
        f"{'reached' if passed else 'not reached'}"
    )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
