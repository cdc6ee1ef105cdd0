"""Training step: the same numbers however a step is split, padding rows without effect, one division."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import (
    CompileOptions,
    TrainState,
    compile_buckets,
    load,
    make_eval_step,
    make_plan,
    make_train_step,
    scale_by_batch_size,
)
from jvarlen._common.pytree import is_key
from jvarlen.batches import BatchShapes
from jvarlen.compiling.recompiles import no_recompiles
from jvarlen.testing import assert_partition_invariant
from jvarlen.training.step import are_finite
from jvarlen.training.train_state import Metrics, MetricSums, divide_once, key_of_seed, new_state
from tests.conftest import random_dataset
from tests.support.meshes import batch_shardings, data_mesh


class Rows(NamedTuple):
    """M×B rows of four numbers."""

    x: np.ndarray
    weights: np.ndarray
    num_sequences: np.ndarray


def loss_fn(params, microbatch):
    losses = jnp.sum(jnp.sin(microbatch.x * params["w"]) ** 2, axis=-1) + params["b"]
    return jnp.sum(losses * microbatch.weights), jnp.sum(microbatch.weights)


def make_rows(num_rows=24, num_padding_rows=3, seed=0):
    rng = np.random.default_rng(seed)
    weights = rng.integers(1, 5, num_rows).astype(float)
    weights[num_rows - num_padding_rows :] = 0
    return rng.normal(size=(num_rows, 4)), weights


def split_into(x, weights, num_microbatches):
    return Rows(
        x.reshape(num_microbatches, -1, 4), weights.reshape(num_microbatches, -1), np.float64(np.count_nonzero(weights))
    )


def params():
    return {"w": jnp.linspace(0.5, 2, 4), "b": jnp.array(0.1)}


OPTIMIZER = optax.chain(optax.sgd(0.1), scale_by_batch_size(7))


@functools.cache
def jitted_step(mesh):
    return jax.jit(make_train_step(loss_fn, OPTIMIZER, layout=mesh))


def take_step(batch, mesh=None):
    if mesh is not None:
        batch = jax.device_put(batch, batch_shardings(batch, mesh))
    return jitted_step(mesh)(new_state(params(), OPTIMIZER), batch)


def test_every_split_and_any_padding_rows_give_the_same_loss_and_gradient():
    splits = assert_partition_invariant(loss_fn, params(), split_into(*make_rows(), 8))
    without_padding = {(split.num_microbatches, split.num_shards) for split in splits if not split.num_padding_rows}
    assert without_padding >= {(8, 1), (8, 2), (8, 4), (4, 4), (2, 2), (1, 1)}
    assert any(split.num_padding_rows for split in splits)


def test_the_step_is_one_division_and_not_a_mean_of_means():
    x, weights = make_rows(num_padding_rows=0)
    with jax.enable_x64(True):
        _, metrics = take_step(split_into(x, weights, 4))
        losses = np.sum(np.sin(x * np.asarray(params()["w"])) ** 2, axis=-1) + 0.1
        np.testing.assert_allclose(metrics.loss, np.sum(losses * weights) / np.sum(weights), rtol=1e-12)
        means = [np.average(a, weights=b) for a, b in zip(losses.reshape(4, -1), weights.reshape(4, -1), strict=True)]
        assert abs(np.mean(means) - float(metrics.loss)) > 1e-4


def test_a_step_of_padding_rows_gives_zero_and_no_nan():
    x, weights = make_rows()
    state, metrics = take_step(split_into(x, np.zeros_like(weights), 2))
    assert metrics.loss == metrics.loss_sum == metrics.weight_sum == 0
    assert jax.tree.map(np.asarray, state.params).keys() == params().keys()
    np.testing.assert_array_equal(state.params["w"], params()["w"])


def test_the_optimizer_takes_a_step_without_weight():
    """Its gradient is 0, which AdamW's decay does not depend on."""
    step = make_train_step(lambda w, batch: (w * jnp.sum(batch), jnp.sum(batch)), optax.adamw(0.1, weight_decay=0.1))
    state, metrics = step(step.init(jnp.float32(2)), jnp.zeros((2, 3)))
    assert metrics.loss == 0
    np.testing.assert_allclose(state.params, 1.98, rtol=1e-6)
    assert state.opt_state[0].count == 1


