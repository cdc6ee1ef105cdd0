"""Two processes of PyTorch, plain or in DistributedDataParallel, against one: the same weights and losses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support import processes

from . import run_replica
from .run_replica import RUNS, exact_step, explicit, make_decoder, read_batches, train

pytestmark = pytest.mark.multiprocess

Results = dict[str, NDArray[Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return where two processes wrote what came out of their runs."""
    folder = tmp_path_factory.mktemp("replicas")
    processes.run(Path(run_replica.__file__), run_replica.NUM_REPLICAS, str(folder))
    return folder


def results_of(folder, name):
    results = []
    for rank in range(run_replica.NUM_REPLICAS):
        with np.load(folder / f"{name} {rank}.npz") as file:
            results.append(dict(file))
    return results


def alone(name):
    """Return what one process makes of a run, with the whole step in one microbatch."""
    return train(explicit(RUNS[name].make_model()), read_batches(1), exact_step)


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_take_the_steps_of_one(folder, name):
    """Weights and losses, in float64, whatever rows the replicas have and however these reach the model."""
    expected = alone(name)
    del expected["num_reductions"]
    assert len(expected["losses"]) == 3
    for together in results_of(folder, name):
        assert together.keys() == expected.keys() | {"num_reductions"}
        for part, values in expected.items():
            np.testing.assert_allclose(together[part], values, rtol=1e-12, atol=1e-14, err_msg=part)


def test_replicas_have_unequal_weights_and_one_has_none():
    """What the other tests of this file rest on."""
    for num_microbatches in {run.num_microbatches for run in RUNS.values() if not run.has_groups}:
        shares = [read_batches(num_microbatches, rank=rank, num_replicas=2) for rank in range(2)]
        weights = np.array([[float(batch.weights.sum()) for batch in share] for share in shares])
        assert weights.shape == (2, 3)
        assert (weights[0] != weights[1]).all()
        assert weights[1].tolist()[1] == 0


def test_gradients_are_reduced_once_a_step(folder):
    """One reduction of all gradients and one of the two sums, whatever microbatches and groups a replica has."""
    assert [len(batch.groups) for batch in read_batches(2, has_groups=True)] == [4, 1, 2]
    for name in ("one microbatch", "four microbatches", "groups"):
        for result in results_of(folder, name):
            assert result["num_reductions"].tolist() == [2, 2, 2], name


def test_parameters_are_reduced_once_a_step_without_a_wrapper(folder):
    """Each by itself, and the sums."""
    num_parameters = len(list(make_decoder().parameters()))
    for name in ("explicit", "groups, explicit"):
        for result in results_of(folder, name):
            assert result["num_reductions"].tolist() == [num_parameters + 1] * 3


def test_the_mean_of_the_replicas_means_is_another_step(folder):
    """What DistributedDataParallel gives where each replica divides by its weights."""
    expected, (first, second) = alone("wrapped"), results_of(folder, "mean of means")
    np.testing.assert_array_equal(first["lm_head.weight"], second["lm_head.weight"])
    assert np.abs(first["lm_head.weight"] - expected["lm_head.weight"]).max() > 1e-3


def test_what_no_row_reaches_is_left_alone(folder):
    """Not even decayed, as the optimizer does to what has a gradient of zero."""
    initial = dict(RUNS["routed, wrapped"].make_model().named_parameters())
    for name in ("routed, explicit", "routed, wrapped"):
        for result in results_of(folder, name):
            np.testing.assert_array_equal(result["for_nothing.weight"], initial["for_nothing.weight"].detach())
            assert (result["for_rare.weight"] != initial["for_rare.weight"].detach().numpy()).any()
