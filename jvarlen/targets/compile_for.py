"""A train step compiled for devices that are not here, and what the compiler says of it."""

from __future__ import annotations

import dataclasses
import functools
import re
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import optax
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding
from tqdm import tqdm

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.jaxprs import count_operations, has_unknown_turns
from jvarlen._common.keywords import check_keywords
from jvarlen._common.pytree import with_sharding
from jvarlen.batches.shapes import BatchShapes, BatchSpec, HasShapes
from jvarlen.compiling.compile import num_threads
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.lowering import LoweredBucket, StepCompiler, largest_first, make_step_compiler
from jvarlen.compiling.program_store import without_compilation_cache
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
from jvarlen.training.trainable import Trainable

__all__ = ["DEFAULT_OPTIONS", "compile_bucket", "compile_for", "layout_text", "target_compiler"]

DEFAULT_OPTIONS = CompileOptions(cache_dir=None)
# A kernel's own name: of Triton in what the call is given, of Pallas for TPUs that of the call; and cuDNN's. Those of
# Pallas for GPUs that are not of Triton tell none.
_KERNELS = (
    re.compile(r'xla\.gpu\.triton".*?\bname = \\?"(\w+)'),
    re.compile(r'^\s*(?:ROOT )?%?([A-Za-z_]\w*)\S* = .*custom_call_target="tpu_custom_call"', re.MULTILINE),
    re.compile(r'custom_call_target="(__cudnn\$[\w$]+|mosaic_gpu\w*)"'),
)
# What a compiler says that finds no room for a program: the bytes that it takes, and those that there are.
_BYTES = r"([\d.]+)([KMGT]?)"
_NO_ROOM = re.compile(rf"Used {_BYTES} of {_BYTES} hbm|\({_BYTES}\) exceeds available HBM \({_BYTES}\)")


@check_keywords
def compile_for(
    model: LayeredModel | LossFn | StepLoss,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    plan: HasShapes | PlannedSteps | BatchShapes,
    *,
    layout: LayoutLike = None,
    params: Any,
    target: Target | str,
    trainable: Trainable = None,
    extra: Any = None,
    seed: int | None = None,
    batch_spec: BatchSpec | None = None,
    options: CompileOptions = DEFAULT_OPTIONS,
    progress: bool = True,
) -> TargetReport:
    """Compiles the train step of every bucket for devices that need not be here, and tells what the compiler says.

    Nothing runs, and nothing is placed: state and batches are shapes. Products are not tuned for GPUs that cannot be
    asked, so the programs are not kept, and `compile_buckets`, whose programs can be saved, refuses such devices. The
    figures are the compiler's, and no device has confirmed them.

    Args:
      model: as for `make_train_step`.
      optimizer: as for `make_train_step`.
      plan: the buckets and M: a plan; or what `compile_buckets` takes besides, as the result of `load` for samples of
        several fields. Its own layout does not count.
      layout: as for `make_train_step`, on all devices of the target; a placement or a mesh is of such devices,
        `Target.parse("8xh100").devices`. None: data parallelism over all.
      params: pytree of arrays or of `jax.ShapeDtypeStruct`, as for `TrainStep.init`; nothing of it is read.
        Its shardings over axes that are the compiler's count by their specs.
      target: the devices, or their name, as for `Target.parse`.
      trainable: as for `make_train_step`.
      extra: as for `TrainStep.init`.
      seed: as for `TrainStep.init`.
      batch_spec: as for `BatchShapes`, for batches of fields of one's own.
      options: of the compiler; its cache does not count.
      progress: whether to show a progress bar that names the bucket.

    Returns:
      `TargetReport`.

    Raises:
      ValueError: a target that is not known; a layout that its devices do not make, or that is not for such a model;
        what `compile_buckets` refuses.
      ModuleNotFoundError: the compiler is not installed.

    Example:
      >>> import jax.numpy as jnp
      >>> def loss_fn(params, batch):
      ...     return jnp.sum(params * batch.weights), jnp.sum(batch.weights)
      >>> shapes = BatchShapes([(2, 4)], num_microbatches=len(jax.devices()))
      >>> report = compile_for(
      ...     loss_fn, optax.sgd(0.1), shapes, params=jnp.float32(1), target="here", progress=False
      ... )
      >>> [row.bucket for row in report]
      [Bucket(rows=2, length=4)]
    """
    if isinstance(target, str):
        target = Target.parse(target)
    state: dict[str, Any] = {"params": params, "extra": extra, "seed": seed}
    how: dict[str, Any] = {"layout": layout, "batch_spec": batch_spec, "options": options}
    how |= {"trainable": trainable}
    compiler = target_compiler(model, optimizer, plan, target=target, **state, **how)
    assert compiler.shapes.placement is not None
    placed, counter = compiler.shapes.placement.layout, None
    runs_again = placed.schedule == "zero_bubble" and placed.remat_in_force != "none"  # in both of its passes
    if placed.stage > 1 and placed.num_devices == len(compiler.devices) and not runs_again:
        # Values tell in the program what a stage does; the same layout without stages does the same in all.
        of_stage: dict[str, Any] = {"stage": 1, "schedule": Layout.schedule, "virtual": 1}
        whole = dataclasses.replace(placed, **of_stage, remat=placed.remat_in_force)
        how["layout"] = place(whole, compiler.devices[: whole.num_devices])
        state["params"] = jax.eval_shape(lambda params: params, params)
        counter = target_compiler(model, optimizer, compiler.shapes, target=target, **state, **how)
    buckets, rows = largest_first(compiler.shapes.buckets), []
    bar = tqdm(total=len(buckets), desc=f"compile for {target.name}", unit="bucket", disable=not progress)
    with without_compilation_cache(), bar, ThreadPoolExecutor(num_threads(options)) as threads:
        # All are lowered in this thread, whose settings of JAX count.
        for row in threads.map(functools.partial(_row, compiler, target), map(compiler.lower, buckets)):
            if counter is not None:
                specs = counter.state_spec, counter.shapes.spec(row.bucket)
                flops = _flops(counter, jax.make_jaxpr(counter.step_fn)(*specs).jaxpr)
                row = dataclasses.replace(row, flops=flops and flops / placed.stage)
            rows.append(row)
            bar.set_postfix_str(str(row.bucket))
            bar.update()
    return TargetReport(rows, target.name, layout_text(compiler), *compiler.clock.seconds)


