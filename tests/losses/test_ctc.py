"""Connectionist temporal classification: loss and alignment, compared with all paths."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tessera.losses.ctc import CTCTargets, align_labels, ctc_loss_B, most_likely_labels

FRAMES = torch.tensor([6, 5, 4])
LABELS = [[1, 2], [1, 1], [3]]


@pytest.fixture
def logits() -> Tensor:
    return torch.randn(3, 6, 4, generator=torch.Generator().manual_seed(2))


def collapse(path: tuple[int, ...]) -> list[int]:
    return [label for label, _ in itertools.groupby(path) if label]


def paths_of(labels: list[int], frames: int) -> list[tuple[int, ...]]:
    return [path for path in itertools.product(range(4), repeat=frames) if collapse(path) == labels]


def log_probability(log_probs_TV: Tensor, path: tuple[int, ...]) -> float:
    return float(sum(log_probs_TV[frame, label] for frame, label in enumerate(path)))


def test_loss_is_the_sum_over_all_paths(logits: Tensor) -> None:
    for row, labels in enumerate(LABELS):
        log_probs_TV = logits[row].log_softmax(-1).double()
        paths = paths_of(labels, int(FRAMES[row]))
        total = sum(math.exp(log_probability(log_probs_TV, path)) for path in paths)
        expected = -math.log(total) / len(labels)
        loss_B = ctc_loss_B(logits, FRAMES.tolist(), CTCTargets.from_labels(LABELS))
        assert float(loss_B[row]) == pytest.approx(expected, rel=1e-4)


def test_alignment_is_the_most_likely_path(logits: Tensor) -> None:
    found = align_labels(logits, FRAMES, LABELS)
    for row, labels in enumerate(LABELS):
        log_probs_TV = logits[row].log_softmax(-1).double()
        best = max(
            paths_of(labels, int(FRAMES[row])), key=lambda path: log_probability(log_probs_TV, path)
        )
        starts = [
            frame
            for frame, label in enumerate(best)
            if label and (frame == 0 or best[frame - 1] != label)
        ]
        assert found[row] == starts


def test_texts_without_characters_or_frames_cost_nothing(logits: Tensor) -> None:
    """Two equal labels need a blank between them, hence three frames."""
    labels, frames = [[], [1, 1], [1, 2]], torch.tensor([6, 2, 2])
    logits.requires_grad_()
    loss_B = ctc_loss_B(logits, frames.tolist(), CTCTargets.from_labels(labels))
    loss_B.sum().backward()
    assert loss_B[:2].tolist() == [0, 0] and loss_B[2] > 0
    assert logits.grad is not None and logits.grad.isfinite().all()
    assert align_labels(logits, frames, labels) == [[], None, [0, 1]]


def test_most_likely_labels_merge_repetitions_within_the_length() -> None:
    best = torch.tensor([[1, 1, 0, 1, 2, 3]])
    logits = torch.nn.functional.one_hot(best, 4).float()
    assert most_likely_labels(logits, torch.tensor([6])) == [[1, 1, 2, 3]]
    assert most_likely_labels(logits, torch.tensor([4])) == [[1, 1]]
