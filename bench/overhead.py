"""What does the engine cost? The same training by the engine with everything on, and by a loop
written by hand.

    python bench/overhead.py [--sizes 5 15 40 100] [--blocks 30] [--steps 8] [--threads 1] [--log-every 10]

The engine's side is `Engine.steps()` as `tessera train` runs it, on the tokenizer task: seeds,
guard, freezing and modes, clipping, rates, average, what the task watches, signals, and lines in
metrics.jsonl. The hand's side does what cannot be left out: forward, loss, backward, clipping,
fused AdamW, zero_grad, and the same moving average; it watches nothing, looks at no number and
writes nothing down. Both get the same ready pictures, so data costs neither anything, and in the
end both must hold the same weights and the same average, bit for bit, or the comparison is void.

No validation, samples or checkpoint lie in the timed steps; what one of each takes is told beside.
The ratio wanted is at most 1.02 for steps of 15 ms and more.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import endless
import pairs

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from tessera.engine.engine import Engine
    from tessera.engine.task import Batch, Task
    from tessera.modalities.image.vqgan import VQGAN

WANTED, FROM_MS = 1.02, 15
RATE, CLIP = 1e-4, 1.0


@dataclass(frozen=True)
class Size:
    """A network and its pictures."""

    dim: int
    pixels: int
    batch: int


SIZES = {
    5: Size(dim=8, pixels=16, batch=4),
    15: Size(dim=16, pixels=32, batch=7),
    40: Size(dim=16, pixels=64, batch=4),
    100: Size(dim=32, pixels=64, batch=3),
}
"""By about how many milliseconds a step takes on one thread."""


def build_task(size: Size) -> Task:
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.modalities.image.reconstruction import ImageTokenizerConfig
    from tessera.modalities.image.vqgan import VQGANConfig

    model = VQGANConfig(dim=size.dim, layers=2, blocks=(0, 1))
    return ImageTokenizerConfig(
        model=model, optimizer=OptimizerConfig(lr=RATE, max_grad_norm=CLIP)
    ).build()


class Pictures:
    """A few batches of noise, ready before the clock runs: both streams of an engine, and the
    hand's."""

    def __init__(self, size: Size):
        import torch

        from tessera.modalities.image.media import ImageBatch

        self.batch_size = size.batch
        shape = (size.batch, 3, size.pixels, size.pixels)
        self.ready = [ImageBatch(torch.rand(shape) * 2 - 1, [""] * size.batch) for _ in range(4)]

    def __len__(self) -> int:
        return self.batch_size * len(self.ready)

    def batches(self, rank: int, processes: int, limit: int | None = None) -> Iterator[Batch]:
        from tessera.engine.task import Batch

        names = [str(number) for number in range(self.batch_size)]
        return (Batch(examples, names, list(range(self.batch_size))) for examples in self.ready)

    def micro_batches(
        self, first_step: int, steps: int, rank: int, processes: int
    ) -> Iterator[list[Batch]]:
        return ([batch] for batch in itertools.cycle(self.batches(rank, processes)))


class ByHand:
    """The loop that a person writes who wants nothing but the training."""

    def __init__(self, model: VQGAN, pictures: Pictures, decay_at: Callable[[int], float]):
        import torch

        self.model, self.decay_at, self.done = model.train(), decay_at, 0
        self.pictures = itertools.cycle(pictures.ready)
        self.parameters = list(model.parameters())
        self.ema = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=RATE, betas=(0.9, 0.99), weight_decay=0.0, fused=True
        )

    def step(self) -> None:
        import torch
        import torch.nn.functional as F

        pixels = next(self.pictures).pixels
        rebuilt = self.model(pixels)
        loss = F.l1_loss(rebuilt.output, pixels) + sum(rebuilt.penalties.values())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, CLIP, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        with torch.no_grad():
            torch._foreach_lerp_(self.ema, self.parameters, 1 - self.decay_at(self.done))


