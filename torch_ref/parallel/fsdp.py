"""ZeRO by `fully_shard` (FSDP2): parameters, gradients and optimizer state in shards over the processes."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import Optimizer

from torch_ref.checks import check_integer, check_number, check_process_group
from torch_ref.loading.batch import AnyStep
from torch_ref.parallel.mesh import check_optimizer
from torch_ref.training.train import LossFn, Metrics, TrainStep, backward_of_sums, check_whole_step, loss_sums, update

__all__ = ["make_fsdp_step", "shard_model"]


def shard_model(model: nn.Module, *, layers: Iterable[nn.Module] | None = None) -> None:
    """Shard a model's parameters over the processes of the default group, in place, with `fully_shard`.

    Make the optimizer afterwards: parameters become `DTensor`s, shards along their first dimension.

    Args:
        model: on this process's device, with the same parameters in all processes. Every row must reach all of them.
        layers: modules whose parameters are gathered together, one module at a time; those of no layer are gathered
            for the whole model. None: the members of the model's `nn.ModuleList`s.

    Raises:
        ValueError: if `torch.distributed` is not initialised, or the model is sharded already.
    """
    check_process_group("shard_model")
    if isinstance(model, FSDPModule):
        raise ValueError("the model is sharded already")
    device = next(model.parameters()).device
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),), mesh_dim_names=("data",))
    if layers is None:
        modules = reversed(list(model.modules()))  # the inner ones first, as fully_shard needs them
        layers = [layer for module in modules if isinstance(module, nn.ModuleList) for layer in module]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)


def make_fsdp_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn = loss_sums,
    *,
    zero: int = 3,
    max_norm: float | None = None,
) -> TrainStep:
    """Make a train step that all processes of the default group take together, each with its share of the batch.

    Level 3 gathers each layer's parameters in each microbatch, forward and backward, and reduces their gradients to
    shards there. Level 2 gathers parameters once a step. Level 1 also accumulates whole gradients, and reduces them to
    shards once a step. Loss and gradient are those of the whole step, as `train_step` says.

    Args:
        model: of `shard_model`, or sharded otherwise by `fully_shard` over the default group. It is updated in place.
        optimizer: of the sharded `model.parameters()`.
        loss_fn: gives a microbatch's two sums, like `loss_sums`.
        zero: the ZeRO level: 1, 2 or 3.
        max_norm: norm of the whole gradient to which it is clipped; None for no clipping.

    Returns:
        `step(batch)`, which returns what `train_step` does. The batch has the same groups and microbatches in all
        processes, as those of `load(…, rank=, num_replicas=)` have.

    Raises:
        ValueError: if `torch.distributed` is not initialised, the model is not sharded, the optimizer has parameters
            that are not the model's, or an argument is out of its range.

    References:
        Zhao et al. 2023, "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel". Rajbhandari et al. 2020,
        "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
    """
    check_process_group("make_fsdp_step")
    zero = check_integer("zero", zero, maximum=3)
    if max_norm is not None:
        check_number("max_norm", max_norm, above=0)
    if not isinstance(model, FSDPModule):
        raise ValueError("the model is not sharded: call shard_model, then make the optimizer")
    check_optimizer(optimizer, model, "shard_model")
    model.set_reshard_after_forward(zero == 3)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Sums, not means: the step divides once, by the sum of weights.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # or it asks for a scaled sum, which only NCCL has

    def around(last: bool) -> AbstractContextManager[None]:
        model.set_requires_gradient_sync(zero > 1 or last)
        model.set_reshard_after_backward(zero == 3 or last)
        return nullcontext()

    def step(batch: AnyStep) -> Metrics:
        check_whole_step(batch)
        optimizer.zero_grad(set_to_none=True)
        total = backward_of_sums(model, batch, loss_fn, around)
        distributed.all_reduce(total)
        return update(model, optimizer, batch, total, max_norm=max_norm)

    return step