def target_compiler(
    model: LayeredModel | LossFn | StepLoss,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    plan: HasShapes | PlannedSteps | BatchShapes,
    *,
    layout: LayoutLike,
    params: Any,
    target: Target,
    trainable: Trainable = None,
    extra: Any = None,
    seed: int | None = None,
    batch_spec: BatchSpec | None = None,
    options: CompileOptions = DEFAULT_OPTIONS,
) -> StepCompiler:
    """What compiles the train step, with the arguments of `compile_for`."""
    placement = _placed(layout, target)
    if isinstance(plan, HasShapes):
        plan = plan.shapes
    if isinstance(plan, BatchShapes):
        shapes = dataclasses.replace(plan, layout=placement, batch_spec=batch_spec or plan.batch_spec)
    else:
        shapes = BatchShapes.of_plan(plan, layout=placement, batch_spec=batch_spec)
    step = make_train_step(model, optimizer, layout=placement, trainable=trainable)
    state = step.init(_shapes_on(placement, params), extra=extra, seed=seed)
    in_force = dataclasses.replace(options, xla_options=(*target.xla_options, *options.xla_options))
    with without_compilation_cache():  # options are tried on a program
        return make_step_compiler(step, state, shapes, in_force)


def _shapes_on(placement: Placement, params: Any) -> Any:
    """Shapes of parameters, which lie on the mesh as they do where they are, if the layout leaves that to them."""

    def shape_of(leaf: Any, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = getattr(getattr(leaf, "sharding", None), "spec", None)
        return with_sharding(None if spec is None else NamedSharding(placement.mesh, spec), shape)

    shapes = jax.eval_shape(lambda params: params, params)
    return jax.tree.map(shape_of, params, shapes) if placement.layout.is_data_parallel else shapes


def _placed(layout: LayoutLike, target: Target) -> Placement:
    """Where a step runs on a target; raises ValueError for other devices."""
    if layout is None or isinstance(layout, str):
        layout = Layout() if layout is None else Layout.parse(layout)
    if isinstance(layout, Layout):
        return place(layout, target.devices)
    placement = placement_of(layout)
    assert placement is not None
    if others := [device for device in devices_of(placement.mesh) if device not in target.devices]:
        raise UserError(
            f"layout has devices that are not of the target {target.name}, whose are Target.parse(…).devices: "
            f"{list_first(others)}"
        )
    return placement


def layout_text(compiler: StepCompiler) -> str:
    """The layout of a step that was made by `target_compiler`."""
    assert compiler.shapes.placement is not None
    return str(compiler.shapes.placement.layout)


def compile_bucket(compiler: StepCompiler, bucket: AnyBucket, target: Target) -> TargetRow:
    """What the compiler says of the program of a bucket."""
    return _row(compiler, target, compiler.lower(bucket))


def _flops(compiler: StepCompiler, jaxpr: Jaxpr) -> float | None:
    """Operations of a device; None of arrays that the compiler splits, of stages, and of loops that turn by values."""
    assert compiler.shapes.placement is not None
    layout = compiler.shapes.placement.layout
    is_told = layout.num_devices == len(compiler.devices) and layout.stage == 1 and not has_unknown_turns(jaxpr)
    return float(count_operations(jaxpr, ())["flops"]) if is_told else None


def _row(compiler: StepCompiler, target: Target, lowered: LoweredBucket) -> TargetRow:
    bucket = lowered.bucket
    assert compiler.mesh is not None
    flops = _flops(compiler, lowered.jaxpr.jaxpr)
    known: dict[str, Any] = {"bucket": bucket, "lower_s": lowered.seconds, "flops": flops}
    begun = time.perf_counter()
    try:
        compiled, dump = compile_with_dump(compiler, lowered)
    except jax.errors.JaxRuntimeError as error:
        known["compile_s"] = time.perf_counter() - begun
        needed_bytes, limit_bytes = _needed_and_limit(error, target, bucket)
        return TargetRow(**known, total_bytes=needed_bytes, limit_bytes=limit_bytes)
    known["compile_s"] = compiled.row.compile_s
    ticks = branches_of_ticks(compiler.shapes, bucket)
    try:
        communication = communication_of(dump.program, compiler.mesh, ticks)
    except UserError:
        communication = None
    seconds = _predicted_seconds(dump.program, compiler, target, ticks)
    row = compiled.row
    if target.devices[0].platform == "tpu" and dump.buffers:
        # XLA counts more bytes of temporaries than it allocates; what it finds room for are the allocations.
        row = dataclasses.replace(row, temp_bytes=min(row.temp_bytes, allocated_bytes(dump)))
    return TargetRow(
        **known,
        argument_bytes=row.argument_bytes,
        output_bytes=row.output_bytes - row.alias_bytes,
        temp_bytes=row.temp_bytes,
        host_bytes=int(getattr(compiled.executable.memory_analysis(), "host_temp_size_in_bytes", 0)),
        total_bytes=row.total_bytes,
        limit_bytes=target.memory_bytes,
        communication=communication,
        seconds=seconds and seconds.total,
        exposed_s=seconds and seconds.exposed,
        kernels=dict(Counter(name for pattern in _KERNELS for name in pattern.findall(dump.program))),
        launches=count_launches(dump),
        buffers=largest_buffers(dump),
    )


def _predicted_seconds(program: str, compiler: StepCompiler, target: Target, ticks: Any) -> ProgramSeconds | None:
    if target.cluster is None:
        return None
    places = {device: place for place, device in enumerate(target.devices)}
    hosts = [places[device] // target.cluster.devices_per_host for device in devices_of(compiler.mesh)]
    is_tpu = target.devices[0].platform == "tpu"
    return program_seconds(program, target.cluster, is_tpu=is_tpu, hosts=hosts, ticks=ticks)


def _needed_and_limit(error: jax.errors.JaxRuntimeError, target: Target, bucket: AnyBucket) -> tuple[int, int]:
    """The bytes of a program for which the compiler found too little memory, and those there are; or another error."""
    found = _NO_ROOM.search(str(error))
    if found is None:
        raise UserError(f"{target.name}: the program of {bucket} does not compile: {error}") from error
    number, unit, of_limit, unit_of_limit = filter(lambda each: each is not None, found.groups())
    needed, limit = (
        round(float(size) * 1024 ** " KMGT".index(power or " "))
        for size, power in ((number, unit), (of_limit, unit_of_limit))
    )
    return needed, limit
