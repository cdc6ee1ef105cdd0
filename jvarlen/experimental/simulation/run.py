"""Simulates a plan on a cluster: seconds by cause, with uneven devices, failures and checkpoints. NumPy only.

Letters: S steps, K buckets.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, check_at_least_one, check_at_least_zero, is_number, list_first
from jvarlen._common.terminal import text_table
from jvarlen.distributed.layout import Layout
from jvarlen.estimates.cluster import Cluster
from jvarlen.estimates.step_seconds import StepSeconds
from jvarlen.experimental.simulation.failures import Failures, Interruption, run_with_failures
from jvarlen.experimental.simulation.noise import Noise, stretches
from jvarlen.planning.steps import PlannedSteps

__all__ = ["Simulation", "simulate"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """What a run of S steps takes.

    Attributes:
      layout: of the step.
      cluster: its devices.
      total_s: seconds from start to end.
      causes: seconds by what they are spent on; they sum to `total_s`. "compute" to "update" are those of devices of
        even speed. "stragglers" is waiting for devices that are always slow, "jitter" for those that are slow just
        then; it can be below 0 for a single device. "lost work" is work that a failure undid, with the saving that it
        cut short. "spares" is waiting for a replacement host.
      step_seconds: float64[S], of every step where nothing fails.
      step_ends: float64[S], seconds since the begin when a step was done for good.
      num_tokens: int64[S], real tokens of each step.
      padded_tokens: int64[S], positions in the arrays of each step.
      interruptions: failures in order of time.
      num_flops: of all steps, without what failures undid; None where not given.
    """

    layout: Layout
    cluster: Cluster
    total_s: float
    causes: dict[str, float]
    step_seconds: Float64[np.ndarray, " S"]
    step_ends: Float64[np.ndarray, " S"]
    num_tokens: Int64[np.ndarray, " S"]
    padded_tokens: Int64[np.ndarray, " S"]
    interruptions: tuple[Interruption, ...]
    num_flops: float | None

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.step_seconds)

    @property
    def num_failures(self) -> int:
        """Failures of hosts that the run used."""
        return len(self.interruptions)

    @property
    def tokens_per_second(self) -> float:
        """Real tokens over all seconds."""
        return int(self.num_tokens.sum()) / self.total_s

    @property
    def positions_per_second(self) -> float:
        """Tokens and padding over all seconds."""
        return int(self.padded_tokens.sum()) / self.total_s

    @property
    def padding(self) -> float:
        """The share of positions without a token."""
        return 1 - int(self.num_tokens.sum()) / int(self.padded_tokens.sum())

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: the share of the peak of all devices, in all seconds; None without `num_flops`."""
        if self.num_flops is None:
            return None
        return self.num_flops / (self.total_s * self.layout.num_devices * self.cluster.flops_per_second)

    def share(self, cause: str) -> float:
        """The share of a cause in all seconds.

        Args:
          cause: a key of `causes`.

        Returns:
          0 to 1.
        """
        return self.causes[cause] / self.total_s

    def report(self) -> str:
        """A table of seconds by cause, and lines with throughput and failures.

        Returns:
          Lines of text.
        """
        used = [(name, seconds) for name, seconds in self.causes.items() if seconds]
        rows = [["", "seconds", "share"]]
        digits = 0 if self.total_s >= 1000 else 1
        rows += [
            [name, f"{seconds:,.{digits}f}", f"{seconds / self.total_s:.1%}"]
            for name, seconds in [*used, ("total", self.total_s)]
        ]
        mfu = "" if self.mfu is None else f", MFU {self.mfu:.1%}"
        failures = f", {self.num_failures:,} failures" if self.interruptions else ""
        return "\n".join(
            [
                f"{self.num_steps:,} steps on {self.layout}, {self.layout.num_devices:,} devices of "
                f"{self.cluster.name}{failures}",
                text_table(rows),
                f"{self.tokens_per_second:,.0f} tokens/s, {self.positions_per_second:,.0f} positions/s, padding "
                f"{self.padding:.1%}{mfu}",
            ]
        )

    def __str__(self) -> str:
        return self.report()


