"""Checkpoints: state and place come back unchanged, or an error says why not."""

import contextlib
import functools
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jvarlen import make_train_step, no_recompiles, scale_by_planned_rate
from jvarlen.distributed.mesh import replicate
from jvarlen.parallel import LayeredModel, LayeredParams
from jvarlen.training import adamw_by_batch_size, checkpoint
from jvarlen.training.checkpoint import Place, open_checkpoints, read_params
from jvarlen.training.manifest import write_manifest
from jvarlen.training.train_state import TrainState
from tests.support.meshes import data_mesh

STATE = TrainState({"w": jnp.arange(3.0), "b": jnp.float32(2)}, (jnp.int32(7),))


def place(num_steps_done):
    return Place(
        num_steps_done=num_steps_done, epoch=1, step=2, plan_digest="ab", seed=3, num_tokens_done=5, train_s=0.5
    )


def test_the_latest_state_and_place_come_back(tmp_path):
    with open_checkpoints(tmp_path) as checkpoints:
        for step in (0, 4, 9):
            checkpoints.save(STATE._replace(params={"w": jnp.arange(3.0) + step, "b": jnp.float32(step)}), place(step))
            checkpoints.save(STATE, place(step))  # saved already
    with open_checkpoints(tmp_path) as checkpoints:
        state, restored_place = checkpoints.restore(STATE)
    assert restored_place == place(9)
    np.testing.assert_array_equal(state.params["w"], np.arange(3.0) + 9)
    assert int(state.opt_state[0]) == 7
    assert isinstance(state, TrainState)


@pytest.mark.parametrize("layout", [None, "data2.zero1", "data1.stage2"])
def test_a_restored_state_has_the_planned_rates_of_the_state_given(tmp_path, layout):
    """Such as those of a training that goes on for longer, at a lower rate."""
    model = LayeredModel(lambda ends, *_: jnp.ones(2), lambda *_: jnp.ones(2), lambda *_: (jnp.ones(()), jnp.ones(())))
    params = LayeredParams(jnp.ones(2), jnp.ones((2, 3)))

    def state_at(num_steps, rate):
        optimizer = adamw_by_batch_size(rate, 8, plan=[8] * num_steps)
        train_step = make_train_step(model, optimizer, layout=layout)
        state = train_step.init(params)
        return state, train_step.portable_form(state, params)

    state, form = state_at(3, 0.5)
    planned = state.opt_state[-1]._replace(count=jnp.int32(2))
    with open_checkpoints(tmp_path, form=form) as checkpoints:
        checkpoints.save(state._replace(opt_state=(*state.opt_state[:-1], planned)), place(2))
    state, form = state_at(2**15, 0.25)
    with open_checkpoints(tmp_path, form=form) as checkpoints:
        moments, *_, restored = checkpoints.restore(state)[0].opt_state
        with pytest.raises(ValueError, match="does not hold the planned rates"):
            checkpoints.restore(jax.eval_shape(lambda state: state, state))
    assert (int(restored.count), restored.table.shape, float(restored.table[2])) == (2, (2**15,), 0.25)
    assert moments.seen.table.shape == (6, 2**15)


