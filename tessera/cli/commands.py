"""The commands: one function each. Heavy modules are imported when a command needs them.

The flags of `train` are the fields of the run's dataclasses (`flags.py`); the flags of the other
commands are the parameters of their functions.
"""

from __future__ import annotations

import json as json_module
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tessera._optional import require
from tessera.cli.export import export
from tessera.cli.pack import pack
from tessera.run.directory import (
    Json,
    RunDirectory,
    check_output_file,
    check_sample_folder,
    is_evaluation,
    move_earlier_samples,
    next_free_folder,
    remove_partial,
    write_atomically,
)
from tessera.run.errors import UserError, as_user_error, printable

if TYPE_CHECKING:
    from tessera.api.files import TimedFiles
    from tessera.cli.flags import TrainArguments
    from tessera.data.pieces import TimeRange

Weights = Literal["ema", "raw"]


def list_recipes() -> int:
    """List what can be trained."""
    from tessera.recipes.registry import RECIPES, installed_recipes, recipe_name, recipe_summary

    for recipe in RECIPES:
        print(f"{recipe_name(recipe):24}{recipe_summary(recipe)}")
    for name, entry in installed_recipes().items():
        print(f"{name:24}{entry.value}")
    print("\n`tessera train RECIPE --help` shows the flags of a recipe.")
    print("Presets: tiny, small (the default), base, paper.")
    return 0


def train(*arguments: str) -> int:
    """Start a run, or resume it where it stopped."""
    if not arguments or arguments[0].startswith("-") and arguments[0] != "--config":
        raise UserError(
            "No recipe given: tessera train RECIPE [--data PATH] [--out RUN], or tessera train "
            "--config FILE; `tessera recipes` lists the recipes."
        )
    parsed = parse_config(arguments[1:]) if arguments[0] == "--config" else parse_recipe(arguments)
    from tessera.cli import launch

    if parsed.run.engine.nproc > 1 and not launch.is_launched():
        return launch.launch_processes(parsed.run.engine.nproc, ["train", *arguments])
    from tessera.run.resolve import resolve_run
    from tessera.run.train import (
        build_engine,
        dry_run,
        find_unused_folder,
        print_header,
        print_plan,
        print_summary,
    )

    if parsed.out is not None and not parsed.out.strip():
        raise UserError("--out is empty: give a folder, or leave it out.")
    out = Path(parsed.out or f"runs/{parsed.run.recipe.rpartition(':')[2]}")
    directory = RunDirectory(find_unused_folder(out) if parsed.fresh else out)
    directory.check_ownership()
    resolved = resolve_run(parsed.run, parsed.given, directory)
    run = resolved.run
    if parsed.plan_only:
        if not parsed.dry_run:
            raise UserError("--plan-only is for --dry-run: add it, or leave --plan-only out.")
        print_plan(run, parsed.preset)
        return 0
    if parsed.dry_run:
        dry_run(run)
        return 0
    with launch.forgiving_output():
        print_header(run, directory, resolved.remark)
        build_engine(run, directory, rescan=parsed.rescan).run()
        print_summary(run, directory)
    return 0


def parse_recipe(arguments: tuple[str, ...]) -> TrainArguments:
    """Parse RECIPE and its flags."""
    from tessera.recipes.registry import get_recipe

    name = arguments[0]
    if ":" in name:
        search_current_folder()
    recipe = get_recipe(name)  # before the flags, whose module imports torch
    from tessera.cli import flags

    parsed = flags.parse(recipe, list(arguments[1:]), name)
    return replace(parsed, run=replace(parsed.run, recipe=name))


def search_current_folder() -> None:
    """Let a module that the user named be imported from the current folder."""
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)


def parse_config(arguments: tuple[str, ...]) -> TrainArguments:
    """Parse the configuration of another run and the flags that change it."""
    if not arguments or arguments[0].startswith("-"):
        raise UserError("--config needs a file: tessera train --config runs/NAME/config.json")
    from tessera.cli import flags
    from tessera.recipes.registry import read_run

    path = Path(arguments[0])
    directory = RunDirectory(path.parent)
    directory.config = path
    run = read_run(directory)
    return flags.parse_changes(run, list(arguments[1:]), f"tessera train --config {path}")


