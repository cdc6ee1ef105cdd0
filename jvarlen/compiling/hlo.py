"""The collectives of a compiled program: how many there are, and what each of them reduces or sends."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jvarlen._common.checks import UserError

__all__ = ["Collective", "Collectives", "count_collectives", "groups_along", "list_collectives"]

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# `%name (parameters) -> type {` or `ENTRY %name ... {`, and what such a computation holds, to the brace that ends it.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{$(.*?)^\}", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|[a-z_]+_computation)=%?([\w.\-]+)")
_LISTED = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
# `%name = type kind(operands), attributes`. Asynchronous ones have a start and a done, and are one.
_INSTRUCTION = re.compile(rf"^\s*(?:ROOT )?%?\S+ = (.*?) ({'|'.join(_KINDS)})(-start)?\((.*)$", re.MULTILINE)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_LOOP = re.compile(r"\bwhile\(.*?\bbody=%?([\w.\-]+)(.*)$", re.MULTILINE)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_LISTED_GROUPS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_STRIDED_GROUPS = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_GROUPS = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


class Collective(NamedTuple):
    """One collective of a program."""

    kind: str  # as XLA names it, such as "all-reduce"
    num_bytes: int  # of all arrays: an all-reduce's or all-gather's results, a reduce-scatter's operands, or a message
    groups: tuple[tuple[int, ...], ...]  # devices, by their place in the mesh; of permutes, pairs of source and target
    times: int | None  # in a step, loops multiplied out; None where XLA does not know how often a loop runs


class Collectives(NamedTuple):
    """How many collectives of one kind a program has.

    Attributes:
      per_step: collectives that run once a step.
      in_loops: collectives in the body of a loop, which run once a turn.
    """

    per_step: int
    in_loops: int


def count_collectives(executable: jax.stages.Compiled | str) -> dict[str, Collectives]:
    """Counts the collectives of a compiled program."""
    counts = {kind: [0, 0] for kind in _KINDS}
    for _, kind, _, _, times in _instructions(executable):
        counts[kind][times != 1] += 1
    return {kind: Collectives(*count) for kind, count in counts.items() if any(count)}


def list_collectives(executable: jax.stages.Compiled | str) -> list[Collective]:
    """The collectives of a compiled program, one by one."""
    listed = []
    for shapes, kind, start, rest, times in _instructions(executable):
        groups = _groups_of(kind, rest)
        listed.append(Collective(kind, _num_bytes(kind, shapes, bool(start), groups), groups, times))
    return listed


def _instructions(executable: jax.stages.Compiled | str) -> Iterator[tuple[str, str, str, str, int | None]]:
    """Of each collective the shapes of its result, its kind, "-start", its attributes, and its times in a step."""
    text = executable if isinstance(executable, str) else executable.as_text()
    if not text:
        raise UserError("this program has no text: compile it here to count its collectives")
    bodies: dict[str, str] = dict(_COMPUTATION.findall(text))
    times = _times_of(bodies)
    for name, body in bodies.items():
        for found in _INSTRUCTION.findall(body):
            yield *found, times[name]


def _times_of(bodies: dict[str, str]) -> dict[str, int | None]:
    """How often each computation runs in a step; None: unknown. Branches count as if all were taken."""
    turns: dict[tuple[str, str], float] = {}
    callers: dict[str, set[str]] = {name: set() for name in bodies}
    for name, body in bodies.items():
        for called in _called_by(body) & bodies.keys():
            callers[called].add(name)
        for loop, attributes in _LOOP.findall(body):
            found = _TRIP_COUNT.search(attributes)
            turns[name, loop] = int(found[1]) if found else math.nan

    @functools.cache
    def times_of(name: str) -> float:
        if not callers[name]:
            return 1
        return sum(times_of(caller) * turns.get((caller, name), 1) for caller in callers[name])

    return {name: None if math.isnan(times_of(name)) else int(times_of(name)) for name in bodies}


def _num_bytes(kind: str, shapes: str, is_start: bool, groups: tuple[tuple[int, ...], ...]) -> int:
    """Of the whole array, from the shapes of the result."""
    sizes = [_bytes_of(dtype, dims) for dtype, dims in _ARRAY.findall(shapes)]
    if is_start and kind == "collective-permute":
        sizes = sizes[1:2]  # operand, result, and what tells that it is done
    elif is_start and kind == "all-gather":
        sizes = sizes[len(sizes) // 2 :]  # operands, results
    return sum(sizes) * (len(groups[0]) if kind == "reduce-scatter" else 1)


def _bytes_of(dtype: str, dims: str) -> int:
    bits = re.match(r"[a-z]+(\d+)", dtype)  # pred has none, and takes a byte
    return math.prod(map(int, filter(None, dims.split(",")))) * (int(bits[1]) if bits else 8) // 8


def _groups_of(kind: str, attributes: str) -> tuple[tuple[int, ...], ...]:
    listed = (_PAIRS if kind == "collective-permute" else _LISTED_GROUPS).search(attributes)
    if listed and listed[1]:
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if found := _STRIDED_GROUPS.search(attributes):
        return _rows(_numbered(found[3], found[4]).reshape(int(found[1]), int(found[2])))
    if found := _MESH_GROUPS.search(attributes):
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
        sizes = list(axes.values())
        devices = _numbered(found[2], found[3]) if found[2] else np.arange(math.prod(sizes))
        along = [list(axes).index(name) for name in re.findall(r"'([^']+)'", found[4])]
        return groups_along(devices.reshape(sizes), along)
    raise UserError(f"the devices of this {kind} are told in an unknown form: {attributes[:200]}")


def _numbered(sizes: str, transposed: str | None) -> np.ndarray:
    """Devices by number, in such an array."""
    shape = list(map(int, sizes.split(",")))
    devices = np.arange(math.prod(shape)).reshape(shape)
    return devices.transpose(list(map(int, transposed.split(",")))) if transposed else devices


def groups_along(devices: np.ndarray, dims: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The devices of a mesh that differ along these dimensions alone, group by group."""
    moved = np.moveaxis(devices, dims, range(-len(dims), 0))
    return _rows(moved.reshape(-1, math.prod(devices.shape[dim] for dim in dims)))


def _rows(devices: np.ndarray) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, devices.tolist()))


def _called_by(body: str) -> set[str]:
    listed = {name.strip().lstrip("%") for names in _LISTED.findall(body) for name in names.split(",")}
    return listed | set(_CALLED.findall(body))
