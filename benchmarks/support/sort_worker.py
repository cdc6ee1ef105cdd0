"""A JAX process of the sorting benchmark: answers questions into a JSON file.

Arguments: the questions by name, each [question, settings], as JSON; a folder; flags for XLA; then the number of
processes, this one's rank and a port. The answers, by name, are `{rank}.json` in the folder. Letters: N rows, p shards,
S calls.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jvarlen
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import place
from jvarlen.experimental import large_plans
from jvarlen.experimental.ordered_file.balance import exchange_volume, shard_balance
from jvarlen.sorting.sample_sort import sort_shard
from jvarlen.sorting.shard_sort import Shards

REPEATS = 3
LIMIT_S = 8.0  # a call is not repeated after it has taken so long in all
OVERSAMPLING = 4

Call = Callable[[], Any]


def seconds_in_turn(calls: dict[str, Call], repeats: int = REPEATS) -> dict[str, list[float]]:
    """Seconds of calls that take turns, so that what else the machine does slows all of them; slow ones have fewer."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            if sum(seconds[name]) < LIMIT_S:
                start = time.perf_counter()
                jax.block_until_ready(call())
                seconds[name].append(time.perf_counter() - start)
    return seconds


def first_seconds(call: Call) -> float:
    """Seconds of the first call, which compiles."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def warmed(call: Call) -> Call:
    first_seconds(call)
    return call


def compiled(function: Callable[..., Any], *args: jax.Array, **options: Any) -> Call:
    """A call of a function on its arguments, compiled, so that a slow one need not run to warm up."""
    program = jax.jit(function, **options).lower(*args).compile()
    return lambda: program(*args)


def make_keys(num_rows: int, dtype: str = "int32") -> np.ndarray:
    rng = np.random.default_rng(0)
    if np.issubdtype(dtype, np.floating):
        return rng.normal(size=num_rows).astype(dtype)
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max, num_rows, dtype, endpoint=True)


def spread(array: np.ndarray, mesh: Mesh) -> jax.Array:
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec("data")))


def sort_pairs(keys: jax.Array, *others: jax.Array) -> tuple[jax.Array, ...]:
    """Sorts keys and indices, on one device, as a sort by both; what else there is follows."""
    return lax.sort((keys, *others), num_keys=2, is_stable=False)


def time_keys(num_rows: int, dtype: str, with_payload: bool, with_peers: bool) -> dict[str, list[float]]:
    """Seconds of sorting on p devices, of `lax.sort` on one of them, and, where asked for, of the other ways."""
    jax.config.update("jax_enable_x64", np.dtype(dtype).itemsize == 8)
    mesh, keys = place(Layout()).mesh, make_keys(num_rows, dtype)
    index, order = np.arange(num_rows, dtype=np.int32), np.argsort(keys, kind="stable")
    sharded, payload = spread(keys, mesh), spread(index, mesh) if with_payload else None
    on_one = [jax.device_put(column, jax.devices()[0]) for column in [keys, index] + [index] * with_payload]

    def sample_sort(**options: Any) -> Call:
        call = warmed(lambda: jvarlen.sample_sort(sharded, mesh, payload=payload, **options))
        ranked = np.asarray(call()[1]).reshape(mesh.size, -1)
        indices = ranked.ravel() if options.get("result") == "block" else ranked.T.ravel()
        assert (indices == order).all(), f"a wrong order: {options}"
        return call

    calls = {
        f"`lax.sort` of (key, index{', payload' * with_payload}), one device": compiled(sort_pairs, *on_one),
        "`sample_sort`": sample_sort(),
    }
    if with_peers:
        with jax.enable_x64(True):
            packed = jax.device_put(keys.astype(np.int64) << 32 | index, jax.devices()[0])
            sort_packed = compiled(lambda rows: lax.sort(rows, is_stable=False), packed)
        calls |= {
            '`sample_sort`, `result="block"`': sample_sort(result="block"),
            '`sample_sort`, `transform="pmap"`': sample_sort(transform="pmap"),
            '`sample_sort`, `transform="pmap"`, `result="block"`': sample_sort(transform="pmap", result="block"),
            "`lax.sort` by key, stable, one device": compiled(lambda *pair: lax.sort(pair, num_keys=1), *on_one),
            "`lax.sort` of key and index in one int64, one device": sort_packed,
            "`jnp.sort` of the sharded array, no index": compiled(jnp.sort, sharded, out_shardings=sharded.sharding),
            "`jnp.argsort` of the sharded array": compiled(jnp.argsort, sharded, out_shardings=sharded.sharding),
            "`np.sort` of key and index in one int64": lambda: np.sort(keys.astype(np.int64) << 32 | index),
        }
    if not with_payload:
        calls["`np.argsort`, stable"] = lambda: np.argsort(keys, kind="stable")
    return seconds_in_turn(calls)


def time_growth(sizes: list[int]) -> list[dict[str, Any]]:
    """For every N seconds on all devices, of the first call as well, and of `lax.sort` of pairs on one."""
    mesh, answers = place(Layout()).mesh, []
    for num_rows in sizes:
        keys = make_keys(num_rows)
        sharded = spread(keys, mesh)
        on_one = [jax.device_put(column, jax.devices()[0]) for column in (keys, np.arange(num_rows, dtype=np.int32))]
        calls = {
            "one device": compiled(sort_pairs, *on_one),
            "sample_sort": lambda sharded=sharded: jvarlen.sample_sort(sharded, mesh),
        }
        first_s = first_seconds(calls["sample_sort"])
        answers.append({"num_rows": num_rows, "first_s": first_s, **seconds_in_turn(calls, 5)})
    return answers


def measure_shards(num_rows: int, memory_rows: list[int]) -> dict[str, Any]:
    """Seconds, what is sent and what is held, with the devices that this process has."""
    from tests.sorting.test_balance import counted  # here: it needs pytest

    mesh = place(Layout()).mesh
    keys = spread(make_keys(num_rows), mesh)
    calls = {"sample_sort": lambda: jvarlen.sample_sort(keys, mesh)}
    answer: dict[str, Any] = {"first_s": first_seconds(calls["sample_sort"]), **seconds_in_turn(calls, 5)}
    sizes = np.full(mesh.size, num_rows // mesh.size)
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(sort_program(num_rows, mesh))(jax.ShapeDtypeStruct(keys.shape, keys.dtype), sizes)
    return answer | {
        "formula": exchange_volume(num_rows, mesh.size, oversampling=OVERSAMPLING),
        "counted": counted(jaxpr.jaxpr, mesh.size),
        "memory": [measure_memory(rows, mesh) for rows in memory_rows] if mesh.size > 1 else [],
    }


def sort_program(num_rows: int, mesh: Mesh) -> Callable[..., Any]:
    """What `sample_sort` compiles for int32 keys that p divides, of keys and the sizes of the shards."""
    shards = Shards("data", mesh.size, OVERSAMPLING, ragged=False)

    def program(keys: jax.Array, sizes: jax.Array) -> Any:
        return sort_shard(keys, None, sizes, shards=shards, result="interleaved", num_out=num_rows // mesh.size)

    axis, everywhere = PartitionSpec("data"), PartitionSpec()
    out_specs = (axis, axis, axis, everywhere)
    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=(axis, everywhere), out_specs=out_specs, check_vma=False))


def measure_memory(num_rows: int, mesh: Mesh) -> dict[str, int]:
    """Bytes of temporaries on each device, as the compiler assigns them."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    keys = jax.ShapeDtypeStruct((num_rows,), np.int32, sharding=sharding)
    pair = (keys, keys)
    with jax.enable_x64(True):
        sort = sort_program(num_rows, mesh).lower(keys, np.zeros(mesh.size, np.int64))
    lowered = {
        "sample_sort": sort,
        "argsort": jax.jit(jnp.argsort, out_shardings=sharding).lower(keys),
        "pairs": jax.jit(sort_pairs, out_shardings=(sharding, sharding)).lower(*pair),
    }
    return {"num_rows": num_rows} | {
        name: program.compile().memory_analysis().temp_size_in_bytes for name, program in lowered.items()
    }