def import_checkpoint(
    model: str,
    file: str,
    /,
    *,
    trainer: Literal[
        "soundstorm", "mulan", "video", "vqgan", "mesh-autoencoder", "mesh-transformer"
    ],
    out: str,
    arguments: str | None = None,
) -> int:
    """Convert a checkpoint of a research package to a run directory that a trainer resumes from.

    Only tensors and numbers are read from the file; nothing in it is executed.

    Args:
        model: The function or class that builds the model, as module:name.
        file: The checkpoint that the trainer of the research package wrote.
        trainer: The trainer that wrote it.
        out: The new run directory.
        arguments: A JSON file with the arguments of the function or class.
    """
    search_current_folder()
    from tessera.recipes.registry import import_reference
    from tessera.trainers.import_checkpoint import import_checkpoint as convert

    build = import_reference(model)
    kwargs = json_module.loads(Path(arguments).read_text(encoding="utf-8")) if arguments else {}
    written = convert(trainer, build(**kwargs), Path(file), Path(out))
    print(
        f"Step {int(written.name)} of {file} is in {written}; a trainer with the folder {out} and "
        "the same model resumes from it."
    )
    return 0


def sample(
    run: str,
    superres: str | None = None,
    /,
    *,
    prompt: tuple[str, ...] = (),
    negative_prompt: str | None = None,
    data: str | None = None,
    mask: str | None = None,
    like: str | None = None,
    prompt_audio: str | None = None,
    seconds: float | None = None,
    first_frame: str | None = None,
    last_frame: str | None = None,
    frames_given: int | None = None,
    frames: int | None = None,
    start: float | None = None,
    format: str | None = None,
    count: int = 16,
    seed: int = 0,
    out: str | None = None,
    weights: Weights = "ema",
    decoding_steps: int | None = None,
    decoding_steps_per_level: tuple[int, ...] = (),
    guidance: float | None = None,
    guidance_from: float | None = None,
    guidance_to: float | None = None,
    guidance_ramp: Literal["constant", "linear", "cosine"] | None = None,
    guidance_power: float | None = None,
    order: Literal["confidence", "critic", "halton"] | None = None,
    schedule: Literal["cosine", "linear", "arccos", "power"] | None = None,
    temperature: float | None = None,
    final_temperature: float | None = None,
    choice_temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    superres_decoding_steps: int | None = None,
) -> int:
    """Generate samples with a generator, or reconstruct examples with a tokenizer.

    Settings of a generator that are left out are those of the run.

    Args:
        run: The run directory.
        superres: The directory of a super-resolution run that enlarges the images.
        prompt: The text prompts. By default the captions of held-out examples are used.
        negative_prompt: The text that guidance leads away from.
        data: A folder or file: the examples that a tokenizer reconstructs, the source of captions
            for a generator, or with a mask the image or video to change. By default held-out
            examples are used.
        mask: An image of the same size, white where the image is generated again (inpainting). For
            a video, an image for all frames or a video.
        like: A recording whose content is followed, for audio-soundstorm.
        prompt_audio: A recording of the voice to use; without it any voice is used.
        seconds: The length of the recording to follow, or of each recording or video that a
            tokenizer reconstructs; by default all of it.
        start: The time in seconds at which recordings and videos that a tokenizer reconstructs
            begin.
        format: The format of files that a tokenizer reconstructs: wav, flac, ogg, mp3, mp4 or gif.
            By default that of the original if it can be written.
        first_frame: An image that a generated video begins with.
        last_frame: An image that it ends with, for interpolation.
        frames_given: The number of first frames of the video in `data` that are continued.
        frames: The number of frames of a generated video, by default that of the training videos;
            longer ones are generated window by window.
        count: The number of samples for each prompt.
        seed: The seed of the samples.
        out: The output folder; by default a new folder among the samples of the run.
        weights: The EMA weights, or the raw weights as the optimizer left them.
        decoding_steps: The number of decoding steps; more steps are slower and more careful.
        decoding_steps_per_level: The same for each quantizer; the last number is used for the rest.
        guidance: The scale of classifier-free guidance; 1 disables it.
        guidance_from: The fraction of the decoding steps after which guidance starts.
        guidance_to: The fraction of the decoding steps after which guidance ends.
        guidance_ramp: How guidance rises between start and end.
        guidance_power: The exponent of the time in the ramp; above 1 guidance rises late.
        order: Which tokens are kept first: by confidence, by the critic, or in a low-discrepancy
            order.
        schedule: How the number of masked tokens falls.
        temperature: The sampling temperature; 0 takes the most likely token.
        final_temperature: The temperature of the last decoding step, reached linearly.
        choice_temperature: The temperature of the noise in the order by confidence.
        top_k: Sample from the k most likely tokens only; 0 uses all.
        top_p: Sample from the most likely tokens with this total probability only.
        superres_decoding_steps: The number of decoding steps of the super-resolution run.
    """
    from tessera.api.generator import Generator, drop_none, reconstruct_samples
    from tessera.cli.files import find_whole_files
    from tessera.data.pieces import TimeRange
    from tessera.engine.evaluation import Sample, save_samples
    from tessera.objectives.contrastive import ContrastiveTask
    from tessera.objectives.generation import GeneratorTask
    from tessera.run.load import load_run

    if count < 1:
        raise UserError(f"--count must be at least 1, got {count}.")
    media_prompts = drop_none(
        mask=mask,
        like=like,
        prompt_audio=prompt_audio,
        first_frame=first_frame,
        last_frame=last_frame,
        frames_given=frames_given,
        frames=frames,
    )
    trained = load_run(run, weights)
    print_notices(trained.notices)
    samples = RunDirectory(run).samples
    folder = check_sample_folder(Path(out) if out else next_free_folder(samples, "by-hand"))
    if isinstance(trained.task, GeneratorTask):
        reject_time_flags(start=start, format=format)
        second = load_run(superres, weights) if superres is not None else None
        print_notices(second.notices if second is not None else [])
        generator = Generator(trained, second)
        generated = generator.generate(
            prompt or None,
            count=count,
            seed=seed,
            negative_prompt=negative_prompt,
            data=data,
            mask=mask,
            like=like,
            prompt_audio=prompt_audio,
            seconds=seconds,
            first_frame=first_frame,
            last_frame=last_frame,
            frames_given=frames_given,
            frames=frames,
            decoding_steps=decoding_steps,
            decoding_steps_per_level=decoding_steps_per_level,
            guidance=guidance,
            guidance_from=guidance_from,
            guidance_to=guidance_to,
            guidance_ramp=guidance_ramp,
            guidance_power=guidance_power,
            order=order,
            schedule=schedule,
            temperature=temperature,
            final_temperature=final_temperature,
            choice_temperature=choice_temperature,
            top_k=top_k,
            top_p=top_p,
            superres_decoding_steps=superres_decoding_steps,
        )
    else:
        if isinstance(trained.task, ContrastiveTask) and prompt:
            raise UserError(
                f"A run of {trained.run.recipe} generates nothing for a prompt; it finds music: "
                f"tessera index {run} --data FOLDER --out INDEX, then tessera search INDEX "
                f"{shlex.quote(prompt[0])}."
            )
        if prompt or negative_prompt or superres or media_prompts:
            raise UserError(
                f"A run of {trained.run.recipe} reconstructs examples (--data) and supports no "
                "prompt, mask or second run: those are for generators, such as images-maskgit."
            )
        if (whole := find_whole_files(trained, data)) is not None:
            part = TimeRange(start or 0.0, seconds)
            return sample_whole(
                whole, count=count, part=part, format=format, folder=folder, data=data
            )
        reject_time_flags(seconds=seconds, start=start, format=format)
        generated = reconstruct_samples(trained, data=data, count=count, seed=seed)
    print_notices(generated.notices)
    content = {
        "run": run,
        "superres_run": superres,
        "step": trained.steps,
        "weights": weights,
        "data": data,
        "seed": seed,
        "count": len(generated.media),
        "examples": generated.names,
        **media_prompts,
        **drop_none(seconds=seconds),
        **generated.settings,
    }
    with writing_samples(folder, content):
        pairs = zip(generated.media, generated.names, strict=True)
        sheet = save_samples([Sample(one, name) for one, name in pairs], folder)
    print(
        f"{len(generated.media)} samples of step {trained.steps} ({weights} weights) in {folder}; "
        f"contact sheet: {sheet}"
    )
    if isinstance(trained.task, ContrastiveTask):
        print(
            f"To find music by a text or a recording: tessera index {run} --data FOLDER --out "
            'INDEX, then tessera search INDEX "TEXT"'
        )
    return 0


