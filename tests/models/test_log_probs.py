"""Log probabilities of tokens: those of whole logits, the loss's own, and losses of them alike on any layout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import load, make_plan
from jvarlen.batches import next_token_targets
from jvarlen.models import DecoderConfig, init_params, layered, logits, make_loss_fn, token_log_probs
from jvarlen.parallel import StepLoss, cross_entropy, layered_loss_fn
from jvarlen.testing import assert_layout_invariant

CONFIG = DecoderConfig(num_layers=2, width=16, num_heads=2, vocab_size=53)
WITHOUT_BEGIN = dataclasses.replace(CONFIG, begins_samples=False)
LENGTHS = [1, 7, 4, 8, 2, 3, 8, 5, 6, 1, 8, 3]
RNG = np.random.default_rng(0)
SAMPLES = [
    {
        "tokens": RNG.integers(0, 52, length).astype(np.int32),
        "weights": RNG.choice([0.0, 0.5, 1.0], length).astype(np.float32),
        "old": RNG.normal(-4, 0.2, length).astype(np.float32),
        "advantage": np.float32(RNG.normal()),
    }
    for length in LENGTHS
]
FIELDS = {"tokens": "length", "weights": "length", "old": "length", "advantage": "row"}


@functools.cache
def params_of(config):
    with jax.enable_x64(False):
        params = init_params(config, seed=0)
    return jax.tree.map(lambda leaf: 3 * np.asarray(leaf), params)  # far from uniform


@functools.cache
def batch_of(packing, num_microbatches=4, length=8):
    """All samples in one step, as named fields."""
    rows = {"padded": len(SAMPLES) // num_microbatches, "best_fit": 2}[packing]
    plan = make_plan(LENGTHS, [(rows, length)], num_microbatches=num_microbatches, packing=packing)
    assert plan.num_steps == 1
    return next(load(plan, SAMPLES, fields=FIELDS))


def microbatches_of(batch):
    for m in range(len(batch["tokens"])):
        yield jax.tree.map(lambda leaf, m=m: leaf[m] if np.ndim(leaf) else leaf, batch)


def places_of(microbatch):
    """For each sample of a microbatch, its id, row and positions."""
    for row, ids in enumerate(np.asarray(microbatch["ids"]).reshape(len(microbatch["tokens"]), -1)):
        for entry, sample in enumerate(ids[ids >= 0].tolist()):
            is_in = microbatch["segment_ids"][row] == entry + 1 if "segment_ids" in microbatch else np.arange(8)
            yield sample, row, np.flatnonzero(is_in) if "segment_ids" in microbatch else is_in[: LENGTHS[sample]]


@functools.partial(jax.jit, static_argnums=1)
def alone(params, config, tokens):
    """Log softmax of the whole logits of one sample, [l, V], those of its token at each place."""
    ids = np.zeros(1, np.int32)
    row = {"tokens": tokens[None], "lengths": np.array([len(tokens)]), "weights": np.ones((1, len(tokens)))}
    row |= {"num_sequences": np.float32(1), "ids": ids, "is_real": ids >= 0}
    return logits(params, config, row)[0]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("packing", ["padded", "best_fit"])
@pytest.mark.parametrize("config", [CONFIG, WITHOUT_BEGIN], ids=["begins", "begins not"])
def test_entry_of_a_token_is_its_log_softmax_in_its_sample_and_elsewhere_0(config, packing, temperature):
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, params_of(config))
        of_tokens = jax.jit(
            lambda params, rows: token_log_probs(params, config, rows, temperature=temperature, entropy=True)
        )
        seen = []
        for microbatch in microbatches_of(batch_of(packing)):
            found, entropies = of_tokens(params, microbatch)
            expected, expected_entropies = np.zeros(found.shape), np.zeros(found.shape)
            for sample, row, places in places_of(microbatch):
                tokens = SAMPLES[sample]["tokens"]
                log_probs = np.asarray(jax.nn.log_softmax(alone(params, config, tokens) / temperature))
                if not config.begins_samples:
                    places, tokens, log_probs = places[1:], tokens[1:], log_probs[:-1]
                expected[row, places] = log_probs[np.arange(len(tokens)), tokens]
                expected_entropies[row, places] = -np.sum(np.exp(log_probs) * log_probs, axis=-1)
                seen.append(sample)
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(entropies, expected_entropies, rtol=1e-12, atol=1e-12)
        assert sorted(seen) == list(range(len(SAMPLES)))


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
@pytest.mark.parametrize("config", [CONFIG, WITHOUT_BEGIN], ids=["begins", "begins not"])
def test_weighted_log_probabilities_are_the_loss_and_have_its_gradient(config, packing):
    """In several chunks, with padding at the end of the last."""

    def weighted(params, microbatch):
        log_probs = token_log_probs(params, config, microbatch)
        return -jnp.sum(log_probs * microbatch["weights"])

    microbatch = next(microbatches_of(batch_of(packing)))
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, params_of(config))
        (expected, _), expected_grads = jax.jit(jax.value_and_grad(make_loss_fn(config), has_aux=True))(
            params, microbatch
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cross_entropy, "_MOST_LOGITS", 5 * config.vocab_size)
            found, grads = jax.jit(jax.value_and_grad(weighted))(params, microbatch)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
        for grad, expected_grad in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
            np.testing.assert_allclose(grad, expected_grad, rtol=0, atol=1e-12 * np.abs(expected_grad).max())


def clipped(log_probs, microbatch, entropy):
    """A clipped policy gradient with an entropy bonus, and per sample a term that no sum over positions gives."""
    weights = microbatch["weights"]
    if "segment_ids" in microbatch:
        of_samples = jax.nn.one_hot(microbatch["segment_ids"] - 1, microbatch["ids"].shape[1])
        advantages = jnp.einsum("bp,btp->bt", microbatch["advantage"], of_samples)
        sums = jnp.einsum("bt,btp->bp", log_probs * weights, of_samples)
    else:
        advantages = microbatch["advantage"][:, None]
        sums = jnp.sum(log_probs * weights, axis=1)
    ratios = jnp.exp(log_probs - microbatch["old"])
    gains = jnp.minimum(ratios * advantages, jnp.clip(ratios, 0.8, 1.2) * advantages)
    of_samples = jax.nn.log_sigmoid(sums) * microbatch["is_real"]
    loss_sum = -jnp.sum(weights * (gains + 0.1 * entropy)) - jnp.sum(of_samples)
    return loss_sum, jnp.sum(weights), {"samples": jnp.sum(microbatch["is_real"]), "ratios": jnp.sum(ratios * weights)}


@pytest.mark.parametrize(
    ("packing", "layouts"),
    [
        ("best_fit", ["data2.context2", "data4.zero3", "data1.stage2.context2.tensor2"]),
        ("padded", ["data1.tensor2.sequence_parallel"]),
    ],
)
def test_a_loss_of_log_probabilities_is_the_same_on_any_layout(packing, layouts):
    model = layered(WITHOUT_BEGIN, clipped, temperature=0.9)
    assert_layout_invariant(model, params_of(WITHOUT_BEGIN), batch_of(packing), layouts, num_steps=1)


def test_a_loss_by_layers_is_that_of_the_whole_model():
    microbatch = next(microbatches_of(batch_of("best_fit")))
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, params_of(CONFIG))
        found, expected = (
            jax.jit(model(CONFIG, clipped, temperature=0.9))(params, microbatch)
            for model in (lambda *args, **options: layered_loss_fn(layered(*args, **options)), make_loss_fn)
        )
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), found, expected)


def preferred(log_probs, microbatch):
    """The log probability of each sample, [B, P], and the number of tokens."""
    is_in = microbatch["segment_ids"][..., None] == 1 + np.arange(microbatch["ids"].shape[1])
    rows = {"log_probs": jnp.sum(log_probs[..., None], axis=1, where=is_in), "ids": microbatch["ids"]}
    return {"tokens": jnp.sum(microbatch["segment_ids"] > 0)}, rows


def loss_of_pairs(sums, rows):
    """The mean of DPO over pairs, samples 2i and 2i + 1, wherever they lie."""
    at = jnp.where(rows["ids"] < 0, len(SAMPLES), rows["ids"]).ravel()
    by_sample = jnp.zeros(len(SAMPLES) + 1).at[at].set(rows["log_probs"].ravel())
    margins = by_sample[:-1:2] - by_sample[1::2]
    return -jnp.mean(jax.nn.log_sigmoid(margins)), {"tokens": sums["tokens"]}


def test_pairs_of_samples_in_packed_rows_have_the_same_loss_on_any_layout():
    step_loss = StepLoss(layered(CONFIG, preferred), loss_of_pairs)
    assert_layout_invariant(step_loss, params_of(CONFIG), batch_of("best_fit"), ["data1.stage2.context2"], num_steps=1)


def test_rows_without_tokens_of_the_decoder_are_refused():
    microbatch = {name: array for name, array in next(microbatches_of(batch_of("padded"))).items() if name != "tokens"}
    with pytest.raises(ValueError, match="with tokens"):
        token_log_probs(params_of(CONFIG), CONFIG, microbatch)
    with pytest.raises(ValueError, match=r"temperature \(0\) must be from 1e-30"):
        make_loss_fn(CONFIG, clipped, temperature=0)


def test_targets_of_logits_are_those_of_next_token_targets():
    microbatch = next(microbatches_of(batch_of("best_fit")))
    params = jax.tree.map(jnp.asarray, params_of(CONFIG))
    of_targets = jax.nn.log_softmax(logits(params, CONFIG, microbatch))
    _, targets, _ = next_token_targets(microbatch, begin_token=CONFIG.begin_token)
    found = jnp.take_along_axis(of_targets, jnp.asarray(targets)[..., None], axis=-1)[..., 0]
    expected = token_log_probs(params, CONFIG, microbatch)
    is_token = microbatch["segment_ids"] > 0
    np.testing.assert_allclose(np.where(is_token, found, 0), expected, rtol=1e-5, atol=1e-5)
