"""Read animated GIF, WebP and PNG files with Pillow; still images are read as one frame."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import PIL.Image

from tessera.data.budget import read_file
from tessera.data.errors import UnreadableFile, is_defect
from tessera.data.files import AnyFile
from tessera.modalities.image.media import (
    check_image_size,
    decode,
    no_size_warnings,
    open_header,
    to_rgb,
)
from tessera.modalities.video.io.base import (
    DEFAULT_RATE_HZ,
    THUMBNAIL,
    Frame,
    Frames,
    VideoInfo,
    downscale,
)


@dataclass(frozen=True)
class Animation:
    """A `FrameReader` of an animation or a still image."""

    path: AnyFile

    def read_info(self) -> VideoInfo:
        with wrap_decoder_errors():
            image = self.open()
            animated = is_animated(image)
            width, height = image.size if animated else decode(read_file(self.path)).size
        count, seconds = 0, 0.0
        with suppress(UnreadableFile):  # the frames before an error are usable
            for frame in self.frames(0.0, THUMBNAIL):
                count, seconds = count + 1, frame.end
        if not count:
            raise UnreadableFile("the data is damaged or truncated in its first frame")
        return VideoInfo(
            seconds,
            seconds,
            count / seconds,
            width,
            height,
            str(image.format) if animated else "still",
        )

    def frames(self, since: float, min_side: int | None) -> Frames:
        """Yield the frames; earlier ones are decoded too, since each frame builds on the last."""
        with wrap_decoder_errors():
            image = self.open()
        if not is_animated(image):
            still = to_rgb(decode(read_file(self.path), min_side))
            yield Frame(0.0, 1 / DEFAULT_RATE_HZ, lambda: downscale(still, min_side))
            return
        end = 0.0
        count = getattr(image, "n_frames", 1)
        for number in range(count):
            with wrap_decoder_errors():
                with no_size_warnings():
                    image.seek(number)
                check_image_size(image, count)  # each frame of a GIF can enlarge it
                image.load()
                start, end = end, end + frame_duration(image)
                pixels = downscale(to_rgb(image), min_side) if end > since else None
            if pixels is not None:
                yield Frame(start, end, partial(np.asarray, pixels))

    def open(self) -> PIL.Image.Image:
        """Open the file without decoding its frames."""
        data = read_file(self.path)
        try:
            image = open_header(data)
        except (PIL.UnidentifiedImageError, PIL.Image.DecompressionBombError):
            return decode(data)  # raises UnreadableFile with the reason
        if is_animated(image):
            check_image_size(image, getattr(image, "n_frames", 1))
        return image


def is_animated(image: PIL.Image.Image) -> bool:
    """Return whether an image is an animation; pages of a TIFF or a stereo JPEG are not frames."""
    return image.format in ("GIF", "WEBP", "PNG") and getattr(image, "n_frames", 1) > 1


def frame_duration(image: PIL.Image.Image) -> float:
    """Return how long the current frame is displayed, in seconds.

    Durations of up to 10 ms count as unspecified and become 100 ms, as in browsers.
    """
    milliseconds = float(image.info.get("duration", 0))
    return milliseconds / 1000 if milliseconds > 10 else 0.1


@contextmanager
def wrap_decoder_errors() -> Iterator[None]:
    """Convert exceptions of decoders to UnreadableFile, except those of the file system."""
    try:
        yield
    except UnreadableFile:
        raise
    except Exception as error:  # decoders raise almost any exception type for damaged data
        if is_defect(error) or (isinstance(error, OSError) and error.errno is not None):
            raise  # a mistake here, or an error of the file system
        raise UnreadableFile(
            f"the data is damaged or truncated ({error or type(error).__name__})"
        ) from error
