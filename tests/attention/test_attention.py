"""Attention gives what its definition says: numbers, gradients, padding, types and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen.attention import attend, blocks, dense
from tests.attention.inputs import packings, random_qkv, rows_of_ids
from tests.attention.lowering import lower_for
from tests.attention.reference import attend_one_by_one, ids_of_lengths, rule

BLOCK = 4
Q, T = 11, 14  # some blocks and a part of one
BOTH = pytest.mark.parametrize("implementation", ["blocks", "xla"])
CAUSAL_OR_NOT = pytest.mark.parametrize("causal", [True, False])


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", BLOCK)
        patch.setattr(dense, "_SLICE", BLOCK)
        jax.clear_caches()
        yield
    jax.clear_caches()


@functools.cache
def program(**static):
    """Outputs and gradients of their weighted sum; compiled once for all examples of these options and shapes."""

    @jax.jit
    def outputs_and_grads(query, key, value, weights, traced):
        def weighted(*qkv):
            outputs = attend(*qkv, **static, **traced)
            return jnp.sum(outputs * weights), outputs

        grads, outputs = jax.grad(weighted, (0, 1, 2), has_aux=True)(query, key, value)
        return outputs, grads

    return outputs_and_grads


def check(arrays, sees, *, traced, scale=None, atol=1e-12, **static):
    """Outputs and gradients against the definition; `arrays` are those of `random_qkv`."""
    with jax.enable_x64():
        if scale is not None:
            static["scale"] = scale
        outputs, grads = program(**static)(*arrays, {name: jnp.asarray(value) for name, value in traced.items()})
        expected, expected_grads = attend_one_by_one(*arrays, sees, scale)
        assert outputs.dtype == arrays[0].dtype
        np.testing.assert_allclose(outputs, expected, rtol=0, atol=atol)
        for name, grad, expected_grad in zip(("query", "key", "value"), grads, expected_grads, strict=True):
            np.testing.assert_allclose(grad, expected_grad, rtol=0, atol=atol, err_msg=f"gradient of {name}")


LENGTHS = st.lists(st.integers(0, T), min_size=2, max_size=2)
OFFSETS = st.lists(st.integers(-T, T + Q), min_size=2, max_size=2)
WINDOWS = st.integers(-1, T + 1)


@BOTH
@CAUSAL_OR_NOT
@settings(max_examples=25)
@given(
    query_ids=packings(2, Q) | rows_of_ids(2, Q), key_ids=packings(2, T) | rows_of_ids(2, T), offset=OFFSETS,
    window=WINDOWS,
)  # fmt: skip
def test_queries_get_what_they_see_of_keys_of_the_same_sample(
    query_ids, key_ids, offset, window, implementation, causal
):
    traced = {"segment_ids": query_ids, "key_segment_ids": key_ids, "query_offset": np.array(offset, np.int32)}
    if causal:
        traced["window"] = np.int32(window)
    sees = rule(query_ids, key_ids, offset=offset, causal=causal, window=window)
    check(random_qkv(2, Q, T), sees, traced=traced, causal=causal, implementation=implementation)


@BOTH
@CAUSAL_OR_NOT
@settings(max_examples=15)
@given(lengths=LENGTHS)
def test_rows_of_one_sample_attend_up_to_their_lengths(lengths, implementation, causal):
    ids = ids_of_lengths(lengths, T)
    sees = rule(ids, ids, causal=causal)
    check(random_qkv(2, T), sees, traced={"lengths": lengths}, causal=causal, implementation=implementation)


@BOTH
@CAUSAL_OR_NOT
@settings(max_examples=10)
@given(lengths=LENGTHS, key_lengths=LENGTHS, offset=st.integers(0, T))
def test_queries_and_keys_may_have_lengths_of_their_own(lengths, key_lengths, offset, implementation, causal):
    sees = rule(ids_of_lengths(lengths, Q), ids_of_lengths(key_lengths, T), offset=offset, causal=causal)
    traced = {"lengths": lengths, "key_lengths": key_lengths, "query_offset": np.int32(offset)}
    check(random_qkv(2, Q, T), sees, traced=traced, causal=causal, implementation=implementation)


PACKED = [[1, 1, 1, 1, 1, 2, 3, 3, 3, 3, 3, 3, 0, 0], [0, 4, 4, 4, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9]]


@BOTH
@pytest.mark.parametrize(("window", "offset"), [(-1, 2), (1, 0), (5, -3), (T, 0), (T, 9), (None, -2 * T)])
def test_windows_and_offsets_may_be_numbers(window, offset, implementation):
    sees = rule(PACKED, PACKED, offset=offset, window=window)
    static = {"window": window, "query_offset": offset, "implementation": implementation}
    check(random_qkv(2, T), sees, traced={"segment_ids": PACKED}, **static)


@BOTH
@pytest.mark.parametrize(
    ("queries", "keys", "causal"),
    [(1, 1, True), (3, 2 * BLOCK, False), (9, 2, True)],
)
def test_all_is_one_sample_where_nothing_else_is_given(queries, keys, causal, implementation):
    ids = np.ones((2, queries)), np.ones((2, keys))
    check(random_qkv(2, queries, keys), rule(*ids, causal=causal), traced={}, causal=causal,
          implementation=implementation)  # fmt: skip


@BOTH
def test_the_last_queries_of_a_row_see_the_keys_before_them(implementation):
    """As with a cache of keys, of which each row has filled some."""
    filled = [9, 4, 1]
    sees = rule(np.ones((3, 2)), ids_of_lengths(filled, T), offset=np.array(filled) - 2)
    traced = {"key_lengths": filled, "query_offset": np.array(filled, np.int32) - 2}
    check(random_qkv(3, 2, T), sees, traced=traced, implementation=implementation)


@BOTH
@pytest.mark.parametrize("kv_heads", [1, 6])
def test_heads_may_share_keys_and_values(kv_heads, implementation):
    arrays = random_qkv(2, T, heads=6, kv_heads=kv_heads)
    check(arrays, rule(PACKED, PACKED), traced={"segment_ids": PACKED}, implementation=implementation)


@BOTH
@pytest.mark.parametrize("dtype", ["int8", "uint64"])
def test_ids_lengths_and_offsets_may_be_of_any_integer_type(dtype, implementation):
    with jax.enable_x64():
        qkv = [jnp.asarray(x) for x in random_qkv(2, T)[:3]]
        numbers = [np.array(x).astype(dtype) for x in (PACKED, [5, 14], [2, 0], 3)]
        ids, lengths, offset, window = map(jnp.asarray, numbers)
        for given_as, sees in [
            ({"segment_ids": ids}, rule(PACKED, PACKED, window=3)),
            ({"lengths": lengths, "query_offset": offset},
             rule(ids_of_lengths([5, 14], T), ids_of_lengths([5, 14], T), offset=[2, 0], window=3)),
        ]:  # fmt: skip
            outputs = attend(*qkv, **given_as, window=window, implementation=implementation)
            np.testing.assert_allclose(outputs, attend_one_by_one(*qkv, qkv[0], sees)[0], rtol=0, atol=1e-12)


@BOTH
@CAUSAL_OR_NOT
@pytest.mark.parametrize(("dtype", "garbage"), [("float64", 1e200), ("bfloat16", 1e30)])
def test_what_padding_holds_changes_nothing(dtype, garbage, causal, implementation):
    with jax.enable_x64():
        arrays = [jnp.asarray(x, dtype) for x in random_qkv(2, T)]
        is_padding = (np.array(PACKED) == 0)[:, :, None, None]
        signs = np.where(np.arange(3) % 2, -1, 1)
        spoiled = [jnp.where(is_padding, jnp.asarray(size * signs, dtype), x)
                   for x, size in zip(arrays, (garbage, garbage, garbage, 1e3), strict=True)]  # fmt: skip
        run = program(implementation=implementation, causal=causal)
        expected, actual = (run(*x, {"segment_ids": np.array(PACKED)}) for x in (arrays, spoiled))
        jax.tree.map(np.testing.assert_array_equal, actual, expected)
        assert all(not x[is_padding[:, :, 0, 0]].any() for x in jax.tree.leaves(actual))


@BOTH
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-6), ("bfloat16", 2e-2), ("float16", 3e-3)])
def test_fewer_bits_round_and_no_more(dtype, atol, implementation):
    """Against exact numbers of the rounded inputs."""
    arrays = [np.asarray(jnp.asarray(x, dtype).astype("float32")) for x in random_qkv(2, T)]
    outputs, grads = program(implementation=implementation)(
        *(jnp.asarray(x, dtype) for x in arrays), {"segment_ids": np.array(PACKED)}
    )
    expected = attend_one_by_one(*arrays, rule(PACKED, PACKED))
    for actual, exact in zip((outputs, *grads), (expected[0], *expected[1]), strict=True):
        assert actual.dtype == dtype
        np.testing.assert_allclose(actual.astype("float32"), exact, rtol=0, atol=atol * np.abs(exact).max())


SOME = random_qkv(2, 6, dtype="float32")[:3]
ROW = np.ones((2, 6), np.int32)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"lengths": [3, 4], "segment_ids": ROW}, "lengths.*segment_ids"),
        ({"lengths": [3, 4], "key_segment_ids": ROW}, "lengths.*segment_ids"),
        ({"lengths": [3, 4, 5]}, "lengths"),
        ({"lengths": [[3, 4]]}, "lengths"),
        ({"lengths": [3.0, 4.0]}, "lengths"),
        ({"segment_ids": ROW[:, :5]}, "segment_ids"),
        ({"segment_ids": ROW[0]}, "segment_ids"),
        ({"segment_ids": ROW.astype(np.float32)}, "segment_ids"),
        ({"segment_ids": ROW, "key_segment_ids": ROW[:, :5]}, "key_segment_ids"),
        ({"query_offset": [1, 2, 3]}, "query_offset"),
        ({"query_offset": 1.5}, "query_offset"),
        ({"window": 2, "causal": False}, "window"),
        ({"window": np.int32(2), "causal": False}, "window"),
        ({"window": [2, 2]}, "window"),
        ({"implementation": "chunked"}, "implementation.*blocks"),
        ({"query": SOME[0][:, :, :3]}, "3 .*2"),
        ({"key": SOME[1][:1]}, "key"),
        ({"value": SOME[2][:, :5]}, "value"),
        ({"key": SOME[1][..., :2]}, "key"),
        ({"query": SOME[0][:, :4], "lengths": [3, 4]}, "key_lengths"),
        ({"query": SOME[0][:, :4], "segment_ids": ROW[:, :4]}, "key_segment_ids"),
        ({"key_segment_ids": ROW}, "key_segment_ids.*segment_ids"),
        ({"query": SOME[0][:0], "key": SOME[1][:0], "value": SOME[2][:0]}, "no rows"),
        ({"query": SOME[0].astype(np.float16)}, "float16.*float32"),
        ({"value": SOME[2].astype(np.float16)}, "float32.*float16"),
        (dict(zip(("query", "key", "value"), (x.astype(np.int32) for x in SOME), strict=True)), "floats.*int32"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(options, names):
    arguments = {"query": SOME[0], "key": SOME[1], "value": SOME[2]} | {
        name: np.array(value) if isinstance(value, list) else value for name, value in options.items()
    }
    with pytest.raises(ValueError, match=names) as raised:
        attend(**arguments)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_a_token_after_a_cache_takes_no_kernel(platform):
    """Which would fill up a block of queries."""

    def decode(query, keys):
        return attend(query, keys, keys, query_offset=jnp.array([3, 1000]))

    query, keys = (jax.ShapeDtypeStruct((2, n, 2, 64), jnp.bfloat16) for n in (1, 1024))
    text = lower_for(platform, decode, query, keys)
    assert "custom_call" not in text
