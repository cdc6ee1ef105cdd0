"""Tensor parallelism by `parallelize_module`: heads, hidden features and the vocabulary split over processes."""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.optim import Optimizer

from torch_ref.checks import check_number, check_process_group
from torch_ref.loading.batch import AnyStep
from torch_ref.parallel.mesh import check_mesh, check_optimizer, reduce_over_data
from torch_ref.training.decoder import Decoder
from torch_ref.training.train import LossFn, Metrics, TrainStep, backward_of_sums, check_whole_step, loss_sums, update

__all__ = ["make_tensor_step", "shard_tensors"]

_OF_HEADS = ("q_norm", "k_norm")


def shard_tensors(model: Decoder, mesh: DeviceMesh, *, sequence_parallel: bool = False) -> None:
    """Split a decoder's products and its vocabulary over the mesh axis "tensor", in place, after Megatron-LM.

    Make the optimizer afterwards: parameters become `DTensor`s. Each process has some of the heads, of the MLP's
    features, and of the rows of embedding and head; norms are whole. The model then gives logits [B, T, V] as a
    `DTensor`, for a loss within `loss_parallel`.

    Args:
        model: on this process's device, with the same parameters in all processes.
        mesh: with an axis "tensor", whose size divides the heads; `init_device_mesh` makes it.
        sequence_parallel: whether a process has only some of the positions between the products. Their number must
            then be a multiple of the axis's size.

    Raises:
        ValueError: if `torch.distributed` is not initialised, the mesh has no axis "tensor" or others than "data" and
            "tensor", its size does not divide the heads or the MLP's features, or the model is split already.

    References:
        Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism".
        Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models".
    """
    check_process_group("shard_tensors")
    check_mesh(mesh, "tensor")
    num_parts, config = mesh["tensor"].size(), model.config
    if isinstance(model.lm_head.weight, DTensor):
        raise ValueError("the model is split already")
    numbers = {"heads": config.num_heads, "heads of keys and values": config.kv_heads, "features": config.mlp_features}
    if wrong := [f"{number} {name}" for name, number in numbers.items() if number % num_parts]:
        raise ValueError(
            f"the size of the mesh axis 'tensor' must divide the heads and features: there are {', '.join(wrong)} for "
            f"{num_parts} processes"
        )
    between = Shard(1) if sequence_parallel else Replicate()
    # Gathered once for all products of the same input.
    whole, columns, rows = Replicate(), ColwiseParallel(), RowwiseParallel(output_layouts=between)
    norm: ParallelStyle = SequenceParallel(use_local_output=True)
    if not sequence_parallel:
        norm = PrepareModuleInputOutput(
            input_layouts=between, desired_input_layouts=between, output_layouts=between, desired_output_layouts=between
        )
        for name, module in model.named_modules():
            if isinstance(module, nn.RMSNorm) and not name.endswith(_OF_HEADS):
                distribute_module(module, mesh["tensor"])  # the same in all processes, but on the mesh of the others
    layer: dict[str, ParallelStyle] = {
        "input_layernorm": norm,
        "self_attn": PrepareModuleInput(input_layouts=(between, None), desired_input_layouts=(whole, None)),
        "post_attention_layernorm": norm,
        "mlp": PrepareModuleInput(input_layouts=between, desired_input_layouts=whole),
    }
    layer |= {f"self_attn.{name}": SequenceParallel(sequence_dim=2, use_local_output=True) for name in _OF_HEADS}
    layer |= dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), columns)
    layer |= {"mlp.gate_proj": columns, "mlp.up_proj": columns, "self_attn.o_proj": rows, "mlp.down_proj": rows}
    held = dict(model.model.layers[0].named_modules())
    styles: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=between),
        **{f"model.layers.*.{name}": style for name, style in layer.items() if name in held},
        "model.norm": norm,
        "lm_head": ColwiseParallel(input_layouts=between, use_local_output=False),
    }
    parallelize_module(model, mesh["tensor"], styles)
    model.tie()

    def check_length(model: nn.Module, inputs: tuple[Tensor]) -> None:
        # The styles take the parts of all processes to be of one size.
        if (length := inputs[0].shape[1]) % num_parts:
            raise ValueError(f"sequence_parallel takes lengths that are multiples of {num_parts}, got {length}")

    if sequence_parallel:
        model.register_forward_pre_hook(check_length)


def make_tensor_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: LossFn = loss_sums,
    *,
    mesh: DeviceMesh,
    max_norm: float | None = None,
) -> TrainStep:
    """Make a train step that all processes of a mesh take together, each with its data shard's share of the batch.

    Gradients are reduced over "data" once a step. Loss and gradient are those of the whole step, as `train_step` says.

    Args:
        model: of `shard_tensors`. It is updated in place. Every row must reach all of its parameters.
        optimizer: of the split `model.parameters()`.
        loss_fn: gives a microbatch's two sums, like `loss_sums`.
        mesh: that of `shard_tensors`.
        max_norm: norm of the whole gradient to which it is clipped; None for no clipping.

    Returns:
        `step(batch)`, which returns what `train_step` does. The batch is the same along "tensor"; along "data" it is
        that of `load(…, rank=mesh.get_local_rank("data"), num_replicas=mesh["data"].size())`.

    Raises:
        ValueError: if `torch.distributed` is not initialised, the model is not split, the optimizer has parameters
            that are not the model's, or an argument is out of its range.
    """
    check_process_group("make_tensor_step")
    check_mesh(mesh, "tensor")
    if max_norm is not None:
        check_number("max_norm", max_norm, above=0)
    if not all(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError("the model is not split: call shard_tensors, then make the optimizer")
    check_optimizer(optimizer, model, "shard_tensors")

    def step(batch: AnyStep) -> Metrics:
        check_whole_step(batch)
        optimizer.zero_grad(set_to_none=True)
        total = backward_of_sums(model, batch, loss_fn, lambda last: loss_parallel())
        for parameter in model.parameters():
            if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
                # Those of norms under sequence parallelism are still to be summed over the positions of all processes.
                # Done here, it is once a step: the optimizer would do it in each of its operations.
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
        reduce_over_data(mesh, model, total)
        return update(model, optimizer, batch, total, max_norm=max_norm)

    return step
