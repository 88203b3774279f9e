"""The trainer for audio: SoundStorm, which generates the acoustic tokens of semantic tokens.

On pairs of tokens that were computed elsewhere:

    model = SoundStormConfig().build(
        TokenStream(vocab_size=1024, num_quantizers=8, frames=500, seconds=0.02),
        TokenStream(vocab_size=500, frames=250, seconds=0.04),
    )
    trainer = SoundStormTrainer(
        model, num_train_steps=10_000, num_warmup_steps=500, batch_size=16, dataset=pairs
    )
    trainer.train()
    acoustic = trainer.generate(semantic)               # token ids (B, T, 8)

On recordings, with a codec and a semantic tokenizer that were trained with this package:

    runs = {"tokenizer": "runs/audio-codec", "semantic": "runs/audio-semantic"}
    model = SoundStormConfig().build(**runs)
    trainer = SoundStormTrainer(
        model,
        num_train_steps=10_000,
        num_warmup_steps=500,
        batch_size=16,
        dataset="recordings",
        **runs,
    )
    trainer.train()
    audio = trainer.to_audio(trainer.generate(semantic))

`trainers/in_memory_audio.py` describes the items of a dataset in memory. The parameters are those
of soundstorm-pytorch.

B examples, T acoustic frames, t semantic frames, L quantizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn

from tessera.api.generator import check_not_external, make_seeds, run_task
from tessera.api.tokenizer import Tokenizer
from tessera.data.dataset import ExampleDataset, Split, split_dataset
from tessera.data.errors import UnreadableFile
from tessera.data.source import Items, require_items
from tessera.engine.ema import EMAConfig
from tessera.engine.modes import eval_mode
from tessera.engine.optim.config import OptimizerConfig
from tessera.modalities.audio.dataset import AudioDataConfig
from tessera.modalities.audio.external_tokens import TokenStream, TokenStreams
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.soundstorm import SoundStormTaskConfig
from tessera.nn.conformer import ConformerConfig
from tessera.nn.masked_transformer import (
    CriticConfig,
    CriticHead,
    CriticHeadConfig,
    MaskedModel,
    MaskedTransformerConfig,
    TokenCritic,
)
from tessera.nn.token_embedding import TokenSpec
from tessera.objectives.generation import GenerationRequest, TokenPrompt
from tessera.objectives.masked import MaskedTask, token_spec
from tessera.objectives.masking import LevelMaskingConfig, MaskingConfig
from tessera.recipes.registry import read_run
from tessera.run.config import Run, encode
from tessera.run.dependencies import find_dependencies
from tessera.run.directory import RunDirectory
from tessera.run.errors import UserError, as_user_error
from tessera.run.train import build_task
from tessera.sampling.maskgit import MaskedSampling
from tessera.trainers.arguments import (
    IN_MEMORY,
    build_engine_config,
    check_arguments,
    check_clear_results,
)
from tessera.trainers.base import Trainer, adopt_model
from tessera.trainers.foreign import ForeignRun
from tessera.trainers.foreign_audio import ForeignSoundStormTask, build_pairs
from tessera.trainers.in_memory_audio import (
    InMemoryTokenPairs,
    InMemoryWaveforms,
    fit_frames,
    parse_tokens,
)

AudioSource = Sequence[object] | str | Path
"""A dataset in memory, or the path of a folder."""
CONFORMER = MaskedTransformerConfig(
    text=None, conformer=ConformerConfig(), absolute_positions=False
)


@dataclass(frozen=True, kw_only=True)
class SoundStormConfig:
    network: MaskedTransformerConfig = CONFORMER
    """The Conformer that predicts masked tokens."""
    critic: CriticConfig | CriticHeadConfig | None = None
    """A network that is trained to separate sampled from real tokens."""

    def build(
        self, tokenizer: TokenStream | str | Path, semantic: TokenStream | str | Path
    ) -> MaskedModel:
        """Build the model for the tokens of two runs, or for two streams of external tokens."""
        acoustic, condition = load_token_spec(tokenizer), load_token_spec(semantic)
        critic = None
        if self.critic is not None:
            critic = self.critic.build(self.network, acoustic, condition)
        return MaskedModel(self.network.build(acoustic, condition), critic)


class SoundStormTrainer(Trainer[MaskedModel]):
    """Train SoundStorm on pairs of tokens, or on recordings with two tokenizers.

    `dataset` holds pairs of tokens. With `tokenizer` and `semantic`, trained runs that are copied
    into the run directory, it is a folder of recordings, or waveforms at the codec's rate; examples
    then have `data_max_length` samples, by default as many as those of the semantic tokenizer.

    A step has `batch_size * grad_accum_every` examples, divided between the processes, with and
    without `split_batches`. The order of the data continues from epoch to epoch, so no batch is
    incomplete, with and without `drop_last`. The learning rate rises from `initial_lr` to `lr` in
    `num_warmup_steps` steps and follows a cosine to 0 at `num_train_steps`. With
    `only_train_generator` or `only_train_critic` the other network is not trained. `results_folder`
    is the run directory: a trainer that is constructed again resumes, and nothing is deleted.
    `workers` is the number of processes that load data.

    A model of another package is trained as it is if it is called like that of soundstorm-pytorch
    (`trainers/foreign_audio.py`).
    """

    result_names = {
        "generator_loss": ("model/generator_loss", "model/cross_entropy"),
        "critic_loss": ("model/critic_loss", "critic/bce"),
    }

    @check_arguments
    def __init__(
        self,
        model: MaskedModel | nn.Module,
        *,
        num_train_steps: int,
        num_warmup_steps: int,
        batch_size: int,
        dataset: AudioSource | None = None,
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
        accelerate_kwargs: Mapping[str, object] | None = None,
        split_batches: bool = False,
        drop_last: bool = False,
        force_clear_prev_results: bool | None = None,
        workers: int = 0,
    ) -> None:
        check_clear_results(force_clear_prev_results)
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
        engine = build_engine_config(
            steps=num_train_steps,
            micro_batch_size=batch_size,
            grad_accum_steps=grad_accum_every,
            validate_every=save_results_every,
            checkpoint_every=save_model_every,
            num_workers=workers,
            ema=EMAConfig(decay=0.0),
            accelerate_kwargs=accelerate_kwargs,
        )
        if not isinstance(model, MaskedModel):
            foreign = ForeignSoundStormTask(
                model,
                optimizer,
                only_train_generator=only_train_generator,
                only_train_critic=only_train_critic,
            )
            pairs = check_foreign_dataset(dataset, tokenizer, semantic, data_max_length)
            split = split_dataset(build_pairs(pairs, foreign.model), valid_frac, random_split_seed)
            arguments = {"optimizer": encode(optimizer), **foreign.kwargs}
            super().__init__(ForeignRun(foreign, split, engine, arguments), results_folder)
            return
        dataset = check_dataset(dataset, tokenizer, semantic)
        directory = RunDirectory(results_folder)
        streams = None
        if tokenizer is None:
            streams = describe_streams(model)
            data = token_data_config(streams, data_max_length)
        else:
            data = audio_data_config(directory, str(semantic), data_max_length)
        data = replace(
            data,
            path=str(dataset) if isinstance(dataset, (str, Path)) else IN_MEMORY,
            val_fraction=valid_frac,
            split_seed=random_split_seed,
        )
        has_levels = model.network.tokens.layout.num_quantizers > 1
        run = Run(
            recipe="audio-soundstorm",
            task=SoundStormTaskConfig(
                tokenizer=IN_MEMORY if tokenizer is None else str(tokenizer),
                semantic=IN_MEMORY if semantic is None else str(semantic),
                streams=streams,
                model=model.network.config,
                critic=critic_config(model),
                critic_optimizer=optimizer,
                train_only=choose_trained(model, only_train_generator, only_train_critic),
                masking=LevelMaskingConfig() if has_levels else MaskingConfig(),
                sampling=MaskedSampling(decoding_steps_per_level=(16, 1), choice_temperature=1.0),
                optimizer=optimizer,
            ),
            data=data,
            engine=engine,
        )
        task = build_task(run, find_dependencies(run, directory))
        assert isinstance(task, MaskedTask)
        check_model(model, task.model)
        adopt_model(task, model)
        super().__init__(run, results_folder, task, build_split(dataset, streams, data))

    @property
    def task(self) -> MaskedTask:
        return cast(MaskedTask, self.engine.task)

    def generate(self, *args: object, **kwargs: object) -> Tensor:
        """Generate with the EMA weights.

        For a model of this package the arguments are those of `generate_tokens`, for another one
        those of its own `generate`.
        """
        generate: Callable[..., Tensor] = self.generate_tokens
        if not isinstance(self.run, ForeignRun):
            return generate(*args, **kwargs)
        with self.engine.ema.applied(), eval_mode(self.engine.task):
            return self.engine.task.model.generate(*args, **kwargs)

    def generate_tokens(
        self,
        cond_semantic_token_ids: Tensor | Sequence[Tensor],
        *,
        prompt_acoustic_token_ids: Tensor | None = None,
        seconds: float | None = None,
        sampling: MaskedSampling | None = None,
        seed: int = 0,
    ) -> Tensor:
        """Generate acoustic token ids (B, T, L), with -1 after the end of shorter examples.

        Sample number i of a seed depends only on the seed, i and its own inputs, not on the other
        samples.

        Args:
            cond_semantic_token_ids: (B, t) with -1 after the end of shorter ones, or a list of
            (t,). prompt_acoustic_token_ids: The first acoustic tokens, whose voice is continued:
                (B, p, l), or (p, l) for all examples. If it has fewer quantizers than the model,
                the finer ones are generated. The semantic tokens cover the prompt too, and the
                result starts with it.
            seconds: Generate only the first seconds; by default as much as the semantic tokens
                cover.
            sampling: The sampling configuration; by default that of the run.
            seed: The seed of all samples.
        """
        conditioner = self.model.network.token_conditioner
        assert conditioner is not None
        acoustic = TokenStream.from_spec(self.model.network.tokens)
        semantic = TokenStream.from_spec(conditioner.cond_tokens)
        rows = parse_semantic(cond_semantic_token_ids, semantic)
        if seconds is not None:
            rows = [crop_seconds(row, seconds, semantic, index) for index, row in enumerate(rows)]
        cond_frames = max(map(len, rows))
        lengths = [conditioner.num_positions(len(row)) for row in rows]
        if seconds is not None:
            max_frames = max(1, round(seconds / acoustic.seconds))
            lengths = [min(length, max_frames) for length in lengths]
        shape = (len(rows), conditioner.num_positions(cond_frames), acoustic.num_quantizers)
        codes_BTL = torch.zeros(shape, dtype=torch.long)
        mask_BTL = torch.ones(shape, dtype=torch.bool)
        if prompt_acoustic_token_ids is not None:
            prompt = parse_prompt(prompt_acoustic_token_ids, acoustic, lengths)
            codes_BTL[:, : prompt.shape[1], : prompt.shape[2]] = prompt
            mask_BTL[:, : prompt.shape[1], : prompt.shape[2]] = False
        request = GenerationRequest(
            prompts=[""] * len(rows),
            seeds=make_seeds(seed, len(rows)),
            start=TokenPrompt(squeeze_levels(codes_BTL), squeeze_levels(mask_BTL)),
            cond_codes=torch.stack([fit_frames(row, cond_frames) for row in rows]),
            lengths=lengths,
            sampling=sampling,
        )
        with self.engine.ema.applied(), eval_mode(self.task):
            return run_task(self.task, request)[:, : max(lengths)]

    def to_audio(self, acoustic_token_ids: Tensor) -> list[Audio]:
        """Decode acoustic token ids (B, T, L) with the codec of this run."""
        check_not_external(self.task)
        media = self.task.tokenizers["tokenizer"].to_media(acoustic_token_ids)
        audio = [one for one in media if isinstance(one, Audio)]
        assert len(audio) == len(media)
        return audio


# ---- configurations from the arguments


def load_token_spec(source: TokenStream | str | Path) -> TokenSpec:
    """Return the tokens of a stream, or of the tokenizer in a run directory."""
    if isinstance(source, TokenStream):
        return source.to_spec()
    tokens = token_spec(Tokenizer.load(source))
    if tokens.seconds is None:
        raise UserError(
            f"The run in {source} has no audio tokens, but SoundStorm needs a codec and a semantic "
            "tokenizer: give runs of audio-codec and audio-semantic."
        )
    return tokens


def describe_streams(model: MaskedModel) -> TokenStreams:
    """Return the description of external tokens, which is what a model was built for."""
    conditioner = model.network.token_conditioner
    if conditioner is None:
        raise UserError(
            "The model was built for acoustic tokens only, but SoundStorm is conditioned on "
            "semantic tokens: build it for both with SoundStormConfig(...).build(ACOUSTIC, "
            "SEMANTIC)."
        )
    with as_user_error(ValueError):
        return TokenStreams(
            acoustic=TokenStream.from_spec(model.network.tokens),
            semantic=TokenStream.from_spec(conditioner.cond_tokens),
        )


def critic_config(model: MaskedModel) -> CriticConfig | CriticHeadConfig | None:
    """Return the configuration that a model's critic was built with."""
    if isinstance(model.critic, TokenCritic):
        config = model.critic.config
        return CriticConfig(dim=config.dim, depth=config.depth, heads=config.heads)
    if isinstance(model.critic, CriticHead):
        return CriticHeadConfig(dim=model.critic.inner)
    return None


