"""MuLaN: that of musiclm-pytorch with its trainer, and ours.

All sides get the same recordings at 8 kHz, such as those of `examples/scores.py`, and the same
captions. Of a recording with several captions one is drawn at every visit, and a random part of 2 s
is cut out. All networks have an audio tower of dim 128, depth 4 and 4 heads, a text tower of dim
128 and 4 heads, and embeddings of 128 dimensions; a quarter of the patches is dropped in training,
and the loss is the decoupled one. The batch size is 64.

package: MuLaNTrainer with its default learning rate of 3e-4. Its text tower takes token ids, so
captions are words of a vocabulary of the training captions; its depth is 2, the least that the
package can compute, and ours is 1. Its spectrogram has our window of 512 samples and our hop of
128, and so 16 x 7 patches; ours has mel bands, and so 4 x 7. Its mask of time is shorter than its
default, which would be two thirds of these frames.
package-1e-3: the same, with a learning rate of 1e-3.
package-128: the same, with a window of 128 samples, and so 4 x 7 patches.
package-default: the same, with its default spectrogram: a window of 24 samples and a hop of 12, and
so 4 x 83 patches.
ours: the recipe music-mulan with the defaults of its preset small.
ours-third: the same, with a schedule that ends after a third of the budget.

The metrics are those of finding each held-out recording by its caption among all held-out ones: the
part in the middle of each recording, and one caption.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from time_to_quality import Judge, Metric, Metrics, Outputs, Row, Setting, SideInfo, SideSpec
from worker import count_parameters, package_versions

RATE_HZ, SECONDS, MAX_SECONDS = 8_000, 2.0, 8.0
LENGTH = int(SECONDS * RATE_HZ)
DIM, DEPTH, HEADS, LATENT_DIM = 128, 4, 4, 128
THEIR_TEXT_DEPTH = 2
BATCH_SIZE, EVAL_BATCH_SIZE = 64, 64
TEXT_LEN = 32
VAL_FRACTION = 0.1
MAX_INT16 = 2**15 - 1

SPECTROGRAM = {
    "spec_n_fft": 512,
    "spec_win_length": 512,
    "spec_hop_length": 128,
    "spec_aug_time_mask": 8,
}
SHORT_WINDOW = SPECTROGRAM | {"spec_n_fft": 128, "spec_win_length": 128, "spec_aug_freq_mask": 20}


# ---- what all sides get


@dataclass(frozen=True)
class Recordings:
    """Recordings with captions, in one file."""

    waves: list[Any]
    """Samples (S,) in [-1, 1], of at least LENGTH."""
    captions: list[list[str]]

    @classmethod
    def load(cls, path: Path) -> Recordings:
        import numpy as np
        import torch

        with np.load(path) as arrays:
            samples, lengths, captions = (arrays[key] for key in ("samples", "lengths", "captions"))
        waves = [
            torch.from_numpy(one[: max(length, LENGTH)]).float() / MAX_INT16
            for one, length in zip(samples, lengths, strict=True)
        ]
        return cls(waves, [json.loads(one) for one in captions])

    def centres(self) -> Any:
        """Return the middle part of each recording, (N, LENGTH)."""
        import torch

        starts = [(len(wave) - LENGTH) // 2 for wave in self.waves]
        return torch.stack(
            [wave[start : start + LENGTH] for wave, start in zip(self.waves, starts, strict=True)]
        )

    def one_caption_each(self) -> list[str]:
        """Return a caption of each recording, in alternating phrasings."""
        return [one[number % len(one)] for number, one in enumerate(self.captions)]


def train_path(work: Path) -> Path:
    return work / "music" / "train.npz"


def held_out_path(work: Path) -> Path:
    return work / "music" / "held-out.npz"


def prepare(data: Path, work: Path) -> None:
    """Write training and held-out recordings, unless that has been done."""
    from tessera.modalities.music.dataset import MusicDataConfig

    config = MusicDataConfig(
        path=str(data),
        rate_hz=RATE_HZ,
        seconds=MAX_SECONDS,
        crop="start",
        val_fraction=VAL_FRACTION,
    )
    split = config.build()
    for dataset, path in (
        (split.train, train_path(work)),
        (split.validation, held_out_path(work)),
    ):
        if not path.exists():
            write_recordings(dataset, path)


def write_recordings(dataset: Any, path: Path) -> None:
    import numpy as np

    from tessera.data.errors import UnreadableFile

    samples, lengths, captions = [], [], []
    for index in range(len(dataset)):
        try:
            example = dataset.item(index, np.random.default_rng(0))
        except UnreadableFile:
            continue
        samples.append((example.samples[0].clip(-1, 1) * MAX_INT16).astype(np.int16))
        lengths.append(example.length)
        captions.append(json.dumps(example.caption_set))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, samples=np.stack(samples), lengths=lengths, captions=captions)
    unfinished.rename(path)


def embed_in_batches(
    recordings: Recordings, embed_audio: Callable[[Any], Any], embed_text: Callable[[Any], Any]
) -> Outputs:
    """Return the embeddings of all recordings and of a caption of each, (N, D)."""
    import torch

    waves, captions = recordings.centres(), recordings.one_caption_each()
    starts = range(0, len(captions), EVAL_BATCH_SIZE)
    with torch.no_grad():
        audio = [embed_audio(waves[start : start + EVAL_BATCH_SIZE]) for start in starts]
        text = [embed_text(captions[start : start + EVAL_BATCH_SIZE]) for start in starts]
    return {"audio": torch.cat(audio).numpy(), "text": torch.cat(text).numpy()}


# ---- the package


@dataclass(frozen=True)
class WordVocabulary:
    """Token ids of words: 0 is padding, 1 is any word that no training caption has."""

    ids: dict[str, int]

    @classmethod
    def of_captions(cls, captions: Sequence[str]) -> WordVocabulary:
        words = sorted({word for caption in captions for word in split_words(caption)})
        return cls({word: number for number, word in enumerate(words, start=2)})

    def __len__(self) -> int:
        return len(self.ids) + 2

    def encode(self, caption: str) -> Any:
        """Return the ids of a caption, (TEXT_LEN,), padded at the end."""
        import torch

        ids = [self.ids.get(word, 1) for word in split_words(caption)][:TEXT_LEN]
        return torch.tensor(ids + [0] * (TEXT_LEN - len(ids)))


def split_words(caption: str) -> list[str]:
    return re.findall(r"[\w/]+", caption.casefold())


@dataclass(frozen=True)
class RandomPairs:
    """A dataset for the package: a random part of a recording, and the ids of a random caption."""

    recordings: Recordings
    vocabulary: WordVocabulary

    def __len__(self) -> int:
        return len(self.recordings.waves)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        import torch

        wave, captions = self.recordings.waves[index], self.recordings.captions[index]
        start = int(torch.randint(len(wave) - LENGTH + 1, ()))
        caption = captions[int(torch.randint(len(captions), ()))]
        return wave[start : start + LENGTH], self.vocabulary.encode(caption)


class PackageSide:
    """The package's model in its own trainer."""

    def __init__(self, setting: Setting, *, lr: float, spectrogram: dict[str, int]):
        from peers.adapters import ExampleList, MuLaNAdapter, seed_everything

        seed_everything(setting.seed)
        train = Recordings.load(train_path(setting.work))
        self.held_out = Recordings.load(held_out_path(setting.work))
        captions = [caption for one in train.captions for caption in one]
        self.vocabulary = WordVocabulary.of_captions(captions)
        size = {"dim": DIM, "heads": HEADS, "dim_head": DIM // HEADS}
        self.adapter = MuLaNAdapter(
            examples=ExampleList(RandomPairs(train, self.vocabulary)),
            audio=size | {"depth": DEPTH} | spectrogram,
            text=size | {"depth": THEIR_TEXT_DEPTH, "num_tokens": len(self.vocabulary)},
            trainer={"lr": lr, "batch_size": BATCH_SIZE, "valid_frac": 0},
        )
        self.model = self.adapter.build_model()
        self.trainer = self.adapter.build_trainer(self.model, setting.scratch / "package")
        self.info = SideInfo(
            parameters=count_parameters(self.model),
            description=f"dim {DIM}, depth {DEPTH} and {THEIR_TEXT_DEPTH}, {HEADS} heads, "
            f"MuLaNTrainer with learning rate {lr:g}, batch size {BATCH_SIZE}, spectrogram "
            f"{spectrogram or 'by default'}",
            packages=package_versions("musiclm-pytorch", "torch"),
        )

    def step(self) -> bool:
        self.adapter.train(self.trainer, steps=1)
        return True

    def outputs(self, final: bool) -> Outputs:
        self.model.eval()
        outputs = embed_in_batches(self.held_out, self.model.get_audio_latents, self.embed_text)
        self.model.train()
        return outputs

    def embed_text(self, captions: Sequence[str]) -> Any:
        import torch

        return self.model.get_text_latents(torch.stack(list(map(self.vocabulary.encode, captions))))


# ---- ours


def build_ours(setting: Setting) -> Any:
    from endless_training import build_engine

    from quality_rows.engine_side import build_side
    from tessera.engine.modes import seed
    from tessera.modalities.music.recipes import music_mulan

    run = music_mulan()
    dataset = build_dataset(Recordings.load(train_path(setting.work)))
    held_out = Recordings.load(held_out_path(setting.work))

    def build(engine_config: Any, folder: Path) -> Any:
        seed(setting.seed)
        task = run.task.build()
        captions = [one for index in range(len(dataset)) for one in dataset.all_captions(index)]
        task.prepare_text(captions, folder)
        return build_engine(task, dataset, engine_config, folder)

    def compute(task: Any, final: bool) -> Outputs:
        return embed_in_batches(held_out, task.model.get_audio_latents, task.model.get_text_latents)

    description = "recipe music-mulan, preset small"
    return build_side(
        replace(run.engine, batch_size=BATCH_SIZE), build, setting, compute, description
    )


def build_dataset(recordings: Recordings) -> Any:
    """Build a dataset of ours: a random part of a recording, and a random caption."""
    from tessera.trainers.in_memory_music import InMemoryMusic

    items = list(zip(recordings.waves, recordings.captions, strict=True))
    return InMemoryMusic(items, length=LENGTH, rate_hz=RATE_HZ, takes_token_ids=False)


# ---- metrics


def build_judge(work: Path) -> Judge:
    return partial(measure, captions=Recordings.load(held_out_path(work)).one_caption_each())


def measure(outputs: Outputs, captions: Sequence[str]) -> Metrics:
    """Rank the recordings by their similarity to each caption.

    Recordings with the same caption are not compared.
    """
    import torch

    from tessera.metrics.retrieval import retrieval_ranks

    ids = {caption: number for number, caption in enumerate(captions)}
    caption_ids = torch.tensor([ids[caption] for caption in captions])
    text, audio = (torch.from_numpy(outputs[name]) for name in ("text", "audio"))
    ranks = retrieval_ranks(text, audio, caption_ids).double()
    recalls = {f"text_to_audio_R@{k}": float((ranks <= k).double().mean()) for k in (1, 5)}
    return recalls | {"reciprocal_rank": float(ranks.reciprocal().mean())}


ROW = Row(
    title="MuLaN",
    package="package",
    sides={
        "package": SideSpec(
            partial(PackageSide, lr=3e-4, spectrogram=SPECTROGRAM), is_package=True
        ),
        "package-1e-3": SideSpec(
            partial(PackageSide, lr=1e-3, spectrogram=SPECTROGRAM),
            is_package=True,
            is_optional=True,
        ),
        "package-128": SideSpec(
            partial(PackageSide, lr=3e-4, spectrogram=SHORT_WINDOW),
            is_package=True,
            is_optional=True,
        ),
        "package-default": SideSpec(
            partial(PackageSide, lr=3e-4, spectrogram={}), is_package=True, is_optional=True
        ),
        "ours": SideSpec(build_ours),
        "ours-third": SideSpec(build_ours, budget=1 / 3),
    },
    metrics=(
        Metric("text_to_audio_R@1", "recordings found first by their caption", True),
        Metric("text_to_audio_R@5", "recordings among the first five", True),
        Metric("reciprocal_rank", "mean reciprocal rank", True),
    ),
    prepare=prepare,
    build_judge=build_judge,
)
