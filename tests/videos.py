"""Videos whose frames can be identified, and video files written without tessera."""

from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
import PIL.Image

from tessera.modalities.video.media import Video


def grey_frames(count: int, height: int = 16, width: int = 32) -> np.ndarray:
    """Return frames of which number k has the grey level 8 k."""
    frames = (
        np.arange(count, dtype=np.uint8).repeat(height * width * 3).reshape(count, height, width, 3)
    )
    return frames * 8


def frame_numbers(video: Video) -> list[int]:
    """Return which of the `grey_frames` each frame is."""
    return np.rint(video.frames.mean(axis=(1, 2, 3)) / 8).astype(int).tolist()


def write_video(
    path,
    frames,
    codec="libx264",
    pix_fmt="yuv420p",
    rate=10,
    starts_ms=None,
    key_frame_interval=12,
    **options,
):
    """Write a video with PyAV; `starts_ms` are the start times of the frames."""
    muxer = {"fflags": "+bitexact"} | (
        {"movflags": "faststart"} if path.suffix in (".mp4", ".mov") else {}
    )
    with av.open(str(path), "w", options=muxer) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pix_fmt
        stream.codec_context.gop_size = key_frame_interval
        if starts_ms is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        for number, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(
                pixels, format="rgba" if pixels.shape[2] == 4 else "rgb24"
            )
            frame.pts = number if starts_ms is None else starts_ms[number]
            frame.time_base = Fraction(1, rate) if starts_ms is None else Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def write_animation(path, frames, durations_ms, **options):
    """Write an animation with Pillow."""
    first, *others = [PIL.Image.fromarray(pixels) for pixels in frames]
    first.save(path, save_all=True, append_images=others, duration=durations_ms, **options)
    return path


def truncate(path, fraction: float):
    """Keep only the first part of a file."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    return path
