"""Names of types that several packages share, most of them pytrees: any structure of arrays, each with one meaning."""

from typing import Any, Literal, TypeAlias

__all__ = [
    "Array", "AttentionImplementation", "Batch", "Extra", "Grads", "Json", "JsonObject", "Key", "KeyPath",
    "Microbatch", "OptState", "Params", "PyTree", "Shapes", "Shardings", "Specs", "Sums",
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
