"""A script that trains in several processes until one of them hangs.

Arguments: a folder, a number of reads, the number of processes, a rank and a port. The processes resume the run in the
folder if there is one. Process 1 hangs after that many reads of its steps.
"""

import inspect
import sys
import time
from pathlib import Path

import jax

from jvarlen import fit
from jvarlen.distributed.processes import initialize_processes
from tests.support.run_fit import make_config, make_data
from tests.support.settings import changed

HEARTBEAT_S = 8


class Hanging:
    """A dataset whose reading, at last, takes for ever."""

    def __init__(self, dataset, num_reads):
        self._dataset = dataset
        self._reads_left = num_reads

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        self._reads_left -= 1
        if self._reads_left == 0:
            print("hangs", flush=True)
            time.sleep(600)
        return self._dataset[index]


def main():
    folder, (num_reads, num_processes, rank, port) = Path(sys.argv[1]), map(int, sys.argv[2:])
    inspect.unwrap(initialize_processes).__kwdefaults__["heartbeat_timeout_seconds"] = HEARTBEAT_S
    jax.config.update("jax_enable_compilation_cache", True)
    begun = [path for path in folder.glob("*-*") if not path.is_symlink()]
    config = changed(
        make_config(folder, folder / "compiled"),
        checkpoint_every=4,
        max_steps=60,
        coordinator=f"127.0.0.1:{port}",
        num_processes=num_processes,
        process_id=rank,
        resume=begun[0] if begun else None,
    )
    data = make_data()
    # Lengths are read first, once each.
    train = Hanging(data.train, len(data.train) + num_reads) if rank == 1 else data.train
    fit(config, data._replace(train=train))


if __name__ == "__main__":
    main()
