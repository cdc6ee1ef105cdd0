"""The training loop: one host loop around one pure step.

Metrics are read a step late, so that no step waits for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.progress import show_line
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.data.split import HELD_OUT
from jvarlen.distributed.processes import Ticks, is_any_interrupted
from jvarlen.loading.loader import Loader, load
from jvarlen.planning.buckets import AnyBucket
from jvarlen.runs.prepare import Prepared
from jvarlen.runs.steps import StepDisplay, StepMeter, StepProfiler
from jvarlen.runs.summary import Evaluation
from jvarlen.runs.trackers import Trackers
from jvarlen.training.checkpoint import Checkpoints, Place
from jvarlen.training.train_state import Metrics, TrainState

__all__ = ["TrainingLoop"]

_WAIT_S = 0.2  # for the compiler, between two looks at whether the run was interrupted
_STEPS_BETWEEN_EXCHANGES = 16  # of several processes: each exchange waits for the steps in flight


@dataclasses.dataclass(kw_only=True)
class TrainingLoop:
    """The loop around the compiled steps; `ticks` show other processes that this one is alive."""

    prepared: Prepared
    train_step: CompiledBuckets
    eval_step: CompiledBuckets
    checkpoints: Checkpoints
    trackers: Trackers
    ticks: Ticks
    run_dir: Path
    _evaluated: tuple[int, dict[str, Evaluation]] | None = dataclasses.field(default=None, init=False)

    def run(self, state: TrainState, place: Place) -> tuple[TrainState, Place]:
        """Takes the remaining steps, or those before an interrupt."""
        config, course, task = self.prepared.config, self.prepared.course, self.prepared.task
        if place.num_steps_done == course.num_steps:
            return state, place
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
                is_evaluated, kept = self.is_evaluated_at(place), config.checkpoints
                # Where the best are kept, every evaluated state may be one of them.
                is_saved = place.num_steps_done % kept.checkpoint_every == 0 or (is_evaluated and kept.keep_best)
                if is_saved or is_evaluated:
                    read_metrics()
                    place, metric = measured(place), None
                    if is_evaluated:
                        evaluations = self.evaluate(state, place)
                        metric = None if evaluations is None else task.measure(evaluations[HELD_OUT])
                        meter.skip()
                    if is_saved:
                        self.save(state, place, metric)
                if _is_interrupted_at(place.num_steps_done):
                    break
                if not self.train_step.pending:
                    self.eval_step.advance()
                batch = meter.next(batches)
            read_metrics()
            return state, measured(place)

    def is_evaluated_at(self, place: Place) -> bool:
        """Whether to evaluate at a place: before the first step, after the last, and at every evaluation interval."""
        every = self.prepared.config.eval_every
        is_due = every is not None and place.num_steps_done % every == 0
        return is_due or place.num_steps_done in (0, self.prepared.course.num_steps)

    def evaluate(self, state: TrainState, place: Place) -> dict[str, Evaluation] | None:
        """Evaluates on every set, once at a place; None if it was interrupted."""
        if self._evaluated is not None and self._evaluated[0] == place.num_steps_done:
            return self._evaluated[1]
        evaluations = self._evaluate(state)
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

    def warm_up_evaluation(self, state: TrainState) -> None:
        """Evaluates a little and discards the result, since the first evaluation compiles small programs."""
        self._evaluate(state, max_steps=1)

    def save(self, state: TrainState, place: Place, metric: float | None = None) -> None:
        """Saves in the background, after everything logged so far is on disk."""
        self.trackers.sync()
        self.checkpoints.save(state, place, metric=metric)

    def _evaluate(self, state: TrainState, max_steps: int | None = None) -> dict[str, Evaluation] | None:
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
