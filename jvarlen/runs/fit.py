"""`fit`: a whole training, from a configuration to a run directory, around one loop and one pure step.

It goes in the order in which a run shows it: data, plan, compilation, the loop, the summary. Metrics are read a step
late, so that no step waits for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.interrupts import remembered_interrupts
from jvarlen._common.progress import show_line
from jvarlen.batches.shapes import BatchShapes, BatchSpec
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.compiling.recompiles import no_recompiles
from jvarlen.data.split import HELD_OUT, Split
from jvarlen.distributed.launch import launch
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import LayoutLike, Placement, placement_of, split_cpu
from jvarlen.distributed.processes import (
    Ticks,
    agree,
    ending_stalled_processes,
    gather_texts,
    is_any_interrupted,
    is_main_process,
    naming_lost_processes,
    together,
)
from jvarlen.loading.collate import CollateFn
from jvarlen.loading.loader import Loader, load
from jvarlen.parallel.layers import LayeredModel
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import Overlong
from jvarlen.runs.config import FitConfig, saved_settings
from jvarlen.runs.directory import (
    EvaluatedIn,
    Summary,
    new_run_dir,
    point_latest_to,
    resumed_run_dir,
    write_summary,
)
from jvarlen.runs.prepare import Prepared, prepare, say, show_estimates
from jvarlen.runs.steps import StepDisplay, StepMeter, StepProfiler
from jvarlen.runs.task import Evaluation, Task
from jvarlen.runs.trackers import Tracker, Trackers, open_trackers
from jvarlen.training.checkpoint import Checkpoints, Place, open_checkpoints
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import Metrics, TrainState

__all__ = ["FitResult", "dry_run", "fit"]

_WAIT_S = 0.2  # for the compiler, between two looks at whether the run was interrupted
_STEPS_BETWEEN_EXCHANGES = 16  # of several processes: each exchange waits for the steps in flight


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
    """Trains the built-in language model or your own loss, with every shape compiled before its first step.

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
      RecompileError: something other than the planned shapes was compiled after the first step.
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
    """The training; `held` holds what is open until its end."""
    prepared = prepare(config, task, given, placement)
    config, task, course, placement = prepared.config, prepared.task, prepared.course, prepared.placement
    first_plan, is_main = course.plan_of_epoch(0), is_main_process()
    agree("the plan", first_plan.digest)
    run_dir = _open_run_dir(prepared, held)

    state, place = task.init_state(course.optimizer, config.seed, placement), course.first_place()
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
    if not checkpoints.is_empty:
        restore = checkpoints.restore_best if config.directory.resume_from == "best" else checkpoints.restore_latest
        state, place = restore(state)
        checkpoints.discard_after(place.num_steps_done)
        course.check_place(place)
    log = held.enter_context(
        open_trackers(
            config.trackers,
            run_dir if is_main else None,
            start_step=place.num_steps_done,
            config=saved_settings(config),
            others=trackers if is_main else None,
        )
    )

    start = time.perf_counter()
    train_step, eval_step = _compile(prepared, state, place)
    compile_s = time.perf_counter() - start
    held.callback(train_step.close)
    held.callback(eval_step.close)
    ticks = held.enter_context(ending_stalled_processes("training", config.stall_timeout_s))
    loop = _Loop(prepared, train_step, eval_step, checkpoints, log, ticks, run_dir)
    with naming_lost_processes("training"):
        state, place, evaluations, num_compilations = loop.train(state, place)
    train_step.close()  # what an interrupted run did not need
    eval_step.close()

    report = train_step.report.with_plan(first_plan)
    prepared.chooser.remember(report)
    evaluated_in: EvaluatedIn = "loss"
    if task.is_language_model:
        evaluated_in = "bits per byte" if prepared.data.is_bytes else "bits per token"
    rows, in_background = [*report, *eval_step.report], prepared.compile_options.in_background
    summary = Summary(
        held_out_before=cast(float, place.held_out_before),
        held_out_after=evaluations.get(HELD_OUT),
        evaluations=evaluations,
        num_steps=place.num_steps_done,
        num_tokens=place.num_tokens_done,
        real_tokens_per_s=place.num_tokens_done / max(place.train_s, 1e-9),
        padding=1.0 - place.num_tokens_done / max(place.num_positions_done, 1),
        num_shapes=len(report),
        compile_s=sum(row.lower_s + row.compile_s for row in rows) if in_background else compile_s,
        stall_s=sum(row.stall_s for row in rows) if in_background else compile_s,
        num_cache_hits=sum(row.cache_hit for row in rows),
        train_s=place.train_s,
        data_wait=place.data_wait_s / max(place.train_s, 1e-9),
        num_adjusted=place.num_adjusted_done,
        compilations_after_first_step=num_compilations,
        interrupted=not evaluations,
        evaluated_in=evaluated_in,
    )
    with together("write the summary"):
        if is_main:
            write_summary(run_dir, summary, report)
            say("Compile report", report.table())
            say("Summary", str(summary))
            print(run_dir, flush=True)
    return FitResult(summary, run_dir, state if form is None else form.save(state))


