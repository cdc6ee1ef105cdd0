"""Packed pairs: rows that hold sources and targets, laid out as planned, with the loss of the pairs alone."""

import jax
import jax.numpy as jnp
import numpy as np

from jvarlen import make_plan
from jvarlen.attention import attend
from jvarlen.batches import PackedPairBatch
from jvarlen.data import WeightedTokens
from jvarlen.loading import collate_tokens
from jvarlen.loading.plan_source import PlanSource

VOCAB, WIDTH = 11, 6
RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, [9, 13], (40, 2))
PAIRS = [tuple(RNG.integers(1, VOCAB, n) for n in pair) for pair in LENGTHS]


def packed_plan(row_lengths=(16, 20), **options):
    options |= {"packing": "best_fit", "row_lengths": row_lengths, "num_microbatches": 2}
    return make_plan(LENGTHS, max_tokens=150, **options)


def test_cut_pairs_keep_their_first_tokens_and_weights():
    pairs = [(np.arange(1, 9), WeightedTokens(np.arange(1, 4), [0, 0.5, 1])), (np.arange(1, 3), np.arange(1, 9))]
    plan = make_plan([[8, 3], [2, 8]], [(2, 6, 7)], packing="best_fit", overlong="truncate", order="length")
    assert plan.num_truncated == 2
    batch = PlanSource(plan, pairs, collate_tokens, lengths=[[8, 3], [2, 8]])[0]
    num_sources = (batch.source_segment_ids[0] > 0).sum(axis=1).tolist()
    weights = dict(zip(num_sources, batch.weights[0].tolist(), strict=True))
    assert weights == {6: [0, 0.5, 1, 0, 0, 0, 0], 2: [1] * 7}


def params_of_encoder_decoder():
    shapes = {
        "source": (VOCAB, WIDTH),
        "target": (VOCAB, WIDTH),
        "place": (32, WIDTH),
        "head": (WIDTH, VOCAB),
        **{f"{block}.{part}": (WIDTH, WIDTH) for block in ("encode", "decode", "cross") for part in "qkv"},
    }
    rng = np.random.default_rng(2)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float64) for name, shape in shapes.items()}


def loss_of_encoder_decoder(params, batch):
    """Attention over sources, causal attention over targets, and cross-attention, each within its pair."""

    def attend_in(block, x_BxQxD, y_BxTxD, of_rows, *, causal):
        inputs = {"q": x_BxQxD, "k": y_BxTxD, "v": y_BxTxD}
        qkv = ((x @ params[f"{block}.{part}"])[:, :, None] for part, x in inputs.items())
        return x_BxQxD + attend(*qkv, **of_rows, causal=causal)[:, :, 0]

    if isinstance(batch, PackedPairBatch):
        name, (of_source, of_target) = "segment_ids", (batch.source_segment_ids, batch.target_segment_ids)
        source_positions, target_positions = batch.source_positions, batch.target_positions
    else:
        name, (of_source, of_target) = "lengths", (batch.source_lengths, batch.target_lengths)
        source_positions, target_positions = (
            np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
            for tokens in (batch.source_tokens, batch.target_tokens)
        )
    encoded = params["source"][batch.source_tokens] + params["place"][source_positions]
    encoded = attend_in("encode", encoded, encoded, {name: of_source}, causal=False)
    before = jnp.where(target_positions == 0, 0, jnp.roll(batch.target_tokens, 1, axis=-1))
    decoded = params["target"][before] + params["place"][target_positions]
    decoded = attend_in("decode", decoded, decoded, {name: of_target}, causal=True)
    decoded = attend_in("cross", decoded, encoded, {name: of_target, f"key_{name}": of_source}, causal=False)
    log_probs = jax.nn.log_softmax(decoded @ params["head"])
    losses = -jnp.take_along_axis(log_probs, batch.target_tokens[..., None], -1)[..., 0]
    return (losses * batch.weights).sum(), batch.weights.sum()


def sums_over(plan, collate, params):
    """Σ loss, Σ weight and the gradient of Σ loss over all microbatches of a plan."""
    source = PlanSource(plan, PAIRS, collate)
    value_and_grad = jax.jit(jax.value_and_grad(loss_of_encoder_decoder, has_aux=True))
    total = None
    for step in range(plan.num_steps):
        for m in range(plan.num_microbatches):
            microbatch = jax.tree.map(lambda leaf, m=m: leaf[m] if np.ndim(leaf) else leaf, source[step])
            sums = value_and_grad(params, microbatch)
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
    return total


def test_packed_pairs_have_the_loss_and_gradient_that_they_have_alone():
    """In float64, where nothing but a wrong term can differ."""
    with jax.enable_x64(True):
        params = params_of_encoder_decoder()
        (loss, weight), grads = sums_over(packed_plan(), collate_tokens, params)
        alone = make_plan(LENGTHS, [(1, 9, 13)], order="length", num_microbatches=8)
        (expected, expected_weight), expected_grads = sums_over(alone, collate_tokens, params)
        assert weight == expected_weight == LENGTHS[:, 1].sum()
        np.testing.assert_allclose(loss, expected, rtol=1e-12)
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, expected_grads[name], rtol=1e-12, atol=1e-12 * loss, err_msg=name)
