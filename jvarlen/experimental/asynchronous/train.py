"""Asynchronous training: worker processes compute gradients on the newest parameters there are, and don't wait.

`StalenessSchedule` says which microbatch is computed next and which step is applied next: pure bookkeeping.

A step is open from the moment its first microbatch is handed out until it is applied. Let v be the updates applied so
far, and s the bound. A gradient that was computed on version u must be applied while v is at most u + s, so the least
such number of a step's microbatches is its deadline. With the open steps in the order of their deadlines, the i-th of
them, from 0, can be applied at v + i at the earliest. Two rules keep that within every deadline: at most s + 1 steps
are open, and a step that is complete waits while applying it would leave another one without its place. The step with
the earliest deadline never waits, so the run never stalls.

Letters: U updates, M microbatches of a step.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jvarlen._common.checks import UserError, check_at_least_one, check_at_least_zero, is_number, list_first
from jvarlen._common.interrupts import is_interrupted, remembered_interrupts
from jvarlen.experimental.asynchronous.arrival_log import ArrivalLog, AsyncRun, digest_of_state
from jvarlen.experimental.asynchronous.programs import StepPrograms, Version, host_batches, split_microbatches
from jvarlen.experimental.asynchronous.worker import Worker, WorkerDied
from jvarlen.planning.plan import Plan
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import Metrics, TrainState

__all__ = ["Part", "StalenessSchedule", "train_async"]

_WAIT_S = 0.2  # for the workers, between two looks at whether the run was interrupted


def train_async(
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    state: TrainState,
    plan: Plan,
    batches: Iterable[Any],
    *,
    num_workers: int,
    staleness_bound: int | None = None,
    start_step: int = 0,
    worker_timeout_s: float | None = 600.0,
    least_seconds: Sequence[float] = (),
) -> AsyncRun:
    """Trains with worker processes that don't wait for each other.

    Each worker takes the next microbatch in the order of the plan and the newest parameters, computes the gradient,
    sends it back, and takes the next. An update is one step of the plan: as soon as all M gradients of the step have
    arrived, they are added in the order of the microbatches, divided once, and applied to the newest parameters.
    Updates come in the order in which steps become complete. The staleness of a gradient is the number of updates
    applied between the parameters that it was computed on and its own update.

    The workers are started here, on this machine, and end with the call. They get compiled programs and arrays, so
    nothing of the caller's is pickled. If one dies, or stops, a warning names it, and the others compute its
    microbatches.

    After Ctrl-C or SIGTERM no further step is begun, and the call returns when the open steps have been applied. The
    log then has the first steps of the plan, and the same call with the state, `start_step` and batches after them
    continues. A second signal ends the call at once, and nothing is kept.

    Args:
      loss_fn: as for `make_train_step`. Keys are those of the step's number in the plan. `extra` is as old as the
        parameters; its changes are added to the newest.
      optimizer: as for `make_train_step`, without those that evaluate the loss themselves, such as line searches.
      state: before the first update, of `make_train_step(loss_fn, optimizer).init`. It is updated where it is, on one
        device or replicated over a mesh.
      plan: its steps from `start_step` on are trained once each.
      batches: of these steps, in the order of the plan: `load(plan, dataset, start_step=start_step)`. Every process
        reads from this one, so the data is read once.
      num_workers: worker processes.
      staleness_bound: the most updates between the parameters of a gradient and its own update. At 0, steps are
        bulk-synchronous: all gradients of a step are computed on the same parameters, the newest. None: unbounded.
      start_step: the first step; the state is that after the steps before it.
      worker_timeout_s: seconds without a sign of a worker that is starting or has a gradient to compute, after which it
        is killed and counts as dead. None waits for ever.
      least_seconds: the minimum seconds of a gradient in each worker, which sleeps for the rest, to try uneven workers
        on one machine. Empty: no sleep.

    Returns:
      `AsyncRun`: the state, the metrics and the log.

    Raises:
      ValueError: arguments out of range; fewer batches than steps, or with another M than the plan; a loss that calls
        Python while it runs; an optimizer that evaluates the loss itself.
      RuntimeError: all workers died; the message says how each did.
      Exception: what computing a gradient raised in a worker.
    """
    check_at_least_one(num_workers=num_workers)
    if staleness_bound is not None:
        check_at_least_zero(staleness_bound=staleness_bound)
    if not 0 <= start_step <= plan.num_steps:
        raise UserError(f"start_step must be between 0 and {plan.num_steps}, not {start_step}")
    if len(least_seconds) not in (0, num_workers) or any(not 0 <= seconds < math.inf for seconds in least_seconds):
        raise UserError(f"least_seconds must be {num_workers} finite numbers of at least 0, not {list(least_seconds)}")
    if worker_timeout_s is not None and not (is_number(worker_timeout_s) and 0 < worker_timeout_s < math.inf):
        raise UserError(f"worker_timeout_s must be finite seconds above 0, or None, not {worker_timeout_s!r}")
    steps = range(start_step, plan.num_steps)
    server = _Server(
        StepPrograms(loss_fn, optimizer, state),
        state,
        host_batches(batches, steps, plan.num_microbatches),
        StalenessSchedule(steps, plan.num_microbatches, staleness_bound),
        start_step,
    )
    initial = digest_of_state(state)
    workers: list[Worker] = []
    try:
        with remembered_interrupts():
            for number in range(num_workers):
                workers.append(Worker(number, least_seconds[number] if least_seconds else 0.0, worker_timeout_s))
            server.run(workers)
    finally:
        for worker in workers:
            worker.close()
    metrics = jax.device_get(server.metrics)
    shape = (len(server.steps), plan.num_microbatches)
    arrived = np.array(server.arrivals, np.float64).reshape(*shape, 2)
    log = ArrivalLog(
        plan_digest=plan.digest,
        staleness_bound=staleness_bound,
        initial_digest=initial,
        final_digest=digest_of_state(server.state),
        steps=np.array(server.steps, np.int64),
        versions=np.array(server.versions, np.int64).reshape(shape),
        workers=arrived[..., 0].astype(np.int64),
        arrived_s=arrived[..., 1].copy(),
        applied_s=np.array(server.applied_s, np.float64),
        losses=np.array([each.loss for each in metrics], np.float64),
    )
    return AsyncRun(server.state, metrics, log, len(log.steps) < len(steps))


class Part(NamedTuple):
    """A microbatch of a step of the plan."""

    step: int
    microbatch: int


@dataclasses.dataclass
class _OpenStep:
    """The versions on which the microbatches of a step are computed, None where not handed out, and how many miss."""

    versions: list[int | None]
    num_missing: int


class StalenessSchedule:
    """The order of an asynchronous run, which calls `next_part`, `arrive` and `next_update` as things happen.

    Args:
      steps: of the plan.
      num_microbatches: M, of every step.
      staleness_bound: the most updates between the parameters of a gradient and its own update; None: any number.

    Attributes:
      version: updates applied so far.
    """

    def __init__(self, steps: range, num_microbatches: int, staleness_bound: int | None):
        self.version = 0
        self._bound = math.inf if staleness_bound is None else staleness_bound
        self._num_microbatches = num_microbatches
        self._parts = (Part(step, i) for step in steps for i in range(num_microbatches))
        self._next = next(self._parts, None)
        self._lost: list[Part] = []
        self._open: dict[int, _OpenStep] = {}
        self._opens_steps = True
        self._complete: list[int] = []  # open steps without missing gradients, in the order of completion

    @property
    def is_done(self) -> bool:
        """Whether every step was applied, or every open one after `open_no_more`."""
        return not self._open and (self._next is None or not self._opens_steps)

    def open_no_more(self) -> None:
        """The run is to end after the steps that are open, which are the first ones of the plan not yet applied."""
        self._opens_steps = False

    def next_part(self) -> Part | None:
        """The microbatch to hand out now, on the current version; None: nothing, until an update or at the end."""
        if self._lost:
            part = self._lost.pop(0)
        elif self._next is None or not (self._next.step in self._open or self._may_open()):
            return None
        else:
            part, self._next = self._next, next(self._parts, None)
        if part.step not in self._open:
            self._open[part.step] = _OpenStep([None] * self._num_microbatches, self._num_microbatches)
        self._open[part.step].versions[part.microbatch] = self.version
        return part

    def lose(self, part: Part) -> None:
        """Its worker died: it will be handed out again."""
        self._open[part.step].versions[part.microbatch] = None
        self._lost = sorted([*self._lost, part])

    def arrive(self, part: Part) -> None:
        """Its gradient has arrived."""
        step = self._open[part.step]
        step.num_missing -= 1
        if not step.num_missing:
            self._complete.append(part.step)

    def next_update(self) -> tuple[int, tuple[int, ...]] | None:
        """The step to apply now, which counts as applied, and the versions of its gradients; None: none may be."""
        for step in self._complete:
            deadlines = sorted(self._deadline(versions) for other, versions in self._open.items() if other != step)
            if all(self.version + 1 + place <= deadline for place, deadline in enumerate(deadlines)):
                self._complete.remove(step)
                self.version += 1
                return step, tuple(version for version in self._open.pop(step).versions if version is not None)
        return None

    def _may_open(self) -> bool:
        return self._opens_steps and len(self._open) <= self._bound

    def _deadline(self, step: _OpenStep) -> float:
        """The last version at which the step can be applied."""
        return min([self.version, *(version for version in step.versions if version is not None)]) + self._bound


class _Server:
    """Holds the state of a run, hands out microbatches and applies updates.

    Attributes:
      state: after the updates so far.
      steps: the step of each update.
      versions: of each update, those of its gradients.
      arrivals: of each update, (worker, seconds) of its gradients.
      applied_s: of each update.
      metrics: of each update.
    """

    def __init__(
        self,
        programs: StepPrograms,
        state: TrainState,
        batches: Iterator[tuple[int, Any]],
        schedule: StalenessSchedule,
        start_step: int,
    ):
        self.state = state
        self.steps: list[int] = []
        self.versions: list[tuple[int, ...]] = []
        self.arrivals: list[list[tuple[int, float]]] = []
        self.applied_s: list[float] = []
        self.metrics: list[Metrics] = []
        self._programs = programs
        self._batches = batches
        self._schedule = schedule
        self._start_step = start_step
        self._open: dict[int, tuple[Any, list[Any]]] = {}  # a step's batch and its microbatches
        self._ahead: tuple[int, tuple[Any, list[Any]]] | None = None  # the same of the next step to be opened
        self._arrived: dict[Part, tuple[Version, tuple[int, float]]] = {}  # sums; worker and seconds
        self._newest: tuple[int, Version] | None = None
        self._begun = 0.0

    def run(self, workers: Sequence[Worker]) -> None:
        """All steps, or the open ones once it is interrupted.

        Raises RuntimeError where every worker died, and what a worker raised.
        """
        busy: dict[Worker, Part | None] = dict.fromkeys(workers)
        idle: list[Worker] = []
        died: list[WorkerDied] = []
        if not self._schedule.is_done:  # while they start
            self._read(self._start_step)
            self._programs.compile(self.state, self._open[self._start_step][0])
        # A worker that is still starting would hold up what is sent to it.
        while None in busy.values() and not is_interrupted():
            self._receive(busy, idle, died)
        self._begun = time.perf_counter()
        while True:
            if is_interrupted():
                self._schedule.open_no_more()
            if self._schedule.is_done:
                return
            self._hand_out(busy, idle, died)
            if not busy:
                raise RuntimeError(f"no worker is left after {len(self.steps)} updates: {list_first(died, '; ')}")
            if not is_interrupted():
                self._read_ahead()
            self._receive(busy, idle, died)

    def _hand_out(self, busy: dict[Worker, Part | None], idle: list[Worker], died: list[WorkerDied]) -> None:
        while idle and (part := self._schedule.next_part()) is not None:
            if part.step not in self._open:
                self._read(part.step)
            version = self._schedule.version
            if self._newest is None or self._newest[0] != version:
                self._newest = (version, self._programs.version_of(self.state))
            microbatch = self._open[part.step][1][part.microbatch]
            program = self._programs.gradient_of(microbatch)
            place = (part.step - self._start_step, part.microbatch)
            worker = idle.pop(0)
            try:
                worker.compute(program, version, self._programs.arguments(self._newest[1], place, microbatch))
                busy[worker] = part
            except WorkerDied as error:
                self._lose(part, error, died)

    def _lose(self, part: Part | None, error: WorkerDied, died: list[WorkerDied]) -> None:
        warnings.warn(f"{error}, after {len(self.steps)} updates", stacklevel=2)
        died.append(error)
        if part is not None:
            self._schedule.lose(part)

    def _read_ahead(self) -> None:
        """Reads the batch of the next step to be opened, while workers compute."""
        if self._ahead is None and (read := next(self._batches, None)) is not None:
            step, batch = read
            self._ahead = (step, (batch, split_microbatches(batch)))

    def _read(self, step: int) -> None:
        self._read_ahead()
        assert self._ahead is not None
        number, self._open[step] = self._ahead
        assert number == step, "steps are opened in the order of the plan"
        self._ahead = None

    def _receive(self, busy: dict[Worker, Part | None], idle: list[Worker], died: list[WorkerDied]) -> None:
        """Waits for workers, takes what they send, and applies what can be applied."""
        begun = time.monotonic()
        of_connection = {worker.connection: worker for worker in busy}
        ready = [of_connection[connection] for connection in wait(list(of_connection), _WAIT_S)]  # type: ignore[index]
        for worker in busy.keys() - ready:
            # A pause of this process itself, which its workers may share, counts as little.
            worker.count_silence(min(time.monotonic() - begun, _WAIT_S))
        for worker in ready:
            part = busy.pop(worker)
            try:
                sums = worker.receive()
            except WorkerDied as error:
                self._lose(part, error, died)
                continue
            except Exception as error:
                error.add_note(f"while worker {worker.number} computed {part}")
                raise
            idle.append(worker)
            if part is not None:
                self._arrived[part] = (sums, (worker.number, time.perf_counter() - self._begun))
                self._schedule.arrive(part)
                self._apply()

    def _apply(self) -> None:
        while (applied := self._schedule.next_update()) is not None:
            step, versions = applied
            batch, microbatches = self._open.pop(step)
            sums, arrivals = zip(*(self._arrived.pop(Part(step, i)) for i in range(len(microbatches))), strict=True)
            self.state, metrics = self._programs.update(self.state, batch, sums)
            self.steps.append(step)
            self.versions.append(versions)
            self.arrivals.append(list(arrivals))
            self.applied_s.append(time.perf_counter() - self._begun)
            self.metrics.append(metrics)
