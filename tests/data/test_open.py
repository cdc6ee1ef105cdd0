"""Data files: everything in them is read; bad content is rejected with its line or sample."""

import contextlib
import io
import json
import pickle
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen import FitConfig, fit
from jvarlen.cli import main
from jvarlen.data.open import open_data
from jvarlen.data.split import sample_hash
from jvarlen.runs.config import DataConfig


def write(path, content):
    path.write_bytes(content)
    return path


def samples_of(dataset):
    return [dataset[i].tobytes() for i in range(len(dataset))]


def jsonl(path, texts, field="text"):
    return write(path, b"".join(json.dumps({"id": i, field: text}).encode() + b"\n" for i, text in enumerate(texts)))


def npz(path, **arrays):
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("last_end", [True, False])
@pytest.mark.parametrize("chunk_bytes", [1, 3, 1 << 24])
def test_every_line_of_a_text_is_a_sample_without_its_end(tmp_path, monkeypatch, end, last_end, chunk_bytes):
    monkeypatch.setattr("jvarlen.data.line_files._CHUNK_BYTES", chunk_bytes)
    lines = [b"a", "größer".encode(), b" ", b"\xff\x00 no UTF-8", b"in\rside"]
    dataset = open_data(write(tmp_path / "t.txt", end.join(lines) + end * last_end))
    assert samples_of(dataset) == lines
    assert dataset.lengths.tolist() == list(map(len, lines))
    assert dataset[0].dtype == np.uint8


def test_a_text_is_mapped_and_not_held(tmp_path):
    dataset = open_data(write(tmp_path / "t.txt", b"abc\nde\n"))
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 0
    assert isinstance(dataset._samples.parts[0]._opened.base, np.memmap)
    assert b"abc" not in pickle.dumps(dataset), "a worker maps the file itself"
    assert samples_of(pickle.loads(pickle.dumps(dataset))) == [b"abc", b"de"]


def test_a_file_of_another_size_is_refused_by_a_worker(tmp_path):
    pickled = pickle.dumps(open_data(write(tmp_path / "t.txt", b"abc\nde\n")))
    write(tmp_path / "t.txt", b"abc\n")
    with pytest.raises(ValueError, match=r"t\.txt has changed: it had 7 bytes"):
        pickle.loads(pickled)


@pytest.mark.parametrize(
    ("content", "line"), [(b"\n", 1), (b"a\n\nb\n", 2), (b"a\r\n\r\nb", 2), (b"\r\n", 1), (b"\na\r", 1)]
)
def test_empty_lines_are_refused_by_number(tmp_path, content, line):
    with pytest.raises(ValueError, match=rf"t\.txt.*line {line}: empty\n"):
        open_data(write(tmp_path / "t.txt", content))


