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
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Int64

from jvarlen import parallel
from jvarlen._common.checks import UserError
from jvarlen._common.interrupts import raise_if_interrupted, remembered_interrupts
from jvarlen.compiling.compilation_cache import use_compilation_cache
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.compile_options import When
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.compiling.ledger import Ledger
from jvarlen.compiling.recompiles import no_recompiles
from jvarlen.data.measure import known_lengths, measure_lengths
from jvarlen.data.split import HELD_OUT, Split
from jvarlen.distributed.launch import launch
from jvarlen.distributed.mesh import batch_shardings, replicate
from jvarlen.distributed.processes import (
    agree,
    gather_texts,
    is_any_interrupted,
    is_main_process,
    naming_lost_processes,
    together,
)
from jvarlen.distributed.watchdog import ending_stalled_processes
from jvarlen.loading.plan_source import CollateFn
from jvarlen.planning.lengths import DataSource, Overlong
from jvarlen.planning.plan import Plan
from jvarlen.reports.report import length_histogram
from jvarlen.runs.config import FitConfig, saved_settings, shared_settings
from jvarlen.runs.data import TrainingData, open_training_data
from jvarlen.runs.directory import is_run_dir, new_run_dir, point_latest_to, resumed_run_dir
from jvarlen.runs.epochs import Course
from jvarlen.runs.loop import TrainingLoop
from jvarlen.runs.shape_choice import ShapeChooser
from jvarlen.runs.summary import EvaluatedIn, Summary, write_summary
from jvarlen.runs.task import BatchSpec, Task
from jvarlen.runs.trackers import Tracker, open_trackers
from jvarlen.training.checkpoint import Place, open_checkpoints
from jvarlen.training.losses import LossFn
from jvarlen.training.step import make_eval_step, make_train_step
from jvarlen.training.train_state import TrainState

__all__ = ["FitResult", "fit"]

_DEMO_STEPS = 360  # enough to learn from the built-in corpus, in minutes on a CPU


class FitResult(NamedTuple):
    """The result of `fit`.

    Attributes:
      summary: figures of the run.
      run_dir: the directory of plan, metrics, settings, checkpoints, curves and summary.
      state: parameters and optimizer state after the last step.
    """

    summary: Summary
    run_dir: Path
    state: TrainState


