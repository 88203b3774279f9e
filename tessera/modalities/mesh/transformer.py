"""The autoregressive transformer of MeshGPT (Siddiqui et al. 2023, arXiv 2311.15475, section 3.2).

A mesh is a sequence of N faces of S tokens each. One transformer runs over the faces: at each it
attends to all earlier faces and returns one vector for the next face. A second, small transformer
predicts the S tokens of that face from this vector. Most of the attention therefore runs over
sequences that are S times shorter than the number of tokens (as in MEGABYTE; Yu 2023,
arXiv 2305.07185, section 2).

The end-of-sequence token is possible only where a face would begin, so every mesh is a whole number
of faces.

B meshes, N faces, S tokens of a face, W `dim`, E `fine_dim`, V vocabulary; token id V is the end of
the sequence. Tokens are (B, N, S), corner by corner, with -1 after the last face of a mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tessera.engine.device import move_tensors
from tessera.modalities.mesh.next_token import (
    NextTokenPredictions,
    RowPadding,
    TextConditionedTransformer,
)
from tessera.nn.causal_transformer import CausalTransformer, KVCache
from tessera.nn.precision import to_fp32
from tessera.nn.transformer import ContextKV, States, linear
from tessera.text.learned import LearnedTextConfig
from tessera.text.pretrained import PretrainedTextConfig


@dataclass(frozen=True, kw_only=True)
class MeshTransformerConfig:
    dim: int = 256
    """The embedding dimension of the transformer over faces."""
    depth: int = 6
    """The number of blocks of the transformer over faces."""
    heads: int = 8
    """The number of attention heads of the transformer over faces."""
    fine_dim: int = 128
    """The embedding dimension of the transformer within a face."""
    fine_depth: int = 2
    """The number of blocks of the transformer within a face."""
    fine_heads: int = 4
    """The number of attention heads of the transformer within a face."""
    max_len: int = 800
    """The maximum number of faces of a mesh."""
    dropout: float = 0.0
    """The fraction of channels that are dropped in training, in the transformer over faces."""
    text: LearnedTextConfig | PretrainedTextConfig | None = field(default_factory=LearnedTextConfig)
    """The text encoder for captions; none trains a model without prompts."""

    def __post_init__(self) -> None:
        for name in ("dim", "depth", "heads", "fine_dim", "fine_depth", "fine_heads", "max_len"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} of a mesh transformer must be at least 1, got {getattr(self, name)}."
                )

    def build(self, vocab_size: int, corners: int, num_quantizers: int) -> MeshTransformer:
        """Build the model for a tokenizer with `num_quantizers` tokens per corner."""
        return MeshTransformer(self, vocab_size, corners, num_quantizers)


@dataclass
class FaceInputs:
    """The real faces of a batch as indices, made on the CPU, and its dropout."""

    dropout_LBW: Tensor | None
    state_P: Tensor
    """The states that predict faces, into the flattened (B x (N + 1))."""
    end_B: Tensor
    """The states that predict the ends, into the same."""
    face_P: Tensor
    """The real faces, into the flattened (B x N)."""
    example_M: Tensor
    """The row of the batch that each token to predict belongs to."""
    count_B: Tensor
    """The number of tokens to predict of each mesh."""


class MeshTransformer(TextConditionedTransformer):
    def __init__(
        self, config: MeshTransformerConfig, vocab_size: int, corners: int, num_quantizers: int
    ):
        super().__init__(
            config.text,
            vocab_size=vocab_size,
            max_len=config.max_len,
            dim=config.dim,
            depth=config.depth,
            heads=config.heads,
        )
        self.config = config
        self.tokens_per_position = corners * num_quantizers
        dim, fine = config.dim, config.fine_dim
        self.token_transformer = CausalTransformer(
            fine, config.fine_depth, config.fine_heads, self.tokens_per_position
        )
        # One table for all corners, but one for each quantizer of the tokenizer.
        self.token_embedding = nn.Embedding(num_quantizers * vocab_size, fine)
        self.to_face = linear(self.tokens_per_position * fine, dim)
        self.bos_embedding = nn.Parameter(torch.randn(dim))
        self.to_first_token = linear(dim, fine)
        self.position_embedding = nn.Parameter(torch.randn(self.tokens_per_position, fine) * 0.5)
        self.head = linear(fine, vocab_size + 1)
        nn.init.normal_(self.head.weight, std=0.02)  # nearly uniform, but no two tokens alike
        offsets = torch.arange(num_quantizers).repeat(corners) * vocab_size
        impossible_SV = build_impossible_mask(self.tokens_per_position, vocab_size)
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("impossible_SV", impossible_SV, persistent=False)
        self.offsets: Tensor
        self.impossible_SV: Tensor

    # ---- teacher forcing

    def prepare_inputs(
        self,
        tokens_BNS: Tensor,
        generators: Sequence[torch.Generator] | None = None,
        texts: Sequence[str] = (),
    ) -> FaceInputs:
        """Find the real faces of tokens on the CPU, and draw dropout if `generators` are given."""
        self.validate_tokens(tokens_BNS)
        batch, count, slots = tokens_BNS.shape
        example_P, face_P = (tokens_BNS[..., 0] >= 0).nonzero(as_tuple=True)
        example_B = torch.arange(batch)
        # There are N + 1 states: the one after the last face of a mesh predicts its end.
        last_B = torch.bincount(example_P, minlength=batch)
        return FaceInputs(
            dropout_LBW=self.transformer.sample_dropout(generators, self.config.dropout),
            state_P=example_P * (count + 1) + face_P,
            end_B=example_B * (count + 1) + last_B,
            face_P=example_P * count + face_P,
            example_M=torch.cat([example_P.repeat_interleave(slots), example_B]),
            count_B=last_B * slots + 1,
        )

    def predict(
        self,
        tokens_BNS: Tensor,
        condition: States | None,
        inputs: FaceInputs | None = None,
    ) -> NextTokenPredictions:
        """Predict each token from all earlier ones; `inputs` are those of `prepare_inputs`.

        The transformer within faces runs on real faces only, so padding costs nothing there.
        """
        if inputs is None:
            inputs = move_tensors(self.prepare_inputs(tokens_BNS.cpu()), tokens_BNS.device)
        embedded_BNSE = self.embed(tokens_BNS)
        states_BNW = self.face_states(embedded_BNSE, condition, dropout_LBW=inputs.dropout_LBW)
        states_PW, states_BW = (
            states_BNW.flatten(0, 1).index_select(0, row) for row in (inputs.state_P, inputs.end_B)
        )
        inner_PSV = self.token_logits(
            states_PW, embedded_BNSE.flatten(0, 1).index_select(0, inputs.face_P)[:, :-1]
        )
        end_B1V = self.token_logits(
            states_BW, embedded_BNSE.new_empty(len(tokens_BNS), 0, embedded_BNSE.shape[-1])
        )
        targets_PS = tokens_BNS.flatten(0, 1)[inputs.face_P]
        ends_B = torch.full_like(inputs.end_B, self.eos_token_id)
        return NextTokenPredictions(
            torch.cat([inner_PSV.flatten(0, 1), end_B1V.flatten(0, 1)]),
            torch.cat([targets_PS.flatten(), ends_B]),
            inputs.example_M,
            inputs.count_B,
        )

    def embed(self, tokens_BNS: Tensor) -> Tensor:
        """Return an embedding for each token, (B, N, S, E)."""
        return self.token_embedding(tokens_BNS.clamp_min(0) + self.offsets)

    def face_states(
        self,
        embedded_BNSE: Tensor,
        condition: States | list[ContextKV] | None,
        cache: KVCache | None = None,
        dropout_LBW: Tensor | None = None,
    ) -> Tensor:
        """Return (B, N + 1, W): the state at the start and after each face, for the next face."""
        faces_BNW = self.to_face(embedded_BNSE.flatten(2))
        bos_B1W = self.bos_embedding.to(faces_BNW.dtype).expand(len(faces_BNW), 1, -1)
        x_BNW = torch.cat([bos_B1W, faces_BNW], dim=1)
        return self.transformer(x_BNW, condition, cache, dropout_LBW)

    def token_logits(self, states_PW: Tensor, embedded_PSE: Tensor) -> Tensor:
        """Return (P, S + 1, V + 1): the logits of the first token of each face, and of one more
        token after each that is given."""
        x_PSE = torch.cat([self.to_first_token(states_PW)[:, None], embedded_PSE], dim=1)
        count = x_PSE.shape[1]
        states_PSE = self.token_transformer(x_PSE + self.position_embedding[:count])
        return self.head(states_PSE).masked_fill_(self.impossible_SV[:count], -math.inf)

    # ---- token by token

    @torch.no_grad()
    def start_decoding(self, condition: States | None, prefix_BNS: Tensor) -> DecodingState:
        """Start decoding after these faces, the same number for each mesh and possibly none."""
        self.validate_tokens(prefix_BNS)
        return DecodingState(self, condition, prefix_BNS)

    def validate_tokens(self, tokens_BNS: Tensor) -> None:
        """Raise ValueError for a wrong shape, too many faces or unknown token ids."""
        if tokens_BNS.ndim != 3 or tokens_BNS.shape[2] != self.tokens_per_position:
            raise ValueError(
                f"Got tokens of shape {tuple(tokens_BNS.shape)}, expected (meshes, faces, "
                f"{self.tokens_per_position}): use the tokenizer that this model was trained with."
            )
        if tokens_BNS.shape[1] > self.max_len:
            raise ValueError(
                f"Got a mesh of {tokens_BNS.shape[1]} faces, but the maximum of this transformer "
                f"is {self.max_len}: leave out or simplify larger meshes, or build it with a "
                "larger `max_len`."
            )
        # A larger id would be embedded as a token of the next quantizer.
        if tokens_BNS.numel() and int(tokens_BNS.max()) >= self.vocab_size:
            raise ValueError(
                f"Got token id {int(tokens_BNS.max())}, expected 0 to {self.vocab_size - 1}: use "
                "the tokenizer that this model was trained with, and no end token within the faces."
            )


class DecodingState:
    """Decodes a batch of meshes: called with the tokens just chosen, it returns the next logits."""

    def __init__(self, model: MeshTransformer, condition: States | None, prefix_BNS: Tensor):
        self.model, self.count = model, len(prefix_BNS)
        self.padding = RowPadding(self.count, prefix_BNS.device)
        self.condition = model.project_condition(condition, self.padding)
        self.face_cache, self.token_cache = KVCache(), KVCache()
        self.offsets = model.offsets.tolist()
        self.positions = model.position_embedding.unbind(0)
        self.impossible = model.impossible_SV.unbind(0)
        self.current_face: list[Tensor] = []
        """The embeddings of the tokens of the unfinished face so far, (B, E) each."""
        embedded = model.embed(self.padding.pad(prefix_BNS))
        self.state_BW = model.face_states(embedded, self.condition, self.face_cache)[:, -1]

    @torch.no_grad()
    def __call__(self, tokens_B: Tensor | None) -> Tensor:
        """Return logits (B, V + 1) for the token after `tokens_B`, which is None at first."""
        if tokens_B is not None:
            self.append(self.padding.pad(tokens_B))
        position = len(self.current_face)
        x_BE = self.current_face[-1] if position else self.model.to_first_token(self.state_BW)
        states_BE = self.model.token_transformer.decode_step(
            x_BE + self.positions[position], None, self.token_cache
        )
        logits_BV = self.model.head(states_BE).masked_fill_(self.impossible[position], -math.inf)
        return to_fp32(logits_BV[: self.count])

    def append(self, tokens_B: Tensor) -> None:
        """Add a token to the unfinished face, and the face to its mesh if it is complete."""
        offset = self.offsets[len(self.current_face)]
        self.current_face.append(self.model.token_embedding(tokens_B + offset))
        if len(self.current_face) == self.model.tokens_per_position:
            face_BW = self.model.to_face(torch.cat(self.current_face, dim=1))
            self.state_BW = self.model.transformer.decode_step(
                face_BW, self.condition, self.face_cache
            )
            self.current_face, self.token_cache.length = [], 0


def build_impossible_mask(tokens_per_position: int, vocab_size: int) -> Tensor:
    """Return (S, V + 1) bool: True for the end token at all but the first token of a face."""
    mask = torch.zeros(tokens_per_position, vocab_size + 1, dtype=torch.bool)
    mask[1:, vocab_size] = True
    return mask
