"""Files of compiled programs: read back unchanged, rejected if damaged, foreign or not one's own."""

import hmac
import stat
import tracemalloc

import pytest

from jvarlen.compiling import program_file
from jvarlen.compiling.program_file import read_compiled, write_compiled


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "compiled.bin"
    write_compiled(path, {"buckets": [[2, 4]]}, [b"one" * 100, b"two" * 100])
    return path


def test_what_was_written_is_read(path):
    header, programs = read_compiled(path)
    assert header["buckets"] == [[2, 4]]
    assert programs == [b"one" * 100, b"two" * 100]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("cut", [0, 10, 200, -1])
def test_a_truncated_file_is_refused(path, cut):
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=f"{path} (holds no compiled programs|is damaged)"):
        read_compiled(path)


def test_a_flipped_bit_anywhere_is_refused(path):
    content = path.read_bytes()
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with pytest.raises(ValueError, match=f"{path}"):
            read_compiled(path)


@pytest.mark.parametrize(
    "header",
    [
        b"{}",
        b"[",
        b"[" * 100_000,
        b'{"sizes": 7}',
        b'{"sizes": ["6"]}',
        b'{"sizes": [5]}',
        b'{"sizes": [7]}',
        b'{"sizes": [600, ' + b"-600, 600, " * 9_000 + b"0]}",
    ],
    ids=lambda header: header[:20],
)
def test_a_header_that_lies_is_refused_under_a_right_signature(path, header):
    content = b"\n".join([program_file._FORMAT, header, b"x" * 600])
    path.write_bytes(content + hmac.digest(program_file._own_key(), content, "sha256"))
    tracemalloc.start()
    with pytest.raises(ValueError, match=f"{path} is damaged"):
        read_compiled(path)
    assert tracemalloc.get_traced_memory()[1] < 3_000_000  # the last one would be cut into 9,000 programs of 600 bytes
    tracemalloc.stop()


def test_another_format_is_refused(path):
    path.write_bytes(b"jvarlen-compiled-2" + path.read_bytes()[18:])
    with pytest.raises(ValueError, match="those of another version"):
        read_compiled(path)
