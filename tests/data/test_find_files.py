"""Files as they lie around: every way to name them gives the samples of the files themselves."""

import gzip
import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from jvarlen import UserError
from jvarlen._common.files import check_outputs
from jvarlen.cli import main
from jvarlen.data.find_files import find_files, without_credentials
from jvarlen.data.open import open_data
from jvarlen.runs.config import DataConfig, evaluation_name

fsspec = pytest.importorskip("fsspec")
pa = pytest.importorskip("pyarrow")
csv = pytest.importorskip("pyarrow.csv")

TEXTS = ["one", 'größer, "quoted"', "tab\there", "two\nlines", "x" * 5000]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store():
    files = fsspec.filesystem("memory")
    yield files
    files.rm("/", recursive=True)


def lines(texts):
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def zstd(content):
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(content)
    return out.getvalue().to_pybytes()


def write(path, content):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def texts_of(dataset):
    return [dataset[i].tobytes().decode() for i in range(len(dataset))]


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_compressed_lines_are_those_of_the_file(tmp_path, ending, compress, cache):
    path = write(tmp_path / f"t.jsonl{ending}", compress(lines(TEXTS)))
    dataset = open_data(path, progress=False)
    assert texts_of(dataset) == TEXTS
    assert dataset.lengths.tolist() == [len(text.encode()) for text in TEXTS]
    assert texts_of(pickle.loads(pickle.dumps(dataset))) == TEXTS
    (kept,) = cache.rglob("t.jsonl")
    before = kept.stat().st_mtime_ns
    open_data(path, progress=False)
    assert kept.stat().st_mtime_ns == before, "decompressed once"
    write(path, compress(lines(["other"])))
    assert texts_of(open_data(path, progress=False)) == ["other"]


