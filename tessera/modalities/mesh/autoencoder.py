"""The autoencoder of MeshGPT: encodes a mesh as tokens of the corners of its faces (Siddiqui et al.
2023, arXiv 2311.15475).

The features of a face are the coordinates of its corners, its angles, its area and its normal. A
graph network exchanges features between faces that share an edge. At each vertex the features of
the faces around it are averaged and its position is added, so corners at the same vertex have the
same tokens (section 3.1). The decoder, a convolutional network along the sequence of faces,
predicts a distribution over bins for each coordinate of each corner.

Padding has no influence: the encoder runs on the real faces of all meshes, concatenated, and in the
decoder padding is zero wherever a convolution could reach it.

B meshes, F faces of the largest, K corners of a face, V vertices, P real faces of the whole batch,
E pairs of adjacent faces, C = 3K coordinates, W channels, L quantizers of a residual quantizer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tessera.nn.init import init_fan_in_
from tessera.nn.precision import to_fp32
from tessera.nn.quantize import LFQConfig, Quantizer, QuantizerConfig, ResidualConfig
from tessera.nn.reconstruction import Reconstruction
from tessera.nn.transformer import Norm, States, Transformer

if TYPE_CHECKING:
    from tessera.modalities.mesh.dataset import MeshDataConfig

HEADS = 4
"""The number of attention heads."""

MAX_AREA = 1.5
"""More than the area of any triangle or quad within a cube of side 1: the rectangle between two
opposite edges has 1.41."""


class MeshInputs(Protocol):
    """A batch of meshes in canonical form, padded with -1."""

    vertices: Tensor
    """(B, V, 3) int64: the bin of each coordinate."""
    faces: Tensor
    """(B, F, K) int64: the vertices of each face."""
    edges: Tensor
    """(B, E, 2) int64: pairs of faces that share an edge, in both directions."""


@dataclass(frozen=True, kw_only=True)
class MeshAutoencoderConfig:
    corners: Literal[3, 4] = 3
    """The number of corners of a face: 3 for triangles, 4 for quads."""
    bins: int = 128
    """The number of bins along each axis of the cube that a mesh fills."""
    coordinate_dim: int = 64
    """The embedding dimension of each coordinate of a corner, in the encoder and in the decoder."""
    angle_dim: int = 16
    """The embedding dimension of the angle at each corner."""
    area_dim: int = 16
    """The embedding dimension of the area of a face."""
    normal_dim: int = 64
    """The embedding dimension of each component of the normal of a face."""
    angle_bins: int = 128
    """The number of bins of an angle."""
    area_bins: int = 128
    """The number of bins of an area."""
    normal_bins: int = 128
    """The number of bins of each component of a normal."""
    encoder: tuple[int, ...] = (64, 128, 256, 256)
    """The channels of each graph convolution; each one extends the receptive field of a face by
    one edge."""
    encoder_attention: int = 0
    """The number of transformer blocks after the graph convolutions, with attention between all
    faces of a mesh."""
    code_dim: int = 192
    """The number of channels of a vertex before quantization."""
    decoder: tuple[int, ...] = (128, 128, 192, 192)
    """The channels of each residual block of the decoder; each one extends the receptive field by
    two faces in both directions."""
    decoder_attention: int = 0
    """The number of transformer blocks after the residual blocks of the decoder."""
    quantizer: QuantizerConfig = field(
        default_factory=lambda: ResidualConfig(
            quantizer=LFQConfig(codebook_size=2**14), num_quantizers=2
        )
    )
    """The quantizer of the features of a vertex."""

    def __post_init__(self) -> None:
        if self.corners not in (3, 4):
            raise ValueError(f"`corners` of a face must be 3 or 4, got {self.corners}.")
        for name in ("bins", "angle_bins", "area_bins", "normal_bins"):
            if getattr(self, name) < 2:
                raise ValueError(
                    f"`{name}` must be at least 2, got {getattr(self, name)}: use for example 128."
                )
        for name in ("coordinate_dim", "angle_dim", "area_dim", "normal_dim", "code_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        for name in ("encoder", "decoder"):
            channels = getattr(self, name)
            if not channels or min(channels) < 1:
                raise ValueError(
                    f"`{name}` must list the channels of at least one layer, each at least 1, got "
                    f"{channels}."
                )
            blocks = getattr(self, f"{name}_attention")
            if blocks < 0:
                raise ValueError(f"`{name}_attention` must be at least 0, got {blocks}.")

    def validate_data(self, data: MeshDataConfig) -> None:
        """Raise ValueError if this model cannot encode the meshes of a data configuration."""
        if data.bins != self.bins:
            raise ValueError(
                f"The meshes have {data.bins} bins along each axis, but this model has "
                f"{self.bins}: use the same number for both."
            )
        if data.polygons != self.polygons:
            raise ValueError(
                f"The meshes have {data.polygons}, but the faces of this model have {self.corners} "
                f"corners: set `polygons` to {self.polygons}, or `corners` to {7 - self.corners}."
            )

    def grid(self, data: MeshDataConfig) -> tuple[int, ...]:
        """Return the shape of the token grid of a mesh; unused positions are -1."""
        return (data.max_faces, self.corners)

    @property
    def polygons(self) -> Literal["triangles", "quads"]:
        return "triangles" if self.corners == 3 else "quads"

    def build(self) -> MeshAutoencoder:
        return MeshAutoencoder(self)


class MeshAutoencoder(nn.Module):
    def __init__(self, config: MeshAutoencoderConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.quantizer: Quantizer = config.quantizer.build(config.code_dim)
        # Meshes differ in their number of vertices, so even a plain mean over vertices needs the
        # statistics of all micro-batches.
        self.quantizer.needs_global_stats = True
        self.decoder = Decoder(config)

    @property
    def vocab_size(self) -> int:
        return self.quantizer.vocab_size

    @property
    def num_quantizers(self) -> int:
        return self.quantizer.num_quantizers

    @property
    def last_layer(self) -> nn.Parameter:
        return self.decoder.to_coordinates.weight  # type: ignore[return-value]

    def forward(
        self,
        meshes: MeshInputs,
        *,
        num_quantizers_B: Tensor | None = None,
        graph: FaceGraph | None = None,
    ) -> Reconstruction:
        """Encode and decode; `output` are logits (B, F, C, bins), `codes` are those of `encode`.

        `graph` is that of the meshes, if it was built before: on a device, building it waits.
        """
        graph = graph or self.graph(meshes)
        latent = self.encoder(graph)
        quantized = self.quantizer(latent.values, latent.mask, num_quantizers_B=num_quantizers_B)
        output = self.decoder(graph.at_corners(quantized.latent, padding=0), graph.real_BF)
        return Reconstruction(
            output, graph.at_corners(quantized.codes, padding=-1), quantized.penalties
        )

    def encode(self, meshes: MeshInputs) -> Tensor:
        """Return the tokens of each corner, (B, F, K), or (B, F, K, L) with a residual quantizer,
        and -1 at padding."""
        graph = self.graph(meshes)
        latent = self.encoder(graph)
        return graph.at_corners(self.quantizer(latent.values, latent.mask).codes, padding=-1)

    def decode(self, codes: Tensor) -> Tensor:
        """Decode the tokens of corners, as `encode` returns them, to logits (B, F, C, bins)."""
        if codes.ndim < 3 or codes.shape[2] != self.config.corners:
            raise ValueError(
                f"Got codes of shape {tuple(codes.shape)}, but this model has "
                f"{self.config.polygons}: pass (meshes, faces, {self.config.corners}), or one more "
                "dimension for the quantizers."
            )
        real_BF = codes.flatten(2)[..., 0] >= 0
        latent_BFKW = self.quantizer.decode(codes.clamp_min(0)) * real_BF[..., None, None]
        # At padding all logits are 0, which gives degenerate faces.
        return self.decoder(latent_BFKW, real_BF) * real_BF[..., None, None]

    @torch.no_grad()
    def tokenize(self, meshes: MeshInputs) -> Tensor:
        """Encode in evaluation mode, whatever the current mode is."""
        was_training = self.training
        try:
            return self.eval().encode(meshes)
        finally:
            self.train(was_training)

    @torch.no_grad()
    def decode_from_codes_to_faces(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Return coordinates (B, F, K, 3) of the most likely bins and (B, F) which faces are real.

        The first bin is at -1 and the last at 1; at padding the coordinates are 0.
        """
        bins_BFC = self.decode(codes).argmax(-1)
        real_BF = codes.flatten(2)[..., 0] >= 0
        coordinates_BFC = 2 * bins_BFC / (self.config.bins - 1) - 1
        return (coordinates_BFC * real_BF[..., None]).unflatten(2, (-1, 3)), real_BF

    def latent(self, meshes: MeshInputs, graph: FaceGraph | None = None) -> States:
        """Return the features of each vertex before quantization, (B, V, W), and which vertices
        belong to a face."""
        return self.encoder(graph or self.graph(meshes))

    def batch_stats(
        self,
        meshes: MeshInputs,
        *,
        num_quantizers_B: Tensor | None = None,
        graph: FaceGraph | None = None,
    ) -> Tensor:
        """Return the statistics of a micro-batch; see `Quantizer.batch_stats`."""
        latent = self.latent(meshes, graph)
        return self.quantizer.batch_stats(
            latent.values, latent.mask, num_quantizers_B=num_quantizers_B
        )

    def graph(self, meshes: MeshInputs) -> FaceGraph:
        """Validate a batch and build its graph."""
        corners = meshes.faces.shape[-1]
        if corners != self.config.corners:
            raise ValueError(
                f"Got faces with {corners} corners, but this model has {self.config.polygons}: "
                f"load the meshes as {self.config.polygons}, or build the model with "
                f"corners={corners}."
            )
        if int(meshes.vertices.max()) >= self.config.bins:
            raise ValueError(
                f"Got a vertex in bin {int(meshes.vertices.max())}, but the bins of this model are "
                f"0 to {self.config.bins - 1}: quantize the meshes to {self.config.bins} bins."
            )
        return build_graph(meshes)


