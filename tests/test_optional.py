"""Tests of `require`, which imports the packages of tessera's extras."""

from __future__ import annotations

import json
import sys

import pytest

from tessera._optional import require


def test_installed_module_is_returned():
    assert require("json", extra="video", purpose="Reading videos") is json


@pytest.mark.parametrize(
    ("module", "package"), [("av", "av"), ("fast_simplification", "fast-simplification")]
)
def test_missing_module_is_an_error_with_the_install_command(monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError) as caught:
        require(module, extra="mesh", purpose="Simplifying meshes")
    message = str(caught.value)
    assert message.startswith(f"Simplifying meshes needs the Python package {package}, which is")
    assert message.endswith('pip install "tessera[mesh]"')
