"""Continues a training of several processes on one host when some of them are lost.

A supervisor starts the processes, one for each worker, which has the GPUs at its index. When one is lost, it ends the
others, which cannot compute without it, and starts as many as can continue. They resume the run from its last
checkpoint. After a while the lost worker is tried again. Rank 0 is no exception.

The processes are forks of the supervisor, which has imported everything and touched no device, so they start at once.
Surviving processes do not continue themselves: in JAX 0.10 only private names can reconnect them, and they are aborted
when the coordination service that they were first connected to ends.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import math
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
from jvarlen._common.interrupts import exit_code_of_interrupt
from jvarlen._common.terminal import say

__all__ = ["Start", "keep_training"]

_ERROR = 2  # of the command; also of a process that misses another one
_INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM)
# How processes end that are not lost themselves. JAX aborts those that miss another one.
_NOT_LOST = (0, _ERROR, *_INTERRUPTED, -signal.SIGABRT)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_INTERVAL_S = 0.05
_AT_ONCE_S = 0.2  # within which several are lost together
_OTHERS_S = 30.0  # for the others to end by themselves after one did: two heartbeat timeouts and some
_KILLED_S = 10.0  # for killed ones to end; one that waits for a disk may never do
_RETURN_S = 60.0  # until a lost worker is tried again; twice as long each time that it is lost
_MOST_VAIN_STARTS = 5
_DEVICE_IDS = "JAX_LOCAL_DEVICE_IDS"
_SET_PDEATHSIG = 1  # of Linux's sys/prctl.h


class Start(NamedTuple):
    """What a process learns when it starts.

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

    A worker is lost if a signal kills it, if it crashes, if it was the first to end where others were then aborted, or
    if it hangs: all must end within 30 s of the first. The others then start again without it. It comes back after a
    minute, and after twice as long each further time, or after SIGUSR1 to this process: once something new is saved,
    the training is interrupted, with all steps saved, and all start again. Ctrl-C and SIGTERM are passed on once; a
    second one kills the processes. Call it in the main thread.

    Args:
      run: trains, and returns an exit code. It runs in every process, a fork of this one, which may not have used a
        device. It resumes what an earlier start has begun. As `jvarlen train` does, it returns 143 after SIGTERM, with
        all saved, and 2 for an error. If all processes return 2, they start again if this start has saved something.
      num_processes: to start with.
      progress: returns something that is new once more is saved, such as the names of the checkpoints.
      survivors: from the number of processes alive to the number that train, such as those of a `surviving_layout`. It
        raises ValueError if too few are alive. None: all.
      devices_per_process: GPUs of each process, from `JAX_LOCAL_DEVICE_IDS` if it is set.

    Returns:
      The exit code of the training: 0; 130 or 143 after an interrupt; 2 for an error of all processes.

    Raises:
      ValueError: fewer processes are alive than any layout can use; several starts in a row saved nothing new;
        `survivors` returned more than are alive, or none; or `JAX_LOCAL_DEVICE_IDS` has too few devices.
    """
    check_at_least_one(num_processes=num_processes, devices_per_process=devices_per_process)
    devices = _devices_of_workers(num_processes, devices_per_process)
    workers, num_vain, cause = _Workers(num_processes), 0, ""

    def num_for(alive: int) -> int:
        size = alive if survivors is None else survivors(alive)
        if not 1 <= size <= alive:
            raise UserError(f"survivors({alive}) must be from 1 to {alive}, not {size}")
        return size

    with _remember_signals(workers) as interrupts:
        while not interrupts:
            alive, saved = workers.alive(), progress()
            try:
                size = num_for(len(alive))
            except ValueError as error:  # as `survivors` may raise
                raise UserError(f"{cause}: {error}" if cause else str(error)) from error
            if cause:
                _say(f"{cause}; goes on from the last checkpoint with {size} of {num_processes} processes")

            def has_more(num_before: int = len(alive), size: int = size, saved: object = saved) -> bool:
                num_alive = len(workers.alive())
                # Not before something is saved: what returns may be lost again.
                return num_alive > num_before and num_for(num_alive) > size and progress() != saved

            used = sorted(alive[:size])
            with _start_group(run, [devices[worker] for worker in used], is_again=cause != "") as group:
                ended = _watch(group, interrupts, has_more)
            if ended.is_done:
                return 0
            if interrupts:
                if ended.code not in _INTERRUPTED:
                    _say("interrupted; steps since the last checkpoint are not saved")
                break
            has_saved = progress() != saved
            if ended.lost:
                # Where all are lost, it was no fault of a worker.
                workers.lose([used[each] for each in ended.lost], stays_away=len(ended.lost) < size)
            elif not ended.makes_room and not (ended.code == _ERROR and has_saved):
                return ended.code
            cause, num_vain = str(ended), 0 if has_saved else num_vain + 1
            if num_vain == _MOST_VAIN_STARTS:
                raise UserError(f"{num_vain} starts in a row have saved nothing new; the last: {cause}")
    return 128 + interrupts[0]


class _Workers:
    """Which workers are lost, and until when."""

    def __init__(self, number: int):
        self._returns_at = [0.0] * number
        self._num_losses = [0] * number

    def alive(self) -> list[int]:
        """Those that are not lost or have returned; what was lost last comes last."""
        now = time.monotonic()
        alive = [worker for worker, at in enumerate(self._returns_at) if at <= now]
        return sorted(alive, key=self._returns_at.__getitem__)

    def lose(self, workers: Sequence[int], *, stays_away: bool) -> None:
        for worker in workers:
            wait_s = _RETURN_S * 2 ** self._num_losses[worker] if stays_away else 0.0
            self._returns_at[worker] = time.monotonic() + wait_s
            self._num_losses[worker] += stays_away

    def return_now(self) -> None:
        now = time.monotonic()
        self._returns_at = [min(at, now) for at in self._returns_at]


def _devices_of_workers(num_processes: int, devices_per_process: int) -> list[str]:
    """The numbers of the GPUs of each worker, as `JAX_LOCAL_DEVICE_IDS` has them."""
    num_devices = num_processes * devices_per_process
    given = os.environ.get(_DEVICE_IDS)
    ids = given.split(",") if given else list(map(str, range(num_devices)))
    if len(ids) < num_devices:
        raise UserError(
            f"{_DEVICE_IDS} ({given}) has {len(ids)} devices, and {num_processes} processes of {devices_per_process} "
            f"take {num_devices}"
        )
    return [",".join(ids[first : first + devices_per_process]) for first in range(0, num_devices, devices_per_process)]


@contextlib.contextmanager
def _remember_signals(workers: _Workers) -> Iterator[list[int]]:
    """A block in which each SIGINT and SIGTERM is appended to a list, and SIGUSR1 brings all workers back."""
    interrupts: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1:
            workers.return_now()
        else:
            interrupts.append(number)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Process:
    """A fork of this process that calls a function, whose result is its exit code."""

    def __init__(self, run: Callable[[], int], device_ids: str):
        self._code: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        supervisor = os.getpid()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # until the fork has handlers of its own
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _be(run, device_ids, supervisor)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def poll(self) -> int | None:
        """Its exit code, or the negative number of the signal that ended it; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._kill_group()  # at once: later its number may be another one's
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it, with the processes that read for it."""
        if self.poll() is None:
            self._kill_group()
            self.send_signal(signal.SIGKILL)  # if it has no group of its own yet

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def _be(run: Callable[[], int], device_ids: str, supervisor: int) -> NoReturn:
    """What a fork does, until it ends as a program does."""
    code = 1
    try:
        os.setpgid(0, 0)  # a terminal's Ctrl-C is for the supervisor, which passes it on
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGTERM)  # it saves and ends if the supervisor is killed
            if os.getppid() != supervisor:  # before that
                os.kill(os.getpid(), signal.SIGTERM)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ[_DEVICE_IDS] = device_ids
        returned = run()
        if not isinstance(returned, int):
            raise TypeError(f"run must return an exit code, not {returned!r}")
        code = returned
    except BaseException as error:
        if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
            code = error.code or 0
        elif isinstance(error, KeyboardInterrupt):
            code = exit_code_of_interrupt()
        else:
            traceback.print_exc()
        if code:
            sys.last_value = error  # as at the end of a program: what bounds its wait for others reads it
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or nobody reads it
                stream.flush()
        os._exit(code)


@contextlib.contextmanager
def _start_group(run: Callable[[Start], int], device_ids: Sequence[str], *, is_again: bool) -> Iterator[list[_Process]]:
    """A block in which processes run."""
    group: list[_Process] = []
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # process 0 shares the port, and nobody else
        held.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{held.getsockname()[1]}"
        try:
            for process_id, ids in enumerate(device_ids):
                start = Start(coordinator, len(device_ids), process_id, is_again)
                group.append(_Process(functools.partial(run, start), ids))
            yield group
        finally:
            _end(group)


def _end(group: Sequence[_Process]) -> None:
    """Kills all, and waits for them, but not for ever."""
    for process in group:
        process.kill()
    deadline = time.monotonic() + _KILLED_S
    while running := [process.pid for process in group if process.poll() is None]:
        if time.monotonic() > deadline:
            _say(f"killed processes do not end, as while they wait for a disk: {list_first(running)}")
            break
        time.sleep(0.01)


class _Ended(NamedTuple):
    """How processes have ended.

    Attributes:
      size: how many there were.
      codes: exit codes of those that have ended by themselves, by number, in the order in which they have.
      was_stopped: whether they were asked to stop because more can train.
    """

    size: int
    codes: Mapping[int, int]
    was_stopped: bool

    @property
    def code(self) -> int:
        """The exit code of the training, if no process is lost."""
        return max(self.codes.values(), default=0)

    @property
    def is_done(self) -> bool:
        return len(self.codes) == self.size and not any(self.codes.values())

    @property
    def makes_room(self) -> bool:
        return self.was_stopped and self.code in _INTERRUPTED and not self.lost

    @property
    def lost(self) -> dict[int, int | None]:
        """Exit codes of lost workers by rank, None for one that stands still."""
        codes = self.codes
        lost: dict[int, int | None] = {each: code for each, code in sorted(codes.items()) if code not in _NOT_LOST}
        lost = lost or {each: None for each in range(self.size) if each not in codes}
        if not lost and -signal.SIGABRT in codes.values() and self.code not in _INTERRUPTED:
            # All have ended, some because they missed another: the first one.
            first = next(each for each, code in codes.items() if code)
            lost = {first: codes[first]}
        return lost

    def __str__(self) -> str:
        if self.makes_room:
            return "takes lost workers back"
        lost = [f"process {each} {_how(code)}" for each, code in self.lost.items()]
        return list_first(lost or [f"all processes {_how(self.code)}"], "; ")


def _watch(group: Sequence[_Process], interrupts: Sequence[int], has_more: Callable[[], bool]) -> _Ended:
    """Waits until all have ended, or those that have not will not by themselves."""
    codes: dict[int, int] = {}
    deadline, was_told, was_stopped = math.inf, False, False
    while True:
        for number, process in enumerate(group):
            if number not in codes and (code := process.poll()) is not None:
                codes[number] = code
                deadline = min(deadline, time.monotonic() + (_OTHERS_S if code in _NOT_LOST else _AT_ONCE_S))
        if len(codes) == len(group) or time.monotonic() > deadline or len(interrupts) > 1:
            return _Ended(len(group), codes, was_stopped)
        if not was_told and (interrupts or (not codes and has_more())):
            was_told, was_stopped = True, not interrupts
            if was_stopped:
                _say("lost workers can return: saves, and starts again by itself")
                group[0].send_signal(signal.SIGTERM)  # all stop together
            else:
                for process in group:
                    process.send_signal(interrupts[0])
        time.sleep(_INTERVAL_S)


def _how(code: int | None) -> str:
    if code is None:
        return "stands still"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _say(message: str) -> None:
    say(f"jvarlen: {message}", error=True)
