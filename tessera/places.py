"""Where the samples of a command go: over nothing that is there, and mixed with nothing."""

from __future__ import annotations

from pathlib import Path

from tessera.folder import Refused

EARLIER = "earlier"


def for_samples(place: Path) -> Path:
    """A place that samples may be written to: a new folder, an empty one, or one that holds earlier samples."""
    if place.exists() and (not place.is_dir() or (lying_in(place) and not (place / "settings.json").exists())):
        raise Refused(f"{place} holds other things than samples. Give another --out; nothing was changed.")
    return place


def set_aside(place: Path) -> Path | None:
    """Earlier samples move into a folder of their own: two sets in one would be neither."""
    earlier = lying_in(place)
    if not earlier:
        return None
    aside = next_free(place, EARLIER)
    aside.mkdir()
    for path in earlier:
        path.rename(aside / path.name)
    return aside


def lying_in(place: Path) -> list[Path]:
    """What has not been set aside."""
    return [path for path in place.iterdir() if not path.name.startswith(f"{EARLIER}-")]


def next_free(folder: Path, name: str) -> Path:
    number = 1
    while (folder / f"{name}-{number:03d}").exists():
        number += 1
    return folder / f"{name}-{number:03d}"
