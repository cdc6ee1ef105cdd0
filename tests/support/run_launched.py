"""A script for torchrun: runs a program of torch_ref and saves which samples each rank read.

Arguments: a folder and the program.
"""

import os
import runpy
import sys
from pathlib import Path

import numpy as np

import torch_ref


class Recorded:
    """Samples that remember which of them were read."""

    def __init__(self, samples):
        self._samples = samples
        self.ids_read = []

    def __getitem__(self, index):
        self.ids_read.append(index)
        return self._samples[index]


def run():
    folder, program = Path(sys.argv[1]), sys.argv[2]
    recorded = []
    load = torch_ref.load

    def recording_load(plan, samples, **settings):
        recorded.append(Recorded(samples))
        return load(plan, recorded[-1], **settings)

    torch_ref.load = recording_load
    runpy.run_path(program)
    (dataset,) = recorded
    np.save(folder / f"ids_{os.environ['RANK']}.npy", dataset.ids_read)


if __name__ == "__main__":
    run()
