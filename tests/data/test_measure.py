"""Measured samples: exactly the function's numbers, with any number of processes and calls."""

import array
import collections
import contextlib
import dataclasses
import os
import signal
import sys
import tempfile
import time
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen._common.interrupts import remembered_interrupts
from jvarlen.data.measure import find_lengths, measure_integers, measure_lengths
from tests.data.run_measure_samples import NUM_SAMPLES
from tests.support.processes import started

PROGRAM = Path(__file__).with_name("run_measure_samples.py")


class Samples:
    """Given samples that note which of them were read; one of them can raise an error instead."""

    def __init__(self, samples, error_at=None, error=KeyboardInterrupt):
        self.samples, self.error_at, self.error = samples, error_at, error
        self.read = []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index == self.error_at:
            raise self.error
        self.read.append(index)
        return self.samples[index]


def identity(sample):
    return sample


def measure(samples, function=identity, **options):
    options = {"num_workers": 0, "shards": None, "shard_size": 65_536, "progress": False} | options
    return measure_integers(samples, function, "numbers", **options)


def from_files(directory):
    return np.concatenate([np.load(path) for path in sorted(Path(directory).glob("*.npy"))])


def is_same(measured, wanted):
    return measured.dtype == wanted.dtype and np.array_equal(measured, wanted)


@pytest.mark.parametrize("kind", [int, np.int64, np.uint64, np.array, jnp.array])
def test_ints_stay_ints(kind):
    large = 2**53 + 1 if kind is not jnp.array else 2**31 - 1  # JAX has 32 bits by default
    assert is_same(measure([kind(large), kind(1)]), np.array([large, 1]))
    assert is_same(measure_lengths([large, 1], kind, progress=False), np.array([large, 1]))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None"),
        ("12", "'12'"),
        (True, "True"),
        (np.True_, "True"),
        (1j, "1j"),
        ([1], "[1]"),
        (np.array([1]), "array([1])"),
        (2**63, str(2**63)),
        (np.uint64(2**63), str(2**63)),
        (-(2**63) - 1, str(-(2**63) - 1)),
    ],
)
def test_what_is_no_number_is_refused_by_id_and_value(value, said):
    for measured in (measure, lambda samples: measure_lengths(samples, identity, progress=False)):
        with pytest.raises(ValueError, match="must be") as refused:
            measured([7, value, 8, value])
        assert f"id 1: {said}, id 3: {said}" in str(refused.value)


@pytest.mark.parametrize("dataset", [(sample for sample in ["a"]), iter([[1]]), {"a", "b"}, object(), None])
def test_what_has_no_len_or_ids_is_told_what_else_to_do(dataset):
    with pytest.raises(ValueError, match=r"len\(\) and samples by their ids, which \w+ lacks: .* stream_batches"):
        measure_lengths(dataset, progress=False)


TOKENS = np.arange(7)
PairOfFields = collections.namedtuple("PairOfFields", "tokens label")
RECORDS = {
    "tuple of list, int": ([1, 2, 3], 0),
    "tuple of int, ndarray": (0, TOKENS),
    "tuple of str, tuple, int": ("name", (1, 2), 0),
    "tuple of str, int": ("some text", 1),
    "PairOfFields of str, str": PairOfFields("question", "answer"),
    "list of int, ndarray, int": [5, TOKENS, 0],
    "list of list, list": [[1, 2], [3]],
    "list of dict": [{"tokens": TOKENS}],
    "tuple of ArrayImpl, int": (jnp.arange(7), 0),
    "PairOfFields of ndarray, int": PairOfFields(TOKENS, 1),
    "dict with the keys 'tokens', 'label'": {"tokens": TOKENS, "label": 1},
    "UserDict with the keys 'tokens'": collections.UserDict(tokens=TOKENS),
    "mappingproxy with the keys 0": types.MappingProxyType({0: "text"}),
}


