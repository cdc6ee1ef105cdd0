"""One `.npy` file of a sorted array, written by many processes, and a file of lengths, sorted by all devices.

- `write`: writes the result of `sample_sort` to one file.
- `balance`: how even a sort is, and what it sends. `command`, `__main__`: its command line.
"""

from jvarlen.experimental.ordered_file.balance import (
    ExchangeVolume,
    ShardBalance,
    balance_table,
    exchange_volume,
    shard_balance,
)
from jvarlen.experimental.ordered_file.write import write_ordered

__all__ = ["ExchangeVolume", "ShardBalance", "balance_table", "exchange_volume", "shard_balance", "write_ordered"]
