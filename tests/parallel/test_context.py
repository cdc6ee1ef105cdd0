"""Rows spread over a mesh axis: the numbers of whole rows, equal work, and what is sent and held."""

import collections
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jvarlen.attention import zigzag
from jvarlen.attention.attention import attend
from jvarlen.attention.masks import block_ranges
from jvarlen.distributed.layout import Layout
from jvarlen.estimates.hlo import list_collectives
from jvarlen.models import DecoderConfig
from jvarlen.parallel.context import attend_over_axis, context_positions, shard_positions
from jvarlen.parallel.layers import Axes
from tests.attention.lowering import lower_for
from tests.support.meshes import layout_mesh

SPREAD = P(None, "context")
MODEL = DecoderConfig(num_layers=2, width=16, num_heads=2, windows=(4, 0))


def on_devices(num_devices, call, in_specs, out_specs):
    mesh = layout_mesh(Layout(data=1, context=num_devices))
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))


def assert_equal_trees(found, expected, rtol=1e-12):
    for leaf, expected_leaf in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.abs(expected_leaf).max() > 1e-6
        np.testing.assert_allclose(leaf, expected_leaf, rtol=rtol, atol=rtol * np.abs(expected_leaf).max())


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
def test_every_position_is_in_one_shard_and_shards_have_an_early_and_a_late_chunk(num_shards):
    positions = context_positions(12 * num_shards, num_shards)
    assert positions.dtype == np.int32
    assert sorted(positions.ravel()) == list(range(12 * num_shards))
    for shard, held in enumerate(positions):
        early, late = 6 * shard, 6 * (2 * num_shards - 1 - shard)
        assert held.tolist() == [*range(early, early + 6), *range(late, late + 6)]


def test_lengths_that_cannot_be_cut_into_equal_chunks_are_refused():
    with pytest.raises(ValueError, match=r"row of 30 positions .* 4 shards in 8 equal chunks: nearest are 24 and 32 p"):
        context_positions(30, 4)
    with pytest.raises(ValueError, match=r"row of 3 positions .* 2 shards in 4 equal chunks: nearest are 4 positions"):
        context_positions(3, 2)
    with pytest.raises(ValueError, match=r"num_shards \(0\)"):
        context_positions(8, 0)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8])
def test_pairs_of_chunks_are_those_that_are_causal_and_equally_many_on_each_device(num_devices):
    chunks = context_positions(2 * num_devices, num_devices)
    seen = collections.Counter()
    for own in range(num_devices):
        visited = [(own, zigzag._pairs_within(own, num_devices))]
        others = (r for r in range(num_devices) if r != own)
        visited += [(r, zigzag._pairs_with(jnp.int32(r), jnp.int32(own), num_devices)) for r in others]
        pairs = [
            (chunks[own][q], chunks[source][k], int(distance))
            for source, pairs in visited
            for q, k, distance in zip(*pairs, strict=True)
        ]
        assert len(pairs) == 2 * num_devices + 1
        assert all(distance == q - k for q, k, distance in pairs)
        seen.update((int(q), int(k)) for q, k, _ in pairs)
    assert seen == {(q, k): 1 for q in range(2 * num_devices) for k in range(q + 1)}