def choose_trained(
    model: MaskedModel, only_generator: bool, only_critic: bool
) -> Literal["all", "generator", "critic"]:
    if only_generator and only_critic:
        raise UserError(
            "only_train_generator and only_train_critic are both True, so nothing would be "
            "trained: leave one out."
        )
    if only_critic and model.critic is None:
        raise UserError(
            "only_train_critic is True, but the model has no critic: build it with one, "
            "SoundStormConfig(critic=...)."
        )
    if only_generator:
        return "generator"
    return "critic" if only_critic else "all"


def token_data_config(streams: TokenStreams, data_max_length: int | None) -> AudioDataConfig:
    """Return the data configuration of pairs of tokens, of which only the duration is known."""
    if data_max_length is not None:
        raise UserError(
            f"data_max_length is {data_max_length} samples, but pairs of tokens have no samples: "
            "leave it out, and build the model for the number of frames."
        )
    seconds = streams.acoustic.frames * streams.acoustic.seconds
    return AudioDataConfig(path=IN_MEMORY, seconds=seconds, crop="centre")


def audio_data_config(
    directory: RunDirectory, semantic: str, data_max_length: int | None
) -> AudioDataConfig:
    """Return the data configuration of the semantic tokenizer, of its copy if there is one."""
    copy = directory.dependencies / "semantic"
    run = read_run(RunDirectory(copy if copy.exists() else semantic))
    if not isinstance(run.data, AudioDataConfig):
        raise UserError(
            f"The run in {semantic} is of the recipe {run.recipe!r}, but SoundStorm needs a "
            "semantic tokenizer: give a run of audio-semantic."
        )
    data = run.data.without_augmentation()
    return data if data_max_length is None else replace(data, samples=data_max_length)


