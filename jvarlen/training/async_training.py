"""Asynchronous training: worker processes compute gradients on the newest parameters there are, and don't wait.

Letters: U updates, M microbatches of a step.
"""

from __future__ import annotations

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
from jvarlen.planning.plan import Plan
from jvarlen.training.arrival_log import ArrivalLog, digest_of_state
from jvarlen.training.async_worker import Worker, WorkerDied
from jvarlen.training.losses import LossFn
from jvarlen.training.staleness import Part, StalenessSchedule
from jvarlen.training.step_programs import StepPrograms, Version, host_arrays, split_microbatches
from jvarlen.training.step_sums import microbatches_of
from jvarlen.training.train_state import Metrics, TrainState

__all__ = ["AsyncRun", "replay", "train_async"]

_WAIT_S = 0.2  # for the workers, between two looks at whether the run was interrupted


class AsyncRun(NamedTuple):
    """The result of an asynchronous run, or of its replay.

    Attributes:
      state: after the last update.
      metrics: of each update, in their order, as NumPy arrays. The losses of an update are those of its gradients, on
        the parameters that these were computed on.
      log: what `replay` repeats.
      interrupted: whether Ctrl-C or SIGTERM ended the run before the last step of the plan. The steps of the log are
        then the first ones; the others are left.
    """

    state: TrainState
    metrics: list[Metrics]
    log: ArrivalLog
    interrupted: bool


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
      state: before the first update, of `init_train_state`. It is updated where it is, on one device or replicated over
        a mesh.
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
        _host_batches(batches, steps, plan.microbatches_per_step),
        StalenessSchedule(steps, plan.microbatches_per_step, staleness_bound),
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
    shape = (len(server.steps), plan.microbatches_per_step)
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


def replay(
    log: ArrivalLog,
    loss_fn: LossFn,
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    state: TrainState,
    plan: Plan,
    batches: Iterable[Any],
) -> AsyncRun:
    """Repeats an asynchronous run in this process, bit for bit.

    It takes the same updates in the same order, each gradient on the version that the log names, and holds as many
    past versions as that needs.

    Args:
      log: of the run.
      loss_fn: of the run.
      optimizer: of the run.
      state: with which the run began, on as many devices as there.
      plan: of the run.
      batches: as in the run: `load(plan, dataset, start_step=log.first_step)`.

    Returns:
      `AsyncRun`: the state and the metrics of the run, and its log.

    Raises:
      ValueError: the log is of another plan, or of a run that began with another state; batches as in `train_async`; an
        update has another loss than in the log, or the last state differs: another loss function, optimizer or dataset,
        or another machine, JAX version or XLA flags, which round differently.
    """
    differing = [
        f"{what}: {there[:12]} in the log, {here[:12]} here"
        for what, there, here in (
            ("the digest of the plan", log.plan_digest, plan.digest),
            ("the digest of the initial state", log.initial_digest, digest_of_state(state)),
        )
        if there != here
    ]
    steps = range(log.first_step, log.first_step + len(log.steps))
    shape = (plan.num_steps - steps.start, plan.microbatches_per_step)
    if log.plan_digest == plan.digest and (len(steps) > shape[0] or log.versions.shape[1] != shape[1]):
        differing.append(f"steps × microbatches: {list(log.versions.shape)} in the log, {list(shape)} here")
    if differing:
        raise UserError(f"this log is of another run: {'; '.join(differing)}")
    programs = StepPrograms(loss_fn, optimizer, state)
    read = _host_batches(batches, steps, plan.microbatches_per_step)
    waiting: dict[int, Any] = {}
    # The least version that this update or a later one takes.
    needed = np.minimum.accumulate(log.versions.min(axis=1, initial=len(log.steps))[::-1])[::-1]
    past: dict[int, Version] = {}
    metrics = []
    for update, step in enumerate(log.steps.tolist()):
        while step not in waiting:
            number, batch = next(read)
            waiting[number] = batch
        past[update] = programs.version_of(state)
        past = {version: arrays for version, arrays in past.items() if version >= needed[update]}
        batch = waiting.pop(step)
        sums = [
            programs.run(programs.gradient_of(part), past[version], (step - log.first_step, i), part)
            for i, (part, version) in enumerate(
                zip(split_microbatches(batch), log.versions[update].tolist(), strict=True)
            )
        ]
        state, of_update = programs.update(state, batch, sums)
        metrics.append(jax.device_get(of_update))
        loss = float(metrics[-1].loss)
        if loss != log.losses[update] and not (np.isnan(loss) and np.isnan(log.losses[update])):
            raise UserError(
                f"update {update}, {_DIFFERS}: its loss is {log.losses[update]!r} in the log, {loss!r} here"
            )
    if digest_of_state(state) != log.final_digest:
        raise UserError(f"the last state, {_DIFFERS}")
    return AsyncRun(state, metrics, log, steps.stop < plan.num_steps)


_DIFFERS = (
    "replayed, is not that of the run: the loss function, optimizer or dataset is another, or the machine, version of "
    "JAX or flags of XLA"
)


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


def _host_batches(batches: Iterable[Any], steps: range, num_microbatches: int) -> Iterator[tuple[int, Any]]:
    """The batches of these steps, with their steps, as arrays on the host.

    Raises:
      ValueError: there are fewer, or one has another M.
    """
    read = iter(batches)
    for step in steps:
        try:
            batch = next(read)
        except StopIteration:
            raise UserError(f"the batches end before step {step}, and the plan has {steps.stop} steps") from None
        leaves, structure = jax.tree.flatten(batch)
        batch = jax.tree.unflatten(structure, host_arrays(leaves))
        if microbatches_of(batch) != num_microbatches:
            raise UserError(
                f"the batch of step {step} has {microbatches_of(batch)} microbatches, the plan {num_microbatches}"
            )
        yield step, batch
