"""Packed rows in steps of a given number of samples or tokens, and rows of a given number of samples."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import assert_same_packing, assert_same_plan, in_both, slow_steps
from .inputs import ORDERS, moderate, seeds
from .test_step_groups import Ramp, size_of

MANY = 2**62


@st.composite
def rows_and_limits(draw, longest):
    """Draw lengths of rows, and the most samples of each, which never descend."""
    lengths = sorted({draw(st.integers(longest, 2 * longest)), *draw(st.lists(st.integers(1, longest), max_size=2))})
    most = draw(st.one_of(st.none(), st.lists(st.integers(1, 4), min_size=len(lengths), max_size=len(lengths))))
    return lengths, None if most is None else sorted(most)


def chunks_of_rows(packing):
    """The chunks of each row: (id, first token, tokens)."""
    starts = np.zeros(len(packing.sample_ids), int) if packing.chunk_starts is None else packing.chunk_starts
    chunks = list(zip(packing.sample_ids.tolist(), starts.tolist(), packing.sample_lengths.tolist(), strict=True))
    return [chunks[i:j] for i, j in itertools.pairwise(packing.row_offsets.tolist())]


@moderate
@given(data=st.data(), lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40))
def test_a_row_that_holds_its_most_samples_is_full(package, data, lengths):
    """Best fit and wrapped, as laid one by one; by an integer, or one for each length of rows."""
    row_lengths, most = data.draw(rows_and_limits(12))
    packing = package.pack_samples(lengths, row_lengths, samples_per_row=most)
    expected = slow_steps.pack_best_fit(lengths, row_lengths, most or [MANY] * len(row_lengths))
    assert [[i for i, *_ in row] for row in chunks_of_rows(packing)] == expected
    most = data.draw(st.integers(1, 4))
    packing = package.pack_samples(lengths, row_lengths[0], samples_per_row=most, method="wrapped")
    [expected] = slow_steps.wrap(lengths, row_lengths[0], most, lambda step, seen: sum(lengths))
    assert chunks_of_rows(packing) == expected


@moderate
@given(pairs=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=20), most=st.integers(1, 4))
def test_a_row_of_pairs_that_holds_its_most_is_full(package, pairs, most):
    packing = package.pack_samples(pairs, (20, 15), samples_per_row=most, order=np.arange(len(pairs)))
    found = [packing.sample_ids[i:j].tolist() for i, j in itertools.pairwise(packing.row_offsets)]
    assert found == slow_steps.pack_pairs(pairs, (20, 15), most)


@st.composite
def plan_arguments(draw, *, is_wrapped=False):
    """Draw arguments of `make_plan` for packed samples of at most 12 tokens, and of steps of some size."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=40))
    row_lengths, most = draw(rows_and_limits(12))
    is_split = not is_wrapped and draw(st.booleans())
    if is_split:
        row_lengths, most = [n for n in row_lengths if n < 12] or [11], None
    if is_wrapped:
        row_lengths, most = row_lengths[-1:], draw(st.one_of(st.none(), st.integers(1, 4)))
    by_tokens = is_wrapped or is_split or draw(st.booleans())
    number = st.integers(12, 90) if by_tokens else st.integers(1, 12)
    size = st.one_of(number, st.lists(number, min_size=80, max_size=80), st.builds(Ramp, number, st.integers(0, 2)))
    rows = [sorted(draw(st.sets(st.integers(1, 4), min_size=1, max_size=2))) for _ in row_lengths]
    buckets = [(each, length) for length, numbers in zip(row_lengths, rows, strict=True) for each in numbers]
    if isinstance(most, list):
        most = [limit for limit, numbers in zip(most, rows, strict=True) for _ in numbers]
    return {
        "lengths": lengths,
        "buckets": buckets,
        "packing": "wrapped" if is_wrapped else "best_fit",
        "num_microbatches": draw(st.integers(1, 3)),
        "order": draw(st.sampled_from(ORDERS)),
        "seed": draw(seeds),
        "overlong": "split" if is_split else "error",
        "samples_per_row": most,
        "tokens_per_step" if by_tokens else "sequences_per_step": draw(size),
    }


def packed_groups_of(plan):
    """The groups of every step: (bucket, rows of chunks), chunks as (id, first token)."""
    starts = np.zeros(plan.num_samples, int) if plan.chunk_starts is None else plan.chunk_starts
    chunks = list(zip(plan.sample_ids.tolist(), starts.tolist(), strict=True))
    rows = [chunks[i:j] for i, j in itertools.pairwise(plan.row_offsets.tolist())]
    first = np.searchsorted(plan.row_offsets, plan.group_offsets).tolist()
    groups = [(int(bucket), rows[first[g] : first[g + 1]]) for g, bucket in enumerate(plan.group_bucket)]
    return [[groups[g] for g in plan.groups(step)] for step in range(plan.num_steps)]


