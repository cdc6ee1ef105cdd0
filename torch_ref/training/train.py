"""The train step: one update, the same for any split of the step."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypedDict

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from torch_ref.checks import known_keywords
from torch_ref.loading.batch import AnyBatch, AnyStep, Batch, OneStep, groups_of, map_tensors, values_of
from torch_ref.training.targets import next_token_targets

__all__ = [
    "LossFn",
    "Metrics",
    "TrainStep",
    "backward_of_sums",
    "check_whole_step",
    "join_sums",
    "loss_sums",
    "segments_of",
    "sum_losses",
    "take_microbatch",
    "to_device",
    "train_step",
    "update",
]

LossFn = Callable[[nn.Module, Any], tuple[Tensor, Tensor]]


class Metrics(TypedDict):
    """What `train_step` returns, over the whole step.

    `loss` is the mean loss, in nats a token for `loss_sums`, and `weight` the sum of weights, both without gradient and
    float32 at least. `num_sequences` counts real samples. `grads_finite` and `params_finite` say whether the gradient,
    and its square, and the trained parameters after the step are finite.
    """

    loss: Tensor
    weight: Tensor
    num_sequences: float
    grads_finite: Tensor
    params_finite: Tensor


TrainStep = Callable[[AnyStep], Metrics]


@known_keywords
def loss_sums(model: nn.Module, microbatch: Batch) -> tuple[Tensor, Tensor]:
    """Return the two sums whose ratio is the loss of predicting each next token.

    Args:
        model: gives, for inputs int64[B, T], the logits [B, T, V] of what follows each. If it, or what
            `DistributedDataParallel` wraps, has a `begin_token`, as `Decoder` does, that is the input before each
            sample; else the first token of a sample is not predicted. See `next_token_targets`.
        microbatch: `tokens` int64[B, T] and `weights` float[B, T]; with `segment_ids` and `positions` int64[B, T], the
            model gets them as keywords.

    Returns:
        (sum of cross-entropy times weight, sum of weights): scalars, the first in nats and in the logits' dtype. Both
        are 0 for a microbatch of padding rows.
    """
    unwrapped = model.module if isinstance(model, DistributedDataParallel) else model
    inputs, targets, weights = next_token_targets(microbatch, begin_token=getattr(unwrapped, "begin_token", None))
    return sum_losses(model(inputs, **segments_of(microbatch)), targets, weights)


def segments_of(microbatch: Batch) -> dict[str, Tensor]:
    """Return `segment_ids` and `positions` of packed rows; nothing where a row is a sample."""
    if microbatch.segment_ids is None or microbatch.positions is None:
        return {}
    return {"segment_ids": microbatch.segment_ids, "positions": microbatch.positions}


def sum_losses(logits_BxTxV: Tensor, targets_BxT: Tensor, weights_BxT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the two sums of `loss_sums` from logits [B, T, V]; of a `DTensor`, within `loss_parallel`."""
    losses_BxT = functional.cross_entropy(logits_BxTxV.transpose(1, 2), targets_BxT, reduction="none")
    if hasattr(losses_BxT, "to_local"):  # a DTensor, whose class takes a second to import
        losses_BxT = losses_BxT.to_local()
    return (losses_BxT * weights_BxT).sum(), weights_BxT.sum()


def take_microbatch(batch: AnyBatch, index: int) -> Any:
    """Return microbatch `index` of a batch, its tensors without the leading m."""
    return map_tensors(batch, lambda value: value[index] if value.ndim else value)


@known_keywords
def to_device(batch: OneStep, device: torch.device | str) -> OneStep:
    """Return a batch whose tensors are on a device.

    Args:
        batch: what `load` gives, of any kind, or a microbatch of it.
        device: that of the model. Copies from pinned memory to it overlap with the host's work.

    Returns:
        The batch, with those of its tensors that were there already.

    Example:
        >>> tokens = torch.zeros(1, 2, 3, dtype=torch.int64)
        >>> to_device(Batch(tokens, tokens[..., 0], torch.ones(1, 2, 3), 2.0), "meta").tokens.device
        device(type='meta')
    """
    # Nothing would say when an asynchronous copy has arrived on the host.
    non_blocking = torch.device(device).type != "cpu"
    return map_tensors(batch, lambda value: value.to(device, non_blocking=non_blocking))


