"""Progress: a bar where someone looks on, plain lines where a log is read."""

import os
import pty
import sys
import termios

import pytest

from jvarlen._common.terminal import progress_bar
from jvarlen.runs import steps
from jvarlen.runs.steps import StepDisplay


def record(step, **figures):
    return {
        "step": step,
        "loss": 1.0,
        "num_tokens": 100,
        "step_s": 0.5,
        "data_wait_s": 0.05,
        "stall_s": 0.0,
        "learning_rate": 0.5,
        "bucket_rows": 3,
        "bucket_length": 8,
        "time_s": 0.5 * step,
        **figures,
    }


def steps_in(lines):
    return [line.split(" · ")[0] for line in lines.splitlines()]


def show_all():
    for _ in progress_bar([1, 2, 3], desc="rows", unit="row"):
        pass
    with progress_bar(total=2000, desc="samples", unit="sample") as bar:
        bar.update(1000)
        bar.set_postfix_str("here")
    with StepDisplay(12) as display:
        for step in range(4, 12):
            display.update(record(step))


def seen_at(ours, theirs, monkeypatch):
    """What standard error gets where it is one end, read from the other."""
    with open(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        show_all()
    seen = b""
    try:
        while piece := os.read(ours, 4096):
            seen += piece
    except OSError:  # how Linux tells that the other end of a terminal is closed
        pass
    os.close(ours)
    return seen.decode()


def test_on_a_terminal_there_are_bars(monkeypatch):
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 160))
    seen = seen_at(ours, theirs, monkeypatch)
    assert "\rrows: 100%|█" in seen
    assert "| 3/3 [" in seen
    assert "| 1000/2000 [" in seen
    assert "step 12/12" in seen


def test_in_a_pipe_there_are_plain_lines(monkeypatch):
    rows, samples, first, last = seen_at(*os.pipe(), monkeypatch).split("\n")[:-1]
    assert rows == "rows: 3/3 × row, 0.0 s"
    assert samples == "samples: 1,000/2,000 × sample, 0.0 s"
    figures = "loss 1.000 nats/token · 200 tokens/s · lr 5.0e-01 · 3×8 · wait 10.0 %"
    assert first == f"step 5/12 · {figures} · 2 s"
    assert last == f"step 12/12 · {figures} · 6 s"


def test_rates_are_over_the_steps_since_the_line_before(capsys, monkeypatch):
    now = iter([0.0, 1.0, 10.0])
    monkeypatch.setattr(steps.time, "monotonic", lambda: next(now))
    with StepDisplay(9) as display:
        display.update(record(0, step_s=100.0))
        display.update(record(1, data_wait_s=0.5, step_s=0.5, num_tokens=400))
        display.update(record(2, data_wait_s=0.0, step_s=1.5, num_tokens=200))
    second = capsys.readouterr().err.splitlines()[1]
    assert "· 300 tokens/s ·" in second
    assert "· wait 25.0 % ·" in second


def test_the_last_step_before_an_error_is_shown(capsys):
    def fail():
        with StepDisplay(9) as display:
            for step in range(3):
                display.update(record(step))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert steps_in(capsys.readouterr().err) == ["step 1/9", "step 3/9"]


def test_no_progress_shows_nothing(capsys):
    with StepDisplay(2, progress=False) as display:
        display.update(record(0))
    with progress_bar(total=3, desc="rows", unit="row", progress=False) as bar:
        bar.update(3)
    assert capsys.readouterr() == ("", "")
