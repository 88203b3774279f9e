"""The project's shape: who may import whom, what no file may hold, what make installs, and what
start-up costs.

A *unit* is the first name below `tessera`: `engine`, `nn`, `folder`. MAY_IMPORT is docs/design.md's
picture of arrows as a table, held against the source as `ast` reads it: an import inside a function
or under TYPE_CHECKING counts too.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent

DOORS = {
    "__init__",
    "__main__",
    "cli",
    "trainers",
    "tokenizer",
    "generator",
    "flags",
    "start",
    "launch",
    "finished",
}
DOORS |= {"parts", "coding", "answers", "search"}
"""Where users come in, and what those places share. They may import anything, and nothing below
imports them."""

MAY_IMPORT: dict[str, set[str]] = {
    "folder": set(),
    "viewer": {"folder"},
    "places": {"folder"},
    "engine": {"folder"},
    "config": {"folder", "engine"},
    "media": set(),
    "data": {"folder", "media", "engine.task", "engine.modes"},
    "nn": set(),
    "models": {"nn", "losses.spectrogram", "engine.task.Frozen"},
    "losses": set(),
    "sampling": set(),
    "tasks": {"models", "nn", "losses", "sampling", "media", "engine.task", "engine.optimizer"},
    "recipes": {
        "folder",
        "config",
        "data",
        "tasks",
        "models",
        "nn",
        "sampling",
        "engine.task",
        "engine.optimizer",
    }
    | {"engine.engine.EngineConfig", "engine.average.AverageConfig"},
}
"""Unit -> what it may import of tessera beside itself: a unit, a module, or one name of a module.

The engine knows no task, model, medium or data: they know its contract, `engine.task` and what that
needs.
"""

ONLY_TORCH = {"losses", "sampling", "engine.task"}
"""Functions of tensors, and the contract: nothing from outside but torch."""

NO_TORCH = {"folder", "viewer", "places"}
"""What reads a run's folder starts at once, also where torch is not installed."""

UNSAFE = {
    "pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "torch.load",
    "torch.serialization",
}
"""What runs code out of files. `torch.load` may not be imported by that name, so that every call of
it can be found."""

HOSTS = {
    "arxiv.org",
    "github.com",
    "doi.org",
    "openreview.net",
    "keepachangelog.com",
    "semver.org",
    "www.w3.org",
}
"""Hosts that a reader is sent to. Nothing is fetched from them."""


# ------------------------------------------------------------------------------------------------ reading the source


@dataclass(frozen=True)
class Import:
    """`module` imports `target` on `line`: `tessera.cli.main` and
    `tessera.run.directory.RunDirectory`, say."""

    module: str
    target: str
    line: int

    @property
    def outside(self) -> bool:
        return root(self.target) not in ("tessera", *sys.stdlib_module_names)

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


SOURCES = {
    file.relative_to(ROOT): ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    for file in sorted(ROOT.joinpath("tessera").rglob("*.py"))
}


