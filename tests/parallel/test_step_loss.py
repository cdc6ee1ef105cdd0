"""Losses of a whole step have the value and the gradient that plain JAX gives for all of it at once, on any layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jvarlen import UserError, compile_buckets, load, make_eval_step, make_plan, make_train_step
from jvarlen.batches import StepBatch, count_tokens
from jvarlen.estimates import estimate_memory
from jvarlen.parallel import (
    Axes,
    LayeredModel,
    LayeredParams,
    StepLoss,
    TensorSpec,
    column_linear,
    divide_once,
    row_linear,
    sum_over_positions,
    take_positions,
    vocabulary_embedding,
    zero,
)
from jvarlen.parallel.layers import layered_loss_fn
from jvarlen.testing import assert_layout_invariant, assert_partition_invariant
from tests.conftest import random_dataset

RNG = np.random.default_rng(0)
M, B, T, D, V, E, L = 8, 3, 8, 4, 11, 3, 4
RTOL = 1e-12


@pytest.fixture(autouse=True)
def in_float64(monkeypatch):
    monkeypatch.setattr(zero, "MIN_SHARDED", 1)  # so that ZeRO shards such small arrays
    with jax.enable_x64(True):
        yield


def gradient_by(step, params, batch, **init):
    """Loss and gradient of a step, which a rate of 1 subtracts, in the form of the parameters."""
    state = step.init(params, **init)
    state, metrics = jax.jit(step)(state, batch)
    gradient = jax.tree.map(np.subtract, params, step.gather_params(state))
    return float(metrics.loss), gradient, metrics, state


def assert_equals(found, expected):
    for leaf, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=RTOL, atol=RTOL * max(1, np.max(np.abs(other))))


def in_order(leaf):
    """The rows of a step, [M · B, …], in the order of plans."""
    return leaf.swapaxes(0, 1).reshape(-1, *leaf.shape[2:])


# Pairs of vectors, each to be told from all others of the step.
PAIRS = {
    "one": RNG.normal(size=(M, B, D)),
    "other": RNG.normal(size=(M, B, D)),
    "is_real": RNG.random((M, B)) < 0.8,
    "id": (RNG.permutation(M * B) * 104_729 - 700_000).astype(np.int32).reshape(M, B),
}
TOWERS = {"one": RNG.normal(size=(D, 5)), "other": RNG.normal(size=(D, 5))}


def towers(params, microbatch):
    vectors = {side: microbatch[side] @ params[side] for side in params}
    size = jnp.sum(params["one"] ** 2) * jnp.sum(microbatch["is_real"])
    return {"size": size}, vectors | {name: microbatch[name] for name in ("is_real", "id")}


def contrast(sums, rows):
    """Weighted by the ids, which must come as they are."""
    logits = jnp.where(rows["is_real"], rows["one"] @ rows["other"].T, -1e9)
    losses = jax.nn.logsumexp(logits, axis=1) - jnp.diagonal(logits)
    weights = jnp.where(rows["is_real"], 1 + rows["id"] / 1e6, 0)
    contrastive = jnp.sum(losses * weights) / jnp.sum(weights)
    return contrastive + 1e-3 * sums["size"] ** 2, {"contrastive": contrastive, "first": rows["id"][0]}


def contrast_of_all(params):
    sums, rows = towers(params, jax.tree.map(in_order, PAIRS))
    return contrast(sums, rows)


CONTRASTIVE = StepLoss(towers, contrast)


@pytest.mark.parametrize("layout", [None, "data8.zero2", "data4.zero3"])
def test_a_contrastive_loss_is_that_of_all_samples_of_the_step(layout):
    (expected, told), gradient = jax.value_and_grad(contrast_of_all, has_aux=True)(TOWERS)
    step = make_train_step(CONTRASTIVE, optax.sgd(1), layout=layout)
    loss, found, metrics, state = gradient_by(step, TOWERS, PAIRS)
    np.testing.assert_allclose(loss, expected, rtol=RTOL)
    assert_equals(found, gradient)
    assert_equals(metrics.sums, told)
    assert metrics.weight_sum == 1
    state = step.init(TOWERS)
    evaluated = jax.jit(make_eval_step(CONTRASTIVE, layout=layout))(state, PAIRS)[1]
    np.testing.assert_allclose(float(evaluated.loss), expected, rtol=RTOL)
    assert_equals(evaluated.sums, told)


def test_users_can_check_that_layouts_agree():
    assert_layout_invariant(CONTRASTIVE, TOWERS, PAIRS, ["data2.zero1"], num_steps=3)


def test_accumulation_changes_nothing():
    expected = jax.grad(lambda params: contrast_of_all(params)[0])(TOWERS)
    for num_microbatches in (1, 2, 4):
        batch = jax.tree.map(
            lambda leaf, m=num_microbatches: np.swapaxes(in_order(leaf).reshape(-1, m, *leaf.shape[2:]), 0, 1), PAIRS
        )
        step = make_train_step(CONTRASTIVE, optax.sgd(1))
        assert_equals(gradient_by(step, TOWERS, batch)[1], expected)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_narrow_parameters_have_gradients_of_their_own_type(dtype):
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), TOWERS)
    batch = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype if leaf.dtype == np.float64 else None), PAIRS)
    expected = jax.grad(lambda params: contrast_of_all(params)[0])(TOWERS)
    step = make_train_step(CONTRASTIVE, optax.sgd(1), layout="data2")
    state, metrics = jax.jit(step)(step.init(params), batch)
    assert metrics.loss.dtype == np.float64  # of weights that are integers over a number
    for name, leaf in state.params.items():
        assert leaf.dtype == dtype
        error = np.abs(np.float64(params[name]) - np.float64(leaf) - expected[name])
        assert np.max(error) < (1e-4 if dtype == np.float32 else 0.3) * np.max(np.abs(expected[name]))


# Layers of experts whose loads are balanced over the step, and a loss with two denominators and one over pairs of rows.
def here(leaf, axes):
    """What a device has of an array of whole rows."""
    return take_positions(leaf if axes.positions is None else leaf[:, axes.positions], 1, axes=axes)


def over_positions(sums, axes):
    return jax.tree.map(lambda leaf: sum_over_positions(leaf.astype(np.float64), axes=axes), sums)


def embed(ends, microbatch, axes):
    tokens = microbatch["tokens"] if axes.positions is None else microbatch["tokens"][:, axes.positions]
    return vocabulary_embedding(ends["table"], tokens, axes=axes)


def layer(own, x, microbatch, axes):
    is_real = here(microbatch["is_real"], axes)
    gates = jax.nn.softmax(x @ own["router"])
    y = (
        x
        + row_linear(jnp.tanh(column_linear(x, own["up"], axes=axes)), own["down"], axes=axes)
        + gates @ own["experts"]
    )
    if axes.key is not None:
        y = y * here(jax.random.bernoulli(axes.key, 0.7, microbatch["tokens"].shape), axes)[..., None]
    if axes.extra is not None:
        y = y - axes.extra["mean"][axes.layer]
    gated, chosen = (jnp.sum(each, (0, 1), where=is_real[..., None]) for each in (gates, gates > 1 / E))
    sums = {"load": gated, "chosen": chosen, "x": jnp.sum(x, (0, 1), where=is_real[..., None])}
    return y, over_positions(sums, axes)


def layered_sums(ends, x, microbatch, axes):
    is_real = here(microbatch["is_real"], axes)[..., None]
    is_learned = here(microbatch["is_learned"], axes)[..., None] & is_real
    errors = (x - ends["target"]) ** 2
    sums = {"errors": jnp.sum(errors, where=is_learned), "learned": jnp.sum(is_learned)}
    sums |= {"sizes": jnp.sum(jnp.abs(x), where=is_real), "real": jnp.sum(is_real)}
    rows = {"vectors": jnp.sum(x, 1, where=is_real)}
    return over_positions((sums, rows), axes)


def layered_loss(sums, rows, layer_sums):
    two = sums["errors"] / sums["learned"] + 0.1 * sums["sizes"] / sums["real"]
    loads = layer_sums["load"] * layer_sums["chosen"] / sums["real"] ** 2
    similar = rows["vectors"] @ rows["vectors"].T
    return two + jnp.sum(E * jnp.arange(1, L + 1)[:, None] * loads) + jnp.mean(jnp.tanh(similar)), {"two": two}


def next_mean(sums, extra, layer_sums):
    return {"mean": 0.5 * extra["mean"] + 0.5 * layer_sums["x"] / sums["real"]}


SPECS = LayeredParams(
    {"table": TensorSpec(P("tensor"), num_values=V), "target": P()},
    {"router": P(), "experts": P(), "up": P(None, "tensor"), "down": P("tensor")},
)
MODEL = LayeredModel(embed, layer, layered_sums, specs=SPECS, by_positions=True)
BALANCED = StepLoss(MODEL, layered_loss)
PARAMS = LayeredParams(
    {"table": RNG.normal(size=(V, D)), "target": RNG.normal(size=D)},
    {
        "router": RNG.normal(size=(L, D, E)),
        "experts": RNG.normal(size=(L, E, D)),
        "up": RNG.normal(size=(L, D, 6)),
        "down": RNG.normal(size=(L, 6, D)),
    },
)
ROWS = {
    "tokens": RNG.integers(0, V, (M, B, T)).astype(np.int32),
    "is_real": np.arange(T) < RNG.integers(0, T + 1, (M, B, 1)),
    "is_learned": RNG.random((M, B, T)) < 0.3,
}


def all_by_layers(params, batch, keys=None, extra=None):
    """All sums of a step, without any of the library's loops."""

    def of_one(microbatch, key):
        fold = (lambda i: None) if key is None else functools.partial(jax.random.fold_in, key)
        x, of_layers = embed(params.ends, microbatch, Axes(key=fold(L))), []
        for i in range(L):
            own = jax.tree.map(lambda leaf, i=i: leaf[i], params.layers)
            x, sums = layer(own, x, microbatch, Axes(key=fold(i), layer=i, extra=extra))
            of_layers.append(sums)
        sums, rows = layered_sums(params.ends, x, microbatch, Axes(key=fold(L + 1)))
        return sums, rows, jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_layers)

    sums, rows, layer_sums = jax.vmap(of_one)(jax.tree.map(jnp.asarray, batch), keys)
    sums, layer_sums = jax.tree.map(lambda leaf: jnp.sum(leaf, 0), (sums, layer_sums))
    return sums, jax.tree.map(in_order, rows), layer_sums


