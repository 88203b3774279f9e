"""The sides of meshes: training steps of autoencoder and transformer, and samples, ours and
meshgpt-pytorch's.

Autoencoder: 64 bins, widths of 32 to 96, 2 x 256 symbols at each corner, random meshes of 40
vertices and 64 faces, batch 4.
Transformer: width 128, depth 2, within faces 1, 4 heads, 64 faces of 6 symbols (384), batch 4, no
text. Both by Adam with a warm-up and gradients clipped at 0.5. Training runs by each side's own
trainer. Their loop can only be entered as a whole, and draws its data anew when it is, so a step
here is AT_ONCE training steps, on both sides.

A sample is meshes of 16 faces, 96 symbols, drawn from the likeliest tenth by an untrained network,
with caches on. The end is made impossible on both sides, or who ends sooner would be faster. Codes
come out; nobody decodes them.

DIFFERENT says what is not the same.
"""

from __future__ import annotations

import itertools
import math
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import endless
from sides import About, Side, mflop, parameters, versions

BINS, SYMBOLS, LEVELS, CORNERS = 64, 256, 2, 3
VERTICES, FACES, MESHES, BATCH = 40, 64, 128, 4
WIDTH, DEPTH, FINE_DEPTH, HEADS = 128, 2, 1, 4
SAMPLED_FACES, KEPT_SHARE = 16, 0.1
CLIP, WARMUP = 0.5, 10
AT_ONCE = 8
SLOTS = CORNERS * LEVELS

DIFFERENT = """\
  not the same:
  - The networks: theirs has pixel norms and squeeze-excitation in the decoder, and memory keys and values in the transformer,
    which ours has not. Parameters and operations stand above.
  - Their transformer tokenizes its meshes at every step, ours once before the first: beside it stands ours tokenizing, too.
  - Their transformer has no moving average; ours has, and their autoencoder, both moved every tenth step.
  - Theirs knows no order of faces and takes its meshes as they are, and derives at every visit which faces touch; so does ours
    where they are "ready". From a folder ("as found") ours brings a mesh into order and finds what touches at its first visit,
    which is not timed, and keeps it. Where a mesh is another one at every visit ("stretched"), ours does all of it every time.
  - A few of their 64 random faces are degenerate; all of ours are real.
  - Theirs learns at a tenth of the rate asked for, which takes as long; theirs logs at every step, ours every tenth."""


# ---- theirs


def their_autoencoder(work: Path) -> Side:
    adapter, model = their("MeshAeA", work)
    vertices, faces = their_batch(adapter)
    about = About(
        parameters={"model": parameters(model)},
        mflop={"model": mflop(lambda: model(vertices=vertices, faces=faces))},
        packages=their_versions(),
    )
    trainer = adapter.trainer(model, str(work / "theirs"), endless.NEVER)
    return Side(about, lambda: adapter.run(trainer, AT_ONCE))


def their_transformer(work: Path) -> Side:
    adapter, model = their("MeshTfA", work)
    about = about_their_transformer(adapter, model)
    trainer = adapter.trainer(model, str(work / "theirs"), endless.NEVER)
    return Side(about, lambda: adapter.run(trainer, AT_ONCE))


