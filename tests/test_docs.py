"""The documentation agrees with the code: commands and examples run, and names exist.

The language of a block determines how it is tested:

    sh       every line is a `tessera` command and is run
    python   is run, each block in its own namespace
    console  lines that start with "$ " are commands that are too long to run here; they are parsed
    py       is an excerpt of the file that its first line names
    text     is not tested, except the listing of a run directory (`runs/name/`), whose files must
             exist after the examples of the page

The blocks of a page are run in order in one folder with a few `images`, `videos`, `audio` and
`meshes`.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
import shutil
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tyro

from tessera.cli import flags
from tessera.cli.commands import COMMANDS
from tessera.modalities.audio.media import Audio
from tessera.modalities.audio.recipes import (
    audio_codec,
    audio_semantic,
    audio_soundstorm,
    audio_text2semantic,
)
from tessera.modalities.audio.synthetic import SyntheticAudio
from tessera.modalities.image.recipes import images_maskgit, images_maskgit_superres, images_vqgan
from tessera.modalities.image.synthetic import SyntheticImages, draw
from tessera.modalities.mesh.recipes import (
    meshes_autoencoder,
    meshes_transformer,
    meshes_tree,
)
from tessera.modalities.mesh.synthetic import generate_object
from tessera.modalities.music.recipes import music_mulan
from tessera.modalities.video.recipes import videos_magvit2, videos_maskgit
from tessera.modalities.video.synthetic import SyntheticVideos, draw_video
from tessera.recipes.registry import RECIPES, get_recipe, recipe_name
from tests.cli_runner import tessera
from tests.pages import (
    LANGUAGES,
    PAGES,
    ROOT,
    RUN_PAGES,
    Block,
    blocks_in_language,
    code_spans,
    read_blocks,
    read_prose,
    recipe_page,
    relative_name,
)

every_page = pytest.mark.parametrize("page", PAGES, ids=relative_name)
every_run_page = pytest.mark.parametrize("page", RUN_PAGES, ids=relative_name)


def as_lines(items: list[str]) -> str:
    return "".join(f"\n  {item}" for item in items)


# ---- examples that are run


@pytest.fixture(scope="module")
def example_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a few `images`, `videos`, `meshes` and `audio` files."""
    folder = tmp_path_factory.mktemp("examples")
    images = SyntheticImages(count=40, size=64, seed=7)
    for number in range(len(images)):
        scene, stem = images.scene(number), "one" if number == 0 else f"shapes/{number:02d}"
        draw(scene, 64).save(folder / f"images/{stem}")
        if number % 2:
            (folder / f"images/{stem}.txt").write_text(scene.caption, encoding="utf-8")
    videos = SyntheticVideos(count=8, size=32, frames=9, seed=7)
    for number in range(len(videos)):
        draw_video(videos.scene(number), 32, 9).save(folder / f"videos/{number:02d}")
        (folder / f"videos/{number:02d}.txt").write_text(videos.caption(number), encoding="utf-8")
    for number in range(8):
        generated = generate_object(7, number)
        generated.mesh.save(folder / f"meshes/{number:02d}.glb")
        (folder / f"meshes/{number:02d}.txt").write_text(generated.caption, encoding="utf-8")
    speech = SyntheticAudio(8, samples=9600, rate_hz=16_000, seed=7)
    (folder / "audio").mkdir()
    for number in range(8):
        samples = speech.item(number, np.random.default_rng(0)).samples
        Audio(samples, 16_000).write(folder / f"audio/{number:02d}.wav")
        caption = speech.caption(number)
        (folder / f"audio/{number:02d}.txt").write_text(caption, encoding="utf-8")
    return folder


