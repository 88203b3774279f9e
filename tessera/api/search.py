"""Search a folder by text or by example in the embedding space of a contrastive run.

    search = Search.load("runs/music-mulan")
    search.index("my-music").save("my-index")          # what `tessera index` does
    Index.load("my-index").search("slow piano, minor key", top=10)

An index is a self-contained folder: the embeddings of all examples (safetensors), their names and
captions (JSON), and the model. A search compares the query with all embeddings, which for a million
embeddings of 128 dimensions is one matrix product; faiss does the same without sorting.

N examples, D embedding dimension.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tessera import __version__
from tessera.api.generator import data_at
from tessera.api.pretrained import Pretrained
from tessera.data.dataset import spread_examples
from tessera.data.errors import UnreadableFile
from tessera.data.loader import EvalLoader
from tessera.engine.checkpoint import describe_file
from tessera.engine.modes import eval_mode
from tessera.engine.task import Batch
from tessera.modalities.audio.io.files import SUFFIXES
from tessera.objectives.contrastive import ContrastiveTask
from tessera.run.dependencies import publish
from tessera.run.directory import PARTIAL, Json, is_file, replacing_file, write_atomically
from tessera.run.errors import UserError
from tessera.run.load import TrainedRun, Weights, format_repr, load_run

INDEX_FILE, EMBEDDINGS_FILE, MODEL_FOLDER = "index.json", "embeddings.safetensors", "model"
Method = Literal["exact", "faiss"]
DAMAGE = (ValueError, SafetensorError)
"""Errors of files whose bytes were changed."""


@dataclass(frozen=True)
class Hit:
    rank: int
    similarity: float
    """The cosine similarity of query and example."""
    name: str
    caption: str
    better_than: float | None = None
    """The fraction of other captions that are less similar to the example than the query; None for
    recordings, or if no captions are known."""


class Search(Pretrained):
    """The embeddings of a trained contrastive run."""

    def __init__(self, trained: TrainedRun):
        if not isinstance(trained.task, ContrastiveTask):
            raise UserError(
                f"The run is of the recipe {trained.run.recipe!r}, which trains no joint "
                "embedding: give a run of music-mulan."
            )
        self.trained, self.task = trained, trained.task

    @classmethod
    def load(cls, run: str | Path, weights: Weights = "ema") -> Search:
        return cls(load_run(run, weights))

    def __repr__(self) -> str:
        settings = {"recipe": self.trained.run.recipe, "step": self.trained.steps}
        return format_repr(self, self.trained, settings)

    def embed_texts(self, texts: Sequence[str]) -> Tensor:
        """Return the embeddings of texts, (N, D)."""
        with eval_mode(self.task):
            return self.task.model.embed_text(texts)[:, -1].float().cpu()

    def embed_file(self, path: str | Path) -> Tensor:
        """Return the embedding of one file, (1, D)."""
        [(batch, embeddings)] = self.embed_folder(str(path), batch_size=1, num_workers=0)
        if not len(batch):
            raise UserError(f"The query cannot be read: {batch.rejected[0][1]}")
        return embeddings

    def index(
        self, data: str | None = None, *, batch_size: int = 16, num_workers: int = 0
    ) -> Index:
        """Embed a folder, or the data of the run, with and without captions."""
        names: list[str] = []
        captions: list[str] = []
        embeddings: list[Tensor] = []
        skipped: list[str] = []
        for batch, embeddings_BD in self.embed_folder(data, batch_size, num_workers):
            skipped += [f"Skipped {name}: {reason}" for name, reason in batch.rejected]
            if len(batch):
                names += batch.names
                captions += batch.examples.captions
                embeddings.append(embeddings_BD)
        if not embeddings:
            raise UserError("No example could be read. `tessera check` shows the reasons.")
        info = IndexInfo(
            data or "data of the run",
            self.trained.run.recipe,
            self.trained.steps,
            self.trained.weights,
            __version__,
        )
        embeddings_ND = torch.cat(embeddings)
        background = self.measure_background(captions, embeddings_ND)
        return Index(self, info, names, captions, embeddings_ND, skipped, background)

    def measure_background(self, captions: Sequence[str], embeddings_ND: Tensor) -> Background:
        """Embed captions to compare queries with: of the run's held-out examples, or these."""
        texts = self.held_out_captions() or [caption for caption in captions if caption]
        texts = sorted(set(texts))[:MAX_REFERENCES]
        texts_RD = self.embed_texts(texts) if texts else embeddings_ND[:0]
        return Background(texts_RD, measure_nearest(embeddings_ND))

    def held_out_captions(self) -> list[str]:
        """Return captions of held-out examples; nothing if the data are gone."""
        try:
            dataset = self.trained.run.data.build().validation
            indices = spread_examples(dataset, MAX_REFERENCES)
            return [caption for i in indices if (caption := dataset.caption(i))]
        except (UserError, UnreadableFile):
            return []

    def embed_folder(
        self, data: str | None, batch_size: int, num_workers: int
    ) -> Iterator[tuple[Batch, Tensor]]:
        """Yield batches with their embeddings; a batch without a readable file is empty."""
        dataset = data_at(self.trained, data).full()
        seed = self.trained.run.engine.seed
        loader = EvalLoader(dataset, seed=seed, batch_size=batch_size, num_workers=num_workers)
        for batch in loader.batches():
            yield batch, self.embed_batch(batch) if len(batch) else torch.empty(0)

    def embed_batch(self, batch: Batch) -> Tensor:
        examples = batch.to(self.trained.dist.device).examples
        with eval_mode(self.task):
            return self.task.model.embed_media(examples)[:, -1].float().cpu()


