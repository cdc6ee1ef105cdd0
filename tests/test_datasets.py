"""The built-in corpus: real, deduplicated, cached; any dataset split by content."""

import ast
import textwrap

import numpy as np
import pytest

from jvarlen import datasets
from jvarlen.datasets import Subset, TokenDataset, known_lengths, split_held_out, stdlib_functions


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    return stdlib_functions(cache_dir=cache, progress=False), cache


@pytest.mark.slow
def test_the_corpus_is_long_tailed_and_without_repetition(corpus):
    dataset, _ = corpus
    samples = [dataset[i].tobytes() for i in range(len(dataset))]
    lengths = np.diff(dataset.offsets)
    assert len(samples) > 10_000
    assert len(set(samples)) == len(samples)
    assert 200 < np.median(lengths) < 350
    assert lengths.max() > 10_000
    assert lengths.min() >= 10


@pytest.mark.slow
def test_every_sample_is_one_function(corpus):
    dataset, _ = corpus
    for i in range(0, len(dataset), 500):
        tree = ast.parse(textwrap.dedent(dataset[i].tobytes().decode()))
        assert len(tree.body) == 1
        assert isinstance(tree.body[0], ast.FunctionDef | ast.AsyncFunctionDef)


@pytest.mark.slow
def test_the_second_call_reads_the_cache(corpus, monkeypatch):
    dataset, cache = corpus
    monkeypatch.setattr(datasets, "_scan", lambda root, progress: pytest.fail("scanned again"))
    again = stdlib_functions(cache_dir=cache, progress=False)
    assert (again.tokens == dataset.tokens).all()
    assert (again.offsets == dataset.offsets).all()


def test_a_damaged_cache_is_named_and_made_anew(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "_scan", lambda root, progress: [b"def f(): ..."])
    stdlib_functions(cache_dir=tmp_path, progress=False)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.warns(UserWarning, match=r"stdlib-functions-\w+\.npz is damaged"):
        assert len(stdlib_functions(cache_dir=tmp_path, progress=False)) == 1
    assert len(stdlib_functions(cache_dir=tmp_path, progress=False)) == 1


def test_only_outermost_functions_count(tmp_path):
    (tmp_path / "m.py").write_text(
        "def f():\n    def g(): pass\n\nclass C:\n    @property\n    def h(self):\n        return 1\n"
        "try:\n    async def k(): pass\nexcept E:\n    def n(): pass\nif x:\n    def f():\n        def g(): pass\n"
    )
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "t.py").write_text("def never(): pass\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    names = sorted(sample.split(b"(")[0].strip() for sample in datasets._scan(tmp_path, progress=False))
    assert names == [b"async def k", b"def f", b"def f", b"def h", b"def n"]


def test_no_sources_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no source files"):
        datasets._scan(tmp_path, progress=False)


def test_held_out_samples_are_chosen_by_content():
    samples = [f"sample {i}".encode() for i in range(2000)]
    split = split_held_out(TokenDataset.from_bytes(samples), 0.1)
    reverse = split_held_out(TokenDataset.from_bytes(samples[::-1]), 0.1)
    held_out = {split.held_out[i].tobytes() for i in range(len(split.held_out))}
    train = {split.train[i].tobytes() for i in range(len(split.train))}
    assert held_out | train == set(samples)
    assert not held_out & train
    assert 150 < len(held_out) < 250
    assert {reverse.held_out[i].tobytes() for i in range(len(reverse.held_out))} == held_out


@pytest.mark.parametrize("fraction", [0, 1, -1, float("nan"), 1e-9])
def test_an_empty_side_is_an_error(fraction):
    with pytest.raises(ValueError, match="held-out fraction"):
        split_held_out(TokenDataset.from_bytes([b"a", b"b"]), fraction)


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 2, 1, 3], [0, 2**63 - 1, -2, 3], []])
def test_offsets_must_span_the_tokens(offsets):
    with pytest.raises(ValueError, match="ascend from 0 to the number of tokens, 3"):
        TokenDataset(np.zeros(3, np.uint8), np.array(offsets, np.int64))


@pytest.mark.parametrize("index", [-1, 2])
def test_samples_are_found_by_id_only(index):
    dataset = TokenDataset.from_bytes([b"a", b"bc"])
    for found_by_id in (dataset, Subset(dataset, np.array([1, 0]))):
        with pytest.raises(IndexError, match="of 2"):
            found_by_id[index]


class Unreadable:
    """Knows its lengths; its samples must not be asked for."""

    lengths = np.array([3, 1, 2])

    def __len__(self):
        return 3

    def __getitem__(self, index):
        pytest.fail("a sample was read")


def test_lengths_that_a_dataset_knows_are_not_measured():
    assert known_lengths(Unreadable()).tolist() == [3, 1, 2]
    assert known_lengths(Subset(Unreadable(), np.array([2, 0]))).tolist() == [2, 3]


def test_lengths_that_a_dataset_does_not_know_are_measured():
    assert known_lengths(["abc", "d"], progress=False).tolist() == [3, 1]
    assert known_lengths(Subset(["abc", "d"], np.array([1])), progress=False).tolist() == [1]


def test_known_lengths_are_checked():
    with pytest.raises(ValueError, match="at least 1: id 1: 0"):
        known_lengths(TokenDataset.from_bytes([b"a", b""]))


def test_a_cache_that_cannot_be_written_is_said_and_done_without(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "_scan", lambda root, progress: [b"def f(): ..."])
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="not kept for the next time"):
        assert len(stdlib_functions(cache_dir=tmp_path / "file" / "cache", progress=False)) == 1
