"""Batch types: the arrays of a step, their shapes, and their token counts.

- `fields`: fields of samples, and the arrays of a batch for a bucket.
- `batches`: `Batch`, `PackedBatch`, `PairBatch`, `PackedPairBatch`, and their specs for a bucket; inputs, targets and
  weights of a loss that predicts the next token; sums over the tokens of each sample.
- `shapes`: the shapes of all buckets and their shardings, which `compile_buckets` needs.
"""

from jvarlen.batches.batches import (
    Batch,
    PackedBatch,
    PackedPairBatch,
    PairBatch,
    StepBatch,
    count_tokens,
    full_batch,
    next_token_targets,
    sample_positions,
    sum_by_sample,
    token_batch_spec,
)
from jvarlen.batches.shapes import BatchShapes, BatchSpec, HasShapes

__all__ = [
    "Batch", "BatchShapes", "BatchSpec", "HasShapes", "PackedBatch", "PackedPairBatch", "PairBatch", "StepBatch",
    "count_tokens", "full_batch", "next_token_targets", "sample_positions", "sum_by_sample", "token_batch_spec",
]  # fmt: skip
