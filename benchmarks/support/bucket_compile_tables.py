"""Report lines and a plot of the bucket benchmark."""

from __future__ import annotations

import collections
import datetime
import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from support.bucket_compile_plans import PACKED_LENGTH_MULTIPLE, MeasuredCost, Shape, Sizes, Strategy, by_time
from support.timing import digits, table, versions_and_hardware

import jvarlen

NO_VALUE = "–"
TORCH_WAYS = {"eager": "eager", "static": "static for each bucket", "dynamic": "`dynamic=True`"}


class Start(NamedTuple):
    """Seconds of starts of a strategy in a process each."""

    cold: list[dict[str, float]]
    warm: list[dict[str, float]]


class Measured(NamedTuple):
    """What all processes answered; None where PyTorch did not, or was not asked."""

    fit: jvarlen.CostModel
    cost: MeasuredCost
    seconds: dict[Shape, float]
    starts: dict[str, Start]
    epoch: dict[str, Any]
    host: dict[str, Any]
    torch: tuple[dict[str, Any] | None, dict[str, Any] | None]


class Figures(NamedTuple):
    """A line of the table, and of the plot; None where something was not measured."""

    name: str
    shapes: str
    num_shapes: int
    padding: float
    epoch_s: float
    efficiency: float
    cold: dict[str, float] | None
    warm: dict[str, float] | None
    is_extrapolated: bool = False
    bound: float | None = None


def middle(starts: Iterable[dict[str, float]]) -> dict[str, float] | None:
    """The median of each figure of some starts."""
    figures = collections.defaultdict(list)
    for start in starts:
        for name, value in start.items():
            figures[name].append(value)
    return {name: statistics.median(values) for name, values in figures.items()} or None


def first_step_s(starts: Iterable[dict[str, float]]) -> float:
    """The median of the seconds to the first step."""
    return statistics.median(start["first_step_s"] for start in starts)


class Judged(NamedTuple):
    """The cost of an epoch without padding, and at best with its number of shapes, by the measured cost."""

    ideal_s: float
    bounds: dict[int, float]
    pad_ratio: float
    powers_ratio: float


def judge(sizes: Sizes, lengths: np.ndarray, strategies: dict[str, Strategy], cost: MeasuredCost) -> Judged:
    def predicted(strategy: Strategy) -> float:
        return strategy.seconds(lambda shape: float(cost(*shape[1:])))

    ideal_s = float(cost(1, lengths).sum())
    numbers = {*sizes.num_shapes, *(len(each.buckets) for each in strategies.values())}
    best = {number: predicted(by_time(sizes, lengths, cost, number)) for number in sorted(numbers)}
    least = best[sizes.main_shapes]
    ratios = (predicted(strategies[name]) / least for name in ("pad to the longest", "powers of two"))
    return Judged(ideal_s, {number: ideal_s / seconds for number, seconds in best.items()}, *ratios)


def strategy_figures(strategies: dict[str, Strategy], judged: Judged, found: Measured) -> list[Figures]:
    lines = []
    for strategy in strategies.values():
        epoch_s, number = strategy.seconds(found.seconds.__getitem__), len(strategy.buckets)
        start = found.starts.get(strategy.name)
        lines.append(
            Figures(
                strategy.name,
                str(number),
                number,
                strategy.padding,
                epoch_s,
                judged.ideal_s / epoch_s,
                middle(start.cold) if start else None,
                middle(start.warm) if start else None,
                bound=judged.bounds[number],
            )
        )
    return lines


def raw_figures(judged: Judged, raw: dict[str, Any], num_tokens: int) -> Figures:
    """Figures of jit on raw shapes. Shapes not reached in time count as the mean of the others."""
    compile_s = statistics.fmean(raw["compile_s"]) * raw["num_shapes"]
    epoch_s = statistics.fmean(raw["step_s"]) * raw["num_batches"]
    return Figures(
        "jit on raw shapes",
        f"{raw['num_compiled']:,} of {raw['num_shapes']:,}",
        raw["num_shapes"],
        1 - num_tokens / raw["num_positions"],
        epoch_s,
        judged.ideal_s / epoch_s,
        {"compile_s": compile_s, "first_step_s": raw["first_step_s"]},
        None,
        is_extrapolated=raw["num_compiled"] < raw["num_shapes"],
    )


