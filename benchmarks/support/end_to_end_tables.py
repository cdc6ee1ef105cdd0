"""Report lines and a figure of the end-to-end benchmark.

The figures at the target are interpolated between the evaluations before and after it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from support.end_to_end_run import (
    FINAL_FRACTION,
    MAX_GRADIENT_NORM,
    OPTIMIZER,
    PADDED_SHAPES,
    PARTS,
    WARMUP_FRACTION,
    Settings,
    Turns,
)
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
    "jvarlen_padded": Way("jvarlen, padded shapes", "jvarlen", True),
    "longest": Way("Flax and Optax, padded to the longest", "flax", True),
    "powers": Way("Flax and Optax, powers of two", "flax", True),
    "grain": Way("Flax and Optax, packed by Grain", "grain", True),
    "group_by_length": Way("PyTorch, Hugging Face `group_by_length`", "transformers", False),
    "token_batches": Way("PyTorch, token batches", "torch", False),
    "packed": Way("PyTorch, packed, attention sample by sample", "torch", False),
}
OTHER_JAX = tuple(name for name, way in WAYS.items() if way.is_jax and way.package != "jvarlen")
OF_TORCH = tuple(name for name, way in WAYS.items() if not way.is_jax)
REACHES = {  # the largest ratios that are good enough
    "jax": 0.6,
    "cold": 1.2,
    "cached": 1.0,
    "packed": 1.0,
    "padded": 1.1,
    "tokens": 1.1,
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
    is_target: bool

    @property
    def total_s(self) -> float:
        """All that is counted."""
        return sum(self.seconds.values())

    @property
    def tokens_per_s(self) -> float:
        """Without the seconds of compiling and planning."""
        return self.num_tokens / (self.seconds["data"] + self.seconds["steps"])

    @property
    def padding(self) -> float:
        """The share of positions without a token, rows without a sample included."""
        return 1.0 - self.num_tokens / self.num_positions


def reached(run: Run, target: float) -> Reached:
    """What there was at the target, between two evaluations; or at the last evaluation."""
    points = run["points"]
    after = next((k for k, point in enumerate(points) if k and point["bits_per_byte"] <= target), None)
    if after is None:
        return Reached(**points[-1], is_target=False)
    one, other = points[after - 1], points[after]
    share = (one["bits_per_byte"] - target) / (one["bits_per_byte"] - other["bits_per_byte"])

    def between(a: float, b: float) -> float:
        return a + share * (b - a)

    names = ("num_tokens", "num_positions", "num_steps", "num_shapes", "num_compiled")
    return Reached(
        bits_per_byte=target,
        seconds={part: between(one["seconds"][part], other["seconds"][part]) for part in PARTS},
        **{name: between(one[name], other[name]) for name in names},
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
        str(len(runs)),
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
    """A row a way; those that have no runs are not installed, or were not asked for."""
    of_ways = {way: [reached(run, target) for run in runs.get(way, [])] for way in WAYS}
    is_reached = all(run.is_target for run in of_ways["jvarlen"])
    first_s = median([run.total_s for run in of_ways["jvarlen"]]) if is_reached else None
    header = (
        "way|runs|positions of a batch|seconds to target|factor|planning, s|compile, s|data, s|steps, s|steps|"
        "real tokens|real tokens a second|padding|shapes|compilations"
    )
    rows = [
        result_row(WAYS[way].name, runs[way][0]["settings"]["max_tokens"], reached_runs, first_s)
        if reached_runs
        else [WAYS[way].name, "", "", "not run"]
        for way, reached_runs in of_ways.items()
    ]
    return table(header, [row + [""] * (header.count("|") + 1 - len(row)) for row in rows])


def best_of(ways: tuple[str, ...], runs: dict[str, list[Run]], target: float) -> str | None:
    """The way with the fewest seconds to the target; None where none reached it in all its runs."""
    medians = {}
    for way in ways:
        found = [reached(run, target) for run in runs.get(way, [])]
        if found and all(run.is_target for run in found):
            medians[way] = median([run.total_s for run in found])
    return min(medians, key=medians.__getitem__, default=None)


def goal_rows(runs: dict[str, list[Run]], target: float, steady: list[Turns]) -> list[list[str]]:
    """What is aimed at: the ratio, over what, and the reach."""

    def over(way: str, ways: tuple[str, ...], of: Callable[[Reached], float]) -> tuple[str, list[float]]:
        """The best of several ways, and the ratio of this one to it for each seed that both have run."""
        best, ours = best_of(ways, runs, target), [reached(run, target) for run in runs.get(way, [])]
        if best is None or not ours or not all(run.is_target for run in ours):
            return "–", []
        theirs = [reached(run, target) for run in runs[best]]
        if of is total_s:
            return WAYS[best].name, [median(list(map(of, ours))) / median(list(map(of, theirs)))]
        return WAYS[best].name, [of(a) / of(b) for a, b in zip(ours, theirs, strict=False)]

    def total_s(run: Reached) -> float:
        return run.total_s

    seconds = f"seconds to {target} bits"
    found = [
        (f"{seconds}, over the best other JAX way", *over("jvarlen", OTHER_JAX, total_s), "jax"),
        (f"{seconds}, over the best PyTorch way", *over("jvarlen", OF_TORCH, total_s), "cold"),
        (
            f"{seconds} with programs of an earlier run of another seed, over the best PyTorch way",
            *over("jvarlen_cached", OF_TORCH, total_s),
            "cached",
        ),
    ]
    found += [
        (
            f"microseconds a real token, {way}, {turns.max_tokens:,} positions a step",
            "–" if turns.best_of_torch is None else WAYS[turns.best_of_torch.removeprefix("torch ")].name,
            turns.ratios(way),
            way,
        )
        for way in ("packed", "padded")
        for turns in steady
    ]
    found.append(
        (
            "real tokens to the target, packed, seed by seed",
            *over("jvarlen", OF_TORCH, lambda run: run.num_tokens),
            "tokens",
        )
    )
    return [
        [what, best, with_spread(ratios, ".2f") if ratios else "–", f"≤ {REACHES[goal]}"]
        for what, best, ratios, goal in found
    ]


def steady_table(steady: list[Turns]) -> list[str]:
    """Microseconds a real token of every way, at each budget."""
    names = list(dict.fromkeys(name for turns in steady for name in turns.of_ways))
    rows = [
        [
            WAYS[name.removeprefix("torch ")].name if name.startswith("torch ") else f"jvarlen, {name}",
            *(with_spread(turns.of_ways[name], ".1f") for turns in steady),
        ]
        for name in names
    ]
    return table("|".join(["way", *(f"{turns.max_tokens:,} positions" for turns in steady)]), rows)


def parts_table(
    runs: dict[str, list[Run]], target: float, steady: list[Turns], imports_s: dict[str, float]
) -> list[str]:
    """Where the seconds of jvarlen's ways go."""
    rows = []
    for way in (name for name, each in WAYS.items() if each.package == "jvarlen" and runs.get(name)):
        of_runs = [reached(run, target) for run in runs[way]]
        about = [run["about"] for run in runs[way]]
        seconds = {part: median([run.seconds[part] for run in of_runs]) for part in PARTS}
        max_tokens = runs[way][0]["settings"]["max_tokens"]
        share = next((attention_share(turns) for turns in steady if turns.max_tokens == max_tokens), None)
        is_packed = all(each["is_packed"] for each in about)
        attention = f"{share * seconds['steps']:.1f}" if share is not None and is_packed else "–"
        rest = f"{(1 - share) * seconds['steps']:.1f}" if share is not None and is_packed else f"{seconds['steps']:.1f}"
        rows.append(
            [
                WAYS[way].name,
                f"{imports_s['jvarlen']:.1f}",
                f"{seconds['planning']:.1f}",
                *(f"{median([each[name] for each in about]):.1f}" for name in ("lower_s", "compile_s")),
                f"{seconds['compile']:.1f}",
                f"{seconds['data']:.1f}",
                attention,
                rest,
            ]
        )
    return table("way|imports|planning|lowering|compiling|waiting for both|data|steps: attention|the rest", rows)