def fit(
    config: FitConfig,
    data: Split | None = None,
    *,
    loss_fn: LossFn | None = None,
    params: Any = None,
    optimizer: optax.GradientTransformation | None = None,
    collate: CollateFn | None = None,
    length_fn: Callable[[Any], int] | None = None,
    eval_loss_fn: LossFn | None = None,
    extra: Any = None,
    batch_spec: BatchSpec | None = None,
    mesh: Mesh | None = None,
    trackers: Mapping[str, Tracker] | None = None,
) -> FitResult:
    """Trains the built-in language model or your own loss, with every shape compiled before the first step.

    Prints the corpus, the plan, progress and a summary. Interrupted once (Ctrl-C or SIGTERM), it ends after the step in
    flight with everything saved; `config.resume` then continues with exactly the remaining steps. After a kill or a
    crash it continues from the last checkpoint. No second run can use the run directory meanwhile.

    The microbatches of a step are spread over the devices; each device accumulates over its own. Losses and rates are
    the same, up to rounding, on any number of devices and processes, and a run may be resumed on another number.
    Several processes all call this; process 0 prints and writes, and all must reach its directory for the checkpoints.

    A model of your own needs `loss_fn` and `params`; `config.model` is then not used. A loss that takes a key gets keys
    from `config.seed`. Scalars among the sums that it returns are logged over Σ weight, at every step and evaluation.
    To resume, call `fit` again with the same arguments and `config.run_dir` or `config.resume`.

    Args:
      config: the settings.
      data: training and held-out samples, the same on all processes; None for the files of the settings, or the
        built-in corpus.
      loss_fn: as for `make_train_step`.
      params: pytree of arrays, the initial parameters; arrays that are already placed on `mesh` keep their sharding.
      optimizer: replaces `config.optimizer`; the log then has no learning rates.
      collate: as for `load`; None for samples of tokens.
      length_fn: returns the length of a sample, as for `measure_lengths`; None for `len`, or for the attribute
        `lengths` of the dataset.
      eval_loss_fn: the loss of evaluations, such as one without dropout; None: `loss_fn`.
      extra: for losses that take it.
      batch_spec: as for `compile_buckets`; None: the shapes that `collate` gives for a step of each bucket.
      mesh: devices to train on, along an axis "data"; None: those of the settings.
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
    # Before the block: where processes meet, JAX takes SIGTERM for itself.
    num_devices = config.devices
    has_processes = config.has_processes or jax.distributed.is_initialized()  # touches no device: a CPU can be split
    if config.layout is not None and num_devices is None and not has_processes:
        num_devices = config.layout.num_devices
    if mesh is None and (num_devices is not None or has_processes or jax.process_count() > 1):
        mesh = launch(dataclasses.replace(config, devices=num_devices))
    if not is_main_process():
        config = dataclasses.replace(config, progress=False)
    if config.plan.overlong is None:
        overlong: Overlong = "truncate" if data is None and not config.data else "error"
        config = dataclasses.replace(config, plan=dataclasses.replace(config.plan, overlong=overlong))
    with remembered_interrupts(), contextlib.ExitStack() as held:
        return _fit(config, task, data, mesh, trackers or {}, held)


def _fit(
    config: FitConfig,
    task: Task,
    given: Split | None,
    mesh: Mesh | None,
    trackers: Mapping[str, Tracker],
    held: contextlib.ExitStack,
) -> FitResult:
    _check_mesh(config, mesh)
    if config.compile.cache_dir is not None:
        use_compilation_cache(config.compile.cache_dir)  # now: drawing the weights is compiled as well
    with together("open the data"):
        opened = _open(config, task, given)
    task = task.with_model(config.model, opened.data.vocab_size, config.seed)
    max_steps = _DEMO_STEPS if _is_endless_demo(config, given) else config.max_steps
    num_devices = 1 if mesh is None else mesh.devices.size
    chooser = ShapeChooser(config, task, opened.data, _when(config), num_devices)
    config = dataclasses.replace(config, plan=chooser.choose(opened.lengths, opened.eval_lengths, max_steps))
    with together("plan the training"):
        planned = _plan(config, task, opened, max_steps, chooser.reason)
    course = planned.course
    first_plan = course.plan_of_epoch(0)
    agree("the plan", first_plan.digest)
    run_dir = _open_run_dir(config, first_plan, planned.data, held)

    state = task.init_state(course.optimizer, config.seed, mesh, config.layout)
    if mesh is not None and config.layout is None:
        state = _place(state, mesh)
    checkpoints = held.enter_context(
        open_checkpoints(
            run_dir / "checkpoints",
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            config=saved_settings(config),
        )
    )
    place = course.first_place()
    if not checkpoints.is_empty:
        restore = checkpoints.restore_best if config.resume_from == "best" else checkpoints.restore_latest
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

    compiled = _compile(config, task, planned, state, place, mesh)
    for step in (compiled.train_step, compiled.eval_step):
        held.callback(step.close)
    loop = TrainingLoop(
        config=config,
        course=course,
        data=planned.data,
        task=task,
        lengths=planned.lengths if task.compares_lengths else None,
        eval_lengths={name: of_set if task.compares_lengths else None for name, of_set in planned.eval_lengths.items()},
        mesh=mesh,
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
    ledger = compiled.train_step.ledger.with_plan(first_plan)
    chooser.remember(ledger)
    evaluated_in: EvaluatedIn = "loss"
    if task.is_language_model:
        evaluated_in = "bits per byte" if planned.data.is_bytes else "bits per token"
    summary = _summary_of(trained, compiled, ledger, evaluated_in)
    with together("write the summary"):
        if is_main_process():
            write_summary(run_dir, summary, ledger)
            _say("Ledger", ledger.table())
            _say("Summary", str(summary))
            print(run_dir, flush=True)
    return FitResult(summary, run_dir, trained.state)


class _Compiled(NamedTuple):
    """The compiled steps of training and evaluation.

    Attributes:
      seconds: until all was compiled, if that was before the first step.
      is_behind: whether steps run while others are compiled.
    """

    train_step: CompiledBuckets
    eval_step: CompiledBuckets
    seconds: float
    is_behind: bool


def _compile(
    config: FitConfig, task: Task, planned: _Planned, state: TrainState, place: Place, mesh: Mesh | None
) -> _Compiled:
    """Compiles the steps for the buckets that are used from a place on."""
    course, data = planned.course, planned.data
    assert task.loss_fn is not None
    options = dataclasses.replace(config.compile, when=_when(config), time_steps=config.compile.time_steps is not False)
    batch_spec = task.batch_spec_for(
        {"training": course.plan_of_epoch(place.epoch), **course.eval_plans},
        {"training": data.train, **data.evaluation},
        packed=config.plan.pack,
    )
    compile_for = functools.partial(
        compile_buckets,
        microbatches_per_step=config.plan.microbatches_per_step,
        mesh=mesh,
        batch_spec=batch_spec,
        progress=config.progress and not options.is_behind,
        options=options,
    )
    start = time.perf_counter()
    steps_left = course.steps_left(place)
    buckets = course.buckets_left(place) or course.buckets
    if options.is_behind:
        _say("Compiling", f"{len(buckets)} shapes, in the order in which steps need them, while earlier steps run")
    if mesh is None or config.layout is None:
        step_fn = make_train_step(task.loss_fn, course.optimizer, mesh=mesh)
    else:
        step_fn = parallel.make_train_step(task.loss_fn, course.optimizer, mesh=mesh, layout=config.layout)
    train_step = compile_for(step_fn, state, buckets)
    train_step.release_after({bucket: steps_left[bucket] for bucket in buckets})
    eval_step = compile_for(make_eval_step(task.eval_loss_fn or task.loss_fn, mesh=mesh), state, course.eval_buckets)
    return _Compiled(train_step, eval_step, time.perf_counter() - start, options.is_behind)


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
    # The first evaluation, save and exchange come before the guard: all compile small things once.
    _raise_if_any_interrupted()
    if loop.is_evaluated_at(place):
        evaluations = loop.evaluate(state, place)
        if place.held_out_before is None and evaluations is not None:
            place = dataclasses.replace(place, held_out_before=loop.task.measure(evaluations[HELD_OUT]))
    else:
        loop.warm_up_evaluation(state)
    _raise_if_any_interrupted()
    loop.save(state, place)
    if is_main_process() and loop.config.run_dir is None:
        point_latest_to(loop.run_dir)

    after: dict[str, float] = {}
    with no_recompiles() as compilations:
        state, place = loop.run(state, place)
        was_interrupted = True
        if place.num_steps_done == loop.course.num_steps:
            evaluations = loop.evaluate(state, place)
            if evaluations is not None:
                was_interrupted = False
                after = {name: loop.task.measure(evaluation) for name, evaluation in evaluations.items()}
        loop.save(state, place, after.get(HELD_OUT))
        if was_interrupted:
            loop.checkpoints.wait()
            saved = f"{place.num_steps_done:,} steps are saved"
            is_own = not loop.task.is_language_model
            _say("Interrupted", saved, f"{'fit with resume=' if is_own else 'jvarlen train --resume '}{loop.run_dir}")
    return _Trained(state, place, after, compilations.num_compilations, was_interrupted)


def _summary_of(trained: _Trained, compiled: _Compiled, ledger: Ledger, evaluated_in: EvaluatedIn) -> Summary:
    place, after = trained.place, trained.evaluations
    rows = [*ledger, *compiled.eval_step.ledger]
    stall_s = sum(row.stall_s for row in rows)
    return Summary(
        held_out_before=cast(float, place.held_out_before),
        held_out_after=after.get(HELD_OUT),
        evaluations=after,
        num_steps=place.num_steps_done,
        num_tokens=place.num_tokens_done,
        real_tokens_per_s=place.num_tokens_done / max(place.train_s, 1e-9),
        padding=1.0 - place.num_tokens_done / max(place.num_positions_done, 1),
        num_shapes=len(ledger),
        compile_s=sum(row.lower_s + row.compile_s for row in rows) if compiled.is_behind else compiled.seconds,
        stall_s=stall_s if compiled.is_behind else compiled.seconds,
        num_cache_hits=sum(row.cache_hit for row in rows),
        train_s=place.train_s,
        data_wait=place.data_wait_s / max(place.train_s, 1e-9),
        num_adjusted=place.num_adjusted_done,
        compilations_after_first_step=trained.num_compilations,
        interrupted=trained.was_interrupted,
        evaluated_in=evaluated_in,
    )


def _place(state: TrainState, mesh: Mesh) -> TrainState:
    """The state on a mesh: arrays that are already on it stay, all others are replicated."""

    def placed(leaf: Any) -> jax.Array:
        sharding = getattr(leaf, "sharding", None)
        is_there = isinstance(sharding, NamedSharding) and sharding.device_set == set(mesh.devices.flat)
        return leaf if is_there else replicate(leaf, mesh)

    return jax.tree.map(placed, state)


def _check_mesh(config: FitConfig, mesh: Mesh | None) -> None:
    """Raises ValueError for shards that do not divide a step, and for processes that were set differently."""
    settings = {name: repr(value) for name, value in shared_settings(config).items()}
    if len(set(gather_texts("the settings", repr(settings)))) > 1:
        of_processes = {name: gather_texts(name, value) for name, value in settings.items()}
        differing = [f"{name}: {', '.join(values)}" for name, values in of_processes.items() if len(set(values)) > 1]
        raise UserError(f"processes differ in settings, in the order of processes: {'; '.join(differing)}")
    if mesh is not None:
        batch_shardings(np.empty(config.plan.microbatches_per_step), mesh)


def _raise_if_any_interrupted() -> None:
    """Raises KeyboardInterrupt on all processes if one was interrupted, so that none waits for it."""
    if is_any_interrupted():
        raise KeyboardInterrupt


def _when(config: FitConfig) -> When:
    """When shapes are compiled: while steps run, which is faster, or before, where several processes train."""
    return config.compile.when or ("behind" if jax.process_count() == 1 else "ahead")


class _Opened(NamedTuple):
    """The data, and the lengths of the samples to train on and of each set to evaluate on."""

    data: TrainingData
    lengths: Int64[np.ndarray, " N"]
    eval_lengths: dict[str, Int64[np.ndarray, " H"]]


class _Planned(NamedTuple):
    """The data, all steps, and the lengths of the samples to train on and of each set to evaluate on."""

    data: TrainingData
    course: Course
    lengths: Int64[np.ndarray, " N"]
    eval_lengths: dict[str, Int64[np.ndarray, " H"]]


def _is_endless_demo(config: FitConfig, given: Split | None) -> bool:
    """Whether the built-in corpus is trained on and no number of steps is given."""
    return given is None and not config.data and config.max_steps is None and config.num_epochs is None


def _open(config: FitConfig, task: Task, given: Split | None) -> _Opened:
    def lengths_of(dataset: DataSource, progress: bool) -> Int64[np.ndarray, " N"]:
        if task.length_fn is None:
            return known_lengths(dataset, progress=progress)
        return measure_lengths(dataset, task.length_fn, progress=progress)

    data = open_training_data(config, given)
    lengths = lengths_of(data.train, config.progress)
    held_out, *others = [f"{len(dataset):,} of {name}" for name, dataset in data.evaluation.items()]
    _say("Corpus", length_histogram(lengths), f"evaluated on other samples: {', '.join([held_out, *others])}")

    return _Opened(data, lengths, {name: lengths_of(dataset, False) for name, dataset in data.evaluation.items()})


def _plan(config: FitConfig, task: Task, opened: _Opened, max_steps: int | None, reason: str) -> _Planned:
    data, lengths, eval_lengths = opened
    course = Course(dataclasses.replace(config, max_steps=max_steps), lengths, eval_lengths, task.optimizer)
    rates = None if course.rates_of_epoch is None else course.rates_of_epoch(0).in_force
    report = course.plan_of_epoch(0).report(rates, cost=config.plan.cost, compile_seconds=config.plan.compile_seconds)
    _say("Plan", report, course.describe(), *([reason] if reason else []))
    raise_if_interrupted()
    return _Planned(data, course, lengths, eval_lengths)


def _open_run_dir(config: FitConfig, plan: Plan, data: TrainingData, held: contextlib.ExitStack) -> Path:
    """The run directory, which process 0 creates or, to resume a run, updates; `held` holds its lock."""
    run_dir = Path()
    resume = config.resume
    if config.run_dir is not None and is_run_dir(config.run_dir):
        resume = config.run_dir
    with together("open the run directory"):
        if is_main_process() and resume is None:
            run_dir = new_run_dir(config, plan, data.content_keys, held)
        elif is_main_process() and resume is not None:
            run_dir, changed = resumed_run_dir(config, resume, plan, data.content_keys, held)
            _say("Resumed", str(run_dir), *(f"changed: {setting}" for setting in changed))
    if jax.process_count() == 1:
        return run_dir
    return Path(gather_texts("the run directory", str(run_dir.resolve()))[0])


def _say(title: str, *texts: str) -> None:
    if is_main_process():
        print(f"\n{title}", *texts, sep="\n", flush=True)
