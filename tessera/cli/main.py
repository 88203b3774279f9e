"""The command line: one function per verb. Nothing heavy is imported before a verb needs it.

The flags of `train` are the fields of the run's dataclasses (flags.py); the flags of the other
verbs are the parameters of their functions.
"""

from __future__ import annotations

import difflib
import json as json_module
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from tessera.cli.launch import leave
from tessera.engine.signals import Interrupted
from tessera.run.directory import (
    RunDirectory,
    UserError,
    for_samples,
    next_free,
    set_aside,
    write_atomically,
)

USAGE = """Tessera trains and samples discrete-token generative models over your own media.

tessera recipes                                   what can be trained
tessera train RECIPE [--data PATH] [--out RUN]    starts, or goes on where RUN stopped; --help shows its flags
tessera sample RUN [--data PATH] [--out DIR]      what the model makes, as ordinary files
tessera tokenize RUN --data PATH --out DIR        a folder of files as codes
tessera evaluate RUN [--data PATH]                the medium's own numbers, with their protocol
tessera index RUN --data PATH --out INDEX         a folder of music as points, to be searched
tessera search INDEX "slow piano, minor key"      what is nearest to some words, or to a recording
tessera check PATH                                what is in a folder, what is unusable and why
tessera demo                                      from nothing to samples, on built-in data

`tessera VERB --help` tells more."""


# ---- the verbs


def recipes() -> int:
    """What can be trained."""
    from tessera.recipes.registry import RECIPES, recipe_name, recipe_summary

    for recipe in RECIPES:
        print(f"{recipe_name(recipe):24}{recipe_summary(recipe)}")
    print(
        "\ntessera train RECIPE --help shows its flags. Presets: tiny, small (the default), base, paper."
    )
    return 0


def train(*arguments: str) -> int:
    """Starts a run, or goes on where it stopped."""
    if not arguments or arguments[0].startswith("-"):
        raise UserError(
            "Which recipe? tessera train RECIPE [--data PATH] [--out RUN]; `tessera recipes` lists them."
        )
    from tessera.recipes.registry import get_recipe

    recipe = get_recipe(arguments[0])
    from tessera.cli import flags, launch

    asked = flags.parse(recipe, list(arguments[1:]))
    if asked.run.engine.nproc > 1 and not launch.is_launched():
        return launch.launch_processes(asked.run.engine.nproc, ["train", *arguments])
    from tessera.run.train import build_engine, dry_run, print_header, print_summary, unused

    if asked.dry_run:
        dry_run(asked.run)
        return 0
    out = Path(asked.out or f"runs/{asked.run.recipe}")
    folder = RunDirectory(unused(out) if asked.fresh else out)
    print_header(asked.run, folder)
    build_engine(asked.run, folder).run()
    print_summary(asked.run, folder)
    return 0


