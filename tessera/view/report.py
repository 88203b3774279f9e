"""A report: one run in one HTML file that opens from disk, without a server and without network.

The file has the scripts of the page as data addresses in an import map, and samples of as many
steps as fit. Its Content-Security-Policy allows no connection at all.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tessera import __version__
from tessera.run.directory import Json, write_atomically
from tessera.run.errors import UserError
from tessera.view import samples
from tessera.view.library import RunLibrary
from tessera.view.metrics import without_nonfinite
from tessera.view.runs import FoundRun, describe_run

MAX_BYTES = 10_000_000
POINTS = 600
MAX_SAMPLES = 16
"""The number of samples of each step."""
MAX_HISTOGRAMS = 50
"""The number of validations whose use of the codebook is shown."""
STATIC = Path(__file__).with_name("static")
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; "
    "img-src data: blob:; media-src data: blob:; connect-src data:"
)
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="Tessera {version}">
<title>{title}</title>
<style>{style}</style>
<script type="importmap">{modules}</script>
</head>
<body>
<header class="top"><span class="brand"><span class="mark"></span>Tessera</span></header>
<main id="main"></main>
<script type="application/json" id="report">{content}</script>
<script type="module">import "tessera/report.js";</script>
</body>
</html>
"""


def export_report(folders: list[Path], path: Path) -> int:
    """Write the report of the only run below some folders; return its size in bytes."""
    runs = list(RunLibrary(folders).find().values())
    if len(runs) != 1:
        names = ", ".join(run.id for run in runs) or "none"
        raise UserError(f"A report shows one run, and {len(runs)} were found ({names}). Name one.")
    run = runs[0]
    run.read_info()
    text = build_report(run)
    write_atomically(path, text)
    return len(text.encode("utf-8"))


def build_report(run: FoundRun) -> str:
    content: Json = {
        "run": describe_run(run),
        "metrics": run.metrics.read(POINTS),
        "validations": run.metrics.read_histograms()[-MAX_HISTOGRAMS:],
        "steps": [],
        "files": {},
        "left_out": 0,
    }
    frame = render(run, content)
    add_samples(run, content, MAX_BYTES - len(frame.encode("utf-8")) - 1000)
    return render(run, content)


def render(run: FoundRun, content: Json) -> str:
    # In a script element only "<" could end the element.
    data = json.dumps(without_nonfinite(content), ensure_ascii=False).replace("<", "\\u003c")
    return PAGE.format(
        policy=html.escape(POLICY),
        version=__version__,
        title=html.escape(run.id),
        style=read_styles(),
        modules=json.dumps({"imports": read_modules()}),
        content=data,
    )


def read_styles() -> str:
    icon = as_data_url(STATIC / "icon.svg", "image/svg+xml")
    files = (STATIC / "vendor" / "uplot.css", STATIC / "style.css")
    return "\n".join(file.read_text(encoding="utf-8") for file in files).replace("icon.svg", icon)


def read_modules(name: str = "report.js") -> dict[str, str]:
    """Return the modules that a module needs, each as an address that holds its code."""
    found: dict[str, str] = {}
    pending = [name]
    while pending:
        module = pending.pop()
        if f"tessera/{module}" in found:
            continue
        code = (STATIC / module).read_text(encoding="utf-8")
        pending += re.findall(r'from "\./([\w/-]+\.js)"', code)
        code = re.sub(r'from "\./([\w/-]+\.js)"', r'from "tessera/\1"', code)
        encoded = base64.b64encode(code.encode("utf-8")).decode()
        found[f"tessera/{module}"] = f"data:text/javascript;base64,{encoded}"
    return found


def as_data_url(path: Path, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(path.read_bytes()).decode()}"


def add_samples(run: FoundRun, content: Json, budget: int) -> None:
    """Add the samples of as many steps as fit: the last, the first, then those in between."""
    steps = samples.list_steps(run)
    chosen: dict[int, Json] = {}
    for number in order_steps(len(steps)):
        step = steps[number]
        files, size = {}, len(json.dumps(step))
        names = [sample["shown"] for sample in step["samples"][:MAX_SAMPLES]]
        if run.read_info().kind == "embedding" and step["sheet"]:
            names.append(step["sheet"])
        for name in names:
            path = run.directory.samples / step["name"] / name
            media_type = samples.MEDIA_TYPES.get(path.suffix, "application/octet-stream")
            files[f"{step['name']}/{name}"] = as_data_url(path, media_type.partition(";")[0])
        size += sum(len(key) + len(value) + 8 for key, value in files.items())
        if size > budget:
            content["left_out"] += len(step["samples"])
            continue
        budget -= size
        content["files"] |= files
        content["left_out"] += len(step["samples"]) - len(step["samples"][:MAX_SAMPLES])
        chosen[number] = step | {"samples": step["samples"][:MAX_SAMPLES]}
    content["steps"] = [chosen[number] for number in sorted(chosen)]


def order_steps(count: int) -> Iterator[int]:
    """Yield 0 to count - 1: the last, the first, then the middle of ever smaller intervals."""
    if count:
        yield count - 1
    if count > 1:
        yield 0
    intervals = [(0, count - 1)]
    while intervals:
        low, high = intervals.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            yield middle
            intervals += [(low, middle), (middle, high)]
