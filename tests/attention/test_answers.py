"""Answers behind the prompt they share: the numbers of rows in which each has the prompt to itself."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen._common.answers import find_answers
from jvarlen._common.checks import UserError
from jvarlen.attention import attend, attention, splash, triton
from tests.attention.inputs import random_qkv
from tests.attention.reference import attend_one_by_one

# The tokens of a prompt and of its answers, sample by sample; 0 answers: an ordinary sample; a prompt of 0 tokens.
ROWS = [[(9, [4, 1, 6]), (5, []), (0, [3, 4]), (6, [7])], [(2, [12, 12, 2, 1])]]
LENGTH = 64


def ids_of(rows, length):
    """The ids of samples and of answers."""
    segments, answers = np.zeros((2, len(rows), length), np.int32)
    for row, samples in enumerate(rows):
        end = 0
        for segment, (prompt, parts) in enumerate(samples, start=1):
            for answer, size in enumerate([prompt, *parts]):
                segments[row, end : end + size], answers[row, end : end + size] = segment, answer
                end += size
    return segments, answers


def positions_of(rows, length):
    """The position of each token in its own prompt and answer."""
    positions = np.zeros((len(rows), length), int)
    for row, samples in enumerate(rows):
        found = [
            place
            for prompt, parts in samples
            for place in [*range(prompt), *(place for size in parts for place in range(prompt, prompt + size))]
        ]
        positions[row, : len(found)] = found
    return positions


def rule_of(rows, length, window=None):
    """Which keys a query sees, in the words of the documentation."""
    segments, answers = ids_of(rows, length)
    positions = positions_of(rows, length)

    def sees(row, i, j):
        is_of_sample = segments[row, i] != 0 and segments[row, i] == segments[row, j] and j <= i
        is_of_both = answers[row, j] in (0, answers[row, i])
        return is_of_sample and is_of_both and (not window or positions[row, i] - positions[row, j] < window)

    return sees


def results(rows, length, arrays, **options):
    """The output and the gradients of its sum, weighted."""
    segments, answers = map(jnp.asarray, ids_of(rows, length))

    def total(query, key, value, weights):
        output = attend(query, key, value, segment_ids=segments, answer_ids=answers, **options)
        return jnp.vdot(output, weights), output

    (_, output), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return output, *grads


@pytest.mark.parametrize("implementation", ["xla", "blocks"])
@pytest.mark.parametrize("window", [None, 3, "data"])
def test_outputs_and_gradients_are_those_of_the_definition(implementation, window, monkeypatch):
    arrays = random_qkv(2, LENGTH)
    expected = attend_one_by_one(*arrays, rule_of(ROWS, LENGTH, 5 if window == "data" else window))
    with jax.enable_x64(True):
        window = jnp.int32(5) if window == "data" else window
        monkeypatch.setattr("jvarlen.attention.blocks.BLOCK", 8)
        found = results(ROWS, LENGTH, arrays, implementation=implementation, window=window)
    for one, other in zip(found, [expected[0], *expected[1]], strict=True):
        assert one.dtype == np.float64
        np.testing.assert_allclose(one, other, atol=1e-12)


@settings(max_examples=15)
@given(
    samples=st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(1, 6), max_size=4)), max_size=4),
    window=st.none() | st.integers(1, 12),
)
def test_random_rows_in_blocks_see_what_the_definition_says(samples, window):
    length = 9 * 4 + 6 * 16
    arrays = random_qkv(1, length, heads=1, kv_heads=1, size=2)
    expected = attend_one_by_one(*arrays, rule_of([samples], length, window))
    with jax.enable_x64(True):
        ids = map(jnp.asarray, ids_of([samples], length))
        found = blocks_of(length, window is not None)(*arrays, *ids, jnp.int32(window or 0))
    for one, other in zip(found, [expected[0], *expected[1]], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)


@functools.cache
def blocks_of(length, has_window):
    del length

    @jax.jit
    def run(query, key, value, weights, segments, answers, window):
        def output(*qkv):
            options = {"window": window} if has_window else {}
            return attend(*qkv, segment_ids=segments, answer_ids=answers, implementation="blocks", **options)

        outputs, vjp = jax.vjp(output, query, key, value)
        return outputs, *vjp(weights)

    return run


@pytest.mark.parametrize("name", ["triton", "splash"])
@pytest.mark.parametrize("window", [None, 40])
def test_interpreted_kernels_give_the_numbers_of_the_definition(name, window, monkeypatch):
    monkeypatch.setattr(splash, "_LARGEST_BLOCK", 128)
    rows, length = [[(70, [66, 3, 129]), (20, []), (30, [50, 7])], [(1, [100, 1])]], 400
    module = {"triton": triton, "splash": splash}[name]
    interpreted = {f: functools.partial(getattr(module, f), interpret=True) for f in ("forward", "backward")}
    monkeypatch.setattr(attention, "_module", lambda _: SimpleNamespace(supports=module.supports, **interpreted))
    for function in interpreted:  # without programs that other tests may share
        monkeypatch.setattr(attention, function, getattr(attention, function).__wrapped__)
    arrays = [x.astype(np.float32) for x in random_qkv(2, length, heads=2, kv_heads=1, size=16)]
    expected = attend_one_by_one(*arrays, rule_of(rows, length, window))
    found = results(rows, length, arrays, window=window, implementation=name)
    for one, other in zip(found, [expected[0], *expected[1]], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-5)


def test_a_block_of_an_answer_meets_no_other_answer():
    """What is not a number there would be in the sums, whatever the mask."""
    rows, block = [[(64, [64, 64, 64])]], 64
    arrays = random_qkv(1, 256)
    with jax.enable_x64(True):
        expected = results(rows, 256, arrays, implementation="blocks")
        poisoned = [x.copy() for x in arrays]
        for x in poisoned[1:3]:
            x[:, 2 * block : 3 * block] = np.nan
        found = results(rows, 256, poisoned, implementation="blocks")
    others = np.delete(np.arange(256), np.s_[2 * block : 3 * block])
    np.testing.assert_array_equal(found[0][:, others], expected[0][:, others])


@pytest.mark.parametrize("is_traced", [True, False])
def test_segments_ascend_and_shifts_lead_back_to_the_prompt(is_traced):
    segments, answers = ids_of(ROWS, LENGTH)
    given = map(jnp.asarray, (segments, answers)) if is_traced else (segments, answers)
    found = find_answers(*given)
    assert np.all(np.diff(np.where(segments, found.segment_ids, 99), axis=1) >= 0)
    starts = np.array([[np.argmax(row == own) for own in row] for row in segments])
    places = np.arange(LENGTH) - starts - found.shifts
    np.testing.assert_array_equal(np.where(segments, places, 0), positions_of(ROWS, LENGTH))


def test_what_answers_cannot_be_told_of_is_refused_by_name():
    query, key, value, _ = map(jnp.asarray, random_qkv(1, 8))
    ids = jnp.ones((1, 8), jnp.int32)
    told = functools.partial(attend, query, key, value, segment_ids=ids, answer_ids=ids)
    for options in ({"causal": False}, {"query_offset": 1}, {"key_segment_ids": ids + 0}):
        with pytest.raises(UserError, match="answer_ids= are for causal attention of a row to itself"):
            told(**options)
    with pytest.raises(UserError, match="cuDNN supports no answer_ids="):
        told(implementation="cudnn")
    with pytest.raises(UserError, match=r"answer_ids= must be integers of shape \[1, 8\]"):
        attend(query, key, value, segment_ids=ids, answer_ids=ids[:, :7])
