"""Asynchronous training with worker processes: bulk-synchronous at bound 0, and repeated bit for bit from its log."""

import os
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jvarlen import UserError, load, make_plan, make_train_step
from jvarlen.experimental.asynchronous import (
    ArrivalLog,
    keep_versions,
    make_stale_train_step,
    replay,
    train,
    train_async,
)
from jvarlen.experimental.asynchronous.arrival_log import digest_of_state
from jvarlen.experimental.asynchronous.programs import StepPrograms, split_microbatches
from jvarlen.experimental.asynchronous.worker import Worker
from jvarlen.training.train_state import new_state
from tests.conftest import random_dataset

OPTIMIZER = optax.adamw(0.05)
DATASET = random_dataset(96, 8)


def loss_fn(params, microbatch):
    x = params["embedding"][microbatch.tokens] @ params["w"]
    losses = (jnp.tanh(x) - microbatch.tokens / 128) ** 2 * microbatch.weights
    return jnp.sum(losses), jnp.sum(microbatch.weights)


def noisy_loss_fn(params, microbatch, key, extra):
    loss_sum, weight_sum = loss_fn(params, microbatch)
    extra = {"rows": extra["rows"] + jnp.sum(microbatch.lengths > 0), "mean": 0.9 * extra["mean"] + 0.1 * loss_sum}
    return loss_sum * (1 + 0.1 * jax.random.normal(key)), weight_sum, {"ones": jnp.ones(())}, extra


def first_state(dtype=jnp.float32):
    embedding = jax.random.normal(jax.random.key(0), (128, 4)).astype(dtype)
    extra = {"rows": jnp.zeros((), jnp.int32), "mean": jnp.zeros((), dtype)}
    return new_state({"embedding": embedding, "w": jnp.ones(4, dtype) / 2}, OPTIMIZER, extra=extra, seed=0)


def make_small_plan(num_microbatches, dataset=DATASET):
    return make_plan(
        [len(sample) for sample in dataset], [(2, 4), (2, 8)], order="length", num_microbatches=num_microbatches
    )


def assert_same_bits(one, other):
    keys_as_data = jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf,
        (one, other),
    )
    jax.tree.map(np.testing.assert_array_equal, *keys_as_data)


class Staying:
    """Workers that a test can find, and end."""

    def __init__(self, monkeypatch):
        self.workers = []
        monkeypatch.setattr(train, "Worker", self.start)

    def start(self, *args):
        self.workers.append(Worker(*args))
        return self.workers[-1]

    def kill(self, number):
        os.kill(self.workers[number]._process.pid, signal.SIGKILL)

    def stop(self, number):
        os.kill(self.workers[number]._process.pid, signal.SIGSTOP)
        self.workers[number]._timeout_s = 0.4  # from now on: starting takes longer


@pytest.fixture
def staying(monkeypatch):
    return Staying(monkeypatch)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_bound_0_is_the_data_parallel_step_bit_for_bit_though_interrupted():
    """With a microbatch for each device, and the state on these devices. Resumed after Ctrl-C."""
    plan = make_small_plan(4)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    initial = jax.device_put(first_state(), NamedSharding(mesh, PartitionSpec()))
    step, state = jax.jit(make_train_step(noisy_loss_fn, OPTIMIZER, layout=mesh)), initial
    losses = []
    for batch in load(plan, DATASET, layout=mesh):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))

    def batches(start_step=0, interrupted_at=None):
        for number, batch in enumerate(load(plan, DATASET, start_step=start_step)):
            if number == interrupted_at:
                signal.raise_signal(signal.SIGINT)
            yield batch

    options = {"num_workers": 2, "staleness_bound": 0}
    first = train_async(noisy_loss_fn, OPTIMIZER, initial, plan, batches(0, 3), **options)
    num_done = len(first.log.steps)
    assert first.interrupted
    assert 2 <= num_done < plan.num_steps
    rest = train_async(noisy_loss_fn, OPTIMIZER, first.state, plan, batches(num_done), start_step=num_done, **options)
    assert not rest.interrupted
    assert_same_bits(rest.state, state)
    assert [*first.log.losses, *rest.log.losses] == losses
    assert [*first.log.steps, *rest.log.steps] == list(range(plan.num_steps))
    assert not rest.log.staleness.any()


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_that_loses_workers_keeps_its_bound_and_is_repeated_bit_for_bit(tmp_path, staying):
    plan = make_small_plan(3)

    def batches():
        for step, batch in enumerate(load(plan, DATASET)):
            if step == plan.num_steps // 2:
                staying.kill(0)
                staying.stop(1)
            yield batch

    with pytest.warns(UserWarning, match="worker") as warned:
        run = train_async(
            noisy_loss_fn,
            OPTIMIZER,
            first_state(),
            plan,
            batches(),
            num_workers=3,
            staleness_bound=2,
            least_seconds=(0.005, 0.005, 0.03),
        )
    said = sorted(str(warning.message) for warning in warned)
    assert re.match(r"worker 0 was killed by signal 9, after \d+ updates", said[0])
    assert re.match(r"worker 1 gave no sign for worker_timeout_s=0.4, and was killed, after \d+ updates", said[1])
    assert sorted(run.log.steps.tolist()) == list(range(plan.num_steps))
    assert 0 < run.log.staleness.max() <= 2
    assert {0, 1, 2} == {*run.log.workers.ravel().tolist()}
    assert (run.log.arrived_s <= run.log.applied_s[:, None]).all()
    assert int(run.state.extra["rows"]) == len(DATASET)
    assert sum(each.sums["ones"] for each in run.metrics) == plan.num_steps * 3
    assert all(worker._process.poll() is not None for worker in staying.workers)
    run.log.save(tmp_path / "log.npz")
    log = ArrivalLog.load(tmp_path / "log.npz")
    replayed = replay(log, noisy_loss_fn, OPTIMIZER, first_state(), plan, load(plan, DATASET))
    assert_same_bits(replayed.state, run.state)
    assert_same_bits(replayed.metrics, run.metrics)


