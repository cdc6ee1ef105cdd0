"""The loop of a training: evaluate, save, dispatch a step, then read the metrics of the step before."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import NamedTuple

import jax

from jvarlen._common.checks import UserError, check_at_least_one
from jvarlen._common.terminal import show_line
from jvarlen._common.types import Batch, JsonObject
from jvarlen.compiling.recompiles import no_recompiles, uncounted_in_thread
from jvarlen.data.split import HELD_OUT
from jvarlen.distributed import processes
from jvarlen.inference.evaluate import sum_metrics
from jvarlen.loading.plan_source import SkippedSample
from jvarlen.models import with_window
from jvarlen.planning.buckets import AnyBucket
from jvarlen.runs import directory, steps
from jvarlen.runs.config import FitConfig
from jvarlen.runs.open_run import Run
from jvarlen.runs.prepare import say
from jvarlen.training.checkpoint import Place
from jvarlen.training.train_state import Metrics, TrainState

__all__ = ["Hook", "Trained", "Training", "every", "train"]

_WAIT_S = 0.2  # for the compiler, between two looks at whether the run was interrupted


@dataclasses.dataclass
class _Evaluator:
    """Evaluates on every set of a run, once at a place."""

    run: Run
    _num_skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    _latest: tuple[int, dict[str, float | None]] | None = None

    def evaluate(self, state: TrainState, place: Place) -> dict[str, float | None] | None:
        """The loss of each set: nats a token, or by the user's loss. Returns None if interrupted.

        The loss of a set in which nothing has weight is None.
        """
        if (known := self.losses_at(place)) is not None:
            return known
        means = self._take_steps(state)
        if means is None:
            return None
        in_nats = self.run.prepared.task.is_language_model
        losses = {name: mean.loss for name, mean in means.items()}
        lines = [f"evaluation after step {place.num_steps_done:,}"]
        for name, loss in losses.items():
            if loss is None:
                lines.append(f"{name} has no value: none of its tokens has weight in the loss")
            else:
                lines.append(f"{name} loss {loss:.3f} nats/token" if in_nats else f"{name} loss {loss:.4g}")
                lines += [f"{sum_name} {mean:.4g}" for sum_name, mean in means[name].sums.items()]
            figure = "nats_per_token" if in_nats else "mean_loss"  # readers recognize a user's loss by this
            record = {"step": place.num_steps_done, "time_s": place.train_s, "evaluation": name, figure: loss}
            if num_skipped := self._num_skipped[name]:
                lines.append(f"without {num_skipped:,} bad samples")
                record["num_skipped"] = num_skipped
            self.run.trackers.log(record | {"num_tokens": round(means[name].weight)} | means[name].sums)
        show_line(" · ".join(lines), progress=self.run.prepared.settings.progress)
        self._latest = place.num_steps_done, losses
        return losses

    def losses_at(self, place: Place) -> dict[str, float | None] | None:
        """The losses that `evaluate` found at this place, if it was there."""
        return self._latest[1] if self._latest is not None and self._latest[0] == place.num_steps_done else None

    def warm_up(self, state: TrainState) -> None:
        """Takes a step of each set, without a result: its first evaluation then compiles nothing."""
        self._take_steps(state, max_steps=1)

    def _take_steps(self, state: TrainState, max_steps: int | None = None) -> dict[str, steps.Means] | None:
        """The means of each set over `max_steps` steps; None if it was interrupted."""
        run, means = self.run, {}
        state = run.step.for_evaluation(state)
        for name in run.prepared.training_plan.eval_plans:
            with contextlib.closing(self._batches(name, max_steps)) as batches:
                total = sum_metrics(run.eval_step, state, batches)
            if total is None:
                return None
            means[name] = steps.means_of(total)
        return means

    def _batches(self, name: str, max_steps: int | None) -> Generator[Batch]:
        run = self.run
        with contextlib.closing(run.prepared.load_evaluation(name)) as batches:
            for batch in itertools.islice(batches, max_steps):
                run.bad_samples.log_evaluation(name, batches.skipped_in_batch)
                run.heartbeat.step()
                yield batch
            self._num_skipped[name] = batches.num_skipped


class _Running(NamedTuple):
    """A step that the devices compute."""

    record: JsonObject
    metrics: Metrics
    skipped: Sequence[SkippedSample]


class Training:
    """A training between two steps, as hooks see it.

    Attributes:
      state: parameters, optimizer state and so on, on the devices. The next step takes its arrays over: copy what you
        keep.
      record: the figures of the step before, as in `metrics.jsonl`.
    """

    def __init__(self, run: Run):
        self.state = run.state
        self.record: JsonObject = {}
        self._run, self._place = run, run.place
        self._evaluator = _Evaluator(run)
        self._meter: steps.StepMeter | None = None  # from the first step on
        self._saved_at: int | None = None
        self._stops = False

    @property
    def num_steps_done(self) -> int:
        """Steps taken, those before a resume included."""
        return self._place.num_steps_done

    def evaluate(self) -> dict[str, float | None] | None:
        """Evaluates on every set, once between two steps.

        Returns:
          The loss of each set by name, `"held_out"` first: nats a token, or by your own loss. It is None for a set
          in which no token has weight. Returns None if the run was interrupted; it then ends.
        """
        losses = self._evaluator.evaluate(self.state, self._place)
        if self._meter is not None:
            self._meter.skip()
        return losses

    def save(self) -> None:
        """Writes a checkpoint, once between two steps; one with an evaluation may be the best."""
        evaluated = self._evaluator.losses_at(self._place)
        self._save(None if evaluated is None else evaluated[HELD_OUT])

    def _save(self, metric: float | None) -> None:
        if self._saved_at == self.num_steps_done:
            return
        with contextlib.nullcontext() if self._meter is None else self._meter.stalled():
            self._run.trackers.sync()  # first, so that no checkpoint is ahead of the logs
            self._run.bad_samples.sync()
            self._run.checkpoints.save(self.state, self._place, metric=metric)
        self._saved_at = self.num_steps_done

    def stop(self) -> None:
        """Ends training here, with its last evaluation and checkpoint. Every process must call it at the same step."""
        self._stops = True

    def _count_evaluation(self, config: FitConfig, held_out: float | None) -> None:
        """Counts an evaluation for `patience`, each once, also if a resumed run makes it again; may stop."""
        if config.patience is None:
            return
        if held_out is None:
            raise UserError("patience needs a held-out loss, and no held-out token has weight in the loss")
        place = self._place
        lowest = math.inf if place.lowest_held_out is None else place.lowest_held_out
        if place.num_steps_counted < place.num_steps_done:
            is_lower = lowest - held_out > config.min_delta  # what is not a number never is
            self._place = place = dataclasses.replace(
                place,
                lowest_held_out=held_out if is_lower else place.lowest_held_out,
                num_not_lower=0 if is_lower else place.num_not_lower + 1,
                num_steps_counted=place.num_steps_done,
            )
        if place.num_not_lower > config.patience:
            say("Stopped", f"{place.num_not_lower} evaluations in a row have not lowered the held-out loss")
            self.stop()

    @property
    def _is_over(self) -> bool:
        return self._stops or self.num_steps_done == self._run.prepared.training_plan.num_steps


class Hook(NamedTuple):
    """A function that is called between steps."""

    num_steps: int
    function: Callable[[Training], object]

    def is_due(self, num_steps_done: int) -> bool:
        """Whether it is called after this many steps."""
        return num_steps_done % self.num_steps == 0


def every(num_steps: int, function: Callable[[Training], object]) -> Hook:
    """A hook of `fit`, called whenever a multiple of `num_steps` steps is done, counted from the start of the run.

    The step before is then over and logged; other steps are dispatched without waiting. What the function compiles does
    not count as recompiling.

    Args:
      num_steps: steps between two calls, at least 1.
      function: takes the `Training`. Every process calls it.

    Returns:
      The hook.

    Example:
      >>> def stop_if_good(training):
      ...     if training.evaluate()["held_out"] < 1.0:
      ...         training.stop()
      >>> every(50, stop_if_good).num_steps
      50
    """
    check_at_least_one(num_steps=num_steps)
    return Hook(num_steps, function)


class Trained(NamedTuple):
    """The result of the loop."""

    state: TrainState
    place: Place
    evaluations: dict[str, float | None] | None  # the metric of each set after the last step; None: it was interrupted
    num_compilations: int  # after the first step


def train(run: Run, hooks: Sequence[Hook] = ()) -> Trained:
    """Takes the remaining steps; evaluates and saves before the first, by hooks, and after the last."""
    training, settings, plan = Training(run), run.prepared.settings, run.prepared.training_plan
    _begin(training, run)
    batches = run.prepared.load_training(run.place, settings.config.data.num_workers)
    meter = training._meter = steps.StepMeter(run.place, batches)
    steps_left = plan.num_steps - training.num_steps_done
    display = steps.StepDisplay(plan.num_steps, progress=settings.progress, in_nats=run.prepared.task.is_language_model)
    profiler = steps.StepProfiler(run.run_dir / "profile", settings.config.profile, steps_left=steps_left)
    from_settings, running = _hooks_of(settings.config), None
    with no_recompiles() as compilations, contextlib.closing(batches), display, profiler:
        while not training._is_over:
            if running is not None and any(hook.is_due(training.num_steps_done) for hook in (*from_settings, *hooks)):
                _end_step(training, run, running, display)
                running, training._place = None, meter.measured(training._place)
                _call(from_settings, training)
                with uncounted_in_thread():
                    _call(hooks, training)
                if training._is_over:
                    break
            if processes.is_interrupted_at(training.num_steps_done):
                break
            batch, skipped = meter.next_batch(), batches.skipped_in_batch
            run.heartbeat.step()  # before the computation that waits for all processes
            if not _has_programs(run, plan.groups_at(training._place), meter, running):
                break
            meter.before_step(running)
            record = plan.record(training._place)
            if plan.windows is not None:
                batch = with_window(batch, record["attention_window"])
            with profiler.step(steps.shape_text(record), training.num_steps_done, training.state):
                training.state, metrics = run.train_step(training.state, batch)
            if running is not None:
                _end_step(training, run, running, display)  # the step before
            running, training._place = _Running(record, metrics, skipped), plan.next_place(training._place)
            if not run.train_step.pending:
                run.eval_step.advance()
        if running is not None:
            _end_step(training, run, running, display)
        training._place = meter.measured(training._place)
    training._meter = None
    is_over = training._is_over
    evaluations = training.evaluate() if is_over else None
    training.save()
    if is_over and running is not None:
        _call(hooks, training)
    if evaluations is None:
        run.checkpoints.wait()
    return Trained(training.state, training._place, evaluations, compilations.num_compilations)


def _hooks_of(config: FitConfig) -> list[Hook]:
    """The hooks that the settings ask for."""

    def evaluate(training: Training) -> None:
        if (losses := training.evaluate()) is not None:
            training._count_evaluation(config, losses[HELD_OUT])
        if config.num_best:  # every evaluated state may be one of the best
            training.save()

    evaluates = [] if config.eval_every is None else [every(config.eval_every, evaluate)]
    return [*evaluates, every(config.checkpoints.checkpoint_every, Training.save)]


def _call(hooks: Sequence[Hook], training: Training) -> None:
    for hook in hooks:
        if hook.is_due(training.num_steps_done):
            hook.function(training)
            if training._meter is not None:
                training._meter.skip()


def _begin(training: Training, run: Run) -> None:
    """The first evaluation, save and exchange, before steps are guarded: all compile small things once."""
    config, plan, place = run.prepared.settings.config, run.prepared.training_plan, run.place
    _raise_if_any_interrupted()
    is_due = config.eval_every is not None and place.num_steps_done % config.eval_every == 0
    if place.num_steps_done in (0, plan.num_steps) or is_due:
        evaluations = training.evaluate()
        if place.held_out_before is None and evaluations is not None:
            training._place = dataclasses.replace(place, held_out_before=evaluations[HELD_OUT])
        if is_due and place.num_steps_done and evaluations is not None:
            training._count_evaluation(config, evaluations[HELD_OUT])
    else:
        training._evaluator.warm_up(training.state)
    _raise_if_any_interrupted()
    training._save(None)  # not one of the best
    if processes.is_main_process() and config.directory.run_dir is None:
        directory.point_latest_to(run.run_dir)
    placement = run.prepared.placement
    sent = "float32" if placement is None else placement.layout.reduce_dtype
    if sent != "float32" and place.num_steps_done < plan.num_steps:
        with contextlib.closing(run.prepared.load_training(place)) as batches:
            error = run.step.reduce_error(training.state, next(batches))
        say("Gradients", f"sent in {sent} differ by {error:.1e} of their norm from float32")


def _end_step(training: Training, run: Run, running: _Running, display: steps.StepDisplay) -> None:
    """Waits for the end of a step, logs it and shows it."""
    metrics, meter = jax.device_get(running.metrics), training._meter
    assert meter is not None
    record = steps.with_metrics(running.record, metrics)
    steps.check_finite(record, metrics, training.state)
    if not metrics.grads_finite:
        record["grads_finite"] = False
    record |= meter.end_step(has_weight=record["loss"] is not None, grads_finite=bool(metrics.grads_finite))
    run.bad_samples.log(record["step"], running.skipped)
    run.trackers.log(record)
    display.update(record, pending=[*map(str, run.train_step.pending)])
    if record["loss"] is None:
        steps.check_weight(run.prepared.training_plan, record, meter.num_in_a_row)
    training.record = record


def _has_programs(run: Run, buckets: Iterable[AnyBucket], meter: steps.StepMeter, running: _Running | None) -> bool:
    """Waits until the programs of the next step are compiled; False if the run was interrupted meanwhile."""
    missing = [bucket for bucket in buckets if not run.train_step.wait(bucket, timeout=0.0)]
    if not missing:
        return True
    jax.block_until_ready(running)  # until then it is the time of that step
    with meter.stalled():
        for bucket in missing:
            while not run.train_step.wait(bucket, timeout=_WAIT_S):
                if processes.is_any_interrupted():  # of one process: several compile ahead
                    return False
    return True


def _raise_if_any_interrupted() -> None:
    """Raises KeyboardInterrupt on all processes if one was interrupted, so that none waits for it."""
    if processes.is_any_interrupted():
        raise KeyboardInterrupt
