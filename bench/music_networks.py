"""The sides of music and texts: training steps of MuLaN, ours and musiclm-pytorch's, and what large
batches take of memory.

step: both towers of width 128, depth 2 and 4 heads, points of 128 numbers; 4096 samples of noise, a
frame every 12, 64 frequencies or bands, patches of 16 x 16 of which a quarter is left out; texts of
32 numbers below 1000; the decoupled loss, batch 8, 320 pairs, Adam, gradients clipped at 0.5. Whole
training steps, by each side's own trainer.

memory: a training step of the small preset on its toys, batch 256 in 8 micro-batches that are all
told apart from each other, beside batch 32 by itself; and 256 at once, to see what it spares.

DIFFERENT says what is not the same.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import endless
import memory
from sides import About, Side, mflop, parameters, versions

WIDTH, DEPTH, HEADS, LATENT = 128, 2, 4, 128
SAMPLES, HOP, WINDOW, BANDS, PATCH, RATE_HZ = 4096, 12, 128, 64, 16, 16_000
SYMBOLS, TEXT, PAIRS, BATCH = 1000, 32, 320, 8
RATE, CLIP = 3e-4, 0.5
LOG_EVERY = 10

DIFFERENT = """\
  not the same:
  - The networks: theirs has a position bias computed by a network of its own and looks at all 65 frequencies of a window of 24
    samples, ours at 64 mel bands of one of 128. Parameters and operations stand above.
  - Theirs asks SpecAugment to stretch, and it does not; ours does.
  - Theirs logs at every step, ours every tenth, as recipes do.
  - Ours holds its scale and counts equal texts as no negatives; theirs does neither."""


# ---- theirs


def theirs(work: Path) -> Side:
    os.environ["PEER_WORK"] = str(work)
    import peer_adapters
    import torch

    adapter = peer_adapters.MulanA()
    adapter.seed(0)
    model = adapter.build()
    waves, texts = (torch.stack(parts) for parts in zip(*adapter.data().items[:BATCH], strict=True))
    about = About(
        parameters={"model": parameters(model)},
        mflop={"model": mflop(lambda: model(wavs=waves, texts=texts))},
        packages=versions("torch", "musiclm-pytorch"),
    )
    trainer = adapter.trainer(model, str(work / "theirs"), endless.NEVER)
    return Side(about, lambda: adapter.run(trainer, 1))


# ---- ours


def ours(work: Path) -> Side:
    import torch

    from tessera.engine.modes import seed
    from tessera.trainers import MuLaNTrainer

    seed(0)
    model, pairs = config().build(), random_pairs()
    waves = torch.stack([wave for wave, _ in pairs[:BATCH]])
    texts = [" ".join(map(str, numbers.tolist())) for _, numbers in pairs[:BATCH]]
    heard = SimpleNamespace(samples=waves.unsqueeze(1), lengths=torch.full((BATCH,), SAMPLES))

    def chances() -> list[torch.Generator]:
        """A quarter of the patches is left out, as in training and as on their side."""
        return [torch.Generator().manual_seed(number) for number in range(BATCH)]

    about = About(
        parameters={"model": parameters(model)},
        mflop={
            "model": mflop(lambda: (model.train().first(heard, chances()), model.second(texts)))
        },
        packages=versions("torch"),
    )
    trainer = MuLaNTrainer(
        model, pairs, batch_size=BATCH, num_train_steps=endless.NEVER, lr=RATE, max_grad_norm=CLIP, valid_frac=0.05,
        save_model_every=endless.NEVER, results_folder=work / "ours",
    )  # fmt: skip
    trainer.engine.config = replace(trainer.engine.config, log_every=LOG_EVERY)
    steps = trainer.engine.steps()
    return Side(about, lambda: next(steps))


def config() -> Any:
    from tessera.modalities.music.mulan import MuLaNConfig
    from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig
    from tessera.text.token_ids import TokenIdTextConfig

    audio = SpectrogramTransformerConfig(
        rate_hz=RATE_HZ,
        window=WINDOW,
        hop=HOP,
        bands=BANDS,
        patch=(PATCH, PATCH),
        dim=WIDTH,
        depth=DEPTH,
        heads=HEADS,
    )
    text = TokenIdTextConfig(tokens=SYMBOLS, dim=WIDTH, depth=DEPTH, heads=HEADS, max_len=64)
    return MuLaNConfig(audio=audio, text=text, latent=LATENT)


def random_pairs() -> list[tuple[Any, Any]]:
    """Noise and numbers, as theirs draws them."""
    import torch

    chance = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(SAMPLES, generator=chance),
            torch.randint(1, SYMBOLS, (TEXT,), generator=chance),
        )
        for _ in range(PAIRS)
    ]


# ---- memory


def stepped(batch_size: int, grad_accum_steps: int) -> memory.Used:
    """One step, after one of the smallest batch there is, which wakes what torch loads when it is
    first used."""
    import dataclasses
    import tempfile

    from tessera.modalities.music.recipes import music_mulan
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    run = music_mulan("small")
    engine = dataclasses.replace(
        run.engine, steps=2, batch_size=batch_size, grad_accum_steps=grad_accum_steps, log_every=1
    )
    with tempfile.TemporaryDirectory() as place:
        at_work = build_engine(dataclasses.replace(run, engine=engine), RunDirectory(place))
        smallest = dataclasses.replace(
            run, engine=dataclasses.replace(engine, batch_size=2, grad_accum_steps=1)
        )
        build_engine(smallest, RunDirectory(f"{place}/smallest")).step(0, micro_batches(smallest))
        micros = micro_batches(dataclasses.replace(run, engine=engine))

        def step() -> float:
            [results] = at_work.step(0, micros).values()
            return float(results.logs[0]["loss"])

        return memory.measured(step)


def micro_batches(run: Any) -> list[Any]:
    from tessera.run.train import stream_of

    return next(stream_of(run.data.build(), run).micro_batches(0, 1, rank=0, processes=1))


CACHED, SMALL, AT_ONCE = "256 in 8 of 32", "32 by itself", "256 at once"
WAYS = {
    CACHED: partial(stepped, 256, 8),
    SMALL: partial(stepped, 32, 1),
    AT_ONCE: partial(stepped, 256, 1),
}
"""The names by which processes are told what to do."""
