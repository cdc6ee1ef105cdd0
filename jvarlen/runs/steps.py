"""The seconds, display, traces, records and checks of steps."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.pytree import leaves_by_name
from jvarlen._common.terminal import say
from jvarlen._common.types import Array, Batch, JsonObject, PyTree
from jvarlen.loading.loader import Loader
from jvarlen.runs.training_plan import TrainingPlan
from jvarlen.training.checkpoint import Place
from jvarlen.training.step import are_finite
from jvarlen.training.train_state import Metrics, MetricSums, TrainState

__all__ = [
    "Means", "StepDisplay", "StepMeter", "StepProfiler", "check_finite", "check_weight",
    "host_memory_bytes", "means_of", "nonfinite_arrays", "shape_text", "with_metrics",
]  # fmt: skip

_LINE_S = 10.0  # between two lines
_SHOWN_STALL_S = 0.1  # of the steps since the line before


class StepMeter:
    """Seconds and memory of each step, which ends when its metrics are found ready. Nothing waits for the device."""

    # Waiting for a batch counts for the step before. Steps and the stalls before them add up to the loop.

    def __init__(self, place: Place, batches: Loader) -> None:
        self._before = place
        self._batches = batches
        self._train_s, self._data_wait_s, self._all_stall_s = place.train_s, place.data_wait_s, place.stall_s
        self._device = jax.local_devices()[0]
        self._last_end: float | None = None
        self._found_ready: float | None = None
        self._wait_s = self._stall_s = 0.0
        self._num_nonfinite_grads = place.num_nonfinite_grads
        self.num_without_weight = place.num_steps_without_weight
        # Steps without weight up to now, with none between them that had some, as far as that is known after a resume.
        self.num_in_a_row = self.num_without_weight if self.num_without_weight == place.num_steps_done else 0

    def next_batch(self) -> Batch:
        """The next batch; the time that it takes counts as waiting for data."""
        start = time.perf_counter()
        batch = next(self._batches)
        end = time.perf_counter()
        if self._last_end is None:
            self._last_end = end
        else:
            self._wait_s += end - start
        return batch

    @contextlib.contextmanager
    def stalled(self) -> Iterator[None]:
        """A block between two steps in which training waits for the compiler or a checkpoint: no part of a step."""
        start = time.perf_counter()
        yield
        stall_s = time.perf_counter() - start
        assert self._last_end is not None
        self._stall_s += stall_s
        self._last_end += stall_s

    def before_step(self, running: PyTree) -> None:
        """Notes whether the step before is over, as on a CPU, where dispatching a small step computes it."""
        leaves: list[Array] = [leaf for leaf in jax.tree.leaves(running) if isinstance(leaf, jax.Array)]
        is_over = leaves and all(leaf.is_ready() for leaf in leaves)
        self._found_ready = time.perf_counter() if is_over else None

    def end_step(self, *, has_weight: bool = True, grads_finite: bool = True) -> JsonObject:
        """The figures of a step whose metrics have just been read; device memory may be unknown, None."""
        self._num_nonfinite_grads += not grads_finite
        self.num_without_weight += not has_weight
        self.num_in_a_row = 0 if has_weight else self.num_in_a_row + 1
        assert self._last_end is not None
        now = self._found_ready or time.perf_counter()
        wait_s, stall_s, memory = self._wait_s, self._stall_s, self._device.memory_stats()
        step_s = now - self._last_end
        self._train_s += step_s + stall_s
        self._data_wait_s += wait_s
        self._all_stall_s += stall_s
        self._last_end, self._found_ready, self._wait_s, self._stall_s = now, None, 0.0, 0.0
        return {
            "time_s": self._train_s,
            "step_s": step_s,
            "data_wait_s": wait_s,
            "stall_s": stall_s,
            "host_memory_bytes": host_memory_bytes(),
            "device_memory_bytes": memory.get("bytes_in_use") if memory else None,
        }

    def skip(self) -> None:
        """Excludes the time since the last end, such as that of an evaluation, from all steps."""
        self._last_end, self._wait_s = time.perf_counter(), 0.0

    def measured(self, place: Place) -> Place:
        """A place with what was measured of all steps before it."""
        return dataclasses.replace(
            place,
            train_s=self._train_s,
            data_wait_s=self._data_wait_s,
            stall_s=self._all_stall_s,
            num_without_target_done=self._before.num_without_target_done + self._batches.num_without_target,
            num_steps_without_weight=self.num_without_weight,
            num_nonfinite_grads=self._num_nonfinite_grads,
        )


def host_memory_bytes() -> int:
    """The most bytes that this process ever held: its resident set, getrusage(2)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class StepDisplay(contextlib.AbstractContextManager):
    """Reports steps on standard error: a line at the first, every 10 s, and at the last."""

    def __init__(self, num_steps: int, *, progress: bool = True, in_nats: bool = True):
        self._is_shown, self._num_steps, self._in_nats = progress, num_steps, in_nats
        self._next_line = -math.inf
        self._unshown: tuple[JsonObject, Sequence[str]] | None = None
        self._since: collections.Counter[str] = collections.Counter()  # sums of figures since the line before

    def __exit__(self, *exception: object) -> None:
        if self._unshown is not None:
            self._show(*self._unshown)

    def update(self, record: JsonObject, *, pending: Sequence[str] = ()) -> None:
        """Takes the record of a finished training step, and which buckets are still to be compiled."""
        if not self._is_shown:
            return
        self._since.update({name: record[name] for name in ("num_tokens", "step_s", "data_wait_s", "stall_s")})
        self._unshown = record, pending
        now = time.monotonic()
        if now >= self._next_line:
            self._show(record, pending)
            self._next_line = now + _LINE_S

    def _show(self, record: JsonObject, pending: Sequence[str]) -> None:
        since, loss = self._since, record["loss"]
        step_s = max(since["step_s"], 1e-9)
        if loss is None:
            shown_loss = "no loss: no token has weight"
        else:
            shown_loss = f"loss {loss:.3f} nats/token" if self._in_nats else f"loss {loss:.4g}"
        figures = (
            f"step {record['step'] + 1:,}/{self._num_steps:,}",
            shown_loss,
            f"{since['num_tokens'] / step_s:,.0f} tokens/s",
            *([f"lr {record['learning_rate']:.1e}"] if "learning_rate" in record else []),
            shape_text(record),
            f"wait {100 * since['data_wait_s'] / step_s:.1f} %",
            *([f"stalled {since['stall_s']:.1f} s"] if since["stall_s"] >= _SHOWN_STALL_S else []),
            *([f"compiling {pending[0]}, {len(pending)} to go"] if pending else []),
            f"{record['time_s']:,.0f} s",
        )
        say(" · ".join(figures), error=True)
        self._unshown = None
        since.clear()