def attention_share(turns: Turns) -> float:
    """The share of attention in the seconds of packed steps."""
    return 1 - turns.median("without attention") / turns.median("packed")


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
    runs: dict[str, list[Run]],
    settings: Settings,
    sizes: str,
    tuned: dict[str, Any] | None,
    plot: str,
    steady: list[Turns],
    imports_s: dict[str, float],
) -> list[str]:
    """The lines between the title and the versions."""
    target = settings.target
    num_params = {run["num_params"] for runs_of_way in runs.values() for run in runs_of_way}
    if len(num_params) > 1:
        raise RuntimeError(f"the ways did not train the same model: {num_params} parameters")
    choices = {run["about"]["reason"] for run in runs.get("jvarlen", [])}
    lines = [
        f"The built-in corpus, samples cut to {settings.longest:,} bytes: {sizes}. One model for all, "
        f"{num_params.pop():,} parameters in float32 (`jvarlen.models`, and in PyTorch `torch_ref`; parity tests hold "
        f"that they are the same function), until {target} bits per held-out byte. Each way has the budget of "
        "positions and the learning rate that serve it best.",
        "",
        *table("figure|over|ratio|reach", goal_rows(runs, target, steady)),
        "",
        "Each run is a process of its own; the ways take turns. The first run of every way begins with the same "
        "weights, the second with others, and so on; the order of the samples is drawn anew as well. Seconds count "
        "from when imports are done and samples and initial weights are in memory: planning, every compilation, "
        "batching and steps. Caches of compiled programs are off or empty, but for the second row. Evaluations, and "
        "compiling them, stop the watch, unless programs are compiled meanwhile; there is one every "
        f"{settings.eval_every:,} real tokens, the same batches for all, and the seconds at the target are read off "
        "the line between two of them. Medians of the runs, least and largest in parentheses. The factor is of "
        "seconds, to the first row.",
        "",
        *result_table(runs, target),
        "",
        "Planning: lengths, costs, shapes and the plan, with what numba compiles for them. Compile: building the "
        "optimizer, and compiling train steps, or waiting for the first; for a jitted loop, the calls that compile. "
        "Data: the time that the loop spent getting batches, in JAX partly during the step before. Real tokens a "
        "second: of data and steps. Shapes: different (rows, length) that were trained on; compilations: train steps "
        f"compiled. {settings.limit_s:.0f} seconds or {settings.horizon:,} real tokens end a run that does not reach "
        "the target.",
        "",
        "The fewer samples a batch holds, the more steps are taken over the same tokens, and the fewer tokens the "
        "target takes, down to a size: real tokens a second alone do not tell which way is first at the target.",
        "",
        f"jvarlen takes {'; '.join(sorted(choices))}." if choices else "",
        "",
        "Where the seconds go, medians. Imports are not in the seconds to the target; PyTorch's take "
        f"{imports_s.get('torch', math.nan):.1f} s, those of a Flax loop {imports_s.get('flax', math.nan):.1f} s. "
        "Lowering and compiling happen while steps run, except for the first shape. Attention is the share of a packed "
        "step that is gone without it.",
        "",
        *parts_table(runs, target, steady, imports_s),
        "",
        "Steps alone, everything planned and compiled, data included: microseconds a real token. The ways take turns "
        "in one process; medians of the turns.",
        "",
        *steady_table(steady),
        "",
        f"![Held-out bits per byte over seconds and over real tokens]({plot})",
        "",
        "How each way makes its batches:",
        "",
        "- jvarlen: one packed shape, as `fit` chooses by default; "
        '`make_plan`, `compile_buckets` with `when="background"`, `load`, `keep_memory_of_steps`; '
        "`scale_by_planned_rate` scales the rate by the square root of the share of the positions of a batch that are "
        "real tokens. With programs of an earlier run: of another seed. A batch of several rows is spread over devices "
        "of JAX that the CPU is split into, one a core at most, since attention of packed rows takes one core of a "
        f'device. One packed shape: `packing="best_fit"`, rows of {settings.longest:,}. Padded shapes: '
        f"up to {PADDED_SHAPES}, as more take longer to compile; lengths rounded to {settings.length_multiple}.",
        "- Flax and Optax: attention is `jax.nn.dot_product_attention`, with a mask of T×T where rows are packed.",
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
        "- Packed in PyTorch: shuffled samples end to end in one row without any padding, as many as the budget has "
        "tokens for; `scaled_dot_product_attention` once a sample, everything else once a row.",
        "",
        f"AdamW ({', '.join(f'{name} {value}' for name, value in OPTIMIZER.items())}), gradients of a global norm of "
        f"at most {MAX_GRADIENT_NORM:g}. The rate rises over the first {WARMUP_FRACTION:.0%} of "
        f"{settings.horizon:,} real tokens and decays along a cosine to {FINAL_FRACTION:.0%}. It follows tokens, not "
        "steps, as the ways take different numbers of steps for the same samples.",
    ]
    if tuned is not None:
        lines += [
            "",
            "Each way has its own budget of positions and its own highest rate: those with the fewest seconds to "
            f"{tuned['target']} bits, without planning and compiling; seed {tuned['seed']}, one run of each, of up to "
            f"{tuned['limit_s']:.0f} seconds. From the choice of an earlier tuning on, twice and half the budget and "
            "the rate are tried until none is better. Ways may have been tuned on different machines: compare the "
            "seconds of one way only. What was chosen is in bold:",
            "",
            *tuning_table(tuned),
        ]
    return lines
