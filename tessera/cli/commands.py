"""The commands: one function each. Heavy modules are imported when a command needs them.

The flags of `train` are the fields of the run's dataclasses (`flags.py`); the flags of the other
commands are the parameters of their functions.
"""

from __future__ import annotations

import json as json_module
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from tessera._optional import require
from tessera.cli.codes import decode, tokenize
from tessera.cli.export import export
from tessera.cli.output import (
    explain_write_errors,
    print_notices,
    print_sample_metrics,
    write_json,
)
from tessera.cli.pack import pack
from tessera.cli.sample import sample, speak
from tessera.cli.search import index, search
from tessera.cli.train import import_checkpoint, list_recipes, train
from tessera.run.directory import (
    Json,
    RunDirectory,
    check_output_file,
    is_evaluation,
)
from tessera.run.errors import UserError, as_user_error, printable


def evaluate(
    run: str,
    /,
    *,
    data: str | None = None,
    out: str | None = None,
    batch_size: int = 16,
    num_workers: int = 0,
    samples: int | None = None,
    seed: int = 0,
) -> int:
    """Compute the metrics of the raw and the EMA weights, and write them with their protocol.

    Args:
        run: The run directory.
        data: A folder or file to evaluate on; by default the held-out examples of the run.
        out: A JSON file for metrics and protocol; by default evaluation.json in the run directory.
        batch_size: The number of examples that are evaluated together.
        num_workers: The number of processes that load data.
        samples: The number of samples of a generator for the metrics of samples: images are
            compared with real ones and with their prompts, meshes are checked for validity and
            novelty. By default as many as there are held-out examples, at least 64 and at most 512
            images or 64 meshes. 0 disables it.
        seed: The seed of these samples.
    """
    if samples is not None and samples < 0:
        raise UserError(f"--samples must be at least 0, got {samples}.")
    path = Path(out) if out else RunDirectory(run).path / "evaluation.json"
    check_output_file(path, is_evaluation)
    from tessera import __version__
    from tessera.api.evaluation import RejectedExamples, evaluate_samples, open_loader
    from tessera.engine.evaluation import evaluate_task
    from tessera.run.load import load_run

    raw = load_run(run, "raw")
    print_notices(raw.notices)
    loader = open_loader(raw, data, batch_size, num_workers)
    rejected = RejectedExamples()
    raw_evaluation = evaluate_task(raw.task, loader, raw.dist, rejected.add)
    print_notices(rejected.lines())
    ema = load_run(run, "ema")
    metrics = {
        "raw": dict(raw_evaluation.metrics),
        "ema": dict(evaluate_task(ema.task, loader, ema.dist).metrics),
    }
    protocol: Json = {
        "run": run,
        "recipe": raw.run.recipe,
        "step": raw.steps,
        "data": data or "held-out examples of the run",
        "examples": raw_evaluation.num_examples,
        "preprocessing": raw.run.data.preprocessing(),
        "tessera": __version__,
    }
    sample_evaluation = None
    if data is None and samples != 0:
        sample_evaluation = evaluate_samples(ema, count=samples, seed=seed)
    if sample_evaluation is not None:
        print_notices(sample_evaluation.notices)
        protocol["sample_metrics"] = sample_evaluation.protocol
    of_samples = sample_evaluation.metrics if sample_evaluation is not None else {}
    with explain_write_errors(path):
        written = {"raw": metrics["raw"], "ema": metrics["ema"] | of_samples}
        content = {"metrics": written, "protocol": protocol}
        write_json(path, content)
    print(
        f"{raw.run.recipe} at step {raw.steps} on {protocol['examples']} examples "
        f"({protocol['data']})"
    )
    print(f"{'':24}{'raw':>12}{'ema':>12}")
    for name, value in metrics["ema"].items():
        shown = f"{metrics['raw'][name]:12.4f}" if name in metrics["raw"] else f"{'':12}"
        print(f"{name:24}{shown}{value:12.4f}")
    if of_samples:
        print_sample_metrics(of_samples)
    print(f"Protocol: {path}")
    return 0


