"""Clips: films, animations and folders of frames in, (T, H, W, 3) bytes in the middle, MP4 and GIF out. T counts frames.

Models see a clip as float32 of shape (3, T, H, W) in [-1, 1]; what the values mean, `media/image.py` knows. There are
three kinds of things to read, and each gives frames with the times at which they begin and end, from 0 on:

- a *film* has a codec: MP4, MOV, WebM, MKV, AVI. PyAV decodes it (the extra tessera[video]);
- an *animation* is a GIF, WebP or PNG of several frames, decoded by Pillow; a still picture is one frame;
- a *folder* holds a picture per frame, in the order of the numbers in their names. Whoever calls this with a folder
  asks for it to be one clip; nothing here takes a folder of pictures for a clip by itself.

Frame k of a clip is what is on the screen at its time, so variable frame rates need no case. What is transparent is
laid on white, the way a camera was held is undone, and pixels are taken to be square.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import PIL.Image

from tessera.media import image
from tessera.media.errors import Unreadable
from tessera.media.image import FORMATS, Image, decode, flatten

if TYPE_CHECKING:
    from types import ModuleType

FILMS = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")
ANIMATIONS = (".gif", ".webp", ".apng")
ENDINGS = FILMS + ANIMATIONS
PICTURES = tuple(ending for ending in image.ENDINGS if ending not in ANIMATIONS)

# Only these may be opened, whatever a file is called: FFmpeg also knows playlists, which lead it to other files.
CONTAINERS = {"format_whitelist": "mov,mp4,matroska,webm,avi,gif", "protocol_whitelist": "file"}
ENCODERS = ("libx264", "libopenh264", "mpeg4")
SEES_THROUGH = {"vp8": "libvpx", "vp9": "libvpx-vp9"}  # FFmpeg's own decoders of these leave transparency out

NO_FRAME = "it holds no frame: it ends before the first"
CLOCK_HZ = 24.0
"""The rate of what has no clock of its own: a folder of frames, a still picture."""
MOST_PIXELS = 100_000_000  # 8K has 33 million in a frame
KEY_FRAME_EVERY = 24  # what is written can be read from any place without decoding much before it
GIF_HZ = 50  # browsers slow faster GIFs down to a crawl
THUMBNAIL = 64  # the short side of frames that are only looked at to see whether they can be


@dataclass(eq=False)
class Video:
    frames: np.ndarray
    """(T, H, W, 3) uint8"""
    rate_hz: float

    def __post_init__(self) -> None:
        if self.frames.dtype != np.uint8 or self.frames.ndim != 4 or self.frames.shape[3] != 3 or not len(self.frames):
            raise ValueError(
                f"a Video holds (frames, height, width, 3) bytes, but was given {self.frames.shape} of "
                f"{self.frames.dtype}; for (3, frames, height, width) floats in [-1, 1] use Video.from_floats"
            )
        if not 0 < self.rate_hz < math.inf:
            raise ValueError(f"a Video shows some frames a second, but its rate is {self.rate_hz}")

    @classmethod
    def load(cls, path: str | Path) -> Video:
        """All of a file that can be read, at its average rate. Raises Unreadable with the file and the reason."""
        facts = probe(path)
        return read_clip(path, 0.0, facts.frames, facts.rate_hz)

    def save(self, stem: str | Path) -> Path:
        """An MP4, and beside it a GIF, which shows everywhere; gives back the MP4."""
        path = Path(f"{stem}.mp4")  # not with_suffix, which would eat the end of "epoch-0.5"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_mp4(self, path)
        write_gif(self, Path(f"{stem}.gif"))
        return path

    @classmethod
    def sheet(cls, items: Sequence[Video], columns: int | None = None) -> Video:
        """A contact sheet that moves, as long as the longest of its clips; the others stay on their last frame."""
        if not items:
            raise ValueError("a sheet of no clips was asked for: give at least one")
        return cls.together(items, lambda pictures: Image.sheet(pictures, columns))

    @classmethod
    def beside(cls, left: Video, right: Video) -> Video:
        """Two clips with a thin gap between them: an original and its reconstruction."""
        return cls.together([left, right], lambda pictures: Image.beside(*pictures))

    @classmethod
    def together(cls, items: Sequence[Video], lay_out: Callable[[list[Image]], Image]) -> Video:
        """Several clips at the same time, each at its own speed."""
        rate = max(item.rate_hz for item in items)
        count = max(round(len(item.frames) * rate / item.rate_hz) for item in items)
        pages = [lay_out([item.at(moment / rate) for item in items]) for moment in range(count)]
        return cls(np.stack([page.pixels for page in pages]), rate)

    def at(self, seconds: float) -> Image:
        """What is on the screen; after the end, the last frame."""
        number = int(seconds * self.rate_hz + 0.01)  # 0.01 of a frame, for rounding
        return Image(self.frames[min(number, len(self.frames) - 1)])

    def floats(self) -> np.ndarray:
        """(3, T, H, W) float32 in [-1, 1]: what models see."""
        count, height, width, _ = self.frames.shape
        column = Image(self.frames.reshape(count * height, width, 3))  # the frames below each other are one tall picture
        return column.floats().reshape(3, count, height, width)

    @classmethod
    def from_floats(cls, array: np.ndarray, rate_hz: float) -> Video:
        """The nearest bytes, as Image.from_floats finds them."""
        array = np.asarray(array)
        if array.ndim != 4 or array.shape[0] != 3:
            raise ValueError(f"a clip of floats has the shape (3, frames, height, width), but this one is {array.shape}")
        _, count, height, width = array.shape
        column = Image.from_floats(array.reshape(3, count * height, width))
        return cls(column.pixels.reshape(count, height, width, 3), rate_hz)


# ---- what a file says of itself, and what it holds


@dataclass(frozen=True)
class Facts:
    """What a file says of itself, upright."""

    seconds: float
    """as far as there is data"""
    claimed_seconds: float
    """as long as it is meant to be; more than that for a file that was cut short"""
    rate_hz: float
    """frames a second, on average"""
    width: int
    height: int
    codec: str
    """h264, vp9, ...; GIF, WEBP, PNG for animations; "frames" for a folder; "still" for a picture"""

    @property
    def frames(self) -> int:
        """at that rate"""
        return max(1, round(self.seconds * self.rate_hz))

    @property
    def still(self) -> bool:
        return self.codec == "still"


@dataclass(frozen=True)
class Examined:
    """What a file turned out to hold."""

    frames: int
    seconds: float
    """where the last frame that can be read ends"""
    broke: str
    """where the file breaks, and why; "" for one that can be read to its end"""


def probe(path: str | Path) -> Facts:
    """Rate, size and length, without decoding a film but for its first frame. Remembered as long as the file is the same."""
    with named(path):
        return _probe(state_of(path))


def examine(path: str | Path) -> Examined:
    """The whole file, frame by frame, holding one at a time. Remembered as long as the file is the same."""
    with named(path):
        return _examine(state_of(path))


def read_clip(path: str | Path, start_seconds: float, count: int, rate_hz: float, shortest: int | None = None) -> Video:
    """The frames on the screen at start, start + 1/rate, ...: `count` of them, or fewer where the file ends or breaks.

    A film is decoded from the last key frame before the start to the end of the clip, and no further. With `shortest`,
    frames much larger than that are reduced one by one; their short side stays at least `shortest`.
    """
    late = min(0.25 / rate_hz, 0.01)  # that a frame may be: time stamps are rounded, to 1 ms in WebM and 10 ms in GIF
    moments = [start_seconds + number / rate_hz + late for number in range(count)]
    with named(path):
        taken = on_screen(reader_of(str(path)).frames(moments[0], shortest), moments)
        if not taken:
            _probe(state_of(path))  # has a better reason if it is the whole file
            raise Unreadable(f"there is no frame to be read at {start_seconds:.2f} s")
        if len({pixels.shape for pixels in taken}) > 1:
            sizes = " and ".join(sorted({f"{pixels.shape[1]} x {pixels.shape[0]}" for pixels in taken}))
            raise Unreadable(f"its frames have different sizes ({sizes}): a clip needs frames of one size")
    return Video(np.stack(taken), rate_hz)


def on_screen(frames: Frames, moments: list[float]) -> list[np.ndarray]:
    """The frame at each moment, until the frames end or break; what nobody asked for is not even converted."""
    taken: list[np.ndarray] = []
    with suppress(Unreadable), closing(frames):
        for frame, until in lasting(until_it_breaks(frames)):
            if due := sum(moment < until for moment in moments[len(taken) :]):
                taken += [frame.pixels()] * due
            if len(taken) == len(moments):
                break
    return taken


def until_it_breaks(frames: Iterator[Frame]) -> Iterator[Frame]:
    with suppress(Unreadable):
        yield from frames


def lasting(frames: Iterator[Frame]) -> Iterator[tuple[Frame, float]]:
    """Each frame and until when it is shown: until the next one, and the last until its own end."""
    shown: Frame | None = None
    for frame in frames:
        if shown is not None:
            yield shown, frame.begins
        shown = frame
    if shown is not None:
        yield shown, shown.ends


@contextmanager
def named(path: str | Path) -> Iterator[None]:
    try:
        yield
    except Unreadable as error:
        raise Unreadable(f"{path}: {error}") from error
    except OSError as error:
        raise Unreadable(f"{path}: the file cannot be opened ({error.strerror or error})") from error


@dataclass(frozen=True)
class State:
    """What stays as it is while a file does, or a folder and its frames."""

    path: str
    bytes: int
    changed_ns: int


def state_of(path: str | Path) -> State:
    whole = Path(path)
    stats = [file.stat() for file in (whole, *(whole.iterdir() if whole.is_dir() else ()))]
    return State(str(path), sum(status.st_size for status in stats), max(status.st_mtime_ns for status in stats))


@lru_cache(maxsize=1 << 16)
def _probe(state: State) -> Facts:
    if state.bytes == 0:
        raise Unreadable("the file is empty (0 bytes)")
    return reader_of(state.path).facts()


@lru_cache(maxsize=1 << 16)
def _examine(state: State) -> Examined:
    facts = _probe(state)
    count, seconds, reason = 0, 0.0, ""
    try:
        for frame in reader_of(state.path).frames(0.0, THUMBNAIL):
            frame.pixels()
            count, seconds = count + 1, frame.ends
    except Unreadable as error:
        reason = str(error)
    if not reason and seconds < facts.claimed_seconds - max(0.25, 1.5 / facts.rate_hz):
        reason = "the data ends there"
    of = f" of {facts.claimed_seconds:.2f} s" if seconds < facts.claimed_seconds - 0.01 else ""
    return Examined(count, seconds, f"it breaks at {seconds:.2f} s{of} ({reason})" if reason else "")


# ---- the three kinds of readers


@dataclass(frozen=True)
class Frame:
    begins: float
    ends: float
    """seconds"""
    pixels: Callable[[], np.ndarray]
    """(H, W, 3) uint8, converted when asked for"""


Frames = Generator[Frame, None, None]


class Reader(Protocol):
    def facts(self) -> Facts: ...

    def frames(self, since: float, shortest: int | None) -> Frames:
        """In order, from the one that is on the screen at `since`, or some before it. Raises Unreadable where it breaks."""


def reader_of(path: str) -> Reader:
    if Path(path).is_dir():
        return Folder(path)
    return Animation(path) if path.lower().endswith((*ANIMATIONS, *PICTURES)) else Film(path)


def reduction(width: int, height: int, shortest: int | None) -> int:
    """By which whole number a frame may be divided."""
    return max(1, min(width, height) // shortest) if shortest else 1


def reduced(picture: PIL.Image.Image, shortest: int | None) -> np.ndarray:
    return np.asarray(picture.reduce(reduction(*picture.size, shortest)))


@dataclass(frozen=True)
class Folder:
    path: str

    def facts(self) -> Facts:
        files = self.files()
        width, height = self.picture(files[0]).size
        seconds = len(files) / CLOCK_HZ
        return Facts(seconds, seconds, CLOCK_HZ, width, height, "frames")

    def frames(self, since: float, shortest: int | None) -> Frames:
        for number, file in enumerate(self.files()):
            if (number + 1) / CLOCK_HZ > since:
                yield Frame(number / CLOCK_HZ, (number + 1) / CLOCK_HZ, partial(self.pixels, file, shortest))

    def files(self) -> list[Path]:
        found = [file for file in Path(self.path).iterdir() if file.name.lower().endswith(image.ENDINGS)]
        files = [file for file in found if not file.name.startswith(".")]
        if not files:
            raise Unreadable(f"the folder holds no frames (files ending in {', '.join(image.ENDINGS)})")
        return sorted(files, key=lambda file: by_number(file.name))

    def pixels(self, file: Path, shortest: int | None) -> np.ndarray:
        return reduced(self.picture(file), shortest)

    def picture(self, file: Path) -> PIL.Image.Image:
        try:
            return flatten(decode(file.read_bytes()))
        except Unreadable as error:
            raise Unreadable(f"the frame {file.name}: {error}") from error


def by_number(name: str) -> list[tuple[int, str]]:
    """A name's place among others: "frame 9" stands before "frame 10"."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name.lower())]


