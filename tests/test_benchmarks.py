"""Benchmarks run, in their quick form; their figures are no concern of tests, but what they count is."""

import importlib
import json
import os

import numpy as np
import pytest

import jvarlen
from tests.support import forks
from tests.support.benchmark_modules import BENCHMARKS, imported

# Those that take long. `make bench` runs them.
LONG = {
    "asynchronous", "attention", "attention_windows", "background", "balance", "batch_size_rules", "bucket_compile",
    "checkpoints", "choice", "code_size", "elastic", "end_to_end", "fine_tuning", "generation", "gpu", "inference",
    "loader", "measuring", "memory", "out_of_core", "overlap", "peers", "rows_by_memory", "schedules", "sequence",
    "shared_prompts", "simulate", "sorting", "step_against_torch", "step_loss", "step_time", "targets", "tensor",
    "training", "zero",
}  # fmt: skip


peers = imported("peers")
packing = imported("packing")
peer_calls = imported("support.peer_calls")


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    sorted(path for path in BENCHMARKS.glob("*.py") if path.stem not in LONG | {"run"}),
    ids=lambda path: path.stem,
)
def test_a_benchmark_prints_its_table_and_gives_its_data(path, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": str(BENCHMARKS.parent),
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JVARLEN_BENCH_REPORTS": str(tmp_path),
    }
    run = forks.run(path, "--quick", env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("\n| ") > 3
    (markdown,), (data,) = tmp_path.glob("*.md"), tmp_path.glob("*.json")
    assert run.stdout.endswith(markdown.read_text())
    report = json.loads(data.read_text())
    assert report["name"].replace("-", "_") == path.stem
    assert report["question"].endswith("?")
    assert report["quick"]
    for table in report["tables"]:
        assert table["rows"]
        assert all(len(row) == len(table["header"]) for row in table["rows"])


@pytest.mark.parametrize("name", sorted({*LONG, *(f"support.{path.stem}" for path in BENCHMARKS.glob("support/*.py"))}))
def test_a_long_benchmark_and_its_workers_find_what_they_import(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    importlib.import_module(name)


def test_lost_and_repeated_samples_and_padding_are_counted(peers):
    lengths = peers.Lengths("three", np.array([4, 8, 5, 2]), 10)

    def work(given, lengths):
        return lambda: [[1, 0], [1]], lambda batches: peers.from_lists(lengths.values, batches)

    lines = peers.compare_batches([peers.Peer("loses two", "jvarlen", work)], lengths)
    named = dict(zip(cells(lines[2]), cells(lines[4]), strict=True))
    assert named["padding"] == f"{1 - (8 + 4 + 8) / 24:.2%}"
    assert (named["shapes"], named["batches"], named["largest / budget"]) == ("2", "2", "1.600")
    assert (named["samples lost"], named["repeated"]) == ("2", "1")


def test_full_cut_and_padding_rows_of_a_packing_are_counted(packing, peer_calls, monkeypatch):
    monkeypatch.setattr(peer_calls, "LIMIT_S", 0)
    lines = packing.compare(peer_calls.Lengths("four", np.array([160, 160, 128, 224]), 512))
    rows = [line for line in lines if line.startswith("| ")]
    named = {cells(line)[0]: dict(zip(cells(rows[0]), cells(line), strict=True)) for line in rows[1:]}
    whole, cut = named["jvarlen: pack_samples, rows of one length"], named["Grain: ConcatThenSplit"]
    assert (whole["fill"], whole["rows"], whole["samples lost"], whole["cut"]) == (f"{21 / 32:.2%}", "4", "0", "0")
    assert (cut["fill"], cut["rows"], cut["samples lost"], cut["cut"]) == (f"{21 / 24:.2%}", "3", "0", "2")
    # Two batches of two rows of 256 each: the packer that cuts has one padding row.
    assert whole["positions / tokens"] == cut["positions / tokens"] == f"{32 / 21:.4f}"
    assert named["first-fit-decreasing in Python"]["rows"] == "4"


def test_positions_of_packed_rows_are_those_of_their_plan(packing):
    lengths = np.random.default_rng(0).integers(1, 65, 500)
    packed = jvarlen.pack_samples(lengths, (16, 32, 64))
    options = {"packing": "best_fit", "row_lengths": (16, 32, 64), "order": "length"}
    plan = jvarlen.make_plan(lengths, max_tokens=192, **options)
    positions = sum(packing.positions_by_length(packed.capacity, 192).values())
    assert plan.padding == pytest.approx(1 - lengths.sum() / positions, abs=1e-12)


def test_first_fit_decreasing_fills_the_first_row_with_room(packing):
    lengths = np.random.default_rng(0).integers(1, 100, 300).tolist()
    rows = []
    for length in sorted(lengths, reverse=True):
        row = next((row for row in rows if sum(row) + length <= 100), None)
        rows.append([length]) if row is None else row.append(length)
    packed = packing.first_fit_decreasing(lengths, 100)
    assert [[lengths[i] for i in row] for row in packed] == rows
    assert sorted(i for row in packed for i in row) == list(range(300))
