"""Runs a program in several processes, which are forks of one that has imported what it imports.

Arguments: the program, its own, and the number of processes. Its `main` finds its own, the number of processes and the
rank in `sys.argv`.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import sys
from pathlib import Path

__all__ = ["command"]


def command(program: Path, *arguments: str, num_processes: int) -> list[str]:
    """What starts the processes. Rank 0 is the process that is started; it waits for the others, or kills them."""
    return [sys.executable, __file__, str(program.resolve()), *arguments, str(num_processes)]


def main() -> None:
    program, *arguments = sys.argv[1:]
    others: list[int] = []
    atexit.register(wait_for, others)  # runs after what the program registers: it may meet the others once more
    sys.path[0] = str(Path(program).parent)
    run = importlib.import_module(Path(program).stem).main
    gc.freeze()
    rank = 0
    for number in range(1, int(arguments[-1])):
        pid = os.fork()
        if pid == 0:
            rank = number
            others.clear()
            break
        others.append(pid)
    sys.argv = [program, *arguments, str(rank)]
    try:
        run()
    except BaseException:
        for pid in others:
            os.kill(pid, signal.SIGKILL)
        raise


def wait_for(others: list[int]) -> None:
    """Exits with an error if one of them does."""
    codes = [os.waitpid(pid, 0)[1] for pid in others]
    if any(codes):
        sys.stdout.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
