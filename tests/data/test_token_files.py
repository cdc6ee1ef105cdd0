"""Files of tokens of other trainers: every token is in exactly one sample; what does not fit is refused by name."""

import contextlib
import itertools
import pickle
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvarlen import UserError
from jvarlen.data.open import open_data
from jvarlen.data.token_files import open_token_file

CODES = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}


def write_bin(path, tokens, dtype="<u2"):
    np.asarray(tokens).astype(dtype).tofile(path)
    return path


def samples_of(dataset):
    return [dataset[i].tolist() for i in range(len(dataset))]


def write_indexed(path, documents, dtype="<i4", *, modes=False):
    """Documents of sequences of tokens in the format of Megatron-LM."""
    sequences = [sequence for document in documents for sequence in document]
    lengths = np.array(list(map(len, sequences)), "<i4")
    pointers = (np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize).astype("<i8")
    ends = np.cumsum([0, *map(len, documents)]).astype("<i8")
    write_bin(path, [token for sequence in sequences for token in sequence], dtype)
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(ends))
    index = header + lengths.tobytes() + pointers.tobytes() + ends.tobytes() + b"\0" * (len(sequences) * modes)
    path.with_suffix(".idx").write_bytes(index)
    return path


@given(
    st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=50), st.integers(1, 9), st.sampled_from([1, 3, 1 << 24])
)
def test_blocks_partition_the_file(tmp_path_factory, tokens, block_length, chunk):
    path = write_bin(tmp_path_factory.getbasetemp() / "blocks.bin", tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jvarlen.data.token_files._CHUNK_TOKENS", chunk)
        dataset = open_data(path, block_length=block_length, num_values=2**16 - 1 if max(tokens) < 2**16 - 1 else None)
    samples = samples_of(dataset)
    assert list(itertools.chain(*samples)) == tokens
    assert {len(sample) for sample in samples[:-1]} <= {block_length}
    assert dataset.lengths.tolist() == list(map(len, samples))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=50), st.sampled_from([1, 3, 1 << 24]))
def test_documents_end_with_their_end_token_and_partition_the_file(tmp_path_factory, tokens, chunk):
    path = write_bin(tmp_path_factory.getbasetemp() / "documents.bin", tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jvarlen.data.token_files._CHUNK_TOKENS", chunk)
        if 0 not in tokens:
            with pytest.raises(UserError, match=r"documents\.bin holds no end token 0"):
                open_data(path, end_token=0, progress=False)
            return
        samples = samples_of(open_data(path, end_token=0, progress=False))
    assert list(itertools.chain(*samples)) == tokens
    assert all(0 not in sample[:-1] for sample in samples)
    assert all(sample[-1] == 0 for sample in samples[:-1])


@pytest.mark.parametrize("dtype", ["<u2", "<u4"])
@pytest.mark.parametrize("most", [300, 65_000, 1_000_000])
def test_the_width_of_tokens_is_found(tmp_path, dtype, most):
    tokens = np.random.default_rng(0).integers(0, min(most, np.iinfo(dtype).max + 1), 5000)
    dataset = open_data(write_bin(tmp_path / "t.bin", tokens, dtype))
    assert np.concatenate([dataset[i] for i in range(len(dataset))]).tolist() == tokens.tolist()
    assert dataset[0].dtype == np.dtype(dtype)


def test_a_file_of_tokens_is_mapped_and_workers_map_it_themselves(tmp_path):
    path = write_bin(tmp_path / "t.bin", range(34_464))
    dataset = open_data(path, num_values=40_000, progress=False)
    assert len(pickle.dumps(dataset)) < 10_000
    assert samples_of(pickle.loads(pickle.dumps(dataset))) == samples_of(dataset)
    pickled = pickle.dumps(dataset)
    write_bin(path, [1, 2])
    with pytest.raises(UserError, match=r"t\.bin has changed"):
        pickle.loads(pickled)


def test_bytes_as_wide_tokens_are_the_same_samples(tmp_path):
    dataset = open_data(write_bin(tmp_path / "t.bin", [5, 6, 255]), num_values=256, progress=False)
    assert dataset[0].dtype == np.uint8


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "holds 0 bytes, which are no 16-bit"),
        (b"abc", "holds 3 bytes, which are no 16-bit or 32-bit tokens: it may be cut short"),
        (np.arange(100, 200).astype("<u4").tobytes()[:-2], "holds 32-bit tokens, but 398 bytes"),
    ],
)
def test_a_file_of_no_whole_tokens_is_refused_by_name(tmp_path, content, said):
    (tmp_path / "t.bin").write_bytes(content)
    with pytest.raises(UserError, match=rf"t\.bin {said}"):
        open_data(tmp_path / "t.bin")


