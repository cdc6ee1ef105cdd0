"""The layout on which a plan takes the least time, among all that a cluster allows. Letters: C layouts, K buckets."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from jaxtyping import Float64, Int64

from jvarlen._common.checks import NothingFitsError, UserError, check_at_least_one, list_first
from jvarlen._common.keywords import check_keywords
from jvarlen._common.terminal import text_table
from jvarlen._common.types import Extra, Params
from jvarlen.batches.batches import token_batch_spec
from jvarlen.batches.shapes import BatchSpec
from jvarlen.distributed.layout import MESH_AXES, Layout, Remat, ScheduleName
from jvarlen.estimates.cluster import Cluster
from jvarlen.estimates.layout_table import REMATS, SCHEDULES, LayoutTable
from jvarlen.estimates.memory_model import MemoryModel
from jvarlen.estimates.model_costs import ModelCosts, count_costs
from jvarlen.estimates.step_seconds import StepSeconds, cuts_of_layers, step_seconds
from jvarlen.parallel.layers import LayeredModel, StepLoss, layers_of_stages
from jvarlen.parallel.step_loss import model_to_estimate
from jvarlen.planning.buckets import Bucket
from jvarlen.planning.budget import CostFn
from jvarlen.planning.plan import Plan
from jvarlen.planning.steps import cost_of_plan
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import Optimizer
from jvarlen.training.trainable import Trainable

__all__ = ["Candidates", "LayoutChoice", "choose_layout", "divisors"]

_SHOWN = 6  # candidates in a table, whose steps are traced
_NEVER = np.iinfo(np.int64).max  # as context_from: no row is spread
_TOO_LARGE, _SHARDS, _LENGTHS, _SPLIT_LENGTHS, _STAGES, _SPREADS_NONE = range(1, 7)  # problems of layouts, 0 for none

_WAITS = ("bubble", "tensor", "context", "stage", "data")  # parts of the seconds that compute nothing

Fixed: TypeAlias = Mapping[str, Any]  # fields of `Layout` with the values that they must have


class Candidates(NamedTuple):
    """All layouts that were considered, the best first.

    Attributes:
      table: the layouts, a row each.
      seconds: float64[C], of an epoch; infinite where the layout cannot take the steps.
      num_bytes: float64[C], that a step takes on the fullest device: by `estimate_memory` for the first 6, and by
        `MemoryModel` for the others. NaN where that is unknown.
      reasons: why each was rejected, "too large" where it needs more memory than a device has; "" for those that were
        not.
      exposed_s: float64[C], seconds in which the programs of `compile_finalists` wait for communication; NaN where all
        figures are estimates.
    """

    table: LayoutTable
    seconds: Float64[np.ndarray, " C"]
    num_bytes: Float64[np.ndarray, " C"]
    reasons: tuple[str, ...]
    exposed_s: Float64[np.ndarray, " C"]

    def layouts(self, most: int | None = None) -> list[Layout]:
        """The first layouts that were not rejected.

        Args:
          most: how many; None for all.

        Returns:
          The layouts, those of the least predicted seconds first.
        """
        return [self.table.layout(row) for row in range(self.num_fitting)[:most]]

    @property
    def num_fitting(self) -> int:
        """How many were not rejected."""
        return self.reasons.count("")

    def rejections(self) -> str:
        """Why layouts were rejected, the most frequent reason first, and how many layouts each."""
        counts = collections.Counter(filter(None, self.reasons))
        listed = [f"{reason} ({number:,})" for reason, number in counts.most_common()]
        return f": {list_first(listed, '; ')}" if listed else ""


class LayoutChoice(NamedTuple):
    """The chosen layout and its alternatives; `str` shows both.

    Attributes:
      layout: the choice.
      seconds: of an epoch.
      num_bytes: memory of a step on the fullest device.
      memory_bytes: memory of a device.
      cluster: the devices.
      of_epoch: the estimated parts of an epoch's seconds on each of the first candidates, 6 at most.
      candidates: all layouts that were considered.
      costs: of the model.
      num_tokens: real tokens of an epoch.
      peak_s: seconds of an epoch's operations, without recomputation, at the peak of all devices.
    """

    layout: Layout
    seconds: float
    num_bytes: float
    memory_bytes: int
    cluster: Cluster
    of_epoch: StepSeconds
    candidates: Candidates
    costs: ModelCosts
    num_tokens: int
    peak_s: float

    def __str__(self) -> str:
        candidates = self.candidates
        is_compiled = np.isfinite(candidates.exposed_s).tolist()
        header = ["layout", "seconds an epoch", "tokens/s", "of the peak", "waits for", "times the best"]
        cells = [[*header, "bytes a device", *["figures"] * any(is_compiled)]]
        for row, layout in enumerate(candidates.layouts(len(self.of_epoch.total))):
            seconds = candidates.seconds[row]
            waits = {name: part[row] / seconds for name, part in self.of_epoch._asdict().items() if name in _WAITS}
            if is_compiled[row]:
                waits = {"communication": candidates.exposed_s[row] / seconds}
            longest = max(waits, key=lambda name: waits[name])
            speed = f"{seconds:,.4g}", f"{self.num_tokens / seconds:,.4g}", f"{self.peak_s / seconds:.1%}"
            waited = f"{longest} {waits[longest]:.0%}" if waits[longest] >= 0.005 else "nothing"
            shown = [f"{seconds / self.seconds:.2f}", f"{candidates.num_bytes[row]:,.0f}"]
            shown += ["compiled" if is_compiled[row] else "estimated"] * any(is_compiled)
            cells.append([str(layout), *speed, waited, *shown])
        left, rejected = candidates.num_fitting - len(cells) + 1, len(candidates.reasons) - candidates.num_fitting
        counts = f"{left:,} more fit; {rejected:,} do not{candidates.rejections()}"
        return f"{text_table(cells)}\n{counts}\n{self.why()}"

    def why(self) -> str:
        """The parts of an epoch's seconds, and what the next layout takes longer for.

        Returns:
          A sentence.
        """
        parts = {name: float(part[0]) for name, part in self.of_epoch._asdict().items()}
        exposed_s = float(self.candidates.exposed_s[0])
        if np.isfinite(exposed_s):
            parts = {"compiled": self.seconds - exposed_s, "exposed communication": exposed_s}
        total = sum(parts.values()) or 1.0
        shares = ", ".join(f"{name} {share:.0%}" for name, part in parts.items() if (share := part / total) >= 0.005)
        fills = f"{self.num_bytes / self.memory_bytes:.0%} of a device's memory"
        said = f"{self.layout}: {self.seconds:,.4g} s an epoch ({shares}), {fills}"
        if self.layout.stage > 1 and len({*(sizes := layers_of_stages(self.costs.num_layers, self.layout))}) > 1:
            said += f"; its stages have {', '.join(map(str, sizes))} layers"
        if len(self.of_epoch.total) < 2 or np.isfinite(exposed_s):
            return said
        more = {name: float(part[1] - part[0]) for name, part in self.of_epoch._asdict().items()}
        longer, most = self.candidates.seconds[1] / self.seconds - 1, max(more, key=lambda name: more[name])
        return f"{said}; the next, {self.candidates.table.layout(1)}, takes {longer:.1%} longer, mostly for {most}"


@check_keywords
def choose_layout(
    model: LayeredModel | LossFn | StepLoss,
    optimizer: Optimizer,
    plan: Plan,
    *,
    cluster: Cluster,
    params: Params,
    trainable: Trainable = None,
    memory_bytes: int | None = None,
    fixed: Fixed | None = None,
    cost: CostFn | None = None,
    lengths: npt.ArrayLike | None = None,
    batch_spec: BatchSpec = token_batch_spec,
    extra: Extra = None,
    costs: ModelCosts | None = None,
    memory: MemoryModel | None = None,
) -> LayoutChoice:
    """Chooses the layout on which an epoch of a plan takes the least predicted time, among those that fit.

    All layouts of all devices of the cluster are considered, with every field of `Layout`. The choice is optimal under
    the predictions. Ties go to the simpler layout.

    Args:
      model: as for `make_train_step`; for a `StepLoss`, its pass for gradients counts.
      optimizer: any Optax optimizer.
      plan: its buckets, groups of each, and microbatches of a group.
      cluster: the devices.
      params: pytree of arrays or `jax.ShapeDtypeStruct`, as for `TrainStep.init`.
      trainable: as for `make_train_step`. Where some layers of an array are trained, all count as trained.
      memory_bytes: memory of a device for a step; None takes the cluster's.
      fixed: fields of `Layout` with the values that they must have, such as `{"tensor": 2}`.
      cost: as for `step_seconds`.
      lengths: as for `Plan.report`.
      batch_spec: as for `compile_buckets`.
      extra: as for `TrainStep.init`.
      costs: the result of `count_costs` for this model and the plan's buckets, if known.
      memory: the `MemoryModel` of the same, if known.

    Returns:
      `LayoutChoice`: the layout, its seconds and bytes, and all candidates.

    Raises:
      ValueError: no layout takes these steps or fits; the message names the nearest, and by how much it is too large.
        Values of `fixed` that no layout has.

    References:
      Zheng et al. 2022, "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", for one
      shape; here every shape of an epoch counts with its steps.
    """
    memory_bytes = cluster.memory_bytes if memory_bytes is None else memory_bytes
    check_at_least_one(memory_bytes=memory_bytes)
    fixed = fixed or {}
    if unknown := sorted({*fixed} - {field.name for field in dataclasses.fields(Layout)}):
        raise UserError(f"a layout has no field {list_first(unknown)}")
    for name, value in fixed.items():
        _ = dataclasses.replace(Layout(data=2), **{name: value}).axis_sizes  # raises ValueError for what none has
    buckets = [bucket for bucket in plan.buckets.shapes if isinstance(bucket, Bucket)]
    if len(buckets) < len(plan.buckets.shapes):
        raise UserError("layouts are chosen for rows of one length, and these are buckets of pairs")
    known = {"params": params, "trainable": trainable, "batch_spec": batch_spec, "extra": extra}
    if costs is None:
        sizes = [fixed["tensor"]] if "tensor" in fixed else divisors(cluster.num_devices)
        costs = count_costs(model_to_estimate(model), buckets, tensor_sizes=sizes, **known)
    if memory is None:
        memory = MemoryModel(model_to_estimate(model), optimizer, buckets, **known)
    cost = None if cost is None else cost_of_plan(plan, cost, lengths)
    num_groups = np.array([*plan.groups_of_buckets().values()])
    per_step = plan.num_groups / plan.num_steps if plan.has_many_groups else None
    num_microbatches = plan.num_microbatches
    search = _LayoutSearch(costs, memory, cluster, num_groups, per_step, num_microbatches, memory_bytes, cost, fixed)
    candidates = search.candidates()
    if candidates.reasons[0]:
        raise NothingFitsError(_none_fits(candidates, cluster, memory_bytes))
    first = candidates.table.take(slice(0, min(candidates.num_fitting, _SHOWN)))
    of_epoch = [part[:, num_groups > 0] @ num_groups[num_groups > 0] for part in search.step_seconds(first)]
    return LayoutChoice(
        layout=first.layout(0),
        seconds=float(candidates.seconds[0]),
        num_bytes=float(candidates.num_bytes[0]),
        memory_bytes=memory_bytes,
        cluster=cluster,
        of_epoch=StepSeconds(*of_epoch),
        candidates=candidates,
        costs=costs,
        num_tokens=int(np.sum(plan.num_tokens)),
        peak_s=float(num_microbatches * num_groups @ costs.step_flops) / cluster.num_devices / cluster.flops_per_second,
    )


def _none_fits(candidates: Candidates, cluster: Cluster, memory_bytes: int) -> str:
    where = f"no layout of the {cluster.num_devices:,} devices of {cluster.name}"
    finite = np.flatnonzero(np.isfinite(candidates.seconds))
    if not len(finite):
        return f"{where} takes these steps{candidates.rejections()}"
    nearest = finite[np.argmin(candidates.num_bytes[finite])]
    layout, needed = candidates.table.layout(int(nearest)), candidates.num_bytes[nearest]
    return (
        f"{where} fits into {memory_bytes:,} bytes a device: the nearest, {layout}, needs {needed:,.0f} bytes, "
        f"{needed - memory_bytes:,.0f} more than there are"
    )


class _LayoutSearch(NamedTuple):
    """A plan, a model and a cluster, by which layouts are compared."""

    costs: ModelCosts
    memory: MemoryModel
    cluster: Cluster
    num_groups: Int64[np.ndarray, " K"]  # of each bucket
    groups_per_step: float | None  # as for `step_seconds`
    num_microbatches: int
    memory_bytes: int  # that a device has for a step
    cost: CostFn | None
    fixed: Fixed

    @property
    def many_groups(self) -> bool:
        """Whether steps have several groups."""
        return self.groups_per_step is not None

    def step_seconds(self, table: LayoutTable) -> StepSeconds:
        """Seconds of a group of every bucket on these layouts."""
        given: Any = {"groups_per_step": self.groups_per_step, "cost": self.cost}
        given |= {"num_microbatches": self.num_microbatches, "state_bytes": self.memory.state_bytes(table)}
        return step_seconds(table, self.costs, self.cluster, **given)

    def candidates(self) -> Candidates:
        """All layouts, the best first."""
        table, cannot = _enumerate(self.costs, self.cluster.num_devices, self.fixed)
        takes = np.flatnonzero(cannot == "")
        if not len(takes):
            raise UserError(f"no layout takes this model: {list_first(sorted(set(cannot.tolist())), '; ')}")
        options = self._options(table.take(takes))
        self._trace_first(table.take(takes), options)
        column = options.best()
        at = np.arange(len(takes)), column
        context_from, problem = table.context_from.copy(), options.problem[at]
        context_from[takes] = options.thresholds[column]
        seconds, num_bytes = np.full(len(cannot), np.inf), np.full(len(cannot), np.nan)
        seconds[takes] = np.where(problem > _TOO_LARGE, np.inf, options.seconds[at])
        num_bytes[takes] = options.num_bytes[at]
        texts = {
            0: "",
            _TOO_LARGE: "too large",
            _SHARDS: f"its data shards do not divide {self.num_microbatches} microbatches",
            _LENGTHS: "rows do not divide into twice the parts of context",
            _SPLIT_LENGTHS: "sequence_parallel does not divide the length of rows",
            _STAGES: "its microbatches are not a multiple of its stages, which virtual stages need",
            _SPREADS_NONE: f"context_from{self.fixed.get('context_from')} spreads no rows",
        }
        reasons = cannot.copy()
        reasons[takes] = [texts[each] for each in problem.tolist()]
        order = np.lexsort((seconds, reasons != ""))
        table, exposed_s = table._replace(context_from=context_from).take(order), np.full(len(order), np.nan)
        return Candidates(table, seconds[order], num_bytes[order], tuple(reasons[order].tolist()), exposed_s)

    def _trace_first(self, table: LayoutTable, options: _Options) -> None:
        """Replaces the guessed bytes of the first that seem to fit by those of a step, traced in the fullest bucket."""
        traced: set[tuple[int, int]] = set()
        while True:
            column = options.best()
            at = np.arange(len(column)), column
            order = np.lexsort((options.seconds[at], options.problem[at]))  # ties in the order of enumeration
            first = [(row, int(column[row])) for row in order[:_SHOWN]]
            new = next((each for each in first if options.problem[each] == 0 and each not in traced), None)
            if new is None:
                return
            traced.add(new)
            layout = table._replace(context_from=options.thresholds[column]).layout(new[0])
            bucket = self.costs.buckets[options.fullest[new]]
            options.num_bytes[new] = self.memory.exact_bytes(layout, bucket, self.num_microbatches, self.many_groups)
            if options.num_bytes[new] > self.memory_bytes:
                options.problem[new] = _TOO_LARGE

    def _options(self, table: LayoutTable) -> _Options:
        """Seconds and bytes of each layout, for each bucket j from which its rows may be spread, and for none."""
        lengths = np.array([bucket.length for bucket in self.costs.buckets])
        used, fixed = self.num_groups > 0, self.fixed.get("context_from")
        spread, whole = self._evaluate(table, True), self._evaluate(table, False)
        columns, thresholds = [], []
        for j in [*np.flatnonzero(used).tolist(), len(lengths)]:
            is_spread = np.arange(len(lengths)) >= j
            seconds, num_bytes, problem = (np.where(is_spread, *pair) for pair in zip(spread, whole, strict=True))
            problem, num_bytes = problem[:, used].max(axis=1, initial=0), np.where(used, num_bytes, 0.0)
            in_all, largest = np.where(used, seconds * self.num_groups, 0.0).sum(axis=1), num_bytes.max(axis=1)
            problem[(problem == 0) & (largest > self.memory_bytes)] = _TOO_LARGE
            spreads = j < len(lengths)
            threshold = int(lengths[j]) if spreads and used[:j].any() else 0
            if fixed is not None and spreads:
                spreads = np.array_equal((lengths >= fixed)[used], is_spread[used])
                threshold = fixed
            problem[np.where(table.context > 1, not spreads, j < len(lengths))] = _SPREADS_NONE
            columns.append((in_all, largest, problem, num_bytes.argmax(axis=1)))
            thresholds.append(threshold)
        seconds, num_bytes, problem, fullest = (np.stack(each, axis=1) for each in zip(*columns, strict=True))
        return _Options(seconds, num_bytes, problem, fullest, np.array(thresholds))

    def _evaluate(self, table: LayoutTable, is_spread: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Seconds, bytes and problem of every bucket, [C, K] each, with rows that are spread or whole."""
        buckets = self.costs.buckets
        table = table._replace(context_from=np.full_like(table.data, 0 if is_spread else _NEVER))
        wide, per_shard = table.wide, table.per_shard(buckets, self.num_microbatches)
        lengths = np.array([bucket.length for bucket in buckets])
        parts = np.where(table.is_spread(buckets), wide.context, 1)
        problems = {
            _SHARDS: per_shard == 0,
            _LENGTHS: (parts > 1) & (lengths % (2 * parts) != 0),
            _SPLIT_LENGTHS: wide.sequence_parallel & (lengths // parts % wide.tensor != 0),
            _STAGES: (wide.virtual > 1) & (wide.stage > 1) & (per_shard % wide.stage != 0),
        }
        problem = np.select([*problems.values()], [*problems], 0)
        num_bytes = self.memory.memory_bytes(table, self.num_microbatches, self.many_groups)
        return self.step_seconds(table).total, num_bytes, problem


class _Options(NamedTuple):
    """Seconds and bytes of each layout with its rows spread from one of J thresholds; [C, J]."""

    seconds: Float64[np.ndarray, "C J"]
    num_bytes: Float64[np.ndarray, "C J"]
    problem: Int64[np.ndarray, "C J"]
    fullest: Int64[np.ndarray, "C J"]  # the bucket that takes the most bytes
    thresholds: Int64[np.ndarray, " J"]

    def best(self) -> Int64[np.ndarray, " C"]:
        """The threshold of each layout that has the fewest seconds, among those with the least problem."""
        by = np.where(self.problem == _TOO_LARGE, self.num_bytes, self.seconds)
        return np.where(self.problem == self.problem.min(axis=1, keepdims=True), by, np.inf).argmin(axis=1)


def _enumerate(costs: ModelCosts, num_devices: int, fixed: Fixed) -> tuple[LayoutTable, np.ndarray]:
    """All layouts, without `context_from`, simple ones first, and why the model does not take some of them."""
    rows: list[tuple[int | str, ...]] = []
    cannot: list[str] = []
    names = (*MESH_AXES, "zero", "schedule", "virtual", "layers", "sequence_parallel", "remat")
    for tensor, stage, context in itertools.product(divisors(num_devices), repeat=3):
        data, rest = divmod(num_devices, tensor * stage * context)
        sizes = data, stage, context, tensor
        if rest or any(fixed.get(name, size) != size for name, size in zip(MESH_AXES, sizes, strict=True)):
            continue
        reason = _why_not(costs, stage, context, tensor)
        for others in _others(costs, stage, data * context, tensor, fixed.get("layers"), is_simple=bool(reason)):
            if all(fixed.get(name, value) in (value, None) for name, value in zip(names[4:], others, strict=True)):
                rows.append((*sizes, *others))
                cannot.append(reason)
    if not rows:
        raise UserError(f"no layout of {num_devices} devices has {dict(fixed)}")
    columns = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
    columns["schedule"] = np.array([SCHEDULES.index(name) for name in columns["schedule"].tolist()])
    columns["remat"] = np.array([REMATS.index(name) for name in columns["remat"].tolist()])
    columns["context_from"] = np.zeros(len(rows), np.int64)
    columns["reduces_bfloat16"] = np.full(len(rows), fixed.get("reduce_dtype") == "bfloat16")
    table, reasons = LayoutTable(**columns), np.array(cannot, object)
    has_stages = (table.stage > 1) & (reasons == "")
    reasons[has_stages & ~table.takes_layers(costs.num_layers)] = "layersN cuts no such stages"
    cannot_pad = has_stages & (table.num_slots(costs.num_layers) > costs.num_layers) & (not costs.uneven_stages)
    reasons[cannot_pad] = "stages of different sizes need num_layers of the model"
    return table, reasons


def _why_not(costs: ModelCosts, stage: int, context: int, tensor: int) -> str:
    if stage > 1 and costs.num_layers < stage:
        return f"stage{stage} needs as many layers, and the model has {costs.num_layers}"
    if tensor not in (1, *costs.tensor_sizes):
        return f"tensor{tensor} does not divide the model"
    return "context needs a model by positions" if context > 1 and not costs.by_positions else ""


def _others(
    costs: ModelCosts, stage: int, num_shards: int, tensor: int, layers: int | None, *, is_simple: bool
) -> Iterator[tuple[int, ScheduleName, int, int, bool, Remat]]:
    """The other fields, of which the layers of a stage may be given: of the simplest layout only or of all."""
    by_layers = costs.num_layers > 0
    zeros = range(1) if is_simple or num_shards == 1 else range(4)
    schedules: list[tuple[ScheduleName, int, int]] = [(SCHEDULES[0], 1, 0)]
    if stage > 1 and not is_simple:
        names: list[tuple[ScheduleName, int]] = [("eager_1f1b", 1), ("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1)]
        names += [("interleaved", virtual) for virtual in divisors(-(-costs.num_layers // stage))[1:]]
        schedules = [(*each, cut) for each in names for cut in cuts_of_layers(costs, stage * each[1], layers)]
    takes_sequence_parallel = tensor > 1 and not is_simple and "sequence_parallel" in costs.layer_traffic
    split = (False, True) if takes_sequence_parallel else (False,)
    remats = ("none",) if is_simple or not by_layers else REMATS[:: -1 if stage > 1 else 1]
    for zero, schedule, sequence_parallel, remat in itertools.product(zeros, schedules, split, remats):
        yield zero, *schedule, sequence_parallel, remat


def divisors(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    return [size for size in range(1, number + 1) if number % size == 0]
