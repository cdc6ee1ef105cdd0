"""packing="auto": padded shapes, packed shapes or one packed shape, by the seconds of an epoch."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jvarlen
import torch_ref

from . import find
from .inputs import dyadic_cost

LENGTHS = np.random.default_rng(0).lognormal(3.0, 0.9, 400).astype(np.int64).clip(1, 128)
BUDGET = {"max_tokens": 512, "max_shapes": 4, "length_multiple": 4, "num_microbatches": 2}


def seconds_of(package, plan, lengths, cost, compile_seconds):
    """Microbatch by microbatch; a sample of packed rows attends to itself alone."""
    total = compile_seconds * len(plan.buckets.shapes)
    for step in range(plan.num_steps):
        rows, length = plan.buckets.shapes[plan.step_bucket[step]]
        for ids in plan.rows(step):
            if plan.row_offsets is not None and isinstance(cost, find(package, "CostModel")):
                pairs = int((np.minimum(lengths[ids[ids >= 0]], plan.buckets.shapes[-1][1]) ** 2).sum())
                total += cost.constant + cost.linear * rows * length + cost.quadratic * pairs
            else:
                total += float(cost(rows, length))
    return total


def ways(package, lengths, **arguments):
    """The plans that are to be compared, in the order in which equal ones win."""
    plans = [package.make_plan(lengths, **arguments)]
    plans.append(package.make_plan(lengths, **arguments | {"max_shapes": 1, "packing": "best_fit"}))
    return [*plans, package.make_plan(lengths, **arguments, packing="best_fit")]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=20),
    coefficients=st.tuples(*[st.sampled_from([0.0, 0.25, 8.0])] * 3).filter(any) | st.none(),
    compile_seconds=st.sampled_from([0.0, 2.0, 64.0, 4096.0]),
    overlong=st.sampled_from(["error", "truncate"]),
    seed=st.integers(0, 2),
    epoch=st.integers(0, 1),
)
@example([7, 7, 7, 7], (0.0, 1.0, 0.0), 0.0, "error", 0, 0)  # equal: padded
@settings(deadline=None, max_examples=12)
def test_the_fewest_seconds_win_alike_in_both_packages(lengths, coefficients, compile_seconds, overlong, seed, epoch):
    lengths = np.array(lengths)
    arguments = BUDGET | {"max_tokens": 64, "compile_seconds": compile_seconds, "overlong": overlong, "seed": seed}
    arguments["max_shapes"] = 2
    arguments["max_length"] = 40 if overlong == "truncate" else None
    plans = []
    for package in (jvarlen, torch_ref):
        cost = dyadic_cost if coefficients is None else find(package, "CostModel")(*coefficients)
        plan = package.make_plan(lengths, packing="auto", epoch=epoch, cost=cost, **arguments)
        tried = ways(package, lengths, cost=cost, **arguments)
        if plan.padding and coefficients is not None and tried[1].padding <= 0.01:
            tried.pop()
        seconds = [seconds_of(package, each, lengths, cost, compile_seconds) for each in tried]
        best = tried[next(i for i, each in enumerate(seconds) if each <= min(seconds) * (1 + 1e-9))]
        assert plan.buckets == best.buckets
        assert (plan.row_offsets is None) == (best.row_offsets is None)
        assert epoch or plan.digest == best.digest
        assert plan.reason
        assert plan.reason in plan.report()
        plans.append(plan)
    assert plans[0].digest == plans[1].digest


@pytest.mark.parametrize(
    ("lengths", "linear", "quadratic", "compile_seconds", "is_packed", "num_shapes"),
    [
        (LENGTHS, 1e-3, 0.0, 0.0, True, 1),
        (LENGTHS, 1e-6, 1e-3, 1e3, True, 1),
        ([128] * 40 + [100] * 200, 1e-3, 0.0, 0.0, False, 2),  # no two of which fit into a row
        ([128] * 4 + [52] * 4 + [45] * 200 + [5] * 200, 1e-3, 0.0, 0.0, True, 2),
        ([128] * 4 + [52] * 4 + [45] * 200 + [5] * 200, 1e-3, 0.0, 1e3, True, 1),
    ],
)
def test_each_way_is_chosen_where_it_is_fastest(
    package, lengths, linear, quadratic, compile_seconds, is_packed, num_shapes
):
    cost = find(package, "CostModel")(0.0, linear, quadratic)
    options = BUDGET | {"max_length": 128, "compile_seconds": compile_seconds}
    plan = package.make_plan(lengths, packing="auto", cost=cost, **options)
    assert (plan.row_offsets is not None, len(plan.buckets.shapes)) == (is_packed, num_shapes)


@pytest.mark.parametrize(
    ("given", "is_packed"),
    [
        ({"overlong": "split", "max_length": 64}, True),
        ({"order": "length"}, False),
        ({"order": np.arange(20)}, False),
        ({"order": jvarlen.Order("shuffle", block_size=64)}, False),
        ({"difficulty": LENGTHS % 7}, False),
        ({"order": "length", "pacing": "linear"}, False),
        ({"strategy": "quantile"}, False),
    ],
)
def test_what_only_one_way_has_decides(package, given, is_packed):
    if "pacing" in given:
        given = given | {"pacing": find(package, "linear_pacing")(10)}
    if isinstance(given.get("order"), jvarlen.Order):
        given = {"order": package.Order("shuffle", block_size=64)}
    cost = find(package, "CostModel")(0.0, 1.0, 0.0)
    plan = package.make_plan(LENGTHS, packing="auto", cost=cost, compile_seconds=0.0, **BUDGET | given)
    same = package.make_plan(
        LENGTHS, packing="best_fit" if is_packed else "padded", cost=cost, compile_seconds=0.0, **BUDGET | given
    )
    assert (plan.row_offsets is not None) == is_packed
    assert plan.digest == same.digest
    assert any(name in plan.reason for name in (*given, "block_size"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({**BUDGET}, "cost"),
        ({"buckets": [(4, 128)]}, "not buckets|in their place"),
        ({**BUDGET, "overlong": "split", "order": "length", "cost": dyadic_cost}, "single samples"),
        ({**BUDGET, "lengths": LENGTHS.reshape(-1, 2), "cost": lambda *sizes: sizes[0] * 1.0}, "samples of one length"),
    ],
)
def test_what_cannot_be_chosen_is_refused(package, arguments, message):
    lengths = arguments.get("lengths", LENGTHS)
    arguments = {name: value for name, value in arguments.items() if name != "lengths"}
    with pytest.raises(ValueError, match=message):
        package.make_plan(lengths, packing="auto", **arguments)


@pytest.mark.parametrize("word", [None, False, True, "none", "unset", "bogus"])
def test_words_that_packing_does_not_have_are_refused(package, word):
    with pytest.raises(ValueError, match=r"packing .*'?padded'?, '?best_fit'?, '?wrapped'?, '?auto'?"):
        package.make_plan(LENGTHS, [(4, 128)], packing=word)


def test_samples_have_rows_of_their_own_unless_packing_is_asked_for(package):
    assert package.make_plan(LENGTHS, [(4, 128)]).row_offsets is None
    assert package.make_plan(LENGTHS, [(4, 128)], packing="padded").row_offsets is None
