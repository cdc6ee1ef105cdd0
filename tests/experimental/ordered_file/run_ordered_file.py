"""A script that writes ordered files in several processes, with and without errors.

Arguments: a directory, a mode, the number of processes, a rank and a port.
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
CASES = [
    (result, shared_disk, num_samples)
    for result in ("interleaved", "block")
    for shared_disk in (None, True, False)
    for num_samples in (0, 1, 101)
]


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


def on_all_devices(values, result, axis_type=AxisType.Auto):
    num_shards = jax.device_count()
    mesh = jax.make_mesh((num_shards,), ("data",), axis_types=(axis_type,))
    return shard_values(values, NamedSharding(mesh, PartitionSpec("data")), result, num_shards=num_shards)


def on_last_process(values):
    devices = [device for device in jax.devices() if device.process_index == jax.process_count() - 1]
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    return shard_values(values, NamedSharding(mesh, PartitionSpec("data")), "interleaved", num_shards=len(devices))


def write(path, values=None, *, ordered=None, **options):
    """Writes to a file; type and text of the error where there is one."""
    values = values_by_rank(101) if values is None else values
    ordered = on_all_devices(values, options.get("result", "interleaved")) if ordered is None else ordered
    before = signal.getsignal(signal.SIGINT)
    try:
        write_ordered(path, ordered, options.pop("num_samples", len(values)), progress=False, **options)
        raised = ["", ""]
    except (Exception, KeyboardInterrupt) as error:
        raised = [type(error).__name__, str(error)]
    assert signal.getsignal(signal.SIGINT) is before
    return raised


def limited(num_bytes, call):
    """Runs it while no file can grow beyond so many bytes, as on a disk that is full."""
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


def write_cases(directory, rank):
    """Files that must be right, on one disk and on one of each process."""
    disk = directory / f"disk of {rank}"
    if rank == 0:
        disk.mkdir()
    raised = []
    for result, shared_disk, num_samples in CASES:
        values, name = values_by_rank(num_samples), f"{result} {shared_disk} {num_samples}.npy"
        raised.append(write(directory / name, values, result=result, shared_disk=shared_disk))
        if not shared_disk:
            raised.append(write(disk / name, values, result=result, shared_disk=shared_disk))
    # Other ways to lie on the devices: all of it everywhere, and an axis along which it repeats.
    everywhere = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Explicit,))
    copies = shard_values(values_by_rank(30), NamedSharding(everywhere, PartitionSpec()), "block", num_shards=1)
    write_ordered(directory / "copies.npy", copies, 30, result="block", progress=False)
    write_ordered(disk / "copies.npy", copies, 30, result="block", progress=False)
    own_copy = values_by_rank(30)
    write_ordered(directory / "own copy.npy", own_copy, 30, result="block", progress=False)
    write_ordered(disk / "own copy.npy", own_copy, 30, result="block", progress=False, shared_disk=False)
    square = jax.make_mesh((2, 2), ("model", "data"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(square, PartitionSpec("data"))
    floats = np.float32([0.5, -0.0, np.nan])
    for name, values, dtype in (("repeated", values_by_rank(31), np.int64), ("repeated floats", floats, np.float32)):
        repeated = shard_values(values, sharding, "interleaved", num_shards=2)
        for path in (directory / f"{name}.npy", disk / f"{name}.npy"):
            write_ordered(path, repeated, len(values), dtype=dtype, progress=False)
    # And on those of one process only, which is not the one that can write where the disk is not shared.
    of_last = on_last_process(values_by_rank(30))
    raised.append(write(directory / "of the last.npy", values_by_rank(30), ordered=of_last))
    raised.append(write(disk / "of the last.npy", values_by_rank(30), ordered=of_last))
    return raised


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


def die_where(victim, rank, directory):
    """The victim is killed, process 0 right before the file gets its name, another one while it writes."""

    def die(*args):
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        name = "move_into_place" if rank == 0 else "_exactly"
        assert hasattr(ordered_file, name)
        setattr(ordered_file, name, die)
    write_ordered(directory / "order.npy", on_all_devices(values_by_rank(101), "interleaved"), 101, progress=False)


def main():
    directory, mode = Path(sys.argv[1]), sys.argv[2]
    num_processes, rank, port = map(int, sys.argv[3:])
    initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    if mode == "write":
        print(json.dumps(write_cases(directory, rank)))
    elif mode == "fail":
        print(json.dumps(fail_cases(directory, rank, num_processes - 1)))
    else:
        die_where(int(mode), rank, directory)


if __name__ == "__main__":
    main()