def _open_run_dir(prepared: Prepared, held: contextlib.ExitStack) -> Path:
    """The run directory, which process 0 creates or, to resume a run, updates; `held` holds its lock."""
    config, run_dir, resumed = prepared.config, Path(), prepared.config.directory.resumed
    plan, keys = prepared.course.plan_of_epoch(0), prepared.data.content_keys
    with together("open the run directory"):
        if is_main_process() and resumed is None:
            run_dir = new_run_dir(config, prepared.shapes, plan, keys, held)
        elif is_main_process() and resumed is not None:
            run_dir, changed = resumed_run_dir(config, resumed, plan, keys, held)
            say("Resumed", str(run_dir), *(f"changed: {setting}" for setting in changed))
    if jax.process_count() == 1:
        return run_dir
    return Path(gather_texts("the run directory", str(run_dir.resolve()))[0])


def _compile(prepared: Prepared, state: TrainState, place: Place) -> tuple[CompiledBuckets, CompiledBuckets]:
    """The steps of training and evaluation, for the buckets that are used from a place on."""
    config, task, course, options = prepared.config, prepared.task, prepared.course, prepared.compile_options
    shapes_of = functools.partial(
        BatchShapes,
        microbatches_per_step=config.plan.microbatches_per_step,
        layout=prepared.placement,
        batch_spec=prepared.batch_spec(place.epoch),
    )
    compile_for: dict[str, Any] = {"progress": config.progress and not options.in_background, "options": options}
    steps_left, buckets = course.steps_left(place), course.buckets_left(place) or course.buckets
    if options.in_background:
        say("Compiling", f"{len(buckets)} shapes, in the order in which steps need them, while earlier steps run")
    train_step = task.train_step(course.optimizer, prepared.placement)
    compiled = compile_buckets(train_step, state, shapes_of(buckets), **compile_for)
    compiled.release_after({bucket: steps_left[bucket] for bucket in buckets})
    eval_step = task.eval_step(prepared.placement)
    return compiled, compile_buckets(eval_step, state, shapes_of(course.eval_buckets), **compile_for)


