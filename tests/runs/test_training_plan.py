"""TrainingPlan: places follow each other over epochs, and what is logged is what the plan says."""

import dataclasses
import math
import tracemalloc
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import CostModel, make_plan
from jvarlen.planning.balance import packed_row_costs, rank_costs
from jvarlen.runs.config import FitConfig, OptimizerConfig, PlanConfig
from jvarlen.runs.settings import resolve
from jvarlen.runs.shapes import epoch_plan, shapes_for
from jvarlen.runs.training_plan import TrainingPlan

LENGTHS = np.random.default_rng(0).integers(1, 40, 150)
EVAL_LENGTHS = {"held_out": LENGTHS[:9]}
PLAN = PlanConfig(max_tokens=80, max_shapes=3, max_length=32, overlong="truncate", packing="padded")
CONFIG = FitConfig(max_steps=None, num_epochs=3, plan=PLAN)


def planned(config, *arguments):
    return TrainingPlan(resolve(config), *arguments)


def places(training):
    place = training.first_place()
    yield place
    for _ in range(training.num_steps):
        place = training.next_place(place)
        yield place


def test_places_run_through_all_epochs():
    training = planned(CONFIG, LENGTHS, EVAL_LENGTHS)
    assert training.num_steps == 3 * training.steps_of_epoch(0)
    walked = list(places(training))
    assert [(p.epoch, p.step) for p in walked[:-1]] == [
        (e, s) for e in range(3) for s in range(training.steps_of_epoch(0))
    ]
    assert all(b.num_steps_done == a.num_steps_done + 1 for a, b in pairwise(walked))
    assert len({p.plan_digest for p in walked[:-1]}) == 3
    assert walked[-1].num_tokens_done == 3 * np.minimum(LENGTHS, 32).sum()
    assert walked[-1].padded_tokens_done == 3 * training.plan_of_epoch(0).padded_tokens_per_step.sum()


PACKED_LENGTHS = np.random.default_rng(0).permutation(np.arange(100, 1_100))
PACKED = FitConfig(
    max_steps=None,
    num_epochs=3,
    plan=PlanConfig(max_tokens=2048, max_length=2048, row_lengths=(2048,), packing="best_fit", block_size=64),
)


@pytest.mark.parametrize("packing", ["best_fit", "wrapped"])
def test_microbatches_of_packed_rows_have_nearly_equal_attention_for_any_devices(packing, tmp_path):
    """The steps hold what they held, and neither devices nor a cost model have a say in who computes what."""
    lengths = np.random.default_rng(1).lognormal(4, 1.2, 6_000).clip(1, 1_024).astype(int)
    options = {"max_length": 1_024, "length_multiple": 8, "packing": packing, "overlong": None}
    settings = PlanConfig(max_tokens=4_096, num_microbatches=8, **options)
    CostModel(1e-3, 1e-6, 1e-9).save(tmp_path / "cost.json")
    costed = dataclasses.replace(settings, cost_model=tmp_path / "cost.json", max_shapes=1)
    dealt, same = (
        epoch_plan(each, shapes_for(each, lengths), lengths, seed=3, epoch=1)
        for each in (settings.resolve(), costed.resolve())
    )
    made = make_plan(lengths, dealt.buckets, packing=settings.packing, num_microbatches=8, seed=3, epoch=1)
    assert dealt.digest == same.digest != made.digest
    np.testing.assert_array_equal(dealt.num_tokens, made.num_tokens)
    np.testing.assert_array_equal(dealt.step_bucket, made.step_bucket)
    for step in range(made.num_steps):
        of_step = slice(made.step_offsets[step], made.step_offsets[step + 1])
        assert sorted(dealt.sample_ids[of_step]) == sorted(made.sample_ids[of_step])
    for num_ranks in (2, 4, 8):
        waits = [_waits(plan, lengths, num_ranks) for plan in (made, dealt)]
        for before, after in zip(*waits, strict=True):  # once a step, and in every microbatch
            assert after - 1 < 0.4 * (before - 1)


