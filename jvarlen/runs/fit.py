"""`fit`: a whole training, from a configuration to a run directory.

A run prints its parts in this order: data, plan, compilation, the loop, the summary.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Int64

from jvarlen._common import terminal
from jvarlen._common.checks import UserError
from jvarlen._common.files import check_outputs
from jvarlen._common.interrupts import remembered_interrupts
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Extra, Params
from jvarlen.batches.fields import FieldAxes
from jvarlen.batches.shapes import BatchSpec
from jvarlen.data.measure import LengthFn
from jvarlen.data.split import Split
from jvarlen.distributed import processes
from jvarlen.distributed.launch import launch
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import split_cpu
from jvarlen.distributed.placement import LayoutLike, Placement, place, placement_of
from jvarlen.loading.collate import CollateFn
from jvarlen.parallel.layers import LayeredModel, StepLoss
from jvarlen.runs import directory
from jvarlen.runs.config import FitConfig
from jvarlen.runs.data import SamplesOfLengths
from jvarlen.runs.loop import Hook, train
from jvarlen.runs.open_run import Run, open_run
from jvarlen.runs.prepare import Prepared, compile_run_for, prepare, say, show_estimates
from jvarlen.runs.summary import Summary, summarize
from jvarlen.runs.task import Task
from jvarlen.targets.report import TargetReport
from jvarlen.targets.target import Target
from jvarlen.training.averages import EvalParams
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import TrainState

__all__ = ["FitResult", "dry_run", "fit", "target_of"]


class FitResult(NamedTuple):
    """The result of `fit`.

    Attributes:
      summary: figures of the run.
      run_dir: the directory of plan, metrics, settings, checkpoints, curves and summary.
      state: parameters and optimizer state after the last step, on any layout as on one device, in the form of the
        parameters that `fit` got or of `init_params`. With ZeRO, arrays of the optimizer may be padded with zeros.
      params: the parameters that were evaluated: an average that the optimizer keeps, or else those of the state.
    """

    summary: Summary
    run_dir: Path
    state: TrainState
    params: Params


@check_keywords
def fit(
    config: FitConfig,
    data: Split | None = None,
    *,
    loss_fn: LossFn | LayeredModel | StepLoss | None = None,
    params: Params = None,
    optimizer: optax.GradientTransformation | None = None,
    eval_params: EvalParams | None = None,
    fields: FieldAxes | None = None,
    collate: CollateFn | None = None,
    length_fn: LengthFn | None = None,
    eval_loss_fn: LossFn | LayeredModel | StepLoss | None = None,
    extra: Extra = None,
    batch_spec: BatchSpec | None = None,
    num_values: Mapping[str, int] | None = None,
    layout: LayoutLike = None,
    trackers: Mapping[str, directory.Tracker] | None = None,
    hooks: Sequence[Hook] = (),
) -> FitResult:
    """Trains the built-in language model or your own loss, with every shape compiled before its first step.

    Interrupted once (Ctrl-C or SIGTERM), it ends after the step in flight with everything saved. To resume, call it
    again with the same arguments and `config.directory.run_dir` or `config.directory.resume`: it continues with exactly
    the remaining steps, after a kill from the last checkpoint. Losses and rates are the same, up to rounding, on any
    number of devices and processes, which may change with a resume. Several processes all call this; process 0 prints
    and writes, and all must reach its directory for the checkpoints.

    Your own model needs `loss_fn` and `params`. A loss that takes a key gets keys from `config.seed`. Scalars
    among the sums that it returns are logged over Σ weight.

    Args:
      config: the settings.
      data: training and held-out samples, the same on all processes; None takes the settings' files or the built-in
        corpus.
      loss_fn: a loss function, a `jvarlen.parallel.LayeredModel`, or a `StepLoss`, as for `make_train_step`.
      params: pytree of arrays, the initial parameters; arrays that are already placed on these devices
        keep their sharding, if the layout is data-parallel alone.
      optimizer: replaces `config.optimizer`; the log then has no learning rates.
      eval_params: as for `make_train_step`: the parameters that are evaluated, sampled and exported. Checkpoints hold
        them besides the trained ones. None takes the trained ones, or the average that the optimizer keeps, of
        `jvarlen.training.ema_of_params` or `optax.contrib.schedule_free`.
      fields: as for `load`.
      collate: as for `load`; None for samples of tokens or of named fields.
      length_fn: returns the length of a sample, or names the field that has it, as for `measure_lengths`; None for
        `len`, for the attribute `lengths` of the dataset, or for the first field that `fields` says has the length.
        For samples of two lengths, it names two fields or returns two numbers.
      eval_loss_fn: the loss of evaluations, such as one without dropout; None: `loss_fn`.
      extra: for losses that take it.
      batch_spec: as for `compile_buckets`; None takes the shapes that `collate` gives for a step of each bucket.
      num_values: as for `load`; the built-in model has its vocabulary.
      layout: as for `make_train_step`; None takes that of the settings. If they name one, give a mesh with its axes.
      trackers: more trackers besides those of the settings, by name; closed at the end. Only process 0 uses them.
      hooks: functions to call between steps, from `jvarlen.runs.every`; the same on all processes.

    Returns:
      `FitResult`.

    Raises:
      ValueError: settings that contradict each other or the data; resuming with another plan, model or data, or a run
        that is still running; processes with different settings or plans; a sample that is not as planned.
      OSError: there is no run to resume, a data file is missing, or something cannot be written.
      RecompileError: something other than the planned shapes was compiled after the first step.
      FloatingPointError: parameters, `extra` or arrays of the optimizer are not finite after a step, or its loss is not
        although its gradient is; the message names the step, and the last checkpoint is from before it. A step whose
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
            "data must be Split(train, held_out), which split_held_out(tokens, 0.02) makes, both of "
            "jvarlen.data.split; samples with fields you divide yourself; "
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
    placement = _launch(config, layout)
    with remembered_interrupts(), contextlib.ExitStack() as held:
        run = open_run(prepare(config, task, data, placement), trackers or {}, held)
        with processes.naming_lost_processes("training"):
            trained = train(run, hooks)
        for step in (run.train_step, run.eval_step):
            step.close()  # programs that an interrupted run did not need
        summary = summarize(run, trained)
        state, evaluated = _in_form(run, trained.state), run.step.for_evaluation(trained.state)
        has_average = evaluated is not trained.state
        params = _in_form(run, evaluated._replace(opt_state=None)).params if has_average else state.params
        return FitResult(summary, run.run_dir, state, params)


