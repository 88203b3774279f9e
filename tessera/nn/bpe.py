"""An alphabet for texts: the bytes of UTF-8, and pieces of words that are often met (byte pair
encoding: Sennrich 2016, arXiv 1508.07909, algorithm 1; on bytes as in GPT-2, so that no character
is unknown).

Why one of our own: all that it learns is one table of whole numbers, `merges`, so it is a tensor of
the network like any other. It travels in the checkpoint, is copied into the average and is sent to
every process; no file lies beside the weights to be lost or mixed up, and nothing has to be
installed.

Symbols: 0 is padding, 1 begins every text (so that a text of nothing is one symbol long), 2 to 257
are the bytes, and 258 + k is the pair in row k of `merges`; rows that are not in use hold -1.

A *word* is a run of letters and digits with the space before it; any other character is a word of
its own. Pairs never reach over the end of a word. Texts are read in one form: composed (Unicode
NFC), with single spaces and none at the ends, and unless told otherwise without case.
`decode(encode(text))` is the text in that form.
"""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

PADDING, BEGIN, FIRST_BYTE, FIRST_PAIR = 0, 1, 2, 258

WORD = re.compile(r" ?[^\W_]+|.", re.DOTALL)

REMEMBERED = 2**16
"""Texts, and words, whose symbols are kept in memory."""

Pair = tuple[int, int]


def refuse_too_few(tokens: int) -> None:
    if tokens < FIRST_PAIR:
        raise ValueError(
            f"An alphabet of {tokens} symbols was asked for, but padding, the beginning and the 256 bytes alone are "
            f"{FIRST_PAIR}: use that many (plain bytes) or more, such as 512."
        )


class BPE(nn.Module):
    """`learn` it from texts, then `encode` and `decode`. Before it has learnt anything it spells
    every text byte by byte."""

    merges: Tensor

    def __init__(self, tokens: int = 512, *, casefold: bool = True):
        super().__init__()
        refuse_too_few(tokens)
        self.size, self.casefold = tokens, casefold
        self.register_buffer("merges", torch.full((tokens - FIRST_PAIR, 2), -1))
        self._spelling, self._seen = Spelling([]), (0, 0)

    def learn(self, texts: Iterable[str]) -> None:
        """Forgets what was learnt and takes the pairs that these texts hold most often, whatever
        order they come in."""
        words: Counter[str] = Counter()
        for text, times in Counter(texts).items():
            for word in words_of(self.form(text)):
                words[word] += times
        pairs = frequent_pairs(
            {spelt(word): times for word, times in words.items()}, most=len(self.merges)
        )
        self.merges.fill_(-1)
        self.merges[: len(pairs)] = torch.tensor(
            pairs, dtype=torch.int64, device=self.merges.device
        ).view(-1, 2)

    def encode(self, text: str) -> list[int]:
        spelling = self.spelling()
        if text not in spelling.texts:
            make_room(spelling.texts)
            tokens = [token for word in words_of(self.form(text)) for token in spelling.spell(word)]
            spelling.texts[text] = (BEGIN, *tokens)
        return list(spelling.texts[text])

    def decode(self, tokens: Iterable[int]) -> str:
        """What these symbols spell. A character that was cut in two, or never was one, is shown as
        U+FFFD."""
        known = self.spelling().bytes_of
        given = list(tokens)
        if strange := [token for token in given if not 0 <= token < len(known)]:
            raise ValueError(
                f"The symbol {strange[0]} came to be read, but this alphabet has learnt those from 0 to {len(known) - 1} only: "
                "it is another alphabet's, or no text's."
            )
        data = b"".join(known[token] for token in given)
        try:
            text = data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            text = data.decode("utf-8", "replace")
        return text.removeprefix(" ")

    def form(self, text: str) -> str:
        """The form in which texts are read. Decomposed before case is folded: Unicode 16, section
        3.13, D145."""
        words = " ".join(text.split())
        if self.casefold:
            words = unicodedata.normalize("NFD", words).casefold()
        return unicodedata.normalize("NFC", words)

    def spelling(self) -> Spelling:
        """As `merges` says now. It may have been learnt, loaded, copied over or exchanged with the
        average's since.

        Where it lies and how often it was written to is asked first: to look at the numbers would
        make a GPU wait.
        """
        seen = (self.merges.data_ptr(), self.merges._version)
        if seen != self._seen:
            pairs = pairs_in(self.merges)
            if pairs != self._spelling.pairs:
                self._spelling = Spelling(pairs)
            self._seen = seen
        return self._spelling