def speak(
    run: str,
    /,
    *,
    text: str,
    voice: str | None = None,
    speed: float = 1.0,
    temperature: float | None = None,
    guidance: float | None = None,
    soundstorm: str | None = None,
    seed: int = 0,
    out: str | None = None,
    weights: Weights = "ema",
) -> int:
    """Speak a text with a run of audio-text2semantic.

    It writes the speech and its plot, and prints what the recogniser of the run reads in it.

    Args:
        run: The run directory.
        text: The text; several sentences are spoken one after the other.
        voice: A recording of the voice to use; without it any voice is used.
        speed: The speed of speech, from 0.25 to 4.
        temperature: The sampling temperature of the semantic tokens.
        guidance: The scale of guidance on the voice; 1 disables it, at half the cost.
        soundstorm: The directory of a SoundStorm run to use instead of the one in the run.
        seed: The seed of the speech.
        out: The output folder; by default a new folder among the samples of the run.
        weights: The EMA weights, or the raw weights as the optimizer left them.
    """
    from tessera.api.speaker import Speaker
    from tessera.metrics.text import character_error
    from tessera.text.characters import normalize_text

    speaker = Speaker.load(run, soundstorm, weights)
    print_notices(speaker.trained.notices)
    samples = RunDirectory(run).samples
    folder = check_sample_folder(Path(out) if out else next_free_folder(samples, "by-hand"))
    speech = speaker.speak(
        text, voice=voice, speed=speed, temperature=temperature, guidance=guidance, seed=seed
    )
    read = speaker.transcribe(speech.media[0])  # type: ignore[arg-type]
    error = character_error([read], [normalize_text(text)])
    settings = {
        "run": run,
        "step": speaker.trained.steps,
        "weights": weights,
        "seed": seed,
        "count": 1,
        "examples": [text],
    }
    content = settings | speech.settings | {"recognised": read, "character_error": error}
    with writing_samples(folder, content):
        file = speech.media[0].save(folder / "0000.wav")
    print(f"{file}: {speech.media[0].seconds:.1f} s")  # type: ignore[attr-defined]
    print(printable(f"The recogniser reads {read!r}, a character error of {error:.0%}."))
    return 0


