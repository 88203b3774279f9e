"""What semantic tokens contain: what is said, and who says it.

    python bench/speech_probes.py RUN [RUN ...] --data DIR [--sentences 40] [--speakers A B ...]

DIR has one folder for each speaker, and all speakers say the same sentences (the captions), such as
`OUT/test` of examples/voices.py. Two numbers for each run of audio-semantic:

- content retrieval: for each recording, the nearest one of another speaker by the edit distance of
  the tokens, without repetitions, is one of the same sentence; the mean over all pairs of speakers.
- speaker probe: a linear probe on how often each token and each pair of successive tokens occurs
  predicts the speaker. It is fitted on half of the sentences and measured on the other half.

Voices with different accents say different sounds, which is content. `--speakers` restricts both
numbers to some of them, such as those with one accent.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tessera.api.tokenizer import Tokenizer
from tessera.metrics.probe import ClassProbe

NUM_PAIR_BINS = 512
"""Pairs of tokens are counted in this many bins."""


@dataclass(frozen=True)
class Recording:
    speaker: str
    sentence: str
    tokens: np.ndarray
    """(T,), without repetitions."""


def read_recordings(
    tokenizer: Tokenizer, folder: str, num_sentences: int, speakers: Sequence[str] = ()
) -> list[Recording]:
    """Tokenize the first sentences of each speaker, or of some of them."""
    data: Any = replace(tokenizer.run.data, path=folder)
    dataset = data.full(captions=True)
    captions = [dataset.caption(index) for index in range(len(dataset))]
    sentences = list(dict.fromkeys(captions))[:num_sentences]
    recordings = []
    for index, sentence in enumerate(captions):
        speaker = str(Path(dataset.name(index)).parent)
        if sentence in sentences and (not speakers or speaker in speakers):
            codes_T = tokenizer.encode(dataset.location(index))[0]
            tokens = torch.unique_consecutive(codes_T[codes_T >= 0]).cpu().numpy()
            recordings.append(Recording(speaker, sentence, tokens))
    return recordings


def edit_distances(query_T: np.ndarray, candidates: Sequence[np.ndarray]) -> np.ndarray:
    """Return the edit distance to each candidate, divided by the longer of both lengths."""
    longest = max(map(len, candidates))
    padded = np.full((len(candidates), longest), -1)
    for row, one in enumerate(candidates):
        padded[row, : len(one)] = one
    columns = np.arange(longest + 1)
    costs = np.tile(columns, (len(candidates), 1))
    for token in query_T:
        changed = costs[:, :-1] + (padded != token)
        best = np.minimum(costs[:, 1:] + 1, changed)
        best = np.concatenate([costs[:, :1] + 1, best], axis=1)
        # Insertions: the minimum over all columns before, plus their distance.
        costs = np.minimum.accumulate(best - columns, axis=1) + columns
    lengths = np.array([len(one) for one in candidates])
    distances = costs[np.arange(len(candidates)), lengths]
    return distances / np.maximum(lengths, len(query_T))


def content_retrieval(recordings: Sequence[Recording]) -> float:
    """Return how often the nearest recording of another speaker is of the same sentence."""
    speakers = sorted({one.speaker for one in recordings})
    hits = []
    for query in recordings:
        distances = edit_distances(query.tokens, [one.tokens for one in recordings])
        for speaker in speakers:
            if speaker != query.speaker:
                others = [i for i, one in enumerate(recordings) if one.speaker == speaker]
                nearest = min(others, key=lambda i: float(distances[i]))
                hits.append(recordings[nearest].sentence == query.sentence)
    return float(np.mean(hits))


def speaker_accuracy(recordings: Sequence[Recording], vocab_size: int) -> float:
    """Return the accuracy of a linear probe of the speaker on sentences it was not fitted on."""
    features_ND = torch.stack([count_tokens(one.tokens, vocab_size) for one in recordings])
    sentences = list(dict.fromkeys(one.sentence for one in recordings))
    fitted = set(sentences[: len(sentences) // 2])
    is_fitted = torch.tensor([one.sentence in fitted for one in recordings])
    labels = [one.speaker for one in recordings]
    train = [label for label, chosen in zip(labels, is_fitted.tolist()) if chosen]
    test = [label for label, chosen in zip(labels, is_fitted.tolist()) if not chosen]
    probe = ClassProbe.fit(features_ND[is_fitted], train)
    predicted = probe.probe(features_ND[~is_fitted]).argmax(1).tolist()
    return float(np.mean([probe.classes[i] == label for i, label in zip(predicted, test)]))


def count_tokens(tokens_T: np.ndarray, vocab_size: int) -> torch.Tensor:
    """Return the square roots of the frequencies of tokens and of pairs of them."""
    single = np.bincount(tokens_T, minlength=vocab_size)
    pairs = (tokens_T[:-1] * 7919 + tokens_T[1:]) % NUM_PAIR_BINS
    counts = np.concatenate([single, np.bincount(pairs, minlength=NUM_PAIR_BINS)])
    return torch.from_numpy(np.sqrt(counts / max(1, len(tokens_T)))).float()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs of audio-semantic")
    parser.add_argument("--data", required=True, help="a folder with a folder for each speaker")
    parser.add_argument("--sentences", type=int, default=40, help="the number of sentences")
    parser.add_argument("--speakers", nargs="+", default=(), help="the speakers; all by default")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results = {}
    for run in args.runs:
        tokenizer = Tokenizer.load(run)
        recordings = read_recordings(tokenizer, args.data, args.sentences, args.speakers)
        speakers = len({one.speaker for one in recordings})
        sentences = len({one.sentence for one in recordings})
        results[run] = {
            "content_retrieval": content_retrieval(recordings),
            "content_chance": 1 / sentences,
            "speaker_accuracy": speaker_accuracy(recordings, tokenizer.vocab_size),
            "speaker_chance": 1 / speakers,
        }
        print(f"{run}: {len(recordings)} recordings of {speakers} speakers")
        for name, value in results[run].items():
            print(f"  {name:<20}{value:8.3f}")
    if args.json is not None:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