def test_the_state_of_another_optimizer_is_refused_in_a_line(tmp_path):
    """Such as one whose rates were in the program."""
    before = optax.chain(optax.scale_by_schedule(lambda count: 0.5))
    now = optax.chain(scale_by_planned_rate([8], 0.5, 8))
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(TrainState(jnp.ones(2), (optax.EmptyState(), before.init(None))), place(0))
        with pytest.raises(ValueError, match=r"of another model or optimizer: .*count") as error:
            checkpoints.restore(TrainState(jnp.ones(2), now.init(None)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_state_with_a_key_is_restored_from_its_shapes(tmp_path, impl):
    """As of a resumed run, which draws no parameters."""
    state = STATE._replace(key=jax.random.key(3, impl=impl))
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, place(4))
        restored = checkpoints.restore(jax.eval_shape(lambda state: state, state))[0]
    assert restored.key == state.key
    assert restored.key.dtype == state.key.dtype


def test_parameters_are_read_alone_while_the_run_goes_on(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        read_params(tmp_path)
    with open_checkpoints(tmp_path) as checkpoints:
        for step, metric in ((4, None), (9, 2.0), (10, 3.0)):
            params = {"w": jnp.arange(3.0) + step, "layers": [{"b": jnp.float32(step)}]}
            checkpoints.save(STATE._replace(params=params), place(step), metric=metric)
        checkpoints.wait()
        part = tmp_path / ".11.part"  # of a checkpoint that is being written
        part.mkdir()
        for which, step in (("latest", 10), ("best", 9)):
            read, read_place = read_params(tmp_path, which)
            assert read_place == place(step)
            assert read.keys() == {"w", "layers.0.b"}
            np.testing.assert_array_equal(read["w"], np.arange(3.0) + step)
            np.testing.assert_array_equal(read["layers.0.b"], step)
        assert part.exists()


def steps_on_disk(directory):
    return sorted(int(path.name) for path in directory.iterdir() if path.name.isdecimal())


@pytest.mark.parametrize(("keep_last", "keep_best"), [(2, 0), (1, 2), (2, 1)])
def test_the_newest_and_the_best_are_kept(tmp_path, keep_last, keep_best):
    metrics = [None, 5.0, 2.0, 7.0, math.nan, 2.0, 3.0, None, 1.0, 9.0]
    for start in (0, 5):  # opened anew in the midst
        with open_checkpoints(tmp_path, keep_last=keep_last, keep_best=keep_best) as checkpoints:
            for step in range(start, start + 5):
                checkpoints.save({"w": jnp.float32(step)}, place(step), metric=metrics[step])
                ranked = [
                    (metrics[i], i) for i in range(step + 1) if metrics[i] is not None and not math.isnan(metrics[i])
                ]
                best = [i for _, i in sorted(ranked)[:keep_best]]
                expected = sorted({*range(max(0, step - keep_last + 1), step + 1), *best})
                assert checkpoints.steps == steps_on_disk(tmp_path) == expected
                if best:
                    assert checkpoints.best_step == best[0]
                    assert float(checkpoints.restore({"w": jnp.float32(0)}, "best")[0]["w"]) == best[0]


def test_none_is_best_where_none_has_a_metric(tmp_path):
    with open_checkpoints(tmp_path, keep_best=2) as checkpoints:
        checkpoints.save(STATE, place(0))
        assert checkpoints.best_step is None
        with pytest.raises(FileNotFoundError, match="no checkpoint with a metric"):
            checkpoints.restore(STATE, "best")


@pytest.mark.parametrize("kept", [{"keep_last": 0}, {"keep_best": -1}])
def test_the_newest_cannot_be_left_out(tmp_path, kept):
    with pytest.raises(ValueError, match="at least"), open_checkpoints(tmp_path, **kept):
        pass


def test_a_checkpoint_tells_the_settings_of_its_run(tmp_path):
    with open_checkpoints(tmp_path, config={"plan": {"max_tokens": 5}}) as checkpoints:
        checkpoints.save(STATE, place(0))
    assert json.loads((tmp_path / "0" / "about.json").read_text())["config"] == {"plan": {"max_tokens": 5}}


def test_writing_does_not_hold_up_training(tmp_path, monkeypatch):
    """Hashing waits in its own thread until the test lets it go; what was saved may be given away meanwhile."""
    go_on, threads = threading.Event(), []

    def write(directory):
        threads.append(threading.current_thread())
        assert go_on.wait(20)
        write_manifest(directory)

    monkeypatch.setattr(checkpoint, "write_manifest", write)
    state = {"w": jnp.arange(100_000.0)}
    add = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1, state), donate_argnums=0)
    with open_checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, place(0))
        for _ in range(5):
            state = add(state)
        jax.block_until_ready(state)
        assert steps_on_disk(tmp_path) == []
        go_on.set()
        assert checkpoints.steps == steps_on_disk(tmp_path) == [0]
        np.testing.assert_array_equal(checkpoints.restore(state)[0]["w"], np.arange(100_000.0))
    assert threads[0] is not threading.main_thread()


