"""Datasets of text lines or JSON lines.

Files are untrusted: a line without text is a ValueError that gives the reason.
"""

from __future__ import annotations

import codecs
import contextlib
import json
import reprlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import read_object
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.threads import in_parts
from jvarlen._common.types import Json
from jvarlen.data.samples import Record
from jvarlen.data.tokens import FileDataset


def _json_loads(line: bytes | memoryview) -> Json:
    return json.loads(str(line, "utf-8"))  # from bytes it would also decode UTF-16


_loads: Callable[[bytes | memoryview], Json] = _json_loads
with contextlib.suppress(ModuleNotFoundError):
    import orjson  # an extra, several times as fast

    _loads = orjson.loads

__all__ = ["LineDataset", "parse_record", "read_json", "size_of_mark"]

_CHUNK_BYTES = 1 << 19  # fits a cache
_NEWLINE, _RETURN = b"\n\r"


class LineDataset(FileDataset):
    """Lines of a memory-mapped file, or a string in the JSON object of each: bytes. Only offsets are held in memory."""

    is_text = True

    def __init__(self, path: Path, field: str | None = None):
        super().__init__(path)
        self._field = field
        self._starts, self._ends = _find_lines(path, self._num_bytes)
        self._starts[0] = size_of_mark(path)
        if field is None:
            self._ends -= self._opened[self._ends - 1] == _RETURN
            self._ends = np.maximum(self._ends, self._starts)

    def _open(self) -> UInt8[np.ndarray, " total"]:
        if not self._num_bytes:
            raise UserError(f"{self._path} is empty: at least one line is needed")
        return np.memmap(self._path, np.uint8, "r").view(np.ndarray)  # slices of a memmap are slow

    def __len__(self) -> int:
        return len(self._starts)

    def _read(self, index: int) -> UInt8[np.ndarray, " L"]:
        line = self._opened[self._starts[index] : self._ends[index]]
        if self._field is not None:
            return np.frombuffer(_parse(line.tobytes(), self._field), np.uint8)
        if not len(line):
            raise UserError("empty")
        return line

    def lengths_of(self, samples: range) -> list[int]:
        """The lengths of consecutive samples, read at once; 0 where a line is not a sample."""
        if self._field is None:
            return self.lengths[samples.start : samples.stop].tolist()
        lengths: list[int] = []
        with self._path.open("rb", buffering=0) as file:  # read: mapping pages takes longer
            file.seek(self._starts[samples.start])
            while len(lengths) < len(samples):
                first = samples.start + len(lengths)
                # A longer line is a block alone.
                end = int(np.searchsorted(self._ends, self._starts[first] + _CHUNK_BYTES, side="right"))
                block = range(first, min(max(end, first + 1), samples.stop))
                lines = memoryview(file.read(int(self._ends[block[-1]] - self._starts[first]) + 1))
                there = slice(first, block.stop)
                starts, ends = ((of[there] - self._starts[first]).tolist() for of in (self._starts, self._ends))
                try:
                    texts = (_loads(lines[start:end])[self._field] for start, end in zip(starts, ends, strict=True))
                    lengths += [len(text) if text.isascii() else len(text.encode()) for text in texts]
                except Exception:  # of any type: a line may hold anything, and is looked at more closely
                    for sample_id in block:
                        try:
                            lengths.append(len(self._read(sample_id)))
                        except ValueError:
                            lengths.append(0)
        return lengths

    @property
    def lengths(self) -> Int64[np.ndarray, " N"]:
        """Bytes of every line; raises AttributeError where samples are in fields."""
        if self._field is not None:
            raise AttributeError("lengths of texts in fields are to be measured")
        return self._ends - self._starts


def size_of_mark(path: Path) -> int:
    """Bytes of the byte order mark with which a text begins; raises ValueError for that of UTF-16 or UTF-32."""
    with path.open("rb") as file:
        begin = file.read(len(codecs.BOM_UTF8))
    if begin.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise UserError(f"{path} is UTF-16 or UTF-32: save it as UTF-8")
    return len(begin) if begin == codecs.BOM_UTF8 else 0


def read_json(path: Path) -> Record:
    """The object in a JSON file, empty without a file; raises ValueError if it is damaged."""
    return read_object(path) if path.exists() else {}


def _find_lines(path: Path, num_bytes: int) -> tuple[Int64[np.ndarray, " N"], Int64[np.ndarray, " N"]]:
    """Where every line starts, and where its newline is; the last line needs none."""
    found: dict[int, Int64[np.ndarray, " n"]] = {}  # by where they were looked for

    def look(start: int, end: int) -> None:
        buffer = np.empty(_CHUNK_BYTES, np.uint8)
        with path.open("rb", buffering=0) as file:  # read: mapping pages takes longer
            file.seek(start)
            while start < end:
                raise_if_interrupted()
                num_read = file.readinto(memoryview(buffer.data)[: end - start])
                if not num_read:
                    raise UserError(f"{path} has changed: it had {num_bytes:,} bytes")
                found[start] = np.flatnonzero(buffer[:num_read] == _NEWLINE) + start
                start += num_read

    in_parts(look, num_bytes)
    ends = np.concatenate([found[start] for start in sorted(found)])
    if not len(ends) or ends[-1] != num_bytes - 1:
        ends = np.append(ends, num_bytes)
    return np.concatenate([[0], ends[:-1] + 1]), ends


def _parse(line: bytes, field: str) -> bytes:
    """The text of a JSON line; raises ValueError with the reason if it has none."""
    record = parse_record(line)
    if field not in record:
        raise UserError(f"no such field, but {list_first(map(reprlib.repr, record)) or 'none'}")
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"no string, but {reprlib.repr(text)}")
    if not text:
        raise UserError("empty")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UserError("half a surrogate pair, which has no UTF-8") from None


def parse_record(line: bytes) -> Record:
    """The JSON object of a line; raises ValueError with a short reason, in one line, for any other line."""
    try:
        try:
            record = _loads(line)
        except ValueError:  # json accepts more, and names the mistake
            record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON ({error})") from None
    if not isinstance(record, dict):
        raise UserError("no JSON object")
    return record
