"""Windows that grow: the numbers of a decoder with such windows, on every layout, in one program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import compile_buckets, load, make_plan, make_train_step, no_recompiles
from jvarlen._common.checks import UserError
from jvarlen.batches import StepBatch
from jvarlen.batches.shapes import BatchShapes, plan_specs
from jvarlen.models import WindowSchedule, init_params, layered, make_loss_fn, token_log_probs, with_window
from jvarlen.models.decoder import window_of
from jvarlen.parallel import layered_loss_fn
from jvarlen.testing import assert_layout_invariant
from tests.conftest import random_dataset
from tests.parallel.steps import BUCKET, DECODER, batches_of, initial_params

WINDOW = 4  # of layers whose own windows are 0, 3, 5, 0
NARROWED = dataclasses.replace(DECODER, windows=(4, 3, 4, 4))


def gradients(loss_fn, params, batch):
    step = make_train_step(loss_fn, optax.sgd(1.0))
    state, metrics = jax.jit(step)(step.init(params), batch)
    return jax.tree.leaves(jax.tree.map(np.asarray, (state.params, metrics.loss, metrics.num_tokens)))


@pytest.fixture(scope="module")
def narrowed():
    with jax.enable_x64(True):
        return gradients(make_loss_fn(NARROWED), initial_params(), batches_of(2)[2])


@pytest.mark.parametrize("form", [make_loss_fn, lambda config: layered_loss_fn(layered(config))])
def test_a_step_is_that_of_a_decoder_with_such_windows(form, narrowed):
    with jax.enable_x64(True):
        batch = batches_of(2)[2]
        found = gradients(form(DECODER), initial_params(), with_window(batch, WINDOW))
        whole = gradients(form(DECODER), initial_params(), with_window(batch, 0))
        without = gradients(form(DECODER), initial_params(), batch)
    for leaf, expected in zip(found, narrowed, strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-12, atol=1e-12)
    assert all(map(np.array_equal, whole, without))
    assert abs(found[-2] - without[-2]) > 1e-5  # the loss


def test_so_is_a_step_of_several_groups(narrowed):
    with jax.enable_x64(True):
        first, second, third = batches_of(2)[:3]
        groups = StepBatch((jax.tree.map(lambda x: x[:1] if x.ndim else x, first), second, third), np.float32(9))
        found = gradients(make_loss_fn(DECODER), initial_params(), with_window(groups, WINDOW))
        expected = gradients(make_loss_fn(NARROWED), initial_params(), groups)
    assert not np.array_equal(narrowed[-2], expected[-2])
    for leaf, expected_leaf in zip(found, expected, strict=True):
        np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-12, atol=1e-12)


def test_every_layout_gives_the_numbers_of_one_device():
    layouts = ["data2.zero1", "stage2.zero_bubble", "tensor2", "data2.context2.zero3"]
    with jax.enable_x64(True):
        batch = with_window(batches_of(4)[0], WINDOW)
        assert_layout_invariant(layered(DECODER), initial_params(), batch, layouts, num_steps=2)


def test_log_probabilities_take_it_and_padded_rows_do():
    dataset = random_dataset(4, BUCKET.length)
    batch = next(iter(load(make_plan(np.diff(dataset.offsets), [BUCKET]), dataset)))
    params, microbatch = init_params(DECODER, 0), jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, batch)
    found, expected, whole = (
        token_log_probs(params, config, given)
        for config, given in [
            (DECODER, with_window(microbatch, WINDOW)), (NARROWED, microbatch), (DECODER, microbatch),
        ]
    )  # fmt: skip
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(found - whole).max() > 1e-4


@pytest.mark.parametrize("of_step", [-7, 0, 1, 4, 2**31 - 1])
@pytest.mark.parametrize("own", [-1, 0, 3, 9])
@pytest.mark.parametrize("is_traced", [True, False])
def test_the_smaller_window_holds_and_below_1_is_none(of_step, own, is_traced):
    if own < 0:
        config = dataclasses.replace(DECODER, windows=())
    else:
        config = dataclasses.replace(DECODER, windows=(own, 5, 5, 5))
    found = window_of(config, jnp.int32(0) if is_traced else 0, jnp.int32(of_step))
    both = [window for window in (own, of_step) if window > 0]
    assert max(int(found), 0) == min(both, default=0)


def test_a_growing_window_compiles_nothing():
    dataset = random_dataset(64, BUCKET.length)
    plan = make_plan(np.diff(dataset.offsets), [(4, 4), (2, BUCKET.length)], order="shuffle")
    specs = plan_specs(plan)
    shapes = BatchShapes.of_plan(plan, batch_spec=lambda *of: jax.eval_shape(lambda x: with_window(x, 0), specs(*of)))
    step = make_train_step(make_loss_fn(DECODER), optax.adamw(1e-3))
    state = step.init(initial_params(dtype=np.float32))
    compiled = compile_buckets(step, state, shapes, progress=False)
    windows = WindowSchedule(first=1, last=8, share=0.75).windows(plan.num_steps)
    losses = []
    with no_recompiles() as compilations:
        for window, batch in zip(windows, load(plan, dataset), strict=True):
            state, metrics = compiled(state, with_window(batch, window))
            losses.append(float(metrics.loss))
    assert compilations.num_compilations == 0
    assert np.isfinite(losses).all()
    assert len({*windows.tolist()}) == 8


def test_a_schedule_is_linear_reaches_its_end_and_is_refused_where_it_says_nothing():
    for num_steps in (1, 2, 7, 1000):
        windows = WindowSchedule(first=32, last=1024, share=0.6).windows(num_steps)
        growing = np.arange(num_steps) / max(1, round(0.6 * num_steps))
        np.testing.assert_array_equal(windows, np.minimum(1024, np.floor(32 + 992 * growing + 1e-9)))
    for text in ("32", "32:1024", "a:1024:0.5", "64:32:0.5", "0:32:0.5", "1:32:0", "1:32:1.5", f"1:{2**31}:1"):
        with pytest.raises(UserError, match=r"such as 32:1024:0\.6"):
            WindowSchedule.parse(text)
    with pytest.raises(UserError, match="with_window takes a batch of load, not a ndarray"):
        with_window(np.zeros(3), 1)
