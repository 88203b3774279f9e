"""What a finished run makes when somebody asks: a tokenizer rebuilds examples, a generator answers
prompts.

The verbs `sample` and `evaluate` ask here; what they are given besides the media is every setting
they were made with.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from tessera.api.generator import (
    Generator,
    Settings,
    Start,
    classes_of,
    refuse_without_codec,
    settings,
    with_settings,
)
from tessera.data.loader import EvalLoader
from tessera.data.sample_metrics import SampleMetric, Samples
from tessera.engine.evaluation import make_samples
from tessera.engine.modes import seed as seed_all
from tessera.engine.task import Batch
from tessera.objectives.autoregressive import AutoregressiveTask
from tessera.objectives.generation import GeneratorTask
from tessera.run.directory import UserError
from tessera.run.load import TrainedRun, load_run


@dataclass(frozen=True, kw_only=True)
class Order:
    """What somebody asks for. Most of it is for generators; a tokenizer takes examples and refuses
    the rest."""

    run: str
    superres: str | None = None
    prompts: tuple[str, ...] = ()
    negative: str | None = None
    data: str | None = None
    mask: str | None = None
    like: str | None = None
    """A recording that says what is to be said,"""
    prompt_audio: str | None = None
    """and one in whose voice."""
    seconds: float | None = None
    count: int
    seed: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    """Instead of what the run's config says of it."""
    guidance: dict[str, Any] = field(default_factory=dict)
    superres_decoding_steps: int | None = None

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"At least 1 sample can be made, but --count is {self.count}.")
        if self.mask is not None and self.data is None:
            raise UserError("A mask is for a picture: say which with --data PICTURE.")
        if self.like is None and (self.prompt_audio is not None or self.seconds is not None):
            raise UserError(
                "A voice and a length are for a recording that is followed: say which with --like RECORDING."
            )
        if self.like is not None and (self.prompts or self.data is not None):
            raise UserError(
                "A recording is followed (--like) without prompts and without --data: leave these out."
            )


@dataclass
class Answer:
    media: list[Any]
    settings: dict[str, Any]
    notices: list[str]
    """What a person should hear about how it came about."""
    codes: list[Tensor] = field(default_factory=list)
    """The symbols that each was read from, if it was generated."""


def given(**settings: Any) -> dict[str, Any]:
    """Those that somebody gave."""
    return {name: value for name, value in settings.items() if value is not None}


def answered(made: TrainedRun, order: Order) -> Answer:
    return generated(made, order) if isinstance(made.task, GeneratorTask) else rebuilt(made, order)


def rebuilt(made: TrainedRun, order: Order) -> Answer:
    """What the task makes of examples."""
    if order.prompts or order.negative or order.mask or order.superres or order.like:
        raise UserError(
            f"A run of {made.run.recipe} rebuilds what it is shown (--data) and takes no prompt, mask or second run: "
            "those are for a generator, such as images-maskgit."
        )
    seed_all(order.seed)
    left_out = LeftOut()
    stream = stream_of(made, order.data, made.run.engine.batch_size)
    media = make_samples(made.task, stream, order.count, made.dist, left_out.of)
    if not media:
        raise UserError(
            "Not one example could be read, so there is nothing to show. `tessera check` tells why."
        )
    return Answer(media, {}, left_out.lines())