def target_bins(meshes: MeshInputs) -> Tensor:
    """Return the bins of all coordinates of all corners, (B, F, C), and -1 at padding."""
    first_B = torch.arange(len(meshes.faces), device=meshes.faces.device) * meshes.vertices.shape[1]
    bins_BFK3 = meshes.vertices.flatten(0, 1)[meshes.faces.clamp_min(0) + first_B[:, None, None]]
    return bins_BFK3.flatten(2).masked_fill(meshes.faces[..., :1] < 0, -1)


# ---- graph


@dataclass
class FaceGraph:
    """The real faces of all meshes, concatenated."""

    real_BF: Tensor
    """Which positions of the padded batch are real faces."""
    face_P: Tensor
    """The indices of the real faces into the flattened positions (B x F)."""
    bins_PK3: Tensor
    """The coordinates of their corners."""
    bins_BV3: Tensor
    """The coordinates of all vertices; 0 at padding."""
    vertex_PK: Tensor
    """The indices of their corners into all vertices of the batch, padding included."""
    source_E: Tensor
    """The face that each message comes from."""
    target_E: Tensor
    """The face that each message goes to."""
    degree_P1: Tensor
    """The number of adjacent faces, and 1 if there are none."""
    corners_V: Tensor
    """The number of corners at each vertex of the batch, padding included."""

    def mean_of_neighbours(self, x_PW: Tensor) -> Tensor:
        """Return the mean over adjacent faces; zeros for a face without any."""
        messages = x_PW.index_select(0, self.source_E)
        return torch.zeros_like(x_PW).index_add(0, self.target_E, messages) / self.degree_P1

    def mean_at_vertices(self, x_PKW: Tensor) -> States:
        """Return the mean over the corners at each vertex, (B, V, W), and whether there are any."""
        rows = self.vertex_PK.flatten()
        shape_BV = self.bins_BV3.shape[:2]
        count_V = self.corners_V
        total_VW = x_PKW.new_zeros(len(count_V), x_PKW.shape[-1]).index_add(
            0, rows, x_PKW.flatten(0, 1)
        )
        mean_VW = total_VW / count_V.clamp_min(1)[:, None]
        return States(mean_VW.view(*shape_BV, -1), (count_V > 0).view(shape_BV))

    def at_corners(self, at_vertices: Tensor, padding: int) -> Tensor:
        """Gather values (B, V, ...) of vertices to the corners of faces, (B, F, K, ...)."""
        rows = at_vertices.flatten(0, 1).index_select(0, self.vertex_PK.flatten())
        return self.unpack(rows.unflatten(0, self.vertex_PK.shape), padding)

    def unpack(self, rows_P: Tensor, padding: int = 0) -> Tensor:
        """Return (B, F, ...) from the rows (P, ...) of real faces, with `padding` elsewhere."""
        flat = rows_P.new_full((self.real_BF.numel(), *rows_P.shape[1:]), padding)
        return flat.index_copy(0, self.face_P, rows_P).unflatten(0, self.real_BF.shape)


