"""The operations and the communication of a microbatch of a model, counted from its traced functions.

Letters: K buckets, L layers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Generic, Literal, NamedTuple, TypeVar

import jax
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Float64

from jvarlen._common.checks import UserError
from jvarlen._common.jaxprs import OperationCounts, count_operations
from jvarlen._common.types import Array, Extra, Key, Microbatch, Params, PyTree, Shapes, Specs
from jvarlen.batches.batches import token_batch_spec
from jvarlen.batches.shapes import BatchSpec
from jvarlen.distributed.layout import Layout, Remat
from jvarlen.distributed.mesh import axes_in
from jvarlen.estimates.cluster import Kind
from jvarlen.estimates.layout_table import REMATS
from jvarlen.estimates.memory import StepShapes, bytes_of, local_shape
from jvarlen.parallel.context import CONTEXT_AXIS
from jvarlen.parallel.layers import Axes, LayeredModel, axes_of, layered_loss_fn, num_layers_of
from jvarlen.parallel.passes import floats_of, split_passes
from jvarlen.parallel.sharded_step import model_on_axes
from jvarlen.parallel.state_layout import other_specs_of
from jvarlen.parallel.tensor import TENSOR_AXIS, partition_specs
from jvarlen.planning.buckets import Bucket
from jvarlen.training.losses import LossFn, bind_loss
from jvarlen.training.train_state import TrainState
from jvarlen.training.trainable import Trainable, merge_trained, where_trained

__all__ = ["Axis", "AxisTraffic", "ModelCosts", "PerPass", "Traffic", "Work", "count_costs"]

_MOST_LENGTHS = 3  # that are traced; operations a token grow evenly between them, and beyond
_LONGEST_TRACED = 1024

_ONE_DEVICE = Layout(data=1)
_AXES = TENSOR_AXIS, CONTEXT_AXIS

Axis = Literal["tensor", "sequence_parallel", "context", "shared_heads"]


_T = TypeVar("_T")


class PerPass(NamedTuple, Generic[_T]):
    """A value for each pass of a microbatch."""

    forward: _T
    backward: _T
    selective: _T  # of what runs again in the backward pass, with `remat_selective`
    full: _T  # and with `remat_full`


class Work(NamedTuple, Generic[_T]):
    """What kernels do in one pass, as float64[K], or a number for each."""

    flops: _T  # of products of matrices
    attention: _T  # operations of attention
    num_bytes: _T  # that elementwise kernels read and write
    kernels: _T  # how many there are


Traffic = PerPass[tuple["AxisTraffic", ...]]


class AxisTraffic(NamedTuple):
    """Collectives of one kind over an axis in one pass."""

    kind: Kind
    times: float
    num_bytes: float  # of all their arrays, in units of the bytes of x, the activations between layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """The costs of a microbatch of each bucket on one device, and how they divide.

    Attributes:
      buckets: the K buckets.
      num_layers: L; 0 for a loss function, which is known only as a whole.
      layer: the work of one layer in each pass.
      ends: the work before and after the layers.
      layer_split: the shares of a layer's work that "tensor" splits, in each pass.
      ends_split: the shares of the work of the ends.
      x_bytes: float64[K], activations between layers.
      layer_traffic: collectives of one layer, by axis and pass; those by which several devices of "tensor" share a
        head are under "shared_heads".
      ends_traffic: collectives of the ends.
      layer_params: parameters of one layer: those that "tensor" does not split, and those that it does.
      ends_params: parameters of the ends, divided in the same way.
      layer_trained: the trained parameters of one layer.
      ends_trained: the trained parameters of the ends.
      param_bytes: of a parameter. Gradients have 4 bytes at least.
      tensor_sizes: sizes of the axis "tensor" that divide the model, of those that were asked for.
      by_positions: whether rows can be spread over "context".
      shared_heads: heads that more devices of "tensor" than these share; 0 if there are none.
      uneven_stages: whether stages may have different numbers of layers, as the model says how many it has.
    """

    buckets: tuple[Bucket, ...]
    num_layers: int
    layer: PerPass[Work[np.ndarray]]
    ends: PerPass[Work[np.ndarray]]
    layer_split: PerPass[Work[float]]
    ends_split: PerPass[Work[float]]
    x_bytes: Float64[np.ndarray, " K"]
    layer_traffic: dict[Axis, Traffic]
    ends_traffic: dict[Axis, Traffic]
    layer_params: tuple[int, int]
    ends_params: tuple[int, int]
    layer_trained: tuple[int, int]
    ends_trained: tuple[int, int]
    param_bytes: float
    tensor_sizes: tuple[int, ...]
    by_positions: bool
    shared_heads: int = 0
    uneven_stages: bool = True

    @property
    def step_flops(self) -> Float64[np.ndarray, " K"]:
        """Operations of a microbatch, forward and backward, without recomputation: those that MFU counts."""
        of_parts = (self.num_layers, self.layer), (1, self.ends)
        passes = [(times, each) for times, part in of_parts for each in (part.forward, part.backward)]
        return np.add.reduce([times * (each.flops + each.attention) for times, each in passes])


def count_costs(
    model: LayeredModel | LossFn,
    buckets: Sequence[Bucket],
    *,
    params: Params,
    batch_spec: BatchSpec = token_batch_spec,
    tensor_sizes: Sequence[int] = (),
    trainable: Trainable = None,
    extra: Extra = None,
) -> ModelCosts:
    """Counts matrix products and collectives of a model, by tracing it. Nothing is compiled or computed.

    Args:
      model: as for `make_train_step`.
      buckets: rows and length of microbatches.
      params: pytree of arrays or `jax.ShapeDtypeStruct`, as for `TrainStep.init`.
      batch_spec: as for `compile_buckets`.
      tensor_sizes: sizes of the axis "tensor" to try.
      trainable: as for `make_train_step`.
      extra: as for `TrainStep.init`.

    Returns:
      The costs. Loops with a number of turns that depends on values count once. `attend` counts as in full rows of one
      sample, half of the pairs of tokens where it is causal, whatever computes it.
    """
    traced = _Traced(StepShapes.of_model(model, params, trainable=trainable, extra=extra, batch_spec=batch_spec))
    layer, ends = _work_of(traced, buckets)
    if not (layer.forward.flops + ends.forward.flops).all():
        raise UserError("no products of matrices were found in this model: its steps cannot be predicted")
    tensor_sizes = tuple(size for size in tensor_sizes if traced.takes_tensor(size))
    split_size = next((size for size in tensor_sizes if size > 1), 1)
    # A length that all these divide. Communicated arrays are as long as the rows.
    bucket = Bucket(buckets[0].rows, -(-buckets[0].length // (4 * split_size)) * 4 * split_size)
    on_axes, x_bytes = traced.on_axes(bucket, split_size), traced.x_bytes(bucket)
    layer_traffic, ends_traffic = (
        {axis: Traffic(*(_traffic_of(counts, x_bytes) for counts in parts[i])) for axis, parts in on_axes.items()}
        for i in (0, 1)
    )
    layer_split = ends_split = PerPass(*[Work(0.0, 0.0, 0.0, 0.0)] * 4)
    if "tensor" in on_axes:
        layer_split, ends_split = (
            PerPass(*(_split_shares(one, split, split_size) for one, split in zip(*pair, strict=True)))
            for pair in zip(traced.passes(bucket, "data1"), on_axes["tensor"], strict=True)
        )
    beyond = next((size for size in tensor_sizes if traced.shared_heads < size), 1)
    if traced.shared_heads and beyond > split_size:
        pair = zip(traced.passes(bucket, f"data1.tensor{beyond}")[0], on_axes["tensor"][0], strict=True)
        layer_traffic["shared_heads"] = Traffic(*(_traffic_of(_minus(*counts), x_bytes) for counts in pair))
    params = traced.step.params
    layer_params, ends_params = traced.num_params(params)
    layer_trained, ends_trained = traced.num_params(traced.step.trained_of(params))
    leaves = jax.tree.leaves(params)
    return ModelCosts(
        buckets=tuple(buckets),
        num_layers=traced.num_layers,
        layer=layer,
        ends=ends,
        layer_split=layer_split,
        ends_split=ends_split,
        x_bytes=np.array([traced.x_bytes(bucket) for bucket in buckets], np.float64),
        layer_traffic=layer_traffic,
        ends_traffic=ends_traffic,
        layer_params=layer_params,
        ends_params=ends_params,
        layer_trained=layer_trained,
        ends_trained=ends_trained,
        param_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / sum(leaf.size for leaf in leaves),
        tensor_sizes=tensor_sizes,
        by_positions="context" in on_axes,
        shared_heads=traced.shared_heads,
        uneven_stages=getattr(model, "num_layers", None) is not None,
    )


def _work_of(traced: _Traced, buckets: Sequence[Bucket]) -> tuple[PerPass[Work[np.ndarray]], PerPass[Work[np.ndarray]]]:
    """The work of one layer and of the ends in every bucket, from that of a few lengths."""
    rows, lengths = np.array(buckets).T
    short = np.unique(lengths)
    short = short[: max(int(np.sum(short <= _LONGEST_TRACED)), 2)]
    known = short[np.unique(np.linspace(0, len(short) - 1, _MOST_LENGTHS).round().astype(int))]
    of_length = {bucket.length: bucket for bucket in reversed(buckets)}
    per_token = []  # [known lengths, 2, 4, 4]
    for bucket in map(of_length.__getitem__, known.tolist()):
        sizes = np.array([*[bucket.padded_tokens] * 3, 1])  # as many kernels in all buckets
        per_token.append([[_work_in(counts) / sizes for counts in part] for part in traced.passes(bucket, "data1")])

    def in_buckets(values: np.ndarray) -> Float64[np.ndarray, " K"]:
        """Between known lengths, and beyond the last by the slope before it."""
        at = np.interp(lengths, known, values)
        if len(known) > 1:
            at += (values[-1] - values[-2]) / (known[-1] - known[-2]) * np.maximum(lengths - known[-1], 0)
        return at

    def work(of_pass: np.ndarray) -> Work[np.ndarray]:
        *of_tokens, kernels = map(in_buckets, of_pass)
        return Work._make([*(rows * lengths * each for each in of_tokens), kernels])

    layer, ends = (PerPass(*map(work, of_part)) for of_part in np.moveaxis(np.array(per_token), 0, -1))
    return layer, ends


def _work_in(counts: OperationCounts) -> np.ndarray:
    attention = counts["attention"]
    return np.array([counts["flops"] - attention, attention, counts["bytes"], counts["kernels"]], np.float64)


_Counts = PerPass[OperationCounts]


class _Traced:
    """A model whose passes are traced for one layer and for two, whose difference is the cost of one."""

    def __init__(self, step: StepShapes):
        self.step = step
        self._layered = step.model if isinstance(step.model, LayeredModel) else None
        self.num_layers = num_layers_of(step.params) if self._layered else 0
        self.passes = functools.cache(self._passes)

    @property
    def shared_heads(self) -> int:
        """The fewest heads that devices of "tensor" may share; 0 if there are none."""
        specs = jax.tree.leaves(None if self._layered is None else self._layered.specs)
        return min((each.num_heads or 0 for each in specs if getattr(each, "shares_heads", False)), default=0)

    def takes_tensor(self, size: int) -> bool:
        """Whether "tensor" of this size divides the model."""
        if size == 1:
            return True
        if self._layered is None or self._layered.specs is None:
            return False
        try:
            self._count(Layout(data=1, tensor=size), Bucket(1, 8), 1, with_grads=False)
        except ValueError:  # of JAX as well, for sizes that the model cannot split
            return False
        return True

    def _passes(self, bucket: Bucket, text: str) -> tuple[_Counts, _Counts]:
        """Counts of one layer and of the ends, on a layout."""
        layout = Layout.parse(text)
        none: OperationCounts = OperationCounts()

        def both(*, with_grads: bool) -> tuple[OperationCounts, OperationCounts]:
            if not self.num_layers:
                return none, self._count(layout, bucket, None, with_grads=with_grads)
            one, two = (self._count(layout, bucket, num_layers, with_grads=with_grads) for num_layers in (1, 2))
            layer = _minus(two, one)
            return layer, _minus(one, layer)

        again = [none, none]
        if self.num_layers:
            of_layer = _OneMicrobatch(self.step.split(layout), layout, bucket, 1)
            kept, *others = (count_operations(of_layer.layer_jaxpr(remat), _AXES) for remat in REMATS)
            again = [_minus(each, kept) for each in others]
        layer, ends = (
            PerPass(forward, _minus(with_grads, forward), *of_again)
            for forward, with_grads, of_again in zip(
                both(with_grads=False), both(with_grads=True), (again, [none, none]), strict=True
            )
        )
        return layer, ends

    def on_axes(self, bucket: Bucket, split_size: int) -> dict[Axis, tuple[_Counts, _Counts]]:
        """The counts on each axis that takes the model: on `split_size` devices of "tensor", and 2 of "context"."""
        split = f"data1.tensor{split_size}"
        texts: dict[Axis, str] = {}
        if split_size > 1:
            texts |= {"tensor": split, "sequence_parallel": f"{split}.sequence_parallel"}
        if self._layered is not None and self._layered.by_positions:
            texts["context"] = "data1.context2"
        found = {}
        for axis, text in texts.items():
            with contextlib.suppress(ValueError):  # also of JAX, such as for layers that cannot be split
                found[axis] = self.passes(bucket, text)
        return found

    def x_bytes(self, bucket: Bucket) -> int:
        """Bytes of the activations between layers; 0 without layers."""
        return _OneMicrobatch(self.step.split(_ONE_DEVICE), _ONE_DEVICE, bucket).x_bytes() if self.num_layers else 0

    def num_params(self, params: Shapes) -> tuple[tuple[int, int], tuple[int, int]]:
        """Parameters of one layer and of the ends, each without and with those that "tensor" splits."""
        if self._layered is None:
            return (0, 0), (sum(leaf.size for leaf in jax.tree.leaves(params)), 0)
        specs = jax.tree.map(lambda _: PartitionSpec(), self.step.params)
        if self._layered.specs is not None:
            specs = partition_specs(self._layered.specs)
        specs = where_trained(params, specs)

        def count(part: Shapes, specs: Specs, num_layers: int = 1) -> tuple[int, int]:
            pairs = list(zip(jax.tree.leaves(part), jax.tree.leaves(specs), strict=True))
            split = sum(leaf.size for leaf, spec in pairs if TENSOR_AXIS in axes_in(spec))
            return (sum(leaf.size for leaf, _ in pairs) - split) // num_layers, split // num_layers

        return count(params.layers, specs.layers, self.num_layers), count(params.ends, specs.ends)

    def _count(self, layout: Layout, bucket: Bucket, num_layers: int | None, *, with_grads: bool) -> OperationCounts:
        microbatch = _OneMicrobatch(self.step.split(layout), layout, bucket, num_layers)
        return count_operations(microbatch.jaxpr(with_grads=with_grads), _AXES)


class _OneMicrobatch:
    """A microbatch of a bucket on one device of a layout, to be traced."""

    def __init__(self, step: StepShapes, layout: Layout, bucket: tuple[int, ...], num_layers: int | None = None):
        """`step` has parameters that are split for "tensor"; None: all of their layers."""
        batch = step.batch(bucket, 1)
        self._microbatch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) if leaf.shape else leaf, batch
        )
        self._layout = layout
        self._model = model_on_axes(step.model, layout, step.params, batch)[0]
        self._params = step.params
        if (other_specs := other_specs_of(step.params, step.model, layout)) is not None:

            def on_device(leaf: Array, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
                return jax.ShapeDtypeStruct(local_shape(leaf.shape, spec, layout), leaf.dtype)

            self._params = jax.tree.map(on_device, self._params, other_specs)
        if num_layers is not None:
            layers = jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct((num_layers, *leaf.shape[1:]), leaf.dtype), self._params.layers
            )
            self._params = self._params._replace(layers=layers)
        self._trained = step.trained_of(self._params)
        self._key = jax.eval_shape(lambda: jax.random.key(0))  # from which layers may draw masks
        self._extra = step.extra

    def jaxpr(self, *, with_grads: bool) -> Jaxpr:
        """The loss, or its gradient, as a device computes it without stages."""
        loss_fn = self._model
        if isinstance(loss_fn, LayeredModel):
            loss_fn = layered_loss_fn(loss_fn)

        def loss(params: Params, microbatch: Microbatch, key: Key, extra: Extra) -> PyTree:
            return bind_loss(loss_fn, TrainState(None, None, extra=extra, key=key))(params, microbatch, key)

        def grads(params: Params, *others: PyTree) -> PyTree:
            trained = where_trained(self._trained, params)
            loss_sum, pull, sums = jax.vjp(
                lambda trained: loss(merge_trained(trained, params), *others), trained, has_aux=True
            )
            return pull(jax.numpy.ones_like(loss_sum)), loss_sum, sums

        return self._on_device(grads if with_grads else loss)

    def layer_jaxpr(self, remat: Remat) -> Jaxpr:
        """The input of one layer and its two passes, as steps run them."""
        model = self._model
        assert isinstance(model, LayeredModel)

        def both(params: Params, microbatch: Microbatch, key: Key, _: Extra) -> PyTree:
            def run(trained: Params, x: PyTree, layer: Params, microbatch: Microbatch, key: Key) -> PyTree:
                return model.layer(merge_trained(trained, layer), x, microbatch, axes_of(key, 0, jax.numpy.int32(0)))

            x = jax.tree.map(jax.numpy.asarray, model.embed(params.ends, microbatch, axes_of(key, 1)))
            layer, trained = (
                jax.tree.map(lambda leaf: leaf[0], each.layers)
                for each in (params, where_trained(self._trained, params))
            )
            passes = split_passes(run, trained, x, layer, microbatch, key, remat=remat)
            y, residuals = passes.forward(trained, x, layer, microbatch, key)
            return passes.backward(trained, residuals, floats_of(y), layer, microbatch, key)

        return self._on_device(both)

    def _on_device(self, call: Callable[..., PyTree]) -> Jaxpr:
        sizes, whole = self._layout.axis_sizes, PartitionSpec()
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        on_device = jax.shard_map(call, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
        (equation,) = jax.make_jaxpr(on_device)(self._params, self._microbatch, self._key, self._extra).jaxpr.eqns
        return equation.params["jaxpr"]

    def x_bytes(self) -> int:
        """Bytes of the activations between layers."""
        model = self._model
        assert isinstance(model, LayeredModel)

        def embed(ends: Params, microbatch: Microbatch, key: Key) -> PyTree:
            return model.embed(ends, microbatch, Axes(key=key))

        return bytes_of(jax.eval_shape(embed, self._params.ends, self._microbatch, self._key))


def _minus(counts: OperationCounts, others: OperationCounts) -> OperationCounts:
    return OperationCounts({name: counts[name] - others[name] for name in {*counts, *others}})


def _split_shares(whole: OperationCounts, split: OperationCounts, size: int) -> Work[float]:
    """The shares of work that this many devices split, from what one of them does."""
    on_one, on_each = _work_in(whole), _work_in(split)
    left = np.divide(on_each, on_one, out=np.ones_like(on_one), where=on_one > 0)
    return Work(*np.clip((1 - left) * size / (size - 1), 0.0, 1.0).tolist())


def _traffic_of(counts: OperationCounts, x_bytes: float) -> tuple[AxisTraffic, ...]:
    kinds: set[Kind] = {name[0] for name in counts if isinstance(name, tuple)}
    return tuple(
        AxisTraffic(kind, counts[kind, "times"], counts[kind, "bytes"] / x_bytes)
        for kind in sorted(kinds)
        if counts[kind, "bytes"] > 0
    )
