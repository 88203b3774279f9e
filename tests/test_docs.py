"""The pages say what is so: their commands work, their examples run, and what they point at is
there.

What is done with a block of code depends on its language:

    sh       every line is a `tessera` command and is carried out as it stands
    python   is run, in a namespace of its own
    console  lines that begin with "$ " are commands too long or too large to run here: each is parsed, flag by flag
    py       is an excerpt; its first line names the file in which the rest must stand
    text     is only looked at by people; but a picture of a run's folder, `runs/first/`, is held against the run that the
             page's own examples made

The blocks of one page run in order in one folder, which holds a few `pictures`, as a reader's
would.
"""

from __future__ import annotations

import functools
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro

from tessera.cli import flags
from tessera.cli.main import VERBS
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.recipes import audio_codec, audio_semantic, audio_soundstorm
from tessera.modalities.audio.synthetic import SyntheticAudio
from tessera.modalities.image.recipes import images_maskgit, images_maskgit_superres, images_vqgan
from tessera.modalities.image.synthetic import SyntheticImages, draw
from tessera.modalities.mesh.recipes import meshes_autoencoder, meshes_transformer
from tessera.modalities.mesh.synthetic import generate_object
from tessera.modalities.music.recipes import music_mulan
from tessera.modalities.video.recipes import videos_magvit2
from tessera.modalities.video.synthetic import SyntheticVideos, draw_video
from tessera.recipes.registry import RECIPES, get_recipe, recipe_name
from tests.cli_runner import tessera
from tests.pages import (
    LANGUAGES,
    PAGES,
    ROOT,
    RUN,
    Block,
    blocks,
    blocks_in,
    of_the_project,
    page_of,
    prose,
    spans,
)

every_page = pytest.mark.parametrize("page", PAGES, ids=of_the_project)
every_run_page = pytest.mark.parametrize("page", RUN, ids=of_the_project)


def listed(found: list[str]) -> str:
    return "".join(f"\n  {one}" for one in found)