def build_graph(meshes: MeshInputs) -> FaceGraph:
    """Concatenate the real faces of a batch."""
    real_BF, real_BE = meshes.faces[..., 0] >= 0, meshes.edges[..., 0] >= 0
    count_B = real_BF.sum(1)
    face_P, edge_E = (real.flatten().nonzero()[:, 0] for real in (real_BF, real_BE))
    first_face_B = count_B.cumsum(0) - count_B
    first_vertex_B = torch.arange(len(real_BF), device=real_BF.device) * meshes.vertices.shape[1]
    vertex_PK = (meshes.faces + first_vertex_B[:, None, None]).flatten(0, 1)[face_P]
    edges = (meshes.edges + first_face_B[:, None, None]).flatten(0, 1)
    target_E, source_E = edges[edge_E].unbind(1)
    bins_BV3 = meshes.vertices.clamp_min(0)
    bins_PK3 = bins_BV3.flatten(0, 1)[vertex_PK]
    degree_P = torch.bincount(target_E, minlength=len(vertex_PK)).clamp_min(1)
    corners_V = torch.bincount(vertex_PK.flatten(), minlength=bins_BV3.shape[:2].numel())
    return FaceGraph(
        real_BF=real_BF,
        face_P=face_P,
        bins_PK3=bins_PK3,
        bins_BV3=bins_BV3,
        vertex_PK=vertex_PK,
        source_E=source_E,
        target_E=target_E,
        degree_P1=degree_P[:, None],
        corners_V=corners_V,
    )


