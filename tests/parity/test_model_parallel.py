"""Tensor parallelism and pipelines in JAX and in several processes of PyTorch: the same losses and weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import jvarlen
import torch_ref
from jvarlen.models import DecoderConfig
from tests.conftest import random_dataset
from torch_ref import parallel

from . import run_model_parallel
from .run_model_parallel import MAX_NORM, NUM_STEPS, WAYS, Way, plan_of_way
from .trained import assert_same, initial_params, initial_tensors, train_in_jax, training
from .twin import make_torch_model

DATASET = random_dataset(120, 32)  # so that some microbatches have no weight
LENGTHS = np.diff(DATASET.offsets)


def make_model(way, params=None):
    return make_torch_model(DecoderConfig(**way.sizes), params, torch.float64)


def results_of(trained, name):
    return trained.results_of(name, WAYS[name].num_processes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return what processes train, while JAX does."""
    weights = {
        f"{name} {key}": value
        for name, way in WAYS.items()
        for key, value in initial_tensors(DecoderConfig(**way.sizes)).items()
    }
    numbers = {way.num_processes for way in WAYS.values()}
    folder = tmp_path_factory.mktemp("model_parallel")
    with training(Path(run_model_parallel.__file__), folder, numbers, DATASET, weights) as trained:
        yield trained


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", WAYS)
def test_jax_and_torch_train_the_same(trained, name):
    """AdamW in float64, with gradients clipped by the norm of the whole: losses of all steps, and final weights."""
    way, layout = WAYS[name], name if name.startswith("data") else f"data1.{name}"
    plan = plan_of_way(jvarlen, LENGTHS, way)
    config = DecoderConfig(**way.sizes)
    expected = train_in_jax(config, layout, plan, DATASET, num_steps=NUM_STEPS, max_norm=MAX_NORM)
    assert expected.norms.min() < MAX_NORM < expected.norms.max()
    assert_same(results_of(trained, name), expected)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_some_microbatches_have_no_weight(trained):
    """What the test above rests on."""
    weights = results_of(trained, "stage2.virtual2.interleaved")[0]["microbatch_weights"]
    assert (weights == 0).any()
    assert (weights > 0).sum() > 2 * NUM_STEPS


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["tensor2.sequence_parallel", "stage2.virtual2.interleaved"])
def test_each_process_holds_its_share(trained, name):
    """Under tensor parallelism, all parameters but norms and output biases; in stages, all but the ends."""
    num_bytes = {key: value.nbytes for key, value in make_model(WAYS[name]).named_parameters()}
    held = [int(result["param_bytes"]) for result in results_of(trained, name)]
    doubled = [size for key, size in num_bytes.items() if "norm" in key or "o_proj.bias" in key]
    expected = sum(num_bytes.values()) + (sum(doubled) if name.startswith("tensor") else 0)
    assert sum(held) == expected
    np.testing.assert_allclose(held, expected / len(held), rtol=0.03)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_steps_communicate_as_often_as_they_must(trained):
    """As Megatron-LM, but for sums of exponentials and the logits of targets, which torch reduces apart."""
    num_layers = WAYS["tensor2.sequence_parallel"].num_layers
    of_loss, of_clipping, of_params, of_norms = 3, 1, 1, 2 * num_layers + 1  # whether parameters are finite: one number
    of_heads = 2 * num_layers  # the gradients of the norms of queries and keys
    for result in results_of(trained, "tensor2.sequence_parallel"):
        assert int(result["c10d_functional.all_gather_into_tensor"]) == 4 * num_layers + 2
        assert int(result["c10d_functional.reduce_scatter_tensor"]) == 4 * num_layers + 2
        assert int(result["c10d_functional.all_reduce"]) == of_loss + of_clipping + of_params + of_norms + of_heads


@pytest.mark.slow
@pytest.mark.multiprocess
def test_sequence_parallelism_takes_lengths_that_are_divided(trained):
    for result in results_of(trained, "tensor2.sequence_parallel"):
        assert str(result["refused"]) == "sequence_parallel takes lengths that are multiples of 2, got 7"


def test_without_a_process_group_it_says_so():
    model, mesh, stages = make_model(Way()), object(), object()
    calls = {
        "shard_tensors": lambda: parallel.shard_tensors(model, mesh),
        "make_tensor_step": lambda: parallel.make_tensor_step(model, object(), mesh=mesh),
        "split_stages": lambda: parallel.split_stages(model, mesh),
        "make_pipeline_step": lambda: parallel.make_pipeline_step(stages, object()),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^{name} needs a process group: call .*init_process_group"):
            call()


def mesh_of(*names):
    return init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)


