"""The commands of a search index: `index` and `search`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tessera.cli.output import Weights, explain_write_errors, print_notices
from tessera.run.errors import printable


def index(
    run: str,
    /,
    *,
    out: str,
    data: str | None = None,
    weights: Weights = "ema",
    batch_size: int = 16,
    num_workers: int = 1,
) -> int:
    """Embed a folder of music, to be searched by text or by music.

    Args:
        run: The directory of a run of music-mulan.
        out: The output folder.
        data: A folder or file; by default the data of the run.
        weights: The EMA weights, or the raw weights as the optimizer left them.
        batch_size: The number of examples that are embedded together.
        num_workers: The number of processes that load data; 0 loads it in this process.
    """
    from tessera.api.search import build_index

    with explain_write_errors(Path(out)):
        print_notices(build_index(run, data, out, weights, batch_size, num_workers))
    return 0


def search(
    index: str,
    query: str,
    /,
    *,
    top: int = 10,
    how: Literal["exact", "faiss"] = "exact",
    json: bool = False,
) -> int:
    """Find the nearest music to a text or to a recording.

    Args:
        index: A folder that `tessera index` wrote.
        query: A text, or the path of a recording.
        top: The number of results.
        how: `exact` compares the query with all embeddings; `faiss` uses the library of that name.
        json: Print JSON instead of a table.
    """
    from tessera.api.search import search_index

    found = search_index(index, query, top, how, as_json=json)
    print(found if json else printable(found))
    return 0
