"""The length cache: measured once, kept whole, never used for other data."""

import errno
import os
import stat
import threading
import time

import numpy as np
import pytest

from jvarlen.data import length_cache
from jvarlen.data.length_cache import cached_hashes, cached_lengths
from jvarlen.data.split import sample_hash

KEY, OTHER_KEY = "a" * 64, "b" * 64


class Counted:
    """Samples of given lengths; ValueError where the length is None. Counts what is read, and can be interrupted."""

    def __init__(self, lengths, interrupt_at=None):
        self.lengths, self.interrupt_at, self.read = lengths, interrupt_at, []

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        if index == self.interrupt_at:
            raise KeyboardInterrupt
        self.read.append(index)
        if self.lengths[index] is None:
            raise ValueError("no sample")
        return b"x" * self.lengths[index]


LENGTHS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


@pytest.fixture(autouse=True)
def user_caches(tmp_path, monkeypatch):
    monkeypatch.setattr("jvarlen._common.files.default_cache_dir", lambda: tmp_path / "caches")
    return tmp_path / "caches"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "t.jsonl"


def measure(dataset, path, key=KEY):
    return cached_lengths(dataset, path, key, progress=False).tolist()


def names(directory):
    return sorted(file.name for file in directory.iterdir())


@pytest.mark.parametrize("shard_size", [4, 65_536])
def test_lengths_are_measured_once(path, monkeypatch, user_caches, shard_size):
    monkeypatch.setattr(length_cache, "_SHARD_SIZE", shard_size)
    first, second = Counted(LENGTHS), Counted(LENGTHS)
    assert measure(first, path) == measure(second, path) == LENGTHS
    assert first.read == list(range(10))
    assert second.read == []
    assert names(path.parent) == [f"t.jsonl.lengths-{KEY[:16]}.npz"]
    assert not user_caches.exists()


def test_lengths_under_another_key_are_left_and_not_used(path):
    measure(Counted(LENGTHS), path)
    assert measure(other := Counted([1, 2]), path, OTHER_KEY) == [1, 2]
    assert other.read == [0, 1]
    assert len(names(path.parent)) == 2
    assert measure(again := Counted(LENGTHS), path) == LENGTHS
    assert again.read == []


def test_where_the_data_lie_in_no_place_to_write_lengths_go_to_the_users_caches(path, monkeypatch, user_caches):
    monkeypatch.setattr(os, "access", lambda place, mode: place != path.parent)
    for num_read in (10, 0):
        assert measure(dataset := Counted(LENGTHS), path) == LENGTHS
        assert len(dataset.read) == num_read
    assert names(user_caches) == [f"lengths-{KEY[:16]}.npz"]
    assert names(path.parent) == []


def test_where_nothing_can_be_written_lengths_are_measured_each_time(path, monkeypatch, user_caches):
    monkeypatch.setattr(os, "access", lambda place, mode: False)
    for _ in range(2):
        with pytest.warns(UserWarning, match=f"lengths are not cached: {path.parent} and {user_caches} cannot be wri"):
            assert measure(dataset := Counted(LENGTHS), path) == LENGTHS
        assert len(dataset.read) == 10
    user_caches.rmdir()
    user_caches.write_bytes(b"")  # a directory that cannot be made
    with pytest.warns(UserWarning, match="lengths are not cached: .*caches"):
        assert measure(Counted(LENGTHS), path) == LENGTHS


