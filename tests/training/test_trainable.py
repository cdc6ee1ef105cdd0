"""What is not trained has no gradient and no state, and keeps its bits; the rest trains as by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jvarlen import make_eval_step, make_train_step, with_float32_master
from jvarlen.training.trainable import merge_trained, select_trained

TRAINABLE = ["dense.?.kernel", "out"]


def own_params(dtype=np.float64):
    rng = np.random.default_rng(0)
    dense = [{"kernel": rng.normal(size=(6, 6)).astype(dtype), "bias": rng.normal(size=6).astype(dtype)} for _ in "ab"]
    return {"dense": dense, "out": rng.normal(size=(6, 3)).astype(dtype), "shift": np.int32(2), "flip": np.array(True)}


def loss_fn(params, x):
    for own in params["dense"]:
        x = jnp.tanh(x @ own["kernel"] + own["bias"] * params["shift"])
    x = jnp.where(params["flip"], -x, x)
    return jnp.sum(jnp.sin(x @ params["out"])), jnp.asarray(len(x), x.dtype)


def batch_of(num_microbatches=3):
    return np.random.default_rng(1).normal(size=(num_microbatches, 4, 6))


def plain_steps(optimizer, num_steps, trainable=TRAINABLE):
    """`jax.grad` of what is trained, and the optimizer on it."""
    params = own_params()
    trained = select_trained(params, trainable)
    state = optimizer.init(trained)

    def loss(trained):
        return sum(loss_fn(merge_trained(trained, params), x)[0] for x in batch_of()) / 12

    for _ in range(num_steps):
        updates, state = optimizer.update(jax.grad(loss)(trained), state, trained)
        trained = optax.apply_updates(trained, updates)
    return merge_trained(trained, params)


def of_matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def labels_of(params):
    return jax.tree.map_with_path(lambda path, _: "slow" if "out" in jax.tree_util.keystr(path) else "fast", params)


PARTS = {"slow": optax.sgd(1e-2), "fast": optax.adam(1e-2, eps=1e-5)}
OPTIMIZERS = {
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, eps=1e-5, weight_decay=0.1)),
    "masked by a function": optax.adamw(1e-2, eps=1e-5, weight_decay=0.5, mask=of_matrices),
    "masked by the whole tree": optax.masked(optax.adam(1e-2, eps=1e-5), of_matrices(own_params())),
    "labels of the whole tree": optax.partition(PARTS, labels_of(own_params())),
    "labels by a function": optax.partition(PARTS, labels_of),
    "accumulated": optax.MultiSteps(optax.apply_if_finite(optax.lamb(1e-2, eps=1e-5), 2), 2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_a_plain_loop_over_what_is_trained(name):
    with jax.enable_x64(True):
        optimizer, params = OPTIMIZERS[name], own_params()
        step = make_train_step(loss_fn, optimizer, trainable=TRAINABLE)
        state, compiled = step.init(params), jax.jit(step)
        for _ in range(4):
            state, _ = compiled(state, batch_of())
        found, expected = step.gather_params(state), plain_steps(optimizer, 4)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), found, expected)
        assert np.abs(found["out"] - params["out"]).min() > 1e-4
        for name in ("shift", "flip"):
            np.testing.assert_array_equal(found[name], params[name])
        for own, before in zip(found["dense"], params["dense"], strict=True):
            np.testing.assert_array_equal(own["bias"], before["bias"])
            assert (own["kernel"] != before["kernel"]).all()


def test_only_what_is_trained_has_state_gradients_and_norms():
    optimizer = with_float32_master(optax.adam(1e-2))
    step = make_train_step(loss_fn, optimizer, trainable="out", norms=True)
    state = step.init(own_params(jnp.bfloat16))
    arrays = [leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim]
    assert arrays == [(6, 3)] * 3  # the master and two moments
    batch = batch_of().astype(jnp.bfloat16)
    following, metrics = jax.jit(step)(state, batch)
    grad = jax.grad(lambda out: sum(loss_fn({**state.params, "out": out}, x)[0].astype(np.float32) for x in batch) / 12)
    np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(grad(state.params["out"])).astype(float), rtol=0.02)
    assert following.params["out"].dtype == jnp.bfloat16
    assert jax.tree.structure(following) == jax.tree.structure(state)
    assert float(make_eval_step(loss_fn)(state, batch)[1].loss_sum) == float(metrics.loss_sum)


def test_what_the_backward_pass_does_not_need_is_not_kept():
    """With the last layer alone trained, no residual of those before it is held, and no gradient but its own."""
    width, depth = 64, 12
    params = {"body": np.zeros((depth, width, width), np.float32), "head": np.zeros((width, width), np.float32)}

    def deep(params, x):
        x, _ = jax.lax.scan(lambda x, own: (jnp.tanh(x @ own), None), x, params["body"])
        return jnp.sum(jnp.sin(x @ params["head"])), jnp.float32(len(x))

    def temp_bytes(trainable):
        step = make_train_step(deep, optax.sgd(0.1), trainable=trainable)
        compiled = jax.jit(step).lower(step.init(params), np.zeros((2, 256, width), np.float32)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    x_bytes = 256 * width * 4
    assert temp_bytes("head") < 6 * x_bytes
    assert temp_bytes(None) > depth * x_bytes + params["body"].nbytes


def test_variables_of_nnx_keep_their_kind():
    class Scale(nnx.Param):
        pass

    class Model(nnx.Module):
        def __init__(self):
            self.linear, self.scale = nnx.Linear(6, 3, rngs=nnx.Rngs(0)), Scale(jnp.ones(3))

    graphdef, params = nnx.split(Model())

    def loss_fn(params, x):
        model = nnx.merge(graphdef, params)
        return jnp.sum(jnp.sin(model.linear(x) * model.scale[...])), jnp.float32(len(x))

    step = make_train_step(loss_fn, optax.adam(1e-2), trainable=["linear.kernel", "scale"])
    state = step.init(params)
    following, _ = jax.jit(step)(state, batch_of().astype(np.float32))
    model = nnx.merge(graphdef, following.params)
    assert isinstance(model.scale, Scale)
    assert (model.scale[...] != 1).all()
    assert not model.linear.bias[...].any()


def test_patterns_that_match_nothing_are_named_with_what_there_is():
    names = r"dense\.0\.bias, dense\.0\.kernel, dense\.1\.bias, .*"
    for trainable, said in (("heads.*", "'heads.*' of trainable"), (["out", "shift"], "'shift' of trainable")):
        with pytest.raises(ValueError, match=f"{said.replace('*', '[*]')} matches no parameter .* named {names}"):
            make_train_step(loss_fn, optax.sgd(0.1), trainable=trainable).init(own_params())
    with pytest.raises(ValueError, match="trainable, which is empty, matches no parameter"):
        make_train_step(loss_fn, optax.sgd(0.1), trainable=[]).init(own_params())
    with pytest.raises(ValueError, match=r"parameters must be numbers, not \['rng'\] key"):
        make_train_step(loss_fn, optax.sgd(0.1)).init({"rng": jax.random.key(0)})


def test_float16_is_not_trained_but_stays_where_it_is_frozen():
    params = {"base": jnp.ones(3, jnp.float16), "a": jnp.ones(3), "b": jnp.ones(3, jnp.bfloat16)}

    def loss_fn(params, x):
        return jnp.sum(x * params["base"] * params["a"]) + jnp.sum(params["b"]).astype(float), jnp.float32(1)

    for layout, trainable in ((None, None), ("data2.zero1", ["base", "a"])):
        step = make_train_step(loss_fn, with_float32_master(optax.sgd(0.1)), layout=layout, trainable=trainable)
        with pytest.raises(
            ValueError, match=r"float16 is not trained, .*: base\. Take bfloat16, .*with_float32_master"
        ):
            step.init(params)
    step = make_train_step(loss_fn, optax.sgd(0.5), trainable=["a"])
    state, _ = jax.jit(step)(step.init(params), jnp.ones((1, 3)))
    np.testing.assert_array_equal(state.params["base"], params["base"], strict=True)
    np.testing.assert_array_equal(state.params["a"], np.full(3, 0.5, np.float32), strict=True)


def test_integers_alone_are_nothing_to_train():
    with pytest.raises(ValueError, match=r"only floats have gradients, and these are \['a'\] int32\[10\], \['n'\]"):
        make_train_step(loss_fn, optax.sgd(0.1)).init({"a": jnp.zeros(10, int), "n": np.array(3)})
