"""What long clips and large codebooks take of memory: each way in a fresh process, which tells how
far it grew.

long: clips of 256 x 256 at 24 frames a second through the small preset of `videos-magvit2`, to
symbols and back, in pieces of 8 frames or at once. Frames are made as they are asked for, and what
comes out is counted and let go: all that stays is what the tokenizer itself keeps. A clip is one
frame longer than its seconds say, so that it fills whole symbols.

lfq: LFQ's entropy penalty over 2^18 symbols and its gradient (tessera/nn/quantize/lfq.py), for rows
of 18 numbers: exactly (in one group), as it is by default (in two groups of 9 bits), and as it is
written down (Yu et al. 2023, arXiv 2310.05737, eq. 5), with the probability of every symbol for
every row. The penalties are told, so that the exact one can be held to the other.

B examples, T frames of a piece, H and W the sides, P rows, V symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from memory import Used, measured

if TYPE_CHECKING:  # the parent only reads what the processes tell
    from torch import Tensor

    from tessera.modalities.video.magvit2 import VideoTokenizer

SIDE, RATE_HZ, PIECE = 256, 24, 8
BITS, ROWS, MANY_ROWS = 18, 384, 5120


# ---- long clips


def in_pieces(seconds: int) -> Used:
    model, frames = small_tokenizer(), seconds * RATE_HZ + 1

    def there_and_back() -> float:
        return sum(
            piece.shape[2] for piece in model.decode_chunks(model.encode_chunks(wave(frames)))
        )

    return measured(there_and_back)


def at_once(seconds: int) -> Used:
    import torch

    model, frames = small_tokenizer(), seconds * RATE_HZ + 1

    @torch.no_grad()
    def there_and_back() -> float:
        clip = torch.cat(list(wave(frames)), dim=2)
        return model.decode(model.encode(clip)).shape[2]

    return measured(there_and_back)


def small_tokenizer() -> VideoTokenizer:
    from tessera.engine.modes import seed
    from tessera.modalities.video.recipes import videos_magvit2

    seed(0)
    return videos_magvit2("small").task.model.build().eval()


def wave(frames: int) -> Iterator[Tensor]:
    """Pieces (1, 3, T, H, W) of a clip in which stripes travel, slower from colour to colour."""
    import torch

    across_W = torch.arange(SIDE) / 16
    slower_C11 = torch.tensor([1.0, 0.7, 0.4]).view(3, 1, 1)
    for first in range(0, frames, PIECE):
        moments_T = torch.arange(first, min(first + PIECE, frames)) / RATE_HZ
        phases_CTW = across_W - 8 * slower_C11 * moments_T[:, None]
        yield torch.sin(phases_CTW)[None, :, :, None].expand(1, 3, len(moments_T), SIDE, SIDE)


# ---- large codebooks


def ours(rows: int, group_bits: int) -> Used:
    from tessera.nn.quantize import LFQConfig

    quantizer = LFQConfig(
        codebook_size=2**BITS, commitment_weight=0.0, group_bits=group_bits
    ).build(BITS)
    return descended(lambda latent_PW: quantizer(latent_PW).penalties["entropy"], rows)


def as_written(rows: int) -> Used:
    import torch

    from tessera.nn.quantize import LFQConfig

    config = LFQConfig()
    symbols_VW = 2.0 * (torch.arange(2**BITS)[:, None] >> torch.arange(BITS) & 1) - 1

    def penalty(latent_PW: Tensor) -> Tensor:
        # |z - c|^2 without |z|^2 and |c|^2, which are the same for all symbols of a row
        log_chance_PV = (2 * config.inverse_temperature * latent_PW @ symbols_VW.T).log_softmax(-1)
        chance_PV = log_chance_PV.exp()
        doubt = -(chance_PV * log_chance_PV).sum(-1).mean()
        mean_V = chance_PV.mean(0)
        return config.entropy_weight * (doubt + config.diversity * (mean_V * mean_V.log()).sum())

    return descended(penalty, rows)


def descended(penalty: Callable[[Tensor], Tensor], rows: int) -> Used:
    """The penalty of some rows, and its gradient. A row before them wakes what torch loads when it
    is first used."""
    import torch

    latent_PW = torch.randn(rows, BITS, generator=torch.Generator().manual_seed(5))

    def descend(some_PW: Tensor) -> float:
        value = penalty(some_PW.requires_grad_())
        value.backward()
        return value.item()

    descend(latent_PW[:1].clone())
    return measured(lambda: descend(latent_PW))


LONG, SHORT, SHORT_AT_ONCE = "10 s in pieces", "2 s in pieces", "2 s at once"
NAIVE, EXACT, GROUPED, MANY = (
    "as written",
    "ours, one group",
    "ours, two groups",
    f"ours, two groups, {MANY_ROWS} rows",
)

WAYS: dict[str, Callable[[], Used]] = {
    LONG: partial(in_pieces, 10),
    SHORT: partial(in_pieces, 2),
    SHORT_AT_ONCE: partial(at_once, 2),
    NAIVE: partial(as_written, ROWS),
    EXACT: partial(ours, ROWS, group_bits=BITS),
    GROUPED: partial(ours, ROWS, group_bits=14),
    MANY: partial(ours, MANY_ROWS, group_bits=14),
}
"""The names by which processes are told what to do."""
