"""How long does each way of batching take to the same held-out bits per byte, compiling included?

The built-in corpus and the built-in model, six ways: jvarlen; a plain Flax and Optax loop padded to the longest, in
powers of two, and packed by Grain; PyTorch with `group_by_length` of transformers, and with token batches. Run `python
benchmarks/end_to_end.py [--quick] [--work DIR]`; with `--work`, an interrupted benchmark resumes. `--tune` tries
budgets and learning rates, and keeps the best of each way in `support/end_to_end_tuned.json`. Prints a table and writes
it, with versions, hardware and a plot, to `benchmarks/results/`. Needs the extra `benchmarks`. Each run is a process of
its own: `end_to_end_jax.py` or `end_to_end_torch.py`, in `support/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import io
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from support import end_to_end_jax
from support.end_to_end_run import Data, Settings, save_data
from support.end_to_end_tables import WAYS, draw, make_report, reached, tuning_table
from support.reports import commit
from support.timing import RESULTS, report, versions_and_hardware

from jvarlen.data.split import split_held_out
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.models import DecoderConfig, init_params
from jvarlen.models.hugging_face import hugging_face_tensors
from jvarlen.runs.config import FitConfig

FOLDER = Path(__file__).parent
TUNED = FOLDER / "support" / "end_to_end_tuned.json"
DEADLINE_S = 3_600  # of a process that hangs
NUM_RUNS = 3
RATES = (1.5e-3, 3e-3, 6e-3)
OF_JVARLEN = ("jvarlen_cached", "jvarlen_ahead")  # tuned with it
PARTS_OF_BUDGET = (1, 4)  # the most positions of a batch are divided by
PILOT = {"eval_every": 20_000, "target": 3.7, "limit_s": 60.0}
NUM_HELD_OUT = 200  # samples, the same for all: evaluating takes seconds that are not counted

DEMO = FitConfig()  # of `make train`
FULL = {
    "model": {"num_layers": 2, "width": 128, "num_heads": 2},  # what DecoderConfig() is
    "longest": 1024,
    "max_tokens": DEMO.plan.max_tokens,
    "max_shapes": 12,
    "length_multiple": DEMO.plan.length_multiple,
    "base_batch_size": 8,
    "horizon": 1_300_000,
    "eval_every": 50_000,
    "target": 3.1,
    "limit_s": 400.0,
}
QUICK = FULL | {
    "model": {"num_layers": 1, "width": 16, "num_heads": 1},
    "longest": 32,
    "max_tokens": 256,
    "max_shapes": 1,
    "horizon": 4_000,
    "eval_every": 1_000,
    "target": 7.5,
}


def say(what: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {what}", file=sys.stderr)


def prepare(folder: Path, sizes: dict[str, Any], seeds: Iterable[int], num_held_out: int) -> str:
    """Writes the files that all processes read, and says how much there is."""
    split = split_held_out(stdlib_functions(progress=False), DEMO.data.held_out_fraction)
    train, held_out = ([sample[: sizes["longest"]] for sample in part] for part in split)
    data = Data(train, held_out[:num_held_out])
    save_data(folder / "data.npz", data)
    config = DecoderConfig(**sizes["model"])
    for seed in seeds:
        np.savez(folder / f"weights-{seed}.npz", **hugging_face_tensors(init_params(config, seed), config))
    (of_train, of_held_out) = (f"{len(part):,} of {sum(map(len, part)):,} bytes" for part in data)
    return f"{of_train} to train on, {of_held_out} held out"


def settings_of(folder: Path, sizes: dict[str, Any], way: str, seed: int) -> Settings:
    files = {"data": str(folder / "data.npz"), "weights": str(folder / f"weights-{seed}.npz")}
    return Settings(way=way, seed=seed, **files, **sizes)


def chosen_for(way: str, tuned: dict[str, Any]) -> dict[str, Any]:
    """What `tune` chose."""
    way = "jvarlen" if way in OF_JVARLEN else way
    return {name: tuned["ways"][way][name] for name in ("max_tokens", "learning_rate")}


def is_installed(way: str) -> bool:
    packages = [WAYS[way].package, "jax" if WAYS[way].is_jax else "torch"]
    return all(importlib.util.find_spec(package) is not None for package in packages)


def figures_of(runs: list[tuple[Settings, Path]], *, cold: bool = True) -> list[dict[str, Any]]:
    """Figures of runs of one framework, in one process; those that a file has of the same settings are read there.

    Planning counts with what numba compiles for it, unless it need not be cold: those of JAX run in this process then.
    """
    missing = [(dataclasses.asdict(settings), str(path)) for settings, path in runs if not is_done(settings, path)]
    if missing and not cold and WAYS[runs[0][0].way].is_jax:
        end_to_end_jax.answer_all(end_to_end_jax.WAYS, missing)
    elif missing:
        program = "end_to_end_jax.py" if WAYS[runs[0][0].way].is_jax else "end_to_end_torch.py"
        # As a module: the programs and this one import what they share by the same names.
        command = [sys.executable, "-m", f"support.{program.removesuffix('.py')}", json.dumps(missing)]
        with tempfile.TemporaryDirectory() as empty:
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), str(FOLDER)]),
                "JAX_ENABLE_COMPILATION_CACHE": "false",
            }
            environment |= {"NUMBA_CACHE_DIR": empty} if cold else {}
            subprocess.run(command, check=True, timeout=DEADLINE_S, env=environment)
    return [json.loads(path.read_text()) for _, path in runs]


def is_done(settings: Settings, path: Path) -> bool:
    """Whether there are figures of the same settings and commit; of changed code none are taken over."""
    if not path.exists() or commit()["dirty"]:
        return False
    made = json.loads(path.read_text())
    return (made["settings"], made["code"]) == (dataclasses.asdict(settings), commit())


def tune(folder: Path, sizes: dict[str, Any]) -> dict[str, Any]:
    """The budget of positions and the rate that take each way the fewest seconds to the target of a pilot."""
    seed = NUM_RUNS  # no run has it
    prepare(folder, sizes, [seed], NUM_HELD_OUT)
    answer: dict[str, Any] = {"target": PILOT["target"], "limit_s": PILOT["limit_s"], "seed": seed, "ways": {}}
    for way in filter(is_installed, [way for way in WAYS if way not in OF_JVARLEN]):
        tried: dict[tuple[int, float], float] = {}
        for part, rate in itertools.product(PARTS_OF_BUDGET, RATES):
            chosen = {"max_tokens": sizes["max_tokens"] // part, "learning_rate": rate}
            say(f"{WAYS[way].name}, {chosen['max_tokens']} positions, rate {rate:g}")
            settings = settings_of(folder, sizes | PILOT | chosen, way, seed)
            (run,) = figures_of([(settings, folder / f"pilot-{way}-{chosen['max_tokens']}-{rate:g}.json")])
            tried[chosen["max_tokens"], rate] = seconds_without_compiling(run, PILOT["target"])
        max_tokens, rate = min(tried, key=tried.__getitem__)
        pilots = [
            {"max_tokens": budget, "learning_rate": of, "seconds": None if math.isinf(taken) else taken}
            for (budget, of), taken in sorted(tried.items())
        ]
        answer["ways"][way] = {"max_tokens": max_tokens, "learning_rate": rate, "pilots": pilots}
    return answer


def seconds_without_compiling(run: dict[str, Any], target: float) -> float:
    """To the target, infinite where it was not reached; a pilot is too short for compiling to have its due weight."""
    end = reached(run, target)
    return end.total_s - end.seconds["compile"] - end.planning_s if end.is_target else math.inf


def compare(folder: Path, sizes: dict[str, Any], choices: dict[str, Any], *, quick: bool) -> tuple[dict[str, Any], str]:
    """Figures of all runs of each way that is installed, and how much data there is."""
    ways, seeds = list(filter(is_installed, WAYS)), range(1 if quick else NUM_RUNS)
    corpus = prepare(folder, sizes, seeds, 20 if quick else NUM_HELD_OUT)
    turns = [[(seed, way)] for seed in seeds for way in ways]
    if quick:  # a process a framework
        turns = [[(0, way) for way in ways if WAYS[way].is_jax == is_jax] for is_jax in (True, False)]
    runs: dict[str, Any] = {way: [] for way in ways}
    for turn in filter(None, turns):
        say(", ".join(f"{WAYS[way].name}, run {seed + 1}" for seed, way in turn))
        given = [
            (settings_of(folder, sizes | choices[way], way, seed), folder / f"{way}-{seed}.json") for seed, way in turn
        ]
        for (_, way), figures in zip(turn, figures_of(given, cold=not quick), strict=True):
            runs[way].append(figures)
    return runs, corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens, and no report")
    parser.add_argument("--tune", action="store_true", help="try budgets and rates, and keep the best of each way")
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
            TUNED.write_text(json.dumps(tuned, indent=2) + "\n")
            print("\n".join(tuning_table(tuned)))
            return
        tuned = None if quick else json.loads(TUNED.read_text())
        chosen = {way: chosen_for(way, tuned) if tuned else {"learning_rate": 1e-2} for way in WAYS}
        runs, corpus = compare(folder, sizes, chosen, quick=quick)
    settings = settings_of(folder, sizes | {"learning_rate": chosen["jvarlen"]["learning_rate"]}, "jvarlen", 0)
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
