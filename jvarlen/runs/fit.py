"""`fit`: a whole training, from a configuration to a run directory, around one loop and one pure step.

It goes in the order in which a run shows it: data, plan, compilation, the loop, the summary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Int64

from jvarlen._common import terminal
from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import check_outputs
from jvarlen._common.interrupts import remembered_interrupts
from jvarlen._common.keywords import check_keywords
from jvarlen._common.pytree import leaves_by_name
from jvarlen._common.terminal import show_line
from jvarlen.batches.shapes import BatchShapes, BatchSpec
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.compiling.recompiles import no_recompiles
from jvarlen.data.measure import LengthFn
from jvarlen.data.split import HELD_OUT, Split
from jvarlen.distributed import processes
from jvarlen.distributed.launch import launch
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import split_cpu
from jvarlen.distributed.placement import LayoutLike, Placement, place, placement_of
from jvarlen.loading.collate import CollateFn
from jvarlen.loading.fields import FieldAxes
from jvarlen.loading.plan_source import SkippedSample
from jvarlen.parallel.layers import LayeredModel, StepLoss
from jvarlen.parallel.portable import PortableForm
from jvarlen.planning.buckets import AnyBucket
from jvarlen.runs import directory
from jvarlen.runs.config import AUTO, FitConfig, is_run_dir, load_config, saved_settings
from jvarlen.runs.data import SamplesOfLengths
from jvarlen.runs.prepare import Prepared, compile_run_for, prepare, say, show_estimates
from jvarlen.runs.steps import StepDisplay, StepMeter, StepProfiler, bucket_text
from jvarlen.runs.task import PairLengthsFn, Task
from jvarlen.targets.report import TargetReport
from jvarlen.targets.target import Target
from jvarlen.training.checkpoint import Checkpoints, Place, open_checkpoints
from jvarlen.training.losses import LossFn
from jvarlen.training.master_weights import EvalParams
from jvarlen.training.optimizers import with_known_rates
from jvarlen.training.step import are_finite
from jvarlen.training.train_state import Metrics, MetricSums, TrainState

__all__ = ["FitResult", "dry_run", "fit", "target_of"]

_WAIT_S = 0.2  # for the compiler, between two looks at whether the run was interrupted


class FitResult(NamedTuple):
    """The result of `fit`.

    Attributes:
      summary: figures of the run.
      run_dir: the directory of plan, metrics, settings, checkpoints, curves and summary.
      state: parameters and optimizer state after the last step, on any layout as on one device, in the form of the
        parameters that `fit` got or of `init_params`. With ZeRO, arrays of the optimizer may be padded with zeros.
      params: the parameters that were evaluated: an average that the optimizer keeps, or else those of the state.
    """

    summary: directory.Summary
    run_dir: Path
    state: TrainState
    params: Any


@check_keywords
def fit(
    config: FitConfig,
    data: Split | None = None,
    *,
    loss_fn: LossFn | LayeredModel | StepLoss | None = None,
    params: Any = None,
    optimizer: optax.GradientTransformation | None = None,
    eval_params: EvalParams | None = None,
    fields: FieldAxes | None = None,
    collate: CollateFn | None = None,
    length_fn: LengthFn | PairLengthsFn | None = None,
    eval_loss_fn: LossFn | LayeredModel | StepLoss | None = None,
    extra: Any = None,
    batch_spec: BatchSpec | None = None,
    num_values: Mapping[str, int] | None = None,
    layout: LayoutLike = None,
    trackers: Mapping[str, directory.Tracker] | None = None,
) -> FitResult:
    """Trains the built-in language model or your own loss, with every shape compiled before its first step.

    Interrupted once (Ctrl-C or SIGTERM), it ends after the step in flight with everything saved. To resume, call it
    again with the same arguments and `config.directory.run_dir` or `config.directory.resume`: it continues with exactly
    the remaining steps, after a kill from the last checkpoint. Losses and rates are the same, up to rounding, on any
    number of devices and processes, which may change with a resume. Several processes all call this; process 0 prints
    and writes, and all must reach its directory for the checkpoints.

    A model of your own needs `loss_fn` and `params`. A loss that takes a key gets keys from `config.seed`. Scalars
    among the sums that it returns are logged over Σ weight.

    Args:
      config: the settings.
      data: training and held-out samples, the same on all processes; None: the settings' files or the built-in corpus.
      loss_fn: a loss function, a `jvarlen.parallel.LayeredModel`, or a `StepLoss`, as for `make_train_step`.
      params: pytree of arrays, the initial parameters; arrays that are already placed on these devices
        keep their sharding, if the layout is data-parallel alone.
      optimizer: replaces `config.optimizer`; the log then has no learning rates.
      eval_params: as for `make_train_step`: the parameters that are evaluated, sampled and exported. Checkpoints hold
        them besides those that are trained. None: these, or those of `optax.contrib.schedule_free`, if it is used.
      fields: as for `load`.
      collate: as for `load`; None for samples of tokens or of named fields.
      length_fn: returns the length of a sample, or names the field that has it, as for `measure_lengths`; None for
        `len`, for the attribute `lengths` of the dataset, or for the first field that `fields` says has the length.
        Of samples of two lengths, it names two fields, or gives two numbers.
      eval_loss_fn: the loss of evaluations, such as one without dropout; None: `loss_fn`.
      extra: for losses that take it.
      batch_spec: as for `compile_buckets`; None: the shapes that `collate` gives for a step of each bucket.
      num_values: as for `load`; the built-in model has its vocabulary.
      layout: as for `make_train_step`; None: as the settings say. If they name one, a mesh with its axes.
      trackers: more trackers besides those of the settings, by name; closed at the end. With several processes, only
        those of process 0 are used.

    Returns:
      `FitResult`.

    Raises:
      ValueError: settings that contradict each other or the data; resuming with another plan, model or data, or a run
        that is still running; processes with different settings or plans; a sample that is not as planned.
      OSError: there is no run to resume, a data file is missing, or something cannot be written.
      RecompileError: something other than the planned shapes was compiled after the first step.
      FloatingPointError: parameters, `extra` or arrays of the optimizer are not finite after a step, or its loss is not
        and its gradient is; the message names the step, and the last checkpoint is from before it. A step whose
        gradient the optimizer rejects, as `optax.apply_if_finite` does, is counted, and the run goes on.
      ProcessesError: another process failed, or was lost.
      KeyboardInterrupt: Ctrl-C or SIGTERM before the first step, or a second Ctrl-C; a second SIGTERM ends the process.
    """
    if not isinstance(config, FitConfig):
        raise UserError(
            f"fit takes settings, a FitConfig, and then data, a Split of samples; here {type(config).__name__} is first"
        )
    if data is not None and not (hasattr(data, "train") and hasattr(data, "held_out")):
        raise UserError(
            "data must be Split(train, held_out), which split_held_out(samples, 0.02) makes, both of jvarlen.data; "
            f"this is of type {type(data).__name__}"
        )
    if config.dry_run:
        raise UserError("fit trains, and dry_run does not: call dry_run(config)")
    task = Task(
        loss_fn=loss_fn,
        params=params,
        eval_loss_fn=eval_loss_fn,
        extra=extra,
        optimizer=optimizer,
        eval_params=eval_params,
        fields=fields,
        collate=collate,
        batch_spec=batch_spec,
        length_fn=length_fn,
        num_values=num_values or {},
        on_bad_sample=config.data.on_bad_sample,
        trainable=config.trainable or None,
    )
    config, placement = _launched(config, data, layout)
    with remembered_interrupts(), contextlib.ExitStack() as held:
        run = _open_run(prepare(config, task, data, placement), trackers or {}, held)
        with processes.naming_lost_processes("training"):
            trained = _train(run)
        for step in (run.train_step, run.eval_step):
            step.close()  # what an interrupted run did not need
        summary = _summarize(run, trained)
        state, evaluated = _in_form(run, trained.state), run.for_evaluation(trained.state)
        has_average = evaluated is not trained.state
        params = _in_form(run, evaluated._replace(opt_state=None)).params if has_average else state.params
        return FitResult(summary, run.run_dir, state, params)


def _in_form(run: _Run, state: TrainState) -> TrainState:
    return state if run.form is None else run.form.save(state)


def dry_run(config: FitConfig, lengths: Int64[np.ndarray, " N"] | None = None) -> TargetReport | None:
    """Prints the plan of a training of the built-in model, and what a step of its largest shape holds and sends.

    With `config.target`, it compiles the steps of all shapes for these devices and tells what the compiler says.

    Args:
      config: settings of the run; `out` and `html` are where to write the report.
      lengths: int64[N], tokens of the samples that are trained on, in place of the data.

    Returns:
      The report; None without a target.

    Raises:
      ValueError: what `fit` and `compile_for` refuse.
    """
    read = config.model, config.plan.cost_model, config.plan.memory_model, config.directory.resumed
    check_outputs({"out": config.out, "html": config.html}, *config.data.inputs, *read, config.hardware.cluster)
    target = None if config.target is None else target_of(config)
    where = None if target is None else place(config.hardware.layout or Layout(), target.devices)
    config, placement = _launched(config, None, where)
    given = None if lengths is None else SamplesOfLengths(lengths)
    with remembered_interrupts():
        prepared = prepare(config, Task(trainable=config.trainable or None), given, placement)
        if target is None:
            show_estimates(prepared)
            return None
        report = compile_run_for(target, prepared)
    say(f"Compiled for {target.name}", str(report))
    if config.out is not None:
        report.save(config.out)
        terminal.say(config.out)
    if config.html is not None:
        from jvarlen.reports.target_page import write_target_page  # here: it draws with matplotlib

        write_target_page(config.html, report)
        terminal.say(config.html)
    return report


def target_of(config: FitConfig) -> Target:
    """The devices of a run that is only compiled; nothing looks for others, whose drivers may not be here."""
    assert config.target is not None
    layout, num_devices = config.hardware.layout, config.hardware.devices
    if config.target != "here":
        if getattr(jax.config, "jax_platforms", None) is None:
            jax.config.update("jax_platforms", "cpu")
    elif num_devices is not None:
        split_cpu(num_devices, again=False)
    elif layout is not None and layout.data != -1:
        split_cpu(layout.num_devices, again=False)
    target = Target.parse(config.target)
    return dataclasses.replace(target, devices=target.devices[:num_devices])


def _launched(config: FitConfig, data: Split | None, where: LayoutLike) -> tuple[FitConfig, Placement | None]:
    """The settings of this process, and where it trains."""
    # Before interrupts are remembered: where processes meet, JAX takes SIGTERM for itself.
    hardware, layout, num_devices = config.hardware, config.hardware.layout, config.hardware.devices
    has_processes = hardware.has_processes or jax.distributed.is_initialized()  # touches no device: a CPU can be split
    placement = None
    if where is not None:
        if layout is None or config.target is not None:
            placement = placement_of(where)
        elif isinstance(where, Mesh):
            placement = place(layout, where)
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
    if not processes.is_main_process():
        config = dataclasses.replace(config, progress=False)
    plan = config.plan.of_shards(_shards_of(config, placement))
    return dataclasses.replace(config, plan=plan.of_files() if data is None else plan), placement


def _shards_of(config: FitConfig, placement: Placement | None) -> int:
    """Microbatches of a step where the settings do not say: those of the run that goes on, or as the layout needs."""
    resumed = config.directory.resumed
    if config.plan.num_microbatches is None and resumed is not None and is_run_dir(resumed):
        return load_config(resumed / "config.json").plan.num_microbatches_in_force
    if placement is None:
        return 1
    if config.hardware.parallel == AUTO:
        return placement.layout.num_devices
    layout = placement.layout
    return layout.data * layout.stage * (layout.context if layout.context_from else 1)


class _Run(NamedTuple):
    """An open run: what its loop uses, and where it begins."""

    prepared: Prepared
    run_dir: Path
    state: TrainState
    place: Place
    form: PortableForm | None  # in which checkpoints hold states; None: as they are
    checkpoints: Checkpoints
    trackers: directory.Trackers
    bad_samples: directory.BadSamples
    heartbeat: processes.Heartbeat
    train_step: CompiledBuckets
    eval_step: CompiledBuckets
    for_evaluation: Callable[[TrainState], TrainState]
    reduce_error: Callable[[TrainState, Any], float]


class _Trained(NamedTuple):
    """What the loop leaves."""

    state: TrainState
    place: Place
    evaluations: dict[str, float | None] | None  # the metric of each set after the last step; None: it was interrupted
    num_compilations: int  # after the first step


def _open_run(prepared: Prepared, trackers: Mapping[str, directory.Tracker], held: contextlib.ExitStack) -> _Run:
    """Opens the directory, restores the latest state, and compiles; `held` closes all of it."""
    config, task, training, placement = prepared.config, prepared.task, prepared.training_plan, prepared.placement
    processes.agree("the plan", training.plan_of_epoch(0).digest)
    run_dir, resumed = _open_run_dir(prepared, held)

    step = task.train_step(training.optimizer, placement)
    state, place = task.init_state(step, config.seed), training.first_place()
    form, is_main = task.form_of(state, step), processes.is_main_process()
    checkpoints = held.enter_context(
        open_checkpoints(
            run_dir / "checkpoints",
            keep_last=config.checkpoints.keep_last,
            keep_best=config.checkpoints.keep_best,
            config=saved_settings(config),
            form=form,
            for_evaluation=step.for_evaluation,
        )
    )
    if checkpoints.steps:
        state, place = checkpoints.restore(with_known_rates(state, step.optimizer), config.directory.resume_from)
        place = training.resumed_place(place)
    if broken := _nonfinite_arrays(state):
        what = f"checkpoint {place.num_steps_done}" if place.num_steps_done else "the initial state"
        raise UserError(f"{what} holds values that are not finite: {list_first(broken)}")
    start_step, is_skipping = place.num_steps_done, config.data.on_bad_sample == "skip"
    bad_samples = held.enter_context(
        directory.open_bad_samples(run_dir, start_step=start_step, skips=is_skipping, progress=config.progress)
    )
    log = held.enter_context(
        directory.open_trackers(
            config.trackers, run_dir if is_main else None, start_step=start_step, others=trackers if is_main else None
        )
    )
    checkpoints.discard_after(start_step)  # now that the logs are not damaged
    if resumed is not None:
        directory.continue_run(run_dir, resumed, has_steps_left=start_step < training.num_steps)

    options = prepared.compile_options

    def compiled(step: Any, buckets: Sequence[AnyBucket], epoch: int | None) -> CompiledBuckets:
        shapes = BatchShapes(
            buckets,
            num_microbatches=config.plan.num_microbatches_in_force,
            layout=placement,
            batch_spec=prepared.batch_spec(epoch),
        )
        progress = config.progress and not options.in_background
        made = compile_buckets(step, state, shapes, progress=progress, options=options)
        return held.enter_context(contextlib.closing(made))

    steps_left = training.steps_left(place)
    buckets = list(steps_left) or training.buckets
    if options.in_background:
        what = f"{len(buckets)} shape{'s' * (len(buckets) > 1)}"
        say("Compiling", f"{what}, in the order in which steps need them, while earlier steps run")
    train_step = compiled(step, buckets, place.epoch)
    train_step.release_after(steps_left or dict.fromkeys(buckets, 0))
    return _Run(
        prepared=prepared,
        run_dir=run_dir,
        state=state,
        place=place,
        form=form,
        checkpoints=checkpoints,
        trackers=log,
        bad_samples=bad_samples,
        train_step=train_step,
        eval_step=compiled(task.eval_step(placement), training.eval_buckets, None),
        heartbeat=held.enter_context(processes.ending_stalled_processes("training", config.stall_timeout_s)),
        for_evaluation=step.for_evaluation,
        reduce_error=step.reduce_error,
    )


def _open_run_dir(prepared: Prepared, held: contextlib.ExitStack) -> tuple[Path, FitConfig | None]:
    """The run directory, which process 0 creates or looks at, and there the settings of a resumed run; locked."""
    config, run_dir, resumed = prepared.config, Path(), prepared.config.directory.resumed
    settings = None
    plan, keys = prepared.training_plan.plan_of_epoch(0), prepared.data.content_keys
    with processes.together("open the run directory"):
        if processes.is_main_process() and resumed is None:
            run_dir = directory.new_run_dir(config, prepared.shapes, plan, keys, held, prepared.data.skipped)
        elif processes.is_main_process() and resumed is not None:
            run_dir, changed, settings = directory.resumed_run_dir(config, resumed, plan, held)
            say("Resumed", str(run_dir), *(f"changed: {setting}" for setting in changed))
    if jax.process_count() == 1:
        return run_dir, settings
    return Path(processes.broadcast_text("the run directory", str(run_dir.resolve()))), settings


def _train(run: _Run) -> _Trained:
    """Takes the remaining steps; evaluates and saves before the first, at intervals, and after the last."""
    prepared, config, training = run.prepared, run.prepared.config, run.prepared.training_plan
    state, place = run.state, run.place
    evaluator = _Evaluator(prepared, run.eval_step, run.trackers, run.bad_samples, run.heartbeat, run.for_evaluation)

    def save(metric: float | None = None) -> None:
        run.trackers.sync()  # first, so that no checkpoint is ahead of the logs
        run.bad_samples.sync()
        run.checkpoints.save(state, place, metric=metric)

    # The first evaluation, save and exchange come before the guard: all compile small things once.
    _raise_if_any_interrupted()
    if place.num_steps_done in (0, training.num_steps) or _is_due(place, config.eval_every):
        evaluations = evaluator.evaluate(state, place)
        if place.held_out_before is None and evaluations is not None:
            place = dataclasses.replace(place, held_out_before=evaluations[HELD_OUT])
    else:
        evaluator.warm_up(state)
    _raise_if_any_interrupted()
    save()
    if processes.is_main_process() and config.directory.run_dir is None:
        directory.point_latest_to(run.run_dir)

    planned = training.plan_of_epoch, prepared.data.train, prepared.lengths
    where: dict[str, Any] = {"epoch": place.epoch, "num_epochs": training.num_epochs, "start_step": place.step}
    sent = "float32" if prepared.placement is None else prepared.placement.layout.reduce_dtype
    if sent != "float32" and place.num_steps_done < training.num_steps:
        with contextlib.closing(prepared.load(*planned, **where)) as batches:
            error = run.reduce_error(state, next(batches))
        say("Gradients", f"sent in {sent} differ by {error:.1e} of their norm from float32")
    batches = prepared.load(*planned, **where, num_workers=config.data.num_workers)
    meter = StepMeter(place, batches)
    with no_recompiles() as compilations:
        with (
            contextlib.closing(batches),
            StepDisplay(
                training.num_steps, progress=config.progress, in_nats=prepared.task.is_language_model
            ) as display,
            StepProfiler(
                run.run_dir / "profile", config.profile, steps_left=training.num_steps - place.num_steps_done
            ) as profiler,
        ):
            # The step that the devices compute.
            running: tuple[dict[str, Any], Metrics, Sequence[SkippedSample]] | None = None

            def end_step(record: dict[str, Any], metrics: Metrics, skipped: Sequence[SkippedSample]) -> None:
                """Waits for the end of a step, logs it and shows it."""
                metrics = jax.device_get(metrics)
                record = _with_metrics(record, metrics)
                _check_finite(record, metrics, state)
                if not metrics.grads_finite:
                    record["grads_finite"] = False
                record |= meter.end_step(has_weight=record["loss"] is not None, grads_finite=bool(metrics.grads_finite))
                run.bad_samples.log(record["step"], skipped)
                run.trackers.log(record)
                display.update(record, pending=run.train_step.pending)
                if record["loss"] is None:
                    _check_weight(run, meter, record)

            while place.num_steps_done < training.num_steps:
                is_evaluated, kept = _is_due(place, config.eval_every), config.checkpoints
                # Where the best are kept, every evaluated state may be one of them.
                is_saved = _is_due(place, kept.checkpoint_every) or (is_evaluated and kept.keep_best > 0)
                if running is not None and (is_evaluated or is_saved):
                    end_step(*running)
                    running, place = None, meter.measured(place)
                    evaluations = evaluator.evaluate(state, place) if is_evaluated else None
                    if is_evaluated:
                        meter.skip()
                    if is_saved:
                        with meter.stalled():
                            save(None if evaluations is None else evaluations[HELD_OUT])
                if processes.is_interrupted_at(place.num_steps_done):
                    break
                batch, skipped = meter.next_batch(), batches.skipped_in_batch
                run.heartbeat.step()  # before the computation that waits for all processes
                if not _has_program(run, training.bucket_at(place), meter, running):
                    break
                meter.before_step(running)
                record = training.record(place)
                with profiler.step(bucket_text(record), place.num_steps_done, state):
                    state, metrics = run.train_step(state, batch)
                if running is not None:
                    end_step(*running)  # the step before
                running, place = (record, metrics, skipped), training.next_place(place)
                if not run.train_step.pending:
                    run.eval_step.advance()
            if running is not None:
                end_step(*running)
            place = meter.measured(place)
        evaluations = evaluator.evaluate(state, place) if place.num_steps_done == training.num_steps else None
        save(None if evaluations is None else evaluations[HELD_OUT])
        if evaluations is None:
            run.checkpoints.wait()
    return _Trained(state, place, evaluations, compilations.num_compilations)


class _Means(NamedTuple):
    """The loss and the scalar sums of some steps over Σ weight."""

    loss: float | None  # in nats for a language model; None, like all sums, if nothing has weight
    weight: float  # Σ weight; for a language model the tokens that are learned, those of cut samples as cut
    sums: dict[str, float | None]


def _means_of(total: Metrics) -> _Means:
    """The means of sums, as `MetricSums` gives them."""
    scalars = {name: value for name, value in sorted(total.sums.items()) if np.ndim(value) == 0}
    weight = float(total.weight_sum)
    if not weight:
        return _Means(None, weight, dict.fromkeys(scalars))
    return _Means(float(total.loss), weight, {name: float(value) / weight for name, value in scalars.items()})


@dataclasses.dataclass
class _Evaluator:
    """Evaluates on every set of a run, once at a place."""

    prepared: Prepared
    eval_step: CompiledBuckets
    trackers: directory.Trackers
    bad_samples: directory.BadSamples
    heartbeat: processes.Heartbeat
    for_evaluation: Callable[[TrainState], TrainState]
    _num_skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    _latest: tuple[int, dict[str, float | None]] | None = None

    def evaluate(self, state: TrainState, place: Place) -> dict[str, float | None] | None:
        """The loss of each set: nats a token, or the user's own. None: it was interrupted.

        The loss of a set in which nothing has weight is None.
        """
        if self._latest is not None and self._latest[0] == place.num_steps_done:
            return self._latest[1]
        means = self._take_steps(state)
        if means is None:
            return None
        in_nats = self.prepared.task.is_language_model
        losses = {name: mean.loss for name, mean in means.items()}
        told = [f"evaluation after step {place.num_steps_done:,}"]
        for name, loss in losses.items():
            if loss is None:
                told.append(f"{name} has no value: none of its tokens has weight in the loss")
            else:
                told.append(f"{name} loss {loss:.3f} nats/token" if in_nats else f"{name} loss {loss:.4g}")
                told += [f"{of_sum} {mean:.4g}" for of_sum, mean in means[name].sums.items()]
            figure = "nats_per_token" if in_nats else "mean_loss"  # by which readers tell a loss of the user's own
            record = {"step": place.num_steps_done, "time_s": place.train_s, "evaluation": name, figure: loss}
            if num_skipped := self._num_skipped[name]:
                told.append(f"without {num_skipped:,} bad samples")
                record["num_skipped"] = num_skipped
            self.trackers.log(record | {"num_tokens": round(means[name].weight)} | means[name].sums)
        show_line(" · ".join(told), progress=self.prepared.config.progress)
        self._latest = place.num_steps_done, losses
        return losses

    def warm_up(self, state: TrainState) -> None:
        """Takes a step of each set, without a result: its first evaluation then compiles nothing."""
        self._take_steps(state, max_steps=1)

    def _take_steps(self, state: TrainState, max_steps: int | None = None) -> dict[str, _Means] | None:
        """The means of each set over so many steps; None if it was interrupted."""
        state = self.for_evaluation(state)
        means: dict[str, _Means] = {}
        num_steps = itertools.count()
        for name, plan in self.prepared.training_plan.eval_plans.items():
            dataset, lengths = self.prepared.data.evaluation[name], self.prepared.eval_lengths[name]
            sums = MetricSums()
            with contextlib.closing(self.prepared.load(plan, dataset, lengths)) as batches:
                for batch in itertools.islice(batches, max_steps):
                    self.bad_samples.log_evaluation(name, batches.skipped_in_batch)
                    self.heartbeat.step()
                    if processes.is_interrupted_at(next(num_steps)):
                        return None
                    sums.add(self.eval_step(state, batch)[1])
                self._num_skipped[name] = batches.num_skipped
            means[name] = _means_of(sums.total)
        return means


def _is_due(place: Place, every: int | None) -> bool:
    return every is not None and place.num_steps_done % every == 0


def _has_program(run: _Run, bucket: AnyBucket, meter: StepMeter, running: Any) -> bool:
    """Waits until the program of the next step is compiled; False if the run was interrupted meanwhile."""
    if run.train_step.wait(bucket, timeout=0.0):
        return True
    jax.block_until_ready(running)  # until then it is the time of that step
    with meter.stalled():
        while not run.train_step.wait(bucket, timeout=_WAIT_S):
            if processes.is_any_interrupted():  # of one process: several compile ahead
                return False
    return True


def _with_metrics(record: dict[str, Any], metrics: Metrics) -> dict[str, Any]:
    """The record of a step with its metrics, which are on the host."""
    sums = MetricSums()
    sums.add(metrics)
    means = _means_of(sums.total)
    record["loss"] = means.loss
    if clashing := means.sums.keys() & (record.keys() | {"time_s"}):
        raise UserError(f"sums of the loss must have other names than figures of a step: {list_first(clashing)}")
    return record | means.sums


def _check_finite(record: Mapping[str, Any], metrics: Metrics, newest: TrainState) -> None:
    """Raises FloatingPointError where a step was not rejected, and left, or is, what is not finite."""
    loss, step = record["loss"], f"step {record['step']} (counted from 0)"
    gradient = "finite" if metrics.grads_finite else "not finite"
    if not metrics.params_finite:
        raise FloatingPointError(
            f"parameters or extra are not finite after {step}: the loss is {loss}, the gradient is {gradient}; "
            "the run ends, with its last checkpoint from before"
        )
    if metrics.grads_finite and loss is not None and not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at {step}, and the gradient is finite; the run ends")
    if not metrics.grads_finite and (broken := _nonfinite_arrays(newest)):
        raise FloatingPointError(
            f"the gradient of {step} is not finite, and the optimizer has not rejected it: not finite are "
            f"{list_first(broken)}; the run ends, with its last checkpoint from before"
        )


def _nonfinite_arrays(state: TrainState) -> list[str]:
    """Names of the arrays of a state that are not finite; waits for it."""
    named = {
        name: leaf
        for name, leaf in leaves_by_name(state).items()
        # Scalars of an optimizer, such as the best loss so far, may begin as infinity.
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and (leaf.ndim or not name.startswith(".opt_state"))
    }
    return [name for name, is_finite in jax.device_get(_each_finite(named)).items() if not is_finite]


@jax.jit
def _each_finite(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(are_finite, arrays)


def _check_weight(run: _Run, meter: StepMeter, record: Mapping[str, Any]) -> None:
    """Raises ValueError if all of an epoch, or of the run, were such steps."""
    num_done, training = record["step"] + 1, run.prepared.training_plan
    epoch, in_a_row = record["epoch"], meter.num_in_a_row
    is_whole_run = num_done == training.num_steps == in_a_row
    is_end_of_epoch = num_done == training.epoch_starts[epoch + 1]
    if is_whole_run or (is_end_of_epoch and in_a_row >= training.steps_of_epoch(epoch)):
        raise UserError(
            f"no token has weight in the loss in any of the last {in_a_row:,} steps, "
            f"{'the whole run' if is_whole_run else 'a whole epoch'}: nothing was learned; learn other parts "
            "(loss_on, loss_weights), or cut less (max_length)"
        )


def _raise_if_any_interrupted() -> None:
    """Raises KeyboardInterrupt on all processes if one was interrupted, so that none waits for it."""
    if processes.is_any_interrupted():
        raise KeyboardInterrupt


def _summarize(run: _Run, trained: _Trained) -> directory.Summary:
    """Prints and writes the summary."""
    prepared, place, evaluations = run.prepared, trained.place, trained.evaluations
    report = run.train_step.report.with_plan(prepared.training_plan.plan_of_epoch(0))
    own_s = max(place.train_s - place.stall_s, 1e-9)
    of_evaluation = run.eval_step.report
    summary = directory.Summary(
        held_out_before=place.held_out_before,
        held_out_after=None if evaluations is None else evaluations[HELD_OUT],
        evaluations=evaluations or {},
        num_steps=place.num_steps_done,
        num_tokens=place.num_tokens_done,
        tokens_per_s=place.num_tokens_done / own_s,
        padding=1.0 - place.num_tokens_done / max(place.padded_tokens_done, 1),
        num_shapes=len(report),
        compile_s=report.wall_s + of_evaluation.wall_s,
        compile_cpu_s=report.cpu_s + of_evaluation.cpu_s,
        num_cache_hits=report.num_cache_hits + of_evaluation.num_cache_hits,
        train_s=place.train_s,
        stall_s=place.stall_s,
        data_wait=place.data_wait_s / own_s,
        num_skipped=run.bad_samples.num_in_steps(),
        num_skipped_evaluation=run.bad_samples.num_in_evaluations(),
        num_skipped_records=run.bad_samples.num_in_files,
        num_without_target=place.num_without_target_done,
        num_steps_without_weight=place.num_steps_without_weight,
        num_nonfinite_grads=place.num_nonfinite_grads,
        compilations_after_first_step=trained.num_compilations,
        interrupted=evaluations is None,
        evaluated_in="nats a token" if prepared.task.is_language_model else "loss",
    )
    with processes.together("write the summary"):
        if processes.is_main_process():
            if evaluations is None:
                how = "jvarlen train --resume " if prepared.task.is_language_model else "fit with resume="
                say("Interrupted", f"{place.num_steps_done:,} steps are saved", f"{how}{run.run_dir}")
            directory.write_summary(run.run_dir, summary, report)
            say("Compile report", report.table())
            say("Summary", str(summary))
            if num_bad := summary.num_skipped + summary.num_skipped_evaluation + summary.num_skipped_records:
                say(
                    "Warning",
                    f"{num_bad:,} bad samples were left out, and are listed in {run.run_dir / directory.BAD_SAMPLES}",
                )
            terminal.say(run.run_dir)
    return summary
