"""Writes the golden values anew: `python -m tests.golden.record`, for all files, or with their names.

A golden changes only in a commit of its own, whose message states the rule that requires it. A change of the code
leaves them alone: if a golden fails, the code is wrong until such a rule is stated.
"""

import sys
from collections.abc import Callable
from typing import Any

from . import figures, plans, training
from .calls import PACKAGES
from .shorten import write

# Where both packages have the function, they must agree, so one of them is recorded.
RECORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "plans": lambda: {name: case(PACKAGES[0]) for name, case in plans.CASES.items()},
    "training": training.recorded,
    "figures": figures.recorded,
}


def main(names: list[str]) -> None:
    for name in names or list(RECORDERS):
        write(name, RECORDERS[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
