"""Float64 training steps give the values of before, on every layout: to 1e-12 after one step, 1e-10 after all."""

import numpy as np
import pytest

from . import training
from .shorten import read

GOLDEN = read("training")
AFTER_ONE, AFTER_ALL = 1e-12, 1e-10


def assert_golden(found, name):
    """Sums of an array differ by no more than that part of its norm; what is not found is not compared."""
    expected = GOLDEN[name]
    assert found.keys() == expected.keys()
    for column in ("loss", "weight_sum", "grad_norm"):
        if found[column]:
            np.testing.assert_allclose(found[column], expected[column], rtol=AFTER_ALL)
            np.testing.assert_allclose(found[column][0], expected[column][0], rtol=AFTER_ONE)
    for when in found.keys() - {"loss", "weight_sum", "grad_norm"}:
        assert found[when].keys() in (expected[when].keys(), set())
        for leaf, sums in found[when].items():
            scale = expected[when][leaf][0] * (AFTER_ONE if when == "after 1 step" else AFTER_ALL)
            np.testing.assert_allclose(sums, expected[when][leaf], rtol=0, atol=scale, err_msg=f"{leaf} {when}")


def test_values_are_of_steps_that_train():
    losses = GOLDEN["layers"]["loss"]
    assert len(losses) == training.NUM_STEPS
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.05
    assert GOLDEN["stale 1"]["loss"] != GOLDEN["plain"]["loss"]


@pytest.mark.parametrize(
    "layout",
    [
        None,
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in ("data2.context2.zero3", "stage2.virtual2.interleaved", "data2.stage2.tensor2.zero1")
        ),
    ],
)
def test_a_layout_trains_to_the_values_of_before(layout):
    assert_golden(training.trained(layout), "layers")


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "slices"), [("data2.stage2.zero1", lambda length: (3, length - 3))])
def test_rows_in_token_slices_train_to_the_values_of_whole_rows(layout, slices):
    assert_golden(training.trained(layout, slices=slices), "layers")


@pytest.mark.parametrize("name", training.DELAYS)
def test_stale_steps_train_to_the_values_of_before(name):
    assert_golden(training.stale(training.DELAYS[name]), f"stale {name}")


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_worker_that_waits_trains_to_the_values_of_steps_without_workers():
    assert_golden(training.asynchronous(), "plain")
