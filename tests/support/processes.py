"""Runs a program in several processes, each with its rank, a port and a deadline, and returns what they printed."""

import contextlib
import dataclasses
import importlib.metadata
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tests.support.forks import ROOT, Fork

# Flags of XLA that make compiling for a CPU some four times faster: no kernels emitted through MLIR, no splitting of
# modules that are small anyway. They change how programs are compiled, not which.
COMPILE_FAST = "--xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib") < "0.11":  # XLA ends a process for a flag that it does not know
    COMPILE_FAST += " --xla_cpu_use_fusion_emitters=false"


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a process ended: exit code (negative: the signal that killed it), all that it printed, and when it was."""

    code: int
    output: str
    at: float  # by time.monotonic


class Processes:
    """Processes of one program; the last arguments of each are how many there are, its rank, and the port they share.

    If some still run at the deadline, all are killed, and TimeoutError shows what each had printed.
    """

    def __init__(self, program: Path, num_processes: int, args: Sequence[str] = (), *, num_devices: int = 1):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        flags = f"--xla_force_host_platform_device_count={num_devices} {COMPILE_FAST}"
        # One thread each for what is linear algebra: there are more processes than cores.
        env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._outputs = [tempfile.TemporaryFile("w+") for _ in range(num_processes)]  # noqa: SIM115  # closed by close
        self.started_at = time.monotonic()
        self.processes = [
            Fork(program, [*args, str(num_processes), str(rank), str(port)], env=env, output=output)
            for rank, output in enumerate(self._outputs)
        ]

    def wait(self, seconds: float) -> list[Ended]:
        """Waits for at most this many seconds, and returns how each process ended."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        running = [rank for rank, process in enumerate(self.processes) if process.poll() is None]
        self.kill()
        ended = [
            Ended(process.wait(), self.output(rank), process.ended_at) for rank, process in enumerate(self.processes)
        ]
        if running:
            printed = "\n".join(f"process {rank} ({end.code}): {end.output}" for rank, end in enumerate(ended))
            raise TimeoutError(f"processes {running} still ran after {seconds} s\n{printed}")
        return ended

    def succeed(self, seconds: float) -> list[str]:
        """What each printed; all end without an error, or AssertionError shows what they said."""
        ended = self.wait(seconds)
        failed = [f"process {rank} ended with {end.code}: {end.output}" for rank, end in enumerate(ended) if end.code]
        assert not failed, "\n".join(failed)
        return [end.output for end in ended]

    def output(self, rank: int) -> str:
        """What a process has printed so far."""
        file = self._outputs[rank].fileno()
        return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")

    def kill(self) -> None:
        """Ends those that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def close(self) -> None:
        """Ends all and forgets what they printed."""
        self.kill()
        for process, output in zip(self.processes, self._outputs, strict=True):
            process.wait()
            output.close()


@contextlib.contextmanager
def started(program: Path, num_processes: int, *args: str, num_devices: int = 1) -> Iterator[Processes]:
    """Processes that run while the block does."""
    processes = Processes(program, num_processes, args, num_devices=num_devices)
    try:
        yield processes
    finally:
        processes.close()


@contextlib.contextmanager
def all_started(program: Path, numbers: Iterable[int], *args: str) -> Iterator[dict[int, Processes]]:
    """Groups of processes, by their size; all run while the block does."""
    with contextlib.ExitStack() as stack:
        yield {number: stack.enter_context(started(program, number, *args)) for number in numbers}


def run(program: Path, num_processes: int, *args: str, num_devices: int = 1, seconds: float = 120) -> list[str]:
    """What each process printed; all end without an error, or AssertionError shows what they said."""
    with started(program, num_processes, *args, num_devices=num_devices) as processes:
        return processes.succeed(seconds)


def outcome(call: Callable[..., object], *args: object) -> list[str]:
    """Type and text of the error that a call raises; two empty texts where it raises none."""
    try:
        call(*args)
    except (Exception, KeyboardInterrupt) as error:
        return [type(error).__name__, str(error)]
    return ["", ""]