def compared(
    size: Size, asked: argparse.Namespace, place: Path
) -> tuple[pairs.Pairs, dict[str, float]]:
    """The two sides in turn, and then what a validation, samples and a checkpoint take."""
    from tessera.engine.engine import Engine
    from tessera.engine.modes import seed
    from tessera.run.directory import RunDirectory

    seed(0)
    task, twin = build_task(size), build_task(size)
    twin.load_state_dict(task.state_dict())
    pictures = Pictures(size)
    config = endless.config(batch_size=size.batch, log_every=asked.log_every)
    folder = RunDirectory(place)
    folder.make()
    engine = Engine(task, pictures, pictures, config, folder)
    engine.open({})
    engine_defaults = engine.steps()
    hand = ByHand(twin.model, pictures, engine.ema.decay_at)
    spent = pairs.alternate(
        pairs.timed(lambda: next(engine_defaults)), pairs.timed(hand.step),
        blocks=asked.blocks, steps=asked.steps, warm_up=10,
    )  # fmt: skip
    refuse_other_work(engine, hand)
    events = events_ms(engine)
    engine_defaults.close()
    return spent, events


def refuse_other_work(engine: Engine, hand: ByHand) -> None:
    import torch

    ema = engine.ema.state_dict()
    for (name, parameter), other, mean in zip(
        engine.task.model.named_parameters(), hand.parameters, hand.ema
    ):
        if not torch.equal(parameter, other) or not torch.equal(ema[name], mean):
            raise SystemExit(
                f"After {hand.done} steps {name} is not the same on both sides: they did different work."
            )


def events_ms(engine: Engine) -> dict[str, float]:
    """What comes now and then. A checkpoint holds the step up only for its staging copy; the rest
    happens beside it."""
    acts = {
        "validation": engine.validate,
        "samples": engine.sample,
        "checkpoint, step held up": engine.checkpoint,
        "checkpoint, until on disk": engine.ensure_saved,
    }
    return {name: milliseconds(act) for name, act in acts.items()}


def milliseconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - began)


def line(name: int, spent: pairs.Pairs) -> str:
    wall, cpu = spent.wall, spent.cpu
    return (
        f"{name:>6}{wall.ours_ms:>10.2f}{wall.theirs_ms:>10.2f}{wall.ratio:>9.3f} ({wall.low:.3f}-{wall.high:.3f})"
        f"{cpu.ours_ms:>10.2f}{cpu.theirs_ms:>10.2f}{cpu.ratio:>9.3f} ({cpu.low:.3f}-{cpu.high:.3f})"
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
        help="ms per step, about",
    )
    parser.add_argument("--blocks", type=int, default=120)
    parser.add_argument(
        "--steps", type=int, default=2, help="in one block: few, so that neighbours are alike"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--log-every",
        type=int,
        default=10,
        help="10 is what a run does unless it is told otherwise",
    )
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    asked = parser.parse_args(arguments)
    pairs.pin(asked.threads)
    print(pairs.circumstances())
    print(
        f"{asked.blocks} blocks of {asked.steps} steps each, a line in metrics.jsonl every {asked.log_every} step(s)"
    )
    print(
        f"{'~ms':>6}{'engine':>10}{'by hand':>10}{'wall ratio (quartiles)':>23}{'engine':>10}{'by hand':>10}  CPU ratio"
    )
    found, well = {}, True
    for name in asked.sizes:
        with tempfile.TemporaryDirectory() as place, open(os.devnull, "w") as nowhere:
            shown, sys.stdout = (
                sys.stdout,
                nowhere,
            )  # the engine's own report is for a person at its run
            try:
                spent, events = compared(SIZES[name], asked, Path(place))
            finally:
                sys.stdout = shown
        print(line(name, spent), flush=True)
        print(
            "       " + ", ".join(f"{event} {ms:.1f} ms" for event, ms in events.items()),
            flush=True,
        )
        found[name] = pairs.as_json(spent) | {"events_ms": events}
        well &= name < FROM_MS or spent.wall.ratio <= WANTED
    if asked.json is not None:
        asked.json.write_text(
            json.dumps({"circumstances": pairs.circumstances(), "sizes": found}, indent=1) + "\n"
        )
    print(
        f"wanted: at most {WANTED} for steps of {FROM_MS} ms and more: {'reached' if well else 'not reached'}"
    )
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