def sample(
    run: str,
    superres: str | None = None,
    /,
    *,
    prompt: tuple[str, ...] = (),
    negative: str | None = None,
    data: str | None = None,
    mask: str | None = None,
    like: str | None = None,
    prompt_audio: str | None = None,
    seconds: float | None = None,
    count: int = 16,
    seed: int = 0,
    out: str | None = None,
    weights: Literal["ema", "raw"] = "ema",
    decoding_steps: int | None = None,
    decoding_steps_per_level: tuple[int, ...] = (),
    guidance: float | None = None,
    guidance_from: float | None = None,
    guidance_to: float | None = None,
    guidance_ramp: Literal["constant", "linear", "cosine"] | None = None,
    order: Literal["confidence", "critic", "halton"] | None = None,
    schedule: Literal["cosine", "linear", "arccos", "power"] | None = None,
    temperature: float | None = None,
    choice_temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    superres_decoding_steps: int | None = None,
) -> int:
    """What a run's model makes, as ordinary files: a tokenizer rebuilds examples, a generator
    answers prompts.

    What is left out of the settings of a generator (rounds and all below) is as the run's config
    says.

    Args: run: The run's folder. superres: A super-resolution run that makes the pictures larger.
        prompt: What to make. Left out: the captions of held-out examples. negative: What to lead
        away from. data: A folder or one file: for a tokenizer, what to rebuild; for a generator,
        where captions come from, or with a mask the picture to change. Left out: the run's held-out
        examples. like: A recording that says what is to be said, for audio-soundstorm.
        prompt_audio: A recording of the voice in which it is to be said; left out, any. seconds:
        How much of it; left out, all. mask: A picture of the same size, white where it is to be
        drawn anew (in-painting, out-painting, editing). count: How many, for each prompt. seed:
        Another seed is another draw, where there is something to draw. out: Where the files go;
        left out, a new folder under the run's samples. weights: The average of the model, or the
        model as the optimizer left it. rounds: How often the model is asked; more make more careful
        pictures. level_rounds: The same for each level of a sound's symbols; the last number holds
        for all further levels. guidance: How far a prompt leads away from no prompt; 1 is off.
        guidance_from: The share of the rounds after which guidance begins. guidance_to: The share
        of the rounds after which guidance ends. guidance_ramp: How guidance grows within them.
        order: Which symbols are kept first: the surest, those its critic believes, or an even
        spread. schedule: How the number of hidden symbols falls. temperature: Of the draw of each
        symbol; 0 takes the likeliest. noise: Chance in the order by confidence. top_k: Only the
        likeliest so many are drawn from; 0 is all. top_p: Only the likeliest with this probability
        together are drawn from. superres_rounds: How often the super-resolution run is asked.
    """
    from tessera.api.sampling import Order, answered, given
    from tessera.engine.evaluation import save_media
    from tessera.run.load import load_run

    made = load_run(run, weights)
    _tell(made.notices)
    place = for_samples(Path(out) if out else next_free(RunDirectory(run).samples, "by-hand"))
    asked = Order(
        run=run,
        superres=superres,
        prompts=prompt,
        negative=negative,
        data=data,
        mask=mask,
        like=like,
        prompt_audio=prompt_audio,
        seconds=seconds,
        count=count,
        seed=seed,
        sampling=given(
            decoding_steps=decoding_steps,
            decoding_steps_per_level=decoding_steps_per_level or None,
            order=order,
            schedule=schedule,
            temperature=temperature,
            choice_temperature=choice_temperature,
            top_k=top_k,
            top_p=top_p,
        ),
        guidance=given(scale=guidance, start=guidance_from, end=guidance_to, ramp=guidance_ramp),
        superres_decoding_steps=superres_decoding_steps,
    )
    answer = answered(made, asked)
    _tell(answer.notices)
    settings = {
        "run": run,
        "steps": made.steps,
        "weights": weights,
        "data": data,
        "seed": seed,
        "count": len(answer.media),
    }
    with _told_if_not_writable(place):
        place.mkdir(parents=True, exist_ok=True)
        if aside := set_aside(place):
            print(f"The samples that were there before are in {aside}.")
        sheet = save_media(answer.media, place)
        (place / "settings.json").write_text(
            json_module.dumps(settings | answer.settings, indent=1) + "\n"
        )
    print(
        f"{len(answer.media)} samples of step {made.steps} ({weights} weights) in {place}; all on one sheet: {sheet}"
    )
    return 0


def tokenize(
    run: str,
    /,
    *,
    out: str,
    data: str | None = None,
    weights: Literal["ema", "raw"] = "ema",
    batch_size: int = 32,
    num_workers: int = 0,
) -> int:
    """A folder of files as codes, with their names and the tokenizer's fingerprint.

    Args: run: The folder of a tokenizer's run; or of a generator's, for the codes of all tokenizers
        that it stands on. out: Where the codes go; those of a generator's tokenizers in one folder
        each. data: A folder or one file; left out, the data that the run was trained on. weights:
        The average of the model, or the model as the optimizer left it. batch_size: Examples
        encoded together. workers: Processes that read and prepare data.
    """
    from tessera.api.sampling import data_of
    from tessera.data.tokens import TokensInfo, write_tokens
    from tessera.run.load import load_run, tokenizers_of

    made = load_run(run, weights)
    _tell(made.notices)
    source = data_of(made, data).full()
    signatures = {source.name(i): source.signature(i) for i in range(len(source))}
    for part, codec in tokenizers_of(made).items():
        place = Path(out) / part
        about = TokensInfo(
            codec.fingerprint, codec.vocab_size, codec.run.recipe, codec.steps, codec.preprocessing
        )
        with _told_if_not_writable(place):
            batches = codec.codes_of(source, batch_size, num_workers)
            rows = (
                (batch.names, [signatures[name] for name in batch.names], codes)
                for batch, codes in batches
            )
            examples = write_tokens(place, rows, about)
        if not examples:
            raise UserError(
                "Not one example could be read, so there are no codes to write. `tessera check` tells why."
            )
        print(
            f"{examples} of {len(source)} examples as codes of {codec.vocab_size} symbols in {place}"
        )
    return 0