@pytest.mark.usefixtures("one_process")
def test_arguments_of_tensor_parallelism_are_checked(monkeypatch):
    model, mesh = make_model(Way()), mesh_of("data", "tensor")
    for names in (("stage",), ("tensor", "stage")):
        with pytest.raises(ValueError, match="the mesh must have an axis 'tensor' and no others but 'data', got"):
            parallel.shard_tensors(model, mesh_of(*names))
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the model is not split: call shard_tensors, then make the optimizer"):
        parallel.make_tensor_step(model, before, mesh=mesh)
    with monkeypatch.context() as patched:
        patched.setattr(DeviceMesh, "size", lambda self, mesh_dim=None: 3)
        with pytest.raises(ValueError, match="there are 4 heads, 2 heads of keys and values for 3 processes"):
            parallel.shard_tensors(model, mesh)
    parallel.shard_tensors(model, mesh)
    with pytest.raises(ValueError, match="the model is split already"):
        parallel.shard_tensors(model, mesh)
    with pytest.raises(ValueError, match="parameters are not the model's: make it after shard_tensors"):
        parallel.make_tensor_step(model, before, mesh=mesh)
    fitting = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="max_norm must be a finite number above 0, got -1"):
        parallel.make_tensor_step(model, fitting, mesh=mesh, max_norm=-1)


@pytest.mark.usefixtures("one_process")
def test_arguments_of_pipelines_are_checked():
    model, mesh = make_model(Way(stage=4)), mesh_of("stage")
    with pytest.raises(ValueError, match="the mesh must have an axis 'stage' and no others but 'data', got"):
        parallel.split_stages(model, mesh_of("data"))
    with pytest.raises(ValueError, match="the 4 layers must be a multiple of the 3 chunks of 1 stages"):
        parallel.split_stages(model, mesh, virtual=3)
    with pytest.raises(ValueError, match="split_stages takes no tied head"):
        parallel.split_stages(make_model(Way(tensor=2)), mesh)
    stages = parallel.split_stages(model, mesh, virtual=2)
    optimizer = torch.optim.SGD(stages.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="schedule must be one of gpipe, 1f1b, interleaved, zero_bubble, got 'zbv'"):
        parallel.make_pipeline_step(stages, optimizer, schedule="zbv")
    with pytest.raises(ValueError, match="1f1b takes one chunk a stage, got 2"):
        parallel.make_pipeline_step(stages, optimizer)
    with pytest.raises(ValueError, match="max_norm must be a finite number above 0, got 0"):
        parallel.make_pipeline_step(stages, optimizer, schedule="interleaved", max_norm=0)
    other = torch.optim.SGD(make_model(Way()).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="parameters are not the model's: make it after split_stages"):
        parallel.make_pipeline_step(stages, other, schedule="interleaved")


@pytest.mark.usefixtures("one_process")
def test_one_process_has_the_whole_model():
    """As one stage, of one chunk or two, and as one part: the weights after a step are those of `train_step`."""
    plan, stages = plan_of_way(torch_ref, LENGTHS, Way()), Way(stage=4)
    batch = next(iter(torch_ref.load(plan, np.split(DATASET.tokens, DATASET.offsets[1:-1]))))

    def trained(way):
        model = make_model(stages, initial_params(DecoderConfig(**stages.sizes)))
        if way == "tensor":
            parallel.shard_tensors(model, mesh_of("tensor"))
        elif way != "train_step":
            model = parallel.split_stages(model, mesh_of("stage"), virtual=1 + (way == "interleaved"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if way == "train_step":
            torch_ref.train_step(model, optimizer, batch, max_norm=MAX_NORM)
        elif way == "tensor":
            parallel.make_tensor_step(model, optimizer, mesh=mesh_of("tensor"), max_norm=MAX_NORM)(batch)
        else:
            parallel.make_pipeline_step(model, optimizer, schedule=way, max_norm=MAX_NORM)(batch)
        return parallel.gather_params(model)

    expected = trained("train_step")
    for way in ("tensor", "gpipe", "1f1b", "interleaved", "zero_bubble"):
        torch.testing.assert_close(trained(way), expected, rtol=0, atol=1e-13)
