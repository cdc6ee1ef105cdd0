"""The benchmark starts with the packages that are installed here."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_processes_of_the_benchmark_find_what_they_import(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    assert importlib.import_module("support.gpu_tables").make_lines
    assert importlib.import_module("support.gpu_jax").parts
    assert importlib.import_module("support.gpu_targets").parts
    pytest.importorskip("torch", reason="torch is not installed")
    assert importlib.import_module("support.gpu_torch").parts
