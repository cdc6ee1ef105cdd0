"""Several JAX processes that start together, take the same decisions, and fail together.

A process that raises while the others wait for it makes them hang. So a step that may fail runs inside `together`, and
values that must be equal go through `agree`. Both are collective: every process calls them, in the same order.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import hashlib
import itertools
import math
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # private: `jax.distributed` gives no client of its key-value store
from jax.experimental import multihost_utils
from jaxtyping import Shaped

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.interrupts import interrupt_signal, take_interrupt
from jvarlen._common.keywords import check_keywords
from jvarlen._common.terminal import say

__all__ = [
    "Heartbeat", "ProcessesError", "agree", "broadcast_text", "end_without_others", "ending_stalled_processes",
    "gather_arrays", "gather_texts", "initialize_processes", "is_any_interrupted", "is_interrupted_at",
    "is_main_process", "key_value_store", "naming_lost_processes", "together",
]  # fmt: skip

# What a process says in an exchange: one size, so that all exchanges match and compile once.
_RECORD = np.dtype([("name", "S256"), ("text", "S1792")])
_FAILED_KEY = "jvarlen/failed/"
_ALIVE_KEY = "jvarlen/alive/"
_LEFT, _FAILED = "left", "failed"  # the last sign of a process
_HEARTBEAT_OF_JAX_S = 100
_WORD_S = 2.0  # for a process to notice that another is lost: the connections of a dead one are closed at once
_HEARD_S = 4.0  # for a process to end by itself when another has failed
_LEAVE_S = 5  # for a process that fails to leave as JAX does, with all others
_ALARM_S = 5  # after the time to leave, if no thread of Python runs any more
_LOOK_S = 1.0  # between two looks at the steps of the others
_STALLED_CODE = 2  # as the command exits after a lost process
_exit_code: int | None = None  # of a process that has failed
_STEPS_BETWEEN_EXCHANGES = 16  # of several processes: each exchange waits for the steps in flight
_num_blocks = 0  # blocks that end stalled processes: all processes enter the same ones, and each has other keys


class ProcessesError(RuntimeError):
    """Another process failed, was lost, or is in another call."""


@check_keywords
def initialize_processes(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat_timeout_seconds: int = 60,
    initialization_timeout: int = 60,
) -> None:
    """Makes this process one of several that compute together. Call it before anything that touches a device.

    When a process dies, is stopped or ends by an uncaught exception, the others end within about a heartbeat timeout,
    with exit code 2 or an error, and a message that names it. If process 0 dies, at whose address all
    meet, JAX aborts the others at once, with its message. SIGTERM keeps its handler, which JAX would replace.

    Args:
      coordinator_address: `"host:port"` of process 0. None, here and in the next two: JAX finds it in the environment
        (Slurm, Open MPI, cloud TPUs, Kubernetes).
      num_processes: the number of processes.
      process_id: the index of this process, from 0.
      heartbeat_timeout_seconds: a process without a heartbeat for this long is considered dead. One that holds Python's
        lock that long sends none, as in a single call that unpickles many gigabytes.
      initialization_timeout: seconds to wait for all processes to connect. JAX then ends this process by SIGABRT.

    Raises:
      RuntimeError: JAX has used its devices already, or was initialized before.
      ValueError: an argument is None and JAX does not find it in the environment; an address without
        host and port, or an index that is not one.
    """
    # What JAX would end the process at, by an abort.
    if coordinator_address is not None:
        host, _, port = coordinator_address.rpartition(":")
        if not host or not re.fullmatch("[0-9]+", port) or not 1 <= int(port) < 2**16:
            raise UserError(f"coordinator ({coordinator_address!r}) must be a host and a port, as host0:29400")
    if num_processes is not None and process_id is not None and process_id >= num_processes:
        raise UserError(f"process_id ({process_id}) must be below num_processes ({num_processes})")
    try:
        jax.distributed.initialize(
            coordinator_address,
            num_processes,
            process_id,
            # Where it ends, JAX aborts all others, which then cannot say why.
            heartbeat_timeout_seconds=max(_HEARTBEAT_OF_JAX_S, 3 * heartbeat_timeout_seconds),
            initialization_timeout=initialization_timeout,
        )
    except ValueError as error:
        if None not in (coordinator_address, num_processes, process_id):
            raise
        raise UserError(
            "JAX finds no environment of Slurm, Open MPI, Kubernetes or cloud TPUs: pass coordinator, "
            f"num_processes and process_id ({error})"
        ) from error
    if threading.current_thread() is threading.main_thread():
        # JAX has replaced the handler below Python, which takes it for the one in force.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
    atexit.register(_leave_after_error)
    answered, ends = [time.monotonic()], threading.Event()  # when process 0 last did; when this process ends
    threads = [
        threading.Thread(target=target, args=(heartbeat_timeout_seconds, answered, ends), daemon=True)
        for target in (_exchange_signs_of_life, _end_without_answer)
    ]

    def stop() -> None:
        ends.set()
        for thread in threads:  # one that is in a call of JAX while Python ends would abort the process
            thread.join(_ALARM_S)

    for thread in threads:
        thread.start()
    atexit.register(stop)


def _exchange_signs_of_life(timeout_s: float, answered: list[float], ends: threading.Event) -> None:
    """Tells the others that this process lives, and ends it when another has not for this long."""
    store, own = key_value_store(), f"{_ALIVE_KEY}{distributed.global_state.process_id}"
    signs, last_at = dict[int, str](), dict.fromkeys(range(distributed.global_state.num_processes), time.monotonic())
    for count in itertools.count():
        is_last = ends.is_set()
        sign = str(count) if not is_last else _FAILED if _has_failed() else _LEFT
        with contextlib.suppress(Exception):  # if it does not answer for long, `_end_without_answer` ends this process
            store.key_value_set(own, sign, allow_overwrite=True)
            shared = store.key_value_dir_get(_ALIVE_KEY)
            answered[0] = time.monotonic()
            for key, sign in shared:
                process = int(key.rpartition("/")[2])
                if signs.get(process) != sign:
                    signs[process], last_at[process] = sign, math.inf if sign == _LEFT else answered[0]
        if is_last or key_value_store() is not store:  # JAX has shut it down
            return
        now = answered[0]
        # By then the main thread has heard of it, unless it waits for ever.
        if failed := [each for each, sign in signs.items() if sign == _FAILED and now - last_at[each] > _HEARD_S]:
            _end(f"{_processes(failed)} ended by an error")
        if lost := [each for each, at in last_at.items() if now - at > timeout_s]:
            _end(f"lost {_processes(lost)}: no sign of life in {timeout_s:g} s")
        ends.wait(_LOOK_S)


def _end_without_answer(timeout_s: float, answered: list[float], ends: threading.Event) -> None:
    """Ends this process when process 0 has not answered for this long."""
    while not ends.wait(_LOOK_S) and key_value_store() is not None:
        if time.monotonic() - answered[0] > timeout_s:
            _end(f"lost process 0, where all meet: no answer in {timeout_s:g} s")


def agree(name: str, value: str | bytes | int) -> None:
    """Checks that all processes pass the same value, and waits for all of them.

    Args:
      name: of the value, for the error; the same on all processes.
      value: for example the digest of a plan. A long value is compared by its SHA-256.

    Raises:
      ValueError: on every process, if values differ; each value is listed with its processes.
      ProcessesError: processes are in calls of different names, or one has died.
    """
    values = gather_texts(name, repr(value))
    if len(set(values)) > 1:
        raise UserError(f"processes differ in {name}: {_by_process(values)}")


@contextlib.contextmanager
def together(name: str) -> Iterator[None]:
    """A block that succeeds on all processes, or raises on all.

    Each process runs the block, and leaves it when all have run it. The block must not contain collective
    calls: a process that has already failed would not take part.

    Args:
      name: a verb phrase for the block, for the error; the same on all processes.

    Raises:
      ProcessesError: the block failed on other processes, which are listed with their errors; or processes are in calls
        of different names, or one has died. A process whose block failed raises that exception.
    """
    try:
        yield
    except BaseException as error:
        gather_texts(name, "".join(traceback.format_exception_only(error)).strip())
        raise
    failures = gather_texts(name, "")
    if any(failures):
        raise ProcessesError(f"could not {name}: {_by_process(failures)}")


@contextlib.contextmanager
def naming_lost_processes(doing: str) -> Iterator[None]:
    """A block in which a failed computation over several processes raises ProcessesError, which names the lost ones."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        message = f"{doing} failed, as where a process is lost; {_who_is_lost()}: {error}"
        # At once: closing objects on the way out may wait for all, and JAX ends this process meanwhile.
        say(f"jvarlen: {' '.join(message.split())}", error=True)
        raise ProcessesError(message) from error