def pairs_in(merges: Tensor) -> list[Pair]:
    """The rows in use: those behind the last of them hold -1."""
    rows = [(left, right) for left, right in merges.tolist()]
    while rows and rows[-1] == (-1, -1):
        rows.pop()
    return rows


class Spelling:
    """What one table of pairs makes of words, with all that was asked before."""

    def __init__(self, pairs: list[Pair]):
        self.pairs = pairs
        self.symbol_of: dict[Pair, int] = {}
        self.bytes_of = [b"", b"", *(bytes([byte]) for byte in range(256))]
        self.texts: dict[str, tuple[int, ...]] = {}
        self.words: dict[str, tuple[int, ...]] = {}
        for token, (left, right) in enumerate(pairs, start=FIRST_PAIR):
            if not (FIRST_BYTE <= left < token and FIRST_BYTE <= right < token):
                raise ValueError(
                    f"Row {token - FIRST_PAIR} of an alphabet's merges joins {left} and {right}, but a pair is made of "
                    f"symbols from {FIRST_BYTE} up to {token - 1}: the table is damaged, or is no alphabet's."
                )
            self.symbol_of[left, right] = token
            self.bytes_of.append(self.bytes_of[left] + self.bytes_of[right])

    def spell(self, word: str) -> tuple[int, ...]:
        """The bytes of a word, joined pair by pair in the order in which the pairs were learnt."""
        if word not in self.words:
            make_room(self.words)
            tokens = spelt(word)
            while found := [
                self.symbol_of[pair] for pair in pairwise(tokens) if pair in self.symbol_of
            ]:
                tokens = joined(tokens, self.pairs[min(found) - FIRST_PAIR], min(found))
            self.words[word] = tokens
        return self.words[word]


def make_room(remembered: dict[str, Any]) -> None:
    if len(remembered) >= REMEMBERED:
        remembered.clear()


def words_of(text: str) -> list[str]:
    """A word that opens a text gets the space that it has elsewhere, so that it is the same symbols
    in both places."""
    return WORD.findall(f" {text}" if text[:1].isalnum() else text)


def spelt(word: str) -> tuple[int, ...]:
    """Byte by byte. Halves of characters, which a terminal of another encoding leaves in a prompt,
    pass."""
    return tuple(FIRST_BYTE + byte for byte in word.encode("utf-8", "surrogatepass"))


def joined(tokens: tuple[int, ...], pair: Pair, token: int) -> tuple[int, ...]:
    """With `token` wherever the pair stood, from left to right."""
    after: list[int] = []
    place = 0
    while place < len(tokens):
        met = tokens[place : place + 2] == pair
        after.append(token if met else tokens[place])
        place += 2 if met else 1
    return tuple(after)


def frequent_pairs(words: dict[tuple[int, ...], int], most: int) -> list[Pair]:
    """The pairs to join: each time the one met most often (of equals, that of smaller symbols),
    until none is met twice."""
    count_by_suffix = Tally(words)
    chosen: list[Pair] = []
    while len(chosen) < most and (pair := count_by_suffix.most_frequent()):
        count_by_suffix.join(pair, FIRST_PAIR + len(chosen))
        chosen.append(pair)
    return chosen


class Tally:
    """How often each pair is met in some words, kept true while pairs are joined, and only where
    they stand.

    The heap may hold counts that are no longer true: they are passed over, because every count that
    changes is put in anew.
    """

    def __init__(self, words: dict[tuple[int, ...], int]):
        self.words, self.times = list(words), list(words.values())
        self.counts: Counter[Pair] = Counter()
        self.homes: defaultdict[Pair, set[int]] = defaultdict(set)
        for number in range(len(self.words)):
            self.add(number)
        self.heap = [(-count, pair) for pair, count in self.counts.items()]
        heapq.heapify(self.heap)

    def add(self, number: int) -> None:
        for pair in pairwise(self.words[number]):
            self.counts[pair] += self.times[number]
            self.homes[pair].add(number)

    def most_frequent(self) -> Pair | None:
        while self.heap:
            count, pair = heapq.heappop(self.heap)
            if -count == self.counts[pair]:
                return pair if -count > 1 else None
        return None

    def join(self, pair: Pair, token: int) -> None:
        changed: set[Pair] = set()
        for number in self.homes.pop(pair):
            before = self.words[number]
            for one in pairwise(before):
                self.counts[one] -= self.times[number]
            self.words[number] = joined(before, pair, token)
            self.add(number)
            changed.update(pairwise(before), pairwise(self.words[number]))
        for one in changed:
            heapq.heappush(self.heap, (-self.counts[one], one))
