"""Autoregressive generation of meshes: face by face, or along the edges."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tessera.modalities.mesh.grid_report import describe_training_grid
from tessera.modalities.mesh.transformer import MeshTransformer, MeshTransformerConfig
from tessera.modalities.mesh.tree_tokenizer import TreeTokenizer
from tessera.modalities.mesh.tree_transformer import TreeTransformer, TreeTransformerConfig
from tessera.objectives.autoregressive import AutoregressiveConfig, AutoregressiveTask
from tessera.objectives.generation import (
    MediaInputs,
    PromptEncoder,
    TokenizedGeneratorConfig,
    TokenizerProtocol,
    TokenPrompt,
)

if TYPE_CHECKING:
    from tessera.modalities.mesh.dataset import MeshDataConfig


@dataclass(frozen=True, kw_only=True)
class MeshGeneratorConfig(AutoregressiveConfig, TokenizedGeneratorConfig):
    tokenizer: str = "runs/meshes-autoencoder"
    """The run of the tokenizer whose tokens are generated; it is copied into the run directory."""
    model: MeshTransformerConfig = field(default_factory=MeshTransformerConfig)

    def validate_data(self, data: MeshDataConfig) -> None:
        super().validate_data(data)
        if data.max_faces > self.model.max_len:
            raise ValueError(
                f"Meshes may have {data.max_faces} faces, but the transformer supports at most "
                f"{self.model.max_len}: set --data.max-faces {self.model.max_len}, or "
                f"--task.model.max-len {data.max_faces}."
            )

    def build_model(self, tokenizer: TokenizerProtocol) -> MeshTransformer:
        _, corners = tokenizer.grid
        return self.model.build(tokenizer.vocab_size, corners, tokenizer.num_quantizers)

    def encode_prompt(self, inputs: MediaInputs, encoder: PromptEncoder) -> TokenPrompt | None:
        """Return the faces of a mesh to continue."""
        return None if inputs.data is None else TokenPrompt(encoder.encode_file(inputs.data))


@dataclass(frozen=True, kw_only=True)
class TreeGeneratorConfig(AutoregressiveConfig):
    model: TreeTransformerConfig = field(default_factory=TreeTransformerConfig)

    def validate_data(self, data: MeshDataConfig) -> None:
        if data.bins != self.model.bins:
            raise ValueError(
                f"The data have {data.bins} bins, but the transformer {self.model.bins}: set "
                f"--data.bins {self.model.bins}, or --task.model.bins {data.bins}."
            )
        if data.polygons != "triangles":
            raise ValueError(
                "The tree tokenizer encodes triangles only: use --data.polygons triangles."
            )

    def notice(self, data: MeshDataConfig) -> str:
        return describe_training_grid(data)

    def build_model(self, tokenizer: TokenizerProtocol) -> TreeTransformer:
        return self.model.build()

    def build(self, **dependencies: TokenizerProtocol) -> AutoregressiveTask:
        tokenizer = TreeTokenizer(self.model.bins, self.model.max_len)
        return AutoregressiveTask(self, tokenizer=tokenizer)

    def encode_prompt(self, inputs: MediaInputs, encoder: PromptEncoder) -> TokenPrompt | None:
        """Return the tokens of a mesh to continue."""
        return None if inputs.data is None else TokenPrompt(encoder.encode_file(inputs.data))
