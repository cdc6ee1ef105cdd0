"""A script that writes an ordered file in several processes, with errors and without.

Arguments: a directory, the number of processes, a rank and a port.
"""

import json
import os
import resource
import signal
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jvarlen.distributed.processes import agree, initialize_processes
from jvarlen.experimental.ordered_file import write as ordered_file
from jvarlen.experimental.ordered_file.write import write_ordered

OLD = "what was there before"


def values_by_rank(num_samples):
    """All different, and none its rank."""
    return (np.arange(num_samples) * 7 + 3).astype(np.int32)


def shard_values(values, sharding, result, *, num_shards):
    """Values in the order of their ranks, as the sort lays them out on p shards, padded with −1."""
    per_shard = -(-len(values) // num_shards)
    padded = np.full(num_shards * per_shard, -1).astype(values.dtype)
    padded[: len(values)] = values
    if result == "interleaved":
        padded = padded.reshape(-1, num_shards).T.ravel()
    return jax.make_array_from_callback(padded.shape, sharding, lambda index: padded[index], dtype=padded.dtype)


def on_all_devices(values):
    num_shards = jax.device_count()
    mesh = jax.make_mesh((num_shards,), ("data",), axis_types=(AxisType.Auto,))
    return shard_values(values, NamedSharding(mesh, PartitionSpec("data")), "interleaved", num_shards=num_shards)


def write(path, values=None, *, ordered=None, **options):
    """Writes to a file; type and text of the error where there is one."""
    values = values_by_rank(101) if values is None else values
    ordered = on_all_devices(values) if ordered is None else ordered
    before = signal.getsignal(signal.SIGINT)
    try:
        write_ordered(path, ordered, options.pop("num_samples", len(values)), progress=False, **options)
        raised = ["", ""]
    except (Exception, KeyboardInterrupt) as error:
        raised = [type(error).__name__, str(error)]
    assert signal.getsignal(signal.SIGINT) is before
    return raised


def limited(num_bytes, call):
    """Runs it while no file can grow beyond a number of bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        return call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def interrupted(call):
    """Runs it with Ctrl-C while the first values are written."""
    exactly = ordered_file._exactly

    def press(*args):
        ordered_file._exactly = exactly
        os.kill(os.getpid(), signal.SIGINT)
        return exactly(*args)

    ordered_file._exactly = press
    return call()


def fail_cases(directory, rank, last):
    """What is raised where one process fails; the old file stays each time, and no part does."""
    path = directory / "order.npy"
    wide = values_by_rank(101)
    wide[100] = 2**20  # the highest rank is the last process's
    disk = directory / ("disk" if rank == 0 else "none")
    other = directory / "disk" / "order.npy"
    if rank == 0:
        other.parent.mkdir()
        other.write_text(OLD)
        path.write_text(OLD)
    agree("the old files", "are there")
    cases = {
        "does not fit": lambda: write(path, wide, dtype=np.int16),
        "does not fit, gathered": lambda: write(disk / "order.npy", wide, dtype=np.int16),
        "disk full at the end": lambda: limited(300 if rank == last else 10**6, lambda: write(path)),
        "interrupted": lambda: interrupted(lambda: write(path)) if rank == last else write(path),
        "not shared": lambda: write(disk / "order.npy", shared_disk=True),
        "no directory": lambda: write(directory / "nowhere" / "order.npy"),
        "other number": lambda: write(path, num_samples=100 if rank == last else 101),
        "wrong number": lambda: write(path, num_samples=-1 if rank == last else 101),
        "in one place": lambda: write(path, ordered=values_by_rank(101) if rank == last else None),
    }
    seen = {}
    for case, run in cases.items():
        seen[case] = run()
        assert path.read_text() == other.read_text() == OLD, case
        agree("what was seen", case)
    assert sorted(os.listdir(directory)) == ["disk", "order.npy"]
    assert os.listdir(other.parent) == ["order.npy"]
    seen["afterwards"] = write(path)
    return seen


def main():
    directory = Path(sys.argv[1])
    num_processes, rank, port = map(int, sys.argv[2:])
    initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    print(json.dumps(fail_cases(directory, rank, num_processes - 1)))


if __name__ == "__main__":
    main()
