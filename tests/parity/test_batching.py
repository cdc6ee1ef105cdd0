"""Token-budget batching: which samples share a batch, within which limits, and in which shape."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from . import in_both
from .inputs import ORDERS, as_arrays, batches_of, batching_arguments, many, moderate, offenders

limited = batching_arguments(shaped=False)
shaped = batching_arguments(shaped=True)


def make_batches(package, arguments):
    return package.batch_by_tokens(**as_arrays(arguments))


@many
@given(arguments=st.one_of(limited, shaped))
# A tail that the next sample breaks (padded, then sum), one that it joins, and one at the end of the order.
@example(arguments={"lengths": [1, 1, 1, 4], "max_tokens": 4, "sequence_multiple": 2})
@example(arguments={"lengths": [1, 1, 1, 4], "max_tokens": 4, "sequence_multiple": 2, "budget": "sum"})
@example(arguments={"lengths": [1, 1, 1, 2], "max_tokens": 4, "sequence_multiple": 2})
@example(arguments={"lengths": [1, 1, 1], "max_tokens": 4, "sequence_multiple": 2})
def test_both_batch_alike(arguments):
    """With every budget, limit, multiple, order and shape."""
    one, other = in_both(lambda package: batches_of(make_batches(package, arguments)))
    assert one == other


@moderate
@given(arguments=st.one_of(limited, shaped))
def test_every_sample_of_the_order_is_in_exactly_one_batch(package, arguments):
    """In order, no batch empty; sizes and types as the contract says."""
    batches = make_batches(package, arguments)
    options = {name: arguments[name] for name in ("order", "seed", "epoch")}
    assert batches.sample_ids.tolist() == package.sample_order(arguments["lengths"], **options).tolist()
    assert batches.offsets[0] == 0
    assert batches.offsets[-1] == len(batches.sample_ids)
    assert (batches.num_sequences >= 1).all()
    assert np.array_equal(batches.num_sequences, np.diff(batches.offsets))
    assert batches.num_batches == len(batches.num_sequences)
    assert batches.sample_ids.dtype == batches.offsets.dtype == batches.num_sequences.dtype == np.int64
    if "shapes" in arguments:
        assert batches.shape_index.dtype == np.int32
        assert batches.shape_index.shape == (batches.num_batches,)
    else:
        assert batches.shape_index is None


def test_buckets_are_shapes(package):
    """Those of `make_buckets` can be passed on."""
    lengths = np.random.default_rng(3).integers(1, 100, 500)
    buckets = package.make_buckets(lengths, 1000, max_shapes=4).shapes
    batches = package.batch_by_tokens(lengths, 1000, shapes=buckets)
    for (ids, shape), expected in zip(batches_of(batches), batches.num_sequences, strict=True):
        assert len(ids) == expected <= buckets[shape].rows
        assert lengths[ids].max() <= buckets[shape].length
    assert len(set(batches.shape_index.tolist())) > 1


def test_batches_of_narrow_integers_do_not_overflow(package):
    """Lengths and limits may be NumPy integers of any width."""
    lengths = np.full(300, 100, dtype=np.int8)
    for budget in ("padded", "sum"):
        batches = package.batch_by_tokens(
            lengths, np.int16(20_000), budget=budget, max_sequences=np.uint8(250), sequence_multiple=np.int8(3)
        )
        assert batches.num_sequences.tolist() == [198, 102]
    assert package.batch_by_tokens(lengths, 1, shapes=np.array([[9, 99], [7, 127]])).num_batches == 43


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 64.0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": 0, "shapes": [(2, 8)]}, "max_tokens"),
        ({"max_sequences": 0}, "max_sequences"),
        ({"max_sequences": 2.0}, "max_sequences"),
        ({"sequence_multiple": 0}, "sequence_multiple"),
        ({"sequence_multiple": None}, "sequence_multiple"),
        ({"budget": "tokens"}, "budget"),
        ({"shapes": []}, "shape"),
        ({"shapes": [(2, 8, 1)]}, "shape"),
        ({"shapes": [(2, 8), (2,)]}, "shape"),
        ({"shapes": [(0, 8)]}, "shape"),
        ({"shapes": [(2, 8), (-2, 8)]}, "shape"),
        ({"shapes": [(2, 8.0)]}, "shape"),
        ({"lengths": []}, "length"),
        ({"lengths": [3, 0]}, r"\b1\b"),
        ({"order": "longest"}, "longest"),
        ({"order": [0, 3]}, "3"),
        ({"seed": -1}, "seed"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(package, arguments, named):
    """Everything outside its range is a ValueError that says what."""
    valid = {"lengths": [3, 5, 8], "max_tokens": 64}
    with pytest.raises(ValueError, match=named):
        package.batch_by_tokens(**(valid | arguments))


@pytest.mark.parametrize(
    ("limits", "limit"),
    [({"max_tokens": 500}, 500), ({"max_tokens": 500, "budget": "sum"}, 500), ({"shapes": [(9, 100), (1, 700)]}, 700)],
    ids=str,
)
@pytest.mark.parametrize("order", [*ORDERS, "array"])
def test_samples_above_the_limit_are_listed(package, limits, limit, order):
    """By id, value and limit, in ascending order of ids; the first few of many."""
    lengths = np.full(900, 10)
    lengths[[234, 567]] = [2002, 1001]
    arguments = {"max_tokens": 1, "order": np.arange(900)[::-1] if order == "array" else order} | limits
    with pytest.raises(ValueError, match=offenders((234, 2002), (567, 1001), limit=limit)):
        package.batch_by_tokens(lengths, **arguments)
    with pytest.raises(ValueError, match=r"\b0\D+1000\b") as caught:
        package.batch_by_tokens(lengths + 990, **arguments)
    assert len(str(caught.value)) < 1000