def simulate(
    plan: PlannedSteps,
    layout: Layout,
    cluster: Cluster,
    *,
    seconds: StepSeconds,
    flops: npt.ArrayLike | None = None,
    num_steps: int | None = None,
    noise: float | Noise = 0.0,
    failures: Failures | None = None,
    checkpoint_every_steps: int | None = None,
    checkpoint_s: float = 0.0,
    start_s: float = 0.0,
    seed: int = 0,
) -> Simulation:
    """Simulates a run of a plan on a cluster.

    The devices of a replica wait for their slowest in every microbatch, and replicas for their slowest in every step.
    So a step takes max over replicas of the mean over microbatches of max over devices, times the seconds that pass in
    microbatches: "compute" and "bubble". The maximum over devices is drawn from its own distribution, which is exact.
    Links and single ranks are not events: a step is the maximum over replicas, and the events are failures, saves and
    restarts, with the hosts under repair on a heap.

    Args:
      plan: its steps.
      layout: how a step spreads over devices, of which the cluster has enough.
      cluster: the devices, and which of them fail together.
      seconds: float64[K] each: a step in every bucket of the plan, on devices of even speed.
      flops: float64[K], of the model in a step, all devices together; for `Simulation.mfu`.
      num_steps: S; a run longer than the plan repeats it. None: those of the plan.
      noise: a number is the jitter.
      failures: None: nothing fails.
      checkpoint_every_steps: steps between checkpoints; the last step is also followed by one. None: no checkpoints.
      checkpoint_s: seconds that steps wait for a checkpoint.
      start_s: seconds before the first step, in which nothing fails.
      seed: of all draws. Noise and failures are drawn apart: one does not change the other.

    Returns:
      A `Simulation`.

    Raises:
      ValueError: a plan whose steps have several buckets; noise that is no number; seconds that are negative or not
        finite, or not of as many buckets as the plan has; a layout of more devices than the cluster has, or whose data
        shards do not divide the microbatches of a step; failures so frequent that the run would not end.

    Example:
      >>> import jvarlen
      >>> plan = jvarlen.make_plan([5, 9, 8, 4], [(1, 8), (1, 16)], order="length", num_microbatches=2)
      >>> even = StepSeconds(np.array([1.0, 2.0]), *np.zeros((6, 2)))
      >>> run = simulate(plan, Layout(data=2), Cluster.named("dgx-h100"), seconds=even)
      >>> run.total_s, run.causes["compute"]
      (4.0, 4.0)

    References:
      Checkpoints and failures: Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart
      dumps".
    """
    if not isinstance(plan, PlannedSteps):
        raise UserError("seconds are those of a bucket: only plans whose steps have one each can be simulated")
    noise = _as_noise(noise)
    num_steps = plan.num_steps if num_steps is None else num_steps
    check_at_least_one(num_steps=num_steps)
    if checkpoint_every_steps is not None:
        check_at_least_one(checkpoint_every_steps=checkpoint_every_steps)
    check_at_least_zero(seed=seed)
    _check_seconds(checkpoint_s=checkpoint_s, start_s=start_s)
    parts_by_name = _check_parts(plan, seconds)
    if layout.num_devices > cluster.num_devices:
        raise UserError(
            f"{layout} takes {layout.num_devices:,} devices, and {cluster.name} has {cluster.num_devices:,}"
        )

    places = np.arange(num_steps) % plan.num_steps
    step_bucket = plan.step_bucket[places]
    in_microbatches = parts_by_name["compute"] + parts_by_name["bubble"]
    noise_seed, failure_seed = np.random.SeedSequence(seed).spawn(2)
    stretch, slowest = stretches(plan, layout, step_bucket, noise, noise_seed)
    step_seconds = seconds.total[step_bucket] + (stretch - 1) * in_microbatches[step_bucket]

    num_of_bucket = np.bincount(step_bucket, minlength=len(plan.buckets.shapes))
    causes = {name: float(num_of_bucket @ part) for name, part in parts_by_name.items()}
    stretched_s = float(num_of_bucket @ in_microbatches)
    causes["stragglers"] = (slowest - 1) * stretched_s
    causes["jitter"] = float((stretch - slowest) @ in_microbatches[step_bucket])
    num_hosts = math.ceil(layout.num_devices / cluster.devices_per_host)
    hosts = num_hosts, cluster.num_hosts - num_hosts
    run = run_with_failures(step_seconds, *hosts, failures, checkpoint_every_steps, float(checkpoint_s), failure_seed)
    causes |= {"checkpoints": run.num_saves * float(checkpoint_s)}
    causes |= {"lost work": run.lost_s, "spares": run.waited_s, "restarts": run.restarts_s, "start": float(start_s)}
    return Simulation(
        layout=layout,
        cluster=cluster,
        total_s=run.total_s + start_s,
        causes=causes,
        step_seconds=step_seconds,
        step_ends=run.step_ends + start_s,
        num_tokens=plan.num_tokens[places],
        padded_tokens=plan.padded_tokens_per_step[places],
        interruptions=tuple(each._replace(at_s=each.at_s + start_s) for each in run.interruptions),
        num_flops=None if flops is None else float(num_of_bucket @ _check_flops(plan, flops)),
    )


def _as_noise(noise: float | Noise) -> Noise:
    if isinstance(noise, Noise):
        return noise
    if not is_number(noise):
        raise UserError(f"noise must be a Noise, or a number for the jitter, not {noise!r}")
    return Noise(jitter=noise)


def _check_seconds(**values: float) -> None:
    wrong = [f"{name} ({value!r})" for name, value in values.items() if not 0 <= value < math.inf]
    if wrong:
        raise UserError(f"must be finite and at least 0: {list_first(wrong)}")


def _check_parts(plan: PlannedSteps, seconds: StepSeconds) -> dict[str, Float64[np.ndarray, " K"]]:
    """The parts by name."""
    shape = (len(plan.buckets.shapes),)
    parts_by_name = {name: np.asarray(part, np.float64) for name, part in seconds._asdict().items()}
    if wrong := [f"{name} {part.shape}" for name, part in parts_by_name.items() if part.shape != shape]:
        raise UserError(
            f"seconds must have the shape {shape}, a value for each bucket of the plan: {list_first(wrong)}"
        )
    wrong = [
        f"{name} of bucket {k}: {part[k]}"
        for name, part in parts_by_name.items()
        for k in np.flatnonzero(~((part >= 0) & (part < math.inf))).tolist()
    ]
    wrong += [f"bucket {k}: 0 in all" for k in np.flatnonzero(seconds.total == 0).tolist()]
    if wrong:
        raise UserError(f"seconds must be finite, at least 0, and not all 0: {list_first(wrong)}")
    return parts_by_name


def _check_flops(plan: PlannedSteps, flops: npt.ArrayLike) -> Float64[np.ndarray, " K"]:
    flops = np.asarray(flops, np.float64)
    if flops.shape != (len(plan.buckets.shapes),) or not np.all((flops >= 0) & (flops < math.inf)):
        raise UserError(f"flops must be {len(plan.buckets.shapes)} finite numbers of at least 0, one for each bucket")
    return flops