def check(
    path: str,
    /,
    *,
    medium: Literal["auto", "image", "video", "audio", "mesh"] = "auto",
    columns: tuple[str, ...] = (),
    download: bool = False,
    group_by: str | None = None,
    json: bool = False,
) -> int:
    """Inspect a folder: list what can be used, what cannot with the reasons, and how to train.

    Every file is opened once. The exit code is 1 if nothing can be used.

    Args:
        path: A folder or file, tar shards, a table, or a text file that lists paths.
        medium: The kind of files; auto takes the kind of most files.
        columns: The columns of a table to read: that of the files, then those of the captions.
        download: Download data at an address to the cache.
        group_by: Show which groups of files a run would hold out: by folder, prefix or a column
            of the metadata, such as speaker.
        json: Print JSON instead of lines.
    """
    from tessera.cli.splits import describe_split
    from tessera.data.discovery import SourceOptions
    from tessera.modalities import MODALITIES, detect_modality, inspect_folder

    options = SourceOptions(columns, download)
    try:
        modality = detect_modality(path, options) if medium == "auto" else MODALITIES[medium]
        report = inspect_folder(path, modality, options)
    except UserError as error:  # a folder without any file of the modality
        content = {"path": path, "usable": 0, "reason": str(error)}
        print(json_module.dumps(content) if json else printable(str(error)))
        return 1
    split = describe_split(path, modality, group_by)
    if not json:
        print(printable("\n".join([*report.lines(), *split.lines()])), flush=True)
    from tessera.recipes.suggest import suggest_commands

    suggested = suggest_commands(report, modality, columns, group_by)
    if json:
        print(report.as_json(suggested.commands, split.as_dict(), suggested.remarks))
    elif suggested.commands:
        print("\n  ".join(["To train on it:", *suggested.commands]))
        for remark in suggested.remarks:
            print(remark)
    return 0 if report.usable else 1


def demo(
    *,
    medium: Literal["image", "video", "audio", "music", "mesh", "all"] = "image",
    out: str = "runs/demo",
) -> int:
    """Train and sample on synthetic data. Ctrl-C stops it; the same command resumes.

    At the end, it prints the path of a contact sheet of samples and a command to try next.

    Approximate times on two CPU cores: image 9 minutes, video 12 minutes, audio 5 minutes, music 2
    minutes, mesh 7 minutes.

    Args:
        medium: image (a tokenizer and text to image), video (a tokenizer and text to video), audio
            (text to speech), music (an embedding of music and text), mesh (text to mesh), or all.
        out: The folder of the runs.
    """
    from tessera.cli.main import run_command
    from tessera.modalities import MODALITIES

    chosen = [one for one in MODALITIES.values() if medium in (one.name, "all") and one.demo]
    for modality in chosen:
        for step in modality.demo:
            if step.creates and Path(step.creates.format(out=out)).exists():
                continue
            print(step.description, flush=True)
            run_command([argument.format(out=out) for argument in step.command])
            print()
    for modality in chosen:
        if sheet := find_sheet(RunDirectory(modality.demo_run.format(out=out))):
            print(f"Samples with their captions ({modality.name}): {sheet}")
        words = (argument.format(out=out) for argument in modality.demo_next)
        print(f"Try next: {shlex.join(['tessera', *words])}")
    return 0


def find_sheet(directory: RunDirectory) -> Path | None:
    """Return the contact sheet of the last samples of a run; of videos, the GIF."""
    sheets = sorted(directory.samples.glob("[0-9]*/sheet.*"))
    shown = [path for path in sheets if path.suffix in (".png", ".gif")]
    return shown[-1] if shown else None


def view(
    runs: tuple[str, ...] = ("runs",),
    /,
    *,
    host: str = "127.0.0.1",
    port: int = 7860,
    token: str | None = None,
    browser: bool = True,
    export: str | None = None,
) -> int:
    """Show runs, their samples and a playground on a page in the browser.

    Args:
        runs: Run directories, or folders of them.
        host: The address to listen on. Other computers can reach the page only if it is not a local
            one, and then a token is required.
        port: The port to listen on; 0 takes a free one.
        token: The token that the address of the page must have; by default a random one where
            other computers can reach it.
        browser: Open the page in the browser, where there is one.
        export: Write one run to this HTML file instead, to be opened without a server.
    """
    folders = [Path(run) for run in runs]
    for folder in folders:
        if not folder.is_dir():
            raise UserError(
                f"{folder} is not a folder: give run directories, or folders of them. `tessera "
                "train` writes to runs/ by default."
            )
    if export is not None:
        from tessera.view.report import export_report

        with explain_write_errors(Path(export)):
            size = export_report(folders, Path(export))
        print(f"{export}: {size / 1e6:.1f} MB")
        return 0
    with as_user_error(ModuleNotFoundError):
        require("uvicorn", extra="view", purpose="The page")
        require("starlette", extra="view", purpose="The page")
    from tessera.view.main import serve

    serve(folders, host=host, port=port, token=token, open_browser=browser)
    return 0


COMMANDS: dict[str, Callable[..., int]] = {
    "recipes": list_recipes,
    "train": train,
    "import": import_checkpoint,
    "sample": sample,
    "speak": speak,
    "tokenize": tokenize,
    "decode": decode,
    "evaluate": evaluate,
    "index": index,
    "search": search,
    "check": check,
    "pack": pack,
    "export": export,
    "view": view,
    "demo": demo,
}
