"""Packing: rows of several samples, best fit sample by sample, and plans of such rows."""

import functools
import importlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jvarlen
import torch_ref

from . import assert_same_packing, assert_same_plan, find, in_both, slow
from .inputs import (
    ORDERS,
    arrangements,
    as_arrays,
    bucket_arguments,
    dyadic_cost,
    few,
    limits,
    make_plan,
    moderate,
    offenders,
    seeds,
    steps_of,
)

PACKINGS = {"jvarlen": "jvarlen.planning.packing", "torch_ref": "torch_ref.planning.packing"}


@st.composite
def packing_arguments(draw):
    """Draw valid arguments of `pack_samples`, for which at least one sample remains."""
    longest = draw(st.sampled_from([4, 12, 40]))
    given_lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=60))
    overlong = draw(st.sampled_from(["error", "drop", "truncate"]))
    sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True).map(sorted))
    order = draw(st.sampled_from(ORDERS))
    used = given_lengths
    if draw(st.integers(0, 3)) == 0:
        permuted = draw(st.permutations(range(len(given_lengths))))
        order = permuted[: draw(st.integers(1, len(permuted)))]
        used = [given_lengths[i] for i in order]
    needed = {"error": max(used), "drop": min(used), "truncate": 1}[overlong]
    return {
        "lengths": given_lengths,
        "row_lengths": sorted({*sizes[:-1], max(sizes[-1], needed)}),
        "order": order,
        "seed": draw(seeds),
        "epoch": draw(seeds),
        "overlong": overlong,
    }


@st.composite
def plan_arguments(draw, packed):
    """Draw arguments of a plan that packs its samples as these of `pack_samples` do."""
    lengths_of_rows, others = packed["row_lengths"], {k: v for k, v in packed.items() if k != "row_lengths"}
    return others | {
        "buckets": [(draw(st.integers(1, 4)), length) for length in lengths_of_rows],
        "num_microbatches": draw(st.integers(1, 3)),
        "packing": "best_fit",
        **{name: value for name, value in draw(arrangements("dataset")).items() if name != "block_size"},
    }


def pack(package, arguments):
    return package.pack_samples(**as_arrays(arguments))


def rows_of(packing):
    """The length of each row, and its samples as (id, cut length)."""
    samples = list(zip(packing.sample_ids.tolist(), packing.sample_lengths.tolist(), strict=True))
    spans = itertools.pairwise(packing.row_offsets.tolist())
    return [(capacity, samples[i:j]) for capacity, (i, j) in zip(packing.capacity.tolist(), spans, strict=True)]


@moderate
@given(arguments=packing_arguments())
def test_both_pack_alike(arguments):
    """Rows in the order of opening, samples in that of placing; attributes, with dtypes."""
    packing, other = in_both(lambda package: pack(package, arguments))
    assert_same_packing(packing, other)
    assert all(sum(length for _, length in samples) <= capacity for capacity, samples in rows_of(packing))
    used = range(len(arguments["lengths"])) if isinstance(arguments["order"], str) else arguments["order"]
    too_long = sum(arguments["lengths"][i] > arguments["row_lengths"][-1] for i in used)
    assert packing.num_dropped == (too_long if arguments["overlong"] == "drop" else 0)
    assert packing.num_truncated == (too_long if arguments["overlong"] == "truncate" else 0)
    kept = len(used) - packing.num_dropped
    assert len(set(packing.sample_ids.tolist())) == len(packing.sample_ids) == kept


@moderate
@given(arguments=packing_arguments(), block_size=st.integers(1, 20))
def test_both_pack_blocks_of_shuffled_samples_alike(arguments, block_size):
    """Each with the last row of the one before, which is not kept."""
    if arguments["overlong"] == "drop":
        arguments["lengths"] += [1]
    arguments["overlong"] = overlong_of(arguments)
    options = {"block_size": block_size}
    assert_same_packing(
        *in_both(lambda package: pack(package, arguments | {"order": package.Order("shuffle", **options)}))
    )


def overlong_of(arguments):
    """Return the rule of drawn arguments, for all samples in place of those of their order."""
    is_long = max(arguments["lengths"]) > arguments["row_lengths"][-1]
    return "truncate" if is_long and arguments["overlong"] == "error" else arguments["overlong"]


def rows_of_several(plan):
    """The rows of more than one sample, as sets."""
    rows = np.split(plan.sample_ids, plan.row_offsets[1:-1])
    return {frozenset(row.tolist()) for row in rows if len(row) > 1}