# ---- encoder


@dataclass
class FaceGeometry:
    """Properties of faces that follow from their corners, each in [0, 1]."""

    angles_PK: Tensor
    """The angle at each corner."""
    size_P: Tensor
    """The square root of the area, since most faces are small."""
    normal_P3: Tensor
    """The unit normal."""


def compute_geometry(bins_PK3: Tensor, bins: int) -> FaceGeometry:
    """Compute angles, areas and normals.

    Computed in float32 from integers: sums and products are exact, and thus independent of the
    batch.
    """
    corners_PK3 = bins_PK3.float()
    forward = corners_PK3.roll(-1, dims=1) - corners_PK3
    backward = -forward.roll(1, dims=1)
    angles_PK = torch.atan2(
        torch.linalg.cross(forward, backward).norm(dim=-1), (forward * backward).sum(-1)
    )
    # Newell's sum, whose length is the area.
    normal_P3 = torch.linalg.cross(corners_PK3, corners_PK3.roll(-1, dims=1)).sum(1) / 2
    size_P = (normal_P3.norm(dim=-1) / (MAX_AREA * bins**2)).sqrt()
    return FaceGeometry(angles_PK / math.pi, size_P, (F.normalize(normal_P3, dim=-1) + 1) / 2)


def to_bins(values: Tensor, bins: int) -> Tensor:
    """Quantize values in [0, 1].

    The offset keeps right angles away from the border between two bins, where the last digit of an
    arc tangent, which depends on the batch, would decide.
    """
    return (values * bins + 0.25).long().clamp(0, bins - 1)


