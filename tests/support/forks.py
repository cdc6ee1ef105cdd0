"""Forks of a process that has imported what programs of tests import: they start in milliseconds instead of seconds.

Run as a program, it is that process. Its argument is the descriptor of a socket that brings it what to run.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
IMPORTED = {
    "jax": ("jvarlen.runs.fit", "flax.nnx", "pytest"),
    "torch": ("torch_ref.parallel", "torch.distributed.tensor.debug"),
    "trainers": ("torch_ref.parallel", "accelerate", "lightning.pytorch", "transformers.trainer"),
}
READ_ON_IMPORT = ("JAX_", "OMP_", "PYTHON")  # how variables begin that count only if they are set before imports
CACHES = "JAX_ENABLE_COMPILATION_CACHE"  # but for this one, which a fork sets in JAX


class Fork:
    """A running program, with those methods of `subprocess.Popen` that tests use.

    Both its outputs go to one file, or its errors to another. It is found by its path, as `python PATH` finds it.
    """

    def __init__(
        self,
        program: Path,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        output: IO[str],
        errors: IO[str] | None = None,
        cwd: Path | None = None,
    ):
        library = "torch" if "import torch" in program.read_text() else "jax"
        library = "trainers" if program.parent.name == "trainers" else library
        fixed = tuple(
            sorted((name, value) for name, value in env.items() if name.startswith(READ_ON_IMPORT) and name != CACHES)
        )
        reading, writing = os.pipe()
        order = {"argv": [str(program), *args], "env": dict(env), "cwd": str(cwd or Path.cwd())}
        with open(writing, "wb"):
            descriptors = [output.fileno(), (errors or output).fileno(), writing]
            socket.send_fds(_server(library, fixed), [json.dumps(order).encode()], descriptors)
        self._said = open(reading, "rb", buffering=0)  # noqa: SIM115  # closed when it has ended
        self.pid = int(self._said.readline())
        self.returncode: int | None = None
        self.ended_at: float | None = None  # by time.monotonic, which is one clock for all processes

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code: that of its exit, or less a signal."""
        if self.returncode is None:
            if not select.select([self._said], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self._said:
                code, at = self._said.readline().split()
            self.returncode, self.ended_at = int(code), float(at)
        return self.returncode

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, signum: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        """Ends it."""
        self.send_signal(signal.SIGKILL)


def run(
    program: Path, *args: str, env: Mapping[str, str], cwd: Path | None = None, seconds: float = 300
) -> subprocess.CompletedProcess[str]:
    """What a program printed, and its exit code; TimeoutExpired where it takes longer than that."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        fork = Fork(program, args, env=env, output=output, errors=errors, cwd=cwd)
        try:
            code = fork.wait(seconds)
        finally:
            fork.kill()
        printed = [os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (output, errors)]
    return subprocess.CompletedProcess([str(program), *args], code, *printed)


@functools.cache
def _server(library: str, fixed: tuple[tuple[str, str], ...]) -> socket.socket:
    """Started when it is first needed; it ends with this process."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(READ_ON_IMPORT)}
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *IMPORTED[library]],
            env=others | dict(fixed),
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            cwd=ROOT,
        )

    def end() -> None:
        ours.close()
        server.wait()

    atexit.register(end)
    return ours


def _serve(connection: socket.socket) -> dict | None:
    """Forks for each order: returns the order in the fork, and None in the server, when no more will come."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not message:
            return None
        # A fork in between waits for the program, so that the server is always free.
        if os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            while _reaped():
                pass
            continue
        connection.close()
        output, errors, said = descriptors
        pid = os.fork()
        if pid:
            os.write(said, b"%d\n" % pid)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(said, f"{code} {time.monotonic()}\n".encode())
            os._exit(0)
        os.dup2(output, 1)
        os.dup2(errors, 2)
        for descriptor in descriptors:
            os.close(descriptor)
        return json.loads(message)


def _reaped() -> bool:
    """Whether a fork had ended."""
    try:
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    except ChildProcessError:
        return False


def main() -> None:
    """Imports, forks for each order, and runs the program in the fork."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        with contextlib.suppress(ModuleNotFoundError):  # whose tests are skipped
            importlib.import_module(name)
    gc.freeze()  # forks share what was imported, and needn't look for garbage in it
    gc.set_threshold(1_000_000, 50, 1_000)  # as tests do
    with connection:
        order = _serve(connection)
    if order is None:
        return
    os.environ.clear()
    os.environ.update(order["env"])
    if jax := sys.modules.get("jax"):
        jax.config.update("jax_enable_compilation_cache", os.environ.get(CACHES, "true").lower() == "true")
    os.chdir(order["cwd"])
    sys.argv = order["argv"]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