def imports_of(file: Path, tree: ast.Module) -> Iterator[Import]:
    """Import statements at any depth, and import_module("...") where the name is written out."""
    package = file.parent.parts
    module = ".".join(file.with_suffix("").parts)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (Import(module, alias.name, node.lineno) for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                above = package[: len(package) - level + 1] if level else ()
                for alias in names:
                    yield Import(
                        module,
                        ".".join([*above, *([base] if base else []), alias.name]),
                        node.lineno,
                    )
            case ast.Call(args=[ast.Constant(value=str(name)), *_]) if ast.unparse(
                node.func
            ).endswith("import_module"):
                yield Import(module, name, node.lineno)


def calls() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Place, name and keywords of every call; a keyword whose value is not written out has the
    value None."""
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                written = {
                    word.arg: getattr(word.value, "value", None)
                    for word in node.keywords
                    if word.arg
                }
                yield f"{file}:{node.lineno}", ast.unparse(node.func), written


def root(dotted: str) -> str:
    return dotted.split(".")[0]


def inner(dotted: str) -> str:
    """`tessera.engine.task` -> `engine.task`; the bare package is `__init__`."""
    return dotted.partition(".")[2] or "__init__"


def unit(dotted: str) -> str:
    return root(inner(dotted))


def below(name: str, prefixes: Collection[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def listed(found: Collection[object]) -> str:
    return "".join(f"\n  {one}" for one in found)


IMPORTS = [found for file, tree in SOURCES.items() for found in imports_of(file, tree)]


# ------------------------------------------------------------------------------------------------------------ arrows


def test_every_unit_has_its_place_in_the_picture():
    units = {unit(".".join(file.with_suffix("").parts)) for file in SOURCES}
    assert {"engine", "folder", "cli"} <= units, (
        "the source was not read, so nothing in this file was tested"
    )
    unmatched = units - DOORS - MAY_IMPORT.keys()
    assert not unmatched, (
        f"{sorted(unmatched)}: add a row to MAY_IMPORT, and a place in docs/design.md"
    )


def test_arrows_never_point_up():
    upward = [
        found
        for found in IMPORTS
        if root(found.target) == "tessera"
        and (importer := unit(found.module)) not in DOORS
        and not below(
            inner(found.target), {importer, "__version__"} | MAY_IMPORT.get(importer, set())
        )
    ]
    assert not upward, f"docs/design.md has no such arrow:{listed(upward)}"


def test_functions_of_tensors_and_the_contract_import_nothing_but_torch():
    others = [
        found
        for found in IMPORTS
        if found.outside
        and root(found.target) != "torch"
        and below(inner(found.module), ONLY_TORCH)
    ]
    assert not others, listed(others)


def test_what_reads_a_run_folder_imports_no_torch():
    heavy = {"torch", "accelerate", "safetensors.torch"}
    found = [
        found
        for found in IMPORTS
        if below(inner(found.module), NO_TORCH) and below(found.target, heavy)
    ]
    assert not found, listed(found)


# --------------------------------------------------------------------------------------------- what no file may hold


def test_nothing_is_ever_unpickled():
    unsafe = [found for found in IMPORTS if below(found.target, UNSAFE)]
    assert not unsafe, listed(unsafe)
    loads = [
        place
        for place, name, how in calls()
        if name == "torch.load" and how.get("weights_only") is not True
    ]
    assert not loads, (
        f"torch.load runs code from the file unless weights_only=True is written out:{listed(loads)}"
    )
    arrays = [place for place, _, how in calls() if how.get("allow_pickle", False) is not False]
    assert not arrays, f"allow_pickle runs code from the file:{listed(arrays)}"


def test_no_question_is_ever_asked():
    asking = {"input", "builtins.input", "getpass.getpass", "getpass", "Prompt.ask", "Confirm.ask"}
    questions = [place for place, name, _ in calls() if name in asking]
    assert not questions, f"a run may have nobody in front of it:{listed(questions)}"


def texts() -> Iterator[tuple[Path, str]]:
    """The project's text as it is committed: not what make, the tools and the runs leave behind."""
    folders = [ROOT / name for name in ("tessera", "tests", "bench", "examples", "docs", ".ci")]
    files = [file for folder in folders for file in folder.rglob("*")] + list(ROOT.glob("*"))
    for file in sorted(files):
        written = file.suffix in (".py", ".md", ".toml", ".txt", ".sh", ".json", ".html", ".js", "")
        if (
            written
            and file.is_file()
            and file.name != "LICENSE"
            and "__pycache__" not in file.parts
        ):
            yield file.relative_to(ROOT), file.read_text(encoding="utf-8")


def places(pattern: str) -> dict[str, str]:
    """Place -> the words there that match."""
    return {
        f"{file}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}": match.group()
        for file, text in texts()
        for match in re.finditer(pattern, text)
    }


def test_no_file_names_a_folder_of_somebodys_machine():
    found = places(r"(?<![\w.})/-])/(?:work|tmp|root|home|opt|mnt|Users)(?![\w-])")
    assert not found, listed(found)


def test_no_file_names_a_host_but_those_a_reader_is_sent_to():
    """So no address of a package registry or a mirror slips in: those belong to the settings of
    whoever installs."""
    named = places(r"(?<=://)[\w-]+(?:\.[\w-]+)*\.[a-z]{2,}|\b[\w-]+(?:\.[\w-]+)*\.(?:org|com)\b")
    strange = [place for place, host in named.items() if host not in HOSTS]
    assert named and not strange, listed(strange)


def test_nothing_is_left_for_later():
    later = places("[T]ODO|[F]IXME")
    assert not later, listed(later)


# ------------------------------------------------------------------------------------------------ what make installs


def project() -> dict[str, Any]:
    return tomllib.loads(ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]


def made() -> list[Requirement]:
    """What the Makefile asks pip for."""
    extras = project()["optional-dependencies"]
    taken = (
        "dev",
        "perceptual",
        "text",
        "video",
        "audio",
        "speech",
        "voice",
        "mesh",
        "tensorboard",
    )
    asked = [*project()["dependencies"], *(line for extra in taken for line in extras[extra])]
    return [Requirement(line) for line in asked]


def pins() -> dict[str, str]:
    lines = ROOT.joinpath("constraints.txt").read_text(encoding="utf-8").splitlines()
    exact = [
        re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if not line.startswith("#")
    ]
    assert all(exact), (
        "a line of constraints.txt is name==version, with no +cpu after it and no address"
    )
    return {canonicalize_name(pin[1]): pin[2] for pin in exact if pin}


def needed_by(requirement: Requirement) -> Iterator[Requirement]:
    """What an installed package needs in turn, on this machine and with the extras asked for."""
    for needed in map(Requirement, metadata.requires(requirement.name) or []):
        extras = requirement.extras or {""}
        if needed.marker is None or any(
            needed.marker.evaluate({"extra": extra}) for extra in extras
        ):
            yield needed


def test_the_core_stays_small():
    assert len(project()["dependencies"]) <= 10


def test_the_pins_keep_to_the_ranges():
    for requirement in made():
        assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)]), (
            requirement
        )
    assert pins()["torch"] == "2.13.0"


