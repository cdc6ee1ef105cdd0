"""A script that trains a small run, possibly killing itself on the way, or resumes it.

Arguments: the folder of runs, the file for the last state, the sample read at which it is killed (0: never), and
optionally the run to resume.
"""

import os
import signal
import sys
from pathlib import Path

from tests.golden import calls


class Killing:
    """A dataset in whose reading this process is killed."""

    def __init__(self, dataset, killed_at):
        self._dataset = dataset
        self._reads_left = killed_at

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        self._reads_left -= 1
        if self._reads_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._dataset[index]


if __name__ == "__main__":
    runs_dir, out, killed_at, *resumed = sys.argv[1:]
    run_dir = Path(resumed[0]) if resumed else None
    calls.fit_small(Path(runs_dir), Path(out), lambda dataset: Killing(dataset, int(killed_at)), run_dir)
