"""Targets of both packages in rows that other collate functions make."""

import numpy as np
import pytest
import torch

import torch_ref
from jvarlen.batches import next_token_targets
from tests.hand_made import packed_batch_of


@pytest.mark.parametrize(
    ("segment_ids", "positions", "targets"),
    [
        ([1, 1, 1, 2, 2, 2, 0, 0], [0, 1, 2, 3, 4, 5, 0, 0], [1, 2, 4, 5]),  # of a collation that counts on in a chunk
        ([1, 1, 1, 1, 1, 1, 0, 0], [0, 1, 2, 0, 1, 2, 0, 0], [1, 2, 4, 5]),  # or numbers no samples
        ([1, 1, 2, 2, 1, 1, 1, 1], [0, 1, 0, 1, 2, 3, 4, 5], [1, 3, 5, 6, 7]),  # or interleaves two
        ([1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 6, 7, 2, 3, 4, 5], [1, 3, 5, 6, 7]),  # rows cut in chunks, reordered
    ],
)
def test_no_target_crosses_what_is_no_neighbour_in_the_text(segment_ids, positions, targets):
    arrays = (np.array([each], np.int32) for each in (np.arange(8), segment_ids, positions))
    microbatch = packed_batch_of(*arrays, (np.array([segment_ids]) > 0) * 1.0, np.float32(2))
    twin = torch_ref.Batch(
        *map(torch.from_numpy, (microbatch.tokens, np.array([8]), microbatch.weights)), 2.0,
        *map(torch.from_numpy, (microbatch.segment_ids, microbatch.positions)),
    )  # fmt: skip
    for found in (next_token_targets(microbatch), torch_ref.next_token_targets(twin)):
        inputs, tokens, weights = map(np.asarray, found)
        assert tokens[weights > 0].tolist() == targets
        assert (inputs[weights > 0] == np.array(targets) - 1).all()