def torch_figures(strategy: Strategy, lengths: np.ndarray, found: Measured) -> list[Figures]:
    """The efficiency of each way of PyTorch, from the cost of a token in the strategy's buckets."""
    cold, warm = found.torch
    lines = []
    for way, of_way in (cold or {}).items():
        seconds = dict(zip(strategy.shapes, of_way["step_s"], strict=True))
        epoch_s = strategy.seconds(seconds.__getitem__)
        per_token = tuple(value / (rows * length) for (_, rows, length), value in seconds.items())
        own_cost = MeasuredCost(tuple(bucket.length for bucket in strategy.buckets), per_token)
        lines.append(
            Figures(
                f"PyTorch, {TORCH_WAYS[way]}",
                "none" if way == "eager" else str(of_way["num_graphs"]),
                len(strategy.buckets),
                strategy.padding,
                epoch_s,
                float(own_cost(1, lengths).sum()) / epoch_s,
                of_way,
                (warm or {}).get(way),
            )
        )
    return lines


def figures_table(lines: list[Figures], num_tokens: int) -> list[str]:
    def cells(each: Figures) -> list[str]:
        about = "≈ " if each.is_extrapolated else ""

        def of_start(start: dict[str, float] | None, name: str, about: str = "") -> str:
            return NO_VALUE if start is None else f"{about}{start[name]:,.1f}"

        return [
            each.name,
            each.shapes,
            of_start(each.cold, "compile_s", about),
            of_start(each.warm, "compile_s"),
            of_start(each.cold, "first_step_s"),
            of_start(each.warm, "first_step_s"),
            f"{about}{num_tokens / each.epoch_s:,.0f}",
            f"{each.padding:.2%}",
            f"{about}{each.epoch_s:,.1f}",
            f"{about}{each.efficiency:.3f}",
            NO_VALUE if each.bound is None else f"{each.bound:.3f}",
            NO_VALUE if each.bound is None else f"{each.efficiency / each.bound:.3f}",
        ]

    header = (
        "strategy|shapes compiled|compile s, cold|warm|first step s, cold|warm|real tokens/s|padding|epoch s|"
        "efficiency|bound|of the bound"
    )
    return table(header, map(cells, lines))


def real_epoch_s(strategy: Strategy, found: Measured) -> float:
    """Seconds of the epoch that was run; where that was a part of it, those of the whole in proportion."""
    done = sum(found.seconds[strategy.shapes[bucket]] for bucket in found.epoch["step_bucket"])
    return found.epoch["epoch_s"] * strategy.seconds(found.seconds.__getitem__) / done


def median_ratio(seconds: dict[str, list[float]]) -> float:
    """The median of the first of two calls over that of the second."""
    ours, theirs = map(statistics.median, seconds.values())
    return ours / theirs


def goals_table(sizes: Sizes, strategies: dict[str, Strategy], judged: Judged, found: Measured) -> list[str]:
    """What was to be reached, and what was."""

    def row(name: str, goal: str, value: float, is_reached: bool, bound: str = "") -> list[str]:
        return [name, goal, digits(value), bound, "yes" if is_reached else "**no**"]

    def at_least(least: float, name: str, value: float, bound: float) -> list[str]:
        return row(name, f"at least {least:g}", value, value >= least, digits(bound))

    def at_most(most: float, name: str, value: float) -> list[str]:
        return row(name, f"at most {most:g}", value, value <= most)

    main = strategies[f"optimal by time, {sizes.main_shapes}"]
    epoch_s = {name: strategy.seconds(found.seconds.__getitem__) for name, strategy in strategies.items()}
    bound, main_s, run_s = judged.bounds[len(main.buckets)], epoch_s[main.name], real_epoch_s(main, found)
    pad_ratio, powers_ratio = epoch_s["pad to the longest"] / main_s, epoch_s["powers of two"] / main_s
    start = found.starts[main.name]
    cold_s = first_step_s(start.cold)
    rows = [
        at_least(0.97, "efficiency of the epoch that was run, of the bound", judged.ideal_s / run_s / bound, bound),
        at_least(0.97, "the same by medians of its steps", judged.ideal_s / main_s / bound, bound),
        at_least(6, "epoch, times faster than pad to the longest", pad_ratio, judged.pad_ratio),
        at_least(1.68, "epoch, times faster than powers of two", powers_ratio, judged.powers_ratio),
        at_most(0, "compilations after the first step, data pipeline included", found.epoch["num_compilations"]),
        at_most(0.25, "first step from the persistent cache, over cold", first_step_s(start.warm) / cold_s),
        *(
            at_most(1.2, f"dispatch over a jitted function, {name}", median_ratio(seconds))
            for name, seconds in found.host["dispatch"].items()
        ),
        at_most(0.03, "device idle in the smallest bucket, share of a step", median_ratio(found.host["idle"]) - 1),
    ]
    return table("figure|to reach|measured|bound|reached", rows)


