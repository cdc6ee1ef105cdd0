"""Plans made in pieces on disk are those made in memory, also after an interruption."""

import dataclasses
import errno
import itertools
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen import Order, make_buckets, make_plan
from jvarlen.experimental.large_plans import open_plan, out_of_core, plan_on_disk, raw_plan, stages
from jvarlen.experimental.large_plans.__main__ import main
from jvarlen.planning import plan_file

ORDERS = ("length", "length_descending", "shuffle", "dataset")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Pieces and chunks of few samples, so that small plans have many."""
    monkeypatch.setattr(stages, "PIECE", 64)
    for module in (plan_file, raw_plan, out_of_core):
        monkeypatch.setattr(module, "DIGEST_CHUNK", 50)


@pytest.fixture
def lengths_file(tmp_path):
    """A memory-mapped file of 500 lengths."""
    path = tmp_path / "lengths.npy"
    np.save(path, np.random.default_rng(0).integers(1, 61, 500).astype(np.uint16))
    return np.load(path, mmap_mode="r")


def check_equal(on_disk, in_memory):
    assert on_disk.digest == in_memory.digest
    assert on_disk.buckets == in_memory.buckets
    assert on_disk.largest_id == in_memory.largest_id
    for name in ("sample_ids", "step_bucket", "step_offsets", "num_tokens"):
        np.testing.assert_array_equal(getattr(on_disk, name), getattr(in_memory, name), err_msg=name)
    for name in ("num_microbatches", "new_shape_every", "overlong", "num_dropped", "num_truncated"):
        assert getattr(on_disk, name) == getattr(in_memory, name)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_the_plan_on_disk_is_the_one_in_memory(tmp_path_factory, data):
    dtype = data.draw(st.sampled_from([np.uint8, np.int16, np.uint32, np.int64, np.uint64]))
    lengths = np.array(
        data.draw(st.lists(st.integers(1, data.draw(st.sampled_from([1, 4, 100]))), max_size=300, min_size=1)), dtype
    )
    if data.draw(st.booleans()):
        lengths = np.repeat(lengths, data.draw(st.integers(1, 3)))
    M = data.draw(st.integers(1, 3))
    buckets = make_buckets(lengths, 200, max_shapes=data.draw(st.integers(1, 4)), num_microbatches=M)
    overlong = data.draw(st.sampled_from(["error", "drop", "truncate"]))
    if overlong != "error":
        num_shapes = data.draw(st.integers(1, len(buckets.shapes)))
        buckets = dataclasses.replace(buckets, shapes=buckets.shapes[:num_shapes])
    arguments = {
        "num_microbatches": M,
        "order": Order(
            data.draw(st.sampled_from(ORDERS)),
            block_size=data.draw(st.none() | st.sampled_from([1, np.int64(7), 100, 1000])),
            shuffle_steps=data.draw(st.booleans()),
            longest_first=data.draw(st.booleans()),
            new_shape_every=data.draw(st.integers(0, 2)),
        ),
        "seed": data.draw(st.integers(0, 5)),
        "overlong": overlong,
    }
    directory = tmp_path_factory.mktemp("plans")
    out = directory / "plan"
    if data.draw(st.booleans()):
        source = tmp_path_factory.mktemp("lengths") / "lengths.npy"
        np.save(source, lengths)
        lengths = np.load(source, mmap_mode="r")
    if overlong == "drop" and (lengths > buckets.shapes[-1].length).all():
        with pytest.raises(ValueError, match="leaves no sample"):
            plan_on_disk(lengths, buckets, out, progress=False, **arguments)
        assert not list(out.parent.iterdir())
        return
    plan = plan_on_disk(lengths, buckets, out, progress=False, **arguments)
    check_equal(plan, make_plan(lengths, buckets, **arguments))
    plan.verify(progress=False)
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize(("order", "block_size"), [*itertools.product(ORDERS, [None]), ("shuffle", 70), ("length", 30)])
def test_an_interrupted_plan_goes_on_where_it_was(order, block_size, lengths_file, tmp_path, monkeypatch):
    buckets = make_buckets(lengths_file, 200, max_shapes=4)
    arguments = {"order": Order(order, block_size=block_size), "seed": 3}
    commit, done = out_of_core._Kept.commit, []

    def interrupted(self, stage, piece, *others):
        done.append((stage, piece))
        if len(done) % 7 == 0:  # what the piece wrote is there, but does not count
            done.pop()
            done.append((stage, None))
            raise KeyboardInterrupt
        commit(self, stage, piece, *others)
        if len(done) % 5 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(out_of_core._Kept, "commit", interrupted)
    for _ in range(100):
        try:
            plan = plan_on_disk(lengths_file, buckets, tmp_path / "plan", progress=False, **arguments)
            break
        except KeyboardInterrupt:
            assert not (tmp_path / "plan").exists()
    assert len(done) > 20
    counted = [each for each in done if each[1] is not None]
    assert len(set(counted)) == len(counted)  # nothing was done twice
    check_equal(plan, make_plan(np.asarray(lengths_file), buckets, **arguments))


def interrupt(lengths, buckets, out, monkeypatch, **arguments):
    """Makes a plan up to its first write of steps."""
    with monkeypatch.context() as patched:
        patched.setattr(out_of_core, "_write_ids", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt) as raised:
            plan_on_disk(lengths, buckets, out, progress=False, **arguments)
    assert raised.value.__notes__ == [
        f"what is done of the plan is kept in {out.parent}/.plan.part; repeat the call to go on"
    ]


def test_other_settings_than_those_of_the_interrupted_call_are_named(lengths_file, tmp_path, monkeypatch):
    buckets = make_buckets(lengths_file, 200, max_shapes=4)
    interrupt(lengths_file, buckets, tmp_path / "plan", monkeypatch, order="shuffle", seed=1)
    with pytest.raises(ValueError, match=r"seed was 1, not 2; longest_first was False, not True.*\.plan\.part"):
        plan_on_disk(lengths_file, buckets, tmp_path / "plan", order=Order("shuffle", longest_first=True), seed=2)


def test_a_lengths_file_that_changed_is_named(lengths_file, tmp_path, monkeypatch):
    buckets = make_buckets(lengths_file, 200, max_shapes=4)
    interrupt(lengths_file, buckets, tmp_path / "plan", monkeypatch)
    os.utime(lengths_file.filename)
    with pytest.raises(ValueError, match="the lengths changed since planning began"):
        plan_on_disk(lengths_file, buckets, tmp_path / "plan", order="length", progress=False)
    shutil.rmtree(tmp_path / ".plan.part")
    write = out_of_core._write_ids

    def changing(*arguments):
        os.utime(lengths_file.filename)
        write(*arguments)

    def shortening(*arguments):
        os.truncate(lengths_file.filename, 200)
        raise IndexError("as from a file that has become too short")

    for change in (changing, shortening):
        monkeypatch.setattr(out_of_core, "_write_ids", change)
        with pytest.raises(ValueError, match="the lengths changed while they were planned"):
            plan_on_disk(lengths_file, buckets, tmp_path / "plan", order="length", progress=False)
        assert os.listdir(tmp_path) == ["lengths.npy"]


def test_a_full_disk_names_the_bytes_needed_and_leaves_nothing_under_the_name(lengths_file, tmp_path, monkeypatch):
    buckets = make_buckets(lengths_file, 200, max_shapes=4)
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(out_of_core.shutil, "disk_usage", lambda _: usage._replace(free=1_000))
        with pytest.raises(OSError, match=r"planning needs [\d,]+ bytes in .* and 1,000 are free") as full:
            plan_on_disk(lengths_file, buckets, tmp_path / "plan", order="length", progress=False)
        assert full.value.errno == errno.ENOSPC
    write = stages.Grouped.append

    def failing(self, *arguments):
        write(self, *arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(stages.Grouped, "append", failing)
        with pytest.raises(OSError, match=r"planning needs [\d,]+ bytes in"):
            plan_on_disk(lengths_file, buckets, tmp_path / "plan", order="length", progress=False)
    assert not (tmp_path / "plan").exists()
    plan = plan_on_disk(
        lengths_file, buckets, tmp_path / "plan", order="length", progress=False
    )  # with room, it goes on
    check_equal(plan, make_plan(np.asarray(lengths_file), buckets, order="length"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lengths": [3, 0, -1]}, "at least 1: id 1: 0, id 2: -1"),
        ({"lengths": [3, 99, 70]}, r"longer than the longest bucket .*: id 1: 99, id 2: 70 \(limit 61\)"),
        ({"order": "by_colour"}, "order .* must be one of"),
        ({"order": np.array([1, 0, 2])}, "of samples of one length, in an order by name"),
        ({"buckets": [(2, 61, 61)]}, "of samples of one length"),
        ({"lengths": 5}, "1-D"),
        ({"lengths": []}, "empty"),
        ({"lengths": [1.5]}, "integers"),
    ],
)
def test_wrong_input_is_listed_and_leaves_nothing(change, message, tmp_path):
    arguments = {"lengths": [3, 9, 60], "buckets": [(2, 61)], "path": tmp_path / "plan", "progress": False}
    with pytest.raises(ValueError, match=message):
        plan_on_disk(**(arguments | change))
    assert not list(tmp_path.iterdir())


def test_the_command_writes_the_plan_that_is_made_in_memory(lengths_file, tmp_path, capsys):
    args = [str(lengths_file.filename), str(tmp_path / "plan"), "--max-tokens", "200", "--seed", "3", "--no-progress"]
    assert main(args) == 0
    in_memory = make_plan(np.asarray(lengths_file), max_tokens=200, order="shuffle", seed=3)
    assert open_plan(tmp_path / "plan").digest == in_memory.digest
    assert f"{in_memory.report()}\ndigest {in_memory.digest}" in capsys.readouterr().out
    assert main([*args, "--max-length", "9"]) == 2
    assert "longer than the longest bucket" in capsys.readouterr().err


def test_windows_are_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match="truncate_start"):
        plan_on_disk(np.array([3, 9]), [(2, 8)], tmp_path / "plan", overlong="truncate_start", progress=False)
    assert not list(tmp_path.iterdir())
