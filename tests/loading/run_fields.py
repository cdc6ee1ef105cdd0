"""A script that loads samples of named fields on one of several processes, each with a data shard.

Arguments: the number of processes, a rank and a port. Prints the arrays of its own microbatch in every step.
"""

import dataclasses
import json
import sys

import numpy as np

from jvarlen import load, make_plan
from jvarlen.distributed.processes import initialize_processes
from tests.support.processes import outcome

LENGTHS = [3, 5, 1, 4, 2, 5, 1]
SAMPLES = [
    {"tokens": np.arange(n) + 1, "near": np.full((n, n), i, np.uint8), "label": i / 2, "weights": np.full(n, 0.5)}
    for i, n in enumerate(LENGTHS)
]


def batches(*, in_one_step=False, **options):
    """In groups of two microbatches, of which the second of the last one has no sample, each a step or all in one."""
    plan = make_plan(LENGTHS, [(3, 5)], num_microbatches=2, order="dataset")
    if in_one_step:
        plan = dataclasses.replace(plan, step_groups=np.array([0, plan.num_groups]))
    return load(plan, SAMPLES, lengths=LENGTHS, padding_rows="repeat", **options)


def main():
    num_processes, rank, port = map(int, sys.argv[1:])
    initialize_processes(f"127.0.0.1:{port}", num_processes, rank)
    layout = f"data{num_processes}"
    (step,) = batches(layout=layout, in_one_step=True)
    own, in_groups = (
        [{name: np.asarray(array.addressable_data(0)).tolist() for name, array in batch.items()} for batch in given]
        for given in (batches(layout=layout), step.groups)
    )
    assert in_groups == own
    assert float(step.num_sequences) == len(SAMPLES)
    rows = [
        {name: np.asarray(array.addressable_data(0)).tolist() for name, array in batch.items()}
        for batch in batches(layout=layout, microbatches=False, rename_fields={"near": "x", "ids": "rows"})
    ]
    axes = {"tokens": "length"} | ({"label": "row"} if rank else {})
    print(json.dumps([own, rows, outcome(lambda: batches(layout=layout, fields=axes))]))


if __name__ == "__main__":
    main()
