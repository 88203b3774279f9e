"""Samples of held-out examples, and the metrics of generated samples, for a trained run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tessera.api.generator import BATCH_SIZE, NO_SETTINGS, Generator, open_dataset, override
from tessera.data.loader import EvalLoader
from tessera.data.sample_metrics import Reference, Samples
from tessera.engine.evaluation import make_samples
from tessera.engine.modes import eval_mode
from tessera.engine.modes import seed as seed_all
from tessera.engine.task import Batch
from tessera.objectives.generation import Generated, GeneratorTask
from tessera.run.directory import Json
from tessera.run.errors import UserError
from tessera.run.load import TrainedRun


def reconstruct_samples(
    trained: TrainedRun, *, data: str | None = None, count: int = 16, seed: int = 0
) -> Generated:
    """Make samples of examples with a run that takes no prompts."""
    seed_all(seed)
    rejected = RejectedExamples()
    loader = open_loader(trained, data, trained.run.engine.batch_size)
    samples = make_samples(trained.task, loader, count, trained.dist, rejected.add)
    if not samples:
        raise UserError("No example could be read. `tessera check` shows the reasons.")
    media, names = [one.media for one in samples], [one.name for one in samples]
    return Generated(media=media, names=names, notices=rejected.lines())


@dataclasses.dataclass(frozen=True)
class SampleEvaluation:
    metrics: dict[str, float]
    protocol: Json
    notices: list[str]


MIN_SAMPLES = 64
"""The number of samples for a held-out set that is smaller."""


def evaluate_samples(
    trained: TrainedRun,
    *,
    count: int | None = None,
    seed: int = 0,
    sampling: Mapping[str, object] = NO_SETTINGS,
    guidance: Mapping[str, object] = NO_SETTINGS,
) -> SampleEvaluation | None:
    """Compute the modality's metrics of samples for held-out captions, if it has any.

    By default there are as many samples as held-out examples, at least MIN_SAMPLES and at most the
    number that is enough for the metrics. `sampling` and `guidance` replace settings of the run.
    """
    if not isinstance(trained.task, GeneratorTask):
        return None
    generator = Generator(trained)
    metrics = [
        metric
        for metric in trained.run.data.sample_metrics()
        if generator.takes_prompts or not metric.uses_prompts
    ]
    if not metrics:
        return None
    max_samples = count or max(metric.max_samples for metric in metrics)
    reference = Reference.choose(trained.run.data, generator.takes_prompts, max_samples)
    count = count or min(max_samples, max(MIN_SAMPLES, len(reference.chosen)))
    config = generator.task.config
    request = dataclasses.replace(
        generator.request_for_evaluation(reference, count, seed),
        sampling=override(config.sampling, sampling),
        guidance=override(config.guidance, guidance),
    )
    generated = generator.run(request)
    samples = Samples(generated.media, request.prompts, generated.codes, reference)
    results = [metric(samples) for metric in metrics]
    values = {name: value for one in results for name, value in one.values.items()}
    batches = EvalLoader(reference.validation, seed=seed, batch_size=BATCH_SIZE).batches(
        indices=reference.chosen[:count]
    )
    device = generator.device
    with eval_mode(trained.task):
        values |= generator.task.measure_conditions((one.to(device) for one in batches), seed)
    protocol: Json = {"samples": len(samples.media), "seed": seed, **generated.settings}
    for one in results:
        protocol |= one.protocol
    return SampleEvaluation(values, protocol, [line for one in results for line in one.notices])


def open_loader(
    trained: TrainedRun, path: str | None, batch_size: int, num_workers: int = 0
) -> EvalLoader:
    seed = trained.run.engine.seed
    dataset = open_dataset(trained, path)
    return EvalLoader(dataset, seed=seed, batch_size=batch_size, num_workers=num_workers)


@dataclasses.dataclass
class RejectedExamples:
    """Collect the examples that could not be read."""

    rejected: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def add(self, batch: Batch | None) -> None:
        self.rejected += batch.rejected if batch is not None else []

    def lines(self) -> list[str]:
        return [f"Skipped {name}: {reason}" for name, reason in self.rejected]
