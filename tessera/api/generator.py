"""A trained generator in Python.

    generator = Generator.load("runs/images-maskgit")
    images = generator.generate(["a red circle left of a blue square"] * 4, seed=1).media
    images[0].save("circle.png")

With a super-resolution run the codes of the first run are the condition of the second:
`Generator.load(base, superres)`. Sample number i of a seed depends only on the seed, i and the
prompt, not on the other samples.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from tessera.api.pretrained import Pretrained
from tessera.data.captions import match_name
from tessera.data.dataset import DataConfig, ExampleDataset, spread_examples
from tessera.data.errors import UnreadableFile
from tessera.data.loader import EvalLoader
from tessera.data.sample_metrics import Reference
from tessera.engine.modes import hash_seed
from tessera.engine.task import Media, Task
from tessera.modalities import recipes
from tessera.objectives.generation import (
    Generated,
    GenerationRequest,
    GeneratorTask,
    MediaTokenizer,
    TokenizerProtocol,
    TokenPrompt,
)
from tessera.run.config import did_you_mean
from tessera.run.directory import Json
from tessera.run.errors import UserError, as_user_error
from tessera.run.load import TrainedRun, Weights, format_repr, load_run
from tessera.sampling.guidance import Guidance

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Config = TypeVar("Config", bound="DataclassInstance")

BATCH_SIZE = 16
"""The number of samples that are generated together."""
NO_SETTINGS: Mapping[str, object] = {}


@dataclasses.dataclass(frozen=True)
class DecodingProgress:
    """One decoding step of a request."""

    step: int
    """The number of finished steps, over all batches and both runs of a cascade."""
    steps: int
    preview: Callable[[], Sequence[Media]]
    """Decode the codes so far to media."""


OnProgress = Callable[[DecodingProgress], None]

_OBSERVER: ContextVar[OnProgress | None] = ContextVar("decoding_observer", default=None)


@contextmanager
def observe_decoding(on_progress: OnProgress) -> Iterator[None]:
    """Call `on_progress` after each decoding step of the generators used in this context.

    It may raise an exception to stop the generation. The samples are those without it.
    """
    token = _OBSERVER.set(on_progress)
    try:
        yield
    finally:
        _OBSERVER.reset(token)


class Generator(Pretrained):
    def __init__(self, trained: TrainedRun, superres: TrainedRun | None = None):
        self.trained, self.task = trained, get_generator_task(trained)
        self.superres = get_generator_task(superres) if superres is not None else None
        self.data: DataConfig = trained.run.data
        self.takes_prompts = self.task.network.text is not None
        self.classes = trained.directory.read_classes()
        """The class names of a run that was trained on named folders, its only prompts."""
        if self.superres is not None:
            check_cascade(self.task, self.superres)

    @classmethod
    def load(
        cls, run: str | Path, superres: str | Path | None = None, weights: Weights = "ema"
    ) -> Generator:
        second = load_run(superres, weights) if superres is not None else None
        return cls(load_run(run, weights), second)

    def save_pretrained(self, folder: str | Path) -> Path:
        if self.superres is not None:
            raise UserError(
                "A generator of two runs is saved in two folders: load each run separately with "
                "Generator.load."
            )
        return super().save_pretrained(folder)

    def __repr__(self) -> str:
        settings: dict[str, object] = {
            "recipe": self.trained.run.recipe,
            "step": self.trained.steps,
            "prompts": self.takes_prompts,
        }
        if self.classes:
            settings["classes"] = len(self.classes)
        return format_repr(self, self.trained, settings)

    def to(self, device: torch.device | str) -> Generator:
        """Move the models and their tokenizers to a device."""
        for task in (self.task, self.superres):
            if task is not None:
                task.to(device)
        return self

    @property
    def device(self) -> torch.device:
        return next(self.task.parameters()).device

    # ---- properties used by the prompts of a modality

    @property
    def tokenizers(self) -> Mapping[str, TokenizerProtocol]:
        return self.task.tokenizers

    def encode_file(self, path: str) -> Tensor:
        """Return the codes of one file, (1, *grid)."""
        return self.encode_with(["tokenizer"], dataclasses.replace(self.data, path=path))[0]

    def encode_with(self, tokenizers: Sequence[str], data: DataConfig) -> list[Tensor]:
        """Encode the only example of these data with several tokenizers."""
        check_not_external(self.task)
        dataset = data.full(captions=False)
        if len(dataset) != 1:
            raise UserError(f"{data.path} has {len(dataset)} examples, expected a single file.")
        batch = next(EvalLoader(dataset, seed=0, batch_size=1).batches())
        if not len(batch):
            raise UserError(batch.rejected[0][1])
        examples = batch.to(self.device).examples
        chosen = [get_tokenizer(self.task, name).with_data(data) for name in tokenizers]
        return [tokenizer.encode_examples(examples) for tokenizer in chosen]

    # ---- requests

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        *,
        count: int = 1,
        seed: int = 0,
        negative_prompt: str | None = None,
        start: TokenPrompt | None = None,
        decoding_steps: int | None = None,
        decoding_steps_per_level: Sequence[int] = (),
        guidance: float | Guidance | None = None,
        guidance_from: float | None = None,
        guidance_to: float | None = None,
        guidance_ramp: str | None = None,
        guidance_power: float | None = None,
        order: str | None = None,
        schedule: str | None = None,
        temperature: float | None = None,
        final_temperature: float | None = None,
        choice_temperature: float | None = None,
        remask: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        retries: int | None = None,
        superres_decoding_steps: int | None = None,
        sampling: DataclassInstance | None = None,
        **inputs: str | float | None,
    ) -> Generated:
        """Generate `count` samples for each prompt ("" for none), in order.

        The parameters are the flags of `tessera sample`, and settings that are left out are those
        of the run. `inputs` are the flags of media files and their settings, which differ between
        modalities, such as `data` and `mask`. Without prompts, captions and conditions are those of
        the examples in `data` or of held-out examples. `start` holds codes to continue or to
        inpaint (`encode_prompt`); `sampling` and a `Guidance` replace the whole configuration of
        the run.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts or ())
        if prompts is not None and not texts:
            return Generated()
        config = self.task.config
        if sampling is not None:
            config = dataclasses.replace(config, sampling=sampling)
        if isinstance(guidance, Guidance):
            config, guidance = dataclasses.replace(config, guidance=guidance), None
        request = self.build_request(
            prompts=texts,
            negative_prompt=negative_prompt,
            inputs=inputs,
            start=start,
            count=count,
            seed=seed,
            config=config,
            sampling=drop_none(
                decoding_steps=decoding_steps,
                decoding_steps_per_level=tuple(decoding_steps_per_level) or None,
                order=order,
                schedule=schedule,
                temperature=temperature,
                final_temperature=final_temperature,
                choice_temperature=choice_temperature,
                remask=remask,
                top_k=top_k,
                top_p=top_p,
                retries=retries,
            ),
            guidance=drop_none(
                scale=None if guidance is None else float(guidance),
                start=guidance_from,
                end=guidance_to,
                ramp=guidance_ramp,
                ramp_power=guidance_power,
            ),
        )
        return self.run(request, superres_decoding_steps)

    def encode_prompt(self, **inputs: object) -> TokenPrompt | None:
        """Turn media files, under the names of the flags of `tessera sample`, into codes to start
        from; None if there are none, or if they only provide captions."""
        config, given = self.task.config, drop_none(**inputs)
        if not given:
            return None
        check_not_external(self.task)
        known = {field.name for field in dataclasses.fields(config.inputs_class)}
        if unsupported := [name for name in given if name not in known]:
            raise UserError(f"This run does not support {describe_input(unsupported[0], known)}")
        with as_user_error(ValueError):
            return config.encode_prompt(config.inputs_class(**given), self)

    def build_request(
        self,
        *,
        prompts: Sequence[str] = (),
        negative_prompt: str | None = None,
        inputs: Mapping[str, object] = NO_SETTINGS,
        start: TokenPrompt | None = None,
        count: int = 16,
        seed: int = 0,
        config: Any = None,
        sampling: Mapping[str, object] = NO_SETTINGS,
        guidance: Mapping[str, object] = NO_SETTINGS,
    ) -> GenerationRequest:
        """Build a request for `count` samples of each prompt.

        Without prompts, captions and conditions are those of the examples in `inputs["data"]` or of
        held-out examples. `sampling` and `guidance` replace settings of `config`, by default that
        of the run.
        """
        if count < 1:
            raise UserError(f"--count must be at least 1, got {count}.")
        config = config or self.task.config
        start = start or self.encode_prompt(**inputs)
        data = None if inputs.get("data") is None else str(inputs["data"])
        if prompts:
            texts = [prompt for prompt in prompts for _ in range(count)]
            request = GenerationRequest(prompts=texts, seeds=make_seeds(seed, len(texts)))
        elif start is not None:
            request = GenerationRequest(prompts=[""] * count, seeds=make_seeds(seed, count))
        elif self.task.conditioner is not None and self.superres is None:
            dataset = open_dataset(self.trained, data)
            indices = spread_examples(dataset, count)
            request = self.request_like_examples(dataset, indices, seed)
        else:
            texts = [""] * count
            if self.takes_prompts:
                texts = choose_captions(self.trained, data, count)
            request = GenerationRequest(prompts=texts, seeds=make_seeds(seed, count))
        return dataclasses.replace(
            request,
            negative_prompt=negative_prompt,
            start=start,
            sampling=override(config.sampling, sampling),
            guidance=override(config.guidance, guidance),
        )

    def request_like_examples(
        self, dataset: ExampleDataset, indices: Sequence[int], seed: int
    ) -> GenerationRequest:
        """Build a request with the captions and conditions of examples of a dataset."""
        loader = EvalLoader(dataset, seed=seed, batch_size=BATCH_SIZE)
        parts, names = [], []
        for batch in loader.batches(indices=indices):
            if len(batch):
                parts.append(self.task.request_like(batch.to(self.device)))
                names += batch.names
        if not parts:
            raise UserError("No example could be read. `tessera check` shows the reasons.")
        conditions = [part.cond_codes for part in parts if part.cond_codes is not None]
        # Synthetic examples have captions, also for a model without prompts.
        texts = [prompt for part in parts for prompt in part.prompts]
        return GenerationRequest(
            prompts=texts if self.takes_prompts else [""] * len(names),
            seeds=make_seeds(seed, len(names)),
            names=names,
            cond_codes=torch.cat(conditions) if conditions else None,
            lengths=[length for part in parts for length in part.lengths or ()] or None,
        )

    def request_for_evaluation(
        self, reference: Reference, count: int, seed: int
    ) -> GenerationRequest:
        """Build a request with the captions and conditions of held-out examples in turn."""
        chosen, dataset = reference.chosen, reference.validation
        indices = [chosen[i % len(chosen)] for i in range(count)]
        if self.task.conditioner is not None:
            return self.request_like_examples(dataset, indices, seed)
        with as_user_error(UnreadableFile):
            prompts = [dataset.caption(i) if self.takes_prompts else "" for i in indices]
        return GenerationRequest(prompts=prompts, seeds=make_seeds(seed, count))

    def run(
        self, request: GenerationRequest, superres_decoding_steps: int | None = None
    ) -> Generated:
        """Generate the samples of a request in batches."""
        negative = request.negative_prompt
        request = dataclasses.replace(
            request,
            prompts=[self.resolve_prompt(prompt) for prompt in request.prompts],
            negative_prompt=None if negative is None else self.resolve_prompt(negative),
        )
        cpu = torch.device("cpu")
        if self.task.conditioner is not None and request.conditioning_codes(cpu) is None:
            raise UserError(
                f"This run is conditioned on tokens ({self.task.conditioner}). For "
                "super-resolution give it after the run that generates small images (tessera "
                "sample BASE SUPERRES --prompt ...) or give images (--data); for audio give a "
                "recording to follow (--like RECORDING) or recordings (--data)."
            )
        names = request.names or [prompt or "unconditional" for prompt in request.prompts]
        settings = describe_request(request, self.takes_prompts)
        last, last_sampling = self.task, None
        if self.superres is not None:
            last, last_sampling = self.superres, self.superres.config.sampling
            if superres_decoding_steps is not None:
                last_sampling = override(last_sampling, {"decoding_steps": superres_decoding_steps})
            settings["superres"] = {
                "sampling": describe_sampling(last_sampling),
                "guidance": dataclasses.asdict(last.config.guidance),
            }
        generated = Generated(names=list(names), settings=settings)
        parts = -(-len(request) // BATCH_SIZE) * (1 if self.superres is None else 2)
        numbers = iter(range(parts))
        for first in range(0, len(request), BATCH_SIZE):
            batch = request.slice(first, first + BATCH_SIZE)
            codes = run_task(self.task, batch, next(numbers), parts)
            if self.superres is not None:
                second = dataclasses.replace(
                    batch, start=None, cond_codes=codes, sampling=last_sampling, guidance=None
                )
                codes = run_task(last, second, next(numbers), parts)
            if request.start is not None and request.start.trim:
                codes = codes[:, request.start.trim :]
            media = last.tokenizers["tokenizer"].to_media(codes)
            generated.media += last.config.finish_media(media, request.start, self.data)
            generated.codes += codes.unbind(0)
        truncated = self.truncated_prompts([*request.prompts, request.negative_prompt or ""])
        generated.notices += [
            f"The text encoder truncates this prompt: {text[:60]}..." for text in truncated
        ]
        return generated

    def resolve_prompt(self, prompt: str) -> str:
        """Return a prompt as the run was trained on it: a class as its folder spells it.

        Raise UserError for a prompt that this run does not support.
        """
        if prompt and not self.takes_prompts:
            raise UserError("This run was trained without captions and supports no prompt.")
        if not prompt or not self.classes:
            return prompt
        known = match_name(prompt, self.classes)
        if known is None:
            raise UserError(
                f"This run was trained on named folders, and {prompt!r} is not one of them"
                f"{did_you_mean(prompt, self.classes)}"
            )
        return known

    def truncated_prompts(self, prompts: Sequence[str]) -> list[str]:
        """Return the prompts that are longer than the text encoder supports."""
        text = self.task.network.text
        known = [prompt for prompt in prompts if prompt]
        return text.find_truncated(known) if text is not None else []


# ---- helpers


def describe_input(name: str, inputs: Collection[str]) -> str:
    """Describe an input of other recipes as a flag, and an unknown one as a keyword.

    `inputs` are those that the run supports.
    """
    if any(name in recipe.media_inputs for recipe in recipes().values()):
        return f"--{name.replace('_', '-')}: leave it out."
    parameters = inspect.signature(Generator.generate).parameters
    keywords = [name for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY]
    return f"the keyword {name!r}{did_you_mean(name, [*keywords, *inputs])}"


def get_generator_task(trained: TrainedRun) -> GeneratorTask:
    if not isinstance(trained.task, GeneratorTask):
        raise UserError(
            f"The run is of the recipe {trained.run.recipe!r}, which trains no generator: give the "
            "run of a generator, such as images-maskgit."
        )
    return trained.task


def check_cascade(base: GeneratorTask, superres: GeneratorTask) -> None:
    """Raise UserError unless the second run is conditioned on the tokens of the first."""
    if superres.conditioner is None:
        raise UserError("The second run is not a super-resolution run.")
    expected = get_tokenizer(superres, superres.conditioner)
    given = get_tokenizer(base, "tokenizer")
    if expected.fingerprint != given.fingerprint:
        raise UserError(
            "The super-resolution run was trained on the tokens of another tokenizer than the "
            "first run generates. Train it with --low-res-tokenizer and the tokenizer of the first "
            "run."
        )


def check_not_external(task: Task) -> None:
    """Raise UserError for a run that was trained on tokens computed elsewhere."""
    if isinstance(task, GeneratorTask) and task.tokenizers["tokenizer"].is_external:
        raise UserError(
            "This run was trained on tokens that were computed elsewhere and has no codec, so it "
            "can neither read nor write audio. Use SoundStormTrainer.generate with tokens of your "
            "codec, or train on the tokens of a codec (tokenizer=RUN, semantic=RUN)."
        )


def get_tokenizer(task: GeneratorTask, name: str) -> MediaTokenizer:
    """Return a tokenizer of a generator that can encode media."""
    check_not_external(task)
    return cast(MediaTokenizer, task.tokenizers[name])


def make_seeds(seed: int, count: int) -> list[int]:
    return [hash_seed(seed, i) for i in range(count)]


def describe_request(request: GenerationRequest, has_text: bool) -> Json:
    """Return the settings of a request for settings.json: those that have an effect.

    Guidance needs a text or a voice prompt.
    """
    settings: Json = {
        "prompts": list(request.prompts),
        "negative_prompt": request.negative_prompt,
        "sampling": describe_sampling(request.sampling) if request.sampling else None,
    }
    if has_text or (request.start is not None and request.start.trim > 0):
        settings["guidance"] = dataclasses.asdict(request.guidance) if request.guidance else None
    return settings


def describe_sampling(sampling: DataclassInstance) -> Json:
    """Return sampling settings; with steps for each level, the common number has no effect."""
    settings = dataclasses.asdict(sampling)
    if settings.get("decoding_steps_per_level"):
        del settings["decoding_steps"]
    return settings


def drop_none(**settings: object) -> dict[str, object]:
    """Return the settings that are given."""
    return {name: value for name, value in settings.items() if value is not None}


def override(config: Config, settings: Mapping[str, object]) -> Config:
    """Return a configuration with some settings replaced."""
    known = {field.name for field in dataclasses.fields(config)}
    for name in settings:
        if name not in known:
            raise UserError(
                f"This generator has no --{name.replace('_', '-')}: it has "
                f"{', '.join(sorted(known))}."
            )
    if "decoding_steps" in settings and getattr(config, "decoding_steps_per_level", None):
        raise UserError(
            "This run decodes its quantizers one after the other: use --decoding-steps-per-level, "
            "for example 16 1, instead of --decoding-steps."
        )
    with as_user_error(ValueError):
        return dataclasses.replace(config, **settings)


def run_task(
    task: GeneratorTask, request: GenerationRequest, part: int = 0, parts: int = 1
) -> Tensor:
    """Generate one of several parts of a request, and report its steps to the observer."""
    on_progress, start = _OBSERVER.get(), request.start
    if on_progress is not None:
        tokenizer = task.tokenizers["tokenizer"]

        def report(step: int, steps: int, codes: Tensor) -> None:
            shown = codes if start is None else codes[:, start.trim :]
            preview = partial(tokenizer.to_media, shown)
            on_progress(DecodingProgress(part * steps + step, parts * steps, preview))

        request = dataclasses.replace(request, on_step=report)
    with as_user_error(ValueError):
        return task.generate(request)


def open_dataset(trained: TrainedRun, path: str | None) -> ExampleDataset:
    """Return all examples of a path, or the held-out examples of the run."""
    check_not_external(trained.task)
    captions = trained.run.task.uses_captions
    if path is None:
        return trained.run.data.build(captions).validation
    return data_at(trained, path).full(captions)


def data_at(trained: TrainedRun, path: str | None) -> DataConfig:
    """Return the run's data configuration, for another path if one is given."""
    data = trained.run.data
    return data if path is None else dataclasses.replace(data, path=path)


def choose_captions(trained: TrainedRun, path: str | None, count: int) -> list[str]:
    """Return captions spread over the held-out examples, or over those of a path."""
    dataset = open_dataset(trained, path)
    indices = spread_examples(dataset, count)
    with as_user_error(UnreadableFile):
        return [dataset.caption(indices[i % len(indices)]) for i in range(count)]
