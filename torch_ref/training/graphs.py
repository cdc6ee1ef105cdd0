"""Compiles a loss function with torch, one whole graph a shape, and counts graphs.

It holds the settings and queries of torch that `compile` needs so that no shape is compiled unnoticed.
"""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn

from torch_ref.checks import known_keywords
from torch_ref.loading.batch import Batch
from torch_ref.training.train import LossFn

__all__ = [
    "Backend",
    "GraphCount",
    "choose_mode",
    "compile_alone",
    "compile_loss",
    "count_graphs",
    "keep_state",
    "no_recompiles",
    "room_for",
]

Backend = str | Callable[..., Any]


@known_keywords
@contextlib.contextmanager
def no_recompiles() -> Iterator[None]:
    """Guard a region in which `torch.compile` may compile nothing, in any thread; first calls count as well.

    Torch raises a RuntimeError there that names the function and what differs from the compiled ones. A function that
    had reached `recompile_limit` before, without an error, runs eagerly in here too without a word: torch no longer
    looks at it. `compile_buckets` does not let that happen to its functions.

    Example:
        >>> double = torch.compile(lambda x: 2 * x, backend="eager", dynamic=False)
        >>> with no_recompiles():
        ...     double(torch.ones(3))
        Traceback (most recent call last):
        RuntimeError: Detected recompile when torch.compile stance is 'fail_on_recompile'. ...
    """
    with torch.compiler.set_stance("fail_on_recompile"):
        yield


def choose_mode(model: nn.Module, backend: Backend) -> str:
    """Return the mode that replays CUDA graphs where Inductor has one GPU to itself, else the default one."""
    devices = {weight.device for weight in model.parameters()}
    is_alone = not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)
    has_one_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
    return "reduce-overhead" if backend == "inductor" and is_alone and has_one_gpu else "default"


def compile_loss(
    model: nn.Module, loss_fn: LossFn, backend: Backend, mode: str
) -> Callable[[Batch], tuple[Tensor, Tensor]]:
    """Return the two sums of a microbatch as a function that torch compiles, apart from all others."""

    def bucket_loss(microbatch: Batch) -> tuple[Tensor, Tensor]:
        return loss_fn(model, microbatch)

    return compile_alone(bucket_loss, backend, mode)


def compile_alone(function: Callable[..., Any], backend: Backend, mode: str) -> Callable[..., Any]:
    """Return a function without default arguments as one that torch compiles in one graph a shape, by itself."""
    assert isinstance(function, types.FunctionType)
    # Torch keeps graphs, and counts them against its limit, by code object. With a copy of it each set of buckets has
    # the limit for itself, and no graph of another model is in the way.
    copy = types.FunctionType(
        function.__code__.replace(), function.__globals__, function.__name__, closure=function.__closure__
    )
    compiled: Callable[..., Any] = torch.compile(copy, fullgraph=True, dynamic=False, backend=backend, mode=mode)
    return compiled


@contextlib.contextmanager
def room_for(num_graphs: int) -> Iterator[None]:
    """Let torch compile this many graphs of a function, and fail instead of running eagerly where it wants more."""
    config = torch._dynamo.config
    limits = config.patch(
        recompile_limit=num_graphs + 1,
        accumulated_recompile_limit=max(num_graphs + 1, config.accumulated_recompile_limit),
        fail_on_recompile_limit_hit=True,
        suppress_errors=False,
    )
    with torch.compiler.set_stance("default"), limits:
        yield


@contextlib.contextmanager
def keep_state(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Bring gradients, buffers and random states back at the end."""
    gradients = [(weight, weight.grad) for weight in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    for weight, _ in gradients:
        weight.grad = None
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for weight, gradient in gradients:
                weight.grad = gradient
            with torch.no_grad():
                for buffer, values in buffers:
                    buffer.copy_(values)


class GraphCount(NamedTuple):
    """What torch has counted in this process: graphs, and of their code what its cache on disk had and lacked."""

    graphs: int
    cache_hits: int
    cache_misses: int


def count_graphs() -> GraphCount:
    """Return the counts until now."""
    counters = torch._dynamo.utils.counters
    inductor = counters["inductor"]
    misses = inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"]
    return GraphCount(counters["stats"]["unique_graphs"], inductor["fxgraph_cache_hit"], misses)
