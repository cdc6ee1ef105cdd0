"""What does it take to open files of tokens, and to measure the lengths of compressed lines?

A `.bin` of uint16 tokens is opened. The lengths of a `.jsonl.zst` are measured for the first time, against
decompressing by `zstandard` and parsing by `orjson` alone. Run `python benchmarks/data_files.py [--quick]`. Prints
tables and writes them, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import io
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from support.timing import REPEATS, best_seconds, digits, report, table, versions_and_hardware

from jvarlen.data.open import open_data

WORDS = [f"{word}{i}" for i in range(40) for word in ("able", "bridge", "cloud", "delta", "echo", "fjord", "grain")]


def open_tokens(folder: Path, num_tokens: int) -> list[list[str]]:
    """Opening a `.bin` in blocks of 1,024 tokens, without and with comparing all tokens with a vocabulary."""
    path = folder / "tokens.bin"
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        for start in range(0, num_tokens, 1 << 24):
            rng.integers(0, 50_257, min(1 << 24, num_tokens - start), np.uint16).tofile(file)
    rows = []
    for name, num_values in (("opened", None), ("opened, and all tokens compared with a vocabulary", 50_257)):
        seconds, dataset = best_seconds(
            lambda num_values=num_values: open_data(path, block_length=1024, num_values=num_values, progress=False)
        )
        rows.append([name, f"{len(dataset):,}", f"{seconds:.4f}"])
    path.unlink()
    return rows


def write_lines(path: Path, num_lines: int) -> int:
    """Writes a `.jsonl.zst`, and returns the bytes of its lines."""
    import pyarrow as pa

    rng = np.random.default_rng(0)
    words = np.array(WORDS)
    size = 0
    with pa.output_stream(str(path), compression="zstd") as file:
        for i in range(num_lines):
            text = " ".join(words[rng.integers(0, len(words), rng.integers(5, 300))])
            line = (json.dumps({"id": i, "text": text, "source": "made up"}) + "\n").encode()
            size += len(line)
            file.write(line)
    return size


def lengths_by_packages(path: Path) -> np.ndarray:
    """Lengths as one gets them from the two packages, line by line."""
    import orjson
    import zstandard

    with path.open("rb") as file:
        lines = io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file), 1 << 20)
        return np.array([len(orjson.loads(line)["text"].encode()) for line in lines])


def measure_lines(folder: Path, num_lines: int) -> list[list[str]]:
    """Lengths of all lines of a compressed file, that was never opened before."""
    path, caches = folder / "lines.jsonl.zst", folder / "caches"
    size = write_lines(path, num_lines)
    os.environ["XDG_CACHE_HOME"] = str(caches)

    def measure() -> np.ndarray:
        shutil.rmtree(caches, ignore_errors=True)
        for kept in folder.glob("lines.jsonl.zst.lengths-*"):
            kept.unlink()
        return open_data(path, field="text", progress=False).lengths

    calls: dict[str, Callable[[], np.ndarray]] = {"`open_data`": measure}
    if importlib.util.find_spec("zstandard") and importlib.util.find_spec("orjson"):
        calls["`zstandard` and `orjson`"] = lambda: lengths_by_packages(path)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    found: dict[str, np.ndarray] = {}
    for _ in range(REPEATS):  # in turn
        for name, call in calls.items():
            begun = time.perf_counter()
            found[name] = call()
            seconds[name].append(time.perf_counter() - begun)
    first = next(iter(found.values()))
    assert all(np.array_equal(first, lengths) for lengths in found.values())
    best = {name: min(values) for name, values in seconds.items()}
    theirs = list(best.values())[-1]
    return [[name, f"{value:.3f}", digits(size / value / 1e6), digits(theirs / value)] for name, value in best.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small files, and no report")
    quick = parser.parse_args().quick
    num_tokens, num_lines = (10**6, 500) if quick else (10**9, 100_000)
    with tempfile.TemporaryDirectory() as folder:
        tokens = open_tokens(Path(folder), num_tokens)
        lines = measure_lines(Path(folder), num_lines)
    report(
        "data-files",
        [
            f"# Data files, {datetime.date.today()}",
            "",
            f"Best of {REPEATS}, what is compared in turn; files are in the page cache.",
            "",
            *table(f"{num_tokens:,} tokens, uint16|blocks of 1,024|seconds", tokens),
            "",
            f"Lengths of {num_lines:,} lines of a `.jsonl.zst`, neither decompressed nor measured before.",
            "",
            *table("by|seconds|MB of lines a second|of the speed of the packages alone", lines),
            "",
            versions_and_hardware("pyarrow", "orjson", "zstandard"),
        ],
        write=not quick,
    )


if __name__ == "__main__":
    main()
