"""Ahead-of-time compilation of a step for every bucket, before the first step or before the first that needs it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from tqdm import tqdm

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.progress import progress_bar
from jvarlen.batches.shapes import BatchShapes, HasShapes
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.compiling.lowering import COMPILING, StepCompiler, largest_first, make_step_compiler
from jvarlen.compiling.program_store import deserialized, read_compiled, use_compilation_cache
from jvarlen.compiling.programs import Programs
from jvarlen.compiling.report import CompileRow, row_of
from jvarlen.distributed.mesh import devices_of, is_compile_only
from jvarlen.planning.buckets import AnyBucket, check_buckets
from jvarlen.planning.steps import PlannedSteps

__all__ = ["compile_buckets", "load_compiled", "num_threads"]

_DEFAULT_OPTIONS = CompileOptions()


def compile_buckets(
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: HasShapes | PlannedSteps | BatchShapes,
    *,
    options: CompileOptions = _DEFAULT_OPTIONS,
    progress: bool = True,
    donate: bool = True,
    start_step: int = 0,
) -> CompiledBuckets:
    """Compiles the step for every bucket, the largest first, so that running out of memory shows at once.

    Arrays that the step closes over become constants of every program. Large ones, such as frozen weights, belong among
    the parameters: `make_train_step(…, trainable=…)` leaves them as they are.

    With `CompileOptions(when="background")` it returns as soon as the first program is being compiled. The others
    follow while steps run, in the order in which the plan first uses them (or of the list), the largest second. Each is
    lowered by a call of the step, under the settings that JAX has in that thread then. A step waits only for its own
    program, and a program that cannot be compiled stops the next step.

    Args:
      step: `step(state, batch) -> (state, metrics)`: plain, not jitted. The state keeps its structure and shapes.
      state: a pytree of arrays, or of `jax.ShapeDtypeStruct`. Over several devices, what is not placed is replicated.
      batches: the result of `load`; or a plan, for what `load` makes of its samples of tokens, on the devices that the
        step was made for; or `BatchShapes`. Of several processes, all compile, and devices are of all.
      options: of the compiler and the cache. By default programs are kept in the user's cache
        directory, which is a setting of JAX for the whole process.
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
    if options.in_background and _has_processes(shapes):
        raise UserError('when="background" is for one process: several compile everything ahead')
    with _on_all_processes(shapes), _with_note_of_plan(batches):
        step_compiler = _make_step_compiler(step, state, shapes, options, donate)
        ordered = _order(shapes, options)
        bar = _bar("compile", step_compiler, len(ordered), progress)
        programs = Programs(step_compiler, ordered, num_threads(options), bar, in_background=options.in_background)
        if options.in_background:
            programs.advance()
        else:
            with contextlib.closing(programs):
                programs.wait_for_all()
    return _ready(step_compiler, programs, ordered, options)


@contextlib.contextmanager
def _with_note_of_plan(batches: Any) -> Iterator[None]:
    """Errors of a step that was given batches of tokens for a plan, and may want fields, tell how to have these."""
    try:
        yield
    except TypeError as error:
        if isinstance(batches, PlannedSteps):
            error.add_note(
                "a plan alone tells batches of tokens: for samples of named fields, give compile_buckets the loader of "
                "these samples, load(plan, samples)"
            )
        raise


def _shapes_of(batches: Any, step: Any, start_step: int = 0) -> BatchShapes:
    """The shapes that an argument `batches` tells, where the step runs if it tells no other place."""
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
            "these devices are not here, so that programs for them are not tuned, which takes timing them: they are "
            "neither run nor saved, and compile_for tells what their compiler says"
        )
    return dataclasses.replace(shapes, start_step=start_step) if start_step else shapes


def _order(shapes: BatchShapes, options: CompileOptions) -> list[AnyBucket]:
    """Buckets in the order of compilation: the largest first, or, in the background, second."""
    ascending = sorted(shapes.buckets, key=lambda bucket: bucket.lengths)
    if not options.in_background:
        return largest_first(ascending)
    ordered = list(shapes.buckets)
    if shapes.plan is not None:
        used, first_use = np.unique(shapes.plan.step_bucket[shapes.start_step :], return_index=True)
        ordered = [ascending[k] for k in dict.fromkeys((*used[np.argsort(first_use)], *range(len(ascending))))]
    largest = largest_first(ordered)[0]
    return list(dict.fromkeys((ordered[0], largest, *ordered)))


def load_compiled(
    path: str | os.PathLike[str],
    step: Callable[[Any, Any], tuple[Any, Any]],
    state: Any,
    batches: HasShapes | PlannedSteps | BatchShapes,
    *,
    options: CompileOptions = _DEFAULT_OPTIONS,
    progress: bool = True,
    donate: bool = True,
) -> CompiledBuckets:
    """Loads executables from a file that `CompiledBuckets.save` wrote; nothing is compiled.

    The step is lowered for the smallest and the largest bucket, to check that it is the one that was compiled.

    Args:
      path: the file, signed with this user's key. Each of several processes has a file of its own.
      step: as for `compile_buckets`.
      state: as for `compile_buckets`.
      batches: as for `compile_buckets`; all of their buckets were compiled.
      options: as for `compile_buckets`.
      progress: whether to show a progress bar.
      donate: as for `compile_buckets`.

    Returns:
      `CompiledBuckets` of the buckets that were saved.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged, not signed with this user's key, or made by other software, for other devices or
        options, or from another step, state or batch; the differences are listed.
    """
    shapes = _shapes_of(batches, step)
    with _on_all_processes(shapes):
        step_compiler, programs = _load(Path(path), step, state, shapes, donate, options, progress)
    return _ready(step_compiler, programs, step_compiler.shapes.buckets, options)