def end_without_others(exit_code: int) -> None:
    """Bounds how long a program that ends with this code waits for the others, as after an uncaught exception."""
    global _exit_code
    _exit_code = exit_code


def is_main_process() -> bool:
    """Whether this is process 0, which prints, and writes what all processes share."""
    return jax.process_index() == 0


def is_any_interrupted() -> bool:
    """Whether any process received Ctrl-C or SIGTERM; all then treat it as theirs, with the same exit code."""
    number = int(gather_arrays(np.array([interrupt_signal()])).max())
    if number:
        take_interrupt(number)
    return number != 0


def is_interrupted_at(num_steps: int) -> bool:
    """Whether to stop after this step: processes decide together, and so only now and then."""
    every = 1 if jax.process_count() == 1 else _STEPS_BETWEEN_EXCHANGES
    return num_steps % every == 0 and is_any_interrupted()


def gather_texts(name: str, text: str) -> list[str]:
    """The short texts of all processes, by process; ProcessesError if they are in calls of different names."""
    if jax.process_count() == 1:
        return [text]
    record = np.array([(_to_bytes(name, _RECORD["name"]), _to_bytes(text, _RECORD["text"]))], _RECORD)
    records = _gather(record, name).ravel()
    names, texts = ([field.decode(errors="ignore") for field in records[key].tolist()] for key in ("name", "text"))
    if len(set(names)) > 1:
        raise ProcessesError(f"processes are not at the same call: {_by_process(names)}")
    return texts


