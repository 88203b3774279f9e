"""A trained tokenizer in Python.

    tokenizer = Tokenizer.load("runs/images-vqgan")
    codes = tokenizer.encode("photo.jpg")        # (1, h, w); also Image, Audio, Video, Mesh, arrays
    images = tokenizer.decode(codes)             # (1, 3, H, W) in [-1, 1]
    tokenizer.to_media(codes)[0].save("reconstruction.png")

The fingerprint of a tokenizer is a hash of its weights and of the preprocessing of its examples:
codes of one tokenizer have no meaning for another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from tessera.data.dataset import DataConfig, ExampleDataset
from tessera.data.loader import EvalLoader
from tessera.data.tokens import TokensInfo
from tessera.engine.modes import eval_mode
from tessera.engine.task import Batch, Examples, Media
from tessera.nn.quantize.features import code_features
from tessera.objectives.reconstruction import TokenizerTask
from tessera.run.config import encode as encode_config
from tessera.run.errors import UserError, as_user_error
from tessera.run.load import TrainedRun, Weights, load_run


class Tokenizer:
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

    @classmethod
    def load(cls, run: str | Path, weights: Weights = "ema") -> Tokenizer:
        return cls(load_run(run, weights))

    def with_data(self, data: DataConfig) -> Tokenizer:
        """Return the same tokenizer for other data."""
        return Tokenizer(self.trained, data)

    # ---- properties

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def num_quantizers(self) -> int:
        """The number of codes in one cell of the grid."""
        return self.model.quantizer.num_quantizers

    @property
    def grid(self) -> tuple[int, ...]:
        """The shape of the codes of an example, without quantizers."""
        return self.network.config.model.grid(self.data)

    @property
    def hop(self) -> int | None:
        """The number of samples of one cell of the grid, for audio."""
        return getattr(self.model, "hop", None)

    @property
    def seconds(self) -> float | None:
        """The duration of one cell of the grid, for audio."""
        hop = self.hop
        return None if hop is None else hop / self.run.data.rate_hz  # type: ignore[attr-defined]

    @property
    def features(self) -> Tensor | None:
        """Features of each code, (V, F); None for residual quantizers."""
        codebook_VW = self.model.quantizer.codebook()
        return None if codebook_VW is None else code_features(codebook_VW.float())

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

        `media` is an Image, Video, Audio or Mesh, a path, a NumPy array of one example, or a list
        of these, which are preprocessed as in training; or a tensor (B, ...) as the model expects
        it. The arrays of a mesh are a pair (vertices, faces).
        """
        adapter = self.network.adapter
        with eval_mode(self.network):
            if isinstance(media, Tensor) and adapter.takes_tensors:
                return self.model.encode(media.to(self.device))
            items = media if isinstance(media, list) else [media]
            if not items:
                raise UserError("There is nothing to encode: the list is empty.")
            batch = self.data.collate([self.load_example(item) for item in items])
            target = batch.to(self.device)
            kwargs = adapter.model_kwargs(target)
            return self.model.encode(adapter.target(target), **kwargs)

    def load_example(self, media: object) -> object:
        """Preprocess one medium, file or array as in training."""
        with as_user_error(ValueError):  # an unreadable file, or an array of another shape or type
            if isinstance(media, (str, Path)):
                return self.data.example_from_file(str(media))
            return self.data.example_from_media(media)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes (B, *grid) to the model's output."""
        with eval_mode(self.network):
            return self.model.decode(codes.to(self.device))

    @torch.no_grad()
    def to_media(self, codes: Tensor) -> Sequence[Media]:
        """Decode codes to media; -1 marks the end of an example."""
        return self.network.adapter.to_media(self.model.decode(codes.to(self.device)))

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

    def encode_dataset(
        self, dataset: ExampleDataset, batch_size: int, num_workers: int = 0
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Encode the readable examples of a dataset, batch by batch in its order."""
        seed = self.run.engine.seed
        loader = EvalLoader(
            dataset.without_captions(), seed=seed, batch_size=batch_size, num_workers=num_workers
        )
        for batch in loader.batches():
            if len(batch):
                yield batch, self.encode_examples(batch.to(self.device).examples).cpu()
            else:
                yield batch, torch.empty(0, dtype=torch.long)
