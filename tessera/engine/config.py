"""The settings of the engine, which every run has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tessera.engine.ema import EMAConfig
from tessera.engine.logging import TRACKERS

Precision = Literal["auto", "fp32", "bf16", "fp16"]
MAX_COUNT = 10**12
"""The largest number of steps or examples: a product of two of them has 64 bits or is an error."""
MAX_SEED = 1 << 63
COUNTS = frozenset(
    "steps batch_size grad_accum_steps nproc log_every validate_every sample_every sample_count "
    "checkpoint_every keep_last max_skipped_steps num_workers keep_every".split()
)
"""The settings of the engine that are numbers of things."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    steps: int = 1000
    """The number of optimizer steps of the whole run."""
    batch_size: int = 16
    """The number of examples in one step, over all micro-batches and processes."""
    grad_accum_steps: int = 1
    """The number of micro-batches in one step; more of them need less memory and change nothing
    else."""
    seed: int = 0
    """The seed of all randomness of the run."""
    init_from: str | None = None
    """A run of the same network whose EMA weights are the initial weights of this one."""
    num_workers: int = 0
    """The number of processes that load data; 0 loads it in the training process."""
    nproc: int = 1
    """The number of training processes on this machine."""
    precision: Precision = "auto"
    """The precision of autocast; auto is bf16 on a GPU that supports it and fp32 elsewhere."""
    log_every: int = 10
    """The number of steps between lines in metrics.jsonl."""
    validate_every: int = 500
    """The number of steps between validations on the held-out set; the last step has one too."""
    sample_every: int = 500
    """The number of steps between samples; the last step has some too."""
    sample_count: int = 16
    """The number of held-out examples that samples are made from, spread over the set."""
    checkpoint_every: int = 500
    """The number of steps between checkpoints; the last step has one too."""
    keep_last: int = 2
    """The number of newest checkpoints to keep, beside the best one."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are kept permanently; 0 keeps none of them."""
    max_skipped_steps: int = 10
    """The number of consecutive steps that may be skipped because their values are not finite."""
    ema: EMAConfig = field(default_factory=EMAConfig)
    shard: bool = False
    """Whether each process holds only a part of the parameters, the optimizer's state and the EMA
    (FSDP2). Checkpoints are the same, and a run may resume with or without it."""
    compile: bool = False
    """Whether losses are compiled by torch.compile; weights and checkpoints have the same names."""
    checkpoint_activations: bool = False
    """Whether activations of transformer and residual blocks are computed again in the backward
    pass instead of kept, which needs less memory and more time and changes no result."""
    log_with: tuple[str, ...] = ()
    """The trackers that receive metrics and samples too: tensorboard, wandb, trackio."""

    def __post_init__(self) -> None:
        for name in sorted(COUNTS - {"num_workers", "keep_every"}):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        for name in ("num_workers", "keep_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}.")
        for name in sorted(COUNTS):
            if getattr(self, name) > MAX_COUNT:
                raise ValueError(
                    f"{name} must be at most {MAX_COUNT:,}, got {getattr(self, name)}."
                )
        if not -MAX_SEED <= self.seed < MAX_SEED:
            raise ValueError(f"seed must be an integer of 64 bits, got {self.seed}.")
        for name in self.log_with:
            if name not in TRACKERS:
                raise ValueError(f"log_with must be among {', '.join(TRACKERS)}, got {name!r}.")
        parts = self.grad_accum_steps * self.nproc
        if self.batch_size % parts:
            raise ValueError(
                f"A batch of {self.batch_size} examples cannot be divided evenly into "
                f"{self.grad_accum_steps} micro-batch(es) on each of {self.nproc} process(es): use "
                f"--batch-size {-(-self.batch_size // parts) * parts}."
            )
