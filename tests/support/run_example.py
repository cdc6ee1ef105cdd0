"""Runs an example, and says whether its loaders delivered every sample, and what was compiled between their batches.

`run_example.py EXAMPLE`
"""

import runpy
import sys

import jax
import numpy as np

import jvarlen
from jvarlen.loading.loader import Loader


class Watched(Loader):
    """A loader that keeps the ids that it delivered, and how much had been compiled before each batch."""

    def watch(self, dataset, count):
        self.delivered, self.num_compiled, self.num_in_dataset, self.count = [], [], len(dataset), count

    def __next__(self):
        self.num_compiled.append(self.count.num_compilations)
        batch = super().__next__()
        self.delivered.append(batch["ids"] if isinstance(batch, dict) else batch.ids)
        return batch


def main():
    load, compile_buckets = jvarlen.load, jvarlen.compile_buckets
    loaders, trained = [], []

    def watched_load(plan, dataset, **options):
        loader = load(plan, dataset, **options)
        loader.__class__ = Watched
        loader.watch(dataset, count)
        loaders.append(loader)
        return loader

    def watched_compile(step, state, batches, **options):
        trained.append(batches)
        return compile_buckets(step, state, batches, **options)

    jvarlen.load, jvarlen.compile_buckets = watched_load, watched_compile
    with jvarlen.no_recompiles("count") as count:
        runpy.run_path(sys.argv[1], run_name="__main__")
    for number, loader in enumerate(loaders):
        ids = np.concatenate([np.ravel(ids) for ids in jax.device_get(loader.delivered)])
        of_sample = np.bincount(ids[ids >= 0], minlength=loader.num_in_dataset)
        print(
            f"loader {number}: {np.sum(of_sample == of_sample.max())} of {loader.num_in_dataset} samples, each "
            f"{of_sample.max()} times, in {len(loader.delivered)} steps"
        )
    for loader in trained:
        first, last = loader.num_compiled[1], loader.num_compiled[-1]
        print("compiled between steps:", ", ".join(count.functions[first:last]) or "none")


if __name__ == "__main__":
    main()
