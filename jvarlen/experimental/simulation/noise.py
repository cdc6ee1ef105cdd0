"""Devices of uneven speed: how much longer steps take where each waits for the slowest. NumPy only.

Letters: S steps, R replicas, m microbatches of a data shard, n devices. A *replica* is the devices of a data shard:
stages, parts of products, and parts of rows where these are spread.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Int64

from jvarlen._common.checks import UserError, check_at_least, check_setting
from jvarlen._common.settings import Settings
from jvarlen.distributed.layout import Layout
from jvarlen.estimates.layout_table import layout_table
from jvarlen.planning.buckets import Bucket
from jvarlen.planning.steps import PlannedSteps

__all__ = ["Noise", "stretches"]

_CHUNK = 2**20  # draws that are held at once; results do not depend on it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise(Settings):
    """How uneven devices are.

    Attributes:
      jitter: standard deviation over mean of the time that a device takes for a microbatch. Times are lognormal with
        the mean that is given, and independent between devices and microbatches.
      straggler_share: the probability that a device is always slow.
      straggler_slowdown: the times as long that such a device takes, at least 1.

    Raises:
      ValueError: a figure out of range, or no number.

    References:
      Stragglers among equal machines: Jiang et al. 2024, "MegaScale: Scaling Large Language Model Training to More Than
      10,000 GPUs". The slowest of many: Dean and Barroso 2013, "The Tail at Scale".
    """

    jitter: float = 0.0
    straggler_share: float = 0.0
    straggler_slowdown: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, 0, "jitter")
        check_setting(self, ("straggler_share",), lambda share: 0 <= share <= 1, "a share from 0 to 1")
        check_at_least(self, 1, "straggler_slowdown")


def stretches(
    plan: PlannedSteps,
    layout: Layout,
    step_bucket: Int32[np.ndarray, " S"],
    noise: Noise,
    seed: np.random.SeedSequence,
) -> tuple[Float64[np.ndarray, " S"], float]:
    """How much longer steps take than on devices of even speed.

    Args:
      plan: its buckets and microbatches.
      layout: of the devices.
      step_bucket: int32[S].
      noise: of the devices.
      seed: of all draws.

    Returns:
      float64[S], a factor for each step, and the factor without jitter.

    Raises:
      ValueError: data shards that do not divide the microbatches of a step.
    """
    table = layout_table([layout])
    buckets = [Bucket(bucket.rows, max(bucket.lengths)) for bucket in plan.buckets.shapes]
    per_shard = table.per_shard(buckets, plan.num_microbatches)[0]
    if not per_shard.all():
        raise UserError(
            f"the data shards of {layout} do not divide the {plan.num_microbatches:,} microbatches of a step"
        )
    for_stragglers, *seeds = seed.spawn(3)
    is_slow = np.random.default_rng(for_stragglers).random(layout.num_devices) < noise.straggler_share
    slowest = noise.straggler_slowdown if is_slow.any() else 1.0
    stretch = np.full(len(step_bucket), slowest)
    if noise.jitter:
        is_spread = table.is_spread(buckets)[0]
        for spread, own_seed in zip((False, True), seeds, strict=True):
            of_these = is_spread == spread
            steps = np.flatnonzero(of_these[step_bucket])
            if len(steps):
                is_slow_RxN = _by_replica(is_slow, layout, spread)
                stretch[steps] = _draw_jitter(len(steps), int(per_shard[of_these][0]), is_slow_RxN, noise, own_seed)
    return stretch, slowest


def _by_replica(is_slow: Bool[np.ndarray, " n"], layout: Layout, spread: bool) -> Bool[np.ndarray, "R n"]:
    """Devices by replica; mesh axes are data, stage, context, tensor."""
    devices = is_slow.reshape(layout.data, layout.stage, layout.context, layout.tensor)
    if spread:
        return devices.reshape(layout.data, -1)
    return devices.swapaxes(1, 2).reshape(layout.num_shards, -1)


def _draw_jitter(
    num_steps: int, m: int, is_slow_RxN: Bool[np.ndarray, "R n"], noise: Noise, seed: np.random.SeedSequence
) -> Float64[np.ndarray, " steps"]:
    """The maximum over replicas of the mean over microbatches of the maximum over devices, for steps of one kind."""
    if m == 1:
        is_slow_RxN = is_slow_RxN.reshape(1, -1)  # a maximum of maxima
    sigma = math.sqrt(math.log1p(noise.jitter**2))
    num_slow = is_slow_RxN.sum(axis=1)
    num_even = is_slow_RxN.shape[1] - num_slow
    has_slow = np.flatnonzero(num_slow)
    of_even, of_slow = map(np.random.default_rng, seed.spawn(2))
    per_chunk = max(1, _CHUNK // (m * len(num_slow)))
    stretch = np.empty(num_steps)
    for start in range(0, num_steps, per_chunk):
        num = min(per_chunk, num_steps - start)
        log_SxRxm = sigma * _normal_maxima(of_even, (num, m), num_even)
        if len(has_slow):
            log_of_slow = sigma * _normal_maxima(of_slow, (num, m), num_slow[has_slow])
            log_of_slow += np.float32(math.log(noise.straggler_slowdown))
            log_SxRxm[:, has_slow] = np.maximum(log_SxRxm[:, has_slow], log_of_slow)
        np.exp(log_SxRxm - np.float32(sigma**2 / 2), out=log_SxRxm)
        stretch[start : start + num] = log_SxRxm.mean(axis=2, dtype=np.float64).max(axis=1)
    return stretch


def _normal_maxima(
    rng: np.random.Generator, shape: tuple[int, int], sizes: Int64[np.ndarray, " R"]
) -> Float32[np.ndarray, "S R m"]:
    """Maxima of groups of standard normals, float32[S, R, m]; −∞ for groups of none.

    The greatest of n uniforms is exp(−E / n), where E is exponential.
    """
    from scipy.special import ndtri  # here: importing it takes long

    # float64 first: as float32 one draw in 2**23 is 0. Draws of a step follow each other, whatever the chunks.
    exponential = rng.standard_exponential((shape[0], len(sizes), shape[1])).astype(np.float32)
    with np.errstate(divide="ignore"):
        exponential /= sizes[:, None].astype(np.float32)
    above = np.expm1(np.negative(exponential, out=exponential), out=exponential)
    return np.negative(ndtri(np.negative(above, out=above), out=above), out=above)
