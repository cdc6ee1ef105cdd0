"""Ways to batch or to pack the same lengths, as table rows with seconds and figures."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from support.timing import best_seconds, digits

LIMIT_S = 20.0  # a call that takes long is not repeated after this

# What is timed, and what then reads its result in the form that is compared.
Work = tuple[Callable[[], Any], Callable[[Any], Any]]


class Lengths(NamedTuple):
    """Lengths to compare on, with the budget of a batch in tokens."""

    name: str
    values: np.ndarray
    max_tokens: int


class Peer(NamedTuple):
    """A way to batch or to pack.

    `found` names what the peer gives, as "module" or "module:name". `work(given, lengths)` takes that and prepares the
    peer's own objects, outside of what is timed.
    """

    name: str
    found: str
    work: Callable[[Any, Lengths], Work]
    is_slow: bool = False


def measure(peers: list[Peer], lengths: Lengths, figures: Callable[[Any], list[str]]) -> list[list[str]]:
    """Rows of a table: name, seconds, ratio to the first peer, figures of the result; or why a peer has none."""
    rows: list[list[str]] = []
    first_s = None
    for peer in peers:
        if importlib.util.find_spec(peer.found.partition(":")[0].partition(".")[0]) is None:
            rows.append([peer.name, "not installed"])
            continue
        try:
            given = pkgutil.resolve_name(peer.found)
        except Exception as error:  # peers of other versions or for other machines raise what they like
            rows.append([peer.name, f"cannot be imported: {error}"])
            continue
        call, read = peer.work(given, lengths)
        seconds, result = best_seconds(call, limit_s=LIMIT_S)
        first_s = first_s or seconds
        rows.append([peer.name, digits(seconds), digits(seconds / first_s), *figures(read(result))])
    num_columns = max(map(len, rows))
    return [row + [""] * (num_columns - len(row)) for row in rows]
