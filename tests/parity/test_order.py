"""Orders: which sample comes when, with ties, difficulties and random keys."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import find, in_both
from .inputs import ORDERS, difficulties, few, lengths, moderate, offenders, seeds


@moderate
@given(
    data=st.data(),
    order=st.sampled_from(ORDERS),
    seed=seeds,
    epoch=seeds,
    block_size=st.one_of(st.none(), st.integers(1, 50), st.just(2**62)),
)
def test_both_order_alike(data, order, seed, epoch, block_size):
    """All named orders, block by block where there are blocks; and the sorted ones as Python sorts."""
    given_lengths = data.draw(lengths)
    difficulty = data.draw(difficulties(given_lengths))
    array = None if difficulty is None else np.array(difficulty)

    def ordered(package):
        in_blocks = package.Order(order, block_size=block_size)
        ids = package.sample_order(np.array(given_lengths), in_blocks, difficulty=array, seed=seed, epoch=epoch)
        assert ids.dtype == np.int64
        return ids.tolist()

    one, other = in_both(ordered)
    assert one == other
    values = given_lengths if difficulty is None else difficulty
    if block_size is None and order == "length":
        assert one == sorted(range(len(values)), key=lambda i: (values[i], i))
    if block_size is None and order == "length_descending":
        assert one == sorted(range(len(values)), key=lambda i: (values[i], -i))[::-1]


@few
@given(data=st.data(), seed=seeds, block_size=st.integers(1, 12))
def test_blocks_of_an_order_array_are_its_places(data, seed, block_size):
    """Cut by place, shuffled by each sample's own key."""
    permuted = data.draw(st.permutations(range(30)))
    subset = permuted[: data.draw(st.integers(1, 30))]
    ids, other = in_both(
        lambda package: package.sample_order(
            [1] * 30, package.Order(np.array(subset), block_size=block_size), seed=seed
        ).tolist()
    )
    assert ids == other
    for start in range(0, len(subset), block_size):
        assert sorted(ids[start : start + block_size]) == sorted(subset[start : start + block_size])


@pytest.mark.parametrize("bad", [0, -1, 2.5, "8", True])
def test_bad_block_sizes_are_refused(package, bad):
    """An integer of at least 1."""
    for order in ORDERS:
        with pytest.raises(ValueError, match="block_size"):
            package.sample_order([1, 2, 3], package.Order(order, block_size=bad))


@pytest.mark.parametrize("switch", ["shuffle_steps", "longest_first"])
@pytest.mark.parametrize("bad", ["no", 1, None])
def test_switches_that_are_neither_on_nor_off_are_refused(package, switch, bad):
    with pytest.raises(ValueError, match=rf"{switch}\b.* must be True or False"):
        package.Order("length", **{switch: bad})


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64"]
)
def test_any_real_dtype_sorts_by_value(package, dtype):
    """Difficulties of every width sort by value, unsigned ones included."""
    info = np.finfo(dtype) if dtype.startswith("float") else np.iinfo(dtype)
    difficulty = np.array([info.max, 3, info.min, 0, info.max, 1, 3], dtype=dtype)
    values = difficulty.tolist()
    expected = sorted(range(7), key=lambda i: (values[i], i)), sorted(range(7), key=lambda i: (values[i], -i))[::-1]
    found = [package.sample_order([1] * 7, order, difficulty=difficulty) for order in ("length", "length_descending")]
    assert tuple(ids.tolist() for ids in found) == expected


def test_shuffles_differ_by_seed_and_by_epoch(package):
    """Seed and epoch are separate halves of the key, not summed or swapped."""
    ones = np.ones(100, dtype=np.int64)
    shuffles = {
        tuple(package.sample_order(ones, "shuffle", seed=seed, epoch=epoch).tolist())
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(shuffles) == 9


@few
@given(data=st.data())
def test_an_order_array_is_taken_as_it_is(package, data):
    """Unique ids in any order, some left out."""
    permuted = data.draw(st.permutations(range(9)))
    subset = permuted[: data.draw(st.integers(1, 9))]
    for dtype in (np.int64, np.int32, np.uint8):
        ids = package.sample_order([1] * 9, np.array(subset, dtype=dtype))
        assert ids.dtype == np.int64
        assert ids.tolist() == subset


@pytest.mark.parametrize(
    "bad",
    [
        [],
        np.empty(0, dtype=np.int64),
        5,
        [[1, 2], [3, 4]],
        [1.0, 2.0],
        [True, False],
        ["1", "2"],
        [None, 1],
        [1 + 0j],
        [2**64, 1],
        None,
    ],
    ids=repr,
)
def test_what_is_not_a_list_of_lengths_is_refused(package, bad):
    """Empty, not 1-D, or not integers."""
    with pytest.raises(ValueError, match="length"):
        find(package, "check_lengths")(bad)
    with pytest.raises(ValueError, match="length"):
        package.sample_order(bad)


def test_bad_lengths_are_listed_with_id_and_value(package):
    """The first offenders by id, value and limit; not all of ten thousand."""
    values = np.full(1000, 5)
    values[777], values[888] = -41, 0
    with pytest.raises(ValueError, match=offenders((777, -41), (888, 0), limit=1)):
        find(package, "check_lengths")(values)
    with pytest.raises(ValueError, match=r"\b0\b") as caught:
        find(package, "check_lengths")(np.zeros(10_000, dtype=np.int64))
    assert len(str(caught.value)) < 1000
    with pytest.raises(ValueError, match=r"\b1\b.*9223372036854775808"):
        find(package, "check_lengths")(np.array([1, 2**63], dtype=np.uint64))


@pytest.mark.parametrize(
    "bad",
    [
        [1.0, np.nan, 2.0],
        [True, False, True],
        [1j, 2, 3],
        [[[1, 2, 3]]],
        [[1, 2], [1, 2]],
        [[1.0, 2.0, 3.0], [1.0, 2.0, np.nan]],
        [1, 2],
        [1, 2, 3, 4],
        7,
        ["a", "b", "c"],
    ],
    ids=repr,
)
def test_bad_difficulties_are_refused(package, bad):
    """NaN, bools, complex numbers, text, wrong sizes; whatever the order."""
    for order in ORDERS:
        with pytest.raises(ValueError, match="difficulty"):
            package.sample_order([1, 2, 3], order, difficulty=np.array(bad))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ("random", "random"),
        ([0, 1, 3], "3"),
        ([0, -1, 1], "-1"),
        ([0, 2, 2], "2"),
        ([], "order"),
        ([[0, 1, 2]], "order"),
        ([0.0, 1.0, 2.0], "order"),
        ([True, False], "order"),
        (None, "order"),
    ],
    ids=repr,
)
def test_bad_orders_are_refused_by_name(package, bad, named):
    """Unknown names; arrays with repeats, ids out of range, no ids, or no integers."""
    with pytest.raises(ValueError, match=named):
        package.sample_order([1, 2, 3], bad)


@pytest.mark.parametrize("name", ["seed", "epoch"])
@pytest.mark.parametrize("bad", [-1, 2**63, 2**64])
def test_seed_and_epoch_outside_63_bits_are_refused(package, name, bad):
    """0 <= seed, epoch < 2**63."""
    with pytest.raises(ValueError, match=name):
        package.sample_order([1, 2, 3], "shuffle", **{name: bad})
