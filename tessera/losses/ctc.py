"""Connectionist temporal classification: loss, most likely labels, and alignment.

Graves 2006, "Connectionist temporal classification". Label 0 is the blank.

B batch, T frames, V labels with the blank, L labels of a text, S = 2 L + 1 states: the labels with
a blank before, between and after them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.nn.precision import to_fp32

BLANK = 0
NO_REDUCTION = 0
"""torch's number of the reduction "none"."""


@dataclass
class CTCTargets:
    """The labels of a batch, which are made on the CPU."""

    flat: Tensor
    """The labels of all examples, one after the other."""
    count_B: Tensor
    counts: list[int]
    """The same numbers, which need not be read from a device."""

    @classmethod
    def from_labels(cls, labels: Sequence[Sequence[int]]) -> CTCTargets:
        counts = [len(one) for one in labels]
        flat = torch.tensor([label for one in labels for label in one], dtype=torch.long)
        return cls(flat, torch.tensor(counts), counts)


@torch.compiler.disable  # it would be compiled again for all other lengths
def ctc_loss_B(logits_BTV: Tensor, frames: Sequence[int], targets: CTCTargets) -> Tensor:
    """Return the negative log-likelihood of the labels of each example, divided by their number.

    It is 0 for examples without labels, and for those with too few frames for their labels.
    """
    log_probs_TBV = to_fp32(logits_BTV).log_softmax(-1).transpose(0, 1)
    loss_B = torch.ctc_loss(
        log_probs_TBV,
        targets.flat,
        list(frames),
        targets.counts,
        BLANK,
        zero_infinity=True,
        reduction=NO_REDUCTION,
    )
    return torch.where(targets.count_B > 0, loss_B, 0.0) / targets.count_B.clamp_min(1)


def most_likely_labels(logits_BTV: Tensor, frames_B: Tensor) -> list[list[int]]:
    """Return the labels of the most likely path: repeated labels are merged, blanks removed."""
    best_BT = logits_BTV.argmax(-1).cpu()
    labels = []
    for best_T, frames in zip(best_BT, frames_B.tolist(), strict=True):
        merged = torch.unique_consecutive(best_T[:frames])
        labels.append(merged[merged != BLANK].tolist())
    return labels


@torch.no_grad()
def align_labels(
    logits_BTV: Tensor, frames_B: Tensor, labels: Sequence[Sequence[int]]
) -> list[list[int] | None]:
    """Return the first frame of each label on the most likely path through all labels (Viterbi).

    None for an example with too few frames for its labels.
    """
    log_probs_BTV = to_fp32(logits_BTV).log_softmax(-1).cpu()
    batch, num_frames, _ = log_probs_BTV.shape
    states_BS, may_skip_BS = expand_labels(labels)
    index_BTS = states_BS[:, None].expand(-1, num_frames, -1)
    emission_TBS = log_probs_BTV.gather(2, index_BTS).transpose(0, 1)
    score_BS = torch.full_like(emission_TBS[0], -math.inf)
    steps_TBS = torch.zeros(num_frames, batch, states_BS.shape[1], dtype=torch.int8)
    last_states = [-1] * batch
    for frame in range(num_frames):
        if frame == 0:
            score_BS[:, :2] = emission_TBS[0, :, :2]
        else:
            one_BS = F.pad(score_BS[:, :-1], (1, 0), value=-math.inf)
            two_BS = F.pad(score_BS[:, :-2], (2, 0), value=-math.inf).where(may_skip_BS, -math.inf)
            best = torch.stack([score_BS, one_BS, two_BS]).max(0)
            score_BS = best.values + emission_TBS[frame]
            steps_TBS[frame] = best.indices
        for row in (frames_B == frame + 1).nonzero().flatten().tolist():
            last_states[row] = final_state(score_BS[row], len(labels[row]))
    return [
        trace_back(steps_TBS[:frames, row], last, len(labels[row])) if last >= 0 else None
        for row, (last, frames) in enumerate(zip(last_states, frames_B.tolist(), strict=True))
    ]


def final_state(score_S: Tensor, num_labels: int) -> int:
    """Return the likelier one of the last label and the blank after it, or -1 if there is none."""
    candidates = [2 * num_labels, 2 * num_labels - 1][: 1 + (num_labels > 0)]
    best = max(candidates, key=lambda state: float(score_S[state]))
    return best if math.isfinite(score_S[best]) else -1


def expand_labels(labels: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the states (B, S), and to which of them a blank before may be skipped.

    The blank between two equal labels may not be skipped.
    """
    size = 2 * max(map(len, labels)) + 1
    states_BS = torch.full((len(labels), max(size, 3)), BLANK)
    for row, one in enumerate(labels):
        states_BS[row, 1 : 2 * len(one) : 2] = torch.tensor(one, dtype=torch.long)
    before_BS = F.pad(states_BS[:, :-2], (2, 0), value=BLANK)
    return states_BS, (states_BS != BLANK) & (states_BS != before_BS)


def trace_back(steps_TS: Tensor, last: int, num_labels: int) -> list[int]:
    """Return the first frame of each label of the path that ends in state `last`."""
    starts, state = [0] * num_labels, last
    for frame in range(len(steps_TS) - 1, -1, -1):
        if state % 2:
            starts[state // 2] = frame
        state -= int(steps_TS[frame, state])
    return starts