def grouped(rows_of_steps, arguments):
    """The groups of steps of rows of chunks (id, first token, tokens)."""
    planned = []
    for rows in rows_of_steps:
        tokens = [sum(n for *_, n in row) for row in rows]
        groups = slow_steps.group_step(
            [(n,) for n in tokens], tokens, arguments["buckets"], arguments["num_microbatches"]
        )
        planned.append([(bucket, [[(i, start) for i, start, _ in rows[r]] for r in of]) for bucket, of in groups])
    return planned


@moderate
@given(arguments=plan_arguments())
def test_samples_are_cut_into_steps_and_then_packed(package, arguments):
    """Samples, or the chunks of split ones, step by step, each packed by itself; rows are then grouped as samples."""
    plan = package.make_plan(**arguments)
    lengths, name = arguments["lengths"], "tokens_per_step" if "tokens_per_step" in arguments else "sequences_per_step"
    row_lengths = sorted({length for _, length in arguments["buckets"]})
    most = arguments["samples_per_row"] or [MANY] * len(arguments["buckets"])
    most = {length: limit for (_, length), limit in zip(arguments["buckets"], most, strict=True)}
    order = package.sample_order(lengths, arguments["order"], seed=arguments["seed"]).tolist()
    chunks = [
        (i, start, min(lengths[i] - start, row_lengths[-1]))
        for i in order
        for start in range(0, lengths[i], row_lengths[-1])
    ]
    tokens = [n for *_, n in chunks]
    counted = tokens if name == "tokens_per_step" else [1] * len(chunks)
    rows_of_steps = []
    for places in slow_steps.cut_steps(counted, size_of(arguments[name]), tokens):
        rows = slow_steps.pack_best_fit([tokens[p] for p in places], row_lengths, [most[n] for n in row_lengths])
        rows_of_steps.append([[chunks[places[p]] for p in row] for row in rows])
    assert packed_groups_of(plan) == grouped(rows_of_steps, arguments)
    if arguments["samples_per_row"] is not None:
        limits = zip(arguments["samples_per_row"], arguments["buckets"], strict=True)
        assert plan.samples_per_row == tuple(min(limit, length) for limit, (_, length) in limits)


@moderate
@given(arguments=plan_arguments(is_wrapped=True))
def test_steps_of_wrapped_rows_have_exactly_their_tokens(package, arguments):
    """The end of a step cuts a sample as the end of a row does."""
    plan = package.make_plan(**arguments)
    lengths = arguments["lengths"]
    order = package.sample_order(lengths, arguments["order"], seed=arguments["seed"]).tolist()
    most = arguments["samples_per_row"] or MANY
    size = size_of(arguments["tokens_per_step"])
    steps = slow_steps.wrap([lengths[i] for i in order], arguments["buckets"][0][1], most, size)
    steps = [[[(order[p], start, n) for p, start, n in row] for row in rows] for rows in steps]
    assert packed_groups_of(plan) == grouped(steps, arguments)
    assert plan.num_tokens.tolist() == [sum(n for row in rows for *_, n in row) for rows in steps]


@st.composite
def arranged_arguments(draw):
    """Draw arguments that decide which samples come and when, as well."""
    is_wrapped = draw(st.booleans())
    arguments = draw(plan_arguments(is_wrapped=is_wrapped))
    order = {"shuffle_steps": draw(st.booleans()), "longest_first": draw(st.booleans())}
    if draw(st.integers(0, 3)) == 0:
        permuted = draw(st.permutations(range(len(arguments["lengths"]))))
        arguments["order"] = permuted[: draw(st.integers(1, len(permuted)))]
    if not is_wrapped and arguments["overlong"] == "error" and draw(st.booleans()):
        arguments["overlong"] = draw(st.sampled_from(["drop", "truncate"]))
        arguments["lengths"] = [25, *arguments["lengths"][1:], 25]
        if len(arguments["lengths"]) < 3 or not isinstance(arguments["order"], str):
            arguments["overlong"] = "truncate"
    return arguments | {"epoch": draw(st.integers(0, 3))}, order


@moderate
@given(drawn=arranged_arguments())
def test_both_pack_steps_alike(drawn, tmp_path_factory):
    """Integer for integer, digests included; a file of one loads in the other."""
    arguments, order = drawn

    def make(package):
        return package.make_plan(**arguments | {"order": package.Order(arguments["order"], **order)})

    plans = in_both(make)
    assert_same_plan(*plans)
    path = tmp_path_factory.mktemp("plans") / "plan.npz"
    for plan in plans:
        plan.save(path)
        for loaded in in_both(lambda package: package.Plan.load(path)):
            assert_same_plan(loaded, plan)