@dataclass(frozen=True)
class IndexInfo:
    """The origin of an index."""

    data: str
    recipe: str
    steps: int
    weights: str
    tessera: str


MIN_REFERENCES, MAX_REFERENCES = 8, 256
"""The number of texts that a query is compared with; with fewer there is no comparison."""
NEAR = 0.75
"""A text is near to an example if it is more similar to it than this fraction of other texts."""
NEAREST_QUANTILE = 0.05
"""A recording is near to an example if they are as similar as all but this fraction of examples
and their nearest other ones."""


@dataclass(frozen=True)
class Background:
    """What similarities are compared with, since their range differs between runs and folders.

    A text about harps had a cosine similarity of 0.75 with drums: high, but lower than that of most
    other texts with the same drums.
    """

    texts_RD: Tensor
    """Embeddings of other captions, those of held-out examples of the run; none if its data are
    gone and the index has no captions."""
    nearest: float | None
    """The similarity that most examples have with their nearest other one."""

    def fraction_below(self, similarity: float, embedding_D: Tensor) -> float | None:
        """Return the fraction of other captions that are less similar to an example."""
        if len(self.texts_RD) < MIN_REFERENCES:
            return None
        return float((self.texts_RD @ embedding_D < similarity).float().mean())


def measure_nearest(embeddings_ND: Tensor) -> float | None:
    """Return the similarity that most examples have with their nearest other one."""
    if len(embeddings_ND) < MIN_REFERENCES:
        return None
    chosen = torch.arange(0, len(embeddings_ND), -(-len(embeddings_ND) // 1000))
    similarities = embeddings_ND[chosen] @ embeddings_ND.T
    similarities[torch.arange(len(chosen)), chosen] = -1.0
    return float(similarities.max(dim=1).values.quantile(NEAREST_QUANTILE))


@dataclass(repr=False)
class Index:
    model: Search
    info: IndexInfo
    names: list[str]
    captions: list[str]
    embeddings_ND: Tensor
    skipped: list[str]
    """The files that could not be read, with the reasons."""
    background: Background

    def __repr__(self) -> str:
        return f"Index({self.info.data!r}, recipe={self.info.recipe!r}, examples={len(self.names)})"

    def search(self, query: str | Path, top: int = 10, how: Method = "exact") -> list[Hit]:
        """Return the nearest examples; a query that is the path of a file is embedded as audio."""
        if top < 1:
            raise UserError(f"--top must be at least 1, got {top}.")
        check_query(query)
        embed_text, embed_file = self.model.embed_texts, self.model.embed_file
        query_1D = embed_file(query) if is_file(query) else embed_text([str(query)])
        search = search_exactly if how == "exact" else search_with_faiss
        similarities, indices = search(self.embeddings_ND, query_1D, min(top, len(self.names)))
        found = zip(similarities.tolist(), indices.tolist(), strict=True)
        is_text = not is_file(query)
        return [
            Hit(
                rank,
                similarity,
                self.names[i],
                self.captions[i],
                self.background.fraction_below(similarity, self.embeddings_ND[i])
                if is_text
                else None,
            )
            for rank, (similarity, i) in enumerate(found, start=1)
        ]

    def explain_distance(self, query: str | Path, hits: Sequence[Hit]) -> str:
        """Return a sentence if nothing in the index is near to the query, else ""."""
        if is_file(query):
            best, least = max(hit.similarity for hit in hits), self.background.nearest
            if least is None or best >= least:
                return ""
            return (
                f"Nothing is near: the best similarity is {best:.3f}, but nearly all examples of "
                f"the index have {least:.3f} or more with their nearest other one."
            )
        fractions = [hit.better_than for hit in hits if hit.better_than is not None]
        if not fractions or max(fractions) >= NEAR:
            return ""
        return (
            f"Nothing is near: {1 - max(fractions):.0%} of other captions describe the results "
            "better than this text."
        )

    def save(self, path: str | Path) -> None:
        """Write the index to a new or empty folder."""
        folder = Path(path)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder} exists and is not empty. Give another --out.")
        folder = folder.resolve()
        temporary = folder.with_name(f".{folder.name}{PARTIAL}")
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            publish(self.model.trained, temporary / MODEL_FOLDER)
            with replacing_file(temporary / EMBEDDINGS_FILE) as file:
                tensors = {
                    "embeddings": self.embeddings_ND.contiguous(),
                    "texts": self.background.texts_RD.contiguous(),
                }
                save_file(tensors, file)
            content = {
                **asdict(self.info),
                "names": self.names,
                "captions": self.captions,
                "nearest": self.background.nearest,
                "sha256": describe_file(temporary / EMBEDDINGS_FILE)["sha256"],
            }
            text = json.dumps(content, indent=1) + "\n"
            write_atomically(temporary / INDEX_FILE, text)
            os.replace(temporary, folder)  # an index is complete, or it does not exist
        except OSError as error:
            reason = error.strerror or error
            raise UserError(
                f"{folder} cannot be written ({reason}). Free some disk space, or give another "
                "--out."
            ) from None

    @classmethod
    def load(cls, path: str | Path) -> Index:
        folder = Path(path)
        try:
            content: Json = json.loads((folder / INDEX_FILE).read_text(encoding="utf-8"))
            if describe_file(folder / EMBEDDINGS_FILE)["sha256"] != content.pop("sha256"):
                raise ValueError(f"{EMBEDDINGS_FILE} does not match its checksum")
            tensors = load_file(folder / EMBEDDINGS_FILE)
            embeddings_ND = tensors["embeddings"]
            background = Background(tensors["texts"], content.pop("nearest"))
            names, captions = content.pop("names"), content.pop("captions")
            info = IndexInfo(**content)
        except FileNotFoundError:
            raise UserError(
                f"There is no index in {folder}: create one with `tessera index RUN --data PATH "
                f"--out {folder}`."
            ) from None
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            SafetensorError,
            RecursionError,
        ) as error:
            raise UserError(
                f"The index in {folder} is corrupt ({error}): create it again."
            ) from None
        if not len(names) == len(captions) == len(embeddings_ND):
            raise UserError(
                f"The index in {folder} is corrupt: it has {len(names)} names and "
                f"{len(embeddings_ND)} embeddings. Create it again."
            )
        model = Search.load(folder / MODEL_FOLDER)
        return cls(model, info, names, captions, embeddings_ND, [], background)