def arrays_of(seq_length, packed, dtype=np.float64):
    """Queries, keys, values and gradients of outputs, segments, and lengths: a full row, a padded and a padding row."""
    rng = np.random.default_rng(seq_length)
    arrays = [rng.normal(size=(3, seq_length, num_heads, 4)).astype(dtype) for num_heads in (4, 2, 2, 4)]
    lengths = np.array([seq_length, seq_length // 2 + 1, 0])
    is_token = np.arange(seq_length) < lengths[:, None]
    arrays[3] *= is_token[:, :, None, None]
    segments = np.cumsum(rng.random((3, seq_length)) < 0.2, axis=1, dtype=np.int32) + 1
    return arrays, segments * is_token if packed else None, lengths


def of_whole_rows(arrays, segments, lengths, window=None):
    arrays, segments, lengths = jax.tree.map(jnp.asarray, (arrays, segments, lengths))

    def loss_of(query, key, value):
        if segments is None:
            attended = attend(query, key, value, lengths=lengths, window=window, implementation="xla")
        else:
            attended = attend(query, key, value, segment_ids=segments, window=window, implementation="xla")
        return jnp.sum(attended * arrays[3])

    value, grads = jax.jit(jax.value_and_grad(loss_of, argnums=(0, 1, 2)))(*arrays[:3])
    return value, [np.asarray(grad) for grad in grads]


def step_over_axis(num_devices, *, packed, window=None):
    def on_device(query, key, value, grad, of_rows, traced_window):
        def loss_of(query, key, value):
            how = {"window": traced_window if window is None else window}
            how["segment_ids" if packed else "lengths"] = of_rows
            attended = attend_over_axis(query, key, value, axes=Axes(context="context"), **how)
            return jnp.sum(attended * grad), attended

        (loss, attended), grads = jax.value_and_grad(loss_of, argnums=(0, 1, 2), has_aux=True)(query, key, value)
        return jax.lax.psum(loss, "context"), attended, grads

    specs = (*[SPREAD] * 4, SPREAD if packed else P(), P())
    return on_devices(num_devices, on_device, specs, (P(), SPREAD, (SPREAD,) * 3))


@pytest.mark.parametrize(("num_devices", "packed"), [(2, True), (4, False)])
def test_attention_over_an_axis_is_that_of_whole_rows(num_devices, packed):
    seq_length = 6 * num_devices
    arrays, segments, lengths = arrays_of(seq_length, packed)
    order = context_positions(seq_length, num_devices).ravel()
    with jax.enable_x64(True):
        step = step_over_axis(num_devices, packed=packed)
        of_rows = segments[:, order] if packed else lengths
        for window in (None, 2, 4, 0):  # chunks are 3 positions long
            expected, expected_grads = of_whole_rows(arrays, segments, lengths, window)
            given = None if window is None else np.int32(window)  # traced, as that of a layer in a scan
            loss, attended, grads = step(*(array[:, order] for array in arrays), of_rows, given)
            assert np.all(np.asarray(attended)[np.arange(seq_length)[order] >= lengths[:, None]] == 0)
            np.testing.assert_allclose(loss, expected, rtol=1e-12)
            assert_equal_trees(grads, [grad[:, order] for grad in expected_grads])


@pytest.mark.usefixtures("in_blocks")
def test_blocks_of_chunks_attend_as_whole_rows():
    arrays, segments, lengths = arrays_of(40, packed=True)  # chunks of 10: two blocks and a half
    order = context_positions(40, 2).ravel()
    with jax.enable_x64(True):
        expected, expected_grads = of_whole_rows(arrays, segments, lengths, 7)
        step = step_over_axis(2, packed=True, window=7)
        loss, _, grads = step(*(array[:, order] for array in arrays), segments[:, order], None)
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        assert_equal_trees(grads, [grad[:, order] for grad in expected_grads])


@pytest.mark.usefixtures("in_blocks")
def test_only_blocks_that_share_a_sample_meet_over_an_axis(monkeypatch):
    """For 32 positions on 2 devices, in blocks of 4: as many as in whole rows."""
    visited = []

    def counting(static, dtype, inputs):
        first, end = block_ranges(static, inputs.masks, 4, 4)
        jax.debug.callback(visited.append, jnp.sum(jnp.maximum(end - first, 0)))
        return forward(static, dtype, inputs)

    forward = zigzag.forward
    monkeypatch.setattr(zigzag, "forward", counting)
    arrays, _, _ = arrays_of(32, packed=False)
    order, step = context_positions(32, 2).ravel(), step_over_axis(2, packed=True)
    for samples in ([32], [5, 13, 3, 8], [1] * 15):
        ids = np.zeros((3, 32), np.int32)
        ids[:, : sum(samples)] = np.repeat(np.arange(1, len(samples) + 1), samples)
        mask = (ids[0][:, None] == ids[0]) & (ids[0] != 0) & np.tri(32, dtype=bool)
        visited.clear()
        step(*(array[:, order] for array in arrays), ids[:, order], None)
        jax.effects_barrier()
        assert sum(visited) == 3 * mask.reshape(8, 4, 8, 4).any(axis=(1, 3)).sum()


def test_without_an_axis_rows_are_whole():
    for packed in (False, True):
        arrays, segments, lengths = arrays_of(6, packed, np.float32)
        of_rows = {"segment_ids": segments} if packed else {"lengths": lengths}
        attended = jax.jit(functools.partial(attend_over_axis, axes=Axes(), window=3))(*arrays[:3], **of_rows)
        expected, _ = of_whole_rows(arrays, segments, lengths, window=3)
        np.testing.assert_allclose(np.sum(attended * arrays[3]), expected, rtol=1e-5)


def test_in_bfloat16_sums_are_float32():
    arrays, _, lengths = arrays_of(32, False, np.float32)
    arrays = [array.astype(jnp.bfloat16) for array in arrays]
    order = context_positions(32, 2).ravel()
    _, attended, grads = step_over_axis(2, packed=False)(*(array[:, order] for array in arrays), lengths, None)
    assert {leaf.dtype for leaf in (attended, *grads)} == {jnp.dtype("bfloat16")}
    _, expected_grads = of_whole_rows([array.astype(np.float32) for array in arrays], None, lengths)
    for grad, wide in zip(grads, expected_grads, strict=True):
        assert np.abs(np.asarray(grad).astype(np.float32) - wide[:, order]).max() < 0.02 * np.abs(wide).max()


def program_of_layers(num_devices, shard_length):
    """Two layers of attention in a loop, and their gradient. Keys and values take 256 bytes a position."""

    def loss_of(x):
        def layer(x, _):
            return attend_over_axis(x, x, x, axes=Axes(context="context")), None

        return jnp.sum(jax.lax.scan(layer, x, length=2)[0])

    x = jax.ShapeDtypeStruct((2, num_devices * shard_length, 4, 4), jnp.float32)
    return on_devices(num_devices, jax.grad(loss_of), SPREAD, SPREAD).lower(x).compile()


def test_keys_and_values_are_gathered_once_a_pass_and_their_gradients_sent_home():
    num_devices, sent = 4, collections.Counter()
    for each in list_collectives(program_of_layers(num_devices, 8)):
        sent[each.kind] += each.times * each.num_bytes * (num_devices - 1) / num_devices
    of_layers = 2 * (num_devices - 1) * 8 * 256
    assert sent == {"all-gather": 2 * of_layers, "all-to-all": of_layers}


def test_no_mask_of_all_pairs_of_positions_is_kept_for_a_loop_over_layers():
    def loss_of(x, segments):
        def layer(x, _):
            axes = Axes(context="context")
            return attend_over_axis(x, x, x, axes=axes, segment_ids=segments), None

        return jnp.sum(jax.lax.scan(layer, x, length=2)[0])

    shapes = jax.ShapeDtypeStruct((1, 8 * 128, 1, 4), jnp.float32), jax.ShapeDtypeStruct((1, 8 * 128), jnp.int32)
    program = on_devices(8, jax.grad(loss_of), (SPREAD, SPREAD), SPREAD).lower(*shapes).compile()
    masks = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"pred\[([\d,]+)\]", program.as_text())]
    assert max(masks) == 64 * 64  # of one pair of chunks