# -------------------------------------------------------------------------------------------------- running examples


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder such as a reader has: nothing in it but `pictures`, some with a caption, `clips`,
    `meshes` and `recordings`."""
    pictures = tmp_path / "pictures"
    num_synthetic = SyntheticImages(count=40, size=64, seed=7)
    for number in range(len(num_synthetic)):
        scene, stem = num_synthetic.scene(number), "one" if number == 0 else f"toys/{number:02d}"
        draw(scene, 64).save(pictures / stem)
        if number % 2:
            (pictures / f"{stem}.txt").write_text(scene.caption, encoding="utf-8")
    films = SyntheticVideos(count=8, size=32, frames=9, seed=7)
    for number in range(len(films)):
        draw_video(films.scene(number), 32, 9).save(tmp_path / f"clips/{number:02d}")
    for number in range(8):
        toy = generate_object(7, number)
        toy.mesh.save(tmp_path / f"meshes/{number:02d}")
        (tmp_path / f"meshes/{number:02d}.obj").unlink()
        (tmp_path / f"meshes/{number:02d}.txt").write_text(toy.caption, encoding="utf-8")
    spoken = SyntheticAudio(8, samples=9600, rate_hz=16_000, seed=7)
    (tmp_path / "recordings").mkdir()
    for number in range(8):
        Audio(spoken.item(number, np.random.default_rng(0)).samples, 16_000).write(
            tmp_path / f"recordings/{number:02d}.wav"
        )
        (tmp_path / f"recordings/{number:02d}.txt").write_text(
            spoken.caption(number), encoding="utf-8"
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


@every_run_page
def test_the_examples_of_a_page_work_as_they_stand_and_leave_what_it_says(
    page: Path, reader: Path
) -> None:
    for block in blocks(page):
        if block.language == "sh":
            for program, *arguments in block.commands():
                assert program == "tessera", (
                    f"{block}: {program} does not belong in a block that is run; mark it console"
                )
                said = tessera(*arguments)
                assert said.code == 0, (
                    f"{block}: tessera {shlex.join(arguments)}\n{said.out}\n{said.err}"
                )
        elif block.language == "python":
            with redirect_stdout(StringIO()):
                exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
    absent = [
        f"{picture}: there is no {name}"
        for picture in drawn_folders(page)
        for name in picture.names
        if not name.exists()
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


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", page_of("images-maskgit")], ids=of_the_project
)
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
        assert words[0] in CHECKS, (
            f"{block}: nobody knows how to check {words[0]!r}; say so in CHECKS"
        )
        CHECKS[words[0]](words[1:])


def check_tessera(arguments: list[str]) -> None:
    """Parses the whole command, and stops there."""
    verb, *rest = arguments
    assert verb in VERBS, f"there is no verb {verb!r}"
    if verb == "train":
        flags.parse(get_recipe(rest[0]), rest[1:])
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
    targets = re.findall(
        r"^([a-z]+):", ROOT.joinpath("Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert [word for word in arguments if "=" not in word and word not in targets] == []


def check_pip(arguments: list[str]) -> None:
    install, place = arguments
    assert install == "install"
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", place)
    assert extras, f"{place} is not this project"
    assert (
        set(filter(None, (extras[1] or "").split(","))) <= project["optional-dependencies"].keys()
    )


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
        "tessera train images-maskgit --low-res-tokenizer runs/mine",
        "tessera sample",
        "tessera sample runs/mine --prompt --decoding-steps many",
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
    with (
        pytest.raises((AssertionError, SystemExit)),
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):
        CHECKS[program](arguments)


# -------------------------------------------------------------------------------------------------- what is pointed at


@every_page
def test_every_block_says_what_it_is(page: Path) -> None:
    strange = [
        f"{block}: {block.language!r}" for block in blocks(page) if block.language not in LANGUAGES
    ]
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
    missing = [
        span for span in spans(page) if re.fullmatch(r"test_\w+", span) and span not in known
    ]
    missing += [
        span
        for span in spans(page)
        if re.fullmatch(r"(?:tessera|tests|bench|examples|docs)/[\w./-]+", span)
        and not ROOT.joinpath(span).exists()
    ]
    assert not missing, listed(missing)


@pytest.mark.parametrize("block", blocks_in("py"), ids=str)
def test_an_excerpt_stands_in_the_file_that_it_names(block: Block) -> None:
    first, rest = block.text.split("\n", 1)
    source = ROOT.joinpath(first.removeprefix("# ")).read_text(encoding="utf-8")
    assert textwrap.dedent(rest).strip(), f"{block} is empty"
    assert rest in source, f"{block} is no longer what stands in {first.removeprefix('# ')}"


def test_every_part_of_the_package_has_its_line_in_the_layout() -> None:
    [layout] = [
        block.text
        for block in blocks(ROOT / "docs/design.md")
        if block.text.startswith("tessera/\n")
    ]
    package = ROOT / "tessera"
    top = {path.name for path in package.iterdir() if path.suffix == ".py"}
    top |= {path.parent.name for path in package.glob("*/__init__.py")}
    inner = {
        path.name for unit in ("engine", "data") for path in package.joinpath(unit).glob("[!_]*.py")
    }
    drawn = set(re.findall(r"[\w]+(?:\.py)?", layout))
    assert top | inner <= drawn, f"docs/design.md does not draw {sorted((top | inner) - drawn)}"
    gone = [name for name in drawn if name.endswith(".py") and not any(package.rglob(name))]
    assert not gone, f"docs/design.md draws what is not there: {gone}"


# ---------------------------------------------------------------------------------------------- flags and other settings


CHOICES = [
    *(
        (images_vqgan, f"--quantizer {quantizer} --adversary on --perceptual on")
        for quantizer in ("fsq", "lfq", "vq")
    ),
    *(
        (recipe, choices)
        for recipe in (images_maskgit, images_maskgit_superres)
        for choices in ("", "--critic head", "--critic own")
    ),
    *(
        (videos_magvit2, f"--quantizer {quantizer} --adversary on --perceptual on")
        for quantizer in ("fsq", "lfq")
    ),
    *((meshes_autoencoder, f"--quantizer {quantizer}") for quantizer in ("lfq", "vq", "fsq")),
    (meshes_transformer, ""),
    (music_mulan, ""),
    *(
        (audio_codec, f"--quantizer {quantizer} --adversary on")
        for quantizer in ("vq", "fsq", "lfq")
    ),
    *((audio_semantic, f"--features {features}") for features in ("mel", "a-folder")),
    *((audio_soundstorm, f"--critic {critic}") for critic in ("own", "head")),
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
    assert {
        "--steps",
        "--task.adversary.starts",
        "--weights",
        "--task.model.text.download",
        "--low-res-tokenizer",
    } <= known_flags
    ours = [span for span in spans(page) if span.startswith(("--", "tessera "))]
    unknown = [
        flag
        for span in ours
        for flag in re.findall(r"(?<!\S)--[\w.-]+", span)
        if flag not in known_flags
    ]
    assert not unknown, listed(unknown)


def test_every_recipe_has_its_page() -> None:
    assert {page.stem for page in (ROOT / "docs").glob("*.md")} == {
        recipe_name(recipe) for recipe in RECIPES
    } | {"design"}
