"""Processes with a loopback of their own, in a network namespace: what goes over it is theirs. Needs Linux and root."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from support import ranks

__all__ = ["is_available", "run"]

DEADLINE_S = 600
# Nothing is lost on a loopback, but on a busy machine TCP takes what is late for lost, and sends it again. So it waits.
_PREPARE = """ip link set lo up && (cd /proc/sys/net/ipv4 &&
echo 0 > tcp_early_retrans && echo 0 > tcp_sack && echo 300 > tcp_reordering)"""


def is_available() -> bool:
    """Whether a network namespace can be made."""
    if not sys.platform.startswith("linux") or not all(map(shutil.which, ("unshare", "ip"))):
        return False
    return subprocess.run(_in_namespace("true"), capture_output=True, check=False).returncode == 0


def run(program: Path, given: object, num_processes: int, **environment: str) -> Any:
    """What a program prints last on process 0, as JSON.

    Args:
      program: its arguments are what is given, as JSON, the number of processes and the rank. All ports are free.
      given: for JSON.
      num_processes: each runs the program.
      **environment: variables.
    """
    command = shlex.join(ranks.command(program, json.dumps(given), num_processes=num_processes))
    told = subprocess.run(
        _in_namespace(f"exec {command}"),
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=DEADLINE_S,
    )
    return json.loads(told.stdout.splitlines()[-1])  # gloo prints as well


def _in_namespace(command: str) -> list[str]:
    # All of its processes end with the first one, which is also killed if this process is.
    return ["unshare", "--net", "--pid", "--fork", "--kill-child", "sh", "-c", f"{_PREPARE} && {command}"]
