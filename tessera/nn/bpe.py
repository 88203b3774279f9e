"""A tokenizer for texts: byte pair encoding (Sennrich 2016, arXiv 1508.07909, algorithm 1) on the
bytes of UTF-8 as in GPT-2, so that no character is unknown.

It is implemented here because all that it learns is one integer table, `merges`, which can be a
buffer of the network like any other. It is saved in the checkpoint, copied into the EMA and
broadcast to every process; there is no separate file that could be lost or mismatched, and no
package to install.

Tokens: 0 is padding, 1 begins every text (so that an empty text has one token), 2 to 257 are the
bytes, and 258 + k is the pair in row k of `merges`; unused rows hold -1.

A *word* is a run of alphanumeric characters with the space before it; any other character is a word
of its own. Pairs never cross the end of a word. Texts are normalized first: composed (Unicode NFC),
with single spaces and none at the ends, and case-folded by default. `decode(encode(text))` is the
normalized text.
"""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import Tensor, nn

PAD_ID, BOS_ID, FIRST_BYTE_ID, FIRST_MERGE_ID = 0, 1, 2, 258

PUNCTUATION = re.compile(r"""[;!?"“”„«»()\[\]{}…–—_]|[.,:](?!\d)|(?<!\d)[.,:]|(?<=\w)-|-(?!\d)""")
"""Punctuation between words, but not within numbers ("4:4", "-3") or as a part of words ("C#")."""

APOSTROPHE = re.compile(r"['’‘]")

WORD = re.compile(r" ?[^\W_]+|.", re.DOTALL)

CACHE_SIZE = 2**16
"""Number of texts, and of words, whose tokens are cached."""

Pair = tuple[int, int]


def check_vocab_size(vocab_size: int) -> None:
    """Raise a ValueError if the vocabulary has no room for the bytes."""
    if vocab_size < FIRST_MERGE_ID:
        raise ValueError(
            f"vocab_size is {vocab_size}, but padding, the beginning of a text and the 256 bytes"
            f" take {FIRST_MERGE_ID} tokens: use that many (bytes only) or more, such as 512."
        )


class BPE(nn.Module):
    """A byte pair encoding, which encodes byte by byte until `train_from_iterator` is called."""

    merges: Tensor

    def __init__(
        self, vocab_size: int = 512, *, casefold: bool = True, ignore_punctuation: bool = False
    ):
        super().__init__()
        check_vocab_size(vocab_size)
        self.vocab_size, self.casefold = vocab_size, casefold
        self.ignore_punctuation = ignore_punctuation
        self.register_buffer("merges", torch.full((vocab_size - FIRST_MERGE_ID, 2), -1))
        self._table, self._table_version = MergeTable([]), (0, 0)

    def train_from_iterator(self, texts: Iterable[str]) -> None:
        """Replace the merges by the most frequent pairs of these texts, whatever their order."""
        words: Counter[str] = Counter()
        for text, count in Counter(texts).items():
            for word in split_words(self.normalize(text)):
                words[word] += count
        pairs = learn_merges(
            {byte_tokens(word): count for word, count in words.items()},
            max_merges=len(self.merges),
        )
        self.merges.fill_(-1)
        self.merges[: len(pairs)] = torch.tensor(
            pairs, dtype=torch.int64, device=self.merges.device
        ).view(-1, 2)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with `BOS_ID` first."""
        table = self.merge_table()
        if text not in table.texts:
            clear_if_full(table.texts)
            words = split_words(self.normalize(text))
            tokens = [token for word in words for token in table.encode_word(word)]
            table.texts[text] = (BOS_ID, *tokens)
        return list(table.texts[text])

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens. Bytes that are not valid UTF-8 are shown as U+FFFD."""
        token_bytes = self.merge_table().token_bytes
        tokens = list(tokens)
        if unknown := [token for token in tokens if not 0 <= token < len(token_bytes)]:
            raise ValueError(
                f"Token {unknown[0]} cannot be decoded, because this vocabulary has tokens from 0"
                f" to {len(token_bytes) - 1}: use the vocabulary that encoded the text."
            )
        data = b"".join(token_bytes[token] for token in tokens)
        try:
            text = data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            text = data.decode("utf-8", "replace")
        return text.removeprefix(" ")

    def normalize(self, text: str) -> str:
        """Normalize punctuation, whitespace, case and Unicode form.

        Characters are decomposed before case folding: Unicode 16, section 3.13, D145.
        """
        if self.casefold:
            text = unicodedata.normalize("NFD", text).casefold()
        if self.ignore_punctuation:
            composed = unicodedata.normalize("NFC", text)
            text = PUNCTUATION.sub(" ", APOSTROPHE.sub("", composed))
        return unicodedata.normalize("NFC", " ".join(text.split()))

    def merge_table(self) -> MergeTable:
        """Return the table of the current `merges`.

        They may have been trained, loaded, copied or swapped with the EMA since the last call. The
        storage address and the version counter are compared first, because reading the values would
        synchronize with a GPU.
        """
        version = (self.merges.data_ptr(), self.merges._version)
        if version != self._table_version:
            pairs = read_pairs(self.merges)
            if pairs != self._table.pairs:
                self._table = MergeTable(pairs)
            self._table_version = version
        return self._table