@dataclass(frozen=True)
class Animation:
    path: str

    def facts(self) -> Facts:
        with damage_told():
            picture = self.open()
            animated = moves(picture)
            width, height = picture.size if animated else decode(Path(self.path).read_bytes()).size
        count, seconds = 0, 0.0
        with suppress(Unreadable):  # the frames before a break are there
            for frame in self.frames(0.0, THUMBNAIL):
                count, seconds = count + 1, frame.ends
        if not count:
            raise Unreadable("it is damaged or cut short before its first frame ends")
        return Facts(seconds, seconds, count / seconds, width, height, str(picture.format) if animated else "still")

    def frames(self, since: float, shortest: int | None) -> Frames:
        """Each frame builds on the one before, so all are decoded; but only those asked for are kept."""
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
    """How long a frame is shown, in seconds. Up to 10 ms means that nobody thought of it: 100 ms, as in browsers."""
    milliseconds = float(picture.info.get("duration", 0))
    return milliseconds / 1000 if milliseconds > 10 else 0.1


@contextmanager
def damage_told() -> Iterator[None]:
    try:
        yield
    except Unreadable:
        raise
    except Exception as error:  # decoders meet damaged bytes with nearly every kind of exception there is
        if isinstance(error, OSError) and error.errno is not None:  # about the file, and not about its bytes
            raise
        raise Unreadable(f"it is damaged or cut short ({error or type(error).__name__})") from error


