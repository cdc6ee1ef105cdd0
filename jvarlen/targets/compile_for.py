"""A train step compiled for devices that are not here, and the report of the compiler."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import jax
import numpy as np
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding
from jaxtyping import Integer
from tqdm import tqdm

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.jaxprs import count_operations, has_unknown_turns
from jvarlen._common.keywords import check_keywords
from jvarlen._common.pytree import with_sharding
from jvarlen._common.types import Array, Extra, Params, Shapes
from jvarlen.batches.shapes import BatchShapes, BatchSpec, HasShapes
from jvarlen.compiling.compile import num_threads
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.lowering import LoweredProgram, StepCompiler, largest_first, make_step_compiler
from jvarlen.compiling.program_store import without_compilation_cache
from jvarlen.compiling.programs import ProgramKey
from jvarlen.compiling.report import program_name
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import devices_of
from jvarlen.distributed.placement import LayoutLike, Placement, place, placement_of
from jvarlen.estimates.communication import communication_of
from jvarlen.parallel.layers import LayeredModel, StepLoss
from jvarlen.parallel.pipeline import branches_of_ticks
from jvarlen.parallel.train import make_train_step
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.steps import PlannedSteps
from jvarlen.targets.buffers import allocated_bytes, largest_buffers
from jvarlen.targets.dump import compile_with_dump, count_launches
from jvarlen.targets.program_seconds import ProgramSeconds, program_seconds
from jvarlen.targets.report import TargetReport, TargetRow
from jvarlen.targets.target import Target
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import Optimizer
from jvarlen.training.trainable import Trainable

__all__ = ["DEFAULT_OPTIONS", "TargetStep", "compile_for", "compile_programs", "layout_of", "seconds_of_runs"]

DEFAULT_OPTIONS = CompileOptions(cache_dir=None)
# The names of kernels: Triton's among the parameters of the call, that of a Pallas call for TPUs, and cuDNN's. Mosaic
# kernels for GPUs have none.
_KERNELS = (
    re.compile(r'xla\.gpu\.triton".*?\bname = \\?"(\w+)'),
    re.compile(r'^\s*(?:ROOT )?%?([A-Za-z_]\w*)\S* = .*custom_call_target="tpu_custom_call"', re.MULTILINE),
    re.compile(r'custom_call_target="(__cudnn\$[\w$]+|mosaic_gpu\w*)"'),
)
# The error of a compiler that finds no room for a program: the bytes that it takes, and those that there are.
_BYTES = r"([\d.]+)([KMGT]?)"
_NO_ROOM = re.compile(rf"Used {_BYTES} of {_BYTES} hbm|\({_BYTES}\) exceeds available HBM \({_BYTES}\)")


@check_keywords
def compile_for(
    model: LayeredModel | LossFn | StepLoss,
    optimizer: Optimizer,
    plan: HasShapes | PlannedSteps | BatchShapes,
    *,
    layout: LayoutLike = None,
    params: Params,
    target: Target | str,
    trainable: Trainable = None,
    extra: Extra = None,
    seed: int | None = None,
    batch_spec: BatchSpec | None = None,
    options: CompileOptions = DEFAULT_OPTIONS,
    progress: bool = True,
) -> TargetReport:
    """Compiles the train step of every bucket for devices that need not be here, and reports the compiler's figures.

    Where steps of the plan have several groups, it compiles their passes over a group of each bucket, and the update.
    Nothing runs, and nothing is placed: state and batches are shapes. Products are not tuned for GPUs that are not
    here, so the programs are not kept, and `compile_buckets`, whose programs can be saved, refuses such devices. The
    figures are the compiler's, and no device has confirmed them.

    Args:
      model: as for `make_train_step`.
      optimizer: as for `make_train_step`.
      plan: the buckets and M: a plan; or what else `compile_buckets` takes, such as the result of `load` for samples of
        several fields. Its layout does not count.
      layout: as for `make_train_step`, on all devices of the target; a placement or a mesh has such devices,
        `Target.parse("8xh100").devices`. None: data parallelism over all.
      params: pytree of arrays or of `jax.ShapeDtypeStruct`, as for `TrainStep.init`; no values are read.
        Its shardings over axes that are left to the compiler count by their specs.
      target: the devices, or their name, as for `Target.parse`.
      trainable: as for `make_train_step`.
      extra: as for `TrainStep.init`.
      seed: as for `TrainStep.init`.
      batch_spec: as for `BatchShapes`, for batches of other fields.
      options: of the compiler; its cache does not count.
      progress: whether to show a progress bar that names the bucket.

    Returns:
      `TargetReport`.

    Raises:
      ValueError: an unknown target; a layout for other devices or other models; what `compile_buckets` refuses.
      ModuleNotFoundError: the compiler is not installed.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> def loss_fn(params, batch):
      ...     return jnp.sum(params * batch.weights), jnp.sum(batch.weights)
      >>> shapes = BatchShapes([(2, 4)], num_microbatches=len(jax.devices()), has_many_groups=False)
      >>> report = compile_for(
      ...     loss_fn, optax.sgd(0.1), shapes, params=jnp.float32(1), target="here", progress=False
      ... )
      >>> [row.bucket for row in report]
      [Bucket(rows=2, length=4)]
    """
    target = Target.parse(target) if isinstance(target, str) else target
    step = TargetStep(model, optimizer, target, trainable, extra, seed, batch_spec, options)
    compiler = step.compiler(plan, layout, params)
    placed, counter = layout_of(compiler), None
    runs_again = placed.schedule == "zero_bubble" and placed.remat_in_force != "none"  # in both of its passes
    if placed.stage > 1 and placed.num_devices == len(compiler.devices) and not runs_again:
        # Values decide in the program what a stage does; the same layout without stages does the same in all.
        whole = dataclasses.replace(placed, stage=1, schedule=Layout.schedule, virtual=1, remat=placed.remat_in_force)
        placement = place(whole, compiler.devices[: whole.num_devices])
        counter = step.compiler(compiler.shapes, placement, jax.eval_shape(lambda params: params, params))
    keys = [key for bucket in largest_first(compiler.shapes.buckets) for key in compiler.passes(bucket)]
    keys, rows = [*keys, *compiler.once_a_step], []
    bar = tqdm(total=len(keys), desc=f"compile for {target.name}", unit="program", disable=not progress)
    with without_compilation_cache(), bar, ThreadPoolExecutor(num_threads(options)) as threads:
        # All are lowered in this thread, whose settings of JAX count.
        compiled = threads.map(functools.partial(_row, compiler, target), map(compiler.lower, keys))
        for key, row in zip(keys, compiled, strict=True):
            if counter is not None:
                flops = _flops(counter, counter.trace(key)[0].jaxpr.jaxpr)
                row = dataclasses.replace(row, flops=flops and flops / placed.stage)
            rows.append(row)
            bar.set_postfix_str(str(row))
            bar.update()
    step_s = _step_seconds(rows, compiler.shapes.plan)
    return TargetReport(rows, target.name, str(placed), *compiler.clock.seconds, step_s)


@dataclasses.dataclass(frozen=True)
class TargetStep:
    """A train step to be compiled for a target, with the arguments of `compile_for`."""

    model: LayeredModel | LossFn | StepLoss
    optimizer: Optimizer
    target: Target
    trainable: Trainable = None
    extra: Extra = None
    seed: int | None = None
    batch_spec: BatchSpec | None = None
    options: CompileOptions = DEFAULT_OPTIONS

    def compiler(
        self, plan: HasShapes | PlannedSteps | BatchShapes, layout: LayoutLike, params: Params
    ) -> StepCompiler:
        """The compiler of the step for the buckets of a plan."""
        placement = _place_on_target(layout, self.target)
        if isinstance(plan, HasShapes):
            plan = plan.shapes
        if isinstance(plan, BatchShapes):
            shapes = dataclasses.replace(plan, layout=placement, batch_spec=self.batch_spec or plan.batch_spec)
        else:
            shapes = BatchShapes.of_plan(plan, layout=placement, batch_spec=self.batch_spec)
        step = make_train_step(self.model, self.optimizer, layout=placement, trainable=self.trainable)
        state = step.init(_shapes_on(placement, params), extra=self.extra, seed=self.seed)
        xla_options = (*self.target.xla_options, *self.options.xla_options)
        with without_compilation_cache():  # trying options compiles a program
            return make_step_compiler(step, state, shapes, dataclasses.replace(self.options, xla_options=xla_options))


def _shapes_on(placement: Placement, params: Params) -> Shapes:
    """Shapes of parameters, with their shardings if the layout leaves these to the compiler."""

    def shape_of(leaf: Array, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = getattr(getattr(leaf, "sharding", None), "spec", None)
        return with_sharding(None if spec is None else NamedSharding(placement.mesh, spec), shape)

    shapes = jax.eval_shape(lambda params: params, params)
    return jax.tree.map(shape_of, params, shapes) if placement.layout.is_data_parallel else shapes


def _place_on_target(layout: LayoutLike, target: Target) -> Placement:
    """The placement of a step on a target; raises ValueError for other devices."""
    if layout is None or isinstance(layout, str | Layout):
        return place(layout or Layout(), target.devices)
    placement = placement_of(layout)
    assert placement is not None
    if others := [device for device in devices_of(placement.mesh) if device not in target.devices]:
        raise UserError(
            f"layout has devices that are not of the target {target.name}, which are in Target.parse(…).devices: "
            f"{list_first(others)}"
        )
    return placement


def layout_of(compiler: StepCompiler) -> Layout:
    """The layout of the step of a `TargetStep`."""
    assert compiler.shapes.placement is not None
    return compiler.shapes.placement.layout


def compile_programs(compiler: StepCompiler, keys: Iterable[ProgramKey], target: Target) -> list[TargetRow]:
    """The compiler's figures for some programs of a step."""
    return [_row(compiler, target, compiler.lower(key)) for key in keys]


