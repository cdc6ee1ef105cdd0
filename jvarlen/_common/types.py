"""Names of types that several packages share, most of them pytrees: any structure of arrays, each with one meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

__all__ = [
    "Array", "AttentionImplementation", "Batch", "Extra", "Grads", "Json", "JsonObject", "Key", "KeyPath",
    "Microbatch", "OptState", "Params", "PyTree", "Shapes", "Shardings", "Specs", "StepHalves", "Sums",
]  # fmt: skip

AttentionImplementation = Literal["auto", "blocks", "xla", "triton", "cudnn", "splash"]
"""What computes attention, as `jvarlen.attend` explains."""

PyTree: TypeAlias = Any
"""Any pytree, where none of the names below says more."""

Array: TypeAlias = Any
"""An array of NumPy or JAX, concrete or traced, or a scalar that becomes one."""

Key: TypeAlias = Array
"""A typed random key of JAX, or None."""

KeyPath: TypeAlias = tuple[Any, ...]
"""The path of a leaf in a pytree, as `jax.tree.leaves_with_path` has it."""

Shapes: TypeAlias = PyTree
"""A `jax.ShapeDtypeStruct` for each leaf of another tree."""

Params: TypeAlias = PyTree
"""The parameters of a model."""

Grads: TypeAlias = PyTree
"""Gradients: the structure of the parameters."""

OptState: TypeAlias = PyTree
"""The state of an Optax optimizer."""

Extra: TypeAlias = PyTree
"""Mutable state of a model that is not parameters, such as running statistics."""

Batch: TypeAlias = PyTree
"""The batch of a step: arrays `[M, B, ...]`, M microbatches of B rows."""

Microbatch: TypeAlias = PyTree
"""One microbatch: arrays `[B, ...]`."""

Sums: TypeAlias = PyTree
"""Named sums of a loss over the rows of a microbatch, or over a step."""

Specs: TypeAlias = PyTree
"""A `PartitionSpec` for each leaf of another tree."""

Shardings: TypeAlias = PyTree
"""A `jax.sharding.Sharding` for each leaf of another tree."""

Json: TypeAlias = Any
"""A value of JSON."""

JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, such as a line of `metrics.jsonl`."""


class StepHalves(NamedTuple):
    """A step over groups in programs of their own: sums begin at zeros, each group adds to them, one update ends it.

    Attributes:
      zeros: `zeros(state, batch, most_rows) -> sums`, from arrays or shapes of the state and of a group, placed where
        sums are between groups; `most_rows`, of a step, is for a loss of the whole step.
      accumulate: `accumulate(state, batch, sums) -> sums`, for each group.
      update: `update(state, sums) -> (state, metrics)`.
      between: for a loss of the whole step, `between(state, sums) -> sums`, after `accumulate` of all groups; the sums
        may have other arrays from there on.
      accumulate_again: `accumulate_again(state, batch, sums) -> sums`, for each group once more, after `between`.
      holds_rows: `holds_rows(state, batch) -> bool`, whether sums have room for `most_rows` rows of a step, and no
        more; None: for any number.
    """

    zeros: Callable[[Any, Batch, int], PyTree]
    accumulate: Callable[[Any, Batch, PyTree], PyTree]
    update: Callable[[Any, PyTree], tuple[Any, PyTree]]
    between: Callable[[Any, PyTree], PyTree] | None = None
    accumulate_again: Callable[[Any, Batch, PyTree], PyTree] | None = None
    holds_rows: Callable[[Any, Batch], bool] | None = None
