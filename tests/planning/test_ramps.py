"""Batch sizes that grow in stages: when a stage begins, in which step, over epochs and from text."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvarlen import make_plan
from jvarlen.planning import BatchSizeStages
from jvarlen.planning.ramps import read_stages

LENGTHS = np.random.default_rng(0).integers(1, 40, 300)
BUCKETS = [(2, 16), (4, 16), (2, 40)]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=6), st.integers(0, 300))
def test_a_size_holds_from_its_tokens_to_those_of_the_next(stages, tokens_seen):
    starts = np.cumsum([0, *(distance for distance, _ in stages[:-1])]).tolist()
    sizes = [size for _, size in stages]
    [expected] = [
        size
        for start, end, size in zip(starts, [*starts[1:], np.inf], sizes, strict=True)
        if start <= tokens_seen < end
    ]
    assert BatchSizeStages(list(zip(starts, sizes, strict=True)))(7, tokens_seen) == expected


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_stages_begin_at_their_tokens_of_all_epochs_and_no_sample_is_lost(num_microbatches):
    ramp = BatchSizeStages([(0, 3), (4_000, 8), (9_000, 20)])
    first = make_plan(LENGTHS, BUCKETS, sequences_per_step=ramp, order="shuffle", num_microbatches=num_microbatches)
    tokens_seen = 0
    for epoch in range(3):
        plan = first.of_epoch(epoch)
        assert np.bincount(plan.sample_ids, minlength=300).tolist() == [1] * 300
        for step, (num_sequences, num_tokens) in enumerate(zip(plan.num_sequences, plan.num_tokens, strict=True)):
            expected = 3 if tokens_seen < 4_000 else 8 if tokens_seen < 9_000 else 20
            assert num_sequences == expected or (step == plan.num_steps - 1 and num_sequences < expected)
            tokens_seen += num_tokens
    assert tokens_seen == 3 * LENGTHS.sum() > 9_000


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ([], "must be pairs of integers"),
        ([(0, 1, 2)], "must be pairs of integers"),
        ([(0, 1.5)], "must be pairs of integers"),
        ([(5, 8)], "stage 0: starts at 5 tokens, not at 0"),
        (
            [(0, 0), (10, 8), (10, 16), (7, -1)],
            r"stage 0: size 0 .*, stage 2: starts at 10 tokens, not after 10, stage 3: starts at 7 tokens.*size -1",
        ),
    ],
)
def test_impossible_stages_are_all_listed(stages, said):
    with pytest.raises(ValueError, match=said):
        BatchSizeStages(stages)


def test_stages_are_read_from_text_and_shares_are_of_the_run():
    assert read_stages("0:32, 1_000:64", 5).stages == ((0, 32), (1000, 64))
    assert read_stages("0%:1,33.3%:2,50%:3", 1_001).stages == ((0, 1), (334, 2), (501, 3))
    ramp = BatchSizeStages([(0, 32), (1000, 64)])
    assert read_stages(str(ramp), 5) == ramp
    for wrong in ("5", "50:%", "0:0", "100%:8", "1_:8", "7:8_"):  # a stage of 100 % would never come
        with pytest.raises(ValueError, match=f"stages are tokens:size.* such as .*, not '{wrong}', 'x'"):
            read_stages(f"0:1,{wrong},x", 10)
