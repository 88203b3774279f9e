"""Frame-wise audio features that describe the content of speech more than the speaker.

- `MFCCFeatures`: MFCCs with deltas, the features of HuBERT's first iteration (Hsu 2021, arXiv
  2106.07447, section IV-B). They need no network.
- `VoiceFeatures`: a small speech embedding network of Google, from the package openwakeword.
- `SpeechFeatures`: a layer of any speech network in the Hugging Face layout.

Pretrained networks are frozen and not part of checkpoints. No gradient passes.

Audio is (B, 1, N) and features are (B, T, D) with T = N / hop, rounded up. Frame t is centred on
the samples from t * hop to (t + 1) * hop, and audio is padded with zeros at both ends. Samples
beyond `lengths` are ignored, so an example has the same features alone and in a padded batch.

B batch, N samples, T frames, D feature dimension.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera._optional import require
from tessera.engine.device import copy_to_device
from tessera.engine.task import Frozen
from tessera.losses.spectrogram import append_deltas, mfcc
from tessera.nn.precision import full_precision, to_fp32
from tessera.text.huggingface import LOCAL_ONLY, check_model_folder, load_weights, translate_errors

Key = TypeVar("Key", bound=Hashable)
MIN_VARIANCE = 1e-3
"""Added to the variance of a coefficient over a recording, so that silence stays small."""


class AudioFeatures(nn.Module):
    """Base class; a subclass sets `dim` and `hop` and implements `extract`."""

    dim: int
    hop: int

    @torch.compiler.disable  # it would be compiled again for all other lengths
    @torch.no_grad()
    def forward(self, samples: Tensor, lengths_B: Tensor | Sequence[int] | None = None) -> Tensor:
        """Return (B, T, D) for (B, 1, N), with zeros in frames of padding.

        Lengths in a tensor of a device have to be read, which waits.
        """
        batch_size, _, max_len = samples.shape
        lengths: Sequence[int] = [max_len] * batch_size
        if lengths_B is not None:
            lengths = lengths_B.tolist() if isinstance(lengths_B, Tensor) else lengths_B
        frames = num_frames(max_len, self.hop)
        features_BTD = to_fp32(samples).new_zeros(batch_size, frames, self.dim)
        with full_precision(samples.device.type):
            for length, rows in group_by_value(lengths):
                if length:
                    row_R = copy_to_device(torch.tensor(rows), samples.device)
                    selected = samples[:, 0, :length].index_select(0, row_R)
                    features = self.extract(to_fp32(selected)).to(features_BTD)
                    features_BTD[:, : features.shape[1]].index_copy_(0, row_R, features)
        return features_BTD

    def extract(self, samples_BN: Tensor) -> Tensor:
        """Return (B, T, D) for (B, N) with at least one sample."""
        raise NotImplementedError


def group_by_value(values: Iterable[Key]) -> Iterator[tuple[Key, list[int]]]:
    """Yield each distinct value and its indices: examples of equal length form one batch."""
    groups: dict[Key, list[int]] = {}
    for index, value in enumerate(values):
        groups.setdefault(value, []).append(index)
    yield from groups.items()


def num_frames(num_samples: int, hop: int) -> int:
    return -(-num_samples // hop)


def pad_to_frames(samples_BN: Tensor, *, hop: int, receptive_field: int) -> Tensor:
    """Pad with zeros so that windows of `receptive_field` samples are centred on their frames."""
    length, left = samples_BN.shape[1], (receptive_field - hop) // 2
    padded_length = (num_frames(length, hop) - 1) * hop + receptive_field
    return F.pad(samples_BN, (left, padded_length - left - length))


# -------------------------------------------------------------------------------------------- MFCC


@dataclass(frozen=True, kw_only=True)
class MFCCFeaturesConfig:
    """MFCCs with their first and second deltas."""

    rate_hz: int = 16_000
    """Sampling rate of the audio."""
    token_rate_hz: float = 50.0
    """Frames per second, whatever the sampling rate. Each frame becomes one token."""
    window_seconds: float = 0.025
    """Window length."""
    bands: int = 40
    """Number of mel bands."""
    coefficients: int = 13
    """Number of cepstral coefficients. The low ones describe the spectral envelope without the
    pitch."""
    normalize_recordings: bool = True
    """Normalise each coefficient to mean 0 and standard deviation 1 over a recording, which removes
    what is constant in it: the speaker's spectrum, the microphone and the loudness (Viikki and
    Laurila 1998)."""

    def __post_init__(self) -> None:
        if self.rate_hz < 1:
            raise ValueError(f"rate_hz must be at least 1, but got {self.rate_hz}.")
        if not (self.token_rate_hz > 0 and (self.rate_hz / self.token_rate_hz).is_integer()):
            raise ValueError(
                f"token_rate_hz must divide the rate of {self.rate_hz:,} Hz, but got "
                f"{self.token_rate_hz:g}."
            )
        if not 1 <= self.hop <= self.window:
            raise ValueError(
                f"A window of {self.window_seconds:g} s is shorter than a frame: use a higher "
                f"token_rate_hz than {self.token_rate_hz:g}, or a longer window."
            )
        if not 1 <= self.coefficients <= self.bands:
            raise ValueError(
                f"coefficients must be 1 to {self.bands}, the number of mel bands, but got "
                f"{self.coefficients}."
            )

    @property
    def window(self) -> int:
        """Window length in samples."""
        return round(self.window_seconds * self.rate_hz)

    @property
    def hop(self) -> int:
        """Samples per frame."""
        return round(self.rate_hz / self.token_rate_hz)

    def build(self) -> MFCCFeatures:
        return MFCCFeatures(self)


class MFCCFeatures(AudioFeatures):
    def __init__(self, config: MFCCFeaturesConfig):
        super().__init__()
        self.config, self.hop, self.dim = config, config.hop, 3 * config.coefficients

    def extract(self, samples_BN: Tensor) -> Tensor:
        config = self.config
        coefficients_BCT = mfcc(
            samples_BN,
            rate_hz=config.rate_hz,
            window=config.window,
            hop=config.hop,
            bands=config.bands,
            coefficients=config.coefficients,
        )
        if config.normalize_recordings:
            coefficients_BCT = normalize_over_time(coefficients_BCT)
        return append_deltas(coefficients_BCT).mT


def normalize_over_time(features_BCT: Tensor) -> Tensor:
    """Return features with mean 0 and standard deviation 1 over time; constant ones become 0."""
    centred = features_BCT - features_BCT.mean(2, keepdim=True)
    return centred / centred.square().mean(2, keepdim=True).add(MIN_VARIANCE).sqrt()


# ---------------------------------------------------------------------------------- speech network


@dataclass(frozen=True, kw_only=True)
class SpeechFeaturesConfig:
    """A layer of a pretrained speech network: wav2vec 2, HuBERT or WavLM. Needs the extra
    `text`."""

    path: str
    """A folder with a network in the Hugging Face layout. It must stay in place."""
    layer: int = 9
    """The layer whose output is used; 0 is the input of the first layer. The ninth layer of HuBERT
    is a common choice for semantic tokens."""
    rate_hz: int = 16_000
    """Sampling rate of the audio that the network was trained on."""
    hop: int = 320
    """Samples per frame of the network."""

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError("path is empty: give the folder of a speech network.")
        if self.layer < 0:
            raise ValueError(
                f"layer must be at least 0, the input of the first layer, but got {self.layer}."
            )

    def build(self) -> SpeechFeatures:
        return SpeechFeatures(self)


class SpeechFeatures(AudioFeatures):
    def __init__(self, config: SpeechFeaturesConfig):
        super().__init__()
        self.config, self.hop = config, config.hop
        what = f"The speech network {config.path!r}"
        transformers = require("transformers", extra="text", purpose="A pretrained speech network")
        check_model_folder(config.path, what)
        with translate_errors(transformers, what):
            settings = transformers.AutoConfig.from_pretrained(config.path, **LOCAL_ONLY)
            weights = load_weights(transformers.AutoModel, config.path, **LOCAL_ONLY)
            preprocessor = read_preprocessor_config(Path(config.path))
        check_speech_network(config, settings, preprocessor)
        self.dim, self.receptive_field = settings.hidden_size, conv_receptive_field(settings)
        self.normalize = preprocessor.get("do_normalize", False)
        # Later layers are not computed. One more than needed is kept, because some networks
        # normalize the output of their last layer.
        network = weights.check_complete(what, unused=("masked_spec_embed",))
        network.encoder.layers = network.encoder.layers[: config.layer + 1]
        self.network = Frozen(network)

    def extract(self, samples_BN: Tensor) -> Tensor:
        if self.normalize:
            samples_BN = samples_BN - samples_BN.mean(1, keepdim=True)
            samples_BN = samples_BN / (samples_BN.square().mean(1, keepdim=True) + 1e-7).sqrt()
        padded_BN = pad_to_frames(samples_BN, hop=self.hop, receptive_field=self.receptive_field)
        padded_BN = padded_BN.to(next(self.network.network.parameters()))
        return self.network(padded_BN, output_hidden_states=True).hidden_states[self.config.layer]


class SpeechNetworkSettings(Protocol):
    """The settings of a speech network of transformers that are read here."""

    model_type: str
    conv_kernel: Sequence[int]
    conv_stride: Sequence[int]
    num_hidden_layers: int


def read_preprocessor_config(folder: Path) -> dict[str, object]:
    """Read how the network's inputs are prepared; {} if the folder has no such file."""
    file = folder / "preprocessor_config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def conv_receptive_field(settings: SpeechNetworkSettings) -> int:
    """Return the samples that determine one frame of a stack of convolutions."""
    field = 1
    layers = list(zip(settings.conv_kernel, settings.conv_stride, strict=True))
    for kernel, stride in reversed(layers):
        field = (field - 1) * stride + kernel
    return field


