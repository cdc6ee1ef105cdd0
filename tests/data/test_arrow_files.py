"""Parquet and Arrow files: rows of a column are read as they were written, whatever its layout, or rejected."""

import contextlib
import json
import pickle
import subprocess
import sys

import numpy as np
import pytest

from jvarlen.data import arrow_files
from jvarlen.data.arrow_files import ColumnDataset
from jvarlen.data.open import open_data

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
feather = pytest.importorskip("pyarrow.feather")


def write_parquet(table, path):
    parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=2)
    return path.with_suffix(".parquet")


def write_arrow(table, path):
    with pa.OSFile(str(path.with_suffix(".arrow")), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return path.with_suffix(".arrow")


def write_stream(table, path):
    with pa.OSFile(str(path.with_suffix(".arrow")), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return path.with_suffix(".arrow")


def write_feather(table, path):
    feather.write_feather(table, path.with_suffix(".feather"), compression="lz4")
    return path.with_suffix(".feather")


WRITERS = [write_parquet, write_arrow, write_stream, write_feather]
TEXTS = ["one", "größer", "x", "four", "5"]
TOKENS = [[1, 2, 3], [255], [0, 0], [7], [9, 8]]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_rows_of_text_are_their_bytes(tmp_path, write, kind):
    table = pa.table({"id": range(5), "text": pa.chunked_array([TEXTS[:2], TEXTS[2:]], pa.string()).cast(kind)})
    table = table.unify_dictionaries()  # as the file format wants it
    dataset = open_data(write(table, tmp_path / "t"), num_values=256)
    assert [dataset[i].tobytes().decode() for i in range(5)] == TEXTS
    assert dataset.lengths.tolist() == [3, 8, 1, 4, 1]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("make_list", [pa.list_, pa.large_list])
@pytest.mark.parametrize("kind", [pa.uint8(), pa.int64()])
def test_rows_of_lists_are_their_tokens(tmp_path, write, make_list, kind):
    table = pa.table({"tokens": pa.chunked_array([TOKENS[:3], TOKENS[3:]], make_list(kind))})
    dataset = open_data(write(table, tmp_path / "t"), field="tokens", num_values=256)
    assert [dataset[i].tolist() for i in range(5)] == TOKENS
    assert dataset[0].dtype == np.uint8


@pytest.mark.parametrize("kind", [pa.string(), pa.large_binary(), pa.list_(pa.int16()), pa.large_list(pa.int16())])
def test_a_part_of_a_longer_column_is_read_alone(kind):
    rows = TOKENS if hasattr(kind, "value_type") else TEXTS
    column, null_rows = arrow_files._flatten(pa.array(rows, kind).slice(1, 3))
    tokens, offsets = column.tokens, column.offsets
    encoded = [row.encode() if isinstance(row, str) else bytes(row) for row in rows[1:4]]
    assert bytes(tokens.tolist()) == b"".join(encoded)
    assert np.diff(offsets).tolist() == list(map(len, encoded))
    assert offsets[0] == 0
    assert not len(null_rows)


def test_null_tokens_are_found_in_a_part_of_a_longer_column():
    _, null_rows = arrow_files._flatten(pa.array([[None, 1], [2], [3, None], [4], [None]]).slice(1, 3))
    assert null_rows.tolist() == [1]


def test_a_column_without_rows_needs_no_offsets():
    column, _ = arrow_files._flatten(pa.StringArray.from_buffers(0, pa.py_buffer(b""), pa.py_buffer(b"")))
    assert not len(column.tokens)
    assert column.offsets.tolist() == [0]


def test_strings_that_are_no_utf8_are_refused(tmp_path):
    path = write_arrow(pa.table({"text": TEXTS}), tmp_path / "t")
    path.write_bytes(path.read_bytes().replace("größer".encode(), b"gr\xff\xff\xff\xffer"))
    with pytest.raises(ValueError, match=r"t\.arrow: no readable column 'text': .*UTF"):
        open_data(path)


def test_an_uncompressed_column_in_one_chunk_is_mapped(tmp_path):
    before = pa.total_allocated_bytes()
    dataset = open_data(write_arrow(pa.table({"text": ["x" * 5_000_000]}), tmp_path / "t"))
    assert pa.total_allocated_bytes() - before < 1_000_000
    assert len(dataset[0]) == 5_000_000


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array(["a", None, "b", None]), "must not hold nulls: id 1, id 3$"),
        (pa.array([[1], None]), "must not hold nulls: id 1$"),
        (pa.array([[1], [2, None], [3], [None]]), "must not hold null tokens: id 1, id 3$"),
        (pa.array(["a", ""]), "mend or remove 1 of 2: id 1: empty\n"),
        (pa.array([[1], []]), "mend or remove 1 of 2: id 1: empty\n"),
        (pa.array([[1], [2, 256], [-1]]), "others: id 1: 256, id 2: -1$"),
        (pa.array([1, 2]), "must hold strings, bytes or lists of integers, not int64"),
        (pa.array([[1.0]]), "must hold strings, bytes or lists of integers, not list"),
        (pa.array([], pa.string()), "holds no samples"),
        (pa.array([], pa.list_(pa.int32())), "holds no samples"),
    ],
)
def test_what_is_no_text_and_no_tokens_is_refused_by_row(tmp_path, write, column, said):
    path = write(pa.table({"text": column}), tmp_path / "t")
    with pytest.raises(ValueError, match=rf"{path.name}.*{said}"):
        open_data(path, num_values=256)