def evaluate(
    run: str,
    /,
    *,
    data: str | None = None,
    out: str | None = None,
    batch_size: int = 16,
    num_workers: int = 0,
    samples: int = 64,
    seed: int = 0,
) -> int:
    """The medium's own numbers, of the live and of the averaged model, with how they came about.

    Args: run: The run's folder. data: A folder or one file, all of which is measured; left out, the
        run's held-out examples. out: A JSON file for numbers and protocol; left out,
        evaluation.json in the run's folder. batch_size: Examples measured together. workers:
        Processes that read and prepare data. samples: Of a generator: for how many held-out prompts
        samples are shown to a judge, where there is one: toy pictures are held against their
        prompts; meshes should end, be whole, and be new. 0: none. seed: Of those samples.
    """
    from tessera import __version__
    from tessera.api.sampling import LeftOut, Order, judged, stream_of
    from tessera.engine.evaluation import evaluate_task
    from tessera.run.load import load_run

    made = load_run(run, "raw")
    _tell(made.notices)
    stream = stream_of(made, data, batch_size, num_workers)
    left_out = LeftOut()
    numbers = {"raw": evaluate_task(made.task, stream, made.dist, left_out.of)}
    _tell(left_out.lines())
    examples = len(stream) - len(left_out.rejected)
    averaged = load_run(run, "ema")
    numbers["ema"] = evaluate_task(averaged.task, stream, averaged.dist)
    protocol = {
        "run": run,
        "recipe": made.run.recipe,
        "steps": made.steps,
        "data": data or "the run's held-out examples",
        "examples": examples,
        "transform": made.run.data.preprocessing(),
        "tessera": __version__,
    }
    verdict = (
        judged(averaged, Order(run=run, count=samples, seed=seed))
        if data is None and samples
        else None
    )
    if verdict is not None:
        numbers["ema"] |= verdict.numbers
        protocol["judged"] = verdict.protocol
    path = Path(out) if out else RunDirectory(run).path / "evaluation.json"
    with _told_if_not_writable(path):
        write_atomically(
            path, json_module.dumps({"numbers": numbers, "protocol": protocol}, indent=1) + "\n"
        )
    print(f"{made.run.recipe} at step {made.steps} on {examples} examples ({protocol['data']})")
    print(f"{'':20}{'raw':>12}{'ema':>12}")
    for name, value in numbers["ema"].items():
        live = f"{numbers['raw'][name]:12.4f}" if name in numbers["raw"] else f"{'':12}"
        print(f"{name:20}{live}{value:12.4f}")
    print(f"The protocol: {path}")
    return 0


def check(
    path: str,
    /,
    *,
    medium: Literal["auto", "image", "video", "audio", "mesh"] = "auto",
    json: bool = False,
) -> int:
    """What is in a folder, what is unusable and why. Opens every file once; exits with 1 if nothing
    is usable.

    Args:
        path: The folder, or one file.
        medium: What to look for; auto takes what most files are.
        json: The report as JSON instead of lines.
    """
    from tessera.modalities import inspect_folder as scan_folder

    try:
        report = scan_folder(path, None if medium == "auto" else medium)
    except UserError as nothing:  # no file at all is nothing usable
        print(
            json_module.dumps({"path": path, "usable": 0, "reason": str(nothing)})
            if json
            else nothing
        )
        return 1
    print(report.as_json() if json else "\n".join(report.lines()))
    return 0 if report.usable else 1


def index(
    run: str,
    /,
    *,
    out: str,
    data: str | None = None,
    weights: Literal["ema", "raw"] = "ema",
    batch_size: int = 16,
    num_workers: int = 0,
) -> int:
    """A folder of music as points that can be searched by words or by music.

    Args:
        run: The folder of a run of music-mulan.
        out: Where the index goes.
        data: A folder or one file; left out, the data that the run was trained on.
        weights: The average of the model, or the model as the optimizer left it.
        batch_size: Examples looked at together.
        workers: Processes that read and prepare data.
    """
    from tessera.api.search import make_index

    with _told_if_not_writable(Path(out)):
        _tell(make_index(run, data, out, weights, batch_size, num_workers))
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
    """What is nearest in an index: to words, or to the music in a file.

    Args:
        index: What `tessera index` wrote.
        query: Words; or the path of a recording.
        top: How many to tell.
        how: exact compares with all; faiss does it with the library of that name.
        json: Print JSON instead of a table.
    """
    from tessera.api.search import searched

    print(searched(index, query, top, how, as_json_text=json))
    return 0


