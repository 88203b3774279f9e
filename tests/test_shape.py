"""The structure of the project: imports, forbidden code and words, dependencies and start-up time.

A *unit* is the first name below `tessera`: `engine`, `nn`. MAY_IMPORT is the table of imports in
docs/design.md, compared with the source: imports inside functions and under TYPE_CHECKING count
too.
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

ENTRY_POINTS = {"__init__", "__main__", "cli", "api", "trainers", "view"}
"""The units that users call; they may import anything. Only `run` imports `api`, and only `cli`
imports `view`."""

MAY_IMPORT: dict[str, set[str]] = {
    "_optional": set(),
    "engine": {"run.directory", "run.errors"},
    "data": {
        "engine.device",
        "_optional",
        "run.directory",
        "run.errors",
        "engine.task",
        "engine.modes",
    },
    "nn": {"losses.spectrogram", "engine.device", "_optional"},
    "text": {"nn", "engine.device", "_optional", "engine.task.Frozen", "run.directory"},
    "losses": {"nn.precision"},
    "metrics": {"losses", "nn.precision"},
    "sampling": set(),
    "objectives": {
        "engine.device",
        "nn",
        "text",
        "losses",
        "metrics",
        "sampling",
        "data.notebook",
        "data.tokens",
        "engine.task",
        "engine.optim.config",
    },
    "modalities": {
        "engine.device",
        "_optional",
        "data",
        "nn",
        "text",
        "losses",
        "metrics",
        "sampling",
        "objectives",
        "engine.task",
        "engine.modes",
        "engine.optim.config",
        "recipes.presets",
        "run.config.Run",
        "run.directory",
        "run.errors",
    },
    "recipes": {
        "modalities",
        "data.dataset.DataConfig",
        "data.inspect",
        "nn",
        "sampling",
        "text",
        "engine.task.TaskConfig",
        "engine.ema.EMAConfig",
        "engine.config",
        "engine.optim.config",
        "run.config",
        "run.directory",
        "run.errors",
    },
    "run": {"_optional", "api", "data", "engine", "objectives", "recipes"},
}
"""Unit -> what it may import of tessera beside itself: a unit, a module, or one name of a
module."""

MODULE_EXCEPTIONS = {"nn.masked_transformer": {"text"}, "engine.__init__": {"run.fit"}}
"""Modules that may import more than the rest of their unit."""

MODALITY_IMPORTS = {
    "image": set(),
    "video": {"image"},
    "audio": {"image.media"},
    "music": {"audio", "image.media"},
    "mesh": {"image.media"},
}
"""Modality -> what it may import of others: contact sheets are images."""

MODALITY_FILES = {"__init__", "media", "dataset", "synthetic", "recipes"}
"""The files that every modality has."""

ONLY_TORCH = {"losses", "metrics", "sampling", "engine.task"}
"""Units and modules that import no other package than torch."""

NO_TORCH = {"run.directory", "run.errors", "data.captions", "data.discovery", "data.inspect"}
"""Modules that do not import torch, so that commands that need no network start quickly."""

VIEW_WORKER = "view.worker"
"""The only module of the page that loads models; the server runs without torch."""

NO_TORCH_FILES = ("media", "io", "dataset", "inspect", "synthetic")
"""Files of a modality that do not import torch at module level, for `tessera check`."""

UNSAFE = {
    "pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "torch.load",
    "torch.serialization",
    "accelerate.utils.gather_object",
    "accelerate.utils.broadcast_object_list",
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
"""Hosts in links for readers. Nothing is fetched from them."""


# ---- the source


@dataclass(frozen=True)
class Import:
    """`module` imports `target` on `line`."""

    module: str
    target: str
    line: int
    at_module_level: bool

    @property
    def is_third_party(self) -> bool:
        return root(self.target) not in ("tessera", "_typeshed", *sys.stdlib_module_names)

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


SOURCES = {
    file.relative_to(ROOT): ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    for file in sorted(ROOT.joinpath("tessera").rglob("*.py"))
}


def find_imports(file: Path, tree: ast.Module) -> Iterator[Import]:
    """Yield imports at any depth, and calls of import_module with a literal name."""
    package = file.parent.parts
    module = ".".join(file.with_suffix("").parts)
    top_level = set(map(id, tree.body))
    for node in ast.walk(tree):
        is_top = id(node) in top_level
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(module, alias.name, node.lineno, is_top)
            case ast.ImportFrom(module=base, names=names, level=level):
                above = package[: len(package) - level + 1] if level else ()
                for alias in names:
                    target = ".".join([*above, *([base] if base else []), alias.name])
                    yield Import(module, target, node.lineno, is_top)
            case ast.Call(args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(node.func).endswith("import_module"):
                    yield Import(module, name, node.lineno, is_top)


def find_calls() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield location, name and literal keyword arguments of every call."""
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                keywords = {
                    keyword.arg: getattr(keyword.value, "value", None)
                    for keyword in node.keywords
                    if keyword.arg
                }
                yield f"{file}:{node.lineno}", ast.unparse(node.func), keywords


