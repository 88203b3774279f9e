"""Limits of what a single file may take, checked from its header before anything is decoded.

A file of a few kilobytes can declare billions of pixels, samples or vertices. All readers use these
functions, so one limit holds for every format: the bytes of the decoded content in memory. It
belongs to the machine and not to the run, so it is a variable of the environment and no setting of
the data. No torch is imported.
"""

from __future__ import annotations

import os

from tessera.data.errors import UnreadableFile
from tessera.data.files import AnyFile, file_signature, open_file
from tessera.run.errors import UserError

VARIABLE = "TESSERA_MAX_DECODED_MB"
"""The variable of the environment that sets the limit, in megabytes."""
DEFAULT_MB = 400
"""An image of 100 million pixels, for example; photographs of 16 bits have up to 150 MB."""
PIXEL_BYTES, SAMPLE_BYTES = 4, 4
MAX_TURNS = 10
"""Content that is decoded piece by piece may be this many times larger, which bounds the time:
1,000 million pixels of an animation take 5 to 15 seconds."""


def max_decoded_bytes() -> int:
    text = os.environ.get(VARIABLE, "") or str(DEFAULT_MB)
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**9:
        raise UserError(f"{VARIABLE} must be a number of megabytes, got {text!r}.")
    return int(text) * 10**6


def check_decoded_size(content: str, num_bytes: float, turns: int = 1) -> None:
    """Raise UnreadableFile if content is too large; `content` is "100 x 100 pixels", for example.

    `turns` is MAX_TURNS for content of which only a part is in memory at a time.
    """
    limit = turns * max_decoded_bytes()
    if not num_bytes <= limit:
        raise UnreadableFile(
            f"its header declares {content}, which are {num_bytes / 1e6:,.0f} MB decoded, and the "
            f"limit is {limit / 1e6:,.0f} MB: reduce it, or set {VARIABLE} higher"
        )


def read_file(file: AnyFile) -> bytes:
    """Read a whole file, unless it is larger than decoded content may be."""
    size, limit = file_signature(file).bytes, max_decoded_bytes()
    if size > limit:
        raise UnreadableFile(
            f"it has {size / 1e6:,.0f} MB, and at most {limit / 1e6:,.0f} MB are read: reduce it, "
            f"or set {VARIABLE} higher"
        )
    with open_file(file) as content:
        return content.read()
