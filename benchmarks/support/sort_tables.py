"""Report lines and a plot of the sorting benchmark."""

from __future__ import annotations

import math
import os
import statistics
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from support.timing import digits, table

KINDS = (
    "uniform", "constant", "90 % duplicates", "sorted", "reversed", "two values", "Zipf, exponent 1.3",
    "a range for each shard",
)  # fmt: skip


class Sizes(NamedTuple):
    """How much is measured."""

    num_keys: int
    num_devices: int
    growth: tuple[int, ...]
    shards: tuple[int, ...]
    shard_keys: int
    memory: tuple[int, ...]
    balance_shards: tuple[int, ...]
    kinds: tuple[str, ...]
    balance_keys: int
    process_keys: int
    process_repeats: int
    num_samples: int
    gpu_keys: int


def seconds_table(seconds: dict[str, list[float]]) -> list[str]:
    """Ratios of the fastest calls to the fastest of the first row."""
    first = min(next(iter(seconds.values())))
    rows = (
        (name, digits(min(values)), digits(statistics.median(values)), f"{min(values) / first:.2f}", str(len(values)))
        for name, values in seconds.items()
    )
    return table("work|seconds|median|ratio|runs", rows)


def process_seconds(answers: dict[str, Any]) -> dict[str, list[float]]:
    """Seconds of all runs on two processes, each as long as its slower process; by what ran, the slowest first."""
    seconds: dict[str, list[float]] = {}
    for first, second in (answer for name, answer in answers.items() if name.startswith("2 processes")):
        for name in first:
            seconds.setdefault(name, []).extend(map(max, first[name], second[name]))
    return dict(sorted(seconds.items(), key=lambda item: -min(item[1])))


def compare_keys(sizes: Sizes, answers: dict[str, Any]) -> list[str]:
    lines = [
        f"## {sizes.num_keys:,} keys on {sizes.num_devices} devices of one CPU",
        "",
        f"The {sizes.num_devices} devices share the {os.cpu_count()} cores; on one device, and with NumPy, it is one "
        "core. Ratios to the first row of a table. Keys lie on their devices before; `sample_sort` returns NumPy's "
        "order, in the interleaved layout and by `shard_map` where nothing else is said.",
        "",
        "XLA sorts rows of several numbers slower than rows of one, as the first table shows on one device. 32-bit "
        "keys with their index are one number to `sample_sort`; 64-bit keys, and rows with a payload, are not.",
        "",
    ]
    for name in (name for name in answers if name.endswith(("keys", "payload"))):
        lines += [f"### {name}, uniform", "", *seconds_table(answers[name]), ""]
    return lines


def compare_processes(sizes: Sizes, answers: dict[str, Any]) -> list[str]:
    seconds = process_seconds(answers)
    lists = min(min(values) for name, values in seconds.items() if name.startswith("lists"))
    rows = (
        (name, digits(min(values)), digits(statistics.median(values)), f"{lists / min(values):.1f}", str(len(values)))
        for name, values in seconds.items()
    )
    return [
        f"## {sizes.process_keys:,} (key, index) rows on 2 processes",
        "",
        "int32 keys, half of them on each process before. Sorting and exchanging only, by gloo, until the slower "
        "process is done; torch has one thread a process. Lists of tuples are sorted by `sorted`, cut at splitters, "
        "exchanged and sorted again. They stay where the splitters put them; `sample_sort` also spreads its rows "
        "evenly and interleaves them. Times faster: than the faster lists.",
        "",
        *table("work|seconds|median|times faster|runs", rows),
        "",
    ]


def compare_balance(sizes: Sizes, answers: dict[str, Any]) -> list[str]:
    def row(num_shards: int, of_kind: dict[str, Any]) -> list[str]:
        rows, textbook = of_kind["rows"], of_kind["textbook"]
        return [
            of_kind["kind"],
            str(num_shards),
            f"{min(rows):,} to {max(rows):,}",
            f"{of_kind['lost']:,}",
            f"{of_kind['misplaced']:,}",
            f"{max(textbook) / (sum(textbook) / num_shards):.2f}",
            f"{of_kind['waiting']:.2%}",
        ]

    rows = [(p, of_kind) for p in sizes.balance_shards for of_kind in answers[f"balance of {p}"]]
    rows.sort(key=lambda row: sizes.kinds.index(row[1]["kind"]))
    means = (f"{sizes.balance_keys / p:,.2f} with {p} devices" for p in sizes.balance_shards)
    return [
        f"## Balance of {sizes.balance_keys:,} keys",
        "",
        f"Rows a device in the mean: {', '.join(means)}. Textbook: a sample sort whose splitters are keys alone, of 4 "
        "regular samples a shard and device; its fullest device over the mean. Waiting: the share of the devices' "
        "time in which they wait for the one with the longest sample, slot by slot, where keys are lengths. "
        "Misplaced: rows that are not where NumPy's stable sort has them.",
        "",
        *table(
            "keys|devices|rows a device|lost|misplaced|textbook: fullest / mean|waiting",
            (row(*given) for given in rows),
        ),
        "",
    ]


