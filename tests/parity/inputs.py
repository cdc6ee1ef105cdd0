"""Hypothesis strategies for the arguments of the contract's functions, and helpers to check results."""

import re
from dataclasses import dataclass

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from . import slow

moderate = settings(deadline=None, max_examples=25)
few = settings(deadline=None, max_examples=15)
many = settings(deadline=None, max_examples=60)

ORDERS = ("dataset", "length", "length_descending", "shuffle")
CLOSED_FORMS = ("pad_to_max", "powers_of_two", "geometric", "quantile", "equal_tokens")


def text_of(value):
    """The text of a parameter without the addresses of functions in it, the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


seeds = st.one_of(st.integers(0, 3), st.integers(0, 2**63 - 1))
lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)


@st.composite
def difficulties(draw, given_lengths):
    """Draw None, the lengths themselves, or numbers of one kind with many ties."""
    size = len(given_lengths)
    kinds = [
        st.integers(-2, 2),
        st.integers(2**53 - 1, 2**53 + 3),
        st.integers(-(2**63), 2**63 - 1),
        st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 0.25, 1e300, np.inf]).map(float),
    ]
    kind = draw(st.sampled_from(kinds))
    one = st.lists(kind, min_size=size, max_size=size)
    return draw(st.one_of(st.none(), st.just(given_lengths), one))


@st.composite
def bucket_arguments(draw, *, strategy, min_samples=1, max_samples=40, longest=40):
    """Draw valid arguments of `make_buckets` without a cost."""
    given_lengths = draw(st.lists(st.integers(1, longest), min_size=min_samples, max_size=max_samples))
    multiple = draw(st.sampled_from([1, 1, 2, 3, 8]))
    max_length = draw(st.one_of(st.none(), st.integers(1, longest).map(lambda n: slow.round_up(n, multiple))))
    top = slow.round_up(max(given_lengths) if max_length is None else min(max(given_lengths), max_length), multiple)
    return {
        "lengths": given_lengths,
        "max_tokens": draw(st.integers(top, 4 * top + 20)),
        "strategy": strategy,
        "max_shapes": draw(st.integers(1, 6)),
        "max_length": max_length,
        # Dropping leaves at least one sample.
        "overlong": draw(st.sampled_from(["truncate", "drop"]))
        if max_length is not None and max_length >= min(given_lengths)
        else "truncate",
        "num_microbatches": draw(st.integers(1, 4)),
        "row_multiple": draw(st.sampled_from([1, 1, 2, 3])),
        "length_multiple": multiple,
    }


def dyadic_cost(rows, length):
    """Cost a microbatch so that every float sum is exact."""
    return (3 * rows * length + 7 * length + 5) / 64


def stepped_cost(rows, length):
    """Cost a microbatch in plateaus of rows, and neither rising nor falling with the length."""
    return ((rows + 3) // 4 * 4) * (length * 5 % 13 + length + 2) / 32


def tile_bytes(rows, length):
    """Return whole bytes, as a device hands them out: in tiles of eight rows."""
    return 64 + (rows + 7) // 8 * 8 * length * length


@st.composite
def limits(draw, longest):
    """Draw a cost and limits of cost, bytes and rows that leave at least one row of any length up to the longest."""
    cost = draw(st.sampled_from([dyadic_cost, stepped_cost]))
    drawn = {"cost": cost}
    spare = st.sampled_from([1.0, 1.0, 1.5, 4.0, 16.0])
    if draw(st.booleans()):
        drawn["max_cost"] = draw(spare) * max(cost(1, length) for length in range(1, longest + 1))
    if draw(st.booleans()):
        drawn |= {"memory": tile_bytes, "max_bytes": draw(spare) * tile_bytes(1, longest)}
    if draw(st.booleans()):
        drawn["max_sequences"] = draw(st.integers(1, 6))
    return drawn


@dataclass(frozen=True)
class Table:
    """A pacing that repeats a list of shares, of steps or arrays of them."""

    shares: tuple[float, ...]

    def __call__(self, step):
        """Return the share at a step."""
        return np.array(self.shares)[step % len(self.shares)]


pacings = st.lists(st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 0.9, 1.0]), min_size=1, max_size=6).map(tuple).map(Table)


@st.composite
def arrangements(draw, order):
    """Draw the options of `make_plan` that decide when samples and steps come, for an order."""
    if order in ("length", "length_descending") and draw(st.booleans()):
        return {"pacing": draw(pacings), "epoch": draw(st.integers(0, 4)), "longest_first": draw(st.booleans())}
    return {
        "block_size": draw(st.one_of(st.none(), st.integers(1, 12))),
        "epoch": draw(seeds),
        "shuffle_steps": draw(st.booleans()),
        "longest_first": draw(st.booleans()),
        "new_shape_every": draw(st.sampled_from([0, 0, 1, 2, 3, 8, 2**63 - 1])),
    }


@st.composite
def plan_arguments(draw):
    """Draw valid arguments of `make_plan`, for which at least one sample remains."""
    given_lengths = draw(lengths)
    overlong = draw(st.sampled_from(["error", "drop", "truncate"]))
    edges = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4, unique=True).map(sorted))
    if overlong == "error" and edges[-1] < max(given_lengths):
        edges.append(max(given_lengths))
    edges[-1] = max(edges[-1], min(given_lengths))
    edges = sorted(set(edges))
    order = draw(st.sampled_from(ORDERS))
    if draw(st.integers(0, 4)) == 0:
        permuted = draw(st.permutations(range(len(given_lengths))))
        order = permuted[: draw(st.integers(1, len(permuted)))]
        if overlong == "drop" and all(given_lengths[i] > edges[-1] for i in order):
            order = permuted
    return {
        "lengths": given_lengths,
        "buckets": [(draw(st.integers(1, 4)), edge) for edge in edges],
        "num_microbatches": draw(st.integers(1, 4)),
        "order": order,
        "difficulty": draw(difficulties(given_lengths)),
        "seed": draw(seeds),
        "overlong": overlong,
    } | draw(arrangements(order))


@st.composite
def batching_arguments(draw, *, shaped):
    """Draw valid arguments of `batch_by_tokens`; samples that an order array leaves out may be above all limits."""
    longest = draw(st.sampled_from([3, 12, 40]))  # small lengths make large batches
    given_lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=40))
    order = draw(st.sampled_from(ORDERS))
    used = given_lengths
    if draw(st.integers(0, 3)) == 0:
        permuted = draw(st.permutations(range(len(given_lengths))))
        order = permuted[: draw(st.integers(1, len(permuted)))]
        used = [given_lengths[i] for i in order]
    top = max(used)
    arguments = {"lengths": given_lengths, "order": order, "seed": draw(seeds), "epoch": draw(seeds)}
    if shaped:
        shapes = draw(st.lists(st.tuples(st.integers(1, 8), st.integers(1, longest)), max_size=5))
        shapes.insert(draw(st.integers(0, len(shapes))), (draw(st.integers(1, 8)), draw(st.integers(top, longest))))
        return arguments | {"max_tokens": 1, "shapes": shapes}
    return arguments | {
        "max_tokens": draw(st.integers(top, 12 * top + 20)),
        "budget": draw(st.sampled_from(["padded", "sum"])),
        "max_sequences": draw(st.one_of(st.none(), st.integers(1, 12))),
        "sequence_multiple": draw(st.sampled_from([1, 1, 2, 3, 4, 8])),
    }


def as_arrays(arguments):
    """Return the arguments with number lists as NumPy arrays, as callers pass them."""
    names = ("lengths", "order", "difficulty")

    def as_array(value):
        return [np.array(part) for part in value] if value and isinstance(value[0], list) else np.array(value)

    return {k: as_array(v) if k in names and isinstance(v, list) else v for k, v in arguments.items()}


def for_plan(package, arguments):
    """Return drawn arguments as `make_plan` takes them: what decides when samples and steps come is an `Order`."""
    names = ("block_size", "shuffle_steps", "longest_first", "new_shape_every")
    options = {name: arguments[name] for name in names if name in arguments}
    others = {name: value for name, value in as_arrays(arguments).items() if name not in names}
    return others | {"order": package.Order(others.get("order", "length"), **options)}


def make_plan(package, arguments):
    """Make the package's plan from drawn arguments."""
    return package.make_plan(**for_plan(package, arguments))


def steps_of(plan):
    """Return a plan's steps as (bucket, sample ids)."""
    bounds = plan.step_offsets.tolist()
    ids = plan.sample_ids.tolist()
    return [(int(k), ids[bounds[s] : bounds[s + 1]]) for s, k in enumerate(plan.step_bucket)]


def batches_of(batches):
    """Return batches as (sample ids, index of the shape)."""
    bounds = batches.offsets.tolist()
    ids = batches.sample_ids.tolist()
    shapes = [None] * batches.num_batches if batches.shape_index is None else batches.shape_index.tolist()
    return [(ids[bounds[b] : bounds[b + 1]], shape) for b, shape in enumerate(shapes)]


def offenders(*pairs, limit):
    """Return the pattern of a message that lists (id, value) pairs in this order, and anywhere the limit."""
    listed = r".*".join(rf"\b{number}\D+?{value}\b" for number, value in pairs)
    return rf"(?s)(?=.*(?<!-)\b{limit}\b).*{listed}"
