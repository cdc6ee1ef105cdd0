"""Ahead-of-time compilation of a step for every bucket, before the first step or before the first that needs it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator

import jax
import jaxlib
import numpy as np

from jvarlen._common.checks import UserError
from jvarlen._common.keywords import check_keywords
from jvarlen._common.terminal import progress_bar
from jvarlen._common.types import PyTree
from jvarlen.batches.shapes import BatchShapes, HasShapes
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.compiling.lowering import StepCompiler, largest_first, make_step_compiler
from jvarlen.compiling.program_store import use_compilation_cache
from jvarlen.compiling.programs import UPDATE, ProgramKey, Step
from jvarlen.compiling.queue import CompileQueue
from jvarlen.distributed.mesh import devices_of, is_compile_only
from jvarlen.distributed.processes import agree, together
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.steps import PlannedSteps

__all__ = ["compile_buckets", "num_threads"]

_DEFAULT_OPTIONS = CompileOptions()


@check_keywords
def compile_buckets(
    step: Step,
    state: PyTree,
    batches: HasShapes | PlannedSteps | BatchShapes,
    *,
    options: CompileOptions = _DEFAULT_OPTIONS,
    progress: bool = True,
    donate: bool = True,
    start_step: int = 0,
) -> CompiledBuckets:
    """Compiles the step for every bucket, the largest first, so that running out of memory shows at once.

    Where a step may have several groups, in a plan or without one, a step of `make_train_step` is compiled as its
    halves: a program for each bucket, which adds to the sums of the step, and one for the update.

    Arrays that the step closes over become constants of every program. Large ones, such as frozen weights, belong among
    the parameters: `make_train_step(…, trainable=…)` leaves them as they are.

    With `CompileOptions(when="background")` it returns as soon as the first program is being compiled. The others
    follow while steps run, in the order in which the plan first uses them (or of the list), the largest second. A step
    waits only for its program, and a program that cannot be compiled stops the next step.

    Args:
      step: `step(state, batch) -> (state, metrics)`: plain, not jitted. The state keeps its structure and shapes.
      state: a pytree of arrays, or of `jax.ShapeDtypeStruct`. Over several devices, arrays that are not placed are
        replicated.
      batches: the result of `load`; or a plan, for the batches that `load` makes of samples of tokens, on the devices
        that the step was made for; or `BatchShapes`. Every process must call this; the devices are those of all
        processes.
      options: of the compiler and the cache. By default programs are kept in the user's cache directory, which is a
        setting of JAX for the whole process.
      progress: whether to show a progress bar that names the bucket.
      donate: whether a step may overwrite its input state, which cannot be used again then. A step that returns its
        input state unchanged, as that of `make_eval_step`, never does.
      start_step: with a plan, the step of the epoch that is taken first, as after a resume; it decides the order.

    Returns:
      `CompiledBuckets`.

    Raises:
      ValueError: buckets or options that are not as described; devices of a `Target` that are not here; data shards
        that do not divide M; a step that returns a state of another structure or shape, or was made for one device
        while batches are on several; processes that compiled different programs.

    Example:
      >>> import numpy as np
      >>> def count(state, batch):
      ...     return state + batch.num_sequences, {}
      >>> compiled = compile_buckets(count, np.float32(0), BatchShapes([(2, 4), (1, 8)]), progress=False)
      >>> [row.bucket.length for row in compiled.report]
      [4, 8]
    """
    shapes = _shapes_of(batches, step, start_step)
    has_processes = _has_processes(shapes)
    if options.in_background and has_processes:
        raise UserError('when="background" is for one process: several compile everything ahead')
    with (
        together("compile the buckets") if has_processes else contextlib.nullcontext(),
        _with_note_of_batches(batches, step),
    ):
        if options.cache_dir is not None:
            use_compilation_cache(options.cache_dir)
        step_compiler = make_step_compiler(step, state, shapes, options, donate=donate)
        ordered = _order(step_compiler, options)
        bar = progress_bar(total=len(ordered), desc=f"compile {step_compiler.name}", unit="program", progress=progress)
        queue = CompileQueue(step_compiler, ordered, options, num_threads(options), bar)
        if options.in_background:
            queue.advance()
        else:
            with contextlib.closing(queue):
                queue.wait_for_all()
    if has_processes:
        made_by = f"jaxlib {jaxlib.__version__} with options {dict(step_compiler.compiler_options)}"
        agree("the compiled buckets", f"{queue.digest.hexdigest()} of {made_by}")
    return CompiledBuckets(queue, time_steps=bool(options.time_steps))


@contextlib.contextmanager
def _with_note_of_batches(batches: object, step: Step) -> Iterator[None]:
    """A block in which an error of a step that takes its batches for others, as it seems, says what they are."""
    try:
        yield
    except (TypeError, ValueError) as error:
        is_of_loop = not isinstance(error, UserError) and not hasattr(step, "placement")
        if isinstance(batches, PlannedSteps) and "indices must be" in str(error):  # as of a tuple by a field's name
            error.add_note(
                "a plan alone stands for batches of tokens: for samples of named fields, give compile_buckets their "
                "loader, load(plan, samples)"
            )
        elif is_of_loop and "shape" in str(error):
            error.add_note(
                "the first axis of a batch's arrays is that of microbatches, unless load has microbatches=False"
            )
        raise


def _shapes_of(batches: object, step: Step, start_step: int) -> BatchShapes:
    """The shapes of an argument `batches`, on its devices or else on those of the step."""
    shapes = batches
    if isinstance(batches, PlannedSteps):
        shapes = BatchShapes.of_plan(batches)
    elif not isinstance(batches, BatchShapes):
        shapes = getattr(batches, "shapes", None)
    if not isinstance(shapes, BatchShapes):
        raise UserError(f"batches are the result of load, a plan or BatchShapes, not a {type(batches).__name__}")
    if shapes.layout is None and (placement := getattr(step, "placement", None)) is not None:
        shapes = dataclasses.replace(shapes, layout=placement)
    if shapes.placement is not None and any(map(is_compile_only, devices_of(shapes.placement.mesh))):
        raise UserError(
            "these devices are not here, so that programs for them can be neither tuned, which takes timing them, nor "
            "run: compile_for reports what their compiler says"
        )
    return dataclasses.replace(shapes, start_step=start_step) if start_step else shapes


def _order(compiler: StepCompiler, options: CompileOptions) -> list[ProgramKey]:
    """Programs in the order of compilation: the largest bucket first, or, in the background, second."""
    shapes = compiler.shapes
    ascending = sorted(shapes.buckets, key=lambda bucket: bucket.lengths)
    ordered = largest_first(ascending)
    if options.in_background:
        by_use = _by_use(shapes, ascending)
        ordered = list(dict.fromkeys((by_use[0], largest_first(by_use)[0], *by_use)))
    keys = [key for bucket in ordered for key in compiler.passes(bucket)]
    if compiler.halves is not None:  # the first step needs it
        keys.insert(2 * len(compiler.passes(ordered[0])) if options.in_background else len(keys), UPDATE)
    return keys


def _by_use(shapes: BatchShapes, ascending: list[AnyBucket]) -> list[AnyBucket]:
    """Buckets in the order in which the plan first uses them, and then the others; without a plan, as they are."""
    plan = shapes.plan
    if plan is None:
        return list(shapes.buckets)
    used, first_use = np.unique(plan.group_bucket[plan.step_groups[shapes.start_step] :], return_index=True)
    return [ascending[k] for k in dict.fromkeys((*used[np.argsort(first_use)], *range(len(ascending))))]


def _has_processes(shapes: BatchShapes) -> bool:
    """Whether several processes compile; raises ValueError if some processes are not among them."""
    if shapes.placement is None or not shapes.placement.mesh.is_multi_process:
        return False
    missing = set(range(jax.process_count())) - {device.process_index for device in devices_of(shapes.placement.mesh)}
    if missing:
        raise UserError(f"a mesh over several processes must span all; it has no device of {sorted(missing)}")
    return True


def num_threads(options: CompileOptions) -> int:
    """Threads that compile; one if several processes compile together, so that all compile in the same order."""
    if options.num_threads or jax.process_count() > 1:
        return options.num_threads or 1
    cores = os.cpu_count() or 1
    return max(1, cores // 2) if options.in_background else cores
