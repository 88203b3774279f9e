"""The sides of masked generation: a training step and a sample, ours and muse-maskgit-pytorch's.

Against the package: 256 symbols, 64 places (8 x 8), width 128, depth 2, 4 heads, batch 4, Adam,
gradients clipped at 0.5, half of the captions dropped. Neither side has a text encoder: a caption
is 16 random states of width 64, which only have to be looked up. Neither side has a picture: codes
in, codes out.

- The package has no trainer for its MaskGit, so its training step is the least there is: forward,
  backward, clipping, Adam, on batches that lie ready. Ours is `Engine.steps()` with everything on,
  moving average included, and its stream of examples.
- A sample is one image in 18 rounds under guidance of 3, drawn from the likeliest tenth of the
  symbols.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import endless
from sides import About, Side, mflop, parameters, versions

SYMBOLS, GRID, WIDTH, DEPTH, HEADS = 256, 8, 128, 2, 4
PLACES = GRID * GRID
TEXT_PLACES, TEXT_WIDTH = 16, 64
BATCH, EXAMPLES = 4, 128
RATE, BETAS, CLIP, DROPPED = 3e-4, (0.9, 0.999), 0.5, 0.5
ROUNDS, SCALE, KEPT_SHARE = 18, 3.0, 0.1


def random_codes() -> Any:
    import torch

    return torch.randint(
        SYMBOLS, (EXAMPLES, GRID, GRID), generator=torch.Generator().manual_seed(7)
    )


def random_states() -> Any:
    """What a text encoder would say of each example's caption, which is the example's number."""
    import torch

    return torch.randn(
        EXAMPLES, TEXT_PLACES, TEXT_WIDTH, generator=torch.Generator().manual_seed(8)
    )


# ---- theirs


def their_step(work: Path) -> Side:
    import torch

    model = their_model(work)
    learning = list(model.transformer.parameters())
    optimizer = torch.optim.Adam(learning, lr=RATE, betas=BETAS)
    ready = itertools.cycle(
        zip(random_codes().split(BATCH), random_states().split(BATCH), strict=True)
    )

    def step() -> None:
        codes, states = next(ready)
        optimizer.zero_grad()
        model(codes, text_embeds=states, cond_drop_prob=DROPPED).backward()
        torch.nn.utils.clip_grad_norm_(learning, CLIP)
        optimizer.step()

    return Side(about_them(model), step)


def their_sample(work: Path) -> Side:
    model = their_model(work)
    asked = {"timesteps": ROUNDS, "cond_scale": SCALE, "topk_filter_thres": 1 - KEPT_SHARE}
    return Side(about_them(model), lambda: model.generate(texts=["0"], **asked))


def their_model(work: Path) -> Any:
    """Its MaskGit, which wants a text encoder and a tokenizer: of one it is told the size, the
    other hands codes through."""
    import peershim  # noqa: F401  # before anything that imports torchvision
    import torch
    from muse_maskgit_pytorch import MaskGit, MaskGitTransformer, VQGanVAE

    torch.manual_seed(0)
    text = work / "text-of-nobody"
    text.mkdir(exist_ok=True)
    (text / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": TEXT_WIDTH}))
    transformer = MaskGitTransformer(
        num_tokens=SYMBOLS,
        seq_len=PLACES,
        dim=WIDTH,
        depth=DEPTH,
        heads=HEADS,
        dim_head=WIDTH // HEADS,
        t5_name=str(text),
    )
    states = random_states()
    transformer.encode_text = lambda texts: states[[int(text) for text in texts]]
    tokenizer = VQGanVAE(dim=16, layers=3, codebook_size=SYMBOLS, use_vgg_and_gan=False)
    model = MaskGit(image_size=64, transformer=transformer, vae=tokenizer, cond_drop_prob=DROPPED)
    model.vae.decode_from_ids = lambda codes: (
        codes
    )  # it cannot do without a tokenizer, but this one takes no time
    return model


def about_them(model: Any) -> About:
    """Without the network for self-conditioning, which is built in any case and never called
    here."""
    network = model.transformer
    codes, states = random_codes()[:BATCH].flatten(1), random_states()[:BATCH]
    return About(
        parameters={"model": parameters(network) - parameters(network.self_cond_to_init_embed)},
        mflop={"model": mflop(lambda: network(codes, text_embeds=states))},
        packages=versions("muse-maskgit-pytorch", "torch"),
    )


# ---- ours


def our_step(work: Path) -> Side:
    from tessera.data.tokens import TokenDataset

    task = our_task()
    names = [str(number) for number in range(EXAMPLES)]
    source = TokenDataset(names, {"tokenizer": random_codes().int()}, names)
    engine_defaults = endless.steps(task, source, endless.config(batch_size=BATCH), work)
    return Side(about_us(task), lambda: next(engine_defaults))


def our_sample(work: Path) -> Side:
    from tessera.objectives.generation import GenerationRequest
    from tessera.sampling.guidance import Guidance
    from tessera.sampling.maskgit import MaskedSampling

    task = our_task().eval()
    seeds = itertools.count()
    sampling = MaskedSampling(decoding_steps=ROUNDS, top_k=math.ceil(KEPT_SHARE * SYMBOLS))
    guidance = Guidance(scale=SCALE)
    return Side(
        about_us(task),
        lambda: task.generate(GenerationRequest(["0"], [next(seeds)]), sampling, guidance),
    )


def our_task() -> Any:
    from tessera.engine.modes import seed
    from tessera.engine.optim.config import OptimizerConfig
    from tessera.nn.masked_transformer import MaskedTransformerConfig
    from tessera.objectives.masked import MaskedConfig

    seed(0)
    return MaskedConfig(
        model=MaskedTransformerConfig(dim=WIDTH, depth=DEPTH, heads=HEADS, text=looked_up()),
        cond_drop_prob=DROPPED,
        optimizer=OptimizerConfig(name="adam", lr=RATE, betas=BETAS, max_grad_norm=CLIP),
    ).build(endless.tokens(SYMBOLS, (GRID, GRID)))


def looked_up() -> Any:
    """A text encoder that only has to look its states up."""
    import torch

    from tessera.nn.transformer import States
    from tessera.text.encoder import LearnedTextConfig, TextEncoder

    class LookedUp(TextEncoder):
        dim = TEXT_WIDTH

        def __init__(self) -> None:
            super().__init__()
            self.states = random_states()

        def forward(self, texts: Any) -> States:
            values = self.states[[int(text) for text in texts]]
            return States(values, torch.ones(values.shape[:2], dtype=torch.bool))

    @dataclass(frozen=True, kw_only=True)
    class LookedUpConfig(LearnedTextConfig):
        def build(self) -> LookedUp:  # type: ignore[override]
            return LookedUp()

    return LookedUpConfig()


def about_us(task: Any) -> About:
    texts = [str(number) for number in range(BATCH)]
    return About(
        parameters={"model": parameters(task.model)},
        mflop={"model": masked_mflop(task, random_codes()[:BATCH], texts)},
        packages=versions("torch"),
    )


def masked_mflop(task: Any, codes: Any, texts: list[str]) -> float:
    """With all symbols asked for, so that it can be held beside a network that gives them all
    always."""
    network, tokens = task.model.network, task.layout.patchify(codes)

    def forward() -> None:
        states = network.states(tokens, network.condition(texts, [False] * len(texts)))
        network.logits(states, tokens >= 0)

    return mflop(forward)
