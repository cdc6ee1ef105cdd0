"""How does `batch_by_tokens` compare with a plain loop in C that cuts the same batches?

Run `python benchmarks/compiled_loop.py [--num-samples 10000000] [--quick]`. Prints a table and writes it, with versions
and hardware, to `benchmarks/results/`. Needs `cc`; without it the loop's columns stay empty.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import functools
import itertools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support.timing import REPEATS, best_seconds, digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.planning._kernels import close_by_budget

SOURCE = Path(__file__).parent / "budget_loop.c"
FLAGS = ("-O3", "-march=native", "-shared", "-fPIC")

Loop = Callable[[np.ndarray, int, int], np.ndarray]


def compile_loop(folder: str) -> Loop | None:
    """The loop in C as a function of lengths, budget and multiple that returns the batches' ends."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = Path(folder) / "budget_loop.so"
    subprocess.run([compiler, *FLAGS, "-o", library, SOURCE], check=True)
    function = ctypes.CDLL(str(library)).close_by_budget
    array = np.ctypeslib.ndpointer(np.int64, flags="C_CONTIGUOUS")
    function.argtypes = [array, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, array]
    function.restype = ctypes.c_int64

    def call(lengths: np.ndarray, max_tokens: int, multiple: int) -> np.ndarray:
        ends = np.empty(len(lengths), np.int64)
        return ends[: function(lengths, len(lengths), max_tokens, multiple, ends)].copy()

    return call


def sort_first(loop: Loop, lengths: np.ndarray, max_tokens: int, multiple: int) -> np.ndarray:
    return loop(lengths[np.argsort(lengths, kind="stable")], max_tokens, multiple)


def measure(num_samples: int, loop: Loop | None) -> list[list[str]]:
    lengths = np.random.default_rng(0).integers(128, 4096, num_samples)
    sorting = None if loop is None else functools.partial(sort_first, loop)
    cases = [
        ("sorted", np.sort(lengths), "dataset", loop),
        ("unsorted", lengths, "dataset", loop),
        ("unsorted, sorted first", lengths, "length", sorting),
    ]
    rows = []
    for (name, values, order, peer), max_tokens, multiple in itertools.product(cases, (500_000, 32_768), (1, 8)):
        call = functools.partial(jvarlen.batch_by_tokens, values, max_tokens, order=order, sequence_multiple=multiple)
        seconds, batches = best_seconds(call)
        row = [name, f"{max_tokens:,}", str(multiple), digits(seconds), "", "no compiler", ""]
        if order == "dataset":
            kernel = functools.partial(close_by_budget, values, max_tokens, num_samples, multiple, True)
            row[4] = digits(best_seconds(kernel)[0])
        if peer is not None:
            loop_s, ends = best_seconds(functools.partial(peer, values, max_tokens, multiple))
            if not np.array_equal(batches.offsets[1:], ends):
                raise RuntimeError(f"the loop in C cuts other batches: {row[:3]}")
            row[5:] = [digits(loop_s), f"{seconds / loop_s:.2f}"]
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-samples", type=int, default=10_000_000)
    parser.add_argument("--quick", action="store_true", help="100,000 samples, and no report")
    options = parser.parse_args()
    num_samples = 100_000 if options.quick else options.num_samples
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(num_samples, compile_loop(folder))
    lines = [
        f"# A compiled loop, {datetime.date.today()}",
        "",
        f"{num_samples:,} lengths, uniform from 128 to 4,095, int64. Best of {REPEATS} in one run. "
        f"`benchmarks/budget_loop.c` with `cc {' '.join(FLAGS)}`; both cut the same batches. The loop takes the "
        "lengths as they are; `batch_by_tokens` also checks them and returns the order; its loop alone is the "
        "kernel that numba compiles. The ratio is the whole call over the loop in C. Sorted first: "
        '`np.argsort(kind="stable")` before the loop, `order="length"` in jvarlen.',
        "",
        *table("lengths|budget|multiple|batch_by_tokens, seconds|its loop alone|loop in C, seconds|ratio", rows),
        "",
        versions_and_hardware(),
    ]
    report("compiled-loop", lines, write=not options.quick)


if __name__ == "__main__":
    main()
