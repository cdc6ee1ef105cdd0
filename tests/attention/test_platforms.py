"""A function by platform: that of the program's platform is traced and no other, in whatever the call is inside of."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jvarlen._common.jaxprs import count_operations
from jvarlen.attention import attend
from jvarlen.attention.platforms import PLATFORMS, by_platform
from tests.support.meshes import data_mesh


def doubled(x, ids):
    return {"y": x * 2 + ids[:, None], "sum": jnp.sum(x, axis=1)}


def never(x, ids, *, devices):
    raise AssertionError("traced for a platform that nothing is compiled for")


@jax.custom_vjp
def call(x, ids):
    return by_platform(x, ids, default=doubled, tpu=never, cuda=never)


call.defvjp(
    lambda x, ids: (call(x, ids), ids),
    lambda ids, grads: (
        by_platform(grads["y"], ids, default=lambda grad, ids: 2.0 * grad + ids[:, None], tpu=never),
        None,
    ),
)
IDS = jnp.arange(4, dtype=jnp.float32)
X = jnp.arange(12, dtype=jnp.float32).reshape(4, 3)


def gradient(x, ids):
    return jax.grad(lambda x: jnp.sum(call(x, ids)["y"]))(x)


def sharded(check_vma):
    return jax.shard_map(
        gradient, mesh=data_mesh(2), in_specs=(P("data"), P("data")), out_specs=P("data"), check_vma=check_vma
    )


FORMS = {
    "jit": gradient,
    "checkpoint": lambda x, ids: jax.grad(jax.checkpoint(lambda x: jnp.sum(call(x, ids)["y"])))(x),
    "scan": lambda x, ids: (
        jax.lax.scan(lambda _, row: (None, gradient(row[None], ids[:1] * 0)[0]), None, x)[1] + ids[:, None]
    ),
    "vmap": lambda x, ids: jax.vmap(gradient, (0, None))(jnp.stack([x, x]), ids)[1],
    "shard_map": sharded(check_vma=False),
    "shard_map that checks": sharded(check_vma=True),
}


@pytest.mark.parametrize("form", FORMS)
def test_the_default_serves_in_every_form_of_program_and_nothing_else_is_traced(form):
    expected = np.full((4, 3), 2.0) + np.arange(4)[:, None]
    np.testing.assert_array_equal(jax.jit(FORMS[form])(X, IDS), expected)


@pytest.mark.parametrize("form", ["jit", "vmap", "shard_map", "split by the compiler"])
def test_the_function_of_the_platform_is_what_is_lowered(form):
    calls = []

    def default(x, ids):
        return x * ids[:, None]

    def on(platform, x, ids, *, devices):
        calls.append((platform, devices.is_split))
        return default(x, ids)

    def function(x, ids):
        return by_platform(x, ids, default=default, **{name: functools.partial(on, name) for name in PLATFORMS})

    given, mesh = (X, IDS), data_mesh(2)
    if form == "vmap":
        function, given = jax.vmap(function, (None, 0)), (X, IDS[None])
    elif form == "shard_map":
        function = jax.shard_map(function, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
    elif form == "split by the compiler":
        given = jax.device_put(given, NamedSharding(mesh, P("data")))
    traced = jax.jit(function).trace(*given)
    assert not calls
    for platform in PLATFORMS:
        traced.lower(lowering_platforms=(platform,))
        is_split = form == "split by the compiler"
        assert calls == ([(platform, is_split)] if is_split or platform != "cpu" else [])  # the default is traced
        calls.clear()


def test_derivatives_are_those_of_the_default():
    def function(x):
        return by_platform(x, IDS, default=lambda x, ids: x**3 * ids[:, None], tpu=never)

    derivative = jax.jit(lambda x: jax.jvp(function, [x], [jnp.ones_like(x)])[1])
    np.testing.assert_array_equal(derivative(X), 3 * X**2 * IDS[:, None])
    derivative.trace(X).lower(lowering_platforms=("tpu",))


def test_the_default_alone_is_counted():
    def product(x, ids):
        return x @ x.T

    def dear_product(x, ids, *, devices):
        return x @ jnp.ones((3, 1000)) @ jnp.ones((1000, 4))

    jaxpr = jax.make_jaxpr(lambda x, ids: by_platform(x, ids, default=product, tpu=dear_product))(X, IDS)
    assert count_operations(jaxpr.jaxpr, ())["flops"] == 2 * 4 * 3 * 4


@pytest.mark.parametrize("spec", [P("data"), P(None, None, "data")], ids=["rows", "heads"])
def test_rows_and_heads_that_the_compiler_splits_stay_on_their_devices(spec):
    mesh = data_mesh(4)
    arrays = np.random.default_rng(0).normal(size=(3, 4, 600, 4, 8)).astype(np.float32)
    segment_ids = np.sort(np.random.default_rng(1).integers(0, 6, (4, 600)), axis=1)

    def loss(query, key, value, segment_ids):
        return jnp.sum(jnp.sin(attend(query, key, value, segment_ids=segment_ids)))

    gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    expected = gradient(*arrays, segment_ids)
    of_ids = P("data") if spec == P("data") else P()
    given = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
    ids = jax.device_put(segment_ids, NamedSharding(mesh, of_ids))
    assert "all-gather" not in gradient.lower(*given, ids).compile().as_text()
    results = [gradient(*given, ids)]
    with jax.set_mesh(Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,))):
        results.append(gradient(*(jax.device_put(x, spec) for x in arrays), jax.device_put(segment_ids, of_ids)))
    for found in results:
        for one, like in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, like, atol=1e-4)
