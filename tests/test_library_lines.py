"""Examples have few lines of the library, and those lines are counted rightly."""

from pathlib import Path

import pytest

from tests.support.library_lines import library_lines
from tests.test_examples import TRAININGS

EXAMPLES = Path(__file__).parents[1] / "examples"
COUNTED = (*TRAININGS, "torch_sampler")
MOST_LINES = 12

# Each line that counts ends with a comment. What is assigned from the library once is of it in every line of its scope.
PROGRAM = """
import numpy as np
import jvarlen, optax  #
from torch_ref.planning.plan import (
    make_plan,  #
    other as renamed,  #
)

def model(params, batch):
    return batch @ params

def loss_fn(params, batch):
    inputs, targets = jvarlen.batches.next_token_targets(batch)  #
    def layer(inputs):
        return inputs + 1
    return layer(params) - targets  #

def plain(plan, step=jvarlen.load):  #
    return plan + 1

data = [np.arange(3)]
plan = make_plan(data)  #
step = optax.sgd(  #
    learning_rate=0.1,
    size=plan.num_steps,  #
)
first, *rest = 1, 2
loss = loss_fn(first)  #
for (i, batch), label in zip(  #
    renamed(data),  #
    data,
):
    total = 0  #
    total += batch  #
    table = {}
    table[i] = 1  #
    by_name = {}  #
    by_name[label] = batch  #
with open("x") as file, jvarlen.no_recompiles() as count:  #
    file.write(1)
    print(count)  #
if (found := count.number):  #
    print(found)  #
squares = [part for part in plan]  #
print(first, rest, data, plain(1))
"""


def test_lines_of_the_library_are_counted():
    marked = {number for number, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("  #")}
    assert library_lines(PROGRAM) == marked


@pytest.mark.parametrize("stem", COUNTED)
def test_examples_have_few_lines_of_the_library(stem):
    counts = {name: len(library_lines((EXAMPLES / f"{name}.py").read_text())) for name in COUNTED}
    assert counts[stem] <= MOST_LINES, counts