def shape_text(record: JsonObject) -> str:
    """The bucket of a step, or how many groups it has and those of the first and the last, from its record."""
    if "groups" not in record:
        return _bucket_text(record, "bucket_")
    ends = dict.fromkeys(_bucket_text(record["groups"][i]) for i in (0, -1))
    return f"{record['num_groups']} group{'s' * (record['num_groups'] > 1)} of {' to '.join(ends)}"


def _bucket_text(sizes: JsonObject, prefix: str = "") -> str:
    lengths = [sizes[prefix + name] for name in ("length", "target_length") if prefix + name in sizes]
    return f"{sizes[f'{prefix}rows']}×{'+'.join(map(str, lengths))}"


class StepProfiler(contextlib.AbstractContextManager):
    """Traces some steps, not the first, which load executables, into `directory`/plugins/profile/<time>/."""

    def __init__(self, directory: Path, num_steps: int, *, steps_left: int, start_after: int = 10):
        self._directory = directory
        first = max(0, min(start_after, steps_left - num_steps))
        self._traced, self._place, self._is_tracing = range(first, first + num_steps), 0, False

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def step(self, bucket: str, step_num: int, state: TrainState) -> contextlib.AbstractContextManager[None]:
        """A block around the dispatch of a step from `state`, the result of the previous one: arrays to wait for."""
        place, self._place = self._place, self._place + 1
        if place not in self._traced:
            if self._is_tracing:
                jax.block_until_ready(state)
                self._stop()
            return contextlib.nullcontext()
        if not self._is_tracing:
            jax.block_until_ready(state)
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # every call of Python would slow the loop down, and crowd out the steps
            jax.profiler.start_trace(self._directory, profiler_options=options)
            self._is_tracing = True
        return jax.profiler.StepTraceAnnotation(f"train {bucket}", step_num=step_num)

    def _stop(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()


class Means(NamedTuple):
    """The loss and the scalar sums of some steps over Σ weight."""

    loss: float | None  # in nats for a language model; None, like all sums, if nothing has weight
    weight: float  # Σ weight; for a language model the tokens that are learned, those of cut samples as cut
    sums: dict[str, float | None]


def means_of(total: Metrics) -> Means:
    """The means of sums, as `MetricSums` gives them."""
    scalars = {name: value for name, value in sorted(total.sums.items()) if np.ndim(value) == 0}
    weight = float(total.weight_sum)
    if not weight:
        return Means(None, weight, dict.fromkeys(scalars))
    return Means(float(total.loss), weight, {name: float(value) / weight for name, value in scalars.items()})


def with_metrics(record: JsonObject, metrics: Metrics) -> JsonObject:
    """The record of a step with its metrics, which are on the host."""
    sums = MetricSums()
    sums.add(metrics)
    means = means_of(sums.total)
    record["loss"] = means.loss
    if clashing := means.sums.keys() & (record.keys() | {"time_s"}):
        raise UserError(f"sums of the loss must have other names than figures of a step: {list_first(clashing)}")
    return record | means.sums


def check_finite(record: JsonObject, metrics: Metrics, newest: TrainState) -> None:
    """Raises FloatingPointError where a step that was not rejected is not finite, or left such arrays."""
    loss, step = record["loss"], f"step {record['step']} (counted from 0)"
    gradient = "finite" if metrics.grads_finite else "not finite"
    if not metrics.params_finite:
        raise FloatingPointError(
            f"parameters or extra are not finite after {step}: the loss is {loss}, the gradient is {gradient}; "
            "the run ends, with its last checkpoint from before"
        )
    if metrics.grads_finite and loss is not None and not math.isfinite(loss):
        raise FloatingPointError(f"the loss is {loss} at {step}, and the gradient is finite; the run ends")
    if not metrics.grads_finite and (broken := nonfinite_arrays(newest)):
        raise FloatingPointError(
            f"the gradient of {step} is not finite, and the optimizer has not rejected it: not finite are "
            f"{list_first(broken)}; the run ends, with its last checkpoint from before"
        )


def nonfinite_arrays(state: TrainState) -> list[str]:
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


def check_weight(training: TrainingPlan, record: JsonObject, num_in_a_row: int) -> None:
    """Raises ValueError if all steps of an epoch, or of the run, were steps without weight, as the last ones."""
    num_done, epoch = record["step"] + 1, record["epoch"]
    is_whole_run = num_done == training.num_steps == num_in_a_row
    is_end_of_epoch = num_done == training.epoch_starts[epoch + 1]
    if is_whole_run or (is_end_of_epoch and num_in_a_row >= training.steps_of_epoch(epoch)):
        raise UserError(
            f"no token has weight in the loss in any of the last {num_in_a_row:,} steps, "
            f"{'the whole run' if is_whole_run else 'a whole epoch'}: nothing was learned; learn other parts "
            "(loss_on, loss_weights), or cut less (max_length)"
        )