def test_dividing_by_no_weight_gives_zero_and_derivatives_of_zero():
    totals, weights = jnp.array([3.0, 4.0, 0.0]), jnp.array([2.0, 0.0, 0.0])
    np.testing.assert_array_equal(divide_once(totals, weights), [1.5, 0, 0])
    gradients = jax.grad(lambda *sums: jnp.sum(divide_once(*sums)), argnums=(0, 1))(totals, weights)
    np.testing.assert_array_equal(gradients, [[0.5, 0, 0], [-0.75, 0, 0]])
    assert divide_once(5, 2) == 2.5
    assert divide_once(jnp.bfloat16(3), 2).dtype == jnp.bfloat16


def test_shards_that_do_not_divide_the_microbatches_are_refused():
    with pytest.raises(ValueError, match="3 microbatches a step do not spread over 2 shards"):
        jax.eval_shape(make_eval_step(loss_fn, layout=data_mesh(2)), params(), split_into(*make_rows(), 3))


def test_evaluation_sums_what_training_sums():
    batch = split_into(*make_rows(), 3)
    kept, metrics = jax.jit(make_eval_step(loss_fn))(params(), batch)
    _, expected = take_step(batch)
    np.testing.assert_allclose(metrics.loss_sum, expected.loss_sum, rtol=1e-6)
    assert float(metrics.weight_sum) == batch.weights.sum()
    np.testing.assert_array_equal(kept["w"], params()["w"])


def test_the_optimizer_is_told_sequences_and_tokens_of_the_whole_step():
    told = []

    def update(updates, state, params=None, *, batch_size, num_tokens):
        told.append((batch_size, num_tokens))
        return jax.tree.map(lambda update: update * 0 + batch_size + num_tokens / 100, updates), state

    watching = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    dataset = random_dataset(12, 10)
    lengths = np.diff(dataset.offsets)
    plan = make_plan(lengths, [(3, 10)], order="length", num_microbatches=4)
    mesh = data_mesh(4)
    step = jax.jit(
        make_train_step(lambda w, batch: (w * jnp.sum(batch.weights), jnp.sum(batch.weights)), watching, layout=mesh)
    )
    state, metrics = step(new_state(jnp.float32(0), watching), next(iter(load(plan, dataset, layout=mesh))))
    assert float(metrics.num_tokens) == lengths.sum()
    np.testing.assert_allclose(float(state.params), 12 + lengths.sum() / 100, rtol=1e-6)
    assert len(told) == 1


def test_gradients_of_bfloat16_parameters_are_added_in_float32():
    """256 ones: in bfloat16 the sum would stop growing at 256, and lose every odd weight before."""
    batch = Rows(np.ones((300, 1, 4)), np.ones((300, 1)), np.float32(300))
    loss = lambda w, microbatch: (w * jnp.sum(microbatch.weights).astype(w.dtype), jnp.sum(microbatch.weights))  # noqa: E731
    optimizer = optax.sgd(1.0)
    state, metrics = jax.jit(make_train_step(loss, optimizer))(new_state(jnp.bfloat16(2), optimizer), batch)
    assert state.params.dtype == jnp.bfloat16
    assert float(metrics.loss_sum) == 600
    assert float(state.params) == 1


def test_the_loss_of_a_step_is_read_without_compiling_and_may_be_traced():
    metrics = Metrics(jnp.float32(6), jnp.float32(4))
    without_weight = Metrics(jnp.float32(6), jnp.float32(0))
    assert (Metrics(3, 2).loss, Metrics(3, 0).loss) == (1.5, 0)
    with no_recompiles():
        assert (float(metrics.loss), float(without_weight.loss)) == (1.5, 0.0)
        assert metrics.loss.dtype == np.float32
    in_program = jax.jit(lambda metrics: metrics.loss)
    assert (float(in_program(metrics)), float(in_program(without_weight))) == (1.5, 0.0)


