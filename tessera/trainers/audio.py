"""The front door of sound: SoundStorm, which says in some voice what semantic symbols tell.

From pairs of symbols that somebody's own tokenizers wrote:

    model = SoundStormConfig().build(
        Stream(vocabulary=1024, num_quantizers=8, frames=500, seconds=0.02), Stream(vocabulary=500, frames=250, seconds=0.04)
    )
    trainer = SoundStormTrainer(model, num_train_steps=10_000, num_warmup_steps=500, batch_size=16, dataset=pairs)
    trainer.train()
    acoustic = trainer.generate(semantic)               # symbols (B, T, 8)

Or from recordings, over a codec and semantic tokens that were trained here:

    runs = {"tokenizer": "runs/audio-codec", "semantic": "runs/audio-semantic"}
    model = SoundStormConfig().build(**runs)
    trainer = SoundStormTrainer(
        model, num_train_steps=10_000, num_warmup_steps=500, batch_size=16, dataset="recordings", **runs
    )
    trainer.train()
    sounds = trainer.sounds(trainer.generate(semantic))

`trainers/in_memory_audio.py` says how the items of a dataset may look.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor

from tessera.api.generator import drawn_by, make_request, refuse_without_codec, settings
from tessera.data.dataset import Split, Subset, split_names
from tessera.data.errors import UnreadableFile
from tessera.engine.ema import EMAConfig
from tessera.engine.modes import eval_mode
from tessera.engine.optim.config import OptimizerConfig
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.external_tokens import TokenStream, TokenStreams
from tessera.modalities.audio.media import Audio
from tessera.nn.conformer import ConformerConfig
from tessera.nn.masked_transformer import (
    CriticConfig,
    CriticHead,
    CriticHeadConfig,
    MaskedModel,
    MaskedTransformerConfig,
    TokenCritic,
    TokenSpec,
)
from tessera.objectives.masked import MaskedConfig, MaskedTask, token_spec
from tessera.objectives.masking import LevelMaskingConfig, MaskingConfig
from tessera.recipes import registry as recipes
from tessera.run.config import Run
from tessera.run.dependencies import find_dependencies
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError
from tessera.run.load import Tokenizer, load_run
from tessera.run.train import build_task
from tessera.sampling.maskgit import MaskedSampling
from tessera.trainers import in_memory_audio as given_sounds
from tessera.trainers.arguments import GIVEN, engine_config, refuse_clearing
from tessera.trainers.base import Trainer
from tessera.trainers.in_memory_audio import InMemoryTokenPairs, InMemoryWaves

Dataset = Sequence[Any] | str | Path
CONFORMER = MaskedTransformerConfig(
    text=None, conformer=ConformerConfig(), absolute_positions=False
)


@dataclass(frozen=True, kw_only=True)
class SoundStormConfig:
    network: MaskedTransformerConfig = CONFORMER
    """The Conformer that guesses symbols."""
    critic: CriticConfig | CriticHeadConfig | None = None
    """Learns to tell drawn symbols from real ones."""

    def build(self, tokenizer: TokenStream | str | Path, semantic: TokenStream | str | Path) -> MaskedModel:
        """For the symbols of two runs, or for symbols of which no more is known than a Stream
        says."""
        heard, said = known(tokenizer), known(semantic)
        critic = self.critic.build(self.network, heard, said) if self.critic is not None else None
        return MaskedModel(self.network.build(heard, said), critic)


class SoundStormTrainer(Trainer):
    """Trains SoundStorm on `dataset`: pairs of symbols; or, over the finished runs `tokenizer` and
    `semantic`, which are copied into this one's folder, recordings: a folder of them, or waves at
    the codec's rate.

    `batch_size * grad_accum_every` examples make a step, whatever the number of processes that
    share them: so it is with and without `split_batches`; and as one pass goes over into the next
    no batch is ever short, with and without `drop_last`. The rate rises from `initial_lr` to `lr`
    in `num_warmup_steps` and falls as a cosine to nothing at `num_train_steps`. With
    `only_train_generator` or `only_train_critic` the other network stays as it is. Of recordings,
    clips of `data_max_length` samples are learnt from, or as long as those that the semantic tokens
    learnt from. `results_folder` is the run's folder; a second construction goes on where the first
    stopped, and nothing is asked or deleted.
    """

    def __init__(
        self,
        model: MaskedModel,
        *,
        num_train_steps: int,
        num_warmup_steps: int,
        batch_size: int,
        dataset: Dataset | None = None,
        tokenizer: str | Path | None = None,
        semantic: str | Path | None = None,
        data_max_length: int | None = None,
        only_train_generator: bool = False,
        only_train_critic: bool = False,
        lr: float = 3e-4,
        initial_lr: float = 1e-5,
        grad_accum_every: int = 1,
        wd: float = 0.0,
        max_grad_norm: float | None = 0.5,
        valid_frac: float = 0.05,
        random_split_seed: int = 42,
        save_results_every: int = 100,
        save_model_every: int = 1000,
        results_folder: str | Path = "./results",
        accelerate_kwargs: Mapping[str, Any] | None = None,
        split_batches: bool = False,
        drop_last: bool = False,
        force_clear_prev_results: bool | None = None,
    ) -> None:
        refuse_clearing(force_clear_prev_results)
        dataset = clear(dataset, tokenizer, semantic)
        streams = streams_of(model) if tokenizer is None else None
        folder = RunDirectory(results_folder)
        data = replace(
            data_of(streams, data_max_length)
            if streams is not None
            else data_beneath(folder, str(semantic), data_max_length),
            path=str(dataset) if isinstance(dataset, (str, Path)) else GIVEN,
            val_fraction=valid_frac,
            split_seed=random_split_seed,
        )
        optimizer = OptimizerConfig(
            name="adamw" if wd else "adam",
            lr=lr,
            warmup_start_lr=initial_lr,
            betas=(0.9, 0.99),
            weight_decay=wd,
            max_grad_norm=max_grad_norm,
            schedule="cosine",
            warmup_steps=num_warmup_steps,
        )
        run = Run(
            recipe="audio-soundstorm",
            task=MaskedConfig(
                tokenizer=GIVEN if tokenizer is None else str(tokenizer),
                semantic=None if semantic is None else str(semantic),
                streams=streams,
                model=model.network.config,
                critic=critic_of(model),
                critic_optimizer=optimizer,
                train_only=learning(model, only_train_generator, only_train_critic),
                masking=LevelMaskingConfig()
                if model.network.tokens.layout.num_quantizers > 1
                else MaskingConfig(),
                sampling=MaskedSampling(decoding_steps_per_level=(16, 1), noise=1.0),
                optimizer=optimizer,
            ),
            data=data,
            engine=engine_config(
                num_train_steps,
                batch_size,
                grad_accum_every,
                save_results_every,
                save_model_every,
                EMAConfig(decay=0.0),
                accelerate_kwargs,
            ),
        )
        task: Any = build_task(run, find_dependencies(run, folder))
        refuse_stranger(model, task.model)
        task.model.load_state_dict(model.state_dict())
        super().__init__(run, results_folder, task, split_of(dataset, streams, data))

    @property
    def task(self) -> MaskedTask:
        return cast(MaskedTask, self.engine.task)

    def generate(
        self,
        cond_semantic_token_ids: Tensor | Sequence[Tensor],
        *,
        prompt_acoustic_token_ids: Tensor | None = None,
        seconds: float | None = None,
        sampling: MaskedSampling | None = None,
        seed: int = 0,
    ) -> Tensor:
        """Acoustic symbols (B, T, L) for as long as the semantic ones last, or for their first
        seconds; -1 where one has ended.

        Semantic symbols are (B, t), with -1 after the end of shorter ones, or a list of (t,). A
        prompt (B, p, l), or (p, l) for all alike, is the beginning of what is wanted, in whose
        voice it goes on; where it has fewer levels, the finer ones are drawn. The semantic symbols
        tell what is said in the prompt too, and the result begins with it. Number i of a seed is a
        function of the seed, i and what is asked for, whoever else is made with it.
        """
        conditioner = self.model.network.token_conditioner
        heard, said = TokenStream.from_spec(self.model.network.tokens), TokenStream.from_spec(conditioner.cond_tokens)
        rows = rows_of(cond_semantic_token_ids, said)
        if seconds is not None:
            rows = [first_seconds(row, seconds, said, number) for number, row in enumerate(rows)]
        most = math.inf if seconds is None else max(1, round(seconds / heard.seconds))
        lengths = [min(conditioner.num_positions(len(row)), most) for row in rows]
        codes = torch.zeros(
            len(rows), conditioner.num_positions(max(map(len, rows))), heard.num_quantizers, dtype=torch.long
        )
        hidden = torch.ones_like(codes, dtype=torch.bool)
        if prompt_acoustic_token_ids is not None:
            prompt = prompt_of(prompt_acoustic_token_ids, heard, lengths)
            codes[:, : prompt.shape[1], : prompt.shape[2]] = prompt
            hidden[:, : prompt.shape[1], : prompt.shape[2]] = False
        wanted = make_request([""] * len(rows), seed, 0, None)
        wanted.codes, wanted.hidden, wanted.lengths = squeezed(codes), squeezed(hidden), lengths
        wanted.coarser = torch.stack([given_sounds.ended(row, max(map(len, rows))) for row in rows])
        with self.engine.ema.applied(), eval_mode(self.task):
            return drawn_by(self.task, wanted, settings(self.task, sampling=sampling))[
                :, : max(lengths)
            ]

    def sounds(self, acoustic_token_ids: Tensor) -> list[Audio]:
        """What such symbols sound like, by the codec that this run stands on."""
        refuse_without_codec(self.task)
        return self.task.tokenizers["tokenizer"].media(acoustic_token_ids.to(self.engine.device))


# ---- their words in ours


def known(stream: TokenStream | str | Path) -> TokenSpec:
    tokens = (
        stream.to_spec()
        if isinstance(stream, TokenStream)
        else token_spec(cast(Any, Tokenizer(load_run(stream))))
    )
    if tokens.seconds is None:
        raise UserError(
            f"The run in {stream} writes no symbols of sound: SoundStorm stands on a codec and on semantic tokens."
        )
    return tokens


def streams_of(model: MaskedModel) -> TokenStreams:
    """What a network was built for is all that is known of symbols that come from elsewhere."""
    if model.network.token_conditioner is None:
        raise UserError(
            "The network was built for acoustic symbols alone, but SoundStorm follows semantic ones: build it for both."
        )
    try:
        return TokenStreams(
            acoustic=TokenStream.from_spec(model.network.tokens),
            semantic=TokenStream.from_spec(model.network.token_conditioner.cond_tokens),
        )
    except ValueError as error:
        raise UserError(str(error)) from None


def critic_of(model: MaskedModel) -> CriticConfig | CriticHeadConfig | None:
    if isinstance(model.critic, TokenCritic):
        own = model.critic.config
        return CriticConfig(width=own.width, depth=own.depth, heads=own.heads)
    return (
        CriticHeadConfig(width=model.critic.inner) if isinstance(model.critic, CriticHead) else None
    )


def learning(
    model: MaskedModel, generator_alone: bool, critic_alone: bool
) -> Literal["all", "generator", "critic"]:
    if generator_alone and critic_alone:
        raise UserError(
            "only_train_generator and only_train_critic are both on, and then nothing would learn: leave one out."
        )
    if critic_alone and model.critic is None:
        raise UserError(
            "only_train_critic is on, but the model has no critic: build it with one (SoundStormConfig(critic=...))."
        )
    return "generator" if generator_alone else "critic" if critic_alone else "all"


def data_of(streams: TokenStreams, data_max_length: int | None) -> AudioDataConfig:
    """Of pairs nobody knows more than how long they last."""
    if data_max_length is not None:
        raise UserError(
            "data_max_length is a number of samples, and pairs of symbols have none: build the model for as many frames."
        )
    return AudioDataConfig(
        path=GIVEN, seconds=streams.acoustic.frames * streams.acoustic.seconds, crop="centre"
    )


def data_beneath(
    folder: RunDirectory, semantic: str, data_max_length: int | None
) -> AudioDataConfig:
    """How sounds were prepared for the semantic tokens: as in their copy in this run's folder, once
    there is one."""
    copy = folder.parts / "semantic"
    run = recipes.stored(RunDirectory(copy if copy.exists() else semantic))
    if not isinstance(run.data, AudioDataConfig):
        raise UserError(
            f"The run in {semantic} is of recipe {run.recipe!r}, but SoundStorm stands on audio-semantic."
        )
    plain = run.data.plain()
    return plain if data_max_length is None else replace(plain, samples=data_max_length)


def split_of(dataset: Dataset, streams: TokenStreams | None, data: AudioDataConfig) -> Split:
    if isinstance(dataset, (str, Path)):
        return data.build()
    source = (
        InMemoryTokenPairs(dataset, streams)
        if streams is not None
        else InMemoryWaves(dataset, data)
    )
    train, validation = split_names(
        [source.name(i) for i in range(len(source))], data.val_fraction, data.split_seed
    )
    return Split(Subset(source, train), Subset(source, validation))


def clear(dataset: Dataset | None, tokenizer: Any, semantic: Any) -> Dataset:
    """The dataset, if there is one and it can be read."""
    if dataset is None:
        raise UserError(
            "There is no dataset: give pairs of symbols, or recordings and the runs that write them as symbols (tokenizer, "
            "semantic)."
        )
    if (tokenizer is None) != (semantic is None):
        missing = "tokenizer" if tokenizer is None else "semantic"
        raise UserError(
            f"Recordings are written as symbols by two runs, of a codec and of semantic tokens: {missing} is missing."
        )
    if isinstance(dataset, (str, Path)) and tokenizer is None:
        raise UserError(
            f"To learn from the recordings in {dataset} takes the runs that write them as symbols: tokenizer=RUN, semantic=RUN."
        )
    if not isinstance(dataset, (str, Path)) and not len(dataset):
        raise UserError("The dataset is empty, so there is nothing to learn from.")
    return dataset


def refuse_stranger(model: MaskedModel, fitting: MaskedModel) -> None:
    """A network that was built for the symbols of others."""
    shapes, wanted = (
        {name: value.shape for name, value in one.state_dict().items()} for one in (model, fitting)
    )
    paces = [
        (one.network.tokens.seconds, getattr(one.network.token_conditioner, "cond_tokens", None))
        for one in (model, fitting)
    ]
    lasting = [(heard, said.seconds if said is not None else None) for heard, said in paces]
    if shapes != wanted or lasting[0] != lasting[1]:
        raise UserError(
            f"The model was built for {told(model)}, but what it is to learn from has {told(fitting)}: build it for those, "
            "SoundStormConfig(...).build(TOKENIZER, SEMANTIC)."
        )


def told(model: MaskedModel) -> str:
    """What a network reads, in words."""
    kinds = {
        "acoustic": model.network.tokens,
        "semantic": getattr(model.network.token_conditioner, "cond_tokens", None),
    }
    return " and ".join(
        f"{one.vocab_size} {kind} symbols in {one.layout.num_quantizers} level(s), a frame of {one.seconds} s"
        for kind, one in kinds.items()
        if one is not None
    )


# ---- what is asked for


def rows_of(semantic: Tensor | Sequence[Tensor], stream: TokenStream) -> list[Tensor]:
    """Of each what is said in it, without the padding."""
    if not len(semantic):
        raise UserError("Nothing is to be generated: cond_semantic_token_ids is empty.")
    if isinstance(semantic, Tensor) and semantic.ndim != 2:
        raise UserError(
            f"cond_semantic_token_ids are {tuple(semantic.shape)}, but they are (examples, frames), or a list of rows."
        )
    try:
        return [
            given_sounds.token_spec(row, stream, f"Semantic symbols {number}")
            for number, row in enumerate(semantic)
        ]
    except UnreadableFile as error:
        raise UserError(f"{error}.") from None


def first_seconds(row: Tensor, seconds: float, stream: TokenStream, number: int) -> Tensor:
    lasts = len(row) * stream.seconds
    if not 0 < seconds <= lasts + 1e-9:
        raise UserError(
            f"{seconds:g} s are asked for, but cond_semantic_token_ids[{number}] lasts {lasts:.2f} s: ask for some time up to "
            "that."
        )
    return row[: math.ceil(seconds / stream.seconds - 1e-9)]


def prompt_of(prompt: Tensor, stream: TokenStream, lengths: Sequence[int]) -> Tensor:
    """(B, p, l): symbols that are there already, in the coarsest levels or in all."""
    given = prompt[None] if prompt.ndim == 2 else prompt
    fits = (
        given.ndim == 3 and len(given) in (1, len(lengths)) and 1 <= given.shape[2] <= stream.num_quantizers
    )
    if not fits or not given.numel():
        raise UserError(
            f"prompt_acoustic_token_ids are {tuple(prompt.shape)}, but a prompt is ({len(lengths)}, frames, up to "
            f"{stream.num_quantizers} levels), or (frames, levels) for all alike."
        )
    if given.shape[1] >= min(lengths):
        raise UserError(
            f"The prompt has {given.shape[1]} frames, and the semantic symbols last for {min(lengths)}: they tell what is said "
            "in the prompt too, and then what comes after it. Give more of them, or a shorter prompt."
        )
    for number in given.unique()[[0, -1]].tolist():
        if number not in range(stream.vocab_size):
            raise UserError(
                f"The prompt has the symbol {number}, but there are those from 0 to {stream.vocab_size - 1}."
            )
    return given.cpu().long().expand(len(lengths), -1, -1)


def squeezed(codes_BTL: Tensor) -> Tensor:
    """As a tokenizer writes them: of one level without an axis for it."""
    return codes_BTL[..., 0] if codes_BTL.shape[2] == 1 else codes_BTL
