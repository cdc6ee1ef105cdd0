"""Pipelines by `torch.distributed.pipelining`: consecutive layers on different processes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.optim import Optimizer

from torch_ref.checks import check_integer, check_number, check_process_group
from torch_ref.loading.batch import Batch, StepBatch, groups_of
from torch_ref.parallel.mesh import check_mesh, check_optimizer, reduce_over_data
from torch_ref.training.decoder import Decoder, rows_of
from torch_ref.training.targets import next_token_targets
from torch_ref.training.train import Metrics, check_whole_step, join_sums, segments_of, sum_losses, update

__all__ = ["Stages", "make_pipeline_step", "split_stages"]

_SINGLE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI = {"interleaved": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble}


class _Chunk(nn.Module):
    """Consecutive layers, with the embedding if they are the first, and norm and head if they are the last.

    Parameters have the names that they have in the whole model.
    """

    def __init__(self, model: Decoder, index: int, num_chunks: int) -> None:
        super().__init__()
        self.config = model.config
        num_layers = self.config.num_layers // num_chunks
        self.index, self.is_first, self.is_last = index, index == 0, index == num_chunks - 1
        places = range(index * num_layers, (index + 1) * num_layers)
        self.model: Any = nn.Module()  # for the names of the parameters
        if self.is_first:
            self.model.embed_tokens = model.model.embed_tokens
        self.model.layers = nn.ModuleDict({str(place): model.model.layers[place] for place in places})
        if self.is_last:
            self.model.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, x_BxTxD: Tensor, *, segment_ids: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return what the next chunk gets [B, T, D], or logits [B, T, V]; the first chunk gets inputs [B, T]."""
        rows = rows_of(self.config, x_BxTxD, segment_ids, positions)
        if self.is_first:
            x_BxTxD = self.model.embed_tokens(x_BxTxD)
        for layer in self.model.layers.values():
            x_BxTxD = layer(x_BxTxD, rows)
        return self.lm_head(self.model.norm(x_BxTxD)) if self.is_last else x_BxTxD

    def examples(self, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Return an input and an output, on the device "meta"."""
        dtype = next(self.parameters()).dtype
        hidden = torch.empty(num_rows, length, self.config.width, dtype=dtype, device="meta", requires_grad=True)
        first = torch.empty(num_rows, length, dtype=torch.int64, device="meta")
        last = torch.empty(num_rows, length, self.config.vocab_size, dtype=dtype, device="meta", requires_grad=True)
        return first if self.is_first else hidden, last if self.is_last else hidden


class Stages(nn.Module):
    """What a process holds of a pipelined model, of `split_stages`.

    Attributes:
        chunks: modules of consecutive layers, whose parameters have the names that they have in the whole model.
        mesh: of the processes.
        group: the processes of one pipeline.
        num_chunks: of all stages.
        begin_token: of the decoder.
    """

    def __init__(self, chunks: Iterable[nn.Module], mesh: DeviceMesh, num_chunks: int, begin_token: int | None) -> None:
        """Hold some chunks."""
        super().__init__()
        self.begin_token = begin_token
        self.chunks: Sequence[_Chunk] = nn.ModuleList(chunks)  # type: ignore[assignment]  # which is no Sequence
        self.mesh, self.group = mesh, mesh.get_group("stage")
        self.num_chunks = num_chunks


def split_stages(model: Decoder, mesh: DeviceMesh, *, virtual: int = 1) -> Stages:
    """Cut a model into the stages of a pipeline.

    Stage s of S holds virtual stages s, s + S and so on, each of equally many consecutive layers. The first one has the
    embedding as well, the last one norm and head. Make the optimizer of the stages' parameters.

    Args:
        model: on this process's device, with the same parameters in all processes. It shares them with the stages.
        mesh: with an axis "stage" of size S; `init_device_mesh` makes it.
        virtual: stages of each stage, for the schedules "interleaved" and "zero_bubble".

    Returns:
        The chunks of this process.

    Raises:
        ValueError: if `torch.distributed` is not initialised, the mesh has no axis "stage" or others than "data" and
            "stage", the layers are not a multiple of S · virtual, or the head is tied to the embedding, which would be
            on another stage.
    """
    check_process_group("split_stages")
    check_mesh(mesh, "stage")
    num_stages = mesh["stage"].size()
    num_chunks = num_stages * check_integer("virtual", virtual)
    num_layers = model.config.num_layers
    if num_layers % num_chunks:
        raise ValueError(
            f"the {num_layers} layers must be a multiple of the {num_chunks} chunks of {num_stages} stages"
        )
    if model.config.tied:
        raise ValueError("split_stages takes no tied head: embedding and head are on different stages")
    indices = range(mesh.get_local_rank("stage"), num_chunks, num_stages)
    return Stages([_Chunk(model, index, num_chunks) for index in indices], mesh, num_chunks, model.begin_token)


def make_pipeline_step(
    stages: Stages, optimizer: Optimizer, *, schedule: str = "1f1b", max_norm: float | None = None
) -> Callable[[Batch | StepBatch], Metrics]:
    """Make a train step that all processes of a mesh take together, each with its data shard's share of the batch.

    Microbatches of a group follow each other through the stages, and a group starts when all stages are done with the
    one before. A process keeps a schedule, with its buffers, for each shape of groups. Gradients are reduced over
    "data" once a step. Loss and gradient are those of the whole step, as `train_step` says.

    Args:
        stages: of `split_stages`. They are updated in place.
        optimizer: of `stages.parameters()`.
        schedule: "gpipe" or "1f1b" for one chunk, "interleaved" or "zero_bubble".
        max_norm: norm of the whole gradient to which it is clipped; None for no clipping.

    Returns:
        `step(batch)`, which returns what `train_step` does. The batch is the same along "stage"; along "data" it is
        that of `load(…, rank=mesh.get_local_rank("data"), num_replicas=mesh["data"].size())`. Each group has at least
        as many microbatches as there are stages S, but for "gpipe"; for "interleaved" and "zero_bubble" a multiple of
        S.

    Raises:
        ValueError: if `torch.distributed` is not initialised, the optimizer has parameters that are not the stages', or
            an argument is out of its range.

    References:
        Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism". Narayanan
        et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM". Qi et al. 2024,
        "Zero Bubble Pipeline Parallelism".
    """
    check_process_group("make_pipeline_step")
    if max_norm is not None:
        check_number("max_norm", max_norm, above=0)
    if schedule not in (*_SINGLE, *_MULTI):
        raise ValueError(f"schedule must be one of {', '.join((*_SINGLE, *_MULTI))}, got {schedule!r}")
    if schedule in _SINGLE and len(stages.chunks) > 1:
        raise ValueError(f"{schedule} takes one chunk a stage, got {len(stages.chunks)}")
    check_optimizer(optimizer, stages, "split_stages")
    is_first, is_last = stages.chunks[0].is_first, stages.chunks[-1].is_last
    schedules: dict[torch.Size, Any] = {}
    expected: list[tuple[Tensor, Tensor]] = []  # targets and weights of the microbatches
    sums: list[Tensor] = []

    def loss_fn(logits_BxTxV: Tensor, index_1: Tensor) -> Tensor:
        loss_sum, weight_sum = sum_losses(logits_BxTxV, *expected[int(index_1)])
        sums.append(join_sums(loss_sum, weight_sum))
        return loss_sum

    def accumulate(batch: Batch) -> None:
        shape = batch.tokens.shape
        if shape not in schedules:
            schedules[shape] = _make_schedule(stages, schedule, shape, loss_fn)
        inputs, targets, weights = next_token_targets(batch, begin_token=stages.begin_token)
        expected[:] = zip(targets, weights, strict=True)
        # Schedules split the first dimension into equal parts, which are the microbatches again.
        given = {name: value.flatten(0, 1) for name, value in segments_of(batch).items()}
        target = torch.arange(len(batch.tokens)) if is_last else None
        given_first = [inputs.flatten(0, 1)] if is_first else []
        schedules[shape].step(*given_first, target=target, return_outputs=False, **given)

    def step(batch: Batch | StepBatch) -> Metrics:
        check_whole_step(batch)
        optimizer.zero_grad(set_to_none=True)
        sums.clear()
        for group in groups_of(batch):
            accumulate(group)
        parameter = next(stages.parameters())
        total = parameter.new_zeros(2, dtype=torch.promote_types(parameter.dtype, torch.float32))
        if is_last:
            total += torch.stack(sums).sum(dim=0)
        distributed.all_reduce(total, group=stages.group)
        reduce_over_data(stages.mesh, stages, total)
        return update(stages, optimizer, batch, total, max_norm=max_norm, stage_group=stages.group)

    return step


def _make_schedule(stages: Stages, name: str, shape: torch.Size, loss_fn: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """Make a schedule for tokens [m, B, T]. All shapes are given: torch runs nothing to find them."""
    num_microbatches, num_rows, length = shape
    device = next(stages.parameters()).device
    made: list[Any] = [
        PipelineStage(
            chunk, chunk.index, stages.num_chunks, device, *chunk.examples(num_rows, length), group=stages.group
        )
        for chunk in stages.chunks
    ]
    # The step divides once, by the sum of weights: schedules must not divide by the number of microbatches.
    if name in _SINGLE:
        return _SINGLE[name](made[0], num_microbatches, loss_fn=loss_fn, scale_grads=False)
    return _MULTI[name](made, num_microbatches, loss_fn=loss_fn, scale_grads=False)
