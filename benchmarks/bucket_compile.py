"""What do strategies of few shapes cost before the first step, and what is an epoch of them worth?

The built-in corpus up to 1,024 bytes and the built-in model, 8,192 tokens a microbatch, in JAX and in PyTorch. Run
`python benchmarks/bucket_compile.py [--quick]`. It takes about half an hour on an otherwise idle machine, prints
tables, and writes them with versions, hardware and a plot to `benchmarks/results/`. Each start, cold or warm, runs in a
process of its own: `bucket_compile_worker.py` or `bucket_compile_torch.py`, in `support/`. Needs the extras `torch` and
`dev`.
"""

from __future__ import annotations

import argparse
import datetime
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from support.bucket_compile_plans import (
    Sizes,
    Strategy,
    by_shape,
    cost_shapes,
    make_strategies,
    measured_cost,
    quarter_shapes,
)
from support.bucket_compile_tables import TORCH_WAYS, Measured, Start, make_report
from support.bucket_compile_worker import QUESTIONS, corpus
from support.timing import COMPILE_FAST, RESULTS, report

import jvarlen

FOLDER = Path(__file__).parent
DEADLINE_S = 3_600  # of a process that hangs

TINY = {"num_layers": 1, "width": 16, "num_heads": 1}
DEMO = {"num_layers": 2, "width": 128, "num_heads": 2}  # what DecoderConfig() is
FULL = Sizes(
    model=DEMO,
    longest=1024,
    max_tokens=8192,
    length_multiple=1,
    cost_lengths=(16, 24, 40, 56, 80, 112, 160, 224, 304, 392, 488, 600, 728, 872, 1000, 1024),
    num_shapes=(4, 8, 16, 24, 32),
    main_shapes=24,
    packed_shapes=8,
    torch_shapes=8,
    torch_backend="inductor",
    torch_limit_s=500,
    num_rounds=3,
    max_steps=None,
    start_all=True,
    start_repeats=2,
    raw_limit_s=60.0,
    dispatch_models={"tiny model": TINY, "demo model": DEMO},
    dispatch_repeats=300,
    idle_repeats=7,
)
QUICK = FULL._replace(
    model=TINY,
    longest=32,
    max_tokens=192,
    length_multiple=16,
    cost_lengths=(16, 32),
    num_shapes=(2,),
    main_shapes=2,
    packed_shapes=1,
    torch_shapes=2,
    torch_backend="eager",
    num_rounds=1,
    max_steps=4,
    start_all=False,
    start_repeats=1,
    raw_limit_s=0.0,
    dispatch_models={"tiny model": TINY},
    dispatch_repeats=2,
    idle_repeats=1,
)


