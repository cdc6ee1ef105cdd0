"""Learning rate: on device the rates and scales of the host, without a retrace."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import (
    lr_scale,
    lr_sequence,
    make_plan,
    make_train_step,
    no_recompiles,
    scale_by_batch_size,
    with_float32_master,
)
from jvarlen.batches import BatchShapes
from jvarlen.models import DecoderConfig, init_params, layered, make_loss_fn
from jvarlen.training import adamw_by_batch_size, beta_sequence
from jvarlen.training.optimizers import scale_by_planned_rate, with_known_tables
from jvarlen.training.rates import base_rates, before_each, step_sizes

pytestmark = pytest.mark.usefixtures("optimized")

PLAN = make_plan([3] * 14 + [9] * 5, [(5, 4), (2, 9)], order="length")
EPOCHS = [make_plan([3] * 14 + [9] * 5, [(5, 4), (2, 9)], order="shuffle", epoch=epoch) for epoch in range(3)]
NUM_STEPS = 3 * PLAN.num_steps
COSINE = optax.warmup_cosine_decay_schedule(0.01, 0.1, 10, 57, 0.005)  # over all samples of three epochs
OPTIONS = {"rule": "sqrt", "counted_in": "sequences"}
DECODER = DecoderConfig(num_layers=2, width=16, num_heads=2)
TABLE = lr_sequence(EPOCHS, COSINE, 3, **OPTIONS)


def update_by(optimizer):
    """One jitted update; gradients of 1, so that what `sgd` gives is the rate."""
    params = jax.tree.map(jnp.ones_like, {"w": jnp.ones(2), "v": jnp.ones(3)})
    return params, optimizer.init(params), jax.jit(lambda state: optimizer.update(params, state, params))


# The table


def test_an_optax_schedule_is_evaluated_in_float64():
    schedule = optax.cosine_decay_schedule(0.1, 1000)
    rates = base_rates(schedule, np.arange(1000))
    exact = 0.1 * 0.5 * (1 + np.cos(np.pi * np.arange(1000) / 1000))
    np.testing.assert_allclose(rates, exact, rtol=1e-12)


def test_a_rule_written_for_jax_is_evaluated_in_float64():
    assert lr_scale([2, 3], 1, jnp.sqrt).tolist() == np.sqrt([2, 3]).tolist()


def test_schedules_come_as_number_array_or_function():
    counts = np.arange(PLAN.num_steps)
    expected = np.full(PLAN.num_steps, 0.5)
    one_count_only = (lambda step: max(step, 0.5) * 0 + 0.5, lambda step: 0.5 if step >= 0 else 1.0)
    for schedule in (0.5, expected, lambda step: 0.5, optax.constant_schedule(0.5), *one_count_only):
        assert (base_rates(schedule, counts) == expected).all()
    for schedule in ([1.0, 2.0], lambda counts: np.ones(2)):
        with pytest.raises(ValueError, match=r"has shape \((6, )?2"):
            base_rates(schedule, counts)


def test_a_function_of_one_count_serves_a_plan_of_one_step():
    assert base_rates(lambda step: np.cos(float(step)), np.zeros(1, np.int64)).tolist() == [1.0]


def test_counts_stay_exact_where_float32_and_int32_end():
    plan = dataclasses.replace(PLAN, group_tokens=np.full(PLAN.num_steps, 2**40 + 1))
    seen = before_each(step_sizes([plan, plan])["tokens"])
    assert seen.tolist() == [(2**40 + 1) * step for step in range(2 * PLAN.num_steps)]
    total = int(seen[-1])
    rates = lr_sequence([plan] * 2, optax.linear_schedule(0.0, total, total), 1, rule=None, counted_in="tokens")
    np.testing.assert_allclose(rates, seen, rtol=1e-15)


def test_the_plans_of_all_epochs_need_not_be_in_memory_together():
    plans = iter(EPOCHS)
    assert (lr_sequence(plans, COSINE, 3, **OPTIONS) == TABLE).all()
    with pytest.raises(ValueError, match="plan is empty"):
        lr_sequence(plans, COSINE, 3, **OPTIONS)


# The table in the state of the optimizer


def planned(plans=EPOCHS, schedule=COSINE, base=3, *, inner=optax.sgd, **options):
    """An optimizer at planned rates."""
    return optax.chain(inner(1.0), scale_by_planned_rate(plans, schedule, base, **(options or OPTIONS)))


def applied(optimizer, num_steps=NUM_STEPS):
    """The rates that one jitted update applies."""
    _, state, update = update_by(optimizer)
    found = []
    for _ in range(num_steps):
        updates, state = update(state)
        found.append(-updates["w"][0].item())
    assert update._cache_size() == 1
    return found


def test_planned_rates_are_the_table_rounded_to_float32():
    assert applied(planned()) == TABLE.astype(np.float32).tolist()


def test_with_64_bits_planned_rates_are_the_table():
    assert TABLE.tolist() != TABLE.astype(np.float32).tolist()
    with jax.enable_x64(True):
        optimizer = planned()
        updates, state = optimizer.update(jnp.ones(2), optimizer.init(None))
        assert (updates.dtype, state[-1].table.dtype) == (np.float64, np.float64)
        assert state[-1].table[:NUM_STEPS].tolist() == TABLE.tolist()
        assert updates[0] == -TABLE[0]


@pytest.mark.parametrize("num_steps", [3, 2**14, 2**14 + 1])
def test_no_rate_is_given_after_the_planned_steps(num_steps):
    transform = scale_by_planned_rate(np.ones(num_steps, np.int64), 0.1, 1)
    state, update = transform.init(None), jax.jit(transform.update)
    assert jnp.isfinite(state.table).all(), "of which a run refuses others"
    for count, rate in {
        0: np.float32(0.1),
        num_steps - 1: np.float32(0.1),
        num_steps: np.nan,
        2**31 - 1: np.nan,
    }.items():
        scaled, _ = update(jnp.ones(()), state._replace(count=jnp.int32(count)))
        np.testing.assert_equal(np.asarray(scaled), rate)


@pytest.mark.parametrize("transform", [scale_by_planned_rate(PLAN, 0.1, 3), scale_by_batch_size(1)])
def test_dtypes_of_updates_are_kept(transform):
    updates, _ = transform.update(jnp.ones(2, jnp.bfloat16), transform.init(None), batch_size=3)
    assert updates.dtype == jnp.bfloat16


@pytest.mark.parametrize("layout", [None, "data2.zero3"])
def test_another_rate_and_number_of_steps_take_the_same_programs(layout):
    """Also the one that makes the first state."""
    model, params = layered(DECODER) if layout else make_loss_fn(DECODER), init_params(DECODER, 0)
    shapes = BatchShapes([(2, 16)], num_microbatches=2, layout=layout, has_many_groups=False)
    texts = set()
    for optimizer in (planned(inner=optax.adamw), planned([PLAN], 0.5, 7, inner=optax.adamw)):
        step = make_train_step(model, optimizer, layout=layout)
        with no_recompiles("count") as count:
            state = step.init(params)
        texts.add(jax.jit(step).lower(state, shapes.spec(shapes.buckets[0])).as_text())
    assert not [each.function for each in count.recompilations if not each.cache_hit]
    assert len(texts) == 1


@pytest.mark.parametrize("layout", [None, "data2.zero3"])
def test_planned_rates_are_known_of_a_state_of_shapes(layout):
    """As that of a run which resumes, whose parameters are in the checkpoint alone."""
    optimizer = with_float32_master(adamw_by_batch_size(COSINE, 3, plan=EPOCHS, **OPTIONS))
    step = make_train_step(layered(DECODER), optimizer, layout=layout)
    state = with_known_tables(step.init(jax.eval_shape(lambda: init_params(DECODER, 0))), optimizer)
    moments, rates = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    np.testing.assert_allclose(moments[2, :NUM_STEPS], beta_sequence(EPOCHS, 0.9, 3), rtol=1e-7)
    assert rates[:NUM_STEPS].tolist() == TABLE.astype(np.float32).tolist()
    assert len(rates.sharding.device_set) == (1 if layout is None else 2)


def test_a_state_without_planned_rates_stays_as_it_is():
    """Also where the optimizer cannot be initialized with a tree of nothing."""
    optimizer = optax.partition({"sgd": optax.sgd(0.1), "adam": optax.adam(0.1)}, {"w": "sgd", "b": "adam"})
    state = optimizer.init({"w": jnp.ones(2), "b": jnp.ones(())})
    assert with_known_tables(state, optimizer) is state


# The scale of each step


@pytest.mark.parametrize("unit", ["sequences", "tokens"])
@pytest.mark.parametrize("rule", ["linear", "sqrt", None])
@pytest.mark.parametrize("base", [3])
def test_the_scale_on_device_is_within_two_ulp(unit, rule, base):
    transform = scale_by_batch_size(base, rule=rule, unit=unit)
    name = {"sequences": "batch_size", "tokens": "num_tokens"}[unit]
    update = jax.jit(lambda size: transform.update(jnp.float32(1), transform.init(None), **{name: size})[0])
    for size in (1, 2, 7, 100, 4097, 10**6):
        exact = float(lr_scale(size, base, rule))
        assert abs(float(update(jnp.float32(size))) - exact) <= 2 * np.spacing(np.float32(exact))


def test_with_64_bits_the_scale_is_exact():
    with jax.enable_x64(True):
        transform = scale_by_batch_size(3, rule="sqrt")
        updates, _ = transform.update(jnp.float64(1), transform.init(None), batch_size=jnp.float32(7))
        assert updates.dtype == np.float64
        assert float(updates) == pytest.approx(float(lr_scale(7, 3, "sqrt")), rel=1e-15)


def test_each_unit_takes_its_own_extra_argument_and_ignores_the_others():
    both = optax.chain(scale_by_batch_size(2), scale_by_batch_size(100, unit="tokens"))
    updates, _ = both.update(jnp.ones(2), both.init(None), batch_size=6, num_tokens=500.0, loss=3.0)
    assert updates.tolist() == [15.0, 15.0]


@pytest.mark.parametrize(("unit", "name"), [("sequences", "batch_size"), ("tokens", "num_tokens")])
def test_the_batch_size_cannot_be_forgotten(unit, name):
    transform = scale_by_batch_size(1, unit=unit)
    other = {"batch_size": "num_tokens", "num_tokens": "batch_size"}[name]
    with pytest.raises(TypeError, match=name):
        transform.update(jnp.ones(2), transform.init(None), **{other: 3})


@pytest.mark.parametrize("rule", ["linear", "sqrt", None, jnp.sqrt])
def test_an_injected_base_batch_size_gives_the_same_scale(rule):
    injected = optax.inject_hyperparams(scale_by_batch_size, static_args=("rule", "unit"))
    transform = injected(base_batch_size=3, rule=rule, unit="tokens")
    init, update = jax.jit(transform.init), jax.jit(transform.update)
    gradient = jnp.ones(2)
    state = init(gradient)
    for size in (1, 7, 10**6):
        updates, state = update(gradient, state, num_tokens=jnp.float32(size))
        expected, _ = scale_by_batch_size(3, rule=rule, unit="tokens").update(gradient, None, num_tokens=size)
        np.testing.assert_allclose(updates, expected, rtol=3e-7)
    state.hyperparams["base_batch_size"] = jnp.float32(7)  # what injecting is for
    updates, _ = update(gradient, state, num_tokens=28.0)
    assert updates.tolist() == [float(lr_scale(28, 7, rule))] * 2


@pytest.mark.parametrize("base", [0.0, -1.0, np.inf, np.nan])
def test_a_base_batch_size_that_cannot_be_refused_while_traced_gives_nan(base):
    update = jax.jit(lambda base: scale_by_batch_size(base).update(jnp.ones(2), None, batch_size=3)[0])
    assert jnp.isnan(update(base)).all()
    for concrete in (base, jnp.float32(base)):
        with pytest.raises(ValueError, match="base_batch_size"):
            scale_by_batch_size(concrete)
        with pytest.raises(ValueError, match="base_batch_size"):
            jax.jit(lambda: scale_by_batch_size(base).update(jnp.ones(2), None, batch_size=3)[0])()


def test_unknown_rules_and_units_are_refused_at_construction():
    for make in (scale_by_batch_size, functools.partial(scale_by_planned_rate, PLAN, 0.1)):
        with pytest.raises(ValueError, match="'cubic'"):
            make(1, rule="cubic")
        with pytest.raises(ValueError, match="'samples'"):
            make(1, unit="samples")
        with pytest.raises(ValueError, match=r"scales .* at least 0"):
            make(1, rule=lambda ratio: -ratio)


# Inside other optimizers


@pytest.mark.parametrize("rule", ["linear", "sqrt"])
def test_a_scaled_adamw_is_adamw_at_the_planned_rate(rule):
    """Weight decay included: it is decoupled from the gradient, not from the rate."""
    rng = np.random.default_rng(0)
    plan = EPOCHS[0]
    weights = {"w": jnp.asarray(rng.normal(size=5), jnp.float32)}
    cosine = optax.cosine_decay_schedule(0.01, 9)
    adamw = optax.adamw(1.0, weight_decay=0.3)
    planned = optax.chain(adamw, scale_by_planned_rate(plan, cosine, 4, rule=rule))
    scaled = optax.chain(optax.adamw(cosine, weight_decay=0.3), scale_by_batch_size(4, rule=rule))
    decay_left_unscaled = optax.chain(
        optax.adam(cosine), scale_by_batch_size(4, rule=rule), optax.add_decayed_weights(-0.3 * 0.01)
    )
    results = []
    for optimizer in map(optax.with_extra_args_support, (planned, scaled, decay_left_unscaled)):
        params, state = weights, optimizer.init(weights)
        gradients = np.random.default_rng(1)
        update = jax.jit(optimizer.update)
        for size in plan.num_sequences:
            grads = {"w": jnp.asarray(gradients.normal(size=5), jnp.float32)}
            updates, state = update(grads, state, params, batch_size=jnp.float32(size))
            params = optax.apply_updates(params, updates)
        results.append(np.asarray(params["w"]))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)
    assert not np.allclose(results[0], results[2], rtol=1e-4)


def test_groups_of_parameters_have_rates_and_rules_of_their_own():
    """Scaled by their own base and rule, by tokens, by a planned table, or not at all."""
    plan = EPOCHS[0]
    planned = scale_by_planned_rate(plan, COSINE, 5, counted_in="tokens")
    groups = {
        "linear": optax.chain(optax.sgd(0.1), scale_by_batch_size(2)),
        "sqrt": optax.chain(optax.sgd(0.2), scale_by_batch_size(8, rule="sqrt")),
        "tokens": optax.chain(optax.sgd(0.3), scale_by_batch_size(16, unit="tokens")),
        "planned": optax.chain(optax.sgd(1.0), planned),
        "unscaled": optax.sgd(0.4),
    }
    optimizer = optax.partition(groups, {name: name for name in groups})
    params = {name: jnp.ones(2) for name in groups}
    expected = {
        "linear": lr_sequence(plan, 0.1, 2),
        "sqrt": lr_sequence(plan, 0.2, 8, rule="sqrt"),
        "tokens": lr_sequence(plan, 0.3, 16, unit="tokens"),
        "planned": lr_sequence(plan, COSINE, 5, counted_in="tokens"),
        "unscaled": np.full(plan.num_steps, 0.4),
    }
    update, state = jax.jit(optimizer.update), optimizer.init(params)
    for step in range(plan.num_steps):
        sizes = jnp.float32(plan.num_sequences[step]), jnp.float32(plan.num_tokens[step])
        updates, state = update(params, state, params, batch_size=sizes[0], num_tokens=sizes[1])
        for name, rates in expected.items():
            assert -updates[name][0].item() == pytest.approx(rates[step], rel=4e-7)
    assert update._cache_size() == 1