@pytest.mark.parametrize(
    ("lengths", "options", "bucket", "num_rows", "num_more"),
    [
        (np.arange(40, 1540), {"max_tokens": 16384}, (5, 3276), 363, 1),
        (np.arange(40, 1540), {"max_tokens": 16384, "max_length": 4096}, (4, 4096), 290, 0),
        (np.arange(40, 1540), {"max_tokens": 16384, "length_multiple": 128}, (5, 3200), 371, 0),
        (np.random.default_rng(0).integers(20, 561, 3000), {"max_tokens": 1024}, (1, 1024), 870, 2),
    ],
    ids=["by the budget", "by max_length", "in multiples", "short chats"],
)
def test_rows_are_full_and_others_in_every_epoch(package, lengths, options, bucket, num_rows, num_more):
    """Rows of the longest sample, 1,539, had every row of epoch 0 again in epoch 1; 560 left half a microbatch idle."""
    plan, other = (package.make_plan(lengths, **options, packing="best_fit", epoch=epoch) for epoch in (0, 1))
    assert plan.buckets.shapes == other.buckets.shapes == (bucket,)
    assert plan.num_rows == num_rows
    assert lengths.sum() / (num_rows * bucket[1]) > 0.985
    order = package.Order(block_size=256)
    blocks = package.make_plan(lengths, **options, packing="best_fit", order=order)
    assert blocks.digest == plan.digest
    at_once = package.make_plan(lengths, **options, packing="best_fit", order=package.Order(block_size=None))
    assert plan.num_rows - at_once.num_rows == num_more
    first, second = rows_of_several(plan), rows_of_several(other)
    assert 20 * len(first & second) <= len(first)
    for text in ("blocks of 256", f"{num_more:,}", f"{len(first & second) / len(first):.1%}", "epoch 1"):
        assert text in plan.report()


@pytest.mark.parametrize("order", ["length", "dataset", "ids"])
def test_steps_that_do_not_follow_the_order_are_told(package, order):
    """Best fit puts the longest samples into the first rows; in steps of given sizes, short samples come first."""
    lengths = np.arange(40, 240)
    order = np.arange(200) if order == "ids" else order

    def means(**options):
        plan = package.make_plan(lengths, [(2, 512)], order=order, **options)
        return plan.num_tokens / plan.num_sequences, "steps" in plan.report() and "tokens_per_step" in plan.report()

    of_rows, is_told = means(packing="best_fit")
    assert of_rows[0] > of_rows[-1]
    assert is_told
    for follows in ({"packing": "best_fit", "tokens_per_step": 1024}, {"packing": "wrapped"}, {}):
        of_steps, is_told = means(**follows)
        assert of_steps[0] < of_steps[-1]
        assert not is_told
    with pytest.raises(ValueError, match=r"neither difficulty nor pacing: .*tokens_per_step"):
        means(packing="best_fit", difficulty=lengths)


def test_rows_that_are_the_same_in_every_epoch_are_told(package):
    """Where rows are packed all at once, and where none has several samples."""
    same = package.make_plan(np.arange(40, 240), max_tokens=1000, packing="best_fit")
    assert "at once" in same.report()
    assert "100.0%" in same.report()
    alone = package.make_plan([900] * 4, max_tokens=1000, packing="best_fit")
    assert "no row holds several" in alone.report()
    assert "epoch 1" not in package.make_plan([900] * 4, max_tokens=1000, packing="best_fit", order="length").report()


@pytest.mark.parametrize("longest", [60, 100])
def test_blocks_are_as_small_as_full_rows_allow(package, monkeypatch, longest):
    """In any epoch those of epoch 0, by the rule in plain Python; the report says what they cost."""
    monkeypatch.setattr(importlib.import_module(PACKINGS[package.__name__]), "_LEAST_BLOCK", 16)
    rng = np.random.default_rng(1)
    found = []
    for number in (16, 50, 150, 400, 900):
        lengths = rng.integers(5, longest, number)

        def pack(block_size, epoch=0, lengths=lengths):
            order = package.Order("shuffle", block_size=block_size)
            return package.pack_samples(lengths, 100, order=order, seed=2, epoch=epoch)

        found.append(slow.choose_block_size(lambda size: pack(size).num_rows, number, least=16))
        for epoch in (0, 3):
            assert np.array_equal(pack("auto", epoch).sample_ids, pack(found[-1], epoch).sample_ids)
    assert found[0] is None
    assert len({*found}) > 2