def compile_for(step, state, batch, mesh=None, **kwargs):
    spec = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    return compile_buckets(
        step,
        state,
        BatchShapes(
            [(1, 1)],
            num_microbatches=len(batch.x),
            layout=mesh,
            batch_spec=lambda bucket, num_microbatches: spec,
            has_many_groups=False,
        ),
        progress=False,
        options=CompileOptions(cache_dir=None),
        **kwargs,
    )


def test_the_program_of_a_plain_loss_holds_no_keys_and_no_extra_state():
    """Its arguments are parameters, optimizer state and batch; two states that leave the rest out give one program."""
    batch, optimizer = split_into(*make_rows(), 4), optax.adam(0.1)
    states = new_state(params(), optimizer), TrainState(params(), optimizer.init(params()), None, None, None)
    texts = [jax.jit(make_train_step(loss_fn, optimizer)).lower(state, batch).as_text() for state in states]
    assert texts[0] == texts[1]
    assert not any(word in texts[0] for word in ("key", "threefry", "random", "extra", "state.step"))
    (signature,) = (line for line in texts[0].splitlines() if "@main(" in line)
    read = params(), optimizer.init(params()), batch.x, batch.weights
    assert signature.count("%arg") == len(jax.tree.leaves(read))


@pytest.mark.parametrize("num_devices", [None, 2])
def test_metrics_are_added_up_without_compiling(num_devices, compilations):
    def loss_with_sums(params, microbatch):
        sums = {"by_feature": jnp.sum(microbatch.x, axis=0), "rows": jnp.sum(microbatch.weights > 0)}
        return *loss_fn(params, microbatch), sums

    mesh = None if num_devices is None else data_mesh(num_devices)
    batch, optimizer = split_into(*make_rows(), 4), optax.sgd(0.1)
    batch = jax.tree.map(np.float32, batch)
    state = new_state(params(), optimizer)
    step = compile_for(make_train_step(loss_with_sums, optimizer, layout=mesh, norms=True), state, batch, mesh)
    steps, sums = [], MetricSums()
    compilations.clear()
    with no_recompiles():
        for _ in range(3):
            state, metrics = step(state, batch)
            steps.append(metrics)
            sums.add(metrics)
        total = sums.total
    assert not compilations
    np.testing.assert_allclose(total.loss, sum(float(metrics.loss_sum) for metrics in steps) / total.weight_sum)
    np.testing.assert_allclose(total.sums["by_feature"], 3 * batch.x.sum(axis=(0, 1)), rtol=1e-5)
    assert total.sums["rows"] == 3 * batch.num_sequences
    assert total.sums["by_feature"].dtype == np.float64
    assert total.grad_norm is None
    assert steps[0].grad_norm > 0


@pytest.mark.parametrize("combine", [lambda one, two: one + two, lambda one, two: sum([one, two])])
def test_metrics_are_no_numbers(combine):
    one = Metrics(jnp.float32(1), jnp.float32(2))
    with pytest.raises(ValueError, match="Metrics are added up by MetricSums"):
        combine(one, one)


def test_steps_without_weight_are_counted():
    sums = MetricSums()
    assert np.isnan(sums.loss)
    for weight in (0, 2, 0):
        sums.add(Metrics(jnp.float32(weight), jnp.float32(weight)))
    assert (sums.num_steps, sums.num_steps_without_weight, sums.loss) == (3, 2, 1)


def test_an_evaluation_leaves_its_state_for_another():
    batch = jax.tree.map(np.float32, split_into(*make_rows(), 4))
    evaluate = compile_for(make_eval_step(loss_fn), params(), batch)
    state = params()
    losses = [float(evaluate(state, batch)[1].loss) for _ in range(2)]
    assert losses[0] == losses[1]
    assert evaluate(state, batch)[0] is state