def test_a_checkpoint_that_is_neither_the_latest_nor_the_best_is_an_error(saved):
    with open_checkpoints(saved) as checkpoints, pytest.raises(ValueError, match=r"which \('bset'\) must be one of"):
        checkpoints.restore(STATE, "bset")


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
        checkpoints.restore(STATE._replace(params=params))


def refused(directory, said, step=3):
    """The one line of the refusal, which begins with which checkpoint and what is wrong with it."""
    begins = f"^checkpoint {step} in {directory} cannot be resumed: {said}"
    with open_checkpoints(directory) as checkpoints, pytest.raises(ValueError, match=begins) as refusal:
        checkpoints.restore(STATE)
    return str(refusal.value)


@pytest.fixture
def saved(tmp_path):
    with open_checkpoints(tmp_path / "run") as checkpoints:
        for step in (2, 3):
            checkpoints.save(STATE, place(step))
    return tmp_path / "run"


def test_a_change_of_any_file_is_refused_by_its_name(saved):
    paths = [path for path in (saved / "3").rglob("*") if path.is_file()]
    assert {"about.json", "manifest.json", "manifest.ocdbt", "_METADATA"} <= {path.name for path in paths}
    for path in paths:
        whole, name = path.read_bytes(), re.escape(str(path.relative_to(saved / "3")))
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        for content in (flipped, whole[:-1]):
            path.write_bytes(content)
            said = "" if path.name == "manifest.json" else f"{saved / '3'} is not whole: {name}: other bytes"
            assert refused(saved, said).endswith(f"Remove {saved / '3'}, to use another checkpoint; there are: 2")
        path.unlink()
        refused(saved, f"{saved / '3'} is not whole: .*{name}: missing")
        path.write_bytes(whole)
    with open_checkpoints(saved) as checkpoints:
        assert checkpoints.restore(STATE)[1] == place(3)


def test_checkpoints_under_another_name_are_refused(saved):
    (saved / "3").rename(saved / "6")
    refused(saved, f"{saved}/6 is of 3 steps", 6)


def test_the_checkpoint_before_a_damaged_one_is_used_when_that_is_removed(saved):
    (saved / "3" / "about.json").unlink()
    refused(saved, "")
    shutil.rmtree(saved / "3")
    with open_checkpoints(saved) as checkpoints:
        assert checkpoints.restore(STATE)[1] == place(2)


def test_a_run_killed_at_any_moment_of_a_save_has_its_older_checkpoints(saved, tmp_path, monkeypatch):
    """What a kill leaves behind is what the disk holds at that moment: copies of it, of several moments."""
    moments = []

    def copied_before(name, call):
        def wrapped(*args):
            moments.append((name, tmp_path / f"{len(moments)}"))
            subprocess.run(["cp", "-r", saved, moments[-1][1]], capture_output=True)  # files come and go meanwhile
            return call(*args)

        return wrapped

    wait = checkpoint.ocp.AsyncCheckpointer.wait_until_finished
    monkeypatch.setattr(checkpoint.ocp.AsyncCheckpointer, "wait_until_finished", copied_before("state", wait))
    monkeypatch.setattr(checkpoint, "write_manifest", copied_before("manifest", write_manifest))
    monkeypatch.setattr(checkpoint, "move_into_place", copied_before("name", checkpoint.move_into_place))
    monkeypatch.setattr(checkpoint.shutil, "rmtree", copied_before("removal", shutil.rmtree))
    with open_checkpoints(saved) as checkpoints:
        checkpoints.save(STATE, place(4))
        assert checkpoints.steps == [3, 4]
    monkeypatch.undo()

    assert {name for name, _ in moments} == {"state", "manifest", "name", "removal"}
    for name, copy in moments:
        was_unfinished = any(path.name.startswith(".") for path in copy.iterdir())
        with open_checkpoints(copy) as checkpoints:
            assert not any(path.name.startswith(".") for path in copy.iterdir())
            newest = 4 if name == "removal" or 4 in steps_on_disk(copy) else 3
            assert checkpoints.steps == steps_on_disk(copy) == ([2, 3] if newest == 3 else [3, 4])
            assert checkpoints.restore(STATE)[1] == place(newest)
        assert was_unfinished or name == "state"


