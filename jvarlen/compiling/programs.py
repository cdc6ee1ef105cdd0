"""The programs of a step: one a bucket, or one a bucket for each pass and one that ends the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jvarlen._common.checks import UserError
from jvarlen._common.pytree import describe, have_same_containers, leaves_by_name
from jvarlen._common.types import Batch, PyTree, Shapes
from jvarlen.planning.buckets import AnyBucket

__all__ = ["LOSS", "UPDATE", "ProgramKey", "Step", "StepPart", "check_same", "gradients_of", "with_mark"]

Step: TypeAlias = Callable[[PyTree, Batch], tuple[PyTree, PyTree]]
"""`step(state, batch) -> (state, metrics)`."""


class StepPart(NamedTuple):
    """A program of a step by halves beside the first pass over each bucket."""

    name: Literal["gradients", "loss", "update"]
    bucket: AnyBucket | None = None  # of "gradients"

    def __str__(self) -> str:
        return self.name if self.bucket is None else f"{self.bucket} {self.name}"


LOSS, UPDATE = StepPart("loss"), StepPart("update")

ProgramKey: TypeAlias = AnyBucket | StepPart
"""A bucket stands for its step, or for the pass over its groups that comes first."""


def gradients_of(bucket: AnyBucket) -> StepPart:
    """The second pass over the groups of a bucket."""
    return StepPart("gradients", bucket)


def with_mark(accumulate: Callable[..., PyTree]) -> Callable[..., tuple[PyTree, jax.Array]]:
    """The same with a number beside the sums, which tells when it has ended: sums are donated to the next program."""
    return lambda *args: (accumulate(*args), jnp.int8(0))


def check_same(name: str, what: str, given: Shapes, returned: PyTree) -> None:
    """Raises ValueError, with the leaves that differ, unless a function returns the shapes that it is given."""
    by_name = [
        {at: describe(jax.typeof(leaf)) for at, leaf in leaves_by_name(tree).items()} for tree in (given, returned)
    ]
    changed = [at for at in {**by_name[0], **by_name[1]} if by_name[0].get(at) != by_name[1].get(at)]
    if changed or not have_same_containers(given, returned):
        listed = "; ".join(f"{at or 'it'}: {by_name[0].get(at)} -> {by_name[1].get(at)}" for at in changed[:5])
        raise UserError(f"{name} returns {what}: {listed or 'its containers differ'}")
