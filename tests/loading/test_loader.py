"""The loader: the plan's rows in the plan's order, from any step, with any number of workers."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jvarlen import Plan, UserError, load, make_buckets, make_plan, stream_batches
from jvarlen.batches import Batch, PackedBatch, PackedPairBatch, PairBatch
from jvarlen.data.tokens import TokenDataset
from jvarlen.experimental.large_plans import plan_distributed
from jvarlen.loading.plan_source import PlanSource
from jvarlen.planning.order import Order
from jvarlen.testing import assert_exactly_once
from tests.conftest import random_dataset
from tests.support.meshes import data_mesh
from tests.support.same_batches import assert_same_batches

DATASET = random_dataset(60, 20)
LENGTHS = np.diff(DATASET.offsets)
BUCKETS = make_buckets(LENGTHS, 64, max_shapes=3, num_microbatches=4)


def plan_of_epoch(epoch, **options):
    return make_plan(LENGTHS, BUCKETS, num_microbatches=4, order="shuffle", epoch=epoch, **options)


def rows_of(batch):
    """Texts of all rows of a batch, microbatch by microbatch; None for a padding row."""
    tokens, lengths = np.asarray(batch.tokens), np.asarray(batch.lengths)
    return [
        [tokens[m, b, :n].astype(np.uint8).tobytes() if (n := lengths[m, b]) else None for b in range(lengths.shape[1])]
        for m in range(len(lengths))
    ]


def planned_rows(plan, step):
    return [[DATASET[i].tobytes() if i >= 0 else None for i in ids] for ids in plan.rows(step)]


def test_every_step_holds_the_planned_rows():
    plan = plan_of_epoch(0)
    batches = list(load(plan, DATASET))
    assert len(batches) == plan.num_steps
    for step, batch in enumerate(batches):
        assert rows_of(batch) == planned_rows(plan, step)
        assert float(batch.num_sequences) == plan.num_sequences[step]
        assert float(np.sum(batch.weights)) == plan.num_tokens[step]
        assert isinstance(batch.tokens, jax.Array)


@pytest.mark.parametrize("start_step", [3, "last", "end"])
def test_loading_starts_at_any_step(start_step):
    plan = plan_of_epoch(0)
    start_step = {"last": plan.num_steps - 1, "end": plan.num_steps}.get(start_step, start_step)
    batches = list(load(plan, DATASET, start_step=start_step))
    assert [rows_of(b) for b in batches] == [planned_rows(plan, s) for s in range(start_step, plan.num_steps)]


def test_the_next_epoch_is_planned_while_one_is_loaded():
    planned = []
    is_planned = threading.Event()

    def plan_and_tell(epoch):
        planned.append((epoch, threading.current_thread() is threading.main_thread()))
        if epoch == 2:
            is_planned.set()
        return plan_of_epoch(epoch)

    batches = load(plan_and_tell, DATASET, epoch=1)
    next(batches)
    assert is_planned.wait(timeout=60)
    assert planned == [(1, True), (2, False)]


@pytest.mark.parametrize("num_epochs", [2, 4])
def test_epochs_end_where_they_should_and_none_is_planned_beyond(num_epochs):
    planned = []

    def plan_and_tell(epoch):
        planned.append(epoch)
        return plan_of_epoch(epoch)

    given = [rows_of(batch) for batch in load(plan_and_tell, DATASET, epoch=1, num_epochs=num_epochs)]
    assert planned == list(range(1, num_epochs))
    expected = [planned_rows(plan_of_epoch(e), s) for e in planned for s in range(plan_of_epoch(e).num_steps)]
    assert given == expected


def test_data_that_are_drawn_with_their_plan_are_drawn_once_an_epoch():
    drawn = {}

    def draw(epoch):
        assert epoch not in drawn
        drawn[epoch] = random_dataset(40, 20 + epoch)
        return make_plan(np.diff(drawn[epoch].offsets), [(3, 40)])

    batches = load(draw, drawn.__getitem__, num_epochs=3)
    assert bool(batches)
    assert not drawn.keys() - {0, 1}  # nothing else was planned
    number = len(batches)
    assert sorted(drawn) == [0, 1, 2]
    assert len(list(batches)) == number == 3 * 14


def test_one_epoch_of_a_plan_is_its_epoch_0():
    plan = make_plan(np.diff(DATASET.offsets), plan_of_epoch(0).buckets, epoch=5)
    expected = [planned_rows(plan.of_epoch(0), step) for step in range(plan.num_steps)]
    assert [rows_of(batch) for batch in load(plan, DATASET, num_epochs=1)] == expected
    assert [rows_of(batch) for batch in load(plan, DATASET)] != expected
    assert list(load(plan, DATASET, num_epochs=1, epoch=1)) == []


@pytest.mark.parametrize("resumed", [{"epoch": 2}, {"epoch": 3, "start_step": 1}, {"epoch": 1, "start_step": "end"}])
def test_a_finished_training_has_no_steps_left(resumed):
    plans = [plan_of_epoch(0), plan_of_epoch(1)]
    if "start_step" in resumed:
        resumed = resumed | {"start_step": {"end": plans[1].num_steps}.get(resumed["start_step"], 1)}
    batches = load(plans.__getitem__, DATASET, num_epochs=2, **resumed)
    assert batches.specs
    assert list(batches) == []


@pytest.mark.parametrize("is_function", [True, False])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_epochs": 0}, r"at least 1 and below .*num_epochs \(0\)"),
        ({"num_epochs": -1}, r"at least 1 and below .*num_epochs \(-1\)"),
        ({"num_epochs": 1.5}, r"must be integers .*num_epochs \(1.5\)"),
        ({"epoch": -1}, r"at least 0 and below .*epoch \(-1\)"),
        ({"start_step": 1.5}, r"must be integers .*start_step \(1.5\)"),
        ({"start_step": 10**6}, "start_step must be between 0 and"),
        ({"num_workers": -1}, r"at least 0 and below .*num_workers \(-1\)"),
    ],
)
def test_epochs_and_steps_that_are_none_are_refused(is_function, options, message):
    with pytest.raises(UserError, match=message):
        load(plan_of_epoch if is_function else plan_of_epoch(0), DATASET, **options)


@pytest.mark.parametrize("options", [{}, {"epoch": 1}, {"epoch": 2, "start_step": 3}, {"epoch": 3}])
def test_the_length_is_that_of_all_epochs_wherever_it_starts(options):
    batches = load(packed_plan_of_epoch, DATASET, num_epochs=3, **options)
    num_steps = [packed_plan_of_epoch(epoch).num_steps for epoch in range(3)]
    assert len(set(num_steps)) > 1
    assert len(batches) == sum(num_steps)
    given = list(batches)
    assert len(batches) == sum(num_steps)
    first = options.get("epoch", 0)
    assert len(given) == sum(num_steps[first:]) - options.get("start_step", 0)


def test_without_an_end_there_is_no_length():
    for batches in (load(plan_of_epoch, DATASET), load(stream_batches(LENGTHS.tolist(), BUCKETS), DATASET)):
        with pytest.raises(TypeError, match=r"no end: give num_epochs=|a stream has no known number of steps"):
            len(batches)
    plan = plan_of_epoch(5)
    assert len(load(plan, DATASET, start_step=2)) == len(load(plan, DATASET, num_epochs=1)) == plan.num_steps


def drawn(epoch):
    """Samples of an epoch, of lengths of their own."""
    return random_dataset(30 + epoch, 20, seed=epoch)


def plan_of_drawn(epoch):
    lengths = np.diff(drawn(epoch).offsets)
    return make_plan(lengths, BUCKETS, num_microbatches=4, order="dataset")


@pytest.mark.parametrize("kind", ["random access", "forward"])
def test_data_can_be_drawn_anew_in_each_epoch(kind):
    drawn_epochs = []

    def dataset_of_epoch(epoch):
        drawn_epochs.append(epoch)
        return drawn(epoch) if kind == "random access" else (drawn(epoch)[i] for i in range(30 + epoch))

    batches = load(plan_of_drawn, dataset_of_epoch, epoch=1, num_epochs=4)
    expected = [batch for epoch in (1, 2, 3) for batch in load(plan_of_drawn(epoch), drawn(epoch))]
    assert_same_batches(batches, expected)
    assert drawn_epochs == [1, 2, 3]
    with pytest.raises(UserError, match="lengths= are of one dataset, and a function gives each epoch another"):
        load(plan_of_drawn, drawn, lengths=LENGTHS)


@pytest.mark.parametrize("options", [{}, {"packing": "best_fit"}, {"sequences_per_step": 13}], ids=str)
def test_a_plan_is_loaded_for_all_epochs_in_its_shapes(options, tmp_path):
    plan = make_plan(LENGTHS, max_tokens=64, max_shapes=3, seed=3, epoch=4, **options)
    batches = load(plan, DATASET, num_epochs=3)
    plans = [plan.of_epoch(epoch) for epoch in range(3)]
    assert len({each.digest for each in plans}) == 3
    assert len(batches) == sum(each.num_steps for each in plans)
    given = list(batches)
    assert_same_batches(given, [batch for each in plans for batch in load(each, DATASET)])
    assert batches.specs == load(plans[2], DATASET).specs
    rest = load(plan, DATASET, epoch=1, start_step=2, num_epochs=3)
    assert_same_batches(rest, given[plans[0].num_steps + 2 :])
    plan.save(tmp_path / "plan.npz")
    with pytest.raises(UserError, match="this plan does not know the lengths of its samples"):
        load(Plan.load(tmp_path / "plan.npz"), DATASET, num_epochs=3)


def test_a_plan_alone_is_one_epoch():
    plan = plan_of_epoch(0)
    assert len(list(load(plan, DATASET, num_epochs=1))) == plan.num_steps
    with pytest.raises(UserError, match="a plan alone is one epoch: epoch=1 needs num_epochs=, or a function"):
        load(plan, DATASET, epoch=1)


def packed_plan_of_epoch(epoch):
    order = Order("shuffle", block_size=6)
    return make_plan(LENGTHS, max_tokens=20, max_length=20, packing="best_fit", order=order, epoch=epoch)


@pytest.mark.parametrize(("plan_of", "num_epochs"), [(plan_of_epoch, None), (packed_plan_of_epoch, 3)])
def test_loading_goes_on_at_the_place_of_the_next_batch(plan_of, num_epochs):
    steps = [(e, s) for e in range(3) for s in range(plan_of(e).num_steps)]
    if plan_of is packed_plan_of_epoch:
        assert len({plan_of(epoch).num_steps for epoch in range(3)}) > 1
    options = {"num_epochs": num_epochs}
    batches = load(plan_of, DATASET, **options)
    places = []
    for step in steps:
        assert batches.place == step  # however many steps were read ahead
        places.append(batches.place)
        ids = np.asarray(next(batches).ids)
        if step[1] % 5 == 0 or step[1] == plan_of(step[0]).num_steps - 1:
            there = load(plan_of, DATASET, epoch=places[-1].epoch, start_step=places[-1].step, **options)
            np.testing.assert_array_equal(next(there).ids, ids)
            assert there.place == batches.place
    end = batches.place
    assert end == ((3, 0) if num_epochs is None else (2, plan_of(2).num_steps))
    if num_epochs is not None:
        assert list(load(plan_of, DATASET, epoch=end.epoch, start_step=end.step, **options)) == []


def test_a_plan_alone_ends_at_its_last_step_and_a_stream_has_its_own_state():
    plan = plan_of_epoch(0)
    batches = load(plan, DATASET, start_step=plan.num_steps - 1)
    next(batches)
    assert batches.place == (0, plan.num_steps)
    batches = load(stream_batches(LENGTHS.tolist(), BUCKETS), DATASET)
    with pytest.raises(UserError, match=r"the place of a stream is stream\.state\(\) after a batch"):
        _ = batches.place


def test_a_place_is_not_passed_by_a_step_that_fails():
    plan = plan_with_seven_late()
    batches = load(plan, Failing("raises"))
    with pytest.raises(OSError, match="disk on fire"):
        list(batches)
    assert batches.place == (0, plan.num_steps - 1)
    batches.close()
    assert batches.place == (0, plan.num_steps - 1)


def test_steps_before_the_start_are_not_read():
    plan = make_plan(LENGTHS, BUCKETS, order="length", num_microbatches=4)
    before = plan.sample_ids[: plan.step_offsets[3]].tolist()
    assert len(list(load(plan, Broken(*before), start_step=3))) == plan.num_steps - 3


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """One ends by an error, one will be killed; what they take for that overlaps with tests before theirs."""
    path = tmp_path_factory.mktemp("programs") / "program.py"
    path.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    with contextlib.ExitStack() as stack:
        started = {}
        for how in ("a worker exits", "is killed"):
            command = [sys.executable, path, how]
            started[how] = stack.enter_context(subprocess.Popen(command, env=environment, **pipes))
            stack.callback(started[how].kill)
        yield started


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.usefixtures("programs")
def test_worker_processes_do_not_change_the_order():
    """Nor what is skipped."""
    plan = plan_of_epoch(0)
    options = {"lengths": LENGTHS, "on_bad_sample": "skip", "max_bad_fraction": 0.1, "start_step": 1}
    alone = load(plan, Failing("raises"), **options)
    batches = load(plan, Failing("raises"), num_workers=2, **options)
    assert_same_batches(batches, alone)
    assert batches.skipped == alone.skipped == [(0, batches.skipped[0].step, 7, "OSError: [Errno 5] disk on fire")]
    assert own_processes() == []
    assert is_soon(lambda: not own_threads())


def own_processes():
    return multiprocessing.active_children()


def own_threads():
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead" and thread not in EARLIER]


EARLIER = set()


@pytest.fixture(autouse=True)
def note_earlier_threads():
    """Those of batches that other tests left in cycles of references end when these are collected."""
    EARLIER.update(threading.enumerate())


class Failing:
    """The dataset, but for sample 7."""

    def __init__(self, how):
        self.how = how

    def __len__(self):
        return len(DATASET)

    def __getitem__(self, index):
        if index == 7:
            match self.how:
                case "raises":
                    raise OSError(5, "disk on fire")
                case "raises no pickle":
                    raise NoPickle(threading.Lock())
                case "is killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "hangs":
                    time.sleep(1000)
        return DATASET[index]


class NoPickle(Exception):
    pass


def plan_with_seven_late():
    ids = [i for i in range(30) if i != 7]
    return make_plan(LENGTHS, [(2, 20)], num_microbatches=1, order=[*ids, 7])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_ends_a_worker_process_is_told_in_bounded_time(monkeypatch):
    """All at once, because starting a process takes longer than all that is looked at."""
    monkeypatch.setattr("jvarlen.loading.epochs._GRACE_S", 1.0)
    plan = plan_with_seven_late()
    hows = ["raises no pickle", "is killed", "hangs"]
    loading = {how: load(plan, Failing(how), num_workers=1) for how in hows}

    def ended(how):
        num_given = 0
        try:
            for _ in loading[how]:
                num_given += 1
        except RuntimeError as error:
            with pytest.raises(type(error)):
                next(loading[how])  # and it does not go on as if nothing had been
            return num_given, error
        raise AssertionError(how)

    with concurrent.futures.ThreadPoolExecutor(len(hows)) as pool:
        found = dict(zip(hows[:-1], pool.map(ended, hows[:-1]), strict=True))
    num_given, error = found["raises no pickle"]
    assert num_given == plan.num_steps - 1
    assert repr(error).startswith("RuntimeError('NoPickle(")
    assert error.__notes__[:2] == ["while reading sample 7", f"while reading step {plan.num_steps - 1}"]
    num_given, error = found["is killed"]
    assert f"a worker process was killed by signal 9 before step {num_given} was read" in str(error)
    for _ in range(plan.num_steps - 1):
        next(loading["hangs"])
    loading.clear()
    del found, error
    assert is_soon(lambda: not own_processes())
    assert is_soon(lambda: not own_threads())


@pytest.mark.slow
@pytest.mark.multiprocess
def test_no_process_is_left_behind_by_an_error_or_a_kill(programs):
    raising, killed = programs["a worker exits"], programs["is killed"]
    workers = [int(process.stdout.readline()) for process in (raising, killed)]
    killed.kill()
    said = raising.communicate(timeout=60)[1].decode()
    assert (raising.returncode, killed.wait(timeout=60)) == (1, -signal.SIGKILL)
    assert "RuntimeError: a worker process ended with exit code 0 before step " in said
    assert is_soon(lambda: not any(map(is_running, workers)))


def is_running(pid):
    """Whether there is such a process that still runs: one whose parent died may stay as an entry in the table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_soon(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


PROGRAM = """
import multiprocessing, os, sys, time
import numpy as np
import jvarlen

class Dataset:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        if i == 50 and sys.argv[1] == "a worker exits":
            os._exit(0)
        return np.arange(3)

if __name__ == "__main__":
    batches = jvarlen.load(jvarlen.make_plan([3] * 100, [(1, 3)], order="length"), Dataset(), num_workers=1)
    next(batches)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    if sys.argv[1] == "is killed":
        time.sleep(1000)
    list(batches)
"""


def test_an_error_in_a_training_leaves_no_thread():
    def train():
        batches = load(plan_of_epoch, DATASET)
        next(batches)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert is_soon(lambda: not own_threads())


LEFT = """
import atexit, threading, time
atexit.register(lambda: print([thread.name for thread in threading.enumerate()]))  # runs last
from jvarlen.loading.epochs import ReadAhead

class Steps:
    def __iter__(self):
        return self

    def __next__(self):
        return 0

    def close(self):
        pass

reading = ReadAhead(Steps(), lambda step: time.sleep(0.5))
next(reading)
del reading
"""


def test_no_thread_reads_on_while_the_interpreter_ends():
    ended = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, check=True)
    assert "read-ahead" not in ended.stdout


