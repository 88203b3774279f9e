"""Training steps of MuLaN, ours and those of musiclm-pytorch; memory of large batches.

step: both towers of dim 128, depth 2 and 4 heads, embeddings of dim 128; 4096 samples of noise, hop
12, 64 frequencies or mel bands, patches of 16 x 16 of which a quarter is dropped; texts of 32 token
ids below 1000; decoupled contrastive loss, batch size 8, 320 pairs, Adam, gradient norm clipped to
0.5. Complete training steps, by each side's own trainer.

memory: a training step of the small preset on synthetic data: batch size 256 in 8 micro-batches
with the whole batch as negatives, batch size 32, and batch size 256 at once, for comparison.

DIFFERENCES lists what is not the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import endless_training
import memory
from worker import ModelInfo, Workload, count_mflop, count_parameters, package_versions

DIM, DEPTH, HEADS, LATENT_DIM = 128, 2, 4, 128
SAMPLES, HOP, WINDOW, BANDS, PATCH, RATE_HZ = 4096, 12, 128, 64, 16, 16_000
TEXT_VOCAB_SIZE, TEXT_LEN, NUM_PAIRS, BATCH_SIZE = 1000, 32, 320, 8
LR, MAX_GRAD_NORM = 3e-4, 0.5
LOG_EVERY = 10

DIFFERENCES = """\
  differences:
  - The networks: theirs has a position bias that a separate network computes, and uses all 65
    frequencies of a window of 24 samples; ours uses 64 mel bands of a window of 128. Parameters and
    operations are printed above.
  - Theirs configures the time stretch of SpecAugment, but it has no effect; ours has an effect.
  - Theirs logs at every step, ours every 10 steps, as recipes do.
  - Ours clamps its logit scale and excludes equal texts from the negatives; theirs does neither."""


# ---- theirs


def build_theirs(work_dir: Path) -> Workload:
    from peers.adapters import MuLaNAdapter, seed_everything

    adapter = MuLaNAdapter()
    seed_everything(0)
    model = adapter.build_model()
    waves, texts = adapter.dataset().batch(BATCH_SIZE)
    info = ModelInfo(
        parameters={"model": count_parameters(model)},
        mflop={"model": count_mflop(lambda: model(wavs=waves, texts=texts))},
        packages=package_versions("torch", "musiclm-pytorch"),
    )
    trainer = adapter.build_trainer(model, work_dir / "theirs")
    return Workload(info, lambda: adapter.train(trainer, steps=1))


# ---- ours


def build_ours(work_dir: Path) -> Workload:
    import torch

    from tessera.engine.modes import seed
    from tessera.trainers import MuLaNTrainer

    seed(0)
    model, pairs = model_config().build(), random_pairs()
    waves = torch.stack([wave for wave, _ in pairs[:BATCH_SIZE]])
    texts = [" ".join(map(str, ids.tolist())) for _, ids in pairs[:BATCH_SIZE]]
    audio = SimpleNamespace(samples=waves.unsqueeze(1), lengths=torch.full((BATCH_SIZE,), SAMPLES))

    def forward() -> None:
        """Embed a batch in training mode, in which a quarter of the patches is dropped."""
        generators = [torch.Generator().manual_seed(number) for number in range(BATCH_SIZE)]
        model.train().embed_media(audio, model.draw(audio, generators))
        model.embed_text(texts)

    info = ModelInfo(
        parameters={"model": count_parameters(model)},
        mflop={"model": count_mflop(forward)},
        packages=package_versions("torch"),
    )
    trainer = MuLaNTrainer(
        model,
        pairs,
        batch_size=BATCH_SIZE,
        num_train_steps=endless_training.NEVER,
        lr=LR,
        max_grad_norm=MAX_GRAD_NORM,
        valid_frac=0.05,
        save_model_every=endless_training.NEVER,
        results_folder=work_dir / "ours",
    )
    trainer.engine.config = replace(trainer.engine.config, log_every=LOG_EVERY)
    steps = trainer.engine.steps()
    return Workload(info, lambda: next(steps))


def model_config() -> Any:
    from tessera.modalities.music.mulan import MuLaNConfig
    from tessera.modalities.music.spectrogram_transformer import SpectrogramTransformerConfig
    from tessera.text.token_ids import TokenIdTextConfig

    audio = SpectrogramTransformerConfig(
        rate_hz=RATE_HZ,
        window=WINDOW,
        hop=HOP,
        bands=BANDS,
        patch=(PATCH, PATCH),
        dim=DIM,
        depth=DEPTH,
        heads=HEADS,
    )
    text = TokenIdTextConfig(
        vocab_size=TEXT_VOCAB_SIZE, dim=DIM, depth=DEPTH, heads=HEADS, max_len=64
    )
    return MuLaNConfig(audio=audio, text=text, latent=LATENT_DIM)


def random_pairs() -> list[tuple[Any, Any]]:
    """Return noise and token ids, the same as on their side."""
    import torch

    generator = torch.Generator().manual_seed(7)
    return [
        (
            torch.randn(SAMPLES, generator=generator).clamp(-1, 1),
            torch.randint(1, TEXT_VOCAB_SIZE, (TEXT_LEN,), generator=generator),
        )
        for _ in range(NUM_PAIRS)
    ]


# ---- memory


def run_step(batch_size: int, grad_accum_steps: int) -> memory.MemoryUse:
    """Measure one step, after a smaller one in which torch loads its libraries."""
    import dataclasses
    import tempfile

    from tessera.modalities.music.recipes import music_mulan
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine

    run = music_mulan("small")
    config = dataclasses.replace(
        run.engine, steps=2, batch_size=batch_size, grad_accum_steps=grad_accum_steps, log_every=1
    )
    run = dataclasses.replace(run, engine=config)
    warmup_run = dataclasses.replace(
        run, engine=dataclasses.replace(config, batch_size=2, grad_accum_steps=1)
    )
    with tempfile.TemporaryDirectory() as directory:
        engine = build_engine(run, RunDirectory(directory))
        build_engine(warmup_run, RunDirectory(f"{directory}/warmup")).run_step(
            0, load_micro_batches(warmup_run)
        )
        micro_batches = load_micro_batches(run)

        def step() -> float:
            [result] = engine.run_step(0, micro_batches).values()
            return float(result.logs[0]["loss"])

        return memory.measure_memory(step)


def load_micro_batches(run: Any) -> list[Any]:
    from tessera.data.loader import TrainLoader

    config = run.engine
    loader = TrainLoader(
        run.data.build().train,
        seed=config.seed,
        batch_size=config.batch_size,
        grad_accum_steps=config.grad_accum_steps,
        num_workers=config.num_workers,
    )
    return next(loader.micro_batches(0, 1, rank=0, world_size=1))


IN_MICRO_BATCHES, SMALL_BATCH, AT_ONCE = "256 in 8 x 32", "batch of 32", "256 at once"
VARIANTS: dict[str, Callable[[], memory.MemoryUse]] = {
    IN_MICRO_BATCHES: partial(run_step, 256, 8),
    SMALL_BATCH: partial(run_step, 32, 1),
    AT_ONCE: partial(run_step, 256, 1),
}
