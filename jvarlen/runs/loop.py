"""The training loop: one host loop around one pure step.

Metrics are read a step late, so that no step waits for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.progress import show_line
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.data.split import HELD_OUT
from jvarlen.distributed.processes import Ticks, is_any_interrupted
from jvarlen.loading.loader import Loader, load
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.plan import Plan
from jvarlen.runs.config import FitConfig
from jvarlen.runs.data import TrainingData
from jvarlen.runs.epochs import Course
from jvarlen.runs.profiling import StepMeter, StepProfiler
from jvarlen.runs.step_display import StepDisplay
from jvarlen.runs.summary import Evaluation
from jvarlen.runs.task import Task
from jvarlen.runs.trackers import Trackers
from jvarlen.training.checkpoint import Checkpoints, Place
from jvarlen.training.train_state import Metrics, TrainState

__all__ = ["TrainingLoop", "evaluate"]

_WAIT_S = 0.2  # for the compiler, between two looks at whether the run was interrupted
_STEPS_BETWEEN_EXCHANGES = 16  # of several processes: each exchange waits for the steps in flight


@dataclasses.dataclass(kw_only=True)
class TrainingLoop:
    """The training loop and everything that its steps need.

    Attributes:
      config: the settings.
      course: all steps.
      data: what is trained and evaluated on.
      task: what is trained.
      lengths: int64[N] of the samples to train on; None compares no lengths.
      eval_lengths: int64[H] of each set to evaluate on, by name; likewise.
      mesh: the devices; None for one.
      train_step: compiled for the buckets of the remaining steps.
      eval_step: compiled for the buckets of evaluations.
      checkpoints: where the state is saved.
      trackers: receive a record of every step and evaluation.
      ticks: counts the steps, so that other processes see that this one is alive.
      run_dir: a profiler trace is written below it.
    """

    config: FitConfig
    course: Course
    data: TrainingData
    task: Task
    lengths: Int64[np.ndarray, " N"] | None
    eval_lengths: Mapping[str, Int64[np.ndarray, " H"] | None]
    mesh: Mesh | None
    train_step: CompiledBuckets
    eval_step: CompiledBuckets
    checkpoints: Checkpoints
    trackers: Trackers
    ticks: Ticks
    run_dir: Path
    _evaluated: tuple[int, dict[str, Evaluation]] | None = dataclasses.field(default=None, init=False)

    def is_evaluated_at(self, place: Place) -> bool:
        """Whether to evaluate at a place: before the first step, after the last, and at every evaluation interval."""
        every = self.config.eval_every
        is_due = every is not None and place.num_steps_done % every == 0
        return is_due or place.num_steps_done in (0, self.course.num_steps)

    def evaluate(self, state: TrainState, place: Place) -> dict[str, Evaluation] | None:
        """Evaluates on every set, once at a place; None if it was interrupted."""
        if self._evaluated is not None and self._evaluated[0] == place.num_steps_done:
            return self._evaluated[1]
        evaluations = self._evaluate(state)
        if evaluations is None:
            return None
        about = {"step": place.num_steps_done, "time_s": place.train_s}
        told = [f"evaluation after step {place.num_steps_done:,}"]
        for name, evaluation in evaluations.items():
            measured = self.task.measure(evaluation)
            if self.task.is_language_model:
                figure = "bits_per_token"
                told.append(f"{name} {measured:.3f} bits/token")
            else:
                figure = "mean_loss"  # by which readers tell a loss of the user's own
                told.append(f"{name} loss {measured:.4g}")
            figures = {"evaluation": name, figure: measured, "num_tokens": round(evaluation.weight)}
            self.trackers.log(about | figures | evaluation.sums)
            told += [f"{of_sum} {mean:.4g}" for of_sum, mean in evaluation.sums.items()]
        show_line(" · ".join(told), progress=self.config.progress)
        self._evaluated = place.num_steps_done, evaluations
        return evaluations

    def warm_up_evaluation(self, state: TrainState) -> None:
        """Evaluates a little and discards the result, since the first evaluation compiles small programs."""
        self._evaluate(state, max_steps=1)

    def save(self, state: TrainState, place: Place, metric: float | None = None) -> None:
        """Saves in the background, after everything logged so far is on disk."""
        self.trackers.sync()
        self.checkpoints.save(state, place, metric=metric)

    def _evaluate(self, state: TrainState, max_steps: int | None = None) -> dict[str, Evaluation] | None:
        def must_stop(num_steps: int) -> bool:
            self.ticks()
            return _is_interrupted_at(num_steps)

        return evaluate(
            self.eval_step,
            state,
            self.course.eval_plans,
            self.data.evaluation,
            self.eval_lengths,
            must_stop=must_stop,
            mesh=self.mesh,
            max_steps=max_steps,
            collate=self.task.collate,
            on_mismatch=self.config.data.on_mismatch,
            verify=self.config.verify,
        )

    def run(self, state: TrainState, place: Place) -> tuple[TrainState, Place]:
        """Takes the remaining steps, or those before an interrupt."""
        config, course = self.config, self.course
        if place.num_steps_done == course.num_steps:
            return state, place
        batches = load(
            course.plan_of_epoch,
            self.data.train,
            layout=self.mesh,
            epoch=place.epoch,
            num_epochs=-(-course.num_steps // course.steps_per_epoch),
            start_step=place.step,
            num_workers=config.data.num_workers,
            collate=self.task.collate,
            lengths=self.lengths,
            on_mismatch=config.data.on_mismatch,
            verify=config.verify,
        )
        steps_left = course.num_steps - place.num_steps_done
        with (
            contextlib.closing(batches),
            StepDisplay(
                course.num_steps,
                place.num_steps_done,
                progress=config.progress,
                in_bits=self.task.is_language_model,
            ) as display,
            StepProfiler(self.run_dir / "profile", config.profile, steps_left=steps_left) as profiler,
        ):
            batch = next(batches)  # starting to read is no wait of a step
            account = _Account(place, batches, self.trackers, display)
            running: tuple[dict[str, Any], Metrics] | None = None
            while True:
                self.ticks()  # before the computation that waits for all processes
                record = course.record(place)
                if not self._has_program(place):
                    break
                with profiler.step(f"{record['bucket_rows']}×{record['bucket_length']}", place.num_steps_done, state):
                    state, metrics = self.train_step(state, batch)
                if running is not None:
                    account.finish(*running, pending=self.train_step.pending)
                running = record, metrics
                place = course.next_place(place)
                if place.num_steps_done == course.num_steps:  # its evaluation and its checkpoint come after the loop
                    break
                is_evaluated = self.is_evaluated_at(place)
                # Where the best are kept, every evaluated state may be one of them.
                kept = config.checkpoints
                is_saved = place.num_steps_done % kept.checkpoint_every == 0 or (is_evaluated and kept.keep_best)
                if is_saved or is_evaluated:
                    account.finish(*running)
                    running = None
                    place = account.with_counts(place)
                    metric = None
                    if is_evaluated:
                        evaluations = self.evaluate(state, place)
                        metric = None if evaluations is None else self.task.measure(evaluations[HELD_OUT])
                        account.skip_since(place)
                    if is_saved:
                        self.save(state, place, metric)
                if _is_interrupted_at(place.num_steps_done):
                    break
                if not self.train_step.pending:
                    self.eval_step.advance()
                batch = account.next_batch()
            if running is not None:
                account.finish(*running)
            place = account.with_counts(place)
        return state, place

    def _has_program(self, place: Place) -> bool:
        """Waits until the program of the next step is compiled; False if the run was interrupted meanwhile."""
        plan = self.course.plan_of_epoch(place.epoch)
        bucket = plan.buckets[plan.step_bucket[place.step]]
        while not self.train_step.wait(bucket, timeout=_WAIT_S):
            self.ticks.wait()
            if jax.process_count() == 1 and is_any_interrupted():
                return False
        return True


class _Account:
    """Measurements of the steps, reported once the metrics of a step are read.

    Args:
      place: where training continues; so do times and counts.
      batches: what the steps take.
      trackers: take a record of every step.
      display: shows it.
    """

    def __init__(self, place: Place, batches: Loader, trackers: Trackers, display: StepDisplay):
        self._batches = batches
        self._trackers = trackers
        self._display = display
        self._meter = StepMeter()
        self._start = time.perf_counter() - place.train_s
        self._data_wait_s = place.data_wait_s
        self._num_adjusted_before = place.num_adjusted_done

    def next_batch(self) -> Any:
        """The next batch; the time that it takes counts as waiting for data."""
        return self._meter.next(self._batches)

    def finish(self, record: dict[str, Any], metrics: Metrics, *, pending: Sequence[AnyBucket] = ()) -> None:
        """Reads the metrics of a step, which waits for its end, and reports them.

        Raises:
          FloatingPointError: the loss is not finite.
          ValueError: a sum of the loss has the name of another figure.
        """
        metrics = jax.device_get(metrics)
        weight = float(metrics.weight_sum)
        record["loss"] = float(metrics.loss_sum) / weight if weight else 0.0
        sums = {name: value for name, value in metrics.sums.items() if np.ndim(value) == 0}
        if clashing := sums.keys() & (record.keys() | {"time_s"}):
            raise UserError(f"sums of the loss must have other names than figures of a step: {list_first(clashing)}")
        record |= {name: float(value) / (weight or 1.0) for name, value in sums.items()}
        if not math.isfinite(record["loss"]):
            raise FloatingPointError(f"the loss is {record['loss']} at step {record['step']}; the run ends")
        record |= {"time_s": self._train_s()} | self._meter.end_step()
        self._data_wait_s += record["data_wait_s"]
        self._trackers.log(record)
        self._display.update(record, pending=pending)

    def with_counts(self, place: Place) -> Place:
        """The place with the measurements so far."""
        return dataclasses.replace(
            place,
            train_s=self._train_s(),
            data_wait_s=self._data_wait_s,
            num_adjusted_done=self._num_adjusted_before + self._batches.num_adjusted,
        )

    def skip_since(self, place: Place) -> None:
        """Excludes the time since `with_counts` returned this place, such as that of an evaluation."""
        self._start += self._train_s() - place.train_s
        self._meter.skip()

    def _train_s(self) -> float:
        return time.perf_counter() - self._start


def _is_interrupted_at(num_steps: int) -> bool:
    """Whether to stop after this step: processes decide together, and so only now and then."""
    every = 1 if jax.process_count() == 1 else _STEPS_BETWEEN_EXCHANGES
    return num_steps % every == 0 and is_any_interrupted()


def evaluate(
    eval_step: CompiledBuckets,
    state: Any,
    plans: Mapping[str, Plan],
    datasets: Mapping[str, DataSource],
    lengths: Mapping[str, Int64[np.ndarray, " H"] | None],
    *,
    must_stop: Callable[[int], bool],
    mesh: Mesh | None = None,
    max_steps: int | None = None,
    **loading: Any,
) -> dict[str, Evaluation] | None:
    """Evaluates a state on all samples of each plan.

    Args:
      eval_step: returns the state and `Metrics`; compiled for the buckets of all plans.
      state: the input of the step; it is not changed.
      plans: the plan of each set, by name.
      datasets: the samples of each set.
      lengths: int64[H] of each set, the lengths that it was planned for; None compares no lengths.
      must_stop: whether to stop before the next step, called with the number of steps taken.
      mesh: the mesh for the batches.
      max_steps: steps of each plan to take; None for all.
      loading: more arguments of `load`, the same for all sets.

    Returns:
      An `Evaluation` of each set, over the steps taken; None if it was stopped.
    """
    evaluations: dict[str, Evaluation] = {}
    num_steps = 0
    for name, plan in plans.items():
        steps = []
        reading = load(plan, datasets[name], layout=mesh, lengths=lengths[name], **loading)
        with contextlib.closing(reading) as batches:
            for batch in itertools.islice(batches, max_steps):
                if must_stop(num_steps):
                    return None
                steps.append(eval_step(state, batch)[1])
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