def test_a_mesh_with_explicit_axes_trains_as_one_device_does():
    dataset = random_dataset(30, 10)
    plan = make_plan(np.diff(dataset.offsets), [(2, 10)], order="length", num_microbatches=4)
    optimizer = optax.adam(0.1)

    def loss_of_tokens(params, microbatch):
        losses = (params["w"][microbatch.tokens] - 1) ** 2
        return jnp.sum(losses * microbatch.weights), jnp.sum(microbatch.weights)

    def losses_on(mesh):
        train_step = make_train_step(loss_of_tokens, optimizer, layout=mesh)
        state = train_step.init({"w": jnp.linspace(-1, 1, 128)})
        step = compile_buckets(train_step, state, plan, progress=False)
        losses = []
        for batch in load(plan, dataset, layout=mesh):
            state, metrics = step(state, batch)
            losses.append(float(metrics.loss))
        return losses

    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    assert mesh.axis_types == (jax.sharding.AxisType.Explicit,)
    np.testing.assert_allclose(losses_on(mesh), losses_on(None), rtol=1e-5)


@pytest.mark.parametrize("step", [make_train_step(loss_fn, optax.sgd(0.1)), make_eval_step(loss_fn)])
def test_a_step_without_the_mesh_that_it_is_compiled_for_is_refused(step):
    state, batch = new_state(params(), optax.sgd(0.1)), split_into(*make_rows(), 4)
    with pytest.raises(ValueError, match="the step was made for one device and is compiled for 2 shards"):
        compile_for(step, state, batch, data_mesh(2))


@pytest.mark.parametrize("num_devices", [None, 2])
def test_a_weight_that_is_no_number_shows_and_a_negative_one_divides(num_devices):
    mesh = None if num_devices is None else data_mesh(num_devices)
    x, weights = make_rows()
    _, expected = take_step(split_into(x, weights, 4), mesh)
    state, metrics = take_step(split_into(x, np.where(np.arange(24) == 5, np.nan, weights), 4), mesh)
    assert np.isnan(metrics.loss)
    assert np.isnan(state.params["w"]).all()
    _, metrics = take_step(split_into(x, -weights, 4), mesh)
    np.testing.assert_allclose(metrics.loss, expected.loss, rtol=1e-6)
    assert metrics.weight_sum == -weights.sum()


@pytest.mark.parametrize("num_devices", [None, 4])
@pytest.mark.parametrize(
    ("dtype", "change"), [(np.uint8, 100), (np.int8, -100), (np.int32, 2**25 + 1), (np.uint32, 2**30)]
)
def test_integers_of_extra_state_are_counted_exactly(num_devices, dtype, change):
    def counting(params, microbatch, extra):
        return *loss_fn(params, microbatch), {"count": extra["count"] + jnp.asarray(change).astype(dtype)}

    mesh, optimizer = None if num_devices is None else data_mesh(num_devices), optax.sgd(0.1)
    state = new_state(params(), optimizer, extra={"count": jnp.array(7, dtype)})
    state, _ = jax.jit(make_train_step(counting, optimizer, layout=mesh))(
        state, split_into(*make_rows(num_padding_rows=6), 8)
    )
    expected = np.array(7, dtype)
    for _ in range(6):  # two of eight microbatches are padding rows
        expected = expected + np.array(change).astype(dtype)
    assert state.extra["count"] == expected


LAYOUTS_WITH_EXTRA = [None, "data2", "data2.zero1", "data2.zero2"]


@pytest.mark.parametrize("layout", LAYOUTS_WITH_EXTRA)
def test_a_flag_of_extra_state_changes_where_any_microbatch_with_weight_changes_it(layout):
    """For a layer that takes its mean from the first step."""

    def loss(params, microbatch, extra):
        mean = jnp.where(extra["init"], extra["mean"], microbatch.x.mean())
        following = {"init": jnp.ones((), bool), "mean": mean, "large": extra["large"] | (microbatch.x.max() > 103)}
        return jnp.sum(params * (microbatch.x - mean)), jnp.sum(microbatch.weights), following

    step = make_train_step(loss, optax.sgd(0.1), layout=layout)
    extra = {"init": jnp.zeros((), bool), "mean": jnp.float32(0), "large": jnp.zeros((), bool)}
    state, found = step.init(jnp.float32(1), extra=extra), []
    for weights, values in [((0, 0), (103, 104)), ((1, 1), (3, 4)), ((1, 0), (103, 104)), ((1, 1), (103, 104))]:
        state, _ = jax.jit(step)(state, rows_of(*values)._replace(weights=np.float32(weights)[:, np.newaxis]))
        found.append((bool(state.extra["init"]), float(state.extra["mean"]), bool(state.extra["large"])))
    assert found == [(False, 0, False), (True, 3.5, False), (True, 3.5, False), (True, 3.5, True)]