def their_sample(work: Path, *, meshes: int, at_once: int) -> Side:
    adapter, model = their("MeshTfA", work)

    def likeliest_and_no_end(logits: Any) -> Any:
        from meshgpt_pytorch.meshgpt_pytorch import top_k

        logits[:, model.eos_token_id] = -math.inf
        return top_k(logits, frac_num_tokens=KEPT_SHARE)

    def sample() -> None:
        for _ in range(meshes // at_once):
            made = model.generate(
                batch_size=at_once,
                max_seq_len=SAMPLED_FACES * SLOTS,
                filter_logits_fn=likeliest_and_no_end,
                return_codes=True,
            )
            refuse_other_work(made)

    return Side(about_their_transformer(adapter, model), sample)


def their(adapter_name: str, work: Path) -> tuple[Any, Any]:
    os.environ["PEER_WORK"] = str(work)
    import peer_adapters

    adapter = getattr(peer_adapters, adapter_name)()
    adapter.seed(0)
    return adapter, adapter.build()


def their_batch(adapter: Any) -> tuple[Any, Any]:
    import torch

    vertices, faces = zip(*adapter.data().items[:BATCH], strict=True)
    return torch.stack(vertices), torch.stack(faces)


def about_their_transformer(adapter: Any, model: Any) -> About:
    codes = random_codes()[:BATCH]
    vertices, faces = their_batch(adapter)
    return About(
        parameters={
            "model": parameters(model) - parameters(model.autoencoder),
            "tokenizer": parameters(model.autoencoder),
        },
        mflop={
            "model": mflop(lambda: model.forward_on_codes(codes)),
            "tokenizer": mflop(lambda: model.autoencoder.tokenize(vertices=vertices, faces=faces)),
        },
        packages=their_versions(),
    )


def their_versions() -> str:
    return versions("meshgpt-pytorch", "vector-quantize-pytorch", "torch")


# ---- ours


def our_autoencoder(work: Path, *, meshes: Literal["ready", "as found", "stretched"]) -> Side:
    from tessera.data.dataset import Split
    from tessera.data.loader import EvalLoader
    from tessera.modalities.mesh.dataset import MeshDataConfig
    from tessera.modalities.mesh.reconstruction import MeshTokenizerConfig
    from tessera.run.config import Run
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine, build_task

    task = MeshTokenizerConfig(model=autoencoder_config(), optimizer=optimizer(1e-4))
    path = str(written(work / "meshes"))
    data = MeshDataConfig(
        path=path,
        bins=BINS,
        max_faces=FACES,
        val_fraction=0.0,
        scale=0.25 if meshes == "stretched" else 0.0,
    )
    run = Run(recipe="bench", task=task, data=data, engine=engine_defaults())
    built, source = build_task(run), Ready()
    about = About(
        parameters={"model": parameters(built.model)},
        mflop={"model": mflop(lambda: built.model(source.batch()))},
        packages=versions("torch"),
    )
    split = Split(source, source) if meshes == "ready" else data.build()
    for _ in EvalLoader(split.train, seed=0, batch_size=BATCH).batches(rank=0, processes=1):
        pass  # whatever is kept is there
    steps = build_engine(run, RunDirectory(work / "ours"), task=built, split=split).steps()
    return Side(about, lambda: several(steps))


def our_transformer(work: Path, *, codes: Literal["cached", "raw"]) -> Side:
    from tessera.data.tokens import TokenDataset

    task = our_task(FACES)
    names = [str(number) for number in range(MESHES)]
    grid = random_codes().unflatten(2, (CORNERS, LEVELS)).int()
    source: Any = Ready() if codes == "live" else TokenDataset(names, {"tokenizer": grid}, names)
    steps = endless.steps(task, source, engine_defaults(), work)
    return Side(about_our_transformer(task), lambda: several(steps))


def our_sample(work: Path, *, meshes: int, at_once: int) -> Side:
    from tessera.objectives.generation import GenerationRequest
    from tessera.sampling.autoregressive import AutoregressiveSampling
    from tessera.sampling.guidance import Guidance

    task = our_task(SAMPLED_FACES).eval()
    task.model.impossible_SV[:, task.model.end] = True
    sampling = AutoregressiveSampling(top_k=math.ceil(KEPT_SHARE * (SYMBOLS + 1)))
    guidance, seeds = Guidance(scale=1.0), itertools.count()

    def sample() -> None:
        for _ in range(meshes // at_once):
            refuse_other_work(
                task.generate(
                    GenerationRequest([""] * at_once, [next(seeds) for _ in range(at_once)]),
                    sampling,
                    guidance,
                )
            )

    return Side(about_our_transformer(task), sample)


def our_task(max_faces: int) -> Any:
    from tessera.engine.modes import seed
    from tessera.modalities.mesh.transformer import MeshTransformerConfig
    from tessera.objectives.autoregressive import AutoregressiveConfig

    seed(0)
    return AutoregressiveConfig(
        model=MeshTransformerConfig(
            dim=WIDTH, depth=DEPTH, heads=HEADS, fine_dim=WIDTH, fine_depth=FINE_DEPTH, fine_heads=HEADS, max_len=FACES,
            text=None,
        ),
        optimizer=optimizer(2e-4),
    ).build(Untrained(max_faces))  # fmt: skip


def about_our_transformer(task: Any) -> About:
    tokenizer, codes, meshes = task.codecs["tokenizer"], random_codes()[:BATCH], Ready().batch()
    return About(
        parameters={"model": parameters(task.model), "tokenizer": parameters(tokenizer.network)},
        mflop={
            "model": mflop(lambda: task.model.guesses(codes, None)),
            "tokenizer": mflop(lambda: tokenizer.codes(meshes)),
        },
        packages=versions("torch"),
    )


def autoencoder_config() -> Any:
    from tessera.modalities.mesh.autoencoder import MeshAutoencoderConfig
    from tessera.nn.quantize import LFQConfig, ResidualConfig

    return MeshAutoencoderConfig(
        bins=BINS, coordinate_dim=32, angle_dim=16, area_dim=16, normal_dim=32, encoder=(32, 64, 64), code_dim=64,
        decoder=(64, 64, 96, 96), quantizer=ResidualConfig(quantizer=LFQConfig(codebook_size=SYMBOLS), levels=LEVELS),
    )  # fmt: skip


def optimizer(rate: float) -> Any:
    from tessera.engine.optim.config import OptimizerConfig

    return OptimizerConfig(
        lr=rate, betas=(0.9, 0.99), max_grad_norm=CLIP, schedule="warmup", warmup_steps=WARMUP
    )


def engine_defaults() -> Any:
    from tessera.engine.ema import EMAConfig

    return endless.config(
        batch_size=BATCH, ema=EMAConfig(decay=0.9999, update_after=100, update_every=10)
    )


def several(steps: Any) -> None:
    for _ in range(AT_ONCE):
        next(steps)


class Untrained:
    """A tokenizer of the autoencoder's size: what its symbols are worth takes no time."""

    def __init__(self, max_faces: int):
        self.network = autoencoder_config().build().eval()
        self.vocab_size, self.grid, self.levels, self.features = (
            SYMBOLS,
            (max_faces, CORNERS),
            LEVELS,
            None,
        )

    def codes(self, examples: Any) -> Any:
        return self.network.tokenize(examples)


def written(folder: Path) -> Path:
    """The random meshes as somebody would have them."""
    folder.mkdir()
    for number, mesh in enumerate(random_meshes()):
        folder.joinpath(f"{number:03d}.obj").write_text(mesh.to_y_up().as_obj())
    return folder


class Ready:
    """The source: as many random faces as theirs, none of them degenerate, and in canonical order
    from the beginning: theirs takes its meshes as they are. Which faces touch is found at every
    visit, as there."""

    def __init__(self) -> None:
        from tessera.modalities.mesh.canonical import MeshExample

        self.examples = [MeshExample.of(mesh, BINS, "") for mesh in random_meshes()]

    def __len__(self) -> int:
        return MESHES

    def name(self, index: int) -> str:
        return str(index)

    def item(self, index: int, rng: Any) -> Any:
        from tessera.modalities.mesh.adjacency import face_pairs

        ready = self.examples[index]
        return replace(ready, edges=face_pairs(ready.faces))

    def collate(self, examples: list[Any]) -> Any:
        from tessera.modalities.mesh.canonical import collate

        return collate(examples)

    def batch(self) -> Any:
        return self.collate([self.item(index, None) for index in range(BATCH)])


@cache
def random_meshes() -> list[Any]:
    import numpy as np

    from tessera.modalities.mesh.canonical import canonical
    from tessera.modalities.mesh.media import Mesh

    rng, found = np.random.default_rng(7), []
    every = np.array(list(itertools.combinations(range(VERTICES), CORNERS)))
    while len(found) < MESHES:
        faces = rng.permuted(every[rng.choice(len(every), FACES, replace=False)], axis=1)
        mesh = Mesh(rng.uniform(-1, 1, (VERTICES, 3)), faces)
        if len(canonical(mesh, BINS).faces) == FACES:
            found.append(mesh)
    return found


# ---- both


def random_codes() -> Any:
    """(meshes, faces, symbols of a face)"""
    import torch

    return torch.randint(
        SYMBOLS, (MESHES, FACES, SLOTS), generator=torch.Generator().manual_seed(7)
    )


def refuse_other_work(codes: Any) -> None:
    """Whoever makes fewer faces is faster and has done something else."""
    codes = codes.flatten(1)
    if (
        codes.shape[1] != SAMPLED_FACES * SLOTS
        or int(codes.min()) < 0
        or int(codes.max()) >= SYMBOLS
    ):
        raise SystemExit(
            f"A sample is {SAMPLED_FACES * SLOTS} symbols, 0 to {SYMBOLS - 1}, but {tuple(codes.shape)} came, "
            f"{int(codes.min())} to {int(codes.max())}."
        )
