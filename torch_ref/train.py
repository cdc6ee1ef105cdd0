"""A model, an optimizer and a step's batch in; one update out, the same however the step was split."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.optim import Optimizer

from torch_ref.loader import Batch

LossFn = Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]


def loss_sums(model: nn.Module, microbatch: Batch) -> tuple[Tensor, Tensor]:
    """Return the two sums of which a loss is the ratio.

    Args:
        model: gives logits [B, T, V] for tokens int64[B, T].
        microbatch: `tokens` int64[B, T] and `weights` float[B, T]; with `segment_ids` and `positions` int64[B, T], the
            model gets them as keywords.

    Returns:
        (sum of cross-entropy times weight, sum of weights): scalars, the first in nats and in the logits' dtype. Both
        are 0 for a microbatch of dummy rows.
    """
    segments: dict[str, Tensor] = {}
    if microbatch.segment_ids is not None and microbatch.positions is not None:
        segments = {"segment_ids": microbatch.segment_ids, "positions": microbatch.positions}
    logits_BxTxV = model(microbatch.tokens, **segments)
    losses_BxT = functional.cross_entropy(logits_BxTxV.transpose(1, 2), microbatch.tokens, reduction="none")
    return (losses_BxT * microbatch.weights).sum(), microbatch.weights.sum()


def take_microbatch(batch: Batch, index: int) -> Batch:
    """Return microbatch `index` of a batch, its tensors without the leading m."""
    fields: dict[str, Any] = {
        name: value[index] for name, value in batch._asdict().items() if isinstance(value, Tensor)
    }
    return batch._replace(**fields)


def train_step(model: nn.Module, optimizer: Optimizer, batch: Batch, *, loss_fn: LossFn = loss_sums) -> dict[str, Any]:
    """Update the model with one step's gradient, that of (sum of losses) / (sum of weights) over the whole step.

    Gradients of the sums add up over the microbatches and, where `torch.distributed` is initialised, over its default
    group; they are divided once. So any split of a step over replicas and microbatches gives the same gradient up to
    rounding. Where all weights are 0 the loss and the gradient are 0.

    Args:
        model: gives logits [B, T, V] for tokens int64[B, T]; not wrapped in DistributedDataParallel, which would
            average the replicas a second time.
        optimizer: of the model's parameters; its gradients are overwritten.
        batch: this replica's share of the step, `tokens` int64[m, B, T].
        loss_fn: gives a microbatch's two sums, like `loss_sums`.

    Returns:
        `loss`: mean nats a token, a scalar without gradient; `weight`: the sum of weights; `num_sequences`: real
        samples; all three over the whole step.
    """
    optimizer.zero_grad(set_to_none=True)
    sums: list[Tensor] = []
    for index in range(len(batch.tokens)):
        loss_sum, weight_sum = loss_fn(model, take_microbatch(batch, index))
        torch.autograd.backward(loss_sum)
        sums.append(torch.stack([loss_sum.detach(), weight_sum.to(loss_sum.dtype)]))
    total = torch.stack(sums).sum(dim=0)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    if distributed.is_available() and distributed.is_initialized():
        for tensor in (total, *gradients):
            distributed.all_reduce(tensor)
    loss, weight = total
    # Sums are 0 where weights are: dividing by 1 then keeps them 0.
    divisor = torch.where(weight > 0, weight, torch.ones_like(weight))
    for gradient in gradients:
        gradient.div_(divisor)
    optimizer.step()
    return {"loss": loss / divisor, "weight": weight, "num_sequences": batch.num_sequences}
