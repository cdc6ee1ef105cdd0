"""What a program that moves all stages of a pipeline in ticks reads: actions, transfers and buffer slots. NumPy only.

Letters: S stages, A actions of a stage, T ticks. In a tick, a stage does at most one action. At the end of the tick it
sends the output of a forward pass to the next stage, or the input gradient of a backward pass to the stage before; the
first and the last stage are neighbours too. What arrives is stored after the action.
"""

from __future__ import annotations

import dataclasses
import heapq
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from jvarlen.distributed.layout import ScheduleName

__all__ = [
    "BACKWARD", "FORWARD", "KINDS", "WEIGHT", "BufferSlots", "Tables", "buffer_slots", "place_of_actions", "tables_of",
]  # fmt: skip

FORWARD, BACKWARD, WEIGHT = range(3)
KINDS = "FBW"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """What every stage does in every tick. Where there is nothing to do or no slot, a table has −1.

    Every stage has three buffers. `inputs` holds a stage's input from its arrival to the forward pass. `activations`
    holds what a forward pass keeps, up to the last action that needs it: W, or B in schedules without W. `gradients`
    holds an output gradient from its arrival up to that action. The first part of the model takes its input from the
    microbatch, and the last part its gradient from the loss, so neither has a slot for it. Within a tick, a slot is
    read before what arrives is stored.

    Attributes:
      kind: int32[T, S]: 0 forward pass, 1 backward pass, 2 weight gradients.
      microbatch: int32[T, S].
      chunk: int32[T, S].
      slice: int32[T, S].
      activation_slot: int32[T, S]: written by a forward pass, read by the other kinds.
      input_slot: int32[T, S]: read by a forward pass.
      gradient_slot: int32[T, S]: read by the other kinds.
      sends_output: bool[T, S]: whether the stage sends to the next one at the end of the tick.
      sends_gradient: bool[T, S]: whether it sends to the one before.
      arriving_input_slot: int32[T, S]: where the stage stores what arrives from the one before.
      arriving_gradient_slot: int32[T, S]: where it stores what arrives from the next one.
      num_inputs: slots of `inputs`; as many as the stage with the most needs.
      num_activations: slots of `activations`.
      num_gradients: slots of `gradients`.
    """

    kind: Int32[np.ndarray, "T S"]
    microbatch: Int32[np.ndarray, "T S"]
    chunk: Int32[np.ndarray, "T S"]
    slice: Int32[np.ndarray, "T S"]
    activation_slot: Int32[np.ndarray, "T S"]
    input_slot: Int32[np.ndarray, "T S"]
    gradient_slot: Int32[np.ndarray, "T S"]
    sends_output: Bool[np.ndarray, "T S"]
    sends_gradient: Bool[np.ndarray, "T S"]
    arriving_input_slot: Int32[np.ndarray, "T S"]
    arriving_gradient_slot: Int32[np.ndarray, "T S"]
    num_inputs: int
    num_activations: int
    num_gradients: int


def tables_of(
    actions: Int32[np.ndarray, "S A 4"], ticks: Int32[np.ndarray, "S A"], received_from: Int64[np.ndarray, "S A"]
) -> Tables:
    """The tables of a schedule.

    Args:
      actions: kind, microbatch, chunk and slice of each action.
      ticks: of each action, in rising order on every stage.
      received_from: the place s · A + a of the action whose result an action receives, or −1.

    Returns:
      The tables.
    """
    num_stages = len(ticks)
    shape = int(ticks.max()) + 1, num_stages
    stage = np.broadcast_to(np.arange(num_stages)[:, None], ticks.shape)
    kind = actions[..., 0]
    place = place_of_actions(actions)
    _, microbatch, chunk, slice_index = np.moveaxis(actions, -1, 0)

    def tick_of(wanted: int) -> Int32[np.ndarray, "S A"]:
        """The tick of the action of another kind for the same stage, microbatch, chunk and slice."""
        return ticks.ravel()[place[wanted, stage, microbatch, chunk, slice_index]]

    of_forward, of_last = tick_of(FORWARD), tick_of(int(kind.max()))
    source_tick = np.where(received_from >= 0, ticks.ravel()[received_from], -1)

    def table(values: np.ndarray, where: np.ndarray, at: np.ndarray = ticks) -> Int32[np.ndarray, "T S"]:
        filled = np.full(shape, -1, np.int32)
        filled[at[where], stage[where]] = values[where]
        return filled

    every = np.ones(ticks.shape, bool)
    is_forward = kind == FORWARD
    takes_input, takes_gradient = ((kind == each) & (received_from >= 0) for each in (FORWARD, BACKWARD))
    activations, num_activations = _slots(of_forward, of_last, is_forward)
    inputs, num_inputs = _slots(source_tick, ticks, takes_input)
    gradients, num_gradients = _slots(source_tick, of_last, takes_gradient)

    def as_of(slots: np.ndarray, owner: int) -> np.ndarray:
        """The slots of the actions of kind `owner`, for all actions on the same thing."""
        return slots.ravel()[place[owner, stage, microbatch, chunk, slice_index]]

    is_sent = np.isin(np.arange(ticks.size).reshape(ticks.shape), received_from)
    return Tables(
        kind=table(kind, every),
        microbatch=table(microbatch, every),
        chunk=table(chunk, every),
        slice=table(slice_index, every),
        activation_slot=table(as_of(activations, FORWARD), every),
        input_slot=table(inputs, takes_input),
        gradient_slot=table(as_of(gradients, BACKWARD), ~is_forward),
        sends_output=table(is_sent, is_forward) == 1,
        sends_gradient=table(is_sent, kind == BACKWARD) == 1,
        arriving_input_slot=table(inputs, takes_input, source_tick),
        arriving_gradient_slot=table(gradients, takes_gradient, source_tick),
        num_inputs=num_inputs,
        num_activations=num_activations,
        num_gradients=num_gradients,
    )


