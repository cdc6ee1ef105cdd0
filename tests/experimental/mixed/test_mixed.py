"""Mixed steps: ranks with different numbers of microbatches of different shapes give the result of one device."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jvarlen import Bucket, Plan, make_plan, make_train_step, no_recompiles, scale_by_batch_size
from jvarlen.distributed.mesh import replicate
from jvarlen.estimates.hlo import list_collectives
from jvarlen.experimental.mixed import (
    load_mixed,
    make_mixed_plan,
    make_mixed_train_step,
    mix_microbatches,
    mixed_batch_spec,
)
from jvarlen.training.train_state import new_state
from tests.conftest import random_dataset
from tests.experimental.mixed import run_mixed
from tests.support import processes
from tests.support.hand_made import batch_of
from tests.support.meshes import data_mesh

BUCKETS = (Bucket(5, 3), Bucket(3, 5), Bucket(2, 8), Bucket(1, 13))
OF_STEP = (3, 0, 2, 1, 1, 0, 3, 2, 0, 1, 2)  # the buckets of eleven microbatches


def rnn_loss(params, microbatch, key=None):
    """A loop that starts from a constant, and dropout where it gets a key."""
    x_TxBxD = params["embedding"][microbatch.tokens].swapaxes(0, 1)
    if key is not None:
        x_TxBxD = x_TxBxD * jax.random.bernoulli(key, 0.7, x_TxBxD.shape)

    def cell(h_BxD, x_BxD):
        h_BxD = jnp.tanh(x_BxD + h_BxD @ params["weight"])
        return h_BxD, jnp.sum(jnp.square(h_BxD - 0.1), axis=-1)

    _, losses_TxB = jax.lax.scan(cell, jnp.zeros(x_TxBxD.shape[1:], x_TxBxD.dtype), x_TxBxD)
    return jnp.sum(losses_TxB.T * microbatch.weights), jnp.sum(microbatch.weights)


def make_params(dtype=np.float64):
    rng = np.random.default_rng(0)
    params = {"embedding": rng.normal(size=(128, 6)), "weight": rng.normal(size=(6, 6)) / 3}
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def make_optimizer():
    return optax.chain(optax.sgd(0.3, momentum=0.9), scale_by_batch_size(8))


def random_microbatches(buckets, num_sequences=29):
    rng = np.random.default_rng(1)
    for bucket in buckets:
        lengths_B = rng.integers(0, bucket.length + 1, bucket.rows).astype(np.int32)
        is_token_BxT = np.arange(bucket.length) < lengths_B[:, None]
        tokens_BxT = (rng.integers(0, 128, is_token_BxT.shape) * is_token_BxT).astype(np.int32)
        weights_BxT = (rng.integers(1, 5, is_token_BxT.shape) / 2 * is_token_BxT).astype(np.float32)
        arrays = (array[None] for array in (tokens_BxT, lengths_B, weights_BxT))
        yield batch_of(*arrays, np.float32(num_sequences))


def hand_made(ranks, of_step=OF_STEP, buckets=BUCKETS):
    """A mixed plan of one step, whose microbatches have these buckets, of one sample each, and these ranks."""
    num_microbatches = len(of_step)
    plan = Plan(
        buckets=buckets,
        num_microbatches=1,
        group_bucket=np.array(of_step, np.int32),
        group_offsets=np.arange(num_microbatches + 1),
        group_tokens=np.ones(num_microbatches, np.int64),
        sample_ids=np.arange(num_microbatches),
    )
    mixed = make_mixed_plan(plan, num_microbatches)
    object.__setattr__(mixed, "ranks", lambda num_ranks, cost=None: np.array(ranks, np.int32))
    return mixed


def mixed_by_hand(ranks, num_ranks, of_step=OF_STEP, buckets=BUCKETS):
    """Microbatches, their mixed batch, its spec and the mesh."""
    mesh = data_mesh(num_ranks)
    spec = mixed_batch_spec(hand_made(ranks, of_step, buckets), layout=mesh)
    own_buckets = [buckets[k] for k in of_step]
    microbatches = list(random_microbatches(own_buckets))
    return microbatches, mix_microbatches(microbatches, own_buckets, ranks, spec), spec, mesh


@functools.cache
def on_one_device():
    """Loss and gradient of the step of eleven microbatches, one by one."""
    sums_of = jax.jit(jax.value_and_grad(rnn_loss, has_aux=True))
    sums, step_key = [], jax.random.fold_in(jax.random.key(3), 0)
    for i, microbatch in enumerate(random_microbatches([BUCKETS[k] for k in OF_STEP])):
        first = jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, microbatch)
        sums.append(jax.device_get(sums_of(make_params(), first, jax.random.fold_in(step_key, i))))
    (loss_sum, weight_sum), grads = jax.tree.map(lambda *leaves: sum(leaves), *sums)
    return loss_sum / weight_sum, jax.tree.map(lambda grad: grad / weight_sum, grads)


def test_ranks_with_different_numbers_of_microbatches_give_the_result_of_one_device():
    ranks, num_ranks = (3, 1, 3, 0, 1, 0, 0, 3, 1, 0, 3), 4  # rank 2 has none
    with jax.enable_x64(True):
        microbatches, batch, spec, mesh = mixed_by_hand(ranks, num_ranks)
        assert batch.num_microbatches.tolist() == np.bincount(ranks, minlength=num_ranks).tolist()
        state = replicate(new_state(make_params(), make_optimizer(), seed=3), mesh)
        step = make_mixed_train_step(rnn_loss, make_optimizer(), BUCKETS, layout=mesh, norms=True)
        compiled = jax.jit(step).lower(state, spec).compile()
        after, metrics = compiled(state, batch)

        loss, grads = on_one_device()
        optimizer = make_optimizer()
        updates, _ = optimizer.update(grads, optimizer.init(make_params()), make_params(), batch_size=29.0)
        expected = optax.apply_updates(make_params(), updates)
        np.testing.assert_allclose(float(metrics.loss), float(loss), rtol=1e-12)
        np.testing.assert_allclose(float(metrics.grad_norm), float(optax.tree.norm(grads)), rtol=1e-12)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-12), after.params, expected)
    weight = sum(float(microbatch.weights.sum(dtype=np.float64)) for microbatch in microbatches)
    np.testing.assert_allclose(float(metrics.weight_sum), weight, rtol=1e-6)
    assert float(metrics.num_tokens) == sum(int(microbatch.lengths.sum()) for microbatch in microbatches)
    assert int(after.step) == 1
    (reduction,) = list_collectives(compiled)
    assert (reduction.kind, reduction.times) == ("all-reduce", 1)
    assert reduction.num_bytes == 8 * (3 + 128 * 6 + 6 * 6)  # loss, weight, tokens, gradients


def test_a_step_of_one_bucket_is_the_ordinary_step():
    """With all that a loss may take and return, and an optimizer that asks for the loss at other parameters."""

    def loss_fn(params, microbatch, key, extra):
        loss_sum, weight_sum = rnn_loss(params, microbatch, key)
        sums = {"first": jnp.sum(microbatch.tokens[:, 0])}
        mean = jnp.sum(microbatch.tokens * microbatch.weights) / weight_sum
        return loss_sum, weight_sum, sums, {"mean": 0.9 * extra["mean"] + 0.1 * mean, "calls": extra["calls"] + 1}

    with jax.enable_x64(True):
        ranks = (1, 0, 1, 1)
        microbatches, batch, _, mesh = mixed_by_hand(ranks, 3, (0, 0, 0, 0), (Bucket(4, 6),))
        whole = jax.tree.map(lambda *leaves: np.concatenate(leaves) if leaves[0].ndim else leaves[0], *microbatches)
        optimizer = optax.polyak_sgd(max_learning_rate=0.3)
        state = new_state(make_params(), optimizer, extra={"mean": np.float64(5), "calls": np.int32(0)}, seed=1)
        expected, metrics = jax.jit(make_train_step(loss_fn, optimizer))(state, whole)
        step = make_mixed_train_step(loss_fn, optimizer, [(4, 6)], layout=mesh)
        after, mixed_metrics = jax.jit(step)(state, batch)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
        jax.tree.map(close, (after.params, after.opt_state, after.extra), expected[:3])
        jax.tree.map(close, mixed_metrics, metrics)
    assert int(after.extra["calls"]) == 4


DATASET = random_dataset(83, 13)
PLAN = make_plan(np.diff(DATASET.offsets), BUCKETS, order="shuffle")
MIXED = make_mixed_plan(PLAN, 7)  # which three ranks do not divide


def tokens_of(batch):
    """The samples in a mixed batch, in the order of ranks."""
    starts = np.zeros_like(batch.num_microbatches)
    for rank, count in enumerate(np.asarray(batch.num_microbatches)):
        for k in np.asarray(batch.bucket_index)[rank, :count]:
            rows, length = batch.layout[k].bucket
            end = starts[rank] + rows * length
            tokens_BxT = np.asarray(batch.arrays.tokens)[rank, starts[rank] : end].reshape(rows, length)
            yield from (row[row > 0].astype(np.uint8).tobytes() for row in tokens_BxT if row.any())
            starts[rank] = end


def test_a_plan_is_loaded_and_trained_and_nothing_is_compiled_after_the_first_step():
    mesh = data_mesh(3)
    loader = load_mixed(MIXED, DATASET, layout=mesh)
    assert loader.place == (0, 0)
    batches = list(loader)
    assert len(batches) == MIXED.num_steps == loader.place.step > 3
    seen = [sample for batch in batches for sample in tokens_of(batch)]
    assert sorted(seen) == sorted(DATASET[i].tobytes() for i in range(len(DATASET)))
    assert [float(batch.num_sequences) for batch in batches] == MIXED.num_sequences.tolist()
    shards = {leaf.sharding.spec for batch in batches for leaf in jax.tree.leaves(batch) if leaf.ndim}
    assert shards == {PartitionSpec("data")}

    optimizer = make_optimizer()
    with jax.enable_x64(True):
        step = jax.jit(make_mixed_train_step(rnn_loss, optimizer, BUCKETS, layout=mesh))
        state = replicate(new_state(make_params(), optimizer), mesh)
        for t, batch in enumerate(batches):
            with no_recompiles("count") as count:
                state, metrics = step(state, batch)
            assert not count.recompilations or t == 0
            assert float(metrics.num_tokens) == MIXED.num_tokens[t]


def test_a_cost_decides_the_ranks():
    mesh = data_mesh(3)
    for cost in (None, lambda rows, length: rows + 0.0 * length):
        ranks = MIXED.ranks(3, cost)[: MIXED.step_offsets[1]]
        batch = next(load_mixed(MIXED, DATASET, layout=mesh, cost=cost))
        assert batch.num_microbatches.tolist() == np.bincount(ranks, minlength=3).tolist()


def test_what_does_not_fit_is_refused_by_name():
    mesh = data_mesh(2)
    microbatches, batch, spec, _ = mixed_by_hand((0, 1, 1), 2, (0, 1, 0))
    buckets = [BUCKETS[k] for k in (0, 1, 0)]
    refused = functools.partial(pytest.raises, ValueError)
    mix = functools.partial(mix_microbatches, spec=spec)
    with refused(match=r"not among the 4 of these batches: \(7, 7\)"):
        mix(microbatches, [(7, 7), *buckets[1:]], (0, 1, 1))
    with refused(match="ranks must be in 0 … 1: 2 of microbatch 1"):
        mix(microbatches, buckets, (0, 2, 1))
    with refused(match="rank 0 gets more than the 2 microbatches"):
        mix(microbatches, buckets, (0, 0, 0))
    with refused(match=r"bucket 3×5 is not as in batch_spec: \.tokens: int32\[1,5,3\], expected int32\[1,3,5\]"):
        mix(microbatches, [buckets[0], buckets[1], buckets[1]], (0, 1, 1))
    with refused(match=r"differ between its microbatches: \.num_sequences: 29\.0 and 3\.0"):
        mix([*microbatches[:2], microbatches[2]._replace(num_sequences=np.float32(3))], buckets, (0, 1, 1))

    make = functools.partial(make_mixed_train_step, rnn_loss, optax.sgd(0.1))
    with refused(match="lengths strictly ascend"):
        make([(2, 4), (2, 4)], layout=mesh)
    with refused(match="a mixed step is data-parallel alone, and layout is data2.tensor2"):
        make(BUCKETS, layout="data2.tensor2")
    state = new_state(make_params(np.float32), optax.sgd(0.1))
    with refused(match="is for 2 ranks, and the mesh has 3"):
        jax.eval_shape(make(BUCKETS, layout=data_mesh(3)), state, batch)
    with refused(match="takes a MixedBatch, such as load_mixed gives, not a Batch"):
        jax.eval_shape(make(BUCKETS, layout=mesh), state, microbatches[0])

    def reducing_loss(params, microbatch):
        return jax.tree.map(lambda x: jax.lax.psum(x, "data"), rnn_loss(params, microbatch))

    with refused(match="reducing_loss names a mesh axis"):
        jax.eval_shape(make_mixed_train_step(reducing_loss, optax.sgd(0.1), BUCKETS, layout=mesh), state, batch)

    with refused(match="start_step must be between 0 and"):
        load_mixed(MIXED, DATASET, layout=mesh, start_step=MIXED.num_steps + 1)
    with refused(match="holds sample 82, the dataset only 50"):
        load_mixed(MIXED, random_dataset(50, 13), layout=mesh)
    with refused(match="rank 0 gets more than the 15 elements of .tokens") as raised:
        next(load_mixed(MIXED, DATASET, layout=mesh, spec=mixed_batch_spec(hand_made((0,), (0,)), layout=mesh)))
    assert raised.value.__notes__ == ["which is a microbatch of step 0 of the mixed plan"]


@pytest.mark.multiprocess
def test_processes_read_their_own_microbatches_and_train_as_one():
    """Two processes of two ranks each; in the last step one of them has no microbatch."""
    losses, params, read, num_samples, counts = run_mixed.train()
    assert read == [*range(num_samples)]
    assert counts == [9, 9, 1]
    found_read, found_samples = [], 0
    for output in processes.run(Path(run_mixed.__file__), 2, num_devices=2):
        found = json.loads(output.splitlines()[-1])
        np.testing.assert_allclose(found[0], losses, rtol=1e-12)
        np.testing.assert_allclose(found[1], params, rtol=1e-12)
        found_read += found[2]
        found_samples += found[3]
    assert {*found_read} == {*read}
    assert len(read) == found_samples < len(found_read) <= found_samples + 4  # both read the last, for its scalars
