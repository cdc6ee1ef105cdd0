"""What is given to cuDNN and what is made of it, with a stand-in that has its manners."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

from jvarlen._common.checks import UserError
from jvarlen.attention import attend, cudnn
from tests.attention.lowering import lower_for

LENGTHS = np.array([150, 0, 1, 70])


def stand_in(
    query, key, value, *, implementation, scale=1.0, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, local_window_size=None,
):  # fmt: skip
    """Like cuDNN's, its gradient is made of what the forward pass kept, and past lengths it leaves anything."""
    assert implementation == "cudnn"
    assert query_seq_lengths is None or local_window_size is None
    lengths = jnp.full(len(query), query.shape[1]) if query_seq_lengths is None else query_seq_lengths
    positions = jnp.arange(query.shape[1])
    distance = positions[:, None] - positions
    mask = positions < lengths[:, None, None]
    if is_causal:
        mask &= distance >= 0
    if local_window_size is not None:
        assert is_causal
        assert local_window_size[1] == 0
        mask &= distance <= local_window_size[0]
    group = query.shape[2] // key.shape[2]
    is_past = (positions >= lengths[:, None])[..., None, None]

    def logits_of(query, key):
        return jnp.einsum("BQHK,BTHK->BHQT", query, key, preferred_element_type=jnp.float32) * scale

    def forward(query, key, value):
        key, value = (jnp.repeat(x, group, 2) for x in (key, value))
        logits = jnp.where(mask[:, None], logits_of(query, key), -jnp.inf)
        lse = jax.nn.logsumexp(logits, axis=3)
        out = jnp.einsum("BHQT,BTHK->BQHK", jnp.exp(logits - lse[..., None]), value)
        return jnp.where(is_past, 77, out).astype(query.dtype), lse

    @jax.custom_vjp
    def attention(query, key, value):
        return forward(query, key, value)[0]

    def attention_forward(query, key, value):
        out, lse = forward(query, key, value)
        return out, (query, key, value, lse, out)

    def attention_backward(kept, grad):
        query, key, value, lse, out = kept
        key, value = (jnp.repeat(x, group, 2) for x in (key, value))
        weights = jnp.where(mask[:, None], jnp.exp(logits_of(query, key) - lse[..., None]), 0)
        inner = jnp.einsum("BQHK,BQHK->BHQ", grad, out)
        dlogits = weights * (jnp.einsum("BQHK,BTHK->BHQT", grad, value) - inner[..., None]) * scale
        grads = (
            jnp.einsum("BHQT,BTHK->BQHK", dlogits, key),
            jnp.einsum("BHQT,BQHK->BTHK", dlogits, query),
            jnp.einsum("BHQT,BQHK->BTHK", weights, grad),
        )
        dq, dk, dv = (jnp.where(is_past, 77, x).astype(query.dtype) for x in grads)
        return dq, *(jnp.sum(x.reshape(*x.shape[:2], -1, group, x.shape[3]), axis=3) for x in (dk, dv))

    attention.defvjp(attention_forward, attention_backward)
    return attention(query, key, value)


@pytest.fixture
def with_stand_in(monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    for clear in (cudnn._can_be_traced.cache_clear, jax.clear_caches):
        clear()
    yield
    for clear in (cudnn._can_be_traced.cache_clear, jax.clear_caches):
        clear()


@pytest.mark.usefixtures("with_stand_in")
@pytest.mark.parametrize(("causal", "window", "num_kv_heads"), [(True, None, 1), (False, None, 4), (True, 20, 2)])
def test_padded_rows_in_16_bits_give_what_they_give_with_a_mask(causal, window, num_kv_heads):
    rng = np.random.default_rng(0)
    shape = len(LENGTHS), LENGTHS.max()
    heads = (4, num_kv_heads, num_kv_heads, 4)
    *qkv, weights = (jnp.asarray(rng.standard_normal((*shape, n, 16)), jnp.bfloat16) for n in heads)

    def loss(implementation, *qkv):
        options = {"causal": causal, "window": window, "implementation": implementation}
        out = attend(*qkv, lengths=jnp.array(LENGTHS), **options)
        return jnp.sum(out.astype(jnp.float32) * weights), out  # the outputs of padding count as well

    gradient = jax.jit(jax.grad(loss, argnums=(1, 2, 3), has_aux=True), static_argnums=0)
    found, expected = (gradient(implementation, *qkv) for implementation in ("cudnn", "xla"))
    is_padding = np.arange(LENGTHS.max()) >= LENGTHS[:, None]
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), atol=0.06, rtol=0.02)
        assert (np.asarray(a, np.float32)[is_padding] == 0).all()


