"""Memory of long videos and of large codebooks; each variant runs in a fresh process.

long: videos of 256 x 256 at 24 frames per second are encoded and decoded by the small preset of
`videos-magvit2`, in chunks of 8 frames or at once. Frames are generated on demand and the output is
counted and dropped, so that the memory is that of the tokenizer. A video has one frame more than
its seconds require, so that it fills whole tokens.

lfq: LFQ's entropy penalty over 2^18 codes and its gradient (tessera/nn/quantize/lfq.py), for rows
of 18 numbers: exact (one group), with the default (two groups of 9 bits), and implemented directly
(Yu et al. 2023, arXiv 2310.05737, eq. 5), with the probability of every code for every row. The
exact penalty is checked against the direct one.

Shapes: B examples, T frames of a chunk, H and W height and width, P rows, V codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from memory import MemoryUse, measure_memory

if TYPE_CHECKING:  # the parent process imports no torch from here
    from torch import Tensor

    from tessera.modalities.video.magvit2 import VideoTokenizer

FRAME_SIZE, RATE_HZ, CHUNK_FRAMES = 256, 24, 8
BITS, ROWS, MANY_ROWS = 18, 384, 5120


# ---- long videos


def run_in_chunks(seconds: int) -> MemoryUse:
    """Encode and decode a video chunk by chunk."""
    model, frames = build_small_tokenizer(), seconds * RATE_HZ + 1

    def encode_and_decode() -> float:
        codes = model.encode_chunks(moving_stripes(frames))
        return sum(chunk.shape[2] for chunk in model.decode_chunks(codes))

    return measure_memory(encode_and_decode)


def run_at_once(seconds: int) -> MemoryUse:
    """Encode and decode a whole video."""
    import torch

    model, frames = build_small_tokenizer(), seconds * RATE_HZ + 1

    @torch.no_grad()
    def encode_and_decode() -> float:
        video = torch.cat(list(moving_stripes(frames)), dim=2)
        return model.decode(model.encode(video)).shape[2]

    return measure_memory(encode_and_decode)


def build_small_tokenizer() -> VideoTokenizer:
    from tessera.engine.modes import seed
    from tessera.modalities.video.recipes import videos_magvit2

    seed(0)
    task: Any = videos_magvit2("small").task
    return task.model.build().eval()


def moving_stripes(frames: int) -> Iterator[Tensor]:
    """Generate chunks (1, 3, T, H, W) of a video of stripes that move at one speed per channel."""
    import torch

    position_W = torch.arange(FRAME_SIZE) / 16
    speed_C11 = torch.tensor([1.0, 0.7, 0.4]).view(3, 1, 1)
    for first in range(0, frames, CHUNK_FRAMES):
        seconds_T = torch.arange(first, min(first + CHUNK_FRAMES, frames)) / RATE_HZ
        phase_CTW = position_W - 8 * speed_C11 * seconds_T[:, None]
        shape = (1, 3, len(seconds_T), FRAME_SIZE, FRAME_SIZE)
        yield torch.sin(phase_CTW)[None, :, :, None].expand(shape)


# ---- large codebooks


def run_our_penalty(rows: int, group_bits: int) -> MemoryUse:
    from tessera.nn.quantize import LFQConfig

    config = LFQConfig(codebook_size=2**BITS, commitment_weight=0.0, group_bits=group_bits)
    quantizer = config.build(BITS)
    return measure_gradient(lambda latent_PW: quantizer(latent_PW).penalties["entropy"], rows)


def run_direct_penalty(rows: int) -> MemoryUse:
    """Compute the penalty with the probabilities of all codes."""
    import torch

    from tessera.nn.quantize import LFQConfig

    config = LFQConfig()
    codes_VW = 2.0 * (torch.arange(2**BITS)[:, None] >> torch.arange(BITS) & 1) - 1

    def penalty(latent_PW: Tensor) -> Tensor:
        # |z - c|^2 without |z|^2 and |c|^2, which are the same for all codes of a row
        log_prob_PV = (2 * config.inverse_temperature * latent_PW @ codes_VW.T).log_softmax(-1)
        prob_PV = log_prob_PV.exp()
        sample_entropy = -(prob_PV * log_prob_PV).sum(-1).mean()
        mean_prob_V = prob_PV.mean(0)
        negative_batch_entropy = (mean_prob_V * mean_prob_V.log()).sum()
        return config.entropy_weight * (sample_entropy + config.diversity * negative_batch_entropy)

    return measure_gradient(penalty, rows)


def measure_gradient(penalty: Callable[[Tensor], Tensor], rows: int) -> MemoryUse:
    """Measure a penalty and its gradient, after one row with which torch loads its libraries."""
    import torch

    latent_PW = torch.randn(rows, BITS, generator=torch.Generator().manual_seed(5))

    def run(inputs_PW: Tensor) -> float:
        value = penalty(inputs_PW.requires_grad_())
        value.backward()
        return value.item()

    run(latent_PW[:1].clone())
    return measure_memory(lambda: run(latent_PW))


LONG, SHORT, SHORT_AT_ONCE = "10 s in chunks", "2 s in chunks", "2 s at once"
DIRECT, EXACT, GROUPED, GROUPED_MANY = (
    "direct implementation",
    "ours, one group",
    "ours, two groups",
    f"ours, two groups, {MANY_ROWS} rows",
)

VARIANTS: dict[str, Callable[[], MemoryUse]] = {
    LONG: partial(run_in_chunks, 10),
    SHORT: partial(run_in_chunks, 2),
    SHORT_AT_ONCE: partial(run_at_once, 2),
    DIRECT: partial(run_direct_penalty, ROWS),
    EXACT: partial(run_our_penalty, ROWS, group_bits=BITS),
    GROUPED: partial(run_our_penalty, ROWS, group_bits=14),
    GROUPED_MANY: partial(run_our_penalty, MANY_ROWS, group_bits=14),
}