class Encoder(nn.Module):
    def __init__(self, config: MeshAutoencoderConfig):
        super().__init__()
        self.config = config
        self.coordinate_embedding = build_embedding(config.bins, config.coordinate_dim)
        self.angle_embedding = build_embedding(config.angle_bins, config.angle_dim)
        self.area_embedding = build_embedding(config.area_bins, config.area_dim)
        self.normal_embedding = build_embedding(config.normal_bins, config.normal_dim)
        corners, channels = config.corners, config.encoder
        inputs = (
            corners * (3 * config.coordinate_dim + config.angle_dim)
            + config.area_dim
            + 3 * config.normal_dim
        )
        self.project_in = build_linear(inputs, channels[0])
        self.graph_convs = nn.ModuleList(
            [GraphConv(*pair) for pair in zip((channels[0], *channels), channels)]
        )
        self.attention = build_attention(channels[-1], config.encoder_attention)
        self.to_corners = build_linear(channels[-1], corners * config.code_dim)
        self.project_position = build_linear(3 * config.coordinate_dim, config.code_dim)

    def forward(self, graph: FaceGraph) -> States:
        x_PW = self.project_in(self.face_features(graph.bins_PK3))
        for layer in self.graph_convs:
            x_PW = layer(x_PW, graph)
        if self.attention is not None:
            x_BFW = self.attention(graph.unpack(x_PW), mask_BN=graph.real_BF)
            x_PW = x_BFW.flatten(0, 1).index_select(0, graph.face_P)
        vertices = graph.mean_at_vertices(
            to_fp32(self.to_corners(x_PW)).unflatten(1, (self.config.corners, -1))
        )
        positions = self.project_position(self.coordinate_embedding(graph.bins_BV3).flatten(2))
        return States(vertices.values + to_fp32(positions), vertices.mask)

    def face_features(self, bins_PK3: Tensor) -> Tensor:
        config = self.config
        geometry = compute_geometry(bins_PK3, config.bins)
        parts = [
            self.coordinate_embedding(bins_PK3.flatten(1)).flatten(1),
            self.angle_embedding(to_bins(geometry.angles_PK, config.angle_bins)).flatten(1),
            self.area_embedding(to_bins(geometry.size_P, config.area_bins)),
            self.normal_embedding(to_bins(geometry.normal_P3, config.normal_bins)).flatten(1),
        ]
        return torch.cat(parts, dim=1)


def build_embedding(bins: int, dim: int) -> nn.Embedding:
    return nn.Embedding.from_pretrained(sinusoidal_embedding(bins, dim), freeze=False)