def test_blocks_up_to_half_of_the_samples_may_need_a_twentieth_more_rows(package, monkeypatch):
    """The largest of them, where none needs but a hundredth."""
    monkeypatch.setattr(importlib.import_module(PACKINGS[package.__name__]), "_LEAST_BLOCK", 16)
    lengths = np.random.default_rng(1).permutation(np.repeat(np.arange(20, 101), 2))
    num_rows = {
        size: package.pack_samples(lengths, 101, order=package.Order(block_size=size)).num_rows
        for size in (None, 16, 32, 64, 128)
    }
    assert min(num_rows[size] for size in (16, 32, 64, 128)) > num_rows[None] + -(-num_rows[None] // 100)
    assert num_rows[64] <= 1.05 * num_rows[None]
    auto = package.pack_samples(lengths, 101, order="shuffle", epoch=1)
    blocks = package.pack_samples(lengths, 101, order=package.Order(block_size=64), epoch=1)
    assert np.array_equal(auto.sample_ids, blocks.sample_ids)


@moderate
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=60),
    block_size=st.sampled_from(["auto", 1, 5, 20]),
)
def test_blocks_of_split_samples_are_the_same_in_both_packages(lengths, block_size):
    """They count samples, however many chunks these have."""
    with pytest.MonkeyPatch.context() as patch:
        packings = []
        for package in (jvarlen, torch_ref):
            module = importlib.import_module(PACKINGS[package.__name__])
            patch.setattr(module, "_LEAST_BLOCK", 4)
            order = package.Order("shuffle", block_size=block_size)
            options = {"overlong": "split", "seed": 1, "epoch": 1}
            packings.append(package.pack_samples(lengths, [10, 20], order=order, **options))
    for name in ("sample_ids", "row_offsets", "sample_lengths", "capacity", "chunk_starts"):
        one, other = (getattr(packing, name) for packing in packings)
        assert (one is None and other is None) or np.array_equal(one, other)


def test_rows_fill_as_by_hand(package):
    """A sample goes where the least space is left, and equals into the row that has waited longest."""
    packing = package.pack_samples([6, 6, 5, 2, 2, 1, 1], 8)
    assert rows_of(packing) == [
        (8, [(0, 6), (3, 2)]),
        (8, [(1, 6), (4, 2)]),
        (8, [(2, 5), (5, 1), (6, 1)]),
    ]
    assert packing.starts.tolist() == [0, 6, 0, 6, 0, 5, 6]
    assert packing.fill == 23 / 24


def test_rows_open_in_the_smallest_length_that_holds_the_sample(package):
    """And take further samples up to it."""
    packing = package.pack_samples([3, 9, 4, 1, 1, 1], [4, 10])
    assert [(capacity, [i for i, _ in samples]) for capacity, samples in rows_of(packing)] == [
        (10, [1, 3]),
        (4, [2]),
        (4, [0, 4]),
        (4, [5]),
    ]
    assert package.pack_samples([1, 2], 3).row_lengths == (3,)


