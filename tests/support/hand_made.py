"""Batches of arrays made by hand: their rows are numbered, in order."""

import numpy as np

from jvarlen.batches import Batch, PackedBatch


def batch_of(tokens, lengths, weights, num_sequences):
    ids = _numbered(np.asarray(lengths) > 0)
    return Batch(tokens, lengths, weights, num_sequences, ids, ids >= 0)


def packed_batch_of(tokens, segment_ids, positions, weights, num_sequences):
    num_in_row = np.max(segment_ids, axis=-1)[..., None]
    ids = _numbered(np.arange(max(1, np.max(segment_ids))) < num_in_row)
    return PackedBatch(tokens, segment_ids, positions, weights, num_sequences, ids, ids >= 0)


def _numbered(is_real):
    return np.where(is_real, np.cumsum(is_real).reshape(is_real.shape) - 1, -1).astype(np.int32)