@pytest.mark.parametrize("layout", LAYOUTS_WITH_EXTRA)
def test_extra_state_and_sums_are_not_rounded_to_the_types_of_the_loss(layout):
    def loss(params, microbatch, extra):
        value = microbatch.x.astype(np.float64).mean()
        following = {"count": extra["count"] + 1, "wave": extra["wave"] + (1j * value).astype(np.complex64)}
        following |= {"least": jnp.minimum(extra["least"], jnp.float32(28)), "half": extra["half"] * 2}
        return jnp.sum(params * microbatch.x), jnp.float32(3), {"many": 1e9 + value}, following

    with jax.enable_x64(True):
        step = make_train_step(loss, optax.sgd(0.1), layout=layout)
        extra = {"count": np.float64(1e9), "wave": np.complex64(2), "least": np.float32(np.inf)}
        extra["half"] = jnp.bfloat16(3)
        state, metrics = jax.jit(step)(step.init(jnp.float32(1), extra=extra), rows_of(1, 2))
        assert {name: leaf.dtype for name, leaf in state.extra.items()} == {n: e.dtype for n, e in extra.items()}
        assert state.extra == {"count": 1e9 + 1, "wave": 2 + 1.5j, "least": 28, "half": 6}
        assert metrics.sums["many"] == 2e9 + 3
        assert state.params.dtype == np.float32


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        ((1.0, 1.0, {"z": 1j}), r"\['sums'\]\['z'\] a Python complex"),
        ((1.0, np.complex64(1 + 1j)), r"\['weight_sum'\] complex64\[\]"),
        ((1.0, 1.0, {"key": jax.random.key(0)}), r"\['sums'\]\['key'\] key<fry>\[\]"),
    ],
)
def test_sums_of_a_loss_that_are_no_real_numbers_are_refused(returned, named):
    def loss(params, microbatch):
        return returned[0] * params, *returned[1:]

    with pytest.raises(ValueError, match=rf"loss must return real numbers, not {named}: .* the real and the imaginary"):
        make_eval_step(loss)(jnp.float32(1), rows_of(1, 2))


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        ("mean", "a Python str"),
        (np.array(["mean"]), r"<U4\[1\]"),
        (np.array([None, 1]), r"object\[2\]"),
        (np.array("2020", "M8[D]"), r"datetime64\[D\]\[\]"),
    ],
)
def test_a_state_that_is_no_array_of_numbers_is_refused(leaf, said):
    init = make_train_step(loss_fn, optax.sgd(0.1)).init
    with pytest.raises(ValueError, match=rf"extra must hold arrays of numbers alone, not \['name'\] {said}"):
        init(params(), extra={"name": leaf})
    with pytest.raises(ValueError, match=rf"parameters must hold arrays of numbers alone, not \['name'\] {said}"):
        init({"name": leaf})


def test_a_state_that_a_loss_cannot_take_is_refused():
    def drawing(params, microbatch, key):
        return loss_fn(params, microbatch)

    optimizer, batch = optax.sgd(0.1), split_into(*make_rows(), 4)
    state = new_state(params(), optimizer)
    with pytest.raises(ValueError, match=r"drawing takes key: step.init\(params, seed=0\) gives"):
        jax.eval_shape(make_train_step(drawing, optimizer), state, batch)
    with pytest.raises(ValueError, match=r"the state has a key and no step: step\.init"):
        jax.eval_shape(make_train_step(drawing, optimizer), state._replace(key=jax.random.key(0)), batch)


