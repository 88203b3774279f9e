"""The autoregressive objective: predict the next token, from the first to the last.

An example is a sequence of up to N positions of S tokens each, with -1 after its last position; the
end is a token too, so the model is trained on the length of an example. What the positions are, the
faces of a mesh for example, is defined by the model that the modality builds.

B batch, N positions, S tokens in a position, M predicted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.data.tokens import TokenizedBatch
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, BestMetric, Examples, Inputs, Loss, Update
from tessera.nn.precision import to_fp32
from tessera.objectives.generation import (
    PROMPT_IGNORED,
    GenerationRequest,
    GeneratorConfig,
    GeneratorTask,
    OnStep,
    TokenizerProtocol,
    other_captions,
)
from tessera.sampling.autoregressive import (
    AutoregressiveSampling,
    NextLogits,
    StartDecoding,
    generate,
    with_cfg,
)
from tessera.sampling.guidance import Guidance
from tessera.text.encoder import TextEncoder, TextInputs

Condition = TypeVar("Condition")


class NextTokenPredictions(Protocol):
    """The logits and targets of all M tokens of a batch, ends included and padding excluded."""

    logits_MV: Tensor
    targets_M: Tensor
    example_M: Tensor
    count_B: Tensor

    def cross_entropy_B(self) -> Tensor: ...


class AutoregressiveModel(Protocol[Condition]):
    """A causal model over positions of S tokens."""

    @property
    def text(self) -> TextEncoder | None: ...
    @property
    def tokens_per_position(self) -> int: ...
    @property
    def eos_token_id(self) -> int: ...
    def condition(
        self, texts: Sequence[str] | TextInputs, dropped: Sequence[bool] = ()
    ) -> Condition: ...
    def prepare_inputs(
        self,
        tokens_BNS: Tensor,
        generators: Sequence[torch.Generator] | None = None,
        texts: Sequence[str] = (),
    ) -> Inputs:
        """Return what `predict` needs beside tokens, which are on the CPU: indices whose number
        depends on them or on their texts, and in training the dropout, from the generators of the
        examples."""

    def predict(
        self, tokens_BNS: Tensor, condition: Condition, inputs: Inputs = None
    ) -> NextTokenPredictions:
        """Predict all tokens; without `inputs` they are prepared now."""

    def start_decoding(self, condition: Condition, prefix_BNS: Tensor) -> NextLogits: ...


@dataclass
class AutoregressiveInputs:
    """What the loss of a batch needs; everything that is random is drawn."""

    tokens_BNS: Tensor
    text: TextInputs | None
    """The captions, some of them dropped; None for a model without prompts."""
    model: Inputs
    """The result of the model's `prepare_inputs`."""


@dataclass(frozen=True, kw_only=True)
class AutoregressiveConfig(GeneratorConfig):
    """Base class: a modality declares the type of `model` and builds it for its tokenizer."""

    load_best: bool = True
    """Whether the trained run is used at the checkpoint with the best held-out cross-entropy, or
    else at the last one. On a small dataset the best one is early: later ones have seen the
    training examples more often, and their samples are more like these."""
    sampling: AutoregressiveSampling = field(default_factory=AutoregressiveSampling)
    guidance: Guidance = field(default_factory=lambda: Guidance(scale=1.0))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def build_model(self, tokenizer: TokenizerProtocol) -> AutoregressiveModel:
        """Return an nn.Module that is an `AutoregressiveModel`."""
        raise NotImplementedError

    def build(self, **dependencies: TokenizerProtocol) -> AutoregressiveTask:
        return AutoregressiveTask(self, **dependencies)


