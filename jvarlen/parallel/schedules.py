"""Pipeline schedules as data: which stage works on what and when, what it holds, and tables of it. NumPy only.

Letters: S stages, M microbatches of a data shard, V virtual stages of each, A actions of a stage, T ticks.
Virtual stage v of stage s is part v · S + s of the model's S · V parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64, Integer

from jvarlen._common.checks import UserError, check_at_least_one, check_choices
from jvarlen.distributed.layout import ScheduleName

__all__ = [
    "BACKWARD", "FORWARD", "WEIGHT", "Schedule", "Tables", "Timeline", "check_schedule", "make_schedule", "schedule_of",
]  # fmt: skip

FORWARD, BACKWARD, WEIGHT = range(3)
_KINDS = "FBW"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Schedule:
    """The actions of every stage in one step; `make_schedule` makes them.

    Attributes:
      name: a word of `Layout`.
      num_stages: S.
      num_microbatches: M.
      num_virtual: V.
      actions: int32[S, A, 3], the actions of each stage in order: kind, microbatch and virtual stage. Kinds are 0 for a
        forward pass (F), 1 for a backward pass (B), and 2 for weight gradients (W). In a schedule with W, B computes
        only the gradient of the stage's input.
      ticks: int32[S, A], the synchronous tick of each action. A result is received in a later tick.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_virtual: int
    actions: Int32[np.ndarray, "S A 3"]
    ticks: Int32[np.ndarray, "S A"]

    @property
    def kinds(self) -> str:
        """The kinds of its actions: `"FB"` or `"FBW"`."""
        return _KINDS[: 1 + int(self.actions[..., 0].max())]

    def simulate(self, costs: Mapping[str, Any], mode: str = "synchronous") -> Timeline:
        """When each action starts and ends. Transfers take no time.

        Args:
          costs: seconds, or any unit, of an action of each kind of `kinds`, on one virtual stage: a number, or an array
            [S].
          mode: `"mpmd"`: a stage starts its next action when it is free and the inputs are there. `"synchronous"`: one
            program moves all stages in ticks, each as long as its slowest action.

        Returns:
          The timeline.

        Raises:
          ValueError: costs of other kinds, or of a wrong shape; an unknown mode.

        Example:
          >>> schedule, costs = make_schedule("1f1b", 4, 8), {"F": 15, "B": 30}
          >>> [schedule.simulate(costs, mode).makespan for mode in ("mpmd", "synchronous")]
          [495.0, 600.0]
          >>> schedule.simulate(costs).peak_activations.tolist()
          [4, 3, 2, 1]
        """
        check_choices(mode=(mode, Literal["synchronous", "mpmd"]))
        kind, durations = self.actions[..., 0], self._durations(costs)
        if mode == "mpmd":
            starts = _earliest_starts(_received_from(self.actions), durations)
            makespan = float((starts + durations).max())
        else:
            lasts = np.zeros(int(self.ticks.max()) + 1)
            np.maximum.at(lasts, self.ticks, durations)
            starts = (np.cumsum(lasts) - lasts)[self.ticks]
            makespan = float(lasts.sum())
        capacity = self.num_stages * makespan
        num_held = np.cumsum(kind == FORWARD, axis=1) - np.cumsum(kind == len(self.kinds) - 1, axis=1)
        return Timeline(
            schedule=self,
            mode=mode,
            starts=starts,
            ends=starts + durations,
            makespan=makespan,
            bubble=float((capacity - durations.sum()) / capacity) if capacity else 0.0,
            peak_activations=num_held.max(axis=1),
        )

    def _durations(self, costs: Mapping[str, Any]) -> Float64[np.ndarray, "S A"]:
        """The cost of each action."""
        of_kinds = self._check_costs(costs, (self.num_stages,))
        return of_kinds[self.actions[..., 0], np.arange(self.num_stages)[:, None]]

    def _check_costs(self, costs: Mapping[str, Any], shape: tuple[int, ...]) -> Float64[np.ndarray, "kinds ..."]:
        """The costs of each kind, broadcast to a shape."""
        if sorted(costs) != sorted(self.kinds):
            raise UserError(f"costs of {self.name} must be of the kinds {', '.join(self.kinds)}, not {sorted(costs)}")
        return np.stack([np.broadcast_to(np.asarray(costs[kind], np.float64), shape) for kind in self.kinds])

    def tables(self) -> Tables:
        """Actions, transfers and buffer slots of every tick and stage, for a program that moves all stages in ticks."""
        ticks, received_from = self.ticks, _received_from(self.actions)
        stage = np.broadcast_to(np.arange(self.num_stages)[:, None], ticks.shape)
        kind, microbatch, virtual = np.moveaxis(self.actions, -1, 0)
        place = _place_of(self.actions)

        def of_kind(wanted: int, values: np.ndarray) -> np.ndarray:
            """The value of the action of another kind, for the same stage, microbatch and virtual stage."""
            return values.ravel()[place[wanted, stage, microbatch, virtual]]

        def table(values: np.ndarray, where: Any = True, at: np.ndarray = ticks) -> Int32[np.ndarray, "T S"]:
            filled = np.full((int(ticks.max()) + 1, len(ticks)), -1, np.int32)
            is_there = np.broadcast_to(where, at.shape)
            filled[at[is_there], stage[is_there]] = values[is_there]
            return filled

        of_last, source_tick = of_kind(int(kind.max()), ticks), ticks.ravel()[received_from]
        takes_input, takes_gradient = ((kind == each) & (received_from >= 0) for each in (FORWARD, BACKWARD))
        activations, num_activations = _slots(of_kind(FORWARD, ticks), of_last, kind == FORWARD)
        for takes in (takes_input, takes_gradient):
            assert _slots(source_tick, ticks, takes)[1] <= 1, "what arrives is read before more does"
        is_last_part = (stage == self.num_stages - 1) & (virtual == self.num_virtual - 1)
        outputs, num_outputs = _slots(ticks, of_kind(BACKWARD, ticks), is_last_part & (kind == FORWARD))
        return Tables(
            kind=table(kind),
            microbatch=table(microbatch),
            virtual=table(virtual),
            activation_slot=table(of_kind(FORWARD, activations)),
            output_slot=table(of_kind(FORWARD, outputs), is_last_part & (kind != WEIGHT)),
            arriving_input=table(microbatch, takes_input, source_tick),
            arriving_gradient=table(microbatch, takes_gradient, source_tick),
            num_activations=num_activations,
            num_outputs=num_outputs,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """A simulated schedule. Its unit of time is that of the costs.

    Attributes:
      schedule: that was simulated.
      mode: as for `Schedule.simulate`.
      starts: float64[S, A], when each action starts.
      ends: float64[S, A], when it ends.
      makespan: the time of the whole step.
      bubble: the share of S · makespan in which stages are idle.
      peak_activations: int64[S], the most forward results, of one virtual stage and microbatch each, that each stage
        holds until the last action that needs them has ended.
    """

    schedule: Schedule
    mode: str
    starts: Float64[np.ndarray, "S A"]
    ends: Float64[np.ndarray, "S A"]
    makespan: float
    bubble: float
    peak_activations: Int64[np.ndarray, " S"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """The actions of every stage in every tick. Where there is nothing to do or no slot, a table has −1.

    At the end of a tick, a stage sends an output to the next stage, or an input gradient to the one before; the first
    and the last stage are neighbours too. The next forward pass of a stage takes the input that arrived last, and its
    next backward pass the gradient. Every stage has as many slots as the stage with the most needs.
    """

    kind: Int32[np.ndarray, "T S"]  # 0 forward pass, 1 backward pass, 2 weight gradients
    microbatch: Int32[np.ndarray, "T S"]
    virtual: Int32[np.ndarray, "T S"]  # which of its virtual stages
    activation_slot: Int32[np.ndarray, "T S"]  # written by a forward pass, read by the other kinds
    output_slot: Int32[np.ndarray, "T S"]  # written by a forward pass of the last part, read by its backward pass
    arriving_input: Int32[np.ndarray, "T S"]  # the microbatch of what arrives from the stage before
    arriving_gradient: Int32[np.ndarray, "T S"]  # and from the next one
    num_activations: int  # of what a forward pass keeps, up to the last action that needs it: W, or else B
    num_outputs: int  # of the model's last part, to the backward pass, which takes its gradient from the loss


def make_schedule(name: ScheduleName, num_stages: int, num_microbatches: int, num_virtual: int = 1) -> Schedule:
    """The schedule of a word of a layout.

    - `"gpipe"`: all forward passes, then all backward passes. A stage holds M activations. The bubble is
      (S − 1) / (M + S − 1), with synchronous ticks too.
    - `"1f1b"`: forward and backward passes in turn. Stage s holds min(M, S − s) activations. The bubble is that of
      GPipe in mode `"mpmd"`.
    - `"eager_1f1b"`: 1F1B for one program: all stages are in forward passes in one tick, and in backward passes in the
      next. Stage s holds min(M, 2 (S − s) − 1) activations. The bubble is that of GPipe with synchronous ticks too.
    - `"interleaved"`: the same with V virtual stages on each stage, in the order of Megatron-LM and PyTorch. Stage s
      holds min(M · V, 2 (S − s − 1) + (V − 1) S + 1) activations of one virtual stage. The bubble is
      (S − 1) / (V M + S − 1), with synchronous ticks too.
    - `"zero_bubble"`: ZB-H1, with weight gradients (W) where 1F1B is idle: stage s computes them s backward passes
      late. It holds min(M, S) activations. With F = B = W and M ≥ S, the bubble is (S − 1) / (3 M + S − 1), with
      synchronous ticks too.

    Args:
      name: the word.
      num_stages: S, at least 1.
      num_microbatches: M, those of one data shard, at least 1; of `"interleaved"` a multiple of S.
      num_virtual: V; 1 for all but `"interleaved"`.

    Returns:
      `Schedule`.

    Raises:
      ValueError: an unknown word; a number below 1; virtual stages without `"interleaved"`; with it, M that is not a
        multiple of S.

    Example:
      >>> make_schedule("gpipe", 4, 8).simulate({"F": 1, "B": 2}).makespan
      33.0

    References:
      Huang et al. 2019, "GPipe". Narayanan et al. 2019, "PipeDream". Lepikhin et al. 2020, "GShard", for one program of
      all stages. Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
      Megatron-LM". Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2.3.
    """
    check_schedule(name, num_stages, num_microbatches, num_virtual)

    def order(s: int, forwards: np.ndarray, backwards: np.ndarray) -> np.ndarray:
        later = num_stages - 1 - s
        more = {"gpipe": num_microbatches, "eager_1f1b": later, "interleaved": (num_virtual - 1) * num_stages + later}
        # The warm-up's forward passes, then forward and backward passes in turn, then the remaining backward passes.
        i, num_warmup = np.arange(len(forwards)), min(later + more.get(name, 0), len(forwards))
        places = np.concatenate([np.maximum(i, 2 * i - num_warmup), 2 * i + num_warmup + 1])
        actions = np.concatenate([forwards, backwards])[np.argsort(places, kind="stable")]
        if name != "zero_bubble":
            return actions
        weights = backwards.copy()
        weights[:, 0] = WEIGHT
        # Weight gradients i follow backward pass i + s, or the last one.
        after = np.flatnonzero(actions[:, 0] == BACKWARD)[np.minimum(i + s, num_microbatches - 1)]
        return np.insert(actions, after + 1, weights, axis=0)

    schedule = schedule_of(name, num_stages, num_microbatches, order, num_virtual)
    if name not in ("eager_1f1b", "interleaved"):
        return schedule
    # Forward pass i of stage s is in tick 2 (i + s), and its backward pass i in tick 2 ((V + 1) S − 2 − s + i) + 1, not
    # counting ticks in which no stage acts. Each receives what was sent in the tick of its kind before.
    is_forward, s = schedule.actions[..., 0] == FORWARD, np.arange(num_stages)[:, None]
    i = np.where(is_forward, np.cumsum(is_forward, axis=1), np.cumsum(~is_forward, axis=1))
    ticks = 2 * i + np.where(is_forward, 2 * s, 2 * ((num_virtual + 1) * num_stages - 2 - s) + 1)
    return dataclasses.replace(schedule, ticks=_freeze(np.unique(ticks, return_inverse=True)[1].reshape(ticks.shape)))


def check_schedule(name: ScheduleName, num_stages: int, num_microbatches: int, num_virtual: int = 1) -> None:
    """Raises ValueError if there is no such schedule."""
    check_choices(schedule=(name, ScheduleName))
    check_at_least_one(num_stages=num_stages, num_microbatches=num_microbatches, num_virtual=num_virtual)
    if num_virtual > 1 and name != "interleaved":
        others = ", ".join(other for other in get_args(ScheduleName) if other != "interleaved")
        raise UserError(
            f"virtual{num_virtual} needs the schedule interleaved, not {name}: {others} have one virtual stage"
        )
    if name == "interleaved" and num_microbatches % num_stages:
        raise UserError(
            f"interleaved needs a multiple of num_stages ({num_stages}) microbatches, not num_microbatches "
            f"({num_microbatches})"
        )


def schedule_of(
    name: str,
    num_stages: int,
    num_microbatches: int,
    order: Callable[[int, np.ndarray, np.ndarray], np.ndarray],
    num_virtual: int = 1,
) -> Schedule:
    """The schedule with `order(s, forwards, backwards)` as the actions of stage s, each in the earliest tick."""
    # With virtual stages, groups of S microbatches go through all of them before the next group does.
    size = num_stages if num_virtual > 1 else num_microbatches
    group, virtual, member = np.indices((num_microbatches // size, num_virtual, size), np.int32).reshape(3, -1)
    microbatch = group * size + member
    forwards = np.stack([np.full_like(virtual, FORWARD), microbatch, virtual], axis=1)
    backwards = np.stack([np.full_like(virtual, BACKWARD), microbatch, num_virtual - 1 - virtual], axis=1)
    actions = np.stack([order(s, forwards, backwards) for s in range(num_stages)])
    ticks = _earliest_starts(_received_from(actions), np.ones(actions.shape[:2]))
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_virtual": num_virtual}
    return Schedule(name=name, **sizes, actions=_freeze(actions), ticks=_freeze(ticks))


def _place_of(actions: Int32[np.ndarray, "S A 3"]) -> Int64[np.ndarray, "kinds S M V"]:
    """The place s · A + a of the action of each kind, stage, microbatch and virtual stage."""
    num_stages, num_actions = actions.shape[:2]
    kind, microbatch, virtual = np.moveaxis(actions, -1, 0)
    place = np.empty((kind.max() + 1, num_stages, microbatch.max() + 1, virtual.max() + 1), np.int64)
    stage = np.arange(num_stages)[:, None]
    place[kind, stage, microbatch, virtual] = stage * num_actions + np.arange(num_actions)
    return place


def _received_from(actions: Int32[np.ndarray, "S A 3"]) -> Int64[np.ndarray, "S A"]:
    """For each action, the place s · A + a of the action whose result it receives over a transfer, or −1."""
    num_stages = len(actions)
    kind, microbatch, virtual = np.moveaxis(actions, -1, 0)
    # One part of the model before for a forward pass, and one after for a backward pass; −1 on both sides of the model.
    part = virtual * num_stages + np.arange(num_stages)[:, None] + np.where(kind == FORWARD, -1, 1)
    is_received = (kind != WEIGHT) & (part >= 0) & (part < num_stages * (virtual.max() + 1))
    part = np.where(is_received, part, 0)
    source = _place_of(actions)[kind, part % num_stages, microbatch, part // num_stages]
    return np.where(is_received, source, -1)


def _earliest_starts(
    received_from: Int64[np.ndarray, "S A"], durations: Float64[np.ndarray, "S A"]
) -> Float64[np.ndarray, "S A"]:
    """When each action starts, if it starts as soon as its stage is free and its input has been computed."""
    num_stages, num_actions = durations.shape
    starts = np.zeros((num_stages, num_actions))
    ends = np.full(num_stages * num_actions, -1.0)  # below 0: not yet known
    num_done, free = [0] * num_stages, [0.0] * num_stages
    while min(num_done) < num_actions:
        num_before = sum(num_done)
        for s in range(num_stages):
            for a in range(num_done[s], num_actions):
                source = received_from[s, a]
                if source >= 0 and ends[source] < 0:
                    break
                starts[s, a] = max(free[s], ends[source] if source >= 0 else 0.0)
                free[s] = ends[s * num_actions + a] = starts[s, a] + durations[s, a]
                num_done[s] += 1
        assert sum(num_done) > num_before, "a schedule deadlocks"
    return starts


def _slots(
    written: Integer[np.ndarray, "S A"], last_read: Integer[np.ndarray, "S A"], where: Bool[np.ndarray, "S A"]
) -> tuple[Int32[np.ndarray, "S A"], int]:
    """A slot for each value, taken in the tick in which it is written, and free from the tick of its last read."""
    slots = np.full(written.shape, -1, np.int32)
    num_slots = 0
    for s in range(len(written)):
        ends: list[int] = []  # of each slot, the tick of the last read of what it holds
        chosen = np.flatnonzero(where[s])
        for a in chosen[np.argsort(written[s, chosen], kind="stable")].tolist():
            slot = next((slot for slot, end in enumerate(ends) if end <= written[s, a]), len(ends))
            ends[slot : slot + 1] = [int(last_read[s, a])]
            slots[s, a] = slot
        num_slots = max(num_slots, len(ends))
    return slots, num_slots


def _freeze(values: np.ndarray) -> np.ndarray:
    array = values.astype(np.int32)
    array.setflags(write=False)
    return array