def test_arrays_of_a_batch_that_begin_with_different_axes_are_listed():
    batch = split_into(*make_rows(), 4)
    with pytest.raises(ValueError, match=r"must begin with the same axis.*'\.x': 4, '\.weights': 3"):
        jax.eval_shape(make_eval_step(loss_fn), params(), batch._replace(weights=batch.weights[:3]))
    with pytest.raises(ValueError, match="must begin with the same axis"):
        jax.eval_shape(make_eval_step(loss_fn), params(), {"num_sequences": jnp.ones(())})


def loss_alone(params, batch):
    loss_sum, weight_sum = loss_fn(params, batch)
    return jax.lax.psum(loss_sum, "data"), weight_sum


def weight_alone(params, batch):
    loss_sum, weight_sum = loss_fn(params, batch)
    return loss_sum, jax.lax.pmean(weight_sum, "data")


def with_a_sum(params, batch):
    return *loss_fn(params, batch), {"rows": jax.lax.psum(jnp.sum(batch.weights > 0), "data")}


def loss_alone_in_jit(params, batch):
    return jax.jit(loss_alone)(params, batch)


def loss_alone_in_checkpoint(params, batch):
    return jax.checkpoint(loss_alone)(params, batch)


def loss_alone_in_scan(params, batch):
    def add(sums, row):
        return jax.tree.map(jnp.add, sums, loss_alone(params, row)), None

    return jax.lax.scan(add, (jnp.zeros(()), jnp.zeros(())), batch._replace(num_sequences=None))[0]


def loss_alone_in_branch(params, batch):
    zeros = jnp.zeros(()), jnp.zeros(())
    return jax.lax.cond(batch.num_sequences > 0, loss_alone, lambda *_: zeros, params, batch)


def loss_alone_after_two_turns(params, batch):
    loss_sum, weight_sum = loss_fn(params, batch)
    sums = jax.lax.psum(loss_sum, "data"), jnp.zeros(())
    return jax.lax.fori_loop(0, 2, lambda _, sums: (sums[0], sums[0]), sums)[1], weight_sum


def loss_alone_in_while(params, batch):
    add = functools.partial(jax.tree.map, jnp.add)
    sums = jnp.zeros(()), jnp.zeros(())
    return jax.lax.while_loop(lambda sums: sums[1] < 9, lambda sums: add(sums, loss_alone(params, batch)), sums)


@pytest.mark.parametrize(
    ("loss_fn", "named"),
    [
        (loss_alone, "loss_alone reduces loss_sum over mesh axis 'data' itself"),
        (weight_alone, "weight_alone reduces weight_sum over"),
        (with_a_sum, r"with_a_sum reduces sums\['rows'\] over"),
        (loss_alone_in_jit, "loss_alone_in_jit reduces loss_sum over"),
        (loss_alone_in_checkpoint, "loss_alone_in_checkpoint reduces loss_sum over"),
        (loss_alone_in_scan, "loss_alone_in_scan reduces loss_sum over"),
        (loss_alone_in_branch, "loss_alone_in_branch reduces loss_sum over"),
        (loss_alone_after_two_turns, "loss_alone_after_two_turns reduces loss_sum over"),
    ],
)
@pytest.mark.parametrize("is_training", [True, False])
def test_a_loss_that_reduces_some_of_its_sums_is_refused_by_name(loss_fn, named, is_training):
    mesh, optimizer = data_mesh(2), optax.sgd(0.1)
    state = new_state(params(), optimizer)
    step = make_train_step(loss_fn, optimizer, layout=mesh) if is_training else make_eval_step(loss_fn, layout=mesh)
    with pytest.raises(ValueError, match=named):
        jax.eval_shape(step, state, jax.tree.map(np.float32, split_into(*make_rows(), 4)))


def test_an_evaluation_that_reduces_some_of_its_sums_in_a_while_loop_is_refused_by_name():
    step, state = make_eval_step(loss_alone_in_while, layout=data_mesh(2)), new_state(params(), optax.sgd(0.1))
    with pytest.raises(ValueError, match="loss_alone_in_while reduces loss_sum over"):
        jax.eval_shape(step, state, jax.tree.map(np.float32, split_into(*make_rows(), 4)))


