"""How long does each way of batching take to the same held-out bits per byte, compiling included?

The built-in corpus and the built-in model, six ways: jvarlen; a plain Flax and Optax loop padded to the longest, in
powers of two, and packed by Grain; PyTorch with `group_by_length` of transformers, and with token batches. Run
`python benchmarks/end_to_end.py [--quick] [--work DIR]`; with `--work`, a benchmark that was interrupted goes on.
`--tune` tries learning rates, and keeps what is best in `support/end_to_end_rates.json`. Prints a table and writes it,
with versions, hardware and a plot, to `benchmarks/results/`. Needs the extra `benchmarks`. Each run has a process of
its own: `end_to_end_jax.py` or `end_to_end_torch.py`, in `support/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from support.end_to_end_run import Data, Settings, save_data
from support.end_to_end_tables import WAYS, draw, make_report, rates_table
from support.timing import RESULTS, report, versions_and_hardware

from jvarlen.config import FitConfig
from jvarlen.datasets import split_held_out, stdlib_functions
from jvarlen.models import TransformerConfig, flat_params, init_params

FOLDER = Path(__file__).parent
RATES = FOLDER / "support" / "end_to_end_rates.json"
DEADLINE_S = 3_600  # of a process that hangs
NUM_RUNS = 3
FIRST_RATES = (1.5e-3, 3e-3, 6e-3)  # each is twice the one before
LEAST_RATE, LARGEST_RATE = 3e-4, 5e-2
PILOT = {"horizon": 200_000, "eval_every": 200_000, "target": 0.0, "limit_s": DEADLINE_S}

DEMO = FitConfig()  # of `make train`
FULL = {
    "model": {"num_layers": 2, "width": 128, "num_heads": 2},  # what TransformerConfig() is
    "longest": 1024,
    "max_tokens": DEMO.plan.max_tokens,
    "max_shapes": DEMO.plan.max_shapes,
    "length_multiple": DEMO.plan.length_multiple,
    "base_batch_size": 8,
    "horizon": 1_300_000,
    "eval_every": 50_000,
    "target": 3.1,
    "limit_s": 400.0,
}
QUICK = FULL | {
    "model": {"num_layers": 1, "width": 16, "num_heads": 1},
    "longest": 64,
    "max_tokens": 256,
    "max_shapes": 2,
    "horizon": 12_000,
    "eval_every": 2_000,
    "target": 6.0,
}


def say(what: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {what}", file=sys.stderr)


def prepare(folder: Path, sizes: dict[str, Any], seeds: Iterable[int], num_held_out: int | None) -> str:
    """Writes the files that all processes read, and says how much there is."""
    split = split_held_out(stdlib_functions(progress=False), DEMO.held_out_fraction)
    train, held_out = ([sample[: sizes["longest"]] for sample in part] for part in split)
    data = Data(train, held_out[:num_held_out])
    save_data(folder / "data.npz", data)
    for seed in seeds:
        np.savez(folder / f"weights-{seed}.npz", **flat_params(init_params(TransformerConfig(**sizes["model"]), seed)))
    (of_train, of_held_out) = (f"{len(part):,} of {sum(map(len, part)):,} bytes" for part in data)
    return f"{of_train} to train on, {of_held_out} held out"


def settings_of(folder: Path, sizes: dict[str, Any], way: str, seed: int, learning_rate: float) -> Settings:
    files = {"data": str(folder / "data.npz"), "weights": str(folder / f"weights-{seed}.npz")}
    return Settings(way=way, seed=seed, learning_rate=learning_rate, **files, **sizes)


def is_installed(way: str) -> bool:
    packages = [WAYS[way].package, "jax" if WAYS[way].is_jax else "torch"]
    return all(importlib.util.find_spec(package) is not None for package in packages)


def figures_of(runs: list[tuple[Settings, Path]]) -> list[dict[str, Any]]:
    """Figures of runs of one framework, in one process; those that a file has of the same settings are read there."""
    missing = [(dataclasses.asdict(settings), str(path)) for settings, path in runs if not is_done(settings, path)]
    if missing:
        program = "end_to_end_jax.py" if WAYS[runs[0][0].way].is_jax else "end_to_end_torch.py"
        # As a module: the programs and this one import what they share by the same names.
        command = [sys.executable, "-m", f"support.{program.removesuffix('.py')}", json.dumps(missing)]
        with tempfile.TemporaryDirectory() as empty:
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), str(FOLDER)]),
                "JAX_ENABLE_COMPILATION_CACHE": "false",
                "NUMBA_CACHE_DIR": empty,
            }
            subprocess.run(command, check=True, timeout=DEADLINE_S, env=environment)
    return [json.loads(path.read_text()) for _, path in runs]


def is_done(settings: Settings, path: Path) -> bool:
    return path.exists() and json.loads(path.read_text())["settings"] == dataclasses.asdict(settings)


def tune(folder: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    """The best rate of each way: of three, and of those beyond as long as the best lies at the end."""
    seed = NUM_RUNS  # no run has it
    prepare(folder, sizes, [seed], None)
    answer: dict[str, Any] = {"num_tokens": PILOT["horizon"], "seed": seed, "ways": {}}
    for way in filter(is_installed, WAYS):
        bits: dict[float, float] = {}
        following = list(FIRST_RATES)
        while following:
            for rate in following:
                say(f"{WAYS[way].name}, rate {rate:g}")
                settings = settings_of(folder, sizes | PILOT, way, seed, rate)
                (run,) = figures_of([(settings, folder / f"pilot-{way}-{rate:g}.json")])
                bits[rate] = run["points"][-1]["bits_per_byte"]
            best = min(bits, key=bits.__getitem__)
            beyond = {min(bits): best / 2, max(bits): best * 2}.get(best)
            following = [beyond] if beyond is not None and LEAST_RATE < beyond < LARGEST_RATE else []
        tried = {str(rate): bits[rate] for rate in sorted(bits)}
        answer["ways"][way] = {"learning_rate": best, "bits_per_byte": tried}
    return answer


def compare(folder: Path, sizes: dict[str, Any], rates: dict[str, float], *, quick: bool) -> tuple[dict[str, Any], str]:
    """Figures of all runs of each way that is installed, and how much data there is."""
    ways, seeds = list(filter(is_installed, WAYS)), range(1 if quick else NUM_RUNS)
    corpus = prepare(folder, sizes, seeds, 20 if quick else None)
    turns = [[(seed, way)] for seed in seeds for way in ways]
    if quick:  # a process a framework
        turns = [[(0, way) for way in ways if WAYS[way].is_jax == is_jax] for is_jax in (True, False)]
    runs: dict[str, Any] = {way: [] for way in ways}
    for turn in filter(None, turns):
        say(", ".join(f"{WAYS[way].name}, run {seed + 1}" for seed, way in turn))
        given = [
            (settings_of(folder, sizes, way, seed, rates[way]), folder / f"{way}-{seed}.json") for seed, way in turn
        ]
        for (_, way), figures in zip(turn, figures_of(given), strict=True):
            runs[way].append(figures)
    return runs, corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens, and no report")
    parser.add_argument("--tune", action="store_true", help="try learning rates, and keep the best of each way")
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="keep finished runs there, and take over what it has of the same settings",
    )
    options = parser.parse_args()
    quick, sizes = options.quick, QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.tune:
            tuned = tune(folder, sizes)
            RATES.write_text(json.dumps(tuned, indent=2) + "\n")
            print("\n".join(rates_table(tuned)))
            return
        tuned = None if quick else json.loads(RATES.read_text())
        rates = {way: tuned["ways"][way]["learning_rate"] if tuned else 1e-2 for way in WAYS}
        runs, corpus = compare(folder, sizes, rates, quick=quick)
    settings = settings_of(folder, sizes, "jvarlen", 0, rates["jvarlen"])
    plot = f"{datetime.date.today()}-end-to-end.png"
    lines = [
        f"# To a fixed held-out bits per byte, {datetime.date.today()}",
        "",
        *make_report(runs, settings, corpus, tuned, plot),
        "",
        versions_and_hardware("jax", "flax", "optax", "grain", "torch", "transformers"),
    ]
    draw(runs, settings.target).savefig(io.BytesIO() if quick else RESULTS / plot, dpi=110, format="png")
    report("end-to-end", lines, write=not quick)


if __name__ == "__main__":
    main()
