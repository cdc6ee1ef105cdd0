"""`assert_finite_on_padding_rows`: a model that a row without tokens breaks is found, by bucket, rows and leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import load, make_plan, make_train_step
from jvarlen.attention import padding_mask
from jvarlen.testing import assert_finite_on_padding_rows

RNG = np.random.default_rng(0)
SAMPLES = [RNG.integers(1, 9, n) for n in (3, 4, 2, 4, 7, 8, 3)]
PLAN = make_plan([len(sample) for sample in SAMPLES], [(3, 4), (2, 8)], order="dataset", microbatches_per_step=2)
PARAMS = {"embed": RNG.normal(size=(9, 4)), "query": RNG.normal(size=4)}


def pooled(params, microbatch, masked):
    """One loss a row, of its tokens as an attention with one query weighs them."""
    x_BxTxD = params["embed"][microbatch.tokens]
    mask_BxT = padding_mask(microbatch.lengths, microbatch.tokens.shape[1])
    mix_BxT = jax.nn.softmax(jnp.where(mask_BxT, x_BxTxD @ params["query"], masked), axis=1)
    values_B = jnp.einsum("bt,btd->b", mix_BxT, x_BxTxD)
    is_real_B = microbatch.lengths > 0
    return jnp.where(is_real_B, values_B, 0).sum(), is_real_B.sum()


def softmax_over_nothing(params, microbatch):
    return pooled(params, microbatch, -jnp.inf)


def finite_scores(params, microbatch):
    return pooled(params, microbatch, -1e9)


def test_a_softmax_over_nothing_is_found_where_the_loss_is_finite():
    message = (
        r"in 2 of 2 buckets\n  3×4: with a padding row: gradient\['embed'\]; with padding rows "
        r"alone: gradient\['embed'\]\n  2×8: with a padding row: .*\nlikely: a softmax over no"
    )
    with pytest.raises(AssertionError, match=message):
        assert_finite_on_padding_rows(softmax_over_nothing, PARAMS, load(PLAN, SAMPLES))
    assert_finite_on_padding_rows(finite_scores, PARAMS, load(PLAN, SAMPLES))


def test_it_is_what_breaks_training():
    batches = list(load(PLAN, SAMPLES))
    for loss_fn, stays_finite in ((softmax_over_nothing, False), (finite_scores, True)):
        step = make_train_step(loss_fn, optax.sgd(0.1))
        state, metrics = jax.jit(step)(step.init(PARAMS), batches[-1])
        assert jnp.isfinite(metrics.loss)
        assert jnp.isfinite(state.params["embed"]).all() == stays_finite


def test_a_microbatch_of_padding_rows_alone_is_tried():
    def mean_over_the_batch(params, microbatch):
        loss_sum, num_rows = finite_scores(params, microbatch)
        return loss_sum - loss_sum / num_rows, num_rows, {"mean": loss_sum / num_rows}

    with pytest.raises(AssertionError, match=r"3×4: with padding rows alone: loss_sum, sums\['mean'\]"):
        assert_finite_on_padding_rows(mean_over_the_batch, PARAMS, load(PLAN, SAMPLES))


def test_other_batches_are_named_by_their_leaves():
    def loss_fn(scale, batch):
        return (scale * batch["x"] / batch["x"]).sum(), jnp.ones(())

    with pytest.raises(AssertionError, match=r"\['x'\] float32\[1,2,3\]: with a padding row: loss_sum, gradient; "):
        assert_finite_on_padding_rows(loss_fn, 2.0, [{"x": np.ones((1, 2, 3), np.float32)}])


def test_what_is_not_finite_without_padding_rows_is_said_to_be():
    def loss_fn(params, microbatch):
        return finite_scores(params, microbatch)[0] + jnp.log(-(params["query"] ** 2).sum()), jnp.ones(())

    with pytest.raises(AssertionError, match=r"3×4: without any padding row, these are not finite: loss_sum"):
        assert_finite_on_padding_rows(loss_fn, PARAMS, load(PLAN, SAMPLES))
    with pytest.raises(ValueError, match="batches are empty"):
        assert_finite_on_padding_rows(loss_fn, PARAMS, [])