def generated(made: TrainedRun, order: Order) -> Answer:
    above = load_run(order.superres, made.weights) if order.superres is not None else None
    generator = Generator(made, above, classes=classes_of(order.run))
    generator.refuse(order.prompts, order.negative)
    sampling = with_settings(generator.task.config.sampling, order.sampling)
    guidance = with_settings(generator.task.config.guidance, order.guidance)
    notices = [
        f"The text encoder does not read the end of so long a prompt: {text[:60]}..."
        for text in generator.cut([text for text in (*order.prompts, order.negative) if text])
    ]
    chosen, how = Settings(sampling, guidance), {"seed": order.seed, "negative": order.negative}
    told = {"superres": order.superres, "negative": order.negative, "mask": order.mask}
    told |= {"sampling": dataclasses.asdict(sampling), "guidance": dataclasses.asdict(guidance)}
    if order.like is not None:
        told |= {"like": order.like, "prompt_audio": order.prompt_audio, "seconds": order.seconds}
        followed = generator.follow(
            order.like,
            chosen,
            voice=order.prompt_audio,
            seconds=order.seconds,
            count=order.count,
            seed=order.seed,
        )
        return Answer(followed.media, told, notices, followed.codes)
    if generator.task.coarser is not None and not order.prompts:
        again = generator.draw_again(source_of(made, order.data), order.count, chosen, **how)
        if not again.media:
            raise UserError(
                "Not one example could be read, so there is nothing to draw again. `tessera check` tells why."
            )
        return Answer(again.media, told, notices, again.codes)
    start = start_of(generator, order)
    texts = texts_of(made, order, started=start is not None)
    drawn = generator.draw(
        texts, chosen, start=start, superres_decoding_steps=order.superres_decoding_steps, **how
    )
    if generator.larger is not None:
        above = settings(generator.larger, order.superres_decoding_steps)
        told["superres_settings"] = {k: dataclasses.asdict(v) for k, v in vars(above).items()}
    return Answer(drawn.media, told | {"prompts": texts}, notices, drawn.codes)


@dataclass(frozen=True)
class Judged:
    numbers: dict[str, float]
    protocol: dict[str, Any]


def judged(made: TrainedRun, order: Order) -> Judged | None:
    """What the medium's judge says of samples for held-out captions; None where there is none, or
    it has nothing to go by."""
    sample_metric: SampleMetric | None = (
        made.run.data.sample_metric() if isinstance(made.task, GeneratorTask) else None
    )
    if sample_metric is None or (sample_metric.by_prompt and not takes_prompts(made)):
        return None
    answer = answered(made, order)
    count = len(answer.media)
    prompts = captions_of(made, None, count) if takes_prompts(made) else [""] * count
    found = sample_metric(Samples(answer.media, prompts, answer.codes))
    return Judged(found.numbers, {"samples": found.of, "seed": order.seed, **answer.settings})


def start_of(generator: Generator, order: Order) -> Start | None:
    """What is there already: the rest of a picture with a mask, or the beginning of what is written
    symbol by symbol."""
    if order.mask is not None:
        return generator.start(str(order.data), order.mask)
    if order.data is not None and isinstance(generator.task, AutoregressiveTask):
        return generator.beginning(order.data)
    return None


def texts_of(made: TrainedRun, order: Order, started: bool) -> list[str]:
    """The prompts, each as often as asked; without any, what is said about examples, if there are
    words to be used."""
    if order.prompts:
        return [text for text in order.prompts for _ in range(order.count)]
    if started or not takes_prompts(made):
        return [""] * order.count
    return captions_of(made, order.data, order.count)


def takes_prompts(made: TrainedRun) -> bool:
    return isinstance(made.task, GeneratorTask) and made.task.network.text is not None


def captions_of(made: TrainedRun, data: str | None, count: int) -> list[str]:
    """What is said about the first held-out examples, or about those in a folder; from the
    beginning again if they are few."""
    dataset = source_of(made, data)
    return [dataset.caption(i % len(dataset)) for i in range(count)]


def data_of(made: TrainedRun, path: str | None) -> Any:
    """The run's way of reading data, on another path if one is given."""
    return made.run.data if path is None else dataclasses.replace(made.run.data, path=path)


def source_of(made: TrainedRun, path: str | None) -> Any:
    """All of a given path, or the run's own held-out examples."""
    refuse_without_codec(made.task)
    return made.run.data.build().validation if path is None else data_of(made, path).full()


def stream_of(
    made: TrainedRun, path: str | None, batch_size: int, num_workers: int = 0
) -> EvalLoader:
    return EvalLoader(
        source_of(made, path),
        seed=made.run.engine.seed,
        batch_size=batch_size,
        num_workers=num_workers,
    )


@dataclass
class LeftOut:
    """The examples that could not be read and took no part."""

    rejected: list[tuple[str, str]] = field(default_factory=list)

    def of(self, batch: Batch | None) -> None:
        self.rejected += batch.rejected if batch is not None else []

    def lines(self) -> list[str]:
        return [f"Left out {name}: {reason}" for name, reason in self.rejected]
