"""Keeps a training of several processes on one host going when some of them are lost.

A supervisor starts the processes, each on a place of its own: with GPUs, those of its number. When one is lost, it ends
the others, which cannot compute without it, and starts as many as can go on without that place; they resume the run
from its last checkpoint. After a while the place is tried again. Process 0 is one like the others.

The processes are forks of the supervisor, which has imported everything and touched no device, so that they start at
once. Surviving processes do not go on themselves: in JAX 0.10 only its private API can connect them anew, and they are
aborted when the coordination service that they were first connected to ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple, NoReturn

from jvarlen._common.checks import UserError, check_at_least_one, list_first

__all__ = ["Start", "keep_training"]

_USER_ERROR = 2  # of the command; also of a process that misses another one
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
# How processes end that are not lost themselves. JAX aborts those that miss another one.
_NOT_LOST = (0, _USER_ERROR, *_INTERRUPTED, -signal.SIGABRT)
_INTERVAL_S = 0.05
_AT_ONCE_S = 0.2  # within which several are lost together
_OTHERS_S = 30.0  # for the others to end by themselves after one did: two heartbeat timeouts and some
_RETURN_S = 60.0  # until a lost place is tried again; twice as long each time that it is lost
_MOST_VAIN_STARTS = 5
_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h


class Start(NamedTuple):
    """What a process is told when it is started.

    Attributes:
      coordinator: host and port of process 0.
      num_processes: the number of processes.
      process_id: the index of the process, from 0.
      is_again: whether processes were started before, and have ended.
    """

    coordinator: str
    num_processes: int
    process_id: int
    is_again: bool = False


def keep_training(
    run: Callable[[Start], int],
    num_processes: int,
    *,
    progress: Callable[[], object],
    survivors: Callable[[int], int] | None = None,
    devices_per_process: int = 1,
) -> int:
    """Runs a training of several processes on this host to its end, with those that survive.

    A process is lost if a signal kills it, if it crashes, or if it stands still when the others have ended. The others
    then start again without it. It comes back after a minute, and after twice as long each further time, or after
    SIGUSR1 to this process: after the next checkpoint the training is interrupted, with all steps saved, and all start
    again. Ctrl-C and SIGTERM are passed on. Call it in the main thread.

    Args:
      run: trains, and returns an exit code. It runs in every process, a fork of this one, which may not have used a
        device. It resumes what an earlier start has begun, and returns, as `jvarlen train` does, 143 after SIGTERM,
        with all saved, and 2 for an error that starting again does not mend.
      num_processes: to start with.
      progress: returns something that is new once more is saved, such as the names of the checkpoints.
      survivors: how many processes train when so many are alive, such as those of a `surviving_layout`. It raises
        ValueError if too few are. None: all.
      devices_per_process: GPUs of each process, which `JAX_LOCAL_DEVICE_IDS` tells JAX unless it is set already.

    Returns:
      The exit code of the training: 0; 130 or 143 after an interrupt; 2 for an error of all processes.

    Raises:
      ValueError: fewer processes are alive than any layout can use, or several starts in a row saved nothing new.
    """
    check_at_least_one(num_processes=num_processes, devices_per_process=devices_per_process)
    places, num_vain, is_again = _Places(num_processes), 0, False
    num_for = survivors or (lambda alive: alive)
    with _remembered_signals() as signals:
        while True:
            alive, saved = places.alive(), progress()
            size = num_for(len(alive))

            def has_more(alive: Sequence[int] = alive, saved: object = saved, size: int = size) -> bool:
                if signals.take(signal.SIGUSR1):
                    places.return_now()
                num_returned = len(places.returned())
                # Not before something is saved: what returns may be lost again.
                return num_returned > 0 and num_for(len(alive) + num_returned) > size and progress() != saved

            with _started(run, alive[:size], devices_per_process, is_again) as group:
                ended = _watch(group, signals, has_more)
            is_again = True
            if ended.code is not None:
                return ended.code
            if not ended.lost:
                places.take_back()
                _say(f"trains on {num_for(len(places.alive()))} of {num_processes} processes again")
                continue
            num_vain = num_vain + 1 if progress() == saved else 0
            lost = list_first([f"process {each} {_how(code)}" for each, code in ended.lost.items()], "; ")
            if num_vain == _MOST_VAIN_STARTS:
                raise UserError(f"{num_vain} starts in a row have saved nothing new; the last: {lost}")
            if len(ended.lost) < size:  # where all are, it was no fault of a place
                places.lose([alive[each] for each in ended.lost])
            try:
                size = num_for(len(places.alive()))
            except UserError as error:
                raise UserError(f"{lost}: {error}") from error
            _say(f"{lost}; goes on from the last checkpoint with {size} of {num_processes} processes")


class _Places:
    """Which places are lost, and until when."""

    def __init__(self, number: int):
        self._returns_at: list[float | None] = [None] * number
        self._num_losses = [0] * number

    def alive(self) -> list[int]:
        return [place for place, at in enumerate(self._returns_at) if at is None]

    def lose(self, places: Sequence[int]) -> None:
        for place in places:
            self._returns_at[place] = time.monotonic() + _RETURN_S * 2 ** self._num_losses[place]
            self._num_losses[place] += 1

    def return_now(self) -> None:
        self._returns_at = [None if at is None else 0.0 for at in self._returns_at]

    def returned(self) -> list[int]:
        """Lost ones that are to be tried again."""
        now = time.monotonic()
        return [place for place, at in enumerate(self._returns_at) if at is not None and at <= now]

    def take_back(self) -> None:
        for place in self.returned():
            self._returns_at[place] = None


class _Signals:
    """Signals that came and are not yet dealt with."""

    def __init__(self) -> None:
        self._came: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)

    def take(self, *numbers: int) -> list[int]:
        """Those of these numbers, each time that they came."""
        taken = [number for number in self._came if number in numbers]
        for number in taken:
            self._came.remove(number)
        return taken


@contextlib.contextmanager
def _remembered_signals() -> Iterator[_Signals]:
    signals = _Signals()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, signals) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Process:
    """A fork of this process that calls a function, whose result is its exit code."""

    def __init__(self, run: Callable[[], int], local_device_ids: str):
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _be(run, local_device_ids)

    def poll(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        return self._wait(os.WNOHANG)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kills it, with the processes that read for it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.send_signal(signal.SIGKILL)  # if it has no group of its own yet
        self._wait(0)

    def _wait(self, options: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, options)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code


def _be(run: Callable[[], int], local_device_ids: str) -> NoReturn:
    """What a fork does, until it ends as a program does."""
    code = 1
    try:
        os.setpgid(0, 0)  # a terminal's Ctrl-C is for the supervisor, which passes it on
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGTERM)  # it saves and ends if the supervisor is killed
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.setdefault("JAX_LOCAL_DEVICE_IDS", local_device_ids)
        code = run()
    except BaseException as error:
        traceback.print_exc()
        sys.last_value = error  # as at the end of a program: what bounds its wait for others reads it
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or nobody reads it
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def _started(
    run: Callable[[Start], int], places: Sequence[int], devices_per_process: int, is_again: bool
) -> Iterator[list[_Process]]:
    """A block in which processes run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    group: list[_Process] = []
    try:
        for process_id, place in enumerate(places):
            first = place * devices_per_process
            devices = ",".join(map(str, range(first, first + devices_per_process)))
            start = Start(coordinator, len(places), process_id, is_again)
            group.append(_Process(functools.partial(run, start), devices))
        yield group
    finally:
        for process in group:
            process.end()


