"""Training steps of mesh autoencoder and mesh transformer, and samples: ours, and those of
meshgpt-pytorch.

Autoencoder: 64 bins, 32 to 96 channels, 2 x 256 codes per vertex of a face, random meshes of 40
vertices and 64 faces, batch size 4.
Transformer: dim 128, depth 2, depth 1 within faces, 4 heads, 64 faces of 6 tokens (384), batch size
4, no text. Both are trained by Adam with warm-up and gradient norm clipped to 0.5, by each side's
own trainer. Their training loop has no entry point for one step, and restarts its data loader at
each call, so one timed step is STEPS_AT_ONCE training steps on both sides.

A sample is one or more meshes of 16 faces (96 tokens), from the top 10 % of the codes of an
untrained network, with key-value caches. The end token is excluded on both sides, so that both
generate the same number of tokens. The tokens are not decoded. The transformer along the edges
(meshes-tree) is compared at the same width and number of blocks, on the same number of faces.

DIFFERENCES lists what is not the same.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import endless_training
from worker import ModelInfo, Workload, count_mflop, count_parameters, package_versions

BINS, CODEBOOK_SIZE, NUM_QUANTIZERS, CORNERS = 64, 256, 2, 3
NUM_VERTICES, NUM_FACES, NUM_MESHES, BATCH_SIZE = 40, 64, 128, 4
DIM, DEPTH, FINE_DEPTH, HEADS = 128, 2, 1, 4
SAMPLED_FACES, TOP_FRACTION = 16, 0.1
MAX_GRAD_NORM, WARMUP_STEPS = 0.5, 10
STEPS_AT_ONCE = 8
TOKENS_PER_FACE = CORNERS * NUM_QUANTIZERS

DIFFERENCES = """\
  differences:
  - The networks: theirs has pixel norm and squeeze-excitation in the decoder, and memory keys and
    values in the transformer; ours does not. Parameters and operations are printed above.
  - Their transformer tokenizes its meshes at every step, ours once before the first step; "live
    tokens" is ours tokenizing at every step.
  - Their transformer has no EMA; ours has one, like their autoencoder, updated every 10 steps.
  - Theirs does not sort faces, and derives adjacency at every access. "canonical meshes" does the
    same. From files ("mesh files") ours sorts a mesh and finds its adjacency at the first access,
    which is not timed, and caches both. "augmented files" does all of it at every access.
  - Some of their 64 random faces are degenerate; all of ours are proper triangles.
  - Theirs trains at a tenth of the configured learning rate, which does not affect the time; theirs
    logs at every step, ours every 10 steps."""


# ---- theirs


def build_their_autoencoder(work_dir: Path) -> Workload:
    from peers.adapters import MeshAutoencoderAdapter, seed_everything

    adapter = MeshAutoencoderAdapter()
    seed_everything(0)
    model = adapter.build_model()
    vertices, faces = adapter.dataset().batch(BATCH_SIZE)
    info = ModelInfo(
        parameters={"model": count_parameters(model)},
        mflop={"model": count_mflop(lambda: model(vertices=vertices, faces=faces))},
        packages=their_versions(),
    )
    trainer = adapter.build_trainer(model, work_dir / "theirs")
    return Workload(info, lambda: adapter.train(trainer, STEPS_AT_ONCE))


def build_their_transformer(work_dir: Path) -> Workload:
    adapter, model = build_their_transformer_model()
    info = their_transformer_info(adapter, model)
    trainer = adapter.build_trainer(model, work_dir / "theirs")
    return Workload(info, lambda: adapter.train(trainer, STEPS_AT_ONCE))


def build_their_sampler(work_dir: Path, *, meshes: int, batch_size: int) -> Workload:
    adapter, model = build_their_transformer_model()

    def filter_logits(logits: Any) -> Any:
        from meshgpt_pytorch.meshgpt_pytorch import top_k

        logits[:, model.eos_token_id] = -math.inf
        return top_k(logits, frac_num_tokens=TOP_FRACTION)

    def sample() -> None:
        for _ in range(meshes // batch_size):
            codes = model.generate(
                batch_size=batch_size,
                max_seq_len=SAMPLED_FACES * TOKENS_PER_FACE,
                filter_logits_fn=filter_logits,
                return_codes=True,
            )
            check_sample(codes)

    return Workload(their_transformer_info(adapter, model), sample)


def build_their_transformer_model() -> tuple[Any, Any]:
    from peers.adapters import MeshTransformerAdapter, seed_everything

    adapter = MeshTransformerAdapter()
    seed_everything(0)
    return adapter, adapter.build_model()


def their_transformer_info(adapter: Any, model: Any) -> ModelInfo:
    codes = random_codes()[:BATCH_SIZE]
    vertices, faces = adapter.dataset().batch(BATCH_SIZE)
    tokenizer = model.autoencoder
    return ModelInfo(
        parameters={
            "model": count_parameters(model) - count_parameters(tokenizer),
            "tokenizer": count_parameters(tokenizer),
        },
        mflop={
            "model": count_mflop(lambda: model.forward_on_codes(codes)),
            "tokenizer": count_mflop(lambda: tokenizer.tokenize(vertices=vertices, faces=faces)),
        },
        packages=their_versions(),
    )


def their_versions() -> str:
    return package_versions("meshgpt-pytorch", "vector-quantize-pytorch", "torch")


# ---- ours


def build_our_autoencoder(
    work_dir: Path, *, meshes: Literal["canonical", "files", "augmented"]
) -> Workload:
    from tessera.data.dataset import Split
    from tessera.data.loader import EvalLoader
    from tessera.modalities.mesh.dataset import MeshDataConfig
    from tessera.modalities.mesh.reconstruction import MeshTokenizerConfig
    from tessera.run.config import Run
    from tessera.run.directory import RunDirectory
    from tessera.run.train import build_engine, build_task

    task_config = MeshTokenizerConfig(
        model=autoencoder_config(), optimizer=optimizer_config(lr=1e-4)
    )
    data = MeshDataConfig(
        path=str(write_meshes(work_dir / "meshes")),
        bins=BINS,
        max_faces=NUM_FACES,
        val_fraction=0.0,
        scale=0.25 if meshes == "augmented" else 0.0,
    )
    run = Run(recipe="bench", task=task_config, data=data, engine=engine_config())
    task, dataset = build_task(run), canonical_meshes()
    info = ModelInfo(
        parameters={"model": count_parameters(task.model)},
        mflop={"model": count_mflop(lambda: task.model(first_batch(dataset)))},
        packages=package_versions("torch"),
    )
    split = Split(dataset, dataset) if meshes == "canonical" else data.build()
    for _ in EvalLoader(split.train, seed=0, batch_size=BATCH_SIZE).batches(rank=0, world_size=1):
        pass  # fills the cache of meshes
    engine = build_engine(run, RunDirectory(work_dir / "ours"), task=task, split=split)
    steps = engine.steps()
    return Workload(info, lambda: run_several(steps))


def build_our_transformer(work_dir: Path, *, tokens: Literal["cache", "live"]) -> Workload:
    from tessera.data.tokens import TokenDataset

    task = build_our_task(NUM_FACES)
    names = [str(number) for number in range(NUM_MESHES)]
    codes = random_codes().unflatten(2, (CORNERS, NUM_QUANTIZERS)).int()
    dataset = canonical_meshes()
    if tokens == "cache":
        dataset = TokenDataset(names, {"tokenizer": codes}, names)
    steps = endless_training.iterate_steps(task, dataset, engine_config(), work_dir)
    return Workload(our_transformer_info(task), lambda: run_several(steps))


def build_our_sampler(work_dir: Path, *, meshes: int, batch_size: int) -> Workload:
    from tessera.objectives.generation import GenerationRequest
    from tessera.sampling.autoregressive import AutoregressiveSampling
    from tessera.sampling.guidance import Guidance

    task = build_our_task(SAMPLED_FACES).eval()
    task.model.impossible_SV[:, task.model.eos_token_id] = True
    sampling = AutoregressiveSampling(top_k=math.ceil(TOP_FRACTION * (CODEBOOK_SIZE + 1)))
    guidance, seeds = Guidance(scale=1.0), itertools.count()

    def sample() -> None:
        for _ in range(meshes // batch_size):
            request = GenerationRequest(
                prompts=[""] * batch_size,
                seeds=[next(seeds) for _ in range(batch_size)],
                sampling=sampling,
                guidance=guidance,
            )
            check_sample(task.generate(request))

    return Workload(our_transformer_info(task), sample)


def build_our_tree_sampler(work_dir: Path, *, meshes: int, batch_size: int) -> Workload:
    """Generate with the transformer along the edges, of as many blocks as theirs has in both of its
    transformers.

    Tokens that attach no face are excluded, and so are boxes, which have four faces for a position,
    so that every position after the first two is a face: a mesh of this length has SAMPLED_FACES
    faces.
    """
    from tessera.engine.modes import seed
    from tessera.modalities.mesh import tree
    from tessera.modalities.mesh.generation import TreeGeneratorConfig
    from tessera.modalities.mesh.tree_transformer import TreeTransformerConfig
    from tessera.objectives.generation import GenerationRequest
    from tessera.sampling.autoregressive import AutoregressiveSampling
    from tessera.sampling.guidance import Guidance

    seed(0)
    max_len = SAMPLED_FACES + 2
    config = TreeGeneratorConfig(
        model=TreeTransformerConfig(
            bins=BINS,
            dim=DIM,
            depth=DEPTH + FINE_DEPTH,
            heads=HEADS,
            max_len=max_len,
            dropout=0.0,
            text=None,
        ),
        optimizer=optimizer_config(lr=2e-4),
    )
    task = config.build().eval()
    task.model.masks[:, [tree.STOP, tree.NEW, task.model.eos_token_id]] = False
    task.model.masks[:, tree.BOX : tree.PAD] = False
    sampling = AutoregressiveSampling(top_k=math.ceil(TOP_FRACTION * task.model.vocab_size))
    guidance, seeds = Guidance(scale=1.0), itertools.count()

    def sample() -> None:
        for _ in range(meshes // batch_size):
            request = GenerationRequest(
                prompts=[""] * batch_size,
                seeds=[next(seeds) for _ in range(batch_size)],
                sampling=sampling,
                guidance=guidance,
            )
            check_length(task.generate(request), max_len)

    codes = task.generate(GenerationRequest(prompts=[""], seeds=[0], guidance=guidance))
    check_tree_sample(task.tokenizers["tokenizer"].decode(codes))
    info = ModelInfo(
        parameters={"model": count_parameters(task.model)},
        mflop={"model": count_mflop(lambda: task.model.predict(codes, None))},
        packages=package_versions("torch"),
    )
    return Workload(info, sample)


def build_our_task(max_faces: int) -> Any:
    from tessera.engine.modes import seed
    from tessera.modalities.mesh.generation import MeshGeneratorConfig
    from tessera.modalities.mesh.transformer import MeshTransformerConfig

    seed(0)
    config = MeshGeneratorConfig(
        model=MeshTransformerConfig(
            dim=DIM,
            depth=DEPTH,
            heads=HEADS,
            fine_dim=DIM,
            fine_depth=FINE_DEPTH,
            fine_heads=HEADS,
            max_len=NUM_FACES,
            text=None,
        ),
        optimizer=optimizer_config(lr=2e-4),
    )
    return config.build(tokenizer=UntrainedTokenizer(max_faces))


def our_transformer_info(task: Any) -> ModelInfo:
    tokenizer, codes = task.tokenizers["tokenizer"], random_codes()[:BATCH_SIZE]
    meshes = first_batch(canonical_meshes())
    return ModelInfo(
        parameters={
            "model": count_parameters(task.model),
            "tokenizer": count_parameters(tokenizer.network),
        },
        mflop={
            "model": count_mflop(lambda: task.model.predict(codes, None)),
            "tokenizer": count_mflop(lambda: tokenizer.encode_examples(meshes)),
        },
        packages=package_versions("torch"),
    )


def autoencoder_config() -> Any:
    from tessera.modalities.mesh.autoencoder import MeshAutoencoderConfig
    from tessera.nn.quantize import LFQConfig, ResidualConfig

    return MeshAutoencoderConfig(
        bins=BINS,
        coordinate_dim=32,
        angle_dim=16,
        area_dim=16,
        normal_dim=32,
        encoder=(32, 64, 64),
        code_dim=64,
        decoder=(64, 64, 96, 96),
        quantizer=ResidualConfig(
            quantizer=LFQConfig(codebook_size=CODEBOOK_SIZE), num_quantizers=NUM_QUANTIZERS
        ),
    )


def optimizer_config(lr: float) -> Any:
    from tessera.engine.optim.config import OptimizerConfig

    return OptimizerConfig(
        lr=lr,
        betas=(0.9, 0.99),
        max_grad_norm=MAX_GRAD_NORM,
        schedule="warmup",
        warmup_steps=WARMUP_STEPS,
    )


def engine_config() -> Any:
    from tessera.engine.ema import EMAConfig

    return endless_training.engine_config(
        batch_size=BATCH_SIZE, ema=EMAConfig(decay=0.9999, update_after=100, update_every=10)
    )


def run_several(steps: Any) -> None:
    for _ in range(STEPS_AT_ONCE):
        next(steps)


class UntrainedTokenizer:
    """A tokenizer with the size of the autoencoder; its quality does not affect the time."""

    is_external = False

    def __init__(self, max_faces: int):
        self.network = autoencoder_config().build().eval()
        self.vocab_size = CODEBOOK_SIZE
        self.grid = (max_faces, CORNERS)
        self.num_quantizers = NUM_QUANTIZERS
        self.features = None

    def encode_examples(self, examples: Any) -> Any:
        return self.network.tokenize(examples)


def write_meshes(folder: Path) -> Path:
    """Write the random meshes as OBJ files."""
    folder.mkdir()
    for number, mesh in enumerate(random_meshes()):
        folder.joinpath(f"{number:03d}.obj").write_text(mesh.to_y_up().to_obj())
    return folder


def canonical_meshes() -> Any:
    """Build a dataset of random meshes in memory, sorted into canonical order.

    Each has as many faces as on their side. Adjacency is found at every access, as there.
    """
    from tessera.data.dataset import ExampleDataset
    from tessera.modalities.mesh.adjacency import find_adjacent_faces
    from tessera.modalities.mesh.canonical import MeshExample, collate

    class CanonicalMeshes(ExampleDataset):
        def __init__(self) -> None:
            self.examples = [MeshExample.from_mesh(mesh, BINS, "") for mesh in random_meshes()]

        def __len__(self) -> int:
            return NUM_MESHES

        def name(self, index: int) -> str:
            return str(index)

        def item(self, index: int, rng: Any) -> MeshExample:
            example = self.examples[index]
            return replace(example, edges=find_adjacent_faces(example.faces))

        def collate(self, examples: list[MeshExample]) -> Any:
            return collate(examples)

    return CanonicalMeshes()


def first_batch(dataset: Any) -> Any:
    return dataset.collate([dataset.item(index, None) for index in range(BATCH_SIZE)])


@cache
def random_meshes() -> list[Any]:
    """Draw meshes whose faces all remain when coordinates are rounded to bins."""
    import numpy as np

    from tessera.modalities.mesh.canonical import canonicalize
    from tessera.modalities.mesh.media import Mesh

    rng = np.random.default_rng(7)
    meshes: list[Any] = []
    triangles = np.array(list(itertools.combinations(range(NUM_VERTICES), CORNERS)))
    while len(meshes) < NUM_MESHES:
        chosen = rng.choice(len(triangles), NUM_FACES, replace=False)
        faces = rng.permuted(triangles[chosen], axis=1)
        mesh = Mesh(rng.uniform(-1, 1, (NUM_VERTICES, 3)), faces)
        if len(canonicalize(mesh, BINS).faces) == NUM_FACES:
            meshes.append(mesh)
    return meshes


# ---- both


def random_codes() -> Any:
    """Return random codes, (meshes, faces, tokens of a face)."""
    import torch

    return torch.randint(
        CODEBOOK_SIZE,
        (NUM_MESHES, NUM_FACES, TOKENS_PER_FACE),
        generator=torch.Generator().manual_seed(7),
    )


def check_length(codes: Any, positions: int) -> None:
    """Exit if a sample along the edges has too few positions, each of which adds a face."""
    fewest = int((codes[..., 0] >= 0).sum(1).min())
    if fewest < positions:
        raise SystemExit(
            f"A sample has {fewest} positions, but {positions} were expected: it cannot be "
            "compared."
        )


def check_tree_sample(meshes: Any) -> None:
    """Exit if a sample has too few faces."""
    fewest = min(len(mesh.faces) for mesh in meshes)
    if fewest < SAMPLED_FACES:
        raise SystemExit(
            f"A sample has {fewest} faces, but at least {SAMPLED_FACES} were expected: it cannot "
            "be compared."
        )


def check_sample(codes: Any) -> None:
    """Exit if a sample does not have the expected number of tokens: shorter ones take less time."""
    codes, expected = codes.flatten(1), SAMPLED_FACES * TOKENS_PER_FACE
    low, high = int(codes.min()), int(codes.max())
    if codes.shape[1] != expected or low < 0 or high >= CODEBOOK_SIZE:
        raise SystemExit(
            f"A sample has shape {tuple(codes.shape)} and codes from {low} to {high}, but "
            f"{expected} tokens from 0 to {CODEBOOK_SIZE - 1} were expected: it cannot be compared."
        )
