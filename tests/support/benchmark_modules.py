"""Modules of the benchmarks, which import each other as scripts in their folder do."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def imported(name):
    """A fixture that is a module of the benchmarks."""

    @pytest.fixture
    def module(monkeypatch):
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module(name)

    return module