@pytest.mark.parametrize("write", WRITERS)
def test_a_missing_column_is_refused_with_those_there_are(tmp_path, write):
    path = write(pa.table({"body": ["a"], "id": [1]}), tmp_path / "t")
    with pytest.raises(ValueError, match="no readable column 'text': the columns are 'body', 'id'"):
        open_data(path)


@pytest.mark.parametrize("write", WRITERS)
def test_a_damaged_file_is_refused_by_name_or_read_as_rows(tmp_path, write):
    path = write(pa.table({"text": TEXTS}), tmp_path / "t")
    whole = path.read_bytes()
    for content in (b"", b"ARROW1", b"PAR1", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=path.name):
            open_data(path)
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        with contextlib.suppress(ValueError):  # some bytes are text, and some do not matter
            assert open_data(path).lengths.min() >= 1


def test_what_is_needed_is_said_where_pyarrow_is_missing(tmp_path, monkeypatch):
    path = write_arrow(pa.table({"text": TEXTS}), tmp_path / "t")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"t\.arrow can only be read with pyarrow: pip install"):
        open_data(path)


def test_columns_of_many_chunks_are_mapped_and_found_by_id(tmp_path):
    texts = [f"{i}" * (i % 7 + 1) for i in range(5_000)]
    table = pa.table({"text": pa.chunked_array([texts[i : i + 100] for i in range(0, 5_000, 100)])})
    before = pa.total_allocated_bytes()
    dataset = open_data(write_stream(table, tmp_path / "t"), num_values=256)
    assert pa.total_allocated_bytes() == before
    assert [dataset[i].tobytes().decode() for i in range(5_000)] == texts
    assert not dataset[0].flags.writeable, "a copy could be written to"
    for index in (-1, 5_000):
        with pytest.raises(IndexError, match="of 5000"):
            dataset[index]


@pytest.mark.parametrize("write", WRITERS)
def test_a_worker_reads_the_columns_itself_and_refuses_others(tmp_path, write):
    path = write(pa.table({"text": ["x" * 10_000, "y"]}), tmp_path / "t")
    pickled = pickle.dumps(ColumnDataset(path, "text", 256))
    assert len(pickled) < 1_000
    assert [len(pickle.loads(pickled)[i]) for i in range(2)] == [10_000, 1]
    write(pa.table({"text": ["x"] * 50}), tmp_path / "t")
    with pytest.raises(ValueError, match=r"has changed: it had [\d,]+ bytes"):
        pickle.loads(pickled)


def save(directory, tables, state=None):
    """What `save_to_disk` leaves, of one table a shard."""
    directory.mkdir()
    for i, table in enumerate(tables):
        write_stream(table, directory / f"data-{i}")
    names = [{"filename": f"data-{i}.arrow"} for i in range(len(tables))]
    (directory / "state.json").write_text(json.dumps({"_data_files": names, "_format_columns": None} | (state or {})))
    return directory


def test_the_shards_of_a_saved_dataset_are_read_in_their_order(tmp_path):
    directory = save(
        tmp_path / "d", [pa.table({"text": pa.array(part, "string")}) for part in (TEXTS[:2], [], TEXTS[2:])]
    )
    dataset = open_data(directory)
    assert [dataset[i].tobytes().decode() for i in range(5)] == TEXTS
    assert dataset.lengths.tolist() == [3, 8, 1, 4, 1]
    one = open_data(save(tmp_path / "one", [pa.table({"text": TEXTS})]))
    assert one.content_key == open_data(save(tmp_path / "other", [pa.table({"text": TEXTS})])).content_key
    assert one.content_key != dataset.content_key