def read_pairs(merges: Tensor) -> list[Pair]:
    """Return the rows in use, without the rows of -1 at the end."""
    rows = [(left, right) for left, right in merges.tolist()]
    while rows and rows[-1] == (-1, -1):
        rows.pop()
    return rows


class MergeTable:
    """A list of merges, with a cache of the words and texts that it has encoded."""

    def __init__(self, pairs: list[Pair]):
        self.pairs = pairs
        self.merge_ids: dict[Pair, int] = {}
        self.token_bytes = [b"", b"", *(bytes([byte]) for byte in range(256))]
        self.texts: dict[str, tuple[int, ...]] = {}
        self.words: dict[str, tuple[int, ...]] = {}
        for token, (left, right) in enumerate(pairs, start=FIRST_MERGE_ID):
            if not (FIRST_BYTE_ID <= left < token and FIRST_BYTE_ID <= right < token):
                raise ValueError(
                    f"Row {token - FIRST_MERGE_ID} of the BPE merges joins {left} and {right}, but"
                    f" a pair consists of tokens from {FIRST_BYTE_ID} to {token - 1}: the"
                    " checkpoint is damaged or belongs to another model."
                )
            self.merge_ids[left, right] = token
            self.token_bytes.append(self.token_bytes[left] + self.token_bytes[right])

    def encode_word(self, word: str) -> tuple[int, ...]:
        """Merge the bytes of a word, pair by pair in the order in which the pairs were learned."""
        if word not in self.words:
            clear_if_full(self.words)
            tokens = byte_tokens(word)
            while merges := [
                self.merge_ids[pair] for pair in pairwise(tokens) if pair in self.merge_ids
            ]:
                first = min(merges)
                tokens = merge_pair(tokens, self.pairs[first - FIRST_MERGE_ID], first)
            self.words[word] = tokens
        return self.words[word]


def clear_if_full(cache: dict[str, tuple[int, ...]]) -> None:
    if len(cache) >= CACHE_SIZE:
        cache.clear()


def split_words(text: str) -> list[str]:
    """Split a normalized text into words.

    A word at the beginning gets the space that it has elsewhere, so that its tokens are the same.
    """
    return WORD.findall(f" {text}" if text[:1].isalnum() else text)


def byte_tokens(word: str) -> tuple[int, ...]:
    """Return one token per byte.

    Lone surrogates, which a terminal with another encoding leaves in a prompt, are accepted.
    """
    return tuple(FIRST_BYTE_ID + byte for byte in word.encode("utf-8", "surrogatepass"))


def merge_pair(tokens: tuple[int, ...], pair: Pair, token: int) -> tuple[int, ...]:
    """Replace each occurrence of a pair by `token`, from left to right."""
    merged: list[int] = []
    index = 0
    while index < len(tokens):
        matches = tokens[index : index + 2] == pair
        merged.append(token if matches else tokens[index])
        index += 2 if matches else 1
    return tuple(merged)


def learn_merges(words: dict[tuple[int, ...], int], max_merges: int) -> list[Pair]:
    """Return the pairs to merge: in each step the most frequent one, until none occurs twice.

    Of equally frequent pairs, the one with the smaller tokens is first.
    """
    counts = PairCounts(words)
    merges: list[Pair] = []
    while len(merges) < max_merges and (pair := counts.most_frequent()):
        counts.merge(pair, FIRST_MERGE_ID + len(merges))
        merges.append(pair)
    return merges


class PairCounts:
    """The frequencies of adjacent pairs in words, updated only where pairs are merged.

    The heap may hold outdated counts. They are skipped, because every changed count is pushed
    again.
    """

    def __init__(self, words: dict[tuple[int, ...], int]):
        self.words, self.word_counts = list(words), list(words.values())
        self.counts: Counter[Pair] = Counter()
        self.words_with_pair: defaultdict[Pair, set[int]] = defaultdict(set)
        for index in range(len(self.words)):
            self.add_word(index)
        self.heap = [(-count, pair) for pair, count in self.counts.items()]
        heapq.heapify(self.heap)

    def add_word(self, index: int) -> None:
        for pair in pairwise(self.words[index]):
            self.counts[pair] += self.word_counts[index]
            self.words_with_pair[pair].add(index)

    def most_frequent(self) -> Pair | None:
        """Remove and return the most frequent pair, or None if no pair occurs twice."""
        while self.heap:
            count, pair = heapq.heappop(self.heap)
            if -count == self.counts[pair]:
                return pair if -count > 1 else None
        return None

    def merge(self, pair: Pair, token: int) -> None:
        """Replace a pair by `token` in all words."""
        changed: set[Pair] = set()
        for index in self.words_with_pair.pop(pair):
            before = self.words[index]
            for old in pairwise(before):
                self.counts[old] -= self.word_counts[index]
            self.words[index] = merge_pair(before, pair, token)
            self.add_word(index)
            changed.update(pairwise(before), pairwise(self.words[index]))
        for one in changed:
            heapq.heappush(self.heap, (-self.counts[one], one))