@settings(max_examples=10)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=8), st.booleans())
def test_texts_of_json_lines_are_read_as_their_bytes(tmp_path_factory, texts, ascii_only):
    try:
        expected = [text.encode() for text in texts]
    except UnicodeEncodeError:
        return  # half a surrogate pair; tested below
    lines = [json.dumps({"n": 1, "body": text}, ensure_ascii=ascii_only) for text in texts]
    path = write(tmp_path_factory.getbasetemp() / "read.jsonl", "\n".join(lines).encode())
    dataset = open_data(path, field="body", progress=False)
    assert samples_of(dataset) == expected
    assert dataset.lengths.tolist() == list(map(len, expected))
    assert samples_of(pickle.loads(pickle.dumps(dataset))) == expected


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"", r"not JSON \(Expecting value: line 1 column 1"),
        (b'{"text": "a"', "not JSON"),
        (b'{"text": "a"} {}', "not JSON"),
        (b'{"text": "\xff"}', "not JSON"),
        ('{"text": "a"}'.encode("utf-16"), "not JSON"),
        (b'"text"', "no JSON object"),
        (b"{}", "no such field, but none"),
        (b'{"body": "a", "id": 1}', "no such field, but 'body', 'id'"),
        (b'{"text": null}', "no string, but None"),
        (b'{"text": ["a"]}', r"no string, but \['a'\]"),
        (b'{"text": ""}', "empty"),
        (rb'{"text": "\ud800"}', "half a surrogate pair"),
        (b'{"text": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "not JSON"),
        (b'{"text": ' + b"1" * 5000 + b"}", "not JSON"),
    ],
)
def test_what_is_no_text_in_a_json_line_is_refused_by_number_and_reason(tmp_path, line, reason):
    path = write(tmp_path / "t.jsonl", b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    with pytest.raises(ValueError, match=rf"t\.jsonl: every sample .* text in 'text'; .*line 2: {reason}"):
        open_data(path, progress=False)


LINES = [b'{"text": "a"}', b"", b'{"text": "bc"}', b'{"body": "d"}', b'{"text": ""}', b"no", b'{"text": "def"}']
BAD_LINES = {2: "not JSON (", 4: "no such field, but 'body'", 5: "empty", 6: "not JSON ("}


@pytest.mark.parametrize("tokenized", [False, True])
def test_lines_that_are_no_samples_are_left_out_and_listed(tmp_path, tokenized, monkeypatch):
    options = {"progress": False, "on_bad_sample": "skip", "max_bad_fraction": 4 / 7}
    if tokenized:
        options["loss_on"] = ["text"]
    path = write(tmp_path / "t.jsonl", b"\n".join(LINES))
    dataset = open_data(path, **options)
    samples = [bytes(getattr(dataset[i], "tokens", dataset[i])) for i in range(len(dataset))]
    assert samples == [b"a", b"bc", b"def"]
    assert dataset.lengths.tolist() == [1, 2, 3]
    assert [name for name, _ in dataset.skipped] == [f"line {number}" for number in BAD_LINES]
    assert dataset.sample_hashes.tolist() == [sample_hash(sample) for sample in samples]
    again = pickle.loads(pickle.dumps(dataset))
    assert bytes(getattr(again[2], "tokens", again[2])) == b"def"
    if not tokenized:
        assert all(
            reason.startswith(BAD_LINES[number]) for number, (_, reason) in zip(BAD_LINES, dataset.skipped, strict=True)
        )
    monkeypatch.setattr("jvarlen.data.measure.measure_ranges", lambda *_: pytest.fail("measured again"))
    assert open_data(path, **options).skipped == dataset.skipped


def test_more_bad_lines_than_the_stated_share_are_an_error(tmp_path):
    path = write(tmp_path / "t.jsonl", b"\n".join(LINES))
    options = {"progress": False, "on_bad_sample": "skip"}
    with pytest.raises(ValueError, match=r"mend or remove 4 of 7: line 2: not JSON(?s:.*) up to max_bad_fraction=0\.5"):
        open_data(path, max_bad_fraction=0.5, **options)
    with pytest.raises(ValueError, match="on_bad_sample"):
        open_data(path, progress=False, on_bad_sample="warn")
    with pytest.raises(ValueError, match="2 of 2"):
        open_data(write(tmp_path / "none.txt", b"\n\n"), max_bad_fraction=1.0, **options)
    text = open_data(write(tmp_path / "t.txt", b"a\n\nb"), max_bad_fraction=0.5, **options)
    assert (samples_of(text), text.skipped) == ([b"a", b"b"], (("line 2", "empty"),))
    assert open_data(write(tmp_path / "whole.txt", b"a\nb"), **options).skipped == ()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("text"), inner, max_size=3),
    max_leaves=6,
)
any_line = (
    st.binary(max_size=30)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.text().map(lambda text: json.dumps({"text": text}).encode())
    | st.sampled_from(
        [b"[" * 3000, b'{"text":' * 3000, b'{"text": NaN}', b'{"text": "a", "text": 5}', b'{"text": "a"}\x00']
    )
    | st.sampled_from([rb'{"text": "\ud800"}', b'\xef\xbb\xbf{"text": "a"}', b'{"text": "\xe2\x80\xa8"}'])
)


@settings(max_examples=50)
@given(st.lists(any_line, max_size=6))
def test_any_lines_are_read_whole_or_refused_by_file_and_line(tmp_path_factory, lines):
    content = b"\n".join(lines)
    path = write(tmp_path_factory.getbasetemp() / "any.jsonl", content)
    refusal = None
    try:
        dataset = open_data(path, progress=False)
    except ValueError as error:
        refusal = str(error)
    if refusal is None:
        wanted = content.removesuffix(b"\n").split(b"\n")
        assert samples_of(dataset) == [json.loads(line)["text"].encode() for line in wanted]
    else:
        assert refusal.startswith(str(path))
        assert "line " in refusal


