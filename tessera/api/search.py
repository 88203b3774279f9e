"""Search: what lies in a folder, by a text or by an example, in the space that a contrastive run
has learnt.

    search = Search.load("runs/music-mulan")
    search.index("my-music").save("found")          # what `tessera index` does
    Index.load("found").search("slow piano, minor key", top=10)

An index is a folder that can be searched by itself: the points of all examples (safetensors), what
they are called and what is said about them (JSON), and the model as a run that can only be used.
Nothing in it is unpickled, and nothing is fetched. It is looked through from end to end, which for
a million points of 128 numbers is one multiplication; faiss does the same and finds the best
without sorting, where it is installed and asked for.

N examples, D numbers of a point.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tessera import __version__
from tessera.api.sampling import data_of
from tessera.data.loader import EvalLoader
from tessera.engine.modes import eval_mode
from tessera.engine.task import Batch
from tessera.objectives.contrastive import ContrastiveTask
from tessera.run.dependencies import publish
from tessera.run.directory import UserError, write_atomically
from tessera.run.load import TrainedRun, Weights, load_run

ABOUT, POINTS, MODEL = "index.json", "points.safetensors", "model"
By = Literal["exact", "faiss"]


@dataclass(frozen=True)
class Hit:
    rank: int
    nearness: float
    """the cosine of query and example, -1 to 1"""
    name: str
    caption: str


class Search:
    """A finished contrastive run, as one asks it: where do texts and examples lie?"""

    def __init__(self, made: TrainedRun):
        if not isinstance(made.task, ContrastiveTask):
            raise UserError(
                f"The run is of recipe {made.run.recipe!r}, which knows no space in which texts and examples lie together: "
                "search with a run of music-mulan."
            )
        self.made, self.task = made, made.task

    @classmethod
    def load(cls, run: str | Path, weights: Weights = "ema") -> Search:
        return cls(load_run(run, weights))

    def texts(self, texts: Sequence[str]) -> Tensor:
        """(N, D)"""
        with eval_mode(self.task):
            return self.task.model.second(texts)[:, -1].float().cpu()

    def file(self, path: str | Path) -> Tensor:
        """(1, D): where one file lies."""
        [(batch, points)] = self.points(str(path), batch_size=1, num_workers=0)
        if not len(batch):
            raise UserError(f"It cannot be searched by {batch.rejected[0][1]}")
        return points

    def index(
        self, data: str | None = None, *, batch_size: int = 16, num_workers: int = 0
    ) -> Index:
        """All of a folder, or of the run's own data, whether or not something is said about it."""
        names, captions, points = [], [], []
        left_out = []
        for batch, some in self.points(data, batch_size, num_workers):
            left_out += [f"Left out {name}: {reason}" for name, reason in batch.rejected]
            if len(batch):
                names += batch.names
                captions += batch.examples.captions
                points.append(some)
        if not points:
            raise UserError(
                "Not one example could be read, so there is nothing to search in. `tessera check` tells why."
            )
        about = About(
            data or "the run's own data",
            self.made.run.recipe,
            self.made.steps,
            self.made.weights,
            __version__,
        )
        return Index(self, about, names, captions, torch.cat(points), left_out)

    def points(
        self, data: str | None, batch_size: int, num_workers: int
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Batch by batch; one may be empty, and only tell what could not be read."""
        dataset = data_of(self.made, data).full()
        stream = EvalLoader(
            dataset, seed=self.made.run.engine.seed, batch_size=batch_size, num_workers=num_workers
        )
        for batch in stream.batches(rank=0, world_size=1):
            if not len(batch):
                yield batch, torch.empty(0)
                continue
            with eval_mode(self.task):
                examples = batch.to(self.made.dist.device).examples
                yield batch, self.task.model.first(examples)[:, -1].float().cpu()


@dataclass(frozen=True)
class About:
    """Where an index came from."""

    data: str
    recipe: str
    steps: int
    weights: str
    tessera: str


@dataclass
class Index:
    by: Search
    about: About
    names: list[str]
    captions: list[str]
    points_ND: Tensor
    left_out: list[str]
    """what could not be read, and why"""

    def search(self, query: str | Path, top: int = 10, how: By = "exact") -> list[Hit]:
        """The nearest first. A query that is the path of a file is searched by that file, any other
        by its words."""
        if top < 1:
            raise UserError(f"At least 1 answer can be given, but top is {top}.")
        if not str(query).strip():
            raise UserError("The query is empty: give a text, or the path of a file.")
        point_1D = self.by.file(query) if Path(query).is_file() else self.by.texts([str(query)])
        nearness, places = LOOK[how](self.points_ND, point_1D, min(top, len(self.names)))
        return [
            Hit(rank, near, self.names[place], self.captions[place])
            for rank, (near, place) in enumerate(
                zip(nearness.tolist(), places.tolist(), strict=True), start=1
            )
        ]

    # ---- on disk

    def save(self, place: str | Path) -> None:
        """A new folder, or an empty one."""
        folder = Path(place)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(
                f"{folder} is there already, and not empty. Give another --out; nothing was changed."
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            publish(self.by.made, folder / MODEL)
            save_file({"points": self.points_ND.contiguous()}, folder / POINTS)
            told = {**asdict(self.about), "names": self.names, "captions": self.captions}
            write_atomically(
                folder / ABOUT, json.dumps(told, indent=1, ensure_ascii=False) + "\n"
            )  # last: now it is one
        except OSError as error:
            raise UserError(
                f"{folder} cannot be written ({error.strerror or error}). Make room, or give another --out."
            ) from None

    @classmethod
    def load(cls, place: str | Path) -> Index:
        folder = Path(place)
        try:
            told: dict[str, Any] = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            points_ND = load_file(folder / POINTS)["points"]
            names, captions = told.pop("names"), told.pop("captions")
            about = About(**told)
        except FileNotFoundError:
            raise UserError(
                f"There is no index in {folder}: make one with `tessera index RUN --data PATH --out {folder}`."
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
            raise UserError(f"The index in {folder} is damaged ({error}): make it again.") from None
        if not len(names) == len(captions) == len(points_ND):
            raise UserError(
                f"The index in {folder} is damaged: it has {len(names)} names and {len(points_ND)} points. Make it again."
            )
        return cls(Search.load(folder / MODEL), about, names, captions, points_ND, [])


# ---- looking


def exactly(points_ND: Tensor, query_1D: Tensor, top: int) -> tuple[Tensor, Tensor]:
    nearness_N = (points_ND @ query_1D.T)[:, 0]
    found = nearness_N.sort(descending=True, stable=True)
    return found.values[:top], found.indices[:top]


def by_faiss(points_ND: Tensor, query_1D: Tensor, top: int) -> tuple[Tensor, Tensor]:
    try:
        faiss: Any = importlib.import_module("faiss")
    except ModuleNotFoundError:
        raise UserError(
            "faiss is not installed: pip install faiss-cpu, or search without it, which finds the same."
        ) from None
    table = faiss.IndexFlatIP(points_ND.shape[1])
    table.add(points_ND.numpy())
    nearness, places = table.search(query_1D.numpy(), top)
    return torch.from_numpy(nearness[0]), torch.from_numpy(places[0])


LOOK = {"exact": exactly, "faiss": by_faiss}


# ---- what the command line tells


def make_index(
    run: str,
    data: str | None,
    out: str,
    weights: Weights = "ema",
    batch_size: int = 16,
    num_workers: int = 0,
) -> list[str]:
    """`tessera index`: what there is to say afterwards."""
    made = Search.load(run, weights)
    index = made.index(data, batch_size=batch_size, num_workers=num_workers)
    index.save(out)
    return [
        *made.made.notices,
        *index.left_out,
        f"{len(index.names):,} examples of {index.about.data} in {out}: tessera search {out} ...",
    ]


def as_table(hits: Sequence[Hit]) -> list[str]:
    width = max(len(hit.name) for hit in hits)
    return [
        f"{hit.rank:>4}  {hit.nearness:6.3f}  {hit.name:<{width}}  {hit.caption}".rstrip()
        for hit in hits
    ]


def as_json(index: Index, query: str, hits: Sequence[Hit]) -> str:
    told = {
        "query": query,
        "of": len(index.names),
        **asdict(index.about),
        "hits": [asdict(hit) for hit in hits],
    }
    return json.dumps(told, indent=1, ensure_ascii=False)


def searched(
    place: str, query: str, top: int = 10, how: By = "exact", as_json_text: bool = False
) -> str:
    """`tessera search`: the nearest, as a table or as JSON."""
    index = Index.load(place)
    hits = index.search(query, top, how)
    return as_json(index, query, hits) if as_json_text else "\n".join(as_table(hits))
