"""Shard files: what was measured is read back, and nothing of another measuring."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen.data.shard_files import ShardFiles

NUM_SAMPLES, SHARD_SIZE = 10, 2


def shard_files(directory, num_samples=NUM_SAMPLES, shard_size=SHARD_SIZE, *, function="builtins.abs", **options):
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
        ({"function": "builtins.float"}, "function is 'builtins.abs', not 'builtins.float'"),
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