class BufferSlots(NamedTuple):
    """How many of each a stage holds, by buffer of the program; integers, or arrays of several schedules.

    Attributes:
      inputs: inputs that arrive.
      kept: what forward passes keep, and what backward passes hand on to weight gradients.
      outputs: of the last part; only where residuals are kept.
      gradients: output gradients that arrive.
    """

    inputs: Any
    kept: Any
    outputs: Any
    gradients: Any


def buffer_slots(name: ScheduleName, num_stages: Any, num_microbatches: Any, num_chunks: Any = 1) -> BufferSlots:
    """The slots of the buffers of a schedule, without its tables; at most one more of `inputs` and `gradients`.

    Args:
      name: a word of `Layout`.
      num_stages: S, at least 2; an integer, or an array of several schedules.
      num_microbatches: M; likewise.
      num_chunks: V; likewise.

    Returns:
      `BufferSlots` of int64, of the shape that the numbers broadcast to.

    Example:
      >>> tuple(map(int, buffer_slots("1f1b", 4, 16)))
      (1, 4, 1, 1)
    """
    s, m, v = np.asarray(num_stages), np.asarray(num_microbatches), np.asarray(num_chunks)
    one = np.ones(np.broadcast_shapes(s.shape, m.shape, v.shape), np.int64)
    if name == "interleaved":
        kept = np.where(m > s, (v + 1) * s - 1, v * s)
        return BufferSlots(2 * one, kept, np.minimum(m // s, s * (v - 1) + 1), np.maximum(2, (s + 1) // 2))
    most = {"gpipe": m, "1f1b": s, "eager_1f1b": 2 * s - 1, "zero_bubble": s}[name]
    kept = np.minimum(most, m) * one
    outputs = kept if name in ("gpipe", "zero_bubble") else one
    return BufferSlots(one, kept, outputs, np.maximum(1, np.minimum(s - 1, m)) * one if name == "zero_bubble" else one)


def place_of_actions(actions: Int32[np.ndarray, "S A 4"]) -> Int64[np.ndarray, "kinds S M V K"]:
    """The place s · A + a of the action of each kind, stage, microbatch, chunk and slice."""
    num_stages, num_actions = actions.shape[:2]
    kind, microbatch, chunk, slice_index = np.moveaxis(actions, -1, 0)
    sizes = [int(each.max()) + 1 for each in (kind, microbatch, chunk, slice_index)]
    place = np.empty((sizes[0], num_stages, *sizes[1:]), np.int64)
    stage = np.arange(num_stages)[:, None]
    place[kind, stage, microbatch, chunk, slice_index] = np.arange(stage.size * num_actions).reshape(num_stages, -1)
    return place


def _slots(
    written: Integer[np.ndarray, "S A"], last_read: Integer[np.ndarray, "S A"], where: Bool[np.ndarray, "S A"]
) -> tuple[Int32[np.ndarray, "S A"], int]:
    """A slot for each value, taken in the tick in which it is written, and free from the tick of its last read."""
    slots = np.full(written.shape, -1, np.int32)
    num_slots = 0
    for s in range(len(written)):
        free: list[int] = []
        in_use: list[tuple[int, int]] = []  # tick of the last read, slot
        num_of_stage = 0
        chosen = np.flatnonzero(where[s])
        for a in chosen[np.argsort(written[s, chosen], kind="stable")].tolist():
            while in_use and in_use[0][0] <= written[s, a]:
                heapq.heappush(free, heapq.heappop(in_use)[1])
            if not free:
                heapq.heappush(free, num_of_stage)
                num_of_stage += 1
            slots[s, a] = heapq.heappop(free)
            heapq.heappush(in_use, (int(last_read[s, a]), int(slots[s, a])))
        num_slots = max(num_slots, num_of_stage)
    return slots, num_slots
