"""A script that prints "ok" if several processes sort and plan as one process would.

Arguments: what to do, the number of processes, a rank and a port. What to do is "together" or "die", as process 1
does between two sorts.
"""

import functools
import os
import signal
import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jvarlen
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import place, placement_of
from jvarlen.experimental import large_plans
from jvarlen.experimental.large_plans import chunk_digests
from jvarlen.planning import plan_file
from tests.support.sort_inputs import KINDS, keys_of_kind, order_of


def check_ranks(array: jax.Array, expected: np.ndarray, result: str) -> None:
    """Compares what this process has of a sorted array with the rows that belong there."""
    per_shard = array.sharding.shard_shape(array.shape)[0]
    num_shards = len(array) // per_shard
    for shard in array.addressable_shards:
        d, slot = (shard.index[0].start or 0) // per_shard, np.arange(per_shard)
        rank = slot * num_shards + d if result == "interleaved" else d * per_shard + slot
        found = np.asarray(shard.data)
        assert (found[rank < len(expected)] == expected[rank[rank < len(expected)]]).all(), (d, result)


def check_sort(mesh: Mesh, kinds: tuple[str, ...]) -> None:
    """Keys of each kind, spread evenly; the transforms and layouts in turn."""
    num_shards, spread = mesh.size, NamedSharding(mesh, PartitionSpec("data"))
    for i, kind in enumerate(kinds):
        keys = keys_of_kind(kind, num_shards * 25, np.random.default_rng(i))
        mine = keys.reshape(jax.process_count(), -1)[jax.process_index()]
        placed = jax.make_array_from_process_local_data(spread, mine)
        result, transform = ("interleaved", "block")[i % 2], ("shard_map", "pmap")[i // 2 % 2]
        sorted_keys, indices = jvarlen.sample_sort(placed, mesh, result=result, transform=transform)
        check_ranks(indices, order_of(keys), result)
        check_ranks(sorted_keys, keys[order_of(keys)], result)


def check_uneven_rows(mesh: Mesh) -> None:
    """Processes with different numbers of rows, one with none; payload; the same array on all; NaN."""
    rng = np.random.default_rng(0)
    rank, count = jax.process_index(), jax.process_count()
    sizes = [0 if i == count - 1 else 7 * i + 3 for i in range(count)]
    keys = rng.integers(0, 5, sum(sizes)).astype(np.float32)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    (placed, payload), shard_sizes = jvarlen.sorting.shard_local_rows((keys[own], keys[own] * 2), mesh)
    sorted_keys, indices, followed = jvarlen.sample_sort(placed, mesh, payload=payload, shard_sizes=shard_sizes)
    check_ranks(indices, order_of(keys), "interleaved")
    check_ranks(sorted_keys, keys[order_of(keys)], "interleaved")
    check_ranks(followed, 2 * keys[order_of(keys)], "interleaved")

    check_ranks(jvarlen.sample_sort(keys, mesh)[1], order_of(keys), "interleaved")
    keys[1] = np.nan
    with pytest.raises(ValueError, match=r"id 1$"):
        jvarlen.sample_sort(keys, mesh)


def check_plan(mesh: Mesh, orders: tuple[str, ...]) -> None:
    """The plan that one process would make of all lengths: the same digest, and of its rows those of this process."""
    plan_file.DIGEST_CHUNK = chunk_digests.DIGEST_CHUNK = 64  # so that all shards have some
    rng = np.random.default_rng(1)
    rank, count = jax.process_index(), jax.process_count()
    lengths = rng.integers(1, 300, 701)
    cuts = [0, *np.sort(rng.integers(0, 700, count - 1)).tolist(), 701]
    mine = lengths[cuts[rank] : cuts[rank + 1]]
    distinct, counts = large_plans.count_lengths(mine)
    microbatches = 2 * mesh.size
    options = {"max_length": 250, "overlong": "truncate", "num_microbatches": microbatches}
    buckets = jvarlen.make_buckets(distinct, 600, counts=counts, max_shapes=4, **options)
    for order in orders:
        options = {
            "num_microbatches": microbatches, "seed": 5, "epoch": 2,
            "order": jvarlen.Order(order, longest_first=True, new_shape_every=3),
            "overlong": "truncate" if order == "length" else "drop",
        }  # fmt: skip
        whole = jvarlen.make_plan(lengths, buckets, **options)
        plan = large_plans.plan_distributed(mine, buckets, mesh, **options)
        assert plan.digest == whole.digest
        assert (plan.num_tokens == whole.num_tokens).all()
        assert len(plan.microbatches) == microbatches // count
        for step in range(whole.num_steps):
            assert (plan.rows(step) == whole.rows(step)[plan.microbatches]).all(), (order, step)
        check_batches(plan, lengths, whole, mesh)
        check_batches(whole, lengths, whole, mesh)
    with pytest.raises(ValueError, match="processes differ in the plan"):
        jvarlen.load(jvarlen.make_plan(lengths, buckets, **options | {"seed": rank}), Remembering(lengths), layout=mesh)
    with pytest.raises(ValueError, match="processes differ in the arguments of plan_distributed"):
        large_plans.plan_distributed(mine, buckets, mesh, order="length", num_microbatches=mesh.size, seed=rank)
    with pytest.raises(ValueError, match="samples longer than the longest bucket"):
        large_plans.plan_distributed(mine, buckets, mesh, order="length", num_microbatches=mesh.size)
    bad = [0] if rank == 0 else [1]
    options = {"buckets": buckets, "layout": mesh, "num_microbatches": mesh.size}
    for plan_or_count in (large_plans.count_lengths, functools.partial(large_plans.plan_distributed, **options)):
        with pytest.raises(ValueError if rank == 0 else RuntimeError, match="lengths must be at least 1"):
            plan_or_count(bad)


def check_refusals(mesh: Mesh) -> None:
    """What differs between processes is an error on all of them, and nobody waits."""
    rank = jax.process_index()
    keys = np.arange(40, dtype=np.int32)
    for keys_here, options in (
        (keys, {"result": ("interleaved", "block")[rank % 2]}),
        (keys, {"oversampling": 4 + rank}),
        (keys, {"payload": keys if rank else None}),
        (keys + rank, {}),
        (keys.astype((np.int32, np.float32)[rank % 2]), {}),
    ):
        with pytest.raises(ValueError, match="processes differ in the arguments of sample_sort"):
            jvarlen.sample_sort(keys_here, mesh, **options)
    with pytest.raises(ValueError, match="processes differ in the kind of rows"):
        jvarlen.sorting.shard_local_rows(keys.astype((np.int32, np.float32)[rank % 2]), mesh)
    with pytest.raises(ValueError if rank == 0 else RuntimeError, match=r"oversampling \(0\)"):
        jvarlen.sample_sort(keys, mesh, oversampling=min(1, rank))
    of_process_0 = [device for device in jax.devices() if device.process_index == 0]
    with pytest.raises((ValueError, RuntimeError), match="has no device of the mesh"):
        jvarlen.sorting.shard_local_rows(keys, Mesh(np.array(of_process_0), ("data",)))
    if jax.local_device_count() > 1:
        mixed = sorted(jax.devices(), key=lambda device: (device.local_hardware_id or device.id % 2048, device.id))
        mixed_mesh = Mesh(np.array(mixed), ("data",))
        check_ranks(jvarlen.sample_sort(keys, mixed_mesh)[1], keys, "interleaved")
        with pytest.raises(ValueError, match="devices of a process side by side"):
            jvarlen.sample_sort(keys, mixed_mesh, transform="pmap")


def check_batches(plan: Any, lengths: np.ndarray, whole: jvarlen.Plan, mesh: Mesh) -> None:
    """The part of every batch on this process is what one process would have put there."""
    dataset = Remembering(lengths)
    loaded = jvarlen.load(plan, dataset, layout=mesh)
    for batch, alone in zip(loaded, jvarlen.load(whole, Remembering(lengths)), strict=True):
        for leaf, expected in zip(batch, alone, strict=True):
            assert leaf.shape == expected.shape
            for shard in leaf.addressable_shards:
                assert (np.asarray(shard.data) == np.asarray(expected)[shard.index]).all()
    own = placement_of(mesh).local_microbatches(whole.num_microbatches)
    ids = np.concatenate([whole.rows(step)[own].ravel() for step in range(whole.num_steps)])
    _, *read = dataset.read  # all processes look at the same sample first: has it fields?
    assert sorted(read) == sorted(ids[ids >= 0].tolist())


class Remembering:
    """Samples of given lengths, and which of them were read."""

    def __init__(self, lengths: np.ndarray):
        self.lengths = lengths
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        self.read.append(i)
        return np.full(self.lengths[i], i)


def die_between_sorts(mesh: Mesh) -> None:
    """Sorts for ever, but for process 1, which dies after the first time."""
    while True:
        jvarlen.sample_sort(np.arange(1000, dtype=np.float32), mesh)
        print("sorted", flush=True)
        if jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Connects, and checks all."""
    what, (num_processes, rank, port) = sys.argv[1], map(int, sys.argv[2:])
    jvarlen.distributed.initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    mesh = place(Layout()).mesh
    if what == "die":
        die_between_sorts(mesh)
    check_sort(mesh, KINDS[1::3])
    check_uneven_rows(mesh)
    check_refusals(mesh)
    check_plan(mesh, ("length", "shuffle"))
    jax.distributed.shutdown()
    print("ok")


if __name__ == "__main__":
    main()
