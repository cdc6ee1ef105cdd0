"""What the host of a GPU launches in a step, one by one and as CUDA graphs."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from jvarlen.targets.dump import Dump

__all__ = ["Launches", "count_launches"]

# `  012: kCopy [prev=… | next=…] …`, by its indent inside of what holds it; and the parts of a loop.
_LINE = re.compile(r"^( *)0*(\d+): k(\w+)|^ *(condition|body):$", re.MULTILINE)
_NAMED = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
_TURNS = re.compile(r'^\s*(?:ROOT )?%?(\S+) = .* while\(.*"known_trip_count":\{"n":"(\d+)"', re.MULTILINE)
_COLLECTIVE = re.compile(r"(?:Nvshmem)?(?:All|Collective|Ragged|Recv|ReduceScatter|Send)")
_COPY = re.compile(r"\w*(?:Copy|Mem)")
_NO_LAUNCH = re.compile(r"AsyncStart|DynamicSliceFusion|Group|Sequential|WaitForStreams|\w*Done")  # hold some, or wait


class Launches(NamedTuple):
    """What the host of a GPU launches in a step, loops multiplied out.

    Attributes:
      kernels: outside of CUDA graphs, one by one.
      copies: likewise, with fills.
      collectives: likewise.
      graphs: CUDA graphs (command buffers of XLA), each time that one is launched.
    """

    kernels: int
    copies: int
    collectives: int
    graphs: int


def count_launches(dump: Dump) -> Launches | None:
    """Counts what the host launches in a step; None for TPUs and CPUs, and with branches or unknown turns."""
    names = {number: name for name, number in _NAMED.findall(dump.launch_names)}
    turns = {name: int(number) for name, number in _TURNS.findall(dump.program)}
    counts: Counter[str] = Counter()
    outer = [(-1, 1)]  # indents of what holds the next line, and how often a step runs that
    is_condition = False  # of a loop whose turns are known: not run
    lines = _LINE.findall(dump.launches)
    for indent, number, kind, part in lines:
        if part or is_condition:
            is_condition = part == "condition" if part else is_condition
            continue
        while outer[-1][0] >= len(indent):
            outer.pop()
        times = outer[-1][1]
        if kind == "CommandBuffer":
            counts["graphs"] += times
            times = 0
        elif kind == "While" and times:
            if (of_loop := turns.get(names.get(number, ""))) is None:
                return None
            times *= of_loop
        elif kind == "Conditional" and times:
            return None
        elif kind != "While" and not _NO_LAUNCH.match(kind):
            what = "collectives" if _COLLECTIVE.match(kind) else "copies" if _COPY.match(kind) else "kernels"
            counts[what] += times
        outer.append((len(indent), times))
    return Launches(*(counts[name] for name in Launches._fields)) if lines else None
