"""Files of compiled programs: read back unchanged, rejected if damaged, foreign or not one's own."""

import json
import stat
import zipfile

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
    with pytest.raises(ValueError, match=f"{path} holds no compiled programs, or is damaged"):
        read_compiled(path)


def test_a_flipped_bit_anywhere_is_refused(path):
    content = path.read_bytes()
    whole = read_compiled(path)
    num_refused = 0
    for place in range(len(content)):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            read = read_compiled(path)
        except ValueError:
            num_refused += 1
        else:
            assert read == whole  # the bit was in what tells nothing, such as a date
    assert num_refused > 0.8 * len(content)


def test_programs_that_were_exchanged_are_refused(path):
    header, programs = read_compiled(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", json.dumps(header))
        for number, program in enumerate(reversed(programs)):
            archive.writestr(str(number), program)
    with pytest.raises(ValueError, match=r"programs \[0, 1\] are not what was written"):
        read_compiled(path)


def test_another_format_is_refused(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("header.json", json.dumps({"format": "something-2", "sha256": []}))
    with pytest.raises(ValueError, match="'something-2'"):
        read_compiled(path)
