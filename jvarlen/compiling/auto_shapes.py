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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int64, Shaped

from jvarlen._common.checks import UserError
from jvarlen._common.files import load_dataclass, save_dataclass
from jvarlen._common.jaxprs import count_operations
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen.compiling.lowering import LoweredBucket, StepCompiler
from jvarlen.compiling.report import CompileReport
from jvarlen.planning.buckets import Bucket, buckets_by_number
from jvarlen.planning.budget import Budget
from jvarlen.planning.candidates import ShapeCandidate, packed_candidates, padded_candidate, shapes_in_words
from jvarlen.planning.cost_model import CostModel, warn_beyond_measured
from jvarlen.planning.lengths import Overlong, fit_lengths
from jvarlen.planning.packings import Packing

__all__ = [
    "MOST_SHAPES",
    "Compiler",
    "RunCosts",
    "ShapeChoice",
    "choose_shapes",
    "costs_from_report",
    "estimate_costs",
    "load_costs",
    "model_key",
    "save_costs",
    "simulated_seconds",
]

MOST_SHAPES = 24
_LEAST_DELAY = 0.05  # the share of the seconds of compiling that a shape costs, even where steps go on undisturbed
_SPACING = 1.1  # between two new shapes, over the seconds of compiling one

# Measured with the built-in model on a CPU with two cores: compiling takes some 10 times as long as lowering a second
# shape, and a step has half the speed of a product of matrices. Both only have to hold for the first run.
_COMPILING_OVER_LOWERING = 10.0
_SHARE_OF_PEAK = 0.5
_MATRIX_SIZE = 1024
_LEAST_SPREAD = 2.0  # of pairs a token, over which a run measures what a pair costs
_MOST_PROGRAMS = 16  # of which the shapes are remembered, the newest


class Compiler(NamedTuple):
    """When programs are compiled, and how long it takes."""

    seconds: float  # of compiling one shape
    threads: int = 1  # that compile at the same time
    slowdown: float = 0.0  # seconds by which steps are delayed per second of compiling, on a CPU that both share
    in_background: bool = True  # whether steps run meanwhile


class ShapeChoice(NamedTuple):
    """Shapes, and what a training in them takes."""

    buckets: tuple[Bucket, ...]
    new_shape_every: int  # steps between two new shapes, for `make_plan`; 0 where the order cannot be changed
    seconds: float  # predicted, of compiling and training
    num_steps: int  # of training
    is_packed: bool = False
    others: tuple[ShapeChoice, ...] = ()  # that were rejected, one for each kind of shapes

    def __str__(self) -> str:
        return shapes_in_words(len(self.buckets), is_packed=self.is_packed)