@functools.cache
def expected_by_layers():
    def loss_of(params):
        return layered_loss(*all_by_layers(params, ROWS))

    return jax.jit(jax.value_and_grad(loss_of, has_aux=True))(PARAMS)


@pytest.mark.parametrize(
    "layout",
    [
        None, "data2.zero3", "data2.tensor2.sequence_parallel.zero1", "stage2.context2", "stage2.data2.remat_full",
    ],
)  # fmt: skip
def test_sums_of_layers_and_of_the_loss_are_those_of_the_step_on_any_layout(layout):
    (expected, told), gradient = expected_by_layers()
    step = make_train_step(BALANCED, optax.sgd(1), layout=layout)
    loss, found, metrics, _ = gradient_by(step, PARAMS, ROWS)
    np.testing.assert_allclose(loss, expected, rtol=RTOL)
    assert_equals(found, gradient)
    assert_equals(metrics.sums, told)
    if layout in ("data2.tensor2.sequence_parallel.zero1", "stage2.data2.remat_full"):
        evaluated = jax.jit(make_eval_step(BALANCED, layout=layout))(step.init(PARAMS), ROWS)[1]
        np.testing.assert_allclose(float(evaluated.loss), expected, rtol=RTOL)


@pytest.mark.parametrize("layout", ["data2.stage2"])
def test_both_passes_have_the_same_keys_and_statistics_are_those_of_the_step(layout):
    step = make_train_step(BALANCED._replace(next_extra=next_mean), optax.sgd(1), layout=layout)
    extra = {"mean": RNG.normal(size=(L, D))}
    loss, found, _, state = gradient_by(step, PARAMS, ROWS, seed=5, extra=extra)
    keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.fold_in(jax.random.key(5), 0)))(np.arange(M))

    @functools.partial(jax.value_and_grad, has_aux=True)
    def whole(params):
        sums, rows, layer_sums = all_by_layers(params, ROWS, keys, extra)
        return layered_loss(sums, rows, layer_sums)[0], next_mean(sums, extra, layer_sums)

    (expected, following), gradient = jax.jit(whole)(PARAMS)
    np.testing.assert_allclose(loss, expected, rtol=RTOL)
    assert_equals(found, gradient)
    assert_equals(state.extra, following)


