"""Names of the pytrees that users bring: any structure of arrays, each with one meaning."""

from typing import Any, TypeAlias

__all__ = ["Array", "Batch", "Extra", "Grads", "Microbatch", "OptState", "Params", "PyTree", "Specs", "Sums"]

PyTree: TypeAlias = Any
"""Any pytree, where none of the names below says more."""

Array: TypeAlias = Any
"""An array of NumPy or JAX, concrete or traced, or a scalar that becomes one."""

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
