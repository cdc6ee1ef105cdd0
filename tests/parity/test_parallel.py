"""Data parallelism and ZeRO in JAX and in several processes of PyTorch: the same losses and weights."""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

import jvarlen
from jvarlen.distributed.grad_buckets import assign_grad_buckets
from jvarlen.models import DecoderConfig
from tests.conftest import random_dataset
from torch_ref import parallel

from . import run_parallel
from .run_parallel import COMPILED_CAP_MB, MAX_NORM, NUM_LAYERS, SMALL_CAP_MB, TASKS, plan_of_task
from .trained import assert_same, initial_tensors, train_in_jax, training
from .twin import make_torch_model

DATASET = random_dataset(121, 32)  # so that in some step one process has padding rows alone
LENGTHS = np.diff(DATASET.offsets)
WAYS = [(name, way) for name, task in TASKS.items() for way in task.ways]


def model_config(name):
    return DecoderConfig(**TASKS[name].sizes)


def make_model(name, device="cpu"):
    with torch.device(device):
        return make_torch_model(model_config(name), dtype=torch.float64)


def results_of(trained, name, way):
    return trained.results_of(f"{name} {way}", TASKS[name].num_processes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return what processes train, while JAX does."""
    weights = {f"{name} {key}": value for name in TASKS for key, value in initial_tensors(model_config(name)).items()}
    numbers = {task.num_processes for task in TASKS.values()}
    folder = tmp_path_factory.mktemp("parallel")
    with training(Path(run_parallel.__file__), folder, numbers, DATASET, weights) as trained:
        yield trained


@functools.cache
def trained_in_jax(name, zero):
    task = TASKS[name]
    layout, plan = f"data{task.num_processes}.zero{zero}", plan_of_task(jvarlen, LENGTHS, task)
    options = {"num_steps": task.num_steps, "max_norm": MAX_NORM, "base_batch_size": task.base_batch_size}
    return train_in_jax(model_config(name), layout, plan, DATASET, **options)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "way"), WAYS)
def test_jax_and_torch_train_the_same(trained, name, way):
    """AdamW in float64, with gradients clipped by the norm of the whole: losses of all steps, and final weights."""
    expected = trained_in_jax(name, TASKS[name].ways[way])
    assert expected.norms.min() < MAX_NORM < expected.norms.max() or name == "compiled"
    assert_same(results_of(trained, name, way), expected)


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["padded", "packed"])
def test_in_some_step_a_process_has_padding_rows_alone(trained, name):
    """What the test above rests on."""
    weights = np.array([result["weights_of_steps"] for result in results_of(trained, name, "ddp")])
    assert (weights == 0).any()
    assert (weights.sum(axis=0) > 0).all()


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(("name", "way"), [(name, way) for name, way in WAYS if way.startswith("zero")])
def test_each_process_holds_its_share(trained, name, way):
    """Parameters and optimizer state, between steps; the embedding's 257 rows are not divided evenly."""
    results, (whole, *_) = results_of(trained, name, way), results_of(trained, name, "ddp")
    for key in ("param_bytes", "state_bytes"):
        shares = np.array([result[key] for result in results]) / whole[key]
        np.testing.assert_allclose(shares, 1 / len(results), rtol=0.02)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_optimizer_that_shards_itself_holds_about_its_share(trained):
    """By whole parameters; those are on all processes."""
    results, (whole, *_) = results_of(trained, "padded", "redundancy"), results_of(trained, "padded", "ddp")
    assert {int(result["param_bytes"]) for result in results} == {int(whole["param_bytes"])}
    assert max(int(result["state_bytes"]) for result in results) < 0.6 * whole["state_bytes"]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("name", "way", "num_gathered", "num_reduced"),
    [
        ("padded", "zero1", 1, 1),
        ("padded", "zero3", 4, 2),
        ("packed", "zero3", 2, 1),
        ("groups", "zero1", 1, 1),
        ("groups", "zero3", 4, 2),
    ],
)
def test_levels_communicate_as_often_as_they_must(trained, name, way, num_gathered, num_reduced):
    """Each layer, and the rest together; two microbatches a process where rows are padded, and one where packed.

    In a step of two groups of one microbatch a process, level 1 does so once, and level 3 in each of them.
    """
    for result in results_of(trained, name, way):
        assert int(result["num_all_gathers"]) == num_gathered * (NUM_LAYERS + 1)
        assert int(result["num_reduce_scatters"]) == num_reduced * (NUM_LAYERS + 1)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_gradients_are_reduced_in_the_buckets_of_jax(trained):
    """Where the cap is given, it is that of the first bucket as well."""
    model = make_model("padded", "meta")
    cap = int(SMALL_CAP_MB * 2**20)
    expected = named(model, assign_grad_buckets(shapes_of(model), cap, cap))
    assert len(expected) > 3
    for result in results_of(trained, "padded", "redundancy"):
        # torch lists parameters of a bucket in the order of the backward pass as well.
        assert [tuple(bucket.split()) for bucket in result["buckets"].tolist()] == expected


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_compiled_model_is_cut_at_its_graph_buckets(trained):
    model = make_model("compiled", "meta")
    tokens = torch.zeros(TASKS["compiled"].buckets[0], dtype=torch.int64, device="meta")
    expected = parallel.graph_buckets(model, tokens, cap=int(COMPILED_CAP_MB * 2**20))
    assert len(expected) > 3
    for result in results_of(trained, "compiled", "compiled"):
        assert result["num_graphs"].tolist() == [len(expected)] * TASKS["compiled"].num_steps


