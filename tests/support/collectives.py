"""How often a compiled step communicates, by kind of collective."""

from typing import NamedTuple

from jvarlen.estimates.hlo import list_collectives


class Collectives(NamedTuple):
    """How many collectives of one kind a program has."""

    per_step: int
    in_loops: int  # which run once a turn


def count_collectives(executable):
    """The collectives of a compiled program, or of its text."""
    counts = {}
    for each in list_collectives(executable):
        counts.setdefault(each.kind, [0, 0])[each.times != 1] += 1
    return {kind: Collectives(*count) for kind, count in counts.items()}
