"""The log of an asynchronous run, which gradients each update took on which parameters; and its replay.

Letters: U updates, M microbatches of a step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import regular_file, write_atomically
from jvarlen._common.pytree import is_key, leaves_by_name
from jvarlen.experimental.asynchronous.programs import StepPrograms, Version, host_batches, split_microbatches
from jvarlen.planning.plan import Plan
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import Metrics, TrainState

__all__ = ["ArrivalLog", "AsyncRun", "digest_of_state", "replay"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ArrivalLog:
    """What happened in `train_async`, in the order of the updates; `replay` repeats it.

    Version v of the parameters is that after v updates of the run.

    Attributes:
      plan_digest: of the plan.
      staleness_bound: of the run; None: unbounded.
      initial_digest: SHA-256 of the state before the first update, as hex digits.
      final_digest: likewise, after the last one.
      steps: int64[U], the step of the plan that each update took.
      versions: int64[U, M], the version on which the gradient of each microbatch was computed.
      workers: int64[U, M], the worker that computed it.
      arrived_s: float64[U, M], when it arrived, in seconds since the first microbatch was handed out.
      applied_s: float64[U], when the update was applied, likewise.
      losses: float64[U], the loss of each update, Σ loss / Σ weight over its microbatches.
    """

    plan_digest: str
    staleness_bound: int | None
    initial_digest: str
    final_digest: str
    steps: Int64[np.ndarray, " U"]
    versions: Int64[np.ndarray, "U M"]
    workers: Int64[np.ndarray, "U M"]
    arrived_s: Float64[np.ndarray, "U M"]
    applied_s: Float64[np.ndarray, " U"]
    losses: Float64[np.ndarray, " U"]

    def __post_init__(self) -> None:
        num_updates = len(self.steps)
        shapes = {name: np.shape(getattr(self, name)) for name in _ARRAYS}
        of_parts = (num_updates, *self.versions.shape[1:2])
        wrong = [
            f"{name} {list(shape)}"
            for name, shape in shapes.items()
            if shape != (of_parts if name in _OF_PARTS else (num_updates,))
        ]
        if wrong or self.versions.ndim != 2:
            raise UserError(f"arrays of an arrival log must be of the same updates and microbatches: {wrong}")
        if missing := sorted({*range(self.first_step, self.first_step + num_updates)} - {*self.steps.tolist()}):
            raise UserError(f"an arrival log must take every step once, and lacks {list_first(missing)}")
        late = np.flatnonzero((self.staleness < 0).any(axis=1) | (self.versions < 0).any(axis=1)).tolist()
        if late:
            raise UserError(f"updates of an arrival log take versions that do not exist yet: {list_first(late)}")

    @property
    def first_step(self) -> int:
        """The least step of the plan."""
        return int(self.steps.min()) if len(self.steps) else 0

    @property
    def staleness(self) -> Int64[np.ndarray, "U M"]:
        """int64[U, M]: updates applied between the parameters of each gradient and its own update."""
        return np.arange(len(self.steps))[:, None] - self.versions

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes an `.npz` file, atomically.

        Args:
          path: the file.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["staleness_bound"] = -1 if self.staleness_bound is None else self.staleness_bound
        with write_atomically(Path(path)) as file:
            np.savez_compressed(file, **fields)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ArrivalLog:
        """Reads what `save` wrote.

        Args:
          path: the file.

        Returns:
          The log.

        Raises:
          FileNotFoundError: there is no such file.
          ValueError: it is no arrival log, or damaged.
        """
        try:
            with regular_file(Path(path)).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                found = {field.name: arrays[field.name] for field in dataclasses.fields(cls)}
            fields: dict[str, Any] = {name: found[name] if name in _ARRAYS else found[name].item() for name in found}
            bound = fields["staleness_bound"]
            return cls(**fields | {"staleness_bound": None if bound < 0 else bound})
        except FileNotFoundError:
            raise FileNotFoundError(f"there is no arrival log {path}") from None
        except Exception as error:  # damage shows in many ways: as zip, as header of an array
            raise UserError(f"{path} holds no arrival log: {error}") from error


_OF_PARTS = ("versions", "workers", "arrived_s")
_ARRAYS = ("steps", "applied_s", "losses", *_OF_PARTS)


def digest_of_state(state: Any) -> str:
    """SHA-256 of names, dtypes, shapes and bytes of all arrays of a pytree, as hex digits."""
    digest = hashlib.sha256()
    for name, leaf in leaves_by_name(state).items():
        array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        digest.update(f"{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


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
    shape = (plan.num_steps - steps.start, plan.num_microbatches)
    if log.plan_digest == plan.digest and (len(steps) > shape[0] or log.versions.shape[1] != shape[1]):
        differing.append(f"steps × microbatches: {list(log.versions.shape)} in the log, {list(shape)} here")
    if differing:
        raise UserError(f"this log is of another run: {'; '.join(differing)}")
    programs = StepPrograms(loss_fn, optimizer, state)
    read = host_batches(batches, steps, plan.num_microbatches)
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
