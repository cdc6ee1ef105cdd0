"""Interrupts: the first waits for a safe place, the second does not, and afterwards all is as before."""

import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from jvarlen import compile_buckets
from jvarlen.interrupts import raise_if_interrupted, remembered_interrupts, without_interrupts


def press():
    os.kill(os.getpid(), signal.SIGINT)


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
        compile_buckets(step, np.float32(0), [(1, 4), (1, 8)], progress=False)


def test_other_threads_are_left_alone():
    seen = []

    def work():
        with remembered_interrupts() as pressed:
            seen.append(pressed.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_thread_does_not_make_the_main_one_forget():
    def work():
        with remembered_interrupts():
            pass

    with remembered_interrupts() as pressed:
        press()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert pressed.is_set()


@pytest.mark.multiprocess
def test_processes_started_without_interrupts_outlive_them():
    program = "import time; print('ready', flush=True); time.sleep(1); print('done')"
    with without_interrupts():
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate()[0] == "done\n"
    assert process.returncode == 0
