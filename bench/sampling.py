"""Compare sampling settings of a trained image generator by quality and variety.

    python bench/sampling.py RUN [--samples 256] [--seed 0] [--split train]
        [--data FOLDER] [--out FILE]
        [--only NAME ...] [--also "order=halton decoding_steps=24 scale=1" ...]

Each setting generates images for the same captions with the same seeds, and they are
compared with real images as `tessera evaluate` does. A line of FILE is the result of one setting;
settings that are there are not repeated. The settings differ from those of the run as stated in
their names; `--also` adds others, as fields of `MaskedSampling` and `Guidance`. "reconstructions"
are those of the tokenizer, the best that a generator can reach.

Choose settings on training images (`--split train`), or on the first half of the held-out images
(`--half first`) and report values of the second.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import timing
from comparison import PROJECT

Setting = dict[str, dict[str, object]]
"""Fields of MaskedSampling ("sampling") and of Guidance ("guidance") by name."""
GUIDANCE_FIELDS = ("scale", "start", "end", "ramp", "ramp_power")

SETTINGS: dict[str, Setting] = {
    "run": {},
    "guidance 1": {"guidance": {"scale": 1.0}},
    "guidance 1.5": {"guidance": {"scale": 1.5}},
    "guidance 2": {"guidance": {"scale": 2.0}},
    "guidance 3": {"guidance": {"scale": 3.0}},
    "guidance 3, linear": {"guidance": {"scale": 3.0, "ramp": "linear"}},
    "guidance 3, cosine": {"guidance": {"scale": 3.0, "ramp": "cosine"}},
    "guidance 3, cosine, power 2": {
        "guidance": {"scale": 3.0, "ramp": "cosine", "ramp_power": 2.0}
    },
    "guidance 2 from 0.3": {"guidance": {"scale": 2.0, "start": 0.3}},
    "guidance 2 to 0.7": {"guidance": {"scale": 2.0, "end": 0.7}},
    "choice temperature 0": {"sampling": {"choice_temperature": 0.0}},
    "choice temperature 1": {"sampling": {"choice_temperature": 1.0}},
    "choice temperature 3": {"sampling": {"choice_temperature": 3.0}},
    "choice temperature 6": {"sampling": {"choice_temperature": 6.0}},
    "choice temperature 12": {"sampling": {"choice_temperature": 12.0}},
    "choice temperature 4.5, guidance 2, 20 steps": {
        "sampling": {"choice_temperature": 4.5, "decoding_steps": 20},
        "guidance": {"scale": 2.0},
    },
    "choice temperature 4.5, guidance 1, 20 steps": {
        "sampling": {"choice_temperature": 4.5, "decoding_steps": 20},
        "guidance": {"scale": 1.0},
    },
    "halton": {"sampling": {"order": "halton"}},
    "halton, 20 steps": {"sampling": {"order": "halton", "decoding_steps": 20}},
    "6 steps": {"sampling": {"decoding_steps": 6}},
    "20 steps": {"sampling": {"decoding_steps": 20}},
    "32 steps": {"sampling": {"decoding_steps": 32}},
    "temperature 0.8": {"sampling": {"temperature": 0.8}},
    "temperature 1.2": {"sampling": {"temperature": 1.2}},
    "temperature 1 to 0.5": {"sampling": {"temperature": 1.0, "final_temperature": 0.5}},
    "temperature 1.2 to 0.6": {"sampling": {"temperature": 1.2, "final_temperature": 0.6}},
    "linear schedule": {"sampling": {"schedule": "linear"}},
    "top-p 0.9": {"sampling": {"top_p": 0.9}},
}
RECONSTRUCTIONS = "reconstructions"
COLUMNS = (
    "frechet_lite0",
    "precision",
    "recall",
    "class_accuracy",
    "caption_R@1",
    "prompt_match",
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the directory of an image generator's run")
    parser.add_argument("--samples", type=int, default=256, help="images for each setting")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    parser.add_argument("--out", type=Path, help="file of results, one line each")
    parser.add_argument(
        "--split",
        choices=("held-out", "train"),
        default="held-out",
        help="compare with these images, and use their captions as prompts",
    )
    parser.add_argument(
        "--data",
        type=Path,
        help="compare with images of this folder instead of that of the run, for example with one "
        "of two sets that it was trained on; files with the same names are held out",
    )
    parser.add_argument("--half", choices=("first", "second"), help="compare with half of them")
    parser.add_argument(
        "--only", nargs="*", choices=(*SETTINGS, RECONSTRUCTIONS), help="only these settings"
    )
    parser.add_argument("--also", nargs="+", default=[], help="further settings, as NAME=VALUE ...")
    args = parser.parse_args(arguments)
    settings = SETTINGS | {text: parse_setting(text) for text in args.also}
    timing.set_threads(1)
    sys.path.insert(0, str(PROJECT))
    results = read_results(args.out)
    chosen = [RECONSTRUCTIONS, *SETTINGS] if args.only is None else args.only
    missing = {
        name: settings.get(name, {}) for name in (*chosen, *args.also) if name not in results
    }
    if missing:
        compare_settings(args, missing, results)
    print_table(results)
    return 0


def parse_setting(text: str) -> Setting:
    """Parse fields of MaskedSampling and Guidance, such as "order=halton scale=1"."""
    setting: Setting = {"sampling": {}, "guidance": {}}
    for word in text.split():
        name, value = word.split("=")
        part = "guidance" if name in GUIDANCE_FIELDS else "sampling"
        setting[part][name] = parse_value(value)
    return setting


def parse_value(text: str) -> object:
    """Return a number if a text is one."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def compare_settings(
    args: argparse.Namespace, settings: dict[str, Setting], results: dict[str, dict[str, float]]
) -> None:
    """Add the results of settings."""
    from tessera.api.generator import Generator, override
    from tessera.modalities.image.embedding import ImageEmbedder, collate_media
    from tessera.modalities.image.prompt_match import match_prompts
    from tessera.modalities.image.sample_metrics import RealImages, choose_others

    generator, embedder = Generator.load(args.run), ImageEmbedder()
    reference = choose_reference(generator, args)
    real = RealImages.embed(reference, choose_others(reference), embedder)
    request = generator.request_for_evaluation(reference, args.samples, args.seed)
    config = generator.task.config
    for name, setting in settings.items():
        start_s = time.process_time()
        if name == RECONSTRUCTIONS:
            media, prompts = reconstruct(generator, reference)
        else:
            sampling = override(config.sampling, setting.get("sampling", {}))
            guidance = override(config.guidance, setting.get("guidance", {}))
            changed = replace(request, sampling=sampling, guidance=guidance)
            media, prompts = generator.run(changed).media, request.prompts
        values = {"cpu_s": time.process_time() - start_s}
        values |= real.compare(embedder.embed(collate_media(media, prompts)))
        if generator.data.path is None:  # synthetic
            match = match_prompts(media, prompts)
            values |= {"prompt_match": match.fraction, "prompt_match_real": 1.0}
        results[name] = values
        print(f"{name}: {format_row(values)}", flush=True)
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"setting": name, **values}) + "\n")


