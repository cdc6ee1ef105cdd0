"""Benchmarks run, in their quick form; their figures are no concern of tests, but what they count is."""

import importlib
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SHARED = {"timing"}  # what the benchmarks import, no benchmark itself


@pytest.fixture
def peers(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peers")


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted(path for path in BENCHMARKS.glob("*.py") if path.stem not in SHARED), ids=lambda path: path.stem
)
def test_a_benchmark_prints_its_table(path):
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS.parent)}
    run = subprocess.run([sys.executable, path, "--quick"], capture_output=True, text=True, check=True, env=environment)
    assert run.stdout.count("\n| ") > 3


def test_peers_that_are_always_installed_are_found(peers):
    always = [peer for peer in peers.BATCHING + peers.PACKING if peer.found.partition(":")[0] in {"jvarlen", "grain"}]
    assert len(always) == 4 + len(peers.PACKING)
    for peer in always:
        pkgutil.resolve_name(peer.found)


def test_lost_and_repeated_samples_and_padding_are_counted(peers):
    lengths = peers.Lengths("three", np.array([4, 8, 5, 2]), 10)

    def work(given, lengths, max_tokens):
        return lambda: [[1, 0], [1]], lambda batches: peers.from_lists(lengths, batches)

    lines = peers.compare_batches([peers.Peer("loses two", "jvarlen", work)], lengths)
    named = dict(zip(cells(lines[2]), cells(lines[4]), strict=True))
    assert named["padding"] == f"{1 - (8 + 4 + 8) / 24:.2%}"
    assert (named["shapes"], named["batches"], named["largest / budget"]) == ("2", "2", "1.600")
    assert (named["samples lost"], named["repeated"]) == ("2", "1")


def test_peers_that_are_missing_or_broken_are_listed(peers):
    lengths = peers.Lengths("one", np.array([4]), 10)
    absent = [
        peers.Peer("absent", "no_package_of_this_name.module:name", None),
        peers.Peer("of another version", "jvarlen:no_such_name", None),
    ]
    rows = [cells(line) for line in peers.compare_batches(absent, lengths)[4:6]]
    assert rows[0][:2] == ["absent", "not installed"]
    assert rows[1][1].startswith("cannot be imported: ")


def test_samples_that_packing_cuts_are_counted(peers, monkeypatch):
    monkeypatch.setattr(peers, "ROW_LENGTH", 6)
    monkeypatch.setattr(peers, "LIMIT_S", 0)
    lines = peers.compare_packing(peers.Lengths("three", np.array([4, 4, 3]), 0))
    named = {cells(line)[0]: dict(zip(cells(lines[2]), cells(line), strict=True)) for line in lines[4:-1]}
    whole, cut = named["jvarlen: pack_samples"], named["Grain: ConcatThenSplit"]
    assert (whole["fill"], whole["rows"], whole["samples lost"], whole["cut"]) == (f"{11 / 18:.2%}", "3", "0", "0")
    assert (cut["fill"], cut["rows"], cut["samples lost"], cut["cut"]) == (f"{11 / 12:.2%}", "2", "0", "1")
