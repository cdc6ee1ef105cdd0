"""The kernels in Pallas's interpreter against plain attention in float64, and what is lowered for GPUs."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from jvarlen._common.checks import UserError
from jvarlen.attention import attend, triton
from jvarlen.attention.masks import UNSEEN, Inputs, MaskArrays, StaticMask
from jvarlen.attention.platforms import Devices
from tests.attention.lowering import H100, lower_for

ROWS, QUERIES, KEYS, HEADS, KV_HEADS, HEAD_SIZE = 2, 150, 150, 4, 2, 24  # three blocks, the last of 22


def ids_of(*lengths, total=QUERIES):
    """Consecutive samples of these lengths, with padding after them; one of 0 tokens has no id."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.pad(ids, (0, total - len(ids)))


PADDING_WITHIN = np.where(np.arange(QUERIES) // 10 % 3 == 1, 0, ids_of(40, 60, 50))
SHUFFLED = np.random.default_rng(1).permutation(ids_of(40, 60, 30))
PACKED = {
    "packed": [ids_of(1, 70, 63, 16), ids_of(64, 64, 22)],
    "padded": [ids_of(150), ids_of(65)],
    "lengths 0 and 1": [ids_of(0), ids_of(1)],
    "padding within, and ids in any order": [PADDING_WITHIN, SHUFFLED],
}


def numpy_attention(static, query, key, value, masks, grad):
    """Outputs, logarithms of sums and the three gradients in float64, of one row after the other."""
    group = query.shape[2] // key.shape[2]
    results = []
    for row in range(len(query)):
        q, g = (np.moveaxis(x[row], 1, 0).astype(np.float64) for x in (query, grad))
        k, v = (np.repeat(np.moveaxis(x[row], 1, 0), group, 0).astype(np.float64) for x in (key, value))
        ids, key_ids = np.asarray(masks.query_ids[row]), np.asarray(masks.key_ids[row])
        mask = (ids[:, None] == key_ids) & (ids[:, None] != 0)
        if static.causal:
            distance = int(masks.offset[row]) + np.arange(len(ids))[:, None] - np.arange(len(key_ids))
            window = static.window or (len(key_ids) + 9999 if masks.window is None else int(masks.window))
            mask &= (distance >= 0) & (distance < window)
        powers = np.where(mask, np.exp(q @ k.swapaxes(1, 2) * static.scale), 0)
        sums = powers.sum(2, keepdims=True)
        weights = powers / np.where(sums, sums, 1)
        dweights = g @ v.swapaxes(1, 2)
        dlogits = weights * (dweights - (weights * dweights).sum(2, keepdims=True)) * static.scale
        dk, dv = dlogits.swapaxes(1, 2) @ q, weights.swapaxes(1, 2) @ g
        dk, dv = (x.reshape(-1, group, *x.shape[1:]).sum(1) for x in (dk, dv))
        lse = np.where(sums, np.log(np.where(sums, sums, 1)), UNSEEN)[..., 0]
        results.append([*(np.moveaxis(x, 0, 1) for x in (weights @ v, dlogits @ k, dk, dv)), lse])
    return [np.stack(x) for x in zip(*results, strict=True)]


@functools.cache
def interpreted(static):
    """Outputs, the three gradients and the logarithms of the sums."""

    def run(query, key, value, masks, grad):
        inputs = Inputs(query, key, value, masks)
        out, lse = triton.forward(static, inputs, interpret=True)
        return (out, *triton.backward(static, inputs, out, lse, grad, interpret=True), lse)

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


def random_arrays(num_keys=KEYS, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = [(QUERIES, HEADS), *[(num_keys, KV_HEADS)] * 2, (QUERIES, HEADS)]
    return [jnp.asarray(rng.standard_normal((ROWS, *shape, HEAD_SIZE)), dtype) for shape in shapes]


def check(static, masks, *, num_keys=KEYS, dtype=np.float32, tolerance=1e-5):
    query, key, value, grad = random_arrays(num_keys, dtype)
    found = interpreted(static)(query, key, value, masks, grad)
    assert [x.dtype for x in found] == [dtype] * 4 + [np.float32]
    expected = numpy_attention(
        static, *(np.asarray(x, np.float32) for x in (query, key, value)), masks, np.asarray(grad)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, atol=tolerance, rtol=tolerance)


def make_masks(query_ids, key_ids=None, offset=0, window=None):
    key_ids = query_ids if key_ids is None else key_ids
    ids = [jnp.asarray(np.stack(x), jnp.int32) for x in (query_ids, key_ids)]
    return MaskArrays(*ids, jnp.full(ROWS, offset, jnp.int32), None if window is None else jnp.int32(window))


def make_static(*, causal=True, window=None):
    return StaticMask(causal, 0.3, window, None, False, "triton")


@pytest.mark.parametrize("window", [1, 65, 1000])
@pytest.mark.parametrize("ids", PACKED.values(), ids=PACKED)
def test_samples_of_packed_and_padded_rows_with_a_window_that_is_data(ids, window):
    check(make_static(), make_masks(ids, window=window))


def test_causal_without_a_window():
    check(make_static(), make_masks(PACKED["packed"]))


@pytest.mark.parametrize(
    "key_ids",
    [[ids_of(20, 10, 40, total=70), ids_of(0, 70, 0, total=70)], [ids_of(0, total=70), ids_of(1, 1, 1, total=70)]],
)
def test_cross_attention_of_rows_of_other_lengths(key_ids):
    check(make_static(causal=False), make_masks(PACKED["packed"], key_ids), num_keys=70)


@pytest.mark.parametrize("offset", [0, 100, -30])
def test_queries_that_begin_elsewhere_than_keys_with_a_fixed_window(offset):
    """As chunks of a row of 250: what those before the first key see is nothing."""
    masks = make_masks([ids_of(20, 130), ids_of(150)], [ids_of(100, 150, total=250), ids_of(250, total=250)], offset)
    check(make_static(window=90), masks, num_keys=250)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits(dtype):
    tolerance = 0.03 if dtype == jnp.bfloat16 else 0.004
    check(make_static(), make_masks(PACKED["packed"]), dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize("causal", [True, False])
def test_blocks_without_a_token_of_the_sample_are_not_even_read(causal):
    """What is not a number there would be in the sums, whatever the mask."""
    static = make_static(causal=causal)
    masks = make_masks([ids_of(64, 64, 22)] * ROWS)
    arrays = random_arrays()
    expected = interpreted(static)(*arrays[:3], masks, arrays[3])
    for start, end in ((0, 64), (64, 128), (128, 150)):
        poisoned = [x.at[:, start:end].set(jnp.nan) for x in arrays]
        found = interpreted(static)(*poisoned[:3], masks, poisoned[3])
        is_other = np.delete(np.arange(150), np.s_[start:end])
        for a, b in zip(found[:4], expected[:4], strict=True):
            np.testing.assert_array_equal(a[:, is_other], b[:, is_other])


@pytest.mark.parametrize(
    ("shape", "dtype", "is_supported"),
    [
        ((1, 8192, 8, 128), jnp.bfloat16, True),
        ((2, 16, 2, 80), jnp.float32, True),
        ((1, 64, 1, 256), jnp.float16, True),
        ((1, 64, 1, 129), jnp.float32, False),
        ((1, 64, 1, 257), jnp.bfloat16, False),
        ((1, 64, 1, 64), jnp.float64, False),
        ((1, 1, 1, 64), jnp.float32, True),
        ((2**11, 2**13, 1, 128), jnp.bfloat16, False),
    ],
)
def test_what_is_supported_is_told_from_shapes_and_dtypes(shape, dtype, is_supported):
    def note(array):
        masks = MaskArrays(*[jnp.ones(shape[:2], jnp.int32)] * 2, jnp.zeros(shape[0], jnp.int32), None)
        found.append(triton.supports(make_static(), Inputs(array, array, array, masks), Devices()))

    found = []
    with jax.enable_x64(True):
        jax.eval_shape(note, jax.ShapeDtypeStruct(shape, dtype))
    assert found == [is_supported]


KERNELS = ["_forward_kernel", "_dq_kernel", "_dkv_kernel"]


def kernels_in(text):
    return re.findall(r'name = "(\w+_kernel)"', text)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("window", [None, 100])
def test_lowering_packed_rows_for_a_gpu_gives_the_kernels(dtype, window):
    def loss(query, key, value, ids):
        return attend(query, key, value, segment_ids=ids, window=window).astype(jnp.float32).sum()

    query, key = (jax.ShapeDtypeStruct((2, 1000, heads, 80), dtype) for heads in (8, 2))
    arguments = query, key, key, jax.ShapeDtypeStruct((2, 1000), jnp.int32)
    assert kernels_in(lower_for("cuda", loss, *arguments)) == KERNELS[:1]
    gradient = jax.grad(loss, argnums=(0, 1, 2))
    text = lower_for("cuda", gradient, *arguments)
    assert kernels_in(text) == KERNELS
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 3
    assert "stablehlo.dot_general" not in text  # nothing else multiplies matrices
    for platform in ("cpu", "tpu"):
        assert "triton" not in lower_for(platform, gradient, *arguments)


@pytest.mark.xfail(
    jax.__version_info__ >= (0, 11),
    raises=DeprecationWarning,
    strict=True,
    reason="The Pallas Triton backend is deprecated and will be removed in a future JAX version.",
)
@pytest.mark.filterwarnings("error:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_jax_keeps_the_compiler_of_the_kernels():
    """All other tests take no notice of the warning. `docs/architecture.md` says which other compilers there are."""
    x = jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.float32)
    assert kernels_in(lower_for("cuda", functools.partial(attend, implementation="triton"), x, x, x)) == KERNELS[:1]


@pytest.mark.parametrize(("shape", "dtype"), [((2, 64, 2, 16), jnp.float64), ((2, 64, 2, 300), jnp.float32)])
def test_what_the_kernels_do_not_support_is_one_product_on_a_gpu_and_refused_by_name(shape, dtype):
    with jax.enable_x64(True):
        arguments = [jax.ShapeDtypeStruct(shape, dtype)] * 3
        text = lower_for("cuda", attend, *arguments)
        assert "stablehlo.dot_general" in text
        assert "triton" not in text
        with pytest.raises(UserError, match="implementation='triton' does not support query"):
            jax.eval_shape(functools.partial(attend, implementation="triton"), *arguments)


def test_the_kernel_chosen_by_name_is_what_is_lowered_in_a_loop_over_layers_with_rematerialization():
    """A window for each layer is data."""

    def loss(x, lengths, windows):
        def layer(x, window):
            return x + attend(x, x, x, lengths=lengths, window=window, implementation="triton"), None

        return jax.lax.scan(jax.checkpoint(layer), x, windows)[0].sum()

    arguments = [jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.float32), *[jax.ShapeDtypeStruct((2,), jnp.int32)] * 2]
    found = kernels_in(lower_for("cuda", jax.grad(loss), *arguments))
    assert sorted(set(found)) == sorted(KERNELS)


def test_products_have_the_precision_that_was_set_where_attention_was_called():
    """Not that of where its gradient is traced, or its kernels."""

    def gradient(precision, x):
        def loss(x):
            with jax.default_matmul_precision(precision):
                return attend(x, x, x).sum()

        return jax.grad(loss)(x)

    x = jax.ShapeDtypeStruct((1, 64, 2, 16), jnp.float32)
    on_cpu = lower_for("cpu", functools.partial(gradient, "highest"), x)
    assert on_cpu.count("precision = [HIGHEST, HIGHEST]") == on_cpu.count("stablehlo.dot_general") > 5
    texts = [lower_for("cuda", functools.partial(gradient, precision), x) for precision in ("highest", "default")]
    kernels = [re.findall(r'ir = "([^"]+)"', text) for text in texts]
    assert [len(of) for of in kernels] == [3, 3]
    assert not set(kernels[0]) & set(kernels[1])
    with jax.default_matmul_precision("highest"):
        text = lower_for("cuda", jax.grad(lambda x: attend(x, x, x).sum()), x)
    assert [len(ir) for ir in re.findall(r'ir = "([^"]+)"', text)] == [len(ir) for ir in kernels[0]]


@pytest.mark.parametrize(("axes", "has_kernel"), [({"data", "model"}, True), ({"data"}, False)])
def test_where_the_compiler_splits_an_axis_it_gets_operations_that_it_can_split(axes, has_kernel):
    mesh = AbstractMesh((2, 2), ("data", "model"), (AxisType.Auto,) * 2, abstract_device=H100)
    specs = {"in_specs": PartitionSpec("data"), "out_specs": PartitionSpec("data")}
    over = jax.shard_map(lambda x: attend(x, x, x), mesh=mesh, axis_names=axes, check_vma=False, **specs)
    text = lower_for("cuda", over, jax.ShapeDtypeStruct((2, 64, 2, 16), jnp.float32))
    assert ("_forward_kernel" in text) == has_kernel
