"""Export the encoder and the decoder of a tokenizer as ONNX, for programs without torch.

encoder.onnx takes a batch in [-1, 1] and returns codes; decoder.onnx takes codes and returns a
batch in [-1, 1]. The batch and the sides (or the length) may have any size that the tokenizer
supports. Both are run with onnxruntime on two shapes and compared with the model before they are
kept. Lengths of padded audio are no input: give each recording alone.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from tessera import __version__
from tessera._optional import require
from tessera.engine.modes import eval_mode
from tessera.objectives.reconstruction import TokenizerTask
from tessera.run.config import encode as encode_config
from tessera.run.directory import PARTIAL, write_atomically
from tessera.run.errors import UserError, as_user_error
from tessera.run.load import TrainedRun

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

TOLERANCE = 1e-4
"""The largest difference between the outputs of the model and of onnxruntime."""
MAX_OTHER_CODES = 1e-3
"""The largest fraction of codes that may differ: a latent half-way between two codes is rounded
either way."""


class Encoder(nn.Module):
    def __init__(self, task: TokenizerTask):
        super().__init__()
        self.model = task.model

    def forward(self, media: Tensor) -> Tensor:
        return self.model.encode(media)


class Decoder(nn.Module):
    def __init__(self, task: TokenizerTask):
        super().__init__()
        self.model, self.adapter = task.model, task.adapter

    def forward(self, codes: Tensor) -> Tensor:
        return self.adapter.bound(self.model.decode(codes))


@dataclass(frozen=True)
class Comparison:
    """The differences between the model and onnxruntime for one shape."""

    name: str
    shape: tuple[int, ...]
    difference: float
    """The largest absolute difference of the output, or the fraction of other codes."""

    def line(self) -> str:
        shown = " x ".join(map(str, self.shape))
        if self.name == "encoder":
            return f"encoder.onnx on {shown}: {self.difference:.2%} of the codes differ"
        return f"decoder.onnx on {shown}: the largest difference is {self.difference:.1e}"


def export_onnx(trained: TrainedRun, out: Path) -> list[str]:
    """Write encoder.onnx and decoder.onnx to a new folder, and return what was compared."""
    task = trained.task
    if not isinstance(task, TokenizerTask) or not task.adapter.takes_tensors:
        raise UserError(
            f"A run of {trained.run.recipe} cannot be exported as ONNX: only tokenizers of images, "
            "videos and audio can. Use --format safetensors."
        )
    with as_user_error(ModuleNotFoundError):
        for module in ("onnx", "onnxscript", "onnxruntime"):
            require(module, extra="onnx", purpose="Exporting ONNX")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} exists and is not empty: give a new folder as --out.")
    temporary = out.with_name(f".{out.name}{PARTIAL}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        with eval_mode(task.cpu()):
            compared = write_networks(task, load_examples(trained, task), temporary)
        write_atomically(temporary / "config.json", describe(trained, compared))
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return [one.line() for one in compared]


def load_examples(trained: TrainedRun, task: TokenizerTask) -> list[Tensor]:
    """Return two batches of different shapes: synthetic examples, and one that is larger."""
    data = dataclasses.replace(trained.run.data, path=None)
    dataset = data.synthetic_dataset()
    examples = [dataset.item(index, np.random.default_rng(index)) for index in range(2)]
    batch_BX = task.adapter.target(dataset.collate(examples))
    return [batch_BX, enlarge(batch_BX[:1])]


def enlarge(media: Tensor) -> Tensor:
    """Repeat an example along its last axis; a video of T frames has 2 T - 1 of them then."""
    wide = torch.cat([media, media.flip(-1)], dim=-1)
    return torch.cat([wide, wide[:, :, 1:].flip(2)], dim=2) if media.ndim == 5 else wide


def write_networks(task: TokenizerTask, batches: list[Tensor], folder: Path) -> list[Comparison]:
    codes = [task.model.encode(batch) for batch in batches]
    compared: list[Comparison] = []
    for name, network, inputs in (
        ("encoder", Encoder(task), batches),
        ("decoder", Decoder(task), codes),
    ):
        file = folder / f"{name}.onnx"
        write_network(network.eval(), inputs[0], file)
        compared += compare(name, network, inputs, file)
    return compared


def write_network(network: nn.Module, example: Tensor, file: Path) -> None:
    """Export a network whose axes, but for the channels of media, have any size."""
    is_media = example.is_floating_point()
    fixed = {1} if is_media else {example.ndim - 1} if has_quantizer_axis(network) else set()
    dynamic = {axis: torch.export.Dim.DYNAMIC for axis in range(example.ndim) if axis not in fixed}
    names = ("media", "codes") if is_media else ("codes", "media")
    with quiet_exporter():
        try:
            torch.onnx.export(
                network,
                (example,),
                file,
                dynamo=True,
                dynamic_shapes=(dynamic,),
                input_names=[names[0]],
                output_names=[names[1]],
                external_data=False,
                verbose=False,
            )
        except Exception as error:  # of the exporter, for operations without an ONNX equivalent
            reason = str(error).strip().splitlines()
            raise UserError(
                f"{file.stem} cannot be exported as ONNX ({type(error).__name__}: "
                f"{reason[0][:200] if reason else ''})."
            ) from None


def has_quantizer_axis(network: nn.Module) -> bool:
    """Return whether codes have an axis of several quantizers."""
    quantizer = getattr(getattr(network, "model", None), "quantizer", None)
    return getattr(quantizer, "num_quantizers", 1) > 1


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Disable warnings of the exporter about its own packages."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


def compare(
    name: str, network: nn.Module, inputs: list[Tensor], file: Path
) -> Iterator[Comparison]:
    """Yield the differences for each input; raise UserError if one is too large."""
    session = open_session(file)
    for one in inputs:
        expected = network(one).numpy()
        [found] = session.run(None, {session.get_inputs()[0].name: one.numpy()})
        if found.shape != expected.shape:
            raise UserError(
                f"{file.name} returns {found.shape} in onnxruntime, but the model {expected.shape}."
            )
        is_codes = np.issubdtype(expected.dtype, np.integer)
        errors = found != expected if is_codes else np.abs(found - expected)
        result = Comparison(
            name, tuple(one.shape), float(errors.mean() if is_codes else errors.max())
        )
        if result.difference > (MAX_OTHER_CODES if is_codes else TOLERANCE):
            raise UserError(f"{result.line()}, which is too much: the export was not kept.")
        yield result


def open_session(file: Path) -> InferenceSession:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])


def describe(trained: TrainedRun, compared: list[Comparison]) -> str:
    """Return the settings that programs need: how media are preprocessed, and the vocabulary."""
    task = trained.task
    assert isinstance(task, TokenizerTask)
    content = {
        "recipe": trained.run.recipe,
        "step": trained.steps,
        "vocab_size": task.model.vocab_size,
        "num_quantizers": task.model.quantizer.num_quantizers,
        "preprocessing": trained.run.data.preprocessing(),
        "model": encode_config(task.config.model),
        "compared_with_onnxruntime": [dataclasses.asdict(one) for one in compared],
        "tessera": __version__,
    }
    return json.dumps(content, indent=2) + "\n"