@pytest.fixture
def example_folder(example_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with a copy of the files."""
    shutil.copytree(example_files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@every_run_page
def test_examples_of_a_page_run_and_leave_the_listed_files(
    page: Path, example_folder: Path
) -> None:
    for block in read_blocks(page):
        if block.language == "sh":
            for program, *arguments in block.commands():
                assert program == "tessera", (
                    f"{block}: only tessera commands can be run, got {program}; mark it console"
                )
                result = tessera(*arguments)
                assert result.code == 0, (
                    f"{block}: tessera {shlex.join(arguments)}\n{result.out}\n{result.err}"
                )
        elif block.language == "python":
            with redirect_stdout(StringIO()):
                exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})
    missing = [
        f"{listing.block}: there is no {path}"
        for listing in run_directory_listings(page)
        for path in listing.paths
        if not path.exists()
    ]
    assert not missing, as_lines(missing)


@dataclass(frozen=True)
class Listing:
    """A text block that lists the files of a run directory."""

    block: Block
    paths: list[Path]


def run_directory_listings(page: Path) -> list[Listing]:
    """Return the listings of run directories on a page whose examples create runs."""
    if not any(block.language == "sh" for block in read_blocks(page)):
        return []
    listings = []
    for block in read_blocks(page):
        folder, *lines = block.text.splitlines()
        if block.language == "text" and re.fullmatch(r"runs/[\w-]+/", folder):
            listings.append(Listing(block, [Path(folder, line.split()[0]) for line in lines]))
    return listings


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", recipe_page("images-maskgit")], ids=relative_name
)
def test_listing_of_a_run_directory_is_found(page: Path) -> None:
    [listing] = run_directory_listings(page)
    assert len(listing.paths) >= 5


# ---- commands that are parsed


@pytest.mark.parametrize("block", blocks_in_language("console"), ids=str)
def test_commands_that_are_not_run_can_be_parsed(block: Block) -> None:
    commands = list(block.commands())
    assert commands, f"{block} has no line that starts with '$ '"
    for words in commands:
        while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words.pop(0)
        assert words[0] in PARSERS, f"{block}: add a parser for {words[0]!r} to PARSERS"
        PARSERS[words[0]](words[1:])


def parse_tessera(arguments: list[str]) -> None:
    command, *rest = arguments
    assert command in COMMANDS, f"there is no command {command!r}"
    if command == "train":
        flags.parse(get_recipe(rest[0]), rest[1:])
    else:
        tyro.cli(without_effect(COMMANDS[command]), args=rest)


def without_effect(command: Callable[..., int]) -> Callable[..., int]:
    """Return a function with the parameters of a command that does nothing."""

    @functools.wraps(command)
    def do_nothing(*_: Any, **__: Any) -> int:
        return 0

    return do_nothing


def parse_torchrun(arguments: list[str]) -> None:
    """Parse the flags of torchrun with its own parser, and the rest as a tessera command."""
    from torch.distributed.run import get_args_parser

    parsed = get_args_parser().parse_args(arguments)
    assert parsed.module and parsed.training_script == "tessera"
    parse_tessera(parsed.training_script_args)


def parse_make(arguments: list[str]) -> None:
    makefile = ROOT.joinpath("Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", makefile, re.MULTILINE)
    assert [word for word in arguments if "=" not in word and word not in targets] == []


def parse_pip(arguments: list[str]) -> None:
    install, target = arguments
    assert install == "install"
    project = tomllib.loads(ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.fullmatch(r"\.(?:\[([\w,]+)\])?", target)
    assert extras, f"{target} is not this project"
    names = set(filter(None, (extras[1] or "").split(",")))
    assert names <= project["optional-dependencies"].keys()


def parse_script(arguments: list[str]) -> None:
    assert ROOT.joinpath(arguments[0]).is_file(), f"there is no {arguments[0]}"


PARSERS: dict[str, Callable[[list[str]], None]] = {
    "tessera": parse_tessera,
    "torchrun": parse_torchrun,
    "make": parse_make,
    "pip": parse_pip,
    "python": parse_script,
    "bash": parse_script,
}


@pytest.mark.parametrize(
    "command",
    [
        "tessera trian images-vqgan",
        "tessera train images-vqgan --stesp 3",
        "tessera train images-vqgan --preset huge",
        "tessera train images-maskgit --critic both",
        "tessera train images-maskgit --low-res-tokenizer runs/vqgan",
        "tessera sample",
        "tessera sample runs/maskgit --prompt --decoding-steps many",
        "tessera tokenize runs/vqgan",
        "tessera check images --fast",
        "torchrun --nproc-per-node 2 -m tessera train images-vqgan --stesp 3",
        "torchrun --nproc-per-nood 2 -m tessera train images-vqgan",
        "make dmeo",
        "pip install .[everything]",
        "python examples/emojis.py",
    ],
)
def test_invalid_commands_are_detected(command: str) -> None:
    program, *arguments = shlex.split(command)
    with (
        pytest.raises((AssertionError, SystemExit)),
        redirect_stdout(StringIO()),
        redirect_stderr(StringIO()),
    ):
        PARSERS[program](arguments)


# ---- links, files, excerpts and quotations


@every_page
def test_every_block_has_a_known_language(page: Path) -> None:
    unknown = [
        f"{block}: {block.language!r}"
        for block in read_blocks(page)
        if block.language not in LANGUAGES
    ]
    assert not unknown, f"expected one of {', '.join(sorted(LANGUAGES))}:{as_lines(unknown)}"


@every_page
def test_links_have_a_target(page: Path) -> None:
    links = re.findall(r"\]\(([^()\s]+)\)", read_prose(page))
    broken = [link for link in links if "://" not in link and not link_exists(page, link)]
    assert not broken, f"broken links in {relative_name(page)}:{as_lines(broken)}"


def link_exists(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """Return the anchors of all headings."""
    headings = re.findall(r"^#+ (.+)$", read_prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_files_and_tests_named_on_a_page_exist(page: Path) -> None:
    test_names = {
        name
        for file in ROOT.joinpath("tests").rglob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    }
    spans = code_spans(page)
    missing = [span for span in spans if re.fullmatch(r"test_\w+", span) and span not in test_names]
    missing += [
        span
        for span in spans
        if re.fullmatch(r"(?:tessera|tests|bench|examples|docs)/[\w./-]+", span)
        and not ROOT.joinpath(span).exists()
    ]
    assert not missing, as_lines(missing)


@pytest.mark.parametrize("block", blocks_in_language("py"), ids=str)
def test_excerpts_are_in_the_file_they_name(block: Block) -> None:
    first, rest = block.text.split("\n", 1)
    file_name = first.removeprefix("# ")
    source = ROOT.joinpath(file_name).read_text(encoding="utf-8")
    assert textwrap.dedent(rest).strip(), f"{block} is empty"
    assert rest in source, f"{block} is not in {file_name}"


def test_every_package_and_module_is_in_the_layout() -> None:
    [layout] = [
        block.text
        for block in read_blocks(ROOT / "docs/design.md")
        if block.text.startswith("tessera/\n")
    ]
    package = ROOT / "tessera"
    expected = {path.stem for path in package.glob("*.py")}
    expected |= {path.parent.name for path in package.glob("*/__init__.py")}
    expected |= {
        path.stem for unit in ("engine", "data") for path in package.joinpath(unit).glob("[!_]*.py")
    }
    words = re.findall(r"\w+(?:\.py)?", layout)
    missing = expected - {word.removesuffix(".py") for word in words}
    assert not missing, f"docs/design.md does not list {sorted(missing)}"
    removed = [word for word in words if word.endswith(".py") and not any(package.rglob(word))]
    assert not removed, f"docs/design.md lists files that do not exist: {removed}"


@dataclass(frozen=True)
class Text:
    """A string of the package; a formatted value of an f-string matches anything."""

    literals: tuple[str, ...]

    def contains(self, quotation: str) -> bool:
        return any(quotation in literal for literal in self.literals)

    def equals(self, name: str) -> bool:
        """Whether the string can be this name; an f-string needs some characters of its own."""
        if len("".join(self.literals)) < 3:
            return self.literals == (name,)
        return re.fullmatch(".+".join(map(re.escape, self.literals)), name) is not None


@functools.cache
def package_texts() -> frozenset[Text]:
    trees = (
        ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "tessera").rglob("*.py")
    )
    return frozenset(text for tree in trees for text in find_texts(tree))


def find_texts(tree: ast.AST) -> Iterator[Text]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield Text((node.value,))
        elif isinstance(node, ast.JoinedStr):
            literals = [""]
            for value in node.values:
                if isinstance(value, ast.Constant):
                    literals[-1] += value.value
                else:
                    literals.append("")
            yield Text(tuple(literals))


@every_run_page
def test_quoted_error_messages_are_those_of_the_package(page: Path) -> None:
    quotations = re.findall(r'\*\*"([^"]+)"\*\*', read_prose(page))
    unknown = [
        quotation
        for quotation in quotations
        if not any(text.contains(" ".join(quotation.split())) for text in package_texts())
    ]
    assert not unknown, as_lines(unknown)


METRIC = re.compile(r"(?:val|val_ema|model|discriminator)/([\w@]+)")


@every_run_page
def test_metrics_named_on_a_page_exist(page: Path) -> None:
    names = [match[1] for span in code_spans(page) if (match := METRIC.fullmatch(span))]
    unknown = [
        name
        for name in names
        if not any(text.equals(re.sub(r"_\d+$", "", name)) for text in package_texts())
    ]
    assert not unknown, as_lines(unknown)


def test_unknown_metrics_and_messages_are_detected() -> None:
    assert any(text.equals("text_to_media_R@1") for text in package_texts())
    assert not any(text.equals("text_to_media_r1") for text in package_texts())
    assert not any(text.contains("but the loss is made for") for text in package_texts())


# ---- flags


CHOICES = [
    *(
        (images_vqgan, f"--quantizer {quantizer} --adversary on --perceptual on")
        for quantizer in ("fsq", "lfq", "vq", "simvq")
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
    (videos_maskgit, ""),
    *((meshes_autoencoder, f"--quantizer {quantizer}") for quantizer in ("lfq", "vq", "fsq")),
    (meshes_transformer, ""),
    (meshes_tree, ""),
    (music_mulan, ""),
    *(
        (audio_codec, f"--quantizer {quantizer} --adversary on")
        for quantizer in ("vq", "fsq", "lfq")
    ),
    (audio_codec, "--network soundstream"),
    *(
        (audio_semantic, f"--features {features}")
        for features in ("mel", "ctc", "hubert", "a-folder")
    ),
    (audio_text2semantic, ""),
    *((audio_soundstorm, f"--critic {critic}") for critic in ("own", "head")),
    (audio_soundstorm, "--speaker-embedding on"),
    (images_maskgit, "--text an-encoder"),
]
"""Every recipe with every choice that adds flags."""


def test_flags_of_every_recipe_are_collected() -> None:
    assert {recipe for recipe, _ in CHOICES} == set(RECIPES)


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Return the flags of all commands, and of `train` with all choices."""
    output = StringIO()
    with redirect_stdout(output):
        for recipe, choices in CHOICES:
            with pytest.raises(SystemExit):
                flags.parse(recipe, [*choices.split(), "--help"])
        for name in COMMANDS.keys() - {"train"}:
            with pytest.raises(SystemExit):
                tyro.cli(without_effect(COMMANDS[name]), args=["--help"])
    return set(re.findall(r"--[a-z][\w.-]*", output.getvalue())) | {
        "--config",
        "--data",
        "--version",
    }


@every_run_page
def test_flags_named_on_a_page_exist(page: Path, known_flags: set[str]) -> None:
    assert {
        "--steps",
        "--task.adversary.start-step",
        "--weights",
        "--task.model.text.download",
        "--low-res-tokenizer",
    } <= known_flags
    spans = [span for span in code_spans(page) if span.startswith(("--", "tessera "))]
    unknown = [
        flag
        for span in spans
        for flag in re.findall(r"(?<!\S)--[\w.-]+", span)
        if flag not in known_flags
    ]
    assert not unknown, as_lines(unknown)


def test_every_recipe_has_a_page() -> None:
    recipes = {recipe_name(recipe) for recipe in RECIPES}
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")}
    others = {"design", "benchmarks", "view", "migrating", "your-own-task", "reliability", "scale"}
    experiments = {"experiments-images-vqgan", "experiments-images-maskgit"}
    assert pages == recipes | others | experiments
