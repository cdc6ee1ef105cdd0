"""Tokenized text: exactly the tokenizer's ids, and errors that name what it cannot take."""

import json
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest

from jvarlen.data.open import open_data
from jvarlen.data.samples import MarkedText
from jvarlen.data.split import split_held_out
from jvarlen.data.tokenizer import FileTokenizer

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers  # noqa: E402

TEXTS = ["the quick brown fox", "größer", "jumps over the lazy dog", "a"]
NUM_IDS = 294  # so few texts have no more merges


def byte_level(path: Path) -> tokenizers.Tokenizer:
    """A small byte-level BPE, which takes any text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=alphabet, special_tokens=["<s>"]
    )
    tokenizer.train_from_iterator(TEXTS * 20, trainer)
    tokenizer.save(str(path))
    return tokenizer


@pytest.fixture
def path(tmp_path):
    byte_level(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def changed(path, change):
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    change(tokenizer)
    tokenizer.save(str(path))
    return path


def ids_of(dataset):
    return [dataset[i].tolist() for i in range(len(dataset))]


def expected_ids(path, texts=TEXTS):
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    return [tokenizer.encode(text).ids for text in texts]


def samples(path, texts=TEXTS):
    tokenizer = FileTokenizer(path)
    return [tokenizer.sample(MarkedText(text)) for text in texts]


def test_samples_are_the_ids_of_their_text(path):
    assert [sample.tolist() for sample in samples(path)] == expected_ids(path)
    assert len(samples(path)[0]) < len(TEXTS[0])
    assert samples(path)[0].dtype == np.int32
    assert FileTokenizer(path).num_values == FileTokenizer(str(path)).num_values == NUM_IDS


def test_special_tokens_are_those_of_the_post_processor(path):
    plain = expected_ids(path)
    changed(
        path,
        lambda tokenizer: setattr(
            tokenizer, "post_processor", processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        ),
    )
    assert ids_of(samples(path)) == [[0, *ids] for ids in plain]


def test_nothing_is_truncated_or_padded_whatever_the_file_says(path):
    plain = expected_ids(path)
    changed(path, lambda tokenizer: tokenizer.enable_truncation(2))
    changed(path, lambda tokenizer: tokenizer.enable_padding(length=50))
    assert expected_ids(path) != plain
    assert ids_of(samples(path)) == plain


def test_a_worker_loads_the_tokenizer_itself_and_refuses_another(path):
    pickled = pickle.dumps(FileTokenizer(path))
    assert len(pickled) < 1000
    assert pickle.loads(pickled).sample(MarkedText("a")).tolist() == samples(path, ["a"])[0].tolist()
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ValueError, match=r"tokenizer\.json has changed"):
        pickle.loads(pickled)


NO_TOKENIZERS = [
    b"",
    b"{}",
    b'{"<unk>": 0, "word": 1}',
    b"[]",
    b"\xff",
    b"[" * 100_000,
    b'{"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": [',
    b'{"model": {"type": "BPE", "vocab": {"a": 4294967295}, "merges": []}}',
    b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
    # Makes the package panic.
    b"""{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "post_processor": {"type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}], "pair": [], "special_tokens": {}}}""",
]


@pytest.mark.parametrize("content", NO_TOKENIZERS, ids=range(len(NO_TOKENIZERS)))
def test_what_is_no_tokenizer_is_refused_by_name(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    said = r"tokenizer\.json(: ids of tokens must fit int32| is not a tokenizer .*WordLevel\(words)"
    with pytest.raises(ValueError, match=said):
        FileTokenizer(path)
    with pytest.raises(FileNotFoundError, match=r"other\.json"):
        FileTokenizer(tmp_path / "other.json")


def test_ids_that_the_file_does_not_count_are_refused(path):
    template = processors.TemplateProcessing(single="<x> $A", special_tokens=[("<x>", 2**32 - 1)])
    changed(path, lambda tokenizer: setattr(tokenizer, "post_processor", template))
    with pytest.raises(ValueError, match=r"token 4294967295, but .*tokenizer\.json has only 294 ids"):
        samples(path)


def test_what_is_no_text_is_refused(tmp_path, path):
    with pytest.raises(ValueError, match="fails on the text"):
        samples(path, ["\ud800"])
    (tmp_path / "t.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match="line 1: not UTF-8 at byte 2"):
        open_data(tmp_path / "t.txt", tokenizer=path, progress=False)


def test_what_is_needed_is_said_where_the_package_is_missing(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"tokenizer\.json can only be read with tokenizers: pip install"):
        FileTokenizer(path)


def write_texts(tmp_path):
    """The same texts in every kind of file that holds text."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "t.txt").write_text("\n".join(TEXTS))
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    parquet.write_table(pa.table({"text": TEXTS}), tmp_path / "t.parquet")
    return [tmp_path / f"t.{ending}" for ending in ("txt", "jsonl", "parquet")]


def test_texts_of_every_kind_of_file_become_the_same_tokens(tmp_path, path):
    texts = write_texts(tmp_path)
    for data in texts:
        dataset = open_data(data, tokenizer=path, progress=False)
        assert ids_of(dataset) == expected_ids(path)
        assert dataset.lengths.tolist() == list(map(len, expected_ids(path)))
        assert dataset.num_values == NUM_IDS
        assert dataset.content_key != open_data(data, progress=False).content_key
        assert open_data(data, progress=False).num_values == 256
        assert ids_of(pickle.loads(pickle.dumps(dataset))) == expected_ids(path)
        assert len(split_held_out(dataset, 0.5).train) in range(1, 4)
        with pytest.raises(ValueError, match=r"tokenizer\.json has 294 ids; at most 256 are allowed"):
            open_data(data, tokenizer=path, num_values=256, progress=False)


def test_lengths_are_kept_for_a_tokenizer_and_measured_anew_for_another(tmp_path, path, monkeypatch):
    (data, *_) = write_texts(tmp_path)
    lengths = open_data(data, tokenizer=path, progress=False).lengths
    with monkeypatch.context() as patched:
        patched.setattr(FileTokenizer, "sample", lambda self, text: pytest.fail("tokenized again"))
        assert open_data(data, tokenizer=path, progress=False).lengths.tolist() == lengths.tolist()
    key = open_data(data, tokenizer=path, progress=False).content_key
    template = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    changed(path, lambda tokenizer: setattr(tokenizer, "post_processor", template))
    other = open_data(data, tokenizer=path, progress=False)
    assert other.lengths.tolist() == (lengths + 1).tolist()
    assert other.content_key != key


def test_samples_without_tokens_are_refused_by_line_or_row(tmp_path, path):
    changed(path, lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.Strip()))
    data = tmp_path / "t.jsonl"
    data.write_bytes(b'{"text": "a"}\n{"text": "  "}\n[]\n')
    with pytest.raises(ValueError, match=r"t\.jsonl: .*line 2: no tokens, by this tokenizer; line 3: no JSON object\n"):
        open_data(data, tokenizer=path, progress=False)
    pa = pytest.importorskip("pyarrow")
    from pyarrow import feather

    feather.write_feather(pa.table({"text": [b"a", b" ", b"\xff"]}), tmp_path / "t.feather")
    with pytest.raises(
        ValueError, match=r"t\.feather: .*id 1: no tokens, by this tokenizer; id 2: not UTF-8 at byte 0\n"
    ):
        open_data(tmp_path / "t.feather", tokenizer=path, progress=False)


def test_a_limit_is_for_the_ids_and_not_for_the_bytes_of_the_text(tmp_path):
    words = models.WordLevel({"größer": 0, "a": 1, "?": 2}, unk_token="?")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    for data in write_texts(tmp_path):
        dataset = open_data(data, tokenizer=tmp_path / "tokenizer.json", num_values=3, progress=False)
        assert ids_of(dataset) == [[2], [0], [2], [1]]


def test_a_tokenizer_for_tokens_is_refused(tmp_path, path):
    np.savez(tmp_path / "t.npz", tokens=np.arange(3, dtype=np.uint8), offsets=np.array([0, 3]))
    with pytest.raises(ValueError, match=r"t\.npz holds tokens, not text: the tokenizer .*tokenizer\.json"):
        open_data(tmp_path / "t.npz", tokenizer=path, num_values=256)