def made_up_run(plan, state, staleness):
    """A log of versions that a test chooses, and its run, in one process; neighbouring steps change places."""
    programs = StepPrograms(loss_fn, OPTIMIZER, state)
    steps = np.argsort(np.arange(plan.num_steps) ^ 1)
    shape = (plan.num_steps, plan.num_microbatches)
    versions = np.maximum(np.arange(plan.num_steps)[:, None] - np.resize(staleness, shape), 0)
    batches = [jax.tree.map(np.asarray, batch) for batch in load(plan, DATASET)]
    initial, losses, past = state, [], []
    for step, of_update in zip(steps.tolist(), versions.tolist(), strict=True):
        past.append(programs.version_of(state))
        parts = split_microbatches(batches[step])
        sums = [
            programs.run(programs.gradient_of(part), past[version], (step, i), part)
            for i, (part, version) in enumerate(zip(parts, of_update, strict=True))
        ]
        state, metrics = programs.update(state, batches[step], sums)
        losses.append(float(metrics.loss))
    log = ArrivalLog(
        plan_digest=plan.digest,
        staleness_bound=None,
        initial_digest=digest_of_state(initial),
        final_digest=digest_of_state(state),
        steps=steps,
        versions=versions,
        workers=np.zeros(shape, np.int64),
        arrived_s=np.zeros(shape),
        applied_s=np.zeros(plan.num_steps),
        losses=np.array(losses),
    )
    return log, state


def test_a_replay_takes_the_versions_and_the_order_of_the_log():
    plan = make_small_plan(2)
    log, state = made_up_run(plan, first_state(), [0, 3, 1, 5])
    replayed = replay(log, loss_fn, OPTIMIZER, first_state(), plan, load(plan, DATASET))
    assert_same_bits(replayed.state, state)
    in_order = keep_versions(first_state(), delays=log.staleness)
    step = jax.jit(make_stale_train_step(loss_fn, OPTIMIZER, delays=log.staleness))
    batches = list(load(plan, DATASET))
    for number in log.steps.tolist():
        in_order, _ = step(in_order, batches[number])
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4), in_order.params, state.params)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_workers": 0}, "num_workers"),
        ({"num_workers": 1, "staleness_bound": -1}, "staleness_bound"),
        ({"num_workers": 1, "start_step": 10_000}, "start_step must be between 0 and"),
        ({"num_workers": 2, "least_seconds": [0.1]}, "least_seconds must be 2 finite numbers"),
        ({"num_workers": 1, "worker_timeout_s": np.inf}, "worker_timeout_s must be finite seconds above 0, or None"),
        ({"num_workers": 1, "least_seconds": [np.inf]}, "least_seconds must be 1 finite numbers"),
    ],
)
def test_arguments_out_of_range_start_no_worker(options, said):
    plan = make_small_plan(2)
    with pytest.raises(UserError, match=said):
        train_async(loss_fn, OPTIMIZER, first_state(), plan, [], **options)
