"""Characters as labels: those of the transcripts that a model is trained on.

Upper and lower case are equivalent, punctuation is a space, and a character that is not in the
vocabulary is replaced by that without its accents, if it is in the vocabulary.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

import torch
from torch import Tensor, nn

APOSTROPHES = "'’ʼ"
SPACE = " "


class CharacterVocab(nn.Module):
    """Up to `size` characters, stored as a buffer of code points; label 0 is reserved."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size
        self.register_buffer("code_points", torch.zeros(size, dtype=torch.long))
        self.code_points: Tensor
        self._read: tuple[tuple[int, int], str] = ((-1, -1), "")

    @property
    def characters(self) -> str:
        """The characters; the buffer, which may be on another device, is read when it changed."""
        version = (self.code_points.data_ptr(), self.code_points._version)
        if self._read[0] != version:
            points = self.code_points.tolist()
            self._read = version, "".join(chr(point) for point in points if point > 0)
        return self._read[1]

    @property
    def num_labels(self) -> int:
        """The number of labels with the reserved one."""
        return self.size + 1

    def train_from(self, texts: Iterable[str]) -> None:
        """Use the characters of these texts; the same texts always give the same vocabulary."""
        characters = sorted(set().union(*map(normalize_text, texts)))
        if not set(characters) - {SPACE}:
            raise ValueError(
                "No example has a transcript, but this recipe is trained on what is said: put "
                "name.txt beside each recording, or a metadata.jsonl."
            )
        if len(characters) > self.size:
            raise ValueError(
                f"The transcripts have {len(characters)} different characters, more than the "
                f"{self.size} of the model: set --task.model.max-characters {len(characters)}."
            )
        self.code_points.zero_()
        self.code_points[: len(characters)] = torch.tensor(
            [ord(character) for character in characters]
        )

    def encode(self, text: str) -> list[int]:
        """Return the labels of a text; characters that are not in the vocabulary are left out."""
        labels = {character: label for label, character in enumerate(self.characters, start=1)}
        chosen = (self.closest(character, labels) for character in normalize_text(text))
        known = "".join(character for character in chosen if character is not None)
        return [labels[character] for character in collapse_spaces(known)]

    def decode(self, labels: Iterable[int]) -> str:
        characters = self.characters
        return "".join(characters[label - 1] for label in labels if 0 < label <= len(characters))

    def find_unknown(self, text: str) -> list[str]:
        """Return the characters of a text that are not in the vocabulary, each once."""
        known = set(self.characters)
        missing = (one for one in normalize_text(text) if self.closest(one, known) is None)
        return list(dict.fromkeys(one for one in missing if one != SPACE))

    @staticmethod
    def closest(character: str, known: Iterable[str]) -> str | None:
        """Return the character itself, or without its accents, or None if it is unknown."""
        if character in known:
            return character
        base = unicodedata.normalize("NFD", character)[0]
        return base if base in known else None


def normalize_text(text: str) -> str:
    """Return characters, digits and apostrophes in lower case, with single spaces between words."""
    plain = unicodedata.normalize("NFKC", text).casefold()
    plain = "".join("'" if one in APOSTROPHES else one for one in plain)
    kept = (one if unicodedata.category(one)[0] in "LMN" or one == "'" else SPACE for one in plain)
    return collapse_spaces("".join(kept))


def collapse_spaces(text: str) -> str:
    return SPACE.join(text.split())