def build_split(
    dataset: AudioSource, streams: TokenStreams | None, data: AudioDataConfig
) -> Split | None:
    """Split a dataset in memory; return None for a folder, which the data configuration splits."""
    if isinstance(dataset, (str, Path)):
        return None
    examples: ExampleDataset = InMemoryWaveforms(dataset, data)
    if streams is not None:
        examples = InMemoryTokenPairs(dataset, streams)
    return split_dataset(examples, data.val_fraction, data.split_seed)


def check_foreign_dataset(
    dataset: AudioSource | None,
    tokenizer: str | Path | None,
    semantic: str | Path | None,
    data_max_length: int | None,
) -> Items:
    """Return the dataset of a model that was not built by this package."""
    if tokenizer is not None or semantic is not None or data_max_length is not None:
        raise UserError(
            "tokenizer, semantic and data_max_length are for recordings and models of this "
            "package, but the model is another one, which takes pairs of tokens: leave them out."
        )
    if dataset is None or isinstance(dataset, (str, Path)):
        raise UserError(
            f"dataset is {dataset!r}, but this model is trained on pairs of semantic and acoustic "
            "tokens: give a dataset of them."
        )
    return require_items(dataset)


def check_dataset(
    dataset: AudioSource | None, tokenizer: str | Path | None, semantic: str | Path | None
) -> AudioSource:
    """Return the dataset, or raise UserError if it cannot be tokenized."""
    if dataset is None:
        raise UserError(
            "dataset is None, but training needs one: give pairs of tokens, or recordings and the "
            "runs that tokenize them (tokenizer=RUN, semantic=RUN)."
        )
    if (tokenizer is None) != (semantic is None):
        missing = "tokenizer" if tokenizer is None else "semantic"
        raise UserError(
            "Recordings are tokenized by two runs, a codec and a semantic tokenizer, but "
            f"{missing} is missing: give both."
        )
    if isinstance(dataset, (str, Path)):
        if tokenizer is None:
            raise UserError(
                f"dataset is the folder {dataset}, but no runs are given that tokenize its "
                "recordings: add tokenizer=RUN and semantic=RUN."
            )
        return dataset
    if not len(require_items(dataset)):
        raise UserError("dataset is empty, but training needs examples: give at least one.")
    return dataset


