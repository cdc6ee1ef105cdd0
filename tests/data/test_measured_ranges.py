"""Ranges of samples: each sample once, in ranges of suitable size, errors that name it; files that are read back."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen.data.measure import MeasuredRange, Ranges, Work, measure_ranges
from jvarlen.data.shard_files import ShardFiles


def identity(sample):
    return sample


def measure(dataset, num_workers, function=identity):
    return list(measure_ranges(Work(dataset, function, "numbers"), [range(len(dataset))], num_workers))


@given(sizes=st.lists(st.integers(0, 2_000), max_size=6), seconds=st.lists(st.floats(0, 10), max_size=20))
@settings(deadline=None)
def test_ranges_cover_what_is_missing_once_and_stay_in_their_shard(sizes, seconds):
    missing = [range(5_000 * index, 5_000 * index + size) for index, size in enumerate(sizes)]
    cut, ranges = [], Ranges(missing)
    for took, samples in zip(seconds, ranges, strict=False):
        cut.append(samples)
        ranges.adapt(MeasuredRange(samples, np.zeros(len(samples), int), took))
    cut += ranges
    assert [i for samples in cut for i in samples] == [i for shard in missing for i in shard]
    assert all(samples.start // 5_000 == (samples.stop - 1) // 5_000 for samples in cut)


def test_ranges_of_slow_samples_are_short():
    ranges = Ranges([range(10**9)])
    lengths = []
    for samples in ranges:
        lengths.append(len(samples))
        if len(lengths) == 25:
            break
        seconds_per_sample = 1e-7 if len(lengths) < 20 else 0.1
        ranges.adapt(MeasuredRange(samples, np.zeros(0, int), len(samples) * seconds_per_sample))
    assert max(lengths) == 32_768
    assert lengths[-1] == 2


class Failing(list):
    """Samples one of which cannot be read."""

    def __getitem__(self, index):
        if index == 1:
            raise OSError("no such block")
        return super().__getitem__(index)


class Slow(list):
    def __getitem__(self, i):
        time.sleep(0.02)
        return super().__getitem__(i)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_workers_measure_the_first_samples_first():
    """So that an interruption leaves complete shards."""
    num_samples, num_measured = 300, 0
    for part in measure_ranges(Work(Slow(range(1, 301)), identity, "x"), [range(num_samples)], 2):
        num_measured += len(part.samples)
        if num_measured <= num_samples // 2:
            assert part.samples.stop <= num_measured + num_samples // 4
    assert num_measured == num_samples


class Unpicklable(list):
    """Samples that no process can hand over."""

    def __reduce_ex__(self, protocol):
        raise TypeError("it holds an open file")


class UnpicklableThere(list):
    """Samples that no other process can take over."""

    def __reduce_ex__(self, protocol):
        return _fail_to_unpickle, ()


def _fail_to_unpickle():
    raise OSError("no such mount")


def test_an_error_of_a_sample_tells_which():
    with pytest.raises(RuntimeError, match=r"sample 2 could not be measured: TypeError\(") as told:
        measure(["a", "b", 3], 0, len)
    assert isinstance(told.value.__cause__, TypeError)
    with pytest.raises(RuntimeError, match=r"sample 1 could not be measured: OSError\('no such block'\)"):
        measure(Failing([1, 2]), 0)
    with pytest.raises(ValueError, match="numbers must be integers that fit int64: id 1: 'x'"):
        measure([1, "x"], 0)


@pytest.mark.multiprocess
def test_workers_need_what_pickles():
    with pytest.raises(ValueError, match=r"functions that pickle: TypeError\('it holds an open file'\)"):
        measure(Unpicklable([1]), 1)
    with pytest.raises(ValueError, match=r"not unpickle in a worker process: OSError\('no such mount'\)") as refused:
        measure(UnpicklableThere([1]), 1)
    assert "_fail_to_unpickle" in refused.value.__notes__[0]


NUM_SAMPLES, SHARD_SIZE = 10, 2


def shard_files(directory, num_samples=NUM_SAMPLES, shard_size=SHARD_SIZE, *, function=abs, **options):
    """Files of a measuring."""
    options = {"quantity": "numbers", "check": lambda values: values} | options
    return ShardFiles(directory, num_samples, shard_size=shard_size, function=function, **options)


def read(files):
    """The samples of each missing shard, and the values of the others."""
    kept = {}
    return files.read(kept.__setitem__), kept


def keep(directory, num_kept, **options):
    """Begins a directory and keeps the first samples, which are 1, 2, …"""
    files = shard_files(directory, **options)
    values = np.arange(1, options.get("num_samples", NUM_SAMPLES) + 1)
    for shard in read(files)[0]:
        files.add(shard[: max(0, num_kept - shard.start)], values)


@pytest.fixture
def directory(tmp_path):
    """Shards 0, 1 and 2 of five, and a sample of the next."""
    keep(tmp_path / "shards", 7)
    return tmp_path / "shards"


@given(
    num_shards=st.integers(1, 30),
    shard_size=st.integers(1, 8),
    data=st.data(),
)
@settings(max_examples=20, deadline=None)
def test_samples_added_in_any_order_are_read_back(tmp_path_factory, num_shards, shard_size, data):
    directory = tmp_path_factory.mktemp("shards")
    bits = np.random.default_rng(0).integers(-(2**63), 2**63, num_shards * shard_size)
    files = shard_files(directory, len(bits), shard_size)
    assert len(read(files)[0]) == num_shards
    added = data.draw(st.lists(st.sampled_from(range(len(bits))), unique=True))
    for i in added:
        files.add(range(i, i + 1), bits)
    missing, kept = read(shard_files(directory, len(bits), shard_size))
    assert {i for shard in missing for i in shard} == {
        i for i in range(len(bits)) if not set(shard_of(i, shard_size)) <= set(added)
    }
    for shard, values in kept.items():
        assert values.dtype == np.int64
        assert (values == bits[shard.start : shard.stop]).all()


def shard_of(sample_id, shard_size):
    start = sample_id // shard_size * shard_size
    return range(start, start + shard_size)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_samples": 12}, "num_samples is 10, not 12"),
        ({"shard_size": 3}, "shard_size is 2, not 3"),
        ({"function": float}, "function is 'builtins.abs', not 'builtins.float'"),
        ({"quantity": "lengths"}, "quantity is 'numbers', not 'lengths'"),
        ({"num_samples": 12, "shard_size": 3}, "num_samples is 10, not 12; shard_size is 2, not 3"),
    ],
)
def test_another_measuring_is_told_what_differs(directory, options, said):
    with pytest.raises(ValueError, match="of another measuring") as refused:
        read(shard_files(directory, **options))[0]
    assert f": {said}. Delete it" in str(refused.value)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"3"])
def test_a_damaged_manifest_is_refused(directory, content):
    (directory / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest\.json is damaged"):
        read(shard_files(directory))[0]


def test_files_that_a_killed_process_left_half_written_are_passed_over(tmp_path):
    (tmp_path / ".manifest.json.1.part").write_bytes(b"{")
    (tmp_path / ".1.npy.1.part").write_bytes(b"half")
    keep(tmp_path, 10)
    assert not read(shard_files(tmp_path))[0]
