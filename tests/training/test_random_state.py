"""Random state in `extra`: microbatches share no mask, and any split of a step draws the same ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jvarlen import make_train_step
from jvarlen.testing import assert_partition_invariant

WIDTH, NUM_MICROBATCHES = 32, 4


class Model(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones(WIDTH))
        self.dropouts = nnx.List([nnx.Dropout(0.5, rngs=rngs.fork()) for _ in range(2)])  # a key for each

    def __call__(self, x):
        for dropout in self.dropouts:
            x = dropout(x)
        return self.weight * x


GRAPH, PARAMS, STATE = nnx.split(Model(nnx.Rngs(3)), nnx.Param, ...)
BATCH = {"x": np.ones((NUM_MICROBATCHES, 2, WIDTH)), "number": np.repeat(np.eye(NUM_MICROBATCHES)[:, np.newaxis], 2, 1)}


def nnx_loss(params, microbatch, extra):
    """`masks` has what each microbatch keeps."""
    model = nnx.merge(GRAPH, params, extra)
    kept = model(microbatch["x"])
    is_real = microbatch["x"][:, :1]
    masks = (jax.lax.stop_gradient(kept[0]) * microbatch["number"][0][:, np.newaxis]) != 0
    return jnp.sum(kept * is_real), jnp.sum(is_real), {"masks": masks * 1.0}, nnx.split(model, nnx.Param, ...)[2]


def pure_loss(params, microbatch, extra):
    variables = nnx.clone(STATE)
    nnx.replace_by_pure_dict(variables, extra)
    *sums, following = nnx_loss(params, microbatch, variables)
    return *sums, nnx.to_pure_dict(following)


def plain_loss(params, microbatch, extra):
    kept = jax.random.bernoulli(extra["key"], 0.5, (2, WIDTH)) * jax.tree.leaves(params)[0]
    is_real = microbatch["x"][:, :1]
    masks = (kept[0] * microbatch["number"][0][:, np.newaxis]) != 0
    return (
        jnp.sum(kept * is_real),
        jnp.sum(is_real),
        {"masks": masks * 1.0},
        extra | {"key": jax.random.split(extra["key"])[0]},
    )


CASES = {
    "nnx": (nnx_loss, STATE),
    "pure": (pure_loss, nnx.to_pure_dict(STATE)),
    "plain": (plain_loss, {"key": jax.random.key(5)}),
}


@pytest.mark.parametrize("name", ["nnx", "plain"])
def test_microbatches_share_no_mask_on_any_number_of_devices(name):
    loss_fn, extra = CASES[name]
    found = []
    for layout in (None, "data2"):
        step = make_train_step(loss_fn, optax.sgd(0.0), layout=layout)
        state, compiled = step.init(PARAMS, extra=extra), jax.jit(step)
        masks = []
        for _ in range(2):
            state, metrics = compiled(state, BATCH)
            masks += list(np.asarray(metrics.sums["masks"]))
        assert len({mask.tobytes() for mask in masks}) == 2 * NUM_MICROBATCHES
        found.append((masks, state.extra))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for after in found:
        counts = [int(leaf) for leaf in jax.tree.leaves(after[1]) if leaf.dtype == np.uint32]
        before = [int(leaf) for leaf in jax.tree.leaves(extra) if leaf.dtype == np.uint32]
        assert [one - other for one, other in zip(counts, before, strict=True)] == [2 * NUM_MICROBATCHES] * len(before)
    assert_partition_invariant(loss_fn, PARAMS, BATCH, extra=extra)


@pytest.mark.parametrize(("name", "kind"), [("discount", "threefry2x32"), ("dropout", "rbg")])
def test_keys_without_a_type_are_refused_in_words(name, kind):
    extra = {name: {"dropout": jax.random.key_data(jax.random.key(0, impl=kind))}}
    step = make_train_step(lambda params, microbatch, extra: (params.sum(), 1.0, extra), optax.sgd(0.1))
    with pytest.raises(
        ValueError, match=rf"extra holds \['{name}'\]\['dropout'\], .*loss_fn\(params, microbatch, key\)"
    ):
        step.init(jnp.ones(2), extra=extra)
