"""Tests of linear probes of classes and captions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tessera.metrics.probe import (
    BagOfWords,
    CaptionProbe,
    ClassProbe,
    RidgeProbe,
    solve_ridge,
)

D = 24
LABELS = ["cat", "dog", "ship"] * 60
SUBJECTS = "apple boat cat dog egg fish goat hat".split()
COLOURS = "red green blue white black".split()
CAPTIONS = [f"a {colour} {subject}" for colour in COLOURS for subject in SUBJECTS]


def encode(texts: list[str], noise: float, seed: int) -> Tensor:
    """Return features: the sum of a random direction for each word, and noise."""
    words = sorted({word for text in [*LABELS, *CAPTIONS] for word in text.split()})
    directions = torch.randn(len(words), D, generator=torch.Generator().manual_seed(0))
    clean = [sum(directions[words.index(word)] for word in text.split()) for text in texts]
    random = torch.randn(len(texts), D, generator=torch.Generator().manual_seed(seed))
    return torch.stack(clean) + noise * random


def shuffled(texts: list[str]) -> list[str]:
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(3))
    return [texts[i] for i in order.tolist()]


def test_ridge_regression_recovers_a_linear_map():
    features = torch.randn(200, D, generator=torch.Generator().manual_seed(1)) * 5 + 100
    targets = features @ torch.ones(D, 2) + 7
    probe = RidgeProbe.fit(features, targets, ridge=1e-9)
    assert torch.allclose(probe(features).float(), targets, rtol=1e-4)
    assert torch.allclose(probe(features + 1).float(), targets + D, rtol=1e-4)


def test_a_larger_penalty_shrinks_predictions_to_the_mean():
    features, targets = encode(LABELS, 0.1, 1), encode(LABELS, 0.0, 0)[:, :2]
    probe = RidgeProbe.fit(features, targets, ridge=1e9)
    assert torch.allclose(probe(features).float(), targets.mean(0).expand(180, 2), atol=1e-4)


@pytest.mark.parametrize("count", [10, 100])
def test_weights_are_those_of_the_normal_equations(count):
    generator = torch.Generator().manual_seed(1)
    x, targets = (torch.randn(count, d, generator=generator).double() for d in (30, 2))
    weights = solve_ridge(x, targets, 0.5)
    assert torch.allclose(x.T @ (x @ weights - targets) + 0.5 * weights, torch.zeros(1).double())


def test_constant_features_have_no_effect():
    features = torch.cat([encode(LABELS, 0.1, 1), torch.ones(len(LABELS), 1)], 1)
    assert ClassProbe.fit(features, LABELS).accuracy(features, LABELS).value == 1


def test_classes_of_new_examples_are_recognised():
    probe = ClassProbe.fit(encode(LABELS, 0.5, 1), LABELS)
    score = probe.accuracy(encode(LABELS, 0.5, 2), LABELS)
    assert score.value > 0.95
    assert score.chance == pytest.approx(1 / 3, abs=0.02)


def test_shuffled_labels_are_at_chance():
    probe = ClassProbe.fit(encode(LABELS, 0.5, 1), LABELS)
    score = probe.accuracy(encode(LABELS, 0.5, 2), shuffled(LABELS))
    assert score.value == pytest.approx(score.chance, abs=0.1)


def test_one_class_for_every_prompt_is_at_chance():
    probe = ClassProbe.fit(encode(LABELS, 0.5, 1), LABELS)
    score = probe.accuracy(encode(["cat"] * len(LABELS), 0.5, 2), LABELS)
    assert score.value == pytest.approx(1 / 3) == score.chance


def test_captions_of_new_combinations_are_retrieved():
    held_out = CAPTIONS[::7]
    train = [caption for caption in CAPTIONS if caption not in held_out]
    probe = CaptionProbe.fit(encode(train * 5, 0.2, 1), train * 5)
    found = probe.recall(encode(held_out, 0.2, 2), held_out)
    assert found[1].value > 0.8 and found[5].value == 1
    assert found[1].chance == pytest.approx(1 / len(held_out))
    assert found[5].chance == pytest.approx(5 / len(held_out))


def test_shuffled_captions_are_at_chance():
    probe = CaptionProbe.fit(encode(CAPTIONS * 5, 0.2, 1), CAPTIONS * 5)
    recalls = probe.recall(encode(CAPTIONS, 0.2, 2), shuffled(CAPTIONS))
    assert recalls[1].value <= 0.1 and recalls[5].value < 0.3
    assert recalls[1].chance == pytest.approx(1 / len(CAPTIONS))


def test_equal_captions_are_not_candidates_for_each_other():
    probe = CaptionProbe.fit(encode(CAPTIONS * 5, 0.2, 1), CAPTIONS * 5)
    repeated = CAPTIONS[:4] * 3
    found = probe.recall(encode(repeated, 0.2, 2), repeated)
    assert found[1].value > 0.9 and found[1].chance == pytest.approx(1 / 4)


def test_words_are_weighted_by_rarity_and_unknown_ones_ignored():
    words = BagOfWords.fit(["a cat", "a dog", "a fish"])
    vectors = words(["A cat!", "a cat of gold", "gold"])
    assert torch.equal(vectors[0], vectors[1]) and not vectors[2].any()
    columns = {word: i for i, word in enumerate(words.weights)}
    assert vectors[0, columns["cat"]] > vectors[0, columns["a"]] > 0