def test_batches_that_were_read_keep_no_variable_of_their_reader():
    def read():
        state = TokenDataset(DATASET.tokens, DATASET.offsets)
        batches = load(plan_of_epoch(0), DATASET)
        assert sum(1 for _ in batches) == plan_of_epoch(0).num_steps
        assert next(batches, None) is None
        return weakref.ref(state)

    gc.disable()
    try:
        assert read()() is None
    finally:
        gc.enable()


def test_closed_batches_are_at_their_end():
    batches = load(plan_of_epoch, DATASET)
    next(batches)
    batches.close()
    batches.close()
    assert is_soon(lambda: not own_threads())
    with pytest.raises(ValueError, match="closed"):
        next(batches)


def test_samples_are_counted_as_they_are_given():
    plan = plan_of_epoch(0)
    batches = load(plan, DATASET, start_step=3)
    assert batches.num_samples == 0
    for step, _ in enumerate(batches, 3):  # however many steps were read ahead
        assert batches.num_samples == plan.step_offsets[step + 1] - plan.step_offsets[3]


def test_adjusted_samples_are_counted_as_they_are_given():
    plan = make_plan(LENGTHS, BUCKETS, order="length", num_microbatches=4)
    samples = [DATASET[i] for i in range(len(DATASET))]
    victims = plan.sample_ids[[0, -1]].tolist()
    for i in victims:
        samples[i] = np.resize(samples[i], LENGTHS[i] + 3)
    batches = load(plan, samples, lengths=LENGTHS, on_mismatch="adjust")
    next(batches)
    assert batches.num_adjusted == 1
    assert sum(1 for _ in batches) == plan.num_steps - 1
    assert batches.num_adjusted == 2
    with pytest.raises(ValueError, match=f"id {victims[0]}: {LENGTHS[victims[0]] + 3} tokens, planned"):
        next(load(plan, samples, lengths=LENGTHS))


