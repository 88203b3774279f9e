"""A finished generator in Python: of pictures, or of meshes.

    generator = Generator.load("runs/images-maskgit")
    pictures = generator.generate(["a red circle left of a blue square"] * 4, seed=1)
    pictures[0].save("circle")

With a super-resolution run the symbols of the first become those of a larger picture: Generator.load(base, superres).
Picture number i of a seed is a function of the seed, i and the prompt, whoever else is made with it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.config import did_you_mean
from tessera.data.draws import Source, Validation
from tessera.engine.modes import mixed
from tessera.finished import Finished, Weights, finished
from tessera.folder import Refused, RunFolder
from tessera.sampling.guidance import Guidance
from tessera.tasks.generator import GeneratorTask, Wanted

TOGETHER = 16
"""Examples that are drawn together."""


class Generator:
    def __init__(self, made: Finished, superres: Finished | None = None, *, classes: Sequence[str] = ()):
        self.made, self.task = made, generating(made)
        self.larger = generating(superres) if superres is not None else None
        self.classes = classes
        """If it was trained on named folders: those names, which are all it knows."""
        if self.larger is not None:
            self._refuse_strangers(self.larger)

    @classmethod
    def load(cls, run: str | Path, superres: str | Path | None = None, weights: Weights = "average") -> Generator:
        larger = finished(superres, weights) if superres is not None else None
        return cls(finished(run, weights), larger, classes=classes_of(run))

    def _refuse_strangers(self, larger: GeneratorTask) -> None:
        if "smaller" not in larger.codecs:
            raise Refused("The second run makes no larger pictures: it is not a super-resolution run.")
        theirs: Any = larger.codecs["smaller"]
        ours: Any = self.task.codecs["tokenizer"]
        if theirs.fingerprint != ours.fingerprint:
            raise Refused(
                "The super-resolution run was trained on the symbols of another tokenizer than the first run writes in: "
                "they would mean nothing to it. Train it with --smaller and the tokenizer that the first run stands on."
            )

    def generate(
        self,
        texts: str | Sequence[str],
        *,
        seed: int = 0,
        negative: str | None = None,
        rounds: int | None = None,
        guidance: float | Guidance | None = None,
        sampling: Any = None,
        superres_rounds: int | None = None,
        start: Start | None = None,
    ) -> list[Any]:
        """One picture for each text (an empty one asks for anything), in their order.

        `negative` is what to lead away from; `rounds` and `guidance` are short for the most used settings of `sampling` and
        `Guidance`; what is left out is as the run's config says. `start` is a picture of which a part is drawn anew.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        self.refuse(texts, negative)
        if "smaller" in self.task.codecs:
            raise Refused(
                "This is a super-resolution run: it makes larger pictures from smaller ones. Give it after the run that makes "
                "those (tessera sample BASE SUPERRES --prompt ...), or pictures to start from (--data)."
            )
        chosen = settings(self.task, rounds, guidance, sampling)
        media: list[Any] = []
        for first in range(0, len(texts), TOGETHER):
            wanted = wanted_of(texts[first : first + TOGETHER], seed, first, negative)
            if start is not None:
                wanted.codes, wanted.hidden = start.times(len(wanted.texts))
            codes = drawn_by(self.task, wanted, chosen)
            if self.larger is None:
                media += self.task.codecs["tokenizer"].media(codes)
            else:
                above = Wanted(wanted.texts, wanted.seeds, wanted.negative, smaller=codes)
                larger = drawn_by(self.larger, above, settings(self.larger, superres_rounds))
                media += self.larger.codecs["tokenizer"].media(larger)
        return media

    def enlarge(
        self,
        source: Source,
        count: int,
        *,
        seed: int = 0,
        negative: str | None = None,
        guidance: Guidance | None = None,
        sampling: Any = None,
    ) -> list[Any]:
        """By a super-resolution run: the first examples of a source, made smaller and then large again."""
        chosen = settings(self.task, None, guidance, sampling)
        stream = Validation(source, seed=seed, batch_size=TOGETHER)
        media: list[Any] = []
        for batch in stream.batches(rank=0, processes=1, limit=count):
            if len(batch):
                examples = batch.to(self.made.meeting.device).examples
                wanted = wanted_of(examples.captions, seed, len(media), negative)
                wanted.smaller = self.task.codes(examples, "smaller")
                media += self.task.codecs["tokenizer"].media(drawn_by(self.task, wanted, chosen))
        return media

    def start(self, picture: str | Path, mask: str | Path) -> Start:
        """A picture's symbols, and those of them that a mask's white covers, if only in part."""
        codes = self.codes_of(picture)
        white = torch.from_numpy(dataclasses.replace(self.made.run.data, path=str(picture)).mask(str(mask)))
        hidden = covered(white, self.task.codecs["tokenizer"].grid)[None]
        if not hidden.any():
            raise Refused(f"Nothing is white in {mask}, so there is nothing to draw: white marks what is drawn anew.")
        return Start(codes, hidden)

    def beginning(self, path: str | Path) -> Start:
        """The symbols of a part of something, to be gone on with."""
        return Start(self.codes_of(path))

    def codes_of(self, path: str | Path) -> Tensor:
        """The symbols of one file, (1, *grid)."""
        source = dataclasses.replace(self.made.run.data, path=str(path)).everything()
        if len(source) != 1:
            raise Refused(f"One example is to start from, but {path} holds {len(source)}.")
        batch = next(Validation(source, seed=0, batch_size=1).batches(rank=0, processes=1))
        if not len(batch):
            raise Refused(f"The example cannot be read: {batch.rejected[0][1]}")
        return self.task.codecs["tokenizer"].codes(batch.to(self.made.meeting.device).examples)

    def refuse(self, texts: Sequence[str], negative: str | None) -> None:
        """Prompts that this run cannot answer."""
        said = [text for text in (*texts, negative) if text]
        if said and self.task.network.text is None:
            raise Refused("This run was trained without captions: it takes no prompt.")
        known = {name.casefold() for name in self.classes}
        for text in said:
            if known and text.casefold() not in known:
                raise Refused(
                    f"This run was trained on named folders and knows no {text!r}{did_you_mean(text, list(self.classes))}"
                )

    def cut(self, texts: Sequence[str]) -> list[str]:
        """The texts that are longer than the text encoder reads."""
        text = self.task.network.text
        return text.cut(texts) if text is not None else []