def test_both_pack_many_alike():
    """Thousands of samples of many lengths: long queues, split intervals."""
    rng = np.random.default_rng(3)
    lengths = np.minimum(rng.zipf(1.3, 3000) + rng.integers(0, 40, 3000), 700)
    options = {"seed": 5, "overlong": "truncate"}
    assert_same_packing(
        *in_both(
            lambda package: package.pack_samples(
                lengths, [64, 100, 512], order=package.Order(block_size=None), **options
            )
        )
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"row_lengths": []}, r"lengths.*\[\]"),
        ({"row_lengths": [9, 8]}, "9"),
        ({"row_lengths": [0, 8]}, "0"),
        ({"row_lengths": 8.5}, r"8\.5"),
        ({"overlong": "ignore"}, "ignore"),
        ({"order": "random"}, "random"),
        ({"seed": -1}, "seed"),
        ({"lengths": [3, -77]}, "-77"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(package, arguments, named):
    """Everything outside its range is a ValueError that says what."""
    valid = {"lengths": [3, 5, 8], "row_lengths": [8]}
    with pytest.raises(ValueError, match=named):
        package.pack_samples(**(valid | arguments))


def test_samples_above_the_longest_row_are_listed(package):
    """By id, value and limit, also where dropping leaves none; one that the order leaves out is not looked at."""
    lengths = [3, 99, 4, 98]
    with pytest.raises(ValueError, match=offenders((1, 99), (3, 98), limit=10)):
        package.pack_samples(lengths, [5, 10], order="length")
    with pytest.raises(ValueError, match=offenders((0, 3), (1, 99), (2, 4), (3, 98), limit=2)):
        package.pack_samples(lengths, 2, overlong="drop")
    assert package.pack_samples(lengths, 10, order=[2, 0]).sample_ids.tolist() == [2, 0]


# Split samples


def split_arguments():
    """Draw arguments of `pack_samples` that split."""
    return packing_arguments().map(lambda arguments: arguments | {"overlong": "split"})


@moderate
@given(arguments=split_arguments(), data=st.data())
def test_both_pack_and_plan_chunks_alike(arguments, data):
    """Each chunk once, as long as the longest row or what is left; rows of chunks are planned like other rows."""
    packing, other = in_both(lambda package: pack(package, arguments))
    assert_same_packing(packing, other)
    longest = arguments["row_lengths"][-1]
    used = range(len(arguments["lengths"])) if isinstance(arguments["order"], str) else arguments["order"]
    chunks = [(i, start) for i in used for start in range(0, arguments["lengths"][i], longest)]
    starts = [0] * len(chunks) if packing.chunk_starts is None else packing.chunk_starts.tolist()
    assert sorted(zip(packing.sample_ids.tolist(), starts, strict=True)) == sorted(chunks)
    drawn = data.draw(plan_arguments(arguments))
    assert_same_plan(*in_both(lambda package: make_plan(package, drawn)))


# Wrapped packing


@st.composite
def wrapped_arguments(draw):
    """Draw lengths, a row length and an order."""
    lengths = draw(st.lists(st.integers(1, draw(st.sampled_from([4, 30]))), min_size=1, max_size=30))
    order = draw(st.sampled_from(ORDERS))
    if draw(st.integers(0, 3)) == 0:
        order = draw(st.permutations(range(len(lengths))))[: draw(st.integers(1, len(lengths)))]
    rates = {"seed": draw(seeds), "epoch": draw(seeds)}
    return {"lengths": lengths, "row_lengths": draw(st.integers(1, 40)), "order": order} | rates


@moderate
@given(arguments=wrapped_arguments())
def test_wrapped_rows_are_cut_from_the_samples_end_to_end(arguments):
    """Token by token, in the order of the samples."""
    packing, other = in_both(lambda package: pack(package, arguments | {"method": "wrapped"}))
    assert_same_packing(packing, other)
    ids = list(dict.fromkeys(packing.sample_ids.tolist()))
    tokens = [(i, place) for i in ids for place in range(arguments["lengths"][i])]
    chunks = zip(
        packing.sample_ids.tolist(), packing.chunk_starts.tolist(), packing.sample_lengths.tolist(), strict=True
    )
    assert [(i, start + place) for i, start, length in chunks for place in range(length)] == tokens
    full, last = divmod(len(tokens), arguments["row_lengths"])
    assert packing.num_tokens.tolist() == [arguments["row_lengths"]] * full + [last] * (last > 0)


@few
@given(
    arguments=wrapped_arguments(),
    num_rows=st.integers(1, 3),
    num_microbatches=st.integers(1, 2),
)
def test_both_plan_wrapped_rows_alike(tmp_path_factory, arguments, num_rows, num_microbatches):
    """Rows keep the order of the samples, unless that is a shuffle."""
    order = np.array(arguments["order"]) if isinstance(arguments["order"], list) else arguments["order"]
    row_length = arguments["row_lengths"]
    options = {"packing": "wrapped", "num_microbatches": num_microbatches}
    options |= {name: arguments[name] for name in ("seed", "epoch")}
    plan, other = in_both(
        lambda package: package.make_plan(
            arguments["lengths"],
            [(num_rows, row_length)],
            order=order,
            **options,
        )
    )
    assert_same_plan(plan, other)
    num_whole = (np.cumsum(sorted(arguments["lengths"])) <= row_length).sum()
    assert plan.samples_per_row == (min(num_whole + 2, row_length),)  # in any epoch, and the parts of two others
    path = tmp_path_factory.mktemp("wrapped") / "plan.npz"
    plan.save(path)
    one, two = in_both(lambda package: package.Plan.load(path))
    limits = [arguments["lengths"][i] for i in plan.sample_ids.tolist()]
    assert np.minimum(one.chunk_ends, limits).tolist() == np.minimum(two.chunk_ends, limits).tolist()


def test_wrapped_rows_are_full_and_others_in_every_epoch(package):
    """1,000 samples of 600 take 586 rows of 1,024, and by best fit one each."""
    lengths = [600] * 1000
    assert package.pack_samples(lengths, 1024, method="wrapped").num_rows == 586
    assert package.pack_samples(lengths, 1024).num_rows == 1000
    options = {"max_tokens": 8192, "max_length": 1024, "packing": "wrapped"}
    plan, other = (package.make_plan(lengths, **options, epoch=epoch) for epoch in (0, 1))
    assert plan.buckets.shapes == ((8, 1024),)
    assert plan.num_rows == other.num_rows == 586
    assert plan.digest != other.digest
    in_order = package.make_plan(lengths, **options, order="dataset")
    assert (np.diff(in_order.sample_ids) >= 0).all()
    assert in_order.padding < 0.011
    assert "packing splits samples, and chunks count as samples" in plan.report()
    assert "overlong" not in plan.report()  # which goes with best fit alone


def test_wrapped_rows_are_as_long_as_said(package):
    """The only bucket, the only given length, `max_length` whatever the samples have, or as others are."""
    lengths = [5, 12, 3, 9]
    for options, longest in (
        ({"max_tokens": 64, "max_length": 20}, 20),
        ({"max_tokens": 64, "strategy": [16]}, 16),
        ({"max_tokens": 64, "length_multiple": 8}, 32),
        ({"max_tokens": 64}, 32),
        ({"max_tokens": 20}, 20),
        ({"buckets": [(2, 7)]}, 7),
    ):
        plan = package.make_plan(lengths, packing="wrapped", **options)
        assert [length for _, length in plan.buckets.shapes] == [longest]
        assert plan.num_rows == -(-sum(lengths) // longest)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lengths": [[3, 4]]}, "samples"),
        ({"row_lengths": [4, 8]}, r"\[4, 8\]"),
        ({"overlong": "split"}, "overlong='split'"),
        ({"order": {"by": "shuffle", "block_size": 4}}, "block_size=4"),
        ({"method": "first_fit"}, "first_fit"),
    ],
)
def test_what_wrapped_packing_excludes_is_named(package, options, named):
    """What it is not for, it refuses."""
    order = {"order": package.Order(**options["order"])} if "order" in options else {}
    with pytest.raises(ValueError, match=named):
        package.pack_samples(**{"lengths": [3, 4], "row_lengths": 8, "method": "wrapped"} | options | order)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"buckets": [(1, 4), (1, 8)]}, "8"),
        ({"max_tokens": 64, "strategy": [4, 8]}, r"\[4, 8\]"),
        ({"max_tokens": 64, "strategy": "quantile"}, "quantile"),
        ({"max_tokens": 64, "max_length": 10, "length_multiple": 8}, "max_length.*10"),
        ({"max_tokens": 5}, "max_length"),
        ({"max_tokens": 64, "difficulty": [1, 2, 3]}, "difficulty"),
    ],
)
def test_what_a_plan_of_wrapped_rows_excludes_is_named(package, options, named):
    """Each in one line."""
    with pytest.raises(ValueError, match=named):
        package.make_plan([3, 4, 6], packing="wrapped", **options)