@pytest.mark.parametrize("error", [StopIteration("end"), SystemExit(0)], ids=["StopIteration", "SystemExit"])
def test_no_error_of_a_dataset_passes_for_the_end_of_the_data(error):
    with pytest.raises(RuntimeError, match=rf"raised {type(error).__name__}\(.*\) for sample 7"):
        list(load(plan_of_epoch(0), Broken(7, error=error)))


def test_microbatches_lie_on_their_shards():
    mesh = data_mesh(4)
    plan = plan_of_epoch(0)
    for step, batch in enumerate(load(plan, DATASET, layout=mesh)):
        assert batch.tokens.sharding.spec == PartitionSpec("data")
        assert batch.num_sequences.sharding.is_fully_replicated
        for shard in batch.tokens.addressable_shards:
            m = shard.index[0].start
            assert mesh.devices[m] == shard.device
            assert (np.asarray(shard.data[0]) == np.asarray(batch.tokens)[m]).all()
        assert rows_of(batch) == planned_rows(plan, step)


class Counted(NamedTuple):
    ids: np.ndarray
    num_sequences: np.ndarray


def count_samples(step):
    return Counted(step.ids, np.float32(sum(map(len, step.samples))))


@pytest.mark.parametrize("mesh", [None, 2], indirect=True)
def test_a_collate_function_of_ones_own_makes_any_pytree(mesh):
    plan = plan_of_epoch(0)
    batches = load(plan, DATASET, layout=mesh, collate=count_samples)
    for step, batch in enumerate(batches):
        assert (np.asarray(batch.ids) == plan.rows(step)).all()
        assert float(batch.num_sequences) == plan.num_sequences[step]
        told = batches.specs[plan.buckets.shapes[plan.step_bucket[step]]]
        assert jax.tree.map(jax.typeof, batch) == jax.tree.map(jax.typeof, told)


