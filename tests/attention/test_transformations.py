"""Attention under JAX's transformations: the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jvarlen.attention import attend, blocks, dense
from tests.attention.inputs import random_qkv
from tests.attention.reference import attend_one_by_one, rule

BOTH = pytest.mark.parametrize("implementation", ["blocks", "xla"])
IDS = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 3], [1, 1, 1, 1, 1, 1, 0, 0, 0], [0] * 9, [4, 5, 5, 5, 5, 5, 6, 6, 6]])
WINDOWS = np.array([0, 3, 1], np.int32)
*QKV, WEIGHTS = random_qkv(4, 9, size=4)
atol = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12)


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64():
        patch.setattr(blocks, "BLOCK", 4)
        patch.setattr(dense, "_SLICE", 4)
        jax.clear_caches()
        yield
    jax.clear_caches()


def outputs_and_grads(attention, *qkv, weights=WEIGHTS):
    """Of a function of queries, keys and values."""

    def weighted(*qkv):
        outputs = attention(*qkv)
        return jnp.sum(outputs * weights), outputs

    grads, outputs = jax.grad(weighted, (0, 1, 2), has_aux=True)(*qkv)
    return outputs, list(grads)


def check(actual, expected):
    jax.tree.map(atol, jax.tree.map(np.asarray, actual), expected)


@functools.cache
def expected_for(window=0):
    return attend_one_by_one(*QKV, WEIGHTS, rule(IDS, IDS, window=window))


@BOTH
def test_outside_jit_and_inside_two(implementation):
    attention = functools.partial(attend, segment_ids=jnp.asarray(IDS), implementation=implementation)
    check(outputs_and_grads(attention, *map(jnp.asarray, QKV)), expected_for())
    check(jax.jit(functools.partial(outputs_and_grads, jax.jit(attention)))(*QKV), expected_for())


def layer(x, window, implementation):
    return jnp.tanh(x + attend(x, x[:, :, :2], x[:, :, 2:], segment_ids=jnp.asarray(IDS), window=window,
                               implementation=implementation))  # fmt: skip


@BOTH
@pytest.mark.parametrize(
    "wrapped",
    [
        lambda step: step,
        jax.checkpoint,
        functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    ],
    ids=["plain", "checkpoint", "dots"],
)
def test_in_a_scan_over_layers_each_with_its_window(wrapped, implementation):
    def scanned(x):
        step = wrapped(lambda x, window: (layer(x, window, implementation), None))
        return jnp.sum(jax.lax.scan(step, x, WINDOWS)[0] * WEIGHTS)

    def unrolled(x):
        for window in WINDOWS:
            x = layer(x, int(window), "xla")
        return jnp.sum(x * WEIGHTS)

    value_and_grad = [jax.jit(jax.value_and_grad(loss))(QKV[0]) for loss in (scanned, unrolled)]
    check(*value_and_grad)


@BOTH
@pytest.mark.parametrize("batched", ["qkv", "q", "ids", "qkv ids offset window"], ids=lambda x: x.replace(" ", "-"))
def test_vmap_gives_what_a_loop_gives(batched, implementation):
    ids = np.array([[[1, 1, 1, 2, 2, 2]], [[0, 1, 1, 1, 2, 0]], [[1, 1, 1, 1, 1, 1]]])
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(3, 1, 6, heads, 2)) for heads in (2, 1, 1))
    arrays = {"q": q, "k": k, "v": v, "ids": ids, "offset": np.arange(3, dtype=np.int32), "window": WINDOWS}
    axes = {"q": "q" in batched, "k": "kv" in batched, "v": "kv" in batched}
    axes |= {name: name in batched for name in ("ids", "offset", "window")}

    def one(q, k, v, ids, offset, window):
        attention = functools.partial(attend, segment_ids=ids, query_offset=offset, window=window,
                                      implementation=implementation)  # fmt: skip
        return outputs_and_grads(attention, q, k, v, weights=1.0 + np.arange(2))

    def at(index):
        return [x[index if axes[name] else 0] for name, x in arrays.items()]

    given = [x if axes[name] else x[0] for name, x in arrays.items()]
    actual = jax.jit(jax.vmap(one, in_axes=[0 if axis else None for axis in axes.values()]))(*given)
    single = jax.jit(one)
    expected = [single(*at(index)) for index in range(3)]
    check(actual, jax.tree.map(lambda *x: np.stack(x), *expected))
    sees = rule(at(2)[3], at(2)[3], offset=at(2)[4], window=at(2)[5])
    check(expected[2], attend_one_by_one(*at(2)[:3], np.broadcast_to(1.0 + np.arange(2), q[0].shape), sees))


@BOTH
@pytest.mark.parametrize("check_vma", [True, False])
def test_on_devices_that_share_the_rows(check_vma, implementation):
    mesh = Mesh(np.array(jax.devices()[:2]), "data")

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
    def on_each(qkv, weights, ids, windows):
        attention = functools.partial(attend, segment_ids=ids, window=windows[0], implementation=implementation)
        return outputs_and_grads(attention, *qkv, weights=weights)

    check(on_each(QKV, WEIGHTS, IDS, np.array([3, 3], np.int32)), expected_for(3))


@BOTH
@pytest.mark.parametrize("spec", [P("data"), P(None, "data"), P(None, None, "data")], ids=["rows", "places", "heads"])
def test_the_compiler_may_share_any_axis_of_the_inputs(spec, implementation):
    mesh = Mesh(np.array(jax.devices()[:2]), "data")
    even = [x[:, :8] for x in (*QKV, WEIGHTS)]
    attention = functools.partial(attend, segment_ids=jnp.asarray(IDS[:, :8]), implementation=implementation)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x in even]
    actual = jax.jit(lambda weights, *qkv: outputs_and_grads(attention, *qkv, weights=weights))(placed[3], *placed[:3])
    check(actual, attend_one_by_one(*even, rule(IDS[:, :8], IDS[:, :8])))


@BOTH
def test_second_derivatives_are_right_or_refused(implementation):
    x, direction = jnp.asarray(QKV[0]), jnp.asarray(QKV[0][::-1])

    def loss(x):
        return jnp.sum(layer(x, 3, implementation) * WEIGHTS)

    def grad_along(x):
        return jnp.vdot(jax.grad(loss)(x), direction)

    grad = jax.jit(jax.grad(loss))
    expected = (grad(x + 1e-5 * direction) - grad(x - 1e-5 * direction)) / 2e-5
    np.testing.assert_allclose(jax.jvp(grad, (x,), (direction,))[1], expected, atol=1e-7)
    if implementation == "xla":
        np.testing.assert_allclose(jax.grad(grad_along)(x), expected, atol=1e-7)
    else:
        with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
            jax.grad(grad_along)(x)
    for forward in (lambda: jax.jvp(loss, (x,), (direction,)), lambda: jax.linearize(loss, x)[1](direction)):
        with pytest.raises(TypeError, match="forward-mode"):
            forward()


def test_no_device_is_asked_what_platform_it_is(monkeypatch):
    def refuse(*args):
        raise AssertionError("asked for the default backend")

    monkeypatch.setattr(jax, "default_backend", refuse)
    lowered = (
        jax.jit(functools.partial(attend, segment_ids=jnp.asarray(IDS))).trace(*QKV).lower(lowering_platforms=("cpu",))
    )
    assert "custom_call" not in lowered.as_text()