def _load(
    path: Path, step: Any, state: Any, shapes: BatchShapes, donate: bool, options: CompileOptions, progress: bool
) -> tuple[StepCompiler, Programs]:
    header, contents = read_compiled(path)
    buckets = [check_buckets([tuple(shape)])[0] for shape in header["buckets"]]
    if missing := [str(bucket) for bucket in shapes.buckets if bucket not in buckets]:
        raise UserError(f"{path} holds no programs of the buckets {list_first(missing)}")
    shapes = dataclasses.replace(shapes, buckets=buckets)
    step_compiler = _make_step_compiler(step, state, shapes, options, donate)
    there, here = header["environment"], step_compiler.environment
    if differing := [name for name in here if there.get(name) != here[name]]:
        listed = "; ".join(f"{name}: {there.get(name)} there, {here[name]} here" for name in differing)
        raise UserError(f"{path} was compiled for something else: {listed}")
    by_size = largest_first(buckets)
    bar = _bar("load", step_compiler, len(buckets), progress)
    programs = Programs(step_compiler, (), num_threads(options), bar)
    lowered = [step_compiler.lower(bucket) for bucket in dict.fromkeys((by_size[0], by_size[-1]))]
    for bucket in buckets:
        programs.note(lowered[0]._replace(bucket=bucket), with_text=False)
    for each in lowered:
        programs.note(each, with_text=True)
    if programs.fingerprint(buckets) != header["fingerprint"]:
        raise UserError(f"{path} was compiled from another step, state or batch than {step_compiler.name} has here")
    program = lowered[0].program
    structures = jax.tree.structure(program.args_info), program.out_tree

    def load_one(bucket: AnyBucket, content: bytes) -> tuple[CompileRow, jax.stages.Compiled]:
        start = time.perf_counter()
        with COMPILING, step_compiler.clock:
            executable = deserialized(content, *structures, step_compiler.devices)
        return row_of(bucket, executable, 0.0, time.perf_counter() - start, cache_hit=True), executable

    with contextlib.closing(programs), ThreadPoolExecutor(num_threads(options)) as threads:
        for row, executable in threads.map(load_one, buckets, contents):
            raise_if_interrupted()
            programs.rows[row.bucket], programs.executables[row.bucket] = row, executable
            bar.update()
    return step_compiler, programs


def _make_step_compiler(
    step: Any, state: Any, shapes: BatchShapes, options: CompileOptions, donate: bool
) -> StepCompiler:
    """What makes the programs, once the cache is set."""
    if options.cache_dir is not None:
        use_compilation_cache(options.cache_dir)
    return make_step_compiler(step, state, shapes, options, donate=donate)


def _ready(
    step_compiler: StepCompiler, programs: Programs, buckets: Sequence[AnyBucket], options: CompileOptions
) -> CompiledBuckets:
    """The compiled buckets, once all processes hold the same programs."""
    if _has_processes(step_compiler.shapes):
        from jvarlen.distributed.processes import agree

        made_by = f"jaxlib {jaxlib.__version__} with options {dict(step_compiler.compiler_options)}"
        agree("the compiled buckets", f"{programs.fingerprint(buckets)} of {made_by}")
    return CompiledBuckets(step_compiler, programs, buckets, options)


def _has_processes(shapes: BatchShapes) -> bool:
    """Whether several processes compile; raises ValueError if some processes are not among them."""
    if shapes.placement is None or not shapes.placement.mesh.is_multi_process:
        return False
    missing = set(range(jax.process_count())) - {device.process_index for device in devices_of(shapes.placement.mesh)}
    if missing:
        raise UserError(f"a mesh over several processes must span all; it has no device of {sorted(missing)}")
    return True


def _on_all_processes(shapes: BatchShapes) -> contextlib.AbstractContextManager[None]:
    """A failure on one process fails on all processes of the mesh, so that none waits for it."""
    if not _has_processes(shapes):
        return contextlib.nullcontext()
    from jvarlen.distributed.processes import together

    return together("compile the buckets")


def num_threads(options: CompileOptions) -> int:
    """Threads that compile; one if several processes compile together, so that all compile in the same order."""
    if options.num_threads or jax.process_count() > 1:
        return options.num_threads or 1
    cores = os.cpu_count() or 1
    return max(1, cores // 2) if options.in_background else cores


def _bar(doing: str, step_compiler: StepCompiler, total: int, progress: bool) -> tqdm:
    return progress_bar(total=total, desc=f"{doing} {step_compiler.name}", unit="bucket", progress=progress)