def per_compared(num_rows: int, seconds: float) -> float:
    """Nanoseconds for each of N·log₂ N."""
    return 1e9 * seconds / (num_rows * math.log2(num_rows))


def compare_growth(sizes: Sizes, answers: dict[str, Any]) -> list[str]:
    growth = answers["growth"]
    rows = (
        (
            f"{each['num_rows']:,}",
            digits(min(each["sample_sort"])),
            digits(per_compared(each["num_rows"], min(each["sample_sort"]))),
            digits(min(each["one device"])),
            f"{min(each['sample_sort']) / min(each['one device']):.2f}",
            f"{each['first_s']:.1f}",
        )
        for each in growth
    )
    num_rows = np.array([each["num_rows"] for each in growth])
    seconds = np.array([min(each["sample_sort"]) for each in growth])
    slopes = [
        f"{np.polyfit(np.log(num_rows[chosen] * np.log2(num_rows[chosen])), np.log(seconds[chosen]), 1)[0]:.2f} {said}"
        for chosen, said in ((slice(None), "over all"), (slice(-4, None), "over the last four"))
    ]
    costs = [per_compared(*each) for each in zip(num_rows[-4:].tolist(), seconds[-4:].tolist(), strict=True)]
    return [
        f"## Growth with N, {sizes.num_devices} devices",
        "",
        f"int32 keys. Seconds grow as N·log₂ N to the power of {' and '.join(slopes)} sizes (least squares of "
        f"logarithms); over the last four, seconds per N·log₂ N differ by a factor of {max(costs) / min(costs):.2f}. "
        "The ratio is that to `lax.sort` of (key, index) on one device. The first call compiles.",
        "",
        *table("N|seconds|ns per N·log₂ N|one device, seconds|ratio|first call, seconds", rows),
        "",
    ]


def compare_shards(sizes: Sizes, answers: dict[str, Any]) -> list[str]:
    by_shards = {p: answers[f"{p} shards"] for p in sizes.shards}
    one = min(by_shards[sizes.shards[0]]["sample_sort"])
    rows = (
        (
            str(p),
            digits(min(each["sample_sort"])),
            f"{min(each['sample_sort']) / one:.2f}",
            f"{each['first_s']:.1f}",
            f"{each['formula'][0]:,}",
            f"{each['counted'][0]:,}",
            f"{each['formula'][1]:,.0f}",
            f"{each['counted'][1]:,.0f}",
            f"{each['formula'][1] / (sizes.shard_keys / p):.1f}",
        )
        for p, each in by_shards.items()
    )
    return [
        f"## Growth with the devices, {sizes.shard_keys:,} keys",
        "",
        f"int32 keys. All devices share {os.cpu_count()} cores, so that more devices than these cannot be faster; what "
        "grows is the exchange. Messages and bytes are what a device sends in one sort, as `exchange_volume` says, and "
        "counted: as the collectives of the traced program add up.",
        "",
        *table(
            "devices|seconds|ratio|first call, seconds|messages|counted|bytes|counted|bytes per own row",
            rows,
        ),
        "",
    ]


def compare_memory(sizes: Sizes, answers: dict[str, Any]) -> list[str]:
    rows = (
        (
            str(p),
            f"{each['num_rows']:,}",
            *(
                cell
                for name in ("sample_sort", "argsort", "pairs")
                for cell in (f"{each[name]:,}", f"{each[name] / (each['num_rows'] / p):.1f}")
            ),
        )
        for p in sizes.shards
        for each in answers[f"{p} shards"]["memory"]
    )
    return [
        "## Memory of a device",
        "",
        "Bytes of temporaries on each device, as the compiler assigns them (`memory_analysis`), and the same over the "
        "rows of a device, N/p. int32 keys; `jnp.argsort`, and `lax.sort` of (key, index), of sharded arrays, whose "
        "results are sharded as well.",
        "",
        *table(
            "devices|N|`sample_sort`|a row|`jnp.argsort`|a row|`lax.sort` of pairs|a row",
            rows,
        ),
        "",
    ]


def compare_plans(sizes: Sizes, answers: dict[str, Any]) -> list[str]:
    rows = (
        (
            each["order"],
            digits(min(each["make_plan"])),
            digits(min(each["plan_distributed"])),
            f"{min(each['plan_distributed']) / min(each['make_plan']):.1f}",
            "yes" if each["equal"] else "no",
        )
        for each in answers["plans"]
    )
    return [
        f"## Plans of {sizes.num_samples:,} samples",
        "",
        f"Uniform lengths from 128 to 4,095, 16 shapes, 8 microbatches a step; {sizes.num_devices} devices of one "
        "process. Both with the digest. `make_plan` has all lengths in one place, `plan_distributed` does without "
        "that.",
        "",
        *table("order|`make_plan`, seconds|`plan_distributed`, seconds|ratio|same digest", rows),
        "",
    ]


