"""A script that prints what one of several processes saw.

Arguments: a mode, the number of processes, a rank and a port.
"""

import json
import os
import signal
import sys
import time

import numpy as np

from jvarlen.distributed.processes import (
    agree,
    broadcast_text,
    gather_arrays,
    gather_texts,
    initialize_processes,
    together,
)
from tests.support.processes import outcome


def fail_on(ranks, rank):
    with together("read the part"):
        if rank in ranks:
            raise OSError(f"disk {rank} is broken")


def interrupt_on(ranks, rank):
    with together("wait"):
        if rank in ranks:
            os.kill(os.getpid(), signal.SIGINT)


def shapes_of(rank):
    """Text of 160 shapes, longer than one exchange takes."""
    return f"é {json.dumps([[rank, length] for length in range(160)] * 2)}"


def try_all(rank):
    """All that can go well or wrong while every process lives, one after the other."""
    long = "a" * 5000
    print(
        json.dumps(
            {
                "same text": outcome(agree, "plan digest", "5d41"),
                "same bytes": outcome(agree, "plan digest", b"\x00\xff\x00"),
                "same number": outcome(agree, "steps", 2**70),
                "one differs": outcome(agree, "plan digest", "5d41" if rank != 1 else "7a3e"),
                "type differs": outcome(agree, "steps", 3 if rank else "3"),
                "end of a long one differs": outcome(agree, "text", long + str(rank)),
                "same long one": outcome(agree, "text", long),
                "other call": outcome(agree, "lengths" if rank else "plan", 1),
                "texts": gather_texts("é", f"process {rank} …"),
                "shared": broadcast_text("shapes", shapes_of(rank)) == shapes_of(0),
                "shared, empty": broadcast_text("nothing", str(rank or "")),
                "arrays": gather_arrays(np.array([[rank, 2**62 + rank]])).tolist(),
                "none fails": outcome(fail_on, [], rank),
                "one fails": outcome(fail_on, [2], rank),
                "two fail": outcome(fail_on, [0, 2], rank),
                "interrupted": outcome(interrupt_on, [1], rank),
                "afterwards": outcome(agree, "steps", 1),
            }
        )
    )


def main():
    mode, num_processes, rank, port = sys.argv[1], *map(int, sys.argv[2:])
    initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    agree("mode", mode)
    if mode == "all":
        try_all(rank)
        return
    if rank == 1:
        print(f"leaves at {time.monotonic()}", flush=True)
        if mode == "terminated":
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("nothing but a handler of JAX's own could let it live")
        raise FileNotFoundError("no such dataset")
    with together("load"):
        pass


if __name__ == "__main__":
    main()