@pytest.fixture
def mesh(request):
    return None if request.param is None else data_mesh(request.param)


@pytest.mark.parametrize("mesh", [None, 2], indirect=True)
@pytest.mark.parametrize("kind", ["padded", "packed", "pairs", "packed pairs"])
def test_the_plan_tells_the_arrays_of_a_batch(kind, mesh):
    lengths = np.stack([LENGTHS, LENGTHS[::-1]], axis=1) if "pairs" in kind else LENGTHS
    dataset = [(DATASET[i], DATASET[59 - i]) for i in range(60)] if "pairs" in kind else DATASET
    longest = (20, 20) if "pairs" in kind else (20,)
    packing = "best_fit" if "packed" in kind else "padded"
    plan = make_plan(lengths, [(2, *longest)], packing=packing, order="length", num_microbatches=2)
    batches = load(plan, dataset, layout=mesh)
    (spec,) = batches.specs.values()
    kinds = {"padded": Batch, "packed": PackedBatch, "pairs": PairBatch, "packed pairs": PackedPairBatch}
    assert type(spec) is kinds[kind]
    for batch in batches:
        for leaf, told in zip(batch, spec, strict=True):
            assert (leaf.shape, leaf.dtype) == (told.shape, told.dtype)
            assert mesh is None or leaf.sharding == told.sharding