def shapes_of(model):
    return [jax.ShapeDtypeStruct(tuple(value.shape), np.float64) for value in model.parameters()]


def named(model, buckets):
    names = [name for name, _ in model.named_parameters()]
    return [tuple(names[place] for place in bucket) for bucket in buckets]


@pytest.mark.parametrize(
    ("cap", "first_cap", "packed"),
    [(1, 1, False), (20_000, 4_000, True), (70_000, 70_000, False), (2**30, 2**20, True)],
)
def test_graphs_are_cut_at_the_buckets_of_jax(cap, first_cap, packed):
    """For a model that uses each parameter once, in the order of its modules, and one in an operation."""
    with jax.enable_x64(True):
        model = make_model("padded", "meta")
        expected = named(model, assign_grad_buckets(shapes_of(model), cap, first_cap))
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    segments = {"segment_ids": tokens, "positions": tokens} if packed else {}
    assert list(parallel.graph_buckets(model, tokens, cap=cap, first_cap=first_cap, **segments)) == expected


def test_graphs_count_a_shared_parameter_each_time():
    """Where jvarlen, whose parameters have one gradient each, does not."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, tokens):
            hidden = self.table(tokens)
            return hidden @ self.table.weight.T

    tokens = torch.zeros(2, 3, dtype=torch.int64)
    assert parallel.graph_buckets(Tied(), tokens, cap=160, first_cap=100) == (("table.weight",), ("table.weight",))


def model_and_optimizer():
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_without_a_process_group_it_says_so():
    model, optimizer = model_and_optimizer()
    for name, call in {
        "make_ddp_step": lambda: parallel.make_ddp_step(model, optimizer),
        "make_fsdp_step": lambda: parallel.make_fsdp_step(model, optimizer),
        "shard_model": lambda: parallel.shard_model(model),
        "gather_params": lambda: parallel.gather_params(model),
    }.items():
        with pytest.raises(ValueError, match=f"^{name} needs a process group: call .*init_process_group"):
            call()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be a finite number above 0, got 0"),
        ({"bucket_cap_mb": 0.5, "backend": "eager"}, "bucket_cap_mb must be at least 1 where torch compiles, got 0.5"),
        ({"max_norm": 0.0}, "max_norm must be a finite number above 0, got 0.0"),
    ],
)
@pytest.mark.usefixtures("one_process")
def test_arguments_of_ddp_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        parallel.make_ddp_step(*model_and_optimizer(), **arguments)


@pytest.mark.usefixtures("one_process")
def test_arguments_of_fsdp_are_checked():
    model, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match="the model is not sharded: call shard_model, then make the optimizer"):
        parallel.make_fsdp_step(model, optimizer)
    parallel.shard_model(model)
    with pytest.raises(ValueError, match="the model is sharded already"):
        parallel.shard_model(model)
    with pytest.raises(ValueError, match="2 of the optimizer's 2 parameters are not the model's: make it after"):
        parallel.make_fsdp_step(model, optimizer)
    fitting = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="zero must be an integer from 1 to 3, got 0"):
        parallel.make_fsdp_step(model, fitting, zero=0)
    with pytest.raises(ValueError, match="max_norm must be a finite number above 0, got -1"):
        parallel.make_fsdp_step(model, fitting, max_norm=-1)


@pytest.mark.usefixtures("one_process")
def test_layers_may_hold_layers():
    """Each is sharded by itself; the weights can be gathered."""

    class Stack(nn.Module):
        def __init__(self, *layers):
            super().__init__()
            self.layers = nn.ModuleList(layers)

    model = Stack(Stack(nn.Linear(3, 3)), nn.Linear(3, 3))
    whole = {name: value.detach().clone() for name, value in model.named_parameters()}
    parallel.shard_model(model)
    sharded = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert sharded == ["", "layers.0", "layers.0.layers.0", "layers.1"]
    torch.testing.assert_close(parallel.gather_params(model), whole, rtol=0, atol=0)


@pytest.mark.parametrize(("cap", "first_cap"), [(0, 1), (10, 0), (10, 11)])
def test_caps_of_graphs_are_checked(cap, first_cap):
    with pytest.raises(ValueError, match="cap must be an integer from 1 to"):
        parallel.graph_buckets(nn.Linear(2, 2), torch.zeros(1, 2), cap=cap, first_cap=first_cap)
