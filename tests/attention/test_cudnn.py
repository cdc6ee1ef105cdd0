"""What is given to cuDNN and what is made of it, with a stand-in that has its manners."""

import functools
import importlib
import json
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh

from jvarlen._common.checks import UserError
from jvarlen.attention import attend, cudnn, platforms
from tests.attention.lowering import lower_for

LENGTHS = np.array([150, 0, 1, 70])


def stand_in(name, config, arrays, results):
    """Like cuDNN, it reads and writes memory from where each sample begins, and leaves anything past its tokens."""
    config = json.loads(config)["cudnn_fmha_backend_config"]
    is_backward, most = name.endswith("Backward"), config["max_seg_per_batch"]
    query, key, value = arrays[:3]
    others = list(arrays[6:] if is_backward else arrays[3:])
    num_rows, length, num_heads, size = query.shape
    num_samples, num_kv_heads = num_rows * most, key.shape[2]
    assert config["intermediate_tensor_shape"]["dimensions"] == [str(x) for x in (num_rows, num_heads, length, length)]
    lengths = jnp.full(num_samples, length)
    if "PADDING" in config["mask_type"]:
        lengths, key_lengths = (others.pop(0).reshape(-1) for _ in range(2))
        assert lengths is key_lengths or lengths.shape == key_lengths.shape == (num_samples,)
    starts = [jnp.arange(num_rows) * length * heads * size for heads in (num_heads, num_kv_heads)]
    if most > 1:
        starts = [others.pop(0).reshape(-1)[:num_samples] for _ in range(2)]
    assert not others
    places = jnp.arange(length)
    is_token = places < lengths[:, None]

    def at(start, heads):
        """Where the numbers of samples lie; past their tokens, beyond all memory."""
        offsets = (places[:, None, None] * heads + jnp.arange(heads)[:, None]) * size + jnp.arange(size)
        return jnp.where(is_token[..., None, None], start[:, None, None, None] + offsets, 2**30)

    at_q, at_k = at(starts[0], num_heads), at(starts[1], num_kv_heads)

    def read(array, at):
        return jnp.take(array.reshape(-1), at, mode="fill", fill_value=0).astype(jnp.float32)

    def write(values, at, like):
        return jnp.full(like.size, 77.0).at[at].set(values, mode="drop").reshape(like.shape).astype(like.dtype)

    distance = places[:, None] - places
    mask = is_token[:, :, None] & is_token[:, None]
    if "CAUSAL" in config["mask_type"]:
        mask &= distance >= 0
    if config["sliding_window_length"]:
        mask &= distance < config["sliding_window_length"]
    mask, group = mask[:, None], num_heads // num_kv_heads
    q, k, v = read(query, at_q), *(jnp.repeat(read(x, at_k), group, 2) for x in (key, value))
    logits = jnp.where(mask, jnp.einsum("SQHK,STHK->SHQT", q, k) * config["fmha_scale"], -jnp.inf)
    if not is_backward:
        sums = jax.nn.logsumexp(logits, axis=3)
        out = jnp.einsum("SHQT,STHK->SQHK", jnp.where(mask, jnp.exp(logits - sums[..., None]), 0), v)
        return [write(out, at_q, results[0]), jnp.where(is_token[:, None], sums, 77).reshape(results[1].shape)]
    sums, grad, out = arrays[3], *(read(x, at_q) for x in arrays[4:6])
    weights = jnp.where(mask, jnp.exp(logits - sums[..., None]), 0)
    inner = jnp.einsum("SQHK,SQHK->SHQ", grad, out)
    dlogits = weights * (jnp.einsum("SQHK,STHK->SHQT", grad, v) - inner[..., None]) * config["fmha_scale"]
    dk, dv = jnp.einsum("SHQT,SQHK->STHK", dlogits, q), jnp.einsum("SHQT,SQHK->STHK", weights, grad)
    dk, dv = (x.reshape(*x.shape[:2], num_kv_heads, group, size).sum(3) for x in (dk, dv))
    grads = (jnp.einsum("SHQT,STHK->SQHK", dlogits, k), at_q), (dk, at_k), (dv, at_k)
    return [write(*each, like) for each, like in zip(grads, results, strict=True)]


