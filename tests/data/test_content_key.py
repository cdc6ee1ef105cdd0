"""Content keys: the same content has the same key, any other content another."""

import hashlib
import json

import numpy as np
import pytest

from jvarlen.data import length_cache
from jvarlen.data.length_cache import combine_keys, content_key


def write(path, content):
    path.write_bytes(content)
    return path


def expected_key(contents, part_bytes):
    whole = hashlib.sha256(b"jvarlen-content-1\0" + json.dumps(list(map(len, contents))).encode())
    for content in contents:
        for start in range(0, len(content), part_bytes):
            whole.update(hashlib.sha256(content[start : start + part_bytes]).digest())
    return whole.hexdigest()


@pytest.mark.parametrize("sizes", [[0], [1], [7], [8], [9], [8, 0, 17], [40, 1]])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_the_key_is_the_hash_of_the_hashes_of_parts(tmp_path, monkeypatch, sizes, num_threads):
    monkeypatch.setattr(length_cache, "_PART_BYTES", 8)
    monkeypatch.setattr(length_cache, "_READ_BYTES", 3)
    monkeypatch.setattr("os.cpu_count", lambda: num_threads)
    contents = [np.random.default_rng(size).bytes(size) for size in sizes]
    paths = [write(tmp_path / f"{i}", content) for i, content in enumerate(contents)]
    assert content_key(*paths) == expected_key(contents, 8)


def test_names_do_not_count_but_every_byte_and_every_border_does(tmp_path):
    one, other = write(tmp_path / "a", b"abc"), write(tmp_path / "b", b"abc")
    assert content_key(one) == content_key(other)
    pairs = [(b"abc", b"abd"), (b"ab", b"cabc"), (b"abca", b"bc"), (b"abcabc", b"")]
    keys = {content_key(write(tmp_path / "c", first), write(tmp_path / "d", second)) for first, second in pairs}
    assert len(keys | {content_key(one, other), content_key(one)}) == 6


def test_a_file_that_was_cut_meanwhile_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="a became shorter while it was read"):
        length_cache._hash_part(write(tmp_path / "a", b"abc"), 0, 4)


def test_an_interrupt_ends_hashing(tmp_path, monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(length_cache, "raise_if_interrupted", interrupt)
    with pytest.raises(KeyboardInterrupt):
        content_key(write(tmp_path / "a", b"abc"))


def test_keys_are_combined_in_order_and_without_confusion():
    keys = [("a", "b"), ("b", "a"), ("ab",), ("a", "b", None), ("a", None, "b"), ('a","b',)]
    assert len({combine_keys(*parts) for parts in keys}) == len(keys)
