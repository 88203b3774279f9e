"""Compare sampling settings of a trained image generator by quality and variety.

    python bench/sampling.py RUN [--samples 256] [--seed 0] [--out FILE] [--only NAME ...]

Each setting generates images for the same held-out captions with the same seeds, and they are
compared with real images as `tessera evaluate` does. A line of FILE is the result of one setting;
settings that are there are not repeated. The settings differ from those of the run as stated in
their names.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import timing
from comparison import PROJECT

SETTINGS: dict[str, dict[str, dict[str, object]]] = {
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
COLUMNS = ("frechet_lite0", "precision", "recall", "class_accuracy", "caption_R@1")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="the directory of an image generator's run")
    parser.add_argument("--samples", type=int, default=256, help="images for each setting")
    parser.add_argument("--seed", type=int, default=0, help="seed of the samples")
    parser.add_argument("--out", type=Path, help="file of results, one line each")
    parser.add_argument("--only", nargs="+", choices=SETTINGS, help="compare only these settings")
    args = parser.parse_args(arguments)
    timing.set_threads(1)
    sys.path.insert(0, str(PROJECT))
    results = read_results(args.out)
    missing = [name for name in args.only or SETTINGS if name not in results]
    if missing:
        compare_settings(args, missing, results)
    print_table(results)
    return 0


def compare_settings(
    args: argparse.Namespace, names: list[str], results: dict[str, dict[str, float]]
) -> None:
    """Add the results of settings."""
    from tessera.api.generator import Generator, override
    from tessera.data.sample_metrics import Reference
    from tessera.modalities.image.embedding import ImageEmbedder, collate_media
    from tessera.modalities.image.sample_metrics import RealImages, choose_others

    generator, embedder = Generator.load(args.run), ImageEmbedder()
    reference = Reference.choose(generator.data, generator.takes_prompts, args.samples)
    real = RealImages.embed(reference, choose_others(reference), embedder)
    request = generator.request_for_evaluation(reference, args.samples, args.seed)
    config = generator.task.config
    for name in names:
        setting, start_s = SETTINGS[name], time.process_time()
        generated = generator.run(
            replace(
                request,
                sampling=override(config.sampling, setting.get("sampling", {})),
                guidance=override(config.guidance, setting.get("guidance", {})),
            )
        )
        cpu_s = time.process_time() - start_s
        embedded = embedder.embed(collate_media(generated.media, request.prompts))
        results[name] = {**real.compare(embedded), "cpu_s": cpu_s}
        print(f"{name}: {format_row(results[name])}", flush=True)
        if args.out is not None:
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"setting": name, **results[name]}) + "\n")


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