# Lengths of rows


@moderate
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    max_tokens=st.integers(1, 200),
    max_length=st.integers(1, 80) | st.none(),
    multiple=st.integers(1, 8),
)
def test_row_lengths_are_those_of_the_rule_in_plain_python(lengths, max_tokens, max_length, multiple):
    """For one shape, `max_length`, or what is left of the budget for the most rows of two samples."""
    longest = -(-max(lengths) // multiple) * multiple
    if longest > max_tokens or longest > (max_length or longest):
        return
    options = {"max_length": max_length, "length_multiple": multiple, "max_shapes": 1}
    chosen, other = in_both(lambda package: find(package, "choose_row_lengths")(lengths, max_tokens, **options))
    if max_length is not None and max_length // multiple * multiple > max_tokens:
        max_length = None  # no row is so long
    assert chosen == other == (slow.choose_row_length(max(lengths), max_tokens, max_length, multiple),)


def test_rows_that_another_limit_forbids_are_as_long_as_the_longest_sample(package):
    """Rows of 30 tokens; two of these would be 60, and cost more than 45."""
    choose = functools.partial(find(package, "choose_row_lengths"), [7, 30], 200, max_shapes=1)
    assert choose() == (66,)
    assert choose(cost=lambda rows, length: 1.0 * rows * length, max_cost=45.0) == (30,)


@moderate
@given(data=st.data(), limited=st.booleans())
def test_both_add_row_lengths_alike(data, limited):
    """Each time that with which the plan of the rows costs least."""
    arguments = data.draw(bucket_arguments(strategy="optimal", max_samples=20, longest=12))
    del arguments["strategy"]
    if limited:
        arguments |= data.draw(limits(20))
        arguments["compile_seconds"] = data.draw(st.sampled_from([None, 0.0, 1.5]))
    chosen, other = in_both(lambda package: find(package, "choose_row_lengths")(**as_arrays(arguments)))
    assert all(isinstance(length, int) for length in chosen)
    assert chosen == other


@few
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60), max_cost=st.sampled_from([None, 9.0]))
def test_row_lengths_by_a_cost_model_leave_out_attention(lengths, max_cost):
    """Its pairs are the same in any rows; only where it limits a microbatch does a row count as one sample."""
    chosen = []
    for package in (jvarlen, torch_ref):
        choose = functools.partial(find(package, "choose_row_lengths"), lengths, 180, max_shapes=3, compile_seconds=0.3)
        model = package.CostModel(constant=0.25, linear=2.0**-7, quadratic=2.0**-9)
        chosen.append(choose(cost=model, max_cost=max_cost))
        if max_cost is None:
            chosen.append(choose(cost=lambda rows, length: 0.25 + rows * length * 2.0**-7))
    assert len(set(chosen)) == 1


def test_row_lengths_of_very_many_lengths_are_those_of_every_kth():
    """Counted down from the longest, the same in both packages."""
    options = {"max_shapes": 3, "max_length": 10_012, "cost": lambda rows, length: rows * length}
    chosen, other = in_both(
        lambda package: find(package, "choose_row_lengths")(np.arange(11, 10_013), 40_000, **options)
    )
    assert set(chosen) <= set(range(10_012, 10, -3))
    assert chosen == other


