"""An open run: its directory, its state, and its compiled steps."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jvarlen._common.checks import UserError, list_first
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.distributed import processes
from jvarlen.distributed.placement import Placement
from jvarlen.parallel.portable import PortableForm
from jvarlen.parallel.train import TrainStep
from jvarlen.planning.buckets import AnyBucket
from jvarlen.runs import directory
from jvarlen.runs.directory import Tracker
from jvarlen.runs.prepare import Prepared, say
from jvarlen.runs.saved_config import kept_settings, save_config
from jvarlen.runs.steps import nonfinite_arrays
from jvarlen.training.averages import without_average
from jvarlen.training.checkpoint import Checkpoints, Place, open_checkpoints
from jvarlen.training.optimizers import with_known_tables
from jvarlen.training.step import StepFn
from jvarlen.training.train_state import TrainState

__all__ = ["Run", "open_run"]


class Run(NamedTuple):
    """An open run, as its loop uses it, and the place where it begins."""

    prepared: Prepared
    run_dir: Path
    state: TrainState
    place: Place
    form: PortableForm | None  # of states in checkpoints; None if they are saved as they are
    checkpoints: Checkpoints
    trackers: directory.Trackers
    bad_samples: directory.BadSamples
    heartbeat: processes.Heartbeat
    train_step: CompiledBuckets
    eval_step: CompiledBuckets
    step: TrainStep


def open_run(prepared: Prepared, trackers: Mapping[str, Tracker], held: contextlib.ExitStack) -> Run:
    """Opens the directory, restores the latest state, and compiles; `held` closes all of it."""
    settings, task, training, placement = prepared.settings, prepared.task, prepared.training_plan, prepared.placement
    config, is_main = settings.config, processes.is_main_process()
    processes.agree("the plan", training.plan_of_epoch(0).digest)
    run_dir = _open_run_dir(prepared, held)
    step = task.train_step(training.optimizer, placement)
    state = task.init_state(step, config.seed)
    form = task.form_of(state, step)
    checkpoints = held.enter_context(
        open_checkpoints(
            run_dir / "checkpoints",
            keep_last=config.checkpoints.keep_last,
            keep_best=config.num_best,
            config=kept_settings(config),
            form=form,
            for_evaluation=step.for_evaluation,
        )
    )
    state, place = _restore(prepared, checkpoints, step, state)
    start_step, is_skipping = place.num_steps_done, config.data.on_bad_sample == "skip"
    bad_samples = held.enter_context(
        directory.open_bad_samples(run_dir, start_step=start_step, skips=is_skipping, progress=settings.progress)
    )
    log = held.enter_context(
        directory.open_trackers(
            config.trackers, run_dir if is_main else None, start_step=start_step, others=trackers if is_main else None
        )
    )
    checkpoints.discard_after(start_step)  # now that the logs are not damaged
    if is_main and config.directory.resumed is not None:
        save_config(config, run_dir / "config.json")  # once nothing can refuse them
        if start_step < training.num_steps:  # until it logs a step, it would look as if it had ended
            (run_dir / "summary.json").unlink(missing_ok=True)
    train_step, eval_step = _compile(prepared, step, state, place, held)
    return Run(
        prepared=prepared,
        run_dir=run_dir,
        state=state,
        place=place,
        form=form,
        checkpoints=checkpoints,
        trackers=log,
        bad_samples=bad_samples,
        train_step=train_step,
        eval_step=eval_step,
        heartbeat=held.enter_context(processes.ending_stalled_processes("training", config.stall_timeout_s)),
        step=step,
    )


def _open_run_dir(prepared: Prepared, held: contextlib.ExitStack) -> Path:
    """The run directory, which process 0 creates or locks."""
    config = prepared.settings.config
    plan, run_dir, resumed = prepared.training_plan.plan_of_epoch(0), Path(), config.directory.resumed
    with processes.together("open the run directory"):
        if processes.is_main_process() and resumed is None:
            keys, skipped = prepared.data.content_keys, prepared.data.skipped
            run_dir = directory.new_run_dir(config, prepared.shapes, plan, keys, held, skipped)
        elif processes.is_main_process() and resumed is not None:
            run_dir, changes = directory.resumed_run_dir(config, resumed, plan, held)
            say("Resumed", str(run_dir), *(f"changed: {change}" for change in changes))
    if jax.process_count() == 1:
        return run_dir
    return Path(processes.broadcast_text("the run directory", str(run_dir.resolve())))


def _restore(
    prepared: Prepared, checkpoints: Checkpoints, step: TrainStep, state: TrainState
) -> tuple[TrainState, Place]:
    """The state and the place to go on from; ValueError for another plan, and for values that are not finite."""
    training = prepared.training_plan
    place = training.first_place()
    if checkpoints.steps:
        which = prepared.settings.config.directory.resume_from
        state, place = checkpoints.restore(with_known_tables(state, step.optimizer), which)
        place = training.resumed_place(place)
    if broken := nonfinite_arrays(state):
        what = f"checkpoint {place.num_steps_done}" if place.num_steps_done else "the initial state"
        raise UserError(f"{what} holds values that are not finite: {list_first(broken)}")
    return state, place


def _describe_devices(placement: Placement | None) -> str:
    """How many devices train, of which kind, and the layout."""
    devices = jax.devices()[:1] if placement is None else placement.mesh.devices.flatten()
    layout = "" if placement is None else f", {placement.layout}"
    return f"{len(devices)} of {jax.device_count()} × {devices[0].device_kind}{layout}"


def _compile(
    prepared: Prepared, step: TrainStep, state: TrainState, place: Place, held: contextlib.ExitStack
) -> tuple[CompiledBuckets, CompiledBuckets]:
    """The steps of training and of evaluation, in the buckets that are left; compiled now, or while steps run."""
    options, training = prepared.settings.compile, prepared.training_plan

    def compile_steps(
        step: StepFn, state: TrainState, buckets: Sequence[AnyBucket], epoch: int | None
    ) -> CompiledBuckets:
        shapes = prepared.batch_shapes(buckets, epoch)
        progress = prepared.settings.progress and not options.in_background
        return held.enter_context(
            contextlib.closing(compile_buckets(step, state, shapes, progress=progress, options=options))
        )

    groups_left = training.groups_left(place)
    buckets = list(groups_left) or training.buckets
    say("Devices", _describe_devices(prepared.placement))
    if options.in_background:
        what = f"{len(buckets)} shape{'s' * (len(buckets) > 1)}"
        say("Compiling", f"{what}, in the order in which steps need them, while earlier steps run")
    train_step = compile_steps(step, state, buckets, place.epoch)
    train_step.release_after(groups_left or dict.fromkeys(buckets, 0))
    evaluated = state._replace(opt_state=without_average(state.opt_state))  # of the form of `step.for_evaluation`
    eval_step = prepared.task.eval_step(prepared.placement)
    return train_step, compile_steps(eval_step, evaluated, training.eval_buckets, None)