def test_every_package_that_make_installs_is_pinned():
    companions = (
        "nvidia-",
        "cuda-",
        "triton",
    )  # of torch's CUDA build, which names one exact version of each itself
    waiting, met = made(), set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, *sorted(requirement.extras)) in met or name.startswith(companions):
            continue
        met.add((name, *sorted(requirement.extras)))
        assert name in pins(), f"make installs {name}, which has no line in constraints.txt"
        waiting.extend(needed_by(requirement))
    assert len(met) > len(made())


NOT_INSTALLED = {"faiss": "faiss-cpu"}
"""Module -> the package that it is in, where make does not install it and their names differ."""


def test_every_import_from_outside_is_a_declared_dependency():
    declared = {
        canonicalize_name(Requirement(line).name)
        for lines in (project()["dependencies"], *project()["optional-dependencies"].values())
        for line in lines
    }
    homes = metadata.packages_distributions()

    def is_declared(name: str) -> bool:
        return any(
            canonicalize_name(home) in declared
            for home in homes.get(name, [NOT_INSTALLED.get(name, name)])
        )

    undeclared = [
        found for found in IMPORTS if found.outside and not is_declared(root(found.target))
    ]
    assert not undeclared, listed(undeclared)


# ----------------------------------------------------------------------------------------------- what start-up costs

CHILD = """
import json, resource, sys
arguments, report = json.loads(sys.argv[1]), sys.argv[2]
import tessera
code = 0
if arguments is not None:
    from tessera.cli.main import main
    try:
        code = main(arguments)
    except SystemExit as stop:
        code = stop.code
used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
with open(report, "w") as file:
    json.dump({
        "failed": code not in (None, 0),
        "torch": "torch" in sys.modules,
        "cpu_seconds": sum(one.ru_utime + one.ru_stime for one in used),
    }, file)
"""


@dataclass(frozen=True, kw_only=True)
class Answer:
    said: str
    failed: bool
    torch: bool
    cpu_seconds: float


def ask(arguments: list[str] | None, report: Path) -> Answer:
    """What a fresh Python says that imports tessera and, unless the arguments are None, runs the
    command with them."""
    command = [sys.executable, "-W", "error", "-c", CHILD, json.dumps(arguments), str(report)]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return Answer(said=done.stdout + done.stderr, **json.loads(report.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("arguments", "refused", "says"),
    [
        pytest.param(None, False, "", id="import tessera"),
        pytest.param(["--help"], False, "recipes", id="--help"),
        pytest.param(["recipes"], False, "images-vqgan", id="recipes"),
        pytest.param(["tran"], True, "train", id="an unknown verb"),
        pytest.param(["train", "images-vqgn"], True, "images-vqgan", id="an unknown recipe"),
    ],
)
def test_what_needs_no_network_is_answered_at_once_and_without_torch(
    arguments, run_invalid, says, tmp_path
):
    for attempt in range(
        3
    ):  # the best of three: other processes share the caches, and the first may have to compile
        answer = ask(arguments, tmp_path / f"{attempt}.json")
        assert not answer.torch, "this imports torch, which alone costs a second and more"
        assert answer.failed == run_invalid
        assert says in answer.said
        if answer.cpu_seconds < 0.3:
            return
    pytest.fail(f"{answer.cpu_seconds:.2f} s of CPU time, and no better in three attempts")