@pytest.fixture
def with_stand_in(monkeypatch):
    monkeypatch.setattr(cudnn, "call_cudnn", stand_in)
    jax.clear_caches()
    yield
    jax.clear_caches()


def outputs_and_gradients(implementation, heads, length, **options):
    rng = np.random.default_rng(0)
    num_rows = len(next(iter(options["rows"].values())))
    *qkv, weights = (jnp.asarray(rng.standard_normal((num_rows, length, n, 16)), jnp.bfloat16) for n in heads)

    @functools.partial(jax.grad, argnums=(0, 1, 2), has_aux=True)
    def gradient(*qkv):
        names = {name: value for name, value in options.items() if name != "rows"}
        out = attend(*qkv, **options["rows"], **names, implementation=implementation)
        return jnp.sum(out.astype(jnp.float32) * weights), out  # the outputs of padding count as well

    return [np.asarray(x, np.float32) for x in jax.tree.leaves(jax.jit(gradient)(*qkv))]


def compare(heads, is_padding, **options):
    length = is_padding.shape[1]
    found, expected = (outputs_and_gradients(name, heads, length, **options) for name in ("cudnn", "xla"))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=0.06, rtol=0.02)
        assert (a[is_padding] == 0).all()


@pytest.mark.usefixtures("with_stand_in")
@pytest.mark.parametrize(("causal", "window", "num_kv_heads"), [(True, None, 1), (False, None, 4), (True, 20, 2)])
def test_padded_rows_in_16_bits_give_what_they_give_with_a_mask(causal, window, num_kv_heads):
    is_padding = np.arange(LENGTHS.max()) >= LENGTHS[:, None]
    options = {"rows": {"lengths": jnp.array(LENGTHS)}, "causal": causal, "window": window}
    compare((4, num_kv_heads, num_kv_heads, 4), is_padding, **options)


# Rows of all samples that fit, of fewer, of one, of none; without tokens in the middle, and between and before samples.
PACKED = np.stack(
    [
        np.repeat(ids, lengths)
        for ids, lengths in [
            ((1, 2, 3, 4), (10, 1, 20, 9)),
            ((1, 2, 0), (17, 18, 5)),
            ((1, 0), (39, 1)),
            ((0,), (40,)),
            ((0, 1, 0, 3, 4), (3, 11, 6, 15, 5)),
        ]
    ]
).astype(np.int32)


@pytest.mark.usefixtures("with_stand_in")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("most", "num_kv_heads"), [(4, 4), (4, 2), (7, 1)])
def test_packed_rows_give_what_they_give_with_a_mask(causal, most, num_kv_heads):
    options = {"rows": {"segment_ids": jnp.array(PACKED)}, "causal": causal, "samples_per_row": most}
    compare((4, num_kv_heads, num_kv_heads, 4), PACKED == 0, **options)


@pytest.mark.usefixtures("with_stand_in")
def test_rows_of_other_ids_than_their_number_of_samples_are_no_numbers_and_others_are():
    other = np.array([[1] * 20 + [2] * 15 + [3] * 5, [1] * 20 + [0] * 20, [2] * 20 + [1] * 20, [1, 2] * 20])
    rows = {"segment_ids": jnp.array(other)}
    found = outputs_and_gradients("cudnn", (2, 2, 2, 2), 40, rows=rows, samples_per_row=2)
    for array in found:
        is_number = ~np.isnan(array).all(axis=(2, 3))
        np.testing.assert_array_equal(is_number, [[False] * 40, [True] * 40, [False] * 40, [False] * 40])


@settings(max_examples=40)
@given(st.lists(st.integers(-1, 4), min_size=9, max_size=9), st.integers(1, 4))
def test_where_samples_lie_is_what_counting_finds(ids, most):
    lengths, starts, fits = (np.asarray(x)[0] for x in cudnn.find_samples(jnp.array([ids], jnp.int32), most))
    places = {number: [i for i, each in enumerate(ids) if each == number] for number in range(1, most + 1)}
    runs = [each for i, each in enumerate(ids) if each and (i == 0 or ids[i - 1] != each)]
    assert lengths.tolist() == [len(places[number]) for number in places]
    assert fits == (runs == sorted(set(runs)) and set(runs) <= set(places))
    if fits:
        assert all(start == places[number][0] for number, start in zip(places, starts, strict=True) if places[number])
        assert starts.tolist() == sorted(starts)


