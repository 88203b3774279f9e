"""The masked objective: predict masked tokens (MaskGIT, Chang 2022, arXiv 2202.04200; Muse, Chang
2023, arXiv 2301.00704).

The model predicts masked tokens from the others, from the caption and from the tokens of a
conditioning tokenizer, if there is one. A critic, if there is one, is a second update that is
trained to separate sampled from real tokens. Examples may differ in length: codes are -1 after the
end of an example, and such positions are never attended to.

B batch, N positions, S tokens in a position, M predicted tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from tessera.data.tokens import TokenizedBatch
from tessera.engine.optim.config import OptimizerConfig
from tessera.engine.task import Batch, BestMetric, Examples, Loss, Update
from tessera.nn.masked_transformer import (
    Condition,
    CriticConfig,
    CriticHeadConfig,
    FirstLayerCache,
    MaskedModel,
    MaskedTransformer,
    MaskedTransformerConfig,
    SelectedTokens,
    TokenTransformer,
)
from tessera.nn.precision import to_fp32
from tessera.nn.prefix_encoder import Prefix, leading_positions
from tessera.nn.token_embedding import TokenSpec
from tessera.nn.token_layout import Layout
from tessera.objectives.generation import (
    PROMPT_IGNORED,
    GenerationRequest,
    GeneratorTask,
    OnStep,
    TokenizedGeneratorConfig,
    TokenizerProtocol,
    other_captions,
)
from tessera.objectives.masking import (
    ExampleRandomness,
    LevelMaskingConfig,
    MaskedTokens,
    MaskingConfig,
    TokenBatch,
    TokenMask,
    valid_positions,
)
from tessera.sampling.guidance import Guidance, apply_cfg
from tessera.sampling.logits import sample_columns
from tessera.sampling.maskgit import MaskedSampling, halton_order, maskgit_decode
from tessera.text.encoder import TextInputs

NEVER = 1 << 62
"""The first step of an update that is disabled."""


@dataclass(frozen=True, kw_only=True)
class MaskedConfig(TokenizedGeneratorConfig):
    max_positions: int | None = None
    """The maximum number of positions of the transformer: where an example has more tokens, squares
    of 2 x 2, 4 x 4, ... of them share one; None uses a position for each. A quarter of the
    positions costs a quarter or less."""
    model: MaskedTransformerConfig = field(default_factory=MaskedTransformerConfig)
    critic: CriticConfig | CriticHeadConfig | None = None
    """A network that separates sampled from real tokens and can choose which tokens to keep."""
    critic_optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train_only: Literal["all", "generator", "critic"] = "all"
    """Which of the two networks is trained, if there is a critic."""
    masking: MaskingConfig | LevelMaskingConfig = field(default_factory=MaskingConfig)
    label_smoothing: float = 0.0
    """The label smoothing of the cross-entropy."""
    sampling: MaskedSampling = field(default_factory=MaskedSampling)
    guidance: Guidance = field(default_factory=Guidance)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(
                f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}."
            )
        if self.max_positions is not None and self.max_positions < 1:
            raise ValueError(f"max_positions must be at least 1, got {self.max_positions}.")
        if self.train_only == "critic" and self.critic is None:
            raise ValueError("train_only is critic, but there is none: use --critic own or head.")
        if self.sampling.order == "critic" and self.critic is None:
            raise ValueError(
                "The sampling order is critic, but there is none: use --critic own or head."
            )

    def build(self, **dependencies: TokenizerProtocol) -> MaskedTask:
        return MaskedTask(self, **dependencies)


@dataclass
class MaskedInputs:
    """What the losses of a batch need beside its tokens; everything that is random is drawn."""

    mask: TokenMask
    selected: SelectedTokens
    valid_BN: Tensor | None
    """The mask of valid positions; None if all are valid."""
    self_condition_B: Tensor
    """Whether the previous states of each example are given."""
    text: TextInputs | None
    """The captions, some of them dropped; None for a model without prompts."""
    critic_text: TextInputs | None
    """The captions for the critic."""
    critic_u_M: Tensor | None
    """A uniform number for each token to predict, by which it is sampled for the critic."""
    prefix_BN: Tensor | None
    """The positions before the first masked token; None if the model has no summary of them."""


class MaskedTask(GeneratorTask):
    config: MaskedConfig
    model: MaskedModel
    best_metric = BestMetric(name="cross_entropy", higher_is_better=False)

    def __init__(
        self,
        config: MaskedConfig,
        tokenizer: TokenizerProtocol,
        **conditioners: TokenizerProtocol,
    ):
        super().__init__({"tokenizer": tokenizer, **conditioners})
        self.config = config
        self.conditioner = next(iter(conditioners), None)
        config.masking.validate_quantizers(tokenizer.num_quantizers)
        tokens = token_spec(tokenizer, config.max_positions)
        cond_tokens = token_spec(conditioners[self.conditioner]) if self.conditioner else None
        self.layout = tokens.layout
        critic = None
        if config.critic is not None:
            critic = config.critic.build(config.model, tokens, cond_tokens)
        self.model = MaskedModel(config.model.build(tokens, cond_tokens), critic)
        updates = [
            Update(
                name="model",
                trains=self.model.network,
                loss=self.masked_token_loss,
                optimizer=config.optimizer,
                start_step=NEVER if config.train_only == "critic" else 0,
            )
        ]
        if critic is not None:
            updates.append(
                Update(
                    name="critic",
                    trains=critic,
                    loss=self.critic_loss,
                    optimizer=config.critic_optimizer,
                    start_step=NEVER if config.train_only == "generator" else 0,
                )
            )
        self.updates = tuple(updates)
        if config.train_only == "critic":
            self.best_metric = BestMetric(name="critic_bce", higher_is_better=False)
        # Conditioning tokens contain most of what a caption describes, so its gain may be small.
        has_alarm = config.model.text is not None and self.conditioner is None
        self.alarms = (PROMPT_IGNORED,) if has_alarm else ()

    @property
    def network(self) -> MaskedTransformer:
        return self.model.network

    def text_networks(self) -> list[TokenTransformer]:
        networks = (self.model.network, self.model.critic)
        transformers = [one for one in networks if isinstance(one, TokenTransformer)]
        return [one for one in transformers if one.text is not None]

    # ---- inputs

    def pad_examples(self, examples: Examples) -> Examples:
        """Pad the codes of joined recordings, whose grid has one axis."""
        if not isinstance(examples, TokenizedBatch):
            return examples
        sides = {name: self.tokenizers[name].grid[0] for name in examples.codes}
        lengths = {name: codes.shape[1] for name, codes in examples.codes.items()}
        if lengths == sides:
            return examples
        # The same part of each grid, so that conditioning codes last as long as the others.
        part = max(self.pad_length(lengths[n], 2 * side) / side for n, side in sides.items())
        return replace(
            examples,
            codes={
                name: pad_end(codes, math.ceil(part * sides[name] - 1e-6))
                for name, codes in examples.codes.items()
            },
        )

    def prepare_inputs(self, batch: Batch) -> MaskedInputs:
        """Draw masks, condition dropout and sampling noise, and find the tokens to predict."""
        randomness = ExampleRandomness.draw(batch)
        count, lengths = self.count_positions(batch.examples)
        rows = zip(lengths, randomness.generators, strict=True)
        masks = [self.draw_mask(length, generator) for length, generator in rows]
        mask = TokenMask.pad(masks, (count, self.layout.tokens_per_position))
        u_M = None
        if self.model.critic is not None:
            shape = mask.loss_mask.shape[1:]
            u = torch.stack([torch.rand(shape, generator=one) for one in randomness.generators])
            u_M = u[mask.loss_mask]
        captions = batch.examples.captions
        dropped = [u < self.config.cond_drop_prob for u in randomness.drop_u]
        return MaskedInputs(
            mask=mask,
            selected=self.model.network.select_tokens(mask.loss_mask),
            valid_BN=valid_positions(lengths, count),
            self_condition_B=torch.tensor([u < 0.5 for u in randomness.self_cond_u]),
            text=prepare_texts(self.model.network, captions, dropped),
            critic_text=prepare_texts(self.model.critic_backbone, captions),
            critic_u_M=u_M,
            prefix_BN=self.find_prefix(mask),
        )

    def find_prefix(self, mask: TokenMask) -> Tensor | None:
        """Return which positions come before all tokens that are masked or predicted."""
        if self.model.network.prefix is None:
            return None
        return leading_positions(~(mask.hidden | mask.loss_mask).any(2))

    def draw_mask(self, length: int, generator: torch.Generator) -> TokenMask:
        """Draw the mask of one example."""
        masking, shape = self.config.masking, (length, self.layout.tokens_per_position)
        region_NS = masking.draw_region(self.layout, generator)
        return masking.draw(shape, self.model.network.mask_token_id, generator, region_NS)

    def count_positions(self, examples: Examples) -> tuple[int, list[int]]:
        """Return the number of positions of a batch and the number of valid ones of each example.

        Neither is read from tokens that are computed at every step.
        """
        if isinstance(examples, TokenizedBatch):
            tokens = self.get_tokens(examples)
            return tokens.tokens_BNS.shape[1], tokens.lengths
        count, hop = self.layout.num_positions, getattr(self.tokenizers["tokenizer"], "hop", None)
        lengths = getattr(examples, "lengths", None)
        if hop is None or lengths is None:
            return count, [count] * len(examples.captions)
        return count, [min(count, -(-length // hop)) for length in lengths.tolist()]

    def mask_batch(self, batch: Batch, inputs: MaskedInputs) -> tuple[Tensor, MaskedTokens]:
        """Return the tokens (B, N, S) of a batch, 0 at padding, and the masked tokens."""
        tokens_BNS = self.get_padded_tokens(batch.examples).clamp_min(0)
        masked = inputs.mask.apply(tokens_BNS, self.model.network.mask_token_id)
        return tokens_BNS, replace(masked, valid_BN=inputs.valid_BN, selected=inputs.selected)

    def get_padded_tokens(self, examples: Examples) -> Tensor:
        """Return tokens (B, N, S), which are -1 after the end of an example."""
        codes = self.get_codes(examples)
        return self.layout.for_length(codes.shape[1]).patchify(codes)

    def get_tokens(self, examples: Examples) -> TokenBatch:
        return TokenBatch.from_padded(self.get_padded_tokens(examples))

    def get_condition(
        self,
        network: TokenTransformer,
        examples: Examples,
        dropped: Sequence[bool] = (),
        texts: Sequence[str] | TextInputs | None = None,
        prefix: Prefix | None = None,
    ) -> Condition:
        """Encode the condition of examples; prepared texts state which of them are dropped."""
        cond_codes = self.get_codes(examples, self.conditioner) if self.conditioner else None
        captions = examples.captions if texts is None else texts
        return network.condition(captions, dropped, cond_codes, prefix)

    # ---- losses

    def masked_token_loss(self, batch: Batch, step: int) -> Loss:
        inputs: MaskedInputs = self.get_inputs(batch)
        tokens_BNS, masked = self.mask_batch(batch, inputs)
        prefix = get_prefix(masked.input_ids, inputs)
        condition = self.get_condition(
            self.model.network, batch.examples, texts=inputs.text, prefix=prefix
        )
        logits_MV = self.predict(masked, condition, inputs.self_condition_B)
        targets_M = tokens_BNS.flatten().index_select(0, inputs.selected.token_M)
        smoothing = self.config.label_smoothing
        summed = F.cross_entropy(
            to_fp32(logits_MV), targets_M, label_smoothing=smoothing, reduction="sum"
        )
        if self.model.critic is not None:
            self.pass_to_critic(batch, inputs, masked, logits_MV.detach())
        # The sum is divided by the expected number of masked tokens instead of the actual one, so
        # that micro-batches add up to the batch exactly. The mean per token of each example is
        # logged too.
        expected = len(batch) * self.config.masking.expected_num_masked(self.layout)
        detached, mask = logits_MV.detach(), masked.loss_mask
        metrics: dict[str, Tensor | Callable[[], Tensor]] = {
            "cross_entropy_per_token": partial(token_cross_entropy, detached, targets_M, mask),
            "accuracy": partial(token_accuracy, detached, targets_M, mask),
        }
        return Loss({"cross_entropy": summed / expected}, metrics)

    def predict(
        self,
        masked: MaskedTokens,
        condition: Condition,
        self_condition_B: Tensor | None = None,
    ) -> Tensor:
        """Return logits (M, V) of the tokens to predict.

        With self-conditioning (Chen 2022, arXiv 2208.04202) a first pass without gradients gives
        the previous states: for all examples, or in training for some.
        """
        network = self.model.network
        predicted = masked.loss_mask if masked.selected is None else masked.selected
        if not self.config.model.self_condition:
            return network.logits_at(masked.input_ids, predicted, condition, masked.valid_BN)
        with torch.no_grad():
            previous = network.states(masked.input_ids, condition, valid_BN=masked.valid_BN)
        if self_condition_B is not None:
            previous = previous * self_condition_B[:, None, None]
        states = network.states(masked.input_ids, condition, previous, masked.valid_BN)
        return network.logits(states, predicted)

    def pass_to_critic(
        self, batch: Batch, inputs: MaskedInputs, masked: MaskedTokens, logits_MV: Tensor
    ) -> None:
        """Sample the masked tokens and leave the completed grid to the critic's update."""
        assert inputs.critic_u_M is not None
        sampled_M = sample_columns(logits_MV, inputs.critic_u_M)
        input_ids = masked.input_ids
        completed = input_ids.flatten().index_copy(0, inputs.selected.token_M, sampled_M)
        batch.scratch |= {
            "completed": completed.view_as(input_ids),
            "is_sampled": masked.loss_mask,
            "inputs": inputs,
        }

    def critic_loss(self, batch: Batch, step: int) -> Loss:
        """Classify each token of a completed grid as real or sampled (Lezama 2022, equation 5).

        Tokens of finer levels that are still masked and padding are left out.
        """
        if "completed" not in batch.scratch:  # the generator is not trained
            with torch.no_grad():
                self.masked_token_loss(batch, step)
        bce_B, correct_B = self.classify_completed(batch)
        return Loss({"bce": bce_B.mean()}, {"accuracy": correct_B.mean()})

    def classify_completed(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the critic's cross-entropy and accuracy on the completed grids, each (B,)."""
        inputs: MaskedInputs = batch.scratch["inputs"]
        completed = batch.scratch["completed"]
        backbone, critic = self.model.critic_backbone, self.model.critic
        assert critic is not None
        condition = self.get_condition(
            backbone,
            batch.examples,
            texts=inputs.critic_text,
            prefix=get_prefix(completed, inputs),
        )
        states = backbone.states(completed, condition, valid_BN=inputs.valid_BN)
        logits = critic.realness_logits(states)
        is_real = (~batch.scratch["is_sampled"]).to(to_fp32(logits).dtype)
        counts = completed != self.model.network.mask_token_id
        if inputs.valid_BN is not None:
            counts = counts & inputs.valid_BN[..., None]
        num_B = counts.flatten(1).sum(1)
        correct_B = (((logits > 0) == (is_real > 0)) & counts).flatten(1).sum(1) / num_B
        bce = F.binary_cross_entropy_with_logits(
            to_fp32(logits), is_real, weight=counts.to(is_real.dtype), reduction="none"
        )
        return bce.flatten(1).sum(1) / num_B, correct_B

    # ---- evaluation

    def eval_step(self, batch: Batch) -> dict[str, Tensor]:
        inputs: MaskedInputs = self.get_inputs(batch)
        tokens_BNS, masked = self.mask_batch(batch, inputs)
        captions, kept = batch.examples.captions, [False] * len(batch)
        network, num_levels = self.model.network, self.layout.num_quantizers
        prefix = get_prefix(masked.input_ids, inputs)
        condition = self.get_condition(network, batch.examples, kept, prefix=prefix)
        logits_MV = self.predict(masked, condition)
        targets_M = tokens_BNS[masked.loss_mask]
        level_M = masked.loss_mask.nonzero(as_tuple=True)[2] % num_levels
        correct_M = logits_MV.argmax(-1) == targets_M
        sums = {
            "tokens": masked.loss_mask.sum(),
            "tokens_L": torch.bincount(level_M, minlength=num_levels),
            "cross_entropy": F.cross_entropy(to_fp32(logits_MV), targets_M, reduction="sum"),
            "correct_L": torch.bincount(level_M[correct_M], minlength=num_levels),
        }
        others = other_captions(captions)
        if network.text is not None and others is not None:
            condition = self.get_condition(network, batch.examples, kept, others, prefix)
            other_MV = self.predict(masked, condition)
            other = F.cross_entropy(to_fp32(other_MV), targets_M, reduction="sum")
            sums |= {"gain": other - sums["cross_entropy"], "gain_tokens": sums["tokens"]}
        if self.model.critic is not None:
            self.pass_to_critic(batch, inputs, masked, logits_MV)
            bce_B, correct_B = self.classify_completed(batch)
            count = torch.tensor(len(batch), device=bce_B.device)
            sums |= {"critic_bce": bce_B.sum(), "critic_correct": correct_B.sum(), "count": count}
        return sums

    def compute_metrics(self, totals: dict[str, Tensor]) -> dict[str, float]:
        metrics = {
            "cross_entropy": float(totals["cross_entropy"] / totals["tokens"]),
            "accuracy": float(totals["correct_L"].sum() / totals["tokens"]),
        }
        if self.layout.num_quantizers > 1:
            accuracies = (totals["correct_L"] / totals["tokens_L"].clamp_min(1)).tolist()
            metrics |= {f"accuracy_{q}": one for q, one in enumerate(accuracies, start=1)}
        if "critic_bce" in totals:
            metrics["critic_bce"] = float(totals["critic_bce"] / totals["count"])
            metrics["critic_accuracy"] = float(totals["critic_correct"] / totals["count"])
        if "gain" in totals:
            metrics["condition_gain"] = float(totals["gain"] / totals["gain_tokens"])
        return metrics

    # ---- generation

    def request_like(self, batch: Batch) -> GenerationRequest:
        examples = batch.examples
        return GenerationRequest(
            prompts=examples.captions,
            seeds=batch.seeds,
            cond_codes=self.get_codes(examples, self.conditioner) if self.conditioner else None,
            lengths=self.get_tokens(examples).lengths,
        )

    @torch.inference_mode()
    def generate(self, request: GenerationRequest) -> Tensor:
        sampling = request.sampling or self.config.sampling
        guidance = request.guidance or self.config.guidance
        network = self.model.network
        device = next(network.parameters()).device
        layout = self.layout
        if request.start is not None:  # which may be longer or shorter than the training examples
            grid = tuple(request.start.codes.shape[1 : 1 + len(layout.grid)])
            layout = replace(layout, grid=grid)
        elif request.lengths is not None:  # of joined examples, or of those in a padded batch
            layout = layout.for_length(max(request.lengths))
        token_batch, masked_BNS = self.initial_tokens(request, layout, device)
        prefix = None
        if network.prefix is not None:
            prefix = Prefix.find(token_batch.tokens_BNS, masked_BNS | ~token_batch.valid_BN1)
        tokens_BNS = maskgit_decode(
            token_batch.tokens_BNS,
            masked_BNS,
            GuidedLogits(network, request, guidance, token_batch.valid_BN, device, prefix),
            sampling,
            request.generators(),
            mask_token_id=network.mask_token_id,
            rank_NS=halton_order(layout.cell_coordinates()) if sampling.order == "halton" else None,
            critic=self.critic_scores(request, token_batch, device, prefix),
            stages=sampling.build_stages(layout.num_positions, layout.num_quantizers, device),
            on_step=self.report_steps(request, layout, token_batch.valid_BN1),
        )
        codes = layout.unpatchify(tokens_BNS.masked_fill(~token_batch.valid_BN1, -1))
        return self.pad_codes(codes, request)

    def pad_codes(self, codes: Tensor, request: GenerationRequest) -> Tensor:
        """Pad the codes of shorter examples to the grid, so that all samples have one shape."""
        if request.lengths is None or codes.shape[1] >= self.layout.grid[0]:
            return codes
        return pad_end(codes, self.layout.grid[0])

    def report_steps(
        self, request: GenerationRequest, layout: Layout, valid_BN1: Tensor
    ) -> OnStep | None:
        """Return a function that passes the tokens of each step to `request.on_step` as codes."""
        on_step, mask_token_id = request.on_step, self.model.network.mask_token_id
        if on_step is None:
            return None

        def report(step: int, steps: int, tokens_BNS: Tensor) -> None:
            # Levels that are decoded later are still masked and have code 0 here.
            tokens = tokens_BNS.masked_fill(tokens_BNS == mask_token_id, 0)
            on_step(step, steps, layout.unpatchify(tokens.masked_fill(~valid_BN1, -1)))

        return report

    def initial_tokens(
        self, request: GenerationRequest, layout: Layout, device: torch.device
    ) -> tuple[TokenBatch, Tensor]:
        """Return the given tokens and the mask of those to generate, by default all."""
        count = len(request)
        if request.start is None or request.start.mask is None:
            shape = (count, layout.num_positions, layout.tokens_per_position)
            tokens = torch.zeros(shape, dtype=torch.long, device=device)
            masked = torch.ones_like(tokens, dtype=torch.bool)
        else:
            codes, mask = request.start.codes, request.start.mask
            tokens = layout.patchify(codes.expand(count, *codes.shape[1:]).to(device))
            masked = layout.patchify(mask.expand(count, *mask.shape[1:]).to(device))
        lengths = list(request.lengths or [tokens.shape[1]] * count)
        valid_BN1 = TokenBatch(tokens, lengths).valid_BN1
        return TokenBatch(tokens.masked_fill(~valid_BN1, 0), lengths), masked & valid_BN1

    def critic_scores(
        self,
        request: GenerationRequest,
        token_batch: TokenBatch,
        device: torch.device,
        prefix: Prefix | None,
    ) -> Callable[[Tensor, float], Tensor] | None:
        """Return the critic's score of each token as a function for the sampler."""
        critic, backbone = self.model.critic, self.model.critic_backbone
        if critic is None:
            return None
        cond_codes = request.conditioning_codes(device)
        condition = backbone.project_condition(
            backbone.condition(request.prompts, [False] * len(request), cond_codes, prefix)
        )
        states = partial(backbone.states, condition=condition, valid_BN=token_batch.valid_BN)
        return lambda tokens, progress: critic.realness_logits(states(tokens)).float()


class GuidedLogits:
    """The logits of a masked model under classifier-free guidance.

    With text both passes run as one batch. Without text, guidance leads away from samples without
    the leading positions that are no part of the sample, such as a voice prompt: the second pass
    leaves them out. Without guidance there is only the conditional pass.
    """

    def __init__(
        self,
        network: MaskedTransformer,
        request: GenerationRequest,
        guidance: Guidance,
        valid_BN: Tensor | None,
        device: torch.device,
        prefix: Prefix | None = None,
    ):
        self.network, self.valid_BN = network, valid_BN
        has_text = network.text is not None
        self.trim = 0 if has_text or request.start is None else request.start.trim
        is_guided = has_text or self.trim > 0
        self.guidance = guidance if is_guided else replace(guidance, scale=1.0)
        self.count = len(request)
        texts, dropped = request.guided_texts(self.guidance.scale if has_text else 1.0)
        self.both = network.project_condition(
            network.condition(texts, dropped, request.conditioning_codes(device), prefix)
        )
        context = self.both.context
        if isinstance(context, list):
            context = [one.first(self.count) for one in context]
        self.conditional = replace(self.both, context=context)
        self.previous: Tensor | None = None
        self.cache, self.trimmed_cache = FirstLayerCache(), FirstLayerCache()

    def __call__(self, tokens_BNS: Tensor, predict_BNS: Tensor, progress: float) -> Tensor:
        scale = self.guidance.at(progress)
        if scale == 1:
            return self.logits(tokens_BNS, predict_BNS, self.conditional)
        if self.trim:
            conditional = self.logits(tokens_BNS, predict_BNS, self.conditional)
            return apply_cfg(
                conditional, self.logits_without_prompt(tokens_BNS, predict_BNS), scale
            )
        doubled = self.logits(tokens_BNS, torch.cat([predict_BNS] * 2), self.both)
        conditional, unconditional = doubled.chunk(2)
        return apply_cfg(conditional, unconditional, scale)

    def logits_without_prompt(self, tokens_BNS: Tensor, predict_BNS: Tensor) -> Tensor:
        """Return the logits of the tokens to predict, none of which is in the prompt, without the
        summary of the prompt."""
        trim = self.trim
        base_embedding = self.conditional.base_embedding
        if base_embedding.ndim > 1:
            base_embedding = base_embedding[..., trim:, :]
        return to_fp32(
            self.network.logits_at(
                tokens_BNS[:, trim:],
                predict_BNS[:, trim:],
                Condition(self.conditional.context, base_embedding),
                None if self.valid_BN is None else self.valid_BN[:, trim:],
                self.trimmed_cache,
            )
        )

    def logits(self, tokens: Tensor, predict: Tensor, condition: Condition) -> Tensor:
        if self.network.self_cond_proj is None:
            return to_fp32(
                self.network.logits_at(tokens, predict, condition, self.valid_BN, self.cache)
            )
        previous = self.previous
        if previous is not None and len(previous) != len(predict):
            previous = torch.cat([previous[: self.count]] * (len(predict) // self.count))
        self.previous = self.network.states(tokens, condition, previous, self.valid_BN)
        return to_fp32(self.network.logits(self.previous, predict))


def pad_end(codes: Tensor, length: int) -> Tensor:
    """Pad codes (B, T, ...) with -1 to a length."""
    return F.pad(codes, (0, 0) * (codes.ndim - 2) + (0, length - codes.shape[1]), value=-1)


def get_prefix(tokens_BNS: Tensor, inputs: MaskedInputs) -> Prefix | None:
    """Return the tokens before the first masked one, if the model has a summary of them."""
    return None if inputs.prefix_BN is None else Prefix(tokens_BNS, inputs.prefix_BN)


def prepare_texts(
    network: TokenTransformer, texts: Sequence[str], dropped: Sequence[bool] = ()
) -> TextInputs | None:
    if network.text is None:
        return None
    return network.text.prepare_inputs(texts, dropped or [False] * len(texts))


def token_spec(tokenizer: TokenizerProtocol, max_positions: int | None = None) -> TokenSpec:
    layout = Layout(tokenizer.grid, tokenizer.num_quantizers).with_max_positions(max_positions)
    return TokenSpec(tokenizer.vocab_size, layout, tokenizer.features, tokenizer.seconds)


def token_cross_entropy(logits_MV: Tensor, targets_M: Tensor, loss_mask_BNS: Tensor) -> Tensor:
    loss_M = F.cross_entropy(to_fp32(logits_MV), targets_M, reduction="none")
    return mean_over_examples(loss_M, loss_mask_BNS)


def token_accuracy(logits_MV: Tensor, targets_M: Tensor, loss_mask_BNS: Tensor) -> Tensor:
    return mean_over_examples((logits_MV.argmax(-1) == targets_M).float(), loss_mask_BNS)


def mean_over_examples(values_M: Tensor, loss_mask_BNS: Tensor) -> Tensor:
    """Return the mean over examples of the mean over their tokens, so that micro-batches add up."""
    zeros = torch.zeros(loss_mask_BNS.shape, device=values_M.device, dtype=values_M.dtype)
    values_BNS = zeros.masked_scatter(loss_mask_BNS, values_M)
    return (values_BNS.flatten(1).sum(1) / loss_mask_BNS.flatten(1).sum(1)).mean()
