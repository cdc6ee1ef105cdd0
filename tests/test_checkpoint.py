"""Checkpoints: state and place come back as they were, or an error says why not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jvarlen import data_mesh, no_recompiles
from jvarlen.checkpoint import Place, open_checkpoints
from jvarlen.distributed import replicate
from jvarlen.train import TrainState

STATE = TrainState({"w": jnp.arange(3.0), "b": jnp.float32(2)}, (jnp.int32(7),))


def place(num_steps_done):
    return Place(num_steps_done=num_steps_done, epoch=1, step=2, plan_digest="ab", num_tokens_done=5, train_s=0.5)


def test_the_latest_state_and_place_come_back(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        for step in (0, 4, 9):
            checkpoints.save(STATE._replace(params={"w": jnp.arange(3.0) + step, "b": jnp.float32(step)}), place(step))
            checkpoints.save(STATE, place(step))  # saved already
    with open_checkpoints(tmp_path) as checkpoints:
        state, restored_place = checkpoints.restore_latest(STATE)
    assert restored_place == place(9)
    np.testing.assert_array_equal(state.params["w"], np.arange(3.0) + 9)
    assert int(state.opt_state[0]) == 7
    assert isinstance(state, TrainState)


def test_old_checkpoints_are_removed(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        for step in range(4):
            checkpoints.save(STATE, place(step))
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["2", "3"]


def test_no_checkpoint_is_an_error(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints, pytest.raises(FileNotFoundError, match="no checkpoint"):
        checkpoints.restore_latest(STATE)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"w": jnp.arange(4.0), "b": jnp.float32(2)}, r"\.params\['w'\] float32\[3\], here float32\[4\]$"),
        ({"v": jnp.ones(3), "b": jnp.int32(2)}, r"'b'\] float32\[\], here int32\[\].*'w'\].*here None.*'v'\] None"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_its_leaves(tmp_path, params, said):
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(STATE, place(3))
    with (
        open_checkpoints(tmp_path) as checkpoints,
        pytest.raises(ValueError, match=rf"checkpoint 3 in \S+ cannot be resumed: it is of another model.*{said}"),
    ):
        checkpoints.restore_latest(STATE._replace(params=params))


def test_a_damaged_checkpoint_is_refused(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(STATE, place(3))
    for path in (tmp_path / "3" / "about").iterdir():
        path.write_bytes(b"{")
    with open_checkpoints(tmp_path) as checkpoints, pytest.raises(ValueError, match="checkpoint 3 "):
        checkpoints.restore_latest(STATE)


def test_saving_what_all_devices_hold_compiles_nothing_and_comes_back_on_others(tmp_path):
    state = replicate({"w": np.arange(24.0, dtype=np.float32).reshape(4, 6), "b": np.float32(2)}, data_mesh(4))
    with open_checkpoints(tmp_path) as checkpoints, no_recompiles():
        checkpoints.save(state, place(1))
    for others in (replicate(state, data_mesh(2)), jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state)):
        given = jax.tree.map(lambda leaf: leaf * 0, others)
        with open_checkpoints(tmp_path) as checkpoints:
            restored, _ = checkpoints.restore_latest(given)
        for name, leaf in restored.items():
            np.testing.assert_array_equal(leaf, state[name])
            assert leaf.sharding == given[name].sharding