def test_shards_must_divide_the_microbatches():
    plan = make_plan(LENGTHS, BUCKETS, order="length", num_microbatches=3)
    with pytest.raises(ValueError, match="3 microbatches a step do not spread over 4 shards"):
        load(plan, DATASET, layout=data_mesh(4))
    with pytest.raises(ValueError, match="which axis of the mesh is for data"):
        load(plan, DATASET, layout=jax.make_mesh((1, 1), ("model", "expert"), devices=jax.devices()[:1]))


def test_a_smaller_dataset_is_refused():
    with pytest.raises(ValueError, match="the plan holds sample 59, the dataset only 10 samples"):
        load(plan_of_epoch(0), random_dataset(10, 20))


def test_a_sample_that_cannot_be_read_is_named():
    with pytest.raises(OSError, match="7 is gone") as raised:
        list(load(plan_of_epoch(0), Broken(7)))
    assert "while reading sample 7" in "".join(raised.value.__notes__)


class Broken:
    """The dataset, but for some samples."""

    def __init__(self, *bad, error=None):
        self.bad, self.error = bad, error

    def __len__(self):
        return len(DATASET)

    def __getitem__(self, index):
        if index in self.bad:
            raise self.error or OSError(f"{index} is gone")
        return DATASET[index]


def test_skipped_samples_are_counted_as_they_are_given():
    bad = 3, 30, 31
    options = {"lengths": LENGTHS, "on_bad_sample": "skip", "max_bad_fraction": 0.05}
    batches = load(plan_of_epoch, Broken(*bad), num_epochs=2, **options)
    told, num_samples = [], 0
    for epoch in range(2):
        plan = plan_of_epoch(epoch)
        of_epoch = []
        for step in range(plan.num_steps):
            batch = next(batches)
            kept = [[DATASET[i].tobytes() for i in ids if i >= 0 and i not in bad] for ids in plan.rows(step)]
            assert [list(filter(None, rows)) for rows in rows_of(batch)] == kept
            assert batch.num_sequences == plan.num_sequences[step]
            ids = np.array([one.id for one in batches.skipped_in_batch], int)
            assert ids.tolist() == [i for i in plan.rows(step).ravel().tolist() if i in bad]
            of_epoch += batches.skipped_in_batch
            num_samples += plan.num_sequences[step] - len(ids)
        assert all((one.epoch, one.reason) == (epoch, f"OSError: {one.id} is gone") for one in of_epoch)
        told += of_epoch
    assert {(one.epoch, one.id) for one in told} == set(itertools.product(range(2), bad))
    assert (batches.num_skipped, batches.skipped, batches.num_samples) == (6, told, num_samples)


