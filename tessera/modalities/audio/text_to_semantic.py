"""Text to semantic tokens: an autoregressive transformer with a duration for each character.

Attention from tokens to characters takes many examples to become monotonic. Here the alignment is
known: the semantic tokens are those of a recogniser (`ctc.py`), which aligns the characters of a
transcript with its tokens. A text encoder predicts the duration of each character (FastSpeech, Ren
2019, arXiv 1905.09263, section 3.3), and a causal transformer predicts the tokens one after the
other; at each frame its input is the state of the character that is spoken there, and its previous
token. The number of frames is the sum of the durations, which determine the speed.

B texts, L characters of the longest text with a position before the first, N tokens, M predicted
tokens, W `dim`, D durations, V vocabulary; token id V is the end. Tokens are (B, N, 1), with -1
after the end.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tessera.engine.device import copy_to_device, move_tensors
from tessera.losses.ctc import align_labels
from tessera.modalities.audio.ctc import CTCTokenizer
from tessera.nn.causal_transformer import CausalTransformer, KVCache
from tessera.nn.precision import to_fp32
from tessera.nn.transformer import States, Transformer, linear
from tessera.text.characters import CharacterVocab
from tessera.text.encoder import TextEncoder, TextInputs, Texts, check_texts

MAX_DURATION = 64
"""Frames of the longest duration that is predicted; longer ones are cut."""
MAX_OFFSET = 16
"""Frames since the start of a character that have an embedding of their own."""
MIN_ROWS = 4
"""Some CPUs round matrix products of fewer rows differently, and the tokens of a seed would depend
on the batch size."""


@dataclass(frozen=True, kw_only=True)
class CharacterEncoderConfig:
    depth: int = 2
    """Number of blocks of the transformer over characters."""
    max_len: int = 400
    """Maximum number of characters of a text."""

    def __post_init__(self) -> None:
        if min(self.depth, self.max_len) < 1:
            raise ValueError(f"depth and max_len must be at least 1, got {self}.")


@dataclass(frozen=True, kw_only=True)
class TextToSemanticConfig:
    dim: int = 128
    """The embedding dimension."""
    depth: int = 3
    """The number of blocks of the transformer over tokens."""
    heads: int = 4
    """The number of attention heads."""
    dropout: float = 0.1
    """The fraction of channels that are dropped in training."""
    text: CharacterEncoderConfig = CharacterEncoderConfig()
    """The encoder of characters."""

    def __post_init__(self) -> None:
        for name in ("dim", "depth", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}.")

    def build(self, recognizer: CTCTokenizer, max_len: int) -> TextToSemantic:
        return TextToSemantic(self, recognizer, max_len)


@dataclass
class SpokenText:
    """Texts as the transformer over tokens gets them."""

    labels: list[list[int]] | None
    """The characters of each text; None if the texts were prepared with the batch."""
    states_BLW: Tensor
    """The state of each character, and of a position before the first."""
    mask_BL: Tensor
    """True at these positions."""
    duration_BLD: Tensor
    """Logits of the duration of each character, in frames."""
    speed: float = 1.0
    """Durations are divided by this."""


@dataclass
class SpeechInputs:
    """What a prediction needs beside tokens and texts, made on the CPU."""

    dropout_LBW: Tensor | None
    duration_BL: Tensor
    """The duration of each character, in frames; -1 where there is none."""
    char_BN: Tensor
    """The position of the character that is spoken at each frame."""
    offset_BN: Tensor
    """The frames since its start."""
    example_M: Tensor
    row_M: Tensor
    """The rows of predicted tokens among all B x N."""
    count_B: Tensor
    """The number of tokens of each example."""


@dataclass
class TokenPredictions:
    """The logits and targets of all M tokens of a batch, and the durations of its characters."""

    logits_MV: Tensor
    targets_M: Tensor
    example_M: Tensor
    count_B: Tensor
    duration_loss_B: Tensor
    """The mean cross-entropy of the durations of each text."""
    frames_error_B: Tensor
    """The difference of predicted and true number of frames, relative to the true number."""

    def cross_entropy_B(self) -> Tensor:
        """Return the mean cross-entropy over the tokens of each example."""
        loss_M = F.cross_entropy(to_fp32(self.logits_MV), self.targets_M, reduction="none")
        total_B = loss_M.new_zeros(len(self.count_B)).index_add(0, self.example_M, loss_M)
        return total_B / self.count_B.clamp_min(1)


class CharacterEncoder(TextEncoder):
    """A transformer on characters, with one more state for what is before the first one."""

    def __init__(self, config: CharacterEncoderConfig, vocab: CharacterVocab, dim: int, heads: int):
        super().__init__()
        self.config, self.dim = config, dim
        self.vocab = CharacterVocab(vocab.size)
        self.vocab.load_state_dict(vocab.state_dict())
        self.embedding = nn.Embedding(vocab.num_labels, dim)
        self.transformer = Transformer(dim, config.depth, heads)

    def forward(self, texts: Texts) -> States:
        assert not isinstance(texts, States)
        if not isinstance(texts, Tensor):
            texts = copy_to_device(self.encode_inputs(texts), self.input_device)
        mask_BL = texts >= 0
        x_BLW = self.embedding(texts.clamp_min(0))
        return States(self.transformer(x_BLW, mask_BN=mask_BL), mask_BL)

    def encode_text(self, text: str) -> list[int]:
        return self.vocab.encode(text)[: self.config.max_len]

    def encode_inputs(self, texts: Sequence[str]) -> Tensor:
        """Return 0 and the characters of each text, (B, L), with -1 after the end."""
        check_texts(texts)
        rows = [torch.tensor([0, *self.encode_text(text)]) for text in texts]
        return pad_sequence(rows, batch_first=True, padding_value=-1)

    def prepare_text(self, texts: Iterable[str], cache_dir: Path | None = None) -> None:
        """The vocabulary is that of the recogniser."""

    def fits(self, text: str) -> bool:
        return len(self.vocab.encode(text)) <= self.config.max_len


class TextToSemantic(nn.Module):
    tokens_per_position = 1

    def __init__(self, config: TextToSemanticConfig, recognizer: CTCTokenizer, max_len: int):
        super().__init__()
        self.config, self.max_len = config, max_len
        self.vocab_size = recognizer.vocab_size
        # Transcripts are aligned on the CPU, before a batch is copied to the device. This copy of
        # the recogniser stays there: nn.Module does not register what is inside a tuple.
        self._aligner = (copy.deepcopy(recognizer).eval().requires_grad_(False),)
        dim = config.dim
        self.text = CharacterEncoder(config.text, recognizer.vocab, dim, config.heads)
        self.duration_head = nn.Linear(dim, MAX_DURATION)
        self.transformer = CausalTransformer(dim, config.depth, config.heads, max_len)
        self.token_embedding = nn.Embedding(self.vocab_size + 1, dim)
        self.offset_embedding = nn.Embedding(MAX_OFFSET, dim)
        self.to_frame = linear(dim, dim)
        self.head = linear(dim, self.vocab_size)
        for layer in (self.duration_head, self.head):
            nn.init.normal_(layer.weight, std=0.02)
        # Durations are short, a mean of about 3 frames, until they are trained.
        with torch.no_grad():
            self.duration_head.bias.copy_(-0.3 * torch.arange(MAX_DURATION))

    @property
    def eos_token_id(self) -> int:
        return self.vocab_size

    def condition(
        self, texts: Sequence[str] | TextInputs, dropped: Sequence[bool] = ()
    ) -> SpokenText:
        """Encode texts; no text is dropped, because speech without text has no length."""
        if isinstance(texts, TextInputs):
            labels, states = None, self.text(texts.encoded)
        else:
            labels, states = [self.text.encode_text(text) for text in texts], self.text(texts)
        return SpokenText(labels, states.values, states.mask, self.duration_head(states.values))

    # ---- teacher forcing

    def prepare_inputs(
        self,
        tokens_BNS: Tensor,
        generators: Sequence[torch.Generator] | None = None,
        texts: Sequence[str] = (),
    ) -> SpeechInputs:
        """Align tokens on the CPU with their texts, and draw dropout if `generators` are given."""
        labels = [self.text.encode_text(text) for text in texts]
        return self.align_inputs(tokens_BNS, labels, generators)

    def align_inputs(
        self,
        tokens_BNS: Tensor,
        labels: Sequence[Sequence[int]],
        generators: Sequence[torch.Generator] | None = None,
    ) -> SpeechInputs:
        tokens_BN = tokens_BNS[..., 0]
        is_token_BN = tokens_BN >= 0
        durations = self.align(tokens_BN, is_token_BN.sum(1), labels)
        characters = spread_characters(durations, tokens_BN.shape[1])
        example_M, position_M = is_token_BN.nonzero(as_tuple=True)
        return SpeechInputs(
            dropout_LBW=self.transformer.sample_dropout(generators, self.config.dropout),
            duration_BL=pad_sequence(
                [torch.tensor(one) for one in durations], batch_first=True, padding_value=-1
            ),
            char_BN=characters.char_BN,
            offset_BN=characters.offset_BN,
            example_M=example_M,
            row_M=example_M * tokens_BN.shape[1] + position_M,
            count_B=is_token_BN.sum(1),
        )

    def predict(
        self, tokens_BNS: Tensor, condition: SpokenText, inputs: SpeechInputs | None = None
    ) -> TokenPredictions:
        """Predict each token from all earlier ones and the characters that it is aligned with."""
        if inputs is None:
            assert condition.labels is not None
            prepared = self.align_inputs(tokens_BNS.cpu(), condition.labels)
            inputs = move_tensors(prepared, tokens_BNS.device)
        tokens_BN = tokens_BNS[..., 0]
        frames_BNW = self.frame_states(condition, inputs.char_BN, inputs.offset_BN)
        inputs_BN = F.pad(tokens_BN[:, :-1], (1, 0), value=self.eos_token_id)
        x_BNW = frames_BNW + self.token_embedding(inputs_BN.where(inputs_BN >= 0, 0))
        states_BNW = self.transformer(x_BNW, dropout_LBW=inputs.dropout_LBW)
        duration_loss_B, frames_error_B = measure_durations(condition, inputs)
        return TokenPredictions(
            self.head(states_BNW.flatten(0, 1).index_select(0, inputs.row_M)),
            tokens_BN.flatten().index_select(0, inputs.row_M),
            inputs.example_M,
            inputs.count_B,
            duration_loss_B,
            frames_error_B,
        )

    @torch.no_grad()
    def align(
        self, tokens_BN: Tensor, frames_B: Tensor, labels: Sequence[Sequence[int]]
    ) -> list[list[int]]:
        """Return the duration of each character and of what is before the first one, in frames.

        Tokens are on the CPU. Where a text has more characters than there are frames, they are
        spread evenly.
        """
        found = align_labels(self._aligner[0].decode(tokens_BN), frames_B, labels)
        durations = []
        for starts, frames, one in zip(found, frames_B.tolist(), labels, strict=True):
            if starts is None:
                starts = [(i + 1) * frames // (len(one) + 1) for i in range(len(one))]
            edges = [0, *starts, frames]
            durations.append([end - start for start, end in zip(edges, edges[1:])])
        return durations

    def frame_states(self, condition: SpokenText, char_BN: Tensor, offset_BN: Tensor) -> Tensor:
        """Return for each frame the state of its character and how long it lasts, (B, N, W)."""
        index_BNW = char_BN[..., None].expand(-1, -1, condition.states_BLW.shape[2])
        offset_BNW = self.offset_embedding(offset_BN.clamp_max(MAX_OFFSET - 1))
        return self.to_frame(condition.states_BLW.gather(1, index_BNW)) + offset_BNW

    # ---- token by token

    @torch.no_grad()
    def start_decoding(self, condition: SpokenText, prefix_BNS: Tensor) -> SpeechDecodingState:
        if prefix_BNS.shape[1]:
            raise ValueError("Text to speech starts without tokens: leave the prefix out.")
        return SpeechDecodingState(self, condition)


class SpeechDecodingState:
    """Decodes a batch of texts: called with the tokens just chosen, it returns the next logits."""

    def __init__(self, model: TextToSemantic, condition: SpokenText):
        self.model, self.cache, self.position = model, KVCache(), 0
        self.device = condition.states_BLW.device
        durations = predict_durations(condition, model.max_len)
        self.frames = [sum(one) for one in durations]
        padding = max(0, MIN_ROWS - len(durations))
        spoken = move_tensors(spread_characters(durations, max(self.frames)), self.device)
        states_BNW = model.frame_states(condition, spoken.char_BN, spoken.offset_BN)
        self.frames_BNW = F.pad(states_BNW, (0, 0, 0, 0, 0, padding))
        self.count = len(durations)
        self.tokens_B = torch.full((self.count,), model.eos_token_id, device=self.device)

    @torch.no_grad()
    def __call__(self, tokens_B: Tensor | None) -> Tensor:
        """Return logits (B, V + 1) for the token after `tokens_B`, which is None at first."""
        if tokens_B is not None:
            self.tokens_B = tokens_B
            self.position += 1
        model, is_end = self.model, [self.position >= frames for frames in self.frames]
        logits_BV = self.frames_BNW.new_zeros(self.count, model.vocab_size)
        if not all(is_end):
            embedded_BW = F.pad(
                model.token_embedding(self.tokens_B),
                (0, 0, 0, len(self.frames_BNW) - self.count),
            )
            x_BW = self.frames_BNW[:, self.position] + embedded_BW
            states_BW = model.transformer.decode_step(x_BW, None, self.cache)
            logits_BV = model.head(states_BW)[: self.count]
        ends_B = torch.tensor(is_end, device=self.device)
        logits_BV = to_fp32(logits_BV).masked_fill(ends_B[:, None], -math.inf)
        eos_B = torch.where(ends_B, 0.0, -math.inf).to(logits_BV)
        return torch.cat([logits_BV, eos_B[:, None]], dim=1)


@dataclass
class SpokenCharacters:
    """Which character is spoken at each frame, and since how many frames; 0 after the end."""

    char_BN: Tensor
    offset_BN: Tensor


def spread_characters(durations: Sequence[Sequence[int]], count: int) -> SpokenCharacters:
    """Repeat each character for its duration, up to `count` frames, on the CPU."""
    characters, offsets = [], []
    for one in durations:
        char_T = torch.repeat_interleave(torch.arange(len(one)), torch.tensor(one))
        start_L = torch.tensor([0, *one]).cumsum(0)[:-1]
        offset_T = torch.arange(len(char_T)) - start_L[char_T]
        characters.append(F.pad(char_T, (0, count - len(char_T))))
        offsets.append(F.pad(offset_T, (0, count - len(offset_T))))
    return SpokenCharacters(torch.stack(characters), torch.stack(offsets))


def measure_durations(condition: SpokenText, inputs: SpeechInputs) -> tuple[Tensor, Tensor]:
    """Return the mean cross-entropy of the durations of each text, and the relative error of the
    number of frames."""
    logits_BLD, target_BL = to_fp32(condition.duration_BLD), inputs.duration_BL
    loss_BL = F.cross_entropy(
        logits_BLD.mT, target_BL.clamp_max(MAX_DURATION - 1), ignore_index=-1, reduction="none"
    )
    loss_B = loss_BL.sum(1) / (target_BL >= 0).sum(1)
    expected_BL = expected_durations(logits_BLD.detach()) * (target_BL >= 0)
    error_B = (expected_BL.sum(1) - inputs.count_B).abs() / inputs.count_B.clamp_min(1)
    return loss_B, error_B


def expected_durations(logits_BLD: Tensor) -> Tensor:
    frames_D = torch.arange(MAX_DURATION, device=logits_BLD.device, dtype=logits_BLD.dtype)
    return logits_BLD.softmax(-1) @ frames_D


@torch.no_grad()
def predict_durations(condition: SpokenText, max_frames: int = 1 << 30) -> list[list[int]]:
    """Return the expected durations in whole frames, whose sums are rounded and not themselves.

    A text has at least one frame, and `max_frames` at most.
    """
    logits_BLD = to_fp32(condition.duration_BLD.detach())
    expected_BL = expected_durations(logits_BLD) / condition.speed
    durations = []
    lengths = condition.mask_BL.sum(1).tolist()
    for expected_L, length in zip(expected_BL.cpu(), lengths, strict=True):
        ends = [round(float(end)) for end in expected_L[:length].cumsum(0)]
        ends = [min(end, max_frames) for end in ends]
        ends[-1] = max(ends[-1], 1)
        durations.append([end - start for start, end in zip([0, *ends], ends)])
    return durations


def with_speed(condition: SpokenText, speed: float) -> SpokenText:
    return replace(condition, speed=speed)