@pytest.mark.parametrize(("full", "num_read"), [(".npz", 10), (".npy", 20), ("manifest.json", 10)])
def test_on_a_full_disk_lengths_are_measured_and_not_cached(path, monkeypatch, full, num_read):
    """Only once, but where the disk became full while they were measured."""
    fsync, link = os.fsync, "/proc/self/fd/{}"

    def fail(descriptor):
        if f"{full}." in os.readlink(link.format(descriptor)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.warns(UserWarning, match=r"lengths are not cached: /.* cannot be written: No space left on device$"):
        assert measure(dataset := Counted(LENGTHS), path) == LENGTHS
    assert len(dataset.read) == num_read
    assert not [name for name in names(path.parent) if name.endswith((".npz", ".lock"))]


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_who_cannot_read_the_data_cannot_read_the_cache(path, mode):
    path.touch(mode)
    measure(Counted(LENGTHS), path)
    (cache,) = path.parent.glob("*.npz")
    assert stat.S_IMODE(cache.stat().st_mode) == mode


def test_a_cache_that_is_damaged_or_of_other_data_is_named(path):
    measure(Counted(LENGTHS), path)
    (cache,) = path.parent.iterdir()
    whole = cache.read_bytes()
    at = whole.index(np.array(LENGTHS).tobytes())
    for content in (b"", whole[:-1], whole[:at] + b"\xff" + whole[at + 1 :]):
        cache.write_bytes(content)
        with pytest.raises(ValueError, match=f"{cache} holds no lengths to use"):
            measure(Counted(LENGTHS), path)
    cache.write_bytes(whole)
    cache.rename(path.with_name(f"t.jsonl.lengths-{OTHER_KEY[:16]}.npz"))
    with pytest.raises(ValueError, match=r"holds no lengths to use, .* it is of other data"):
        measure(Counted(LENGTHS), path, OTHER_KEY)


@pytest.mark.parametrize("shard_size", [4, 65_536])
def test_where_there_is_no_sample_the_length_is_0_and_kept_as_such(path, monkeypatch, shard_size):
    monkeypatch.setattr(length_cache, "_SHARD_SIZE", shard_size)
    dataset = Counted([3, None, 1, 0, 2])
    for _ in range(2):
        assert measure(dataset, path) == [3, 0, 1, 0, 2]
    assert len(dataset.read) == 5


@pytest.fixture
def interrupted(path, monkeypatch):
    """The directory that a measuring leaves which an interrupt ended in its third shard."""
    monkeypatch.setattr(length_cache, "_SHARD_SIZE", 4)
    with pytest.raises(KeyboardInterrupt):
        measure(Counted(LENGTHS, interrupt_at=9), path)
    parts = path.with_name(f"t.jsonl.lengths-{KEY[:16]}.parts")
    assert names(parts) == ["0.npy", "1.npy", "manifest.json"]
    assert names(path.parent) == [parts.name], "no lock is left"
    return parts


def test_an_interrupted_measuring_goes_on(path, interrupted):
    assert measure(dataset := Counted(LENGTHS), path) == LENGTHS
    assert dataset.read == [8, 9]
    assert names(path.parent) == [f"t.jsonl.lengths-{KEY[:16]}.npz"]


def test_of_several_that_need_the_same_lengths_one_measures(path, monkeypatch):
    monkeypatch.setattr(length_cache, "_SHARD_SIZE", 4)
    monkeypatch.setattr(length_cache, "_SECONDS_BETWEEN_TRIES", 0.001)
    begun, others_wait = threading.Event(), threading.Event()

    class Slow(Counted):
        def __getitem__(self, index):
            begun.set()
            assert others_wait.wait(10)
            return super().__getitem__(index)

    datasets = [Slow(LENGTHS), Counted(LENGTHS), Counted(LENGTHS)]
    results = {}

    def run(number):
        results[number] = measure(datasets[number], path)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    sleeping = threading.Semaphore(0)
    monkeypatch.setattr(time, "sleep", lambda seconds: sleeping.release())
    threads[0].start()
    assert begun.wait(10)
    for waiting in threads[1:]:
        waiting.start()
        assert sleeping.acquire(timeout=10)
    others_wait.set()
    for thread in threads:
        thread.join(10)
    assert results == dict.fromkeys(range(3), LENGTHS)
    assert [len(dataset.read) for dataset in datasets] == [10, 0, 0]
    assert names(path.parent) == [f"t.jsonl.lengths-{KEY[:16]}.npz"]


def test_hashes_are_kept_beside_lengths_and_are_not_taken_for_them(tmp_path):
    dataset = Counted(LENGTHS)
    path = tmp_path / "data"
    hashes = cached_hashes(dataset, path, KEY, progress=False)
    assert hashes.tolist() == [sample_hash(b"x" * length) for length in LENGTHS]
    assert cached_lengths(dataset, path, KEY, progress=False).tolist() == LENGTHS
    num_read = len(dataset.read)
    assert cached_hashes(dataset, path, KEY, progress=False).tolist() == hashes.tolist()
    assert len(dataset.read) == num_read
    (kept,) = tmp_path.glob("data.hashes-*.npz")
    kept.rename(next(tmp_path.glob("data.lengths-*.npz")))
    with pytest.raises(ValueError, match="holds no lengths to use"):
        cached_lengths(dataset, path, KEY, progress=False)
