"""Checks that a loss has the same gradient for every split of a step. Letters: M microbatches, B rows of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jvarlen._common.checks import UserError, check_choices, list_first
from jvarlen._common.pytree import check_arrays, leaves_by_name
from jvarlen._common.types import Array, Batch, Extra, Params, PyTree
from jvarlen.batches.batches import mark_padding_rows
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import replicate
from jvarlen.distributed.placement import Placement, place
from jvarlen.training.losses import LossFn, takes_argument
from jvarlen.training.reduction import Shards, sum_over_shards
from jvarlen.training.step_sums import LossProgram
from jvarlen.training.train_state import TrainState, divide_once, new_state

__all__ = [
    "FloatDtype", "Partition", "assert_partition_invariant", "check_comparable", "differences_of", "floats_in",
    "make_step_values",
]  # fmt: skip

_RTOL = {"float64": 1e-12, "float32": 1e-5}
_LIKELY = (
    "loss_fn returns means, and not the sum of loss × weight and the sum of weights; padding rows count (multiply each "
    "loss by a weight that is 0 there); it divides by what is 0 for padding rows, or takes a root of it, which no "
    "weight of 0 undoes in the gradient; the loss of a row depends on the rows beside it, or a term of no row, such as "
    "weight decay, is added once a microbatch; or it computes in float32 inside (then give rtol=1e-5)"
)

FloatDtype = Literal["float64", "float32"]


class Partition(NamedTuple):
    """One way to divide the rows of a step.

    Attributes:
      num_microbatches: of the whole step.
      rows: of each microbatch.
      num_shards: devices that share the microbatches; each accumulates over its share.
      num_padding_rows: rows of zeros that were added to the rows of the batch.
    """

    num_microbatches: int
    rows: int
    num_shards: int = 1
    num_padding_rows: int = 0

    def __str__(self) -> str:
        rows = f"microbatches × rows {self.num_microbatches}×{self.rows}"
        padding = f", padding rows {self.num_padding_rows}" if self.num_padding_rows else ""
        return f"{rows}, shards {self.num_shards}{padding}"


def assert_partition_invariant(
    loss_fn: LossFn,
    params: Params,
    batch: Batch,
    *,
    extra: Extra = None,
    seed: int = 0,
    num_shards: Sequence[int] | None = None,
    dtype: FloatDtype = "float64",
    rtol: float | None = None,
) -> list[Partition]:
    """Asserts that a step has the same loss and gradient however it is split, and that padding rows change nothing.

    The rows of the batch are computed as one microbatch, as every number of microbatches that divides M, and one by
    one, each on every number of shards that divides it. Then with a padding row in every microbatch; with as many
    padding microbatches as real ones, also so that one of two shards holds only these; and with nothing but padding
    rows, which must give 0. For a loss that takes `key` or `extra` the microbatches stay as they are, and only shards
    and padding microbatches vary; the next `extra` must agree as well.

    Use rows of different lengths or weights, and parameters that are not all 0. The check does not see mistakes that
    are the same in every split, such as padding inside a row that has weight or is attended to.

    Args:
      loss_fn: as for `make_train_step`.
      params: pytree of arrays; floats are cast to `dtype`.
      batch: pytree of arrays that begin with axes M and B, or are scalars, with an attribute `num_sequences`, such as a
        `jvarlen.batches.Batch`. Floats are cast to `dtype`. A row of zeros is a padding row.
      extra: for a loss that takes it; floats are cast to `dtype`.
      seed: for a loss that takes `key`.
      num_shards: numbers of shards to try; None tries all for which there are devices, and which divide microbatches.
      dtype: what to compute in; `"float32"` for a loss that takes nothing else, as if a scan begins with float32.
      rtol: the largest difference allowed, for any entry of a sum relative to the largest of this sum, and of the
        gradient to the largest of the whole. None: 1e-12, or 1e-5 in float32. A loss that computes in float32 inside
        needs about 1e-5, in bfloat16 1e-2.

    Returns:
      The splits, which all agree; the first is the one that the others were compared with.

    Raises:
      AssertionError: some splits differ; the message names splits, leaves, values, errors, and likely mistakes.
      ValueError: the batch has no weight, or leaves without those axes; shards without devices, or
        that divide no microbatches; or a loss that `make_train_step` rejects.

    Example:
      >>> from jvarlen.batches import Batch
      >>> def loss_fn(scale, microbatch):
      ...     losses = (scale * microbatch.tokens - 1.0) ** 2
      ...     return (losses * microbatch.weights).sum(), microbatch.weights.sum()
      >>> tokens = np.array([[[3, 1], [2, 0]]])
      >>> lengths, ids = np.array([[2, 1]]), np.array([[0, 1]])
      >>> batch = Batch(tokens, lengths, (tokens > 0) * 1.0, np.float32(2), ids, ids >= 0)
      >>> for split in assert_partition_invariant(loss_fn, 0.5, batch, num_shards=[1]):
      ...     print(split)
      microbatches × rows 1×2, shards 1
      microbatches × rows 2×1, shards 1
      microbatches × rows 1×3, shards 1, padding rows 1
      microbatches × rows 2×2, shards 1, padding rows 2
      microbatches × rows 1×2, shards 1, padding rows 2

    References:
      Unequal microbatches: D. and M. Han 2024, "Bugs in LLM Training - Gradient Accumulation Fix".
    """
    check_arrays(params)
    is_fixed = takes_argument(loss_fn, "key") or takes_argument(loss_fn, "extra")
    with floats_in(dtype, rtol) as (cast, rtol):
        state = new_state(cast(params), optax.identity(), extra=cast(extra), seed=seed)
        batch = jax.tree.map(np.asarray, cast(batch))
        num_microbatches, rows = _leading_axes(batch)
        most = num_microbatches if is_fixed else num_microbatches * rows
        shards = [p for p in range(1, jax.device_count() + 1) if most % p == 0] if num_shards is None else num_shards
        if unfit := [p for p in shards if p < 1 or most % p]:
            raise UserError(f"num_shards {unfit} must be at least 1 and divide {most} microbatches")
        placements = {p: place(Layout(data=p)) for p in {1, *shards}}  # one shard has the axis "data", too
        values_on = {p: make_step_values(loss_fn, state, placement) for p, placement in placements.items()}
        (reference, whole), *others = _splits(batch, num_microbatches, rows, shards, is_fixed=is_fixed)
        expected = values_on[1](whole)
        check_comparable(expected)
        differences = {at: differences_of(values_on[at.num_shards](part), expected, rtol) for at, part in others}
        no_rows = reference._replace(num_padding_rows=reference.num_microbatches * reference.rows)
        empty, nothing = jax.tree.map(np.zeros_like, (whole, expected))
        differences[no_rows] = differences_of(values_on[1](mark_padding_rows(empty)), nothing, rtol)
    if differing := {split: found for split, found in differences.items() if found}:
        raise AssertionError(
            f"the step depends on how it is split: {len(differing)} of {len(differences)} splits differ from "
            f"{reference} (or from 0, if all are padding rows) by more than {rtol:g} relative\n"
            + list_first((f"  {split}: {list_first(found, '; ')}" for split, found in differing.items()), "\n")
            + f"\nlikely: {_LIKELY}"
        )
    return [reference, *differences]


def make_step_values(
    loss_fn: LossFn, state: TrainState, placement: Placement
) -> Callable[[Batch], dict[str, np.ndarray]]:
    """A function of a batch to what a step must not let depend on how rows are laid out, by name."""
    sums_of = sum_over_shards(LossProgram(loss_fn), Shards(mesh=placement.mesh)).whole
    state = replicate(state, placement.mesh)

    @jax.jit
    def step(state: TrainState, batch: Batch) -> dict[str, jax.Array]:
        sums = sums_of(state, batch)
        values = {"loss": sums.loss, "loss_sum": sums.loss_sum, "weight_sum": sums.weight_sum}
        values |= {f"sums{name}": value for name, value in leaves_by_name(sums.sums).items()}
        grads = leaves_by_name(sums.grads)
        values |= {f"gradient{name}": divide_once(grad, sums.weight_sum) for name, grad in grads.items()}
        for i, change in enumerate(sums.extra):
            is_float = jnp.issubdtype(change.dtype, jnp.inexact)
            values[f"change of extra[{i}]"] = divide_once(change, sums.weight_sum) if is_float else change.astype(float)
        return values

    def values_of(batch: Batch) -> dict[str, np.ndarray]:
        return jax.tree.map(np.asarray, step(state, jax.device_put(batch, placement.batch_shardings(batch))))

    return values_of


@contextlib.contextmanager
def floats_in(dtype: FloatDtype, rtol: float | None) -> Iterator[tuple[Callable[[PyTree], PyTree], float]]:
    """A context in which JAX computes in this type, a function that casts floats to it, and `rtol`, or its default."""
    check_choices(dtype=(dtype, FloatDtype))

    def cast(leaf: Array) -> jax.Array:
        array = jnp.asarray(leaf)
        return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array

    with jax.enable_x64(dtype == "float64"):
        try:
            yield lambda tree: jax.tree.map(cast, tree), _RTOL[dtype] if rtol is None else rtol
        except (TypeError, ValueError) as error:  # of a carry, say, that would change its type
            if "float64" in str(error):
                error.add_note('The check computes in float64. For a loss that asks for float32, give dtype="float32".')
            raise


def _leading_axes(batch: Batch) -> tuple[int, int]:
    """M and B; raises ValueError where leaves differ in them."""
    axes = {name: leaf.shape[:2] for name, leaf in leaves_by_name(batch).items() if leaf.ndim}
    if len(set(axes.values())) != 1 or len(next(iter(axes.values()))) != 2:
        raise UserError(
            f"leaves of the batch that are not scalars must begin with the same axes, microbatches and rows: {axes}"
        )
    return next(iter(axes.values()))


def _splits(
    batch: Batch, num_microbatches: int, rows: int, shards: Sequence[int], *, is_fixed: bool
) -> Iterator[tuple[Partition, Batch]]:
    """Every split and its batch; first the whole step as one microbatch or, if their number is fixed, as given."""
    num_rows = num_microbatches * rows

    def split_into(number: int) -> Batch:
        shape = number, num_rows // number
        return jax.tree.map(lambda leaf: leaf.reshape(*shape, *leaf.shape[2:]) if leaf.ndim else leaf, batch)

    def with_padding(microbatches: int, rows: int) -> Batch:
        def pad(leaf: np.ndarray) -> np.ndarray:
            widths = [(0, microbatches), (0, rows)] + [(0, 0)] * (leaf.ndim - 2)
            return np.pad(leaf, widths) if leaf.ndim else leaf

        return mark_padding_rows(jax.tree.map(pad, batch))

    numbers = [num_microbatches]
    if not is_fixed:
        numbers = sorted({n for n in range(1, num_microbatches + 1) if num_microbatches % n == 0} | {num_rows})
    yield Partition(numbers[0], num_rows // numbers[0]), split_into(numbers[0])
    for number in numbers:
        for p in shards:
            if number % p == 0 and (number, p) != (numbers[0], 1):
                yield Partition(number, num_rows // number, p), split_into(number)
    if not is_fixed:
        yield Partition(num_microbatches, rows + 1, num_padding_rows=num_microbatches), with_padding(0, 1)
    for p in sorted({1, 2} & set(shards)) or [1]:
        yield Partition(2 * num_microbatches, rows, p, num_rows), with_padding(num_microbatches, 0)


def check_comparable(expected: dict[str, np.ndarray]) -> None:
    """Raises an error if the expected values are not finite or have no weight."""
    if not_finite := [name for name, leaf in expected.items() if not np.isfinite(leaf).all()]:
        raise AssertionError(f"the step is not finite in {list_first(not_finite, ', ')}")
    if not expected["weight_sum"] > 0:
        raise UserError(f"the weights of the batch add up to {expected['weight_sum']}: there is nothing to compare")


def differences_of(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float) -> list[str]:
    """The entry of each leaf that differs most and is off by more than `rtol`, with its relative error; worst first."""
    # That of a gradient relative to the largest entry of all gradients, any other to the largest entry of its leaf.
    grads = [leaf for name, leaf in expected.items() if name.startswith("gradient")]
    largest_grad = max((np.abs(grad).max(initial=0) for grad in grads), default=0)
    found = []
    for name, leaf in expected.items():
        leaf, other = 1.0 * leaf, 1.0 * got[name]  # constants may be integers and booleans
        difference = np.abs(other - leaf)
        difference = np.where(np.isnan(difference), np.inf, difference)
        scale = largest_grad if name.startswith("gradient") else np.abs(leaf).max(initial=0)
        if not (difference <= rtol * scale).all():
            at = np.unravel_index(np.argmax(difference), leaf.shape)
            where = f"[{', '.join(map(str, at))}]" if at else ""
            error = float(difference[at] / scale) if scale else np.inf
            is_off = f"{name}{where} is {other[at]:.9g}, not {leaf[at]:.9g} (relative error {error:.1e})"
            found.append((-error, is_off))
    return [is_off for _, is_off in sorted(found)]
