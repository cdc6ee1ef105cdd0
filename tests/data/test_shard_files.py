"""Shard files: they are read back unchanged, and no other file is accepted."""

import functools
import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen.data.shard_files import ShardFiles

NUM_SAMPLES, SHARD_SIZE = 10, 2


def shard_files(directory, num_samples=NUM_SAMPLES, shard_size=SHARD_SIZE, *, function=abs, **options):
    """Files of a measuring."""
    options = {"quantity": "difficulty", "check": lambda values: values} | options
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


def test_whole_shards_are_kept_and_read(directory):
    assert sorted(path.name for path in directory.iterdir()) == ["0.npy", "1.npy", "2.npy", "manifest.json"]
    missing, kept = read(shard_files(directory))
    assert missing == [range(6, 8), range(8, 10)]
    assert {shard: values.tolist() for shard, values in kept.items()} == {
        range(2): [1, 2], range(2, 4): [3, 4], range(4, 6): [5, 6]
    }  # fmt: skip
    assert {values.dtype for values in kept.values()} == {np.dtype(np.int64)}


@given(
    dtype=st.sampled_from([np.int64, np.float64]),
    num_shards=st.integers(1, 30),
    shard_size=st.integers(1, 8),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_samples_added_in_any_order_are_read_bit_by_bit(tmp_path_factory, dtype, num_shards, shard_size, data):
    directory = tmp_path_factory.mktemp("shards")
    bits = np.random.default_rng(0).integers(-(2**63), 2**63, num_shards * shard_size)  # NaNs and subnormals are kept
    files = shard_files(directory, len(bits), shard_size)
    assert len(read(files)[0]) == num_shards
    added = data.draw(st.lists(st.sampled_from(range(len(bits))), unique=True))
    for i in added:
        files.add(range(i, i + 1), bits.view(dtype))
    missing, kept = read(shard_files(directory, len(bits), shard_size))
    assert {i for shard in missing for i in shard} == {
        i for i in range(len(bits)) if not set(shard_of(i, shard_size)) <= set(added)
    }
    for shard, values in kept.items():
        assert values.dtype == dtype
        assert (values.view(np.int64) == bits[shard.start : shard.stop]).all()


def shard_of(sample_id, shard_size):
    start = sample_id // shard_size * shard_size
    return range(start, start + shard_size)


def test_more_than_ten_shards_sort_by_name(tmp_path):
    keep(tmp_path, 1_101, num_samples=1_101, shard_size=10)
    paths = sorted(tmp_path.glob("*.npy"))
    assert np.concatenate([np.load(path) for path in paths]).tolist() == list(range(1, 1_102))
    assert np.load(tmp_path / "042.npy", mmap_mode="r").tolist() == list(range(421, 431))


def test_a_shard_that_the_check_refuses_is_left_out(tmp_path):
    def check(values):
        if 3 in values:
            raise ValueError("three is no difficulty")
        return values

    keep(tmp_path, 10, check=check)
    assert read(shard_files(tmp_path))[0] == [range(2, 4)]


def flip_a_bit(directory):
    content = bytearray((directory / "1.npy").read_bytes())
    content[-40] ^= 1  # in the array's last value, before the seal
    (directory / "1.npy").write_bytes(content)


def cut_short(directory):
    os.truncate(directory / "1.npy", 100)


def empty(directory):
    os.truncate(directory / "1.npy", 0)


def take_the_place_of_another(directory):
    shutil.copy(directory / "0.npy", directory / "1.npy")


def replace_by_an_array(directory):
    np.save(directory / "1.npy", np.arange(2))


def replace_by_another_measuring(directory):
    other = directory.with_name("other")
    keep(other, 10, quantity="lengths")
    shutil.copy(other / "1.npy", directory / "1.npy")


@pytest.mark.parametrize(
    "damage",
    [flip_a_bit, cut_short, empty, take_the_place_of_another, replace_by_an_array, replace_by_another_measuring],
)
def test_damaged_and_foreign_shards_are_refused_by_name(directory, damage):
    damage(directory)
    with pytest.raises(ValueError, match=r"holds shards that are damaged .*: 1\.npy\. To start again, delete it"):
        read(shard_files(directory))[0]
    (directory / "1.npy").unlink()
    assert read(shard_files(directory))[0] == [range(2, 4), range(6, 8), range(8, 10)]


def test_many_damaged_shards_are_counted(tmp_path):
    keep(tmp_path, 7, num_samples=7, shard_size=1)
    for path in tmp_path.glob("*.npy"):
        os.truncate(path, 0)
    with pytest.raises(ValueError, match=r": 0\.npy, 1\.npy, 2\.npy, 3\.npy, 4\.npy and 2 more\. To start"):
        read(shard_files(tmp_path, 7, 1))[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_samples": 12}, "num_samples is 10, not 12"),
        ({"shard_size": 3}, "shard_size is 2, not 3"),
        ({"function": float}, "function is 'builtins.abs', not 'builtins.float'"),
        ({"quantity": "lengths"}, "quantity is 'difficulty', not 'lengths'"),
        ({"num_samples": 12, "shard_size": 3}, "num_samples is 10, not 12; shard_size is 2, not 3"),
    ],
)
def test_another_measuring_is_told_what_differs(directory, options, said):
    with pytest.raises(ValueError, match="of another measuring") as refused:
        read(shard_files(directory, **options))[0]
    assert f": {said}. To start again" in str(refused.value)


class Scaled:
    """A function that is an object."""

    def __call__(self, sample):
        return 2 * sample


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (len, "builtins.len"),
        (str.count, "builtins.str.count"),
        (keep, "tests.data.test_shard_files.keep"),
        (functools.partial(functools.partial(keep, 1), 2), "tests.data.test_shard_files.keep"),
        (Scaled(), "tests.data.test_shard_files.Scaled"),
        (Scaled().__call__, "tests.data.test_shard_files.Scaled.__call__"),
    ],
)
def test_a_function_is_known_by_its_name(tmp_path, function, name):
    read(shard_files(tmp_path, function=function))[0]
    assert json.loads((tmp_path / "manifest.json").read_bytes())["function"] == name


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"3"])
def test_a_damaged_manifest_is_refused(directory, content):
    (directory / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged manifest\.json"):
        read(shard_files(directory))[0]


def test_a_manifest_without_a_field_is_of_another_measuring(directory):
    manifest = json.loads((directory / "manifest.json").read_bytes())
    del manifest["function"]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="function is None, not"):
        read(shard_files(directory))[0]


def test_files_that_a_killed_process_left_half_written_are_passed_over(tmp_path):
    (tmp_path / ".manifest.json.1.part").write_bytes(b"{")
    (tmp_path / ".1.npy.1.part").write_bytes(b"half")
    keep(tmp_path, 10)
    assert not read(shard_files(tmp_path))[0]