@dataclass(frozen=True)
class Film:
    path: str

    def facts(self) -> Facts:
        with opened(self.path) as reel:
            first = next(reel.frames(None), None)
            if first is None:
                raise Unreadable(NO_FRAME)
            height, width, _ = first.pixels().shape
            seconds, claimed = reel.lengths()
            return Facts(seconds, claimed, reel.rate_hz, width, height, reel.stream.codec_context.name)

    def frames(self, since: float, shortest: int | None) -> Frames:
        with opened(self.path) as reel:
            if since > 0:
                reel.wind(since)
            frames = reel.frames(shortest)
            first = next(frames, None)
            if first is not None and first.begins > since > 0:  # a damaged index leads too far
                reel.wind(0.0)
                frames = reel.frames(shortest)
            elif first is not None:
                yield first
            yield from frames


@dataclass(frozen=True)
class Reel:
    """An open film: PyAV's container, and the one stream of it that moves."""

    container: Any
    stream: Any
    decode: Callable[[Any], list[Any]]
    """a packet's frames"""

    @property
    def rate_hz(self) -> float:
        return float(self.stream.average_rate or self.stream.guessed_rate or CLOCK_HZ)

    @property
    def first(self) -> int:
        """the time stamp of the beginning"""
        return self.stream.start_time or 0

    @property
    def time_of_first(self) -> float:
        return float(self.first * self.stream.time_base)

    def time(self, stamp: int) -> float:
        return float((stamp - self.first) * self.stream.time_base)

    def wind(self, seconds: float) -> None:
        """To the last key frame before."""
        self.container.seek(self.first + int(seconds / self.stream.time_base), stream=self.stream, backward=True)

    def frames(self, shortest: int | None) -> Iterator[Frame]:
        """From where the film is wound to. A frame without a time stamp follows on the one before."""
        counted = self.container.format.name == "avi"  # has no time stamps; those that FFmpeg guesses jump to and fro
        ends: float | None = None
        for packet in self.container.demux(self.stream):
            if ends is None:
                ends = self.time(packet.dts if packet.dts is not None else self.first)
            for picture in self.decode(packet):
                begins = ends if counted or picture.pts is None else self.time(picture.pts)
                ends = begins + (float((picture.duration or 0) * self.stream.time_base) or 1 / self.rate_hz)
                yield Frame(begins, ends, partial(converted, picture, shortest))

    def lengths(self) -> tuple[float, float]:
        """Where the last frame ends, and where it is said to end.

        The last packets are asked and not the header: it may speak of the sound, which often lasts longer, or of data
        that is no longer there.
        """
        said = float((self.stream.duration or 0) * self.stream.time_base)
        whole = (self.container.duration or 0) / 1e6
        ends = self.last_ends(said or whole) or self.last_ends(0.0)
        own = ends.get(self.stream.index, 1 / self.rate_hz)
        cut_short = max(ends.values(), default=0.0) < whole - 0.5
        return own, max(own, said, whole if cut_short else 0.0)

    def last_ends(self, since: float) -> dict[int, float]:
        """Where each stream ends, by its number; nothing if there is no picture from there on."""
        ends: dict[int, float] = {}
        with suppress(library().FFmpegError):  # as far as it can be read
            self.wind(since)
            for packet in self.container.demux():
                if packet.pts is not None:
                    end = float((packet.pts + (packet.duration or 0)) * packet.time_base) - self.time_of_first
                    ends[packet.stream_index] = max(end, ends.get(packet.stream_index, 0.0))
        return ends if self.stream.index in ends else {}


