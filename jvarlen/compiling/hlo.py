"""Counts the collectives of a compiled program.

Accumulation must communicate once a step, not once a microbatch: no all-reduce may be inside a loop.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import jax

from jvarlen._common.checks import UserError

__all__ = ["Collectives", "count_collectives"]

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
# `%name (parameters) -> type {` or `ENTRY %name ... {`, and what such a computation holds, to the brace that ends it.
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{$(.*?)^\}", re.MULTILINE | re.DOTALL)
_CALLED = re.compile(r"(?:body|condition|to_apply|calls|[a-z_]+_computation)=%?([\w.\-]+)")
_LISTED = re.compile(r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}")
_LOOP_BODY = re.compile(r"\bwhile\(.*?\bbody=%?([\w.\-]+)")
# Asynchronous ones have a start and a done, and are one.
_COLLECTIVE = re.compile(rf"\b({'|'.join(_KINDS)})(?:-start)?\(")


class Collectives(NamedTuple):
    """How many collectives of one kind a program has.

    Attributes:
      per_step: collectives that run once a step.
      in_loops: collectives in the body of a loop, which run once an iteration.
    """

    per_step: int
    in_loops: int


def count_collectives(executable: jax.stages.Compiled | str) -> dict[str, Collectives]:
    """Counts the collectives of a compiled program.

    Args:
      executable: the result of `jax.jit(...).lower(...).compile()`, or its text in XLA's HLO. One that was read from a
        saved set may have no text.

    Returns:
      `Collectives` by kind (`"all-reduce"`, `"all-gather"`, …); kinds that do not occur are left out. A collective over
      several arrays counts once.

    Raises:
      ValueError: the program has no text.

    Example:
      >>> count_collectives(jax.jit(lambda x: x + 1).lower(1.0).compile())
      {}
    """
    text = executable if isinstance(executable, str) else executable.as_text()
    if not text:
        raise UserError("this program has no text: compile it here to count its collectives")
    bodies = dict(_COMPUTATION.findall(text))
    calls = {name: _called_by(body) & bodies.keys() for name, body in bodies.items()}
    looping = _reachable({name for body in bodies.values() for name in _LOOP_BODY.findall(body)}, calls)
    counts = {kind: [0, 0] for kind in _KINDS}
    for name, body in bodies.items():
        for kind in _COLLECTIVE.findall(body):
            counts[kind][name in looping] += 1
    return {kind: Collectives(*count) for kind, count in counts.items() if any(count)}


def _called_by(body: str) -> set[str]:
    listed = {name.strip().lstrip("%") for names in _LISTED.findall(body) for name in names.split(",")}
    return listed | set(_CALLED.findall(body))


def _reachable(names: set[str], calls: dict[str, set[str]]) -> set[str]:
    """These computations and all that they call, directly or not."""
    reached: set[str] = set()
    found = names & calls.keys()
    while found:
        reached |= found
        found = {called for name in found for called in calls[name]} - reached
    return reached