def root(dotted: str) -> str:
    return dotted.split(".")[0]


def inner(dotted: str) -> str:
    """Return `engine.task` for `tessera.engine.task`; the package itself is `__init__`."""
    return dotted.partition(".")[2] or "__init__"


def unit(dotted: str) -> str:
    return root(inner(dotted))


def is_below(name: str, prefixes: Collection[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def as_lines(found: Collection[object]) -> str:
    return "".join(f"\n  {one}" for one in found)


IMPORTS = [found for file, tree in SOURCES.items() for found in find_imports(file, tree)]


# ---- imports


def test_every_unit_is_in_the_table_of_imports():
    units = {unit(".".join(file.with_suffix("").parts)) for file in SOURCES}
    assert {"engine", "modalities", "cli"} <= units, "the source was not read"
    unknown = units - ENTRY_POINTS - MAY_IMPORT.keys()
    assert not unknown, f"{sorted(unknown)}: add a row to MAY_IMPORT and to docs/design.md"


def test_the_root_of_the_package_has_no_other_modules():
    modules = {file.stem for file in ROOT.joinpath("tessera").glob("*.py")}
    assert modules == {"__init__", "__main__", "_optional"}


def test_units_import_only_what_the_table_allows():
    forbidden = []
    for found in IMPORTS:
        importer = unit(found.module)
        if root(found.target) != "tessera" or importer in ENTRY_POINTS:
            continue
        extra = MODULE_EXCEPTIONS.get(inner(found.module), set())
        allowed = {importer, "__version__"} | MAY_IMPORT[importer] | extra
        if not is_below(inner(found.target), allowed):
            forbidden.append(found)
    assert not forbidden, f"docs/design.md does not allow these imports:{as_lines(forbidden)}"


def test_only_registry_and_entry_points_import_modalities():
    outside = {"modalities", "recipes", *ENTRY_POINTS}
    found = [
        found
        for found in IMPORTS
        if is_below(inner(found.target), {"modalities"}) and unit(found.module) not in outside
    ]
    assert not found, as_lines(found)


def test_only_the_command_line_imports_the_page():
    found = [
        found
        for found in IMPORTS
        if is_below(inner(found.target), {"view"}) and unit(found.module) not in ("cli", "view")
    ]
    assert not found, as_lines(found)


def test_only_the_worker_of_the_page_imports_models():
    heavy = {"torch", "tessera.api", "tessera.engine", "tessera.run.load", "tessera.objectives"}
    found = [
        found
        for found in IMPORTS
        if is_below(inner(found.module), {"view"})
        and inner(found.module) != VIEW_WORKER
        and is_below(found.target, heavy | {f"tessera.{VIEW_WORKER}"})
    ]
    assert not found, as_lines(found)


def modality_of(dotted: str) -> str | None:
    parts = dotted.split(".")
    return parts[2] if parts[1:2] == ["modalities"] and len(parts) > 2 else None


def test_a_modality_imports_others_only_as_the_table_allows():
    forbidden = []
    for found in IMPORTS:
        importer, target = modality_of(found.module), modality_of(found.target)
        if importer not in MODALITY_IMPORTS or target not in MODALITY_IMPORTS or importer == target:
            continue
        name = found.target.removeprefix("tessera.modalities.")
        if not is_below(name, MODALITY_IMPORTS[importer]):
            forbidden.append(found)
    assert not forbidden, as_lines(forbidden)


@pytest.mark.parametrize("modality", MODALITY_IMPORTS)
def test_every_modality_has_the_prescribed_files(modality: str):
    files = {file.stem for file in ROOT.joinpath("tessera", "modalities", modality).glob("*.py")}
    assert files >= MODALITY_FILES


def test_losses_metrics_and_the_task_interface_import_only_torch():
    others = [
        found
        for found in IMPORTS
        if found.is_third_party
        and root(found.target) != "torch"
        and is_below(inner(found.module), ONLY_TORCH)
    ]
    assert not others, as_lines(others)


def test_modules_that_inspect_files_and_runs_import_no_torch():
    heavy = {"torch", "accelerate", "safetensors.torch"}
    found = []
    for one in IMPORTS:
        name = inner(one.module)
        is_modality_file = modality_of(one.module) is not None and one.at_module_level
        in_file = is_modality_file and name.split(".")[2:3] and name.split(".")[2] in NO_TORCH_FILES
        if (is_below(name, NO_TORCH) or in_file) and is_below(one.target, heavy):
            found.append(one)
    assert not found, as_lines(found)


# ---- forbidden code and words


def test_nothing_is_unpickled():
    unsafe = [found for found in IMPORTS if is_below(found.target, UNSAFE)]
    assert not unsafe, as_lines(unsafe)
    sent = {"all_gather_object", "gather_object", "broadcast_object_list", "send_object_list"}
    objects = [one for one, name, _ in find_calls() if name.rpartition(".")[2] in sent]
    assert not objects, f"objects are pickled to be sent to other processes:{as_lines(objects)}"
    loads = [
        location
        for location, name, keywords in find_calls()
        if name == "torch.load" and keywords.get("weights_only") is not True
    ]
    assert not loads, f"torch.load needs a literal weights_only=True:{as_lines(loads)}"
    arrays = [
        location
        for location, _, keywords in find_calls()
        if keywords.get("allow_pickle", False) is not False
    ]
    assert not arrays, f"allow_pickle runs code from the file:{as_lines(arrays)}"


def test_no_command_asks_for_input():
    names = {"input", "builtins.input", "getpass.getpass", "getpass", "Prompt.ask", "Confirm.ask"}
    calls = [location for location, name, _ in find_calls() if name in names]
    assert not calls, as_lines(calls)


def read_texts() -> Iterator[tuple[Path, str]]:
    """Yield the committed text files of the project."""
    folders = [ROOT / name for name in ("tessera", "tests", "bench", "examples", "docs", ".ci")]
    files = [file for folder in folders for file in folder.rglob("*")] + list(ROOT.glob("*"))
    suffixes = (".py", ".md", ".toml", ".txt", ".sh", ".json", ".html", ".js", "")
    for file in sorted(files):
        is_text = (
            file.suffix in suffixes and file.is_file() and file.name not in ("LICENSE", ".git")
        )
        if is_text and "__pycache__" not in file.parts:
            yield file.relative_to(ROOT), file.read_text(encoding="utf-8")


def find_text(pattern: str, *, flags: int = 0, below: str = "") -> dict[str, str]:
    """Return location -> matching text."""
    return {
        f"{file}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}": match.group()
        for file, text in read_texts()
        if file.as_posix().startswith(below)
        for match in re.finditer(pattern, text, flags)
    }


def test_no_file_contains_a_path_of_a_machine():
    found = find_text(r"(?<![\w.})/-])/(?:work|tmp|root|home|opt|mnt|Users)(?![\w-])")
    assert not found, as_lines(found)


def test_no_file_contains_other_hosts_than_those_for_readers():
    """Addresses of package registries belong to the settings of the machine."""
    hosts = find_text(
        r"(?<=://)[\w-]+(?:\.[\w-]+)*\.[a-z]{2,}|\b[\w-]+(?:\.[\w-]+)*\.(?:org|com)\b"
    )
    unknown = [location for location, host in hosts.items() if host not in HOSTS]
    assert hosts and not unknown, as_lines(unknown)


def test_any_is_rare_in_annotations():
    """It is needed where Python has no better type, such as for the content of JSON files."""
    found = [
        f"{path}:{number}"
        for path in sorted((ROOT / "tessera").rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.search(r"\bAny\b", line) and not re.match(r"\s*(from|import) |\s*Any,$", line)
    ]
    assert len(found) < 60, found


def test_limits_of_time_in_tests_are_generous():
    """A machine may be eight times slower; only limits of CPU time may be tight."""
    limits = find_text(r"(?<=timeout=)[0-9.]+|(?<=wait\()[0-9.]+(?=\))", below="tests")
    short = [location for location, number in limits.items() if float(number) < 600]
    assert limits and not short, as_lines(short)


def test_no_todo_is_left():
    found = find_text("[T]ODO|[F]IXME")
    assert not found, as_lines(found)


RENAMED = (
    "told heard meeting sayings judged letter foretell beliefs settle forget_gradients "
    "gradients_meet share_right refuse_[a-z]+ symbols?"
).split()
"""Words of earlier versions that have other names now; docs/design.md names the concepts."""


@pytest.mark.parametrize("folder", ["tessera", "docs", "README.md"])
def test_renamed_words_do_not_come_back(folder: str):
    found = find_text(rf"\b(?:{'|'.join(RENAMED)})\b", below=folder)
    assert not found, as_lines(found)


def test_every_config_field_has_a_whole_sentence_as_help():
    """The string below a field is the help of its flag."""
    incomplete = []
    for file, tree in SOURCES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ClassDef) or not node.name.endswith("Config"):
                continue
            for statement, following in zip(node.body, node.body[1:]):
                is_field = isinstance(statement, ast.AnnAssign)
                match following:
                    case ast.Expr(value=ast.Constant(value=str(text))) if is_field:
                        first = text.lstrip("`")[:1]
                        if not (first.isupper() and text.rstrip().endswith(".")):
                            incomplete.append(f"{file}:{following.lineno}: {text[:60]}")
    assert not incomplete, as_lines(incomplete)


# ---- dependencies

INSTALLED_EXTRAS = (
    "dev perceptual text video audio speech voice mesh datasets remote hub onnx view tensorboard"
).split()
"""The extras that the Makefile installs."""
NOT_INSTALLED = {"faiss": "faiss-cpu"}
"""Module -> its package, where `make` does not install it and the names differ."""


def read_project() -> dict[str, Any]:
    return tomllib.loads(ROOT.joinpath("pyproject.toml").read_text(encoding="utf-8"))["project"]


def installed_requirements() -> list[Requirement]:
    """Return what the Makefile installs."""
    extras = read_project()["optional-dependencies"]
    lines = [line for extra in INSTALLED_EXTRAS for line in extras[extra]]
    return [Requirement(line) for line in [*read_project()["dependencies"], *lines]]


def read_pins() -> dict[str, str]:
    lines = ROOT.joinpath("constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [re.fullmatch(r"([\w.-]+)==([\w.]+)", one) for one in lines if not one.startswith("#")]
    assert all(pins), "a line of constraints.txt must be name==version"
    return {canonicalize_name(pin[1]): pin[2] for pin in pins if pin}


def dependencies_of(requirement: Requirement) -> Iterator[Requirement]:
    """Yield what an installed package needs on this machine, with the requested extras."""
    extras = requirement.extras or {""}
    for needed in map(Requirement, metadata.requires(requirement.name) or []):
        marker = needed.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
            yield needed


def test_the_core_has_at_most_ten_dependencies():
    assert len(read_project()["dependencies"]) <= 10


def test_the_makefile_installs_the_listed_extras():
    makefile = ROOT.joinpath("Makefile").read_text(encoding="utf-8")
    assert f".[{','.join(INSTALLED_EXTRAS)}]" in makefile


def test_pinned_versions_are_within_the_ranges():
    for requirement in installed_requirements():
        pin = read_pins()[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin), requirement
    assert read_pins()["torch"] == "2.13.0"


def test_every_installed_package_is_pinned():
    # The CUDA build of torch pins its own companions.
    companions = ("nvidia-", "cuda-", "triton")
    pending, visited = installed_requirements(), set()
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        key = (name, *sorted(requirement.extras))
        if key in visited or name.startswith(companions):
            continue
        visited.add(key)
        assert name in read_pins(), f"{name} is installed and has no line in constraints.txt"
        pending.extend(dependencies_of(requirement))
    assert len(visited) > len(installed_requirements())


def test_every_third_party_import_is_a_declared_dependency():
    extras = read_project()["optional-dependencies"]
    declared = {
        canonicalize_name(Requirement(line).name)
        for lines in (read_project()["dependencies"], *extras.values())
        for line in lines
    }
    packages = metadata.packages_distributions()

    def is_declared(name: str) -> bool:
        candidates = packages.get(name, [NOT_INSTALLED.get(name, name)])
        return any(canonicalize_name(package) in declared for package in candidates)

    undeclared = [
        found for found in IMPORTS if found.is_third_party and not is_declared(root(found.target))
    ]
    assert not undeclared, as_lines(undeclared)


# ---- start-up time

MAX_CPU_SECONDS = 0.3
MAX_NUMPY_IMPORTS = 3.2
"""The limit on machines on which everything takes longer, in units of importing numpy."""

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
        "imports_torch": "torch" in sys.modules,
        "cpu_seconds": sum(one.ru_utime + one.ru_stime for one in used),
    }, file)
"""


@dataclass(frozen=True, kw_only=True)
class Result:
    output: str
    failed: bool
    imports_torch: bool
    cpu_seconds: float


def run_python(arguments: list[str] | None, report: Path) -> Result:
    """Import tessera in a new process and, unless the arguments are None, run a command."""
    command = [sys.executable, "-W", "error", "-c", CHILD, json.dumps(arguments), str(report)]
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    content = json.loads(report.read_text(encoding="utf-8"))
    return Result(output=done.stdout + done.stderr, **content)


@pytest.mark.parametrize(
    ("arguments", "fails", "expected"),
    [
        pytest.param(None, False, "", id="import tessera"),
        pytest.param(["--help"], False, "recipes", id="--help"),
        pytest.param(["recipes"], False, "images-vqgan", id="recipes"),
        pytest.param(["tran"], True, "train", id="an unknown command"),
        pytest.param(["train", "images-vqgn"], True, "images-vqgan", id="an unknown recipe"),
    ],
)
def test_commands_without_a_network_start_quickly_and_without_torch(
    arguments, fails, expected, tmp_path
):
    """One of three attempts must be quick: the first may have to compile."""
    for attempt in range(3):
        result = run_python(arguments, tmp_path / f"{attempt}.json")
        assert not result.imports_torch, "importing torch takes more than a second"
        assert result.failed == fails
        assert expected in result.output
        if result.cpu_seconds < MAX_CPU_SECONDS:
            return
        if result.cpu_seconds < MAX_NUMPY_IMPORTS * measure_numpy_import():
            return
    pytest.fail(f"{result.cpu_seconds:.2f} s of CPU time in the last of three attempts")


def measure_numpy_import() -> float:
    """Return the CPU time of a process that imports numpy."""
    script = "import numpy, time; print(time.process_time())"
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return float(done.stdout)
