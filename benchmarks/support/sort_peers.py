"""A process of the sorting benchmark without JAX: `torch_ref.sample_sort`, and sorts of Python lists.

Arguments and answers are those of `sort_worker.py`; an answer is this process's seconds of each call.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

import torch_ref

OVERSAMPLING = 4

Row = tuple[int, int]  # key, index
Parts = list[list[Row]]  # one for each process


def sort_lists(rows: list[Row], exchange: Callable[[Parts], Parts]) -> list[Row]:
    """This process's block of the rows of all: a sample sort as one writes it of lists of (key, index)."""
    num_processes = distributed.get_world_size()
    run = sorted(rows)
    gathered: Any = [None] * num_processes
    distributed.all_gather_object(gathered, run[:: max(1, len(run) // (OVERSAMPLING * num_processes))])
    samples = sorted(itertools.chain.from_iterable(gathered))
    splitters = [samples[d * len(samples) // num_processes] for d in range(1, num_processes)]
    bounds = [0, *(bisect.bisect_left(run, splitter) for splitter in splitters), len(run)]
    arrived = exchange([run[start:end] for start, end in itertools.pairwise(bounds)])
    return sorted(itertools.chain.from_iterable(arrived))


def gather_all(parts: Parts) -> Parts:
    """Every process receives everything and keeps what is its own; torch has no all-to-all of objects."""
    gathered: Any = [None] * len(parts)
    distributed.all_gather_object(gathered, parts)
    return [sent[distributed.get_rank()] for sent in gathered]


def send_pickled(parts: Parts) -> Parts:
    """Every process receives what is its own, pickled, as bytes."""
    pickled = [torch.frombuffer(bytearray(pickle.dumps(part)), dtype=torch.uint8) for part in parts]
    sent = torch.tensor([len(part) for part in pickled])
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent)
    arrived = torch.empty(int(received.sum()), dtype=torch.uint8)
    distributed.all_to_all_single(arrived, torch.cat(pickled), received.tolist(), sent.tolist())
    return [pickle.loads(part.numpy().tobytes()) for part in arrived.split(received.tolist())]


def measure(work: str, keys: np.ndarray, repeats: int) -> dict[str, list[float]]:
    """Seconds of this process in each call, by what is called; the keys are those of all processes."""
    rank, num_processes = distributed.get_rank(), distributed.get_world_size()
    bounds = np.arange(num_processes + 1) * len(keys) // num_processes
    own = slice(*bounds[rank:][:2])
    order = np.argsort(keys, kind="stable")
    if work == "torch_ref":
        tensor = torch.from_numpy(keys[own])
        seconds, (_, indices) = seconds_of(lambda: torch_ref.sample_sort(tensor), repeats)
        assert (indices.numpy() == order[rank::num_processes]).all(), "a wrong order"
        return {"`torch_ref.sample_sort`": seconds}
    name, exchange = {
        "gather": ("lists of tuples, `all_gather_object`", gather_all),
        "pickled": ("lists of tuples, pickled, `all_to_all_single`", send_pickled),
    }[work]
    rows = list(zip(keys[own].tolist(), range(len(keys))[own], strict=True))
    seconds, block = seconds_of(lambda: sort_lists(rows, exchange), repeats)
    sizes: Any = [None] * num_processes
    distributed.all_gather_object(sizes, len(block))
    first = sum(sizes[:rank])
    assert sum(sizes) == len(keys), "lost rows"
    assert [index for _, index in block] == order[first : first + len(block)].tolist(), "a wrong order"
    return {name: seconds}


def seconds_of(call: Callable[[], Any], repeats: int) -> tuple[list[float], Any]:
    """Seconds of calls that all processes begin together, after one that is not counted; and the last result."""
    call()
    seconds = []
    for _ in range(repeats):
        distributed.barrier()
        start = time.perf_counter()
        result = call()
        seconds.append(time.perf_counter() - start)
    return seconds, result


def main() -> None:
    questions, folder, _ = sys.argv[1:4]
    num_processes, rank, port = map(int, sys.argv[4:])
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's own name need not resolve
    distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_processes)
    answers = {}
    for name, (work, given) in json.loads(questions).items():
        keys = np.random.default_rng(0).integers(-(2**31), 2**31, given["num_rows"]).astype(np.int32)
        answers[name] = measure(work, keys, given["repeats"])
    distributed.destroy_process_group()
    Path(folder, f"{rank}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
