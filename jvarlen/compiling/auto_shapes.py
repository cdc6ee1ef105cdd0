"""Chooses the number of shapes with which compiling and training together take the least time.

The first run of a model estimates what steps and compiling cost on this machine; each run then writes what it measured
beside its compiled programs. Letters: K shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import timeit
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError
from jvarlen._common.files import load_dataclass, save_dataclass
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen.compiling.lowering import StepCompiler
from jvarlen.compiling.report import CompileReport
from jvarlen.planning.buckets import Bucket, buckets_by_number
from jvarlen.planning.budget import Budget
from jvarlen.planning.cost_model import CostModel, warn_beyond_measured
from jvarlen.planning.lengths import Overlong, fit_lengths

__all__ = [
    "Compiler",
    "RunCosts",
    "ShapeChoice",
    "choose_shapes",
    "costs_from_report",
    "estimate_costs",
    "load_costs",
    "model_key",
    "save_costs",
    "seconds_of_epoch",
    "simulated_seconds",
]

_MOST_SHAPES = 24
_LEAST_DELAY = 0.05  # the share of the seconds of compiling that a shape costs, even where steps go on undisturbed
_SPACING = 1.1  # between two new shapes, over the seconds of compiling one

# Measured with the built-in model on a CPU with two cores: compiling takes some 10 times as long as lowering a second
# shape, and a step has half the speed of a product of matrices. Both only have to hold for the first run.
_COMPILING_OVER_LOWERING = 10.0
_SHARE_OF_PEAK = 0.5
_MATRIX_SIZE = 1024
_MOST_PROGRAMS = 16  # of which the shapes are remembered, the newest


class Compiler(NamedTuple):
    """When programs are compiled, and how long it takes."""

    seconds: float  # of compiling one shape
    threads: int = 1  # that compile at the same time
    slowdown: float = 0.0  # seconds by which steps are delayed per second of compiling, on a CPU that both share
    in_background: bool = True  # whether steps run meanwhile


class ShapeChoice(NamedTuple):
    """The chosen shapes."""

    buckets: tuple[Bucket, ...]
    new_shape_every: int  # steps between two new shapes, for `make_plan`; 0 where the order cannot be changed
    seconds: float  # predicted, of compiling and training
    num_steps: int  # of training


def choose_shapes(
    lengths: Int64[np.ndarray, " N"],
    budget: Budget,
    compiler: Compiler,
    *,
    num_epochs: float | None = None,
    num_steps: int | None = None,
    compiled: Iterable[Sequence[int]] = (),
    can_space: bool = True,
    max_length: int | None = None,
    overlong: Overlong = "error",
) -> ShapeChoice:
    """The optimal shapes of `make_buckets`, as many as take the least predicted seconds of compiling and training."""
    # Training ends with `num_epochs` or `num_steps`, whichever comes first; with neither, after an epoch. It is
    # simulated with each number of shapes, for the same samples: with `num_steps`, those of the plan with the most
    # shapes. The first step waits for its shape; others are compiled meanwhile, in the order of appearance.
    if budget.cost is None:
        raise UserError("the number of shapes is chosen by seconds: the budget needs a cost")
    budget = dataclasses.replace(budget, compile_seconds=None)
    fitted = fit_lengths(lengths, max_length, overlong).lengths
    budget = dataclasses.replace(budget, max_length=max_length)
    optimum = functools.partial(buckets_by_number, lengths, overlong=overlong)
    most_steps = math.inf if num_steps is None else num_steps
    if num_epochs is None:
        num_epochs = 1.0 if num_steps is None else math.inf
    most_epochs = num_epochs
    if num_steps is not None:
        _, steps_of_epoch = seconds_of_epoch(fitted, optimum(budget, [_MOST_SHAPES])[0], budget)
        num_epochs = min(num_epochs, num_steps / int(steps_of_epoch.sum()))
    known = {tuple(shape) for shape in compiled}
    if known:  # what is delayed by compiling one shape, in seconds of an epoch
        delay_s = max(compiler.slowdown, _LEAST_DELAY) * compiler.seconds
        optimum = functools.partial(optimum, compiled=sorted(known))
        priced = dataclasses.replace(budget, compile_seconds=delay_s / num_epochs)
    choices = []
    numbers = range(1, _MOST_SHAPES + 1)
    for max_shapes, buckets in zip(numbers, optimum(priced if known else budget, numbers), strict=True):
        if len(buckets) < max_shapes:  # more do not help
            break
        of_shape, of_steps = seconds_of_epoch(fitted, buckets, budget)
        work = num_epochs * of_shape
        new = [tuple(bucket) not in known for bucket in buckets]
        spacing = 0
        if can_space and len(buckets) > 1 and any(new):
            step_s = of_shape.sum() / max(1, of_steps.sum())
            needed = _SPACING * compiler.seconds / compiler.threads / step_s
            first_epoch = int(of_steps.sum() * min(1.0, num_epochs))
            spacing = max(1, min(math.ceil(needed), first_epoch // len(buckets)))
        predicted = simulated_seconds(work, new, compiler, spacing * step_s if spacing else None)
        steps = int(min(most_steps, most_epochs * of_steps.sum()))
        choices.append(ShapeChoice(buckets, spacing, predicted, steps))
    chosen = min(choices, key=lambda choice: choice.seconds)
    warn_beyond_measured(budget.cost, chosen.buckets)
    return chosen


def seconds_of_epoch(
    lengths: Int64[np.ndarray, " N"], buckets: tuple[Bucket, ...], budget: Budget
) -> tuple[Float64[np.ndarray, " K"], Int64[np.ndarray, " K"]]:
    """Predicted seconds of all steps of each bucket in an epoch, and their number."""
    rows, bucket_lengths = np.array(buckets).T
    num_samples = np.bincount(np.searchsorted(bucket_lengths, lengths), minlength=len(buckets))
    num_steps = -(-num_samples // (rows * budget.microbatches_per_step))
    assert budget.cost is not None
    cost = np.asarray(budget.cost(rows, bucket_lengths), np.float64)
    return num_steps * budget.microbatches_per_step * cost, num_steps


def simulated_seconds(
    work: Float64[np.ndarray, " K"], is_new: Sequence[bool], compiler: Compiler, spacing_s: float | None = None
) -> float:
    """Seconds of training, waiting for the compiler included, from the seconds of all steps of each shape."""
    # Shapes appear in order, every `spacing_s` seconds of steps, or, for None, when the one before has no steps left.
    total = float(work.sum())
    num_new = sum(is_new)
    if not compiler.in_background:
        return total + compiler.seconds * math.ceil(num_new / compiler.threads)
    between = work.tolist() if spacing_s is None else [spacing_s] * (len(work) - 1)
    now, left, num_compiled = 0.0, total, 0
    for i, new in enumerate(is_new):
        if new:
            num_compiled += 1
            # The first alone; then as many at a time as there are threads.
            now = max(now, compiler.seconds * (1 + math.ceil((num_compiled - 1) / compiler.threads)))
        steps_s = min(left, between[i]) if i < len(between) else left
        now, left = now + steps_s, left - steps_s
    return now + left + compiler.slowdown * compiler.seconds * max(0, num_new - 1)


@dataclasses.dataclass(frozen=True)
class RunCosts:
    """What a step of a model costs on a kind of device."""

    device: str  # number and kind of the devices
    model: str  # what tells models apart, by `model_key`
    seconds: CostModel  # of a microbatch
    compile_seconds: float  # of lowering and compiling one shape
    # (rows, length) of the shapes that earlier runs compiled, by what tells their programs apart.
    compiled: dict[str, tuple[tuple[int, int], ...]] = dataclasses.field(default_factory=dict)
    is_estimate: bool = False  # whether nothing was measured


def model_key(state_spec: Any, loss_fn: Any, *details: object) -> str:
    """What tells models apart: names, shapes and dtypes of the parameters, the loss, and other details."""
    leaves = {name: describe(leaf) for name, leaf in leaves_by_name(state_spec).items()}
    loss = f"{getattr(loss_fn, '__module__', '')}.{getattr(loss_fn, '__qualname__', type(loss_fn).__name__)}"
    text = repr((sorted(leaves.items()), loss, details))
    return hashlib.sha256(text.encode()).hexdigest()


def _path_of(cache_dir: Path, device: str, model: str) -> Path:
    name = hashlib.sha256(f"{device}\0{model}".encode()).hexdigest()[:32]
    return cache_dir / "costs" / f"{name}.json"


def load_costs(cache_dir: Path, device: str, model: str) -> RunCosts | None:
    """The costs that `save_costs` wrote; None if there are none, or, with a warning, if the file is damaged."""
    path = _path_of(cache_dir, device, model)
    try:
        return load_dataclass(RunCosts, path, "costs of a model") if path.exists() else None
    except (OSError, ValueError) as error:
        warnings.warn(f"{error}; it is not used", stacklevel=2)
        return None


def save_costs(costs: RunCosts, cache_dir: Path) -> None:
    """Writes costs beside the compiled programs; where that is impossible, a warning says so."""
    path = _path_of(cache_dir, costs.device, costs.model)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_dataclass(costs, path)
    except OSError as error:
        warnings.warn(f"what the model costs could not be kept in {path}: {error}", stacklevel=2)


def estimate_costs(
    step_compiler: StepCompiler, buckets: Sequence[Bucket], model: str, num_devices: int = 1
) -> RunCosts:
    """Costs from lowering a step on one device for two shapes of different lengths; nothing of it is compiled."""
    lowered = [step_compiler.lower(bucket) for bucket in buckets]
    operations = [(each.program.cost_analysis() or {}).get("flops", math.nan) for each in lowered]
    counted = [(bucket, count) for bucket, count in zip(buckets, operations, strict=True) if count > 0]
    if not counted:
        raise UserError('max_shapes "auto" needs a cost model here: XLA does not count the operations of this step')
    of_token = np.array([count / bucket.padded_tokens for bucket, count in counted])
    linear, quadratic = _line([bucket.length for bucket, _ in counted], of_token)
    seconds = 1.0 / (_SHARE_OF_PEAK * _operations_per_second(step_compiler.device) * num_devices)
    return RunCosts(
        step_compiler.device_text,
        model,
        CostModel(0.0, linear * seconds, quadratic * seconds, device=step_compiler.device_text, model="estimated"),
        (1 + _COMPILING_OVER_LOWERING) * min(each.seconds for each in lowered),
        is_estimate=True,
    )


def costs_from_report(report: CompileReport, microbatches_per_step: int, before: RunCosts, program: str) -> RunCosts:
    """The costs that a run measured; where it measured too little, those known before."""
    timed = [row for row in report if row.times_used > 1 and row.step_s > 0]
    cold = [row.lower_s + row.compile_s for row in report if not row.cache_hit]
    seconds = before.seconds
    if timed:
        of_token = np.array([row.step_s / microbatches_per_step / row.bucket.padded_tokens for row in timed])
        linear, quadratic = _line([row.bucket.lengths[0] for row in timed], of_token)
        seconds = CostModel(0.0, linear, quadratic, device=before.device, model="measured in a run")
        shapes = [(row.bucket.rows, row.bucket.lengths[0], row.step_s / microbatches_per_step) for row in timed]
        largest_error = max(abs(float(seconds(rows, length)) / value - 1) for rows, length, value in shapes)
        seconds = dataclasses.replace(seconds, measured=tuple(shapes), largest_error=largest_error)
    compiled = {name: shapes for name, shapes in before.compiled.items() if name != program}
    here = ((row.bucket.rows, row.bucket.lengths[0]) for row in report)
    compiled[program] = tuple(dict.fromkeys((*before.compiled.get(program, ()), *here)))
    return dataclasses.replace(
        before,
        seconds=seconds,
        compile_seconds=float(np.median(cold)) if cold else before.compile_seconds,
        compiled=dict(list(compiled.items())[-_MOST_PROGRAMS:]),
        is_estimate=before.is_estimate and not timed,
    )


def _line(lengths: Sequence[int], of_token: Float64[np.ndarray, " K"]) -> tuple[float, float]:
    """What a token costs, and what it costs more for each token of its row; neither is below 0."""
    if len(set(lengths)) > 1:
        quadratic, linear = np.polyfit(lengths, of_token, 1).tolist()
        if linear >= 0 and quadratic >= 0:
            return linear, quadratic
    return float(of_token.mean()), 0.0


def _operations_per_second(device: jax.Device) -> float:
    """Floating-point operations a second of a product of matrices in float32."""
    matrix = jax.device_put(jnp.ones((_MATRIX_SIZE, _MATRIX_SIZE), jnp.float32), device)
    multiply = jax.jit(jnp.matmul)
    # The first also compiles.
    seconds = timeit.repeat(lambda: multiply(matrix, matrix).block_until_ready(), number=1, repeat=4)
    return 2 * _MATRIX_SIZE**3 / min(seconds)