LARGE = {"w": jnp.asarray(np.random.default_rng(0).normal(size=500_000))}


@contextlib.contextmanager
def full_disk(path):
    """A file system of 1 MB, where this user may mount one."""
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def save_all(directory, *states, first=1):
    """Saves states one after the other, each at the next step; functions among them are called."""
    steps = itertools.count(first)
    with open_checkpoints(directory) as checkpoints:
        for state in states:
            if callable(state):
                state()
            else:
                checkpoints.save(state, place(next(steps)))


def test_a_full_disk_ends_a_run_whose_checkpoints_before_it_are_intact(tmp_path, capfd, caplog):
    """And says so once: Orbax and TensorStore would print some sixty lines, or hundreds, of tracebacks."""
    with full_disk(tmp_path / "run"):
        directory = tmp_path / "run" / "checkpoints"
        said = (
            rf"^checkpoint 2 could not be written to {directory}: No space left on device; those of 1 steps are intact$"
        )
        with pytest.raises(OSError, match=said):
            save_all(directory, STATE, LARGE)
        assert sorted(os.listdir(directory)) == ["1"]
        with pytest.raises(OSError, match=said):
            save_all(directory, LARGE, STATE, first=2)
        with open_checkpoints(directory) as checkpoints:
            state, restored_place = checkpoints.restore(STATE)
        assert restored_place == place(1)
        np.testing.assert_array_equal(state.params["w"], STATE.params["w"])
    assert not caplog.records
    assert capfd.readouterr() == ("", "")


def test_what_ended_training_is_told_before_a_checkpoint_that_failed(tmp_path):
    def fail():
        raise FloatingPointError

    with full_disk(tmp_path / "run"), pytest.raises(FloatingPointError) as ended:
        save_all(tmp_path / "run", LARGE, fail)
    assert ended.value.__notes__[0].startswith("checkpoint 1 could not be written")


def test_a_directory_that_is_gone_is_told_as_a_full_disk_is(tmp_path):
    with pytest.raises(OSError, match=r"^checkpoint 1 could not be written to .*No such file or directory"):
        save_all(tmp_path, functools.partial(shutil.rmtree, tmp_path), STATE)


def test_saving_what_all_devices_hold_compiles_nothing_and_comes_back_on_others(tmp_path):
    state = replicate({"w": np.arange(24.0, dtype=np.float32).reshape(4, 6), "b": np.float32(2)}, data_mesh(4))
    with open_checkpoints(tmp_path) as checkpoints, no_recompiles():
        checkpoints.save(state, place(1))
    for others in (replicate(state, data_mesh(2)), jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state)):
        given = jax.tree.map(lambda leaf: leaf * 0, others)
        with open_checkpoints(tmp_path) as checkpoints:
            restored, _ = checkpoints.restore(given)
        for name, leaf in restored.items():
            np.testing.assert_array_equal(leaf, state[name])
            assert leaf.sharding == given[name].sharding


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_state_comes_back_bit_for_bit_on_more_devices_and_on_fewer(tmp_path, is_sharded):
    values = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    values[0, 0] = np.nan

    def on(num_devices):
        mesh = data_mesh(num_devices)
        spec = jax.sharding.PartitionSpec("data") if is_sharded else jax.sharding.PartitionSpec()
        return {"w": jax.device_put(values, jax.sharding.NamedSharding(mesh, spec))}

    for number, (before, after) in enumerate([(1, 4), (4, 1), (4, 2)]):
        with open_checkpoints(tmp_path / str(number)) as checkpoints:
            checkpoints.save(on(before), place(1))
        with open_checkpoints(tmp_path / str(number)) as checkpoints:
            given = on(after)
            restored, _ = checkpoints.restore(given)
        assert np.asarray(restored["w"]).tobytes() == values.tobytes()
        assert restored["w"].sharding == given["w"].sharding