@dataclasses.dataclass
class _Loop:
    """The loop around the compiled steps; `ticks` show other processes that this one is alive."""

    prepared: Prepared
    train_step: CompiledBuckets
    eval_step: CompiledBuckets
    checkpoints: Checkpoints
    trackers: Trackers
    ticks: Ticks
    run_dir: Path
    _evaluated: tuple[int, dict[str, Evaluation]] | None = dataclasses.field(default=None, init=False)

    def train(self, state: TrainState, place: Place) -> tuple[TrainState, Place, dict[str, float], int]:
        """Evaluates, takes the remaining steps, evaluates, and saves.

        The last state and place; the metric of each set after the last step, of none if training was interrupted; and
        the number of programs that were compiled after the first step.
        """
        config, course, task = self.prepared.config, self.prepared.course, self.prepared.task
        # The first evaluation, save and exchange come before the guard: all compile small things once.
        _raise_if_any_interrupted()
        if self._is_evaluated_at(place):
            evaluations = self._evaluate(state, place)
            if place.held_out_before is None and evaluations is not None:
                place = dataclasses.replace(place, held_out_before=task.measure(evaluations[HELD_OUT]))
        else:
            self._evaluate_steps(state, max_steps=1)
        _raise_if_any_interrupted()
        self._save(state, place)
        if is_main_process() and config.directory.run_dir is None:
            point_latest_to(self.run_dir)

        after: dict[str, float] = {}
        with no_recompiles(arithmetic=False) as compilations:  # metrics are added up on the host
            if place.num_steps_done < course.num_steps:
                state, place = self._take_steps(state, place)
            if place.num_steps_done == course.num_steps:
                evaluations = self._evaluate(state, place)
                after = {name: task.measure(evaluation) for name, evaluation in (evaluations or {}).items()}
            self._save(state, place, after.get(HELD_OUT))
            if not after:
                self.checkpoints.wait()
                how = "jvarlen train --resume " if task.is_language_model else "fit with resume="
                say("Interrupted", f"{place.num_steps_done:,} steps are saved", f"{how}{self.run_dir}")
        return state, place, after, compilations.num_compilations

    def _take_steps(self, state: TrainState, place: Place) -> tuple[TrainState, Place]:
        """Takes the remaining steps, or those before an interrupt."""
        config, course, task = self.prepared.config, self.prepared.course, self.prepared.task
        batches = self._load(
            course.plan_of_epoch,
            self.prepared.data.train,
            self.prepared.lengths,
            epoch=place.epoch,
            num_epochs=-(-course.num_steps // course.steps_per_epoch),
            start_step=place.step,
            num_workers=config.data.num_workers,
        )
        is_shown: dict[str, Any] = {"progress": config.progress, "in_bits": task.is_language_model}
        steps_left = course.num_steps - place.num_steps_done
        with (
            contextlib.closing(batches),
            StepDisplay(course.num_steps, place.num_steps_done, **is_shown) as display,
            StepProfiler(self.run_dir / "profile", config.profile, steps_left=steps_left) as profiler,
        ):
            batch = next(batches)  # starting to read is no wait of a step
            meter = StepMeter(place.train_s, place.data_wait_s)
            num_adjusted_before = place.num_adjusted_done
            running: tuple[dict[str, Any], Metrics] | None = None

            def read_metrics(pending: Sequence[AnyBucket] = ()) -> None:
                """Reads those of the running step, which waits for its end, and reports them."""
                nonlocal running
                if running is not None:
                    record = _with_metrics(*running) | meter.end_step()
                    running = None
                    self.trackers.log(record)
                    display.update(record, pending=pending)

            def measured(place: Place) -> Place:
                num_adjusted = num_adjusted_before + batches.num_adjusted
                return dataclasses.replace(
                    place, train_s=meter.train_s, data_wait_s=meter.data_wait_s, num_adjusted_done=num_adjusted
                )

            while True:
                self.ticks()  # before the computation that waits for all processes
                if not self._has_program(place):
                    break
                record = course.record(place)
                with profiler.step(f"{record['bucket_rows']}×{record['bucket_length']}", place.num_steps_done, state):
                    state, metrics = self.train_step(state, batch)
                read_metrics(self.train_step.pending)  # of the step before
                running = record, metrics
                place = course.next_place(place)
                if place.num_steps_done == course.num_steps:  # its evaluation and its checkpoint come after the loop
                    break
                is_evaluated, kept = self._is_evaluated_at(place), config.checkpoints
                # Where the best are kept, every evaluated state may be one of them.
                is_saved = place.num_steps_done % kept.checkpoint_every == 0 or (is_evaluated and kept.keep_best)
                if is_saved or is_evaluated:
                    read_metrics()
                    place, metric = measured(place), None
                    if is_evaluated:
                        evaluations = self._evaluate(state, place)
                        metric = None if evaluations is None else task.measure(evaluations[HELD_OUT])
                        meter.skip()
                    if is_saved:
                        self._save(state, place, metric)
                if _is_interrupted_at(place.num_steps_done):
                    break
                if not self.train_step.pending:
                    self.eval_step.advance()
                batch = meter.next(batches)
            read_metrics()
            return state, measured(place)

    def _is_evaluated_at(self, place: Place) -> bool:
        """Whether to evaluate at a place: before the first step, after the last, and at every evaluation interval."""
        every = self.prepared.config.eval_every
        is_due = every is not None and place.num_steps_done % every == 0
        return is_due or place.num_steps_done in (0, self.prepared.course.num_steps)

    def _evaluate(self, state: TrainState, place: Place) -> dict[str, Evaluation] | None:
        """Evaluates on every set, once at a place; None if it was interrupted."""
        if self._evaluated is not None and self._evaluated[0] == place.num_steps_done:
            return self._evaluated[1]
        evaluations = self._evaluate_steps(state)
        if evaluations is None:
            return None
        task = self.prepared.task
        told = [f"evaluation after step {place.num_steps_done:,}"]
        for name, evaluation in evaluations.items():
            measured = task.measure(evaluation)
            if task.is_language_model:
                figure = "bits_per_token"
                told.append(f"{name} {measured:.3f} bits/token")
            else:
                figure = "mean_loss"  # by which readers tell a loss of the user's own
                told.append(f"{name} loss {measured:.4g}")
            record = {"step": place.num_steps_done, "time_s": place.train_s, "evaluation": name, figure: measured}
            self.trackers.log(record | {"num_tokens": round(evaluation.weight)} | evaluation.sums)
            told += [f"{of_sum} {mean:.4g}" for of_sum, mean in evaluation.sums.items()]
        show_line(" · ".join(told), progress=self.prepared.config.progress)
        self._evaluated = place.num_steps_done, evaluations
        return evaluations

    def _save(self, state: TrainState, place: Place, metric: float | None = None) -> None:
        """Saves in the background, after everything logged so far is on disk."""
        self.trackers.sync()
        self.checkpoints.save(state, place, metric=metric)

    def _evaluate_steps(self, state: TrainState, max_steps: int | None = None) -> dict[str, Evaluation] | None:
        """The result on each set, over so many steps of each; None if it was interrupted."""
        evaluations: dict[str, Evaluation] = {}
        num_steps = 0
        for name, plan in self.prepared.course.eval_plans.items():
            steps = []
            reading = self._load(plan, self.prepared.data.evaluation[name], self.prepared.eval_lengths[name])
            with contextlib.closing(reading) as batches:
                for batch in itertools.islice(batches, max_steps):
                    self.ticks()
                    if _is_interrupted_at(num_steps):
                        return None
                    steps.append(self.eval_step(state, batch)[1])
                    num_steps += 1
            on_host: list[Metrics] = jax.device_get(steps)
            weight = math.fsum(metrics.weight_sum for metrics in on_host)
            sums: dict[str, float] = {}
            for metrics in on_host:
                for of_sum, value in metrics.sums.items():
                    if np.ndim(value) == 0:
                        sums[of_sum] = sums.get(of_sum, 0.0) + float(value)
            divisor = weight or 1.0
            loss = math.fsum(metrics.loss_sum for metrics in on_host) / divisor
            evaluations[name] = Evaluation(loss, weight, {of_sum: total / divisor for of_sum, total in sums.items()})
        return evaluations

    def _load(self, plan: Any, dataset: Any, lengths: Any, **where: Any) -> Loader:
        config, task = self.prepared.config, self.prepared.task
        return load(
            plan,
            dataset,
            layout=self.prepared.placement,
            collate=task.collate,
            lengths=lengths if task.compares_lengths else None,
            on_mismatch=config.data.on_mismatch,
            verify=config.verify,
            **where,
        )

    def _has_program(self, place: Place) -> bool:
        """Waits until the program of the next step is compiled; False if the run was interrupted meanwhile."""
        plan = self.prepared.course.plan_of_epoch(place.epoch)
        bucket = plan.buckets[plan.step_bucket[place.step]]
        while not self.train_step.wait(bucket, timeout=_WAIT_S):
            self.ticks.wait()
            if jax.process_count() == 1 and is_any_interrupted():
                return False
        return True


def _with_metrics(record: dict[str, Any], metrics: Metrics) -> dict[str, Any]:
    """The record of a step with its metrics; raises FloatingPointError if the loss is not finite."""
    metrics = jax.device_get(metrics)
    weight = float(metrics.weight_sum)
    record["loss"] = float(metrics.loss_sum) / weight if weight else 0.0
    sums = {name: value for name, value in metrics.sums.items() if np.ndim(value) == 0}
    if clashing := sums.keys() & (record.keys() | {"time_s"}):
        raise UserError(f"sums of the loss must have other names than figures of a step: {list_first(clashing)}")
    if not math.isfinite(record["loss"]):
        raise FloatingPointError(f"the loss is {record['loss']} at step {record['step']}; the run ends")
    return record | {name: float(value) / (weight or 1.0) for name, value in sums.items()}


def _is_interrupted_at(num_steps: int) -> bool:
    """Whether to stop after this step: processes decide together, and so only now and then."""
    every = 1 if jax.process_count() == 1 else _STEPS_BETWEEN_EXCHANGES
    return num_steps % every == 0 and is_any_interrupted()


def _raise_if_any_interrupted() -> None:
    """Raises KeyboardInterrupt on all processes if one was interrupted, so that none waits for it."""
    if is_any_interrupted():
        raise KeyboardInterrupt
