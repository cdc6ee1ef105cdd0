"""What a microbatch of a model computes and communicates, counted from its traced functions.

Letters: K buckets, L layers, P parameters.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Float64

from jvarlen._common.checks import UserError
from jvarlen.batches.batches import token_batch_spec
from jvarlen.clusters.cluster import Kind
from jvarlen.distributed.mesh import axes_in
from jvarlen.parallel.layers import Axes, LayeredModel, LayeredParams, keeping_inputs, layered_loss_fn, num_layers_of
from jvarlen.parallel.layout import Layout
from jvarlen.parallel.sequence import SEQUENCE_AXIS
from jvarlen.parallel.tensor import TENSOR_AXIS, partition_specs, split_params
from jvarlen.parallel.train import model_on_axes
from jvarlen.planning.buckets import Bucket
from jvarlen.training.losses import LossFn, bind_loss, takes_argument
from jvarlen.training.train_state import TrainState

__all__ = ["AxisTraffic", "ModelCosts", "Passes", "count_costs"]

_MOST_LENGTHS = 3  # that are traced; operations a position grow evenly between them, and beyond
_LONGEST_TRACED = 1024

Axis = Literal["tensor", "sequence_parallel", "sequence"]


class Passes(NamedTuple):
    """A number for each pass of a microbatch.

    Attributes:
      forward: of the forward pass.
      backward: of the backward pass.
      again: of running the forward pass again, from kept inputs.
    """

    forward: Any
    backward: Any
    again: Any


class AxisTraffic(NamedTuple):
    """Collectives of one kind over an axis in one pass.

    Attributes:
      kind: of collective.
      times: how often.
      num_bytes: of all their arrays, in units of the bytes of x, what goes from layer to layer.
    """

    kind: Kind
    times: float
    num_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """What a microbatch of each bucket costs on one device, and how that divides.

    Attributes:
      buckets: the K buckets.
      num_layers: L; 0 for a loss function, of which only the whole is known.
      layer_flops: operations of one layer in each pass, float64[K] each.
      ends_flops: of what comes before and after the layers.
      layer_split: the share of a layer's operations that "tensor" splits, in each pass.
      ends_split: likewise of the ends.
      x_bytes: float64[K], activations between layers.
      layer_traffic: collectives of one layer, by axis and pass.
      ends_traffic: likewise of the ends.
      layer_params: parameters of one layer: those that "tensor" does not split, and those that it does.
      ends_params: likewise of the ends.
      param_bytes: of a parameter. Gradients have 4 bytes at least.
      tensor_sizes: sizes of the axis "tensor" that divide the model, of those that were asked for.
      by_positions: whether rows can be spread over "sequence".
    """

    buckets: tuple[Bucket, ...]
    num_layers: int
    layer_flops: Passes
    ends_flops: Passes
    layer_split: Passes
    ends_split: Passes
    x_bytes: Float64[np.ndarray, " K"]
    layer_traffic: dict[Axis, Passes]
    ends_traffic: dict[Axis, Passes]
    layer_params: tuple[int, int]
    ends_params: tuple[int, int]
    param_bytes: float
    tensor_sizes: tuple[int, ...]
    by_positions: bool

    @property
    def step_flops(self) -> Float64[np.ndarray, " K"]:
        """Operations of a microbatch, forward and backward, without what is computed again: those that MFU counts."""
        layers, ends = self.layer_flops, self.ends_flops
        return self.num_layers * (layers.forward + layers.backward) + ends.forward + ends.backward


def count_costs(
    model: LayeredModel | LossFn,
    params: Any,
    buckets: Sequence[Bucket],
    *,
    batch_spec: Callable[[Any, int], Any] = token_batch_spec,
    tensor_sizes: Sequence[int] = (),
    extra: Any = None,
) -> ModelCosts:
    """Counts products of matrices and collectives of a model, by tracing it. Nothing is compiled or computed.

    Args:
      model: as for `parallel.make_train_step`.
      params: pytree of arrays or `jax.ShapeDtypeStruct`, as for `parallel.init_state`.
      buckets: rows and length of microbatches.
      batch_spec: as for `compile_buckets`.
      tensor_sizes: sizes of the axis "tensor" to ask for.
      extra: as for `parallel.init_state`.

    Returns:
      The costs. Loops with a number of turns that depends on values count once.

    Raises:
      ValueError: no products of matrices were found.
    """
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)), params)
    traced = _Traced(model, params, batch_spec, extra)
    lengths = np.unique([bucket.length for bucket in buckets])
    short = lengths[: max(int(np.sum(lengths <= _LONGEST_TRACED)), 2)]
    chosen = short[np.unique(np.linspace(0, len(short) - 1, _MOST_LENGTHS).round().astype(int))]
    of_length = {bucket.length: bucket for bucket in reversed(buckets)}
    counted = [traced.passes(of_length[length], "data1") for length in chosen.tolist()]

    def per_bucket(part: int) -> Passes:
        values = []
        for name in Passes._fields:
            per_position = [
                getattr(parts[part], name)["flops"] / of_length[length].num_positions
                for parts, length in zip(counted, chosen.tolist(), strict=True)
            ]
            at = _interpolated(np.array([bucket.length for bucket in buckets]), chosen, np.array(per_position))
            values.append(at * [bucket.num_positions for bucket in buckets])
        return Passes(*values)

    layer_flops, ends_flops = per_bucket(0), per_bucket(1)
    if not (layer_flops.forward + ends_flops.forward).all():
        raise UserError("no products of matrices were found in this model: its steps cannot be predicted")
    layer_traffic: dict[Axis, Passes] = {}
    ends_traffic: dict[Axis, Passes] = {}
    x_bytes = np.zeros(len(buckets))
    layer_split, ends_split = Passes(0.0, 0.0, 0.0), Passes(0.0, 0.0, 0.0)
    tensor_sizes = tuple(size for size in tensor_sizes if traced.takes_tensor(size))
    if traced.num_layers:
        assert isinstance(model, LayeredModel)
        x_bytes = np.array([traced.x_bytes(bucket) for bucket in buckets], np.float64)
        texts: dict[Axis, str] = {}
        split_size = next((size for size in tensor_sizes if size > 1), 1)
        if split_size > 1:
            texts = {"tensor": f"tensor{split_size}", "sequence_parallel": f"tensor{split_size}.sequence_parallel"}
        if model.by_positions:
            texts["sequence"] = "sequence2"
        # Positions that all these divide. What is communicated is as long as the rows.
        rows, length = buckets[0]
        bucket = Bucket(rows, -(-length // (4 * split_size)) * 4 * split_size)
        whole = traced.passes(bucket, "data1")
        for axis, text in texts.items():
            try:
                parts = traced.passes(bucket, text)
            except ValueError:  # such as layers that cannot be split by positions
                continue
            layer_traffic[axis], ends_traffic[axis] = (
                Passes(*(_traffic_of(counts, traced.x_bytes(bucket)) for counts in part)) for part in parts
            )
            if axis == "tensor":
                layer_split, ends_split = (
                    Passes(*(_split_share(one, split, split_size) for one, split in zip(*pair, strict=True)))
                    for pair in zip(whole, parts, strict=True)
                )
    layer_params, ends_params = traced.num_params()
    leaves = jax.tree.leaves(params)
    return ModelCosts(
        buckets=tuple(buckets),
        num_layers=traced.num_layers,
        layer_flops=layer_flops,
        ends_flops=ends_flops,
        layer_split=layer_split,
        ends_split=ends_split,
        x_bytes=x_bytes,
        layer_traffic=layer_traffic,
        ends_traffic=ends_traffic,
        layer_params=layer_params,
        ends_params=ends_params,
        param_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / sum(leaf.size for leaf in leaves),
        tensor_sizes=tensor_sizes,
        by_positions="sequence" in layer_traffic,
    )


def _interpolated(lengths: np.ndarray, known: np.ndarray, values: np.ndarray) -> Float64[np.ndarray, " K"]:
    """Between known lengths, and beyond the last by the slope before it."""
    at = np.interp(lengths, known, values)
    if len(known) > 1:
        slope = (values[-1] - values[-2]) / (known[-1] - known[-2])
        at += slope * np.maximum(lengths - known[-1], 0)
    return at


_Counts = collections.Counter  # operations as "flops"; of collectives, ("psum", "times") and ("psum", "bytes")


class _Traced:
    """A model whose passes are traced for one layer and for two, which tells what one costs."""

    def __init__(
        self, model: LayeredModel | LossFn, params: Any, batch_spec: Callable[[Any, int], Any], extra: Any = None
    ):
        self._model, self._batch_spec, self._extra = model, batch_spec, extra
        self._params = params
        self.num_layers = 0
        if isinstance(model, LayeredModel):
            self._params = params if model.stack is None else jax.eval_shape(model.stack, params)
            self._model = model._replace(stack=None)
            self.num_layers = num_layers_of(self._params)

    def takes_tensor(self, size: int) -> bool:
        """Whether "tensor" of this size divides the model."""
        if size == 1:
            return True
        if not isinstance(self._model, LayeredModel) or self._model.specs is None:
            return False
        try:
            self._split(Layout(tensor=size))
            self._count(Layout(tensor=size), self._bucket_of_one, 1, "forward")
        except ValueError:
            return False
        return True

    @property
    def _bucket_of_one(self) -> Bucket:
        return Bucket(1, 8)

    def passes(self, bucket: Bucket, text: str) -> tuple[Passes, Passes]:
        """Counts of one layer and of the ends, on a layout."""
        layout = Layout.parse(text)
        if not self.num_layers:
            forward, both = (self._count(layout, bucket, 0, name) for name in ("forward", "both"))
            return Passes(_Counts(), _Counts(), _Counts()), Passes(forward, _minus(both, forward), _Counts())
        found: dict[str, tuple[_Counts, _Counts]] = {}
        for name in ("forward", "both", "inputs"):
            one, two = (self._count(layout, bucket, num_layers, name) for num_layers in (1, 2))
            of_layer = _minus(two, one)
            found[name] = of_layer, _minus(one, of_layer)
        layer, ends = (
            Passes(
                found["forward"][part],
                _minus(found["both"][part], found["forward"][part]),
                _minus(found["inputs"][part], found["both"][part]),
            )
            for part in (0, 1)
        )
        return layer, ends

    def x_bytes(self, bucket: Bucket) -> int:
        """Bytes of what goes from layer to layer."""
        model, microbatch = self._model, self._microbatch(bucket)
        assert isinstance(model, LayeredModel)
        axes = Axes(key=jax.eval_shape(lambda: jax.random.key(0)))

        def embed(ends: Any, microbatch: Any, key: Any) -> Any:
            return model.embed(ends, microbatch, axes._replace(key=key))

        x = jax.eval_shape(embed, self._params.ends, microbatch, axes.key)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))

    def num_params(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of one layer and of the ends, each without and with those that "tensor" splits."""
        if not self.num_layers:
            return (0, 0), (sum(leaf.size for leaf in jax.tree.leaves(self._params)), 0)
        specs = jax.tree.map(lambda _: PartitionSpec(), self._params)
        if isinstance(self._model, LayeredModel) and self._model.specs is not None:
            specs = partition_specs(self._model.specs)

        def counted(params: Any, specs: Any) -> tuple[int, int]:
            split = jax.tree.map(lambda leaf, spec: leaf.size if TENSOR_AXIS in axes_in(spec) else 0, params, specs)
            whole = sum(leaf.size for leaf in jax.tree.leaves(params))
            return whole - sum(jax.tree.leaves(split)), sum(jax.tree.leaves(split))

        whole, split = counted(self._params.layers, specs.layers)
        return (whole // self.num_layers, split // self.num_layers), counted(self._params.ends, specs.ends)

    def _microbatch(self, bucket: Bucket) -> Any:
        batch = self._batch_spec(bucket, 1)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if leaf.shape else leaf, batch
        )

    def _split(self, layout: Layout, num_layers: int | None = None) -> Any:
        """Shapes of the parameters of one device, of the first layers."""
        params, model = self._params, self._model
        if num_layers is not None and isinstance(params, LayeredParams) and self.num_layers:
            layers = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape[1:]), leaf.dtype), params.layers
            )
            params = params._replace(layers=layers)
        if layout.tensor == 1 or not isinstance(model, LayeredModel) or model.specs is None:
            return params
        params = jax.eval_shape(functools.partial(split_params, specs=model.specs, num_devices=layout.tensor), params)

        def local(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
            parts = [layout.tensor if TENSOR_AXIS in axes_in([axes]) else 1 for axes in spec]
            parts += [1] * (len(leaf.shape) - len(parts))
            shape = tuple(-(-size // part) for size, part in zip(leaf.shape, parts, strict=True))
            return jax.ShapeDtypeStruct(shape, leaf.dtype)

        return jax.tree.map(local, params, partition_specs(model.specs))

    def _count(self, layout: Layout, bucket: Bucket, num_layers: int, what: str) -> _Counts:
        """Counts of the forward pass, of both passes, or of both with kept inputs, on one device of a layout."""
        params, microbatch = self._split(layout, num_layers), self._microbatch(bucket)
        model, _ = model_on_axes(self._model, layout, self._params, self._batch_spec(bucket, 1))
        if isinstance(model, LayeredModel):
            model = keeping_inputs(model) if what == "inputs" else model
        loss_fn = layered_loss_fn(model) if isinstance(model, LayeredModel) else model
        key = jax.eval_shape(lambda: jax.random.key(0)) if takes_argument(loss_fn, "key") else None

        def loss(params: Any, microbatch: Any, key: Any, extra: Any) -> Any:
            return bind_loss(loss_fn, TrainState(None, None, extra=extra, key=key))(params, microbatch, key)[0]

        call = loss if what == "forward" else jax.grad(loss)
        mesh = AbstractMesh(tuple(layout.axis_sizes.values()), tuple(layout.axis_sizes))
        whole = PartitionSpec()
        on_device = jax.shard_map(call, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        return _counts_of(jax.make_jaxpr(on_device)(params, microbatch, key, self._extra).jaxpr)


def _minus(counts: _Counts, others: _Counts) -> _Counts:
    return _Counts({name: counts[name] - others[name] for name in {*counts, *others}})


_KINDS: dict[str, Kind] = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "psum2": "all_reduce",
    "pmax": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "psum_scatter": "reduce_scatter",
    "ppermute": "send",
}


def _counts_of(jaxpr: Jaxpr, times: float = 1) -> _Counts:
    """Operations of products of matrices, and collectives over "tensor" and "sequence"; loops multiplied out."""
    counts: Any = _Counts()
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        taken, returned = (
            [cast(Any, each.aval) for each in each_of] for each_of in (equation.invars, equation.outvars)
        )
        if name == "dot_general":
            ((contracted, _), _), shape = params["dimension_numbers"], taken[0].shape
            size = math.prod(returned[0].shape) * math.prod(shape[dim] for dim in contracted)
            counts["flops"] += times * 2 * size
        elif name == "conv_general_dilated":
            kernel = taken[1].shape
            features = kernel[params["dimension_numbers"].rhs_spec[0]]
            size = math.prod(returned[0].shape) * math.prod(kernel) // features
            counts["flops"] += times * 2 * size
        elif name in _KINDS and {*axes_in([params.get("axes", params.get("axis_name"))])} & {
            TENSOR_AXIS,
            SEQUENCE_AXIS,
        }:
            arrays = taken if _KINDS[name] == "reduce_scatter" else returned
            counts[_KINDS[name], "times"] += times * len(arrays)
            counts[_KINDS[name], "bytes"] += times * sum(each.size * each.dtype.itemsize for each in arrays)
        branches = [_counts_of(each, times * _turns(name, params)) for each in _jaxprs_in(params)]
        if name == "cond":
            branches = sorted(branches, key=lambda counts: counts["flops"])[-1:]
        for each in branches:
            counts.update(each)
    return counts


def _turns(name: str, params: dict[str, Any]) -> int:
    return params["length"] if name == "scan" else 1


def _jaxprs_in(params: dict[str, Any]) -> list[Jaxpr]:
    values = [each for value in params.values() for each in (value if isinstance(value, tuple | list) else (value,))]
    found = [each for each in values if isinstance(each, ClosedJaxpr | Jaxpr)]
    return [each.jaxpr if isinstance(each, ClosedJaxpr) else each for each in found]


def _split_share(whole: _Counts, split: _Counts, size: int) -> float:
    """The share of operations that so many devices split, from what one of them computes."""
    if not whole["flops"]:
        return 0.0
    return min(max((1 - split["flops"] / whole["flops"]) * size / (size - 1), 0.0), 1.0)


def _traffic_of(counts: _Counts, x_bytes: float) -> tuple[AxisTraffic, ...]:
    kinds = {name[0] for name in counts if name != "flops"}
    return tuple(
        AxisTraffic(kind, counts[kind, "times"], counts[kind, "bytes"] / x_bytes)
        for kind in sorted(kinds)
        if counts[kind, "bytes"] > 0
    )
