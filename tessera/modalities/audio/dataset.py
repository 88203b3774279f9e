"""Audio from a folder, or synthetic: examples of one rate and length with captions or transcripts.

Where a training example starts is drawn from its generator, and only that part of the file is
decoded. Channels are averaged to one, or kept as left and right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from tessera.data.arrays import check_range, is_array, is_float, to_numpy
from tessera.data.dataset import DataConfig, Extent, FileDataset
from tessera.data.errors import UnreadableFile
from tessera.data.files import AnyFile, file_signature
from tessera.modalities.audio.io.base import AudioInfo, import_soundfile, import_soxr
from tessera.modalities.audio.io.files import (
    MIN_SECONDS,
    RATE_RANGE_HZ,
    SUFFIXES,
    measure_level,
    probe,
    scan_audio,
)
from tessera.modalities.audio.io.wav import declared_ratio
from tessera.modalities.audio.media import (
    Audio,
    AudioBatch,
    AudioExample,
    collate,
    loudness_gain,
    normalize_loudness,
    pad_samples,
    read_segment,
)
from tessera.modalities.audio.synthetic import (
    MIN_RATE_HZ,
    MIN_SYNTHETIC_SECONDS,
    SyntheticAudio,
)
from tessera.modalities.audio.synthetic_speech import SyntheticSpeech
from tessera.run.errors import UserError, as_user_error

MAX_SPEED = 4.0
MAX_GAIN_DB = 60.0
RATE_STEP_HZ = 100
"""Playback rates are multiples of this: resampling between rates with a large common divisor
decodes less of a file."""


@dataclass(frozen=True, kw_only=True)
class AudioDataConfig(DataConfig):
    batch_ndim: ClassVar[int | None] = 3
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES
    noun: ClassVar[str] = "audio files"

    path: str | None = None
    """A folder of audio files, with subfolders, one file, tar shards, a table or a list of paths;
    None generates synthetic audio."""
    rate_hz: int = 16_000
    """The sampling rate; files of another rate are resampled."""
    seconds: float = 2.0
    """The length of an example."""
    channels: int = 1
    """Channels of an example: 1 averages those of a file, and 2 is stereo, where a mono file has
    two equal channels and more than two are averaged."""
    samples: int | None = None
    """The exact length of an example in samples; None uses `seconds`."""
    crop: Literal["random", "centre", "start"] = "random"
    """The position of a training example in a longer file."""
    speed: float = 1.0
    """Play training examples at a random speed between 1 / speed and speed, which changes their
    pitch too (speed perturbation); 1 leaves them unchanged."""
    gain_db: float = 0.0
    """Change the level of training examples by a random gain of up to this many decibels up or
    down, without clipping; 0 leaves it unchanged."""
    flip: bool = False
    """Invert the sign of the samples of every other training example, at random."""
    loudness_db: float | None = None
    """Normalise every example to this root mean square, in decibels of full scale (-24, for
    example); None leaves it unchanged."""
    on_short: Literal["pad", "skip"] = "pad"
    """What to do with shorter files: append silence, or skip them."""
    on_long: Literal["crop", "skip"] = "crop"
    """What to do with longer files: use a part, or skip them, since a transcript belongs to a whole
    recording."""
    val_fraction: float = 0.05
    """The fraction held out, chosen by file name; 0 validates on the training examples."""
    split_seed: int = 0
    """The seed of the choice of held-out files."""
    group_by: str = "file"
    """What is held out as a whole: file (each one alone), folder, prefix (of the file name, up to
    the first "-", "_" or "."), or a column of the metadata, such as speaker."""
    balance_by: str = "file"
    """What is drawn equally often in training: file, folder, prefix, or a column of the metadata,
    such as speaker. A group of few files is then seen as often as one of many."""
    num_synthetic: int = 2000
    """The number of synthetic training examples; the held-out ones come on top."""
    synthetic_seed: int = 0
    """The seed of the synthetic audio."""
    synthetic_content: Literal["mixed", "speech"] = "mixed"
    """What synthetic audio is: voices, instruments and drums with captions that describe them, or
    voices with captions that are transcripts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        lowest, highest = RATE_RANGE_HZ
        if not lowest <= self.rate_hz <= highest:
            raise ValueError(
                f"rate_hz must be between {lowest:,} and {highest:,} samples per second, got "
                f"{self.rate_hz}."
            )
        if self.channels not in (1, 2):
            raise ValueError(f"channels must be 1 (mono) or 2 (stereo), got {self.channels}.")
        if not MIN_SECONDS <= self.seconds < math.inf:
            raise ValueError(f"seconds must be at least {MIN_SECONDS:g}, got {self.seconds}.")
        if self.samples is not None and self.samples < 1:
            raise ValueError(f"samples must be at least 1, got {self.samples}.")
        is_short = self.length / self.rate_hz < MIN_SYNTHETIC_SECONDS
        if self.path is None and (self.rate_hz < MIN_RATE_HZ or is_short):
            raise ValueError(
                f"Synthetic audio needs at least {MIN_SYNTHETIC_SECONDS:g} seconds at "
                f"{MIN_RATE_HZ:,} samples per second or more, got {self.length:,} samples at "
                f"{self.rate_hz:,}."
            )
        if not 1 <= self.speed <= MAX_SPEED:
            raise ValueError(
                f"speed must be between 1, which leaves examples unchanged, and {MAX_SPEED:g}, got "
                f"{self.speed:g}."
            )
        if not 0 <= self.gain_db <= MAX_GAIN_DB:
            raise ValueError(
                f"gain_db must be between 0 and {MAX_GAIN_DB:g}, got {self.gain_db:g}."
            )
        if self.loudness_db is not None and not -90 <= self.loudness_db <= 0:
            raise ValueError(
                f"loudness_db must be between -90 and 0, or None, got {self.loudness_db}."
            )

    @property
    def length(self) -> int:
        """The number of samples of an example."""
        return round(self.seconds * self.rate_hz) if self.samples is None else self.samples

    def synthetic_dataset(self) -> SyntheticAudio:
        kind = SyntheticSpeech if self.synthetic_content == "speech" else SyntheticAudio
        return kind(
            self.num_synthetic,
            samples=self.length,
            rate_hz=self.rate_hz,
            loudness_db=self.loudness_db,
            channels=self.channels,
            seed=self.synthetic_seed,
        )

    def folder_dataset(self) -> AudioFolderDataset:
        return AudioFolderDataset(self.find_files(), self)

    def check_libraries(self) -> None:
        import_soundfile()
        import_soxr()

    def preprocessing(self) -> dict[str, object]:
        """The length is left out: a codec encodes audio of any length."""
        mono: dict[str, object] = {"rate_hz": self.rate_hz, "loudness_db": self.loudness_db}
        return mono if self.channels == 1 else mono | {"channels": self.channels}

    def check_mono(self, model: str) -> None:
        """Raise ValueError if the examples are stereo, for a model of mono audio."""
        if self.channels != 1:
            raise ValueError(
                f"{model} has one channel, but the audio has {self.channels}: use --data.channels "
                "1, which averages the channels."
            )

    def without_augmentation(self) -> AudioDataConfig:
        crop = "centre" if self.crop == "random" else self.crop
        return replace(self, crop=crop, speed=1.0, gain_db=0.0, flip=False)

    def draw_playback_rate(self, rng: np.random.Generator) -> int:
        """Draw the rate at which a file is read, to be played at `rate_hz`.

        Speeds are evenly spread over the logarithm of the pitch.
        """
        if self.speed == 1:
            return self.rate_hz
        speed = self.speed ** rng.uniform(-1, 1)
        return max(1, round(self.rate_hz / speed / RATE_STEP_HZ)) * RATE_STEP_HZ

    def augment(self, samples_CN: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Change gain and sign at random, where this is enabled."""
        factor = 1.0
        if self.gain_db:
            peak = float(np.abs(samples_CN).max(initial=0))
            gain = 10 ** (rng.uniform(-1, 1) * self.gain_db / 20)
            factor *= min(gain, max(1.0, 1 / peak)) if peak else gain
        if self.flip:
            factor *= rng.choice((-1, 1))
        return samples_CN if factor == 1 else samples_CN * np.float32(factor)

    def collate(self, examples: list[AudioExample]) -> AudioBatch:
        longest = max(example.samples.shape[1] for example in examples)
        return collate(
            [replace(one, samples=pad_samples(one.samples, longest)) for one in examples]
        )

    def is_input_shape(self, shape: Sequence[int]) -> bool:
        return super().is_input_shape(shape) and shape[1] == self.channels

    def example_from_media(self, media: object) -> AudioExample:
        """Preprocess all of an Audio, or an array (N,) or (C, N) at `rate_hz`.

        Arrays are int16, or floats in [-1, 1].
        """
        audio, found = media, f"a {type(media).__name__}"
        if is_array(media):
            array = to_numpy(media)
            found = f"an array of {array.dtype}"
            if array.dtype == np.int16:
                array = array.astype(np.float32) / 2**15
            if is_float(array):
                check_range(array)
                audio = Audio(np.atleast_2d(array).astype(np.float32), self.rate_hz)
        if not isinstance(audio, Audio):
            raise UserError(
                "Expected an Audio, a path or an array (samples,) or (channels, samples) of int16 "
                f"or of floats in [-1, 1], got {found}."
            )
        samples = audio.to_channels(self.channels).resample(self.rate_hz).samples
        samples = normalize_loudness(samples, self.loudness_db)
        return AudioExample(samples, samples.shape[1], self.rate_hz, "")

    def example_from_file(self, path: str) -> AudioExample:
        """Preprocess all of a file."""
        return self.example_from_media(Audio.load(path))

    def whole_recording(
        self, path: str | Path, seconds: float | None, step: int
    ) -> AudioDataConfig:
        """Return the configuration for a recording from its start, a multiple of `step` samples
        long."""
        with as_user_error(UnreadableFile):
            duration = scan_audio(str(path)).num_samples / probe(str(path)).rate_hz
        if seconds is not None and not 0 < seconds < math.inf:
            raise UserError(f"--seconds must be above 0, got {seconds:g}.")
        if seconds is not None and seconds > duration:
            raise UserError(
                f"{path} has {duration:.2f} s, but --seconds is {seconds:g}: use less, or leave it "
                "out."
            )
        requested = duration if seconds is None else seconds
        samples = math.floor(requested * self.rate_hz) // step * step
        if samples < step:
            raise UserError(
                f"{requested:.3f} s of {path} were requested, less than a frame of "
                f"{step / self.rate_hz:.3f} s."
            )
        return replace(self, path=str(path), samples=samples, crop="start", on_short="pad")


PIECE_SAMPLES = 1 << 19
"""Samples of one piece of a whole file: 33 seconds at 16 kHz."""


@dataclass(frozen=True)
class AudioFolderDataset(FileDataset):
    config: AudioDataConfig
    piece_length: ClassVar[int | None] = PIECE_SAMPLES

    def extent(self, index: int) -> Extent:
        info = probe(self.files.file(index))
        rate_hz = self.config.rate_hz
        return Extent(math.ceil(info.num_samples * rate_hz / info.rate_hz), rate_hz)

    def declared_extent(self, index: int) -> Extent:
        extent = self.extent(index)
        ratio = declared_ratio(file_signature(self.files.file(index)))
        return Extent(round(extent.length * ratio), extent.rate_hz)

    def load_piece(self, index: int, start: int, count: int) -> AudioExample:
        """Load a piece; with `loudness_db`, all pieces get the gain of the whole file."""
        path, rate_hz = self.files.file(index), self.config.rate_hz
        channels = self.config.channels
        samples = read_segment(path, start / rate_hz, count, rate_hz, channels).samples
        if self.config.loudness_db is not None:
            level = measure_level(path, channels)
            gain = loudness_gain(level.rms, level.peak, self.config.loudness_db)
            samples = (samples * np.float32(gain)).clip(-1, 1)
        return AudioExample(samples, samples.shape[1], rate_hz, "")

    def item(self, index: int, rng: np.random.Generator) -> AudioExample:
        """Draw one random number, for the start."""
        example = self.load_example(index, rng)
        return replace(example, caption=self.sample_caption(index, rng))

    def collate(self, examples: list[AudioExample]) -> AudioBatch:
        return collate(examples)

    def load_example(self, index: int, rng: np.random.Generator) -> AudioExample:
        """Load an example without its caption."""
        config, u = self.config, rng.random()
        position = {"random": u, "centre": 0.5, "start": 0.0}[config.crop]
        playback_rate_hz = config.draw_playback_rate(rng)
        audio = self.load_part(self.files.file(index), position, playback_rate_hz)
        samples = config.augment(normalize_loudness(audio.samples, config.loudness_db), rng)
        length = samples.shape[1]
        return AudioExample(pad_samples(samples, config.length), length, config.rate_hz, "")

    def load_part(self, path: AnyFile, position: float, playback_rate_hz: int) -> Audio:
        """Load the part that starts at `position`: 0 is the first possible start, 1 the last.

        The file is read at `playback_rate_hz`, and the result has `rate_hz`.
        """
        config = self.config
        info = probe(path)
        if config.on_long == "skip" and info.seconds * config.rate_hz > config.length + 1:
            raise UnreadableFile(
                f"{path}: it has {info.seconds:.2f} s, more than the "
                f"{config.length / config.rate_hz:.2f} s of an example (--data.seconds)"
            )
        if config.on_long == "skip" and playback_rate_hz > config.rate_hz:
            # A slower recording must still fit as a whole.
            fitting_rate_hz = int(config.length / max(info.seconds, 1 / config.rate_hz))
            fitting_rate_hz -= fitting_rate_hz % RATE_STEP_HZ
            playback_rate_hz = min(playback_rate_hz, max(config.rate_hz, fitting_rate_hz))
        audio = self.read_part(path, info, position, playback_rate_hz)
        if audio.samples.shape[1] < config.length and config.on_short == "skip":
            raise UnreadableFile(
                f"{path}: it has {audio.seconds:.2f} s, less than the requested "
                f"{config.length / config.rate_hz:.2f} s"
            )
        return audio

    def read_part(
        self, path: AnyFile, info: AudioInfo, position: float, playback_rate_hz: int
    ) -> Audio:
        """Read with the length that the file states, or, if that is wrong, with the decoded one."""
        try:
            audio = self.read_at(path, info.seconds, position, playback_rate_hz)
            stated = math.floor(info.seconds * playback_rate_hz)
            if audio.samples.shape[1] >= min(self.config.length, stated):
                return audio
        except UnreadableFile:
            pass
        seconds = scan_audio(path).num_samples / info.rate_hz
        return self.read_at(path, seconds, position, playback_rate_hz)

    def read_at(
        self, path: AnyFile, seconds: float, position: float, playback_rate_hz: int
    ) -> Audio:
        """Read from a sample at the requested rate; all samples are equally likely."""
        length, channels = self.config.length, self.config.channels
        num_later = max(0, math.floor(seconds * playback_rate_hz) - length)
        start = min(num_later, int(position * (num_later + 1)))
        start_seconds = start / playback_rate_hz
        audio = read_segment(path, start_seconds, length, playback_rate_hz, channels)
        return Audio(audio.samples, self.config.rate_hz)
