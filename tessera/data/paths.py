"""Choose the suffix of a file that is written."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]{1,4}\Z")


def resolve_suffix(path: str | Path, default: str, allowed: Sequence[str]) -> Path:
    """Return `path` with a suffix in `allowed`, appending `default` where it has none.

    A suffix is a dot and two to five characters, the first of which is alphabetic. All other
    endings belong to the name, so "guidance-1.5" becomes "guidance-1.5.png". Suffixes are compared
    in lower case and kept as given.

    Raises:
        ValueError: If the path has a suffix that is not in `allowed`.
    """
    path = Path(path)
    found = SUFFIX.search(path.name)
    if found is None or found.start() == 0:  # ".cache" is a name without a suffix
        return path.with_name(path.name + default)
    if found.group().lower() not in allowed:
        raise ValueError(
            f"{path} ends in {found.group()}, but the formats that can be written are "
            f"{', '.join(allowed)}: use one of these, or no suffix for {default}"
        )
    return path
