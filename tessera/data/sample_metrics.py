"""What a judge of samples is shown, and what it says: the contract between a medium's judge and
whoever asks it (`evaluate`).

A source's configuration gives its judge (`judge()`), or None where nobody can tell. A judge says
numbers by their names; what they are, the medium's page in docs/ tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:  # data can be listed and looked at without torch
    from torch import Tensor


@dataclass(frozen=True)
class Samples:
    """Samples, in one order."""

    media: Sequence[Any]
    prompts: Sequence[str]
    """"" where nothing was asked for"""
    codes: Sequence[Tensor]
    """the symbols that each was read from, as its tokenizer's grid; -1 where it does not fill the
    grid"""


@dataclass(frozen=True)
class SampleMetrics:
    numbers: dict[str, float]
    of: int
    """how many samples could be judged"""


class SampleMetric(Protocol):
    by_prompt: bool
    """whether it holds samples against their prompts, and has nothing to say of a model that takes
    none"""

    def __call__(self, shown: Samples) -> SampleMetrics: ...