def test_a_stream_cut_between_its_batches_or_with_more_behind_it_is_refused(tmp_path):
    table = pa.table({"text": ["a" * 8] * 12})
    path = tmp_path / "t.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        ends = [writer.write_table(table, max_chunksize=4) or file.tell() for table in (table[:4], table[4:])]
    whole = path.read_bytes()
    assert len(open_data(path, progress=False)) == 12
    for content in (whole[: ends[0]], whole[:-8], whole + b"\0" * 8, whole * 2):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"t\.arrow: .*the stream does not end where the file does"):
            open_data(path, progress=False)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ((["a", "b"], ["c", None]), r"data-1\.arrow: column 'text' must not hold nulls: id 1$"),
        (([[1], [2]], [[3], [None]]), r"data-1\.arrow: column 'text' must not hold null tokens: id 1$"),
        ((["a", "b"], ["c", ""]), r"data-1\.arrow id 1: empty\n"),
        (([[1], [2]], [[3], [300]]), r"data-1\.arrow: .*others.*: id 1: 300$"),
        ((["a"], [[3]]), "column 'text' must be of one type"),
        ((["a"], [3]), r"data-1\.arrow: column 'text' must hold strings, bytes or lists"),
    ],
)
def test_rows_of_a_saved_dataset_are_refused_by_shard_and_row(tmp_path, parts, said):
    directory = save(tmp_path / "d", [pa.table({"text": part}) for part in parts])
    with pytest.raises(ValueError, match=f"{directory}.*{said}"):
        open_data(directory, num_values=256)


@pytest.mark.parametrize(
    "name", ["../data-0.arrow", "/etc/hosts", "a/b.arrow", "..", ".", "", None, 3, ["data-0.arrow"]]
)
def test_files_outside_the_directory_are_refused(tmp_path, name):
    directory = save(tmp_path / "d", [pa.table({"text": TEXTS})], {"_data_files": [{"filename": name}]})
    with pytest.raises(ValueError, match=r"state\.json must name files of its own directory, not "):
        open_data(directory)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("[]", r"state\.json is damaged: it holds no JSON object"),
        ("{", r"state\.json is damaged"),
        ("[" * 100_000, r"state\.json is damaged"),
        ("{}", r"state\.json names no files of data"),
        ('{"_data_files": []}', r"state\.json names no files of data"),
        ('{"_data_files": ["data-0.arrow"]}', r"state\.json names no files of data"),
        ('{"_data_files": [{"filename": "data-9.arrow"}]}', r"files of its own directory, not 'data-9\.arrow'"),
        ('{"_data_files": [{"filename": "\\u0000"}]}', r"files of its own directory"),
        ('{"_indices_files": [{"filename": "i.arrow"}]}', r"picks its rows by a file of indices"),
    ],
)
def test_a_damaged_state_is_refused(tmp_path, state, said):
    directory = save(tmp_path / "d", [pa.table({"text": TEXTS})])
    (directory / "state.json").write_text(state)
    with pytest.raises(ValueError, match=f"{directory}.*{said}"):
        open_data(directory)


def test_a_directory_of_anything_else_is_refused(tmp_path):
    with pytest.raises(ValueError, match="holds no data files, whose names end with"):
        open_data(tmp_path)


SAVE_DATASETS = """
import sys
import datasets
folder = sys.argv[1]
datasets.disable_progress_bars()
rows = {"text": [f"{i} größer" for i in range(2500)], "input_ids": [[i, 1] for i in range(2500)]}
dataset = datasets.Dataset.from_dict(rows)
dataset.save_to_disk(f"{folder}/shards", num_shards=3)
dataset.with_format("numpy", columns=["input_ids"]).select([7, 3]).save_to_disk(f"{folder}/selected")
datasets.DatasetDict(train=dataset.select(range(2)), test=dataset.select([5])).save_to_disk(f"{folder}/splits")
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_what_datasets_itself_saves_is_read(tmp_path):
    pytest.importorskip("datasets")
    subprocess.run([sys.executable, "-c", SAVE_DATASETS, str(tmp_path)], check=True)
    texts = open_data(tmp_path / "shards")
    assert [texts[i].tobytes().decode() for i in range(2500)] == [f"{i} größer" for i in range(2500)]
    tokens = open_data(tmp_path / "shards", field="input_ids")
    assert [tokens[i].tolist() for i in range(2500)] == [[i, 1] for i in range(2500)]
    selected = open_data(tmp_path / "selected", field="input_ids")
    assert [selected[i].tolist() for i in range(2)] == [[7, 1], [3, 1]]
    with pytest.raises(ValueError, match=r"splits holds several datasets; take one of them: .*splits/train, .*/test$"):
        open_data(tmp_path / "splits")
    assert open_data(tmp_path / "splits" / "test")[0].tobytes().decode() == "5 größer"
