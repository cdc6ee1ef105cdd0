"""Figures of a sort: the program sends what they say, and the shards hold what they say."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jvarlen import sample_sort
from jvarlen.experimental.ordered_file.balance import balance_table, exchange_volume, shard_balance
from jvarlen.sorting.sample_sort import sort_shard
from jvarlen.sorting.shard_sort import Shards
from tests.support.meshes import data_mesh

# How many messages a shard sends in a collective of p shards, and what share of its operand goes into each.
MESSAGES = {
    "all_to_all": lambda p: (p - 1, 1 / p),
    "all_gather": lambda p: (p - 1, 1),
    "psum": lambda p: (2 * (p - 1), 1 / p),
    "psum_invariant": lambda p: (2 * (p - 1), 1 / p),
}


def counted(jaxpr, num_shards, times=1):
    """Messages and bytes of all collectives of a program, those in loops as often as these run."""
    messages = num_bytes = 0
    for equation in jaxpr.eqns:
        for operand in equation.invars if equation.primitive.name in MESSAGES else ():
            sent, share = MESSAGES[equation.primitive.name](num_shards)
            messages += times * sent
            num_bytes += times * sent * share * operand.aval.size * operand.aval.dtype.itemsize
        inner_times = times * equation.params.get("length", 1) if equation.primitive.name == "scan" else times
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                assert equation.primitive.name != "while"  # it would hide how often it runs
                of_inner = counted(inner, num_shards, inner_times)
                messages, num_bytes = messages + of_inner[0], num_bytes + of_inner[1]
    return messages, num_bytes


@pytest.mark.parametrize("num_shards", [1, 2, 3, 4])
@pytest.mark.parametrize("result", ["interleaved", "block"])
@pytest.mark.parametrize(("case", "num_rows", "oversampling"), [(0, 1, 4), (1, 101, 1), (2, 5000, 4), (3, 40_000, 16)])
def test_what_is_sent_follows_the_formula(case, num_rows, oversampling, result, num_shards):
    # Each dtype in each case, in each result and on each number of shards.
    place = case + num_shards + 2 * (result == "block")
    dtype = (np.int32, np.float32, np.int64, np.float64)[place % 4]
    per_shard = -(-num_rows // num_shards)
    shards = Shards("data", num_shards, oversampling, ragged=False)

    def sort(keys, sizes):
        return sort_shard(keys, None, sizes, shards=shards, result=result, num_out=per_shard)

    axis, everywhere = PartitionSpec("data"), PartitionSpec()
    out_specs = (axis, axis, axis, everywhere)
    mapped = jax.shard_map(
        sort, mesh=data_mesh(num_shards), in_specs=(axis, everywhere), out_specs=out_specs, check_vma=False
    )
    with jax.enable_x64(True):
        keys = jax.ShapeDtypeStruct((num_shards * per_shard,), dtype)
        jaxpr = jax.make_jaxpr(mapped)(keys, jax.ShapeDtypeStruct((num_shards,), np.int64)).jaxpr
    volume = exchange_volume(num_rows, num_shards, dtype=dtype, result=result, oversampling=oversampling)
    assert (volume.messages, volume.num_bytes) == pytest.approx(counted(jaxpr, num_shards))
    assert (volume.messages > 0) == (num_shards > 1)


def test_exact_balance():
    keys = np.repeat([1, 10, 100, 1000], 25).astype(np.int32)  # the longest quarter lies on the last shard
    exact = shard_balance(*sample_sort(keys, data_mesh(4)), 4)
    assert exact.rows.tolist() == [25] * 4
    # Slots of four neighbours: only where the length changes, at ranks 25, 50 and 75, does any shard wait.
    ranked = np.repeat([1, 10, 100, 1000], 25).reshape(25, 4)
    assert exact.waiting == pytest.approx(1 - ranked.sum() / (4 * ranked.max(axis=1).sum()))
    table = balance_table({"exact": exact})
    assert "25 to 25" in table
