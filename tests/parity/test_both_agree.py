"""The two packages against each other, on inputs too large for the slow transcription."""

import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from . import PACKAGES, find
from .inputs import ORDERS, for_plan, moderate

pytestmark = pytest.mark.skipif(len(PACKAGES) < 2, reason="PARITY_PACKAGES names only one package")

STRATEGIES = ("pad_to_max", "powers_of_two", "geometric", "quantile", "equal_tokens", "optimal")
SIZE = 4_000


@pytest.fixture(scope="module")
def both():
    return [importlib.import_module(name) for name in PACKAGES]


def inputs(seed):
    """Return lengths with a long tail, and difficulties of three kinds."""
    rng = np.random.default_rng(seed)
    return {
        "lengths": np.minimum(rng.zipf(1.4, SIZE) + rng.integers(0, 30, SIZE), 5000),
        "integers": rng.integers(2**60, 2**60 + 5000, SIZE),
        "floats": rng.normal(size=SIZE).round(2),
        "subset": rng.permutation(SIZE)[: SIZE // 3],
    }


def timed_cost(rows, length):
    return 15e-6 + rows * length * (0.219e-6 + 1.3e-10 * length)


def assert_equal_plans(plans):
    """Hold two plans equal in all that a trainer sees."""
    one, other = plans
    assert one.digest == other.digest
    assert [tuple(bucket) for bucket in one.buckets] == [tuple(bucket) for bucket in other.buckets]
    for name in ("step_bucket", "step_offsets", "sample_ids", "num_sequences", "num_tokens"):
        assert getattr(one, name).dtype == getattr(other, name).dtype
        assert np.array_equal(getattr(one, name), getattr(other, name))
    assert (one.row_offsets is None) == (other.row_offsets is None)
    if one.row_offsets is not None:
        assert one.row_offsets.dtype == other.row_offsets.dtype
        assert np.array_equal(one.row_offsets, other.row_offsets)
    assert one.neighbour_correlation == pytest.approx(other.neighbour_correlation, abs=1e-9, nan_ok=True)
    for name in ("num_steps", "num_samples", "num_rows", "microbatches_per_step", "overlong", "num_dropped"):
        assert getattr(one, name) == getattr(other, name)
    assert one.padding == pytest.approx(other.padding, abs=1e-12)
    for step in range(one.num_steps):
        assert np.array_equal(one.rows(step), other.rows(step))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_both_choose_the_same_buckets(both, strategy):
    """Every strategy, with and without multiples."""
    lengths = inputs(0)["lengths"]
    cut = {"max_length": 2048, "overlong": "truncate", "length_multiple": 4}
    for options in ({}, {"row_multiple": 8, "length_multiple": 16}, cut):
        one, other = (
            package.make_buckets(lengths, 16_384, strategy=strategy, max_shapes=12, microbatches_per_step=3, **options)
            for package in both
        )
        assert [tuple(bucket) for bucket in one] == [tuple(bucket) for bucket in other]


@pytest.mark.parametrize("compile_seconds", [None, 0.01])
def test_both_weigh_seconds_alike(both, compile_seconds):
    """A cost that rounds: the same sums in the same order."""
    lengths = inputs(1)["lengths"]
    one, other = (
        package.make_buckets(
            lengths, 16_384, max_shapes=24, length_multiple=8, cost=timed_cost, compile_seconds=compile_seconds
        )
        for package in both
    )
    assert [tuple(bucket) for bucket in one] == [tuple(bucket) for bucket in other]


def test_both_reuse_the_same_shapes(both):
    """The shapes of other lengths, and many that fit badly or not at all."""
    options = {"max_shapes": 24, "length_multiple": 8, "microbatches_per_step": 2}
    options |= {"cost": timed_cost, "compile_seconds": 0.01}
    shapes = both[0].make_buckets(inputs(1)["lengths"], 16_384, **options)
    rows, lengths = np.random.default_rng(3).integers((1, 1), (200, 700), (300, 2)).T
    compiled = [*shapes, *zip(rows, 8 * lengths, strict=True)]
    one, other = (package.make_buckets(inputs(4)["lengths"], 16_384, compiled=compiled, **options) for package in both)
    assert [tuple(bucket) for bucket in one] == [tuple(bucket) for bucket in other]
    assert set(one) & set(shapes)


@pytest.mark.parametrize("order", [*ORDERS, "subset"])
@pytest.mark.parametrize(
    ("difficulty", "shuffle_steps"), [(None, False), (None, True), ("integers", False), ("floats", True)]
)
def test_both_make_the_same_plan(both, order, difficulty, shuffle_steps):
    """The same rows in every step, the same counts, the same digest."""
    drawn = inputs(2)
    buckets = both[1].make_buckets(drawn["lengths"], 16_384, max_shapes=12, microbatches_per_step=4)
    plans = [
        package.make_plan(
            drawn["lengths"],
            buckets,
            microbatches_per_step=4,
            order=package.Order(
                drawn["subset"] if order == "subset" else order,
                shuffle_steps=shuffle_steps,
                longest_first=shuffle_steps,
            ),
            difficulty=None if difficulty is None else drawn[difficulty],
            seed=2**40 + 7,
            epoch=3,
        )
        for package in both
    ]
    assert_equal_plans(plans)


@pytest.mark.parametrize(("order", "new_shape_every"), [("shuffle", 1), ("subset", 10), ("length_descending", 2000)])
def test_both_let_shapes_come_one_by_one(both, order, new_shape_every):
    """Of samples, of packed rows and of pairs."""
    drawn, pairs = inputs(16), pair_lengths(16)
    buckets = both[1].make_buckets(drawn["lengths"], 8192, max_shapes=12)
    pair_buckets = both[1].make_pair_buckets(pairs, 4096, max_shapes=8, max_candidates=12)
    for shuffle_steps in (False, True):
        options = {"seed": 3, "shuffle_steps": shuffle_steps, "new_shape_every": new_shape_every}
        options |= {"order": drawn["subset"] if order == "subset" else order, "longest_first": shuffle_steps}
        for lengths, shapes in ((drawn["lengths"], buckets), (pairs, pair_buckets)):
            plans = [package.make_plan(lengths, shapes, **for_plan(package, options)) for package in both]
            assert plans[0].digest == plans[1].digest
        packings = [package.pack_samples(drawn["lengths"], (500, 5000)) for package in both]
        row_buckets = [(16, 500), (1, 5000)]
        options["order"] = "dataset" if order == "subset" else order
        packed = [
            package.make_plan(packing, row_buckets, **for_plan(package, options))
            for package, packing in zip(both, packings, strict=True)
        ]
        assert packed[0].digest == packed[1].digest


@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_both_treat_overlong_samples_alike(both, overlong):
    """The same samples dropped or cut."""
    lengths = inputs(3)["lengths"]
    plans = [
        package.make_plan(lengths, [(8, 20), (4, 100), (1, 1000)], order="shuffle", overlong=overlong, seed=1)
        for package in both
    ]
    assert_equal_plans(plans)
    assert plans[0].num_dropped + plans[0].num_truncated > 0


def memory_bytes(rows, length):
    """Return bytes of a microbatch: activations of each token and the scores of attention."""
    return 1e6 + rows * length * (4096.0 + 8.0 * length)


@pytest.mark.parametrize("strategy", [*STRATEGIES, (16, 60, 250, 1000, 4096)], ids=str)
def test_both_keep_the_same_limits(both, strategy):
    """Of cost and of bytes, for every strategy and for given edges, with each rule for long samples."""
    options = {"microbatches_per_step": 4, "row_multiple": 8, "length_multiple": 4, "max_shapes": 12}
    options |= {"cost": timed_cost, "max_cost": 0.008, "memory": memory_bytes, "max_bytes": 3e8, "max_length": 4096}
    for overlong in ("truncate", "drop"):
        one, other = (
            package.make_buckets(inputs(8)["lengths"], 65_536, strategy=strategy, overlong=overlong, **options)
            for package in both
        )
        assert [tuple(bucket) for bucket in one] == [tuple(bucket) for bucket in other]
        assert any(rows * length < 40_000 for rows, length in one)


def test_both_fit_the_same_cost_model(both):
    """To the rounding of the solver, from noisy measurements."""
    rng = np.random.default_rng(9)
    shapes = [(max(1, 16_384 // length), length) for length in (16, 32, 100, 256, 700, 2048, 5000)]
    measured = [timed_cost(*shape) * rng.uniform(0.9, 1.1) for shape in shapes]
    one, other = (package.fit_cost_model(shapes, measured) for package in both)
    for name in ("constant", "linear", "quadratic", "largest_error"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=1e-6)


@pytest.mark.parametrize(("order", "block_size"), [*((order, 64) for order in ORDERS), ("subset", 5000)])
def test_both_shuffle_the_same_blocks(both, order, block_size):
    """The same order and the same plan."""
    drawn = inputs(10)
    by, options = drawn["subset"] if order == "subset" else order, {"seed": 2**40 + 7, "epoch": 3}
    in_blocks = [package.Order(by, block_size=block_size) for package in both]
    one, other = (
        package.sample_order(drawn["lengths"], each, **options) for package, each in zip(both, in_blocks, strict=True)
    )
    assert np.array_equal(one, other)
    buckets = both[1].make_buckets(drawn["lengths"], 16_384, max_shapes=12)
    assert_equal_plans(
        [
            package.make_plan(drawn["lengths"], buckets, order=each, **options)
            for package, each in zip(both, in_blocks, strict=True)
        ]
    )


PACINGS = {
    "linear_pacing": {"initial": 0.05},
    "root_pacing": {"initial": 0.05, "degree": 3},
    "competence_pacing": {"initial": 0.01},
    "discrete_pacing": {"num_stages": 7, "initial": 0.2},
}


@pytest.mark.parametrize("name", PACINGS)
@pytest.mark.parametrize(("order", "difficulty"), [("length", "floats"), ("length_descending", None)])
def test_both_pace_alike(both, name, order, difficulty):
    """Each with its own pacing function, over the epochs of a run."""
    drawn = inputs(11)
    buckets = both[1].make_buckets(drawn["lengths"], 16_384, max_shapes=12, microbatches_per_step=2)
    for epoch in range(3):
        plans = [
            package.make_plan(
                drawn["lengths"],
                buckets,
                microbatches_per_step=2,
                order=order,
                difficulty=None if difficulty is None else drawn[difficulty],
                seed=5,
                epoch=epoch,
                pacing=find(package, name)(150, **PACINGS[name]),
            )
            for package in both
        ]
        assert plans[0].digest == plans[1].digest
    assert_equal_plans(plans)


@pytest.fixture(scope="module")
def row_lengths(both):
    """Chosen by each package for some of the lengths."""
    lengths = inputs(12)["lengths"][::8]
    return [
        find(package, "choose_row_lengths")(lengths, 16_384, max_length=2048, overlong="truncate", max_shapes=3)
        for package in both
    ]


@pytest.mark.parametrize(("order", "overlong"), [("shuffle", "drop"), ("subset", "truncate"), ("dataset", "drop")])
def test_both_pack_alike(both, row_lengths, order, overlong):
    """The same rows of the same lengths, and the same plans of them."""
    drawn = inputs(12)
    assert row_lengths[0] == row_lengths[1]
    one, other = packings = [
        package.pack_samples(
            drawn["lengths"],
            chosen,
            order=drawn["subset"] if order == "subset" else order,
            seed=3,
            epoch=1,
            overlong=overlong,
        )
        for package, chosen in zip(both, row_lengths, strict=True)
    ]
    for name in ("sample_ids", "row_offsets", "sample_lengths", "capacity", "num_tokens", "starts"):
        assert getattr(one, name).dtype == getattr(other, name).dtype
        assert np.array_equal(getattr(one, name), getattr(other, name))
    for name in ("num_rows", "row_lengths", "overlong", "num_dropped", "num_truncated"):
        assert getattr(one, name) == getattr(other, name)
    assert one.fill == pytest.approx(other.fill, abs=1e-12)
    assert one.fill > 0.98
    buckets = both[0].make_buckets(one.num_tokens, 16_384, strategy=row_lengths[0], microbatches_per_step=2)
    for plan_order, block_size in (("length", None), ("shuffle", None), ("shuffle", 50), ("dataset", None)):
        options = {"microbatches_per_step": 2, "order": plan_order, "block_size": block_size, "seed": 1}
        assert_equal_plans(
            [
                package.make_plan(packing, buckets, **for_plan(package, options))
                for package, packing in zip(both, packings, strict=True)
            ]
        )


@pytest.mark.parametrize(("cost", "max_shapes"), [(None, 1), (None, 4), (timed_cost, 16)])
def test_both_choose_the_same_row_lengths(both, cost, max_shapes):
    """In tokens and in seconds, with limits and multiples."""
    lengths = inputs(13)["lengths"][::16]
    options = {} if cost is None else {"cost": cost, "compile_seconds": 0.05, "max_cost": 0.02}
    one, other = (
        find(package, "choose_row_lengths")(
            lengths, 16_384, max_shapes=max_shapes, length_multiple=8, microbatches_per_step=4, **options
        )
        for package in both
    )
    assert one == other


@moderate
@given(
    lengths=st.lists(st.integers(1, 60), min_size=9, max_size=60),
    max_shapes=st.integers(2, 6),
    max_sets=st.integers(1, 60),
    length_multiple=st.sampled_from([1, 3]),
    num_microbatches=st.integers(1, 3),
)
def test_both_search_alike_where_not_all_row_lengths_are_tried(
    both, lengths, max_shapes, max_sets, length_multiple, num_microbatches
):
    """With limits far below the real ones, so that these end the search at any point."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("jvarlen.planning.row_lengths._MAX_SETS", max_sets)
        patched.setattr("torch_ref.row_lengths._MOST_SETS", max_sets)
        one, other = (
            find(package, "choose_row_lengths")(
                lengths,
                180,
                max_shapes=max_shapes,
                length_multiple=length_multiple,
                microbatches_per_step=num_microbatches,
            )
            for package in both
        )
    assert one == other


def pair_lengths(seed):
    """Return sentences and their translations, of related but not equal lengths."""
    rng = np.random.default_rng(seed)
    source = np.clip(rng.lognormal(3.0, 0.6, SIZE).round(), 1, 250).astype(np.int64)
    target = np.clip((source * rng.lognormal(0.05, 0.25, SIZE)).round(), 1, 250).astype(np.int64)
    return np.stack([source, target], axis=1)


@pytest.mark.parametrize("budget", ["sum", "larger"])
@pytest.mark.parametrize("max_candidates", [12, 40])
def test_both_choose_the_same_pair_buckets(both, budget, max_candidates):
    """And make the same plans of them."""
    lengths = pair_lengths(14)
    for options in ({"max_shapes": 5}, {"max_shapes": 16, "row_multiple": 8, "length_multiple": 4}):
        one, other = (
            package.make_pair_buckets(
                lengths, 8192, budget=budget, max_candidates=max_candidates, microbatches_per_step=2, **options
            )
            for package in both
        )
        assert [tuple(bucket) for bucket in one] == [tuple(bucket) for bucket in other]
        assert len(one) > 4
    for order in ORDERS:
        plans = [
            package.make_plan(
                lengths, one, microbatches_per_step=2, order=package.Order(order, longest_first=True), seed=4
            )
            for package in both
        ]
        assert_equal_plans(plans)
    assert_equal_plans(
        [package.make_plan(lengths, [(64, 20, 30), (32, 60, 50)], order="length", overlong="drop") for package in both]
    )


@pytest.mark.parametrize("max_waiting", [None, 500])
@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_both_stream_alike(both, max_waiting, overlong):
    """The same buckets and steps."""
    lengths = inputs(15)["lengths"]
    streams = [
        package.stream_batches(
            iter(lengths),
            max_tokens=8192,
            num_estimate=2000,
            max_length=3000,
            max_shapes=8,
            microbatches_per_step=2,
            row_multiple=4,
            max_waiting=max_waiting,
            overlong=overlong,
        )
        for package in both
    ]
    assert [tuple(bucket) for bucket in streams[0].buckets] == [tuple(bucket) for bucket in streams[1].buckets]
    num_steps = 0
    for one, other in zip(*streams, strict=True):
        assert one.bucket_index == other.bucket_index
        for name in ("ids", "lengths"):
            assert getattr(one, name).dtype == getattr(other, name).dtype
            assert np.array_equal(getattr(one, name), getattr(other, name))
        num_steps += 1
    assert num_steps > 20
    for name in ("num_read", "num_dropped", "num_truncated"):
        assert getattr(streams[0], name) == getattr(streams[1], name)
    assert streams[0].num_dropped + streams[0].num_truncated > 0


def assert_equal_batches(batches):
    """Hold two results of `batch_by_tokens` equal, types included."""
    one, other = batches
    for name in ("sample_ids", "offsets", "num_sequences", "shape_index"):
        if getattr(one, name) is None:
            assert getattr(other, name) is None
        else:
            assert getattr(one, name).dtype == getattr(other, name).dtype
            assert np.array_equal(getattr(one, name), getattr(other, name))
    assert one.num_batches == other.num_batches > 1


@pytest.mark.parametrize("order", ["shuffle", "subset"])
@pytest.mark.parametrize("budget", ["padded", "sum"])
@pytest.mark.parametrize("sequence_multiple", [1, 8, 100])
def test_both_make_the_same_batches(both, order, budget, sequence_multiple):
    """From batches of a few samples to batches of thousands."""
    drawn = inputs(5)
    for max_tokens in (5000, 16_384, 200_000):
        for max_sequences in (None, 37, 1000):
            batches = [
                package.batch_by_tokens(
                    drawn["lengths"],
                    max_tokens,
                    order=drawn["subset"] if order == "subset" else order,
                    budget=budget,
                    max_sequences=max_sequences,
                    sequence_multiple=sequence_multiple,
                    seed=2**40 + 7,
                    epoch=3,
                )
                for package in both
            ]
            assert_equal_batches(batches)


@pytest.mark.parametrize("order", ["shuffle", "subset"])
def test_both_choose_the_same_shapes_for_batches(both, order):
    """Planned buckets, and shapes of which some hold nothing that others do not, in no order."""
    drawn = inputs(6)
    rng = np.random.default_rng(7)
    scattered = [(int(2 ** rng.integers(0, 10)), int(2 ** rng.integers(0, 13))) for _ in range(40)]
    for shapes in (both[0].make_buckets(drawn["lengths"], 16_384), [*scattered, (1, 5000), (2, 5000), (1, 5000)]):
        batches = [
            package.batch_by_tokens(
                drawn["lengths"], 1, order=drawn["subset"] if order == "subset" else order, shapes=shapes, seed=1
            )
            for package in both
        ]
        assert_equal_batches(batches)
        assert len(set(batches[0].shape_index.tolist())) > 3


@pytest.mark.parametrize("rule", ["linear", "sqrt", None, np.log1p])
@pytest.mark.parametrize("unit", ["sequences", "tokens"])
def test_both_give_the_same_learning_rates(both, rule, unit):
    """To 1e-12 in float64."""
    lengths = inputs(4)["lengths"]
    plan = both[0].make_plan(lengths, [(64, 16), (16, 100), (2, 5000)], order="shuffle")
    for base in (3e-4, lambda t: 3e-4 * 0.99**t, np.linspace(1e-3, 1e-5, plan.num_steps)):
        one, other = (package.lr_sequence(plan, base, 256, rule=rule, unit=unit) for package in both)
        assert one.dtype == other.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=0)


def test_both_export_the_planning_names(both):
    """The same names for the planning part."""
    names = {"Bucket", "Plan", "batch_by_tokens", "check_lengths", "lr_scale", "lr_sequence"}
    names |= {"make_buckets", "make_plan", "sample_order"}
    names |= {"CostModel", "Packing", "PairBucket", "choose_row_lengths", "fit_cost_model", "make_pair_buckets"}
    names |= {"competence_pacing", "discrete_pacing", "linear_pacing", "root_pacing", "pack_samples", "stream_batches"}
    for package in both:
        assert all(find(package, name) for name in names)