def sample_whole(
    files: TimedFiles,
    *,
    count: int,
    part: TimeRange,
    format: str | None,
    folder: Path,
    data: str | None,
) -> int:
    """Reconstruct whole recordings or videos with a codec."""
    from tessera.cli.files import rebuild_files
    from tessera.engine.evaluation import Sample, make_sheet

    trained = files.tokenizer.trained
    content: Json = {
        "run": str(trained.directory.path),
        "step": trained.steps,
        "weights": trained.weights,
        "data": data,
        "start": part.start_seconds,
        "seconds": part.seconds,
    }
    with writing_samples(folder, content):
        rebuilt = rebuild_files(
            files, count=count, part=part, folder=folder, format=format, notify=print_notices
        )
        pairs = zip(rebuilt.pairs, rebuilt.names, strict=True)
        sheet = make_sheet([Sample(one, name) for one, name in pairs]).save(folder / "sheet")
        content |= {
            "count": len(rebuilt.names),
            "examples": rebuilt.names,
            "files": rebuilt.files,
        }
    print(
        f"{len(rebuilt.names)} files, reconstructed by step {trained.steps} ({trained.weights} "
        f"weights), in {folder}; originals and reconstructions: {sheet}"
    )
    return 0


def reject_time_flags(**flags: object) -> None:
    """Raise UserError if a flag for whole recordings and videos is given."""
    for name, value in flags.items():
        if value is not None:
            raise UserError(
                f"--{name} is for recordings and videos that a tokenizer reconstructs: leave it "
                "out."
            )


