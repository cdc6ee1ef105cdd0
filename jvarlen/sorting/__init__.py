"""A distributed sample sort.

- `shard_sort`, `sharded_rows`: the sort of a shard, rows of processes.
- `sample_sort`: keys sorted over a mesh axis.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen.sorting.sharded_rows import shard_local_rows

__all__ = ["shard_local_rows"]

__getattr__, __dir__ = lazy_imports(__name__)
