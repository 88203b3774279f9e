"""MeshGPT's second stage: which face comes next? (Siddiqui et al. 2023, arXiv 2311.15475, section
3.2)

A face is S symbols, those of its corners. One transformer goes over faces: at each it has seen all
faces before and says, as one vector, what the next will be like. A second, small one goes over the
symbols of that face, from that vector on. So most of the attention runs over S times fewer places
than there are symbols (as in MEGABYTE; Yu 2023, arXiv 2305.07185, section 2).

The mesh's end is a symbol too, and stands only where a face could begin: every mesh is a whole
number of faces.

B meshes, F faces, S symbols of a face, W width, E width within a face, L levels of the tokenizer, V
vocabulary; V itself is the end. Codes are (B, F, S), corner by corner, and -1 after a mesh's last
face.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.causal_transformer import CausalTransformer, KVCache
from tessera.nn.precision import to_fp32
from tessera.nn.transformer import ContextKV, States, linear
from tessera.text.encoder import LearnedTextConfig, PretrainedTextConfig

FEWEST_ROWS = 4
"""Some CPUs round products of fewer rows otherwise, and a seed's mesh would depend on the batch."""


@dataclass(frozen=True, kw_only=True)
class MeshTransformerConfig:
    dim: int = 256
    depth: int = 6
    heads: int = 8
    fine_dim: int = 128
    """Of the transformer within a face."""
    fine_depth: int = 2
    fine_heads: int = 4
    max_len: int = 800
    """Faces of the largest mesh."""
    text: LearnedTextConfig | PretrainedTextConfig | None = field(default_factory=LearnedTextConfig)
    """What reads the captions; none makes a model without prompts."""

    def __post_init__(self) -> None:
        for name in (
            "width",
            "depth",
            "heads",
            "fine_width",
            "fine_depth",
            "fine_heads",
            "longest",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"A mesh transformer's {name} is at least 1, but it is {getattr(self, name)}."
                )

    def build(self, vocab_size: int, corners: int, levels: int) -> MeshTransformer:
        return MeshTransformer(self, vocab_size, corners, levels)


@dataclass
class Guesses:
    """How likely each symbol was, for every symbol that some meshes have, their ends included and
    padding not."""

    logits_MV: Tensor
    """(M, V + 1); the end is impossible where no face begins"""
    targets_M: Tensor
    mesh_M: Tensor
    """Which mesh of the batch each belongs to"""
    meshes: int

    def cross_entropy_B(self) -> Tensor:
        """The mean over each mesh's symbols."""
        lost_M = F.cross_entropy(to_fp32(self.logits_MV), self.targets_M, reduction="none")
        symbols_B = torch.bincount(self.mesh_M, minlength=self.meshes)
        return lost_M.new_zeros(self.meshes).index_add(0, self.mesh_M, lost_M) / symbols_B


