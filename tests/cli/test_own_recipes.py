"""Recipes of a user's own module or of an installed package, and runs from another's settings."""

from __future__ import annotations

import json
import shutil
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from tessera.recipes import registry
from tessera.run.directory import RunDirectory
from tests.cli_runner import run_invalid, tessera

SOURCE = Path(__file__).parents[1] / "sixth_modality/curves.py"


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module that defines a recipe, and data for it."""
    shutil.copy(SOURCE, tmp_path / "my_curves.py")
    (tmp_path / "data").mkdir()
    for number in range(12):
        values = np.sin(np.linspace(0, 1 + number, 32))
        np.savetxt(tmp_path / f"data/{number}.csv", values, delimiter=",")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


FLAGS = ("--data", "data", "--steps", "3", "--batch-size", "4")


def test_a_recipe_of_a_module_is_trained_and_read_back(workplace: Path) -> None:
    result = tessera("train", "my_curves:curves_tokenizer", *FLAGS)
    assert result.code == 0, result
    run = workplace / "runs/curves_tokenizer"
    assert json.loads((run / "config.json").read_text())["recipe"] == "my_curves:curves_tokenizer"
    assert registry.read_run(RunDirectory(run)).data.path == "data"
    assert tessera("evaluate", run).code == 0
    copied = tessera("train", "--config", run / "config.json", "--steps", "4", "--out", "other")
    assert copied.code == 0, copied
    settings = [json.loads((one / "config.json").read_text()) for one in (run, Path("other"))]
    assert [one["engine"].pop("steps") for one in settings] == [3, 4]
    assert settings[0] == settings[1]
    help_text = tessera("train", "--config", run / "config.json", "--help").text
    assert "--task.model.dim" in help_text and "3" in help_text


def test_a_recipe_of_an_installed_package_is_found_by_name(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("my-curves", "my_curves:curves_tokenizer", registry.ENTRY_POINTS)
    groups = {registry.ENTRY_POINTS: (entry,)}
    monkeypatch.setattr(registry, "entry_points", lambda group: groups.get(group, ()))
    assert "my-curves" in tessera("recipes").out
    assert tessera("train", "my-curves", *FLAGS).code == 0
    assert registry.read_run(RunDirectory("runs/my-curves")).recipe == "my-curves"
    assert "did you mean 'my-curves'?" in run_invalid("train", "my-curvs")


def test_a_function_that_is_no_recipe_is_never_called(workplace: Path) -> None:
    for name in ("shutil:rmtree", "my_curves:make_recipe"):
        assert "is no recipe" in run_invalid("train", name)
    Path("run").mkdir()
    Path("run/config.json").write_text(json.dumps({"recipe": "os:getcwd"}))
    assert "is no recipe" in run_invalid("sample", "run")


def test_invalid_references_get_a_sentence(workplace: Path) -> None:
    assert "'no_module:recipe' cannot be imported" in run_invalid("train", "no_module:recipe")
    assert "has no 'nothing'" in run_invalid("train", "my_curves:nothing")
    assert "--config needs a file" in run_invalid("train", "--config")
    assert "it has no config.json" in run_invalid("train", "--config", "data/config.json")