def lengths_of_kind(kind: str, num_rows: int, num_shards: int) -> np.ndarray:
    """int32 keys from 1 on, so that they can be lengths."""
    rng = np.random.default_rng(0)
    uniform = rng.integers(1, 4097, num_rows)
    kinds: dict[str, Callable[[], np.ndarray]] = {
        "uniform": lambda: uniform,
        "constant": lambda: np.full(num_rows, 512),
        "90 % duplicates": lambda: np.where(rng.random(num_rows) < 0.9, 512, uniform),
        "sorted": lambda: np.sort(uniform),
        "reversed": lambda: np.sort(uniform)[::-1],
        "two values": lambda: rng.choice([128, 4096], num_rows),
        "Zipf, exponent 1.3": lambda: np.minimum(rng.zipf(1.3, num_rows), 2**20),
        # Shard d has lengths of its own, the longest first.
        "a range for each shard": lambda: (
            uniform % 512 + 1 + 512 * (num_shards - 1 - np.arange(num_rows) * num_shards // num_rows)
        ),
    }
    return kinds[kind]().astype(np.int32)


def textbook_rows(keys: np.ndarray, num_shards: int) -> np.ndarray:
    """int64[p], the rows of each shard after a sample sort whose splitters are keys alone, so that equal keys stay one.

    References:
      Shi and Schaeffer 1992, "Parallel sorting by regular sampling".
    """
    per_shard = OVERSAMPLING * num_shards
    samples = [
        np.sort(shard)[np.arange(per_shard) * len(shard) // per_shard] for shard in np.array_split(keys, num_shards)
    ]
    ranked = np.sort(np.concatenate(samples))
    splitters = ranked[np.arange(1, num_shards) * len(ranked) // num_shards]
    return np.bincount(np.searchsorted(splitters, keys, side="right"), minlength=num_shards)


def measure_balance(num_rows: int, kinds: list[str]) -> list[dict[str, Any]]:
    """How evenly keys of each kind lie after `sample_sort` and a textbook's sort, and what is lost."""
    mesh, answers = place(Layout()).mesh, []
    for kind in kinds:
        keys = lengths_of_kind(kind, num_rows, mesh.size)
        sorted_keys, indices = jvarlen.sample_sort(keys, mesh)
        exact = shard_balance(sorted_keys, indices, mesh.size)
        by_rank = np.asarray(indices).reshape(mesh.size, -1).T.ravel()
        found, order = by_rank[by_rank >= 0], np.argsort(keys, kind="stable")
        answers.append(
            {
                "kind": kind,
                "rows": exact.rows.tolist(),
                "lost": num_rows - len(np.unique(found)),
                "misplaced": int((by_rank[:num_rows] != order).sum()),
                "textbook": textbook_rows(keys, mesh.size).tolist(),
                "waiting": exact.waiting,
            }
        )
    return answers


def time_plans(num_samples: int) -> list[dict[str, Any]]:
    """Seconds of a distributed plan and of the plan in one place, both with their digest."""
    mesh = place(Layout()).mesh
    lengths = np.random.default_rng(0).integers(128, 4096, num_samples)
    buckets = jvarlen.make_buckets(lengths, 500_000, max_shapes=16, num_microbatches=8)
    answers = []
    for order in ("length", "shuffle"):
        options: dict[str, Any] = {"num_microbatches": 8, "order": order}
        calls: dict[str, Call] = {
            "make_plan": lambda options=options: jvarlen.make_plan(lengths, buckets, **options).digest,
            "plan_distributed": lambda options=options: (
                large_plans.plan_distributed(lengths, buckets, mesh, **options).digest
            ),
        }
        digests = {call() for call in calls.values()}
        answers.append({"order": order, "equal": len(digests) == 1, **seconds_in_turn(calls, 5)})
    return answers


def time_one_device(num_rows: int, platform: str) -> dict[str, list[float]] | None:
    """Seconds of `sample_sort` and `torch.sort` on one device of a platform; None where there is no such."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # leaves torch its share
    jax.config.update("jax_platforms", None)  # workers are confined to the CPU otherwise
    if jax.default_backend() != platform:
        return None
    keys = make_keys(num_rows)
    mesh = place(Layout(data=1)).mesh
    sharded, index = spread(keys, mesh), jax.device_put(np.arange(num_rows, dtype=np.int32))
    calls = {
        "`sample_sort`": warmed(lambda: jvarlen.sample_sort(sharded, mesh)),
        "`lax.sort` of (key, index)": warmed(compiled(sort_pairs, jax.device_put(keys), index)),
    }
    return seconds_in_turn(calls, 5) | time_torch_sort(keys, platform)


def time_torch_sort(keys: np.ndarray, platform: str) -> dict[str, list[float]]:
    """Seconds of `torch.sort`, which returns indices as well, where torch has such a device."""
    # Here: all other questions do without it. `tests/support/forks.py` takes a program with the statement for one of
    # PyTorch.
    torch = importlib.import_module("torch")
    if platform == "gpu" and not torch.cuda.is_available():
        return {}
    tensor = torch.from_numpy(keys).to("cuda" if platform == "gpu" else platform)

    def sort() -> None:
        torch.sort(tensor, stable=True)
        if platform == "gpu":
            torch.cuda.synchronize()

    return seconds_in_turn({"`torch.sort`, stable": warmed(sort)}, 5)


def time_processes(num_rows: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of this process in sorts of rows that lie on several processes already."""
    mesh, keys = place(Layout()).mesh, make_keys(num_rows)
    bounds = np.arange(jax.process_count() + 1) * num_rows // jax.process_count()
    own = slice(*bounds[jax.process_index() :][:2])
    placed, sizes = jvarlen.sorting.shard_local_rows(keys[own], mesh)

    calls: dict[str, Call] = {
        "`jvarlen.sample_sort`": lambda: jvarlen.sample_sort(placed, mesh, shard_sizes=sizes),
    }
    (_, indices), *_ = (call() for call in calls.values())
    expected = np.argsort(keys, kind="stable")[jax.process_index() :: jax.process_count()]
    assert (np.asarray(indices.addressable_data(0))[: len(expected)] == expected).all(), "a wrong order"
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            multihost_utils.sync_global_devices("start")
            seconds[name] += seconds_in_turn({name: call}, 1)[name]
    return seconds


QUESTIONS: dict[str, Callable[..., Any]] = {
    "keys": time_keys,
    "growth": time_growth,
    "shards": measure_shards,
    "balance": measure_balance,
    "plans": time_plans,
    "one device": time_one_device,
    "processes": time_processes,
}


def main() -> None:
    questions, folder, flags = sys.argv[1:4]
    num_processes, rank, port = map(int, sys.argv[4:])
    os.environ["XLA_FLAGS"] += f" {flags}"  # XLA reads it when it is first used
    if num_processes > 1:
        jvarlen.distributed.initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    asked = json.loads(questions)
    answers = {name: QUESTIONS[question](**settings) for name, (question, settings) in asked.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(answers))
    if num_processes > 1:
        jax.distributed.shutdown()


if __name__ == "__main__":
    main()