@few
@given(data=st.data())
def test_row_lengths_for_split_samples_are_those_for_their_chunks(package, data):
    """Without a longest row nothing is split."""
    arguments = data.draw(bucket_arguments(strategy="optimal", max_samples=20, longest=12))
    del arguments["strategy"], arguments["overlong"]
    lengths, limit = arguments["lengths"], arguments["max_length"]
    of_chunks = lengths
    if limit is not None:
        of_chunks = [min(limit, length - start) for length in lengths for start in range(0, length, limit)]
    chosen = find(package, "choose_row_lengths")(**as_arrays(arguments), overlong="split")
    assert chosen == find(package, "choose_row_lengths")(**as_arrays(arguments | {"lengths": of_chunks}))


def test_row_lengths_follow_the_limits(package):
    """The same refusals as for buckets."""
    with pytest.raises(ValueError, match=offenders((1, 60), limit=50)):
        find(package, "choose_row_lengths")([4, 60], 50)
    with pytest.raises(ValueError, match="max_cost"):
        find(package, "choose_row_lengths")([4, 60], 100, max_cost=3.0)
    with pytest.raises(ValueError, match=offenders((1, 60), limit=7)):
        find(package, "choose_row_lengths")([4, 60], 100, max_length=7, overlong="error")
    assert find(package, "choose_row_lengths")([4, 60], 100, max_length=7, overlong="drop") == (7,)
    assert find(package, "choose_row_lengths")([4, 60], 100, max_length=7, max_shapes=1, overlong="truncate") == (7,)


# Plans


@moderate
@given(arguments=packing_arguments(), data=st.data())
def test_both_plan_packed_rows_alike(tmp_path_factory, arguments, data):
    """Rows are planned as samples would be, then replaced by their samples: digest, rows, counts, and the file."""
    arguments["overlong"] = overlong_of(arguments) if arguments["order"] == "shuffle" else arguments["overlong"]
    drawn = data.draw(plan_arguments(arguments))
    plan, other = in_both(lambda package: make_plan(package, drawn))
    assert_same_plan(plan, other)
    order = arguments["order"]
    is_array = not isinstance(order, str)
    packing = pack(jvarlen, arguments | {"order": order if is_array or order == "shuffle" else "dataset"})
    drawn = {name: value for name, value in drawn.items() if name not in ("packing", "overlong")}
    of_rows = make_plan(jvarlen, drawn | {"lengths": packing.num_tokens, "order": "dataset" if is_array else order})
    rows = np.split(packing.sample_ids, packing.row_offsets[1:-1])
    assert plan.sample_ids.tolist() == np.concatenate([rows[r] for r in of_rows.sample_ids]).tolist()
    assert plan.step_bucket.tolist() == of_rows.step_bucket.tolist()
    path = tmp_path_factory.mktemp("packed") / "plan.npz"
    plan.save(path)
    with np.load(path, allow_pickle=False) as archive:
        assert archive["format_version"] == 2
        assert archive["row_offsets"].tolist() == plan.row_offsets.tolist()
        assert archive["samples_per_row"].tolist() == list(plan.samples_per_row)
    assert_same_plan(*in_both(lambda package: package.Plan.load(path)))


@pytest.mark.parametrize("order", [*ORDERS, "subset"])
def test_a_plan_packs_its_samples_on_request(package, order):
    """As `pack_samples` and the plan of its rows: one row length, with a cost several; anew in a shuffled epoch."""
    lengths = np.random.default_rng(0).integers(1, 60, 300)
    by = np.arange(299, 9, -1) if order == "subset" else order
    options = {"seed": 3, "epoch": 2}
    of_packing = by if order in ("shuffle", "subset") else "dataset"
    cost = {"cost": dyadic_cost, "max_shapes": 2}
    for fields in ({"max_length": 50}, {"strategy": [32, 64]}, cost | {"max_length": 64, "length_multiple": 16}):
        overlong = "split" if fields.get("max_length") == 50 else "error"
        sizes = fields.get("strategy") or find(package, "choose_row_lengths")(
            lengths, 256, overlong=overlong, **({"max_shapes": 1} if "cost" not in fields else {}) | fields
        )
        packing = package.pack_samples(lengths, sizes, order=of_packing, overlong=overlong, **options)
        rows = package.pack_samples(lengths, sizes, order=of_packing, overlong=overlong, seed=3)
        limits = {name: value for name, value in fields.items() if name not in ("max_length", "strategy")}
        buckets = package.make_buckets(rows.num_tokens, 256, strategy=sizes, **limits)
        packed = {"order": by, "packing": "best_fit", "overlong": overlong, **options}
        plan = package.make_plan(lengths, max_tokens=256, **fields, **packed)
        assert plan.buckets == buckets
        assert plan.num_rows == packing.num_rows
        assert package.make_plan(lengths, buckets, **packed).digest == plan.digest
        chosen = {"max_tokens": 256, "row_lengths": sizes, **limits}
        assert package.make_plan(lengths, **chosen, **packed).digest == plan.digest


