"""A script that runs `fit` in several processes.

Arguments: a folder, the number of processes, a rank and a port. The processes train a whole run, and one in which only
process 1 is interrupted. Process 0 prints the results.
"""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

from jvarlen import CompileOptions, FitConfig, fit
from jvarlen.data.split import Split
from jvarlen.data.tokens import TokenDataset
from jvarlen.models import DecoderConfig
from jvarlen.runs import summary
from jvarlen.runs.config import CheckpointConfig, DirectoryConfig, PlanConfig
from tests.support.processes import outcome
from tests.support.settings import changed

NUM_STEPS = 40


def make_data():
    rng = np.random.default_rng(0)
    samples = [rng.integers(32, 127, length, np.uint8).tobytes() for length in rng.integers(1, 33, 150)]
    return Split(train=TokenDataset.from_bytes(samples[:130]), held_out=TokenDataset.from_bytes(samples[130:]))


def make_config(runs_dir, cache_dir=None):
    return FitConfig(
        max_steps=NUM_STEPS,
        num_epochs=20,
        checkpoints=CheckpointConfig(checkpoint_every=10),
        directory=DirectoryConfig(runs_dir=runs_dir),
        compile=CompileOptions(cache_dir=cache_dir),
        progress=False,
        plan=PlanConfig(max_tokens=128, max_shapes=1, max_length=32, num_microbatches=4, packing="padded"),
        decoder=DecoderConfig(num_layers=1, width=8, num_heads=1),
    )


def make_skipping_config(runs_dir, cache_dir=None):
    return changed(make_config(runs_dir, cache_dir), on_bad_sample="skip", max_bad_fraction=0.1)


class Wrapped:
    """A dataset in whose reading something happens."""

    def __init__(self, dataset):
        self._dataset = dataset

    def __len__(self):
        return len(self._dataset)

    def __getitem__(self, index):
        self.on_read(index)
        return self._dataset[index]

    def on_read(self, index):
        pass


class Gaps(Wrapped):
    """Some samples cannot be read, and some not any more after their lengths were."""

    IDS, LATER = (3, 60, 129), (60, 129)

    def __init__(self, dataset):
        super().__init__(dataset)
        self._measured = set()

    def on_read(self, index):
        if index in self.IDS and (index not in self.LATER or index in self._measured):
            raise OSError(f"sample {index} is gone")
        self._measured.add(index)


class Interrupting(Wrapped):
    """Ctrl-C is pressed at read number `after`."""

    def __init__(self, dataset, after):
        super().__init__(dataset)
        self._reads_left = after

    def on_read(self, index):
        self._reads_left -= 1
        if self._reads_left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def make_data_with_gaps():
    data = make_data()
    return data._replace(train=Gaps(data.train), held_out=Gaps(data.held_out))


def leave_pictures_empty(set_attribute=setattr):
    """In this process and its forks: pictures of a run take longer than its steps."""
    set_attribute(summary, "plot_curves", lambda _, path: path.write_bytes(b""))


def main():
    folder, (num_processes, rank, port) = Path(sys.argv[1]), map(int, sys.argv[2:])
    data = make_data_with_gaps()
    leave_pictures_empty()
    jax.config.update("jax_enable_compilation_cache", True)  # for the second run
    config = changed(
        make_skipping_config(folder / "runs", folder / "compiled"),
        coordinator=f"127.0.0.1:{port}",
        num_processes=num_processes,
        process_id=rank,
    )
    whole = fit(config, data)
    data = make_data_with_gaps()
    # Lengths are read first, once each; then some steps are trained on.
    reads = len(data.train) + 100
    train = Interrupting(data.train, reads) if rank == 1 else data.train
    stopped = fit(changed(config, runs_dir=folder / "stopped"), data._replace(train=train))
    # What process 0 chooses, by what steps cost there, holds on all: otherwise their plans would differ, an error.
    chosen = changed(config, max_steps=2, runs_dir=folder / "chosen")
    chosen = fit(dataclasses.replace(chosen, plan=dataclasses.replace(chosen.plan, packing="auto")), data)
    other_settings = dataclasses.replace(config, seed=rank)
    differing = outcome(lambda: fit(other_settings, data))
    (folder / f"{rank}.json").write_text(
        json.dumps(
            {
                "whole": [str(whole.run_dir), whole.summary.num_steps, whole.summary.compilations_after_first_step],
                "stopped": [str(stopped.run_dir), stopped.summary.num_steps, stopped.summary.interrupted],
                "chosen": chosen.summary.num_steps,
                "differing": differing,
                "num_devices": jax.device_count(),
            }
        )
    )


if __name__ == "__main__":
    main()
