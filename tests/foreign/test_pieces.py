"""Each piece in a loop of somebody else's, without the other pieces."""

import pickle

import equinox as eqx
import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jvarlen import (
    RecompileError,
    compile_buckets,
    load,
    lr_scale,
    make_plan,
    no_recompiles,
    scale_by_batch_size,
    scale_by_planned_rate,
)
from jvarlen.loading import PlanSource

RNG = np.random.default_rng(0)
SAMPLES = [RNG.integers(1, 20, length) for length in RNG.integers(1, 30, 60)]
LENGTHS = np.array([len(sample) for sample in SAMPLES])
PLAN = make_plan(LENGTHS, max_tokens=90, max_shapes=3, num_microbatches=2)
PAIRS = list(zip(SAMPLES, SAMPLES[::-1], strict=True))
FIELDS = [{"tokens": sample, "label": i} for i, sample in enumerate(SAMPLES)]
FORMS = {
    "fields": (PLAN, FIELDS),
    "padded": (PLAN, SAMPLES),
    "packed": (make_plan(LENGTHS, [(2, 40)], packing="best_fit"), SAMPLES),
    "pairs": (make_plan(np.stack([LENGTHS, LENGTHS[::-1]], axis=1), max_tokens=180, max_shapes=2), PAIRS),
}


def assert_same(batches, expected):
    batches, expected = list(batches), list(expected)
    assert len(batches) == len(expected) > 1
    for one, other in zip(batches, expected, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("form", FORMS)
def test_a_plan_source_has_the_batches_of_load_on_the_host_and_pickles(form):
    plan, samples = FORMS[form]
    source = PlanSource(plan, samples)
    assert not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(source[0]))
    assert_same((source[step] for step in range(len(source))), load(plan, samples))
    again = pickle.loads(pickle.dumps(source))
    assert_same([again[1], again[0]], [source[1], source[0]])


def test_grain_reads_steps_in_threads_and_resumes():
    steps = grain.MapDataset.source(PlanSource(PLAN, SAMPLES)).to_iter_dataset(grain.ReadOptions(num_threads=2))
    expected = list(load(PLAN, SAMPLES))
    assert_same(steps, expected)
    iterator = iter(steps)
    for _ in range(3):
        next(iterator)
    state, resumed = iterator.get_state(), iter(steps)
    resumed.set_state(state)
    assert_same(resumed, expected[3:])


def test_a_data_loader_of_pytorch_reads_steps_or_the_samples_of_steps():
    DataLoader = pytest.importorskip("torch.utils.data").DataLoader
    same = {"batch_size": None, "collate_fn": lambda batch: batch}
    assert_same(DataLoader(PlanSource(PLAN, SAMPLES), **same), load(PLAN, SAMPLES))
    of_steps = [PLAN.rows(step)[PLAN.rows(step) >= 0].tolist() for step in range(PLAN.num_steps)]
    read = list(DataLoader(SAMPLES, batch_sampler=of_steps, collate_fn=list))
    assert [len(rows) for rows in read] == PLAN.num_sequences.tolist()
    assert sum(int(sample.sum()) for rows in read for sample in rows) == sum(map(np.sum, SAMPLES))


PARAMS = {"w": jnp.arange(1.0, 4.0)}
GRADS = {"w": jnp.full(3, 0.5)}
SIZES = [8, 64, 3]


def by_hand(inner):
    """Updates that are scaled after the optimizer: an own loop, which passes the batch size."""
    optimizer = optax.chain(inner, scale_by_batch_size(32, rule="sqrt"))
    params, state = PARAMS, optimizer.init(PARAMS)
    for size in SIZES:
        updates, state = optimizer.update(GRADS, state, params, batch_size=size)
        params = optax.apply_updates(params, updates)
    return params


def in_nnx(inner):
    model = nnx.Dict(w=nnx.Param(PARAMS["w"]))
    optimizer = nnx.Optimizer(model, optax.chain(inner, scale_by_batch_size(32, rule="sqrt")), wrt=nnx.Param)
    for size in SIZES:
        optimizer.update(model, nnx.State({"w": nnx.Param(GRADS["w"])}), batch_size=size)
    return {"w": model["w"][...]}


