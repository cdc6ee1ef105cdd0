"""Samples that hold a prompt once: their arrays, their parts, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvarlen import load, make_plan
from jvarlen._common.checks import UserError
from jvarlen.data import WeightedTokens, share_prompts

EMPTY = np.zeros(0, int)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(1, 5), min_size=1, max_size=6)), max_size=4),
    room=st.none() | st.integers(0, 30),
)
def test_every_answer_is_in_one_sample_behind_its_prompt(sizes, room):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 99, size) for size, _ in sizes]
    answers = [[rng.integers(0, 99, size) for size in each] for _, each in sizes]
    longest = max((size + max(each) for size, each in sizes), default=1)
    max_length = None if room is None else longest + room
    samples, group_ids = share_prompts(prompts, answers, max_length=max_length)
    found = [[] for _ in prompts]
    for sample, i in zip(samples, group_ids.tolist(), strict=True):
        tokens, numbers, weights = (sample[name] for name in ("tokens", "answer_ids", "weights"))
        assert max_length is None or len(tokens) <= max_length
        size = len(prompts[i])
        if not numbers.any():  # of one answer
            assert tokens[:size].tolist() == prompts[i].tolist()
            found[i].append(tokens[size:].tolist())
            assert weights.tolist() == [0] * size + [1] * (len(tokens) - size)
            continue
        assert tokens[numbers == 0].tolist() == prompts[i][:-1].tolist()
        for number in range(1, numbers.max() + 1):
            first, *answer = tokens[numbers == number].tolist()
            assert first == prompts[i][-1]
            found[i].append(answer)
            assert weights[numbers == number].tolist() == [0] + [1] * len(answer)
        num_tokens = size - 1 + sum(1 + len(answer) for answer in found[i][-numbers.max() :])
        assert len(tokens) == num_tokens
    assert found == [[answer.tolist() for answer in each] for each in answers]
    assert max_length is not None or group_ids.tolist() == list(range(len(prompts)))


def test_further_arrays_lie_along_answers_and_trained_prompts_count_for_each():
    prompt = WeightedTokens([1, 2], [0.5, 0.25])
    answers = [{"tokens": [7, 8], "advantages": np.float32([3, 4])}, {"tokens": [9], "advantages": np.float32([5])}]
    ((sample,), _) = share_prompts([prompt], [answers])
    assert sample["tokens"].tolist() == [1, 2, 7, 8, 2, 9]
    assert sample["advantages"].tolist() == [0, 0, 3, 4, 0, 5]
    assert sample["advantages"].dtype == np.float32
    assert sample["weights"].tolist() == [1, 0.5, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("prompts", "answers", "options", "message"),
    [
        ([[1], EMPTY], [[[1]], [[1]]], {}, "need a token: prompt 1 of 0 has answers of [1]"),
        ([[1]], [[]], {}, "need a token: prompt 0 of 1 has answers of []"),
        ([[1]], [[[1], EMPTY]], {}, "need a token: prompt 0 of 1 has answers of [1, 0]"),
        ([[1]], [], {}, "1 prompts need answers to each, not to 0"),
        ([[1, 2], [3]], [[[1, 2]], [[1]]], {"max_length": 3}, "above max_length (3): prompt 0: 4"),
        ([[1]], [[[1], {"tokens": [1], "old": [0.5]}]], {}, "the same fields, 'old', 'tokens', 'weights': those of pr"),
        ([[1]], [[{"tokens": [1], "old": [0.5, 0.5]}]], {}, "arrays of 1 tokens have as many entries, not old (2,)"),
        (
            [[1]],
            [[{"tokens": [1], "x": np.ones((1, 2))}, {"tokens": [1], "x": [1]}]],
            {},
            "those of prompt 0 have others",
        ),
        ([[1]], [[{"tokens": [1], "answer_ids": [1]}]], {}, "give this field of answers another name"),
        ([[1], {"tokens": [1], "old": [1]}], [[[1]]] * 2, {}, "tokens and weights alone: prompt 1 has 'old'"),
        ([[1]], [[{"old": [0.5, 0.5]}]], {}, "an answer has tokens, not only the fields 'old'"),
    ],
)
def test_what_makes_no_sample_is_listed(prompts, answers, options, message):
    with pytest.raises(UserError) as error:
        share_prompts(prompts, answers, **options)
    assert message in str(error.value)


@pytest.mark.parametrize("options", [{"packing": "best_fit", "overlong": "split"}, {"packing": "wrapped"}])
def test_a_part_of_a_sample_that_begins_within_answers_is_refused(options):
    whole, _ = share_prompts([[1, 2, 3, 4, 5], [6]], [[[7]], [[8, 9], [8]]])
    with pytest.raises(UserError, match="id 1: a part of a sample begins within answers"):
        list(load(make_plan([6, 5], [(1, 4)], order="dataset", **options), whole))
    of_prompts = [sample | {"answer_ids": np.zeros_like(sample["answer_ids"])} for sample in whole]
    assert len(list(load(make_plan([6, 5], [(1, 4)], order="dataset", **options), of_prompts))) >= 3