def compare_gpu(sizes: Sizes, answers: dict[str, Any]) -> list[str]:
    title = [f"## {sizes.gpu_keys:,} int32 keys on one GPU", ""]
    if answers["GPU"] is None:
        return [*title, "Not measured: JAX finds no GPU.", ""]
    return [*title, *seconds_table(answers["GPU"]), ""]


def list_goals(sizes: Sizes, answers: dict[str, Any]) -> list[str]:
    """What was to be reached, and what was."""
    pairs_s, ours_s, *_ = (min(values) for values in answers["int32 keys"].values())
    rows = [goal_row("int32 keys, over `lax.sort` of (key, index)", "at most 1", ours_s / pairs_s, ours_s <= pairs_s)]
    seconds = {name: min(values) for name, values in process_seconds(answers).items()}
    lists_s = min(value for name, value in seconds.items() if name.startswith("lists"))
    for name, value in seconds.items():
        if name.endswith("sample_sort`"):
            faster = lists_s / value
            rows += [
                goal_row(f"2 processes, {name}, seconds", "below 0.4", value, value < 0.4),
                goal_row(f"2 processes, {name}, times faster than lists", "at least 6", faster, faster >= 6),
            ]
    found = [each for p in sizes.balance_shards for each in answers[f"balance of {p}"]]
    spread = max(max(each["rows"]) - min(each["rows"]) for each in found)
    num_wrong = sum(each["lost"] + each["misplaced"] for each in found)
    volumes = [answers[f"{p} shards"] for p in sizes.shards]
    num_differing = sum(each["formula"] != each["counted"] for each in volumes)
    num_other_plans = sum(not each["equal"] for each in answers["plans"])
    return table(
        "figure|to reach|measured|reached",
        [
            *rows,
            goal_row("rows of the fullest device, less those of the emptiest", "at most 1", spread, spread <= 1),
            goal_row("rows lost or misplaced", "0", num_wrong, num_wrong == 0),
            goal_row("sorts that send what `exchange_volume` does not say", "0", num_differing, num_differing == 0),
            goal_row("plans whose digest is not that of `make_plan`", "0", num_other_plans, num_other_plans == 0),
            gpu_goal(answers["GPU"]),
        ],
    )


def goal_row(name: str, goal: str, value: float, is_reached: bool) -> list[str]:
    return [name, goal, digits(value), "yes" if is_reached else "**no**"]


def gpu_goal(seconds: dict[str, list[float]] | None) -> list[str]:
    name, goal = "one GPU, over `torch.sort`", "at most 2"
    torch_s = (seconds or {}).get("`torch.sort`, stable")
    if seconds is None or torch_s is None:
        return [name, goal, "", "no GPU" if seconds is None else "no torch with CUDA"]
    ratio = min(seconds["`sample_sort`"]) / min(torch_s)
    return goal_row(name, goal, ratio, ratio <= 2)


def draw(sizes: Sizes, answers: dict[str, Any]) -> Figure:
    """Seconds over N and over the number of devices."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    by_size, by_shards = figure.subplots(1, 2)
    growth = answers["growth"]
    num_rows = np.array([each["num_rows"] for each in growth])
    ours = np.array([min(each["sample_sort"]) for each in growth])
    by_size.plot(num_rows, [min(each["one device"]) for each in growth], "s-", color="C1", label="lax.sort, one device")
    by_size.plot(num_rows, ours, "o-", color="C0", label=f"sample_sort, {sizes.num_devices} devices")
    compared = num_rows * np.log2(num_rows)
    by_size.plot(num_rows, ours[-1] * compared / compared[-1], "--", color="0.6", label="N·log N")
    by_size.set(xscale="log", yscale="log", xlabel="N", ylabel="seconds")
    by_size.legend(frameon=False)
    seconds = [min(answers[f"{p} shards"]["sample_sort"]) for p in sizes.shards]
    by_shards.plot(sizes.shards, seconds, "o-", color="C0")
    by_shards.set_xscale("log", base=2)
    by_shards.set_xticks(sizes.shards, [str(p) for p in sizes.shards])
    by_shards.set(xlabel=f"devices, on {os.cpu_count()} cores", ylabel=f"seconds, {sizes.shard_keys:,} keys")
    by_shards.set_ylim(0, 1.1 * max(seconds))
    for axis in (by_size, by_shards):
        axis.spines[["top", "right"]].set_visible(False)
    return figure
