"""A script that measures in the processes of `mpirun`. Argument: a folder in which they note what they measure."""

import sys
from pathlib import Path

import jvarlen
from tests.logged_samples import LoggedSamples

NUM_SAMPLES = 500

if __name__ == "__main__":
    from mpi4py.futures import MPIPoolExecutor  # where no MPI is installed, this fails

    with MPIPoolExecutor() as executor:
        dataset = LoggedSamples(Path(sys.argv[1]), NUM_SAMPLES, 0.001)
        workers = executor.num_workers
        print(jvarlen.measure_lengths(dataset, executor=executor, num_workers=workers, progress=False).tolist())