def tokenize(
    run: str,
    /,
    *,
    out: str,
    data: str | None = None,
    whole: bool = True,
    start: float | None = None,
    seconds: float | None = None,
    weights: Weights = "ema",
    batch_size: int = 32,
    num_workers: int = 1,
) -> int:
    """Encode a folder of files as codes, with their names and the fingerprint of the tokenizer.

    All of a recording or video is encoded, whatever its length.

    Args:
        run: The directory of a tokenizer run, or of a generator run to use all its tokenizers.
        out: The output folder; the tokenizers of a generator get a subfolder each.
        data: A folder or file; by default the data of the run.
        whole: Encode whole recordings and videos; without, one example of each in the length of
            the run, for `--task.tokens` of a generator.
        start: The time in seconds at which recordings and videos begin; by default 0.
        seconds: The length of recordings and videos; by default all of them.
        weights: The EMA weights, or the raw weights as the optimizer left them.
        batch_size: The number of examples that are encoded together; whole recordings and videos
            are encoded one by one.
        num_workers: The number of processes that load data; 0 loads it in this process.
    """
    from tessera.cli.files import TokenizeRequest, tokenize_data
    from tessera.data.pieces import TimeRange
    from tessera.run.load import load_run

    part = TimeRange(start or 0.0, seconds)
    request = TokenizeRequest(Path(out), part, whole, batch_size, num_workers)
    trained = load_run(run, weights)
    print_notices(trained.notices)
    with explain_write_errors(Path(out)):
        for line in tokenize_data(trained, data, request, print_notices):
            print(line)
    return 0


def decode(
    run: str,
    codes: str,
    /,
    *,
    out: str,
    format: str | None = None,
    weights: Weights = "ema",
) -> int:
    """Decode codes to images, videos, audio or meshes, under the names of their originals.

    Args:
        run: The directory of the tokenizer run that wrote the codes, or of a generator run with
            this tokenizer.
        codes: A folder that `tessera tokenize` wrote.
        out: The output folder; for a single example also a file, whose ending selects the format.
        format: The format, such as wav, flac, ogg or mp3 for audio, mp4 or gif for videos, png or
            jpg for images, glb or obj for meshes. By default that of the original if it can be
            written.
        weights: The weights that wrote the codes: EMA, or raw.
    """
    from tessera.cli.files import decode_folder
    from tessera.run.load import load_run

    trained = load_run(run, weights)
    print_notices(trained.notices)
    with explain_write_errors(Path(out)):
        count = decode_folder(trained, Path(codes), Path(out), format)
    print(f"{count} of {count} examples of {codes} decoded in {out}")
    return 0


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
    """Compute the metrics of the raw and the EMA weights, with the protocol.

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
    from tessera.api.generator import RejectedExamples, evaluate_samples, open_loader
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

    commands = suggest_commands(report, modality, columns, group_by)
    if json:
        print(report.as_json(commands, split.as_dict()))
    elif commands:
        print("\n  ".join(["To train on it:", *commands]))
    return 0 if report.usable else 1


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


def demo(
    *,
    medium: Literal["image", "video", "audio", "music", "mesh", "all"] = "image",
    out: str = "runs/demo",
) -> int:
    """Train and sample on synthetic data. Ctrl-C stops it; the same command resumes.

    At the end, it prints the path of a contact sheet of samples and a command to try next.

    Approximate times on two CPU cores: image 8 minutes, video 6 minutes, audio 5 minutes, music 2
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


@contextmanager
def explain_write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(
            f"{path} cannot be written ({reason}). Free some disk space, or give another --out."
        ) from None


@contextmanager
def writing_samples(folder: Path, settings: Json) -> Iterator[None]:
    """Prepare a folder of samples, and write the settings at the end.

    The block may add to the settings. Earlier samples are moved into a subfolder.
    """
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if earlier := move_earlier_samples(folder):
            print(f"The samples that were there before are in {earlier}.")
        remove_partial(folder)
        # First of all, so that the folder is recognised if this process is killed.
        write_json(folder / "settings.json", settings | {"complete": False})
        yield
        write_json(folder / "settings.json", settings)


def write_json(path: Path, content: Json) -> None:
    write_atomically(path, json_module.dumps(content, indent=1) + "\n")


def print_sample_metrics(values: Mapping[str, float]) -> None:
    """Print a row for each value, with that of real examples and that at chance beside it."""
    print(f"{'':24}{'samples':>12}{'real':>12}{'chance':>12}")
    beside = {f"{name}_{kind}" for name in values for kind in ("real", "chance")}
    for name in (name for name in values if name not in beside):
        cells = (values.get(one) for one in (name, f"{name}_real", f"{name}_chance"))
        shown = (f"{'':12}" if cell is None else f"{cell:12.4f}" for cell in cells)
        print(f"{name:24}{''.join(shown)}".rstrip())


def print_notices(lines: list[str]) -> None:
    for line in lines:
        print(printable(line), file=sys.stderr)
