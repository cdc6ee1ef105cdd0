"""The communication of a step, from its compiled program.

This module imports no JAX: a saved report can be read on a machine without devices.
"""

from __future__ import annotations

import collections
import itertools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Integer

from jvarlen._common.checks import UserError
from jvarlen._common.terminal import text_table
from jvarlen.estimates.hlo import Collective, groups_along, list_collectives

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jvarlen.compiling.compiled_buckets import CompiledBuckets

__all__ = ["CommunicationEstimate", "Traffic", "communication_of", "estimate_communication"]


class Traffic(NamedTuple):
    """Collectives of one kind over the same mesh axes.

    Attributes:
      kind: as XLA names it, such as `"all-reduce"`.
      axes: along which devices communicate; empty where groups of devices follow no axes.
      times: in a step, loops multiplied out; with stages, in the stage in which they run most often.
      num_bytes: of all arrays that are reduced, gathered or sent in a step.
      wire_bytes: bytes that the device which sends the most sends in a step.
      asynchronous: how many have a start and a done, between which something else may run.
      overlapped: how many have a matrix product or a kernel of attention scheduled between start and done.
    """

    kind: str
    axes: tuple[str, ...]
    times: int
    num_bytes: int
    wire_bytes: int
    asynchronous: int
    overlapped: int


class CommunicationEstimate(tuple[Traffic, ...]):
    """The communication of a step, by kind of collective and mesh axes; `str` is a table."""

    @property
    def wire_bytes(self) -> int:
        """Bytes that the device which sends the most sends in a step, in all collectives."""
        return sum(row.wire_bytes for row in self)

    def cells(self) -> list[list[str]]:
        """The table: a header, and a row for each kind and axes."""
        rows = [[row.kind, ", ".join(row.axes) or "other", *(f"{number:,}" for number in row[2:])] for row in self]
        header = ["collective", "axes", "times a step", "bytes", "sent by a device", "asynchronous", "overlapped"]
        return [header, *rows]

    def __str__(self) -> str:
        return text_table(self.cells(), align="<<>")


def estimate_communication(compiled: CompiledBuckets, bucket: tuple[int, ...] | None) -> CommunicationEstimate:
    """The communication of a step of a bucket, or of a group where steps may have several, from the compiled program.

    Reductions and gathers are counted as rings, which send the fewest bytes; a backend may choose otherwise.

    Args:
      compiled: the result of `compile_buckets`.
      bucket: one of its buckets; None for the update of steps of several groups.

    Returns:
      The estimate; empty on one device.

    Raises:
      ValueError: no such bucket; a program that was read from a file and has no text; or a collective in a loop whose
        turns XLA does not know.
    """
    from jvarlen.parallel.pipeline import branches_of_ticks  # here: it imports JAX

    text = compiled.program_text(bucket)
    ticks = [branches_of_ticks(compiled.shapes, each) for each in compiled.specs if each == bucket]
    return communication_of(text, compiled.mesh, *ticks)


def communication_of(
    program_text: str, mesh: Mesh | None, ticks: Integer[np.ndarray, "T S"] | None = None
) -> CommunicationEstimate:
    """`estimate_communication` for the text of a program on the devices of a mesh, and `branches_of_ticks`."""
    found: dict[tuple[str, tuple[str, ...]], np.ndarray] = {}
    unknown: list[str] = []
    for each in list_collectives(program_text, ticks):
        if each.kind != "collective-permute" and max(map(len, each.groups)) == 1:
            continue  # over single devices, which XLA leaves in programs for CPUs
        if each.times is None:
            unknown.append(f"{each.kind} of {each.num_bytes:,} bytes")
            continue
        axes = () if mesh is None else _axes_of(each.groups, mesh, each.kind)
        figures = np.array([1, each.num_bytes, _wire_bytes(each), each.is_asynchronous, each.products > 0])
        found[each.kind, axes] = found.get((each.kind, axes), 0) + each.times * figures
    if unknown:
        raise UserError(
            f"how often a step communicates is unknown: {', '.join(unknown)} in a loop whose number of turns depends "
            "on values"
        )
    return CommunicationEstimate(Traffic(*key, *figures.tolist()) for key, figures in found.items())


def _wire_bytes(each: Collective) -> int:
    """The bytes that the busiest device sends, each time."""
    if each.kind == "collective-permute":
        sent = collections.Counter(source for source, target in each.groups if source != target)
        return max(sent.values(), default=0) * each.num_bytes
    size: int = len(each.groups[0])
    if each.kind.endswith("all-to-all"):  # all but the part that stays on a device
        return each.num_bytes * (size - 1) // size
    rounds = (size - 1) * (2 if each.kind == "all-reduce" else 1)
    return rounds * -(-each.num_bytes // size)


def _axes_of(groups: tuple[tuple[int, ...], ...], mesh: Mesh, kind: str) -> tuple[str, ...]:
    """The axes of the mesh that these groups follow."""
    shape: tuple[int, ...] = mesh.devices.shape
    devices = np.arange(mesh.devices.size).reshape(shape)
    wide = [dim for dim in range(len(shape)) if shape[dim] > 1]
    for num_axes in range(1, len(wide) + 1):
        for dims in itertools.combinations(wide, num_axes):
            along = {frozenset(group) for group in groups_along(devices, dims)}
            if kind == "collective-permute":
                is_along = all(any({*pair} <= group for group in along) for pair in groups)
            else:
                is_along = along == {frozenset(group) for group in groups}
            if is_along:
                return tuple(mesh.axis_names[dim] for dim in dims)
    return ()
