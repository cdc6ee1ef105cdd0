"""Runs an example in one of several processes, and saves what its steps report and the samples that it trained on.

Arguments: the example, a folder, the number of processes, the rank, and a port.
"""

import json
import os
import runpy
import sys
import warnings
from pathlib import Path

import torch_ref


def set_environment(num_processes, rank, port):
    """Says which of several processes this one is, as torchrun does."""
    if int(num_processes) > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}
        os.environ |= names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    warnings.filterwarnings("error", module="torch_ref")


def record_ids():
    """The list to which every sample that is read from now on adds its id."""
    ids, read = [], torch_ref.PlannedDataset.__getitems__

    def recorded(self, indices):
        rows = read(self, indices)
        ids.extend(row.ids for row in rows if row.is_real)
        return rows

    torch_ref.PlannedDataset.__getitems__ = recorded
    return ids


def main():
    example, folder, num_processes, rank, port = sys.argv[1:]
    set_environment(num_processes, rank, port)
    ids = record_ids()
    reports = runpy.run_path(example)["main"]()
    Path(folder, f"{rank}.json").write_text(json.dumps({"reports": reports, "ids": ids}))


if __name__ == "__main__":
    main()
