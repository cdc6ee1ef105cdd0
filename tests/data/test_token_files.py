"""Files of tokens of other trainers: every token is in exactly one sample; what does not fit is refused by name."""

import itertools
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvarlen import UserError
from jvarlen.data.open import open_data


def write_bin(path, tokens, dtype="<u2"):
    np.asarray(tokens).astype(dtype).tofile(path)
    return path


def samples_of(dataset):
    return [dataset[i].tolist() for i in range(len(dataset))]


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
        (b"", "holds 0 bytes, which are not 16-bit"),
        (b"abc", "holds 3 bytes, which are not 16-bit or 32-bit tokens: it may be cut short"),
        (np.arange(100, 200).astype("<u4").tobytes()[:-2], "holds 32-bit tokens, but 398 bytes"),
    ],
)
def test_a_file_of_no_whole_tokens_is_refused_by_name(tmp_path, content, said):
    (tmp_path / "t.bin").write_bytes(content)
    with pytest.raises(UserError, match=rf"t\.bin {said}"):
        open_data(tmp_path / "t.bin")


@pytest.mark.parametrize("name", ["tokens", "tokens.npy"])
def test_a_member_that_is_no_array_is_refused_by_name(tmp_path, name):
    np.savez(tmp_path / "offsets.npz", offsets=np.array([0, 3]))
    path = (tmp_path / "offsets.npz").rename(tmp_path / "t.npz")
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"no array")
    with pytest.raises(UserError, match=r"t\.npz: tokens is not an array"):
        open_data(path, progress=False)


def test_tokens_above_the_vocabulary_are_refused_by_sample(tmp_path):
    path = write_bin(tmp_path / "t.bin", [1, 2, 3, 300, 4, 256, 300, 7])
    with pytest.raises(
        UserError,
        match=r"t\.bin: .* below 256, by --decoder.vocab-size or --model; .*: id 1: 300, id 2: 300$",
    ):
        open_data(path, num_values=256, block_length=3, progress=False)


def test_the_content_key_tells_cuts_apart(tmp_path):
    path = write_bin(tmp_path / "t.bin", [1, 2, 3])
    keys = {open_data(path, progress=False, **cut).content_key for cut in ({}, {"block_length": 2}, {"end_token": 2})}
    assert len(keys) == 3


def test_documents_of_megatron_are_refused_by_name(tmp_path):
    write_bin(tmp_path / "t.bin", [1, 2, 3])
    (tmp_path / "t.idx").touch()
    with pytest.raises(ValueError, match=rf"{tmp_path}/t.bin: with an .idx beside it, .* Megatron-LM"):
        open_data(tmp_path / "t.bin", progress=False)


def test_negative_tokens_are_refused(tmp_path):
    np.savez(tmp_path / "t.npz", tokens=np.array([1, 2, -3]), offsets=np.array([0, 2, 3]))
    with pytest.raises(UserError, match=r"t\.npz: tokens must be at least 0; .* id 1: -3$"):
        open_data(tmp_path / "t.npz", progress=False)