def starts_table(start: Start) -> list[str]:
    kinds = {
        "cold": start.cold,
        "warm: persistent cache": start.warm,
    }
    rows = (
        [
            name,
            *(f"{value:.2f}" for value in each.values()),
            f"{each['first_step_s'] / first_step_s(start.cold):.3f}",
            str(len(starts)),
        ]
        for name, starts in kinds.items()
        if (each := middle(starts)) is not None
    )
    return table("start|model and optimizer, s|compile, s|first step, s|over cold|runs", rows)


def prediction_errors(found: Measured) -> list[str]:
    """How far both cost models are from the measured steps of all buckets that are not packed."""
    shapes = [shape for shape in found.seconds if not shape[0]]
    measured = np.array([found.seconds[shape] for shape in shapes])
    rows, length = np.array([shape[1:] for shape in shapes]).T
    return table(
        "cost|median error|95 % of the errors are below|largest error",
        (
            [name, *(f"{value:.1%}" for value in (*np.quantile(errors, [0.5, 0.95]), errors.max()))]
            for name, model in (("lines between measured lengths", found.cost), ("fitted cost model", found.fit))
            for errors in [np.abs(model(rows, length) / measured - 1)]
        ),
    )


def draw(lines: list[Figures], judged: Judged, run: tuple[int, float]) -> Figure:
    """Efficiency over the number of shapes, and the seconds of a first epoch."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    by_shapes, by_seconds = figure.subplots(1, 2)
    numbers = sorted(judged.bounds)
    by_shapes.plot(numbers, [judged.bounds[number] for number in numbers], "--", color="0.6", label="bound")
    series = collections.defaultdict(list)
    for each in lines:
        if each.bound is not None:
            series[each.name.rpartition(",")[0] or each.name].append(each)
    for name, of_name in series.items():
        style = "o-" if len(of_name) > 1 else "o"
        by_shapes.plot([each.num_shapes for each in of_name], [each.efficiency for each in of_name], style, label=name)
    by_shapes.plot(*run, "k*", markersize=11, label="epoch that was run")
    by_shapes.set(xlabel="shapes", ylabel="efficiency", ylim=(0, 1))
    by_shapes.legend(frameon=False)
    started = [each for each in lines if each.cold is not None][::-1]
    compile_s = [(each.cold or {})["compile_s"] for each in started]
    by_seconds.barh([each.name for each in started], [each.epoch_s for each in started], color="C0", label="an epoch")
    by_seconds.barh(
        [each.name for each in started],
        compile_s,
        left=[each.epoch_s for each in started],
        color="C1",
        label="compiling, cold",
    )
    by_seconds.set_xlabel("seconds of a first epoch")
    by_seconds.legend(frameon=False)
    for axis in (by_shapes, by_seconds):
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def make_report(
    sizes: Sizes,
    lengths: np.ndarray,
    strategies: dict[str, Strategy],
    found: Measured,
    plot: str | None,
    minutes: float,
) -> tuple[list[str], Figure]:
    judged = judge(sizes, lengths, strategies, found.cost)
    main = strategies[f"optimal by time, {sizes.main_shapes}"]
    lines = [
        *strategy_figures(strategies, judged, found),
        raw_figures(judged, found.host["raw"], int(lengths.sum())),
        *torch_figures(strategies[f"optimal by time, {sizes.torch_shapes}"], lengths, found),
    ]
    run_s, epoch = real_epoch_s(main, found), found.epoch
    for_torch = f"the {sizes.torch_shapes} shapes of “optimal by time, {sizes.torch_shapes}”"
    raw = found.host["raw"]
    text = [
        f"# Compiled buckets, {datetime.date.today()}",
        "",
        f"{len(lengths):,} samples of up to {sizes.longest:,} bytes, {lengths.sum():,} in all; {sizes.max_tokens:,} "
        "tokens a microbatch, one microbatch a step; lengths of shapes are multiples of "
        f"{sizes.length_multiple}, those of packed rows of {PACKED_LENGTH_MULTIPLE}. "
        f"Model: {', '.join(f'{name} {value}' for name, value in sizes.model.items())}; AdamW.",
        "",
        *goals_table(sizes, strategies, judged, found),
        "",
        "The bound of an efficiency: the predicted efficiency of the plan that the dynamic programme finds with the "
        "measured cost. The bound of times faster: predicted by that cost as well. The goals were set for a cost of "
        "15.0 µs + 0.219 µs·T a token, whose bounds are 0.925, 6.26 and 1.74. Ratios are of one run; those of starts, "
        "dispatch and idling are of medians of calls in turn.",
        "",
        "## Strategies",
        "",
        *figures_table(lines, int(lengths.sum())),
        "",
        "An epoch's seconds are not those of a run but a sum: each bucket's median step × its steps. All shapes of JAX "
        f"were run in turn, {sizes.num_rounds} times (those of the cost twice as often), in one process, and "
        f"between these rounds an epoch of “{main.name}” through `jvarlen.load`: "
        f"{epoch['num_steps']:,} steps, {epoch['num_tokens']:,} tokens, "
        f"{epoch['epoch_s']:.1f} s, {epoch['num_tokens'] / epoch['epoch_s']:,.0f} real tokens/s; "
        f"{run_s / strategies[main.name].seconds(found.seconds.__getitem__):.3f} times the sum of its medians, "
        f"efficiency {judged.ideal_s / run_s:.3f}, {epoch['num_compilations']} compilations. Efficiency: "
        f"{judged.ideal_s:.1f} s, which the samples would take at their own length without padding, over the seconds "
        "of the epoch. Packed rows cost what they cost; the bound is that of as many shapes without packing.",
        "",
        "Compiling is a process of its own with an empty cache (cold), then another (warm). The first step's seconds "
        "begin with making the model and the optimizer; imports are left out. “–”: not measured, or nothing to "
        "measure.",
        "",
        f"Jit on raw shapes: shuffled samples in batches of up to {sizes.max_tokens:,} tokens, each in its own rows × "
        f"longest sample, {raw['num_batches']:,} batches an epoch. Stopped after {sizes.raw_limit_s:g} s; what is "
        f"marked ≈ is extrapolated from the mean of {raw['num_compiled']} shapes.",
        "",
        f"PyTorch: {for_torch}, so that compiling takes minutes at most; the backend is “{sizes.torch_backend}”, and "
        "eager, static and dynamic are compiled in this order in one process and then run in turn. Shapes compiled "
        "are graphs. Efficiency there: by what a token costs that way in these buckets, shorter samples at the cost "
        f"of the shortest bucket's. Processes are stopped after {sizes.torch_limit_s} s"
        f"{'' if found.torch[0] else '; this one was, or failed, so that there are no figures'}.",
        "",
        *([f"![Efficiency over shapes, and seconds of a first epoch]({plot})", ""] if plot else []),
        f"## Starts of “{main.name}”",
        "",
        *starts_table(found.starts[main.name]),
        "",
        "## Cost",
        "",
        f"Seconds a token at lengths {', '.join(map(str, found.cost.lengths))}, in µs: "
        f"{', '.join(digits(1e6 * value) for value in found.cost.seconds_per_token)}. In between, on straight lines. "
        "Plans were made with the same lengths, measured before; bounds and ideal seconds are of these, measured in "
        f"turn with all steps. The fitted model would be {found.fit}. Against the measured steps:",
        "",
        *prediction_errors(found),
        "",
        "Dispatch: seconds until a call comes back, same state, same batch of 2 × 16 tokens, in µs: "
        + "; ".join(
            f"{name}: {', '.join(f'{kind} {1e6 * statistics.median(each):.0f}' for kind, each in seconds.items())}"
            for name, seconds in found.host["dispatch"].items()
        )
        + f". Idling: {main.buckets[0]}, steps through `jvarlen.load` against the same loop over batches that lie on "
        "the device. Here the device is the CPU, which loading needs too.",
        "",
        f"All took {minutes:.0f} minutes. {versions_and_hardware('jax', 'jaxlib', 'torch')}",
    ]
    return text, draw(lines, judged, (sizes.main_shapes, judged.ideal_s / run_s))