@dataclasses.dataclass
class Settings:
    sampling: Any
    guidance: Guidance


def settings(
    task: GeneratorTask,
    rounds: int | None = None,
    guidance: float | Guidance | None = None,
    sampling: Any = None,
) -> Settings:
    """What a run says of sampling, with what is asked for instead."""
    sampling = sampling or task.config.sampling
    if rounds is not None:
        sampling = dataclasses.replace(sampling, rounds=rounds)
    if not isinstance(guidance, Guidance):
        known = task.config.guidance
        guidance = known if guidance is None else dataclasses.replace(known, scale=float(guidance))
    return Settings(sampling, guidance)


def wanted_of(texts: Sequence[str], seed: int, first: int, negative: str | None) -> Wanted:
    seeds = [mixed(seed, first + i) for i in range(len(texts))]
    return Wanted(list(texts), seeds, [negative] * len(texts) if negative is not None else None)


def drawn_by(task: GeneratorTask, wanted: Wanted, chosen: Settings) -> Tensor:
    try:
        return task.generate(wanted, chosen.sampling, chosen.guidance)
    except ValueError as error:
        raise Refused(str(error)) from None


@dataclasses.dataclass
class Start:
    """What is there already: its symbols (1, *grid), and which of them are to be drawn anew; None: what comes after them."""

    codes: Tensor
    hidden: Tensor | None = None

    def times(self, count: int) -> tuple[Tensor, Tensor | None]:
        codes = self.codes.expand(count, *self.codes.shape[1:])
        return codes, self.hidden.expand(count, *self.hidden.shape[1:]) if self.hidden is not None else None


def covered(white: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The cells of a grid of which any pixel is white."""
    down, across = (side // cells for side, cells in zip(white.shape, grid, strict=True))
    return white.unflatten(1, (grid[1], across)).unflatten(0, (grid[0], down)).any(3).any(1)


def generating(made: Finished) -> GeneratorTask:
    if not isinstance(made.task, GeneratorTask):
        raise Refused(f"The run is of recipe {made.run.recipe!r}, which makes nothing from a prompt.")
    return made.task


CLASSES = "classes.json"


def classes_of(run: str | Path) -> list[str]:
    """The names of the folders that a run was trained on, if those were its captions."""
    file = RunFolder(run).path / CLASSES
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []
