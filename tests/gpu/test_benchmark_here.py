"""The benchmark starts with the packages that are installed here."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_processes_of_the_benchmark_find_what_they_import(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    sections = importlib.import_module("gpu").SECTIONS
    for section in sections:
        if section.module == "gpu_torch":
            pytest.importorskip("torch", reason="torch is not installed")
        assert section.name in importlib.import_module(f"support.{section.module}").SECTIONS
