"""Batch types: the arrays of a step, their shapes, and their token counts.

- `batches`: `Batch`, `PackedBatch`, `PairBatch`, `PackedPairBatch`, and the specs that `compile_buckets` needs.
"""

from jvarlen.batches.batches import (
    Batch,
    PackedBatch,
    PackedPairBatch,
    PairBatch,
    count_tokens,
    full_batch,
    packed_batch_spec,
    packed_pair_batch_spec,
    pair_batch_spec,
    token_batch_spec,
)

__all__ = [
    "Batch",
    "PackedBatch",
    "PackedPairBatch",
    "PairBatch",
    "count_tokens",
    "full_batch",
    "packed_batch_spec",
    "packed_pair_batch_spec",
    "pair_batch_spec",
    "token_batch_spec",
]