@pytest.mark.usefixtures("with_stand_in")
def test_the_backward_pass_takes_what_the_forward_pass_found():
    """In a loop over layers, where no compiler sees that it is the same."""
    x = jnp.ones((1, 32, 2, 16), jnp.bfloat16)

    def loss(x):
        return jax.lax.scan(lambda x, _: (attend(x, x, x, implementation="cudnn"), None), x, length=2)[0].sum()

    assert jax.jit(jax.grad(loss)).lower(x).compile().as_text().count(" log(") == 1  # of the forward pass


def calls_of(function, *arguments):
    """The calls of cuDNN in a program for a GPU: names, attributes and types."""
    lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
    return re.findall(r"custom_call @(__cudnn\$\w+)\(.*?\) (\{.*\}) : (.*)", lowered.as_text())


@pytest.mark.parametrize(
    ("options", "of_jax"),
    [
        ({"lengths": True}, {"query_seq_lengths": True, "key_value_seq_lengths": True}),
        ({"lengths": True, "causal": False}, {"query_seq_lengths": True, "key_value_seq_lengths": True}),
        ({"lengths": True, "window": 9}, {"local_window_size": (8, 0)}),
        ({"segment_ids": True, "samples_per_row": 5}, None),
    ],
)
def test_the_calls_are_those_of_the_functions_of_jax(monkeypatch, options, of_jax):
    """Which ask for a GPU and for cuDNN, so that they are told that both are here; operands are tested by numbers."""
    private = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(private, "cuda_versions", types.SimpleNamespace(cudnn_get_version=lambda: 91000))
    monkeypatch.setattr(private, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(private, "is_cuda_compute_capability_equal", lambda capability: False)
    query, key = (jax.ShapeDtypeStruct((3, 64, heads, 24), jnp.bfloat16) for heads in (4, 2))
    shapes = {"lengths": (3,), "segment_ids": (3, 64)}
    shape = next(shape for name, shape in shapes.items() if name in options)
    given = [jax.ShapeDtypeStruct(shape, jnp.int32)]

    def ours(*qkv, given):
        filled = {name: given[0] if value is True and name != "causal" else value for name, value in options.items()}
        return attend(*qkv, **filled, scale=0.3, implementation="cudnn").astype(jnp.float32).sum()

    def theirs(*qkv, given):
        if of_jax is not None:
            filled = {name: given[0] if value is True else value for name, value in of_jax.items()}
            call = functools.partial(jax.nn.dot_product_attention, is_causal=options.get("causal", True), **filled)
            return call(*qkv, scale=0.3, implementation="cudnn").astype(jnp.float32).sum()
        lengths, offsets = given
        sizes = {"q_seqlen": lengths, "kv_seqlen": lengths, "q_offsets": offsets, "kv_offsets": offsets}
        options_of = {"scale": 0.3, "mask_type": private.MaskType.PADDING_CAUSAL}
        return private.dot_product_attention(*qkv, **sizes, **options_of).astype(jnp.float32).sum()

    found = calls_of(jax.grad(lambda q, k, v, *x: ours(q, k, v, given=x), (0, 1, 2)), query, key, key, *given)
    if of_jax is None:
        given = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, 5), (3, 6))]
    expected = calls_of(jax.grad(lambda q, k, v, *x: theirs(q, k, v, given=x), (0, 1, 2)), query, key, key, *given)
    assert [name for name, *_ in found] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert found == expected


IDS = jnp.ones((2, 4096), jnp.int32)


