"""Attention under JAX's transformations: the same numbers, whatever else is traced for other platforms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jvarlen.attention import attend, blocks, dense
from tests.attention.inputs import random_qkv
from tests.attention.lowering import H100, lower_for
from tests.attention.reference import attend_one_by_one, rule

IDS = np.repeat(
    [[1, 1, 1, 2, 2, 2, 2, 0, 3], [1, 1, 1, 1, 1, 1, 0, 0, 0], [0] * 9, [4, 5, 5, 5, 5, 5, 6, 6, 6]], 2, axis=1
)
WINDOWS = np.array([0, 3, 1], np.int32)
ARRAYS = random_qkv(4, 18, size=4)  # queries, keys, values, and weights of the outputs
# Here "auto" is that of short rows, which is "xla".
BOTH = pytest.mark.parametrize("implementation", ["blocks", "auto"])


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64():
        patch.setattr(blocks, "BLOCK", 4)
        patch.setattr(dense, "_SLICE", 4)
        jax.clear_caches()
        yield
    jax.clear_caches()


def arrays_for(implementation, arrays=ARRAYS):
    """In float32 for what takes kernels on other platforms, which are traced with the rest."""
    return [jnp.asarray(x, "float32" if implementation == "auto" else "float64") for x in arrays]


def outputs_and_grads(within, *qkv, weights):
    def weighted(*qkv):
        outputs = within(*qkv)
        return jnp.sum(outputs * weights), outputs

    grads, outputs = jax.grad(weighted, (0, 1, 2), has_aux=True)(*qkv)
    return outputs, list(grads)


def check(actual, expected):
    atol = 1e-12 if jax.tree.leaves(actual)[0].dtype == "float64" else 2e-5
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=atol), actual, expected)


@functools.cache
def expected_for(window=0):
    return attend_one_by_one(*ARRAYS, rule(IDS, IDS, window=window))


@BOTH
def test_outside_jit_and_inside_two(implementation):
    within = functools.partial(attend, segment_ids=jnp.asarray(IDS), implementation=implementation)
    *qkv, weights = arrays_for(implementation)
    check(outputs_and_grads(within, *qkv, weights=weights), expected_for())
    check(jax.jit(functools.partial(outputs_and_grads, jax.jit(within), weights=weights))(*qkv), expected_for())


def layer(x, window, implementation):
    of_others = x[:, :, :2], x[:, :, 2:]
    ids = jnp.asarray(IDS)
    return jnp.tanh(x + attend(x, *of_others, segment_ids=ids, window=window, implementation=implementation))


@pytest.mark.parametrize(
    ("implementation", "wrapped"),
    [
        ("auto", lambda step: step),
        ("blocks", functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)),
    ],
    ids=["plain", "checkpoint"],
)
def test_in_a_scan_over_layers_each_with_its_window(implementation, wrapped):
    x, *_, weights = arrays_for(implementation)

    def scanned(x):
        step = wrapped(lambda x, window: (layer(x, window, implementation), None))
        return jnp.sum(jax.lax.scan(step, x, WINDOWS)[0] * weights)

    def unrolled(x):
        for window in WINDOWS:
            x = layer(x, int(window), "xla")
        return jnp.sum(x * weights)

    check(*(jax.jit(jax.value_and_grad(loss))(x) for loss in (scanned, unrolled)))


@pytest.mark.parametrize(
    ("implementation", "batched"),
    [("blocks", "q"), ("blocks", "qkv ids offset window"), ("auto", "qkv ids offset window")],
    ids=lambda x: x.replace(" ", "-"),
)
def test_vmap_gives_what_a_loop_gives(batched, implementation):
    q, k, v, _ = arrays_for(implementation, random_qkv(3, 18, heads=2, kv_heads=1, size=2))
    arrays = {
        "q": q[:, None], "k": k[:, None], "v": v[:, None], "ids": IDS[[0, 1, 3], None],
        "offset": np.arange(3, dtype=np.int32), "window": WINDOWS,
    }  # fmt: skip
    is_batched = {"q": "q" in batched, "k": "kv" in batched, "v": "kv" in batched}
    is_batched |= {name: name in batched for name in ("ids", "offset", "window")}
    weights = jnp.asarray([1, 2], q.dtype)

    def one(q, k, v, ids, offset, window):
        options = {"segment_ids": ids, "query_offset": offset, "window": window, "implementation": implementation}
        return outputs_and_grads(functools.partial(attend, **options), q, k, v, weights=weights)

    def at(index):
        return [x[index if is_batched[name] else 0] for name, x in arrays.items()]

    given = [x if is_batched[name] else x[0] for name, x in arrays.items()]
    outputs, grads = jax.jit(jax.vmap(one, in_axes=[0 if axis else None for axis in is_batched.values()]))(*given)
    for index in range(3):
        q, k, v, ids, offset, window = at(index)
        sees = rule(ids, ids, offset=offset, window=window)
        expected = attend_one_by_one(q, k, v, jnp.broadcast_to(weights, q.shape), sees)
        check((outputs[index], [grad[index] for grad in grads]), expected)


@pytest.mark.parametrize(("implementation", "check_vma"), [("auto", True), ("blocks", True), ("blocks", False)])
def test_on_devices_that_share_the_rows(check_vma, implementation):
    mesh = Mesh(np.array(jax.devices()[:2]), "data")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    def on_each(qkv, weights, ids, windows):
        options = {"segment_ids": ids, "window": windows[0], "implementation": implementation}
        return outputs_and_grads(functools.partial(attend, **options), *qkv, weights=weights)

    *qkv, weights = arrays_for(implementation)
    check(on_each(qkv, weights, IDS, np.array([3, 3], np.int32)), expected_for(3))


@pytest.mark.parametrize(
    ("implementation", "spec"),
    [("blocks", P("data")), ("auto", P("data")), ("blocks", P(None, "data")), ("blocks", P(None, None, "data"))],
    ids=["rows", "short rows", "places", "heads"],
)
def test_the_compiler_may_share_any_axis_of_the_inputs(spec, implementation):
    mesh = Mesh(np.array(jax.devices()[:2]), "data")
    within = functools.partial(attend, segment_ids=jnp.asarray(IDS), implementation=implementation)
    *qkv, weights = (jax.device_put(x, NamedSharding(mesh, spec)) for x in ARRAYS)
    actual = jax.jit(lambda weights, *qkv: outputs_and_grads(within, *qkv, weights=weights))(weights, *qkv)
    check(actual, expected_for())


def test_second_derivatives_are_right_or_refused():
    x, direction, weights = arrays_for("blocks", [ARRAYS[0], ARRAYS[0][::-1], ARRAYS[3]])

    def loss(x):
        return jnp.sum(layer(x, 3, "blocks") * weights)

    def grad_along(x):
        return jnp.vdot(jax.grad(loss)(x), direction)

    grad = jax.jit(jax.grad(loss))
    expected = (grad(x + 1e-5 * direction) - grad(x - 1e-5 * direction)) / 2e-5
    np.testing.assert_allclose(jax.jvp(jax.grad(loss), (x,), (direction,))[1], expected, atol=1e-7)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(grad_along)(x)
    for forward in (lambda: jax.jvp(loss, (x,), (direction,)), lambda: jax.linearize(loss, x)[1](direction)):
        with pytest.raises(TypeError, match="forward-mode"):
            forward()


def on_two_devices(function):
    mesh = AbstractMesh((2,), ("data",), (AxisType.Auto,), abstract_device=H100)
    return jax.shard_map(function, mesh=mesh, in_specs=P(None, "data"), out_specs=P(None, "data"), check_vma=True)


@pytest.mark.parametrize("form", [jax.vmap, on_two_devices], ids=["vmap", "shard_map"])
@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_the_platform_that_is_compiled_for_decides_not_the_one_here(platform, form, monkeypatch):
    def refuse(*_):
        raise AssertionError("asked for the default backend")

    monkeypatch.setattr(jax, "default_backend", refuse)
    rows, ids = jax.ShapeDtypeStruct((2, 2, 640, 2, 64), jnp.float32), jax.ShapeDtypeStruct((2, 2, 640), jnp.int32)

    def gradient(x, ids):
        if form is not jax.vmap:
            x, ids = x[0], ids[0]
        grad = jax.grad(lambda x: jnp.sum(attend(x, x, x, segment_ids=ids)))(x)
        return grad if form is jax.vmap else grad[None]

    text = lower_for(platform, form(gradient), rows, ids)
    names = {"cuda": "@__gpu$xla.gpu.triton", "tpu": "@tpu_custom_call"}
    found = {name: text.count(f"custom_call {name}") for name in names.values()}
    assert found == {name: 3 * (names.get(platform) == name) for name in names.values()}