def in_flax_by_plan(make):
    tx = optax.chain(make(1.0), scale_by_planned_rate(SIZES, 0.1, 32, rule="sqrt"))
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    for _ in SIZES:
        state = state.apply_gradients(grads=GRADS)
    return state.params


@pytest.mark.parametrize("make", [optax.sgd, optax.adamw], ids=["sgd", "adamw"])
def test_rates_follow_the_batch_size_in_any_trainer(make):
    expected = by_hand(make(0.1))
    if make is optax.sgd:
        total = 0.1 * 0.5 * lr_scale(SIZES, 32, "sqrt").sum()
        np.testing.assert_allclose(expected["w"], PARAMS["w"] - total, rtol=1e-6)
    for params in (in_nnx(make(0.1)), in_flax_by_plan(make)):
        np.testing.assert_allclose(params["w"], expected["w"], rtol=1e-6)


@pytest.mark.parametrize(("unit", "name"), [("sequences", "batch_size"), ("tokens", "num_tokens")])
def test_a_trainer_that_passes_no_batch_size_learns_what_to_do(unit, name):
    tx = optax.chain(optax.sgd(0.1), scale_by_batch_size(32, unit=unit))
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    with pytest.raises(TypeError, match=rf"needs the extra argument {name} .*params, {name}=….*scale_by_planned_rate"):
        state.apply_gradients(grads=GRADS)


def test_a_guard_sees_a_foreign_loop_compile():
    step = jax.jit(lambda total, tokens: total + tokens.sum())
    total, (batch, *_) = jnp.int32(0), load(PLAN, SAMPLES)
    with pytest.raises(RecompileError, match="compiled"), no_recompiles():
        step(total, batch.tokens)
    for bucket in PLAN.buckets.shapes:
        step(total, jnp.zeros((2, *bucket), jnp.int32))
    with no_recompiles():
        for batch in load(PLAN, SAMPLES):
            total = step(total, batch.tokens)
    assert total == sum(map(np.sum, SAMPLES))


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        return nn.Dense(20)(nn.Embed(20, 4)(tokens))


def mean_loss(logits, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.tokens)
    return (losses * batch.weights).sum() / batch.weights.sum()


def of_flax():
    def step(state, batch):
        def loss_fn(params):
            return mean_loss(state.apply_fn(params, batch.tokens), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    params = Model().init(jax.random.key(0), jnp.zeros((1, 1, 1), jnp.int32))
    return step, TrainState.create(apply_fn=Model().apply, params=params, tx=optax.adam(1e-2))


def of_equinox():
    arrays, rest = eqx.partition(eqx.nn.Embedding(20, 20, key=jax.random.key(0)), eqx.is_inexact_array)
    optimizer = optax.adam(1e-2)

    def step(state, batch):
        def loss_fn(arrays):
            embed = jax.vmap(jax.vmap(jax.vmap(eqx.combine(arrays, rest))))
            return mean_loss(embed(batch.tokens), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state[0])
        updates, opt_state = optimizer.update(grads, state[1])
        return (eqx.apply_updates(state[0], updates), opt_state), {"loss": loss}

    return step, (arrays, optimizer.init(arrays))


@pytest.mark.parametrize("make", [of_flax, of_equinox])
def test_a_compiled_step_of_another_library_gives_what_its_jitted_one_gives(make):
    step, expected = make()
    compiled = compile_buckets(step, expected, PLAN, progress=False, donate=False)
    jitted, state = jax.jit(step), expected
    losses = []
    with no_recompiles():
        for batch in load(PLAN, SAMPLES):
            state, metrics = compiled(state, batch)
            losses.append(metrics["loss"])
    for batch, loss in zip(load(PLAN, SAMPLES), losses, strict=True):
        expected, metrics = jitted(expected, batch)
        np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-6)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    assert losses[-1] < losses[0]