def test_a_loss_may_change_what_it_is_given_in_place():
    def loss_in_place(params, microbatch, extra):
        extra["count"] += 1
        extra["mean"] = (extra["mean"] + microbatch.pop("x").mean()) / 2
        microbatch.pop("num_tokens")
        return params["b"] * microbatch["weights"].sum(), microbatch["weights"].sum(), extra

    x, _ = make_rows(num_padding_rows=0)
    batch = {"x": x.reshape(4, 6, 4), "weights": np.ones((4, 6)), "num_tokens": np.arange(4)}
    optimizer = optax.sgd(0.1)
    state = new_state(params(), optimizer, extra={"count": jnp.zeros((), int), "mean": jnp.zeros(())})
    state, metrics = jax.jit(make_train_step(loss_in_place, optimizer))(state, batch)
    assert state.extra["count"] == 4
    np.testing.assert_allclose(state.extra["mean"], x.mean() / 2, rtol=1e-5)
    assert metrics.num_tokens == 0 + 1 + 2 + 3


def root_loss(params, microbatch, extra):
    """Finite at a root of 0, where its gradient is not."""
    loss_sum = jnp.sum(jnp.sqrt(params * microbatch.x[:, 0]))
    return loss_sum, jnp.float32(1), {"mean": jnp.mean(microbatch.x), "count": extra["count"] + 1, "key": extra["key"]}


def rows_of(*values):
    return Rows(np.float32(values).reshape(-1, 1, 1), np.ones((len(values), 1), np.float32), np.float32(len(values)))


def host_arrays(tree):
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree)


def root_state(optimizer, layout=None):
    step = make_train_step(root_loss, optimizer, layout=layout)
    extra = {"mean": jnp.float32(0), "count": jnp.int32(0), "key": jax.random.key(3)}
    params = jnp.linspace(1, 2, 2048)  # enough for ZeRO to shard them
    return step, step.init(params, extra=extra)


@pytest.mark.parametrize("layout", LAYOUTS_WITH_EXTRA)
@pytest.mark.parametrize("optimizer", [optax.adam(0.1)], ids=["adam"])
def test_the_step_that_breaks_a_state_says_so(optimizer, layout):
    step, state = root_state(optimizer, layout)
    found = []
    for batch in (rows_of(1, 1), rows_of(1, 0), rows_of(1, 1)):
        state, metrics = jax.jit(step)(state, batch)
        found.append((np.isfinite(metrics.loss), bool(metrics.grads_finite), bool(metrics.params_finite)))
    assert found == [(True, True, True), (True, False, False), (False, False, False)]


@pytest.mark.parametrize("layout", LAYOUTS_WITH_EXTRA)
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.apply_if_finite(optax.adam(0.1), 3),
        optax.chain(optax.clip_by_global_norm(1.0), optax.apply_if_finite(optax.adam(0.1), 3)),
        optax.MultiSteps(optax.adam(0.1), 1, should_skip_update_fn=optax.transforms.skip_not_finite),
    ],
    ids=["apply_if_finite", "inside a chain", "skip_not_finite"],
)
def test_a_step_that_the_optimizer_rejects_leaves_no_trace_in_parameters_or_extra(optimizer, layout):
    step, begun = root_state(optimizer, layout)
    before, _ = jax.jit(step)(begun, rows_of(1, 1))
    rejected, metrics = jax.jit(step)(before, rows_of(1, 0))
    assert (bool(metrics.grads_finite), bool(metrics.params_finite)) == (False, True)
    jax.tree.map(np.testing.assert_array_equal, *(host_arrays(state[:3:2]) for state in (rejected, before)))
    after, metrics = jax.jit(step)(rejected, rows_of(4, 4))
    expected, _ = jax.jit(step)(before, rows_of(4, 4))
    assert bool(metrics.grads_finite)
    np.testing.assert_array_equal(after.params, expected.params)
    assert (float(after.extra["mean"]), int(after.extra["count"])) == (4, 4)


def test_derivatives_through_a_step_without_weight_are_numbers():
    step = make_train_step(lambda w, batch: (jnp.sum(w * batch), jnp.sum(batch)), optax.sgd(0.1))
    params_after = lambda w, batch: step(new_state(w, optax.sgd(0.1)), batch)[0].params  # noqa: E731
    assert [float(jax.grad(params_after)(2.0, x)) for x in (jnp.ones((2, 3)), jnp.zeros((2, 3)))] == [1, 1]


