"""The pages say what is so: their commands work, their examples run, and what they point at is there.

What is done with a block of code depends on its language:

    sh       every line is a `tessera` command and is carried out as it stands
    python   is run, in a namespace of its own
    console  lines that begin with "$ " are commands too long or too large to run here: each is parsed, flag by flag
    py       is an excerpt; its first line names the file in which the rest must stand
    text     is only looked at by people; but a picture of a run's folder, `runs/first/`, is held against the run that the
             page's own examples made

The blocks of one page run in order in one folder, which holds a few `pictures`, as a reader's would.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from math import log2
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
import tyro

from tessera import flags
from tessera.cli import VERBS
from tessera.config import MAY_DIFFER
from tessera.data.toys.images import ToyImages, draw
from tessera.data.toys.meshes import imagine as imagine_mesh
from tessera.data.toys.sounds import ToySounds
from tessera.data.toys.videos import ToyVideos, film
from tessera.media.sound import Sound
from tessera.models.masked_transformer import MaskedTransformerConfig
from tessera.models.patch_discriminator import PatchDiscriminatorConfig
from tessera.nn.quantize.features import features
from tessera.recipes import RECIPES, name_of, named
from tessera.recipes.images import images_maskgit, images_maskgit_superres, images_vqgan
from tessera.recipes.meshes import meshes_autoencoder, meshes_transformer
from tessera.recipes.music import music_mulan
from tessera.recipes.presets import Preset
from tessera.recipes.sounds import sounds_codec, sounds_semantic, sounds_soundstorm
from tessera.recipes.videos import videos_magvit2
from tessera.tasks.videos import VideoJudges
from tessera.trainers import (
    MaskGitTrainer,
    MuLaNTrainer,
    SoundStormTrainer,
    Trainer,
    VideoTokenizerTrainer,
    VQGanVAETrainer,
)
from tests.command import tessera

ROOT = Path(__file__).resolve().parent.parent
RUN = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
"""The pages whose examples are run."""
PAGES = [*RUN, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "bench/README.md"]
IMAGES, MASKGIT, SUPERRES = (ROOT / f"docs/images-{name}.md" for name in ("vqgan", "maskgit", "maskgit-superres"))
VIDEOS, MESHES = ROOT / "docs/videos-magvit2.md", ROOT / "docs/meshes-autoencoder.md"
MUSIC = ROOT / "docs/music-mulan.md"
CODEC, SEMANTIC, SOUNDSTORM = (ROOT / f"docs/sounds-{name}.md" for name in ("codec", "semantic", "soundstorm"))
LANGUAGES = {"sh", "python", "console", "py", "text"}


def of_the_project(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=of_the_project)
every_run_page = pytest.mark.parametrize("page", RUN, ids=of_the_project)


# ------------------------------------------------------------------------------------------------- reading the pages


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    """Where it begins in its page."""
    language: str
    text: str

    def __str__(self) -> str:
        return f"{of_the_project(self.page)}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """The words of each command; lines that end in a backslash are one with the next."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            if words := shlex.split(line, comments=True):
                yield words


FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@functools.cache
def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, found.start()) + 1, found[1].strip(), found[2]) for found in FENCE.finditer(text)]


@functools.cache
def prose(page: Path) -> str:
    """A page without its blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def spans(page: Path) -> list[str]:
    """What stands between backticks in running text; it may go over the end of a line."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def blocks_in(language: str) -> list[Block]:
    found = [block for page in PAGES for block in blocks(page) if block.language == language]
    assert found, f"no page has a block marked {language}, so nothing was tested"
    return found


def table(page: Path, first_heading: str) -> list[list[str]]:
    """The rows of the table whose first heading this is, without the line below the headings."""
    lines = iter(page.read_text(encoding="utf-8").splitlines())
    rows = [next(line for line in lines if line.startswith(f"| {first_heading} |"))]
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append(line)
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in (rows[0], *rows[2:])]


def listed(found: list[str]) -> str:
    return "".join(f"\n  {one}" for one in found)


