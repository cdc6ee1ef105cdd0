"""Whole parameters, of a model that is spread over processes in any way."""

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from torch_ref.checks import check_process_group
from torch_ref.parallel.pipeline import Stages

__all__ = ["gather_params"]


@torch.no_grad()
def gather_params(model: nn.Module, *, to_all: bool = False) -> dict[str, Tensor]:
    """Return the whole parameters of a model, sharded or not.

    All processes must call it. A device holds one whole parameter at a time.

    Args:
        model: what a step was made of.
        to_all: whether all processes get them, or only rank 0.

    Returns:
        Tensors on the CPU by name, which later steps do not change; nothing on other ranks unless `to_all`.

    Raises:
        ValueError: if `torch.distributed` is not initialised.
    """
    check_process_group("gather_params")
    if isinstance(model, Stages):
        return _gather_stages(model, to_all)
    gathered: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if to_all or distributed.get_rank() == 0:
            gathered[name] = torch.empty_like(whole, device="cpu").copy_(whole)
    return gathered


def _gather_stages(stages: Stages, to_all: bool) -> dict[str, Tensor]:
    held = {
        name: torch.empty_like(parameter, device="cpu").copy_(parameter)
        for chunk in stages.chunks
        for name, parameter in chunk.named_parameters()
    }
    of_stages: list[dict[str, Tensor]] = [{}] * stages.group.size()
    distributed.all_gather_object(of_stages, held, group=stages.group)
    if not to_all and distributed.get_rank() != 0:
        return {}
    return {name: parameter for each in of_stages for name, parameter in each.items()}
