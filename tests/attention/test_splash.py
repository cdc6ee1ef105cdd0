"""Attention by JAX's splash kernel, interpreted: the numbers of a plain softmax, and only blocks that are needed."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jvarlen.attention import attend, splash
from jvarlen.attention.masks import Inputs, MaskArrays, StaticMask
from jvarlen.attention.platforms import Devices
from tests.attention.lowering import lower_for

STATIC = StaticMask(causal=True, scale=0.3, window=None, offset=None, is_rows=False, implementation="splash")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(splash, "_LARGEST_BLOCK", 128)


def ids_of(rows, length):
    """Ids of rows given as (id, tokens) runs; zeros after the last."""
    ids = np.zeros((len(rows), length), np.int32)
    for row, runs in enumerate(rows):
        flat = np.repeat([run[0] for run in runs], [run[1] for run in runs])
        ids[row, : len(flat)] = flat
    return ids


def mask_of(static, query_ids, key_ids, offset, window=None):
    """bool[B, Q, T], pair by pair as the words have it."""
    window = static.window if window is None else window
    query_places = offset[:, None, None] + np.arange(query_ids.shape[1])[:, None]
    key_places = np.arange(key_ids.shape[1])
    mask = (query_ids[:, :, None] == key_ids[:, None]) & (query_ids != 0)[:, :, None]
    if static.causal:
        mask = mask & (key_places <= query_places)
    return mask if window is None else mask & (query_places - key_places < window)


def plain_attention(static, mask, query, key, value):
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    logits = jnp.where(mask[:, None], jnp.einsum("BQHK,BTHK->BHQT", query, key) * static.scale, -jnp.inf)
    largest = jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), -1e30)
    powers = jnp.where(mask[:, None], jnp.exp(logits - largest), 0)
    sums = jnp.sum(powers, axis=-1, keepdims=True)
    output = jnp.einsum("BHQT,BTHK->BQHK", powers / jnp.where(sums == 0, 1, sums), value)
    return output, (largest + jnp.log(sums))[..., 0]


SELF = ids_of(
    [
        [(1, 100), (2, 1), (3, 90), (4, 60)],  # packed
        [(1, 77)],
        [(1, 130), (0, 33), (2, 137)],  # padding in the middle
        [],
        [(5, 40), (2, 100), (5, 10), (2, 150)],  # runs that return, in any order
    ],
    300,
)
SOURCES = ids_of([[(1, 50), (3, 120), (4, 130)], [], [(2, 200), (3, 1)]], 300)  # none for one sample, or for a row
TARGETS = ids_of([[(1, 70), (2, 30), (4, 30)], [(1, 100)], [(1, 10), (2, 1), (3, 90)]], 130)
CASES = {
    "causal": (STATIC, SELF, SELF, np.zeros(5, np.int32), (4, 2)),
    "window as data": (STATIC, SELF, SELF, np.zeros(5, np.int32), (2, 1), 65),
    "window as data, offset": (
        STATIC, np.ones((2, 200), np.int32), ids_of([[(1, 390)], [(1, 333)]], 390), np.array([290, -57], np.int32),
        (2, 2), 140,
    ),
    "window as data that hides nothing": (
        STATIC, TARGETS, SOURCES, np.zeros(3, np.int32), (2, 1), np.iinfo(np.int32).max,
    ),
    "both ways, across": (STATIC._replace(causal=False), TARGETS, SOURCES, np.zeros(3, np.int32), (2, 1)),
    "window, offset": (
        STATIC._replace(window=140), np.ones((2, 200), np.int32), ids_of([[(1, 390)], [(1, 333)]], 390),
        np.array([190, 57], np.int32), (2, 2),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_outputs_and_gradients_are_those_of_a_plain_softmax(case):
    static, query_ids, key_ids, offset, heads, *window = case
    rng = np.random.default_rng(0)
    shapes = [(*query_ids.shape, heads[0], 8), *2 * [(*key_ids.shape, heads[1], 8)], (*query_ids.shape, heads[0], 8)]
    query, key, value, grad = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    query[query_ids == 0] *= 1000  # padding, whose products with itself have no finite power
    key[key_ids == 0] *= 1000
    mask = mask_of(static, query_ids, key_ids, offset, *window)

    @jax.jit
    def by_kernel(query, key, value, grad, *window):
        masks = MaskArrays(jnp.array(query_ids), jnp.array(key_ids), jnp.array(offset), *(window or [None]))
        inputs = Inputs(query, key, value, masks)
        output, log_sums = splash.forward(static, inputs, interpret=True)
        grads = splash.backward(static, inputs, output, log_sums, grad, interpret=True)
        return output, log_sums, grads

    with jax.enable_x64(True):
        plain = functools.partial(plain_attention, static, mask)
        qkv = [jnp.array(x, jnp.float64) for x in (query, key, value)]
        (expected, expected_sums), vjp = jax.vjp(plain, *qkv)
        expected_grads = vjp((jnp.array(grad, jnp.float64), jnp.zeros_like(expected_sums)))
    output, log_sums, grads = by_kernel(query, key, value, grad, *map(jnp.int32, window))
    sees = mask.any(axis=2)
    assert sees.any()
    assert offset.any() or not sees.all()
    assert (np.asarray(output)[~sees] == 0).all()
    assert np.isfinite(log_sums).all()
    np.testing.assert_allclose(output, expected, atol=1e-5)
    np.testing.assert_allclose(*(np.moveaxis(x, 1, 2)[sees] for x in (log_sums, expected_sums)), atol=1e-5)
    for name, got, wanted in zip(("query", "key", "value"), grads, expected_grads, strict=True):
        assert (np.asarray(got)[(query_ids if name == "query" else key_ids) == 0] == 0).all(), name
        np.testing.assert_allclose(got, wanted, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 200), (False, None)])
@pytest.mark.parametrize("num_queries", [1100, 700])
def test_tables_visit_exactly_the_blocks_that_share_a_pair(num_queries, causal, window):
    rng = np.random.default_rng(0)
    static = STATIC._replace(causal=causal, window=window)
    rows = [np.maximum(rng.lognormal(4, 1, 40).astype(int), 1) for _ in range(3)]
    ids = ids_of([[(i + 1, n) for i, n in enumerate(lengths)] for lengths in rows[:2]] + [[]], 5000)
    key_ids = ids[:, :1100]
    offset = np.array([1100 - num_queries, 0, 0], np.int32)
    query_ids = np.stack([row[start:][:num_queries] for row, start in zip(ids, offset, strict=True)])
    masks = MaskArrays(jnp.array(query_ids), jnp.array(key_ids), jnp.array(offset), None)
    mask = mask_of(static, query_ids, key_ids, offset)
    padded = np.pad(mask, ((0, 0), (0, -num_queries % 128), (0, -1100 % 128)))
    needed = padded.reshape(3, -1, 128, 9, 128).any(axis=(2, 4))
    for of in ("queries", "keys"):
        table = splash._table(static, masks, of)
        fetched, is_visited = (np.asarray(x)[0] for x in (table.data_next, table.block_mask))
        if of == "keys":
            needed, fetched, is_visited = np.swapaxes(needed, 1, 2), fetched.T, is_visited.T
        num_others = needed.shape[2]
        if window is not None:
            assert fetched.shape[1] < num_others  # no step for a block out of reach
        visited = np.zeros_like(needed).reshape(-1, num_others)
        for block, (numbers, visits) in enumerate(zip(fetched, is_visited == 1, strict=True)):
            assert (numbers // num_others == block // needed.shape[1]).all()  # of its own row
            visited[block, numbers[visits] % num_others] = True
            assert visits.sum() == len(set(numbers[visits]))
            assert len(set(numbers)) == max(visits.sum(), 1)  # nothing is fetched that is not visited
        np.testing.assert_array_equal(visited.reshape(needed.shape), needed)


def test_a_kernel_is_supported_for_floats_of_tpus_heads_and_tables_and_windows_that_fit(monkeypatch):
    def is_supported(shape=(2, 1000, 4, 64), num_keys=1000, dtype=jnp.bfloat16, static=STATIC, window=None):
        query, key = (jax.ShapeDtypeStruct((shape[0], n, *shape[2:]), dtype) for n in (shape[1], num_keys))
        return splash.supports(static, Inputs(query, key, key, MaskArrays(None, None, None, window)), Devices())

    taken = [{"dtype": jnp.float32}, {"shape": (3, 1, 2, 80), "num_keys": 77}, {"shape": (50, 1000, 4, 64)}]
    taken += [{"window": jnp.int32(3)}, {"shape": (10, 1000, 4, 64), "window": jnp.int32(3)}]
    assert all(is_supported(**given) for given in [{}, {"static": STATIC._replace(window=3)}, *taken])
    refused = [{"dtype": jnp.float16}, {"dtype": jnp.float64}, {"shape": (2, 9, 4, 257)}]
    assert not any(is_supported(**given) for given in [{"shape": (100, 1000, 4, 64)}, *refused])
    monkeypatch.undo()  # blocks of the usual size, with tables for long rows
    for num_rows, has_bits in ((4, True), (8, False)):
        long_rows = {"shape": (num_rows, 2**14, 4, 64), "num_keys": 2**14}
        assert is_supported(**long_rows)
        assert is_supported(**long_rows, window=jnp.int32(3)) == has_bits


@pytest.mark.parametrize("window", [1, 99, 2**14, np.iinfo(np.int32).max])
def test_an_integer_of_32_bits_holds_the_keys_of_a_query(window):
    num_rows, length = 4, 2**14  # the last key takes the highest bit
    masks = MaskArrays(None, None, None, jnp.int32(window))
    places = np.tile([-3, 0, 98, 99, length - 1, length + 50], (num_rows, 1))
    rows, keys = np.arange(num_rows)[:, None, None], np.arange(num_rows * length)
    distance = places[..., None] - (keys - rows * length)
    encoded = splash._EncodedMask.encode(masks, jnp.array(places), length)
    seen = splash._EncodedMask(length.bit_length())(encoded[..., None], jnp.array(keys))
    np.testing.assert_array_equal(seen, (distance >= 0) & (distance < window) & (keys // length == rows))


def test_the_gradient_of_the_kernel_still_takes_what_is_given_to_it():
    """It is private to JAX. Where this fails, read `_splash_attention_bwd` and mend `backward`."""
    parameters = inspect.signature(splash_attention_kernel._splash_attention_bwd).parameters
    assert list(parameters) == [
        "save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function",
        "attn_logits_soft_cap", "interpret", "res", "do",
    ]  # fmt: skip


FORWARD = ["splash_mha_fwd_segmented_residuals"]
BOTH = ["splash_mha_dkv_segmented_no_residuals", "splash_mha_dq_segmented_no_residuals", *FORWARD]
ROWS_FORMS = {
    "packed": {"segment_ids": jnp.ones((2, 600), jnp.int32)},
    "padded": {"lengths": jnp.array([600, 7])},
    "window": {"window": 100},
    "window as data": {"window": jnp.int32(100)},
    "both ways": {"causal": False},
    "offset": {"query_offset": jnp.array([3, 4])},
}


def kernels_for(platform, function, *arguments):
    return sorted(re.findall(r'kernel_name = "(\w+)"', lower_for(platform, function, *arguments)))


@pytest.mark.parametrize("form", ROWS_FORMS)
def test_programs_for_tpus_hold_the_kernels_and_others_do_not(form):
    def loss(x):
        return jnp.sum(attend(x, x[:, :, :1], x[:, :, :1], **ROWS_FORMS[form]).astype(jnp.float32))

    x = jnp.ones((2, 600, 2, 64), jnp.bfloat16)
    assert kernels_for("tpu", loss, x) == FORWARD
    assert kernels_for("tpu", jax.grad(loss), x) == BOTH
    assert "tpu_custom_call" not in lower_for("cpu", jax.grad(loss), x)
    assert "tpu_custom_call" not in lower_for("cuda", jax.grad(loss), x)


def test_programs_for_tpus_hold_the_kernels_in_loops_with_rematerialization_and_on_each_device_of_a_mesh():
    def loss(x, x_of_layers):
        layer = jax.checkpoint(lambda x, y: (x + attend(x, y, y), None))
        return jnp.sum(jax.lax.scan(layer, x, x_of_layers)[0])

    def on_devices(options, x, x_of_layers):
        return jax.shard_map(
            jax.grad(loss), mesh=mesh, in_specs=(P("data"), P(None, "data")), out_specs=P("data"), **options
        )(x, x_of_layers)

    mesh = Mesh(np.array(jax.devices()[:2]).reshape(2, 1), ("data", "tensor"))
    # Where some axes are left to the compiler, as in the library's own layouts, they have one device each.
    mapped = ({"check_vma": True}, {"check_vma": False}, {"check_vma": False, "axis_names": {"data"}})
    x = jnp.ones((2, 600, 2, 64))
    x_of_layers = jnp.stack([x, x])
    for function in (jax.grad(loss), *(functools.partial(on_devices, options) for options in mapped)):
        assert set(kernels_for("tpu", function, x, x_of_layers)) == set(BOTH)
    shared = jax.device_put(x, NamedSharding(mesh, P("data")))  # by the compiler, which cannot split kernels
    assert not kernels_for("tpu", jax.grad(loss), shared, x_of_layers)


def test_what_the_kernel_does_not_take_is_loops_for_tpus_and_refused_by_name():
    x = jnp.ones((1, 600, 2, 300))
    ids = jnp.ones((1, 600), jnp.int32)
    assert "while" in lower_for("tpu", lambda x: attend(x, x, x, segment_ids=ids), x)
    assert kernels_for("tpu", lambda x: attend(x, x, x), x) == []
    with pytest.raises(ValueError, match=r"'splash' does not support query .*300"):
        attend(x, x, x, implementation="splash")