@pytest.mark.parametrize("ending", ["txt", "jsonl", "csv"])
def test_a_byte_order_mark_is_no_text_and_utf_16_is_refused_by_name(tmp_path, ending):
    if ending == "csv":
        pytest.importorskip("pyarrow")
    text = {"txt": "one\ntwo\n", "jsonl": '{"text": "one"}\n{"text": "two"}\n', "csv": "text\none\ntwo\n"}[ending]
    path = tmp_path / f"t.{ending}"
    path.write_text(text, encoding="utf-8-sig")
    dataset = open_data(path, progress=False)
    assert samples_of(dataset) == [b"one", b"two"]
    assert dataset.lengths.tolist() == [3, 3]
    for encoding in ("utf-16", "utf-32"):
        path.write_text(text, encoding=encoding)
        with pytest.raises(ValueError, match=rf"t\.{ending} is UTF-16 or UTF-32: save it as UTF-8"):
            open_data(path, progress=False)


def test_a_line_that_changed_is_named_when_it_is_read(tmp_path):
    path = jsonl(tmp_path / "t.jsonl", ["one", "two"])
    dataset = open_data(path, progress=False)
    with path.open("r+b") as file:
        file.seek(path.read_bytes().index(b"two"))
        file.write(b'"""')
    with pytest.raises(ValueError, match=r"t\.jsonl has changed: line 2: not JSON"):
        dataset[1]


def test_json_lines_are_parsed_once_and_again_when_they_change(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "t.jsonl", ["one", "seven"])
    first = open_data(path, progress=False)
    with monkeypatch.context() as patched:
        patched.setattr("jvarlen.data.line_files._parse", lambda line, field: pytest.fail("parsed again"))
        again = open_data(path, progress=False)
    assert again.lengths.tolist() == [3, 5]
    assert again.content_key == first.content_key
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "t.jsonl",
        f"t.jsonl.lengths-{first.content_key[:16]}.npz",
    ]
    jsonl(path, ["four", "six!"])  # as many bytes
    assert open_data(path, progress=False).lengths.tolist() == [4, 4]


def test_the_content_key_says_which_samples_these_are(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    texts = ["one", "two"]
    keys = set()
    for content in (texts, ["one", "six"]):
        write(tmp_path / "t.txt", "\n".join(content).encode())
        write(other / "another.txt", "\n".join(content).encode())
        key = open_data(tmp_path / "t.txt").content_key
        assert key == open_data(other / "another.txt", field="any").content_key
        keys.add(key)
    lines = [json.dumps({"text": text, "body": text}).encode() for text in texts]
    for field in ("text", "body"):
        keys.add(open_data(write(tmp_path / "t.jsonl", b"\n".join(lines)), field=field, progress=False).content_key)
    for last in (3, 4):
        tokens = npz(tmp_path / "t.npz", tokens=np.array([1, last]), offsets=np.array([0, 1, 2]))
        keys.add(open_data(tokens).content_key)
    assert len(keys) == 6
    assert all(len(key) == 64 for key in keys)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, ">i8", np.uint64])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_read_as_their_samples(tmp_path, dtype, save):
    save(tmp_path / "t.npz", tokens=np.array([5, 6, 255], dtype), offsets=np.array([0, 2, 3]))
    dataset = open_data(tmp_path / "t.npz", num_values=256)
    assert [dataset[i].tolist() for i in range(2)] == [[5, 6], [255]]
    assert dataset[0].dtype == np.uint8, "the same bytes have one hash, whatever they were stored as"
    assert dataset.lengths.tolist() == [2, 1]
    assert open_data(tmp_path / "t.npz")[0].dtype == dtype


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"tokens": [1, 2]}, "offsets"),
        ({"tokens": [1.0], "offsets": [0, 1]}, r"tokens must be 1-D integers, not float64\[1\]"),
        ({"tokens": [[1]], "offsets": [0, 1]}, r"tokens must be 1-D integers, not int64\[1, 1\]"),
        ({"tokens": [True], "offsets": [0, 1]}, "tokens must be 1-D integers, not bool"),
        ({"tokens": [1], "offsets": [0.0, 1.0]}, "offsets must be 1-D integers, not float64"),
        ({"tokens": [1, 2], "offsets": np.array([], int)}, "offsets must ascend from 0 to the number of tokens, 2"),
        ({"tokens": [1, 2], "offsets": [0, 1]}, "offsets must ascend"),
        ({"tokens": [1, 2], "offsets": [-1, 2]}, "offsets must ascend"),
        ({"tokens": [1, 2], "offsets": [0, 2, 1, 2]}, "offsets must ascend"),
        ({"tokens": [1, 2], "offsets": [0, 2**63 - 1, -2, 2]}, "offsets must ascend"),  # whose differences overflow
        ({"tokens": np.array([], int), "offsets": [0]}, "holds no samples"),
        ({"tokens": [1, 2], "offsets": [0, 0, 1, 1, 2]}, "id 0: empty; id 2: empty\n"),
        (
            {"tokens": [1, 256, 300, 4, -7], "offsets": [0, 1, 3, 4, 5]},
            "at least 0 and below 256, by --decoder.vocab-size or --model; .* others: id 1: 256, id 3: -7$",
        ),
    ],
)
def test_arrays_that_do_not_fit_together_are_refused(tmp_path, arrays, said):
    path = npz(tmp_path / "t.npz", **{name: np.asarray(array) for name, array in arrays.items()})
    with pytest.raises(ValueError, match=rf"t\.npz.*{said}"):
        open_data(path, num_values=256)


