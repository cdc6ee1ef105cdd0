"""What collectives send, before they run: bytes, rounds and seconds. NumPy only.

Letters: N devices, X bytes, r rounds. Device 0 is the root. In a round, a device sends at most one message and receives
at most one, and all messages are of one size.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_at_least_one, check_at_least_zero
from jvarlen.targets.cluster import Link

__all__ = ["ALGORITHMS", "WireBytes", "check_algorithm", "collective_seconds", "tree_rounds", "wire_bytes"]

ALGORITHMS = {
    "broadcast": ("tree", "star"),
    "reduce": ("tree", "star"),
    "scatter": ("star",),
    "gather": ("star",),
    "all_gather": ("xla", "ring"),
    "reduce_scatter": ("xla", "ring"),
    "all_reduce": ("xla", "ring", "tree", "star", "rs_ag"),
}  # the default of each first


class WireBytes(NamedTuple):
    """What a collective sends.

    Attributes:
      sent: bytes that each device sends, N of them.
      received: bytes that each device receives, N of them.
      busiest: the most bytes that one device sends, or receives.
      rounds: messages that wait for each other.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    busiest: int
    rounds: int


def wire_bytes(kind: str, num_bytes: int, n: int, algorithm: str, *, itemsize: int = 1) -> WireBytes:
    """Bytes that each device sends and receives in a collective, padding included.

    `"xla"` and `"rs_ag"` leave the messages to XLA, and are counted as the ring. A backend may send a dtype as a wider
    one: XLA's CPU backend sends bfloat16 as float32.

    Args:
      kind: the name of a function of `jvarlen.experimental.collectives`.
      num_bytes: X, the bytes of the whole array: for `scatter` the root's, for `gather` and `all_gather` the result,
        otherwise the array of each device.
      n: N, at least 1.
      algorithm: one of that function; `"star"` for `scatter` and `gather`.
      itemsize: bytes of an element. Chunks hold whole elements.

    Returns:
      The counts.

    Raises:
      ValueError: an unknown kind or algorithm, a number out of range, or an itemsize that does not divide X.

    Example:
      >>> wire_bytes("all_reduce", 4_000_000, 4, "ring")
      WireBytes(sent=(6000000, 6000000, 6000000, 6000000), received=(6000000, 6000000, 6000000, 6000000), \
busiest=6000000, rounds=6)
      >>> wire_bytes("all_reduce", 4_000_000, 4, "star").received
      (12000000, 4000000, 4000000, 4000000)

    References:
      Ring: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations". Trees:
      Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH".
    """
    message_bytes = _message_bytes(kind, num_bytes, n, algorithm, itemsize)
    *messages, rounds = _messages(kind, n, algorithm)
    sent, received = (tuple(num * message_bytes for num in each.tolist()) for each in messages)
    return WireBytes(sent, received, max(*sent, *received), rounds)


def collective_seconds(kind: str, num_bytes: int, n: int, algorithm: str, link: Link) -> float:
    """Seconds of a collective between devices that have nothing else to send: r · (latency + message / bandwidth).

    Args:
      kind: as for `wire_bytes`.
      num_bytes: X, as for `wire_bytes`.
      n: N, at least 1.
      algorithm: as for `wire_bytes`.
      link: of every device.

    Returns:
      Seconds. Sums themselves take none.

    Raises:
      ValueError: as `wire_bytes`.

    Example:
      >>> link = Link(bytes_per_second=1e6)
      >>> [collective_seconds("broadcast", 5_000_000, 8, algorithm, link) for algorithm in ("star", "tree")]
      [35.0, 15.0]
    """
    message_bytes = _message_bytes(kind, num_bytes, n, algorithm, itemsize=1)
    _, _, rounds = _messages(kind, n, algorithm)
    return rounds * (link.latency_s + message_bytes / link.bytes_per_second)


def tree_rounds(n: int) -> list[list[tuple[int, int]]]:
    """The messages of a broadcast by a binomial tree: in each round, all devices that have the data send it on.

    Args:
      n: N, at least 1.

    Returns:
      For each of ⌈log₂ N⌉ rounds, pairs of source and target; device 0 is the root. Reversed, they are a reduction.

    Raises:
      ValueError: N is below 1.

    Example:
      >>> tree_rounds(5)
      [[(0, 4)], [(0, 2)], [(0, 1), (2, 3)]]
    """
    check_at_least_one(n=n)
    strides = [1 << k for k in reversed(range((n - 1).bit_length()))]
    return [[(i, i + stride) for i in range(0, n - stride, 2 * stride)] for stride in strides]


def check_algorithm(kind: str, algorithm: str) -> None:
    """Raises ValueError for an unknown collective, or an algorithm that it does not have."""
    if kind not in ALGORITHMS:
        raise UserError(f"kind ({kind!r}) must be one of {', '.join(map(repr, ALGORITHMS))}")
    if algorithm not in ALGORITHMS[kind]:
        raise UserError(f"algorithm ({algorithm!r}) of {kind} must be one of {', '.join(map(repr, ALGORITHMS[kind]))}")


def _message_bytes(kind: str, num_bytes: int, n: int, algorithm: str, itemsize: int) -> int:
    """The size of every message: the whole array, or its N-th part with padding."""
    check_algorithm(kind, algorithm)
    check_at_least_one(n=n, itemsize=itemsize)
    check_at_least_zero(num_bytes=num_bytes)
    if num_bytes % itemsize:
        raise UserError(f"num_bytes ({num_bytes}) must be a multiple of itemsize ({itemsize})")
    is_whole = kind in ("broadcast", "reduce") or (kind == "all_reduce" and algorithm in ("tree", "star"))
    return num_bytes if is_whole else -(-num_bytes // (itemsize * n)) * itemsize


def _messages(kind: str, n: int, algorithm: str) -> tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"], int]:
    """Messages that each device sends and receives, and rounds."""
    if algorithm not in ("tree", "star"):
        rounds = (n - 1) * (2 if kind == "all_reduce" else 1)
        each = np.full(n, rounds, np.int64)
        return each, each, rounds
    pairs = tree_rounds(n) if algorithm == "tree" else [[(0, i)] for i in range(1, n)]
    away, arriving = (np.bincount([pair[end] for each in pairs for pair in each], minlength=n) for end in (0, 1))
    if kind == "all_reduce":  # to the root, and back
        return away + arriving, away + arriving, 2 * len(pairs)
    if kind in ("reduce", "gather"):
        away, arriving = arriving, away
    return away, arriving, len(pairs)