def check_query(query: str | Path) -> None:
    """Raise UserError for a query that is empty, or the path of a file that does not exist."""
    text = str(query).strip()
    if not text:
        raise UserError("The query is empty: give a text, or the path of a file.")
    looks_like_path = text.lower().endswith(SUFFIXES) or text.startswith(("/", "./", "../", "~/"))
    if (looks_like_path or isinstance(query, Path)) and not is_file(query):
        raise UserError(
            f"{text} does not exist: give the path of a recording, or a text that is no path."
        )


def format_fraction(hit: Hit) -> str:
    return "" if hit.better_than is None else f"{hit.better_than:4.0%}  "


def search_exactly(embeddings_ND: Tensor, query_1D: Tensor, top: int) -> tuple[Tensor, Tensor]:
    similarity_N = (embeddings_ND @ query_1D.T)[:, 0]
    ordered = similarity_N.sort(descending=True, stable=True)
    return ordered.values[:top], ordered.indices[:top]


def search_with_faiss(embeddings_ND: Tensor, query_1D: Tensor, top: int) -> tuple[Tensor, Tensor]:
    try:
        faiss = importlib.import_module("faiss")
    except ModuleNotFoundError:
        raise UserError(
            'faiss is not installed: pip install "tessera[search]", or use --how exact, which '
            "returns the same."
        ) from None
    table = faiss.IndexFlatIP(embeddings_ND.shape[1])
    table.add(embeddings_ND.numpy())
    similarities, indices = table.search(query_1D.numpy(), top)
    return torch.from_numpy(similarities[0]), torch.from_numpy(indices[0])


# ---- for the command line


def build_index(
    run: str,
    data: str | None,
    out: str,
    weights: Weights = "ema",
    batch_size: int = 16,
    num_workers: int = 0,
) -> list[str]:
    """Build and save an index; return notices for the user."""
    search = Search.load(run, weights)
    index = search.index(data, batch_size=batch_size, num_workers=num_workers)
    index.save(out)
    summary = (
        f"{len(index.names):,} examples of {index.info.data} in {out}: tessera search {out} ..."
    )
    return [*search.trained.notices, *index.skipped, summary]


def search_index(
    path: str, query: str, top: int = 10, how: Method = "exact", as_json: bool = False
) -> str:
    """Search an index; return a table or JSON."""
    index = Index.load(path)
    hits = index.search(query, top, how)
    notice = index.explain_distance(query, hits)
    if as_json:
        content = {
            "query": query,
            "examples": len(index.names),
            **asdict(index.info),
            "notice": notice,
            "hits": [asdict(hit) for hit in hits],
        }
        return json.dumps(content, indent=1, ensure_ascii=False)
    width = max(len(hit.name) for hit in hits)
    lines = [
        f"{hit.rank:>4}  {hit.similarity:6.3f}  {format_fraction(hit)}{hit.name:<{width}}  "
        f"{hit.caption}".rstrip()
        for hit in hits
    ]
    return "\n".join([*lines, notice] if notice else lines)