def test_tokens_of_a_larger_vocabulary_are_left_as_they_are(tmp_path):
    path = npz(tmp_path / "t.npz", tokens=np.array([70_000, 3]), offsets=np.array([0, 1, 2]))
    assert open_data(path)[0].tolist() == [70_000]
    with pytest.raises(ValueError, match="id 0: 70000"):
        open_data(path, num_values=70_000)


class Evil:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


def test_nothing_is_unpickled(tmp_path):
    objects = npz(tmp_path / "a.npz", tokens=np.array([Evil()], object), offsets=np.array([0, 1]))
    pickled = write(tmp_path / "b.npz", pickle.dumps(Evil()))
    for path in (objects, pickled):
        with pytest.raises(ValueError, match="not a readable"):
            open_data(path)


def test_a_damaged_array_file_is_refused_by_name(tmp_path):
    whole = npz(tmp_path / "t.npz", tokens=np.arange(50), offsets=np.array([0, 20, 50])).read_bytes()
    array = io.BytesIO()
    np.save(array, np.arange(3))
    empty = io.BytesIO()
    zipfile.ZipFile(empty, "w").close()
    flipped = [whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :] for at in range(0, 300, 7)]
    for content in (b"", b"PK", whole[:-30], whole[:200], array.getvalue(), empty.getvalue()):
        with pytest.raises(ValueError, match=r"t\.npz"):
            open_data(write(tmp_path / "t.npz", content))
    for content in flipped:
        with contextlib.suppress(ValueError):  # some bytes of a zip do not matter
            assert open_data(write(tmp_path / "t.npz", content))[1].tolist() == list(range(20, 50))


@pytest.mark.parametrize("name", ["t.txt", "t.jsonl"])
def test_an_empty_file_is_an_error(tmp_path, name):
    with pytest.raises(ValueError, match=f"{name} is empty"):
        open_data(write(tmp_path / name, b""))


def test_a_missing_or_foreign_file_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no data file .*t\.txt"):
        open_data(tmp_path / "t.txt")
    with pytest.raises(ValueError, match=r"t\.doc is not a data file: names must end with \.txt, \.jsonl, \.csv"):
        open_data(write(tmp_path / "t.doc", b"a"))


def test_a_file_that_cannot_be_trained_on_is_one_line_on_the_command_line(tmp_path, capsys):
    wide = npz(tmp_path / "wide.npz", tokens=np.array([1, 999]), offsets=np.array([0, 1, 2]))
    for path, said in ((wide, "id 1: 999"), (jsonl(tmp_path / "t.jsonl", ["a"], "body"), "but 'id', 'body'")):
        assert main(["train", "--data", str(path), "--no-progress", "--runs-dir", str(tmp_path / "runs")]) == 2
        message = capsys.readouterr().err
        assert said in message
        assert str(path) in message
        assert message.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_data_are_given_once(split, tmp_path):
    with pytest.raises(ValueError, match=r"given twice.*t\.txt"):
        fit(FitConfig(data=DataConfig(files=(tmp_path / "t.txt",)), progress=False), split)
