"""Samples that processes of a cluster read, each noting which in a file of its own."""

import os
import time
from collections import Counter
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


def measured_by(folder: Path) -> dict[int, list[int]]:
    """The ids that each process has measured, those that are written whole."""
    return {
        int(path.name): [int(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        for path in folder.iterdir()
    }


def times_measured(folder: Path) -> Counter[int]:
    """How often each id has been measured."""
    return Counter(i for ids in measured_by(folder).values() for i in ids)