@contextmanager
def opened(path: str) -> Iterator[Reel]:
    """A film, wound to its beginning; whatever FFmpeg finds wrong with it, now or later, is Unreadable."""
    av = library()
    reel: Reel | None = None
    try:
        # "file:", so that no name is taken for an address; tags in any encoding are let be
        with av.open(f"file:{path}", options=CONTAINERS, metadata_errors="surrogateescape") as container:
            stream = moving_stream(container)
            reel = Reel(container, stream, decoder_of(stream))
            yield reel
    except FileNotFoundError as error:
        raise Unreadable("the file cannot be opened (No such file or directory)") from error
    except av.FFmpegError as error:
        reason = error.strerror or str(error)
        if reel is not None:
            raise Unreadable(f"it is damaged or cut short ({reason})") from error
        if isinstance(error, EOFError):
            raise Unreadable(NO_FRAME) from error
        with open(path, "rb") as file:
            begins = file.read(8)
        raise Unreadable(
            f"it is no MP4, MOV, WebM, MKV or AVI, or it is cut short ({reason}; it begins with {begins!r})"
        ) from error


def library() -> ModuleType:
    """PyAV, or how to get it."""
    try:
        import av
    except ImportError as error:
        raise ModuleNotFoundError(
            "Reading and writing video needs PyAV, the Python package av, which is not installed. Install tessera[video]."
        ) from error
    return av


