"""The loss of all steps of a plan."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import jax
import numpy.typing as npt

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import remembered_interrupts
from jvarlen._common.keywords import check_keywords
from jvarlen._common.pytree import program_key
from jvarlen._common.types import Batch, PyTree
from jvarlen.batches.fields import FieldAxes
from jvarlen.batches.shapes import BatchShapes
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.data.samples import AnyDataset
from jvarlen.distributed.processes import is_interrupted_at
from jvarlen.loading.collate import CollateFn
from jvarlen.loading.loader import load
from jvarlen.parallel.evaluation import EvalStep
from jvarlen.planning.steps import PlannedSteps
from jvarlen.training.step import StepFn
from jvarlen.training.train_state import Metrics, MetricSums

__all__ = ["evaluate", "sum_metrics"]


@check_keywords
def evaluate(
    eval_step: EvalStep,
    state: PyTree,
    plan: PlannedSteps,
    dataset: AnyDataset,
    *,
    fields: FieldAxes | None = None,
    collate: CollateFn | None = None,
    lengths: npt.ArrayLike | None = None,
    progress: bool = True,
) -> Metrics:
    """The loss of all samples of a plan: Σ loss / Σ weight of all its steps, divided once.

    The step is compiled for every bucket, and keeps its programs: a later call with buckets and a state of the same
    shapes compiles nothing. The device never waits for the host between steps.

    Args:
      eval_step: of `make_eval_step`; batches are placed as its layout says.
      state: what the step takes: `train_step.for_evaluation(state)`, or parameters alone.
      plan: of any kind, such as `make_plan(lengths, max_tokens=…, order="length")`.
      dataset: as for `load`.
      fields: as for `load`.
      collate: as for `load`.
      lengths: as for `load`.
      progress: whether to show a progress bar while programs are compiled.

    Returns:
      The sums of all steps in float64, on the host. `metrics.loss` is the loss, and of further sums
      `metrics.sums[name] / metrics.weight_sum` is the mean. With a `StepLoss` it is the mean over steps. Every process
      must call this, and gets the same.

    Raises:
      ValueError: another step than one of `make_eval_step`; no sample has weight in the loss, which then has no value;
        a state with an average that is not evaluated; and as `load` and `compile_buckets`.
      KeyboardInterrupt: Ctrl-C or SIGTERM came, in any process; the step that was running is finished.

    Example:
      >>> import jax.numpy as jnp
      >>> from jvarlen import make_eval_step, make_plan
      >>> def loss_fn(params, microbatch):
      ...     return jnp.sum(params * microbatch.tokens * microbatch.weights), jnp.sum(microbatch.weights)
      >>> plan = make_plan([1, 3, 2], max_tokens=4)
      >>> eval_step, samples = make_eval_step(loss_fn), [[5], [1, 2, 3], [4, 4]]
      >>> metrics = evaluate(eval_step, jnp.float32(2), plan, samples, progress=False)
      >>> round(float(metrics.loss), 4)  # 2 · 19 / 6
      6.3333
    """
    if not isinstance(eval_step, EvalStep):
        raise UserError(f"evaluate takes an eval step, make_eval_step(model), not a {type(eval_step).__name__}")
    batches = load(plan, dataset, layout=eval_step.placement, fields=fields, collate=collate, lengths=lengths)
    with remembered_interrupts(), contextlib.closing(batches):
        metrics = sum_metrics(_compiled(eval_step, state, batches.shapes, progress), state, batches)
    if metrics is None:
        raise KeyboardInterrupt
    if not metrics.weight_sum:
        raise UserError(f"no sample of these {plan.num_steps:,} steps has weight in the loss, which has no value then")
    return metrics


def sum_metrics(step: StepFn, state: PyTree, batches: Iterable[Batch]) -> Metrics | None:
    """The sums of a step over all batches, which nothing waits for; None if a process was interrupted."""
    sums = MetricSums()
    for number, batch in enumerate(batches):
        if is_interrupted_at(number):
            return None
        sums.add(step(state, batch)[1])
    return sums.total


def _compiled(eval_step: EvalStep, state: PyTree, shapes: BatchShapes, progress: bool) -> CompiledBuckets:
    """The programs of all buckets; those of an earlier call that had them."""
    kept = eval_step.programs.setdefault((*program_key(state), shapes.may_have_many_groups), [])
    specs = {bucket: jax.tree.flatten(spec) for bucket, spec in shapes.specs.items()}
    for compiled in kept:
        known = {bucket: jax.tree.flatten(spec) for bucket, spec in compiled.specs.items()}
        has_room = not eval_step.halves.holds_rows or shapes.most_rows <= compiled.shapes.most_rows
        if known | specs == known and has_room:
            return compiled
    kept.append(compile_buckets(eval_step, state, shapes.without_dataset(), progress=progress))
    return kept[-1]
