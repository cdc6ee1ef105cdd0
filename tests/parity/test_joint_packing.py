"""Packing of pairs: rows that hold inputs and targets, sample by sample, and plans of such rows."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jvarlen

from . import assert_same_packing, assert_same_plan, in_both
from .inputs import ORDERS, as_arrays, few, moderate, seeds


@st.composite
def pair_arguments(draw):
    """Draw valid arguments of `pack_samples` for pairs, of which at least one remains."""
    row_lengths = [draw(st.integers(1, 24)), draw(st.integers(1, 24))]
    overlong = draw(st.sampled_from(["error", "drop", "truncate"]))
    above = 0 if overlong == "error" else 3
    # Only the first length of a sample must be there.
    sample = st.tuples(*(st.integers(d == 0, length + above) for d, length in enumerate(row_lengths))).map(list)
    lengths = [[1, 1], *draw(st.lists(sample, max_size=50))]
    order = draw(st.sampled_from(ORDERS))
    if draw(st.integers(0, 3)) == 0:
        permuted = draw(st.permutations(range(len(lengths))))
        order = [0, *(i for i in permuted if i)][: draw(st.integers(1, len(lengths)))]
    return {
        "lengths": lengths,
        "row_lengths": row_lengths,
        "order": order,
        "seed": draw(seeds),
        "epoch": draw(seeds),
        "overlong": overlong,
    }


@moderate
@given(arguments=pair_arguments())
def test_both_pack_alike(arguments):
    """Every row, pair by pair in order of placing, and every attribute of them."""
    packing, other = in_both(lambda package: package.pack_samples(**as_arrays(arguments)))
    assert_same_packing(packing, other)
    sizes = arguments["row_lengths"]
    assert (packing.num_tokens <= packing.capacity).all()
    assert packing.capacity.tolist() == [sizes] * packing.num_rows
    used = range(len(arguments["lengths"])) if isinstance(arguments["order"], str) else arguments["order"]
    too_long = sum(any(np.greater(arguments["lengths"][i], sizes)) for i in used)
    assert packing.num_dropped == (too_long if arguments["overlong"] == "drop" else 0)
    assert packing.num_truncated == (too_long if arguments["overlong"] == "truncate" else 0)


@few
@given(arguments=pair_arguments(), block_size=st.integers(1, 20))
def test_both_pack_blocks_of_shuffled_pairs_alike(arguments, block_size):
    """Each with the last row of the one before, which is not kept."""
    if arguments["overlong"] == "error":
        arguments["overlong"] = "truncate"
    del arguments["order"]
    arrays = as_arrays(arguments)
    assert_same_packing(
        *in_both(lambda package: package.pack_samples(**arrays, order=package.Order(block_size=block_size)))
    )


def test_rows_fill_as_by_hand(package):
    """The longest first, then what has most where most is free; equal sums by the first length."""
    order = np.arange(5)
    packing = package.pack_samples([[4, 2], [1, 5], [5, 5], [3, 3], [2, 1]], (8, 8), order=order)
    assert [row.tolist() for row in np.split(packing.sample_ids, packing.row_offsets[1:-1])] == [[2, 3], [0, 1, 4]]
    assert packing.starts.tolist() == [[0, 0], [5, 5], [0, 0], [4, 2], [5, 7]]


def test_rows_may_be_millions_of_tokens_long():
    """So that lengths and factors nearly need 64 bits."""
    lengths = np.random.default_rng(5).integers(1, 2**21, (60, 2))
    assert_same_packing(*in_both(lambda package: package.pack_samples(lengths, [2**23 - 1, 2**22 + 1])))


def test_pairs_come_in_blocks_in_every_order():
    """At least two, of up to 2,048 pairs; a word other than "shuffle" takes those of epoch 0."""
    pairs = np.random.default_rng(0).integers(1, 60, (4100, 2))
    for number, block_size in ((4100, 2048), (2200, 1024), (512, 256), (511, None)):
        order = jvarlen.Order(block_size=block_size)
        expected = jvarlen.pack_samples(pairs[:number], (64, 64), order=order)
        assert_same_packing(expected, jvarlen.pack_samples(pairs[:number], (64, 64), order="shuffle"))
        for other in in_both(lambda package, n=number: package.pack_samples(pairs[:n], (64, 64), order="length")):
            assert_same_packing(expected, other)


def test_rows_of_pairs_hold_several_and_are_others_in_every_epoch(package):
    """One pair a row, 48.7 % padding, where rows were as long as the longest of each side."""
    pairs = np.stack([np.arange(40, 1540), np.arange(40, 1540)[::-1]], axis=1)
    plan, other = (package.make_plan(pairs, max_tokens=16_384, packing="best_fit", epoch=epoch) for epoch in (0, 1))
    assert plan.buckets.shapes == ((2, 4096, 4096),)
    assert plan.padding < 0.11
    assert plan.digest != other.digest
    assert "0.0%" in plan.report()


@few
@given(data=st.data())
def test_both_plan_rows_of_pairs_alike(tmp_path_factory, data):
    """Rows are planned like pairs, and unpacked; the digest and the file cover them."""
    arguments = as_arrays(data.draw(pair_arguments())) | {"packing": "best_fit", "num_microbatches": 2}
    buckets = [(data.draw(st.integers(1, 3)), *arguments.pop("row_lengths"))]
    plan, other = in_both(lambda package: package.make_plan(buckets=buckets, **arguments))
    assert_same_plan(plan, other)
    path = tmp_path_factory.mktemp("joint") / "plan.npz"
    plan.save(path)
    assert_same_plan(*in_both(lambda package: package.Plan.load(path)))
    assert "samples" in plan.report()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"row_lengths": 8}, "8"),
        ({"row_lengths": [8, 8, 8]}, r"\[8, 8, 8\]"),
        ({"row_lengths": [8, 0]}, "0"),
        ({"row_lengths": [8, 8.5]}, r"8\.5"),
        ({"row_lengths": [8, 2**23]}, str(2**23)),
        ({"overlong": "split"}, "split"),
        ({"lengths": [[3, 4], [0, 5]]}, r"id 1\D+0, 5"),
        ({"lengths": [[3], [5]]}, r"\(2, 1\)"),
        ({"lengths": [[3.0, 4.0]]}, "float64"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(package, arguments, named):
    """Everything outside its range is a ValueError that says what."""
    valid = {"lengths": [[3, 4], [5, 8]], "row_lengths": [8, 8]}
    with pytest.raises(ValueError, match=named):
        package.pack_samples(**(valid | arguments))


def test_what_does_not_fit_is_listed(package):
    """Samples above a row in any feature, and rows above every bucket, by id, lengths and limit."""
    lengths = [[3, 9], [1, 1], [9, 3]]
    with pytest.raises(ValueError, match=r"id 0\D+3, 9.*id 2\D+9, 3.*8"):
        package.pack_samples(lengths, (8, 8), order="length")
    with pytest.raises(ValueError, match=r"drop.*id 0\D+9, 9"):
        package.pack_samples([[9, 9]], (8, 8), overlong="drop")
    assert package.make_plan(lengths, [(1, 8, 8)], packing="best_fit", overlong="truncate").num_truncated == 2
    with pytest.raises(ValueError, match=r"pairs|lengths"):
        package.make_plan(lengths, [(1, 8)], packing="best_fit", overlong="truncate")


def test_packed_pairs_have_the_one_bucket_of_their_rows(package):
    pairs = np.random.default_rng(0).integers(1, 60, (300, 2))
    budget = {"max_tokens": 1024, "num_microbatches": 2, "row_multiple": 2, "max_sequences": 7}
    plan = package.make_plan(pairs, **budget, packing="best_fit", row_lengths=(128, 96))
    num_rows = package.pack_samples(pairs, (128, 96), order="shuffle").num_rows
    cap = 4  # 1024 // (128 + 96), and a multiple of 2
    num_steps = math.ceil(num_rows / (2 * cap))
    rows = min(cap, 2 * math.ceil(math.ceil(num_rows / (2 * num_steps)) / 2))
    assert [tuple(bucket) for bucket in plan.buckets.shapes] == [(rows, 128, 96)]
    chosen = package.make_plan(pairs, **budget, packing="best_fit")
    (bucket,) = chosen.buckets.shapes
    assert package.make_plan(pairs, **budget, packing="best_fit", row_lengths=bucket[1:]).digest == chosen.digest
    with pytest.raises(ValueError, match="max_tokens 200 leaves no row of 128"):
        package.make_plan(pairs, max_tokens=200, packing="best_fit", row_lengths=(128, 96))