def _in_form(run: Run, state: TrainState) -> TrainState:
    return state if run.form is None else run.form.save(state)


def dry_run(config: FitConfig, lengths: Int64[np.ndarray, " N"] | None = None) -> TargetReport | None:
    """Prints the plan of a training of the built-in model, and the memory and communication of its largest step.

    With `config.target`, it compiles the steps of all shapes for these devices and prints the compiler's figures.

    Args:
      config: settings of the run; `out` and `html` are where to write the report.
      lengths: int64[N], tokens of the samples that are trained on, in place of the data.

    Returns:
      The report; None without a target.

    Raises:
      ValueError: what `fit` and `compile_for` refuse.
    """
    read = config.model, config.plan.cost_model, config.directory.resumed
    check_outputs({"out": config.out, "html": config.html}, *config.data.inputs, *read, config.hardware.cluster)
    target = None if config.target is None else target_of(config)
    where = None if target is None else place(config.hardware.layout or Layout(), target.devices)
    placement = _launch(config, where)
    given = None if lengths is None else SamplesOfLengths(lengths)
    with remembered_interrupts():
        prepared = prepare(config, Task(trainable=config.trainable or None), given, placement)
        if target is None:
            show_estimates(prepared)
            return None
        report = compile_run_for(target, prepared)
    say(f"Compiled for {target.name}", str(report), *_epoch_seconds(report, prepared))
    if config.out is not None:
        report.save(config.out)
        terminal.say(config.out)
    if config.html is not None:
        from jvarlen.reports.target_page import write_target_page  # here: it draws with matplotlib

        write_target_page(config.html, report)
        terminal.say(config.html)
    return report


def _epoch_seconds(report: TargetReport, prepared: Prepared) -> list[str]:
    """The estimated seconds of an epoch, if those of a step are known."""
    if report.step_s is None:
        return []
    num_steps = prepared.training_plan.plan_of_epoch(0).num_steps
    return [f"an epoch of {num_steps:,} steps: {num_steps * report.step_s:,.1f} s, an estimate"]


def target_of(config: FitConfig) -> Target:
    """The devices of a run that is only compiled. Only they are looked for: drivers of others may be missing."""
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


def _launch(config: FitConfig, where: LayoutLike) -> Placement | None:
    """Connects the processes, if there are several, and places the layout; None for one device."""
    # Before interrupts are remembered: where processes meet, JAX takes SIGTERM for itself.
    hardware, layout, num_devices = config.hardware, config.hardware.layout, config.hardware.devices
    has_processes = hardware.has_processes or jax.distributed.is_initialized()  # touches no device: a CPU can be split
    if where is not None:
        if layout is None or config.target is not None:
            return placement_of(where)
        if isinstance(where, Mesh):
            return place(layout, where)
        raise UserError(f"layout ({where}) and parallel ({layout}) both say where to train: give one of them")
    if layout is not None and num_devices is None and not has_processes:
        if layout.data == -1:
            split_cpu(dataclasses.replace(layout, data=1, zero=0).num_devices, again=False)
        else:
            num_devices = layout.num_devices
    if num_devices is None and not has_processes and hardware.parallel is None and jax.process_count() == 1:
        return None
    return launch(dataclasses.replace(hardware, devices=num_devices), layout or Layout())
