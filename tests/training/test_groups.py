"""Steps of several groups: the numbers of all their microbatches in one group, with one reduction and one update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import (
    CompileOptions,
    UserError,
    compile_buckets,
    load,
    make_eval_step,
    make_plan,
    make_train_step,
    scale_by_batch_size,
    with_float32_master,
)
from jvarlen.batches import BatchShapes, StepBatch
from jvarlen.data.tokens import TokenDataset
from jvarlen.models import DecoderConfig, init_params, layered
from jvarlen.parallel import StepLoss
from tests.parallel.steps import assert_equal_trees
from tests.support.collectives import Collectives, count_collectives

WIDTH = 48  # of weights that ZeRO shards
SHAPES = [(4, 2), (2, 5), (8, 1), (2, 3)]  # M and B of the groups of a step; the last has no weight
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2), scale_by_batch_size(7))


@pytest.fixture(autouse=True)
def in_float64():
    with jax.enable_x64(True):
        yield


def loss_fn(params, microbatch, key, extra):
    """It depends on the keys of a microbatch, and changes `extra` in all ways."""
    noise = jax.random.normal(key, WIDTH) + jax.random.uniform(extra["key"])
    hidden = jnp.tanh((microbatch["x"] + noise) @ params["w"] + extra["mean"])
    weights = microbatch["weights"]
    losses = jnp.sum((hidden @ params["v"]) ** 2, axis=-1)
    mean = weights @ hidden / jnp.maximum(jnp.sum(weights), 1e-9)
    following = {"mean": mean, "calls": extra["calls"] + 1, "has_seen": ~extra["has_seen"], "key": extra["key"]}
    return jnp.sum(losses * weights), jnp.sum(weights), {"noise": jnp.sum(noise)}, following


def params():
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(WIDTH, WIDTH)) / 8, "v": rng.normal(size=(WIDTH, 3)) / 8}


def extra():
    return {
        "mean": jnp.zeros(WIDTH), "calls": jnp.int32(3), "has_seen": jnp.array(False), "key": jax.random.key(5)
    }  # fmt: skip


def group_of(number):
    (num_microbatches, rows), rng = SHAPES[number], np.random.default_rng(number)
    weights = rng.uniform(0.5, 2, (num_microbatches, rows)) * (number < 3)
    x = rng.normal(size=(num_microbatches, rows, WIDTH))
    sequences, tokens = np.float64(np.count_nonzero(weights)), np.float64(10 * weights.size)
    return {"x": x, "weights": weights, "num_sequences": sequences, "num_tokens": tokens}


GROUPS = tuple(map(group_of, range(len(SHAPES))))
STEP = StepBatch(GROUPS, sum(group["num_sequences"] for group in GROUPS))


def in_one_group():
    """All microbatches in one group, in their order, with padding rows."""
    most = max(rows for _, rows in SHAPES)

    def join(name):
        each = [group[name] for group in GROUPS]
        if not each[0].ndim:
            return sum(each)
        return np.concatenate([
            np.pad(leaf, [(0, 0), (0, most - leaf.shape[1])] + [(0, 0)] * (leaf.ndim - 2)) for leaf in each
        ])  # fmt: skip

    return {name: join(name) for name in GROUPS[0]}


def take(run, state, num_steps):
    metrics = None
    for _ in range(num_steps):
        state, metrics = run(state)
    return state, metrics


@functools.cache
def expected_after(num_steps):
    step = make_train_step(loss_fn, OPTIMIZER, norms=True)
    compiled, batch = jax.jit(step), in_one_group()
    return take(lambda state: compiled(state, batch), step.init(params(), extra=extra(), seed=1), num_steps)


def halves_of(step):
    """A step by the public halves."""
    accumulate, update = jax.jit(step.accumulate, donate_argnums=2), jax.jit(step.update)

    def run(state):
        sums = None
        for group in GROUPS:
            sums = accumulate(state, group, sums)
        return update(state, sums)

    return run


@pytest.mark.parametrize("layout", [None, "data2", "data2.zero1.grad_bucket_bytes4096", "data2.zero2"])
@pytest.mark.parametrize("how", ["step", "halves"])
def test_groups_of_many_shapes_are_one_step(layout, how):
    step = make_train_step(loss_fn, OPTIMIZER, layout=layout, norms=True)
    compiled = jax.jit(step)
    run = halves_of(step) if how == "halves" else lambda state: compiled(state, STEP)
    for num_steps, rtol in ((1, 1e-12), (10, 1e-11)):
        state, metrics = take(run, step.init(params(), extra=extra(), seed=1), num_steps)
        expected, expected_metrics = expected_after(num_steps)
        assert_equal_trees(step.gather_params(state), jax.tree.map(np.asarray, expected.params), rtol)
        found, wanted = (each | {"key": jax.random.key_data(each["key"])} for each in (state.extra, expected.extra))
        assert_equal_trees(found, wanted, rtol)
        assert_equal_trees(metrics, expected_metrics, rtol)
        assert state.step == num_steps


def test_a_step_of_one_group_is_the_step_of_its_batch():
    step = make_train_step(loss_fn, OPTIMIZER)
    state = step.init(params(), extra=extra(), seed=1)
    batches = GROUPS[0], StepBatch(GROUPS[:1], GROUPS[0]["num_sequences"])
    one, other = (jax.jit(step).lower(state, batch).as_text() for batch in batches)
    assert one == other


@pytest.mark.parametrize("layout", [None, "data2.zero1"])
def test_evaluations_take_groups(layout):
    step = make_train_step(loss_fn, OPTIMIZER, layout=layout)
    state = step.init(params(), extra=extra(), seed=1)
    kept, metrics = jax.jit(make_eval_step(loss_fn, layout=layout))(state, STEP)
    _, expected = jax.jit(make_eval_step(loss_fn))(step.init(params(), extra=extra(), seed=1), in_one_group())
    assert_equal_trees(metrics, expected, 1e-12)
    assert_equal_trees(kept.params, state.params, 0)


def tied_loss(params, microbatch):
    losses = jnp.sum((microbatch["x"] @ params["w"].astype(float) @ params["v"].astype(float)) ** 2, axis=-1)
    return jnp.sum(losses * microbatch["weights"]), jnp.sum(microbatch["weights"])


@pytest.mark.parametrize(
    ("optimizer", "dtype", "trainable"),
    [
        (with_float32_master(optax.adamw(1e-2)), jnp.bfloat16, None),
        (optax.contrib.schedule_free_sgd(1e-2), np.float64, None),
        (optax.MultiSteps(optax.adam(1e-2), 2), np.float64, "w"),
    ],
)
def test_what_the_optimizer_sees_is_one_step(optimizer, dtype, trainable):
    found = []
    for batch in (in_one_group(), STEP):
        step = make_train_step(tied_loss, optimizer, layout="data2.zero1", trainable=trainable)
        start = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params())
        compiled = jax.jit(step)
        state, _ = take(lambda state, run=compiled, batch=batch: run(state, batch), step.init(start), 3)
        found.append(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), (state.params, state.opt_state)))
    assert_equal_trees(found[1], found[0], 1e-6 if dtype == jnp.bfloat16 else 1e-12)


@pytest.mark.parametrize("layout", ["data2.zero1", "data1.stage2.tensor2"])
def test_compiled_programs_give_the_numbers_of_the_plain_step(layout):
    """In three steps of three groups of two shapes, so that the plain step compiles once."""
    assert_equal_trees(trained_decoder(layout), trained_decoder(None), 1e-12)


@functools.cache
def trained_decoder(layout):
    config = DecoderConfig(num_layers=2, width=8, num_heads=2)
    rng = np.random.default_rng(0)
    lengths = np.tile(rng.integers(1, 13, 10), 3)
    dataset = TokenDataset.from_bytes([rng.integers(32, 127, n, np.uint8).tobytes() for n in lengths])
    options = {"sequences_per_step": 10, "num_microbatches": 2, "order": "dataset"}
    plan = make_plan(lengths, [(2, 4), (2, 12)], **options)
    assert plan.num_groups == 3 * plan.num_steps == 9
    assert len(set(plan.group_bucket.tolist())) == 2
    step = make_train_step(layered(config), OPTIMIZER, layout=layout)
    state = step.init(jax.tree.map(np.float64, init_params(config, seed=0)))
    run = jax.jit(step)
    if layout is not None:
        shapes = BatchShapes.of_plan(plan, layout=step.placement)
        run = compile_buckets(step, state, shapes, progress=False, options=CompileOptions(cache_dir=None))
    losses = []
    for batch in load(plan, dataset, layout=layout):
        state, metrics = run(state, batch)
        losses.append(float(metrics.loss))
    return step.gather_params(state), losses


def wide_loss(params, microbatch):
    return jnp.sum(jnp.tanh(microbatch @ params) ** 2), jnp.float32(len(microbatch))


def programs(layout):
    """An accumulation, the update and a step of one group, compiled; and the bytes of the sums on a device."""
    step = make_train_step(wide_loss, optax.sgd(0.1), layout=layout)
    state, batch = step.init(np.ones((256, 256), np.float32)), np.ones((8, 2, 256), np.float32)
    if step.placement is not None:
        batch = jax.device_put(batch, step.placement.batch_shardings(batch))
    sums = step.halves.zeros(state, batch, 0)
    accumulate = jax.jit(step.accumulate, donate_argnums=2).lower(state, batch, sums).compile()
    update = jax.jit(step.update, donate_argnums=0).lower(state, sums).compile()
    whole = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    num_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(sums))
    return (accumulate, update, whole), num_bytes


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("layout", [None, "data4", "data4.zero1"])
def test_sums_stand_once_and_gradients_are_reduced_by_the_update_alone(layout):
    (accumulate, update, whole), num_bytes = programs(layout)
    memory = accumulate.memory_analysis()
    gradient = 4 * 256 * 256
    assert memory.alias_size_in_bytes >= num_bytes >= gradient
    assert memory.temp_size_in_bytes < 1.1 * gradient  # that of one microbatch, which is added to the sums
    assert count_collectives(accumulate) == {}
    found = count_collectives(update)
    assert found == count_collectives(whole)
    kind = {None: None, "data4": "all-reduce", "data4.zero1": "reduce-scatter"}[layout]
    assert layout is None or found[kind] == Collectives(1, 0)


@pytest.mark.parametrize("layout", [None, "data2.zero2"])
def test_sums_lie_alike_before_and_after_a_group_of_any_shape(layout):
    step = make_train_step(loss_fn, OPTIMIZER, layout=layout)
    state = step.init(params(), extra=extra(), seed=1)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), GROUPS)
    zeros = [step.halves.zeros(state, shape, 0) for shape in shapes]
    inside = jax.jit(lambda: step.halves.zeros(state, shapes[0], 0))()
    accumulated = jax.jit(step.halves.accumulate)(state, GROUPS[1], zeros[0])
    for leaf, *others in zip(*map(jax.tree.leaves, (accumulated, inside, *zeros)), strict=True):
        for other in others:
            assert (other.shape, other.dtype) == (leaf.shape, leaf.dtype)
            assert layout is None or other.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
            assert not np.any(other)


def test_what_cannot_be_one_step_is_named():
    step = make_train_step(loss_fn, OPTIMIZER, layout="data2")
    state = step.init(params(), extra=extra(), seed=1)

    def run(*groups, of=step, given=state):
        return jax.eval_shape(of, given, StepBatch(groups, np.float64(1)))

    with pytest.raises(UserError, match="at least one group"):
        run()
    with pytest.raises(UserError, match=r"groups 0 and 2 differ: \['x'\]: float64\[2,3,48\] and float32\[2,3,48\]"):
        run(GROUPS[3], GROUPS[3], GROUPS[3] | {"x": np.float32(GROUPS[3]["x"])})
    with pytest.raises(UserError, match=r"groups 0 and 1 differ: \['num_tokens'\]: float64\[\] and absent"):
        run(GROUPS[0], {name: leaf for name, leaf in GROUPS[1].items() if name != "num_tokens"})
    odd = {name: leaf[:3] if leaf.ndim else leaf for name, leaf in GROUPS[2].items()}
    with pytest.raises(UserError, match="3 microbatches a step do not spread over 2 shards") as error:
        run(GROUPS[0], odd)
    assert error.value.__notes__[0] == "in group 1 of 2 of the step"
    counted = [group | {"num_sequences": np.ones(len(group["x"]))} for group in GROUPS[:2]]
    with pytest.raises(UserError, match=r"num_sequences of a group must be a scalar, not an array \(4,\)"):
        run(*counted)

    def by_rows(params, microbatch):
        losses = jnp.sum((microbatch["x"] @ params["w"]) ** 2, axis=-1)
        return jnp.sum(losses), jnp.float32(1), {"rows": losses}

    of_rows = make_train_step(by_rows, optax.sgd(0.1))
    with pytest.raises(UserError, match=r"same shapes and dtypes: sums\['rows'\]: float64\[2\] -> float64\[5\]"):
        run(*GROUPS[:2], of=of_rows, given=of_rows.init(params()))
    of_step = make_train_step(
        StepLoss(lambda params, x: {"sum": jnp.sum(params * x)}, lambda sums: sums["sum"]), optax.sgd(1)
    )
    with pytest.raises(UserError, match="a StepLoss is of all groups of a step"):
        of_step.accumulate(of_step.init(jnp.ones(2)), jnp.ones((2, 2)))


def test_other_arrays_than_sums_are_refused():
    step = make_train_step(lambda params, x: (jnp.sum(params * x), jnp.float32(x.size)), optax.sgd(0.1))
    state = step.init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"sums are the result of accumulate\(state, batch, sums\), not a NoneType"):
        step.update(state, None)
    with pytest.raises(ValueError, match="not a ArrayImpl"):
        step.accumulate(state, jnp.ones((2, 2)), jnp.ones((2, 2)))
