"""The arrays of a step: their types, their shapes, the tokens that they hold.

- `batches`: `Batch`, `PackedBatch`, `PairBatch`, and what `compile_buckets` is told of them.
"""

from jvarlen.batches.batches import (
    Batch,
    PackedBatch,
    PairBatch,
    count_tokens,
    full_batch,
    packed_batch_spec,
    pair_batch_spec,
    token_batch_spec,
)

__all__ = [
    "Batch",
    "PackedBatch",
    "PairBatch",
    "count_tokens",
    "full_batch",
    "packed_batch_spec",
    "pair_batch_spec",
    "token_batch_spec",
]
