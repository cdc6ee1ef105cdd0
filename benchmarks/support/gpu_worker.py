"""What the processes of the GPU benchmark share: each runs one section and writes its answer as JSON."""

from __future__ import annotations

import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.gpu_sizes import OF_NAME, Sizes

Answer = dict[str, Any]
Save = Callable[[], None]
Section = Callable[[Sizes, Answer, Save], None]


def run_section(sections: dict[str, Section]) -> int:
    """Runs a section; arguments of the program are the size's name, the file and the section. Returns the exit code.

    The file is whole whenever the process ends: a section saves what it has so far. One that fails has the last line of
    its error under "failed".
    """
    size, path, name = sys.argv[1:]
    answer: Answer = {}

    def save() -> None:
        Path(f"{path}.new").write_text(json.dumps(answer))
        os.replace(f"{path}.new", path)

    try:
        sections[name](OF_NAME[size], answer, save)
    except Exception as error:
        traceback.print_exc()
        answer["failed"] = said(error)
    save()
    return 1 if "failed" in answer else 0


def said(error: Exception) -> str:
    """Its type and its first line."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"


def say(what: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {what}", file=sys.stderr, flush=True)