def say(what: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {what}", file=sys.stderr)


def ask(
    questions: dict[str, Any], *, program: str = "bucket_compile_worker.py", limit_s: float = DEADLINE_S, **env: Any
) -> Any:
    """What a process of its own answers; `env` is set for it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    environment |= {
        "PYTHONPATH": str(FOLDER.parent),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        command = [sys.executable, str(FOLDER / "support" / program), json.dumps(questions), str(answer)]
        subprocess.run(command, check=True, timeout=limit_s, env=environment | {k: str(v) for k, v in env.items()})
        return json.loads(answer.read_text())


def ask_here(questions: dict[str, Any], *, cache: Path) -> Any:
    """What this process answers, with compiled programs kept there: the quick form saves what a process imports."""
    jax.config.update("jax_compilation_cache_dir", str(cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return json.loads(json.dumps({name: QUESTIONS[name](**settings) for name, settings in questions.items()}))


def measure_start(sizes: Sizes, strategy: Strategy, shared_cache: Path, repeats: int) -> Start:
    """Starts in turn: cold, and warm from the persistent cache. In the quick form the first one alone has a process."""
    found = Start([], [])
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder, "cache")

            def start(cache: Path = cache) -> dict[str, float]:
                settings = {"model": sizes.model, "buckets": strategy.buckets, "is_packed": strategy.is_packed}
                if found.cold and not sizes.start_all:
                    return ask_here({"start": settings}, cache=shared_cache)["start"]
                return ask({"start": settings}, JAX_COMPILATION_CACHE_DIR=cache)["start"]

            found.cold.append(start())
            found.warm.append(start())
            if sizes.start_all:
                shutil.copytree(cache, shared_cache, dirs_exist_ok=True)
        say(f"{strategy.name}: {found.cold[-1]['first_step_s']:.1f} s cold, {found.warm[-1]['first_step_s']:.1f} warm")
    return found


def measure_starts(
    sizes: Sizes, strategies: dict[str, Strategy], main: Strategy, shared_cache: Path
) -> dict[str, Start]:
    """Starts of all strategies, by name; of the main one alone in the quick form."""
    starts = {}
    for strategy in strategies.values():
        if strategy is main or (strategy.is_started and sizes.start_all):
            repeats = sizes.start_repeats if strategy is main else 1
            starts[strategy.name] = measure_start(sizes, strategy, shared_cache, repeats)
    return starts


def measure_torch(sizes: Sizes, strategy: Strategy) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The ways of PyTorch: started cold, and again warm."""
    say("PyTorch")
    settings = {
        "model": sizes.model,
        "buckets": strategy.buckets,
        "backend": sizes.torch_backend,
        "ways": list(TORCH_WAYS),
    }

    def answer(num_rounds: int, cache: str) -> dict[str, Any] | None:
        try:
            return ask(
                settings | {"num_rounds": num_rounds},
                program="bucket_compile_torch.py",
                limit_s=sizes.torch_limit_s,
                TORCHINDUCTOR_CACHE_DIR=cache,
            )
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:  # all else is worth a report
            say(f"no figures of PyTorch: {error}")
            return None

    with tempfile.TemporaryDirectory() as cache:
        cold = answer(sizes.num_rounds, cache)
        warm = answer(0, cache) if cold and sizes.start_all else None
    return cold, warm


def measure(sizes: Sizes, lengths: np.ndarray) -> tuple[dict[str, Strategy], Measured]:
    common = {"model": sizes.model, "longest": sizes.longest}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as beside:
        shared_cache = Path(folder, "shared")

        def ask_cached(questions: dict[str, Any]) -> Any:
            if sizes.start_all:
                return ask(questions, JAX_COMPILATION_CACHE_DIR=shared_cache)
            return ask_here(questions, cache=shared_cache)

        say("costs of steps, to plan with")
        shapes = [shape for is_packed in (False, True) for shape in cost_shapes(sizes, is_packed=is_packed)]
        settings = common | {"shapes": shapes, "num_rounds": sizes.num_rounds}
        before = by_shape(ask_cached({"costs": settings})["costs"])
        cost, packed_cost = (measured_cost(sizes, before, is_packed=is_packed) for is_packed in (False, True))
        strategies = make_strategies(sizes, lengths, cost, packed_cost)
        main = strategies[f"optimal by time, {sizes.main_shapes}"]
        starts = beside.submit(measure_starts, sizes, strategies, main, shared_cache)
        torch = beside.submit(measure_torch, sizes, strategies[f"optimal by time, {sizes.torch_shapes}"])
        if sizes.start_all:  # in full, each has the machine for itself
            for each in (starts, torch):
                each.result()

        references = [*cost_shapes(sizes), *quarter_shapes(sizes)]
        of_strategies = {shape: None for strategy in strategies.values() for shape in strategy.shapes}
        # Those that all is compared with come twice a round.
        shapes = [*references, *(shape for shape in of_strategies if shape not in references), *references]
        say(f"{len(set(shapes))} shapes, and an epoch of {main.name}")
        settings = common | {"buckets": main.buckets, "shapes": shapes, "num_rounds": sizes.num_rounds}
        epoch = ask_cached({"epoch": settings | {"max_steps": sizes.max_steps}})["epoch"]
        say("raw shapes, and the host")
        idle = {"repeats": sizes.idle_repeats, "steps_per_repeat": 6, "buffered_steps": 8}
        for_host = {
            "raw": common | {"max_tokens": sizes.max_tokens, "limit_s": sizes.raw_limit_s},
            "dispatch": {"models": sizes.dispatch_models, "repeats": sizes.dispatch_repeats},
            "idle": common | {"bucket": main.buckets[0]} | idle,
        }
        # In full without the cache: raw shapes are compiled cold.
        host = ask(for_host) if sizes.start_all else ask_cached(for_host)
    seconds = by_shape(epoch["rows"])
    return strategies, Measured(
        fit=jvarlen.fit_cost_model([shape[1:] for shape in references], [seconds[shape] for shape in references]),
        cost=measured_cost(sizes, seconds),
        seconds=seconds,
        starts=starts.result(),
        epoch=epoch,
        host=host,
        torch=torch.result(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few shapes, and no report")
    quick = parser.parse_args().quick
    sizes = QUICK if quick else FULL
    if quick:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COMPILE_FAST}"
    begun = time.monotonic()
    lengths = jvarlen.measure_lengths(corpus(sizes.longest), progress=False)
    strategies, found = measure(sizes, lengths)
    plot = None if quick else f"{datetime.date.today()}-bucket-compile.png"
    minutes = (time.monotonic() - begun) / 60
    lines, figure = make_report(sizes, lengths, strategies, found, plot, minutes)
    figure.savefig(RESULTS / plot if plot else io.BytesIO(), dpi=110, format="png")
    report("bucket-compile", lines, write=not quick)


if __name__ == "__main__":
    main()