@known_keywords
def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    batch: AnyStep,
    *,
    loss_fn: LossFn = loss_sums,
    max_norm: float | None = None,
) -> Metrics:
    """Update the model with one step's gradient, that of (sum of losses) / (sum of weights) over the whole step.

    Gradients of the sums add up over the microbatches of all groups and then, once, over the replicas; they are divided
    once. So any split of a step over replicas, groups and microbatches gives the same gradient up to rounding. Where
    the weights add up to 0 the loss and the gradient are 0, and the optimizer takes its step all the same: AdamW decays
    the parameters.

    Args:
        model: gives logits [B, T, V] for inputs int64[B, T]. Its replicas are those of a `DistributedDataParallel`,
            whose mean over them is undone. Where `torch.distributed` is initialised and the model is not wrapped, they
            are those of the default group, with one all-reduce for each parameter. Where rows of a replica may not
            reach all parameters, `DistributedDataParallel` needs `find_unused_parameters`.
        optimizer: of the model's parameters; its gradients are overwritten. Gradients are those of the whole step in
            hooks of `register_step_pre_hook`. An `AdamWByBatchSize` is told the step's samples, or its tokens where a
            batch of fields has `num_tokens`.
        batch: this replica's share of the step, of any kind that `load` gives, on the model's device (see `to_device`);
            all of its microbatches.
        loss_fn: gives the two sums of a microbatch, the batch without its leading m, like `loss_sums`, which is for
            tokens; it calls the model that it gets, once.
        max_norm: global norm to which gradients are clipped; None for no clipping.

    Returns:
        The `Metrics`. To add up steps, take `float(loss) * float(weight)`, a step late, in Python's floats: sums in
        float32 lose counts above 2**24. Where gradient or parameters are not finite, save nothing: a finite loss may
        have such a gradient.

    Raises:
        ValueError: if the batch holds one of several microbatches, as `PlannedDataset.collate` may make it, or if
            `loss_fn` returns one tensor.

    References:
        `DistributedDataParallel.no_sync` for reducing once a step: Li et al. 2020, "PyTorch Distributed: Experiences on
        Accelerating Data Parallel Training".
    """
    check_whole_step(batch)
    optimizer.zero_grad(set_to_none=True)
    num_averaged = 1
    if isinstance(model, DistributedDataParallel):
        total = backward_of_sums(model, batch, loss_fn, lambda last: nullcontext() if last else model.no_sync())
        distributed.all_reduce(total, group=model.process_group)
        num_averaged = distributed.get_world_size(model.process_group)
    else:
        total = backward_of_sums(model, batch, loss_fn)
        if distributed.is_available() and distributed.is_initialized():
            total = _reduce(model, total)
    return update(model, optimizer, batch, total, num_averaged=num_averaged, max_norm=max_norm)


def check_whole_step(batch: AnyStep) -> None:
    """Refuse a batch that holds one of several microbatches that this replica has of a step."""
    for num_microbatches in (values_of(group).get("num_microbatches") for group in groups_of(batch)):
        if num_microbatches is None:
            continue
        count = int(num_microbatches)
        raise ValueError(
            f"the batch holds 1 of the {count} microbatches that this replica has of a step, which would be an update "
            f"each: read the plan with torch_ref.load, whose batches hold all {count}; or add up the gradients of "
            f"{count} batches in your own loop (gradient_accumulation_steps={count} in the Trainer of transformers)"
        )


