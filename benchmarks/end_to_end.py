"""How long does each way of batching take to the same held-out bits per byte, compiling included?

The built-in corpus and the built-in model: jvarlen packed into one shape, and padded; a plain Flax
and Optax loop padded to the longest, in powers of two, and packed by Grain; PyTorch with `group_by_length` of
transformers, with token batches, and packed. Run `python benchmarks/end_to_end.py [--quick | --short] [--seeds N]
[--work DIR]`; with `--work`, an interrupted benchmark resumes. `--short` compares jvarlen with PyTorch's padded ways in
some ten minutes. `--tune [WAY ...]` tries budgets and learning rates, and keeps the best of
each way in `support/end_to_end_tuned.json`. Prints tables and writes them, with versions, hardware and a plot, to
`benchmarks/results/`. Needs the extra `benchmarks`. Each run is a process of its own: `end_to_end_jax.py` or
`end_to_end_torch.py`, in `support/`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import io
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from support import end_to_end_jax, end_to_end_steady
from support.end_to_end_run import Data, Settings, Turns, save_data
from support.end_to_end_tables import WAYS, draw, make_report, reached, tuning_table
from support.reports import commit
from support.timing import COMPILE_FAST, REPEATS, RESULTS, report, versions_and_hardware

from jvarlen.data.split import split_held_out
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.distributed import split_cpu
from jvarlen.models import DecoderConfig, init_params
from jvarlen.models.hugging_face import hugging_face_tensors
from jvarlen.runs.config import FitConfig

FOLDER = Path(__file__).parent
TUNED = FOLDER / "support" / "end_to_end_tuned.json"
DEADLINE_S = 3_600  # of a process that hangs
NUM_SEEDS = 5
SHORT_WAYS, SHORT_SEEDS = ("jvarlen", "jvarlen_cached", "group_by_length", "token_batches"), 3
NUM_DEVICES = os.cpu_count() or 1  # of jvarlen at most: each has rows of its own
SEED_OF_PILOTS, SEED_BEFORE = 1_000, 1_001  # no run has them
ONE_RUN = ("longest",)  # takes three times as long as any other
FIRST_TRIED = {"max_tokens": 1024, "learning_rate": 3e-3}  # where no earlier tuning has chosen
PILOT = {
    "eval_every": 25_000,
    "target": 3.15,
    "limit_s": 40.0,
}  # near the target of runs: rates that are too high stall before it
NUM_HELD_OUT, NUM_HELD_OUT_OF_PILOTS = 120, 40  # samples, the same for all: evaluating takes seconds not counted
STEADY = {"num_shapes": 16, "num_turns": 7, "turn_s": 1.5}
BUDGETS = (1_024, 4_096, 16_384)  # of steady steps
IMPORTS = {
    "jvarlen": "jax, optax, jvarlen, jvarlen.models; jvarlen.make_plan, jvarlen.compile_buckets, jvarlen.load",
    "flax": "jax, optax, flax.nnx",
    "torch": "torch, torch._dynamo, torch.utils.data",
}

DEMO = FitConfig()  # of `make train`
FULL = {
    "model": {"num_layers": 2, "width": 128, "num_heads": 2},  # what DecoderConfig() is
    "longest": 1024,
    "length_multiple": DEMO.plan.length_multiple,
    "horizon": 1_300_000,
    "eval_every": 50_000,
    "target": 3.1,
    "limit_s": 400.0,
}
QUICK = FULL | {
    "model": {"num_layers": 1, "width": 16, "num_heads": 1},
    "longest": 32,
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
    num_rows = sizes["max_tokens"] // sizes["longest"]
    num_devices = min(NUM_DEVICES, num_rows) if way.startswith("jvarlen") else 1
    return Settings(way=way, seed=seed, num_devices=num_devices, **files, **sizes)


CACHED = ("jvarlen_earlier", "jvarlen_cached")


def tuned_as(way: str) -> str:
    """The way whose budget and rate it has."""
    return "jvarlen" if way in CACHED else way


def is_installed(way: str) -> bool:
    packages = [WAYS[way].package, "jax" if WAYS[way].is_jax else "torch"]
    return all(importlib.util.find_spec(package) is not None for package in packages)


def figures_of(runs: list[tuple[Settings, Path]], *, cold: bool = True) -> list[dict[str, Any]]:
    """Figures of runs of one framework, in one process; those that a file has of the same settings are read there.

    Planning counts with what numba compiles for it, unless an earlier run has left it, or it need not be cold: runs of
    JAX are made in this process then.
    """
    missing = [(dataclasses.asdict(settings), str(path)) for settings, path in runs if not is_done(settings, path)]
    is_jax = runs[0][0].way in end_to_end_jax.WAYS
    if missing and not cold and is_jax:
        end_to_end_jax.answer_all(end_to_end_jax.WAYS, missing)
    elif missing:
        program = "end_to_end_jax" if is_jax else "end_to_end_torch"
        # As a module: the programs and this one import what they share by the same names.
        command = [sys.executable, "-m", f"support.{program}", json.dumps(missing)]
        programs = runs[0][0].programs
        with tempfile.TemporaryDirectory() as empty:
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join([str(FOLDER.parent), str(FOLDER)]),
                "JAX_ENABLE_COMPILATION_CACHE": "true" if programs else "false",
            }
            environment |= {"NUMBA_CACHE_DIR": f"{programs}-numba" if programs else empty} if cold else {}
            subprocess.run(command, check=True, timeout=DEADLINE_S, env=environment)
    return [json.loads(path.read_text()) for _, path in runs]


def is_done(settings: Settings, path: Path) -> bool:
    """Whether there are figures of the same settings and commit; of changed code none are taken over."""
    if not path.exists() or commit()["dirty"]:
        return False
    made = json.loads(path.read_text())
    return (made["settings"], made["code"]) == (dataclasses.asdict(settings), commit())


def tune(folder: Path, sizes: dict[str, Any], ways: list[str]) -> dict[str, Any]:
    """The budget of positions and the rate that take each way the fewest seconds to the target of a pilot.

    With `ways`, only these are tuned, and the others are kept.
    """
    prepare(folder, sizes, [SEED_OF_PILOTS], NUM_HELD_OUT_OF_PILOTS)
    before = json.loads(TUNED.read_text())["ways"] if TUNED.exists() else {}
    answer: dict[str, Any] = {
        "target": PILOT["target"],
        "limit_s": PILOT["limit_s"],
        "seed": SEED_OF_PILOTS,
        "ways": dict(before) if ways else {},
    }
    for way in filter(is_installed, [way for way in ways or WAYS if tuned_as(way) == way]):
        tried: dict[tuple[int, float], float] = {}
        first = before.get(way, FIRST_TRIED)
        center = first["max_tokens"], first["learning_rate"]
        best = None
        while best != center:
            # Rates before budgets: most often a rate is better, and the budget stays.
            near = [center, *((center[0], center[1] * factor) for factor in (2.0, 0.5))]
            near += [
                (center[0] * 2, center[1]),
                *([(center[0] // 2, center[1])] if center[0] > sizes["longest"] else []),
            ]
            new = [choice for choice in near if choice not in tried]
            pilots = [
                (
                    settings_of(
                        folder, sizes | PILOT | {"max_tokens": max_tokens, "learning_rate": rate}, way, SEED_OF_PILOTS
                    ),
                    folder / f"pilot-{way}-{max_tokens}-{rate:g}.json",
                )
                for max_tokens, rate in new
            ]
            say(f"{WAYS[way].name}, {', '.join(f'{max_tokens} positions at {rate:g}' for max_tokens, rate in new)}")
            for choice, run in zip(new, figures_of(pilots), strict=True):
                tried[choice] = seconds_without_compiling(run, PILOT["target"])
            best, center = center, min(tried, key=tried.__getitem__)
        max_tokens, rate = center
        answer["ways"][way] = {
            "max_tokens": max_tokens,
            "learning_rate": rate,
            "pilots": [
                {"max_tokens": budget, "learning_rate": of, "seconds": None if math.isinf(taken) else taken}
                for (budget, of), taken in sorted(tried.items())
            ],
        }
    return answer


def seconds_without_compiling(run: dict[str, Any], target: float) -> float:
    """To the target, infinite where it was not reached; a pilot is too short for compiling to have its due weight."""
    end = reached(run, target)
    return end.seconds["data"] + end.seconds["steps"] if end.is_target else math.inf


def compare(
    folder: Path, sizes: dict[str, Any], choices: dict[str, Any], asked: Iterable[str], num_seeds: int, *, quick: bool
) -> tuple[dict[str, Any], str]:
    """Figures of all runs of each way asked for that is installed, and how much data there is."""
    ways, seeds = list(filter(is_installed, asked)), range(num_seeds)
    corpus = prepare(folder, sizes, [*seeds, SEED_BEFORE], 20 if quick else NUM_HELD_OUT)
    programs, left = folder / "programs", folder / "programs-of-an-earlier-run"

    def run_of(way: str, seed: int) -> tuple[Settings, Path]:
        given = sizes | choices[tuned_as(way)] | ({"programs": str(programs)} if way in CACHED else {})
        return settings_of(folder, given, way, seed), folder / f"{way}-{seed}.json"

    before, path = run_of("jvarlen_earlier", SEED_BEFORE)
    before = dataclasses.replace(before, target=math.inf)  # it need not train
    if not is_done(before, path):
        for earlier in (programs, left):
            shutil.rmtree(earlier, ignore_errors=True)
        figures_of([(before, path)], cold=not quick)
        shutil.copytree(programs, left)
    turns = [[(seed, way)] for seed in seeds for way in ways if not (seed and way in ONE_RUN)]
    if quick:  # a process a framework
        turns = [[(0, way) for way in ways if WAYS[way].is_jax == is_jax] for is_jax in (True, False)]
    runs: dict[str, Any] = {way: [] for way in ways}
    for turn in filter(None, turns):
        say(", ".join(f"{WAYS[way].name}, run {seed + 1}" for seed, way in turn))
        given = [run_of(way, seed) for seed, way in turn]
        if any(way in CACHED for _, way in turn):  # JAX finds programs where they were compiled, and nowhere else
            shutil.rmtree(programs)
            shutil.copytree(left, programs)
        for (_, way), figures in zip(turn, figures_of(given, cold=not quick), strict=True):
            runs[way].append(figures)
    return runs, corpus


def steady_turns(folder: Path, sizes: dict[str, Any], *, quick: bool) -> list[Turns]:
    """Turns of steps at each budget; those that a file has of the same settings are read there."""
    found = []
    for max_tokens in (sizes["longest"] * 4,) if quick else BUDGETS:
        given = sizes | {"max_tokens": max_tokens, "learning_rate": 1e-3}
        settings, path = settings_of(folder, given, "jvarlen", 0), folder / f"steady-{max_tokens}.json"
        if not is_done(settings, path):
            say(f"steps of {max_tokens:,} positions")
            how = STEADY | ({"num_shapes": 1, "num_turns": 1, "turn_s": 0.01} if quick else {})
            turns = end_to_end_steady.measure(settings, has_torch=is_installed("packed"), **how)
            path.write_text(json.dumps({"settings": dataclasses.asdict(settings), "code": commit(), "turns": turns}))
        found.append(Turns(**json.loads(path.read_text())["turns"]))
    return found


def seconds_to_import(modules: str) -> float:
    """The median of three processes; not a number where something is not installed."""
    program = f"import time; begun = time.perf_counter(); import {modules}; print(time.perf_counter() - begun)"
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    runs = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
        for _ in range(min(REPEATS, 3))
    ]
    return statistics.median(float(run.stdout) if run.returncode == 0 else math.nan for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens, and no report")
    parser.add_argument(
        "--tune",
        nargs="*",
        choices=list(WAYS),
        metavar="WAY",
        help="try budgets and rates of these ways, or all, and keep the best of each",
    )
    parser.add_argument("--short", action="store_true", help="the ways that compare best, 3 runs each, and no report")
    parser.add_argument("--seeds", type=int, metavar="N", help=f"runs of each way ({NUM_SEEDS})")
    parser.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="keep finished runs there, and take over what it has of the same settings",
    )
    options = parser.parse_args()
    split_cpu(NUM_DEVICES)  # a way on one of them is slower than where the CPU is not split
    quick, sizes = options.quick, QUICK if options.quick else FULL
    if quick:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COMPILE_FAST}"
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if options.tune is not None:
            (folder / "pilots").mkdir(exist_ok=True)
            tuned = tune(folder / "pilots", sizes, options.tune)
            TUNED.write_text(json.dumps(tuned, indent=2) + "\n")
            print("\n".join(tuning_table(tuned)))
            return
        tuned = None if quick else json.loads(TUNED.read_text())
        names = ("max_tokens", "learning_rate")
        of_all = {"max_tokens": 4 * sizes["longest"], "learning_rate": 1e-2}
        chosen = {
            way: {name: tuned["ways"].get(way, FIRST_TRIED)[name] for name in names} if tuned else of_all
            for way in WAYS
            if tuned_as(way) == way
        }
        asked, num_seeds = (SHORT_WAYS, SHORT_SEEDS) if options.short else (WAYS, 1 if quick else NUM_SEEDS)
        runs, corpus = compare(folder, sizes, chosen, asked, options.seeds or num_seeds, quick=quick)
        steady = [] if options.short else steady_turns(folder, sizes, quick=quick)
        imports_s = {name: seconds_to_import(modules) for name, modules in IMPORTS.items()}
        settings = settings_of(folder, sizes | chosen["jvarlen"], "jvarlen", 0)
    plot = f"{datetime.date.today()}-end-to-end.png"
    lines = [
        f"# To a fixed held-out bits per byte, {datetime.date.today()}",
        "",
        *make_report(runs, settings, corpus, tuned, plot, steady, imports_s),
        "",
        versions_and_hardware("jax", "flax", "optax", "grain", "torch", "transformers"),
    ]
    has_report = not (quick or options.short)
    draw(runs, settings.target).savefig(RESULTS / plot if has_report else io.BytesIO(), dpi=110, format="png")
    report("end-to-end", lines, write=has_report)


if __name__ == "__main__":
    main()