def test_more_bad_samples_than_the_stated_share_are_an_error():
    options = {"lengths": LENGTHS, "on_bad_sample": "skip"}
    batches = load(plan_of_epoch(0), Broken(5, 6, 7, 8), max_bad_fraction=0.05, **options)
    message = r"4 bad samples of 60 in epoch 0 are more than max_bad_fraction=0\.05: id \d \(step \d+\): OSError: \d is"
    with pytest.raises(ValueError, match=message) as raised:
        list(batches)
    assert batches.num_skipped == len(batches.skipped) < 4  # those of the steps before
    with pytest.raises(ValueError, match="4 bad samples"):
        next(batches)
    assert {int(i) for i in re.findall(r"id (\d)", str(raised.value))} == {5, 6, 7, 8}
    assert len(list(load(plan_of_epoch(0), Broken(5, 6, 7), max_bad_fraction=0.05, **options))) > 1
    assert list(load(plan_of_epoch(0), Broken(*range(60)), max_bad_fraction=1, **options))[-1].lengths.max() == 0
    for share in (-0.1, 1.1, "all", None):
        with pytest.raises(ValueError, match="max_bad_fraction must be between 0 and 1"):
            load(plan_of_epoch(0), DATASET, max_bad_fraction=share, **options)
    with pytest.raises(ValueError, match="a stream is loaded as it comes, without on_bad_sample"):
        load(stream_batches(LENGTHS.tolist(), BUCKETS, num_microbatches=4), DATASET, on_bad_sample="skip")


