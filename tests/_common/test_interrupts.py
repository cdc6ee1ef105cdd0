"""Interrupts: the first waits for a safe place, the second does not, and afterwards all is as before."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from jvarlen import compile_buckets
from jvarlen._common.interrupts import (
    exit_code_of_interrupt,
    is_interrupted,
    raise_if_interrupted,
    remembered_interrupts,
    without_interrupts,
)
from jvarlen.batches import BatchShapes

SIGNALS = [signal.SIGINT, signal.SIGTERM]


def press(number=signal.SIGINT):
    os.kill(os.getpid(), number)


def test_the_first_is_remembered_and_the_second_raises():
    before = signal.getsignal(signal.SIGINT)
    with remembered_interrupts() as pressed:
        raise_if_interrupted()
        press()
        assert pressed.is_set()
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()
        with pytest.raises(KeyboardInterrupt):
            press()
    assert signal.getsignal(signal.SIGINT) is before
    raise_if_interrupted()


@pytest.mark.parametrize(("first", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("second", SIGNALS)
def test_the_second_of_either_kind_does_what_it_did_before(first, code, second):
    seen = []
    before = [signal.signal(number, lambda number, frame: seen.append(number)) for number in SIGNALS]
    own = [signal.getsignal(number) for number in SIGNALS]
    try:
        with remembered_interrupts():
            press(first)
            assert is_interrupted()
            assert seen == []
            press(second)
            assert seen == [second]
        assert exit_code_of_interrupt() == code
        assert [signal.getsignal(number) for number in SIGNALS] == own
        with remembered_interrupts():
            pass
        assert exit_code_of_interrupt() == 130, "of the latest block"
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def test_what_was_pressed_before_a_block_within_stays_remembered():
    with remembered_interrupts() as pressed:
        press()
        with remembered_interrupts():
            assert pressed.is_set()
        with pytest.raises(KeyboardInterrupt):
            raise_if_interrupted()
    raise_if_interrupted()


def test_what_is_pressed_in_a_block_within_reaches_the_outer_one():
    before = signal.getsignal(signal.SIGINT)
    with remembered_interrupts() as pressed:
        with remembered_interrupts():
            press()
            with pytest.raises(KeyboardInterrupt):
                raise_if_interrupted()
        assert pressed.is_set()
    assert signal.getsignal(signal.SIGINT) is before
    with remembered_interrupts() as pressed:
        assert not pressed.is_set()


def test_compiling_stops_between_buckets():
    def step(state, batch):
        press_once()  # traced once a bucket
        return state, None

    presses = iter([press])

    def press_once():
        next(presses)()

    with remembered_interrupts(), pytest.raises(KeyboardInterrupt):
        compile_buckets(step, np.float32(0), BatchShapes([(1, 4), (1, 8)]), progress=False)


@pytest.mark.multiprocess
@pytest.mark.parametrize("number", SIGNALS)
def test_processes_started_without_interrupts_outlive_them(number):
    program = "import time; print('ready', flush=True); time.sleep(0.5); print('done')"
    with without_interrupts():
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.communicate()[0] == "done\n"
    assert process.returncode == 0