def _step_seconds(rows: Iterable[TargetRow], plan: PlannedSteps | None) -> float | None:
    """Predicted seconds of a step of a plan, on average."""
    if plan is None:
        return None
    seconds = seconds_of_runs(rows, plan.groups_of_buckets(), plan.num_steps)
    return seconds and seconds / plan.num_steps


def seconds_of_runs(
    rows: Iterable[TargetRow],
    num_groups: Mapping[AnyBucket, int],
    num_steps: int,
    figure: Literal["seconds", "exposed_s"] = "seconds",
) -> float | None:
    """Predicted seconds of some steps: of all groups and all updates; None where those of a program are unknown."""
    total = 0.0
    for row in rows:
        if times := num_steps if row.bucket is None else num_groups[row.bucket]:
            if (seconds := getattr(row, figure)) is None:
                return None
            total += times * seconds
    return total


def _flops(compiler: StepCompiler, jaxpr: Jaxpr) -> float | None:
    """Operations of a device; None with arrays that the compiler splits, stages, and loops that turn by values."""
    layout = layout_of(compiler)
    is_known = layout.num_devices == len(compiler.devices) and layout.stage == 1 and not has_unknown_turns(jaxpr)
    return float(count_operations(jaxpr, ())["flops"]) if is_known else None


def _row(compiler: StepCompiler, target: Target, lowered: LoweredProgram) -> TargetRow:
    program, bucket = compiler.program_of(lowered.key)
    flops = _flops(compiler, lowered.jaxpr.jaxpr)
    start = time.perf_counter()
    try:
        compiled, dump = compile_with_dump(compiler, lowered)
    except jax.errors.JaxRuntimeError as error:
        needed_bytes, limit_bytes = _needed_and_limit(error, target, program_name(program, bucket))
        return TargetRow(
            bucket=bucket,
            program=program,
            lower_s=lowered.seconds,
            compile_s=time.perf_counter() - start,
            flops=flops,
            total_bytes=needed_bytes,
            limit_bytes=limit_bytes,
        )
    row, ticks = compiled.row, None if bucket is None else branches_of_ticks(compiler.shapes, bucket)
    try:
        communication = communication_of(dump.program, compiler.mesh, ticks)
    except UserError:
        communication = None
    seconds = _predict_seconds(dump.program, compiler, target, ticks, bucket)
    if target.devices[0].platform == "tpu" and dump.buffers:
        # XLA counts more bytes of temporaries than it allocates; only allocations need room.
        row = dataclasses.replace(row, temp_bytes=min(row.temp_bytes, allocated_bytes(dump)))
    return TargetRow(
        bucket=bucket,
        program=program,
        lower_s=lowered.seconds,
        compile_s=row.compile_s,
        flops=flops,
        argument_bytes=row.argument_bytes,
        output_bytes=row.output_bytes - row.alias_bytes,
        temp_bytes=row.temp_bytes,
        host_bytes=int(getattr(compiled.executable.memory_analysis(), "host_temp_size_in_bytes", 0)),
        total_bytes=row.total_bytes,
        limit_bytes=target.memory_bytes,
        communication=communication,
        seconds=seconds and seconds.total,
        exposed_s=seconds and seconds.exposed,
        products_s=seconds and seconds.products,
        elementwise_bytes=seconds and seconds.elementwise_bytes,
        num_kernels=seconds and seconds.kernels,
        kernels=dict(Counter(name for pattern in _KERNELS for name in pattern.findall(dump.program))),
        launches=count_launches(dump),
        buffers=largest_buffers(dump),
    )


