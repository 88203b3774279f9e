"""Training steps and samples of SoundStorm: ours, and those of soundstorm-pytorch.

4 quantizers of 256 codes, 128 frames (at 50 per second, 2.56 s), conditioned on semantic tokens
(100 codes) at the same frame rate; a conformer of dim 128, depth 2, 4 heads and kernel size 31;
batch size 4, 128 random examples, Adam with warm-up and gradient norm clipped to 0.5. Training
steps are run by each side's own trainer.

A sample is 128 frames of an untrained network: 8 decoding steps for the first quantizer and one for
each other quantizer, 11 forward passes in all, from the top 30 % of the codes. The long sample is
30 s, 1,500 frames, with 16 decoding steps for the first quantizer: 19 passes. The tokens are not
decoded.

DIFFERENCES lists what is not the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import endless_training
from worker import ModelInfo, Workload, count_mflop, count_parameters, package_versions

CODEBOOK_SIZE, NUM_QUANTIZERS, SEMANTIC_VOCAB_SIZE = 256, 4, 100
FRAMES, NUM_EXAMPLES, BATCH_SIZE = 128, 128, 4
DIM, DEPTH, HEADS, KERNEL_SIZE = 128, 2, 4, 31
FRAME_SECONDS = 0.02
CODE_DIM = 128
"""The size of the vectors of the codes, that of the codec at preset small."""
LR, BETAS, MAX_GRAD_NORM, WARMUP_STEPS = 3e-4, (0.9, 0.99), 0.5, 10
TOP_FRACTION = 0.3


@dataclass(frozen=True)
class SampleSize:
    """The length of a sample, and the decoding steps of its first quantizer."""

    frames: int
    decoding_steps: int

    @property
    def passes(self) -> int:
        return self.decoding_steps + NUM_QUANTIZERS - 1


SHORT, LONG = SampleSize(FRAMES, 8), SampleSize(1500, 16)

DIFFERENCES = """\
  differences:
  - The networks: theirs has four residual streams (hyper-connections), adds the values of the first
    layer to those of the second, and has a norm at the input of each output head; ours has none of
    these. Parameters and operations are printed above.
  - Theirs computes the logits of all quantizers at every position, in training and in every pass of
    a sample; ours only those of the quantizer and the positions that are needed.
  - Theirs draws one prefix and one quantizer for the whole batch; ours draws both for each example.
  - While the first quantizer is sampled, theirs shows the network the tokens of the other
    quantizers as sampled so far, since it counts masked tokens over all quantizers; with ours they
    stay masked until their turn. The number of passes is the same.
  - Theirs has no EMA and no check for non-finite values; ours has both. Theirs logs at every step,
    ours every 10 steps."""


# ---- theirs


def build_their_step(work_dir: Path) -> Workload:
    adapter, model = build_their_model()
    trainer = adapter.build_trainer(model, work_dir / "theirs")
    return Workload(their_info(model), lambda: adapter.train(trainer, steps=1))


def build_their_sampler(work_dir: Path, *, size: SampleSize) -> Workload:
    _, model = build_their_model()
    model.steps = size.decoding_steps
    passes, semantic = count_calls(model.net, "forward"), random_semantic_tokens(size.frames)[:1]

    def sample() -> None:
        check_sample(model.generate(cond_semantic_token_ids=semantic), size)

    return Workload(their_info(model), check_passes(sample, passes, size))


def build_their_model() -> tuple[Any, Any]:
    from peers.adapters import SoundStormAdapter, seed_everything

    adapter = SoundStormAdapter()
    seed_everything(0)
    return adapter, adapter.build_model().eval()


def their_info(model: Any) -> ModelInfo:
    codes = random_codes()[:BATCH_SIZE].flatten(1)
    condition = model.maybe_get_condition(random_semantic_tokens()[:BATCH_SIZE])
    return ModelInfo(
        parameters={"model": count_parameters(model)},
        mflop={"model": count_mflop(lambda: model.net(codes, cond=condition))},
        packages=package_versions("soundstorm-pytorch", "torch"),
    )


# ---- ours


def build_our_step(work_dir: Path, *, code_dim: int | None = None) -> Workload:
    """Build our training steps; with `code_dim`, the codes have vectors of this size, as those of a
    codec have."""
    from tessera.data.tokens import TokenDataset

    task = build_our_task(FRAMES, code_dim)
    names = [str(number) for number in range(NUM_EXAMPLES)]
    tokens = {"tokenizer": random_codes().int(), "semantic": random_semantic_tokens().int()}
    dataset = TokenDataset(names, tokens, [""] * NUM_EXAMPLES)
    config = endless_training.engine_config(batch_size=BATCH_SIZE)
    steps = endless_training.iterate_steps(task, dataset, config, work_dir)
    return Workload(our_info(task), lambda: next(steps))


def build_our_sampler(work_dir: Path, *, size: SampleSize) -> Workload:
    from tessera.objectives.generation import GenerationRequest
    from tessera.sampling.guidance import Guidance
    from tessera.sampling.maskgit import MaskedSampling

    task = build_our_task(size.frames).eval()
    info = our_info(build_our_task(FRAMES))
    passes, seeds = count_calls(task.model.network, "forward_blocks"), itertools.count()
    semantic = random_semantic_tokens(size.frames)[:1]
    sampling = MaskedSampling(
        decoding_steps_per_level=(size.decoding_steps, 1),
        top_k=math.ceil(TOP_FRACTION * CODEBOOK_SIZE),
    )
    guidance = Guidance(scale=1.0)

    def sample() -> None:
        request = GenerationRequest(
            prompts=[""],
            seeds=[next(seeds)],
            cond_codes=semantic,
            sampling=sampling,
            guidance=guidance,
        )
        check_sample(task.generate(request), size)

    return Workload(info, check_passes(sample, passes, size))


def build_our_task(frames: int, code_dim: int | None = None) -> Any:
    from tessera.engine.modes import seed
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.nn.conformer import ConformerConfig
    from tessera.nn.masked_transformer import MaskedTransformerConfig
    from tessera.objectives.masked import MaskedConfig
    from tessera.objectives.masking import LevelMaskingConfig

    seed(0)
    network = MaskedTransformerConfig(
        dim=DIM,
        depth=DEPTH,
        heads=HEADS,
        text=None,
        conformer=ConformerConfig(kernel=KERNEL_SIZE),
        absolute_positions=False,
    )
    optimizer = OptimizerConfig(
        name="adam",
        lr=LR,
        betas=BETAS,
        max_grad_norm=MAX_GRAD_NORM,
        schedule="warmup",
        warmup_steps=WARMUP_STEPS,
    )
    config = MaskedConfig(
        tokenizer="stub", model=network, masking=LevelMaskingConfig(), optimizer=optimizer
    )
    return config.build(
        tokenizer=endless_training.stub_tokenizer(
            CODEBOOK_SIZE,
            (frames,),
            num_quantizers=NUM_QUANTIZERS,
            seconds=FRAME_SECONDS,
            features=None if code_dim is None else random_code_vectors(code_dim),
        ),
        semantic=endless_training.stub_tokenizer(
            SEMANTIC_VOCAB_SIZE, (frames,), seconds=FRAME_SECONDS
        ),
    )


def our_info(task: Any) -> ModelInfo:
    """Return the sizes, with logits at all positions, since theirs computes all of them."""
    network, tokens = task.model.network, task.layout.patchify(random_codes()[:BATCH_SIZE])

    def forward() -> None:
        semantic = random_semantic_tokens()[:BATCH_SIZE]
        condition = network.condition([""] * BATCH_SIZE, [False] * BATCH_SIZE, semantic)
        network.logits(network.states(tokens, condition), tokens >= 0)

    return ModelInfo(
        parameters={"model": count_parameters(task.model)},
        mflop={"model": count_mflop(forward)},
        packages=package_versions("torch"),
    )


# ---- both


def random_codes() -> Any:
    """Return random codes, (examples, frames, quantizers)."""
    import torch

    return torch.randint(
        CODEBOOK_SIZE,
        (NUM_EXAMPLES, FRAMES, NUM_QUANTIZERS),
        generator=torch.Generator().manual_seed(7),
    )


def random_code_vectors(dim: int) -> Any:
    """Return random vectors of the codes of each quantizer, (quantizers, codes, dim)."""
    import torch

    generator = torch.Generator().manual_seed(9)
    return torch.randn(NUM_QUANTIZERS, CODEBOOK_SIZE, dim, generator=generator)


def random_semantic_tokens(frames: int = FRAMES) -> Any:
    """Return random semantic tokens, (examples, frames)."""
    import torch

    return torch.randint(
        SEMANTIC_VOCAB_SIZE, (NUM_EXAMPLES, frames), generator=torch.Generator().manual_seed(8)
    )


def count_calls(network: Any, method: str) -> list[int]:
    """Count the calls of a method from now on, in the only entry of the returned list."""
    call, calls = getattr(network, method), [0]

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return call(*args, **kwargs)

    setattr(network, method, counted)
    return calls


def check_passes(
    sample: Callable[[], None], passes: list[int], size: SampleSize
) -> Callable[[], None]:
    """Wrap a sampler: exit if a sample takes another number of forward passes than expected."""

    def checked_sample() -> None:
        passes[0] = 0
        sample()
        if passes[0] != size.passes:
            raise SystemExit(
                f"A sample of {size.frames} frames took {passes[0]} forward passes, but "
                f"{size.passes} were expected: it cannot be compared."
            )

    return checked_sample


def check_sample(codes: Any, size: SampleSize) -> None:
    """Exit if a sample does not have the expected number of tokens: shorter ones take less time."""
    codes = codes.flatten()
    low, high = int(codes.min()), int(codes.max())
    if len(codes) != size.frames * NUM_QUANTIZERS or low < 0 or high >= CODEBOOK_SIZE:
        raise SystemExit(
            f"A sample has {len(codes)} tokens from {low} to {high}, but {size.frames} x "
            f"{NUM_QUANTIZERS} tokens from 0 to {CODEBOOK_SIZE - 1} were expected: it cannot be "
            "compared."
        )