def test_tokens_above_the_vocabulary_are_refused_by_sample(tmp_path):
    path = write_bin(tmp_path / "t.bin", [1, 2, 3, 300, 4, 256, 300, 7])
    with pytest.raises(
        UserError,
        match=r"t\.bin: .* below 256, by --decoder.vocab-size or --model; .*: id 1: 300, id 2: 300$",
    ):
        open_data(path, num_values=256, block_length=3, progress=False)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("modes", [True, False])
def test_documents_of_an_index_are_read(tmp_path, dtype, modes):
    path = write_indexed(tmp_path / "t.bin", [[[1, 2], [3]], [], [[4]], [[], [5, 6]], [[]]], dtype, modes=modes)
    dataset = open_data(path, num_values=100, end_token=3, progress=False)
    assert samples_of(dataset) == [[1, 2, 3], [4], [5, 6]]
    assert dataset.lengths.tolist() == [3, 1, 2]
    assert dataset[0].dtype == np.uint8
    assert samples_of(pickle.loads(pickle.dumps(dataset))) == samples_of(dataset)


def test_the_index_of_a_file_in_an_object_store_is_found(tmp_path, monkeypatch):
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_indexed(tmp_path / "t.bin", [[[1, 2], [3]], [[4]]])
    store = fsspec.filesystem("memory")
    for file in (path, path.with_suffix(".idx")):
        store.pipe(f"/tokens/{file.name}", file.read_bytes())
    assert samples_of(open_data("memory://tokens/t.bin", progress=False)) == [[1, 2, 3], [4]]
    write_indexed(path, [[[1, 2]], [[3], [4]]])
    store.pipe("/tokens/t.idx", path.with_suffix(".idx").read_bytes())
    assert samples_of(open_data("memory://tokens/t.bin", progress=False)) == [[1, 2], [3, 4]]
    store.rm("/tokens", recursive=True)


def test_the_content_key_tells_index_and_cut_apart(tmp_path):
    path = write_indexed(tmp_path / "t.bin", [[[1, 2]], [[3]]])
    keys = {open_data(path).content_key}
    write_indexed(path, [[[1]], [[2, 3]]])
    keys.add(open_data(path).content_key)
    path.with_suffix(".idx").unlink()
    keys |= {open_data(path, progress=False, **cut).content_key for cut in ({}, {"block_length": 2}, {"end_token": 2})}
    assert len(keys) == 5


def test_negative_tokens_are_refused(tmp_path):
    path = write_indexed(tmp_path / "t.bin", [[[1, 2]], [[-3]]])
    with pytest.raises(UserError, match=r"t\.bin: tokens must be at least 0; .* id 1: -3$"):
        open_data(path, progress=False)


def test_a_damaged_index_is_refused_by_name(tmp_path):
    path = write_indexed(tmp_path / "t.bin", [[[1, 2], [3]], [[4]]])
    index = path.with_suffix(".idx")
    whole = index.read_bytes()
    right = samples_of(open_data(path))
    cases = {
        b"": "is no index of Megatron-LM of version 1",
        whole[:20]: "is no index of Megatron-LM of version 1",
        whole[:-3]: "sequences and 3 documents take",
        b"X" + whole[1:]: "is no index of Megatron-LM of version 1",
        whole[:9] + b"\2" + whole[10:]: "is no index of Megatron-LM of version 1",
        whole[:17] + b"\6" + whole[18:]: "its dtype has the code 6",
        whole[:17] + b"\5" + whole[18:]: "sequences must lie one after the other: id 1, id 2",
        whole[:34] + b"\1" + whole[35:]: "sequences must lie one after the other",
        whole[:-8] + b"\2" + whole[-7:]: "documents must ascend from 0 to the 3 sequences",
    }
    for content, said in cases.items():
        index.write_bytes(content)
        with pytest.raises(UserError, match=rf"t\.idx .*{said}"):
            open_data(path)
    for place in range(len(whole)):
        index.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        with contextlib.suppress(UserError):
            samples = samples_of(open_data(path))
            assert list(itertools.chain(*samples)) == list(itertools.chain(*right)), (
                "of a document's end, only the next one tells"
            )
    index.write_bytes(whole)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match=r"t\.idx is damaged or of another file: t\.bin holds 12 bytes, not 4 tokens"):
        open_data(path)


@pytest.mark.slow
def test_a_billion_tokens_open_at_once(tmp_path):
    import time

    with (tmp_path / "t.bin").open("wb") as file:
        file.truncate(2 * 10**9)  # sparse
    start = time.perf_counter()
    dataset = open_token_file(tmp_path / "t.bin")
    assert time.perf_counter() - start < 1.0, "0.01 s on an idle machine"
    assert len(dataset) == -(-(10**9) // 1024)
