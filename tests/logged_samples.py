"""Samples that processes of a cluster read, each noting which in a file of its own."""

import os
import time
from pathlib import Path


class LoggedSamples:
    """Samples of length id plus 1; a process that has read one appends its id to the file of its process id."""

    def __init__(self, folder: Path, num_samples: int, seconds: float):
        self._folder, self._num_samples, self._seconds = folder, num_samples, seconds

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> range:
        time.sleep(self._seconds)
        with open(self._folder / str(os.getpid()), "a") as log:
            log.write(f"{index}\n")
        return range(index + 1)