# -------------------------------------------------------------------------------------------------- running examples


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder such as a reader has: nothing in it but `pictures`, some with a caption, `clips`, `meshes` and `recordings`."""
    pictures = tmp_path / "pictures"
    toys = ToyImages(count=40, size=64, seed=7)
    for number in range(len(toys)):
        scene, stem = toys.scene(number), "one" if number == 0 else f"toys/{number:02d}"
        draw(scene, 64).save(pictures / stem)
        if number % 2:
            (pictures / f"{stem}.txt").write_text(scene.caption, encoding="utf-8")
    films = ToyVideos(count=8, size=32, frames=9, seed=7)
    for number in range(len(films)):
        film(films.play(number), 32, 9).save(tmp_path / f"clips/{number:02d}")
    for number in range(8):
        toy = imagine_mesh(7, number)
        toy.mesh.save(tmp_path / f"meshes/{number:02d}")
        (tmp_path / f"meshes/{number:02d}.obj").unlink()
        (tmp_path / f"meshes/{number:02d}.txt").write_text(toy.caption, encoding="utf-8")
    spoken = ToySounds(8, samples=9600, rate_hz=16_000, seed=7)
    (tmp_path / "recordings").mkdir()
    for number in range(8):
        Sound(spoken.item(number, np.random.default_rng(0)).samples, 16_000).write(tmp_path / f"recordings/{number:02d}.wav")
        (tmp_path / f"recordings/{number:02d}.txt").write_text(spoken.caption(number), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@every_run_page
def test_the_examples_of_a_page_work_as_they_stand_and_leave_what_it_says(page: Path, reader: Path) -> None:
    for block in blocks(page):
        if block.language == "sh":
            for program, *arguments in block.commands():
                assert program == "tessera", f"{block}: {program} does not belong in a block that is run; mark it console"
                said = tessera(*arguments)
                assert said.code == 0, f"{block}: tessera {shlex.join(arguments)}\n{said.out}\n{said.err}"
        elif block.language == "python":
            with redirect_stdout(StringIO()):
                exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
    absent = [
        f"{picture}: there is no {name}" for picture in drawn_folders(page) for name in picture.names if not name.exists()
    ]
    assert not absent, listed(absent)


@dataclass(frozen=True)
class DrawnFolder:
    block: Block
    names: list[Path]

    def __str__(self) -> str:
        return str(self.block)


def drawn_folders(page: Path) -> list[DrawnFolder]:
    """The pictures of run folders on a page that makes such runs; design.md only tells of them."""
    if not any(block.language == "sh" for block in blocks(page)):
        return []
    found = []
    for block in blocks(page):
        folder, *lines = block.text.splitlines()
        if block.language == "text" and re.fullmatch(r"runs/[\w-]+/", folder):
            found.append(DrawnFolder(block, [Path(folder, line.split()[0]) for line in lines]))
    return found


@pytest.mark.parametrize("page", [ROOT / "README.md", MASKGIT], ids=of_the_project)
def test_a_page_that_draws_a_runs_folder_is_held_to_it(page: Path) -> None:
    [picture] = drawn_folders(page)
    assert len(picture.names) >= 5


# ------------------------------------------------------------------------------------------------- parsing the others


@pytest.mark.parametrize("block", blocks_in("console"), ids=str)
def test_commands_that_are_not_run_are_at_least_right(block: Block) -> None:
    commands = list(block.commands())
    assert commands, f"{block} has no line that begins with '$ '"
    for words in commands:
        while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        assert words[0] in CHECKS, f"{block}: nobody knows how to check {words[0]!r}; say so in CHECKS"
        CHECKS[words[0]](words[1:])


def check_tessera(arguments: list[str]) -> None:
    """Parses the whole command, and stops there."""
    verb, *rest = arguments
    assert verb in VERBS, f"there is no verb {verb!r}"
    if verb == "train":
        flags.parse(named(rest[0]), rest[1:])
    else:
        tyro.cli(still(VERBS[verb]), args=rest)


def still(verb: Callable[..., int]) -> Callable[..., int]:
    """A verb with its parameters that does nothing."""

    @functools.wraps(verb)
    def nothing(*_: Any, **__: Any) -> int:
        return 0

    return nothing


def check_torchrun(arguments: list[str]) -> None:
    """Its own flags are parsed by itself, and what follows `-m tessera` is our command."""
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(arguments)
    assert parsed.module and parsed.training_script == "tessera"
    check_tessera(parsed.training_script_args)


def check_make(arguments: list[str]) -> None:
    targets = re.findall(r"^([a-z]+):", ROOT.joinpath("Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert [word for word in arguments if "=" not in word and word not in targets] == []


def check_pip(arguments: list[str]) -> None:
    install, place = arguments
    assert install == "install"
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", place)
    assert extras, f"{place} is not this project"
    assert set(filter(None, (extras[1] or "").split(","))) <= project["optional-dependencies"].keys()


def check_script(arguments: list[str]) -> None:
    assert ROOT.joinpath(arguments[0]).is_file(), f"there is no {arguments[0]}"


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "tessera": check_tessera,
    "torchrun": check_torchrun,
    "make": check_make,
    "pip": check_pip,
    "python": check_script,
    "bash": check_script,
}


@pytest.mark.parametrize(
    "wrong",
    [
        "tessera trian images-vqgan",
        "tessera train images-vqgan --stesp 3",
        "tessera train images-vqgan --preset huge",
        "tessera train images-maskgit --critic both",
        "tessera train images-maskgit --smaller runs/mine",
        "tessera sample",
        "tessera sample runs/mine --prompt --rounds many",
        "tessera tokenize runs/mine",
        "tessera check pictures --fast",
        "torchrun --nproc-per-node 2 -m tessera train images-vqgan --stesp 3",
        "torchrun --nproc-per-nood 2 -m tessera train images-vqgan",
        "make dmeo",
        "pip install .[everything]",
        "python examples/emojis.py",
    ],
)
def test_a_wrong_command_in_a_page_would_be_noticed(wrong: str) -> None:
    program, *arguments = shlex.split(wrong)
    with pytest.raises((AssertionError, SystemExit)), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        CHECKS[program](arguments)


# -------------------------------------------------------------------------------------------------- what is pointed at


@every_page
def test_every_block_says_what_it_is(page: Path) -> None:
    strange = [f"{block}: {block.language!r}" for block in blocks(page) if block.language not in LANGUAGES]
    assert not strange, f"a block is marked {', '.join(sorted(LANGUAGES))}:{listed(strange)}"


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^()\s]+)\)", prose(page))
    dead = [link for link in links if "://" not in link and not is_there(page, link)]
    assert not dead, f"{of_the_project(page)} points at what is not there:{listed(dead)}"


def is_there(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """Headings, as links spell them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_files_and_tests_that_a_page_names_exist(page: Path) -> None:
    known = {
        name
        for file in ROOT.joinpath("tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    missing = [span for span in spans(page) if re.fullmatch(r"test_\w+", span) and span not in known]
    missing += [
        span
        for span in spans(page)
        if re.fullmatch(r"(?:tessera|tests|bench|examples|docs)/[\w./-]+", span) and not ROOT.joinpath(span).exists()
    ]
    assert not missing, listed(missing)


@pytest.mark.parametrize("block", blocks_in("py"), ids=str)
def test_an_excerpt_stands_in_the_file_that_it_names(block: Block) -> None:
    first, rest = block.text.split("\n", 1)
    source = ROOT.joinpath(first.removeprefix("# ")).read_text(encoding="utf-8")
    assert textwrap.dedent(rest).strip(), f"{block} is empty"
    assert rest in source, f"{block} is no longer what stands in {first.removeprefix('# ')}"


def test_every_part_of_the_package_has_its_line_in_the_layout() -> None:
    [layout] = [block.text for block in blocks(ROOT / "docs/design.md") if block.text.startswith("tessera/\n")]
    package = ROOT / "tessera"
    top = {path.name for path in package.iterdir() if path.suffix == ".py"}
    top |= {path.parent.name for path in package.glob("*/__init__.py")}
    inner = {path.name for unit in ("engine", "data") for path in package.joinpath(unit).glob("[!_]*.py")}
    drawn = set(re.findall(r"[\w]+(?:\.py)?", layout))
    assert top | inner <= drawn, f"docs/design.md does not draw {sorted((top | inner) - drawn)}"
    gone = [name for name in drawn if name.endswith(".py") and not any(package.rglob(name))]
    assert not gone, f"docs/design.md draws what is not there: {gone}"


# ---------------------------------------------------------------------------------------------- flags and other settings


CHOICES = [
    *((images_vqgan, f"--quantizer {quantizer} --adversary on --perceptual on") for quantizer in ("fsq", "lfq", "vq")),
    *(
        (recipe, choices)
        for recipe in (images_maskgit, images_maskgit_superres)
        for choices in ("", "--critic head", "--critic own")
    ),
    *((videos_magvit2, f"--quantizer {quantizer} --adversary on --perceptual on") for quantizer in ("fsq", "lfq")),
    *((meshes_autoencoder, f"--quantizer {quantizer}") for quantizer in ("lfq", "vq", "fsq")),
    (meshes_transformer, ""),
    (music_mulan, ""),
    *((sounds_codec, f"--quantizer {quantizer} --adversary on") for quantizer in ("vq", "fsq", "lfq")),
    *((sounds_semantic, f"--features {features}") for features in ("mel", "a-folder")),
    *((sounds_soundstorm, f"--critic {critic}") for critic in ("own", "head")),
    (images_maskgit, "--text an-encoder"),
]
"""Every recipe with every choice that brings flags of its own."""


def test_the_flags_of_every_recipe_are_looked_at() -> None:
    assert {recipe for recipe, _ in CHOICES} == set(RECIPES)


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Every flag that any verb, and `train` with any choice of parts, tells of in its help."""
    helps = StringIO()
    with redirect_stdout(helps):
        for recipe, choices in CHOICES:
            with pytest.raises(SystemExit):
                flags.parse(recipe, [*choices.split(), "--help"])
        for name in VERBS.keys() - {"train"}:
            with pytest.raises(SystemExit):
                tyro.cli(still(VERBS[name]), args=["--help"])
    return set(re.findall(r"--[a-z][\w.-]*", helps.getvalue())) | {"--data", "--version"}


@every_run_page
def test_flags_that_a_page_names_exist(page: Path, known_flags: set[str]) -> None:
    assert {"--steps", "--task.adversary.starts", "--weights", "--task.model.text.download", "--smaller"} <= known_flags
    ours = [span for span in spans(page) if span.startswith(("--", "tessera "))]
    unknown = [flag for span in ours for flag in re.findall(r"(?<!\S)--[\w.-]+", span) if flag not in known_flags]
    assert not unknown, listed(unknown)


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_table_of_presets_is_what_the_recipe_makes(preset: Preset) -> None:
    rows = {row[0]: row for row in table(IMAGES, "preset")}
    run = images_vqgan(preset)
    with torch.device("meta"):  # sizes without the memory
        model = run.task.model.build()
    grid = run.data.size // run.task.model.stride
    made = [
        f"`{preset}`", f"{run.data.size} x {run.data.size}", f"{grid} x {grid}", f"{model.vocabulary:,}",
        f"{sum(parameter.numel() for parameter in model.parameters()):,}", f"{run.engine.steps:,}",
        f"{run.engine.batch_size}", f"{run.task.optimizer.rate:g}", "off" if run.task.adversary is None else "on",
    ]  # fmt: skip
    assert rows[f"`{preset}`"] == made, f"in docs/images-vqgan.md the row is to be:\n| {' | '.join(made)} |"


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_table_of_generators_is_what_the_recipe_makes(preset: Preset) -> None:
    rows = {row[0]: row for row in table(MASKGIT, "preset")}
    run, symbols = images_maskgit(preset), symbols_of(preset)
    with torch.device("meta"):
        task = run.task.build(symbols)
    made = [
        f"`{preset}`", f"{run.data.size} x {run.data.size}",
        f"{' x '.join(map(str, symbols.grid))} of {symbols.vocabulary:,}", f"{task.layout.count}",
        f"{sum(parameter.numel() for parameter in task.model.parameters()):,}", f"{run.engine.steps:,}",
        f"{run.engine.batch_size}", run.task.optimizer.kind, f"{run.task.optimizer.rate:g}", f"{run.task.sampling.rounds}",
    ]  # fmt: skip
    assert rows[f"`{preset}`"] == made, f"in docs/images-maskgit.md the row is to be:\n| {' | '.join(made)} |"


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_table_of_clips_is_what_the_recipe_makes(preset: Preset) -> None:
    rows = {row[0]: row for row in table(VIDEOS, "preset")}
    run = videos_magvit2(preset)
    with torch.device("meta"):
        model = run.task.model.build()
    made = [
        f"`{preset}`", f"{run.data.frames} x {run.data.size} x {run.data.size}",
        " x ".join(map(str, run.task.model.grid(run.data))), f"{model.vocabulary:,}",
        f"{sum(parameter.numel() for parameter in model.parameters()):,}", f"{run.engine.steps:,}",
        f"{run.engine.batch_size}", f"{run.task.optimizer.rate:g}", "off" if run.task.adversary is None else "on",
    ]  # fmt: skip
    assert rows[f"`{preset}`"] == made, f"in docs/videos-magvit2.md the row is to be:\n| {' | '.join(made)} |"


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_table_of_meshes_is_what_the_recipe_makes(preset: Preset) -> None:
    rows = {row[0]: row for row in table(MESHES, "preset")}
    run = meshes_autoencoder(preset)
    model = run.task.model.build()
    made = [
        f"`{preset}`", f"{run.data.bins}", f"{run.data.most_faces}", f"{model.levels} of {model.vocabulary:,}",
        f"{sum(parameter.numel() for parameter in model.parameters()):,}", f"{run.engine.steps:,}",
        f"{run.engine.batch_size}", f"{run.task.optimizer.rate:g}",
    ]  # fmt: skip
    assert rows[f"`{preset}`"] == made, f"in docs/meshes-autoencoder.md the row is to be:\n| {' | '.join(made)} |"


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_table_of_mesh_transformers_is_what_the_recipe_makes(preset: Preset) -> None:
    rows = {row[0]: row for row in table(ROOT / "docs/meshes-transformer.md", "preset")}
    run, tokenizer = meshes_transformer(preset), meshes_autoencoder(preset).task.model
    config, quantizer = run.task.model, tokenizer.quantizer
    with torch.device("meta"):
        model = config.build(quantizer.quantizer.codebook_size, tokenizer.corners, quantizer.levels)
    made = [
        f"`{preset}`", f"{config.longest}", f"{config.width}", f"{config.depth}", f"{config.fine_width} x {config.fine_depth}",
        f"{sum(parameter.numel() for parameter in model.parameters()):,}", f"{run.engine.steps:,}",
        f"{run.engine.batch_size}", run.task.optimizer.kind, f"{run.task.optimizer.rate:g}",
    ]  # fmt: skip
    assert rows[f"`{preset}`"] == made, f"in docs/meshes-transformer.md the row is to be:\n| {' | '.join(made)} |"


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_table_of_music_is_what_the_recipe_makes(preset: Preset) -> None:
    rows = {row[0]: row for row in table(MUSIC, "preset")}
    run = music_mulan(preset)
    audio = run.task.model.audio
    with torch.device("meta"):
        model = run.task.model.build()
    times = math.ceil(math.ceil(run.data.length / audio.hop) / audio.patch[1])
    made = [
        f"`{preset}`", f"{run.data.seconds:g} s at {run.data.rate_hz / 1000:g} kHz", f"{audio.bands}",
        f"{audio.bands // audio.patch[0]} x {times}", f"{audio.width}", f"{audio.depth}",
        f"{sum(parameter.numel() for parameter in model.parameters()):,}", f"{run.engine.steps:,}",
        f"{run.engine.batch_size}", run.task.optimizer.kind, f"{run.task.optimizer.rate:g}",
    ]  # fmt: skip
    assert rows[f"`{preset}`"] == made, f"in docs/music-mulan.md the row is to be:\n| {' | '.join(made)} |"


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_table_of_codecs_is_what_the_recipe_makes(preset: Preset) -> None:
    rows = {row[0]: row for row in table(CODEC, "preset")}
    run = sounds_codec(preset)
    with torch.device("meta"):
        model = run.task.model.build()
    frames_hz = run.data.rate_hz / model.hop
    made = [
        f"`{preset}`", clip_of(run), f"{frames_hz:g}", f"{model.levels} of {model.vocabulary:,}",
        f"{model.levels * log2(model.vocabulary) * frames_hz / 1000:g}",
        f"{sum(parameter.numel() for parameter in model.parameters()):,}", f"{run.engine.steps:,}",
        f"{run.engine.batch_size}", f"{run.task.optimizer.rate:g}", "off" if run.task.adversary is None else "on",
    ]  # fmt: skip
    assert rows[f"`{preset}`"] == made, f"in docs/sounds-codec.md the row is to be:\n| {' | '.join(made)} |"


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_table_of_semantic_symbols_is_what_the_recipe_makes(preset: Preset) -> None:
    rows = {row[0]: row for row in table(SEMANTIC, "preset")}
    run = sounds_semantic(preset)
    model = run.task.model
    symbols_hz = model.rate_hz / model.hop
    made = [
        f"`{preset}`", clip_of(run), f"{symbols_hz:g}", f"{model.vocabulary:,}", f"{symbols_hz * log2(model.vocabulary):g}",
        f"{run.engine.steps:,}", f"{run.engine.batch_size}", f"{run.task.optimizer.rate:g}",
    ]  # fmt: skip
    assert rows[f"`{preset}`"] == made, f"in docs/sounds-semantic.md the row is to be:\n| {' | '.join(made)} |"


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_table_of_soundstorms_is_what_the_recipe_makes(preset: Preset) -> None:
    rows = {row[0]: row for row in table(SOUNDSTORM, "preset")}
    run = sounds_soundstorm(preset)
    acoustic, said = (symbols_of_sounds(recipe(preset), run.data) for recipe in (sounds_codec, sounds_semantic))
    with torch.device("meta"):
        task = run.task.build(acoustic, semantic=said)
    first, finer = run.task.sampling.level_rounds
    made = [
        f"`{preset}`", clip_of(run), f"{acoustic.grid[0]} x {acoustic.levels}", f"{said.grid[0]} of {said.vocabulary:,}",
        f"{run.task.model.width}", f"{run.task.model.depth}",
        f"{sum(parameter.numel() for parameter in task.model.parameters()):,}", f"{run.engine.steps:,}",
        f"{run.engine.batch_size}", run.task.optimizer.kind, f"{run.task.optimizer.rate:g}",
        f"{first} + {finer * (acoustic.levels - 1)}",
    ]  # fmt: skip
    assert rows[f"`{preset}`"] == made, f"in docs/sounds-soundstorm.md the row is to be:\n| {' | '.join(made)} |"


def clip_of(run: Any) -> str:
    return f"{run.data.seconds:g} s at {run.data.rate_hz / 1000:g} kHz"


def symbols_of_sounds(run: Any, data: Any) -> Any:
    """All that SoundStorm's size depends on of a tokenizer; what is known of a cascade's symbols is nothing."""
    model = run.task.model.build()
    every = torch.arange(model.vocabulary)
    known = features(model.quantizer.values(every, torch.float32).detach()) if model.levels == 1 else None
    return SimpleNamespace(
        network=torch.nn.Identity(), vocabulary=model.vocabulary, grid=run.task.model.grid(data), levels=model.levels,
        features=known, seconds=model.hop / run.data.rate_hz,
    )  # fmt: skip


def symbols_of(preset: Preset) -> Any:
    """All that a generator's size depends on of a tokenizer: its quantizer and its grid."""
    run = images_vqgan(preset)
    model = run.task.model
    quantizer = model.quantizer.build(model.widths[-1])
    known = features(quantizer.values(torch.arange(quantizer.vocabulary), torch.float32).detach())
    return SimpleNamespace(
        network=torch.nn.Identity(),
        vocabulary=quantizer.vocabulary,
        grid=model.grid(run.data),
        levels=1,
        features=known,
        seconds=None,
    )


@pytest.mark.parametrize("preset", get_args(Preset))
def test_the_sizes_of_super_resolution_are_those_of_its_presets(preset: Preset) -> None:
    [pictures] = [row[1] for row in table(SUPERRES, "preset") if row[0] == f"`{preset}`"]
    size = images_maskgit_superres(preset).data.size
    assert pictures == f"{size} x {size}"


def test_every_recipe_has_its_page() -> None:
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} == {name_of(recipe) for recipe in RECIPES} | {"design"}


DOORS = [
    (IMAGES, VQGanVAETrainer), (MASKGIT, MaskGitTrainer), (VIDEOS, VideoTokenizerTrainer), (MUSIC, MuLaNTrainer),
    (SOUNDSTORM, SoundStormTrainer),
]  # fmt: skip


@pytest.mark.parametrize(("page", "door"), DOORS, ids=lambda door: getattr(door, "stem", ""))
def test_the_table_of_a_front_door_is_its_signature(page: Path, door: type[Trainer]) -> None:
    _, *rows = table(page, "parameter")
    told = {name.strip("`"): default.strip("`") for name, default, _ in rows}
    real = {
        name: "required" if parameter.default is inspect.Parameter.empty else repr(parameter.default)
        for name, parameter in inspect.signature(door).parameters.items()
    }
    configs = {repr(PatchDiscriminatorConfig()), repr(MaskedTransformerConfig()), repr(VideoJudges())}
    assert told == real | {name: "a config" for name, default in real.items() if default in configs}


def test_the_settings_that_may_change_are_all_told() -> None:
    """Those of every recipe on the first recipe's page, and those of runs that stand on others where such a run is told of."""
    sentences = [
        line for page in (IMAGES, MASKGIT) for line in re.split(r"\n\n|(?<=\.)\s", prose(page)) if "may differ" in line
    ]
    told = {name for sentence in sentences for name in re.findall(r"`--([\w.-]+)`", sentence)}
    assert len(sentences) == 2
    assert told == {name.removeprefix("engine.").replace("_", "-") for name in MAY_DIFFER}