@pytest.mark.parametrize(
    ("platform", "kernel"), [("tpu", r"splash_mha_(fwd|dq|dkv)_"), ("cuda", r"_(forward|dq|dkv)_kernel")]
)
def test_kernels_attend_to_the_chunks_of_other_devices(platform, kernel):
    def on_device(x, segments):
        def loss(x):
            return jnp.sum(attend_over_axis(x, x, x, axes=axes, segment_ids=segments))

        axes = Axes(context="context")
        return jax.grad(loss)(x)

    shapes = jax.ShapeDtypeStruct((1, 4 * 512, 2, 64), jnp.float32), jax.ShapeDtypeStruct((1, 4 * 512), jnp.int32)
    text = lower_for(platform, on_devices(4, on_device, (SPREAD, SPREAD), SPREAD), *shapes)
    assert set(re.findall(kernel, text)) == set(kernel[kernel.index("(") + 1 : kernel.index(")")].split("|"))


def test_what_cannot_attend_is_refused():
    def attend_on(num_devices, length, key_heads=2, key_length=None, **options):
        def on_device(query, key):
            return attend_over_axis(query, key, key, **{"axes": Axes(context="context"), **options})

        shapes = (1, length, 4, 2), (1, key_length or length, key_heads, 2)
        return on_devices(num_devices, on_device, (SPREAD, SPREAD), SPREAD)(*map(np.ones, shapes))

    with pytest.raises(ValueError, match=r"row of 6 positions cannot be spread over 2 shards .* 4 and 8 positions"):
        attend_on(2, 6)
    with pytest.raises(ValueError, match="4 heads of queries must be a multiple of the 3 of keys"):
        attend_on(2, 8, key_heads=3)
    with pytest.raises(ValueError, match=r"query float32\[1,4,4,2\], key float32\[1,2,2,2\]"):
        attend_on(2, 8, key_length=4)
    with pytest.raises(ValueError, match="either lengths= or segment_ids="):
        attend_on(2, 8, lengths=jnp.ones(1, int), segment_ids=jnp.ones((1, 4), int))
    with pytest.raises(NameError, match="rows"):
        attend_on(2, 8, axes=Axes(context="rows"))
    with pytest.raises(NameError, match="context"):
        shard_positions(8)
