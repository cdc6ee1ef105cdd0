"""Which microbatch of an asynchronous run is computed next, and which step is applied next: pure bookkeeping.

A step is open from the moment its first microbatch is handed out until it is applied. Let v be the updates applied so
far, and s the bound. A gradient that was computed on version u must be applied while v is at most u + s, so the least
such number of a step's microbatches is its deadline. With the open steps in the order of their deadlines, the i-th of
them, from 0, can be applied at v + i at the earliest. Two rules keep that within every deadline: at most s + 1 steps
are open, and a step that is complete waits while applying it would leave another one without its place. The step with
the earliest deadline never waits, so the run never stalls.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

__all__ = ["Part", "StalenessSchedule"]


class Part(NamedTuple):
    """A microbatch of a step of the plan."""

    step: int
    microbatch: int


@dataclasses.dataclass
class _OpenStep:
    """The versions on which the microbatches of a step are computed, None where not handed out, and how many miss."""

    versions: list[int | None]
    num_missing: int


class StalenessSchedule:
    """The order of an asynchronous run, which calls `next_part`, `arrive` and `next_update` as things happen.

    Args:
      steps: of the plan.
      num_microbatches: M, of every step.
      staleness_bound: the most updates between the parameters of a gradient and its own update; None: any number.

    Attributes:
      version: updates applied so far.
    """

    def __init__(self, steps: range, num_microbatches: int, staleness_bound: int | None):
        self.version = 0
        self._bound = math.inf if staleness_bound is None else staleness_bound
        self._num_microbatches = num_microbatches
        self._parts = (Part(step, i) for step in steps for i in range(num_microbatches))
        self._next = next(self._parts, None)
        self._lost: list[Part] = []
        self._open: dict[int, _OpenStep] = {}
        self._opens_steps = True
        self._complete: list[int] = []  # open steps without missing gradients, in the order of completion

    @property
    def is_done(self) -> bool:
        """Whether every step was applied, or every open one after `open_no_more`."""
        return not self._open and (self._next is None or not self._opens_steps)

    def open_no_more(self) -> None:
        """The run is to end after the steps that are open, which are the first ones of the plan not yet applied."""
        self._opens_steps = False

    def next_part(self) -> Part | None:
        """The microbatch to hand out now, on the current version; None: nothing, until an update or at the end."""
        if self._lost:
            part = self._lost.pop(0)
        elif self._next is None or not (self._next.step in self._open or self._may_open()):
            return None
        else:
            part, self._next = self._next, next(self._parts, None)
        if part.step not in self._open:
            self._open[part.step] = _OpenStep([None] * self._num_microbatches, self._num_microbatches)
        self._open[part.step].versions[part.microbatch] = self.version
        return part

    def lose(self, part: Part) -> None:
        """Its worker died: it will be handed out again."""
        self._open[part.step].versions[part.microbatch] = None
        self._lost = sorted([*self._lost, part])

    def arrive(self, part: Part) -> None:
        """Its gradient has arrived."""
        step = self._open[part.step]
        step.num_missing -= 1
        if not step.num_missing:
            self._complete.append(part.step)

    def next_update(self) -> tuple[int, tuple[int, ...]] | None:
        """The step to apply now, which counts as applied, and the versions of its gradients; None: none may be."""
        for step in self._complete:
            deadlines = sorted(self._deadline(versions) for other, versions in self._open.items() if other != step)
            if all(self.version + 1 + place <= deadline for place, deadline in enumerate(deadlines)):
                self._complete.remove(step)
                self.version += 1
                return step, tuple(version for version in self._open.pop(step).versions if version is not None)
        return None

    def _may_open(self) -> bool:
        return self._opens_steps and len(self._open) <= self._bound

    def _deadline(self, step: _OpenStep) -> float:
        """The last version at which the step can be applied."""
        return min([self.version, *(version for version in step.versions if version is not None)]) + self._bound
