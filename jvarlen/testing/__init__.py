"""Checks for the tests of users. Each returns, or raises an AssertionError that says why.

- `layouts`: does a model train to the same numbers on any layout?
- `packing`: is a loss the same for packed rows as for padded ones?
- `partition`: is a loss the same for any split of a step?
- `plans`: does every sample come once?
"""

from jvarlen.testing.layouts import assert_layout_invariant
from jvarlen.testing.packing import assert_packing_invariant
from jvarlen.testing.partition import Partition, assert_partition_invariant
from jvarlen.testing.plans import assert_exactly_once

__all__ = [
    "Partition", "assert_exactly_once", "assert_layout_invariant", "assert_packing_invariant",
    "assert_partition_invariant",
]  # fmt: skip
