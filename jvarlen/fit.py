"""Fit: in goes a configuration, out come a trained model and a run directory.

One host loop around one pure step, from the corpus to the summary, in the order in which a run shows it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from jvarlen.checkpoint import Checkpoints, Place, open_checkpoints
from jvarlen.collate import pack_to_bucket, packed_batch_spec, pad_to_bucket, token_batch_spec
from jvarlen.compilation_cache import use_compilation_cache
from jvarlen.compile import compile_buckets
from jvarlen.compiled_buckets import CompiledBuckets
from jvarlen.config import FitConfig, flat_settings
from jvarlen.course import Course
from jvarlen.data_files import open_data_file
from jvarlen.datasets import Split, known_lengths, split_held_out, stdlib_functions
from jvarlen.distributed import batch_shardings, replicate
from jvarlen.interrupts import is_interrupted, raise_if_interrupted, remembered_interrupts
from jvarlen.lengths import DataSource
from jvarlen.loader import load
from jvarlen.models import init_params, make_loss_fn
from jvarlen.models.transformer import NUM_BYTES
from jvarlen.plan import Plan
from jvarlen.processes import agree, gather_texts, is_on_any, naming_lost_processes, together
from jvarlen.recompiles import no_recompiles
from jvarlen.report import length_histogram
from jvarlen.run_dir import MetricsLog, new_run_dir, point_latest_to, resumed_run_dir
from jvarlen.summary import Summary, write_summary
from jvarlen.train import Metrics, TrainState, init_train_state, make_eval_step, make_train_step

__all__ = ["FitResult", "fit"]

# What need not be the same on all processes.
_OF_EACH_PROCESS = {
    "distributed",
    "coordinator",
    "num_processes",
    "process_id",
    "devices",
    "num_workers",
    "runs_dir",
    "resume",
    "progress",
    "compile.cache_dir",
    "compile.num_threads",
}
_STEPS_BETWEEN_EXCHANGES = 16  # of several processes: each exchange waits for the steps in flight


class FitResult(NamedTuple):
    """What `fit` gives back.

    Attributes:
      summary: figures of the run.
      run_dir: where plan, metrics, settings, checkpoints, curves and summary lie.
      state: parameters and optimizer state after the last step.
    """

    summary: Summary
    run_dir: Path
    state: TrainState


def fit(config: FitConfig, data: Split | None = None, *, mesh: Mesh | None = None) -> FitResult:
    """Trains a small language model, every shape compiled before the first step and none afterwards.

    Prints the corpus, the plan, progress and a summary. Interrupted once (Ctrl-C, or SIGTERM), it ends after the
    step in flight with everything saved; `config.resume` then goes on with exactly the steps that were left. No second
    run can use the run directory meanwhile.

    The microbatches of a step spread over the devices, and accumulate for the rest: losses and rates are the same, up
    to rounding, on any number of devices and processes, and a run may be resumed on another number. Of several
    processes, all call this, process 0 prints and writes, and all must reach its directory, where the checkpoints are.

    Args:
      config: the settings.
      data: bytes to train on and to hold out, the same on all processes; None for the file of the settings, or the
        built-in corpus.
      mesh: devices to train on, along an axis "data"; None: those of the settings.

    Returns:
      `FitResult`.

    Raises:
      ValueError: settings that fit neither each other nor the data; resuming with another plan or model, or a run that
        has not ended; devices whose number does not divide the microbatches of a step; processes with different
        settings or plans.
      FileNotFoundError: there is no run to resume, or no file of data.
      OSError: the run directory cannot be written.
      RecompileError: something was compiled after the first step.
      FloatingPointError: the loss is no number; the last checkpoint is from before that.
      ProcessesError: another process failed, or was lost.
      KeyboardInterrupt: Ctrl-C or SIGTERM before the first step, or a second Ctrl-C; a second SIGTERM ends the process.
    """
    # Before the block: where processes meet, JAX takes SIGTERM for itself.
    if mesh is None and (config.devices is not None or config.has_processes or jax.process_count() > 1):
        mesh = config.make_mesh()
    if not _is_main():
        config = dataclasses.replace(config, progress=False)
    with remembered_interrupts(), contextlib.ExitStack() as held:
        return _fit(config, data, mesh, held)


def _fit(config: FitConfig, data: Split | None, mesh: Mesh | None, held: contextlib.ExitStack) -> FitResult:
    _check_mesh(config, mesh)
    with together("plan the training"):
        data, course = _plan(config, data)
    first_plan = course.plan_of_epoch(0)
    agree("the plan", first_plan.digest)
    run_dir = _open_run_dir(config, first_plan, held)

    log_path = run_dir / "metrics.jsonl" if _is_main() else None
    with open_checkpoints(run_dir / "checkpoints") as checkpoints, MetricsLog(log_path) as log:
        if config.compile.cache_dir is not None:
            use_compilation_cache(config.compile.cache_dir)  # now: drawing the weights is compiled as well
        loss_fn = make_loss_fn(config.model)
        state = init_train_state(init_params(config.model, config.seed), course.optimizer)
        if mesh is not None:
            state = replicate(state, mesh)
        place = course.first_place()
        if not checkpoints.is_empty:
            state, place = checkpoints.restore_latest(state)
            course.check_place(place)
        log.cut_to(place.num_steps_done)

        compile_for = functools.partial(
            compile_buckets,
            microbatches_per_step=config.plan.microbatches_per_step,
            mesh=mesh,
            batch_spec=packed_batch_spec if config.plan.pack else token_batch_spec,
            progress=config.progress,
            options=dataclasses.replace(config.compile, time_steps=config.compile.time_steps is not False),
        )
        compile_start = time.perf_counter()
        steps_left = course.steps_left(place)
        buckets = [bucket for bucket, num_steps in steps_left.items() if num_steps] or course.buckets
        train_step = compile_for(make_train_step(loss_fn, course.optimizer, mesh=mesh), state, buckets)
        train_step.release_after({bucket: steps_left[bucket] for bucket in buckets})
        eval_step = compile_for(make_eval_step(loss_fn, mesh=mesh), state.params, course.held_out_buckets)
        compile_s = time.perf_counter() - compile_start

        # The first evaluation, the first save and the first exchange come before the guard: all compile small things
        # once.
        _raise_if_any_interrupted()
        params, bits_per_byte = _evaluate(eval_step, state.params, course.held_out_plan, data.held_out, mesh)
        state = state._replace(params=params)
        if place.held_out_bits_per_byte_before is None:
            place = dataclasses.replace(place, held_out_bits_per_byte_before=bits_per_byte)
        checkpoints.save(state, place)
        if _is_main():
            point_latest_to(run_dir)
        _raise_if_any_interrupted()

        after = None
        with naming_lost_processes("training"), no_recompiles() as compilations:
            state, place = _train(config, course, data.train, mesh, train_step, state, place, checkpoints, log)
            checkpoints.save(state, place)
            if was_interrupted := place.num_steps_done < course.num_steps:
                _say("Interrupted", f"{place.num_steps_done:,} steps are saved", f"jvarlen train --resume {run_dir}")
            else:
                params, after = _evaluate(eval_step, state.params, course.held_out_plan, data.held_out, mesh)
                state = state._replace(params=params)

    ledger = train_step.ledger.with_plan(first_plan)
    rows = (*ledger, *eval_step.ledger)
    summary = Summary(
        held_out_bits_per_byte_before=cast(float, place.held_out_bits_per_byte_before),
        held_out_bits_per_byte_after=after,
        num_steps=place.num_steps_done,
        num_tokens=place.num_tokens_done,
        real_tokens_per_s=place.num_tokens_done / max(place.train_s, 1e-9),
        padding=1.0 - place.num_tokens_done / max(place.num_positions_done, 1),
        num_shapes=len(ledger),
        compile_s=compile_s,
        num_cache_hits=sum(row.cache_hit for row in rows),
        train_s=place.train_s,
        compilations_after_first_step=compilations.num_compilations,
        interrupted=was_interrupted,
    )
    with together("write the summary"):
        if _is_main():
            write_summary(run_dir, summary, ledger)
            _say("Ledger", ledger.table())
            _say("Summary", str(summary))
            print(run_dir, flush=True)
    return FitResult(summary, run_dir, state)


def _is_main() -> bool:
    """Whether this is the process that prints and writes."""
    return jax.process_index() == 0


def _check_mesh(config: FitConfig, mesh: Mesh | None) -> None:
    """Raises ValueError for shards that do not divide a step, and for processes that were set differently."""
    settings = {name: repr(value) for name, value in flat_settings(config).items() if name not in _OF_EACH_PROCESS}
    if len(set(gather_texts("the settings", repr(settings)))) > 1:
        of_processes = {name: gather_texts(name, value) for name, value in settings.items()}
        differing = [f"{name}: {', '.join(values)}" for name, values in of_processes.items() if len(set(values)) > 1]
        raise ValueError(f"processes differ in settings, in the order of processes: {'; '.join(differing)}")
    if mesh is not None:
        batch_shardings(np.empty(config.plan.microbatches_per_step), mesh)


def _raise_if_any_interrupted() -> None:
    """Raises KeyboardInterrupt on all processes where one was interrupted, so that none waits for it."""
    if is_on_any(is_interrupted()):
        raise KeyboardInterrupt


def _data(config: FitConfig, data: Split | None) -> Split:
    """What is given, what lies in the file of the settings, or the built-in corpus."""
    if data is not None:
        if config.data is not None:
            raise ValueError(f"data are given twice, as an argument and as the setting data: {config.data}")
        return data
    if config.data is None:
        return split_held_out(stdlib_functions(progress=config.progress), config.held_out_fraction)
    dataset = open_data_file(config.data, field=config.field, num_values=NUM_BYTES, progress=config.progress)
    return split_held_out(dataset, config.held_out_fraction)


def _plan(config: FitConfig, data: Split | None) -> tuple[Split, Course]:
    """What is trained on, and its steps."""
    data = _data(config, data)
    lengths = known_lengths(data.train, progress=config.progress)
    _say("Corpus", length_histogram(lengths), f"{len(data.held_out):,} more samples are held out")

    course = Course(config, lengths, known_lengths(data.held_out, progress=False))
    rates = course.rates_of_epoch(0).in_force
    report = course.plan_of_epoch(0).report(rates, cost=config.plan.cost, compile_seconds=config.plan.compile_seconds)
    _say("Plan", report, f"training takes {course.num_steps:,} steps")
    raise_if_interrupted()
    return data, course


def _open_run_dir(config: FitConfig, plan: Plan, held: contextlib.ExitStack) -> Path:
    """The directory, which process 0 makes or, of a run to resume, brings up to date; `held` holds its lock."""
    run_dir = Path()
    with together("open the run directory"):
        if _is_main() and config.resume is None:
            run_dir = new_run_dir(config, plan, held)
        elif _is_main() and config.resume is not None:
            run_dir, changed = resumed_run_dir(config, config.resume, plan, held)
            _say("Resumed", str(run_dir), *(f"changed: {setting}" for setting in changed))
    if jax.process_count() == 1:
        return run_dir
    return Path(gather_texts("the run directory", str(run_dir.resolve()))[0])


def _train(
    config: FitConfig,
    course: Course,
    dataset: DataSource,
    mesh: Mesh | None,
    train_step: CompiledBuckets,
    state: TrainState,
    place: Place,
    checkpoints: Checkpoints,
    log: MetricsLog,
) -> tuple[TrainState, Place]:
    """Takes the steps that are left; metrics are read a step late, so that no step waits for them."""
    batches = load(
        course.plan_of_epoch,
        dataset,
        mesh=mesh,
        epoch=place.epoch,
        num_epochs=-(-course.num_steps // course.steps_per_epoch),
        start_step=place.step,
        num_workers=config.num_workers,
        collate=pack_to_bucket if config.plan.pack else pad_to_bucket,
    )
    start = time.perf_counter() - place.train_s
    running: tuple[dict[str, Any], Metrics] | None = None
    with tqdm(
        total=course.num_steps, initial=place.num_steps_done, desc="train", unit="step", disable=not config.progress
    ) as bar:

        def finish(record: dict[str, Any], metrics: Metrics) -> None:
            record["loss"] = float(metrics.loss_sum) / float(metrics.weight_sum)
            if not math.isfinite(record["loss"]):
                raise FloatingPointError(f"the loss is {record['loss']} at step {record['step']}; the run ends")
            record["time_s"] = seconds = time.perf_counter() - start
            log.write(record)
            bar.set_postfix_str(
                f"loss {record['loss'] / np.log(2):.3f} bits/byte, {place.num_tokens_done / seconds:,.0f} tokens/s, "
                f"lr {record['learning_rate']:.2e}, bucket {record['bucket_rows']}×{record['bucket_length']}",
                refresh=False,
            )
            bar.update()

        while place.num_steps_done < course.num_steps and not _must_stop(place):
            state, metrics = train_step(state, next(batches))
            if running is not None:
                finish(*running)
            running = course.record(place), metrics
            place = course.next_place(place)
            if place.num_steps_done % config.checkpoint_every == 0:
                finish(*running)
                running = None
                checkpoints.save(state, dataclasses.replace(place, train_s=time.perf_counter() - start))
        if running is not None:
            finish(*running)
    return state, dataclasses.replace(place, train_s=time.perf_counter() - start)


def _must_stop(place: Place) -> bool:
    """Whether training ends here: processes decide together, and so only now and then."""
    if jax.process_count() == 1:
        return is_interrupted()
    return place.num_steps_done % _STEPS_BETWEEN_EXCHANGES == 0 and is_on_any(is_interrupted())


def _evaluate(
    eval_step: CompiledBuckets, params: Any, plan: Plan, dataset: DataSource, mesh: Mesh | None
) -> tuple[Any, float]:
    """Bits per byte over all samples of a plan; the parameters come back because a step takes them over."""
    steps = []
    for batch in load(plan, dataset, mesh=mesh, collate=pack_to_bucket if plan.is_packed else pad_to_bucket):
        params, metrics = eval_step(params, batch)
        steps.append(metrics)
    nats = sum(float(metrics.loss_sum) for metrics in steps) / sum(float(metrics.weight_sum) for metrics in steps)
    return params, nats / float(np.log(2))


def _say(title: str, *texts: str) -> None:
    if _is_main():
        print(f"\n{title}", *texts, sep="\n", flush=True)
