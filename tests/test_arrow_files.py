"""Parquet and Arrow files: rows of a column are read as they were written, whatever its layout, or refused."""

import contextlib
import sys

import numpy as np
import pytest

from jvarlen import arrow_files
from jvarlen.data_files import open_data_file

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
    dataset = open_data_file(write(table, tmp_path / "t"), num_values=256)
    assert [dataset[i].tobytes().decode() for i in range(5)] == TEXTS
    assert dataset.lengths.tolist() == [3, 8, 1, 4, 1]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("make_list", [pa.list_, pa.large_list])
@pytest.mark.parametrize("kind", [pa.uint8(), pa.int64()])
def test_rows_of_lists_are_their_tokens(tmp_path, write, make_list, kind):
    table = pa.table({"tokens": pa.chunked_array([TOKENS[:3], TOKENS[3:]], make_list(kind))})
    dataset = open_data_file(write(table, tmp_path / "t"), field="tokens", num_values=256)
    assert [dataset[i].tolist() for i in range(5)] == TOKENS
    assert dataset[0].dtype == np.uint8


@pytest.mark.parametrize("kind", [pa.string(), pa.large_binary(), pa.list_(pa.int16()), pa.large_list(pa.int16())])
def test_a_part_of_a_longer_column_is_read_alone(kind):
    rows = TOKENS if hasattr(kind, "value_type") else TEXTS
    (tokens, offsets), null_rows = arrow_files._flatten(pa.array(rows, kind).slice(1, 3))
    encoded = [row.encode() if isinstance(row, str) else bytes(row) for row in rows[1:4]]
    assert bytes(tokens.tolist()) == b"".join(encoded)
    assert np.diff(offsets).tolist() == list(map(len, encoded))
    assert offsets[0] == 0
    assert not len(null_rows)


def test_null_tokens_are_found_in_a_part_of_a_longer_column():
    _, null_rows = arrow_files._flatten(pa.array([[None, 1], [2], [3, None], [4], [None]]).slice(1, 3))
    assert null_rows.tolist() == [1]


def test_a_column_without_rows_needs_no_offsets():
    (tokens, offsets), _ = arrow_files._flatten(pa.StringArray.from_buffers(0, pa.py_buffer(b""), pa.py_buffer(b"")))
    assert not len(tokens)
    assert offsets.tolist() == [0]


def test_strings_that_are_no_utf8_are_refused(tmp_path):
    path = write_arrow(pa.table({"text": TEXTS}), tmp_path / "t")
    path.write_bytes(path.read_bytes().replace("größer".encode(), b"gr\xff\xff\xff\xffer"))
    with pytest.raises(ValueError, match=r"t\.arrow: no readable column 'text': .*UTF"):
        open_data_file(path)


def test_an_uncompressed_column_in_one_chunk_is_mapped(tmp_path):
    before = pa.total_allocated_bytes()
    dataset = open_data_file(write_arrow(pa.table({"text": ["x" * 5_000_000]}), tmp_path / "t"))
    assert pa.total_allocated_bytes() - before < 1_000_000
    assert len(dataset[0]) == 5_000_000


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("column", "said"),
    [
        (pa.array(["a", None, "b", None]), "must not hold nulls: id 1, id 3$"),
        (pa.array([[1], None]), "must not hold nulls: id 1$"),
        (pa.array([[1], [2, None], [3], [None]]), "must not hold null tokens: id 1, id 3$"),
        (pa.array(["a", ""]), "must not be empty: id 1$"),
        (pa.array([[1], []]), "must not be empty: id 1$"),
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
        open_data_file(path, num_values=256)


@pytest.mark.parametrize("write", WRITERS)
def test_a_missing_column_is_refused_with_those_there_are(tmp_path, write):
    path = write(pa.table({"body": ["a"], "id": [1]}), tmp_path / "t")
    with pytest.raises(ValueError, match="no readable column 'text': the columns are 'body', 'id'"):
        open_data_file(path)


@pytest.mark.parametrize("write", WRITERS)
def test_a_damaged_file_is_refused_by_name_or_read_as_rows(tmp_path, write):
    path = write(pa.table({"text": TEXTS}), tmp_path / "t")
    whole = path.read_bytes()
    for content in (b"", b"ARROW1", b"PAR1", whole[: len(whole) // 2]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=path.name):
            open_data_file(path)
    for place in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        with contextlib.suppress(ValueError):  # some bytes are text, and some do not matter
            assert open_data_file(path).lengths.min() >= 1


def test_what_is_needed_is_said_where_pyarrow_is_missing(tmp_path, monkeypatch):
    path = write_arrow(pa.table({"text": TEXTS}), tmp_path / "t")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"t\.arrow can only be read with pyarrow: pip install"):
        open_data_file(path)
