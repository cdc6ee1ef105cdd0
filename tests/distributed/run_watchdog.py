"""A script in which process 1 is slow at times and then hangs.

Arguments: the number of processes, a rank and a port.
"""

import sys
import time

from jvarlen.distributed import processes
from jvarlen.distributed.processes import agree, ending_stalled_processes, initialize_processes

TIMEOUT_S = 2.5


def read_from_a_disk_that_hangs():
    time.sleep(600)


def main():
    num_processes, rank, port = map(int, sys.argv[1:])
    processes._LOOK_S = 0.1
    initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    with ending_stalled_processes("practice", TIMEOUT_S) as heartbeat:
        for _ in range(4):
            heartbeat.step()
            agree("step", "")
            if rank == 1:
                time.sleep(TIMEOUT_S / 2)
    print("slow is not stalled", flush=True)
    with ending_stalled_processes("training", TIMEOUT_S) as heartbeat:
        for step in range(9):
            if step == 5 and rank == 1:
                print(f"hangs at {time.time()}", flush=True)
                read_from_a_disk_that_hangs()
            heartbeat.step()
            agree("step", "")


if __name__ == "__main__":
    main()