class AutoregressiveTask(GeneratorTask):
    config: AutoregressiveConfig
    best_metric = BestMetric(name="cross_entropy", higher_is_better=False)

    def __init__(self, config: AutoregressiveConfig, tokenizer: TokenizerProtocol):
        super().__init__({"tokenizer": tokenizer})
        self.config = config
        self.max_positions, *self.position_shape = tokenizer.grid
        self.num_quantizers = tokenizer.num_quantizers
        self.model = config.build_model(tokenizer)
        update = Update(
            name="model",
            trains=self.model,
            loss=self.next_token_loss,
            optimizer=config.optimizer,
        )
        self.updates = (update,)
        self.alarms = (PROMPT_IGNORED,) if self.model.text is not None else ()

    @property
    def network(self) -> AutoregressiveModel:
        return self.model

    # ---- training and evaluation

    def prepare_inputs(self, batch: Batch) -> AutoregressiveInputs:
        """Draw condition dropout, and prepare tokens and texts."""
        generators = batch.generators()
        u = [float(torch.rand((), generator=one)) for one in generators]
        dropped = [one < self.config.cond_drop_prob for one in u]
        tokens_BNS, encoder = self.get_tokens(batch.examples), self.model.text
        captions, text = batch.examples.captions, None
        if encoder is not None:  # dropped texts are masked, and not left out by their indices
            text = replace(encoder.prepare_inputs(captions, dropped), has_text_idx=None)
        return AutoregressiveInputs(
            tokens_BNS,
            text,
            self.model.prepare_inputs(
                tokens_BNS, generators if self.model.training else None, captions
            ),
        )

    def next_token_loss(self, batch: Batch, step: int) -> Loss:
        inputs: AutoregressiveInputs = self.get_inputs(batch)
        condition = self.model.condition(inputs.text or batch.examples.captions)
        predictions = self.model.predict(inputs.tokens_BNS, condition, inputs.model)
        # Only what the metric needs is kept, and nothing of the size of the vocabulary.
        correct_M = (predictions.logits_MV.detach().argmax(-1) == predictions.targets_M).float()
        accuracy = partial(token_accuracy, correct_M, predictions.example_M, predictions.count_B)
        return Loss({"cross_entropy": predictions.cross_entropy_B().mean()}, {"accuracy": accuracy})

    def get_tokens(self, examples: Examples) -> Tensor:
        """Return tokens (B, N, S) on the CPU, cut after the last position of the longest example
        or at the next length of `pad_length`.

        A trained tokenizer that is applied at every step is run on its device.
        """
        weight = next(self.tokenizers["tokenizer"].network.parameters(), None)
        if weight is not None and not isinstance(examples, TokenizedBatch):
            examples = examples.to(weight.device)
        codes = self.get_codes(examples).cpu()
        tokens_BNS = codes.reshape(*codes.shape[:2], -1)
        longest = int((tokens_BNS[..., 0] >= 0).sum(1).max())
        # Contiguous, because a compiled loss is compiled again for other strides.
        return tokens_BNS[:, : self.pad_length(longest, tokens_BNS.shape[1])].contiguous()

    def eval_step(self, batch: Batch) -> dict[str, Tensor]:
        captions = batch.examples.captions
        inputs: AutoregressiveInputs = self.get_inputs(batch)
        predictions = self.predict(inputs, captions)
        targets_M = predictions.targets_M
        correct_M = predictions.logits_MV.argmax(-1) == targets_M
        is_eos_M = targets_M == self.model.eos_token_id
        sums = {
            "tokens": torch.tensor(len(targets_M), device=targets_M.device),
            "cross_entropy": summed_cross_entropy(predictions),
            "correct": correct_M.sum(),
            "eos": is_eos_M.sum(),
            "eos_correct": correct_M[is_eos_M].sum(),
        }
        others = other_captions(captions)
        if self.model.text is not None and others is not None:
            condition = self.model.condition(others, [False] * len(others))
            other = summed_cross_entropy(self.model.predict(inputs.tokens_BNS, condition))
            sums |= {"gain": other - sums["cross_entropy"], "gain_tokens": sums["tokens"]}
        return sums

    def predict(
        self, inputs: AutoregressiveInputs, captions: Sequence[str]
    ) -> NextTokenPredictions:
        condition = self.model.condition(captions, [False] * len(captions))
        return self.model.predict(inputs.tokens_BNS, condition, inputs.model)

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        cross_entropy = totals["cross_entropy"] / totals["tokens"]
        metrics = {
            "cross_entropy": float(cross_entropy),
            "perplexity": float(cross_entropy.exp()),
            "accuracy": float(totals["correct"] / totals["tokens"]),
        }
        if totals["eos"]:  # an example that was cut off has no end
            metrics["eos_accuracy"] = float(totals["eos_correct"] / totals["eos"])
        if "gain" in totals:
            metrics["condition_gain"] = float(totals["gain"] / totals["gain_tokens"])
        return metrics

    # ---- generation

    @torch.no_grad()
    def generate(self, request: GenerationRequest) -> Tensor:
        """Return codes (B, *grid); examples that do not end are sampled again, at most
        `sampling.retries` times."""
        sampling = request.sampling or self.config.sampling
        generators = request.generators()
        codes, ended_B = self.generate_once(request, sampling, generators)
        for _ in range(sampling.retries):
            rows = (~ended_B).nonzero()[:, 0]
            if not len(rows):
                break
            again = replace(
                request.select(rows.tolist()), on_step=merge_steps(request, codes, rows)
            )
            # A generator continues where it stopped: the result does not depend on the batch.
            codes[rows], ended_B[rows] = self.generate_once(
                again, sampling, [generators[row] for row in rows.tolist()]
            )
        return codes

    def generate_once(
        self,
        request: GenerationRequest,
        sampling: AutoregressiveSampling,
        generators: Sequence[torch.Generator],
    ) -> tuple[Tensor, Tensor]:
        """Return codes (B, *grid), and which of the examples have ended, (B,)."""
        guidance = request.guidance or self.config.guidance
        device = next(self.model.parameters()).device
        sequence = generate(
            self.start_decoding(request, guidance),
            self.prefix(request).to(device),
            sampling,
            generators,
            eos_token_id=self.model.eos_token_id,
            max_positions=self.max_positions,
            on_step=self.report_steps(request),
        )
        # Copies, since tensors of inference mode cannot be changed.
        return self.pad_codes(sequence.tokens_BNS).clone(), sequence.ended_B.clone()

    def pad_codes(self, tokens_BNS: Tensor) -> Tensor:
        """Pad tokens to the maximum number of positions and rearrange them to codes (B, *grid)."""
        missing = self.max_positions - tokens_BNS.shape[1]
        padded = F.pad(tokens_BNS, (0, 0, 0, missing), value=-1)
        codes = padded.unflatten(2, (*self.position_shape, self.num_quantizers))
        return codes[..., 0] if self.num_quantizers == 1 else codes

    def report_steps(self, request: GenerationRequest) -> OnStep | None:
        """Return a function that passes the tokens so far to `request.on_step` as codes."""
        on_step = request.on_step
        if on_step is None:
            return None
        return lambda step, steps, tokens_BNS: on_step(step, steps, self.pad_codes(tokens_BNS))

    def prefix(self, request: GenerationRequest) -> Tensor:
        """Return the tokens that the samples begin with, (B, N, S)."""
        count = len(request)
        if request.start is None:
            return torch.empty(count, 0, self.model.tokens_per_position, dtype=torch.long)
        codes = request.start.codes.expand(count, *request.start.codes.shape[1:])
        tokens_BNS = codes.reshape(*codes.shape[:2], -1)
        return tokens_BNS[:, : int((tokens_BNS[..., 0] >= 0).sum(1).max())]

    def start_decoding(self, request: GenerationRequest, guidance: Guidance) -> StartDecoding:
        """Return the function that starts decoding; guidance decodes with and without prompts."""
        if (guidance.start, guidance.end, guidance.ramp) != (0.0, 1.0, "constant"):
            raise ValueError(
                "guidance start, end and ramp are for masked models; an autoregressive model "
                "supports only a constant guidance scale."
            )
        scale = guidance.scale if self.model.text is not None else 1.0
        condition = self.model.condition(*request.guided_texts(scale))
        start = partial(self.model.start_decoding, condition)
        return start if scale == 1 else with_cfg(start, scale)


def merge_steps(request: GenerationRequest, codes: Tensor, rows: Tensor) -> OnStep | None:
    """Return a function that passes the steps of some rows to `request.on_step`, with the codes of
    the others."""
    on_step = request.on_step
    if on_step is None:
        return None

    def report(step: int, steps: int, codes_of_rows: Tensor) -> None:
        on_step(step, steps, codes.index_copy(0, rows, codes_of_rows))

    return report


def summed_cross_entropy(predictions: NextTokenPredictions) -> Tensor:
    logits_MV = to_fp32(predictions.logits_MV)
    return F.cross_entropy(logits_MV, predictions.targets_M, reduction="sum")


def token_accuracy(correct_M: Tensor, example_M: Tensor, count_B: Tensor) -> Tensor:
    """Return the mean over examples of their accuracy, so that micro-batches add up."""
    correct_B = torch.zeros(len(count_B), device=correct_M.device)
    return (correct_B.index_add(0, example_M, correct_M) / count_B).mean()