TINY = LayeredModel(
    lambda ends, microbatch, axes: microbatch["one"] @ ends,
    lambda own, x, microbatch, axes: row_linear(column_linear(x, own["up"], axes=axes), own["down"], axes=axes),
    lambda ends, x, microbatch, axes: {"x": jnp.sum(x), "n": x.size, "least": jnp.min(microbatch["id"])},
    specs=LayeredParams(P(), {"up": P(None, "tensor"), "down": P("tensor")}),
)


def next_of_every_type(sums, extra):
    following = {"large": jnp.float32(1), "least": jnp.minimum(extra["least"], 28), "is_begun": ~extra["is_begun"]}
    following |= {"wave": extra["wave"] * 1j, "steps": extra["steps"] + 1, "exact": extra["exact"] + 1}
    return following | ({"key": jax.random.split(extra["key"])[0]} if "key" in extra else {})


@pytest.mark.parametrize("layout", [None, "data2", "data2.zero1", "data2.zero2", "data2.zero3", "data2.stage2.tensor2"])
def test_extra_state_after_a_step_is_what_next_extra_returns(layout):
    extra = {"large": np.float32(1e8), "least": np.float32(np.inf), "is_begun": np.bool_(False)}
    extra |= {"wave": np.complex64(1), "steps": np.int8(126), "exact": np.float64(1e9)}
    expected = {"large": 1, "least": 28, "is_begun": True, "wave": 1j, "steps": 127, "exact": 1e9 + 1}
    model = TINY
    if layout not in ("data2.zero3", "data2.stage2.tensor2"):
        model, extra["key"] = layered_loss_fn(TINY, takes_key=False), jax.random.key(3)
        expected["key"] = jax.random.split(extra["key"])[0]
    loss = StepLoss(model, lambda sums, extra: (sums["x"] / sums["n"], {"exact": extra["exact"]}), next_of_every_type)
    step = make_train_step(loss, optax.sgd(1), layout=layout)
    params = LayeredParams(TOWERS["one"], {"up": np.ones((2, 5, 4)), "down": np.ones((2, 4, 5))})
    narrow = jax.tree.map(np.float32, (params, PAIRS["one"]))
    state, metrics = jax.jit(step)(step.init(narrow[0], extra=extra), PAIRS | {"one": narrow[1]})
    assert state.extra == expected
    assert {name: leaf.dtype for name, leaf in state.extra.items()} == {n: leaf.dtype for n, leaf in extra.items()}
    assert metrics.sums["exact"] == 1e9