def broadcast_text(name: str, text: str) -> str:
    """The text of process 0, of any length, on all; ProcessesError if they are in calls of different names."""
    if jax.process_count() == 1:
        return text
    content = np.frombuffer(text.encode(), np.uint8)
    size = int(gather_texts(name, str(len(content)))[0])
    shared = np.zeros(max(size, 1), np.uint8)  # a gathered array is not empty
    if is_main_process():
        shared[:size] = content
    return gather_arrays(shared)[0, :size].tobytes().decode()


def gather_arrays(array: Shaped[np.ndarray, ...]) -> Shaped[np.ndarray, "P ..."]:
    """The arrays of all processes, bit for bit: not empty, of one shape and dtype."""
    if jax.process_count() == 1:
        return array[None]
    return _gather(array, "arrays")


class Heartbeat:
    """The steps that this process has taken, for the others to see."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self) -> None:
        """Counts a step: once this process has its part, before the computation that needs all parts."""
        self.num_steps += 1


@contextlib.contextmanager
def ending_stalled_processes(doing: str, stall_timeout_s: float) -> Iterator[Heartbeat]:
    """A block in which all processes end when none has a heartbeat for this long; the error names those behind."""
    # The main thread may wait in a collective that nothing interrupts, for a process whose disk hangs. So a thread
    # prints the reason and ends the process: nothing is saved, and no exception is raised.
    own = Heartbeat()
    if jax.process_count() == 1:
        yield own
        return
    global _num_blocks
    _num_blocks += 1
    left = threading.Event()

    def watch(prefix: str) -> None:
        store = key_value_store()
        seen: list[tuple[str, str]] = []
        last_move = time.monotonic()
        while not left.wait(_LOOK_S):
            try:
                store.key_value_set(f"{prefix}{jax.process_index()}", str(own.num_steps), allow_overwrite=True)
                shared = sorted(store.key_value_dir_get(prefix))
            except Exception:  # process 0 is lost, which JAX notices as well: it ends this process
                return
            steps = dict.fromkeys(range(jax.process_count()), 0) | {
                int(key.rpartition("/")[2]): int(value) for key, value in shared
            }
            if shared != seen:
                seen, last_move = shared, time.monotonic()
            elif time.monotonic() - last_move >= stall_timeout_s:
                own_is_behind = steps[jax.process_index()] == min(steps.values())
                _end(f"{doing} has stalled: no step in {stall_timeout_s:g} s; {_who_is_behind(steps)}", own_is_behind)

    thread = threading.Thread(target=watch, args=(f"jvarlen/steps-{_num_blocks}/",), name="watchdog", daemon=True)
    thread.start()
    try:
        yield own
    finally:
        left.set()
        thread.join()


def _who_is_behind(steps: Mapping[int, int]) -> str:
    """The processes that have taken the fewest steps."""
    least, most = min(steps.values()), max(steps.values())
    behind = [process for process, count in steps.items() if count == least]
    if least == most:
        return f"all processes stand after step {least:,}"
    stand = "stands" if len(behind) == 1 else "stand"
    return f"{_processes(behind)} {stand} after step {least:,}, others after {most:,}"


def _end(message: str, shows_where: bool = False) -> None:
    """Ends this process, and may print where in the code it is."""
    say(f"jvarlen: {message}", error=True)
    if shows_where:
        faulthandler.dump_traceback(sys.stderr)
    time.sleep(_seconds_for_others())
    os._exit(_STALLED_CODE)


def _seconds_for_others() -> float:
    """How long process 0 stays after an error: without it, JAX aborts the others before they can say why."""
    return 5 * _LOOK_S if distributed.global_state.process_id == 0 else 0.0


def key_value_store() -> Any:
    """JAX's client of the key-value store of process 0; its errors depend on the backend."""
    return distributed.global_state.client