def test_a_stream_loads_every_sample_once():
    mesh = data_mesh(2)
    read = []

    class Counting:
        def __getitem__(self, i):
            read.append(i)
            return DATASET[i]

    stream = stream_batches(LENGTHS.tolist(), BUCKETS, num_microbatches=4)
    rows = [row for batch in load(stream, Counting(), layout=mesh) for m in rows_of(batch) for row in m if row]
    assert sorted(rows) == sorted(DATASET[i].tobytes() for i in range(len(DATASET)))
    assert_exactly_once(read, len(DATASET))


def test_a_stream_goes_on_after_the_last_batch_that_was_given():
    """The state after a batch, through JSON, gives the batches after it and no other."""

    def stream(state=None):
        return stream_batches(LENGTHS.tolist(), BUCKETS, num_microbatches=4, state=state)

    expected = [rows_of(batch) for batch in load(stream(), DATASET)]
    assert len(expected) > 3
    for num_given in range(1, len(expected)):
        first = stream()
        given = [rows_of(batch) for batch in itertools.islice(load(first, DATASET), num_given)]
        state = json.loads(json.dumps(first.state()))
        assert given + [rows_of(batch) for batch in load(stream(state), DATASET)] == expected


def test_a_payload_of_another_length_than_the_stream_said_is_refused():
    stream = stream_batches(LENGTHS.tolist(), BUCKETS, num_microbatches=4)
    with pytest.raises(ValueError, match="a stream is loaded as it comes, without start_step"):
        load(stream, DATASET, start_step=1)
    with pytest.raises(ValueError, match="planned"):
        list(load(stream, {i: DATASET[i][:1] for i in range(len(DATASET))}))


def test_a_distributed_plan_loads_what_the_whole_plan_does():
    dataset = random_dataset(60, 30)
    lengths = [len(dataset[i]) for i in range(60)]
    buckets, mesh = [(2, 12), (1, 30)], data_mesh(2)
    options = {"num_microbatches": 4, "order": "shuffle", "seed": 3}
    plan = plan_distributed(lengths, buckets, mesh, **options)
    whole = make_plan(lengths, buckets, **options)
    loading = load(plan, dataset, layout=mesh, lengths=lengths)
    batches, expected = list(loading), list(load(whole, dataset, layout=mesh))
    assert_same_batches(batches, expected)
    assert [leaf.sharding for leaf in jax.tree.leaves(batches)] == [leaf.sharding for leaf in jax.tree.leaves(expected)]
    with pytest.raises(ValueError, match="is not the one whose lengths were planned"):
        next(load(plan, [dataset[i][:1] for i in range(60)], layout=mesh))
    with pytest.raises(ValueError, match=r"made for a mesh where this process has the microbatches \[0, 1\]"):
        load(dataclasses.replace(plan, microbatches=np.array([0, 1])), dataset, layout=mesh)


def test_a_stream_that_truncates_is_loaded_with_its_samples_cut():
    samples = [np.arange(length) for length in (3, 9, 1)]
    stream = stream_batches(map(len, samples), [(3, 4)], overlong="truncate")
    (batch,) = load(stream, samples)
    assert (batch.lengths.tolist(), batch.ids.tolist()) == ([[3, 4, 1]], [[0, 1, 2]])
    assert (stream.num_truncated, float(batch.num_sequences)) == (1, 3.0)


class Iterable:
    """The dataset, which can only be iterated; `num_held` is how many samples were read and not yet given."""

    def __init__(self, samples=DATASET, fails_at=None):
        self.samples, self.num_read, self.fails_at = samples, 0, fails_at

    def __iter__(self):
        for i in range(len(self.samples)):
            self.num_read = i + 1
            if i == self.fails_at:
                raise OSError("the archive ends here")
            yield self.samples[i]


class IterableDataset(Iterable):
    """As PyTorch has it."""

    def __getitem__(self, index):
        raise NotImplementedError


IN_ORDER = make_plan(LENGTHS, BUCKETS, num_microbatches=4, order="dataset")


