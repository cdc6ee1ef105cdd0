"""Seconds of a step of every bucket on many layouts at once, by cause. NumPy only.

Letters: C layouts, K buckets, L layers, M microbatches of a step, m of a data shard, S stages, V virtual ones.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.types import Array
from jvarlen.estimates.cluster import Cluster, Kind
from jvarlen.estimates.layout_table import REMATS, SCHEDULES, LayoutTable
from jvarlen.estimates.model_costs import Axis, AxisTraffic, ModelCosts, PerPass, Traffic, Work
from jvarlen.parallel.layers import bounds_of_cut
from jvarlen.parallel.schedules import make_schedule
from jvarlen.planning.budget import CostFn

__all__ = ["StepSeconds", "cuts_of_layers", "step_seconds"]


class StepSeconds(NamedTuple):
    """Seconds of one step, or of a group of several, by cause; float64[C, K], a row for a layout, or float64[K].

    Attributes:
      compute: forward and backward passes of the microbatches of a device, recomputation included.
      bubble: waiting for other stages.
      tensor: communication over "tensor".
      context: communication over "context" for rows that are spread.
      stage: sending from stage to stage.
      data: communication of gradients and parameters over "data" and "context" that no pass hides.
      update: of the optimizer.
    """

    compute: Float64[np.ndarray, ...]
    bubble: Float64[np.ndarray, ...]
    tensor: Float64[np.ndarray, ...]
    context: Float64[np.ndarray, ...]
    stage: Float64[np.ndarray, ...]
    data: Float64[np.ndarray, ...]
    update: Float64[np.ndarray, ...]

    @property
    def total(self) -> Float64[np.ndarray, ...]:
        """The sum of all."""
        return np.add.reduce([np.asarray(part) for part in self])


def step_seconds(
    table: LayoutTable,
    costs: ModelCosts,
    cluster: Cluster,
    *,
    num_microbatches: int,
    state_bytes: Float64[np.ndarray, " C"] | None = None,
    cost: CostFn | None = None,
    groups_per_step: float | None = None,
    of_own_programs: bool = False,
) -> StepSeconds:
    """Predicts the seconds of one step, or of one group with its share of what a step of several does once.

    A pass takes what its products, its attention, its elementwise kernels and their launches take by themselves. A tick
    of the stages lasts as long as its slowest action: every tick ends with messages to neighbours, and devices that
    wait for their neighbours alone take as long. Passes hide communication at ZeRO-3 without stages. Where steps
    have several groups, ZeRO-0 and ZeRO-1 reduce gradients once a step.

    Args:
      table: the layouts; one that cannot take a bucket gets a number without meaning.
      costs: of the model, for the K buckets.
      cluster: of at least as many devices.
      num_microbatches: M.
      state_bytes: float64[C], parameters and optimizer state of a device, which an update reads and writes; None: 0.
      cost: cost(rows, length) -> measured seconds of a microbatch on one device, in place of operations over speed.
      groups_per_step: of steps of several groups, on average; None: a step is one group, in one program.
      of_own_programs: whether each stage is a program of its own, as in Megatron-LM, which waits for its inputs alone.

    Returns:
      The seconds, float64[C, K] each.

    Raises:
      ValueError: costs that are not finite and above 0; more stages than layers.
    """
    _check_stages(table, costs.num_layers)
    is_spread, wide = table.is_spread(costs.buckets), table.wide
    per_shard = table.per_shard(costs.buckets, num_microbatches)
    parts = np.where(is_spread, wide.context, 1)
    ticks = _tick_counts(wide, per_shard, of_own_programs)
    pass_seconds = functools.partial(
        _pass_seconds, unit_s=_unit_seconds(cluster), scale=_scale(costs, cluster, cost), parts=parts, wide=wide
    )

    def over_axis(traffic: Traffic | None, x_bytes: Array, size: Array, in_host: Array) -> PerPass[np.ndarray]:
        def seconds(each: AxisTraffic) -> np.ndarray:
            times = max(each.times, 1)
            return times * cluster.collective_seconds(each.kind, each.num_bytes * x_bytes / times, size, in_host)

        zero = np.zeros(is_spread.shape)
        return PerPass(*(sum(map(seconds, of_pass), zero) for of_pass in traffic or ((),) * 4))

    def over_tensor(traffic: Mapping[Axis, Traffic]) -> PerPass[np.ndarray]:
        group = costs.x_bytes / parts, wide.tensor, cluster.members_in_host(wide.tensor, 1)
        both = over_axis(traffic.get("sequence_parallel"), *group), over_axis(traffic.get("tensor"), *group)
        size = np.maximum(wide.tensor // max(costs.shared_heads, 1), 1)  # of the devices that share a head
        shared = over_axis(traffic.get("shared_heads"), group[0], size, cluster.members_in_host(size, 1))
        of_passes = zip(*both, shared, strict=True)
        return PerPass(*(np.where(wide.sequence_parallel, *each) + of_heads for *each, of_heads in of_passes))

    def over_context(traffic: Mapping[Axis, Traffic]) -> PerPass[np.ndarray]:
        in_host = np.where(is_spread, cluster.members_in_host(wide.context, wide.tensor), 1)
        # Keys and values of the heads of a device.
        num_parts = np.minimum(wide.tensor, costs.shared_heads or wide.tensor)
        return over_axis(traffic.get("context"), costs.x_bytes / num_parts, parts, in_host)

    of_step = functools.partial(_schedule_seconds, wide, costs.num_layers, per_shard, ticks, of_own_programs)
    layer = pass_seconds(costs.layer, costs.layer_split)
    ends = pass_seconds(costs.ends, costs.ends_split)
    compute, bubble = of_step(layer, ends)
    tensor, waits_for_tensor = of_step(over_tensor(costs.layer_traffic), over_tensor(costs.ends_traffic))
    context, waits_for_context = of_step(over_context(costs.layer_traffic), over_context(costs.ends_traffic))
    sends = sum(ticks[..., i] * ((i & 1) + (i >> 1 & 1)) for i in range(8))  # an activation after F, a gradient after B
    stage = _send_seconds(wide, cluster, costs.x_bytes / parts, sends)
    forward, backward = (costs.num_layers * layer[i] + ends[i] for i in (0, 1))
    data = _data_seconds(wide, costs, cluster, per_shard, forward, backward, groups_per_step)
    update = np.zeros_like(compute)
    if state_bytes is not None:
        update += 2 * state_bytes[:, None] / cluster.elementwise_bytes_per_second / (groups_per_step or 1)
    return StepSeconds(compute, bubble + waits_for_tensor + waits_for_context, tensor, context, stage, data, update)


def _check_stages(table: LayoutTable, num_layers: int) -> None:
    if (cannot := ~table.takes_layers(num_layers) & (table.stage > 1)).any():
        listed = list_first(str(table.layout(row)) for row in np.flatnonzero(cannot).tolist())
        raise UserError(f"{num_layers} layers do not make these stages, each of which has at least one: {listed}")


def cuts_of_layers(costs: ModelCosts, num_parts: int, given: int | None = None) -> list[int]:
    """Values of `Layout.layers` to try: 0, and more layers for as long as the last stage computes the ends late."""
    if given is not None:
        return [given]
    least, most = bounds_of_cut(costs.num_layers, num_parts)
    sizes = np.arange(least, most + 1)
    of_layer, *of_ends = (
        float(np.sum(each.flops + each.attention)) for each in (costs.layer.backward, *costs.ends[:2])
    )
    # In the ticks of backward passes, which `zero_bubble` halves.
    late = sum(of_ends) > np.minimum(sizes * num_parts - costs.num_layers, sizes) * of_layer / 2
    return [0, *sizes[1:][late[:-1]].tolist()]


def _send_seconds(wide: LayoutTable, cluster: Cluster, x_bytes: Array, sends: Array) -> Float64[np.ndarray, "C K"]:
    """Seconds of sending arrays between stages, and of gathering their parts; the slowest pair of stages counts."""
    is_inside = cluster.members_in_host(wide.stage, wide.tensor * wide.context) == wide.stage
    one_send = cluster.collective_seconds("send", x_bytes / wide.tensor, 2, np.where(is_inside, 2, 1))
    in_host = cluster.members_in_host(wide.tensor, 1)
    gather = cluster.collective_seconds("all_gather", x_bytes, wide.tensor, in_host)
    return np.where(wide.stage > 1, sends * (one_send + np.where(wide.sequence_parallel, 0.0, gather)), 0.0)


def _unit_seconds(cluster: Cluster) -> Work[float]:
    """Seconds of one operation, byte or kernel."""
    rates = cluster.products_per_second, cluster.attention_per_second, cluster.elementwise_bytes_per_second
    return Work._make([*(1 / rate for rate in rates), cluster.kernel_s])


def _pass_seconds(
    passes: PerPass[Work[np.ndarray]],
    split: PerPass[Work[float]],
    *,
    unit_s: Work[float],
    scale: Array,
    parts: Array,
    wide: LayoutTable,
) -> PerPass[np.ndarray]:
    """Seconds of each pass. Each device of "tensor" does all that is not split over them, and launches all kernels."""
    found = []
    for work, shares in zip(passes, split, strict=True):
        seconds = np.zeros(parts.shape)
        for amount, unit, over, share in zip(work, unit_s, (parts, parts, parts, 1), shares, strict=True):
            seconds = seconds + scale * amount * unit / over * (1 - share + share / wide.tensor)
        found.append(seconds)
    return PerPass(*found)


def _scale(costs: ModelCosts, cluster: Cluster, cost: CostFn | None) -> Float64[np.ndarray, " K"]:
    """Measured seconds of a microbatch on one device over those predicted."""
    rows, lengths = np.array(costs.buckets).T
    if cost is None:
        return np.ones(len(rows))
    seconds = np.asarray(cost(rows, lengths), np.float64)
    wrong = [f"{bucket}: {s}" for bucket, s in zip(costs.buckets, seconds, strict=True) if not 0 < s < np.inf]
    if wrong:
        raise UserError(f"the cost of a microbatch must be finite and above 0 s: {list_first(wrong)}")
    predicted, unit_s = np.zeros(len(rows)), _unit_seconds(cluster)
    for times, part in ((costs.num_layers, costs.layer), (1, costs.ends)):
        for work in part[:2]:
            predicted += times * np.add.reduce([amount * unit for amount, unit in zip(work, unit_s, strict=True)])
    return seconds / predicted


def _schedule_seconds(
    wide: LayoutTable,
    num_layers: int,
    num_microbatches: Array,
    ticks: np.ndarray,
    of_own_programs: bool,
    layer: PerPass[np.ndarray],
    ends: PerPass[np.ndarray],
) -> tuple[Float64[np.ndarray, "C K"], Float64[np.ndarray, "C K"]]:
    """Seconds of the mean stage in a step, and how much longer the ticks of the step take."""
    again = sum(np.where(wide.remat == REMATS.index(name), getattr(layer, name), 0.0) for name in REMATS[1:])
    splits = (wide.schedule == SCHEDULES.index("zero_bubble")) & (wide.stage > 1)
    half = layer.backward / 2
    # From kept inputs, weight gradients run each layer and its backward pass again.
    weights = again + np.where(wide.remat == REMATS.index("full"), layer.backward, half)
    of_layer = layer.forward, again + np.where(splits, half, layer.backward), np.where(splits, weights, 0.0)
    makespan = np.zeros(ticks.shape[:-1])
    size = wide.layers_per_part(num_layers)
    of_part = [size * seconds + makespan for seconds in of_layer]
    for present in range(1, 8):
        slowest = functools.reduce(np.maximum, [of_part[i] for i in range(3) if present >> i & 1])
        makespan = makespan + ticks[..., present] * slowest
    # The last stage computes the loss, its forward pass too, in the ticks of its backward passes, and may have fewer
    # layers instead.
    of_ends = ends.forward + ends.backward
    fewer = np.minimum(size * wide.stage * wide.virtual - num_layers, size)
    beside = np.maximum(of_ends - fewer * (sum(of_layer) if of_own_programs else of_layer[1]), 0.0)
    work = num_microbatches * (num_layers * sum(of_layer) + of_ends) / wide.stage
    return work, np.where(wide.stage > 1, np.maximum(makespan + num_microbatches * beside - work, 0.0), 0.0)


def _tick_counts(
    wide: LayoutTable, num_microbatches: Int64[np.ndarray, "C K"], of_own_programs: bool
) -> Int64[np.ndarray, "C K 8"]:
    """How many ticks hold which kinds: at index 1 for F, plus 2 for B, plus 4 for W."""
    sizes = tuple(int(each.max()) + 1 for each in (wide.schedule, wide.stage, wide.virtual, num_microbatches))
    keys = np.ravel_multi_index(np.broadcast_arrays(wide.schedule, wide.stage, wide.virtual, num_microbatches), sizes)
    unique, inverse = np.unique(keys, return_inverse=True)
    counts = [_ticks_of(*map(int, key), of_own_programs) for key in zip(*np.unravel_index(unique, sizes), strict=True)]
    return np.array(counts)[inverse.reshape(keys.shape)]


_STEADY = 4  # times as many microbatches as stages: from then on, ticks grow by the same for as many more microbatches


@functools.lru_cache(maxsize=65536)
def _ticks_of(
    schedule: int, num_stages: int, num_virtual: int, num_microbatches: int, of_own_programs: bool = False
) -> tuple[int, ...]:
    if num_stages == 1 or num_microbatches < 1:
        return (0,) * 8
    name, num_slots = SCHEDULES[schedule], num_microbatches * num_virtual + num_stages - 1
    if name == "interleaved" and (num_microbatches % num_stages or num_virtual < 2):
        return (0,) * 8
    if name not in ("1f1b", "zero_bubble") or (of_own_programs and name == "1f1b"):
        return (0, num_slots, num_slots, 0, 0, 0, 0, 0)
    rounds, rest = divmod(num_microbatches, num_stages)
    if rounds > _STEADY + 1:
        fewer, more = (
            np.array(_ticks_of(schedule, num_stages, num_virtual, num_stages * (_STEADY + i) + rest)) for i in (0, 1)
        )
        return tuple((fewer + (rounds - _STEADY) * (more - fewer)).tolist())
    made = make_schedule(name, num_stages, num_microbatches, num_virtual)
    present = np.zeros((int(made.ticks.max()) + 1, 3), bool)
    present[made.ticks.ravel(), made.actions[..., 0].ravel()] = True
    return tuple(np.bincount(present @ [1, 2, 4], minlength=8).tolist())


def _data_seconds(
    wide: LayoutTable,
    costs: ModelCosts,
    cluster: Cluster,
    num_microbatches: Array,
    forward: Array,
    backward: Array,
    groups_per_step: float | None,
) -> Float64[np.ndarray, "C K"]:
    """Seconds of gradients and parameters over the data axes, and of the ends' gradients over the stages."""
    of_params = costs.layer_params, costs.ends_params, costs.layer_trained, costs.ends_trained
    of_layer, of_ends, trained_layer, trained_ends = ((whole + split / wide.tensor) for whole, split in of_params)
    num_layers = wide.layers_per_part(costs.num_layers) * wide.virtual  # of the stage with the most
    on_stage = num_layers * of_layer
    trained = num_layers * trained_layer + trained_ends
    wide_bytes = max(costs.param_bytes, 4.0)
    grad_bytes = np.where(wide.reduces_bfloat16, 2.0, wide_bytes)
    size, in_stage = wide.num_shards, wide.tensor * wide.context
    in_host = cluster.members_in_host(wide.context, wide.tensor)
    in_host = np.minimum(size, in_host * cluster.members_in_host(wide.data, in_stage * wide.stage))

    def seconds(kind: Kind, num_bytes: Array) -> np.ndarray:
        return cluster.collective_seconds(kind, num_bytes, size, in_host)

    has_stages = wide.stage > 1
    gathered = np.where(wide.zero == 3, on_stage + of_ends, trained)  # those that changed
    times_reduced = np.where(has_stages | (wide.zero < 2), 1, num_microbatches)
    reduced = times_reduced * seconds("reduce_scatter", trained * grad_bytes)
    of_layers = 2 * num_microbatches * seconds("all_gather", on_stage * costs.param_bytes)
    gathers = np.where(
        (wide.zero == 3) & ~has_stages,
        of_layers + (1 if costs.num_layers else num_microbatches) * seconds("all_gather", of_ends * costs.param_bytes),
        seconds("all_gather", gathered * costs.param_bytes),
    )
    reduced = np.where(wide.zero == 0, seconds("all_reduce", trained * grad_bytes), reduced)
    in_host_of_stages = cluster.members_in_host(wide.stage, in_stage)
    ends = cluster.collective_seconds("all_reduce", trained_ends * wide_bytes, wide.stage, in_host_of_stages)
    if groups_per_step is not None:  # in programs of their own: gradients, and what is gathered after the update
        reduced = np.where(wide.zero < 2, reduced / groups_per_step, reduced)
        gathers = np.where(wide.zero < 3, gathers / groups_per_step, gathers)
        ends = ends / groups_per_step
    beside_passes = reduced + np.where(wide.zero == 3, gathers, 0.0)
    after = np.where((wide.zero > 0) & (wide.zero < 3), gathers, 0.0)
    hides = np.where((wide.zero == 3) & ~has_stages, num_microbatches * (forward + backward), 0.0)
    hidden = np.minimum(cluster.overlap * beside_passes, hides)
    return beside_passes + after - hidden + ends