def _who_is_lost() -> str:
    """The processes that do not report, within some seconds, that the same computation has failed for them too."""
    try:
        store, missing = key_value_store(), set(range(jax.process_count()))
        store.key_value_set(f"{_FAILED_KEY}{jax.process_index()}", "", allow_overwrite=True)
        deadline = time.monotonic() + _WORD_S
        while missing and time.monotonic() < deadline:
            time.sleep(_WORD_S / 30)
            missing -= {int(key.rpartition("/")[2]) for key, _ in store.key_value_dir_get(_FAILED_KEY)}
    except Exception:
        return "process 0, where all meet, does not answer"
    if not missing:
        return "all processes still run"
    return f"no word from {_processes(sorted(missing))}"


def _gather(array: Shaped[np.ndarray, ...], name: str) -> Shaped[np.ndarray, "P ..."]:
    try:
        gathered = multihost_utils.process_allgather(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    except Exception as error:  # its type depends on the backend
        raise ProcessesError(f"lost the other processes at {name!r}; {_who_is_lost()}") from error
    return np.ascontiguousarray(gathered).view(array.dtype).reshape(-1, *array.shape)


def _to_bytes(text: str, field: np.dtype) -> bytes:
    """The text, or its start and its SHA-256 if it does not fit the field."""
    whole = text.encode(errors="backslashreplace")
    if len(whole) <= field.itemsize:
        return whole
    mark = f"… (SHA-256 {hashlib.sha256(whole).hexdigest()})".encode()
    return whole[: field.itemsize - len(mark)].decode(errors="ignore").encode() + mark


def _by_process(texts: Iterable[str]) -> str:
    """The different texts that are not empty, each with its processes; the first few of both."""
    processes: dict[str, list[int]] = {}
    for process, text in enumerate(texts):
        if text:
            processes.setdefault(text, []).append(process)
    return list_first([f"{_processes(held)}: {text}" for text, held in processes.items()], "; ")


def _processes(ranks: list[int]) -> str:
    return f"process{'es' * (len(ranks) > 1)} {list_first(ranks)}"


def _has_failed() -> bool:
    """Whether this process ends by an error."""
    return _exit_code is not None or hasattr(sys, "last_value")  # set by an uncaught exception


def _leave_after_error() -> None:
    """Bounds the wait for other processes when this one ends by an exception: they may be waiting for it."""
    if not _has_failed():
        return

    def leave() -> None:
        time.sleep(_LEAVE_S + _seconds_for_others())
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or nobody reads it
                stream.flush()
        os._exit(1 if _exit_code is None else _exit_code)

    with contextlib.suppress(RuntimeError):  # no thread starts this late
        threading.Thread(target=leave, daemon=True).start()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(_LEAVE_S + math.ceil(_seconds_for_others()) + _ALARM_S)
