"""Report lines and a figure of the end-to-end benchmark.

The figures at the target are interpolated between the evaluations before and after it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from support.end_to_end_run import FINAL_FRACTION, MAX_GRADIENT_NORM, OPTIMIZER, PARTS, WARMUP_FRACTION, Settings
from support.timing import table

Run = dict[str, Any]


class Way(NamedTuple):
    """A way of training.

    Attributes:
      name: as it stands in tables.
      package: what must be installed, besides what the framework needs.
      is_jax: whether it runs in JAX, else in PyTorch.
    """

    name: str
    package: str
    is_jax: bool


# The first one is what the others are compared with.
WAYS = {
    "jvarlen": Way("jvarlen", "jvarlen", True),
    "jvarlen_cached": Way("jvarlen, programs of an earlier run", "jvarlen", True),
    "jvarlen_ahead": Way("jvarlen, a fixed number of shapes, ahead", "jvarlen", True),
    "longest": Way("Flax and Optax, padded to the longest", "flax", True),
    "powers": Way("Flax and Optax, powers of two", "flax", True),
    "grain": Way("Flax and Optax, packed by Grain", "grain", True),
    "group_by_length": Way("PyTorch, Hugging Face `group_by_length`", "transformers", False),
    "token_batches": Way("PyTorch, token batches", "torch", False),
}


class Reached(NamedTuple):
    """What a run took until the target, or until it ended without reaching it."""

    bits_per_byte: float
    seconds: dict[str, float]
    num_tokens: float
    num_positions: float
    num_steps: float
    num_shapes: float
    num_compiled: float
    planning_s: float
    is_target: bool

    @property
    def total_s(self) -> float:
        """All that is counted."""
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        """Without the seconds of compiling and planning."""
        return self.num_tokens / (self.total_s - self.seconds["compile"] - self.planning_s)

    @property
    def padding(self) -> float:
        """The share of positions without a token, rows without a sample included."""
        return 1.0 - self.num_tokens / self.num_positions


def reached(run: Run, target: float) -> Reached:
    """What there was at the target, between two evaluations; or at the last evaluation."""
    points = run["points"]
    planning_s = points[0]["seconds"]["data"]
    after = next((k for k, point in enumerate(points) if k and point["bits_per_byte"] <= target), None)
    if after is None:
        return Reached(**points[-1], planning_s=planning_s, is_target=False)
    one, other = points[after - 1], points[after]
    share = (one["bits_per_byte"] - target) / (one["bits_per_byte"] - other["bits_per_byte"])

    def between(a: float, b: float) -> float:
        return a + share * (b - a)

    names = ("num_tokens", "num_positions", "num_steps", "num_shapes", "num_compiled")
    return Reached(
        bits_per_byte=target,
        seconds={part: between(one["seconds"][part], other["seconds"][part]) for part in PARTS},
        **{name: between(one[name], other[name]) for name in names},
        planning_s=planning_s,
        is_target=True,
    )


def median(values: list[float]) -> float:
    return statistics.median(values)


def with_spread(values: list[float], form: str) -> str:
    """The median, and the least and the largest of several."""
    text = format(median(values), form)
    return text if len(values) == 1 else f"{text} ({min(values):{form}}–{max(values):{form}})"


def result_row(name: str, max_tokens: int, runs: list[Reached], first_s: float | None) -> list[str]:
    def middle(value: Callable[[Reached], float]) -> float:
        return median([value(run) for run in runs])

    seconds = with_spread([run.total_s for run in runs], ".1f")
    if not all(run.is_target for run in runs):
        bits = with_spread([run.bits_per_byte for run in runs], ".3f")
        seconds = f"not reached: {bits} bits after {seconds}"
    is_comparable = all(run.is_target for run in runs)
    return [
        name,
        f"{max_tokens:,}",
        seconds,
        f"{middle(lambda run: run.total_s) / first_s:.2f}" if is_comparable and first_s is not None else "–",
        *(f"{middle(lambda run, part=part: run.seconds[part]):.1f}" for part in PARTS),
        f"{middle(lambda run: run.num_steps):,.0f}",
        f"{middle(lambda run: run.num_tokens):,.0f}",
        with_spread([run.tokens_per_s for run in runs], ",.0f"),
        f"{middle(lambda run: run.padding):.1%}",
        f"{middle(lambda run: run.num_shapes):.0f}",
        f"{middle(lambda run: run.num_compiled):.0f}",
    ]


def result_table(runs: dict[str, list[Run]], target: float) -> list[str]:
    """A row a way; those that have no runs are not installed."""
    of_ways = {way: [reached(run, target) for run in runs.get(way, [])] for way in WAYS}
    is_reached = all(run.is_target for run in of_ways["jvarlen"])
    first_s = median([run.total_s for run in of_ways["jvarlen"]]) if is_reached else None
    header = (
        "way|positions of a batch|seconds to target|factor|compile, s|data, s|steps, s|steps|real tokens|"
        "real tokens a second|padding|shapes|compilations"
    )
    rows = [
        result_row(WAYS[way].name, runs[way][0]["settings"]["max_tokens"], reached_runs, first_s)
        if reached_runs
        else [WAYS[way].name, "", "not installed"]
        for way, reached_runs in of_ways.items()
    ]
    return table(header, [row + [""] * (header.count("|") + 1 - len(row)) for row in rows])


def compare_frameworks(runs: dict[str, list[Run]], target: float) -> list[str]:
    """What must be said of rows of two frameworks, where both are there."""
    if not runs.get("token_batches"):
        return []
    jax_s, torch_s = (
        median([reached(run, target).tokens_per_s for run in runs[way]]) for way in ("jvarlen", "token_batches")
    )
    jax_tokens, torch_tokens = (runs[way][0]["settings"]["max_tokens"] for way in ("jvarlen", "token_batches"))
    return [
        "PyTorch runs eagerly, on kernels other than XLA's, and its step takes any shape without compiling. With token "
        f"batches of {torch_tokens:,} positions it trains on {torch_s / jax_s:.2f} times as many real tokens a second "
        f"here as jvarlen does in JAX with {jax_tokens:,}; what batching alone is worth shows between rows of one "
        "framework.",
        "",
    ]


def tuning_table(tuned: dict[str, Any]) -> list[str]:
    """What the pilots came to, and what was chosen."""
    rows = []
    for name, way in tuned["ways"].items():
        for pilot in way["pilots"]:
            is_chosen = all(pilot[key] == way[key] for key in ("max_tokens", "learning_rate"))
            seconds = "not reached" if pilot["seconds"] is None else f"{pilot['seconds']:.1f}"
            texts = [f"{pilot['max_tokens']:,}", f"{pilot['learning_rate']:g}", seconds]
            rows.append([WAYS[name].name, *(f"**{text}**" if is_chosen else text for text in texts)])
    return table("way|positions of a batch|rate|seconds", rows)


def draw(runs: dict[str, list[Run]], target: float) -> Figure:
    """Bits per byte over seconds: a line a run, a colour a way; on the right over real tokens."""
    figure, axes = plt.subplots(1, 2, figsize=(12, 5), sharey=True, layout="constrained")
    for number, (name, runs_of_way) in enumerate(runs.items()):
        for index, run in enumerate(runs_of_way):
            bits = [point["bits_per_byte"] for point in run["points"]]
            label = None if index else WAYS[name].name.replace("`", "")
            style = {"color": f"C{number}", "alpha": 0.8, "linewidth": 1.2, "label": label}
            axes[0].plot([sum(point["seconds"].values()) for point in run["points"]], bits, **style)
            axes[1].plot([point["num_tokens"] for point in run["points"]], bits, **style)
    for axis, label in zip(axes, ("seconds, evaluations left out", "real tokens"), strict=True):
        axis.axhline(target, color="grey", linestyle=":")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[1].xaxis.set_major_formatter("{x:,.0f}")
    axes[0].set_ylabel("held-out bits per byte")
    axes[0].legend()
    return figure


def make_report(
    runs: dict[str, list[Run]], settings: Settings, sizes: str, tuned: dict[str, Any] | None, plot: str
) -> list[str]:
    """The lines between the title and the versions."""
    target = settings.target
    num_each = max(map(len, runs.values()))
    num_runs = "one run" if num_each == 1 else f"{num_each} runs"
    num_params = {run["num_params"] for runs_of_way in runs.values() for run in runs_of_way}
    if len(num_params) > 1:
        raise RuntimeError(f"the ways did not train the same model: {num_params} parameters")
    lines = [
        f"The built-in corpus, samples cut to {settings.longest:,} bytes: {sizes}. One model for all, "
        f"{num_params.pop():,} parameters in float32 (`jvarlen.models`, and in PyTorch `torch_ref`; parity tests hold "
        f"that they are the same function), until {target} bits per held-out byte. No batch has more than "
        f"{settings.max_tokens:,} positions, padding included; each way has as many of these as serve it best.",
        "",
        "Each run is a process of its own; the ways take turns. The first run of every way begins with the same "
        "weights, the second with others, and so on; the order of the samples is drawn anew as well. Seconds count "
        "from when imports are done and samples and initial weights are in memory: planning, every compilation, "
        "batching and steps. Caches of compiled programs are off or empty, but for the second row. Evaluations, and "
        "compiling them, stop the watch, unless programs are compiled meanwhile; there is one every "
        f"{settings.eval_every:,} real tokens, the same batches for all, and the seconds at the target are read off "
        f"the line between two of them. Medians of {num_runs}, least and largest in parentheses. The factor is of "
        "seconds, to the first row.",
        "",
        *result_table(runs, target),
        "",
        "Compile: choosing the number of shapes, building the optimizer, and compiling train steps, or waiting for "
        "the first; for a jitted loop, the calls that compile. Data: "
        "planning, with what numba compiles for it, and the time that the loop spent getting batches, in JAX partly "
        "beside the step before. Real tokens a second: without the seconds of compiling and planning. Shapes: "
        "different (rows, length) that were trained on; compilations: train steps compiled. "
        f"{settings.limit_s:.0f} seconds or {settings.horizon:,} real tokens end a run that does not reach the target.",
        "",
        "The fewer samples a batch holds, the more steps are taken over the same tokens, and the fewer tokens the "
        "target takes, down to a size: real tokens a second alone do not tell which way is first at the target.",
        "",
        *compare_frameworks(runs, target),
        "",
        f"![Held-out bits per byte over seconds and over real tokens]({plot})",
        "",
        "How each way makes its batches:",
        "",
        "- jvarlen: as many shapes as the run is worth, by costs estimated before planning, and lengths rounded to "
        f"{settings.length_multiple}; `make_plan(order=Order(new_shape_every=…))`, "
        '`compile_buckets` with `when="background"`, `load`, `keep_memory_of_steps`; '
        "`scale_by_planned_rate` scales the rate by the square "
        f"root of samples / {settings.base_batch_size}. A fixed number of shapes, ahead: {settings.max_shapes} shapes, "
        "all compiled before the first step.",
        "- Padded to the longest: shuffled samples, as many a batch as the budget has rows of the longest, all in one "
        "shape; `jax.jit`.",
        "- Powers of two: shuffled samples, a batch when the bucket of a power of two is full (budget / length "
        "samples), as `bucket_by_sequence_length` of tf.data does it; `jax.jit` compiles a shape when it comes.",
        "- Packed by Grain: `BestFitPackIterDataset` over shuffled samples, rows of "
        f"{settings.longest:,}; attention stays within segments; `jax.jit`.",
        "- `group_by_length`: `LengthGroupedSampler` of transformers, as many samples a batch as the budget has rows "
        "of the longest, in a `DataLoader` that pads to the longest of a batch; the loop is our own, without the "
        "Trainer around it.",
        "- Token batches: samples sorted by length, a batch as large as rows × longest allow, batches shuffled "
        "(fairseq's rule, by `torch_ref.batch_by_tokens`), in a `DataLoader` likewise.",
        "",
        f"AdamW ({', '.join(f'{name} {value}' for name, value in OPTIMIZER.items())}), gradients of a global norm of "
        f"at most {MAX_GRADIENT_NORM:g}. The rate rises over the first {WARMUP_FRACTION:.0%} of "
        f"{settings.horizon:,} real tokens and decays along a cosine to {FINAL_FRACTION:.0%}. It follows tokens, not "
        "steps, as the ways take different numbers of steps for the same samples.",
    ]
    if tuned is not None:
        lines += [
            "",
            "Each way has its own budget of positions, the whole or a quarter of the most, and its own highest rate: "
            f"those with the fewest seconds to {tuned['target']} bits, early in a run, without compiling; seed "
            f"{tuned['seed']}, one run of each, of up to {tuned['limit_s']:.0f} seconds. What was chosen is in bold; "
            "where that is the highest rate tried, a higher one might serve better still:",
            "",
            *tuning_table(tuned),
        ]
    return lines