def backward_of_sums(
    model: nn.Module,
    batch: AnyStep,
    loss_fn: LossFn,
    around: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext(),
) -> Tensor:
    """Add the gradient of a batch's sum of losses to the gradients of the model.

    Returns:
        (sum of losses, sum of weights) of the batch: [2], without gradient, in float32 or the loss's wider dtype. Each
        microbatch runs in the context that `around` gives for whether it is the last one of the last group.
    """
    sums: list[Tensor] = []
    microbatches = [(group, index) for group in groups_of(batch) for index in range(len(values_of(group)["weights"]))]
    for number, (group, index) in enumerate(microbatches, start=1):
        with around(number == len(microbatches)):
            returned = loss_fn(model, take_microbatch(group, index))
            if isinstance(returned, Tensor):
                raise ValueError("loss_fn must return (sum of losses, sum of weights), not one tensor such as a mean")
            loss_sum, weight_sum = returned
            torch.autograd.backward(loss_sum)
        sums.append(join_sums(loss_sum, weight_sum))
    return torch.stack(sums).sum(dim=0)


def join_sums(loss_sum: Tensor, weight_sum: Tensor) -> Tensor:
    """Return the two sums as [2] without gradient, in float32 at least: bfloat16 cannot count beyond 256."""
    wide = torch.promote_types(loss_sum.dtype, torch.float32)
    return torch.stack([loss_sum.detach().to(wide), weight_sum.to(wide)])


def update(
    model: nn.Module,
    optimizer: Optimizer,
    batch: AnyStep,
    total: Tensor,
    *,
    num_averaged: int = 1,
    max_norm: float | None = None,
    stage_group: "distributed.ProcessGroup | None" = None,
) -> Metrics:
    """Divide the gradients by the sum of weights, clip them, and let the optimizer take its step.

    Gradients are those of the sum of losses over the whole step, or shards of them as `DTensor`s, divided by
    `num_averaged`; `total` are the two sums [2]. `stage_group` are the processes that hold one stage of a pipeline
    each.
    """
    loss, weight = total
    # Sums are 0 where weights are: dividing by 1 then keeps them 0.
    divisor = torch.where(weight != 0, weight, torch.ones_like(weight))
    reached = [parameter for parameter in model.parameters() if parameter.grad is not None]
    gradients = [parameter.grad for parameter in reached if parameter.grad is not None]
    for gradient in gradients:
        gradient.div_(divisor / num_averaged)
    norm = _norm(gradients, 2, stage_group)
    if max_norm is not None:
        # Without the 1e-6 that torch's clipping adds to the norm.
        scale = torch.where(norm < max_norm, torch.ones_like(norm), max_norm / norm)
        for gradient in gradients:
            gradient.mul_(scale)
    for group in optimizer.param_groups:
        # Those of `AdamWByBatchSize`, also under the wrappers of others.
        count = {"sequences": "num_sequences", "tokens": "num_tokens"}.get(group.get("unit", ""))
        if count is not None and "batch_size" in group:
            group["batch_size"] = values_of(batch).get(count, group["batch_size"])
    optimizer.step()
    return {
        "loss": loss / divisor,
        "weight": weight,
        "num_sequences": float(values_of(batch)["num_sequences"]),
        "grads_finite": norm.isfinite(),
        "params_finite": _norm([parameter.detach() for parameter in reached], 1, stage_group).isfinite(),
    }


def _norm(tensors: list[Tensor], order: int, stage_group: "distributed.ProcessGroup | None") -> Tensor:
    """Return the norm of all tensors, over the processes that hold shards and stages; NaN if a value is."""
    norm = nn.utils.get_total_norm(tensors, order)
    if hasattr(norm, "full_tensor"):  # a DTensor, whose class takes a second to import
        norm = norm.full_tensor()
    if stage_group is None:
        return norm
    power = norm**order
    distributed.all_reduce(power, group=stage_group)
    return power ** (1 / order)


def _reduce(model: nn.Module, total: Tensor) -> Tensor:
    """Add up gradients over the replicas of the default group, and return what `total` adds up to."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    reached = total.new_tensor([parameter.grad is not None for parameter in trained])
    counted = torch.cat([total, reached])
    distributed.all_reduce(counted)
    total, num_reached = counted[: len(total)], counted[len(total) :]
    for index, parameter in enumerate(trained):
        # A replica whose rows do not reach a parameter takes part all the same, or the others would wait for it.
        if parameter.grad is None and num_reached[index] > 0:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad is not None:
            distributed.all_reduce(parameter.grad)
    return total