def test_what_cannot_be_packed_by_a_plan_is_refused(package):
    """Another word, rows, pairs, and what gives samples an order that rows would lose."""
    for lengths, options, named in (
        ([3, 4], {"packing": "worst_fit"}, "worst_fit"),
        ([[3, 4]], {"packing": "wrapped", "buckets": [(1, 4, 4)]}, r"one length|several lengths"),
        ([[3, 4]], {"buckets": [(1, 4, 8), (1, 8, 8)]}, r"one bucket|two lengths"),
        ([3, 4], {"difficulty": [1, 2]}, "difficulty"),
        ([3, 4], {"order": package.Order("length", block_size=2)}, "block_size"),
        ([3, 4], {"order": "length", "pacing": find(package, "linear_pacing")(3)}, "pacing"),
    ):
        with pytest.raises(ValueError, match=named):
            package.make_plan(lengths, **{"buckets": [(1, 8)], "packing": "best_fit"} | options)


def test_the_side_of_pairs_that_fills_up_first_is_as_long_as_the_mean_pair_needs(package):
    """Within `max_tokens` and `max_length`, rounded up; then both grow as rows of single samples do, rounded down."""
    choose, pairs = find(package, "choose_row_lengths"), [[3, 9], [3, 4], [8, 8], [2, 4]]
    assert choose(pairs, 21) == choose(pairs, 40, max_length=13) == (8, 13)  # 25 targets for 16 sources: 12.5 beside 8
    assert choose(pairs, 32) == (12, 19)
    assert choose(pairs, 100) == (19, 30)  # in two rows of 50
    assert choose(pairs, 50, max_length=26) == (16, 26)
    assert choose(pairs, 24, length_multiple=4) == (8, 16)
    assert choose(pairs, 32, length_multiple=4) == (8, 20)
    assert choose(pairs, 17) == choose(pairs, 32, max_length=9) == (8, 9)
    assert choose([[4, 0], [2, 0]], 5) == (4, 1)


def test_a_max_length_above_the_budget_leaves_rows_of_pairs_as_long_as_without_one(package):
    """As it does rows of single samples; up to there, the longer side grows with it."""
    choose, sides = find(package, "choose_row_lengths"), np.random.default_rng(0).integers(30, 561, 300)
    sides[0] = 560
    pairs = np.stack([sides, sides[::-1]], axis=1)
    pairs[0] = 560
    for max_length, row_lengths in ((1500, (1497, 1500)), (2048, (2044, 2048)), (4096, (2046, 2049))):
        assert choose(pairs, 4096, max_length=max_length) == row_lengths
    assert choose(pairs, 4096) == (2046, 2049)
    plan = package.make_plan(pairs, max_tokens=4096, max_length=4096, packing="best_fit")
    assert plan.buckets.shapes == ((1, 2046, 2049),)
    assert choose(sides, 4096, max_length=8192) == choose(sides, 4096)


@pytest.mark.parametrize(("is_correlated", "before", "after"), [(True, 0.18, 0.03), (False, 0.34, 0.06)])
def test_a_plan_packs_pairs_into_rows_of_good_lengths(package, is_correlated, before, after):
    """Padding of rows of the longest sides, and of the chosen ones; the same again from a file, in other epochs."""
    rng = np.random.default_rng(0)
    source = np.clip(np.rint(rng.lognormal(3.0, 0.6, 1000)), 1, 200)
    target = source * rng.lognormal(0.05, 0.25, 1000) if is_correlated else rng.lognormal(4.0, 0.9, 1000)
    pairs = np.stack([source, np.clip(np.rint(target), 1, 1000)], axis=1).astype(int)
    longest = pairs.max(axis=0).tolist()
    rows = package.pack_samples(pairs, longest)
    assert 1 - pairs.sum() / (rows.num_rows * sum(longest)) > before
    plan = package.make_plan(pairs, max_tokens=4096, packing="best_fit", epoch=1)
    (bucket,) = plan.buckets.shapes
    assert 1 - pairs.sum() / (plan.num_rows * sum(bucket[1:])) < after
    assert bucket[0] * sum(bucket[1:]) <= 4096
    assert plan.samples_per_row == ((np.cumsum(np.sort(pairs, axis=0), axis=0) <= bucket[1:]).sum(axis=0).min(),)
    assert np.diff(plan.row_offsets).max() <= plan.samples_per_row[0]
    assert np.sort(plan.sample_ids).tolist() == list(range(1000))
    again = package.make_plan(pairs, [bucket], packing="best_fit", epoch=1)
    assert again.digest == plan.digest


