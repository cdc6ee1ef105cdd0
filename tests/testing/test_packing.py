"""`assert_packing_invariant`: losses that keep samples apart pass, and each way to mix them is found and named."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen.attention import attend, padding_mask, segment_mask
from jvarlen.batches import PackedBatch, next_token_targets
from jvarlen.data import WeightedTokens
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.testing import assert_packing_invariant

V, D = 11, 4
RNG = np.random.default_rng(0)
SAMPLES = [RNG.integers(0, V, n) for n in (5, 3, 6, 2, 4)]
PAIRS = [(RNG.integers(0, V, n), sample) for n, sample in zip((2, 6, 3, 4, 1), SAMPLES, strict=True)]
SHAPES = {"embed": (V, D), "places": (32, D), "query": (D, D), "key": (D, D), "recur": (D, D), "head": (D, V)}
PARAMS = {name: RNG.normal(size=shape) for name, shape in SHAPES.items()}


def summed(logits, targets, weights):
    return (optax.softmax_cross_entropy_with_integer_labels(logits, targets) * weights).sum(), weights.sum()


def positions_of(microbatch):
    if isinstance(microbatch, PackedBatch):
        return microbatch.positions
    return jnp.broadcast_to(jnp.arange(microbatch.tokens.shape[1]), microbatch.tokens.shape)


def attended(params, x, microbatch, *, across=False, causal=True):
    query, key, value = ((x @ params[name])[:, :, None] for name in ("query", "key", "recur"))
    is_packed = isinstance(microbatch, PackedBatch)
    if is_packed and not across and causal:
        return x + attend(query, key, value, segment_ids=microbatch.segment_ids)[:, :, 0]
    segment_ids = microbatch.segment_ids if is_packed else padding_mask(microbatch.lengths, x.shape[1]).astype(int)
    if across or causal:
        return x + attend(query, key, value, lengths=(segment_ids > 0).sum(axis=1))[:, :, 0]
    mask = segment_mask(segment_ids, segment_ids, causal=False)
    scores = jnp.einsum("btk,bsk->bts", query[:, :, 0], key[:, :, 0])
    return x + jax.nn.softmax(jnp.where(mask, scores, -1e30)) @ value[:, :, 0]


def transformer(params, microbatch, *, targets=next_token_targets, across=False, causal=True, reset=True):
    inputs, next_tokens, weights = targets(microbatch)
    positions = positions_of(microbatch) if reset else jnp.arange(inputs.shape[1])
    x = params["embed"][inputs] + params["places"][positions]
    return summed(attended(params, x, microbatch, across=across, causal=causal) @ params["head"], next_tokens, weights)


def across_samples(microbatch):
    """The shift of padded rows, with the shape of the tokens."""
    return microbatch.tokens, *(jnp.pad(a[:, 1:], ((0, 0), (0, 1))) for a in (microbatch.tokens, microbatch.weights))


def recurrent(params, microbatch, *, reset):
    """In the style of Equinox: a plain function of one row, a scan of it, and vmap over the rows."""
    inputs, targets, weights = next_token_targets(microbatch)

    def logits_of_row(tokens_T, positions_T):
        def cell(state_D, token_and_position):
            token, position = token_and_position
            state_D = jnp.where((position == 0) & reset, 0, state_D)
            state_D = jnp.tanh(state_D @ params["recur"] + params["embed"][token])
            return state_D, state_D @ params["head"]

        return jax.lax.scan(cell, jnp.zeros(D), (tokens_T, positions_T))[1]

    return summed(jax.vmap(logits_of_row)(inputs, positions_of(microbatch)), targets, weights)


def mean_of_each_row(params, microbatch):
    loss_sum, weight_sum = transformer(params, microbatch)
    return loss_sum + len(microbatch.tokens) * params["head"].sum(), weight_sum


@pytest.mark.parametrize(
    "loss_fn",
    [functools.partial(transformer, causal=False), functools.partial(recurrent, reset=True)],
    ids=["attention", "recurrent"],
)
def test_a_loss_that_keeps_samples_apart_passes(loss_fn):
    assert_packing_invariant(loss_fn, PARAMS, SAMPLES)


def test_few_samples_share_one_row():
    assert_packing_invariant(transformer, PARAMS, SAMPLES[:2])


def test_the_built_in_model_passes():
    config = DecoderConfig(num_layers=1, width=8, num_heads=2, vocab_size=V)
    params = jax.tree.map(lambda leaf: leaf * 5, init_params(config, seed=0))
    weighted = [WeightedTokens(sample, np.arange(len(sample)) % 3) for sample in SAMPLES]
    assert_packing_invariant(make_loss_fn(config), params, weighted)


@pytest.mark.parametrize(
    ("loss_fn", "differs"),
    [
        (functools.partial(transformer, targets=across_samples), "weight_sum is 18, not 15"),
        (functools.partial(transformer, across=True), "loss_sum is"),
        (functools.partial(transformer, reset=False), "loss_sum is"),
        (functools.partial(recurrent, reset=False), "loss_sum is"),
        (mean_of_each_row, "loss_sum is"),
    ],
    ids=["targets", "attention", "positions", "state", "term a row"],
)
def test_a_loss_that_mixes_samples_fails_and_says_what_differs(loss_fn, differs):
    message = rf"(?s)packed rows differ from padded ones by more than 1e-12 relative: .*{differs}.*\nlikely: targets"
    with pytest.raises(AssertionError, match=message):
        assert_packing_invariant(loss_fn, PARAMS, SAMPLES)


def translation(params, microbatch, *, across=False):
    inputs, targets, weights = next_token_targets(microbatch, begin_token=0)
    if hasattr(microbatch, "source_segment_ids"):
        mask = segment_mask(microbatch.target_segment_ids, microbatch.source_segment_ids, causal=False)
        mask |= across & (microbatch.source_segment_ids > 0)[:, None, :]
    else:
        mask = padding_mask(microbatch.source_lengths, microbatch.source_tokens.shape[1])[:, None, :]
    source, x = params["embed"][microbatch.source_tokens], params["embed"][inputs]
    scores = jnp.where(mask, jnp.einsum("bud,bsd->bus", x @ params["query"], source @ params["key"]), -1e30)
    return summed((x + jax.nn.softmax(scores) @ source) @ params["head"], targets, weights)


def test_pairs_are_compared_too():
    named = collections.namedtuple("named", "source target")
    assert_packing_invariant(translation, PARAMS, [named(*pair) for pair in PAIRS])
    with pytest.raises(AssertionError, match=r"(?s)packed rows differ.*segment_ids"):
        assert_packing_invariant(functools.partial(translation, across=True), PARAMS, PAIRS)


def test_a_loss_for_packed_rows_alone_is_compared_with_a_sample_in_each():
    def loss_fn(params, microbatch, *, across=False):
        inputs, targets, weights = next_token_targets(microbatch)
        segment_ids = jnp.minimum(microbatch.segment_ids, 1) if across else microbatch.segment_ids
        x = params["embed"][inputs] + params["places"][microbatch.positions]
        return summed(
            attended(params, x, microbatch._replace(segment_ids=segment_ids)) @ params["head"], targets, weights
        )

    assert_packing_invariant(loss_fn, PARAMS, SAMPLES)
    with pytest.raises(AssertionError, match="packed rows differ"):
        assert_packing_invariant(functools.partial(loss_fn, across=True), PARAMS, SAMPLES)


def test_rounding_of_float32_passes_where_it_is_allowed():
    def loss_fn(params, microbatch):
        return transformer(jax.tree.map(lambda leaf: leaf.astype(np.float32), params), microbatch)

    with pytest.raises(AssertionError, match=r"relative error \d.\de-0[678].*\nlikely: .*give rtol=1e-5"):
        assert_packing_invariant(loss_fn, PARAMS, SAMPLES)
    assert_packing_invariant(loss_fn, PARAMS, SAMPLES, dtype="float32")


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(AttributeError, match=r"'PackedBatch' object has no attribute 'lengths'"):
        assert_packing_invariant(lambda params, batch: (params["head"].sum(), batch.lengths.sum()), PARAMS, SAMPLES)
    with pytest.raises(ValueError, match="at least two: there are 1"):
        assert_packing_invariant(transformer, PARAMS, SAMPLES[:1])
    with pytest.raises(ValueError, match="loss_fn needs a key"):
        assert_packing_invariant(lambda params, microbatch, key: transformer(params, microbatch), PARAMS, SAMPLES)
    with pytest.raises(ValueError, match="nothing to compare"):
        assert_packing_invariant(transformer, PARAMS, [[1], [2]])


def tag_loss(params, microbatch, *, labels_of):
    """A label a token, and one a sample, which tells its tokens what to expect."""
    segments = microbatch["segment_ids"]
    one_a_token = jnp.take_along_axis(microbatch["kind"], jnp.maximum(segments, 1) - 1, axis=1)
    logits = params[microbatch["tokens"], one_a_token]
    losses = (logits - labels_of(microbatch) * microbatch["scores"].sum(-1)) ** 2
    return (losses * microbatch["weights"]).sum(), microbatch["weights"].sum()


def test_named_fields_are_packed_as_they_are_padded():
    given = {"tokens": "length", "scores": "length", "kind": "row", "weights": "length"}
    rng = np.random.default_rng(0)
    samples = [
        {"tokens": rng.integers(0, 5, n), "scores": rng.normal(size=(n, 2)), "kind": n % 3, "weights": rng.random(n)}
        for n in (3, 1, 4, 2, 5)
    ]
    table = rng.normal(size=(5, 3))
    right = functools.partial(tag_loss, labels_of=lambda rows: rows["tokens"])
    wrong = functools.partial(tag_loss, labels_of=lambda rows: jnp.roll(rows["tokens"], 1, axis=1))
    assert_packing_invariant(right, table, samples, fields=given)
    with pytest.raises(AssertionError, match="packed rows differ"):
        assert_packing_invariant(wrong, table, samples)
    with pytest.raises(KeyError, match="lengths"):
        assert_packing_invariant(lambda table, rows: (table.sum(), rows["lengths"].sum()), table, samples, fields=given)
    with pytest.raises(ValueError, match=r"in packed rows are 'length', .* has 'left'"):
        assert_packing_invariant(right, table, samples, fields={"tokens": "left", "scores": "row"})
    squares = [sample | {"near": np.ones([len(sample["tokens"])] * 2)} for sample in samples]
    with pytest.raises(ValueError, match="'near' cannot be packed"):
        assert_packing_invariant(right, table, squares)