class MeshTransformer(nn.Module):
    def __init__(self, config: MeshTransformerConfig, vocab_size: int, corners: int, levels: int):
        super().__init__()
        self.config, self.vocab_size, self.slots = config, vocab_size, corners * levels
        self.text = config.text.build() if config.text is not None else None
        context = self.text.dim if self.text is not None else None
        dim, fine = config.dim, config.fine_dim
        self.faces = CausalTransformer(
            dim, config.depth, config.heads, config.max_len + 1, context=context
        )
        self.within = CausalTransformer(fine, config.fine_depth, config.fine_heads, self.slots)
        self.tokens = nn.Embedding(
            levels * vocab_size, fine
        )  # a symbol says the same of any corner, but not at any level
        self.to_face = linear(self.slots * fine, dim)
        self.beginning = nn.Parameter(torch.randn(dim))
        self.to_symbols = linear(dim, fine)
        self.slot = nn.Parameter(torch.randn(self.slots, fine) * 0.5)
        self.head = linear(fine, vocab_size + 1)
        nn.init.normal_(self.head.weight, std=0.02)  # nearly even, but for no two symbols the same
        offsets = torch.arange(levels).repeat(corners) * vocab_size
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("impossible_SV", impossible(self.slots, vocab_size), persistent=False)
        self.offsets: Tensor
        self.impossible_SV: Tensor

    @property
    def end(self) -> int:
        """What stands for a mesh's end."""
        return self.vocab_size

    def condition(self, texts: Sequence[str], dropped: Sequence[bool]) -> list[ContextKV] | None:
        """What the texts say, nothing where they are dropped or empty."""
        if self.text is None:
            return None
        states = self.text(texts)
        kept = torch.tensor(
            [bool(text) and not one for text, one in zip(texts, dropped)], device=states.mask.device
        )
        return self.faces.project_context(States(states.values, states.mask & kept[:, None]))

    # ---- all at once

    def guesses(self, codes_BFS: Tensor, condition: list[ContextKV] | None) -> Guesses:
        """Each symbol from all before it. Only what is asked for is computed within faces: padding
        costs nothing there."""
        self.refuse_strange(codes_BFS)
        batch, most, _ = codes_BFS.shape
        read_BFSE = self.read(codes_BFS)
        states_BFW = self.states(read_BFSE, condition)
        mesh_P, face_P = (codes_BFS[..., 0] >= 0).nonzero(as_tuple=True)
        mesh_B = torch.arange(batch, device=codes_BFS.device)
        last_B = torch.bincount(
            mesh_P, minlength=batch
        )  # F + 1 places: behind a mesh's last face there is one for its end
        asked = mesh_P * (most + 1) + face_P, mesh_B * (most + 1) + last_B
        states_PW, states_BW = (states_BFW.flatten(0, 1).index_select(0, rows) for rows in asked)
        rows_P = mesh_P * most + face_P
        inner_PSV = self.token_logits(
            states_PW, read_BFSE.flatten(0, 1).index_select(0, rows_P)[:, :-1]
        )
        end_B1V = self.token_logits(states_BW, read_BFSE.new_empty(batch, 0, read_BFSE.shape[-1]))
        return Guesses(
            torch.cat([inner_PSV.flatten(0, 1), end_B1V.flatten(0, 1)]),
            torch.cat(
                [codes_BFS.flatten(0, 1)[rows_P].flatten(), torch.full_like(mesh_B, self.end)]
            ),
            torch.cat([mesh_P.repeat_interleave(self.slots), mesh_B]),
            batch,
        )

    def read(self, codes_BFS: Tensor) -> Tensor:
        """A vector for each symbol, (B, F, S, E)."""
        return self.tokens(codes_BFS.clamp_min(0) + self.offsets)

    def states(
        self, read_BFSE: Tensor, condition: list[ContextKV] | None, cache: KVCache | None = None
    ) -> Tensor:
        """(B, F + 1, W): at the beginning and after each face, what will come next."""
        faces_BFW = self.to_face(read_BFSE.flatten(2))
        begun = torch.cat(
            [self.beginning.to(faces_BFW.dtype).expand(len(faces_BFW), 1, -1), faces_BFW], dim=1
        )
        return self.faces(begun, condition, cache)

    def token_logits(self, states_PW: Tensor, read_PSE: Tensor) -> Tensor:
        """For faces from their states on: logits of their first symbol, and of one more behind each
        symbol that is read."""
        x_PSE = torch.cat([self.to_symbols(states_PW)[:, None], read_PSE], dim=1)
        return self.judged(self.within(x_PSE + self.slot[: x_PSE.shape[1]]), first=0)

    def judged(self, states_PSE: Tensor, first: int) -> Tensor:
        """(P, S, V + 1), the first of them those of slot `first`."""
        slots = slice(first, first + states_PSE.shape[1])
        return self.head(states_PSE).masked_fill_(self.impossible_SV[slots], -math.inf)

    # ---- symbol by symbol

    @torch.no_grad()
    def start(self, condition: list[ContextKV] | None, faces_BFS: Tensor) -> DecodingState:
        """Meshes that begin with these faces, as many in each and maybe none, and can be gone on
        with."""
        self.refuse_strange(faces_BFS)
        return DecodingState(self, condition, faces_BFS)

    def refuse_strange(self, codes_BFS: Tensor) -> None:
        if codes_BFS.ndim != 3 or codes_BFS.shape[2] != self.slots:
            raise ValueError(
                f"Codes of shape {tuple(codes_BFS.shape)} came to a transformer whose faces have {self.slots} symbols: give "
                f"them as (meshes, faces, {self.slots}). Those of another tokenizer mean nothing here."
            )
        if codes_BFS.shape[1] > self.config.max_len:
            raise ValueError(
                f"A mesh of {codes_BFS.shape[1]} faces came to a transformer that knows {self.config.max_len}: leave out or "
                "simplify larger ones, or build it with a larger `max_len`."
            )
        if (
            codes_BFS.numel() and int(codes_BFS.max()) >= self.vocab_size
        ):  # it would be read as one of the next level
            raise ValueError(
                f"Symbol {int(codes_BFS.max())} came to a transformer that knows {self.vocab_size}, 0 to "
                f"{self.vocab_size - 1}: it is another tokenizer's, or an end, which belongs to no face."
            )