@moderate
@given(
    seed=seeds,
    epoch=st.integers(0, 2),
    block_size=st.one_of(st.just("auto"), st.none(), st.integers(1, 300)),
    most=st.integers(1, 9),
    sides=st.sampled_from([1, 2]),
)
def test_both_pack_blocks_of_rows_with_a_most_alike(seed, epoch, block_size, most, sides):
    rng = np.random.default_rng(seed % 1000)
    lengths = rng.integers(1, 30, (300, 2) if sides == 2 else 900)
    row_lengths = [64, 70] if sides == 2 else [40, 64]

    def pack(package):
        order = package.Order(block_size=block_size)
        return package.pack_samples(lengths, row_lengths, order=order, seed=seed, epoch=epoch, samples_per_row=most)

    assert_same_packing(*in_both(pack))


@pytest.mark.parametrize(
    "options",
    [
        {"packing": "best_fit", "row_lengths": [32, 64], "samples_per_row": [2, 4]},
        {"packing": "best_fit", "samples_per_row": 3},
        {"packing": "wrapped", "samples_per_row": 3},
        {"packing": "auto", "samples_per_row": 3},
    ],
    ids=str,
)
def test_both_choose_shapes_of_rows_with_a_most_alike(options):
    lengths = np.random.default_rng(0).integers(1, 30, 400)
    plans = in_both(lambda package: package.make_plan(lengths, max_tokens=128, num_microbatches=2, **options))
    assert_same_plan(*plans)


def test_packed_and_padded_steps_have_the_same_samples(package):
    lengths = np.random.default_rng(0).integers(1, 30, 100)
    packed = package.make_plan(lengths, [(1, 30)], packing="best_fit", sequences_per_step=16, seed=2)
    padded = package.make_plan(lengths, [(1, 30)], sequences_per_step=16, seed=2)
    for step in range(7):
        of_step = [set(p.sample_ids[slice(*p.step_offsets[step : step + 2])].tolist()) for p in (packed, padded)]
        assert of_step[0] == of_step[1]


def test_pairs_are_packed_step_by_step(package):
    rng = np.random.default_rng(0)
    pairs = rng.integers(1, 9, (40, 2))
    plan = package.make_plan(
        pairs, [(1, 20, 15), (2, 20, 15)], packing="best_fit", order="dataset", sequences_per_step=8
    )
    for step, groups in enumerate(packed_groups_of(plan)):
        of_step = [tuple(pair) for pair in pairs[8 * step : 8 * step + 8].tolist()]
        rows = slow_steps.pack_pairs(of_step, (20, 15), MANY)
        sizes = [tuple(np.sum([of_step[p] for p in row], axis=0).tolist()) for row in rows]
        expected = slow_steps.group_step(sizes, [sum(size) for size in sizes], [(1, 20, 15), (2, 20, 15)], 1)
        assert groups == [(bucket, [[(8 * step + p, 0) for p in rows[r]] for r in of]) for bucket, of in expected]


def test_plans_of_other_samples_have_the_same_shapes(package):
    """The most samples of a row are those that are given, whatever the lengths."""
    rng = np.random.default_rng(0)
    plans = [
        package.make_plan(rng.integers(1, 30, 50), [(2, 64)], packing="best_fit", samples_per_row=6) for _ in range(2)
    ]
    assert {plan.samples_per_row for plan in plans} == {(6,)}
    assert max(np.diff(plan.row_offsets).max() for plan in plans) <= 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples_per_row": 0}, "samples_per_row must be .* 0"),
        ({"samples_per_row": [3, 2]}, "(must|may) not descend"),
        ({"samples_per_row": [3]}, "one for each of 2|one number or 2"),
        ({"samples_per_row": 2, "packing": "padded"}, "packed rows"),
        ({"sequences_per_step": 3, "overlong": "split"}, "tokens_per_step"),
        ({"sequences_per_step": 3, "packing": "auto"}, "auto"),
    ],
)
def test_what_rows_of_steps_cannot_be_is_told(package, options, message):
    with pytest.raises(ValueError, match=message):
        package.make_plan([3, 1, 4, 2], [(2, 4), (1, 8)], **({"packing": "best_fit"} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [({"sequences_per_step": 3}, "tokens_per_step"), ({"tokens_per_step": 8, "order": 2}, "block_size")],
)
def test_wrapped_rows_are_of_tokens_alone(package, options, message):
    order = package.Order(block_size=options.get("order"))
    with pytest.raises(ValueError, match=message):
        package.make_plan([3, 1, 4, 2], [(2, 4)], packing="wrapped", **options | {"order": order})