def demo(
    *,
    medium: Literal["image", "video", "sound", "music", "mesh", "all"] = "image",
    out: str = "runs/demo",
) -> int:
    """From nothing to samples, on built-in examples. Ctrl-C stops it; the same command goes on.

    Args: medium: image (a tokenizer, then text to image), video or mesh (a tokenizer), sound (a
        codec), music (an embedding of music and text), or all of them, one after the other. out:
        Where the runs go.
    """
    demos = {
        "image": _demo_of_images,
        "video": _demo_of_videos,
        "sound": _demo_of_sounds,
        "music": _demo_of_music,
        "mesh": _demo_of_meshes,
    }
    for name in demos if medium == "all" else (medium,):
        demos[name](out)
    return 0


def _demo_of_images(out: str) -> None:
    print(
        "An image tokenizer learns from 2,000 built-in pictures to write pictures as symbols, and to read them back."
    )
    train("images-vqgan", "--steps", "1500", "--out", f"{out}/images-vqgan")
    print("\nA transformer learns from captions which symbols belong together: text to image.")
    train("images-maskgit", "--tokenizer", f"{out}/images-vqgan", "--out", f"{out}/images-maskgit")
    print(
        "\nPictures for captions that it has never seen, held against them by a judge that reads shapes and colours:"
    )
    evaluate(f"{out}/images-maskgit")


def _demo_of_videos(out: str) -> None:
    print(
        "A video tokenizer learns from 2,000 built-in clips to write motion as symbols, and to read it back."
    )
    train("videos-magvit2", "--steps", "600", "--out", f"{out}/videos-magvit2")


def _demo_of_sounds(out: str) -> None:
    print(
        "A codec learns from 2,000 built-in voices and instruments to write sound as symbols, and to play it back."
    )
    train("audio-codec", "--out", f"{out}/audio-codec")


def _demo_of_music(out: str) -> None:
    print(
        "Two networks learn from 2,048 built-in tunes which words belong to which music: it can then be searched."
    )
    train("music-mulan", "--out", f"{out}/music-mulan")


def _demo_of_meshes(out: str) -> None:
    print(
        "A mesh tokenizer learns from 2,000 built-in pieces of furniture to write triangles as symbols, and to read them."
    )
    train("meshes-autoencoder", "--steps", "1000", "--out", f"{out}/meshes-autoencoder")


VERBS = {
    verb.__name__: verb
    for verb in (recipes, train, sample, tokenize, evaluate, index, search, check, demo)
}


# ---- what they share


def main(arguments: list[str] | None = None) -> None:
    """Carries out one command and exits: 0 well, 1 nothing usable or failed, 2 refused, 130 and 143
    stopped by a signal."""
    # Until a run takes over, SIGTERM ends the process at once and says so in its exit code.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        code = _carry_out(sys.argv[1:] if arguments is None else arguments)
    except (UserError, Interrupted) as ended:
        print(f"tessera: {ended}", file=sys.stderr)
        code = ended.exit_code
    except KeyboardInterrupt:
        print("tessera: stopped", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # somebody piped us into `head`
        code = 0
    leave(code)


def _carry_out(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(USAGE)
        return 0
    if arguments[0] == "--version":
        from tessera import __version__

        print(__version__)
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in VERBS:
        near = difflib.get_close_matches(name, VERBS, n=1, cutoff=0.4)
        raise UserError(
            f"There is no verb {name!r}"
            + (f": did you mean {near[0]!r}?" if near else f".\n\n{USAGE}")
        )
    if name == "train":
        return train(*rest)
    if name == "recipes" and not rest:
        return recipes()
    import tyro

    return tyro.cli(VERBS[name], prog=f"tessera {name}", args=rest)


@contextmanager
def _told_if_not_writable(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{place} cannot be written ({error.strerror or error}). Make room, or give another --out."
        ) from None


def _tell(lines: list[str]) -> None:
    for line in lines:
        print(line, file=sys.stderr)