def test_planned_steps_of_packed_rows_have_both_denominators():
    """A mean over tokens and one over samples, of what is trained alone."""
    dataset = random_dataset(40, 9)
    lengths = np.diff(dataset.offsets)
    plan = make_plan(lengths, max_tokens=36, max_length=9, packing="best_fit", num_microbatches=2)

    def sums(params, batch, key):
        is_real = batch.segment_ids > 0
        values = (params["table"] * jax.random.normal(key))[batch.tokens] + params["fixed"]
        is_first = is_real & (batch.positions == 0)
        over = {"tokens": is_real, "samples": is_first}
        return {n: jnp.sum(each) for n, each in over.items()} | {
            f"of_{n}": jnp.sum(values**2, where=each) for n, each in over.items()
        }

    def loss(sums):
        return sums["of_tokens"] / sums["tokens"] + sums["of_samples"] / sums["samples"], {"samples": sums["samples"]}

    params = {"table": RNG.normal(size=256), "fixed": np.float64(3)}
    step = make_train_step(StepLoss(sums, loss), optax.sgd(1), layout="data2", trainable="table")
    state, batches = step.init(params, seed=1), load(plan, dataset, layout="data2")
    compiled = compile_buckets(step, state, batches, progress=False)
    for number, batch in enumerate(batches):
        before = np.asarray(state.params["table"])
        microbatches = [jax.tree.map(lambda leaf, m=m: leaf[m] if leaf.ndim else leaf, batch) for m in range(2)]
        keys = [jax.random.fold_in(jax.random.fold_in(jax.random.key(1), number), m) for m in range(2)]

        def whole(table, microbatches=microbatches, keys=keys):
            of_all = [sums({**params, "table": table}, *each) for each in zip(microbatches, keys, strict=True)]
            return loss(jax.tree.map(lambda *leaves: sum(leaves), *of_all))[0]

        expected, gradient = jax.value_and_grad(whole)(jnp.asarray(before))
        num_sequences, num_tokens = int(batch.num_sequences), float(count_tokens(batch))
        state, metrics = compiled(state, batch)
        np.testing.assert_allclose(float(metrics.loss), expected, rtol=RTOL)
        assert_equals(before - state.params["table"], gradient)
        assert state.params["fixed"] == 3
        assert (metrics.sums["samples"], metrics.num_tokens) == (num_sequences, num_tokens)


