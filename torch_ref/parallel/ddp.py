"""Data parallelism by `DistributedDataParallel`, and where `torch.compile` cuts its graphs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_ref.checks import check_integer, check_number, check_process_group
from torch_ref.loading.batch import AnyStep
from torch_ref.training.graphs import Backend, compile_alone
from torch_ref.training.train import LossFn, Metrics, TrainStep, loss_sums, train_step

__all__ = ["BUCKET_BYTES", "FIRST_BUCKET_BYTES", "graph_buckets", "make_ddp_step"]

BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20


def make_ddp_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn = loss_sums,
    *,
    bucket_cap_mb: float | None = None,
    max_norm: float | None = None,
    backend: Backend | None = None,
) -> TrainStep:
    """Make a train step that all processes of the default group take together, each with its share of the batch.

    Gradients are reduced once a step, in the backward pass of a process's last microbatch, bucket by bucket. Loss and
    gradient are those of the whole step, as `train_step` says.

    Args:
        model: on this process's device, with the same parameters in all processes. It is updated in place. Every row
            must reach all of its parameters.
        optimizer: of `model.parameters()`. With `torch.distributed.optim.ZeroRedundancyOptimizer`, which shards the
            optimizer state by whole parameters, the step is one of ZeRO-1.
        loss_fn: gives a microbatch's two sums, like `loss_sums`.
        bucket_cap_mb: MiB at which a gradient bucket is full. None: 25, and 1 for the first bucket.
        max_norm: norm of the whole gradient to which it is clipped; None for no clipping.
        backend: of `torch.compile`, which cuts the forward pass where `graph_buckets` says; None: eager execution.

    Returns:
        `step(batch)`, which returns what `train_step` does. The batch has the same groups and microbatches in all
        processes, as those of `load(…, rank=, num_replicas=)` have.

    Raises:
        ValueError: if `torch.distributed` is not initialised, or an argument is out of its range.

    References:
        Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training".
    """
    check_process_group("make_ddp_step")
    if bucket_cap_mb is not None:
        check_number("bucket_cap_mb", bucket_cap_mb, above=0)
        # DDPOptimizer fails with an assertion where the first bucket, always of 1 MiB, is larger than the others.
        if backend is not None and bucket_cap_mb * 2**20 < FIRST_BUCKET_BYTES:
            raise ValueError(f"bucket_cap_mb must be at least 1 where torch compiles, got {bucket_cap_mb!r}")
    if max_norm is not None:
        check_number("max_norm", max_norm, above=0)
    replicated = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=True)
    if backend is not None:
        replicated.compile(backend=backend, dynamic=False)

    def step(batch: AnyStep) -> Metrics:
        return train_step(replicated, optimizer, batch, loss_fn=loss_fn, max_norm=max_norm)

    return step


def graph_buckets(
    model: nn.Module, *args: Any, cap: int = BUCKET_BYTES, first_cap: int = FIRST_BUCKET_BYTES, **kwargs: Any
) -> tuple[tuple[str, ...], ...]:
    """Return the graphs into which `torch.compile` cuts a model that `DistributedDataParallel` wraps.

    All gradients of a compiled graph are ready at the same time, at the end of its backward pass. DDPOptimizer
    therefore cuts the graph of the forward pass at gradient buckets. It goes through the graph from the end and cuts
    where the parameters reach the cap, so buckets are those of `DistributedDataParallel` but for this:

    - The first bucket has a cap of 1 MiB, also where `bucket_cap_mb` is given.
    - The order is that of operations in the forward pass, reversed, and not that in which gradients were ready in the
      first step. Parameters of one operation share a bucket, and so do those of different dtypes. A parameter that
      several operations use counts in each.
    - A bucket continues past its cap until a result of its graph is used outside of it. Operations without parameters
      before the last bucket's belong to that bucket.

    Nothing is compiled and no process group is needed; the model and its arguments may be on the device "meta".

    Args:
        model: not wrapped, and torch must be able to capture it in one graph. It is called once.
        *args: of the model.
        cap: bytes at which a bucket is full.
        first_cap: the same for the first bucket; at most `cap`.
        **kwargs: of the model, such as `segment_ids`.

    Returns:
        The names of the parameters of each graph, in the order in which buckets are reduced: the last graph first.

    Raises:
        ValueError: if a cap is out of its range.

    Example:
        >>> import torch
        >>> layers = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 20, bias=False), nn.Linear(20, 5))
        >>> graph_buckets(layers, torch.zeros(1, 10), cap=500, first_cap=100)
        (('2.weight', '2.bias'), ('1.weight',), ('0.weight',))
    """
    from torch._dynamo.backends.distributed import DDPOptimizer  # here: importing it takes a second

    cap = check_integer("cap", cap)
    first_cap = check_integer("first_cap", first_cap, maximum=cap)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: list[tuple[str, ...]] = []

    def cut(graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        optimizer = DDPOptimizer(cap, lambda graph, _: graph.forward, first_cap)
        compiled: Callable[..., Any] = optimizer.compile_fn(graph, inputs)
        placeholders = (node.target for node in graph.graph.nodes if node.op == "placeholder")
        value_of = dict(zip(placeholders, inputs, strict=True))
        found.extend(
            tuple(names[id(value_of[each])] for each in dict.fromkeys(bucket.params))
            for bucket in optimizer.buckets[::-1]
        )
        return compiled

    def call(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    compile_alone(call, cut, "default")(*args, **kwargs)
    return tuple(found)
