"""Learning rates of every step, in float64 on the host: base(how far training has come) × rule(batch size / base size).

Letters: S steps of all plans.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, Literal, NamedTuple, cast, get_args

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, check_choices, is_number, list_offenders
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Array, PyTree
from jvarlen.planning.steps import StepPlan

__all__ = [
    "BaseSchedule", "BatchSizeUnit", "BatchSizes", "Rule", "ScheduleUnit", "StepsOfRun", "apply_rule", "base_rates",
    "before_each", "beta_sequence", "check_beta", "counted_sizes", "lr_scale", "lr_sequence", "step_sizes",
    "table_size",
]  # fmt: skip

_LEAST_TABLE = 2**14  # entries: trainings of fewer steps share what is compiled

Rule = Literal["linear", "sqrt"] | Callable[[Array], Array] | None
BatchSizes = StepPlan | Iterable[StepPlan | int] | npt.ArrayLike  # a plan, or several, or the sizes themselves
BaseSchedule = float | npt.ArrayLike | Callable[[Array], Array]
BatchSizeUnit = Literal["sequences", "tokens"]
ScheduleUnit = Literal["steps", "sequences", "tokens"]


class StepsOfRun(NamedTuple):
    """Every step of a whole run."""

    num_sequences: Int64[np.ndarray, " S"]
    """int64[S], real samples."""
    num_tokens: Int64[np.ndarray, " S"]
    """int64[S], real tokens."""
    learning_rates: Float64[np.ndarray, " S"]
    """float64[S], the rates in force."""


@check_keywords
def lr_scale(batch_size: npt.ArrayLike, base_batch_size: float, rule: Rule = "linear") -> PyTree:
    """The factor on the learning rate for a batch size.

    Args:
      batch_size: number or array ≥ 0, in sequences (or in tokens, if `base_batch_size` is).
      base_batch_size: the batch size that the base rate was tuned for, > 0, in the same unit.
      rule: `"linear"`, `"sqrt"`, None (no scaling), or a function from the ratio, float64 of the shape of `batch_size`,
        to scales of the same shape.

    Returns:
      float64 of the shape of `batch_size`.

    Raises:
      ValueError: an unknown rule, a negative or NaN batch size, a base batch size that is not positive; a function
        whose scales have another shape, are negative or not finite.

    Example:
      >>> float(lr_scale(1024, 256, "sqrt"))
      2.0

    References:
      Linear: Goyal et al. 2017, "Accurate, Large Minibatch SGD". Square root: Krizhevsky 2014, "One weird trick", and
      for Adam Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms".
    """
    is_scalar = is_number(base_batch_size) or (hasattr(base_batch_size, "dtype") and np.shape(base_batch_size) == ())
    if not is_scalar or not 0 < base_batch_size < math.inf:
        raise UserError(f"base_batch_size must be a finite number above 0, not {base_batch_size!r}")
    sizes = np.asarray(batch_size, np.float64)
    _check_not_negative("batch sizes", sizes)
    with _in_float64() if callable(rule) else contextlib.nullcontext():  # tables of numbers do without JAX
        scales = np.asarray(apply_rule(np, sizes / float(base_batch_size), rule), np.float64)
    if scales.shape != sizes.shape:
        raise UserError(f"rule must give each ratio a scale: {sizes.shape} ratios, scales of shape {scales.shape}")
    _check_not_negative("scales that rule gives", scales)
    return scales[()]


@check_keywords
def lr_sequence(
    plan: BatchSizes,
    base_schedule: BaseSchedule,
    base_batch_size: float,
    *,
    rule: Rule = "linear",
    unit: BatchSizeUnit = "sequences",
    counted_in: ScheduleUnit = "steps",
) -> Float64[np.ndarray, " S"]:
    """The learning rate of every step of a plan, in float64 on the host.

    Args:
      plan: a plan; or several, one an epoch, over which all counts continue; or, without a plan, integers[S], the batch
        size of every step in `unit`. S steps in all.
      base_schedule: a number, an array of S rates, or a function of how far training has come, such as an Optax
        schedule (evaluated in float64 here).
      base_batch_size: the batch size that the base rate was tuned for, in `unit` a step.
      rule: as in `lr_scale`.
      unit: what the batch size counts: real `"sequences"` or real `"tokens"`.
      counted_in: what the argument of the function counts: `"steps"`, or the real `"sequences"` or `"tokens"` of the
        steps before. Warm-up and decay are then given in that unit, whatever the size of steps.

    Returns:
      float64[S].

    Raises:
      ValueError: an array of rates that does not have S entries, or that comes with another count than steps; batch
        sizes that are not integers, or that are to be counted in another unit than theirs; tokens of a plan whose
        `size` is not their sum, which steps on devices count; arguments that `lr_scale` rejects.

    Example:
      >>> from jvarlen.planning.make_plan import make_plan
      >>> plan = make_plan([3] * 14, [(10, 3)], order="length")
      >>> lr_sequence(plan, 1e-3, 2).tolist()
      [0.005, 0.002]
      >>> lr_sequence([plan, plan], lambda seen: 1.0 + seen, 1, rule=None, counted_in="sequences").tolist()
      [1.0, 11.0, 15.0, 25.0]

    References:
      Over samples: Smith et al. 2018, "Don't Decay the Learning Rate, Increase the Batch Size".
    """
    counted, sizes = counted_sizes(plan, unit, counted_in)
    if counted_in != "steps" and not callable(base_schedule) and np.ndim(base_schedule):
        raise UserError(
            f"base_schedule is an array, one rate a step: it cannot be counted in {counted_in}; give a function of them"
        )
    return base_rates(base_schedule, before_each(counted)) * lr_scale(sizes, base_batch_size, rule)


@check_keywords
def beta_sequence(
    plan: BatchSizes,
    beta: float,
    base_batch_size: float,
    *,
    unit: BatchSizeUnit = "sequences",
) -> Float64[np.ndarray, " S"]:
    """What each step of `adamw_by_batch_size` keeps of a moment: beta ** (batch size / base_batch_size).

    Args:
      plan: as in `lr_sequence`.
      beta: what a step of `base_batch_size` keeps, at least 0 and below 1.
      base_batch_size: the batch size that beta was chosen for, > 0, in `unit` a step.
      unit: as in `lr_sequence`.

    Returns:
      float64[S], on the host; 1 for a batch of nothing.

    Raises:
      ValueError: a beta out of its range; plans and batch sizes that `lr_sequence` rejects.

    Example:
      >>> beta_sequence([1, 2, 4, 0], 0.25, 2).tolist()
      [0.5, 0.25, 0.0625, 1.0]

    References:
      Marek et al. 2025, "Small Batch Size Training for Language Models".
    """
    check_beta("beta", beta)
    _, sizes = counted_sizes(plan, unit)
    return np.float64(beta) ** lr_scale(sizes, base_batch_size)


def check_beta(name: str, beta: object) -> None:
    """Raises ValueError unless it is a share that a moment may keep."""
    if not (is_number(beta) and 0 <= beta < 1):
        raise UserError(f"{name} ({beta!r}) must be a number, at least 0 and below 1")


def counted_sizes(
    plan: BatchSizes, unit: BatchSizeUnit, counted_in: ScheduleUnit = "steps"
) -> tuple[Int64[np.ndarray, " S"], Int64[np.ndarray, " S"]]:
    """The size of every step in the unit that a schedule counts, and in that of batch sizes."""
    check_choices(unit=(unit, BatchSizeUnit), counted_in=(counted_in, ScheduleUnit))
    given = _batch_sizes(plan)
    sizes = step_sizes(cast("StepPlan", plan)) if given is None else {"steps": np.ones_like(given), unit: given}
    if given is None and not {unit, counted_in} <= sizes.keys():
        raise UserError(
            "a plan whose size is not the sum does not count tokens, as steps on devices do: count sequences, or "
            "give batch sizes in place of the plan, such as plan.num_tokens"
        )
    if counted_in not in sizes:
        raise UserError(f"batch sizes in {unit} do not tell {counted_in}: counted_in must be 'steps' or {unit!r}")
    return sizes[counted_in], sizes[unit]


def _batch_sizes(plan: Any) -> Int64[np.ndarray, " S"] | None:
    """Batch sizes that were given in place of a plan."""
    is_list = isinstance(plan, list | tuple) and len(plan) > 0 and is_number(plan[0])
    if not is_list and not hasattr(plan, "dtype"):
        return None
    sizes = np.asarray(plan)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or not len(sizes):
        raise UserError(f"batch sizes must be integers[S], one a step, not {sizes.dtype} of shape {sizes.shape}")
    return sizes.astype(np.int64)


def step_sizes(plan: StepPlan | Iterable[StepPlan]) -> dict[str, Int64[np.ndarray, " S"]]:
    """The size of every step of one plan or several, in each unit that all of them count: steps, sequences, tokens."""
    plans = plan if isinstance(plan, Iterable) else [plan]
    # Only the sizes are kept: the plans of many epochs need not be in memory together.
    try:
        sizes = [
            (np.ones(each.num_steps, np.int64), each.num_sequences)
            + ((each.num_tokens,) if getattr(each, "size", "sum") == "sum" else ())
            for each in plans
        ]
    except AttributeError as error:
        raise UserError(f"plan must be a plan or several of them: {error}") from error
    if not sizes:
        raise UserError("plan is empty: it must be a plan, several of them, or batch sizes")
    columns = (np.concatenate(column) for column in zip(*sizes, strict=False))
    return dict(zip(get_args(ScheduleUnit), columns, strict=False))


def before_each(sizes: Int64[np.ndarray, " S"]) -> Int64[np.ndarray, " S"]:
    """The exact total of the steps before each step."""
    return np.cumsum(sizes) - sizes


def base_rates(base_schedule: BaseSchedule, counts: Int64[np.ndarray, " S"]) -> Float64[np.ndarray, " S"]:
    """The base rate at every count, before any scaling by batch size: float64[S]. An array gives all its rates."""
    if not callable(base_schedule):
        rates = np.asarray(base_schedule)
        if rates.dtype.kind not in "iuf":
            raise UserError(f"base_schedule must be a rate, an array of rates or a function, not {base_schedule!r}")
        rates = rates.astype(np.float64)
    else:
        import jax

        with _in_float64():
            try:
                jax.eval_shape(base_schedule, jax.ShapeDtypeStruct((), np.int64))
            except TypeError:  # it converts the count to a Python number, which JAX cannot trace
                rates = np.array([float(base_schedule(count)) for count in counts.tolist()])
            else:
                padded = np.pad(counts, (0, table_size(len(counts)) - len(counts)), mode="edge")
                rates = np.asarray(jax.vmap(base_schedule)(padded), np.float64)[: len(counts)]
    if rates.shape not in ((), counts.shape):
        raise UserError(f"base_schedule has shape {rates.shape}, the plan {len(counts)} steps")
    return np.broadcast_to(rates, counts.shape).copy()


@contextlib.contextmanager
def _in_float64() -> Iterator[None]:
    """A block in which users' functions, such as Optax schedules, are evaluated immediately, in float64."""
    import jax

    with jax.enable_x64(True), jax.ensure_compile_time_eval():
        yield


def table_size(num_steps: int) -> int:
    """Entries of a table of rates: a power of two, so that programs need few shapes."""
    return max(_LEAST_TABLE, 1 << (num_steps - 1).bit_length())


def apply_rule(numpy: ModuleType, ratio: Array, rule: Rule) -> PyTree:
    """The scale at a ratio, computed by `numpy`, which is NumPy or its JAX counterpart."""
    rules = {"linear": lambda ratio: ratio, "sqrt": numpy.sqrt, None: numpy.ones_like}
    chosen = rule if callable(rule) else rules.get(rule)
    if chosen is None:
        raise UserError(f'rule must be "linear", "sqrt", None or a function of the ratio, not {rule!r}')
    return chosen(ratio)


def _check_not_negative(what: str, values: Float64[np.ndarray, " *shape"]) -> None:
    wrong = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(wrong):
        raise UserError(f"{what} must be finite and at least 0: {list_offenders(wrong, values.ravel()[wrong], 0)}")