class _Ended(NamedTuple):
    """How processes have ended.

    Attributes:
      code: the exit code of the training; None if it is to go on.
      lost: exit codes of lost processes by number, None for one that stood still; empty if lost ones are to come back.
    """

    code: int | None
    lost: Mapping[int, int | None]


def _watch(group: Sequence[_Process], signals: _Signals, has_more: Callable[[], bool]) -> _Ended:
    """Waits until processes have ended or one is lost."""
    is_interrupted = makes_room = False
    first_end: float | None = None
    while len(codes := _codes(group)) < len(group) and not _lost_in(codes):
        for number in signals.take(signal.SIGINT, signal.SIGTERM):
            is_interrupted = True
            for process in group:
                process.send_signal(number)
        if codes and not is_interrupted:
            first_end = first_end or time.monotonic()
            if time.monotonic() - first_end > _OTHERS_S:
                break
        if not (codes or is_interrupted or makes_room) and has_more():
            makes_room = True
            group[0].send_signal(signal.SIGTERM)  # all stop together
        time.sleep(_INTERVAL_S)
    if _lost_in(codes):
        time.sleep(_AT_ONCE_S)
        codes = _codes(group)
    lost: dict[int, int | None] = _lost_in(codes)
    if not lost:  # some miss others: those that stand still, or else those that ended in a way of their own
        lost = {each: None for each in range(len(group)) if each not in codes}
        lost = lost or {each: code for each, code in codes.items() if code == -signal.SIGABRT}
    if lost and not is_interrupted:
        return _Ended(None, lost)
    if makes_room and not is_interrupted and any(code in _INTERRUPTED for code in codes.values()):
        return _Ended(None, {})
    return _Ended(max(map(abs, codes.values())), {})


def _codes(group: Sequence[_Process]) -> dict[int, int]:
    """Exit codes of the processes that have ended, by number."""
    return {each: code for each, process in enumerate(group) if (code := process.poll()) is not None}


def _lost_in(codes: Mapping[int, int]) -> dict[int, int | None]:
    return {each: code for each, code in codes.items() if code not in _NOT_LOST}


def _how(code: int | None) -> str:
    if code is None:
        return "stands still"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _say(message: str) -> None:
    print(f"jvarlen: {message}", file=sys.stderr, flush=True)