@pytest.mark.parametrize(
    ("pairs", "options", "named"),
    [
        ([[30, 2], [3, 40], [50, 60]], {"max_tokens": 100}, r"50.*60"),
        ([[30, 2], [3, 40]], {"max_tokens": 60}, r"30.*40"),
        ([[30, 2], [3, 40]], {"max_tokens": 100, "max_length": 32}, "40"),
        ([[30, 2]], {"max_tokens": 100, "cost": dyadic_cost}, r"not (chosen )?by cost$"),
        ([[30, 2]], {"max_tokens": 100, "size": "product"}, r"not (chosen )?by size$"),
        ([[30, 2]], {"max_tokens": 100, "strategy": [32, 64]}, r"not (chosen )?by strategy$"),
    ],
)
def test_what_rows_of_pairs_cannot_be_is_told(package, pairs, options, named):
    """Sides, limits, fields that pairs have no use for."""
    with pytest.raises(ValueError, match=named):
        package.make_plan(pairs, packing="best_fit", **options)


def test_a_plan_is_independent_of_the_packing_of_the_same_seed():
    """Two given rows of four, two to a step, meet in a third of the seeds: within 3.3 standard deviations."""
    num_seeds, lengths = 600, [6] * 4 + [2] * 4
    num_met = 0
    for seed in range(num_seeds):
        step = jvarlen.make_plan(lengths, [(2, 8)], packing="best_fit", order="shuffle", seed=seed).rows(0)
        # Samples 0 to 3 are in a row each, whichever that is.
        num_met += np.isin([0, 1], step).sum() != 1
    assert abs(num_met / num_seeds - 1 / 3) < 3.3 * (2 / 9 / num_seeds) ** 0.5


def test_a_plan_of_single_samples_is_not_a_packed_one(package):
    """Unpacked plans have no row offsets; one sample a row packed is another digest."""
    lengths, buckets = [5, 5, 5], [(2, 8)]
    plain = package.make_plan(lengths, buckets, order="length")
    packed = package.make_plan(lengths, buckets, packing="best_fit", order="length")
    assert plain.row_offsets is None
    assert plain.num_rows == plain.num_samples == 3
    assert packed.row_offsets.tolist() == [0, 1, 2, 3]
    assert steps_of(packed) == steps_of(plain)
    assert packed.digest != plain.digest
    assert packed.rows(0).shape == (1, 2, 1)


# How many samples a row has room for


@moderate
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), epoch=st.integers(0, 3))
def test_a_row_has_room_for_as_many_samples_as_the_shortest_that_fit_it(package, lengths, epoch):
    """Whatever the order, chunks among them; of two lengths, the fewer."""
    plan = package.make_plan(lengths, [(2, 4), (1, 9)], packing="best_fit", overlong="split", epoch=epoch)
    chunks = sorted(min(9, length - start) for length in lengths for start in range(0, length, 9))

    def room(sizes, limit):
        return max(n for n in range(len(sizes) + 1) if sum(sorted(sizes)[:n]) <= limit)

    assert plan.samples_per_row == tuple(max(1, room(chunks, limit)) for _, limit in plan.buckets.shapes)
    for step in range(plan.num_steps):
        assert plan.rows(step).shape[2] <= plan.samples_per_row[plan.step_bucket[step]]
    pairs = np.stack([lengths, lengths[::-1]], axis=1)
    joint = package.make_plan(pairs, [(1, 20, 15)], packing="best_fit")
    assert joint.samples_per_row == (min(room(lengths, 20), room(lengths, 15)),)


@moderate
@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=30), row_length=st.integers(1, 20), epoch=seeds)
def test_a_wrapped_row_has_room_for_the_parts_of_two_samples_as_well(package, lengths, row_length, epoch):
    """Whatever the epoch cuts, but for rows of fewer tokens."""
    plan = package.make_plan(lengths, [(2, row_length)], packing="wrapped", epoch=epoch)
    assert plan.samples_per_row == (min((np.cumsum(sorted(lengths)) <= row_length).sum() + 2, row_length),)
    assert np.diff(plan.row_offsets).max() <= plan.samples_per_row[0]


def test_a_row_has_room_for_as_many_samples_in_epochs_that_take_some_of_them_only(package):
    """Those that another epoch may take count, but for those too long for any."""
    lengths, options = [5, 4, 3, 1, 1, 2, 9], {"packing": "best_fit", "overlong": "drop"}
    plans = [package.make_plan(lengths, [(1, 6)], order=order, **options) for order in ("shuffle", [0, 1], [3, 4, 5])]
    assert [plan.samples_per_row for plan in plans] == [(3,)] * 3
    assert package.make_plan(lengths[:4], [(1, 6)], order=[0, 1], packing="best_fit").samples_per_row == (2,)
    assert package.make_plan(lengths[:6], [(1, 3), (1, 6)]).samples_per_row == (1, 1)
