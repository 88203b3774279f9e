"""The commands between files and codes: `tokenize` and `decode`."""

from __future__ import annotations

from pathlib import Path

from tessera.cli.output import Weights, explain_write_errors, print_notices


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
        out: The output folder; for a single example also a file, whose suffix selects the format.
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