@pytest.mark.parametrize("said", RECORDS)
def test_a_number_of_fields_is_no_length(said):
    with pytest.raises(ValueError, match="give measure_lengths a length_fn") as refused:
        find_lengths([[1, 2], RECORDS[said]], progress=False)
    assert f"sample 1 cannot be measured: length_fn=len counts fields of a {said}, not tokens" in str(refused.value)
    assert measure_lengths([RECORDS[said]], lambda sample: len(sample), progress=False).tolist() == [len(RECORDS[said])]


@pytest.mark.parametrize("kind", ["jax", "numpy", "torch"])
def test_the_only_row_of_an_array_is_no_length(kind):
    """As tokenizers return it; its `len` is 1, whatever it holds."""
    make = {"jax": jnp.ones, "numpy": np.ones}.get(kind) or pytest.importorskip("torch").ones
    samples = [make((1, 7)), make((1, 3))]
    with pytest.raises(
        ValueError, match=r"counts the first axis of a \w+ of shape \(1, 7\), not tok.*len\(sample\[0\]\)"
    ):
        measure_lengths(samples, progress=False)
    assert measure_lengths(samples, lambda sample: len(sample[0]), progress=False).tolist() == [7, 3]
    assert measure_lengths([make((1, 1)), make((2, 3))], progress=False).tolist() == [1, 2]


@pytest.mark.parametrize("of", ["the first axis of a ndarray of shape (1, 4)", "fields of a list of list"])
def test_the_only_row_of_a_field_is_no_length(of):
    rows = [np.arange(k)[None] for k in (4, 5, 6)]
    rows = [row.tolist() for row in rows] if "list" in of else rows
    samples = [{"s": row, "t": np.arange(9)} for row in rows]
    for names in ("s", ("t", "s"), ("s", "t")):
        with pytest.raises(
            ValueError, match=r"not tokens, in all samples; let samples hold the only row, s\[0\]"
        ) as said:
            measure_lengths(samples, names, progress=False)
        assert f"sample 0 cannot be measured: length_fn='s' counts {of}, not tokens" in str(said.value)
    assert measure_lengths([{"s": row[0]} for row in rows], "s", progress=False).tolist() == [4, 5, 6]
    assert measure_lengths([*samples, {"s": np.ones((2, 4))}], "s", progress=False).tolist() == [1, 1, 1, 2]
    assert measure_lengths([{"s": [7]}, {"s": np.ones((1, 1))}, {"s": ["a"]}], "s", progress=False).tolist() == [1] * 3


@dataclasses.dataclass
class Graph:
    nodes: np.ndarray
    edges: np.ndarray


Sentences = collections.namedtuple("Sentences", "nodes edges")


@pytest.mark.parametrize("kind", [dict, Graph, Sentences, collections.UserDict])
def test_names_of_fields_give_the_sizes_of_their_first_axes(kind):
    samples = [kind(nodes=np.zeros((n, 3)), edges=[[0, 1]] * (n + 1)) for n in (2, 5, 1)]
    assert is_same(measure_lengths(samples, "nodes", progress=False), np.array([2, 5, 1]))
    both = measure_lengths(samples, ("edges", "nodes"), progress=False)
    assert is_same(both, np.array([[3, 2], [6, 5], [2, 1]]))


@pytest.mark.parametrize(
    ("sample", "told"),
    [
        ({"label": 3, "other": TOKENS}, "dict with the keys 'label', 'other'"),
        ({"text": "abc"}, "dict with the keys 'text'"),
        ({"text": np.int64(3)}, "dict with the keys 'text'"),
        ({"text": None}, "dict with the keys 'text'"),
        (Graph(TOKENS, TOKENS), "Graph"),
        (np.arange(3), "ndarray"),
    ],
)
def test_a_sample_without_a_named_length_is_told(sample, told):
    good = {"text": TOKENS, "nodes": TOKENS}
    for name in ("text", ("text", "nodes")):
        with pytest.raises(ValueError, match=rf"sample 1 .*: no field 'text' with a first axis in {told}$"):
            measure_lengths([good, sample, good], name, progress=False)