def check_model(model: MaskedModel, expected: MaskedModel) -> None:
    """Raise UserError unless a model was built for the tokens of the runs."""
    shapes, durations = [], []
    for one in (model, expected):
        shapes.append({name: value.shape for name, value in one.state_dict().items()})
        durations.append({kind: spec.seconds for kind, spec in token_specs(one).items()})
    if shapes[0] != shapes[1] or durations[0] != durations[1]:
        raise UserError(
            f"The model was built for {describe_tokens(model)}, but the dataset has "
            f"{describe_tokens(expected)}: build it for those, "
            "SoundStormConfig(...).build(TOKENIZER, SEMANTIC)."
        )


def token_specs(model: MaskedModel) -> dict[str, TokenSpec]:
    specs = {"acoustic": model.network.tokens}
    if model.network.token_conditioner is not None:
        specs["semantic"] = model.network.token_conditioner.cond_tokens
    return specs


def describe_tokens(model: MaskedModel) -> str:
    return " and ".join(
        f"{kind} tokens ({spec.vocab_size} codes, {spec.layout.num_quantizers} quantizer(s), "
        f"{spec.seconds} s per frame)"
        for kind, spec in token_specs(model).items()
    )


# ---- the arguments of `generate`


def parse_semantic(semantic: Tensor | Sequence[Tensor], stream: TokenStream) -> list[Tensor]:
    """Return the token ids of each example without padding."""
    if not len(semantic):
        raise UserError(
            "cond_semantic_token_ids is empty, but each sample needs semantic tokens: give at "
            "least one row."
        )
    if isinstance(semantic, Tensor) and semantic.ndim != 2:
        raise UserError(
            f"cond_semantic_token_ids has the shape {tuple(semantic.shape)}, but must be "
            "(examples, frames) or a list of rows: for a single example add a first dimension."
        )
    try:
        return [
            parse_tokens(row, stream, f"cond_semantic_token_ids[{index}]: the tokens")
            for index, row in enumerate(semantic)
        ]
    except UnreadableFile as error:
        raise UserError(f"{error}.") from None


