"""The number of shapes that a run is worth."""

import dataclasses

import jax
import numpy as np
import optax
import pytest

from jvarlen import Bucket, CompileOptions, make_buckets, make_plan, make_train_step
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.auto_shapes import Compiler, choose_shapes, estimate_costs, simulated_seconds
from jvarlen.compiling.lowering import make_step_compiler
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.planning.budget import Budget
from jvarlen.planning.candidates import padded_candidate
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.order import Order
from jvarlen.planning.row_lengths import choose_packed_buckets

LENGTHS = np.random.default_rng(0).lognormal(4.5, 0.8, 5000).astype(np.int64).clip(1, 1024)
BUDGET = Budget(max_tokens=4096, length_multiple=8, cost=lambda rows, length: rows * length * (3e-5 + 1e-8 * length))
BACKGROUND = Compiler(2.0, slowdown=0.5)


def seconds_of_epoch(lengths, buckets, budget):
    candidate = padded_candidate(lengths, buckets, budget)
    return candidate.seconds, candidate.num_steps


def by_the_clock(work, is_new, compiler, spacing_s):
    """The same in ticks of a hundredth: a step may only take a tick of a shape that is there."""
    ready, done = [], 0
    for new in is_new:
        done += new
        ready.append(0.0 if not new else compiler.seconds * (1 + -(-(done - 1) // compiler.threads)))
    left, now, worked = sum(work), 0.0, 0.0
    appears = (
        [i * spacing_s for i in range(len(work))] if spacing_s is not None else np.cumsum([0, *work[:-1]]).tolist()
    )
    while left > 1e-9:
        needed = max((ready[i] for i in range(len(work)) if appears[i] <= worked + 1e-9), default=0.0)
        if now + 1e-9 >= needed:
            worked, left = worked + 0.01, left - 0.01
        now += 0.01
    return now + compiler.slowdown * compiler.seconds * max(0, sum(is_new) - 1)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("spacing_s", [None, 0.5, 2.5])
@pytest.mark.parametrize("is_new", [(True,) * 4, (False, True, False, True), (False,) * 4, (True,)])
def test_waiting_is_simulated_as_a_clock_shows_it(is_new, spacing_s, threads):
    work = np.array([4.0, 1.0, 0.5, 6.0][: len(is_new)])
    compiler = Compiler(2.0, threads, slowdown=0.25)
    expected = by_the_clock(work, is_new, compiler, spacing_s)
    assert simulated_seconds(work, is_new, compiler, spacing_s) == pytest.approx(expected, abs=0.1)


def test_seconds_of_an_epoch_are_those_of_its_plan():
    for num_microbatches in (1, 3):
        budget = dataclasses.replace(BUDGET, microbatches_per_step=num_microbatches)
        buckets = make_buckets(LENGTHS, budget, max_shapes=5)
        seconds, num_steps = seconds_of_epoch(LENGTHS, buckets, budget)
        plan = make_plan(LENGTHS, buckets, order="length", microbatches_per_step=num_microbatches)
        np.testing.assert_array_equal(num_steps, np.bincount(plan.step_bucket, minlength=5))
        costs = [BUDGET.cost(*bucket) for bucket in buckets]
        assert seconds.sum() == pytest.approx(num_microbatches * sum(costs[k] for k in plan.step_bucket))


def test_longer_runs_get_more_shapes_and_slower_compilers_fewer():
    by_epochs = [len(choose_shapes(LENGTHS, BUDGET, BACKGROUND, num_epochs=n).buckets) for n in (0.1, 1, 5, 50)]
    assert by_epochs == sorted(by_epochs)
    assert by_epochs[0] < by_epochs[2] < by_epochs[3]
    by_seconds = [
        len(choose_shapes(LENGTHS, BUDGET, BACKGROUND._replace(seconds=s), num_epochs=5).buckets)
        for s in (0.1, 1, 10, 1000)
    ]
    assert by_seconds == sorted(by_seconds, reverse=True)
    assert by_seconds[0] > by_seconds[3] == 1


@pytest.mark.parametrize(
    "compiler", [BACKGROUND, BACKGROUND._replace(slowdown=0.0), Compiler(2.0, 2, in_background=False)]
)
def test_no_other_number_of_shapes_is_faster(compiler):
    chosen = choose_shapes(LENGTHS, BUDGET, compiler, num_epochs=2, can_space=False)
    for max_shapes in range(1, 20):
        buckets = make_buckets(LENGTHS, BUDGET, max_shapes=max_shapes)
        seconds, _ = seconds_of_epoch(LENGTHS, buckets, BUDGET)
        other = simulated_seconds(2 * seconds, [True] * len(buckets), compiler)
        assert chosen.seconds <= other + 1e-9
        if buckets == chosen.buckets:
            assert chosen.seconds == other


def test_steps_count_as_the_samples_that_they_take():
    num_steps = make_plan(LENGTHS, make_buckets(LENGTHS, BUDGET, max_shapes=24), order="length").num_steps
    by_epochs = choose_shapes(LENGTHS, BUDGET, BACKGROUND, num_epochs=3)
    of_epoch = make_plan(LENGTHS, by_epochs.buckets, order="length").num_steps
    assert choose_shapes(LENGTHS, BUDGET, BACKGROUND, num_steps=3 * num_steps)[:3] == by_epochs[:3]
    assert by_epochs.num_steps == 3 * of_epoch


@pytest.mark.parametrize("num_epochs", [None, 50])
def test_a_run_of_few_steps_is_short_whatever_its_epochs(num_epochs):
    short = choose_shapes(LENGTHS, BUDGET, BACKGROUND, num_epochs=num_epochs, num_steps=7)
    assert short == choose_shapes(LENGTHS, BUDGET, BACKGROUND, num_steps=7)
    assert short.num_steps == 7
    assert choose_shapes(LENGTHS, BUDGET, BACKGROUND, num_epochs=2, num_steps=10**6) == choose_shapes(
        LENGTHS, BUDGET, BACKGROUND, num_epochs=2
    )


def test_new_shapes_come_as_fast_as_they_are_compiled():
    choice = choose_shapes(LENGTHS, BUDGET, BACKGROUND, num_epochs=5)
    seconds, num_steps = seconds_of_epoch(LENGTHS, choice.buckets, BUDGET)
    spacing_s = choice.new_shape_every * seconds.sum() / num_steps.sum()
    assert BACKGROUND.seconds < spacing_s < 1.5 * BACKGROUND.seconds
    assert choice.new_shape_every * len(choice.buckets) <= num_steps.sum(), "all appear in the first epoch"
    assert choose_shapes(LENGTHS, BUDGET, BACKGROUND, can_space=False).new_shape_every == 0


def test_compiled_shapes_are_chosen_again_and_cost_nothing():
    first = choose_shapes(LENGTHS, BUDGET, BACKGROUND, num_epochs=2)
    again = choose_shapes(LENGTHS, BUDGET, BACKGROUND, num_epochs=2, compiled=first.buckets)
    assert again.buckets == first.buckets
    assert again.new_shape_every == 0
    seconds, _ = seconds_of_epoch(LENGTHS, first.buckets, BUDGET)
    assert again.seconds == pytest.approx(2 * seconds.sum())
    others = np.random.default_rng(1).permutation(LENGTHS)[:4900]
    of_others = choose_shapes(others, BUDGET, BACKGROUND, num_epochs=2, compiled=first.buckets)
    assert len(set(of_others.buckets) & set(first.buckets)) >= len(first.buckets) - 1


def pack(budget):
    return choose_packed_buckets(LENGTHS, budget, "error", order=Order(), seed=0)


@pytest.mark.parametrize(("compile_s", "is_packed"), [(1e-4, False), (100.0, True)])
def test_packed_shapes_are_simulated_beside_padded_ones(compile_s, is_packed):
    budget = dataclasses.replace(BUDGET, cost=CostModel(0.0, 1e-6, 1e-7))  # mostly attention, to whole rows
    compiler = BACKGROUND._replace(seconds=compile_s)
    choice = choose_shapes(LENGTHS, budget, compiler, pack=pack, whole_below=2048)
    assert choice.is_packed == is_packed
    assert [other.is_packed for other in choice.others] == [not is_packed]
    alone = choose_shapes(LENGTHS, budget, compiler)
    assert alone in (choice._replace(others=()), *choice.others), "padded shapes are chosen as without packed ones"
    assert str(choice).split()[1] == ("packed" if is_packed else "padded")


def test_one_packed_shape_takes_its_steps_and_one_compilation():
    cost = CostModel(0.0, 3e-5, 1e-8)
    budget = dataclasses.replace(BUDGET, cost=cost)
    choice = choose_shapes(LENGTHS, budget, BACKGROUND, num_epochs=2, pad=False, pack=pack)
    plan = make_plan(LENGTHS, choice.buckets, packing="best_fit")
    pairs = float((LENGTHS**2).sum())
    steps_s = plan.num_steps * cost.linear * choice.buckets[0].padded_tokens + cost.quadratic * pairs
    assert choice.seconds == pytest.approx(BACKGROUND.seconds + 2 * steps_s)
    assert (len(choice.buckets), choice.num_steps, choice.others) == (1, 2 * plan.num_steps, ())
    whole = choose_shapes(LENGTHS, budget, BACKGROUND, num_epochs=2, pad=False, pack=pack, whole_below=2048)
    rows, length = whole.buckets[0]
    assert whole.seconds == pytest.approx(BACKGROUND.seconds + 2 * plan.num_steps * float(cost(rows, length)))
    of_steps = choose_shapes(LENGTHS, budget, BACKGROUND, num_steps=plan.num_steps // 2, pad=False, pack=pack)
    assert of_steps.num_steps == plan.num_steps // 2
    assert of_steps.seconds == pytest.approx(BACKGROUND.seconds + steps_s / 2, rel=0.01)


def test_compiled_packed_shapes_cost_nothing():
    budget = dataclasses.replace(BUDGET, cost=CostModel(0.0, 3e-5, 1e-8))
    slow = BACKGROUND._replace(seconds=1e3)
    (shape,) = choose_shapes(LENGTHS, budget, slow, pad=False, pack=pack).buckets
    for known, is_fast in ((tuple(shape), True), ((shape.rows - 1, shape.length), False)):
        again = choose_shapes(LENGTHS, budget, slow, pad=False, pack=pack, compiled_packed=[known])
        assert (again.buckets, again.seconds < 1e3) == ((shape,), is_fast)


@pytest.mark.parametrize("most_shapes", [1, 3])
def test_a_number_bounds_the_shapes_of_both_kinds(most_shapes):
    lengths = -(-LENGTHS // 128) * 128

    def pack(budget):
        return choose_packed_buckets(lengths, budget, "error", order=Order(), seed=0)

    eager = BACKGROUND._replace(seconds=1e-3)
    for pads in (True, False):
        choice = choose_shapes(lengths, BUDGET, eager, pad=pads, pack=pack, most_shapes=most_shapes, num_epochs=50)
        for each in (choice, *choice.others):
            assert len(each.buckets) == most_shapes


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_operations_are_counted_as_attention_of_whole_rows_has_them(num_microbatches, monkeypatch):
    """Of rows of any length from short ones: what loops with bounds from the data do, nothing can count."""
    monkeypatch.setattr("jvarlen.compiling.auto_shapes._operations_per_second", lambda device: 2.0)
    config = DecoderConfig(width=32, num_heads=2, vocab_size=64)
    params = jax.eval_shape(lambda: init_params(config, 0))
    long, short = [Bucket(1, 2048)], [Bucket(4, 128), Bucket(2, 256)]

    def costs(buckets, **changes):
        step = make_train_step(make_loss_fn(dataclasses.replace(config, **changes)), optax.sgd(0.1))
        shapes = BatchShapes(buckets, microbatches_per_step=num_microbatches)
        step_compiler = make_step_compiler(step, step.init(params), shapes, CompileOptions(cache_dir=None))
        return estimate_costs(step_compiler, buckets, "").seconds

    estimate, whole = costs(short), costs(long, attention="xla")
    assert float(estimate(1, 2048)) == pytest.approx(float(whole(1, 2048)), rel=0.2)
    assert estimate.quadratic * 2048 > estimate.linear, "of rows this long"


def test_without_seconds_there_is_nothing_to_choose_by():
    with pytest.raises(ValueError, match="the budget needs a cost"):
        choose_shapes(LENGTHS, Budget(max_tokens=4096), BACKGROUND)