def choose_reference(generator: Any, args: argparse.Namespace) -> Any:
    """Return the images to compare with: the first ones of the requested split or half of it."""
    from tessera.data.sample_metrics import Reference, choose_evenly

    data = generator.data if args.data is None else replace(generator.data, path=str(args.data))
    everything = Reference.choose(data, generator.takes_prompts, sys.maxsize)
    if args.split == "train":
        chosen = choose_evenly(everything.train, sys.maxsize, everything.has_classes)
        everything = replace(everything, validation=everything.train, chosen=chosen)
    chosen = everything.chosen
    middle = len(chosen) // 2
    halves = {"first": chosen[:middle], "second": chosen[middle:], None: chosen}
    return replace(everything, chosen=halves[args.half][: args.samples])


def reconstruct(generator: Any, reference: Any) -> tuple[list[Any], list[str]]:
    """Return the tokenizer's reconstructions of the reference images, and their captions."""
    from tessera.data.loader import EvalLoader

    tokenizer = generator.task.tokenizers["tokenizer"]
    loader = EvalLoader(reference.validation, seed=0, batch_size=16)
    media, captions = [], []
    for batch in loader.batches(indices=reference.chosen):
        media += tokenizer.to_media(tokenizer.encode_examples(batch.examples))
        captions += batch.examples.captions
    return media, captions


def read_results(file: Path | None) -> dict[str, dict[str, float]]:
    if file is None or not file.exists():
        return {}
    lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {line.pop("setting"): line for line in lines}


def print_table(results: dict[str, dict[str, float]]) -> None:
    """Print a Markdown table with the values of real images in the first row."""
    first = next(iter(results.values()))
    names = [name for name in COLUMNS if name in first]
    print(f"| setting | {' | '.join(names)} | CPU seconds |")
    print("|---|" + "---|" * (len(names) + 1))
    real = " | ".join(f"{first[f'{name}_real']:.3f}" for name in names)
    print(f"| real images | {real} | |")
    for setting, values in results.items():
        row = " | ".join(f"{values[name]:.3f}" for name in names)
        print(f"| {setting} | {row} | {values['cpu_s']:.0f} |")


def format_row(values: dict[str, float]) -> str:
    shown = [f"{name} {values[name]:.3f}" for name in COLUMNS if name in values]
    return ", ".join([*shown, f"{values['cpu_s']:.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
