"""Plans of every kind, from generated lengths: each case gives what is held of it."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from . import calls
from .shorten import as_json, exact

Case = Callable[[str], Any]  # from the package to values

CASES: dict[str, Case] = {}

SIZE = 3000
ORDERS = ("dataset", "length", "length_descending", "shuffle")
STRATEGIES = ("optimal", "pad_to_max", "powers_of_two", "geometric", "quantile", "equal_tokens")
M = 4  # microbatches a step


def lengths_of(seed: int, size: int = SIZE, longest: int = 2000) -> Any:
    """int64[size], skewed as texts are."""
    rng = np.random.default_rng(seed)
    return np.clip(np.rint(rng.lognormal(4.5, 1.0, size)), 1, longest).astype(np.int64)


def pair_lengths(seed: int, size: int = SIZE) -> Any:
    """int64[size, 2], sentences and translations."""
    rng = np.random.default_rng(seed)
    source = np.clip(np.rint(rng.lognormal(3.0, 0.6, size)), 1, 200)
    target = np.clip(np.rint(source * rng.lognormal(0.05, 0.25, size)), 1, 200)
    return np.stack([source, target], axis=1).astype(np.int64)


LENGTHS = lengths_of(0)
PAIRS = pair_lengths(1)
SUBSET = np.random.default_rng(2).permutation(SIZE)[:1234]
EASE = np.random.default_rng(3).integers(0, 40, SIZE)  # a difficulty with ties
SCORES = np.random.default_rng(4).random(SIZE)  # a difficulty in floats
BUCKETS = [(64, 32), (32, 64), (16, 128), (8, 256), (4, 512), (1, 2000)]
FEW_BUCKETS = [(16, 100), (4, 400), (2, 900)]  # some samples are longer


def case(name: str) -> Callable[[Case], Case]:
    def add(function: Case) -> Case:
        assert name not in CASES
        CASES[name] = function
        return function

    return add


def add_all(prefix: str, options: dict[str, Any], function: Callable[[str, Any], Any]) -> None:
    """A case for each of the options."""
    for name, values in options.items():
        case(f"{prefix}: {name}")(lambda package, values=values: function(package, values))


def shapes(buckets: Any) -> Any:
    return [list(map(int, bucket)) for bucket in buckets.shapes]


def described(plan: Any) -> dict[str, Any]:
    """All that decides the batches of a plan, and its totals."""
    some = sorted({0, plan.num_steps // 2, plan.num_steps - 1})
    values = {
        "digest": plan.digest,
        "buckets": shapes(plan.buckets),
        "steps": plan.num_steps,
        "step_bucket": exact(plan.step_bucket),
        "step_offsets": exact(plan.step_offsets),
        "sample_ids": exact(plan.sample_ids),
        "num_tokens": exact(plan.num_tokens),
        "num_sequences": exact(plan.num_sequences),
        "rows": {str(step): exact(plan.rows(step)) for step in some},
        "padding": float(plan.padding).hex(),
        "dropped, truncated": [plan.num_dropped, plan.num_truncated],
    }
    if plan.row_offsets is not None:
        values |= {"num_rows": plan.num_rows, "row_offsets": exact(plan.row_offsets)}
    if plan.chunk_starts is not None:
        values |= {"piece_starts": exact(plan.chunk_starts), "pieces": exact(plan.chunks(0))}
    return values


def planned(package: str, options: dict[str, Any]) -> dict[str, Any]:
    buckets = options.pop("buckets", BUCKETS)
    return described(calls.make_plan(package, LENGTHS, buckets, **{"num_microbatches": M} | options))


ORDER_OPTIONS: dict[str, dict[str, Any]] = {order: {"order": order} for order in ORDERS} | {
    "subset": {"order": SUBSET},
    "difficulty": {"difficulty": EASE},
    "difficulty in floats, descending": {"order": "length_descending", "difficulty": SCORES},
    "difficulty is the length": {"difficulty": LENGTHS},
    "blocks of a sorted order": {"order": "length", "block_size": 64},
    "blocks of a shuffle": {"order": "shuffle", "block_size": 64},
    "blocks of a subset": {"order": SUBSET, "block_size": 50},
    "seed and epoch": {"order": "shuffle", "seed": 2**40 + 7, "epoch": 3},
    "another epoch": {"order": "shuffle", "epoch": 1},
    "shuffle_steps": {"order": "length", "shuffle_steps": True, "seed": 5},
    "shuffle and shuffle_steps": {"order": "shuffle", "shuffle_steps": True, "seed": 5, "epoch": 2},
    "longest_first": {"order": "dataset", "longest_first": True},
    "longest_first, by length": {"order": "length", "longest_first": True},
    "onset_spacing": {"order": "shuffle", "new_shape_every": 4},
    "onset_spacing, longest_first, shuffle_steps": {"new_shape_every": 3, "longest_first": True, "shuffle_steps": True},
    "one microbatch": {"order": "shuffle", "num_microbatches": 1},
    "many microbatches": {"order": "dataset", "num_microbatches": 12},
}
add_all("plan in order", ORDER_OPTIONS, lambda package, options: planned(package, dict(options)))
add_all(
    "overlong samples",
    {
        f"{overlong}, {order}": {"overlong": overlong, "order": order}
        for overlong, order in itertools.product(("drop", "truncate"), ("length", "shuffle", "dataset"))
    },
    lambda package, options: planned(package, {"buckets": FEW_BUCKETS} | options),
)


add_all(
    "windows of overlong samples",
    {
        f"{overlong}, {name}": {"overlong": overlong, "seed": 7, "epoch": 2} | options
        for overlong in ("truncate_start", "truncate_random")
        for name, options in (("padded", {}), ("packed", {"packing": "best_fit"}))
    },
    lambda package, options: planned(package, {"buckets": FEW_BUCKETS} | options),
)


PACINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {"initial": 0.05}),
    "competence": ("competence", {"initial": 0.01}),
}


def paced(package: str, pacing: Any, **options: Any) -> dict[str, Any]:
    return planned(package, {"pacing": pacing, "num_microbatches": 2} | options)


for epoch in (0, 1):
    add_all(
        f"pacing in epoch {epoch}",
        PACINGS,
        lambda package, of, epoch=epoch: paced(
            package, calls.pacing(package, of[0], 300, **of[1]), seed=5, epoch=epoch, longest_first=bool(epoch)
        ),
    )


@case("pacing: longest first")
def _(package: str) -> Any:
    return paced(package, calls.pacing(package, "linear", 40), order="length_descending")


@case("pacing: by difficulty")
def _(package: str) -> Any:
    return paced(package, calls.pacing(package, "linear", 40), difficulty=EASE, epoch=1)


SAMPLE_OPTIONS = ("order", "difficulty", "block_size", "seed", "epoch")
add_all(
    "order of samples",
    {name: options for name, options in ORDER_OPTIONS.items() if options.keys() <= set(SAMPLE_OPTIONS)},
    lambda package, options: exact(
        calls.sample_order(
            package,
            LENGTHS,
            options.get("order", "length"),
            **{name: value for name, value in options.items() if name != "order"},
        )
    ),
)


def seconds(rows: Any, length: Any) -> Any:
    """The seconds of a microbatch, without rounding."""
    return (3 * rows * length + 7 * length + 500) / 2**20


def num_bytes(rows: Any, length: Any) -> Any:
    return 2.0**20 + rows * length * (4096.0 + 8.0 * length)


STRATEGY_OPTIONS: dict[str, dict[str, Any]] = {strategy: {"strategy": strategy} for strategy in STRATEGIES} | {
    "lengths as given": {"strategy": (16, 60, 250, 1000, 2000)},
    "few shapes": {"max_shapes": 3},
    "one shape": {"max_shapes": 1},
    "row_multiple": {"row_multiple": 8},
    "length_multiple": {"length_multiple": 16},
    "both multiples": {"row_multiple": 4, "length_multiple": 64},
    "max_sequences": {"max_sequences": 24},
    "cost": {"cost": seconds},
    "cost and compile_seconds": {"cost": seconds, "compile_seconds": 0.5},
    "max_cost": {"cost": seconds, "max_cost": 0.02},
    "memory": {"memory": num_bytes, "max_bytes": 5e7},
    "all limits": {
        "cost": seconds,
        "compile_seconds": 0.01,
        "max_cost": 0.02,
        "memory": num_bytes,
        "max_bytes": 6e7,
        "max_sequences": 50,
        "row_multiple": 2,
        "length_multiple": 8,
    },
    "longest is dropped": {"max_length": 500, "overlong": "drop"},
    "longest is cut": {"max_length": 500, "overlong": "truncate"},
    "longest is cut, by quantiles": {"strategy": "quantile", "max_length": 512, "overlong": "truncate"},
}


def of_buckets(package: str, options: dict[str, Any]) -> Any:
    buckets = calls.make_buckets(package, LENGTHS, 8192, **{"max_shapes": 6, "num_microbatches": M} | options)
    overlong = options.get("overlong", "error")
    return described(calls.make_plan(package, LENGTHS, buckets, num_microbatches=M, order="shuffle", overlong=overlong))


add_all("buckets", STRATEGY_OPTIONS, of_buckets)


@case("buckets: by a fitted model of costs")
def _(package: str) -> Any:
    cost = calls.cost_model(package, 2.0**-10, 2.0**-20, 2.0**-32)
    return shapes(calls.make_buckets(package, LENGTHS, 8192, cost=cost, compile_seconds=0.03, max_cost=2.0**-6))


def of_rows(package: str, options: dict[str, Any]) -> Any:
    """Packs, then plans."""
    options = dict(options)
    plan_options = options.pop("plan", {})
    row_lengths = options.pop("row_lengths")
    lengths = options.pop("lengths", LENGTHS)
    packing = calls.pack_samples(package, lengths, row_lengths, **options)
    buckets = plan_options.pop("buckets", [(8192 // length, length) for length in np.atleast_1d(row_lengths).tolist()])
    plan = calls.plan_rows(package, packing, buckets, **{"num_microbatches": 2} | plan_options)
    return {
        "rows of the packing": packing.num_rows,
        "fill": float(packing.fill).hex(),
        "sample_lengths": exact(packing.sample_lengths),
        "starts": exact(packing.starts),
        "tokens of rows": exact(packing.num_tokens),
        "capacity": exact(packing.capacity),
        **described(plan),
    }


SHORT = lengths_of(5, 1000, 700)
PACKED_OPTIONS: dict[str, dict[str, Any]] = {
    "one row length": {"row_lengths": 2048},
    "several row lengths": {"row_lengths": (512, 1024, 2048)},
    "shuffled": {"row_lengths": 2048, "order": "shuffle", "seed": 3, "epoch": 1, "plan": {"order": "shuffle"}},
    "subset": {"row_lengths": (1024, 2048), "order": SUBSET, "plan": {"order": "dataset"}},
    "drop": {"row_lengths": 512, "overlong": "drop"},
    "truncate": {"row_lengths": (256, 512), "overlong": "truncate", "plan": {"order": "length_descending"}},
    "split": {"row_lengths": 512, "overlong": "split", "plan": {"order": "shuffle", "seed": 1}},
    "split, several row lengths": {"row_lengths": (128, 512), "overlong": "split"},
    "wrapped": {"row_lengths": 512, "method": "wrapped", "order": "shuffle", "seed": 3, "plan": {"order": "shuffle"}},
    "wrapped, subset": {"row_lengths": 300, "method": "wrapped", "order": SUBSET, "plan": {"order": "dataset"}},
    "blocks, shuffle_steps": {
        "row_lengths": 2048,
        "plan": {"order": "shuffle", "block_size": 8, "shuffle_steps": True, "new_shape_every": 2},
    },
}
add_all(
    "packed",
    PACKED_OPTIONS,
    lambda package, options: of_rows(package, {**options, "plan": {**options.get("plan", {})}}),
)
add_all(
    "row lengths",
    {
        "one": {"max_shapes": 1, "max_length": 2000},
        "several": {"max_shapes": 3, "max_length": 1024, "overlong": "truncate"},
        "in seconds": {"max_shapes": 3, "cost": seconds, "compile_seconds": 0.05, "max_cost": 0.1},
        "multiples": {"max_shapes": 2, "length_multiple": 32, "row_multiple": 2, "num_microbatches": 2},
    },
    lambda package, options: list(calls.choose_row_lengths(package, LENGTHS[::6], 4096, **options)),
)


@case("packed: pairs")
def _(package: str) -> Any:
    return of_rows(
        package, {"lengths": PAIRS, "row_lengths": (256, 256), "plan": {"buckets": [(8, 256, 256)], "order": "shuffle"}}
    )


@case("packed: pairs, truncated")
def _(package: str) -> Any:
    options = {"overlong": "truncate", "plan": {"buckets": [(8, 100, 80)]}}
    return of_rows(package, {"lengths": PAIRS, "row_lengths": (100, 80)} | options)


def of_pairs(package: str, options: dict[str, Any]) -> Any:
    plan_options = options.get("plan", {})
    options = {name: value for name, value in options.items() if name != "plan"}
    buckets = calls.make_buckets(package, PAIRS, 4096, **{"max_candidates": 24, "num_microbatches": 2} | options)
    return described(calls.make_plan(package, PAIRS, buckets, num_microbatches=2, **plan_options))


add_all(
    "pairs",
    {
        "sum": {"max_shapes": 5},
        "larger": {"max_shapes": 5, "size": "larger", "plan": {"order": "shuffle", "seed": 4}},
        "multiples": {"max_shapes": 8, "row_multiple": 8, "length_multiple": 4, "plan": {"order": "dataset"}},
        "max_sequences": {"max_shapes": 4, "max_sequences": 20, "plan": {"longest_first": True, "shuffle_steps": True}},
    },
    of_pairs,
)


@case("pairs: dropped")
def _(package: str) -> Any:
    return described(calls.make_plan(package, PAIRS, [(64, 20, 30), (32, 60, 50)], overlong="drop"))


def of_stream(package: str, options: dict[str, Any]) -> Any:
    options = {"buckets": None, "num_microbatches": 2} | options
    stream = calls.stream_batches(package, iter(LENGTHS.tolist()), options.pop("buckets"), **options)
    steps = list(stream)
    return {
        "buckets": shapes(stream.buckets),
        "step_bucket": exact([step.bucket_index for step in steps]),
        "ids": exact(np.concatenate([step.ids.ravel() for step in steps])),
        "lengths": exact(np.concatenate([step.lengths.ravel() for step in steps])),
        "first": exact(steps[0].ids),
        "last": exact(steps[-1].ids),
        "read, dropped, truncated": [stream.num_read, stream.num_dropped, stream.num_truncated],
    }


add_all(
    "stream",
    {
        "buckets as given": {"buckets": BUCKETS},
        "estimated": {"max_tokens": 4096, "num_estimate": 1000, "max_length": 2000, "max_shapes": 6},
        "multiples": {
            "max_tokens": 8192,
            "max_length": 1024,
            "row_multiple": 4,
            "length_multiple": 32,
            "overlong": "truncate",
        },
        "max_waiting": {"buckets": BUCKETS, "max_waiting": 100},
        "shuffled": {"buckets": BUCKETS, "shuffle_buffer": 256, "seed": 9, "epoch": 2},
        "dropped": {"buckets": FEW_BUCKETS, "overlong": "drop", "max_waiting": 50, "num_microbatches": 1},
        "max_sequences": {"max_tokens": 4096, "max_length": 2000, "max_sequences": 16, "max_shapes": 4},
    },
    of_stream,
)


@case("stream: goes on from a state")
def _(package: str) -> Any:
    options: dict[str, Any] = {"shuffle_buffer": 100, "seed": 1, "num_microbatches": 2}
    stream = calls.stream_batches(package, iter(LENGTHS.tolist()), BUCKETS, **options)
    first = [next(stream) for _ in range(5)]
    rest = list(calls.stream_batches(package, iter(LENGTHS.tolist()), state=as_json(stream.state())))
    return {"steps": [len(first), len(rest)], "ids": exact(np.concatenate([step.ids.ravel() for step in first + rest]))}


def of_batches(package: str, options: dict[str, Any]) -> Any:
    options = dict(options)
    batches = calls.batch_by_tokens(package, LENGTHS, options.pop("max_tokens", 5000), **options)
    return {
        "batches": batches.num_batches,
        "sample_ids": exact(batches.sample_ids),
        "offsets": exact(batches.offsets),
        "shape_index": None if batches.shape_index is None else exact(batches.shape_index),
    }


add_all(
    "batches by tokens",
    {
        **{f"padded, {order}": {"order": order} for order in ORDERS},
        "padded, subset": {"order": SUBSET},
        "sum": {"budget": "sum", "order": "shuffle", "seed": 2**40 + 7, "epoch": 3},
        "sum, by length": {"budget": "sum", "order": "length"},
        "max_sequences": {"max_sequences": 37, "order": "length"},
        "sequence_multiple": {"sequence_multiple": 8, "order": "shuffle", "max_tokens": 16_384},
        "sum, sequence_multiple": {"budget": "sum", "sequence_multiple": 8, "order": "length", "max_sequences": 100},
        "shapes": {"max_tokens": 1, "shapes": BUCKETS, "order": "shuffle"},
        "shapes in no order": {"max_tokens": 1, "shapes": [(3, 300), (9, 90), (1, 2000), (20, 40), (2, 2000)]},
    },
    of_batches,
)


def balanced(package: str, options: dict[str, Any]) -> Any:
    options = dict(options)
    if options.pop("packed", False):
        packing = calls.pack_samples(package, LENGTHS, 2048, order="shuffle", seed=3)
        plan = calls.plan_rows(package, packing, [(4, 2048)], num_microbatches=M, order="shuffle")
        cost = calls.packed_row_costs(package, plan, LENGTHS, 1024.0)
    else:
        plan = calls.make_plan(package, LENGTHS, BUCKETS, num_microbatches=M, order="shuffle")
        cost = LENGTHS * (LENGTHS + 512.0)
    return {"cost": exact(cost), **described(calls.balance_plan(package, plan, cost, options["ranks"]))}


add_all(
    "balanced",
    {
        "within steps": {"ranks": 4},
        "within steps, two ranks": {"ranks": 2},
        "packed rows": {"ranks": 4, "packed": True},
    },
    balanced,
)


@case("mixtures: counts")
def _(package: str) -> Any:
    sizes, weights = [100, 2000, 35], [0.5, 0.3, 0.2]
    return [exact(calls.mixture_counts(package, sizes, weights, **options)) for options in ({}, {"total": 777})]


def rates(package: str, options: dict[str, Any]) -> Any:
    """The rates of every step; the base rate is a number, one a step, or a function of the step."""
    options = dict(options)
    plan = calls.make_plan(package, LENGTHS, BUCKETS, num_microbatches=M, order="shuffle")
    plans: Any = plan
    if options.pop("of", "plan") == "epochs":
        plans = [calls.make_plan(package, LENGTHS, BUCKETS, order="shuffle", epoch=epoch) for epoch in range(2)]
    base = {
        "number": 3e-4,
        "array": np.arange(plan.num_steps, 0, -1) / 2**12,
        "function": lambda step: 2.0**-10 / (1 + step),
    }[options.pop("base", "number")]
    values = calls.lr_sequence(package, plans, base, 256, **options)
    return {"rates": exact(values), "first": exact(values[:5]), "last": exact(values[-2:])}


RATE_OPTIONS: dict[str, dict[str, Any]] = {
    f"{rule}, {unit}": {"rule": rule, "unit": unit}
    for rule, unit in itertools.product(("linear", "sqrt", None), ("sequences", "tokens"))
}
RATE_OPTIONS |= {
    "one base rate a step": {"base": "array"},
    "function": {"base": "function", "rule": "sqrt"},
    "counted in tokens": {"base": "function", "counted_in": "tokens"},
    "counted in sequences": {"base": "function", "counted_in": "sequences", "unit": "tokens"},
    "two epochs": {"of": "epochs", "base": "function"},
}
add_all("rates", RATE_OPTIONS, rates)


def betas(package: str, options: dict[str, Any]) -> Any:
    """What is left of a moment after every step, to 12 digits: powers are not the same to the bit everywhere."""
    plan = calls.make_plan(package, LENGTHS, BUCKETS, num_microbatches=M, order="shuffle")
    values = calls.beta_sequence(package, plan, 0.95, **options)
    return [f"{value:.11e}" for value in (*values[:5], *values[-2:], values.sum())]


BETA_OPTIONS: dict[str, dict[str, Any]] = {
    "sequences": {"base_batch_size": 256},
    "tokens": {"base_batch_size": 2**15, "unit": "tokens"},
}
add_all("betas", BETA_OPTIONS, betas)