@pytest.mark.parametrize(("ending", "compress"), [(".gz", gzip.compress), (".zst", zstd)])
def test_a_compressed_file_cut_short_or_damaged_is_named_and_nothing_is_kept(tmp_path, ending, compress, cache):
    whole = compress(lines(TEXTS) + np.random.default_rng(0).bytes(3000))
    for content in (whole[:-1], whole[: len(whole) // 2], b"", b"nonsense"):
        with pytest.raises(UserError, match=rf"t\.txt{ending} is (damaged or was cut short|empty)"):
            open_data(write(tmp_path / f"t.txt{ending}", content), progress=False)
    assert not list(cache.rglob("*t.txt*"))


@pytest.mark.parametrize(("ending", "delimiter"), [(".csv", ","), (".tsv", "\t")])
@pytest.mark.parametrize("compression", ["", ".gz"])
def test_a_column_of_a_delimited_file_is_read(tmp_path, ending, delimiter, compression):
    table = pa.table({"id": range(len(TEXTS)), "body": TEXTS})
    csv.write_csv(table, tmp_path / f"t{ending}", csv.WriteOptions(delimiter=delimiter))
    path = tmp_path / f"t{ending}{compression}"
    if compression:
        write(path, gzip.compress((tmp_path / f"t{ending}").read_bytes()))
    dataset = open_data(path, field="body", progress=False)
    assert texts_of(dataset) == TEXTS
    assert texts_of(pickle.loads(pickle.dumps(dataset))) == TEXTS
    with pytest.raises(UserError, match=r"no readable column 'text': the columns are 'id', 'body'"):
        open_data(path, progress=False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("text,id\n" + '"a",1\n"b,2\n"c",3\n"d",4\n', "line 3: a quote is missing"),
        ('text,id\na,1\n"b\nc,2\nd,3\n', "line 3: a quote is missing"),
        ('text\n"two\n\nlines"\n"b\nc', "line 5: a quote is missing"),
        ('text\n"say "hi""\n', "line 2: a quote is missing, or one in the text is not doubled"),
        ('\ufeff"text\na\n', "line 1: a quote is missing"),
        ("text,id\na,1\nb\n\nc,2,3\n", "line 3 has 1 values, line 5 has 3 values, and there are 2 columns"),
    ],
)
@pytest.mark.parametrize("ending", [".csv", ".tsv", ".csv.gz"])
def test_rows_that_would_run_together_or_vanish_are_refused_by_line(tmp_path, content, said, ending):
    content = (content.replace(",", "\t") if ending == ".tsv" else content).encode()
    path = write(tmp_path / f"t{ending}", gzip.compress(content) if ending.endswith("gz") else content)
    for options in ({}, {"template": "Q: {text}"}):
        with pytest.raises(UserError, match=rf"t\.(csv|tsv): .*{said}"):
            open_data(path, progress=False, **options)


def test_quotes_and_lines_that_belong_to_values_are_read(tmp_path):
    content = 'text,id\n"two\n\nlines",1\n"say ""hi"", he said",2\n5" pipe,3\n"",4\n'.encode("utf-8-sig")
    with pytest.raises(UserError, match=r"id 3: empty\n"):
        open_data(write(tmp_path / "t.csv", content))
    texts = ["two\n\nlines", 'say "hi", he said', '5" pipe']
    assert texts_of(open_data(write(tmp_path / "t.csv", content[:-5]))) == texts


@pytest.mark.parametrize("end", ["\n\n", "\n" * 9, "\r\n\r\n\r\n"])
@pytest.mark.parametrize("last", ["b", '"b\n\n"'])
def test_blank_lines_of_a_delimited_file_are_no_rows(tmp_path, end, last):
    path = write(tmp_path / "t.csv", f"text,n\na,1{end}{last},2{end}".encode())
    assert texts_of(open_data(path)) == ["a", last.strip('"')]


@pytest.mark.parametrize("name", ["", "/", "/*.jsonl", "/part-?.jsonl", "/../*/part-*"])
def test_a_directory_or_a_glob_stands_for_all_its_files_by_name(tmp_path, name, monkeypatch):
    for i, text in ((1, "b"), (0, "a"), (2, "c")):
        write(tmp_path / "data" / f"part-{i}.jsonl", lines([text, text * 2]))
    for other in ("README.md", ".hidden.jsonl", "part-0.jsonl.lengths-0123456789abcdef.npz"):
        if "part-*" not in name:
            write(tmp_path / "data" / other, b"")
    dataset = open_data(f"{tmp_path}/data{name}", progress=False)
    assert texts_of(dataset) == ["a", "aa", "b", "bb", "c", "cc"]
    assert dataset.lengths.tolist() == [1, 2] * 3
    assert texts_of(pickle.loads(pickle.dumps(dataset))) == texts_of(dataset)
    monkeypatch.setattr("jvarlen.data.line_files.LineDataset.lengths_of", lambda *_: pytest.fail("measured again"))
    assert open_data(f"{tmp_path}/data{name}", progress=False).content_key == dataset.content_key


def test_a_bad_line_among_several_files_is_named_with_its_file(tmp_path):
    write(tmp_path / "data" / "a.jsonl", lines(["x"] * 3))
    write(tmp_path / "data" / "b.jsonl", lines(["x"]) + b"{}\n")
    with pytest.raises(UserError, match=r"data/b\.jsonl line 2: no such field"):
        open_data(tmp_path / "data", progress=False)


@pytest.mark.parametrize("pattern", ["**/*.txt", "**"])
def test_links_in_circles_do_not_repeat_files(tmp_path, monkeypatch, pattern):
    for name in ("a.txt", "deep/b.txt", "deep/[x]/c.txt", ".hidden/d.txt"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text("line")
    (tmp_path / "data/deep/up").symlink_to(tmp_path / "data")
    monkeypatch.chdir(tmp_path / "data")
    for root in (tmp_path / "data", Path()):
        names = [file.name for file in find_files(root / pattern, progress=False)]
        assert names == [str(root / name) for name in ("a.txt", "deep/[x]/c.txt", "deep/b.txt")]


def test_two_links_to_their_own_directory_are_walked_once(tmp_path):
    """Following each, then each below it, and so on, is 2**40 directories."""
    folder = write(tmp_path / "data" / "a.jsonl", lines(TEXTS)).parent
    for name in ("one", "two"):
        (folder / name).symlink_to(folder)
    pattern = folder / "**" / "*.jsonl"
    assert [file.name for file in find_files(pattern, progress=False)] == [str(folder / "a.jsonl")]
    with pytest.raises(UserError, match=r"--out .*a\.jsonl.* would overwrite .*a\.jsonl, which is read"):
        check_outputs({"--out": folder / "a.jsonl"}, pattern)


@pytest.mark.parametrize("path", ["", "*.jsonl", "pipe.jsonl"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_file_is_named_and_never_skipped(tmp_path, path, make):
    write(tmp_path / "data" / "a.jsonl", lines(TEXTS))
    make(tmp_path / "data" / "pipe.jsonl")
    with pytest.raises((UserError, FileNotFoundError), match=r"pipe\.jsonl"):
        open_data(tmp_path / "data" / path, progress=False)


def test_what_cannot_be_found_or_told_apart_is_refused_by_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no data file matches .*\*\.jsonl"):
        find_files(tmp_path / "*.jsonl")
    with pytest.raises(UserError, match="holds no data files"):
        find_files(tmp_path)
    write(tmp_path / "a.txt", b"a")
    write(tmp_path / "b.jsonl", b"b")
    with pytest.raises(UserError, match=r"several formats, such as .*a\.txt, .*b\.jsonl: choose .* a glob"):
        find_files(tmp_path)
    with pytest.raises(
        UserError, match=r"t\.npz\.gz is not a data file: .* \.txt, \.jsonl, \.csv, \.tsv followed by \.gz"
    ):
        find_files(write(tmp_path / "t.npz.gz", b""))


@pytest.mark.parametrize("name", ["data/t.jsonl.gz", "data", "data/*.gz"])
def test_an_object_store_is_read_through_fsspec(store, name, cache):
    store.pipe("/data/t.jsonl.gz", gzip.compress(lines(TEXTS)))
    dataset = open_data(f"memory://{name}", progress=False)
    assert texts_of(dataset) == TEXTS
    assert texts_of(pickle.loads(pickle.dumps(dataset))) == TEXTS
    assert all(cache in path.parents for path in cache.rglob("t.jsonl*"))
    store.pipe("/data/t.jsonl.gz", gzip.compress(lines(["newer"])))
    assert texts_of(open_data(f"memory://{name}", progress=False)) == ["newer"]


def test_a_download_cut_short_is_named_and_not_kept(store, monkeypatch, cache):
    store.pipe("/data/t.txt", b"line")
    monkeypatch.setattr(type(store), "size", lambda *_: 5)
    with pytest.raises(UserError, match=r"t\.txt was cut short: 4 of 5 bytes came"):
        open_data("memory:///data/t.txt", progress=False)
    monkeypatch.setattr(type(store), "size", lambda *_: None)
    assert texts_of(open_data("memory:///data/t.txt", progress=False)) == ["line"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("ftp://user:secret@host/a/t.jsonl", "ftp://user:…@host/a/t.jsonl"),
        ("https://secret@host/t.jsonl?sig=secret", "https://…@host/t.jsonl?…"),
        ("s3://bucket/part-?.jsonl", "s3://bucket/part-?.jsonl"),
        ("abfs://container@account/t.jsonl", "abfs://container@account/t.jsonl"),
        ("abfs://container@account/t.jsonl?sv=1&sig=se/cret", "abfs://container@account/t.jsonl?…"),
        ("s3://bucket/part-?/year=2020/*.jsonl", "s3://bucket/part-?/year=2020/*.jsonl"),
        ("http://127.0.0.1:8765?token=secret", "http://127.0.0.1:8765?…"),
        ("HTTP://bob:secret@h/t.txt", "HTTP://…@h/t.txt"),
        ("simplecache::http://bob:secret@h/t.txt", "simplecache::http://…@h/t.txt"),
        ("zip://*.txt::ftp://bob:secret@h/t.zip", "zip://*.txt::ftp://bob:…@h/t.zip"),
        ("http://bob:secret@[::1]/t.txt?sig=secret", "http://…@[::1]/t.txt?…"),
        ("/data/u:p@t.jsonl", "/data/u:p@t.jsonl"),
    ],
)
def test_credentials_in_urls_are_hidden(url, shown):
    assert without_credentials(url) == without_credentials(shown) == shown


def test_a_run_keeps_and_shows_no_credentials(store, tmp_path, capsys):
    """And resumes where the whole URL is given again."""
    store.pipe("/u:secret@host/t.jsonl", lines([f"{'x' * (i % 20)}{i}" for i in range(200)]))
    url, run_dir = "memory://u:secret@host/t.jsonl", tmp_path / "run"
    args = ["train", "--run-dir", str(run_dir), "--max-tokens", "128", "--no-progress", "--num-epochs", "9"]
    args += ["--decoder.num-layers", "1", "--decoder.width", "8", "--decoder.num-heads", "1", "--max-shapes", "1"]
    assert main([*args, "--data", url, "--eval-data", url, "--max-steps", "1"]) == 0
    assert main(["report", str(run_dir), "--html", str(tmp_path / "page.html")]) == 0
    assert main(["train", "--resume", str(run_dir), "--max-steps", "2"]) == 2
    printed = "".join(capsys.readouterr())
    assert "memory://u:…@host/t.jsonl: a run doesn't keep passwords and signatures; give the whole URL" in printed
    assert main(["train", "--resume", str(run_dir), "--max-steps", "2", "--data", url, "--eval-data", url]) == 0
    written = [path for path in tmp_path.rglob("*") if path.is_file() and "cache" not in path.parts]
    assert len(written) > 10
    assert [path for path in written if b"secret" in path.read_bytes()] == []
    assert "secret" not in printed + "".join(capsys.readouterr())


def test_urls_that_differ_in_what_is_hidden_keep_a_content_each(store, tmp_path, capsys):
    urls = ["memory://u:first@host/t.jsonl", "memory://u:second@host/t.jsonl"]
    for name, url in zip("ab", urls, strict=True):
        store.pipe(url.removeprefix("memory:/"), lines([f"{name * (i % 20)}{i}" for i in range(200)]))
    args = ["train", "--run-dir", str(tmp_path / "run"), "--max-tokens", "128", "--no-progress", "--max-shapes", "1"]
    args += ["--decoder.num-layers", "1", "--decoder.width", "8", "--decoder.num-heads", "1", "--num-epochs", "9"]
    assert main([*args, "--max-steps", "1", "--data", *urls]) == 0
    keys = json.loads((tmp_path / "run" / "data.json").read_text())
    assert [*keys] == ["memory://u:…@host/t.jsonl", "memory://u:…@host/t.jsonl (2)"]
    assert len({*keys.values()}) == 2
    resume = ["train", "--resume", str(tmp_path / "run"), "--max-steps", "2", "--data", *urls]
    assert main(resume) == 0
    for url in urls:
        content = store.cat(url)
        store.pipe(url.removeprefix("memory:/"), lines([f"{i}another" for i in range(200)]))
        assert main(resume) == 2
        store.pipe(url.removeprefix("memory:/"), content)
    message = capsys.readouterr().err
    assert "began with another content of memory://u:…@host/t.jsonl:" in message
    assert "began with another content of memory://u:…@host/t.jsonl (2):" in message


def test_where_no_copy_can_be_written_one_line_says_what_to_do(store, tmp_path, monkeypatch, cache, capsys):
    path = write(tmp_path / "small.txt.gz", gzip.compress(b"line\n" * 50))
    monkeypatch.setattr(os, "access", lambda place, mode: cache not in Path(place).parents)
    assert main(["train", "--data", str(path), "--no-progress", "--runs-dir", str(tmp_path / "runs")]) == 2
    message = capsys.readouterr().err
    assert f"decompressing {path}: the copy has no place, as {cache}" in message
    assert "set XDG_CACHE_HOME to a directory that can be written" in message
    assert message.count("\n") == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))  # a directory that cannot be made
    store.pipe("/data/t.txt", b"line")
    with pytest.raises(UserError, match=r"downloading memory://.*t\.txt: the copy has no place, .* set XDG_CACHE_HOME"):
        open_data("memory:///data/t.txt", progress=False)


def test_settings_keep_urls_and_name_evaluations_by_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = DataConfig(files=("gs://bucket/train.jsonl", "*.txt"), eval_data=("s3://b/a.val.jsonl.gz", "books/*.txt"))
    assert config.files == ("gs://bucket/train.jsonl", tmp_path / "*.txt")
    signed = DataConfig(eval_data=("https://host/a.txt?sig=1", "https://host/b.txt.gz?sig=1"))
    assert [*map(evaluation_name, signed.eval_data)] == ["a", "b"]
    with pytest.raises(UserError, match=r"names must differ: a\.val"):
        DataConfig(eval_data=("s3://b/a.val.jsonl.gz", "a.val.txt"))
