"""Files of compiled programs: read back unchanged, rejected if damaged, foreign or not one's own."""

import stat

import pytest

from jvarlen.compiling.program_store import read_compiled, write_compiled


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


def test_another_format_is_refused(path):
    path.write_bytes(b"jvarlen-compiled-2" + path.read_bytes()[18:])
    with pytest.raises(ValueError, match="those of another version"):
        read_compiled(path)
