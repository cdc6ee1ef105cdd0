"""Attention: the same numbers in all forms of mask, each sample on its own, no T×T array where that is promised."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen.attention import blocks, dense, padding_mask
from jvarlen.attention.attention import attend

T = 600  # two whole chunks of queries and a part of one


def random_qkv(batch, length, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.array(rng.normal(size=(batch, length, 2, 8)).astype(np.float32)) for _ in range(3)]


def segments_of(rows, length):
    """Segment ids of rows given as lists of sample lengths."""
    ids = np.zeros((len(rows), length), np.int32)
    for row, lengths in enumerate(rows):
        ids[row, : sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return jnp.array(ids)


SEGMENTS = segments_of([[600], [1, 299, 256, 3], []], T)


FORMS = {
    "lengths": lambda q, k, v, **options: attend(q, k, v, **options, implementation="xla"),
    "blocks": lambda q, k, v, **options: attend(q, k, v, **options, implementation="blocks"),
    "segments": lambda q, k, v, lengths, **options: attend(
        q, k, v, segment_ids=padding_mask(lengths, q.shape[1]).astype(jnp.int32), **options, implementation="blocks"
    ),
    "segments at once": lambda q, k, v, lengths, **options: attend(
        q, k, v, segment_ids=padding_mask(lengths, q.shape[1]).astype(jnp.int32), **options, implementation="xla"
    ),
}
ROWS = np.array([5, 0, 1, 3])  # as long as can be, a padding row, a single token, some of each


@pytest.fixture
def short_chunks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", 2)  # two whole blocks and a part of one
    monkeypatch.setattr(dense, "_SLICE", 2)
    jax.clear_caches()
    yield
    jax.clear_caches()


def attend_in_numpy(q_LxHxK, k_LxNxK, v_LxNxK, weights_LxHxK, causal, window=0):
    """Attention of one sample in NumPy, and the gradients of its weighted sum, each head of queries by itself."""
    outputs, *grads = (np.zeros_like(x) for x in (q_LxHxK, q_LxHxK, k_LxNxK, v_LxNxK))
    scale = 1 / np.sqrt(q_LxHxK.shape[2])
    for head in range(q_LxHxK.shape[1]):
        kv_head = head * k_LxNxK.shape[1] // q_LxHxK.shape[1]
        q, k, v, weights = q_LxHxK[:, head], k_LxNxK[:, kv_head], v_LxNxK[:, kv_head], weights_LxHxK[:, head]
        powers_LxL = np.exp(q @ k.T * scale)
        powers_LxL = np.tril(powers_LxL) if causal else powers_LxL
        powers_LxL = np.triu(powers_LxL, 1 - window) if window else powers_LxL
        probabilities_LxL = powers_LxL / powers_LxL.sum(axis=1, keepdims=True)
        outputs[:, head] = probabilities_LxL @ v
        of_probabilities = weights @ v.T
        of_logits = probabilities_LxL * (
            of_probabilities - (of_probabilities * probabilities_LxL).sum(axis=1, keepdims=True)
        )
        grads[0][:, head] = of_logits @ k * scale
        grads[1][:, kv_head] += of_logits.T @ q * scale
        grads[2][:, kv_head] += probabilities_LxL.T @ weights
    return outputs, grads


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    ("dtype", "num_kv_heads", "causal"),
    [
        ("float64", 6, True), ("float64", 6, False), ("float64", 1, True), ("float64", 2, False),
        ("float32", 6, False), ("float32", 2, True),
    ],
)  # fmt: skip
def test_all_forms_of_mask_and_groups_of_query_heads_give_what_each_sample_gives_alone(dtype, num_kv_heads, causal):
    with jax.enable_x64(dtype == "float64"):
        atol = {"float64": 1e-13, "float32": 4e-6 if num_kv_heads < 6 else 2e-6}[dtype]
        rng = np.random.default_rng(0)
        shapes = [(len(ROWS), ROWS.max(), heads, 4) for heads in (6, num_kv_heads, num_kv_heads, 6)]
        *qkv, weights = (rng.normal(size=shape).astype(dtype) for shape in shapes)
        is_token = np.arange(ROWS.max()) < ROWS[:, None]
        weights *= is_token[..., None, None]

        def together(form, *qkv):
            outputs = FORMS[form](*qkv, lengths=jnp.array(ROWS, jnp.int32), causal=causal)
            return jnp.sum(outputs * weights), outputs

        @jax.jit
        def in_all_forms(*qkv):
            gradient = jax.grad(together, argnums=(1, 2, 3), has_aux=True)
            return {form: gradient(form, *qkv) for form in FORMS}

        for grads, outputs in in_all_forms(*qkv).values():
            assert outputs.dtype == dtype
            assert jnp.isfinite(outputs).all()  # those of padding and of the padding row as well
            assert all((np.asarray(grad)[~is_token] == 0).all() for grad in grads)
            for row, n in enumerate(ROWS):
                expected, expected_grads = attend_in_numpy(*(x[row, :n] for x in (*qkv, weights)), causal)
                np.testing.assert_allclose(outputs[row, :n], expected, atol=atol)
                for grad, expected_grad in zip(grads, expected_grads, strict=True):
                    np.testing.assert_allclose(grad[row, :n], expected_grad, atol=atol)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(("dtype", "is_traced"), [("float64", True), ("float64", False), ("float32", False)])
def test_a_window_hides_all_but_the_last_keys_of_a_query(dtype, is_traced):
    """Traced as those of layers in a scan, where 0 is no window; of grouped heads, outputs and gradients."""
    with jax.enable_x64(dtype == "float64"):
        atol = {"float64": 1e-12, "float32": 4e-6}[dtype]
        rng = np.random.default_rng(0)
        *qkv, weights = (rng.normal(size=(len(ROWS), 5, heads, 4)).astype(dtype) for heads in (4, 2, 2, 4))
        weights *= (np.arange(5) < ROWS[:, None])[..., None, None]

        @functools.partial(jax.jit, static_argnums=() if is_traced else 0)
        def in_all_forms(window, *qkv):
            def together(form, *qkv):
                outputs = FORMS[form](*qkv, lengths=jnp.array(ROWS, jnp.int32), window=window)
                return jnp.sum(outputs * weights), outputs

            gradient = jax.grad(together, argnums=(1, 2, 3), has_aux=True)
            return {form: gradient(form, *qkv) for form in FORMS}

        for window in (0, 1, 2, 4, 5, 1000) if is_traced else (2, 4):
            for grads, outputs in in_all_forms(jnp.int32(window) if is_traced else window, *qkv).values():
                assert jnp.isfinite(outputs).all()
                for row, n in enumerate(ROWS):
                    expected = attend_in_numpy(*(x[row, :n] for x in (*qkv, weights)), True, window)
                    np.testing.assert_allclose(outputs[row, :n], expected[0], atol=atol)
                    for grad, expected_grad in zip(grads, expected[1], strict=True):
                        np.testing.assert_allclose(grad[row, :n], expected_grad, atol=atol)


@pytest.mark.parametrize("window", [3, jnp.int32(3)], ids=["static", "traced"])
def test_windows_of_packed_rows_are_those_of_each_sample_alone(window):
    q, k, v = random_qkv(1, 9)
    segments = segments_of([[5, 3]], 9)
    for implementation in ("xla", "blocks"):
        packed = attend(q, k, v, segment_ids=segments, window=window, implementation=implementation)
        for sample in (np.s_[:, :5], np.s_[:, 5:8]):
            qkv = [np.asarray(x[sample][0]) for x in (q, k, v)]
            expected, _ = attend_in_numpy(*qkv, qkv[0], True, 3)
            np.testing.assert_allclose(packed[sample][0], expected, atol=2e-6)


def test_a_window_of_attention_that_is_not_causal_is_refused():
    q, k, v = random_qkv(1, 4)
    for window in (2, jnp.int32(2)):
        for form in FORMS:
            with pytest.raises(ValueError, match="window is for causal attention"):
                FORMS[form](q, k, v, lengths=jnp.array([2]), causal=False, window=window)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_heads_that_do_not_divide_those_of_queries_are_refused(dtype):
    with jax.enable_x64(dtype == "float64"):
        query, key = jnp.ones((1, 2, 3, 4), dtype), jnp.ones((1, 2, 2, 4), dtype)
        for form in FORMS:
            with pytest.raises(ValueError, match="multiple of"):
                FORMS[form](query, key, key, lengths=jnp.array([2]), causal=True)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint64"])
def test_lengths_and_segments_may_be_of_any_integer_type(dtype):
    with jax.enable_x64("64" in dtype):
        q, k, v = (x.astype(jnp.float32) for x in random_qkv(len(ROWS), 5))
        lengths = jnp.array(ROWS, dtype)
        assert lengths.dtype == dtype
        is_token = padding_mask(lengths, 5)

        @jax.jit
        def attend_in_all_forms(q, k, v, lengths, segments):
            attended = [FORMS[form](q, k, v, lengths=lengths, causal=True) for form in ("lengths", "blocks")]
            return attended + [attend(q, k, v, segment_ids=segments, implementation=name) for name in ("xla", "blocks")]

        attended = attend_in_all_forms(q, k, v, lengths, is_token.astype(dtype))
        for outputs in attended[1:]:
            np.testing.assert_allclose(outputs[is_token], attended[0][is_token], atol=2e-6)


@pytest.mark.parametrize(("dtype", "causal"), [("float32", False), ("bfloat16", True)])
def test_rows_without_a_token_give_no_nan_even_where_their_outputs_count(dtype, causal):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 5, 1, 2)), dtype)

    def total(form, *qkv):
        return FORMS[form](*qkv, lengths=jnp.zeros(2, jnp.int32), causal=causal).sum().astype("float32")

    gradient = jax.grad(total, argnums=(1, 2, 3))
    for grad in jax.tree.leaves(jax.jit(lambda x: {form: gradient(form, x, x, x) for form in FORMS})(x)):
        assert np.isfinite(np.asarray(grad, np.float32)).all()


@pytest.mark.parametrize("causal", [True, False])
def test_each_sample_attends_as_if_it_were_alone(causal):
    q, k, v = random_qkv(3, T)
    within = jax.jit(functools.partial(attend, causal=causal), static_argnames="implementation")
    in_all_forms = [within(q, k, v, segment_ids=SEGMENTS, implementation=name) for name in ("blocks", "xla")]
    start = 1
    for length in (299, 256, 3):
        part = np.s_[1:2, start : start + length]
        alone = jax.jit(functools.partial(attend, causal=causal))(
            q[part], k[part], v[part], lengths=jnp.array([length])
        )
        for attended in in_all_forms:
            np.testing.assert_allclose(attended[part], alone, atol=2e-6)
        start += length


@pytest.mark.parametrize("causal", [True, False])
def test_chunks_give_the_values_and_gradients_of_the_whole(causal):
    weights = (SEGMENTS > 0)[:, :, None, None]

    def total(implementation, q, k, v):
        attended = attend(q, k, v, segment_ids=SEGMENTS, causal=causal, implementation=implementation)
        return jnp.sum(jnp.sin(attended) * weights)

    qkv = random_qkv(3, T)
    value_and_grads = jax.jit(jax.value_and_grad(total, argnums=(1, 2, 3)), static_argnums=0)
    expected, expected_grads = value_and_grads("xla", *qkv)
    value, grads = value_and_grads("blocks", *qkv)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        assert jnp.isfinite(grad).all()
        np.testing.assert_allclose(grad, expected_grad, atol=1e-5)


@pytest.mark.gpu
def test_cudnn_keeps_samples_apart():
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv(1, 128))
    segments = segments_of([[100, 28]], 128)
    expected, actual = (
        attend(q, k, v, segment_ids=segments, implementation=name).astype(jnp.float32) for name in ("xla", "cudnn")
    )
    np.testing.assert_allclose(actual, expected, atol=3e-2)


@pytest.mark.gpu
def test_cudnn_gives_the_same_numbers():
    """In bfloat16, the type that its kernels take."""
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv(2, 128))
    lengths = jnp.array([128, 40])
    for window in (None, 17, jnp.int32(17)):
        expected, actual = (
            attend(q, k, v, lengths=lengths, window=window, implementation=name).astype(jnp.float32)
            for name in ("xla", "cudnn")
        )
        assert jnp.isfinite(actual).all()
        for row, query_end in enumerate((128, 40)):
            np.testing.assert_allclose(actual[row, :query_end], expected[row, :query_end], atol=3e-2)


def test_no_mask_of_all_pairs_of_positions_is_kept_for_a_loop_over_layers():
    def loss_of(x):
        def layer(x, _):
            return attend(x, x, x, lengths=jnp.full(1, 4096)), None

        return jnp.sum(jax.lax.scan(layer, x, length=2)[0])

    program = jax.jit(jax.grad(loss_of)).lower(jax.ShapeDtypeStruct((1, 4096, 1, 4), jnp.float32)).compile()
    masks = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"pred\[([\d,]+)\]", program.as_text())]
    assert 64 * 64 <= max(masks) <= 256 * 4096


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("implementation", ["blocks", "xla"])
@pytest.mark.parametrize("window", [None, 5])
def test_float16_has_its_values_and_gradients_on_a_cpu(implementation, window):
    qkv = [x.astype(jnp.float16) for x in random_qkv(1, 24)]

    def loss(*qkv):
        attended = attend(*qkv, lengths=jnp.full(1, 24), window=window, implementation=implementation)
        return jnp.sum(jnp.sin(attended.astype(jnp.float32)))

    results = [jax.value_and_grad(loss, (0, 1, 2))(*(x.astype(t) for x in qkv)) for t in (jnp.float16, jnp.float32)]
    for ours, exact in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(ours.astype(jnp.float32), exact, rtol=0, atol=2e-3 * abs(exact).max())


@pytest.mark.usefixtures("optimized")
def test_many_chunks_lose_no_precision_in_bfloat16():
    """Gradients of keys are sums over all chunks, which must not be rounded one by one."""
    length = 2048
    q, k, v = (x.astype(jnp.bfloat16) for x in random_qkv(1, length))
    segments = jnp.ones((1, length), jnp.int32)

    def key_gradient(implementation, *qkv):
        def loss(k):
            attended = attend(qkv[0], k, qkv[2], segment_ids=segments, causal=False, implementation=implementation)
            return jnp.sum(jnp.sin(attended.astype(jnp.float32)))

        return jax.jit(jax.grad(loss))(qkv[1]).astype(jnp.float32)

    exact = key_gradient("xla", *(x.astype(jnp.float32) for x in (q, k, v)))

    def error(implementation):
        return float(jnp.linalg.norm(key_gradient(implementation, q, k, v) - exact) / jnp.linalg.norm(exact))

    assert error("blocks") < 1.2 * error("xla")


@pytest.mark.usefixtures("optimized")
def test_chunks_never_hold_all_pairs_of_positions():
    length = 2048

    def program(implementation):
        def loss(q, k, v, segments):
            return attend(q, k, v, segment_ids=segments, implementation=implementation).sum()

        spec = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)
        segments = jax.ShapeDtypeStruct((1, length), jnp.int32)
        return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(spec, spec, spec, segments).compile()

    whole, chunked = program("xla"), program("blocks")
    assert f"{length},{length}" not in chunked.as_text()
    assert f"{length},{length}" not in program("auto").as_text()  # long rows are chunked by themselves
    assert chunked.memory_analysis().temp_size_in_bytes < whole.memory_analysis().temp_size_in_bytes / 3