@pytest.mark.parametrize("layout", [None, "data2"])
def test_a_denominator_may_be_zero_where_it_is_divided_once(layout):
    """As of an expert that no token of the step has chosen."""

    def sums(w, x):
        return {
            "error": jnp.sum((w * x) ** 2),
            "numbers": x.size,
            "idle": jnp.sum(w * x) * 0,
            "of_idle": jnp.sum(w) * 0,
        }

    def trained(ratio):
        model = StepLoss(sums, lambda sums: sums["error"] / sums["numbers"] + ratio(sums["idle"], sums["of_idle"]))
        step = make_train_step(model, optax.sgd(0.5), layout=layout)
        return step(step.init(3.0), np.ones((2, 4)))

    state, metrics = trained(divide_once)
    assert (float(metrics.loss), float(state.params)) == (9, 0)
    assert np.isnan(trained(jnp.divide)[0].params)


def test_what_is_no_loss_of_a_step_is_refused():
    def refused(match, sums=towers, loss=contrast, **others):
        step = make_train_step(StepLoss(sums, loss, **others), optax.sgd(1))
        with pytest.raises(UserError, match=match):
            step(step.init(TOWERS, extra=np.zeros(2)), PAIRS)

    refused("the loss of a StepLoss must return a float scalar", loss=lambda sums, rows: rows["one"])
    refused("the loss of a StepLoss must return a float scalar", loss=lambda sums, rows: 1)
    refused(r"of_arrays of a StepLoss must return sums or \(sums, rows\), dicts of arrays, not a \w+", sums=of_arrays)
    refused(r"real numbers, not \['z'\] complex128\[\]", sums=lambda params, batch: {"z": jnp.sum(batch["one"]) * 1j})
    refused(r"begin with the axis .* not \['r'\] float64\[4\]", sums=lambda params, batch: ({}, {"r": batch["one"][0]}))
    refused("next_extra must return extra as it takes it", next_extra=lambda sums, extra: extra[0])
    refused(
        r"real numbers, not \['z'\] complex128\[\]", loss=lambda sums, rows: (1.0, {"z": jnp.sum(rows["one"]) * 1j})
    )
    step = make_train_step(BALANCED, optax.sgd(1))
    with pytest.raises(UserError, match=r"no random keys in extra.*init\(…, seed=0\) gives each call axes.key"):
        step.init(PARAMS, extra={"mean": np.zeros((L, D)), "key": jax.random.key(0)})
    calls = []

    def forgetful(own, x, microbatch, axes):
        calls.append(axes)
        return layer(own, x, microbatch, axes) if len(calls) == 1 else layer(own, x, microbatch, axes)[0]

    step = make_train_step(BALANCED._replace(sums=MODEL._replace(layer=forgetful)), optax.sgd(1))
    with pytest.raises(UserError, match="layers must return the same sums, and in every call"):
        step(step.init(PARAMS), ROWS)
    with pytest.raises(UserError, match="this takes a loss function, not a StepLoss"):
        assert_partition_invariant(CONTRASTIVE, TOWERS, PAIRS)
    with pytest.raises(UserError, match="stage2 takes a LayeredModel, and towers is a loss function"):
        make_train_step(CONTRASTIVE, optax.sgd(1), layout="stage2")


def of_arrays(params, microbatch):
    return jnp.sum(microbatch["one"]), jnp.float64(1)


