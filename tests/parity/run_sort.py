"""A script that sorts keys over several processes and writes each process's share; run by a test or by torchrun.

Arguments: the folder, and without torchrun also the number of processes, the rank and a port. `cases.npz` holds keys by
name of case; `cases.json` holds `cases` (see `Case`), `timeout_s` of the process group, and `absent_rank`, which
connects and then does nothing for `absent_s`.
"""

import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypedDict
from unittest import mock

import numpy as np
import torch
from torch import Tensor, distributed

import torch_ref

COLLECTIVES = ("all_gather_object", "all_to_all_single")


class Case(TypedDict, total=False):
    """One call of `sample_sort`, but for the keys: the rows of each process, its keywords, and what its keys are.

    `dimensions` of the keys are 1 by default, `group` are the processes that call, if not all are in one group, and
    `last` is what is different on the last process.
    """

    sizes: list[int]
    options: dict[str, Any]
    dtype: str
    dimensions: int
    payload: bool
    group: list[int]
    last: "Case"


def make_payload(index: Tensor) -> dict[str, Tensor]:
    """Return rows that show their index, int64[n], in two dtypes, one of them with two columns."""
    return {"tripled": 3 * index, "pair": torch.stack([index, -index], dim=1).to(torch.float32)}


@contextmanager
def record_calls(calls: list[tuple[str, int, int]]) -> Iterator[None]:
    """Note every collective: name, bytes it sends and rows it receives (0 for an object)."""

    def record(name: str) -> Any:
        collective = getattr(distributed, name)

        def call(received: Any, sent: Any, *args: Any, **options: Any) -> Any:
            sizes = (sent.nbytes, len(received)) if isinstance(sent, Tensor) else (0, 0)
            calls.append((name, *sizes))
            return collective(received, sent, *args, **options)

        return call

    with mock.patch.multiple(distributed, **{name: record(name) for name in COLLECTIVES}):
        yield


def sort_share(all_keys: Tensor, case: Case, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sort one case; return this process's share by name, and the error if there was one, else the calls."""
    if rank == len(case["sizes"]) - 1:
        case = case | case.get("last", {})
    group = distributed.new_group(case["group"]) if "group" in case else None
    start = sum(case["sizes"][:rank])
    index = torch.arange(start, start + case["sizes"][rank])
    keys = all_keys[index]
    if "dtype" in case:
        keys = keys.to(getattr(torch, case["dtype"]))
    keys = keys.reshape((-1,) + (1,) * (case.get("dimensions", 1) - 1))
    payload = make_payload(index) if case.get("payload") else None
    calls: list[tuple[str, int, int]] = []
    try:
        with record_calls(calls):
            found = torch_ref.sample_sort(keys, group=group, payload=payload, **case.get("options", {}))
    except ValueError as error:
        return {}, {"error": str(error)}
    # NumPy has no bfloat16; as float32 it loses nothing.
    widened = found[0].float() if keys.dtype == torch.bfloat16 else found[0]
    share = {"keys": widened, "indices": found[1]} | (found[2] if len(found) == 3 else {})
    return {name: tensor.numpy() for name, tensor in share.items()}, {"calls": calls}


def main() -> None:
    """Connect, sort every case, and write `{rank}.npz` and `{rank}.json`."""
    warnings.simplefilter("error")
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    settings = json.loads((folder / "cases.json").read_text())
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name need not resolve
    timeout = timedelta(seconds=settings["timeout_s"])
    if len(sys.argv) > 2:
        num_processes, rank, port = map(int, sys.argv[2:])
        address = f"tcp://127.0.0.1:{port}"
        distributed.init_process_group("gloo", address, rank=rank, world_size=num_processes, timeout=timeout)
    else:
        distributed.init_process_group("gloo", timeout=timeout)
        rank = distributed.get_rank()
    if rank == settings["absent_rank"]:
        time.sleep(settings["absent_s"])
        return

    shares, reports = {}, {}
    with np.load(folder / "cases.npz") as keys:
        for name, case in settings["cases"].items():
            share, reports[name] = sort_share(torch.from_numpy(keys[name]), case, rank)
            shares |= {f"{name}/{column}": values for column, values in share.items()}
    distributed.destroy_process_group()
    np.savez(folder / f"{rank}.npz", **shares)
    (folder / f"{rank}.json").write_text(json.dumps(reports))


if __name__ == "__main__":
    main()
