"""What is printed: names cannot steer the terminal, and no output that fails ends the work."""

import io
import os
import subprocess
import sys

import pytest

from jvarlen._common.terminal import escape_controls, progress_bar, say, show_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plan\n\tof größe ×", "plan\n\tof größe ×"),
        ("\x1b[2Jgone\r\b\x7f", r"\x1b[2Jgone\r\x08\x7f"),
        ("\x9b31m\u202egnp.exe", r"\x9b31m\u202egnp.exe"),
        (os.fsdecode(b"n\xffme"), r"n\udcffme"),
    ],
)
def test_control_characters_are_shown_as_escapes(text, shown):
    assert escape_controls(text) == shown


@pytest.mark.parametrize("error", [False, True])
def test_no_name_reaches_the_terminal_raw(error, capsys):
    say("a\x1b[31m", "b\x07", error=error)
    for progress in (progress_bar([1], desc="c\x1b]0;"), progress_bar([1], desc="c\x1b]0;", progress=False)):
        list(progress)
    show_line("d\x1b[1A")
    written = capsys.readouterr()
    assert "\x1b" not in written.out + written.err
    assert (written.err if error else written.out).startswith("a\\x1b[31m\nb\\x07\n")


def test_what_an_encoding_lacks_is_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    say("8×128 → ü")
    assert written.getvalue() == rb"8\xd7128 \u2192 \xfc" + b"\n"


@pytest.fixture
def without_reader():
    """A stream into a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        yield stream


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_reader_that_has_gone_ends_nothing(name, without_reader, monkeypatch, capsys):
    monkeypatch.setattr(sys, name, without_reader)
    for _ in range(2):
        say("x" * 100_000, error=name == "stderr")
    list(progress_bar([1, 2], desc="work"))
    say("the end", error=name != "stderr")
    monkeypatch.undo()
    assert "the end" in "".join(capsys.readouterr())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a full device")
def test_a_full_disk_under_standard_output_is_told_once(monkeypatch, capsys):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        say("one")
        say("two")
        monkeypatch.undo()
    assert capsys.readouterr().err == "jvarlen: standard output cannot be written: No space left on device\n"


def test_a_process_without_streams_goes_on(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    say("nowhere")


@pytest.mark.parametrize(
    ("end", "code", "shown"),
    [
        ("pass", 0, ["ours"]),
        ("raise UserError('no such layout')", 1, ["ours", "no such layout"]),
        ("raise ValueError('no such instruction')", 1, ["ours", "of the library", "no such instruction"]),
        ("os.write(2, b'died'); os.abort()", -6, ["ours", "of the library", "died"]),
    ],
)
def test_what_libraries_write_is_shown_of_failures_alone(end, code, shown):
    program = f"""
import os, sys
from jvarlen._common.checks import UserError
from jvarlen._common.terminal import errors_of_failures
with errors_of_failures():
    os.write(2, b"of the library\\n")
    print("ours", file=sys.stderr)
    {end}
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == code
    for text in ("ours", "of the library", "no such layout", "no such instruction", "died"):
        assert (text in ended.stderr.replace(program, "")) == (text in shown), ended.stderr
