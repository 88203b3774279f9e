"""Training steps and samples of the masked generator: ours, and those of muse-maskgit-pytorch.

256 codes, 64 positions (8 x 8), dim 128, depth 2, 4 heads, batch size 4, Adam, gradient norm
clipped to 0.5, half of the captions dropped. Neither side has a text encoder: a caption is 16
random states of dim 64 from a table. Neither side has images: tokens in, tokens out.

- The package has no trainer for its MaskGit, so its training step is a minimal loop (forward,
  backward, clipping, Adam) on batches that are in memory. Ours is `Engine.steps()` with all its
  features, including EMA, and its data loader.
- A sample is one image in 18 decoding steps with guidance 3, from the top 10 % of the codes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import endless_training
from worker import ModelInfo, Workload, count_mflop, count_parameters, package_versions

CODEBOOK_SIZE, GRID, DIM, DEPTH, HEADS = 256, 8, 128, 2, 4
POSITIONS = GRID * GRID
TEXT_LEN, TEXT_DIM = 16, 64
BATCH_SIZE, NUM_EXAMPLES = 4, 128
LR, BETAS, MAX_GRAD_NORM, COND_DROP_PROB = 3e-4, (0.9, 0.999), 0.5, 0.5
DECODING_STEPS, GUIDANCE_SCALE, TOP_FRACTION = 18, 3.0, 0.1


def random_codes() -> Any:
    import torch

    return torch.randint(
        CODEBOOK_SIZE, (NUM_EXAMPLES, GRID, GRID), generator=torch.Generator().manual_seed(7)
    )


def random_text_states() -> Any:
    """Return the text states of each example; its caption is its number."""
    import torch

    return torch.randn(NUM_EXAMPLES, TEXT_LEN, TEXT_DIM, generator=torch.Generator().manual_seed(8))


# ---- theirs


def build_their_step(work_dir: Path) -> Workload:
    import torch

    model = build_their_model(work_dir)
    parameters = list(model.transformer.parameters())
    optimizer = torch.optim.Adam(parameters, lr=LR, betas=BETAS)
    batches = itertools.cycle(
        zip(random_codes().split(BATCH_SIZE), random_text_states().split(BATCH_SIZE), strict=True)
    )

    def step() -> None:
        codes, states = next(batches)
        optimizer.zero_grad()
        model(codes, text_embeds=states, cond_drop_prob=COND_DROP_PROB).backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()

    return Workload(their_info(model), step)


def build_their_sampler(work_dir: Path) -> Workload:
    model = build_their_model(work_dir)
    settings = {
        "timesteps": DECODING_STEPS,
        "cond_scale": GUIDANCE_SCALE,
        "topk_filter_thres": 1 - TOP_FRACTION,
    }
    return Workload(their_info(model), lambda: model.generate(texts=["0"], **settings))


def build_their_model(work_dir: Path) -> Any:
    """Build their MaskGit at the configuration that is compared."""
    import torch

    torch.manual_seed(0)
    states = random_text_states()
    return build_their_maskgit(
        work_dir,
        vocab_size=CODEBOOK_SIZE,
        grid=GRID,
        depth=DEPTH,
        text_dim=TEXT_DIM,
        encode_text=lambda texts: states[[int(text) for text in texts]],
        cond_drop_prob=COND_DROP_PROB,
    )


def build_their_maskgit(
    work_dir: Path,
    *,
    vocab_size: int,
    grid: int,
    depth: int,
    text_dim: int,
    encode_text: Callable[[list[str]], Any],
    cond_drop_prob: float,
) -> Any:
    """Build their MaskGit with stubs for the text encoder and the tokenizer that it requires.

    It takes and returns codes. `encode_text` returns states that are zero after the end of a text.
    """
    from peers import shims

    shims.install()
    from muse_maskgit_pytorch import MaskGit, MaskGitTransformer, VQGanVAE

    text_encoder = work_dir / "text-encoder"  # only its config is read
    text_encoder.mkdir(exist_ok=True)
    (text_encoder / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": text_dim}))
    transformer = MaskGitTransformer(
        num_tokens=vocab_size,
        seq_len=grid * grid,
        dim=DIM,
        depth=depth,
        heads=HEADS,
        dim_head=DIM // HEADS,
        t5_name=str(text_encoder),
    )
    transformer.encode_text = encode_text
    tokenizer = VQGanVAE(dim=16, layers=3, codebook_size=2**16, use_vgg_and_gan=False)
    tokenizer.codebook_size = vocab_size  # which is compared with the transformer's
    model = MaskGit(
        image_size=8 * grid, transformer=transformer, vae=tokenizer, cond_drop_prob=cond_drop_prob
    )
    model.vae.decode_from_ids = lambda codes: codes
    return model


def their_info(model: Any) -> ModelInfo:
    """Return the sizes without the self-conditioning network, which is built but not used here."""
    network = model.transformer
    codes, states = random_codes()[:BATCH_SIZE].flatten(1), random_text_states()[:BATCH_SIZE]
    unused = count_parameters(network.self_cond_to_init_embed)
    return ModelInfo(
        parameters={"model": count_parameters(network) - unused},
        mflop={"model": count_mflop(lambda: network(codes, text_embeds=states))},
        packages=package_versions("muse-maskgit-pytorch", "torch"),
    )


# ---- ours


def build_our_step(work_dir: Path) -> Workload:
    from tessera.data.tokens import TokenDataset

    task = build_our_task()
    names = [str(number) for number in range(NUM_EXAMPLES)]
    dataset = TokenDataset(names, {"tokenizer": random_codes().int()}, names)
    config = endless_training.engine_config(batch_size=BATCH_SIZE)
    steps = endless_training.iterate_steps(task, dataset, config, work_dir)
    return Workload(our_info(task), lambda: next(steps))


def build_our_sampler(work_dir: Path) -> Workload:
    from tessera.objectives.generation import GenerationRequest
    from tessera.sampling.guidance import Guidance
    from tessera.sampling.maskgit import MaskedSampling

    task = build_our_task().eval()
    seeds = itertools.count()
    sampling = MaskedSampling(
        decoding_steps=DECODING_STEPS, top_k=math.ceil(TOP_FRACTION * CODEBOOK_SIZE)
    )
    guidance = Guidance(scale=GUIDANCE_SCALE)
    return Workload(
        our_info(task),
        lambda: task.generate(
            GenerationRequest(
                prompts=["0"], seeds=[next(seeds)], sampling=sampling, guidance=guidance
            )
        ),
    )


def build_our_task() -> Any:
    from tessera.engine.modes import seed
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.nn.masked_transformer import MaskedTransformerConfig
    from tessera.objectives.masked import MaskedConfig

    seed(0)
    config = MaskedConfig(
        tokenizer="stub",
        model=MaskedTransformerConfig(dim=DIM, depth=DEPTH, heads=HEADS, text=text_table_config()),
        cond_drop_prob=COND_DROP_PROB,
        optimizer=OptimizerConfig(name="adam", lr=LR, betas=BETAS, max_grad_norm=MAX_GRAD_NORM),
    )
    return config.build(tokenizer=endless_training.stub_tokenizer(CODEBOOK_SIZE, (GRID, GRID)))


def text_table_config() -> Any:
    """Return the config of a text encoder that reads its states from a table."""
    import torch

    table = random_text_states()

    def encode(texts: Sequence[str]) -> tuple[Any, Any]:
        values = table[[int(text) for text in texts]]
        return values, torch.ones(values.shape[:2], dtype=torch.bool)

    return fixed_text_config(TEXT_DIM, encode)


def fixed_text_config(text_dim: int, encode: Callable[[Sequence[str]], tuple[Any, Any]]) -> Any:
    """Return the config of a text encoder without parameters, whose states are given by a function.

    `encode` returns the states and the mask of those that are no padding.
    """
    import torch

    from tessera.nn.transformer import States
    from tessera.text.encoder import TextEncoder
    from tessera.text.learned import LearnedTextConfig

    class FixedText(TextEncoder):
        dim = text_dim

        @property
        def input_device(self) -> torch.device:
            return torch.device("cpu")

        def forward(self, texts: Any) -> States:
            return texts if isinstance(texts, States) else self.encode_inputs(texts)

        def encode_inputs(self, texts: Sequence[str]) -> States:
            return States(*encode(texts))

    @dataclass(frozen=True, kw_only=True)
    class FixedTextConfig(LearnedTextConfig):
        def build(self) -> FixedText:  # type: ignore[override]
            return FixedText()

    return FixedTextConfig()


def our_info(task: Any) -> ModelInfo:
    texts = [str(number) for number in range(BATCH_SIZE)]
    return ModelInfo(
        parameters={"model": count_parameters(task.model)},
        mflop={"model": count_masked_mflop(task, random_codes()[:BATCH_SIZE], texts)},
        packages=package_versions("torch"),
    )


def count_masked_mflop(task: Any, codes: Any, texts: list[str]) -> float:
    """Count a forward pass with logits at all positions, as networks without masking compute it."""
    network, tokens = task.model.network, task.layout.patchify(codes)

    def forward() -> None:
        states = network.states(tokens, network.condition(texts, [False] * len(texts)))
        network.logits(states, tokens >= 0)

    return count_mflop(forward)