class DecodingState:
    """Meshes in the making: told the symbols that were just laid, it gives logits for those to
    come."""

    def __init__(
        self, model: MeshTransformer, condition: list[ContextKV] | None, faces_BFS: Tensor
    ):
        self.model, self.count = model, len(faces_BFS)
        self.more = torch.arange(FEWEST_ROWS, device=faces_BFS.device).clamp_max(self.count - 1)
        """What stands in the rows, where meshes are fewer than rows must be"""
        self.condition = (
            [self.rows_of(context_kv) for context_kv in condition]
            if condition is not None
            else None
        )
        self.coarse, self.fine = KVCache(), KVCache()
        self.offsets, self.slots, self.impossible = (
            model.offsets.tolist(),
            model.slot.unbind(0),
            model.impossible_SV.unbind(0),
        )
        self.begun: list[Tensor] = []
        """Of the face that is begun, the vectors of its symbols so far, (B, E) each"""
        self.state_BW = model.states(
            model.read(self.enough(faces_BFS)), self.condition, self.coarse
        )[:, -1]

    @torch.no_grad()
    def __call__(self, symbols_B: Tensor | None) -> Tensor:
        """(B, V + 1); None before the first."""
        if symbols_B is not None:
            self.lay(self.enough(symbols_B))
        slot = len(self.begun)
        x_BE = self.begun[-1] if slot else self.model.to_symbols(self.state_BW)
        states_BE = self.model.within.one_more(x_BE + self.slots[slot], None, self.fine)
        return to_fp32(
            self.model.head(states_BE).masked_fill_(self.impossible[slot], -math.inf)[: self.count]
        )

    def lay(self, symbols_B: Tensor) -> None:
        self.begun.append(self.model.tokens(symbols_B + self.offsets[len(self.begun)]))
        if len(self.begun) == self.model.slots:
            face_BW = self.model.to_face(torch.cat(self.begun, dim=1))
            self.state_BW = self.model.faces.one_more(face_BW, self.condition, self.coarse)
            self.begun, self.fine.length = [], 0

    def enough(self, rows: Tensor) -> Tensor:
        return rows if self.count >= FEWEST_ROWS else rows[self.more]

    def rows_of(self, context_kv: ContextKV) -> ContextKV:
        return ContextKV(
            self.enough(context_kv.keys),
            self.enough(context_kv.values),
            self.enough(context_kv.mask),
        )


def impossible(slots: int, vocab_size: int) -> Tensor:
    """(S, V + 1): a mesh does not end within a face."""
    table = torch.zeros(slots, vocab_size + 1, dtype=torch.bool)
    table[1:, vocab_size] = True
    return table