def _predict_seconds(
    program: str,
    compiler: StepCompiler,
    target: Target,
    ticks: Integer[np.ndarray, "T S"] | None,
    bucket: AnyBucket | None,
) -> ProgramSeconds | None:
    if target.cluster is None:
        return None
    number_of = {device: i for i, device in enumerate(target.devices)}
    hosts = [number_of[device] // target.cluster.devices_per_host for device in devices_of(compiler.mesh)]
    is_tpu = target.devices[0].platform == "tpu"
    length = max(bucket[1:]) if bucket else None
    return program_seconds(program, target.cluster, is_tpu=is_tpu, hosts=hosts, ticks=ticks, length=length)


def _needed_and_limit(error: jax.errors.JaxRuntimeError, target: Target, name: str) -> tuple[int, int]:
    """The bytes of a program that finds too little memory, and those that there are; raises other errors."""
    found = _NO_ROOM.search(str(error))
    if found is None:
        raise UserError(f"{target.name}: the program of {name} does not compile: {error}") from error
    number, unit, limit, unit_of_limit = (each for each in found.groups() if each is not None)
    needed_bytes, limit_bytes = (
        round(float(size) * 1024 ** " KMGT".index(power or " "))
        for size, power in ((number, unit), (limit, unit_of_limit))
    )
    return needed_bytes, limit_bytes