def crop_seconds(row: Tensor, seconds: float, stream: TokenStream, index: int) -> Tensor:
    duration = len(row) * stream.seconds
    if not 0 < seconds <= duration + 1e-9:
        raise UserError(
            f"seconds is {seconds:g}, but cond_semantic_token_ids[{index}] covers {duration:.2f} "
            "s: use more than 0 and at most that."
        )
    return row[: math.ceil(seconds / stream.seconds - 1e-9)]


def parse_prompt(prompt: Tensor, stream: TokenStream, lengths: Sequence[int]) -> Tensor:
    """Return the given acoustic tokens, (B, p, l), of the l coarsest quantizers."""
    given = prompt[None] if prompt.ndim == 2 else prompt
    has_shape = (
        given.ndim == 3
        and len(given) in (1, len(lengths))
        and 1 <= given.shape[2] <= stream.num_quantizers
    )
    if not has_shape or not given.numel():
        raise UserError(
            f"prompt_acoustic_token_ids has the shape {tuple(prompt.shape)}, but must be "
            f"({len(lengths)}, frames, up to {stream.num_quantizers} quantizers), or (frames, "
            "quantizers) for all examples: reshape it."
        )
    if given.shape[1] >= min(lengths):
        raise UserError(
            f"The prompt has {given.shape[1]} frames, but the semantic tokens cover "
            f"{min(lengths)}, and they must cover the prompt and the part to generate: give more "
            "of them, or a shorter prompt."
        )
    for token in given.unique()[[0, -1]].tolist():
        if token not in range(stream.vocab_size):
            raise UserError(
                f"The prompt has the token {token}, but tokens must be between 0 and "
                f"{stream.vocab_size - 1}: give tokens of the same codec."
            )
    return given.cpu().long().expand(len(lengths), -1, -1)


def squeeze_levels(codes_BTL: Tensor) -> Tensor:
    """Remove the dimension of quantizers if there is only one, as in the codes of a tokenizer."""
    return codes_BTL[..., 0] if codes_BTL.shape[2] == 1 else codes_BTL