def moving_stream(container: Any) -> Any:
    """The first stream of moving pictures; the cover of a record is none."""
    cover = library().stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not streams:
        sound = "it holds only sound" if container.streams.audio else "it holds neither pictures nor sound"
        raise Unreadable(f"{sound}, and no video")
    stream = streams[0]
    if stream.codec_context is None:
        raise Unreadable("its codec is not one that FFmpeg knows")
    width, height = stream.codec_context.width, stream.codec_context.height
    if width * height > MOST_PIXELS:
        raise Unreadable(f"its frames are {width} x {height}, more pixels than a frame may have: scale it down")
    stream.codec_context.thread_count = 1  # many readers at a time are faster than one with many threads
    return stream


def decoder_of(stream: Any) -> Callable[[Any], list[Any]]:
    av = library()
    name = SEES_THROUGH.get(stream.codec_context.name)
    if name is None or stream.metadata.get("alpha_mode") != "1" or name not in av.codecs_available:
        return lambda packet: packet.decode()
    context = av.CodecContext.create(name, "r")
    return context.decode


def converted(picture: Any, shortest: int | None) -> np.ndarray:
    """PyAV's frame as pixels, upright."""
    divisor = reduction(picture.width, picture.height, shortest)
    if any(component.is_alpha for component in picture.format.components):
        pixels = reduced(flatten(PIL.Image.fromarray(picture.to_ndarray(format="rgba"))), shortest)
    else:
        size = {"width": picture.width // divisor, "height": picture.height // divisor}
        pixels = picture.to_ndarray(format="rgb24", interpolation="AREA", **size)
    return np.ascontiguousarray(np.rot90(pixels, round(picture.rotation / 90)))


# ---- writing


def write_mp4(video: Video, path: Path) -> None:
    """H.264 where PyAV's build has it. Its colours stand for 2 x 2 pixels, so odd sides gain a copy of their last row."""
    av = library()
    _, height, width, _ = video.frames.shape
    even = np.pad(video.frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    rate = Fraction(video.rate_hz).limit_denominator(1001)
    encoder = next(name for name in ENCODERS if name in av.codecs_available)
    with av.open(f"file:{path}", "w", format="mp4", options={"movflags": "faststart"}) as container:
        stream = container.add_stream(encoder, rate=rate, options={"crf": "18"} if encoder == "libx264" else {})
        stream.height, stream.width = even.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.gop_size = KEY_FRAME_EVERY
        for number, pixels in enumerate(even):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def write_gif(video: Video, path: Path) -> None:
    """Endlessly. A GIF counts hundredths of a second, so pauses differ by one where the rate does not divide 100."""
    step = math.ceil(video.rate_hz / GIF_HZ)
    pictures = [PIL.Image.fromarray(pixels) for pixels in video.frames[::step]]
    ends = np.rint(np.arange(len(pictures) + 1) * step * 100 / video.rate_hz).astype(int)
    pauses = (np.diff(ends) * 10).tolist()
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=pauses, loop=0)
