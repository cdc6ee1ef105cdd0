"""How fast do two processes measure the lengths of JSON lines, against `orjson` reading the same file in as many?

The plain program cuts the file in two at the end of a line; each process parses its lines one by one. `open_data`
hashes the file as well, for the cache of lengths. Run `python benchmarks/measuring.py [--quick]`. Prints tables and
writes them, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from support.timing import REPEATS, digits, report, table, versions_and_hardware

from jvarlen.data.line_files import LineDataset
from jvarlen.data.measure import measure_lengths
from jvarlen.data.open import open_data

WORDS = [f"{word}{i}" for i in range(40) for word in ("able", "bridge", "cloud", "delta", "echo", "fjord", "grain")]
NUM_TEXTS = 20_000  # different ones


def write_lines(path: Path, num_lines: int) -> int:
    """Writes a `.jsonl`, and returns its bytes."""
    rng = np.random.default_rng(0)
    words = np.array(WORDS)
    texts = [" ".join(words[rng.integers(0, len(words), rng.integers(5, 300))]) for _ in range(NUM_TEXTS)]
    block = [json.dumps({"id": i, "text": text, "source": "made up"}) + "\n" for i, text in enumerate(texts)]
    with path.open("w") as file:
        for start in range(0, num_lines, NUM_TEXTS):
            file.writelines(block[: num_lines - start])
    return path.stat().st_size


def lengths_of_lines(path: Path, start: int, end: int) -> np.ndarray:
    """Lengths of the lines between two offsets."""
    import orjson

    lengths = []
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            lengths.append(len(orjson.loads(line)["text"].encode()))
            start += len(line)
            if start >= end:
                break
    return np.array(lengths)


def by_orjson(path: Path) -> np.ndarray:
    """Lengths by a plain program of two processes."""
    with path.open("rb") as file:
        file.seek(path.stat().st_size // 2)
        file.readline()
        middle = file.tell()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        halves = pool.map(lengths_of_lines, [path] * 2, [0, middle], [middle, path.stat().st_size])
        return np.concatenate(list(halves))


def by_open_data(path: Path) -> np.ndarray:
    """Lengths of a file that was never opened before."""
    for kept in path.parent.glob(f"{path.name}.lengths-*"):
        kept.unlink()
    return open_data(path, num_workers=2, progress=False).lengths


def by_measure_lengths(path: Path) -> np.ndarray:
    """Lengths of a dataset, opening it included."""
    return measure_lengths(LineDataset(path, "text"), num_workers=2, progress=False)


CALLS: dict[str, Callable[[Path], np.ndarray]] = {
    "`orjson`": by_orjson,
    "`measure_lengths`": by_measure_lengths,
    "`open_data`": by_open_data,
}


def timed(call: Callable[[Path], np.ndarray], path: Path) -> tuple[float, float, np.ndarray]:
    """Seconds, seconds of CPU in this process and those it started, and the lengths."""
    before, begun = cpu_seconds(), time.perf_counter()
    lengths = call(path)
    return time.perf_counter() - begun, cpu_seconds() - before, lengths


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small file, and no report")
    quick = parser.parse_args().quick
    num_lines = 5_000 if quick else 2_500_000
    seconds: dict[str, list[float]] = {name: [] for name in CALLS}
    cpu: dict[str, list[float]] = {name: [] for name in CALLS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lines.jsonl")
        size = write_lines(path, num_lines)
        for _ in range(REPEATS):  # in turn
            found = {}
            for name, call in CALLS.items():
                took, used, found[name] = timed(call, path)
                seconds[name].append(took)
                cpu[name].append(used)
            assert all(np.array_equal(found["`orjson`"], lengths) for lengths in found.values())
    best, least = ({name: min(values) for name, values in of.items()} for of in (seconds, cpu))
    rows = [
        [
            name,
            f"{best[name]:.2f}",
            digits(size / best[name] / 1e6),
            digits(best["`orjson`"] / best[name]),
            f"{least[name]:.2f}",
            digits(least["`orjson`"] / least[name]),
        ]
        for name in CALLS
    ]
    runs = [[str(i + 1), *(f"{seconds[name][i]:.2f}" for name in CALLS)] for i in range(REPEATS)]
    report(
        "measuring",
        [
            f"# Measuring JSON lines, {datetime.date.today()}",
            "",
            f"{num_lines:,} lines, {size / 1e6:,.0f} MB, in the page cache; two processes each.",
            f"Best of {REPEATS}, in turn, starting processes included; a ratio above 1 is faster than `orjson`.",
            "",
            *table("by|seconds|MB a second|of `orjson`|seconds of CPU|of `orjson`, in CPU", rows),
            "",
            *table(f"run|{'|'.join(f'{name}, seconds' for name in CALLS)}", runs),
            "",
            versions_and_hardware("orjson"),
        ],
        write=not quick,
    )


if __name__ == "__main__":
    main()
