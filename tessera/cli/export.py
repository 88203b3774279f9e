"""`tessera export`: write what using a run needs, for other people or other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def export(run: str, /, *, out: str, format: Literal["safetensors", "onnx"] = "safetensors") -> int:
    """Write the model of a run without what only training needs.

    The folder has config.json, the EMA weights, the tokenizers of a generator, and a model card
    with the metrics of the run; `from_pretrained` and all commands load it. With `--format onnx`,
    the encoder and the decoder of a tokenizer are written for other programs.

    Args:
        run: The run directory.
        out: The new folder.
        format: safetensors for Tessera, or onnx: encoder.onnx and decoder.onnx, compared with the
            model in onnxruntime before they are kept.
    """
    from tessera.run.export import export_run
    from tessera.run.load import load_run

    trained = load_run(run)
    for line in trained.notices:
        print(line)
    if format == "onnx":
        from tessera.run.export_onnx import export_onnx

        for line in export_onnx(trained, Path(out)):
            print(line)
    else:
        export_run(trained, Path(out))
    size = sum(file.stat().st_size for file in Path(out).rglob("*") if file.is_file())
    print(f"{trained.run.recipe} at step {trained.steps:,} in {out} ({size / 1e6:.1f} MB)")
    return 0
