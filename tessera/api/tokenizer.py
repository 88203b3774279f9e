"""A trained tokenizer in Python.

    tokenizer = Tokenizer.load("runs/images-vqgan")
    codes = tokenizer.encode("photo.jpg")        # (1, h, w); also media, PIL images and arrays
    images = tokenizer.decode(codes)             # (1, 3, H, W) in [-1, 1]
    tokenizer.to_media(codes)[0].save("reconstruction.png")

The fingerprint of a tokenizer is a hash of its weights and of the preprocessing of its examples:
codes of one tokenizer have no meaning for another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from tessera.api.pretrained import Pretrained
from tessera.data.arrays import check_range
from tessera.data.dataset import DataConfig, ExampleDataset, Extent
from tessera.data.loader import EvalLoader
from tessera.data.tokens import TokensInfo
from tessera.engine.modes import eval_mode
from tessera.engine.task import Batch, Examples, Media
from tessera.nn.quantize.features import code_features
from tessera.objectives.generation import TokenizerProtocol
from tessera.objectives.reconstruction import MediaAdapter, TokenizerTask
from tessera.run.config import encode as encode_config
from tessera.run.errors import UserError, as_user_error
from tessera.run.load import TrainedRun, Weights, format_repr, load_run


class Tokenizer(Pretrained):
    is_external = False

    def __init__(self, trained: TrainedRun, data: DataConfig | None = None):
        if not isinstance(trained.task, TokenizerTask):
            raise UserError(
                f"The run is of the recipe {trained.run.recipe!r}, which trains no tokenizer: give "
                "the run of a tokenizer, such as images-vqgan."
            )
        self.trained, self.run = trained, trained.run
        self.network: TokenizerTask = trained.task
        self.model = trained.task.model
        self.data = trained.run.data if data is None else data
        """The data it is used on, with the preprocessing of its training data."""
        self.grid: tuple[int, ...] = trained.task.config.model.grid(self.data)
        """The shape of the codes of an example, without quantizers."""
        self.vocab_size: int = self.model.vocab_size
        self.num_quantizers: int = self.model.quantizer.num_quantizers
        """The number of codes in one cell of the grid."""
        self.hop: int | None = getattr(self.model, "hop", None)
        """The number of samples of one cell of the grid, for audio."""

    @classmethod
    def load(cls, run: str | Path, weights: Weights = "ema") -> Tokenizer:
        return cls(load_run(run, weights))

    def __repr__(self) -> str:
        settings: dict[str, object] = {
            "recipe": self.run.recipe,
            "step": self.trained.steps,
            "grid": self.grid,
            "vocab_size": self.vocab_size,
        }
        if self.num_quantizers > 1:
            settings["num_quantizers"] = self.num_quantizers
        return format_repr(self, self.trained, settings)

    def to(self, device: torch.device | str) -> Tokenizer:
        """Move the model to a device."""
        self.network.to(device)
        return self

    def with_data(self, data: DataConfig) -> Tokenizer:
        """Return the same tokenizer for other data."""
        return Tokenizer(self.trained, data)

    # ---- properties

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def seconds(self) -> float | None:
        """The duration of one cell of the grid, for audio."""
        if self.hop is None:
            return None
        return self.hop / self.run.data.rate_hz  # type: ignore[attr-defined]

    @property
    def features(self) -> Tensor | None:
        """Features of each code of each quantizer, (L, V, F); None where codes have no vectors."""
        codebooks_LVW = self.model.quantizer.codebooks()
        return None if codebooks_LVW is None else code_features(codebooks_LVW.float())

    @cached_property
    def fingerprint(self) -> str:
        settings = [self.run.data.preprocessing(), encode_config(self.network.config.model)]
        digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def info(self) -> TokensInfo:
        """Return the description that is stored with codes."""
        return TokensInfo(
            self.fingerprint,
            self.vocab_size,
            self.run.recipe,
            self.trained.steps,
            self.run.data.preprocessing(),
        )

    # ---- encoding and decoding

    def encode(self, media: object) -> Tensor:
        """Encode media as codes (B, *grid).

        `media` is an Image, Video, Audio or Mesh, a path, a PIL image, an array or tensor of one
        or several examples, or a list of these, which are preprocessed as in training. Arrays hold
        integers as in files or floats in [-1, 1]; the arrays of a mesh are a pair (vertices,
        faces). A float tensor (B, C, ...) of several examples, with the channels of the model, goes
        to it as it is, so that other sizes can be encoded too.
        """
        adapter, dtype = self.network.adapter, next(self.model.parameters()).dtype
        with eval_mode(self.network), as_user_error(ValueError):
            if isinstance(media, Tensor) and self.is_model_input(media):
                if self.data.batch_ndim is not None:
                    check_range(media)
                return self.model.encode(media.to(self.device, dtype))
            items = media if isinstance(media, list) else self.data.split_batch(media)
            if not items:
                raise UserError("There is nothing to encode: the list is empty.")
            batch = self.data.collate([self.load_example(item) for item in items])
            target = batch.to(self.device)
            kwargs = adapter.model_kwargs(target)
            return self.model.encode(adapter.target(target), **kwargs)

    def is_model_input(self, tensor: Tensor) -> bool:
        """Return whether this is a batch as the model takes it."""
        return (
            self.network.adapter.takes_tensors
            and tensor.is_floating_point()
            and self.data.is_input_shape(tensor.shape)
        )

    def load_example(self, media: object) -> object:
        """Preprocess one medium, file or array as in training."""
        if isinstance(media, (str, Path)):
            return self.data.example_from_file(str(media))
        return self.data.example_from_media(media)

    def decode(self, codes: ArrayLike | Tensor) -> Tensor:
        """Decode codes (B, *grid), or (*grid) of one example, to a batch of the model's output.

        Images, videos and audio are in [-1, 1].
        """
        with eval_mode(self.network), as_user_error(ValueError):
            return self.network.adapter.bound(self.model.decode(self.as_codes(codes)))

    @torch.no_grad()
    def to_media(self, codes: ArrayLike | Tensor) -> Sequence[Media]:
        """Decode codes, as `decode` takes them, to media; -1 marks the end of an example."""
        with as_user_error(ValueError):
            return self.network.adapter.to_media(self.model.decode(self.as_codes(codes)))

    def as_codes(self, codes: ArrayLike | Tensor) -> Tensor:
        """Return codes as a batch of integers on the device of the model."""
        tensor = torch.as_tensor(codes).to(self.device)
        if tensor.is_floating_point() or tensor.is_complex():
            raise ValueError(f"Codes must be integers, got {tensor.dtype}.")
        num_dims = len(self.grid) + (self.num_quantizers > 1)
        if tensor.ndim not in (num_dims, num_dims + 1):
            raise ValueError(
                f"Codes must have {num_dims + 1} dimensions, or {num_dims} for one example, got "
                f"the shape {tuple(tensor.shape)}. The grid of an example is {self.grid}."
            )
        return (tensor[None] if tensor.ndim == num_dims else tensor).long()

    @torch.no_grad()
    def encode_examples(self, examples: Examples) -> Tensor:
        """Encode collated examples as codes (B, *grid), with -1 outside of shorter examples."""
        adapter = self.network.adapter
        dtype = next(self.model.parameters()).dtype
        target = adapter.preprocess(adapter.target(examples), self.data, dtype)
        codes = self.model.encode(target, **adapter.model_kwargs(examples))
        shape = (len(codes), *self.grid, *codes.shape[1 + len(self.grid) :])
        padded = codes.new_full(shape, -1)
        padded[tuple(slice(0, side) for side in codes.shape)] = codes
        return padded

    # ---- whole recordings and videos

    @property
    def has_time(self) -> bool:
        """Whether whole files are processed in pieces along time."""
        adapter = type(self.network.adapter)
        return adapter.encode_pieces is not MediaAdapter.encode_pieces

    @property
    def plays_whole_files(self) -> bool:
        """Whether codes of whole files can be decoded to media."""
        adapter = type(self.network.adapter)
        return adapter.decode_pieces is not MediaAdapter.decode_pieces

    def encode_pieces(self, pieces: Iterable[Examples]) -> Tensor:
        """Encode one medium, which arrives in pieces along time, as codes (t, ...).

        Memory use does not depend on its length, except for the codes.
        """
        on_device = (piece.to(self.device) for piece in pieces)
        with eval_mode(self.network), as_user_error(ValueError):
            return self.network.adapter.encode_pieces(self.model, on_device)

    @torch.no_grad()
    def decode_pieces(self, codes: Tensor, extent: Extent) -> Iterator[Media]:
        """Decode codes (t, ...) of a whole recording or video to its media, in pieces."""
        adapter, device = self.network.adapter, self.device
        with as_user_error(ValueError):
            yield from adapter.decode_pieces(
                self.model, codes.to(device), extent.length, extent.rate_hz
            )

    def encode_dataset(
        self,
        dataset: ExampleDataset,
        batch_size: int,
        num_workers: int = 0,
        *,
        start: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Encode the readable examples of a dataset, batch by batch in its order.

        It begins at example `start`; of several processes each encodes every n-th batch.
        """
        part = DatasetPart(start, rank, world_size)
        return encode_dataset(self, dataset, batch_size, num_workers, self.device, part)


@dataclass(frozen=True)
class DatasetPart:
    """The examples from `start` on; of several processes each has every n-th batch."""

    start: int = 0
    rank: int = 0
    world_size: int = 1


ALL_EXAMPLES = DatasetPart()


def encode_dataset(
    tokenizer: TokenizerProtocol,
    dataset: ExampleDataset,
    batch_size: int,
    num_workers: int = 0,
    device: torch.device | str = "cpu",
    part: DatasetPart = ALL_EXAMPLES,
) -> Iterator[tuple[Batch, Tensor]]:
    """Encode the readable examples of a dataset, batch by batch in its order."""
    loader = EvalLoader(
        dataset.without_captions(), seed=0, batch_size=batch_size, num_workers=num_workers
    )
    indices = range(part.start, len(dataset))
    for batch in loader.batches(part.rank, part.world_size, indices):
        if len(batch):
            yield batch, tokenizer.encode_examples(batch.to(torch.device(device)).examples).cpu()
        else:
            yield batch, torch.empty(0, dtype=torch.long)
