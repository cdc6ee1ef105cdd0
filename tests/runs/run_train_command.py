"""A script that runs `jvarlen train` in several processes, with a failure in process 1.

Arguments: the failure, a folder, the number of processes, a rank and a port. The corpus is small. Process 1 fails while
planning, or while reading a sample of a step, where it may also be killed or stopped; or it has another letter in the
file of `--data` or `--eval-data`, or in the given samples.
"""

import importlib
import inspect
import os
import signal
import sys
import time
from pathlib import Path

from jvarlen.cli import main
from jvarlen.data.tokens import TokenDataset
from jvarlen.distributed.processes import initialize_processes
from jvarlen.planning.cost_model import CostModel
from jvarlen.runs.data import open_training_data
from tests.support.run_fit import Wrapped, make_data

HEARTBEAT_S = 6


class Failing(Wrapped):
    """It can be read `num_reads` times, and no more."""

    def __init__(self, dataset, num_reads, failing):
        super().__init__(dataset)
        self._failing, self._reads_left = failing, num_reads

    def on_read(self, index):
        self._reads_left -= 1
        if self._reads_left < 0:
            if self._failing != "reading":
                print(f"struck at {time.monotonic()}", flush=True)
                os.kill(os.getpid(), signal.SIGKILL if self._failing == "killed" else signal.SIGSTOP)
            raise OSError("the disk of this process is gone")


def open_missing(path):
    raise FileNotFoundError(f"{path} is gone on the host of process 1")


def write_files(folder, letter_of):
    """Files of the same lengths, in a folder of this process which all know by one name; one has another letter."""
    folder.mkdir()
    os.chdir(folder)
    for name in ("data", "eval"):
        letter = "b" if name == letter_of else "a"
        Path(f"{name}.txt").write_text("".join(f"{letter}{'x' * (i % 20)}{i}\n" for i in range(200)))


def run():
    failing, folder, (num_processes, rank, port) = sys.argv[1], Path(sys.argv[2]), sys.argv[3:]
    inspect.unwrap(initialize_processes).__kwdefaults__["heartbeat_timeout_seconds"] = HEARTBEAT_S
    files = []
    if failing in ("data", "eval"):
        write_files(folder / rank, failing if rank == "1" else None)
        files = ["--data", "/proc/self/cwd/data.txt", "--eval-data", "/proc/self/cwd/eval.txt"]
    data = make_data()
    failing, _, victim = failing.partition(" ")
    if failing in ("reading", "killed", "stopped") and rank == (victim or "1"):
        # Lengths are read first, once each; then the first steps.
        data = data._replace(train=Failing(data.train, len(data.train) + 10, failing))
    if failing == "given" and rank == "1":
        tokens = data.train.tokens.copy()
        tokens[7] ^= 1
        data = data._replace(train=TokenDataset(tokens, data.train.offsets))
    prepare = importlib.import_module("jvarlen.runs.prepare")
    if not files:
        prepare.open_training_data = lambda config, given, model: open_training_data(config, data, model)
    CostModel(1e-3, 1e-5, 1e-7).save(folder / "cost.json")
    if failing == "planning" and rank == "1":
        CostModel.load = staticmethod(open_missing)
    return main(
        ["train", *files, "--coordinator", f"127.0.0.1:{port}", "--num-processes", num_processes, "--process-id", rank,
         "--max-steps", "6", "--num-epochs", "9", "--runs-dir", str(folder / "runs"), "--no-progress",
         "--max-tokens", "128", "--max-shapes", "1", "--max-length", "32",
         "--num-microbatches", "2", "--cost-model", str(folder / "cost.json"), "--packing", "padded",
         "--decoder.num-layers", "1", "--decoder.width", "8", "--decoder.num-heads", "1"]
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(run())
