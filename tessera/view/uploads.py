"""Uploaded files: bounded in bytes while they arrive, and in size by their header before they are
decoded.

An upload is stored under the hash of its content, so that its name is never used as a path and a
file that is sent twice is stored once.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

from tessera import modalities
from tessera.data.errors import UnreadableFile
from tessera.run.errors import UserError

MAX_BYTES = 100_000_000
MAX_SIZES = {"pixels": 50_000_000, "seconds": 600, "faces": 200_000}
"""What is accepted of a file; the readers of training data accept more."""


async def receive(chunks: AsyncIterator[bytes], folder: Path, suffix: str) -> Path:
    """Write an upload to a folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    digest, size = hashlib.sha256(), 0
    temporary = folder / f".{os.urandom(8).hex()}.writing"
    try:
        with open(temporary, "wb") as file:
            async for chunk in chunks:
                size += len(chunk)
                if size > MAX_BYTES:
                    raise UserError(
                        f"The file has more than {MAX_BYTES / 1e6:,.0f} MB, the limit of uploads."
                    )
                digest.update(chunk)
                file.write(chunk)
        if not size:
            raise UserError("The file is empty.")
        target = folder / f"{digest.hexdigest()[:16]}{suffix}"
        os.replace(temporary, target)
        return target
    finally:
        temporary.unlink(missing_ok=True)


def check_suffix(name: str, allowed: tuple[str, ...]) -> str:
    """Return the suffix of a file name if it is among those that the field accepts."""
    suffix = Path(name).suffix.lower()
    if suffix not in allowed:
        raise UserError(
            f"{Path(name).name} cannot be used here: expected a file ending in "
            f"{', '.join(allowed)}."
        )
    return suffix


def check_size(path: str, modality: str) -> None:
    """Raise UserError if the header of a file declares more than is accepted."""
    reference = modalities.MODALITIES[modality].measure
    assert reference is not None, modality
    try:
        sizes: dict[str, float] = modalities.resolve(reference)(path)
    except UnreadableFile as error:
        raise UserError(f"The file cannot be read: {error}.") from None
    for unit, size in sizes.items():
        if not size <= MAX_SIZES[unit]:
            raise UserError(
                f"The file has {size:,.0f} {unit}, and at most {MAX_SIZES[unit]:,} are accepted "
                "here."
            )