def sinusoidal_embedding(bins: int, dim: int) -> Tensor:
    """Return initial embeddings (bins, dim) of mean square 1, similar for near bins and all
    different.

    Pairs of sine and cosine, with wavelengths from twice the number of bins to four bins (Vaswani
    2017, arXiv 1706.03762, section 3.5).

    After 200 steps of 8 synthetic meshes (300 for training, 32 held out, 128 bins, 0.5 M
    parameters, one seed) coordinates were off by 5.4 bins on average and the loss was 2.07; with
    random numbers instead, 23 bins and 3.07. Without `Encoder.project_position`: 6.5 and 2.56.
    """
    lengths = 2 * bins * (2 / bins) ** (torch.arange((dim + 1) // 2) / max(1, dim // 2 - 1))
    angles = 2 * math.pi * torch.arange(bins)[:, None] / lengths
    return math.sqrt(2) * torch.stack([angles.cos(), angles.sin()], dim=2).flatten(1)[:, :dim]


class GraphConv(nn.Module):
    """Combines each face with the mean of its adjacent faces (GraphSAGE; Hamilton 2017, arXiv
    1706.02216, algorithm 1 with the mean as aggregator); residual if the channels stay the same."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.linear = build_linear(2 * inputs, outputs)
        self.norm = Norm(outputs)
        self.residual = inputs == outputs

    def forward(self, x_PW: Tensor, graph: FaceGraph) -> Tensor:
        inputs = torch.cat([x_PW, graph.mean_of_neighbours(x_PW)], dim=1)
        outputs = F.silu(self.norm(self.linear(inputs)))
        return x_PW + outputs if self.residual else outputs


# ---- decoder


class Decoder(nn.Module):
    def __init__(self, config: MeshAutoencoderConfig):
        super().__init__()
        self.coordinates = 3 * config.corners
        channels = config.decoder
        self.conv_in = FaceConv(config.corners * config.code_dim, channels[0], kernel=7)
        self.blocks = nn.ModuleList(
            [ResidualBlock(*pair) for pair in zip((channels[0], *channels), channels)]
        )
        self.attention = build_attention(channels[-1], config.decoder_attention)
        self.norm = Norm(channels[-1])
        self.to_coordinates = build_linear(channels[-1], self.coordinates * config.coordinate_dim)
        self.bin_embedding = nn.Parameter(
            sinusoidal_embedding(config.bins, config.coordinate_dim) * config.coordinate_dim**-0.5
        )

    def forward(self, latent_BFKW: Tensor, real_BF: Tensor) -> Tensor:
        """Return logits (B, F, C, bins)."""
        real_BF1 = real_BF[..., None]
        x_BFW = self.conv_in(latent_BFKW.flatten(2), real_BF1)
        for block in self.blocks:
            x_BFW = block(x_BFW, real_BF1)
        if self.attention is not None:
            x_BFW = self.attention(x_BFW, mask_BN=real_BF)
        x_BFCW = self.to_coordinates(F.silu(self.norm(x_BFW))).unflatten(2, (self.coordinates, -1))
        return to_fp32(x_BFCW @ self.bin_embedding.T.to(x_BFCW.dtype))


class FaceConv(nn.Module):
    """A convolution along the sequence of faces, with zeros at padding.

    Computed as one matrix product with the neighbours concatenated: for 4 x 64 faces of 64 channels
    it takes 0.6 of the time of torch's Conv1d.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int):
        super().__init__()
        self.kernel = kernel
        self.linear = build_linear(kernel * inputs, outputs)

    def forward(self, x_BFW: Tensor, real_BF1: Tensor) -> Tensor:
        margin = self.kernel // 2
        padded = F.pad(x_BFW * real_BF1, (0, 0, margin, margin))
        return self.linear(padded.unfold(1, self.kernel, 1).flatten(2))


class ResidualBlock(nn.Module):
    """x + f(x), where f is zero at initialization."""

    is_block = True

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.shortcut = build_linear(inputs, outputs) if inputs != outputs else nn.Identity()
        self.norms = nn.ModuleList([Norm(outputs), Norm(outputs)])
        convs = [FaceConv(outputs, outputs, kernel=3) for _ in range(2)]
        nn.init.zeros_(convs[1].linear.weight)
        self.convs = nn.ModuleList(convs)

    def forward(self, x_BFW: Tensor, real_BF1: Tensor) -> Tensor:
        change = x_BFW = self.shortcut(x_BFW)
        for norm, conv in zip(self.norms, self.convs):
            change = conv(F.silu(norm(change)), real_BF1)
        return x_BFW + change


def build_attention(dim: int, depth: int) -> Transformer | None:
    return Transformer(dim, depth, HEADS) if depth else None


def build_linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    init_fan_in_(layer, gain=1.0)
    return layer