class _Training(NamedTuple):
    """What is simulated."""

    compiler: Compiler
    num_epochs: float  # by the samples that it takes
    most_steps: float
    most_epochs: float
    can_space: bool

    def choice(self, candidate: ShapeCandidate, known: Collection[tuple[int, ...]]) -> ShapeChoice:
        """How long it takes in these shapes, of which some are compiled."""
        compiler, buckets, of_steps = self.compiler, candidate.buckets, candidate.num_steps
        work = self.num_epochs * candidate.seconds
        new = [tuple(bucket) not in known for bucket in buckets]
        spacing, spacing_s = 0, None
        if self.can_space and len(buckets) > 1 and any(new):
            step_s = candidate.seconds.sum() / max(1, of_steps.sum())
            needed = _SPACING * compiler.seconds / compiler.threads / step_s
            first_epoch = int(of_steps.sum() * min(1.0, self.num_epochs))
            spacing = max(1, min(math.ceil(needed), first_epoch // len(buckets)))
            spacing_s = spacing * step_s
        seconds = simulated_seconds(work, new, compiler, spacing_s)
        steps = int(min(self.most_steps, self.most_epochs * of_steps.sum()))
        return ShapeChoice(buckets, spacing, seconds, steps, candidate.packing is not None)


def choose_shapes(
    lengths: Int64[np.ndarray, " N"],
    budget: Budget,
    compiler: Compiler,
    *,
    num_epochs: float | None = None,
    num_steps: int | None = None,
    compiled: Iterable[Sequence[int]] = (),
    can_space: bool = True,
    most_shapes: int = MOST_SHAPES,
    max_length: int | None = None,
    overlong: Overlong = "error",
    pad: bool = True,
    pack: Callable[[Budget], tuple[tuple[Any, ...], Packing]] | None = None,
    compiled_packed: Iterable[Sequence[int]] = (),
    whole_below: int = 0,
) -> ShapeChoice:
    """The shapes with which compiling and training are predicted to take the least time.

    Padded ones are those of `make_buckets`, of all numbers up to `most_shapes`. With `pack`, which gives the buckets
    and rows for a budget, packed ones are tried as well, or, without `pad`, alone; `whole_below` is as in
    `packed_candidates`.
    """
    # Training ends with `num_epochs` or `num_steps`, whichever comes first; with neither, after an epoch. It is
    # simulated in each of the shapes, for the same samples: with `num_steps`, those of the plan with the most
    # padded shapes, or one packed shape. The first step waits for its shape; others are compiled meanwhile, in the
    # order of appearance.
    if budget.cost is None:
        raise UserError("the number of shapes is chosen by seconds: the budget needs a cost")
    budget = dataclasses.replace(budget, compile_seconds=None, max_length=max_length)
    optimum = functools.partial(buckets_by_number, lengths, overlong=overlong)
    fitted = fit_lengths(lengths, max_length, overlong).lengths if pad else None
    most_steps = math.inf if num_steps is None else num_steps
    if num_epochs is None:
        num_epochs = 1.0 if num_steps is None else math.inf
    most_epochs = num_epochs
    if num_steps is not None:
        if fitted is not None:
            densest = padded_candidate(fitted, optimum(budget, [MOST_SHAPES])[0], budget)
        else:
            assert pack is not None
            densest = packed_candidates(pack, dataclasses.replace(budget, max_shapes=1))[0]
        num_epochs = min(num_epochs, num_steps / int(densest.num_steps.sum()))
    training = _Training(compiler, num_epochs, most_steps, most_epochs, can_space)
    # With what is delayed by compiling one shape, in seconds of an epoch.
    delay_s = max(compiler.slowdown, _LEAST_DELAY) * compiler.seconds / num_epochs
    priced = dataclasses.replace(budget, compile_seconds=delay_s, max_shapes=most_shapes)
    choices: list[list[ShapeChoice]] = []
    if fitted is not None:
        known = {tuple(shape) for shape in compiled}
        if known:
            optimum = functools.partial(optimum, compiled=sorted(known))
        padded = []
        numbers = range(1, most_shapes + 1)
        for max_shapes, buckets in zip(numbers, optimum(priced if known else budget, numbers), strict=True):
            if len(buckets) < max_shapes:  # more do not help
                break
            padded.append(training.choice(padded_candidate(fitted, buckets, budget), known))
        choices.append(padded)
    if pack is not None:
        known = {tuple(shape) for shape in compiled_packed}
        choices.append([training.choice(each, known) for each in packed_candidates(pack, priced, whole_below)])
    best, *others = sorted(
        (min(each, key=lambda choice: choice.seconds) for each in choices), key=lambda choice: choice.seconds
    )
    warn_beyond_measured(budget.cost, best.buckets)
    return best._replace(others=tuple(others))


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
    """Costs from lowering a step on one device for shapes of different lengths; nothing of it is compiled."""
    lowered = [step_compiler.lower(bucket) for bucket in buckets]
    operations = np.array([_operations(step_compiler, each) for each in lowered])
    if not (operations > 0).all():
        raise UserError(
            "shapes are chosen by seconds, and the operations of this step cannot be counted: give a cost model "
            "(cost_model), or a number for max_shapes and packing=None"
        )
    of_token = operations / step_compiler.shapes.microbatches_per_step / [each.padded_tokens for each in buckets]
    linear, quadratic = _line(np.array([bucket.length for bucket in buckets]), of_token)
    seconds = 1.0 / (_SHARE_OF_PEAK * _operations_per_second(step_compiler.device) * num_devices)
    return RunCosts(
        step_compiler.device_text,
        model,
        CostModel(0.0, linear * seconds, quadratic * seconds, device=step_compiler.device_text, model="estimated"),
        (1 + _COMPILING_OVER_LOWERING) * min(each.seconds for each in lowered),
        is_estimate=True,
    )


def costs_from_report(
    report: CompileReport,
    microbatches_per_step: int,
    before: RunCosts,
    program: str,
    pairs: Mapping[tuple[int, ...], float] | None = None,
) -> RunCosts:
    """The costs that a run measured; where it measured too little, those known before.

    `pairs` are those of tokens in a packed microbatch of each shape; None: every row is one sample.
    """
    timed = [row for row in report if row.times_used > 1 and row.step_s > 0]
    cold = [row.lower_s + row.compile_s for row in report if not row.cache_hit]
    seconds = before.seconds
    if timed:
        rows, lengths = np.array([(row.bucket.rows, row.bucket.lengths[0]) for row in timed]).T
        num_pairs = rows * lengths**2 if pairs is None else np.array([pairs[tuple(row.bucket)] for row in timed])
        measured = np.array([row.step_s for row in timed]) / microbatches_per_step
        seconds = _fitted(rows * lengths, num_pairs, measured, before.seconds)
        errors = np.abs(seconds(rows, lengths, pairs=num_pairs) / measured - 1)
        seconds = dataclasses.replace(
            seconds,
            device=before.device,
            model="measured in a run",
            measured=tuple(zip(rows.tolist(), lengths.tolist(), measured.tolist(), strict=True)),
            largest_error=float(errors.max()),
        )
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


def _fitted(
    tokens: Int64[np.ndarray, " K"],
    pairs: Shaped[np.ndarray, " K"],
    measured: Float64[np.ndarray, " K"],
    before: CostModel,
) -> CostModel:
    """What a token and a pair of tokens cost, of microbatches that were measured."""
    pairs_of_token = pairs / tokens
    if pairs_of_token.max() >= _LEAST_SPREAD * pairs_of_token.min():
        linear, quadratic = _line(pairs_of_token, measured / tokens)
        if quadratic:
            return CostModel(0.0, linear, quadratic)
    # Microbatches that are nearly alike do not tell the two apart: they stay in proportion.
    predicted = before.linear * tokens + before.quadratic * pairs
    scale = float(np.median(measured / predicted)) if predicted.min() > 0 else 0.0
    if not scale:
        return CostModel(0.0, float((measured / tokens).mean()), 0.0)
    return CostModel(0.0, scale * before.linear, scale * before.quadratic)


def _line(lengths: Shaped[np.ndarray, " K"], of_token: Float64[np.ndarray, " K"]) -> tuple[float, float]:
    """What a token costs, and what it costs more for each token of its row; neither is below 0."""
    if len(np.unique(lengths)) > 1:
        quadratic, linear = np.polyfit(lengths, of_token, 1).tolist()
        if linear >= 0 and quadratic >= 0:
            return linear, quadratic
    return float(of_token.mean()), 0.0


def _operations(step_compiler: StepCompiler, lowered: LoweredBucket) -> float:
    """Those of all products of matrices of a step, on any platform; where there are none, what XLA counts."""
    # XLA counts the body of a loop once, and neither what kernels compute nor, on most platforms, anything before it
    # has compiled.
    products = count_operations(lowered.jaxpr.jaxpr, ())["flops"]
    num_microbatches = step_compiler.shapes.microbatches_per_step
    return float(products or num_microbatches * (lowered.program.cost_analysis() or {}).get("flops", 0.0))


def _operations_per_second(device: jax.Device) -> float:
    """Floating-point operations a second of a product of matrices in float32."""
    matrix = jax.device_put(jnp.ones((_MATRIX_SIZE, _MATRIX_SIZE), jnp.float32), device)
    multiply = jax.jit(jnp.matmul)
    # The first also compiles.
    seconds = timeit.repeat(lambda: multiply(matrix, matrix).block_until_ready(), number=1, repeat=4)
    return 2 * _MATRIX_SIZE**3 / min(seconds)