@pytest.mark.parametrize(
    ("capability", "dtype", "options", "is_cudnn"),
    [
        (8.0, jnp.bfloat16, {}, True),
        (None, jnp.bfloat16, {}, False),
        (9.0, jnp.float16, {"lengths": jnp.array([3, 64]), "window": 9}, True),
        (9.0, jnp.float32, {}, False),
        (9.0, jnp.bfloat16, {"segment_ids": IDS}, False),
        (9.0, jnp.bfloat16, {"segment_ids": IDS, "samples_per_row": 8}, True),
        (8.0, jnp.bfloat16, {"segment_ids": IDS, "samples_per_row": 8}, False),
        (9.0, jnp.bfloat16, {"segment_ids": IDS, "samples_per_row": 8, "window": 9}, False),
        (9.0, jnp.bfloat16, {"segment_ids": IDS, "samples_per_row": 8, "window": jnp.array(9)}, False),
        (9.0, jnp.bfloat16, {"segment_ids": IDS, "samples_per_row": 20}, False),  # clearing its sums takes longer
        (9.0, jnp.bfloat16, {"segment_ids": IDS, "samples_per_row": 8, "answer_ids": IDS}, False),
        (9.0, jnp.bfloat16, {"segment_ids": IDS, "samples_per_row": 8, "key_segment_ids": IDS + 1}, False),
        (9.0, jnp.bfloat16, {"lengths": jnp.array([3, 64]), "key_lengths": jnp.array([3, 64])}, False),
        (9.0, jnp.bfloat16, {"window": jnp.array(9)}, False),
        (9.0, jnp.bfloat16, {"query_offset": 1}, False),
    ],
)
def test_auto_takes_it_for_rows_in_16_bits_of_one_sample_or_on_hopper_of_few(
    monkeypatch, capability, dtype, options, is_cudnn
):
    monkeypatch.setattr(platforms, "_capability", lambda devices: capability)
    x = jax.ShapeDtypeStruct((2, 4096, 2, 16), dtype)
    text = lower_for("cuda", functools.partial(attend, **options), x, x, x)
    assert ("__cudnn" in text, "_forward_kernel" in text) == (is_cudnn, not is_cudnn)


@pytest.mark.parametrize("mesh", [None, AbstractMesh((1,), ("data",)), AbstractMesh((1,), ("data",), (AxisType.Auto,))])
def test_it_is_called_beside_axes_of_one_device(monkeypatch, mesh):
    monkeypatch.setattr(platforms, "_capability", lambda devices: 9.0)
    x = jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.bfloat16)
    with use_abstract_mesh(mesh or AbstractMesh((), ())):
        lowered = jax.jit(lambda x: attend(x, x, x)).trace(x).lower(lowering_platforms=("cuda",))
    assert "__cudnn" in lowered.as_text()


def test_a_context_may_name_more_devices_than_there_are():
    x = jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.float32)
    with use_abstract_mesh(AbstractMesh((4,), ("data",))):
        lowered = jax.jit(lambda x: attend(x, x, x)).trace(x).lower(lowering_platforms=("tpu",))
    assert "manual_computation" not in lowered.as_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": jnp.int32(9)}, r"'cudnn' does not support .* window=an array, .*triton"),
        ({"segment_ids": jnp.ones((2, 64), jnp.int32)}, "'cudnn' does not support .*samples_per_row=None"),
        ({"samples_per_row": 2}, "samples_per_row=2 is at least 1, and needs segment_ids="),
        ({"segment_ids": jnp.ones((2, 64), jnp.int32), "samples_per_row": 0}, "samples_per_row=0 is at least 1"),
    ],
)
def test_what_it_does_not_take_is_refused_by_name(options, message):
    x = jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.bfloat16)
    with pytest.raises(UserError, match=message):
        jax.eval_shape(lambda x: attend(x, x, x, **options, implementation="cudnn"), x)


def test_where_a_gpu_has_no_cudnn_such_rows_are_for_triton(monkeypatch):
    monkeypatch.setattr(platforms, "_capability", lambda devices: 9.0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    cudnn._is_missing.cache_clear()
    x = jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.bfloat16)
    try:
        assert "_forward_kernel" in lower_for("cuda", attend, x, x, x)
    finally:
        cudnn._is_missing.cache_clear()
