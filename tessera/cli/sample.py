"""The commands that generate or reconstruct media: `sample` and `speak`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tessera.cli.output import (
    Weights,
    explain_write_errors,
    find_output_file,
    print_notices,
    writing_samples,
)
from tessera.run.directory import (
    Json,
    RunDirectory,
    check_sample_folder,
    next_free_folder,
)
from tessera.run.errors import UserError, printable

if TYPE_CHECKING:
    from tessera.api.files import TimedFiles
    from tessera.data.pieces import TimeRange
    from tessera.engine.task import Media
    from tessera.run.load import TrainedRun


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
    remask: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    retries: int | None = None,
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
        format: The format of the files, such as png, jpg, wav, flac, ogg, mp3, mp4, gif, obj or
            glb. By default that of the original for recordings and videos that a tokenizer
            reconstructs, if it can be written, else png, wav, mp4 or glb.
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
        remask: The fraction of kept tokens that are masked and sampled again after each step.
        top_k: Sample from the k most likely tokens only; 0 uses all.
        top_p: Sample from the most likely tokens with this total probability only.
        retries: How often a sample that does not end within the maximum length is drawn again.
        superres_decoding_steps: The number of decoding steps of the super-resolution run.
    """
    from tessera.api.generator import Generator, drop_none
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
        reject_time_flags(start=start)
        second = load_run(superres, weights) if superres is not None else None
        print_notices(second.notices if second is not None else [])
        generator = Generator(trained, second)
        generated = generator.generate(
            prompt or None,
            count=count,
            seed=seed,
            negative_prompt=negative_prompt,
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
            remask=remask,
            top_k=top_k,
            top_p=top_p,
            retries=retries,
            superres_decoding_steps=superres_decoding_steps,
            data=data,
            seconds=seconds,
            **media_prompts,  # type: ignore[arg-type]
        )
    else:
        is_prompted = bool(prompt or negative_prompt or superres or media_prompts)
        check_no_prompts(trained, prompt, is_prompted)
        from tessera.api.evaluation import reconstruct_samples
        from tessera.cli.files import find_whole_files
        from tessera.data.pieces import TimeRange

        if (whole := find_whole_files(trained, data)) is not None:
            part = TimeRange(start or 0.0, seconds)
            return sample_whole(
                whole, count=count, part=part, format=format, folder=folder, data=data
            )
        reject_time_flags(seconds=seconds, start=start)
        generated = reconstruct_samples(trained, data=data, count=count, seed=seed)
    print_notices(generated.notices)
    suffix = find_suffix(generated.media, format)
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
        sheet = save_samples([Sample(one, name) for one, name in pairs], folder, suffix)
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
    candidates: int = 4,
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
        candidates: How many candidates of each sentence are generated. The one is kept that is most
            like the voice and has the fewest errors; 1 takes less time.
        soundstorm: The directory of a SoundStorm run to use instead of the one in the run.
        seed: The seed of the speech.
        out: The output folder, or a new file that ends in .wav, .flac, .ogg or .mp3; by default a
            new folder among the samples of the run.
        weights: The EMA weights, or the raw weights as the optimizer left them.
    """
    from tessera.api.speaker import Speaker
    from tessera.metrics.text import character_error
    from tessera.modalities.audio.media import Audio
    from tessera.text.characters import normalize_text

    target = find_output_file(out, Audio.suffixes) if out is not None else None
    if target is not None and target.exists():
        raise UserError(f"{out} exists already. Give another --out.")
    speaker = Speaker.load(run, soundstorm, weights)
    print_notices(speaker.trained.notices)
    samples = RunDirectory(run).samples
    folder = Path(out) if out else next_free_folder(samples, "by-hand")
    if target is None:
        check_sample_folder(folder)
    speech = speaker.speak(
        text,
        voice=voice,
        speed=speed,
        temperature=temperature,
        guidance=guidance,
        candidates=candidates,
        seed=seed,
    )
    [audio] = speech.media
    assert isinstance(audio, Audio)
    read = speaker.transcribe(audio)
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
    if target is not None:
        with explain_write_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            file = audio.write(target)
    else:
        with writing_samples(folder, content):
            file = audio.save(folder / "0000.wav")
    print(f"{file}: {audio.seconds:.1f} s")
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


def check_no_prompts(trained: TrainedRun, prompt: tuple[str, ...], is_prompted: bool) -> None:
    """Raise UserError if a run that generates nothing is given prompts, masks or a second run."""
    from tessera.objectives.contrastive import ContrastiveTask

    if isinstance(trained.task, ContrastiveTask) and prompt:
        raise UserError(
            f"A run of {trained.run.recipe} generates nothing for a prompt; it finds music: "
            f"tessera index {trained.directory.path} --data FOLDER --out INDEX, then tessera "
            f"search INDEX {shlex.quote(prompt[0])}."
        )
    if is_prompted:
        raise UserError(
            f"A run of {trained.run.recipe} reconstructs examples (--data) and supports no prompt, "
            "mask or second run: those are for generators, such as images-maskgit."
        )


def find_suffix(media: Sequence[Media], format: str | None) -> str:
    """Return the suffix of a format, empty for the default; raise UserError if the media cannot be
    written in it."""
    if format is None:
        return ""
    from tessera.api.files import OutputNames

    return OutputNames(Path(), getattr(type(media[0]), "suffixes", ()), format).format or ""


def reject_time_flags(**flags: object) -> None:
    """Raise UserError if a flag for whole recordings and videos is given."""
    for name, value in flags.items():
        if value is not None:
            raise UserError(
                f"--{name} is for recordings and videos that a tokenizer reconstructs: leave it "
                "out."
            )