def _waits(plan, lengths, num_ranks):
    """What ranks wait for over the mean work, if they meet once a step or in every microbatch."""
    pairs = packed_row_costs(plan, lengths, CostModel(0.0, 0.0, 1.0))
    work_SxPxA = rank_costs(plan, pairs, 8).reshape(plan.num_steps, num_ranks, -1)
    slowest = work_SxPxA.sum(axis=2).max(axis=1).sum(), work_SxPxA.max(axis=1).sum()
    return [each / pairs.sum() * num_ranks for each in slowest]


@pytest.mark.parametrize("unit", ["steps", "tokens"])
def test_epochs_of_packed_rows_have_different_numbers_of_steps(unit):
    """A row more or less is a step more or less; rates and places follow them."""
    config = dataclasses.replace(PACKED, optimizer=OptimizerConfig(schedule_unit=unit))
    training = planned(config, PACKED_LENGTHS, {"held_out": PACKED_LENGTHS[:9]})
    sizes = [training.steps_of_epoch(epoch) for epoch in range(3)]
    assert sizes == [training.plan_of_epoch(epoch).num_steps for epoch in range(3)]
    assert len(set(sizes)) > 1
    assert training.num_steps == sum(sizes)
    assert training.describe().endswith(f"an epoch has {min(sizes)} to {max(sizes)}")
    walked = list(places(training))
    assert [(p.epoch, p.step) for p in walked[:-1]] == [(e, s) for e, size in enumerate(sizes) for s in range(size)]
    assert walked[-1].num_tokens_done == 3 * PACKED_LENGTHS.sum()
    assert training.epoch_starts == [0, *np.cumsum(sizes).tolist()]
    records = [training.record(place) for place in walked[:-1]]
    assert (
        len({record["base_learning_rate"] for record in records[len(records) // 2 :]})
        == len(records) - len(records) // 2
    )
    # Resumed in the last epoch, by a training made anew.
    at = walked[sizes[0] + sizes[1] + 5]
    resumed = planned(config, PACKED_LENGTHS, {"held_out": PACKED_LENGTHS[:9]})
    assert resumed.resumed_place(at) == at
    assert resumed.record(at) == records[at.num_steps_done]


def test_an_epoch_that_never_runs_is_not_planned_until_training_is_extended():
    short = planned(CONFIG, LENGTHS, EVAL_LENGTHS)
    last = list(places(short))[-1]
    assert (last.epoch, last.step) == (2, short.steps_of_epoch(0))
    assert short.plan_of_epoch.cache_info().misses == 3
    assert short.resumed_place(last) == last
    extended = planned(dataclasses.replace(CONFIG, num_epochs=4), LENGTHS, EVAL_LENGTHS)
    assert extended.resumed_place(last) == list(places(extended))[3 * short.steps_of_epoch(0)]


@pytest.mark.parametrize("max_steps", [None, 1, 40, 60])
@pytest.mark.parametrize("order", ["shuffle", "length", "packed", "groups", "groups in blocks", "stages"])
def test_the_groups_left_of_each_bucket_are_those_that_follow(order, max_steps):
    settings = {
        "packed": {"packing": "best_fit", "block_size": 8, "row_lengths": (32, 48), "max_length": 48},
        "groups": {"sequences_per_step": 7},
        "stages": {"order": "length", "sequences_per_step": "0:7,10%:20,70%:50"},
        "groups in blocks": {"order": "length", "block_size": 12, "tokens_per_step": 150},
    }.get(order, {"order": order})
    plan = dataclasses.replace(CONFIG.plan, **settings)
    training = planned(dataclasses.replace(CONFIG, plan=plan, max_steps=max_steps), LENGTHS, EVAL_LENGTHS)
    if order not in ("shuffle", "length") and max_steps is None:
        counts = [training.plan_of_epoch(epoch).groups_of_buckets() for epoch in range(3)]
        assert counts[0] != counts[1]
    left = {}
    for place in reversed(list(places(training))):
        if place.num_steps_done < training.num_steps:
            plan = training.plan_of_epoch(place.epoch)
            for group in reversed(plan.groups(place.step)):
                bucket = plan.buckets.shapes[plan.group_bucket[group]]
                left = {bucket: left.get(bucket, 0) + 1} | {other: n for other, n in left.items() if other != bucket}
        assert list(training.groups_left(place).items()) == list(left.items())


@pytest.mark.parametrize("unit", ["sequences", "tokens"])
def test_full_steps_of_a_given_size_have_the_rate_of_the_schedule_and_records_tell_their_groups(unit):
    size = {"sequences": 32, "tokens": 500}[unit]
    plan = dataclasses.replace(CONFIG.plan, **{f"{unit}_per_step": size})
    config = dataclasses.replace(CONFIG, plan=plan, optimizer=OptimizerConfig(batch_size_unit=unit))
    training = planned(config, LENGTHS, EVAL_LENGTHS)
    for place in list(places(training))[:-1]:
        record, plan = training.record(place), training.plan_of_epoch(place.epoch)
        assert record["learning_rate_scale"] == pytest.approx(math.sqrt(record[f"num_{unit}"] / size))
        assert record["num_groups"] == len(plan.groups(place.step)) == sum(g["num_groups"] for g in record["groups"])
        padded = sum(g["num_groups"] * g["rows"] * g["length"] for g in record["groups"])
        assert record["padded_tokens"] == plan.num_microbatches * padded
        assert record.keys().isdisjoint(["bucket_rows", "bucket_length"])


TOKENS = int(np.minimum(LENGTHS, 32).sum())  # of an epoch


def records_of(training):
    return [training.record(place) for place in list(places(training))[:-1]]


@pytest.mark.parametrize("options", [{}, {"packing": "best_fit"}, {"order": "length", "packing": "padded"}], ids=str)
@pytest.mark.parametrize("stages", ["0:4,50%:16", f"0:4,{-(-3 * TOKENS // 2)}:16"])
def test_steps_grow_at_the_tokens_of_the_whole_run(options, stages):
    plan = dataclasses.replace(CONFIG.plan, sequences_per_step=stages, **options)
    training = planned(dataclasses.replace(CONFIG, plan=plan), LENGTHS, EVAL_LENGTHS)
    seen, samples = 0, np.zeros(3)
    for record in records_of(training):
        size = 4 if seen < 3 * TOKENS / 2 else 16
        samples[record["epoch"]] += record["num_sequences"]
        assert record["num_sequences"] == size or samples[record["epoch"]] == len(LENGTHS)
        assert record["learning_rate_scale"] == pytest.approx(math.sqrt(record["num_sequences"] / 4))
        seen += record["num_tokens"]
    assert seen == 3 * TOKENS
    assert samples.tolist() == [len(LENGTHS)] * 3
    told = [line.split()[:3] for line in training.describe().splitlines()[-2:]]
    first = int(training.steps_of_run.num_tokens.cumsum().searchsorted(-(-3 * TOKENS // 2))) + 1
    assert told == [["0", "0", "4"], [f"{-(-3 * TOKENS // 2):,}", str(first), "16"]]


@pytest.mark.parametrize("max_steps", [None, 100])
def test_seesaw_takes_the_tokens_of_the_run_in_fewer_steps_at_rates_that_fall_by_the_root(max_steps):
    plan = dataclasses.replace(CONFIG.plan, sequences_per_step=4)
    optimizer = OptimizerConfig(schedule="seesaw", max_batch_size=16, final_fraction=0.1, warmup_fraction=0.2)
    config = dataclasses.replace(CONFIG, plan=plan, optimizer=optimizer, max_steps=max_steps)
    training = planned(config, LENGTHS, EVAL_LENGTHS)
    total = 3 * TOKENS
    warmup = int(0.2 * total)
    # Where 0.1 + 0.9 (1 + cos) / 2 is a half and a quarter of the peak.
    halves, quarters = (
        warmup + (total - warmup) * math.acos(2 * (share - 0.1) / 0.9 - 1) / math.pi for share in (0.5, 0.25)
    )
    assert training.stages.stages == ((0, 4), (math.ceil(halves), 8), (math.ceil(quarters), 16))
    records = records_of(training)
    steps = training.steps_of_run
    np.testing.assert_array_equal(steps.num_tokens, [record["num_tokens"] for record in records])
    np.testing.assert_array_equal(steps.num_sequences, [record["num_sequences"] for record in records])
    np.testing.assert_array_equal(steps.learning_rates, [record["learning_rate"] for record in records])
    seen = np.cumsum(steps.num_tokens) - steps.num_tokens
    full = np.isin(steps.num_sequences, [4, 8, 16])
    for begin, end, rate in ((warmup, halves, 3e-3), (halves, quarters, 3e-3 / math.sqrt(2))):
        of_stage = full & (seen >= begin) & (seen < end)
        np.testing.assert_allclose(steps.learning_rates[of_stage], rate, rtol=1e-3)
    assert len(records) == training.num_steps < (max_steps or 3 * -(-len(LENGTHS) // 4)) + 1
    if max_steps is None:
        assert sum(steps.num_tokens) == total
        falling = steps.learning_rates[full & (seen >= quarters)]
        assert (np.diff(falling) < 0).all()
    # A training made anew goes on in the middle of a stage of the second epoch.
    at = list(places(training))[60]
    resumed = planned(config, LENGTHS, EVAL_LENGTHS)
    assert resumed.resumed_place(at) == at
    assert resumed.record(at) == records[60]


def test_a_run_resumes_with_the_sizes_that_its_steps_had():
    """The plan of its epoch is the same, but not those before."""
    plan = dataclasses.replace(CONFIG.plan, sequences_per_step="0:4,50%:16", order="length")
    began, other = (
        planned(dataclasses.replace(CONFIG, plan=plan, num_epochs=number), LENGTHS, {}) for number in (3, 4)
    )
    at = [place for place in places(began) if place.epoch == 2][4]
    assert began.resumed_place(at) == at
    assert other.plan_of_epoch(2).digest == began.plan_of_epoch(2).digest
    with pytest.raises(ValueError, match=f"at step {at.num_steps_done}, which is step .* leave it as it was"):
        other.resumed_place(at)


def test_ramps_of_shares_need_the_epochs_and_seesaw_its_own_optimizer():
    stages = dataclasses.replace(CONFIG.plan, sequences_per_step="0:4,50%:8")
    with pytest.raises(ValueError, match="0:4,50%:8 are shares of the tokens of num_epochs: give it"):
        planned(FitConfig(max_steps=9, plan=stages), LENGTHS, {})
    with pytest.raises(ValueError, match="stage 1: starts at 0 tokens, not after 0"):
        planned(FitConfig(max_steps=9, plan=dataclasses.replace(stages, sequences_per_step="0:4,0:8")), LENGTHS, {})
    plan = dataclasses.replace(CONFIG.plan, sequences_per_step=4)
    config = FitConfig(plan=plan, optimizer=OptimizerConfig(schedule="seesaw"))
    with pytest.raises(ValueError, match="seesaw decides rates, and there is an optimizer"):
        planned(config, LENGTHS, {}, optax.sgd(0.1))
    with pytest.raises(ValueError, match="seesaw decays over the tokens of num_epochs: give it"):
        planned(dataclasses.replace(config, max_steps=9), LENGTHS, {})


@pytest.mark.parametrize("order", ["shuffle", "length"])
def test_packed_rows_keep_their_shapes_over_all_epochs(order):
    plan = dataclasses.replace(CONFIG.plan, packing="best_fit", order=order, overlong="drop")
    training = planned(dataclasses.replace(CONFIG, plan=plan), LENGTHS, EVAL_LENGTHS)
    plans = [training.plan_of_epoch(epoch) for epoch in range(3)]
    assert {p.num_steps for p in plans} == {training.steps_of_epoch(0)}
    assert len({p.digest for p in plans}) == (3 if order == "shuffle" else 1)
    for p in (*plans, training.eval_plans["held_out"]):
        assert p.is_packed
    kept = np.flatnonzero(LENGTHS <= 32)
    assert all((np.sort(p.sample_ids) == kept).all() for p in plans)


def test_wrapped_rows_are_others_in_every_epoch_and_evaluations_keep_samples_whole():
    plan = dataclasses.replace(CONFIG.plan, packing="wrapped", order="shuffle", overlong=None, max_length=16)
    training = planned(dataclasses.replace(CONFIG, plan=plan), LENGTHS, EVAL_LENGTHS)
    plans = [training.plan_of_epoch(epoch) for epoch in range(3)]
    assert {(p.num_steps, p.num_rows, *p.buckets.shapes) for p in plans} == {
        (training.steps_of_epoch(0), -(-LENGTHS.sum() // 16), *training.buckets)
    }
    assert len({p.digest for p in plans}) == 3
    for p in plans:
        assert p.num_tokens.sum() == LENGTHS.sum()
    whole = dataclasses.replace(plan, packing="best_fit", overlong="split")
    of_whole = planned(dataclasses.replace(CONFIG, plan=whole), LENGTHS, EVAL_LENGTHS)
    evaluated, expected = (each.eval_plans["held_out"] for each in (training, of_whole))
    assert evaluated.sample_ids.tolist() == expected.sample_ids.tolist()
    assert evaluated.chunk_starts.tolist() == expected.chunk_starts.tolist()


def in_units(units, max_steps=None, max_tokens=80):
    """A training whose schedule and batch sizes count these units, decaying weights only: at the rate in force."""
    schedule_unit, batch_size_unit = units
    optimizer = OptimizerConfig(
        schedule_unit=schedule_unit,
        batch_size_unit=batch_size_unit,
        base_batch_size={"sequences": 3, "tokens": 40}[batch_size_unit],
        weight_decay=1.0,
    )
    plan = dataclasses.replace(CONFIG.plan, max_tokens=max_tokens)
    config = dataclasses.replace(CONFIG, optimizer=optimizer, max_steps=max_steps, plan=plan)
    return planned(config, LENGTHS, EVAL_LENGTHS)


def base_rate(count, total, highest=3e-3, last=0.05 * 3e-3):
    """Warm-up over a tenth of a training and a cosine over the rest."""
    warmup = total // 10
    rising = last + (highest - last) * count / warmup
    falling = last + (highest - last) * (1 + np.cos(np.pi * (count - warmup) / (total - warmup))) / 2
    return np.where(count < warmup, rising, falling)


UNITS = [("steps", "sequences"), ("steps", "tokens"), ("sequences", "tokens"), ("tokens", "sequences")]


@pytest.mark.parametrize("units", UNITS, ids="-".join)
@pytest.mark.parametrize("max_steps", [None, 70])
def test_rates_follow_what_the_schedule_and_the_batch_size_count(units, max_steps):
    """From the records alone, over epochs; training may end within one."""
    training = in_units(units, max_steps)
    records = [training.record(place) for place in list(places(training))[:-1]]
    column = {name: np.array([record[name] for record in records]) for name in records[0]}
    sizes = {
        "steps": np.ones(len(records), np.int64),
        "sequences": column["num_sequences"],
        "tokens": column["num_tokens"],
    }
    counted, batch_sizes = (sizes[unit] for unit in units)
    expected_base = base_rate(np.cumsum(counted) - counted, counted.sum())
    np.testing.assert_allclose(column["base_learning_rate"], expected_base, rtol=1e-12)
    expected_scale = np.sqrt(batch_sizes / {"sequences": 3, "tokens": 40}[units[1]])
    np.testing.assert_allclose(column["learning_rate_scale"], expected_scale, rtol=1e-15)
    assert (column["base_learning_rate"] * column["learning_rate_scale"] == column["learning_rate"]).all()


@pytest.mark.parametrize("unit", ["sequences", "tokens"])
def test_fewer_larger_steps_decay_as_fast(unit):
    """At every count of samples that both come to, the base rates are the same."""
    base_at = []
    for max_tokens in (80, 320):
        training = in_units((unit, "sequences"), max_tokens=max_tokens)
        records = [training.record(place) for place in list(places(training))[:-1]]
        sizes = [record[f"num_{unit}"] for record in records]
        seen = (np.cumsum(sizes) - sizes).tolist()
        base_at.append(dict(zip(seen, [record["base_learning_rate"] for record in records], strict=True)))
    assert len(base_at[0]) > 3 * len(base_at[1]) > 60
    both = base_at[0].keys() & base_at[1].keys()
    assert len(both) >= 3
    assert all(base_at[0][count] == base_at[1][count] for count in both)


@pytest.mark.parametrize("units", UNITS, ids="-".join)
def test_the_optimizer_applies_the_rates_and_goes_on_where_it_was_resumed(units):
    """Resumed in the second epoch by a training made anew, its state read from host arrays."""
    training, params = in_units(units, max_steps=70), {"w": jnp.ones(())}
    stop = training.steps_of_epoch(0) + 3
    assert stop < 70

    def follow(training, state, place):
        update, applied, states = jax.jit(training.optimizer.update), [], []
        state = jax.tree.map(jnp.asarray, state)
        while place.num_steps_done < training.num_steps:
            states.append((jax.tree.map(np.asarray, state), place))
            record = training.record(place)
            sizes = {"batch_size": record["num_sequences"], "num_tokens": record["num_tokens"]}
            no_gradient = {"w": jnp.zeros(())}
            updates, state = update(no_gradient, state, params, **jax.tree.map(jnp.float32, sizes))
            applied.append((-updates["w"].item(), record["learning_rate"]))
            place = training.next_place(place)
        assert update._cache_size() == 1
        return applied, states

    applied, states = follow(training, training.optimizer.init(params), training.first_place())
    on_device, on_host = zip(*applied, strict=True)
    np.testing.assert_allclose(on_device, on_host, rtol=3e-7)
    resumed, _ = follow(in_units(units, max_steps=70), *states[stop])
    assert resumed == applied[stop:]


@pytest.mark.parametrize(("unit", "num_planned"), [("steps", 1), ("sequences", 3), ("tokens", 3)])
def test_epochs_are_planned_ahead_only_where_rates_depend_on_them(unit, num_planned):
    assert in_units((unit, "sequences")).plan_of_epoch.cache_info().misses == num_planned


@pytest.mark.parametrize(
    ("max_steps", "num_epochs", "expected"),
    [(None, None, 1.0), (None, 3, 3.0), (2.5, None, 2.5), (2.5, 2, 2.0), (0.5, None, 0.5)],
)
def test_training_takes_an_epoch_unless_steps_or_epochs_are_given(max_steps, num_epochs, expected):
    steps_per_epoch = planned(CONFIG, LENGTHS, EVAL_LENGTHS).steps_of_epoch(0)
    steps = None if max_steps is None else int(max_steps * steps_per_epoch)
    config = dataclasses.replace(CONFIG, max_steps=steps, num_epochs=num_epochs)
    training = planned(config, LENGTHS, EVAL_LENGTHS)
    assert training.num_steps == int(expected * steps_per_epoch)
    assert training.describe() == f"training takes {training.num_steps} steps, an epoch has {steps_per_epoch}"
    assert len({place.plan_digest for place in list(places(training))[:-1]}) == math.ceil(expected)


def test_held_out_samples_come_in_the_same_buckets():
    training = planned(CONFIG, LENGTHS, EVAL_LENGTHS)
    assert training.eval_plans.keys() == {"held_out"}
    plan = training.eval_plans["held_out"]
    assert plan.buckets.shapes == training.buckets
    assert sorted(plan.sample_ids) == list(range(9))
    assert set(training.eval_buckets) == {training.buckets[k] for k in plan.step_bucket}


def test_samples_to_evaluate_on_that_fit_no_bucket_are_named():
    config = dataclasses.replace(CONFIG, plan=PlanConfig(max_tokens=80, max_length=64, overlong="error"))
    with pytest.raises(ValueError, match=r"the evaluation held_out: .*id 1: 70"):
        planned(config, LENGTHS, {"held_out": np.array([3, 70])})


def test_a_place_of_another_plan_is_refused():
    training = planned(CONFIG, LENGTHS, EVAL_LENGTHS)
    place = training.first_place()
    assert training.resumed_place(place) == place
    with pytest.raises(ValueError, match="belongs to plan abc"):
        training.resumed_place(dataclasses.replace(place, plan_digest="abc"))
    with pytest.raises(ValueError, match="of seed 3, training is of seed 0"):
        training.resumed_place(dataclasses.replace(place, seed=3))
    with pytest.raises(ValueError, match="training takes"):
        training.resumed_place(dataclasses.replace(place, num_steps_done=10**6))


def test_a_training_of_billions_of_steps_with_an_optimizer_of_ones_own_holds_no_rates():
    tracemalloc.start()
    config = dataclasses.replace(CONFIG, num_epochs=None, max_steps=2**31 - 1)
    training = planned(config, LENGTHS, EVAL_LENGTHS, optax.sgd(0.1))
    assert training.num_steps == 2**31 - 1
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()