def test_measured_fields_resume_from_their_own_files(tmp_path):
    samples = [{"a": [0] * (1 + i % 7), "b": [0] * (1 + i % 5)} for i in range(50)]
    options = {"shards": tmp_path, "shard_size": 8, "progress": False}
    lengths = measure_lengths(samples, ("a", "b"), **options)
    assert is_same(from_files(tmp_path), lengths)
    assert is_same(measure_lengths(Samples(samples, 0), ("a", "b"), **options), lengths)  # nothing is read
    for other in ("a", ("b", "a")):
        with pytest.raises(ValueError, match="is of another measuring: function is"):
            measure_lengths(samples, other, **options)


TOKENS_OF_ALL_KINDS = (
    "ab", b"ab", bytearray(2), [1, 2], (1, 2), ["a", "bc"], (b"a", b"b"), [1.5, None], range(2), {1, 2}, np.arange(2),
    np.zeros((2, 5)), jnp.arange(2), [np.int64(1), np.array(2)], [jnp.array(1)] * 2, array.array("i", [1, 2]),
)  # fmt: skip


@pytest.mark.parametrize("sample", TOKENS_OF_ALL_KINDS, ids=repr)
def test_len_of_tokens_is_a_length(sample):
    assert measure_lengths([sample], progress=False).tolist() == [2]


def test_arguments_out_of_range_are_refused(tmp_path):
    for num_workers in (-1, 1.0, True):
        with pytest.raises(ValueError, match="num_workers"):
            measure_lengths(["a"], num_workers=num_workers, progress=False)
    for shard_size in (0, 1.0):
        with pytest.raises(ValueError, match="shard_size"):
            measure_lengths(["a"], shards=tmp_path, shard_size=shard_size, progress=False)
    with pytest.raises(ValueError, match="dataset is empty"):
        measure_lengths([], shards=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


@given(
    samples=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40),
    shard_size=st.integers(1, 50),
    data=st.data(),
)
@settings(max_examples=20, deadline=None)
def test_a_measuring_in_shards_and_calls_is_a_measuring(samples, shard_size, data):
    wanted = np.array(samples, np.int64)
    assert is_same(measure(samples), wanted)
    with tempfile.TemporaryDirectory() as shards:
        options = {"shards": shards, "shard_size": shard_size}
        reached = 0
        for _ in range(data.draw(st.integers(0, 3))):
            stop = data.draw(st.integers(reached, len(samples) - 1))
            dataset = Samples(samples, stop, data.draw(st.sampled_from([KeyboardInterrupt, OSError])))
            with pytest.raises((KeyboardInterrupt, RuntimeError)):
                measure(dataset, **options)
            assert dataset.read == list(range(reached, stop))
            reached = stop // shard_size * shard_size
        dataset = Samples(samples)
        assert is_same(measure(dataset, **options), wanted)
        assert dataset.read == list(range(reached, len(samples)))
        assert is_same(from_files(shards), wanted)
        untouched = Samples(samples)
        assert is_same(measure(untouched, **options), wanted)
        assert not untouched.read


def test_only_shards_with_refused_values_are_measured_again(tmp_path):
    options = {"progress": False, "shards": tmp_path, "shard_size": 10}
    with pytest.raises(ValueError, match="id 25: 0, id 26: 0"):
        measure_lengths([b"" if i in (25, 26) else b"a" for i in range(45)], **options)
    mended = Samples([b"a"] * 45)
    assert measure_lengths(mended, **options).tolist() == [1] * 45
    assert mended.read == [0, *range(20, 30)]  # the first one tells how many lengths a sample has


def half_measured(directory):
    """Shards 0, 1 and 2 of five."""
    with pytest.raises(KeyboardInterrupt):
        measure(Samples(range(1, 11), 7), shards=directory, shard_size=2)
    assert sorted(path.name for path in directory.iterdir()) == ["0.npy", "1.npy", "2.npy", "manifest.json"]


def test_samples_stay_unread_where_the_directory_is_refused(tmp_path):
    half_measured(tmp_path)
    dataset = Samples(range(1, 11))
    os.truncate(tmp_path / "1.npy", 100)
    with pytest.raises(ValueError, match=r"1\.npy is not a readable \.npy file of numbers"):
        measure(dataset, shards=tmp_path, shard_size=2)
    assert not dataset.read
    (tmp_path / "1.npy").unlink()
    assert measure(dataset, shards=str(tmp_path), shard_size=2).tolist() == list(range(1, 11))
    assert dataset.read == [2, 3, 6, 7, 8, 9]