def test_memory_is_estimated_without_the_rows_of_the_step():
    def batch_spec(bucket, num_microbatches):
        shapes = jax.tree.map(lambda leaf: (num_microbatches, *bucket, *leaf.shape[3:]), ROWS)
        return jax.tree.map(lambda leaf, shape: jax.ShapeDtypeStruct(shape, leaf.dtype), ROWS, shapes)

    def loss(ends, x, microbatch, axes):
        return jnp.sum(layered_sums(ends, x, microbatch, axes)[0]["errors"]), 1.0

    ordinary = MODEL._replace(layer=lambda *given: layer(*given)[0], loss=loss)
    of = {"params": PARAMS, "optimizer": optax.adam(1e-3), "bucket": (4, 64), "batch_spec": batch_spec}
    for layout in ("data2.zero3", "data1.stage2.tensor2"):
        expected, found = (estimate_memory(model, layout=layout, **of) for model in (ordinary, BALANCED))
        assert (found.params, found.grads, found.opt_state) == (expected.params, expected.grads, expected.opt_state)
        assert 1 <= found.total / expected.total < 1.3


def in_groups(tree, shapes):
    """Groups of M microbatches of B rows, whose rows in the order of plans are these in turn."""
    start, groups = 0, []
    for num_microbatches, rows in shapes:
        end = start + num_microbatches * rows
        groups.append(
            jax.tree.map(
                lambda leaf, at=np.s_[start:end], m=num_microbatches: np.swapaxes(
                    in_order(leaf)[at].reshape(-1, m, *leaf.shape[2:]), 0, 1
                ),
                tree,
            )
        )
        start = end
    return StepBatch(tuple(groups), np.float64(start))


def running(sums, rows, extra):
    return {"mean": jnp.mean(rows["one"], axis=0) + 0.5 * extra["mean"]}


@pytest.mark.parametrize("layout", [None, "data2", "data2.zero1", "data2.zero2", "data2.zero3"])
def test_a_step_of_several_groups_has_the_loss_of_all_their_rows(layout):
    groups = in_groups(PAIRS, [(4, 2), (2, 3), (2, 5)])
    model = CONTRASTIVE._replace(next_extra=running)
    init = {"extra": {"mean": jnp.ones(5)}}
    (expected, told), gradient = jax.value_and_grad(contrast_of_all, has_aux=True)(TOWERS)
    step = make_train_step(model, optax.sgd(1), layout=layout)
    loss, found, metrics, state = gradient_by(step, TOWERS, groups, **init)
    np.testing.assert_allclose(loss, expected, rtol=RTOL)
    assert_equals(found, gradient)
    assert_equals(metrics.sums, told)
    assert_equals(state.extra, running(*towers(TOWERS, jax.tree.map(in_order, PAIRS)), init["extra"]))
    evaluated = jax.jit(make_eval_step(CONTRASTIVE, layout=layout))(step.init(TOWERS), groups)[1]
    np.testing.assert_allclose(float(evaluated.loss), expected, rtol=RTOL)


@pytest.mark.parametrize("layout", [None, "data2.zero2"])
def test_groups_in_programs_of_their_own_leave_zeros_after_the_rows_of_a_step(layout):
    groups = in_groups(PAIRS, [(4, 2), (2, 3), (2, 5)]).groups
    step = make_train_step(CONTRASTIVE, optax.sgd(1), layout=layout)
    halves, state = step.halves, step.init(TOWERS)
    expected, gradient = jax.value_and_grad(lambda params: contrast_of_all(params)[0])(TOWERS)

    def take(most_rows):
        sums = halves.zeros(state, groups[0], most_rows)
        for group in groups:
            sums = jax.jit(halves.accumulate, donate_argnums=2)(state, group, sums)
        sums = jax.jit(halves.between)(state, sums)
        for group in groups:
            sums = jax.jit(halves.accumulate_again, donate_argnums=2)(state, group, sums)
        return jax.jit(halves.update)(state, sums)

    following, metrics = take(M * B + 7)
    np.testing.assert_allclose(float(metrics.loss), expected, rtol=RTOL)
    assert_equals(jax.tree.map(np.subtract, TOWERS, step.gather_params(following)), gradient)
    rejected, metrics = take(M * B - 1)  # there is no room for all rows
    told = metrics.loss, *metrics.sums.values(), *step.gather_params(rejected).values()
    assert all(np.isnan(each).all() for each in jax.tree.leaves(told))
    assert not metrics.grads_finite
