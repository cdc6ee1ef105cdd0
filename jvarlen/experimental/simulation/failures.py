"""Failures of hosts: what they undo, and when steps are done. NumPy only.

Failures are few events on a heap; a library of discrete events would add a dependency for a loop. Letters: S steps.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from jvarlen._common.checks import UserError, check_above, check_at_least
from jvarlen._common.settings import Settings

__all__ = ["DisturbedRun", "Failures", "Interruption", "run_with_failures"]

_MOST_FAILURES = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures(Settings):
    """How often hosts fail, and how long recovery takes.

    A failed host ends the run at once. It starts again from its last checkpoint on a spare host: one that the layout
    leaves free, or one that has been repaired. Hosts fail while they start, train and save, independently of each other
    and of their age.

    Attributes:
      mean_seconds_between: mean time between failures of one host; the times are exponential.
      restart_s: seconds from a failure, or from the arrival of a spare, until steps continue: starting, compiling,
        loading.
      repair_s: seconds until a failed host is repaired.

    Raises:
      ValueError: a figure out of range.
    """

    mean_seconds_between: float
    restart_s: float = 0.0
    repair_s: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_above(self, 0, "mean_seconds_between")
        check_at_least(self, 0, "restart_s", "repair_s")


class Interruption(NamedTuple):
    """A failure, and what it costs.

    Attributes:
      at_s: seconds since the start of the run.
      step: the step that it hit, or before which it hit the start.
      resumed_step: the step of the checkpoint from which the run continues.
      lost_s: of work since that checkpoint.
      waited_s: for a spare host.
    """

    at_s: float
    step: int
    resumed_step: int
    lost_s: float
    waited_s: float


class DisturbedRun(NamedTuple):
    """Steps with checkpoints and failures.

    Attributes:
      total_s: seconds from begin to end.
      step_ends: float64[S], seconds since the begin when a step was done for good.
      num_saves: checkpoints, without those that failures undid.
      lost_s: of work that failures undid.
      waited_s: for spares.
      restarts_s: of starts after failures.
      interruptions: in order of time.
    """

    total_s: float
    step_ends: Float64[np.ndarray, " S"]
    num_saves: int
    lost_s: float
    waited_s: float
    restarts_s: float
    interruptions: list[Interruption]


def run_with_failures(
    step_seconds: Float64[np.ndarray, " S"],
    num_hosts: int,
    num_spares: int,
    failures: Failures | None,
    every: int | None,
    checkpoint_s: float,
    seed: np.random.SeedSequence,
) -> DisturbedRun:
    """Simulates steps with checkpoints and failures.

    Args:
      step_seconds: float64[S], of every step.
      num_hosts: hosts that run the steps.
      num_spares: other hosts.
      failures: None: nothing fails.
      every: steps between checkpoints; None: nothing is saved.
      checkpoint_s: seconds of saving.
      seed: of the times of failures.

    Returns:
      A `DisturbedRun`.

    Raises:
      ValueError: failures so frequent that the run would hardly end.
    """
    num_steps = len(step_seconds)
    ends = np.append(np.arange(every or num_steps, num_steps, every or num_steps), num_steps)  # of parts, in steps
    num_saves = len(ends) if every else 0
    pauses = np.zeros(num_steps)  # before each step
    pauses[ends[:-1]] = checkpoint_s
    done_s = np.cumsum(step_seconds + pauses)  # with no failure
    saved_s = np.concatenate([[0.0], done_s[ends - 1] + (checkpoint_s if every else 0.0)])
    if failures is None:
        return DisturbedRun(float(saved_s[-1]), done_s, num_saves, 0.0, 0.0, 0.0, [])
    mean_s = failures.mean_seconds_between / num_hosts
    _check_ends(saved_s, mean_s, failures.restart_s, every)

    saved_steps = np.concatenate([[0], ends])
    rng = np.random.default_rng(seed)
    ready_at = [0.0] * num_spares
    interruptions: list[Interruption] = []
    lasts, offsets = [], []  # parts that attempts kept, and what is added to when they end
    now = restart = lost_s = waited_s = restarts_s = 0.0
    kept = 0  # parts that are saved
    while True:
        left = rng.exponential(mean_s)
        offsets.append(now + restart - saved_s[kept])
        if restart + saved_s[-1] - saved_s[kept] <= left:
            lasts.append(len(ends))
            restarts_s += restart
            break
        worked_until = saved_s[kept] + left - restart
        reached = max(kept, int(np.searchsorted(saved_s, worked_until, side="right")) - 1)
        lasts.append(reached)
        lost = max(0.0, float(worked_until - saved_s[reached]))
        step = int(np.searchsorted(done_s, worked_until, side="right"))
        kept = reached
        now += left
        heapq.heappush(ready_at, now + failures.repair_s)
        wait = max(0.0, heapq.heappop(ready_at) - now)
        resumed = int(saved_steps[kept])
        interruptions.append(Interruption(now, min(max(step, resumed), num_steps - 1), resumed, lost, wait))
        now += wait
        lost_s, waited_s, restarts_s = lost_s + lost, waited_s + wait, restarts_s + min(left, restart)
        restart = failures.restart_s
    steps_kept = np.diff(saved_steps[np.concatenate([[0], lasts])])
    step_ends = done_s + np.repeat(offsets, steps_kept)
    total_s = float(saved_s[-1] + offsets[-1])
    return DisturbedRun(total_s, step_ends, num_saves, lost_s, waited_s, restarts_s, interruptions)


def _check_ends(saved_s: Float64[np.ndarray, " parts"], mean_s: float, restart_s: float, every: int | None) -> None:
    """Raises ValueError where too many failures are to be expected: Daly's formula, over the mean time between them."""
    parts = np.diff(saved_s)
    with np.errstate(over="ignore"):
        expected = np.exp(restart_s / mean_s) * np.expm1(parts / mean_s).sum()
    if not expected <= _MOST_FAILURES:
        saved = f"every {every:,} steps" if every else "never"
        raise UserError(
            f"failures are so frequent that the run would hardly end: a host fails every {mean_s:,.4g} s, a start "
            f"takes {restart_s:,.4g} s, and from checkpoint to checkpoint ({saved}) it is up to {parts.max():,.4g} s; "
            f"{expected:,.3g} failures are to be expected, and at most {_MOST_FAILURES:,} are simulated"
        )
