"""What is heard in a sound, frame by frame: numbers that tell sounds apart by what is said more
than by who says it.

`MelFeatures` are MFCC with their deltas, which HuBERT began with (Hsu 2021, arXiv 2106.07447,
section IV-B) and which need nothing but arithmetic. `VoiceFeatures` are those of a small network of
Google's, whose weights lie inside a package. `SpeechFeatures` are a layer of any speech network in
the Hugging Face layout. Networks of others are held and never trained, and are in no checkpoint.

Sounds are (B, 1, N); features (B, T, D) with T = N / hop, rounded up: frame t is heard around the
samples from t * hop to (t + 1) * hop. Beyond its ends a sound is silent, and of a sound of
`lengths` only so many samples are heard, whatever follows: a sound has the same features alone and
beside longer ones. No gradient passes.

B examples, N samples, T frames, D width of the features.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.engine.task import Frozen
from tessera.losses.spectra import mfcc, with_deltas
from tessera.nn.precision import full_precision, to_fp32
from tessera.text.huggingface import LOCAL, library, read_weights, refuse_no_folder, told


class Features(nn.Module):
    """The contract of all of them."""

    dim: int
    hop: int

    @torch.no_grad()
    def forward(self, samples: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """(B, 1, N) -> (B, T, D), zero in frames that have no real sample."""
        count, _, whole = samples.shape
        lengths = [whole] * count if lengths_B is None else lengths_B.tolist()
        features_BTD = to_fp32(samples).new_zeros(count, frames(whole, self.hop), self.dim)
        with full_precision(samples.device.type):
            for length, here in alike(lengths):
                if length:
                    heard = self.hear(to_fp32(samples[here, 0, :length]))
                    features_BTD[here, : heard.shape[1]] = heard.to(features_BTD)
        return features_BTD

    def hear(self, samples_BN: Tensor) -> Tensor:
        """(B, N) of at least one sample -> (B, T, D)."""
        raise NotImplementedError


def alike(keys: Iterable[Any]) -> Iterator[tuple[Any, list[int]]]:
    """Each different key, and the places where it stands: those of one length go through a network
    together."""
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(key, []).append(place)
    yield from places.items()


def frames(samples: int, hop: int) -> int:
    return -(-samples // hop)


def around(samples_BN: Tensor, *, hop: int, reach: int) -> Tensor:
    """With so much silence before and after that windows of `reach` samples, `hop` apart, are
    centred on their frames."""
    samples, before = samples_BN.shape[1], (reach - hop) // 2
    return F.pad(samples_BN, (before, (frames(samples, hop) - 1) * hop + reach - before - samples))


# ------------------------------------------------------------------------------------------------------------------ mel


@dataclass(frozen=True, kw_only=True)
class MelFeatures:
    """MFCC with their first and second deltas."""

    rate_hz: int = 16_000
    """Samples a second of the sounds."""
    window: int = 400
    """Samples that are looked at for one frame: 25 ms at 16 kHz."""
    hop: int = 320
    """Samples from one frame to the next; each has one symbol."""
    bands: int = 40
    """Mel bands."""
    coefficients: int = 13
    """How many numbers are kept of them: the shape of the spectrum without its pitch."""

    def __post_init__(self) -> None:
        if not 1 <= self.hop <= self.window:
            raise ValueError(
                f"A hop is at least 1 sample and at most the window, but they are {self.hop} and {self.window}."
            )
        if not 1 <= self.coefficients <= self.bands:
            raise ValueError(
                f"{self.coefficients} coefficients are not to be had of {self.bands} mel bands: use at most so many."
            )
        if self.rate_hz < 1:
            raise ValueError(f"rate_hz is a number of samples a second, but it is {self.rate_hz}.")

    def build(self) -> Mel:
        return Mel(self)


class Mel(Features):
    def __init__(self, config: MelFeatures):
        super().__init__()
        self.config, self.hop, self.dim = config, config.hop, 3 * config.coefficients

    def hear(self, samples_BN: Tensor) -> Tensor:
        config = self.config
        heard = mfcc(
            samples_BN, rate_hz=config.rate_hz, window=config.window, hop=config.hop, bands=config.bands,
            coefficients=config.coefficients,
        )  # fmt: skip
        return with_deltas(heard).mT


# --------------------------------------------------------------------------------------------------------------- speech


@dataclass(frozen=True, kw_only=True)
class SpeechFeatures:
    """A layer of somebody else's speech network: wav2vec 2, HuBERT, WavLM. Needs the extra
    `text`."""

    path: str
    """A folder that holds one in the Hugging Face layout. It must stay where it is."""
    layer: int = 9
    """Whose output is taken; 0 is what enters the first. Symbols are often made of HuBERT's
    ninth."""
    rate_hz: int = 16_000
    """Samples a second of the sounds it learnt from."""
    hop: int = 320
    """Samples from one of its frames to the next."""

    def __post_init__(self) -> None:
        if not self.path.strip():
            raise ValueError(
                "Features of a speech network need the folder that holds it: give its path."
            )
        if self.layer < 0:
            raise ValueError(
                f"Layers are counted from 0, which is what enters the first, but layer is {self.layer}."
            )

    def build(self) -> Speech:
        return Speech(self)


class Speech(Features):
    def __init__(self, config: SpeechFeatures):
        super().__init__()
        self.config, self.hop = config, config.hop
        what = f"The speech network {config.path!r}"
        transformers = library("A speech network of others", "take the features of MFCC")
        refuse_no_folder(config.path, what)
        with told(transformers, what):
            settings = transformers.AutoConfig.from_pretrained(config.path, **LOCAL)
            weights = read_weights(transformers.AutoModel, config.path, **LOCAL)
            taken = listening(Path(config.path))
        refuse_other_speech(config, settings, taken)
        self.dim, self.reach = settings.hidden_size, reach(settings)
        self.evened = taken.get("do_normalize", False)
        # Layers above the one asked for are not computed. One more than needed stays: some networks
        # norm what their last gives.
        network = weights.refuse_half(what, unused=("masked_spec_embed",))
        network.encoder.layers = network.encoder.layers[: config.layer + 1]
        self.network = Frozen(network)

    def hear(self, samples_BN: Tensor) -> Tensor:
        if self.evened:
            samples_BN = samples_BN - samples_BN.mean(1, keepdim=True)
            samples_BN = samples_BN / (samples_BN.square().mean(1, keepdim=True) + 1e-7).sqrt()
        padded_BN = around(samples_BN, hop=self.hop, reach=self.reach).to(
            next(self.network.network.parameters())
        )
        return self.network(padded_BN, output_hidden_states=True).hidden_states[self.config.layer]


def listening(folder: Path) -> dict[str, Any]:
    """How its makers prepared sounds for it, where they left word."""
    file = folder / "preprocessor_config.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def reach(settings: Any) -> int:
    """Samples that one frame of a stack of convolutions sees."""
    seen = 1
    for kernel, stride in reversed(
        list(zip(settings.conv_kernel, settings.conv_stride, strict=True))
    ):
        seen = (seen - 1) * stride + kernel
    return seen


def refuse_other_speech(config: SpeechFeatures, settings: Any, taken: dict[str, Any]) -> None:
    what = f"The speech network {config.path!r}"
    if not (hasattr(settings, "conv_stride") and hasattr(settings, "conv_kernel")):
        raise ValueError(
            f"{what} is a {settings.model_type}, which does not listen to samples: take one that does, "
            "such as wav2vec 2, HuBERT or WavLM."
        )
    if (hop := math.prod(settings.conv_stride)) != config.hop:
        raise ValueError(
            f"{what} makes a frame of every {hop} samples, but hop is {config.hop}: set it to {hop}."
        )
    if (rate_hz := taken.get("sampling_rate", config.rate_hz)) != config.rate_hz:
        raise ValueError(
            f"{what} learnt from {rate_hz} samples a second, but rate_hz is {config.rate_hz}: set it to {rate_hz}."
        )
    if config.layer > settings.num_hidden_layers:
        raise ValueError(
            f"{what} has {settings.num_hidden_layers} layers, but layer {config.layer} is asked for."
        )


# ---------------------------------------------------------------------------------------------------------------- voice


@dataclass(frozen=True, kw_only=True)
class VoiceFeatures:
    """Google's speech embedding (Lin 2020, arXiv 2002.01322), 96 numbers every 80 ms, as
    openwakeword 0.5 carries it.

    Needs the extra `voice`. It runs on the CPU, and takes about 50 ms for a second of sound.
    """

    rate_hz: ClassVar[int] = 16_000
    hop: ClassVar[int] = 1280

    def build(self) -> Voice:
        return Voice()


class Voice(Features):
    dim, hop = 96, VoiceFeatures.hop
    MELS, MEL_STEP, MELS_AT_ONCE, MEL_REACH = 32, 160, 76, 512
    REACH = (MELS_AT_ONCE - 1) * MEL_STEP + MEL_REACH
    """Samples that one frame sees: 782 ms."""

    def __init__(self) -> None:
        super().__init__()
        runtime, folder = voice_library()
        alone = runtime.SessionOptions()
        alone.intra_op_num_threads = alone.inter_op_num_threads = (
            1  # the number of threads changes the bits
        )
        self.spectrum, self.embedding = (
            runtime.InferenceSession(str(folder / name), alone, providers=["CPUExecutionProvider"])
            for name in ("melspectrogram.onnx", "embedding_model.onnx")
        )

    def hear(self, samples_BN: Tensor) -> Tensor:
        # One sound after the other: the spectrum is cut off 80 dB below the loudest of all that
        # come together.
        padded_BN = around(samples_BN, hop=self.hop, reach=self.REACH).float().cpu().numpy()
        return torch.from_numpy(np.stack([self.hear_one(one) for one in padded_BN]))

    def hear_one(self, samples_N: np.ndarray) -> np.ndarray:
        """(T, D). Samples as 16-bit numbers, and the spectrum scaled, as the embedding is used
        to."""
        (spectrum,) = self.spectrum.run(None, {"input": samples_N[None] * 32767})
        spectrum_FM = spectrum.reshape(-1, self.MELS) / 10 + 2
        windows = np.lib.stride_tricks.sliding_window_view(spectrum_FM, self.MELS_AT_ONCE, axis=0)
        windows = windows[:: self.hop // self.MEL_STEP].transpose(0, 2, 1)[..., None]
        (embedded,) = self.embedding.run(None, {"input_1": np.ascontiguousarray(windows)})
        return embedded.reshape(len(windows), self.dim)


def voice_library() -> tuple[Any, Path]:
    """onnxruntime, and the folder of the networks; openwakeword itself is not imported, which would
    want more packages."""
    try:
        import onnxruntime
    except ModuleNotFoundError as problem:
        raise ModuleNotFoundError(VOICE_MISSING.format(problem.name)) from problem
    found = importlib.util.find_spec("openwakeword")
    folder = (
        Path(found.origin).parent / "resources" / "models" if found and found.origin else Path()
    )
    if not (folder / "embedding_model.onnx").is_file():
        raise ModuleNotFoundError(
            VOICE_MISSING.format("openwakeword 0.5 (0.6 has no weights in it)")
        )
    return onnxruntime, folder


VOICE_MISSING = (
    'Features of voices need the package {}, which is not installed: pip install "tessera[voice]", and its weights alone with '
    "pip install --no-deps openwakeword==0.5.1; or take MFCC."
)
