"""A training step of the image tokenizer beside one of muse-maskgit-pytorch, the published package, in one run.

    python bench/images.py --peer-env DIR --peer-adapters DIR [--blocks 30] [--steps 8]

DIR of the first is an environment in which that package is installed (DIR/venv/bin/python), DIR of the second holds
`peer_adapters.py`, which builds its trainer at the small configuration; nothing of either is part of this project.
The configuration: pictures of 64 x 64 from PNG files, batch 4, dim 32, 3 halvings, LFQ with 256 symbols, discriminator
with 3 layers, moving average each step, one compute thread, fp32.

Each side is a process of its own, with its own packages; one works while the other waits. Both do whole training steps
by their own trainer, pictures read and decoded, with the same losses: L1, a perceptual term on two strided convolutions
of 8 channels, LFQ's entropy, a hinge discriminator weighed by gradients at the last layer, and a gradient penalty. Theirs
takes the penalty at every step, whatever it is asked for; ours is told with the penalty at every step and at every
fourth. No validation, samples or checkpoints on either side.

Our network has their widths (`late=1`: 32, 32, 64, 128), and sizes in parameters and operations are printed beside the times.
Wanted, with the penalty as it is asked for: their time at least 1.5 times ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import pairs

WANTED = 1.5
SIDE, BATCH, SYMBOLS = 64, 4, 256


@dataclass(frozen=True)
class Variant:
    """Our side, in one of its forms."""

    name: str
    dim: int
    penalty_every: int


VARIANTS = (Variant("penalty each step", 32, 1), Variant("penalty each 4th", 32, 4))
JUDGED = VARIANTS[-1]
"""The same work as configured: the penalty every fourth step is what both are asked for."""


@dataclass(frozen=True)
class About:
    """How large a side is."""

    model: int
    """Parameters of encoder, quantizer and decoder."""
    judge: int
    """Parameters of the discriminator."""
    model_mflop: float
    """Millions of floating-point operations of one forward pass of a batch."""
    judge_mflop: float
    packages: str


# ---- a worker: one side, which does steps when it is told to


def work(asked: argparse.Namespace) -> None:
    """Answers on what was stdout, in lines of JSON; whatever the packages print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    about, step = (ours if asked.worker == "ours" else theirs)(asked)
    tell(answers, asdict(about))
    block = pairs.timed(step)
    for line in sys.stdin:
        tell(answers, asdict(block(int(line))))


def tell(answers: TextIO, values: dict[str, Any]) -> None:
    answers.write(json.dumps(values) + "\n")
    answers.flush()


def theirs(asked: argparse.Namespace) -> tuple[About, Any]:
    os.environ["PEER_WORK"] = str(asked.work)
    sys.path.insert(0, str(asked.peer_adapters))
    from peer_adapters import VqganA

    adapter = VqganA()
    adapter.seed(0)
    model = adapter.build()
    judge, features = parameters(model.discr), parameters(model.vgg)
    about = About(
        model=parameters(model) - judge - features,
        judge=judge,
        model_mflop=mflop(model),
        judge_mflop=mflop(model.discr),
        packages=versions("muse-maskgit-pytorch", "vector-quantize-pytorch", "torch"),
    )
    trainer = adapter.trainer(model, str(asked.work / "theirs"), 10**9)
    return about, lambda: adapter.run(trainer, 1)


def ours(asked: argparse.Namespace) -> tuple[About, Any]:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tessera.folder import RunFolder
    from tessera.start import engine_of, task_of

    run = run_of(asked.dim, asked.penalty_every, asked.work / "data" / "images")
    task = task_of(run)
    about = About(
        model=parameters(task.model),
        judge=parameters(task.discriminator),
        model_mflop=mflop(task.model),
        judge_mflop=mflop(task.discriminator),
        packages=versions("torch"),
    )
    folder = RunFolder(asked.work / f"ours-{asked.dim}-{asked.penalty_every}")
    life = engine_of(run, folder, task=task).steps()
    return about, lambda: next(life)


def run_of(dim: int, penalty_every: int, pictures: Path) -> Any:
    """The same configuration and the same losses, in our words."""
    from tessera.config import Run
    from tessera.data.images import Images
    from tessera.engine.average import AverageConfig
    from tessera.engine.engine import EngineConfig
    from tessera.engine.optimizer import OptimizerConfig
    from tessera.models.patch_discriminator import PatchDiscriminatorConfig
    from tessera.models.vqgan import VQGANConfig
    from tessera.nn.quantize import LFQConfig
    from tessera.tasks.fidelity import ImageFidelityConfig
    from tessera.tasks.tokenizer import AdversaryConfig, TokenizerConfig

    quantizer = LFQConfig(codebook_size=SYMBOLS, diversity=4.0)
    optimizer = OptimizerConfig(kind="adam", rate=3e-4, betas=(0.9, 0.999), clip=1.0)
    adversary = AdversaryConfig(
        discriminator=PatchDiscriminatorConfig(dim=32, widest=128, layers=3),
        adaptive=True,
        weight=1.0,
        penalty=10.0,
        penalty_every=penalty_every,
        penalty_centre=1.0,
        optimizer=optimizer,
    )
    task = TokenizerConfig(
        model=VQGANConfig(dim=dim, widest=128, late=1, layers=3, blocks=(0, 0, 1), quantizer=quantizer),
        fidelity=ImageFidelityConfig(pixel="l1", perceptual=stand_in()),
        adversary=adversary,
        optimizer=optimizer,
    )
    never = 10**9
    engine = EngineConfig(
        steps=never, batch_size=BATCH, validate_every=never, sample_every=never, checkpoint_every=never,
        average=AverageConfig(decay=0.995),
    )  # fmt: skip
    return Run(recipe="bench", task=task, data=Images(path=str(pictures), size=SIDE, flip=True), engine=engine)


