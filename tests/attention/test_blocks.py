"""Loops over blocks visit no block in vain, and hold nothing of all pairs of positions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen.attention import attend, blocks
from tests.attention.inputs import random_qkv
from tests.attention.reference import rule

BLOCK = 4


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK", BLOCK)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("causal", [True, False])
def test_no_block_is_visited_in_vain(causal):
    """What a block holds that is not a number shows in all that visit it, forward and backward."""
    ids = np.array([[1] * 4 + [2] * 5 + [3] * 3 + [0] * 4, [1] * 16, [0] * 4 + [5] * 9 + [0] * 3])
    sees = rule(ids, ids, causal=causal)
    needed = {(row, i // BLOCK, j // BLOCK) for row, i, j in np.ndindex(3, 16, 16) if sees(row, i, j)}

    @jax.jit
    def run(query, key, value, weights):
        def weighted(*qkv):
            outputs = attend(*qkv, segment_ids=jnp.asarray(ids), causal=causal, implementation="blocks")
            return jnp.sum(outputs * weights), outputs

        grads, outputs = jax.grad(weighted, (0, 1, 2), has_aux=True)(query, key, value)
        return dict(zip(("query", "key", "value", "outputs"), (*grads, outputs), strict=True))

    def spoiled_blocks(name, read, block):
        arrays = dict(zip(("query", "key", "value", "weights"), random_qkv(3, 16, dtype="float32"), strict=True))
        arrays[name][:, BLOCK * block : BLOCK * (block + 1)] = np.nan
        is_spoiled = np.isnan(run(*arrays.values())[read]).any(axis=(2, 3)).reshape(3, -1, BLOCK).any(axis=2)
        return set(zip(*map(np.ndarray.tolist, np.nonzero(is_spoiled)), strict=True))

    for block in range(4):
        visitors = {(row, i) for row, i, j in needed if j == block}
        assert visitors == spoiled_blocks("value", "outputs", block) == spoiled_blocks("key", "query", block)
        visitors = {(row, j) for row, i, j in needed if i == block}
        assert visitors == spoiled_blocks("query", "key", block) == spoiled_blocks("weights", "value", block)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize(
    ("causal", "num_layers", "wrap"), [(False, 1, lambda step: step), (True, 2, jax.checkpoint)], ids=["plain", "scan"]
)
def test_memory_grows_with_positions_not_with_their_pairs(causal, num_layers, wrap):
    """For the gradient of long rows; a loop over layers keeps no mask either."""
    num_positions = 4096

    def loss(x, ids):
        def step(x, _):
            return attend(x, x, x, segment_ids=ids, causal=causal), None

        return jnp.sum(jax.lax.scan(wrap(step), x, length=num_layers)[0] ** 2)

    row, ids = (jax.ShapeDtypeStruct((1, num_positions, *shape), dtype) for shape, dtype in
                (((1, 8), jnp.float32), ((), jnp.int32)))  # fmt: skip
    compiled = jax.jit(jax.value_and_grad(loss)).lower(row, ids).compile()
    shapes = re.findall(r"\w+\[([\d,]+)\]", compiled.as_text())
    assert num_positions in map(int, shapes[0].split(","))
    assert max(np.prod([int(size) for size in shape.split(",")]) for shape in shapes) <= 16 * num_positions
    assert compiled.memory_analysis().temp_size_in_bytes < 512 * num_positions


@pytest.mark.usefixtures("optimized")
def test_many_blocks_lose_no_precision_in_bfloat16():
    """Gradients of keys are sums over all blocks, which must not be rounded one by one."""
    q, k, v, weights = random_qkv(1, 512, heads=1, kv_heads=1, size=8, dtype="float32")

    def key_gradient(implementation, dtype):
        def loss(k):
            attended = attend(q.astype(dtype), k, v.astype(dtype), causal=False, implementation=implementation)
            return jnp.sum(attended.astype(jnp.float32) * weights)

        return jax.jit(jax.grad(loss))(k.astype(dtype)).astype(jnp.float32)

    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    exact = key_gradient("xla", jnp.float32)
    errors = [jnp.linalg.norm(key_gradient(name, jnp.bfloat16) - exact) for name in ("blocks", "xla")]
    assert errors[0] < 1.2 * errors[1]


@pytest.mark.usefixtures("optimized")
def test_blocks_are_taken_without_copies_of_their_rows():
    def both(q, k, v, ids, grad):
        outputs, pull = jax.vjp(lambda *qkv: attend(*qkv, segment_ids=ids), q, k, v)
        return outputs, pull(grad)

    rows, ids = jax.ShapeDtypeStruct((2, 2048, 2, 16), jnp.float32), jax.ShapeDtypeStruct((2, 2048), jnp.int32)
    compiled = jax.jit(both).lower(rows, rows, rows, ids, rows).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < rows.size * 4


@pytest.mark.parametrize(
    ("rows", "options", "has_loop"),
    [
        (1, {}, False),
        (1, {"window": 16}, True),
        (2**12, {}, True),
        (1, {"query_offset": 1}, True),
    ],
    ids=["few logits", "a window skips", "many logits", "queries after keys"],
)
def test_rows_of_one_sample_are_computed_whole_where_that_takes_little_memory(rows, options, has_loop):
    arrays = jax.ShapeDtypeStruct((rows, 1024, 1, 8), jnp.float32)
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)

    def lowered(**where):
        return jax.jit(lambda q, k, v, where: attend(q, k, v, **where, **options)).lower(*[arrays] * 3, where).as_text()

    assert ("stablehlo.while" in lowered(lengths=lengths)) == has_loop
    packed = {"segment_ids": jax.ShapeDtypeStruct((rows, 1024), jnp.int32)}
    assert "stablehlo.while" in lowered(**packed)
