"""A sixth modality in one file: curves of one dimension, stored as CSV files.

`register(MODALITY)` adds the recipes curves-tokenizer and curves-maskgit. No file of the package
changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from tessera.data.dataset import DataConfig, FileDataset
from tessera.data.errors import UnreadableFile
from tessera.data.files import resolve_suffix
from tessera.engine.config import EngineConfig
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import BestMetric
from tessera.modalities import Modality, Recipe
from tessera.nn.masked_transformer import MaskedTransformerConfig
from tessera.nn.quantize import FSQConfig
from tessera.nn.reconstruction import Reconstruction
from tessera.objectives import reconstruction
from tessera.objectives.masked import MaskedConfig
from tessera.run.config import Run


@dataclass
class Curve:
    values: np.ndarray

    def save(self, path: str | Path) -> Path:
        path = resolve_suffix(path, ".csv", (".csv",))
        np.savetxt(path, self.values, delimiter=",")
        return path

    @classmethod
    def sheet(cls, items: list[Curve], labels: Any = ()) -> Curve:
        return cls(np.concatenate([np.atleast_2d(item.values) for item in items]))


@dataclass
class CurveBatch:
    values: Tensor
    captions: list[str]

    def to(self, device: Any) -> CurveBatch:
        return replace(self, values=self.values.to(device))


class CurveFolder(FileDataset):
    def item(self, index: int, rng: np.random.Generator) -> tuple[np.ndarray, str]:
        try:
            values = np.loadtxt(self.files.file(index), delimiter=",", dtype=np.float32)
            return values.reshape(self.config.length), self.sample_caption(index, rng)
        except ValueError as error:
            raise UnreadableFile(f"{self.files.file(index)}: {error}") from error

    def collate(self, examples: list[tuple[np.ndarray, str]]) -> CurveBatch:
        values = torch.from_numpy(np.stack([values for values, _ in examples]))
        return CurveBatch(values, [caption for _, caption in examples])


@dataclass(frozen=True, kw_only=True)
class CurveDataConfig(DataConfig):
    suffixes: ClassVar[tuple[str, ...]] = (".csv",)
    noun: ClassVar[str] = "curves"

    path: str | None = None
    length: int = 32
    val_fraction: float = 0.25

    def folder_dataset(self) -> CurveFolder:
        return CurveFolder(self.find_files(), self)


class CurveModel(nn.Module):
    """Encode every four values as one code."""

    def __init__(self, config: CurveModelConfig):
        super().__init__()
        dim = config.dim
        self.encoder = nn.Sequential(nn.Linear(4, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.quantizer = config.quantizer.build(dim)
        self.decoder = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, 4))
        self.vocab_size = self.quantizer.vocab_size

    def forward(self, values: Tensor) -> Reconstruction:
        quantized = self.quantizer(self.encoder(values.unflatten(1, (-1, 4))))
        output = self.decoder(quantized.latent).flatten(1)
        return Reconstruction(output, quantized.codes, quantized.penalties)

    def encode(self, values: Tensor) -> Tensor:
        return self(values).codes

    def decode(self, codes: Tensor) -> Tensor:
        return self.decoder(self.quantizer.decode(codes)).flatten(1)


@dataclass(frozen=True, kw_only=True)
class CurveModelConfig:
    dim: int = 32
    quantizer: FSQConfig = field(default_factory=lambda: FSQConfig(levels=(5, 5, 5)))

    def grid(self, data: CurveDataConfig) -> tuple[int, ...]:
        return (data.length // 4,)

    def build(self) -> CurveModel:
        return CurveModel(self)


class CurveAdapter(reconstruction.MediaAdapter):
    def target(self, examples: CurveBatch) -> Tensor:
        return examples.values

    def to_media(self, output: Tensor) -> list[Curve]:
        return [Curve(values) for values in output.float().cpu().numpy()]

    def show_pairs(self, output: Tensor, batch: Any) -> list[Curve]:
        return self.to_media(torch.stack([batch.examples.values, output], dim=1))


class CurveLoss(reconstruction.ReconstructionLoss):
    best_metric = BestMetric(name="mse", higher_is_better=False)

    def losses(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"mse": (output - batch.examples.values).square().mean()}

    def eval_step(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"mse": (output - batch.examples.values).square().mean(1).double().sum()}

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        return {"mse": float(totals["mse"] / totals["examples"])}


@dataclass(frozen=True, kw_only=True)
class CurveLossConfig(reconstruction.ReconstructionConfig):
    def build(self) -> CurveLoss:
        return CurveLoss()


@dataclass(frozen=True, kw_only=True)
class CurveTokenizerConfig(reconstruction.TokenizerConfig):
    model: CurveModelConfig = field(default_factory=CurveModelConfig)
    reconstruction: CurveLossConfig = field(default_factory=CurveLossConfig)

    def build_adapter(self) -> CurveAdapter:
        return CurveAdapter()


def curves_tokenizer() -> Run:
    """Train a tokenizer of curves."""
    task = CurveTokenizerConfig(optimizer=OptimizerConfig(lr=3e-3))
    data = CurveDataConfig()
    return Run(recipe="curves-tokenizer", task=task, data=data, engine=EngineConfig(steps=300))


def curves_maskgit(tokenizer: str = "runs/curves-tokenizer") -> Run:
    """Train a generator of curves from text."""
    model = MaskedTransformerConfig(dim=32, depth=2, heads=2)
    task = MaskedConfig(tokenizer=tokenizer, model=model, optimizer=OptimizerConfig(lr=3e-3))
    data = CurveDataConfig()
    return Run(recipe="curves-maskgit", task=task, data=data, engine=EngineConfig(steps=300))


def make_recipe(name: str, task: str, kind: str, metric: str) -> Recipe:
    data = f"{__name__}:CurveDataConfig"
    return Recipe(build=f"{__name__}:{name}", task=task, data=data, kind=kind, metric=metric)


TOKENIZER = make_recipe("curves_tokenizer", f"{__name__}:CurveTokenizerConfig", "tokenizer", "mse")
GENERATOR = make_recipe(
    "curves_maskgit", "tessera.objectives.masked:MaskedConfig", "generator", "cross_entropy"
)
MODALITY = Modality(name="curve", media=f"{__name__}:Curve", recipes=(TOKENIZER, GENERATOR))