@pytest.mark.parametrize("start_step", [0, 3])
@pytest.mark.parametrize("dataset_type", [Iterable, IterableDataset, lambda: iter(Iterable())])
def test_a_dataset_that_only_iterates_is_read_forward(dataset_type, start_step):
    dataset = dataset_type()
    options = {"lengths": LENGTHS, "start_step": start_step}
    batches, expected = load(IN_ORDER, dataset, **options), load(IN_ORDER, DATASET, **options)
    assert_same_batches(batches, expected)


def test_an_iterable_is_read_again_in_each_epoch_and_an_iterator_is_refused():
    plans = [IN_ORDER] * 3
    batches = load(plans.__getitem__, Iterable(), num_epochs=3)
    assert_same_batches(batches, itertools.chain(*(load(IN_ORDER, DATASET) for _ in plans)))
    with pytest.raises(ValueError, match="a generator gives its samples once: for any number of epochs"):
        load(plans.__getitem__, iter(Iterable()), num_epochs=3)


def test_an_iterable_in_another_order_is_refused():
    long = np.resize(LENGTHS, 600)
    plan = make_plan(long, BUCKETS, num_microbatches=4, order="shuffle")
    message = r'\d+ would wait in memory, and at most \d+ may, .* order="dataset", or .* with stream_batches'
    with pytest.raises(ValueError, match=message):
        load(plan, Iterable())
    samples, options = [DATASET[i % 60] for i in range(600)], {"max_tokens": 64, "order": "dataset"}
    packed, wrapped = (make_plan(long, **options, packing=packing) for packing in ("best_fit", "wrapped"))
    with pytest.raises(ValueError, match='Plan with order="dataset", packed rows with packing="wrapped", or'):
        load(packed, Iterable())
    assert_same_batches(load(wrapped, Iterable(samples)), load(wrapped, samples))
    with pytest.raises(ValueError, match="num_workers=2 needs random access"):
        load(IN_ORDER, Iterable(), num_workers=2)
    with pytest.raises(ValueError, match="the plan holds sample 59, "):
        load(IN_ORDER, Iterable(), lengths=LENGTHS[1:])
    with pytest.raises(ValueError, match="has no step to read first"):
        _ = load(IN_ORDER, Iterable(), collate=lambda step: step.ids).specs


def test_bad_samples_of_an_iterable_are_skipped():
    samples = [DATASET[i] for i in range(60)]
    samples[5] = samples[5][:0]
    options = {"lengths": LENGTHS, "on_bad_sample": "skip", "max_bad_fraction": 0.02}
    batches = load(IN_ORDER, Iterable(samples), **options)
    assert_same_batches(batches, load(IN_ORDER, samples, **options))
    assert [one.id for one in batches.skipped] == [5]


@pytest.mark.parametrize("buffer", [{}, {"shuffle_buffer": 9, "seed": 1}])
@pytest.mark.parametrize("overlong", ["drop", "truncate"])
def test_a_stream_takes_what_can_only_be_iterated(buffer, overlong):
    """Also from a state, and an iterator that is split for lengths and samples."""
    options = {"buckets": [(2, 5), (1, 12)], "num_microbatches": 2, "overlong": overlong, **buffer}

    def batches_from(dataset, state=None):
        stream = stream_batches(LENGTHS.tolist(), state=state, **options)
        return stream, load(stream, dataset)

    expected = list(batches_from(DATASET)[1])
    assert_same_batches(batches_from(Iterable())[1], expected)
    lengths, samples = itertools.tee(Iterable())
    assert_same_batches(load(stream_batches(map(len, lengths), **options), samples), expected)
    stream, batches = batches_from(Iterable())
    given = list(itertools.islice(batches, 4))
    state = json.loads(json.dumps(stream.state()))
    assert_same_batches([*given, *batches_from(Iterable(), state)[1]], expected)
    assert_same_batches(batches_from(iter(Iterable()))[1], expected)


def test_datasets_of_hugging_face_and_pytorch_are_read_in_the_order_of_the_plan():
    datasets, torch = pytest.importorskip("datasets"), pytest.importorskip("torch")
    plan = plan_of_epoch(0)
    samples = [DATASET[i].tolist() for i in range(len(DATASET))]
    table = datasets.Dataset.from_dict({"tokens": samples}).with_format("numpy")
    expected = [[samples[i] for i in ids[ids >= 0].tolist()] for ids in (plan.rows(s) for s in range(plan.num_steps))]
    for dataset in (table, torch.utils.data.Subset(table, range(len(samples)))):
        source = PlanSource(plan, dataset, lambda step: [one["tokens"].tolist() for m in step.samples for one in m])
        assert [source[step] for step in range(plan.num_steps)] == expected
