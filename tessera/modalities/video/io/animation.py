"""A GIF, WebP or PNG of several frames, as Pillow decodes it; a still picture of any kind is one
frame."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import PIL.Image

from tessera.data.errors import UnreadableFile
from tessera.modalities.image.media import FORMATS, decode, flatten
from tessera.modalities.video.io.base import CLOCK_HZ, THUMBNAIL, Facts, Frame, Frames, reduced


@dataclass(frozen=True)
class Animation:
    path: str

    def facts(self) -> Facts:
        with damage_told():
            picture = self.open()
            animated = moves(picture)
            width, height = picture.size if animated else decode(Path(self.path).read_bytes()).size
        count, seconds = 0, 0.0
        with suppress(UnreadableFile):  # the frames before a break are there
            for frame in self.frames(0.0, THUMBNAIL):
                count, seconds = count + 1, frame.ends
        if not count:
            raise UnreadableFile("it is damaged or cut short before its first frame ends")
        return Facts(
            seconds,
            seconds,
            count / seconds,
            width,
            height,
            str(picture.format) if animated else "still",
        )

    def frames(self, since: float, shortest: int | None) -> Frames:
        """Each frame builds on the one before, so all are decoded; but only those asked for are
        kept."""
        with damage_told():
            picture = self.open()
        if not moves(picture):
            still = flatten(decode(Path(self.path).read_bytes(), shortest))
            yield Frame(0.0, 1 / CLOCK_HZ, lambda: reduced(still, shortest))
            return
        ends = 0.0
        for number in range(picture.n_frames):
            with damage_told():
                picture.seek(number)
                picture.load()
                begins, ends = ends, ends + pause(picture)
                shown = reduced(flatten(picture), shortest) if ends > since else None
            if shown is not None:
                yield Frame(begins, ends, partial(np.asarray, shown))

    def open(self) -> PIL.Image.Image:
        data = Path(self.path).read_bytes()
        try:
            return PIL.Image.open(BytesIO(data), formats=FORMATS)
        except PIL.UnidentifiedImageError:
            return decode(data)  # which says what it is instead


def moves(picture: PIL.Image.Image) -> bool:
    """The pages of a TIFF and the two views of a stereo JPEG are no animation."""
    return picture.format in ("GIF", "WEBP", "PNG") and getattr(picture, "n_frames", 1) > 1


def pause(picture: PIL.Image.Image) -> float:
    """How long a frame is shown, in seconds. Up to 10 ms means that nobody thought of it: 100 ms,
    as in browsers."""
    milliseconds = float(picture.info.get("duration", 0))
    return milliseconds / 1000 if milliseconds > 10 else 0.1


@contextmanager
def damage_told() -> Iterator[None]:
    try:
        yield
    except UnreadableFile:
        raise
    except (
        Exception
    ) as error:  # decoders meet damaged bytes with nearly every kind of exception there is
        if (
            isinstance(error, OSError) and error.errno is not None
        ):  # about the file, and not about its bytes
            raise
        raise UnreadableFile(
            f"it is damaged or cut short ({error or type(error).__name__})"
        ) from error
