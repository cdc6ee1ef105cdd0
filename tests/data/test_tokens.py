"""The built-in corpus: real, deduplicated, cached; any dataset split by content."""

import numpy as np
import pytest

import jvarlen
from jvarlen.data.measure import find_lengths
from jvarlen.data.samples import to_tokens
from jvarlen.data.split import split_held_out
from jvarlen.data.stdlib_corpus import read_functions
from jvarlen.data.tokens import Subset, TokenDataset


def test_no_sources_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="no source files"):
        read_functions(tmp_path, progress=False)


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


@pytest.mark.parametrize("fraction", [0, 1, -1, float("nan")])
def test_a_share_is_between_0_and_1(fraction):
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


@pytest.mark.parametrize(
    ("ids", "named"), [([2, -1, 3], r"id -1, id 3 \(limit 2\)"), ([True, False, True], "integers, not bool")]
)
def test_a_subset_holds_samples_of_its_dataset(ids, named):
    with pytest.raises(ValueError, match=named):
        Subset(["a", "b", "c"], np.array(ids))


class Unreadable:
    """Knows its lengths; its samples must not be asked for."""

    lengths = np.array([3, 1, 2])

    def __len__(self):
        return 3

    def __getitem__(self, index):
        pytest.fail("a sample was read")


def test_lengths_that_a_dataset_knows_are_not_measured():
    assert find_lengths(Unreadable()).tolist() == [3, 1, 2]
    assert find_lengths(Subset(Unreadable(), np.array([2, 0]))).tolist() == [2, 3]


def test_known_lengths_are_checked():
    with pytest.raises(ValueError, match="at least 1: id 1: 0"):
        find_lengths(TokenDataset.from_bytes([b"a", b""]))


SAMPLES = [[3, 1, 4], [1], [5, 9], [2, 6, 5, 3], [5], [8, 9, 7]]


def torch_dataset(samples):
    torch = pytest.importorskip("torch")

    class MapStyle(torch.utils.data.Dataset):
        def __len__(self):
            return len(samples)

        def __getitem__(self, index):
            return torch.tensor(samples[index])

    return MapStyle()


def grain_source(samples):
    import grain

    return grain.MapDataset.source([np.array(sample, np.int32) for sample in samples])


def grain_random_access(samples):
    from grain.python import RandomAccessDataSource

    class Source:
        def __len__(self):
            return len(samples)

        def __getitem__(self, record_key):
            return np.array(samples[record_key], np.uint16)

    assert isinstance(Source(), RandomAccessDataSource)
    return Source()


MAKERS = [list, torch_dataset, grain_source, grain_random_access]
IDS = ["list", "torch", "grain", "grain_random_access"]


@pytest.mark.parametrize("make", MAKERS, ids=IDS)
def test_any_random_access_dataset_is_measured_split_and_loaded(make):
    dataset = make(SAMPLES)
    lengths = find_lengths(dataset, progress=False)
    assert lengths.tolist() == list(map(len, SAMPLES))
    split = split_held_out(dataset, 0.5)
    assert len(split.train) + len(split.held_out) == len(SAMPLES)
    plan = jvarlen.make_plan(lengths, [(2, 2), (2, 4)], order="length")
    steps = list(jvarlen.load(plan, dataset))
    read = {
        tuple(tokens[:length])
        for step in steps
        for tokens, length in zip(np.asarray(step.tokens)[0].tolist(), step.lengths[0].tolist(), strict=True)
    }
    assert read - {()} == set(map(tuple, SAMPLES))


def test_the_same_tokens_are_on_the_same_side_whatever_holds_them():
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, 50_000, 5).tolist() for _ in range(40)]
    makers = [list, torch_dataset, grain_source, grain_random_access]
    sides = [list(split_held_out(make(samples), 0.3).held_out) for make in makers]
    held_out = [[np.asarray(sample).tolist() for sample in side] for side in sides]
    assert 0 < len(held_out[0]) < 40
    assert all(side == held_out[0] for side in held_out)


def test_texts_and_their_bytes_are_the_same_tokens():
    for sample in ("größer", "größer".encode(), bytearray("größer".encode()), memoryview("größer".encode())):
        assert to_tokens(sample).dtype == np.uint8
        assert to_tokens(sample).tobytes() == "größer".encode()


@pytest.mark.parametrize(
    "sample", [None, 7, [1.0], [True], [[1]], [[1], [2, 3]], [], {"text": "a"}, {1, 2}, ["a"], np.array(3)], ids=repr
)
def test_what_is_no_sequence_of_tokens_is_refused(sample):
    with pytest.raises(ValueError, match=r"sample must be text, bytes or 1-D integers|no tokens, but list"):
        to_tokens(sample)
