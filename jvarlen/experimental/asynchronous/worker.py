"""Worker processes of `train_async`: each computes the gradients that it is handed, one at a time.

A worker gets compiled programs, parameters and microbatches as arrays, and knows neither the loss function nor the
data. It ends when its owner does.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

from jvarlen._common.interrupts import without_interrupts
from jvarlen._common.workers import portable_error

__all__ = ["Worker", "WorkerDied"]


class WorkerDied(Exception):
    """The process of a worker ended, or was given up; none of its pending results will come."""


class Worker:
    """A worker process, seen by its owner.

    Args:
      number: of the worker.
      least_s: seconds that each gradient takes at least; the worker sleeps for the rest.
      timeout_s: seconds without a sign of a worker that is waited for, after which it is killed; None: any number.

    Attributes:
      number: of the worker.
      connection: has something to receive when the worker is ready, has a gradient, or died.
    """

    def __init__(self, number: int, least_s: float = 0.0, timeout_s: float | None = None):
        self.number = number
        self._timeout_s = math.inf if timeout_s is None else timeout_s
        self._silent_s = 0.0
        self._given_up = ""
        here, there = socket.socketpair()
        if timeout_s is not None:  # for a worker that stops in the middle of a message
            timeval = struct.pack("@ll", int(timeout_s), max(1, int(timeout_s % 1 * 1e6)))  # zeros would be no limit
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                here.setsockopt(socket.SOL_SOCKET, option, timeval)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        settings = {
            "PYTHONPATH": path,
            "JAX_PLATFORMS": jax.default_backend(),
            "JAX_ENABLE_X64": str(bool(jax.config.jax_enable_x64)),  # type: ignore[attr-defined]
        }
        with there, without_interrupts():  # Ctrl-C is for the owner to handle
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jvarlen.experimental.asynchronous.worker", str(there.fileno()), str(least_s)],
                env=os.environ | settings,
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self.connection = Connection(here.detach())
        self._programs: set[int] = set()
        self._version: int | None = None

    def compute(self, program: Any, version: int, arguments: tuple[Any, ...]) -> None:
        """Hands out a gradient.

        Args:
          program: a `GradientProgram`, sent once.
          version: the number of the version among the arguments, sent once.
          arguments: of the program.

        Raises:
          WorkerDied: it did.
        """
        is_known = program.number in self._programs
        parameters, *rest = arguments
        sent = None if self._version == version else parameters
        message = (program.number, None if is_known else program.serialized(), sent, rest)
        self._silent_s = 0.0
        try:
            self.connection.send(message)
        except OSError as error:
            raise WorkerDied(self._how_it_ended(error)) from None
        self._programs.add(program.number)
        self._version = version

    def receive(self) -> Any:
        """What the worker sent: None when it is ready, or the results of the program.

        Raises:
          WorkerDied: it did.
          Exception: what the program raised.
        """
        try:
            received = self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerDied(self._how_it_ended(error)) from None
        if isinstance(received, BaseException):
            raise received
        return received

    def count_silence(self, seconds: float) -> None:
        """Its owner has waited for it for so long; past the limit it is killed, and will be found to have died."""
        self._silent_s += seconds
        if self._silent_s >= self._timeout_s:
            self._give_up()

    def _give_up(self) -> None:
        self._given_up = f"worker {self.number} gave no sign for worker_timeout_s={self._timeout_s:g}, and was killed"
        self._process.kill()

    def _how_it_ended(self, error: Exception) -> str:
        if isinstance(error, BlockingIOError):
            self._give_up()
        code = self._process.wait()
        if self._given_up:
            return self._given_up
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"worker {self.number} {how}"

    def close(self) -> None:
        """Ends the process at once; it holds nothing that is needed."""
        self._process.kill()
        self._process.wait()
        self.connection.close()


def _work(connection: Connection, least_s: float) -> None:
    programs: dict[int, Any] = {}
    parameters: list[np.ndarray] = []
    connection.send(None)
    while True:
        number, program, sent, rest = connection.recv()
        begun = time.perf_counter()
        try:
            parameters = parameters if sent is None else sent
            if program is not None:
                code, in_tree, out_tree = program
                programs[number] = serialize_executable.deserialize_and_load(
                    code, in_tree, out_tree, execution_devices=jax.devices()[:1]
                )
            results: Any = [np.asarray(leaf) for leaf in programs[number](parameters, *rest)]
        except Exception as error:
            results = portable_error(error)
        time.sleep(max(0.0, begun + least_s - time.perf_counter()))
        connection.send(results)


def _main() -> None:
    descriptor, least_s = sys.argv[1:]
    try:
        jax.devices()
        _work(Connection(int(descriptor)), float(least_s))
    except (EOFError, ConnectionError):
        return  # the owner ended


if __name__ == "__main__":
    _main()
