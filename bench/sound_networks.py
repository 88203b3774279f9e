"""The sides of SoundStorm: training steps and samples, ours and soundstorm-pytorch's.

4 levels of 256 symbols, 128 frames (at 50 a second, 2.56 s), under 100 semantic symbols of the same
rate; a conformer of width 128, depth 2, 4 heads and a kernel of 31; batch 4, 128 random examples,
Adam with a warm-up and gradients clipped at 0.5. Training runs by each side's own trainer.

A sample is 128 frames by an untrained network, the first level in 8 rounds and each finer one in a
single round, 11 passes in all, drawn from the likeliest 30 % of the symbols. The long sample is 30
s, 1,500 frames, the first level in 16 rounds: 19 passes. Codes come out; nobody decodes them.

DIFFERENT says what is not the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import endless
from sides import About, Side, mflop, parameters, versions

SYMBOLS, LEVELS, SEMANTIC, FRAMES, EXAMPLES, BATCH = 256, 4, 100, 128, 128, 4
WIDTH, DEPTH, HEADS, KERNEL = 128, 2, 4, 31
FRAME_SECONDS = 0.02
RATE, BETAS, CLIP, WARMUP = 3e-4, (0.9, 0.99), 0.5, 10
KEPT_SHARE = 0.3


@dataclass(frozen=True)
class Length:
    """How much is sampled, and in how many rounds of the first level."""

    frames: int
    decoding_steps: int

    @property
    def passes(self) -> int:
        return self.decoding_steps + LEVELS - 1


SHORT, LONG = Length(FRAMES, 8), Length(1500, 16)

DIFFERENT = """\
  not the same:
  - The networks: theirs has four residual streams (hyper-connections), adds the values of the first layer to those of the
    second, and norms each head's input anew; ours has none of this. Parameters and operations stand above.
  - Theirs computes the logits of all levels at every place, in training and in every pass of a sample; ours only those of the
    level and the places that are asked for.
  - Theirs hides a beginning and a level that are the same for all examples of a batch; ours draws both for each.
  - While the first level is sampled, theirs lets the network see finer levels as they were drawn, since its count of what stays
    hidden is over all levels; with ours they are hidden until their turn. The number of passes is the same.
  - Theirs has no moving average and no check for numbers that are not finite; ours has both. Theirs logs at every step, ours
    every tenth."""


# ---- theirs


def their_step(work: Path) -> Side:
    adapter, model = their()
    trainer = adapter.trainer(model, str(work / "theirs"), endless.NEVER)
    return Side(about_them(model), lambda: adapter.run(trainer, 1))


def their_sample(work: Path, *, length: Length) -> Side:
    _, model = their()
    model.steps = length.decoding_steps
    passes, semantic = counted(model.net, "forward"), random_semantic(length.frames)[:1]

    def sample() -> None:
        refuse_other_work(model.generate(cond_semantic_token_ids=semantic), length)

    return Side(about_them(model), checked(sample, passes, length))


def their() -> tuple[Any, Any]:
    import peer_adapters

    adapter = peer_adapters.SoundStormA()
    adapter.seed(0)
    return adapter, adapter.build().eval()


def about_them(model: Any) -> About:
    codes, condition = (
        random_codes()[:BATCH].flatten(1),
        model.maybe_get_condition(random_semantic()[:BATCH]),
    )
    return About(
        parameters={"model": parameters(model)},
        mflop={"model": mflop(lambda: model.net(codes, cond=condition))},
        packages=versions("soundstorm-pytorch", "torch"),
    )


# ---- ours


def our_step(work: Path) -> Side:
    from tessera.data.tokens import TokenDataset

    task = our_task(FRAMES)
    names = [str(number) for number in range(EXAMPLES)]
    source = TokenDataset(
        names,
        {"tokenizer": random_codes().int(), "semantic": random_semantic().int()},
        [""] * EXAMPLES,
    )
    engine_defaults = endless.steps(task, source, endless.config(batch_size=BATCH), work)
    return Side(about_us(task), lambda: next(engine_defaults))


def our_sample(work: Path, *, length: Length) -> Side:
    from tessera.objectives.generation import GenerationRequest
    from tessera.sampling.guidance import Guidance
    from tessera.sampling.maskgit import MaskedSampling

    task = our_task(length.frames).eval()
    about = about_us(our_task(FRAMES))
    passes, seeds = counted(task.model.network, "looking_around"), itertools.count()
    semantic = random_semantic(length.frames)[:1]
    sampling = MaskedSampling(
        decoding_steps_per_level=(length.decoding_steps, 1), top_k=math.ceil(KEPT_SHARE * SYMBOLS)
    )
    guidance = Guidance(scale=1.0)

    def sample() -> None:
        made = task.generate(
            GenerationRequest([""], [next(seeds)], coarser=semantic), sampling, guidance
        )
        refuse_other_work(made, length)

    return Side(about, checked(sample, passes, length))


def our_task(frames: int) -> Any:
    from tessera.engine.modes import seed
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.nn.conformer import ConformerConfig
    from tessera.nn.masked_transformer import MaskedTransformerConfig
    from tessera.objectives.masked import MaskedConfig
    from tessera.objectives.masking import LevelMaskingConfig

    seed(0)
    network = MaskedTransformerConfig(
        dim=WIDTH,
        depth=DEPTH,
        heads=HEADS,
        text=None,
        conformer=ConformerConfig(kernel=KERNEL),
        absolute_positions=False,
    )
    optimizer = OptimizerConfig(
        name="adam",
        lr=RATE,
        betas=BETAS,
        max_grad_norm=CLIP,
        schedule="warmup",
        warmup_steps=WARMUP,
    )
    return MaskedConfig(model=network, masking=LevelMaskingConfig(), optimizer=optimizer).build(
        endless.tokens(SYMBOLS, (frames,), levels=LEVELS, seconds=FRAME_SECONDS),
        semantic=endless.tokens(SEMANTIC, (frames,), seconds=FRAME_SECONDS),
    )


def about_us(task: Any) -> About:
    """With all symbols asked for, so that it can be held beside a network that gives them all
    always."""
    network, tokens = task.model.network, task.layout.patchify(random_codes()[:BATCH])

    def forward() -> None:
        condition = network.condition([""] * BATCH, [False] * BATCH, random_semantic()[:BATCH])
        network.logits(network.states(tokens, condition), tokens >= 0)

    return About({"model": parameters(task.model)}, {"model": mflop(forward)}, versions("torch"))


# ---- both


def random_codes() -> Any:
    """(examples, frames, levels)"""
    import torch

    return torch.randint(
        SYMBOLS, (EXAMPLES, FRAMES, LEVELS), generator=torch.Generator().manual_seed(7)
    )


def random_semantic(frames: int = FRAMES) -> Any:
    """(examples, frames)"""
    import torch

    return torch.randint(SEMANTIC, (EXAMPLES, frames), generator=torch.Generator().manual_seed(8))


def counted(network: Any, method: str) -> list[int]:
    """How often a network has been asked, from here on, in the first entry of a list."""
    asked, passes = getattr(network, method), [0]

    def counting(*arguments: Any, **named: Any) -> Any:
        passes[0] += 1
        return asked(*arguments, **named)

    setattr(network, method, counting)
    return passes


def checked(sample: Callable[[], None], passes: list[int], length: Length) -> Callable[[], None]:
    """Whoever asks its network less often is faster and has done something else."""

    def once() -> None:
        passes[0] = 0
        sample()
        if passes[0] != length.passes:
            raise SystemExit(
                f"A sample of {length.frames} frames takes {length.passes} passes, but there were {passes[0]}."
            )

    return once


def refuse_other_work(codes: Any, length: Length) -> None:
    codes = codes.flatten()
    if len(codes) != length.frames * LEVELS or int(codes.min()) < 0 or int(codes.max()) >= SYMBOLS:
        raise SystemExit(
            f"A sample is {length.frames} x {LEVELS} symbols, 0 to {SYMBOLS - 1}, but {len(codes)} came, {int(codes.min())} to "
            f"{int(codes.max())}."
        )
