"""How long does planning on disk take, in how much memory, and how soon is there a batch?

Files of 10⁷ to 10⁹ lognormal lengths, uint16, are planned in a process each, by length and shuffled. Up to 10⁸ the
plan is made in memory as well, and both digests are compared. Then another process opens the file and takes the first
batch at a random step. Run `python benchmarks/out_of_core.py [--quick] [--directory DIR]`. It needs 30 GB of disk.
Prints a table and writes it, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from support.timing import digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.experimental import large_plans

SIZES = (10**7, 10**8, 10**9)
QUICK_SIZES = (10**3, 10**4)
LARGEST_IN_MEMORY = 10**8
ORDERS = ("length", "shuffle")
LONGEST = 8192
PIECE = 2**24


class Samples:
    """A dataset of samples as long as the lengths say."""

    def __init__(self, lengths: np.ndarray):
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.ones(self._lengths[index], np.int32)


def write_lengths(path: Path, num_samples: int) -> None:
    """A file of lengths, lognormal with a median of 270."""
    rng = np.random.default_rng(0)
    lengths = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint16, shape=(num_samples,))
    for start in range(0, num_samples, PIECE):
        part = lengths[start : start + PIECE]
        part[:] = rng.lognormal(5.6, 0.8, len(part)).clip(1, LONGEST)
    lengths.flush()


def plan(path: Path, order: str, out: Path | None) -> dict[str, float | str]:
    """Seconds, the most resident bytes and the digest."""
    lengths = np.load(path, mmap_mode="r")
    begun = time.perf_counter()
    if out is None:
        lengths = np.asarray(lengths)
    settings = {"max_shapes": 16, "length_multiple": 16, "num_microbatches": 8}
    buckets = jvarlen.make_buckets(lengths, 32_768, **settings)
    options = {"num_microbatches": 8, "order": order, "seed": 1}
    if out is None:
        made = jvarlen.make_plan(lengths, buckets, **options)
    else:
        made = large_plans.plan_on_disk(lengths, buckets, out, **options)
    digest = made.digest
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": seconds, "bytes": peak, "digest": digest, "steps": made.num_steps}


def open_plan(path: Path, out: Path) -> dict[str, float]:
    """Seconds to open a plan, and until there is the first batch at a random step."""
    jvarlen.load(
        jvarlen.make_plan([3, 1], [(2, 3)], order="length"), [np.ones(3), np.ones(1)]
    ).close()  # imports what loading needs
    samples = Samples(np.load(path))  # in memory: what counts is the plan
    begun = time.perf_counter()
    opened = large_plans.open_plan(out)
    opened_s = time.perf_counter() - begun
    start = int(np.random.default_rng().integers(opened.num_steps))
    begun = time.perf_counter()
    batches = jvarlen.load(opened, samples, start_step=start)
    next(batches)
    first_s = time.perf_counter() - begun
    batches.close()
    begun = time.perf_counter()
    opened.verify()
    return {"open": opened_s, "first": first_s, "verify": time.perf_counter() - begun}


def answer(work: str, lengths: str, *rest: str) -> dict[str, float | str]:
    """What a process is asked for."""
    if work == "open":
        return open_plan(Path(lengths), Path(*rest))
    order, out = rest
    return plan(Path(lengths), order, Path(out) if out else None)


def apart(*arguments: str) -> dict[str, float | str]:
    """What a process of its own measures."""
    command = [sys.executable, __file__, "--one", *arguments]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def measure(sizes: tuple[int, ...], directory: Path, *, is_apart: bool) -> tuple[list[str], list[str]]:
    """The table, and the sentences on growth. Unless all is measured apart, the first plan alone is."""
    rows, seconds = [], {order: [] for order in ORDERS}
    for num_samples in sizes:
        lengths, out = directory / "lengths.npy", directory / "plan"
        write_lengths(lengths, num_samples)
        for order in ORDERS:
            ask = apart if is_apart else answer
            on_disk = (ask if rows else apart)("plan", str(lengths), order, str(out))
            opened = ask("open", str(lengths), str(out))
            in_memory = None if num_samples > LARGEST_IN_MEMORY else ask("plan", str(lengths), order, "")
            if in_memory is not None and in_memory["digest"] != on_disk["digest"]:
                raise AssertionError(f"the digests of {num_samples:,} samples by {order} differ")
            seconds[order].append(on_disk["seconds"])
            rows.append(
                [
                    f"{num_samples:,}",
                    order,
                    digits(on_disk["seconds"]),
                    "–" if in_memory is None else digits(in_memory["seconds"]),
                    digits(on_disk["bytes"] / 1e9),
                    "–" if in_memory is None else digits(in_memory["bytes"] / 1e9),
                    digits(1e3 * opened["open"]),
                    digits(opened["first"]),
                    digits(opened["verify"]),
                ]
            )
            out.unlink()
        lengths.unlink()
    header = "samples|order|s on disk|s in memory|GB on disk|GB in memory|open, ms|first batch, s|verify, s"
    grown = [
        f"By {order}, seconds grow from {sizes[0]:,} to {sizes[-1]:,} samples with the exponent "
        f"{np.polyfit(np.log(sizes), np.log(seconds[order]), 1)[0]:.2f} (least squares of logarithms)."
        for order in ORDERS
    ]
    return table(header, rows), grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 and 10,000 samples, and no report")
    parser.add_argument("--directory", type=Path, help="where to write the files; a temporary directory otherwise")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(answer(*options.one)))
        return
    directory = Path(tempfile.mkdtemp(dir=options.directory))
    try:
        rows, grown = measure(QUICK_SIZES if options.quick else SIZES, directory, is_apart=not options.quick)
    finally:
        shutil.rmtree(directory)
    lines = [
        f"# Planning on disk, {datetime.date.today()}",
        "",
        "Lognormal lengths of uint16, median 270, longest 8,192; 16 shapes of up to 32,768 tokens, 8 microbatches a "
        "step. Seconds include choosing the shapes and the digest. GB: the most resident memory of the process. "
        "Opening, and the first batch at a random step, in a process that has imported the library already. Digests on "
        "disk and in memory were equal wherever both were made.",
        "",
        *rows,
        "",
        *grown,
        "",
        versions_and_hardware("jax"),
    ]
    report("out-of-core", lines, write=not options.quick)


if __name__ == "__main__":
    main()
