"""Targets of both packages in rows that other collate functions make."""

import numpy as np
import pytest
import torch

import torch_ref
from jvarlen.batches import next_token_targets
from tests.support.hand_made import packed_batch_of


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


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("begin_token", [None, 0])
def test_named_tokens_have_the_targets_of_the_same_tokens_without_names(package, packing, is_pair, begin_token):
    """Those called `tokens`, and of two lengths `target_tokens`."""
    tokens = [np.arange(10 * n, 11 * n) for n in (3, 5, 2, 4)]
    fields = {"source_tokens": "source", "target_tokens": "target"} if is_pair else {"tokens": "length"}
    unnamed = [(each[1:], each) if is_pair else each for each in tokens]
    named = [dict(zip(fields, (each[1:], each) if is_pair else (each,), strict=True)) for each in tokens]
    lengths = [[len(each) - 1, len(each)] if is_pair else len(each) for each in tokens]
    plan = package.make_plan(lengths, max_tokens=30, packing=packing)
    for one, other in zip(package.load(plan, named, fields=fields), package.load(plan, unnamed), strict=True):
        assert isinstance(one, dict)
        found = _targets_of(package)(one, begin_token=begin_token), _targets_of(package)(other, begin_token=begin_token)
        for array, expected in zip(*found, strict=True):
            np.testing.assert_array_equal(array, expected)


def test_a_batch_without_tokens_is_named(package):
    plan = package.make_plan([3, 2], [(2, 3)])
    (batch,) = package.load(plan, [{"frames": np.ones((n, 2))} for n in (3, 2)])
    with pytest.raises(ValueError, match=r"next_token_targets takes .*tokens"):
        _targets_of(package)(batch)


def _targets_of(package):
    return torch_ref.next_token_targets if package is torch_ref else next_token_targets