def check_speech_network(
    config: SpeechFeaturesConfig, settings: SpeechNetworkSettings, preprocessor: dict[str, object]
) -> None:
    """Raise ValueError if the network does not match the configuration."""
    what = f"The speech network {config.path!r}"
    if not (hasattr(settings, "conv_stride") and hasattr(settings, "conv_kernel")):
        raise ValueError(
            f"{what} is a {settings.model_type}, which does not take audio samples as input: use a "
            "network such as wav2vec 2, HuBERT or WavLM."
        )
    if (hop := math.prod(settings.conv_stride)) != config.hop:
        raise ValueError(
            f"{what} has {hop} samples per frame, but hop is {config.hop}: set it to {hop}."
        )
    if (rate_hz := preprocessor.get("sampling_rate", config.rate_hz)) != config.rate_hz:
        raise ValueError(
            f"{what} was trained at {rate_hz} Hz, but rate_hz is {config.rate_hz}: set it to "
            f"{rate_hz}."
        )
    if config.layer > settings.num_hidden_layers:
        raise ValueError(
            f"{what} has {settings.num_hidden_layers} layers, but layer is {config.layer}: use a "
            "lower one."
        )


# -------------------------------------------------------------------------------- speech embedding


@dataclass(frozen=True, kw_only=True)
class VoiceFeaturesConfig:
    """Google's speech embedding (Lin 2020, arXiv 2002.01322), 96 numbers every 80 ms, from
    openwakeword 0.5.

    Needs the extra `voice`. It runs on the CPU and takes about 50 ms per second of audio.
    """

    rate_hz: ClassVar[int] = 16_000
    hop: ClassVar[int] = 1280

    def build(self) -> VoiceFeatures:
        return VoiceFeatures()