def test_a_step_without_parameters_gives_its_loss():
    step = make_train_step(lambda _, batch: (jnp.sum(batch), jnp.float32(3)), optax.sgd(0.1))
    _, metrics = step(step.init({}), jnp.ones((1, 3)))
    assert (metrics.loss, metrics.grads_finite, metrics.params_finite) == (1, True, True)


@pytest.mark.parametrize(
    ("optimizer", "loss_fn"),
    [
        (optax.sgd(1e30), lambda params, x, extra: (jnp.sum(params * x) * 1e10, jnp.float32(1), extra)),
        (optax.sgd(0.1), lambda params, x, extra: (jnp.sum(params * x), jnp.float32(1), jnp.log(-extra))),
    ],
    ids=["update", "extra"],
)
def test_a_finite_gradient_can_break_a_state(optimizer, loss_fn):
    step = make_train_step(loss_fn, optimizer)
    _, metrics = jax.jit(step)(step.init(jnp.ones(3), extra=jnp.float32(1)), np.ones((1, 3), np.float32))
    assert (bool(metrics.grads_finite), bool(metrics.params_finite)) == (True, False)


@pytest.mark.parametrize(
    "dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16", "float16", "float32", "float64", "complex64"]
)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_found_among_many(dtype, value):
    if dtype == "float8_e4m3fn" and np.isinf(value):
        pytest.skip("it has no infinity")
    with jax.enable_x64(dtype == "float64"):
        ones = jnp.ones((3, 1000), dtype)
        largest = jnp.full(2, np.nan_to_num(float(jnp.finfo(dtype).max)), dtype)
        assert are_finite({"ones": ones, "largest": -largest, "none": ones[:0], "ids": jnp.arange(3)})
        assert not are_finite((ones, ones.at[1, 500].set(value)))


def test_parameters_that_are_overwritten_with_their_gradients_are_refused_by_name():
    """Scales of fp8 layers: of a step's values the largest is right, and a mean would be taken."""
    variables = {"params": {"w": jnp.ones(3)}, "_overwrite_with_gradient": {"input_scale": jnp.ones(1)}}
    step = make_train_step(lambda params, x: (jnp.sum(params["params"]["w"] * x), jnp.float32(1)), optax.sgd(0.1))
    with pytest.raises(ValueError, match=r"\['_overwrite_with_gradient'\]\['input_scale'\] are overwritten"):
        step(step.init(variables), np.ones((2, 3)))


def test_seeds_above_32_bits_are_not_cut():
    seeds = [0, 1, 2**32, 2**32 + 1, 2**40, 2**63 - 1]
    keys = [tuple(jax.random.key_data(key_of_seed(seed)).tolist()) for seed in seeds]
    assert len(set(keys)) == len(seeds)
    assert keys[:2] == [tuple(jax.random.key_data(jax.random.key(seed)).tolist()) for seed in seeds[:2]]
    assert new_state(params(), optax.sgd(0.1), seed=2**32).key != new_state(params(), optax.sgd(0.1), seed=0).key


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda x: (jnp.mean(x), {"accuracy": jnp.mean(x)}), "a dict"),
        (lambda x: (jnp.mean(x), (jnp.mean(x),)), "a tuple"),
        (lambda x: (jnp.mean(x), None), "a NoneType"),
        (lambda x: (jnp.mean(x), x), r"float32\[12,4\]"),
    ],
)
def test_a_loss_that_gives_a_mean_and_others_is_told_what_sums_are(returned, said):
    def mean_and_others(params, microbatch):
        return returned(microbatch.x * params["w"])

    state, batch = new_state(params(), optax.sgd(0.1)), split_into(*make_rows(), 2)
    for step in (make_train_step(mean_and_others, optax.sgd(0.1)), make_eval_step(mean_and_others)):
        with pytest.raises(ValueError, match=rf"scalar weight_sum, not {said}: sum over the rows\. .* \(mean, aux\)"):
            step(state, batch)
