"""Meshes of processes: checks, and data parallelism along one axis."""

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

__all__ = ["check_mesh", "check_optimizer", "reduce_over_data"]


def check_mesh(mesh: DeviceMesh, axis: str) -> None:
    """Raise ValueError unless a mesh has an axis of that name, and no others but "data"."""
    names = mesh.mesh_dim_names or ()
    if axis not in names or not {axis, "data"}.issuperset(names):
        raise ValueError(f"the mesh must have an axis {axis!r} and no others but 'data', got {names}")


def check_optimizer(optimizer: Optimizer, model: nn.Module, made_by: str) -> None:
    """Raise ValueError, which names `made_by`, if an optimizer has parameters that are not the model's."""
    held = set(map(id, model.parameters()))
    given = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    if foreign := len(set(given) - held):
        raise ValueError(
            f"{foreign} of the optimizer's {len(given)} parameters are not the model's: make it after {made_by}"
        )


@torch.no_grad()
def reduce_over_data(mesh: DeviceMesh, model: nn.Module, total: Tensor) -> None:
    """Add up gradients and `total`, the two sums [2], over the mesh axis "data" if there is one, in place."""
    if "data" not in (mesh.mesh_dim_names or ()):
        return
    group = mesh.get_group("data")
    distributed.all_reduce(total, group=group)
    for parameter in model.parameters():
        if (gradient := parameter.grad) is not None:
            distributed.all_reduce(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group=group)
