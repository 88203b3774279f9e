"""A finished generator in Python: of pictures, sounds or meshes.

    generator = Generator.load("runs/images-maskgit")
    pictures = generator.generate(["a red circle left of a blue square"] * 4, seed=1)
    pictures[0].save("circle")

With a super-resolution run the symbols of the first become those of a larger picture:
Generator.load(base, superres). Picture number i of a seed is a function of the seed, i and the
prompt, whoever else is made with it.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tessera.data.loader import EvalLoader, ExampleDataset
from tessera.engine.modes import hash_seed
from tessera.engine.task import Batch
from tessera.modalities.audio.external_tokens import ExternalTokenizer
from tessera.objectives.generation import GenerationRequest, GeneratorTask
from tessera.run.config import did_you_mean
from tessera.run.directory import RunDirectory, UserError
from tessera.run.load import TrainedRun, Weights, load_run
from tessera.sampling.guidance import Guidance

TOGETHER = 16
"""Examples that are drawn together."""


class Generator:
    def __init__(
        self, made: TrainedRun, superres: TrainedRun | None = None, *, classes: Sequence[str] = ()
    ):
        self.made, self.task = made, generating(made)
        self.larger = generating(superres) if superres is not None else None
        self.classes = classes
        """If it was trained on named folders: those names, which are all it knows."""
        if self.larger is not None:
            self._refuse_strangers(self.larger)

    @classmethod
    def load(
        cls, run: str | Path, superres: str | Path | None = None, weights: Weights = "ema"
    ) -> Generator:
        larger = load_run(superres, weights) if superres is not None else None
        return cls(load_run(run, weights), larger, classes=classes_of(run))

    def _refuse_strangers(self, larger: GeneratorTask) -> None:
        if "smaller" not in larger.tokenizers:
            raise UserError(
                "The second run makes no larger pictures: it is not a super-resolution run."
            )
        theirs: Any = larger.tokenizers["smaller"]
        ours: Any = self.task.tokenizers["tokenizer"]
        if theirs.fingerprint != ours.fingerprint:
            raise UserError(
                "The super-resolution run was trained on the symbols of another tokenizer than the first run writes in: "
                "they would mean nothing to it. Train it with --smaller and the tokenizer that the first run stands on."
            )

    def generate(
        self,
        texts: str | Sequence[str],
        *,
        seed: int = 0,
        negative: str | None = None,
        decoding_steps: int | None = None,
        guidance: float | Guidance | None = None,
        sampling: Any = None,
        superres_decoding_steps: int | None = None,
        start: Start | None = None,
    ) -> list[Any]:
        """One picture for each text (an empty one asks for anything), in their order.

        `negative` is what to lead away from; `decoding_steps` and `guidance` are short for the most
        used settings of `sampling` and `Guidance`; what is left out is as the run's config says.
        `start` is a picture of which a part is drawn anew.
        """
        texts = [texts] if isinstance(texts, str) else list(texts)
        chosen = settings(self.task, decoding_steps, guidance, sampling)
        return self.draw(
            texts,
            chosen,
            seed=seed,
            negative=negative,
            superres_decoding_steps=superres_decoding_steps,
            start=start,
        ).media

    def draw(
        self,
        texts: Sequence[str],
        chosen: Settings,
        *,
        seed: int = 0,
        negative: str | None = None,
        superres_decoding_steps: int | None = None,
        start: Start | None = None,
    ) -> Drawn:
        """As `generate`, with the symbols."""
        self.refuse(texts, negative)
        if self.task.coarser == "smaller":
            raise UserError(
                "This is a super-resolution run: it makes larger pictures from smaller ones. Give it after the run that makes "
                "those (tessera sample BASE SUPERRES --prompt ...), or pictures to start from (--data)."
            )
        if self.task.coarser is not None:
            raise UserError(
                "This run sounds out what is said in a recording: give it one to follow (--like RECORDING), or recordings from "
                "which it starts (--data)."
            )
        made = Drawn()
        for first in range(0, len(texts), TOGETHER):
            wanted = make_request(texts[first : first + TOGETHER], seed, first, negative)
            if start is not None:
                wanted.codes, wanted.hidden = start.times(len(wanted.texts))
            codes = drawn_by(self.task, wanted, chosen)
            if self.larger is None:
                made.add(self.task, codes)
            else:
                above = GenerationRequest(
                    wanted.texts, wanted.seeds, wanted.negative, coarser=codes
                )
                made.add(
                    self.larger,
                    drawn_by(self.larger, above, settings(self.larger, superres_decoding_steps)),
                )
        return made

    def draw_again(
        self,
        dataset: ExampleDataset,
        count: int,
        chosen: Settings,
        *,
        seed: int = 0,
        negative: str | None = None,
    ) -> Drawn:
        """By a run that starts from coarser symbols: the first examples of a source, reduced to
        those and then drawn again."""
        stream = EvalLoader(dataset, seed=seed, batch_size=TOGETHER)
        made = Drawn()
        for batch in stream.batches(rank=0, world_size=1, limit=count):
            if len(batch):
                examples = batch.to(self.made.dist.device).examples
                wanted = make_request(examples.captions, seed, len(made.media), negative)
                wanted.coarser, wanted.lengths = self.task.started_from(examples)
                made.add(self.task, drawn_by(self.task, wanted, chosen))
        return made

    def follow(
        self,
        like: str | Path,
        chosen: Settings,
        *,
        voice: str | Path | None = None,
        seconds: float | None = None,
        count: int = 1,
        seed: int = 0,
    ) -> Drawn:
        """What is said in one recording, or its first seconds, in the voice of another."""
        if self.task.coarser is None or not hasattr(self.made.run.data, "whole"):
            raise UserError(
                "This run follows no recording: only one that was trained on semantic symbols of sound does."
            )
        refuse_without_codec(self.task)
        said = self.heard(like, seconds)
        before = self.heard(voice) if voice is not None else said.nothing()
        prompt = before.codes.shape[1]
        codes = torch.cat([before.codes, torch.zeros_like(said.codes)], dim=1)
        start = Start(
            codes,
            (torch.arange(codes.shape[1], device=codes.device) >= prompt)[None, :, None].expand_as(
                codes
            ),
        )
        made = Drawn()
        for first in range(0, count, TOGETHER):
            wanted = make_request([""] * min(TOGETHER, count - first), seed, first, None)
            wanted.codes, wanted.hidden = start.times(len(wanted.texts))
            wanted.coarser = torch.cat([before.coarser, said.coarser], dim=1).expand(
                len(wanted.texts), -1
            )
            made.add(self.task, drawn_by(self.task, wanted, chosen)[:, prompt:])
        return made

    def heard(self, path: str | Path, seconds: float | None = None) -> Heard:
        """The symbols of a recording, as far as it fills whole frames of both kinds."""
        tokenizers = [
            self.task.tokenizers["tokenizer"],
            self.task.tokenizers[str(self.task.coarser)],
        ]
        data = self.made.run.data.whole(
            path, seconds, math.lcm(*(codec.hop for codec in tokenizers))
        )
        examples = self.one_of(data).examples
        return Heard(*(codec.on(data).codes(examples) for codec in tokenizers))

    def start(self, picture: str | Path, mask: str | Path) -> Start:
        """A picture's symbols, and those of them that a mask's white covers, if only in part."""
        codes = self.codes_of(picture)
        white = torch.from_numpy(
            dataclasses.replace(self.made.run.data, path=str(picture)).mask(str(mask))
        )
        hidden = covered(white, self.task.tokenizers["tokenizer"].grid)[None]
        if not hidden.any():
            raise UserError(
                f"Nothing is white in {mask}, so there is nothing to draw: white marks what is drawn anew."
            )
        return Start(codes, hidden)

    def beginning(self, path: str | Path) -> Start:
        """The symbols of a part of something, to be gone on with."""
        return Start(self.codes_of(path))

    def codes_of(self, path: str | Path) -> Tensor:
        """The symbols of one file, (1, *grid)."""
        data = dataclasses.replace(self.made.run.data, path=str(path))
        return self.task.tokenizers["tokenizer"].codes(self.one_of(data).examples)

    def one_of(self, data: Any) -> Batch:
        """The only example of these data."""
        dataset = data.full()
        if len(dataset) != 1:
            raise UserError(f"One example is to start from, but {data.path} holds {len(dataset)}.")
        batch = next(EvalLoader(dataset, seed=0, batch_size=1).batches(rank=0, world_size=1))
        if not len(batch):
            raise UserError(f"The example cannot be read: {batch.rejected[0][1]}")
        return batch.to(self.made.dist.device)

    def refuse(self, texts: Sequence[str], negative: str | None) -> None:
        """Prompts that this run cannot answer."""
        said = [text for text in (*texts, negative) if text]
        if said and self.task.network.text is None:
            raise UserError("This run was trained without captions: it takes no prompt.")
        known = {name.casefold() for name in self.classes}
        for text in said:
            if known and text.casefold() not in known:
                raise UserError(
                    f"This run was trained on named folders and knows no {text!r}{did_you_mean(text, list(self.classes))}"
                )

    def cut(self, texts: Sequence[str]) -> list[str]:
        """The texts that are longer than the text encoder reads."""
        text = self.task.network.text
        return text.cut(texts) if text is not None else []


@dataclasses.dataclass
class Drawn:
    media: list[Any] = dataclasses.field(default_factory=list)
    codes: list[Tensor] = dataclasses.field(default_factory=list)
    """The symbols that each was read from, (*grid)"""

    def add(self, task: GeneratorTask, codes: Tensor) -> None:
        self.media += task.tokenizers["tokenizer"].media(codes)
        self.codes += codes.unbind(0)


@dataclasses.dataclass
class Heard:
    """A recording as symbols: those that are to be drawn, (1, T, L), and those that say what is
    said, (1, t)."""

    codes: Tensor
    coarser: Tensor

    def nothing(self) -> Heard:
        """One that lasts no time."""
        return Heard(self.codes[:, :0], self.coarser[:, :0])


@dataclasses.dataclass
class Settings:
    sampling: Any
    guidance: Guidance


def settings(
    task: GeneratorTask,
    decoding_steps: int | None = None,
    guidance: float | Guidance | None = None,
    sampling: Any = None,
) -> Settings:
    """What a run says of sampling, with what is asked for instead."""
    sampling = sampling or task.config.sampling
    if decoding_steps is not None:
        sampling = with_settings(sampling, {"rounds": decoding_steps})
    if not isinstance(guidance, Guidance):
        known = task.config.guidance
        guidance = known if guidance is None else dataclasses.replace(known, scale=float(guidance))
    return Settings(sampling, guidance)


def with_settings(config: Any, asked: dict[str, Any]) -> Any:
    """A configuration with what somebody asked for instead."""
    known = {field.name for field in dataclasses.fields(config)}
    for name in asked:
        if name not in known:
            raise UserError(
                f"This generator knows no --{name.replace('_', '-')}: it has {', '.join(sorted(known))}."
            )
    if "rounds" in asked and getattr(config, "level_rounds", ()):
        raise UserError(
            "This run lays its symbols level by level: say how often it is asked in each, --decoding-steps-per-level 16 1, say."
        )
    try:
        return dataclasses.replace(config, **asked)
    except ValueError as error:
        raise UserError(str(error)) from None


def make_request(
    texts: Sequence[str], seed: int, first: int, negative: str | None
) -> GenerationRequest:
    seeds = [hash_seed(seed, first + i) for i in range(len(texts))]
    return GenerationRequest(
        list(texts), seeds, [negative] * len(texts) if negative is not None else None
    )


def drawn_by(task: GeneratorTask, wanted: GenerationRequest, chosen: Settings) -> Tensor:
    try:
        return task.generate(wanted, chosen.sampling, chosen.guidance)
    except ValueError as error:
        raise UserError(str(error)) from None


@dataclasses.dataclass
class Start:
    """What is there already: its symbols (1, *grid), and which of them are to be drawn anew; None:
    what comes after them."""

    codes: Tensor
    hidden: Tensor | None = None

    def times(self, count: int) -> tuple[Tensor, Tensor | None]:
        codes = self.codes.expand(count, *self.codes.shape[1:])
        return codes, self.hidden.expand(
            count, *self.hidden.shape[1:]
        ) if self.hidden is not None else None


def covered(white: Tensor, grid: tuple[int, ...]) -> Tensor:
    """The cells of a grid of which any pixel is white."""
    down, across = (side // cells for side, cells in zip(white.shape, grid, strict=True))
    return white.unflatten(1, (grid[1], across)).unflatten(0, (grid[0], down)).any(3).any(1)


def generating(made: TrainedRun) -> GeneratorTask:
    if not isinstance(made.task, GeneratorTask):
        raise UserError(
            f"The run is of recipe {made.run.recipe!r}, which makes nothing from a prompt."
        )
    return made.task


def refuse_without_codec(task: Any) -> None:
    """A run that learnt from symbols which were given to it."""
    if isinstance(task, GeneratorTask) and isinstance(
        task.tokenizers["tokenizer"], ExternalTokenizer
    ):
        raise UserError(
            "This run learnt from symbols that were given to it and knows no codec: it can neither read nor play recordings. "
            "SoundStormTrainer.generate takes symbols and gives symbols, for the codec that wrote yours; or train over a codec "
            "(tokenizer=RUN, semantic=RUN)."
        )


CLASSES = "classes.json"


def classes_of(run: str | Path) -> list[str]:
    """The names of the folders that a run was trained on, if those were its captions."""
    file = RunDirectory(run).path / CLASSES
    return list(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []
