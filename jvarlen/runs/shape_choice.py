"""Chooses the shapes of a run, padded or packed, and how many, where its settings leave that to seconds.

Seconds that no cost model gives are estimated from the operations of a step that is lowered, and not compiled.
"""

from __future__ import annotations

import ast
import dataclasses
import timeit
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen._common.files import load_dataclass
from jvarlen._common.jaxprs import count_operations
from jvarlen.attention.attention import WHOLE_BELOW
from jvarlen.batches.shapes import BatchShapes, BatchSpec
from jvarlen.compiling.lowering import LoweredBucket, StepCompiler, make_step_compiler
from jvarlen.distributed.processes import gather_texts, together
from jvarlen.loading.collate import is_own
from jvarlen.planning.buckets import AnyBucket, Bucket, make_buckets
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.plan import make_plan
from jvarlen.runs.config import FitConfig, is_run_dir
from jvarlen.runs.model import optimizer_for
from jvarlen.runs.plan_config import SHAPES_FILE, ChosenShapes, shapes_for

if TYPE_CHECKING:
    from jvarlen.runs.prepare import Task, TrainingData

__all__ = ["choose_shapes", "estimate_costs"]

# Measured with the built-in model on a CPU with two cores: compiling a step and its evaluation takes some 13 times as
# long as lowering a second shape, and a step has half the speed of a product of matrices.
_COMPILING_OVER_LOWERING = 13.0
_SHARE_OF_PEAK = 0.5
_MATRIX_SIZE = 1024


def choose_shapes(
    config: FitConfig, task: Task, data: TrainingData, lengths: Int64[np.ndarray, " N *2"], num_devices: int = 1
) -> ChosenShapes:
    """The shapes for the lengths of the samples; the same on all processes, those of process 0, and after a resume."""
    plan, run_dir = config.plan, config.directory.resumed
    if run_dir is not None and is_run_dir(run_dir):
        return load_dataclass(ChosenShapes, run_dir / SHAPES_FILE, "chosen shapes")
    if lengths.ndim == 2 or not plan.chooses_by_seconds or config.target is not None:
        with together("plan the training"):
            return shapes_for(plan, lengths, seed=config.seed)
    with together("choose the shapes"):
        cost, compile_s, known = plan.cost, plan.compile_seconds, "as given"
        if cost is None or compile_s is None:
            estimated, estimated_s = _estimate(config, task, data, lengths, num_devices)
            cost, compile_s, known = cost or estimated, estimated_s, "estimated"
        most_epochs = config.num_epochs or (1 if config.max_steps is None else np.inf)
        # Steps are nearly full, whatever the shapes.
        most_tokens = (config.max_steps or np.inf) * plan.num_microbatches * plan.max_tokens
        chosen = shapes_for(
            plan,
            lengths,
            seed=config.seed,
            budget=dataclasses.replace(plan.budget, cost=cost, compile_seconds=compile_s),
            num_epochs=float(min(most_epochs, most_tokens / lengths.sum())),
            whole_below=WHOLE_BELOW if jax.default_backend() == "cpu" else 0,
        )
        chosen = dataclasses.replace(chosen, reason=f"{chosen.reason} ({compile_s:.1f} s a shape, {known})")
    shared = gather_texts("the chosen shapes", repr(dataclasses.asdict(chosen)))[0]
    return ChosenShapes(**ast.literal_eval(shared))


def _estimate(
    config: FitConfig, task: Task, data: TrainingData, lengths: Int64[np.ndarray, " N"], num_devices: int
) -> tuple[CostModel, float]:
    """Seconds of a microbatch, and of compiling a shape, with a usual optimizer."""
    buckets, batch_spec = _probe(config, task, data, lengths)
    step = task.train_step(task.optimizer or optimizer_for(task.shapes, optax.adamw(1e-3)))
    state = dataclasses.replace(task, params=task.shapes).init_state(step, config.seed)
    shapes = BatchShapes(buckets, microbatches_per_step=config.plan.num_microbatches, batch_spec=batch_spec)
    return estimate_costs(make_step_compiler(step, state, shapes, config.compile), buckets, num_devices)


def _probe(
    config: FitConfig, task: Task, data: TrainingData, lengths: Int64[np.ndarray, " N"]
) -> tuple[tuple[AnyBucket, ...], BatchSpec]:
    """Two shapes of which the operations can be counted, and the batches of them."""
    plan = config.plan
    of_plan: dict[str, Any] = {"microbatches_per_step": plan.num_microbatches, "order": "length"}
    longest = min(int(lengths.max()), plan.longest)
    if task.collate is not None and not is_own(task.collate) and task.batch_spec is None:  # which takes samples
        limits = dataclasses.replace(plan.budget, strategy="quantile", max_shapes=2, max_length=longest)
        of_plan["overlong"] = plan.padded_overlong
        made = make_plan(lengths, make_buckets(lengths, limits, overlong=plan.padded_overlong), **of_plan)
    else:
        # Rows that attention computes as a whole: of what it skips by the data, nothing could be counted.
        multiple = plan.length_multiple
        most = max(1, min(-(-longest // multiple), (WHOLE_BELOW - 1) // multiple))
        sizes = sorted({max(1, most // part) * multiple for part in (1, 2)})
        made = make_plan(sizes, [Bucket(max(1, plan.max_tokens // size), size) for size in sizes], **of_plan)
    return made.buckets, task.batch_spec_for({"": made}, {"": data.train})


def estimate_costs(
    step_compiler: StepCompiler, buckets: Sequence[AnyBucket], num_devices: int = 1
) -> tuple[CostModel, float]:
    """Seconds of a microbatch, and of compiling a shape, from lowering a step on one device for two lengths."""
    lowered = [step_compiler.lower(bucket) for bucket in buckets]
    operations = np.array([_operations(step_compiler, each) for each in lowered])
    if not (operations > 0).all():
        raise UserError(
            "shapes are chosen by seconds, and the operations of this step cannot be counted: give a cost model "
            "(cost_model), or a number for max_shapes and packing=None"
        )
    of_token = operations / step_compiler.shapes.microbatches_per_step / [each.padded_tokens for each in buckets]
    linear, quadratic = float(of_token.mean()), 0.0
    if len(buckets) > 1:
        line = np.polyfit([bucket.lengths[0] for bucket in buckets], of_token, 1).tolist()
        if min(line) >= 0:
            quadratic, linear = line
    seconds = 1.0 / (_SHARE_OF_PEAK * _operations_per_second(step_compiler.device) * num_devices)
    cost = CostModel(0.0, linear * seconds, quadratic * seconds, device=step_compiler.device_text, model="estimated")
    return cost, (1 + _COMPILING_OVER_LOWERING) * min(each.seconds for each in lowered)


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