def stand_in() -> Any:
    """The small network on which both sides take their perceptual term, in place of a VGG that has to be fetched."""
    from torch import Tensor, nn

    from tessera.tasks.fidelity import PerceptualConfig

    class TwoConvolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, 4, 1))

        def features(self, images: Tensor) -> list[Tensor]:
            return [self.layers(images)]

    @dataclass(frozen=True, kw_only=True)
    class StandIn(PerceptualConfig):
        def build(self) -> nn.Module:
            return TwoConvolutions()

    return StandIn()


def parameters(network: Any) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def mflop(network: Any) -> float:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(torch.rand(BATCH, 3, SIDE, SIDE))
    return counter.get_total_flops() / 1e6


def versions(*packages: str) -> str:
    from importlib.metadata import version

    return ", ".join(f"{package} {version(package)}" for package in packages)


# ---- the parent: lets them take turns


class Worker:
    """One side in its own process and environment."""

    def __init__(self, process: subprocess.Popen[str]):
        self._process = process
        self.about = About(**self._answer())

    def __call__(self, steps: int) -> pairs.Spent:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return pairs.Spent(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"A side has died with exit code {self._process.wait()}; its words are above.")
        return json.loads(line)


@contextmanager
def working(python: Path | str, *arguments: str | Path) -> Iterator[Worker]:
    """A side for as long as it is needed. Its words are shown only if it dies."""
    command = [str(python), __file__, *map(str, arguments)]
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=words, text=True)
        try:
            yield Worker(process)
        except SystemExit:
            words.seek(0)
            sys.stderr.write(words.read())
            raise
        finally:
            process.kill()
            process.wait()


def compare(asked: argparse.Namespace, place: Path) -> Iterator[tuple[Variant, About, About, pairs.Pairs]]:
    """Each of our forms beside theirs, which stays the same process throughout."""
    peer = asked.peer_env / "venv" / "bin" / "python"
    threads = ("--threads", str(asked.threads))
    with working(peer, "--worker", "theirs", "--work", place, "--peer-adapters", asked.peer_adapters, *threads) as them:
        for variant in VARIANTS:
            form = ("--dim", str(variant.dim), "--penalty-every", str(variant.penalty_every))
            with working(sys.executable, "--worker", "ours", "--work", place, *threads, *form) as us:
                spent = pairs.alternate(us, them, blocks=asked.blocks, steps=asked.steps, warm_up=asked.steps)
                yield variant, us.about, them.about, spent


def size_line(name: str, about: About) -> str:
    """Parameters in millions and operations in millions, each of the model and of the judge."""
    numbers = f"{about.model / 1e6:>8.2f}{about.judge / 1e6:>8.2f}{about.model_mflop:>10.0f}{about.judge_mflop:>8.0f}"
    return f"  {name:<30}{numbers}   {about.packages}"


def time_line(name: str, ratio: pairs.Ratio) -> str:
    """The ratio upside down: how many times as fast we are."""
    times = f"{ratio.ours_ms:>8.1f}{ratio.theirs_ms:>8.1f}"
    return f"  {name:<30}{times}{1 / ratio.ratio:>10.2f} ({1 / ratio.high:.2f}-{1 / ratio.low:.2f})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-env", type=Path, help="where the package is installed: DIR/venv/bin/python")
    parser.add_argument("--peer-adapters", type=Path, help="the folder of peer_adapters.py")
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=8, help="in one block")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the numbers here as well")
    for hidden, kind in (("--worker", str), ("--work", Path), ("--dim", int), ("--penalty-every", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    pairs.pin(asked.threads)
    if asked.worker is not None:
        work(asked)
        return 0
    if asked.peer_env is None or asked.peer_adapters is None:
        parser.error("both sides are needed: give --peer-env and --peer-adapters")

    print(pairs.circumstances())
    print(f"{asked.blocks} blocks of {asked.steps} steps on each side, in turn")
    found = {}
    with tempfile.TemporaryDirectory() as place:
        for variant, us, them, spent in compare(asked, Path(place)):
            if not found:
                print(f"  {'size':<30}{'model':>8}{'judge':>8}{'MFLOP':>10}{'MFLOP':>8}\n{size_line('theirs', them)}")
            print(f"{size_line(variant.name, us)}\n  {'ms per step':<30}{'ours':>8}{'theirs':>8}   times as fast (quartiles)")
            print(f"{time_line('  wall', spent.wall)}\n{time_line('  CPU', spent.cpu)}", flush=True)
            found[variant.name] = pairs.as_json(spent) | {"ours": asdict(us), "theirs": asdict(them)}
    if asked.json is not None:
        asked.json.write_text(json.dumps({"circumstances": pairs.circumstances(), **found}, indent=1) + "\n")
    judged = 1 / found[JUDGED.name]["wall"]["ratio"]
    print(f"wanted: at least {WANTED} times as fast; {JUDGED.name}: {judged:.2f} times as fast")
    return 0 if judged >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