def test_a_progress_bar_begins_with_what_was_measured_before(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    half_measured(tmp_path)
    measure(range(1, 11), shards=tmp_path, shard_size=2, progress=True)
    shown = capsys.readouterr().err.split("\r")
    assert "numbers:  60%" in shown[1]
    assert "6/10" in shown[1]
    assert "10/10" in shown[-1]


def test_a_remembered_interrupt_ends_a_measuring():
    class Interrupted(Samples):
        def __getitem__(self, index):
            if index == 100:
                os.kill(os.getpid(), signal.SIGINT)
            return super().__getitem__(index)

    dataset = Interrupted(range(1, 100_001))
    with remembered_interrupts(), pytest.raises(KeyboardInterrupt):
        measure(dataset)
    assert len(dataset.read) < 1_000


class PickledOnce(Samples):
    """Samples that can be pickled a single time."""

    def __reduce__(self):
        assert not hasattr(self, "is_pickled")
        self.is_pickled = True
        return Samples, (self.samples,)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_worker_processes_measure_the_same(tmp_path):
    samples = ["x" * (1 + i % 97) for i in range(10_000)]
    lengths = measure_lengths(samples, progress=False)
    options = {"num_workers": 2, "progress": False}
    dataset = PickledOnce(samples)
    assert is_same(measure_lengths(dataset, shards=tmp_path, shard_size=999, **options), lengths)
    assert is_same(from_files(tmp_path), lengths)
    # Nothing is missing, so that nothing is pickled or started.
    assert is_same(measure_lengths(dataset, shards=tmp_path, shard_size=999, **options), lengths)


class ReadAtOnce(Samples):
    """Samples of which lengths are read by ranges."""

    def lengths_of(self, samples):
        return None if 3 in samples else [10 * len(self.samples[i]) for i in samples]


def test_lengths_that_a_dataset_reads_at_once_are_taken_where_all_are_there():
    dataset = ReadAtOnce(["a"] * 100)
    assert measure_lengths(dataset, progress=False).tolist() == [1] * 4 + [10] * 96
    assert dataset.read == [0, 1, 2, 3]
    assert measure_lengths(dataset, lambda sample: len(sample), progress=False).tolist() == [1] * 100
    with pytest.raises(RuntimeError, match="sample 50 could not be measured: OSError"):
        measure_lengths(ReadAtOnce([*["a"] * 50, "", "a"], 50, OSError("no block")), progress=False)


def die_of_none(sample):
    if sample is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


@pytest.mark.multiprocess
def test_a_killed_worker_is_told_and_finished_shards_stay(tmp_path):
    options = {"progress": False, "shards": tmp_path, "shard_size": 4}
    with pytest.raises(RuntimeError, match=r"killed by signal 9; it had samples 44 to 47\. .*fewer workers"):
        measure([None if i == 45 else i for i in range(100)], die_of_none, num_workers=1, **options)
    assert len(list(tmp_path.glob("*.npy"))) == 11
    dataset = Samples(range(100))
    assert measure(dataset, die_of_none, **options).tolist() == list(range(100))
    assert dataset.read == list(range(44, 100))


@contextlib.contextmanager
def measuring_without_end(directory):
    """A program that measures by two workers, until both are stuck."""
    deadline = time.monotonic() + 60
    with started(PROGRAM, 1, str(directory)) as program:
        while program.output(0).count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        yield program


@pytest.mark.slow
@pytest.mark.multiprocess
def test_an_interrupt_ends_workers_at_once_and_quietly(tmp_path):
    with measuring_without_end(tmp_path) as program:
        os.killpg(program.processes[0].pid, signal.SIGINT)
        (end,) = program.wait(30)
    assert end.code == -signal.SIGINT
    first, second, *traceback = end.output.splitlines()
    for worker in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(int(worker), 0)
    assert end.output.count("Traceback") == 1
    assert traceback[-1] == "KeyboardInterrupt"
    assert from_files(tmp_path).tolist() == list(range(1, NUM_SAMPLES // 2 + 1))


class Broken:
    """Samples, some of which are errors."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if isinstance(self.samples[index], Exception):
            raise self.samples[index]
        return self.samples[index]


@pytest.mark.parametrize(
    ("samples", "length_fn", "lengths"),
    [
        ([[1, 2], OSError("gone"), [], None, [1, 2, 3]], len, [2, 1, 1, 1, 3]),
        ([{"t": [1, 2]}, OSError("gone"), {"t": []}, {"x": [1]}, {"t": [1]}], "t", [2, 1, 1, 1, 1]),
        ([{"s": [1, 2], "t": [1]}, OSError("gone"), {"s": [], "t": []}], ("s", "t"), [[2, 1], [1, 1], [1, 1]]),
    ],
)
def test_bad_samples_have_a_place_of_one_token(samples, length_fn, lengths, tmp_path):
    options = {"progress": False, "shards": tmp_path}
    for _ in range(2):
        found = measure_lengths(Broken(samples), length_fn, on_bad_sample="skip", **options)
        assert found.tolist() == lengths
    with pytest.raises((RuntimeError, ValueError)):
        measure_lengths(Broken(samples), length_fn, **options)


def test_what_is_wrong_with_all_samples_and_memory_are_errors_all_the_same():
    with pytest.raises(ValueError, match="counts fields"):
        measure_lengths([{"t": [1]}], on_bad_sample="skip", progress=False)
    with pytest.raises(RuntimeError, match="MemoryError"):
        measure_lengths(Broken([MemoryError()]), on_bad_sample="skip", progress=False)
    with pytest.raises(ValueError, match="on_bad_sample"):
        measure_lengths([[1]], on_bad_sample="warn", progress=False)


class Rows:
    """Samples [frames, height, width]; the second cannot be read."""

    def __len__(self):
        return 4

    def __getitem__(self, i):
        if i == 1:
            raise OSError("damaged")
        return np.zeros((i + 1, 3, 5))


def test_functions_may_return_several_lengths(tmp_path):
    pairs = [(np.arange(3), [1, 2]), (np.arange(1), []), (np.arange(4), np.arange(9))]
    assert measure_lengths(pairs, progress=False).tolist() == [[3, 2], [1, 0], [4, 9]]
    videos = [np.zeros((2, 3, 4)), np.zeros((5, 6, 7))]
    for num_workers in (0, 1):
        shards = {"shards": tmp_path / str(num_workers), "shard_size": 1, "num_workers": num_workers}
        for _ in range(2):
            assert measure_lengths(videos, np.shape, progress=False, **shards).tolist() == [[2, 3, 4], [5, 6, 7]]
    found = measure_lengths(Rows(), np.shape, progress=False, on_bad_sample="skip")
    assert found.tolist() == [[1, 3, 5], [1, 1, 1], [3, 3, 5], [4, 3, 5]]
    named = [{"a": [1], "b": [1, 2], "c": [1, 2, 3]}]
    assert measure_lengths(named, ("a", "b", "c"), progress=False).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize(
    ("samples", "length_fn", "named"),
    [
        ([(np.arange(3), np.arange(2)), (np.arange(3), 0)], len, "sample 1 .*no pair"),
        ([(np.arange(3), np.arange(2)), np.arange(3)], len, "sample 1 .*no pair"),
        ([([[1, 2]], [[3]])], len, "fields of a tuple"),
        ([np.zeros((2, 3, 4)), np.zeros((2, 3))], np.shape, r"sample 1 .*\(2, 3\).*3 lengths"),
        ([np.zeros((0, 3))], np.shape, r"at least 1"),
        ([2, 3], lambda seconds: (seconds, 1.5), r"sample 0 .*integers.*\(2, 1.5\)"),
        ([{"a": [1]}], ("a", "a"), "different names"),
    ],
)
def test_samples_of_other_numbers_of_lengths_are_refused(samples, length_fn, named):
    with pytest.raises(ValueError, match=named):
        measure_lengths(samples, length_fn, progress=False)