class VoiceFeatures(AudioFeatures):
    dim, hop = 96, VoiceFeaturesConfig.hop
    MEL_BANDS, MEL_HOP, MEL_FRAMES, MEL_WINDOW = 32, 160, 76, 512
    """Mel spectrogram that the embedding network receives."""
    RECEPTIVE_FIELD = (MEL_FRAMES - 1) * MEL_HOP + MEL_WINDOW
    """Samples that determine one frame: 782 ms."""

    def __init__(self) -> None:
        super().__init__()
        onnxruntime, folder = find_embedding_models()
        options = onnxruntime.SessionOptions()
        # The number of threads would change the rounding.
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.spectrogram, self.embedding = (
            onnxruntime.InferenceSession(
                str(folder / name), options, providers=["CPUExecutionProvider"]
            )
            for name in ("melspectrogram.onnx", "embedding_model.onnx")
        )

    def extract(self, samples_BN: Tensor) -> Tensor:
        padded_BN = pad_to_frames(samples_BN, hop=self.hop, receptive_field=self.RECEPTIVE_FIELD)
        # One example at a time: the spectrogram network clips at 80 dB below the maximum over its
        # batch.
        arrays = padded_BN.float().cpu().numpy()
        return torch.from_numpy(np.stack([self.extract_one(samples_N) for samples_N in arrays]))

    def extract_one(self, samples_N: np.ndarray) -> np.ndarray:
        """Return (T, D) for (N,); scales the samples and the spectrogram as the networks expect."""
        (spectrogram,) = self.spectrogram.run(None, {"input": samples_N[None] * 32767})
        mel_FM = spectrogram.reshape(-1, self.MEL_BANDS) / 10 + 2
        windows = np.lib.stride_tricks.sliding_window_view(mel_FM, self.MEL_FRAMES, axis=0)
        windows = windows[:: self.hop // self.MEL_HOP].transpose(0, 2, 1)[..., None]
        (embedding,) = self.embedding.run(None, {"input_1": np.ascontiguousarray(windows)})
        return embedding.reshape(len(windows), self.dim)


def find_embedding_models() -> tuple[ModuleType, Path]:
    """Return onnxruntime and the folder of the ONNX models.

    openwakeword is not imported, because it needs further packages.
    """
    purpose = "The speech embedding of openwakeword"
    onnxruntime = require("onnxruntime", extra="voice", purpose=purpose)
    spec = importlib.util.find_spec("openwakeword")
    folder = Path(spec.origin).parent / "resources" / "models" if spec and spec.origin else Path()
    if not (folder / "embedding_model.onnx").is_file():
        raise ModuleNotFoundError(
            "The speech embedding needs the models in the Python package openwakeword 0.5, which "
            "is not installed (0.6 has no models in it). Install it with: "
            "pip install --no-deps openwakeword==0.5.1; or use MFCC features.",
            name="openwakeword",
        )
    return onnxruntime, folder