@pytest.mark.usefixtures("with_stand_in")
def test_the_backward_pass_takes_what_the_forward_pass_found():
    """In a loop over layers, where no compiler sees that it is the same."""
    x = jnp.ones((1, 32, 2, 16), jnp.bfloat16)

    def loss(x):
        return jax.lax.scan(lambda x, _: (attend(x, x, x, implementation="cudnn"), None), x, length=2)[0].sum()

    assert jax.jit(jax.grad(loss)).lower(x).compile().as_text().count(" log(") == 1  # of the forward pass


@pytest.mark.usefixtures("with_stand_in")
@pytest.mark.parametrize(
    ("dtype", "options", "is_cudnn"),
    [
        (jnp.bfloat16, {}, True),
        (jnp.float16, {"lengths": jnp.array([3, 64]), "window": 9}, True),
        (jnp.float32, {}, False),
        (jnp.bfloat16, {"segment_ids": jnp.ones((2, 64), jnp.int32)}, False),
        (jnp.bfloat16, {"lengths": jnp.array([3, 64]), "key_lengths": jnp.array([3, 64])}, False),
        (jnp.bfloat16, {"window": jnp.array(9)}, False),
        (jnp.bfloat16, {"query_offset": 1}, False),
    ],
)
def test_auto_takes_it_for_rows_of_one_sample_in_16_bits(dtype, options, is_cudnn):
    x = jax.ShapeDtypeStruct((2, 64, 2, 16), dtype)
    text = lower_for("cuda", functools.partial(attend, **options), x, x, x)
    assert ("_forward_kernel" not in text) == is_cudnn


@pytest.mark.usefixtures("with_stand_in")
@pytest.mark.parametrize("mesh", [None, AbstractMesh((1,), ("data",)), AbstractMesh((1,), ("data",), (AxisType.Auto,))])
def test_auto_asks_for_no_devices_where_jax_does_not_tell_them(monkeypatch, mesh):
    """As in a function of the user's own, where cuDNN's partitioning is JAX's."""

    def partitioned(query, *args, **options):
        same = custom_partitioning(lambda x: x)
        same.def_partition(partition=None, sharding_rule="... -> ...")
        return stand_in(query, *args, **options) + same(jax.lax.stop_gradient(query))

    monkeypatch.setattr(jax.nn, "dot_product_attention", partitioned)
    x = jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.bfloat16)
    with use_abstract_mesh(mesh or AbstractMesh((), ())):
        lowered = jax.jit(lambda x: attend(x, x, x)).trace(x).lower(lowering_platforms=("cuda",))
    assert "_forward_kernel" not in lowered.as_text()


def test_a_context_may_name_more_devices_than_there_are():
    x = jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.float32)
    with use_abstract_mesh(AbstractMesh((4,), ("data",))):
        lowered = jax.jit(lambda x: attend(x, x, x)).trace(x).lower(lowering_platforms=("tpu",))
    assert "manual_computation" not in lowered.as_text()


@pytest.mark.usefixtures("with_stand_in")
def test_a_window_that_is_data_names_the_kernel_that_takes_it():
    x = jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.bfloat16)
    with pytest.raises(UserError, match=r"'cudnn' does not support .* window=an array: .*triton"):
        jax.eval_shape(lambda x, window: attend(x, x, x, window=window, implementation="cudnn"), x, jnp.int32(9))


def test_without_cudnn_such_rows_are_for_triton():
    x = jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.bfloat16)
    assert "_forward_kernel" in lower_for("cuda", attend, x, x, x)
    with pytest.raises(UserError, match="implementation='cudnn' does not support"):
        jax.eval_shape(lambda x: attend(x, x, x, implementation="cudnn"), x)
