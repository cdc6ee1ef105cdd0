"""Parameters on the host: only what a process places is read, and the state is that of whole arrays."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen.models import (
    DecoderConfig,
    from_hugging_face,
    init_params,
    layered,
    make_loss_fn,
    stack_layers,
    to_hugging_face,
)
from jvarlen.parallel import make_train_step
from tests.parallel import run_slices
from tests.support import processes

CONFIG = DecoderConfig(num_layers=4, width=32, num_heads=2, mlp_width=48, vocab_size=67, qkv_bias=True)


@functools.cache
def initial_params():
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), init_params(CONFIG, seed=0))


def num_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize(
    ("layout", "model_of"),
    [
        *((text, layered) for text in ("data2", "data2.zero1", "data2.zero3.tensor2.stage2")),
        ("stage2.virtual2.interleaved", layered),
        ("data2.zero3", make_loss_fn),
    ],
)
def test_the_state_is_that_of_whole_arrays_and_no_byte_is_read_twice(layout, model_of):
    step = make_train_step(model_of(CONFIG), run_slices.optimizer(), layout=layout)
    state, num_read = run_slices.init_by_slices(step, jax.tree.map(np.asarray, initial_params()))
    run_slices.assert_equal(state, step.init(initial_params()))
    assert num_read == num_bytes(initial_params())


def test_the_state_does_not_share_memory_with_arrays_of_the_caller():
    params = jax.tree.map(np.array, initial_params())
    for layout in (None, "data2", "stage2"):
        state = make_train_step(layered(CONFIG), run_slices.optimizer(), layout=layout).init(params)
        before = jax.tree.map(np.array, state.params)
        for leaf in jax.tree.leaves(params):
            leaf += 1
        jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_stacked_parameters_are_read_by_slices_too():
    step = make_train_step(layered(CONFIG)._replace(stack=None), run_slices.optimizer(), layout="stage2.tensor2")
    params = stack_layers(initial_params())
    state, num_read = run_slices.init_by_slices(step, jax.tree.map(np.asarray, params))
    run_slices.assert_equal(state, step.init(params))
    assert num_read == num_bytes(params)


@pytest.mark.multiprocess
def test_each_process_reads_only_what_it_places(tmp_path):
    to_hugging_face(tmp_path / "model", initial_params(), CONFIG, max_shard_bytes=30_000)
    layouts = ["data2", "data2.zero3", "stage2", "tensor2"]
    counted = processes.run(
        Path(run_slices.__file__), 2, str(tmp_path / "model"), str(tmp_path / "again"), *layouts, num_devices=1
    )
    whole = num_bytes(initial_params())
    for printed in counted:
        counts = json.loads(printed.splitlines()[-1])
        assert counts.pop("data2") == [whole, whole]
        for num_read, num_placed in counts.values():
            # Placed are zeros as well, after the vocabulary.
            assert num_placed - 2 * 2 * CONFIG.width <= num_read <= num_placed < 0.75 * whole
    one, other = (from_hugging_face(tmp_path / name) for name in ("model", "again"))
    assert one[0] == other[0]
    jax.tree.map(functools.partial(np.testing.assert_array_equal, strict=True), one[1], other[1])
    assert {path.name for path in tmp_path.iterdir()} == {"model", "again"}
