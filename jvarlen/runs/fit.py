"""`fit`: a whole training, from a configuration to a run directory.

It goes in the order in which a run shows it: data, plan, compilation, the loop around one pure step, the summary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import optax
from jax.sharding import Mesh

from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import remembered_interrupts
from jvarlen.batches.shapes import BatchShapes, BatchSpec
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.compiling.recompiles import no_recompiles
from jvarlen.compiling.report import CompileReport
from jvarlen.data.split import HELD_OUT, Split
from jvarlen.distributed.launch import launch
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import LayoutLike, Placement, placement_of, split_cpu
from jvarlen.distributed.processes import (
    agree,
    ending_stalled_processes,
    gather_texts,
    is_any_interrupted,
    is_main_process,
    naming_lost_processes,
    together,
)
from jvarlen.loading.collate import CollateFn
from jvarlen.parallel.layers import LayeredModel
from jvarlen.planning.lengths import Overlong
from jvarlen.planning.plan import Plan
from jvarlen.runs.config import FitConfig, saved_settings
from jvarlen.runs.directory import new_run_dir, point_latest_to, resumed_run_dir
from jvarlen.runs.loop import TrainingLoop
from jvarlen.runs.prepare import Prepared, prepare, say, show_estimates, when_compiled
from jvarlen.runs.summary import EvaluatedIn, Summary, write_summary
from jvarlen.runs.task import Task
from jvarlen.runs.trackers import Tracker, open_trackers
from jvarlen.training.checkpoint import Place, open_checkpoints
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import TrainState

__all__ = ["FitResult", "dry_run", "fit"]


class FitResult(NamedTuple):
    """The result of `fit`.

    Attributes:
      summary: figures of the run.
      run_dir: the directory of plan, metrics, settings, checkpoints, curves and summary.
      state: parameters and optimizer state after the last step, on any layout as on one device, in the form of the
        parameters that `fit` got or of `init_params`. With ZeRO, arrays of the optimizer may be padded with zeros.
    """

    summary: Summary
    run_dir: Path
    state: TrainState


def fit(
    config: FitConfig,
    data: Split | None = None,
    *,
    loss_fn: LossFn | LayeredModel | None = None,
    params: Any = None,
    optimizer: optax.GradientTransformation | None = None,
    collate: CollateFn | None = None,
    length_fn: Callable[[Any], int] | None = None,
    eval_loss_fn: LossFn | LayeredModel | None = None,
    extra: Any = None,
    batch_spec: BatchSpec | None = None,
    layout: LayoutLike = None,
    trackers: Mapping[str, Tracker] | None = None,
) -> FitResult:
    """Trains the built-in language model or your own loss, with every shape compiled before the first step.

    Prints the corpus, the plan, progress and a summary. Interrupted once (Ctrl-C or SIGTERM), it ends after the step in
    flight with everything saved; `config.directory.resume` then continues with exactly the remaining steps. After a
    kill or a crash it continues from the last checkpoint. No second run can use the run directory meanwhile.

    The microbatches of a step are spread over the devices; each device accumulates over its own. Losses and rates are
    the same, up to rounding, on any number of devices and processes, and a run may be resumed on another number.
    Several processes all call this; process 0 prints and writes, and all must reach its directory for the checkpoints.

    A model of your own needs `loss_fn` and `params`; `config.decoder` is then not used. A loss that takes a key gets
    keys from `config.seed`. Scalars among the sums that it returns are logged over Σ weight, at every step and
    evaluation.
    To resume, call `fit` again with the same arguments and `config.directory.run_dir` or `config.directory.resume`.

    Args:
      config: the settings.
      data: training and held-out samples, the same on all processes; None for the files of the settings, or the
        built-in corpus.
      loss_fn: a loss function, as for `make_train_step`, or a `jvarlen.parallel.LayeredModel`.
      params: pytree of arrays, the initial parameters; arrays that are already placed on these devices
        keep their sharding, if the layout is data-parallel alone.
      optimizer: replaces `config.optimizer`; the log then has no learning rates.
      collate: as for `load`; None for samples of tokens.
      length_fn: returns the length of a sample, as for `measure_lengths`; None for `len`, or for the attribute
        `lengths` of the dataset.
      eval_loss_fn: the loss of evaluations, such as one without dropout; None: `loss_fn`.
      extra: for losses that take it.
      batch_spec: as for `compile_buckets`; None: the shapes that `collate` gives for a step of each bucket.
      layout: where to train, as for `make_train_step`; None: as the settings say. If they name a layout, a mesh with
        its axes.
      trackers: more trackers besides those of the settings, by name; closed at the end. With several processes, only
        those of process 0 are used.

    Returns:
      `FitResult`.

    Raises:
      ValueError: settings that contradict each other or the data; resuming with another plan, model or data, or a run
        that is still running; a number of devices that does not divide the microbatches of a step; processes with
        different settings or plans; a sample that is not as planned.
      FileNotFoundError: there is no run to resume, or a data file is missing.
      OSError: the run directory or a checkpoint cannot be written.
      RecompileError: something was compiled after the first step.
      FloatingPointError: the loss is not finite; the last checkpoint is from before that.
      ProcessesError: another process failed, or was lost.
      KeyboardInterrupt: Ctrl-C or SIGTERM before the first step, or a second Ctrl-C; a second SIGTERM ends the process.
    """
    task = Task(
        loss_fn=loss_fn,
        params=params,
        eval_loss_fn=eval_loss_fn,
        extra=extra,
        optimizer=optimizer,
        collate=collate,
        batch_spec=batch_spec,
        length_fn=length_fn,
    )
    if config.dry_run:
        raise UserError("fit trains, and dry_run does not: call dry_run(config)")
    config, placement = _launched(config, data, layout)
    with remembered_interrupts(), contextlib.ExitStack() as held:
        return _fit(config, task, data, placement, trackers or {}, held)


def dry_run(config: FitConfig) -> None:
    """Prints the plan of a training, and what a step of its largest shape holds and sends on a device; trains nothing.

    Args:
      config: the settings, of the built-in model.

    Raises:
      ValueError: as `fit`, before its first step.
    """
    config, placement = _launched(config, None, None)
    with remembered_interrupts():
        show_estimates(prepare(config, Task(), None, placement))


def _launched(config: FitConfig, data: Split | None, where: LayoutLike) -> tuple[FitConfig, Placement | None]:
    """The settings of this process, and where it trains."""
    # Before interrupts are remembered: where processes meet, JAX takes SIGTERM for itself.
    hardware, layout, num_devices = config.hardware, config.hardware.layout, config.hardware.devices
    has_processes = hardware.has_processes or jax.distributed.is_initialized()  # touches no device: a CPU can be split
    placement = None
    if where is not None:
        if layout is None:
            placement = placement_of(where)
        elif isinstance(where, Mesh):
            placement = layout.on(where)
        else:
            raise UserError(f"layout ({where}) and parallel ({layout}) both say where to train: give one of them")
    else:
        if layout is not None and num_devices is None and not has_processes:
            if layout.data == -1:
                split_cpu(dataclasses.replace(layout, data=1, zero=0).num_devices, again=False)
            else:
                num_devices = layout.num_devices
        if num_devices is not None or has_processes or hardware.parallel is not None or jax.process_count() > 1:
            placement = launch(dataclasses.replace(hardware, devices=num_devices), layout or Layout())
    if layout is not None and placement is not None:
        hardware = dataclasses.replace(hardware, parallel=str(placement.layout))
        config = dataclasses.replace(config, hardware=hardware)
    if not is_main_process():
        config = dataclasses.replace(config, progress=False)
    if config.plan.overlong is None:
        overlong: Overlong = "truncate" if data is None and not config.data.files else "error"
        config = dataclasses.replace(config, plan=dataclasses.replace(config.plan, overlong=overlong))
    return config, placement


def _fit(
    config: FitConfig,
    task: Task,
    given: Split | None,
    placement: Placement | None,
    trackers: Mapping[str, Tracker],
    held: contextlib.ExitStack,
) -> FitResult:
    prepared = prepare(config, task, given, placement)
    config, task, course, placement = prepared.config, prepared.task, prepared.course, prepared.placement
    first_plan = course.plan_of_epoch(0)
    agree("the plan", first_plan.digest)
    run_dir = _open_run_dir(prepared, first_plan, held)

    state = task.init_state(course.optimizer, config.seed, placement)
    form = task.form_of(state, course.optimizer, placement)
    checkpoints = held.enter_context(
        open_checkpoints(
            run_dir / "checkpoints",
            keep_last=config.checkpoints.keep_last,
            keep_best=config.checkpoints.keep_best,
            config=saved_settings(config),
            form=form,
        )
    )
    place = course.first_place()
    if not checkpoints.is_empty:
        restore = checkpoints.restore_best if config.directory.resume_from == "best" else checkpoints.restore_latest
        state, place = restore(state)
        checkpoints.discard_after(place.num_steps_done)
        course.check_place(place)
    all_trackers = held.enter_context(
        open_trackers(
            config.trackers,
            run_dir if is_main_process() else None,
            start_step=place.num_steps_done,
            config=saved_settings(config),
            others=trackers if is_main_process() else None,
        )
    )

    compiled = _compile(prepared, state, place)
    for step in (compiled.train_step, compiled.eval_step):
        held.callback(step.close)
    loop = TrainingLoop(
        prepared=prepared,
        train_step=compiled.train_step,
        eval_step=compiled.eval_step,
        checkpoints=checkpoints,
        trackers=all_trackers,
        ticks=held.enter_context(ending_stalled_processes("training", config.stall_timeout_s)),
        run_dir=run_dir,
    )
    with naming_lost_processes("training"):
        trained = _train(loop, state, place)
    compiled.train_step.close()  # what an interrupted run did not need
    compiled.eval_step.close()
    report = compiled.train_step.report.with_plan(first_plan)
    prepared.chooser.remember(report)
    evaluated_in: EvaluatedIn = "loss"
    if task.is_language_model:
        evaluated_in = "bits per byte" if prepared.data.is_bytes else "bits per token"
    summary = _summary_of(trained, compiled, report, evaluated_in)
    with together("write the summary"):
        if is_main_process():
            write_summary(run_dir, summary, report)
            say("Compile report", report.table())
            say("Summary", str(summary))
            print(run_dir, flush=True)
    return FitResult(summary, run_dir, trained.state if form is None else form.save(trained.state))


class _Compiled(NamedTuple):
    """The compiled steps of training and evaluation.

    Attributes:
      seconds: until all was compiled, if that was before the first step.
      in_background: whether steps run while others are compiled.
    """

    train_step: CompiledBuckets
    eval_step: CompiledBuckets
    seconds: float
    in_background: bool


def _compile(prepared: Prepared, state: TrainState, place: Place) -> _Compiled:
    """Compiles the steps for the buckets that are used from a place on."""
    config, task, course = prepared.config, prepared.task, prepared.course
    time_steps = config.compile.time_steps is not False
    options = dataclasses.replace(config.compile, when=when_compiled(config), time_steps=time_steps)
    compile_for = functools.partial(
        compile_buckets,
        progress=config.progress and not options.in_background,
        options=options,
    )
    shapes_of = functools.partial(
        BatchShapes,
        microbatches_per_step=config.plan.microbatches_per_step,
        layout=prepared.placement,
        batch_spec=prepared.batch_spec(place.epoch),
    )
    start = time.perf_counter()
    steps_left = course.steps_left(place)
    buckets = course.buckets_left(place) or course.buckets
    if options.in_background:
        say("Compiling", f"{len(buckets)} shapes, in the order in which steps need them, while earlier steps run")
    train_step = compile_for(task.train_step(course.optimizer, prepared.placement), state, shapes_of(buckets))
    train_step.release_after({bucket: steps_left[bucket] for bucket in buckets})
    eval_step = compile_for(task.eval_step(prepared.placement), state, shapes_of(course.eval_buckets))
    return _Compiled(train_step, eval_step, time.perf_counter() - start, options.in_background)


class _Trained(NamedTuple):
    """The result of the training loop.

    Attributes:
      state: after the last step that was taken.
      place: likewise.
      evaluations: of each set, `Task.measure` after the last step of training; empty where it was interrupted.
      num_compilations: programs that were compiled after the first step.
      was_interrupted: whether steps, or that evaluation, are left.
    """

    state: TrainState
    place: Place
    evaluations: dict[str, float]
    num_compilations: int
    was_interrupted: bool


def _train(loop: TrainingLoop, state: TrainState, place: Place) -> _Trained:
    """Evaluates, takes the remaining steps, evaluates, and saves."""
    config, course, task = loop.prepared.config, loop.prepared.course, loop.prepared.task
    # The first evaluation, save and exchange come before the guard: all compile small things once.
    _raise_if_any_interrupted()
    if loop.is_evaluated_at(place):
        evaluations = loop.evaluate(state, place)
        if place.held_out_before is None and evaluations is not None:
            place = dataclasses.replace(place, held_out_before=task.measure(evaluations[HELD_OUT]))
    else:
        loop.warm_up_evaluation(state)
    _raise_if_any_interrupted()
    loop.save(state, place)
    if is_main_process() and config.directory.run_dir is None:
        point_latest_to(loop.run_dir)

    after: dict[str, float] = {}
    with no_recompiles(arithmetic=False) as compilations:  # metrics are added up on the host
        state, place = loop.run(state, place)
        was_interrupted = True
        if place.num_steps_done == course.num_steps:
            evaluations = loop.evaluate(state, place)
            if evaluations is not None:
                was_interrupted = False
                after = {name: task.measure(evaluation) for name, evaluation in evaluations.items()}
        loop.save(state, place, after.get(HELD_OUT))
        if was_interrupted:
            loop.checkpoints.wait()
            saved = f"{place.num_steps_done:,} steps are saved"
            is_own = not task.is_language_model
            say("Interrupted", saved, f"{'fit with resume=' if is_own else 'jvarlen train --resume '}{loop.run_dir}")
    return _Trained(state, place, after, compilations.num_compilations, was_interrupted)


def _summary_of(trained: _Trained, compiled: _Compiled, report: CompileReport, evaluated_in: EvaluatedIn) -> Summary:
    place, after = trained.place, trained.evaluations
    rows = [*report, *compiled.eval_step.report]
    stall_s = sum(row.stall_s for row in rows)
    return Summary(
        held_out_before=cast(float, place.held_out_before),
        held_out_after=after.get(HELD_OUT),
        evaluations=after,
        num_steps=place.num_steps_done,
        num_tokens=place.num_tokens_done,
        real_tokens_per_s=place.num_tokens_done / max(place.train_s, 1e-9),
        padding=1.0 - place.num_tokens_done / max(place.num_positions_done, 1),
        num_shapes=len(report),
        compile_s=sum(row.lower_s + row.compile_s for row in rows) if compiled.in_background else compiled.seconds,
        stall_s=stall_s if compiled.in_background else compiled.seconds,
        num_cache_hits=sum(row.cache_hit for row in rows),
        train_s=place.train_s,
        data_wait=place.data_wait_s / max(place.train_s, 1e-9),
        num_adjusted=place.num_adjusted_done,
        compilations_after_first_step=trained.num_compilations,
        interrupted=trained.was_interrupted,
        evaluated_in=evaluated_in,
    )


def _raise_if_any_interrupted() -> None:
    """Raises KeyboardInterrupt on all processes if one was interrupted, so that none waits for it."""
    if is_any_interrupted():
        raise KeyboardInterrupt


def _open_run_dir(prepared: Prepared, plan: Plan, held: contextlib.ExitStack) -> Path:
    """The run directory, which process 0 creates or, to resume a run, updates; `held` holds its lock."""
    config, data, run_dir = prepared.config, prepared.data, Path()
    resume = config.directory.resumed
    with together("open the run directory"):
        if is_main_process() and resume is None:
            run_dir = new_run_dir(config, prepared.shapes, plan, data.content_keys, held)
        elif is_main_process() and resume is not None:
            run_dir, changed = resumed_run_dir(config, resume, plan, data.content_keys, held)
            say("Resumed", str(run_dir), *(f"changed: {setting}" for setting in changed))
    if jax.process_count() == 1:
        return run_dir
    return Path(gather_texts("the run directory", str(run_dir.resolve()))[0])
